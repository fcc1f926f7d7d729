"""Child process: renders conversations with the chat template of a GGUF file, as llama-cpp-python does for its users.

A template is a program from somebody else. llama-cpp-python renders it in jinja2's immutable sandbox; endless loops and
memory bombs are ended by the limits that `run` sets.
Job: {"template", "bos", "eos", "seconds", "conversations": [{"messages", "tools", "add_generation_prompt"}]}
"""

from __future__ import annotations

import contextlib
import faulthandler
from typing import Any

from skill_train.core.errors import NotInstalled
from skill_train.core.worker import worker_main

_MEMORY_BYTES = 8 << 30  # of addresses, of which libraries take a part


def run(job: dict[str, Any]) -> dict[str, Any]:
    formatter = _formatter()  # imported before the limits, which are meant for the template alone
    faulthandler.dump_traceback_later(job["seconds"], exit=True)
    _limit_memory()
    rendered = [_render(formatter, job, conversation) for conversation in job["conversations"]]
    faulthandler.cancel_dump_traceback_later()
    return {"rendered": rendered}


def _formatter() -> Any:
    try:
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter
    except ImportError:
        raise NotInstalled(
            "llama-cpp-python is not installed", code="missing_package", hint='pip install "skill-train[gguf]"'
        ) from None
    return Jinja2ChatFormatter


def _render(formatter: Any, job: dict[str, Any], conversation: dict[str, Any]) -> dict[str, str]:
    """`{"text"}`, or `{"refused"}` with the error of the template."""
    import jinja2

    # What a template can raise: its own refusal, and Python's errors of the expressions in it.
    errors = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError)
    try:
        prompt = conversation["add_generation_prompt"]
        template = formatter(job["template"], job["eos"], job["bos"], add_generation_prompt=prompt)
        tools = {"tools": conversation["tools"]} if conversation["tools"] else {}
        return {"text": template(messages=conversation["messages"], **tools).prompt}
    except (*errors, TypeError, ValueError) as error:
        return {"refused": f"{type(error).__name__}: {error}"[:300]}


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(ValueError, OSError):  # macOS does not always take it; the time limit stays
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, hard))


if __name__ == "__main__":
    worker_main(run)
