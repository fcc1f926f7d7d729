"""What `verify` asks of a pair of GGUF files, a language model and its projector, and what they answer about pictures.

llama.cpp runs in a child process. Arrays travel in files of a temporary folder, so that numpy's own format keeps their
shapes and types: in a message between the two, the name of its file stands in place of an array.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from skill_train.core.console import Bar
from skill_train.core.files import scratch_folder
from skill_train.core.worker import run_worker

Array = Any  # of numpy, which is not imported here
WORKER = "skill_train.llama.pictures.compare_worker"
MARKER = "<__media__>"  # stands for a picture in the text of a prompt: llama.cpp's own


class Picture(msgspec.Struct, frozen=True):
    """A picture for llama.cpp, uint8 [height, width, 3]."""

    pixels: Array
    # one more, of the size of a tile, that takes the place of the overview which llama.cpp would make
    overview: Array = None


class PicturePrompt(msgspec.Struct, frozen=True):
    """A text with `MARKER` in place of each picture. Special tokens are recognised, and none is added."""

    text: str
    pictures: list[Picture]
    # of all parts of pictures in their order, float32 [tokens, width]: the text is then read a second time, with these
    # in place of llama.cpp's own
    embeddings: list[Array] = []


class PictureJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked, in one load of the pair."""

    text: str
    projector: str
    threads: int
    # pictures of every size are taken as they are. Otherwise llama.cpp's own limits hold, as for its users.
    any_size: bool
    prompts: list[PicturePrompt]
    folder: str  # where the answers' arrays are written


class PictureChunk(msgspec.Struct, frozen=True):
    """A part of a prompt as llama.cpp divides it: text, or a picture or one tile of it."""

    ids: list[int] | None  # of text; None for a picture
    tokens: int  # embeddings that the model reads
    positions: int  # by how many the position of what follows is further on
    # the tensor that the vision tower reads, float32 [3, height, width]; None when it could not be read
    pixels: Array = None
    embeddings: Array = None  # what the projector makes of it, float32 [tokens, width]


class PictureAnswer(msgspec.Struct, frozen=True):
    chunks: list[PictureChunk]
    logits: Array  # after each token of the text behind the last picture, float32 [tokens, vocabulary]
    logits_of_given: Array  # the same with the given embeddings; None without any
    unread: str  # why the pixels of some chunk are None; empty when all were read

    @property
    def pictures(self) -> list[PictureChunk]:
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
    """The answers to the prompts, in their order, from a child process. Without a prompt the pair is only loaded.

    Raises:
        NativeCrash: llama.cpp crashed.
        VerificationFailed: it refuses one of the files, or a prompt; or the projector reads no pictures.
        DecisionNeeded: there was not enough memory.
    """
    with scratch_folder() as folder:
        job = PictureJob(
            text=str(pair.text),
            projector=str(pair.projector),
            threads=threads,
            any_size=any_size,
            prompts=prompts,
            folder=str(folder),
        )
        answers = run_worker(WORKER, in_files(job, str(folder)), list[PictureAnswer], progress=progress)
        return [_read(answer) for answer in answers]


def in_files(message: object, folder: str) -> Any:
    """A message as JSON holds it, with each of its arrays in a file of the folder."""
    import numpy as np

    def written(array: Array) -> str:
        with tempfile.NamedTemporaryFile(suffix=".npy", dir=folder, delete=False) as file:
            np.save(file, array)
            return file.name

    return msgspec.to_builtins(message, enc_hook=written)


def _read(answer: PictureAnswer) -> PictureAnswer:
    import numpy as np

    def array(file: str | None) -> Array:
        return None if file is None else np.load(file)

    chunks = [
        msgspec.structs.replace(chunk, pixels=array(chunk.pixels), embeddings=array(chunk.embeddings))
        for chunk in answer.chunks
    ]
    return msgspec.structs.replace(
        answer, chunks=chunks, logits=array(answer.logits), logits_of_given=array(answer.logits_of_given)
    )
