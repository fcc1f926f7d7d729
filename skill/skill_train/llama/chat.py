"""The job of the child process that answers for a GGUF file in `chat`, its requests and its lines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from skill_train.core.errors import UsageError
from skill_train.core.live_worker import LiveWorker, live_worker
from skill_train.llama.sampling import Sampling

WORKER = "skill_train.llama.chat_worker"


class ChatJob(msgspec.Struct, frozen=True, kw_only=True):
    """The file to load.

    Attributes:
        projector: the file that reads pictures for it; None where there is none.
        context_tokens: of a prompt with its answer.
        device: `cpu` or `gpu`; None for the GPU where llama.cpp has one. A projector stays on the processor.
    """

    gguf: str
    projector: str | None = None
    context_tokens: int
    threads: int
    device: str | None = None


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt.

    Attributes:
        text: with llama.cpp's marker in place of each picture. Special tokens are recognised.
        add_special: the tokenizer adds its own tokens, as to plain text.
        pictures: files in `folder`.
        most: tokens that the answer may have; the context may have room for fewer.
    """

    text: str
    add_special: bool
    pictures: list[str]
    folder: str
    sampling: Sampling
    most: int


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, when all of its text was sent.

    Attributes:
        prompt_ids: of the whole prompt; without those of pictures.
        prompt_tokens: of the prompt, with those of pictures.
        stopped: it ended with a token that ends answers.
        seconds: with the reading of the prompt.
    """

    text: str
    prompt_ids: list[int]
    prompt_tokens: int
    tokens: int
    stopped: bool
    seconds: float


def most_tokens(most: int, prompt: int, room: int) -> int:
    """The most tokens of an answer, which shares the room of the context with its prompt.

    Raises:
        UsageError: the prompt leaves none.
    """
    if prompt >= room:
        raise UsageError(
            "the prompt is longer than the context",
            code="bad_usage",
            expected=f"fewer than {room} tokens",
            got=f"{prompt} tokens",
            hint="allow a longer context with --context, or start a new chat",
        )
    return min(most, room - prompt)


@dataclass
class LoadedChat:
    """A file that is loaded in a child process, on `device`: `cpu` or `gpu`."""

    worker: LiveWorker
    device: str

    def answer(self, request: ChatRequest, on_text: Callable[[str], None]) -> ChatAnswer:
        """Asks for one answer, and calls `on_text` with each piece of its text.

        Raises:
            NativeCrash: llama.cpp crashed.
            VerificationFailed: it refuses the prompt.
            DecisionNeeded: there was not enough memory.
            UsageError: the prompt is longer than the context.
        """
        self.worker.send(msgspec.to_builtins(request))
        while True:
            line: Any = self.worker.receive()
            if "answer" in line:
                return msgspec.convert(line["answer"], ChatAnswer)
            on_text(line["text"])


@contextlib.contextmanager
def loaded_chat(job: ChatJob) -> Iterator[LoadedChat]:
    """The file, in a child process that ends with the block.

    Raises:
        NativeCrash: llama.cpp crashed.
        VerificationFailed: it refuses a file.
        DecisionNeeded: there was not enough memory.
        NotInstalled: a GPU was asked for, and llama.cpp has none.
    """
    with live_worker(WORKER, msgspec.to_builtins(job)) as worker:
        yield LoadedChat(worker, worker.receive()["device"])
