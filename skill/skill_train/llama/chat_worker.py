"""Answers chat prompts with one GGUF file, with or without a projector. The child process lives as long as the command.

The context has llama.cpp's default key and value types and its default attention, as users run it.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from skill_train.core.errors import UsageError, failure_of
from skill_train.core.live_worker import LiveWorker, Send, live_worker, live_worker_main
from skill_train.llama.llama_cpp import Llama, in_context, loaded_model, uses_gpu
from skill_train.llama.pictures.mtmd import Chunk, Projector, projector
from skill_train.llama.sampling import Sampling, next_token
from skill_train.program.events import Refused
from skill_train.program.pictures.decode import read_picture

if TYPE_CHECKING:
    import numpy as np

WORKER = "skill_train.llama.chat_worker"
_STEP = 128  # tokens read at once
_MOST_OF_A_PICTURE = 4096  # tokens of a picture; if they attend in both directions, one step must read them all


class ChatJob(msgspec.Struct, frozen=True, kw_only=True):
    """The file to load."""

    gguf: str
    projector: str | None = None  # the GGUF file that reads pictures for the model; None for text alone
    context_tokens: int  # the most tokens of a prompt and its answer together
    is_all: bool = False  # `context_tokens` is the most that the model was made for
    threads: int
    # `cpu` or `gpu`; None for the GPU where llama.cpp has one. A projector stays on the processor.
    device: str | None = None


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, and the settings for its answer."""

    text: str  # with llama.cpp's marker in place of each picture. Special tokens are recognised.
    add_special: bool  # the tokenizer adds BOS and EOS where the file says so, as to plain text
    pictures: list[str]  # files in `folder`
    folder: str
    sampling: Sampling
    most: int  # tokens that the answer may have; the context may have room for fewer


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer, sent after the last piece of its text."""

    text: str
    prompt_ids: list[int]  # the text tokens of the prompt; pictures have no token ids
    prompt_tokens: int  # the length of the prompt, with the tokens of its pictures
    tokens: int  # the length of the answer, with the token that ends it
    stopped: bool  # the answer ended with an end-of-generation token, or a stop text
    seconds: float  # reading the prompt and writing the answer


def most_tokens(most: int, prompt: int, room: int, *, is_all: bool) -> int:
    """The smaller of `most` and the room that the prompt leaves in the context. `is_all` is as in `ChatJob`.

    Raises:
        UsageError: the prompt fills the context.
    """
    if prompt >= room:
        raise UsageError(
            "the prompt is longer than the context",
            code="bad_usage",
            expected=f"fewer than {room} tokens",
            got=f"{prompt} tokens",
            hint="start a new chat, or shorten the prompt: the model was made for no more tokens"
            if is_all
            else "allow a longer context with --context, or start a new chat",
        )
    return min(most, room - prompt)


@dataclass
class LoadedChat:
    """A model that is loaded in a child process. `device` is `cpu` or `gpu`."""

    worker: LiveWorker
    device: str

    def answer(self, request: ChatRequest, on_text: Callable[[str], None]) -> ChatAnswer:
        """Asks for one answer, and calls `on_text` with each piece of its text.

        Raises:
            NativeCrash: llama.cpp crashed.
            VerificationFailed: llama.cpp refuses the prompt.
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
    """Loads the file in a child process that ends with the block.

    Raises:
        NativeCrash: llama.cpp crashed.
        VerificationFailed: llama.cpp refuses a file.
        DecisionNeeded: there was not enough memory.
        NotInstalled: a GPU was asked for, and llama.cpp has none.
    """
    with live_worker(WORKER, msgspec.to_builtins(job)) as worker:
        yield LoadedChat(worker, worker.receive()["device"])


def work(document: object, receive: Callable[[], Any], send: Send) -> None:
    job = msgspec.convert(document, ChatJob)
    with contextlib.ExitStack() as stack:
        gpu = uses_gpu(job.device)
        file = stack.enter_context(loaded_model(Path(job.gguf), gpu=gpu))
        encoder, step = None, _STEP
        if job.projector is not None:
            encoder = stack.enter_context(projector(file, Path(job.projector), threads=job.threads, any_size=False))
            step = _MOST_OF_A_PICTURE if encoder.looks_both_ways else _STEP
        room = max(job.context_tokens, step)
        llama = stack.enter_context(
            in_context(file, context_tokens=room, threads=job.threads, at_once=step, exact=False)
        )
        send({"device": "gpu" if gpu else "cpu"})
        chat = _Chat(llama, encoder, step, job)
        while True:
            request = msgspec.convert(receive(), ChatRequest)
            try:
                answer = chat.answer(request, lambda text: send({"text": text}))
            except UsageError as refusal:  # the next prompt may be answered
                send(failure_of(refusal))
            else:
                send({"answer": msgspec.to_builtins(answer)})


