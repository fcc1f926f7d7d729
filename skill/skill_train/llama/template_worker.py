"""Child process: renders conversations with the chat template of a GGUF file, as llama-cpp-python does for its users.

A template is untrusted code. llama-cpp-python renders it in jinja2's immutable sandbox, and the limits that `run` sets
end endless loops and memory bombs.
"""

import faulthandler
from datetime import date
from functools import cache
from typing import Any

from skill_train.core.memory import limit_process
from skill_train.core.worker import worker_main
from skill_train.llama.llama_cpp import bindings
from skill_train.llama.template import Conversation, Rendered, TemplateJob, rendered_by

_MEMORY_BYTES = 8 << 30  # limit of the address space; libraries use a part of it


def run(job: TemplateJob) -> list[Rendered]:
    bindings()  # imported first, because the limits are meant only for the template
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    faulthandler.dump_traceback_later(job.seconds, exit=True)
    limit_process(_MEMORY_BYTES)

    @cache  # compiling takes longer than rendering
    def formatter(prompt: bool) -> Any:
        chat_formatter = Jinja2ChatFormatter(job.template, job.eos, job.bos, add_generation_prompt=prompt)
        chat_formatter.strftime_now = date.today().strftime  # as `by_tokenizer`
        return chat_formatter

    def render(conversation: Conversation) -> str:
        tools: dict[str, Any] = {"tools": conversation.tools} if conversation.tools else {}
        return str(formatter(conversation.add_generation_prompt)(messages=conversation.messages, **tools).prompt)

    rendered = [rendered_by(render, conversation) for conversation in job.conversations]
    faulthandler.cancel_dump_traceback_later()
    return rendered


if __name__ == "__main__":
    worker_main(run, TemplateJob)
