"""Loads a model once and answers turn after turn: folders with transformers, GGUF files with llama.cpp."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from skill_train.core.errors import NotInstalled, UsageError
from skill_train.evaluate.backends import Model, device_of, generate
from skill_train.evaluate.chat.prompts import FolderPrompts, GgufPrompts
from skill_train.evaluate.pictures import PictureTurns, picture_tensors, plain_generation
from skill_train.facts import JsonObject
from skill_train.llama.chat_worker import ChatAnswer, ChatJob, ChatRequest, LoadedChat, loaded_chat, most_tokens
from skill_train.llama.gguf_header import read_gguf, read_model_file
from skill_train.llama.pictures.compare import MARKER
from skill_train.llama.sampling import Sampling, next_token
from skill_train.machine.read import physical_cores
from skill_train.model.folder import read_config
from skill_train.program.pictures.decode import PictureSize, picture_digest, picture_size
from skill_train.reference.load import context_length, load_tokenizer, read_model, reference_model, stop_ids
from skill_train.reference.pictures import with_markers

OnText = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """The settings for all answers of a chat."""

    sampling: Sampling
    most: int  # the most tokens of an answer
    context: int  # the most tokens of a prompt with its answer
    raw: bool  # the text is continued without a chat template
    tokenizer_of: Path | None  # the folder of the tokenizer to check a GGUF file's prompts with; None if it is unknown
    device: str | None = None  # `cpu` or `gpu`; None for the GPU if there is one


@dataclass(frozen=True)
class CheckedAnswer:
    """An answer. `ids_equal` tells whether llama.cpp's ids of the prompt equal the ids of the model's tokenizer; None
    if that is unknown."""

    answer: ChatAnswer
    ids_equal: bool | None


@contextlib.contextmanager
def answering(model: Model, settings: Settings) -> Iterator[Answering]:
    """Loads the model for the length of the block.

    Raises:
        VerificationFailed: llama.cpp refuses the file.
        NativeCrash: llama.cpp crashed.
        UsageError: the model has no chat template, or reads no pictures.
        NotInstalled: a GPU was requested, and there is none.
    """
    with _gguf(model, settings) if model.is_gguf else _folder(model, settings) as loaded:
        yield loaded


# --- GGUF files ---


@contextlib.contextmanager
def _gguf(model: Model, settings: Settings) -> Iterator[Answering]:
    gguf = read_model_file(model.path)
    if model.projector is not None:
        read_gguf(model.projector)
    tokenizer = None if settings.tokenizer_of is None else load_tokenizer(settings.tokenizer_of)
    prompts, trained = GgufPrompts(gguf, tokenizer, raw=settings.raw), gguf.count("context_length")
    job = ChatJob(
        gguf=str(model.path),
        projector=None if model.projector is None else str(model.projector),
        context_tokens=min(settings.context, trained or settings.context),
        is_all=trained is not None and trained <= settings.context,
        threads=physical_cores(),
        device=settings.device,
    )
    with loaded_chat(job) as chat:
        yield _GgufAnswering(model, settings, prompts, chat)


@dataclass(frozen=True)
class _GgufAnswering:
    model: Model
    settings: Settings
    prompts: GgufPrompts
    chat: LoadedChat

    @property
    def device(self) -> str:
        return self.chat.device

    def answer(self, messages: list[JsonObject], images: list[str], on_text: OnText) -> CheckedAnswer:
        if self.model.pictures is not None:
            _require_no_marks(messages, (MARKER,))
        with_marks = messages if self.model.pictures is None else with_markers(messages, MARKER)
        text = self.prompts.text(with_marks)
        request = ChatRequest(
            text=text,
            add_special=self.prompts.adds_special(text),
            pictures=images,
            folder=str(self.model.pictures.folder) if self.model.pictures else "",
            sampling=self.settings.sampling,
            most=self.settings.most,
        )
        answer = self.chat.answer(request, on_text)
        expected = None if images else self.prompts.ids(text)
        return CheckedAnswer(answer, None if expected is None else expected == answer.prompt_ids)


# --- Model folders ---


@contextlib.contextmanager
def _folder(model: Model, settings: Settings) -> Iterator[Answering]:
    tokenizer = load_tokenizer(model.path)
    prompts = FolderPrompts(tokenizer, raw=settings.raw)
    read = None if model.pictures is None else partial(read_model, task="ImageTextToText")
    with reference_model(model.path, model.adapter, read) as network, plain_generation(network):
        network.to(_torch_device(network, settings.device))
        yield _FolderAnswering(model, settings, prompts, network)


@dataclass(frozen=True)
class _FolderAnswering:
    model: Model
    settings: Settings
    prompts: FolderPrompts
    network: Any

    @property
    def device(self) -> str:
        return "gpu" if self.network.device.type == "cuda" else "cpu"

    def answer(self, messages: list[JsonObject], images: list[str], on_text: OnText) -> CheckedAnswer:
        import torch

        started, tokenizer = time.monotonic(), self.prompts.tokenizer
        prompt, pictures = self._prompt(messages, images)
        context, trained = self.settings.context, context_length(read_config(self.model.path))
        room = context if trained is None else min(context, trained)
        ids = torch.tensor([prompt], device=self.network.device)
        stops = stop_ids(self.model.path, tokenizer, self.model.adapter)
        choice = _Choice(self.settings.sampling, _Spoken(tokenizer, stops, on_text))
        most = most_tokens(self.settings.most, len(prompt), room, is_all=trained == room)
        tensors = {} if pictures is None else pictures(ids)
        spoken, texts = choice.spoken, self.settings.sampling.stops

        def ended(ids: Any, scores: Any, **_: Any) -> Any:
            return torch.full((len(ids),), any(text in spoken.text for text in texts), device=ids.device)

        more = {"logits_processor": [choice], "stopping_criteria": [ended], **tensors}
        generate(self.network, ids, most, stops, **more)
        spoken.finish()
        answer = ChatAnswer(
            text=spoken.text,
            prompt_ids=prompt,
            prompt_tokens=len(prompt),
            tokens=len(spoken.ids),
            stopped=(bool(spoken.ids) and spoken.ids[-1] in stops) or any(text in spoken.text for text in texts),
            seconds=time.monotonic() - started,
        )
        return CheckedAnswer(answer, None)

    def _prompt(self, messages: list[JsonObject], images: list[str]) -> tuple[list[int], Any]:
        """The token ids, and a function from the ids to the model's inputs for the pictures; None for a text model."""
        if self.model.pictures is None:
            return self.prompts.ids(self.prompts.text(messages)), None
        folder = self.model.pictures.folder
        reader = self.model.pictures.read_by(self.prompts.tokenizer)
        _require_no_marks(messages, (reader.mark, *reader.places))
        by_template = reader.engine is None and not self.settings.raw  # the template writes the mark of each picture
        marked = messages if by_template else with_markers(messages, reader.mark)
        text = self.prompts.text(marked)
        sizes: list[PictureSize] = [picture_size(image, folder) for image in images]
        fed, _ = reader.expanded(text, sizes)
        turns = PictureTurns(messages, None, images, [picture_digest(image, folder) for image in images])
        return self.prompts.ids(fed), partial(picture_tensors, reader, turns if images else None)


