"""Child process: renders conversations with the chat template of a GGUF file, as llama-cpp-python does for its users.

A template is a program from somebody else. llama-cpp-python renders it in jinja2's immutable sandbox. The limits that
`run` sets end endless loops and memory bombs.
"""

from __future__ import annotations

import contextlib
import faulthandler
from functools import partial
from typing import Any

import msgspec

from skill_train.core.errors import NotInstalled
from skill_train.core.worker import worker_main
from skill_train.llama.template import Conversation, TemplateJob, TemplateResult, rendered_by

_MEMORY_BYTES = 8 << 30  # limit of the address space, of which libraries use a part


def run(document: object) -> object:
    job = msgspec.convert(document, TemplateJob)
    formatter = _formatter()  # imported before the limits are set, which are meant only for the template
    faulthandler.dump_traceback_later(job.seconds, exit=True)
    _limit_memory()
    rendered = [rendered_by(partial(_text, formatter, job), conversation) for conversation in job.conversations]
    faulthandler.cancel_dump_traceback_later()
    return msgspec.to_builtins(TemplateResult(rendered))


def _formatter() -> Any:
    try:
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter
    except ImportError:
        raise NotInstalled(
            "llama-cpp-python is not installed", code="missing_package", hint='pip install "skill-train[gguf]"'
        ) from None
    return Jinja2ChatFormatter


def _text(formatter: Any, job: TemplateJob, conversation: Conversation) -> str:
    prompt = conversation.add_generation_prompt
    template = formatter(job.template, job.eos, job.bos, add_generation_prompt=prompt)
    tools = {"tools": conversation.tools} if conversation.tools else {}
    return str(template(messages=conversation.messages, **tools).prompt)


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
