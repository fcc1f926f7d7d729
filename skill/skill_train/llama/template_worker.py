"""Child process: renders conversations with the chat template of a GGUF file, as llama-cpp-python does for its users.

A template is a program from somebody else. llama-cpp-python renders it in jinja2's immutable sandbox. The limits that
`run` sets end endless loops and memory bombs.
"""

from __future__ import annotations

import contextlib
import faulthandler
from typing import Any

import msgspec

from skill_train.core.worker import worker_main
from skill_train.llama.llama_cpp import bindings
from skill_train.llama.template import Conversation, Rendered, TemplateJob

_MEMORY_BYTES = 8 << 30  # limit of the address space, of which libraries use a part


def run(document: object) -> object:
    job = msgspec.convert(document, TemplateJob)
    bindings()  # imported before the limits are set, which are meant only for the template
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    faulthandler.dump_traceback_later(job.seconds, exit=True)
    _limit_memory()
    rendered = [_render(Jinja2ChatFormatter, job, conversation) for conversation in job.conversations]
    faulthandler.cancel_dump_traceback_later()
    return msgspec.to_builtins(rendered)


def _render(formatter: Any, job: TemplateJob, conversation: Conversation) -> Rendered:
    import jinja2

    # The errors of a template: its own refusal, and Python's errors in its expressions.
    errors = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError)
    try:
        prompt = conversation.add_generation_prompt
        template = formatter(job.template, job.eos, job.bos, add_generation_prompt=prompt)
        tools = {"tools": conversation.tools} if conversation.tools else {}
        return Rendered(str(template(messages=conversation.messages, **tools).prompt))
    except (*errors, TypeError, ValueError) as error:
        return Rendered(refused=f"{type(error).__name__}: {error}"[:300])


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(ValueError, OSError):  # macOS does not always accept this limit; the time limit remains
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, hard))


if __name__ == "__main__":
    worker_main(run)
