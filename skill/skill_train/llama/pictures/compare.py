"""What `verify` asks of a pair of GGUF files, a language model and its projector, and what they answer about pictures.

llama.cpp runs in a child process. Arrays travel in files of a temporary folder, so that numpy's own format keeps their
shapes and types.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from skill_train.core.console import Bar
from skill_train.core.worker import run_worker

if TYPE_CHECKING:
    import numpy as np

WORKER = "skill_train.llama.pictures.compare_worker"
MARKER = "<__media__>"  # stands for a picture in the text of a prompt: llama.cpp's own


class PictureFile(msgspec.Struct, frozen=True):
    """A picture in a file of numpy, uint8 [height, width, 3].

    Attributes:
        overview: one more, of the size of a tile, that takes the place of the overview which llama.cpp would make.
    """

    pixels: str
    overview: str | None = None


class PromptFiles(msgspec.Struct, frozen=True):
    """A text with `MARKER` in place of each picture. Special tokens are recognised, and none is added.

    Attributes:
        embeddings: of all parts of pictures in their order, float32 [tokens, width]: the text is then read a second
            time, with these in place of llama.cpp's own.
    """

    text: str
    pictures: list[PictureFile]
    embeddings: list[str] | None = None


class PictureJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked, in one load of the pair.

    Attributes:
        any_size: pictures of every size are taken as they are. Otherwise llama.cpp's own limits hold, as for its users.
        folder: where the answers' arrays are written.
    """

    text: str
    projector: str
    threads: int
    any_size: bool
    prompts: list[PromptFiles]
    folder: str


class ChunkFiles(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a prompt as llama.cpp divides it: text, or a picture or one tile of it.

    Attributes:
        ids: of text; None for a picture.
        tokens: embeddings that the model reads.
        positions: by how many the position of what follows is further on.
        pixels: the tensor that the vision tower reads, float32 [3, height, width]; None when it could not be read.
        embeddings: what the projector makes of it, float32 [tokens, width].
    """

    ids: list[int] | None
    tokens: int
    positions: int
    pixels: str | None = None
    embeddings: str | None = None


class AnswerFiles(msgspec.Struct, frozen=True):
    """Attributes:
    logits: after each token of the text behind the last picture, float32 [tokens, vocabulary].
    given: the same with the given embeddings; None without any.
    unread: why the pixels of some chunk are None; empty when all were read.
    """

    chunks: list[ChunkFiles]
    logits: str
    given: str | None
    unread: str


@dataclass(frozen=True)
class Picture:
    """A picture for llama.cpp, uint8 [height, width, 3]. For `overview` see `PictureFile`."""

    pixels: np.ndarray
    overview: np.ndarray | None = None


@dataclass(frozen=True)
class PicturePrompt:
    """As `PromptFiles`."""

    text: str
    pictures: list[Picture]
    embeddings: list[np.ndarray] = field(default_factory=list)


@dataclass(frozen=True)
class PictureChunk:
    """As `ChunkFiles`."""

    ids: list[int] | None
    tokens: int
    positions: int
    pixels: np.ndarray | None
    embeddings: np.ndarray | None


@dataclass(frozen=True)
class PictureAnswer:
    """As `AnswerFiles`."""

    chunks: list[PictureChunk]
    logits: np.ndarray
    given: np.ndarray | None
    unread: str

    @property
    def shown(self) -> list[PictureChunk]:
        """The pictures, or the tiles of them."""
        return [chunk for chunk in self.chunks if chunk.ids is None]

    @property
    def following(self) -> list[int]:
        """The text behind the last picture."""
        return self.chunks[-1].ids or []

    def tokens(self, picture: int) -> list[int]:
        """The whole prompt, with this id for each embedding of a picture."""
        return [token for chunk in self.chunks for token in chunk.ids or [picture] * chunk.tokens]


@dataclass(frozen=True)
class Pair:
    """A language model and its projector, as GGUF files."""

    text: Path
    projector: Path


def ask_pictures(
    pair: Pair, prompts: list[PicturePrompt], *, any_size: bool, threads: int, progress: Bar | None = None
) -> list[PictureAnswer]:
    """The answers to the prompts, in their order, from a child process.

    Raises:
        NativeCrash: llama.cpp crashed.
        VerificationFailed: it refuses one of the files, or a prompt.
        DecisionNeeded: there was not enough memory.
    """
    with tempfile.TemporaryDirectory(prefix="skill-train-") as folder:
        written = [_written(prompt, Path(folder), number) for number, prompt in enumerate(prompts)]
        job = PictureJob(
            text=str(pair.text),
            projector=str(pair.projector),
            threads=threads,
            any_size=any_size,
            prompts=written,
            folder=folder,
        )
        result = run_worker(WORKER, msgspec.to_builtins(job), progress=progress)
        return [_read(answer) for answer in msgspec.convert(result, list[AnswerFiles])]


def _written(prompt: PicturePrompt, folder: Path, number: int) -> PromptFiles:
    pictures = []
    for place, picture in enumerate(prompt.pictures):
        name = f"{number}-{place}"
        overview = picture.overview
        small = None if overview is None else save(folder / f"{name}-overview.npy", overview)
        pictures.append(PictureFile(save(folder / f"{name}-picture.npy", picture.pixels), small))
    given = [save(folder / f"{number}-{place}-given.npy", one) for place, one in enumerate(prompt.embeddings)]
    return PromptFiles(prompt.text, pictures, given or None)


def _read(answer: AnswerFiles) -> PictureAnswer:
    import numpy as np

    chunks = [
        PictureChunk(
            chunk.ids,
            chunk.tokens,
            chunk.positions,
            None if chunk.pixels is None else np.load(chunk.pixels),
            None if chunk.embeddings is None else np.load(chunk.embeddings),
        )
        for chunk in answer.chunks
    ]
    given = None if answer.given is None else np.load(answer.given)
    return PictureAnswer(chunks, np.load(answer.logits), given, answer.unread)


def save(path: Path, array: np.ndarray) -> str:
    """Writes an array, and returns the path as text."""
    import numpy as np

    np.save(path, array)
    return str(path)