Answering = _GgufAnswering | _FolderAnswering  # a loaded model; its `device` is `cpu` or `gpu`


def _require_no_marks(messages: list[JsonObject], marks: tuple[str, ...]) -> None:
    """Refuses a text that contains a picture's mark, because the model would expect a picture there."""
    texts = [part.get("text") or "" for message in messages for part in message["content"]]
    mark = next((mark for mark in marks if mark and any(mark in text for text in texts)), None)
    if mark is not None:
        raise UsageError(
            f"the text holds {mark}, which stands for a picture",
            code="bad_usage",
            expected="a text without marks; each --image puts its own mark before the text",
            got=mark,
            hint="leave the mark out of the text",
        )


def _torch_device(network: Any, device: str | None) -> str:
    """torch's name of the device. If `device` is None, it is `cuda` if the weights fit."""
    import torch

    if device == "gpu" and not torch.cuda.is_available():
        raise NotInstalled(
            "torch has no GPU here: none is in this machine, or torch was installed without CUDA",
            code="device_unavailable",
            expected="a GPU, and the CUDA build of torch",
            hint="leave --device out",
        )
    if device is None:
        return device_of(network)
    return "cuda" if device == "gpu" else "cpu"


class _Spoken:
    """Decodes an answer token by token, without special tokens, and passes each new piece of text to `on_text`. An
    incomplete character waits for its other tokens."""

    def __init__(self, tokenizer: Any, stops: set[int], on_text: OnText) -> None:
        self.tokenizer, self.stops, self.on_text = tokenizer, stops, on_text
        self.ids: list[int] = []
        self.text = ""

    def add(self, token: int) -> None:
        self.ids.append(token)
        if token not in self.stops:
            self._say(self._decoded().rstrip("\ufffd"))

    def finish(self) -> None:
        self._say(self._decoded())

    def _decoded(self) -> str:
        return str(self.tokenizer.decode(self.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _say(self, text: str) -> None:
        if text.startswith(self.text) and len(text) > len(self.text):
            self.on_text(text[len(self.text) :])
            self.text = text


@dataclass
class _Choice:
    """A logits processor that replaces the sampler of `generate` by `next_token`, as in chats with GGUF files."""

    sampling: Sampling
    spoken: _Spoken

    def __post_init__(self) -> None:
        import numpy as np

        self.random = np.random.default_rng(self.sampling.seed)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        import torch

        token = next_token(scores[0].float().cpu().numpy(), self.sampling, self.random, input_ids[0].tolist())
        self.spoken.add(token)
        chosen = torch.full_like(scores, -torch.inf)
        chosen[0, token] = 0.0
        return chosen