@dataclass
class _Chat:
    """A loaded file. `step` is the number of tokens that are read at once."""

    llama: Llama
    encoder: Projector | None
    step: int
    job: ChatJob

    def answer(self, request: ChatRequest, on_text: Callable[[str], None]) -> ChatAnswer:
        import numpy as np

        started, random = time.monotonic(), np.random.default_rng(request.sampling.seed)
        prompt, tokens, chunks = self._prompt(request)
        most = most_tokens(request.most, tokens, self.job.context_tokens, is_all=self.job.is_all)
        request = msgspec.structs.replace(request, most=most)
        decoder, ids, text = codecs.getincrementaldecoder("utf-8")(errors="replace"), list[int](), ""
        stopped = False
        for token in self._tokens(request, prompt, chunks, random):
            ids.append(token)
            if self.llama.ends(token):
                stopped = True
                break
            if piece := decoder.decode(self._piece(token)):
                text += piece
                on_text(piece)
            if stopped := any(stop in text for stop in request.sampling.stops):
                break
        if piece := decoder.decode(b"", final=True):
            text += piece
            on_text(piece)
        return ChatAnswer(
            text=text,
            prompt_ids=prompt,
            prompt_tokens=tokens,
            tokens=len(ids),
            stopped=stopped,
            seconds=time.monotonic() - started,
        )

    def _prompt(self, request: ChatRequest) -> tuple[list[int], int, list[Chunk]]:
        """The text token ids, the number of all tokens, and the chunks. There are no chunks without pictures."""
        if not request.pictures:
            ids = self.llama.tokenize(request.text, add_special=request.add_special)
            return ids, len(ids), []
        assert self.encoder is not None
        chunks = self.encoder.tokenize(request.text, [_pixels(name, request.folder) for name in request.pictures])
        ids = [token for chunk in chunks for token in chunk.ids or ()]
        return ids, sum(chunk.tokens for chunk in chunks), chunks

    def _tokens(
        self, request: ChatRequest, prompt: list[int], chunks: list[Chunk], random: np.random.Generator
    ) -> Iterator[int]:
        """At most `request.most` tokens of the answer. The caller stops at a token that ends the answer."""
        if chunks:
            assert self.encoder is not None
            row, position = self.encoder.read_prompt(self.llama, chunks, self.step)
        else:
            row, position = self._read(prompt), len(prompt)
        answer: list[int] = []
        for _ in range(request.most):
            answer.append(next_token(row[: self.llama.tokens], request.sampling, random, [*prompt, *answer]))
            yield answer[-1]
            if len(answer) < request.most:
                row = self.llama.decode(answer[-1:], position + len(answer) - 1, last=1)[0]

    def _read(self, ids: list[int]) -> np.ndarray:
        """The logits [vocabulary] after a prompt without pictures."""
        if not ids:
            raise UsageError(
                "the prompt is empty", code="bad_usage", expected="one token or more", hint="write a prompt"
            )
        self.llama.forget()
        row: np.ndarray = self.llama.read(ids, at_once=self.step)[0]
        return row

    def _piece(self, token: int) -> bytes:
        """The UTF-8 bytes of a token's text. Special tokens have no text."""
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            count = self.llama.api.llama_token_to_piece(self.llama.vocab, token, buffer, room, 0, False)
            if count >= 0:
                return buffer.raw[:count]
            room = -count


def _pixels(name: str, folder: str) -> np.ndarray:
    import numpy as np

    try:
        pixels: np.ndarray = np.asarray(read_picture(name, Path(folder)))
        return pixels
    except Refused as refusal:
        raise UsageError(
            refusal.error["message"],
            code=refusal.error["code"],
            expected=refusal.error.get("expected", ""),
            got=refusal.error.get("got", ""),
            hint="give a still picture, such as PNG or JPEG",
        ) from None


if __name__ == "__main__":
    live_worker_main(work)
