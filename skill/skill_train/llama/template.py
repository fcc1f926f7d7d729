"""What a chat template is asked to write, and what it wrote: the job of a child process and its result."""

from __future__ import annotations

from typing import Any

import msgspec

from skill_train.core.foreign import JsonObject
from skill_train.core.worker import run_worker

WORKER = "skill_train.llama.template_worker"


Message = JsonObject  # of anybody's making


class Conversation(msgspec.Struct, frozen=True):
    """What a template is given."""

    messages: list[Message]
    tools: list[Any] | None
    add_generation_prompt: bool


class Rendered(msgspec.Struct, frozen=True):
    """The text of a conversation; None where the template refuses it, and what it says then."""

    text: str | None = None
    refused: str = ""


class TemplateJob(msgspec.Struct, frozen=True, kw_only=True):
    """Conversations for one template, which may take so many seconds for all of them."""

    template: str
    bos: str
    eos: str
    seconds: float
    conversations: list[Conversation]


class TemplateResult(msgspec.Struct, frozen=True):
    """One for each conversation."""

    rendered: list[Rendered]


def ask(job: TemplateJob) -> list[Rendered]:
    """Each conversation as llama-cpp-python's users get it, from a child process.

    Raises:
        NativeCrash: the template did not come to an end, or took too much memory.
    """
    return msgspec.convert(run_worker(WORKER, msgspec.to_builtins(job)), TemplateResult).rendered
