"""Asks a language model and its projector about pictures, for `verify`.

llama.cpp runs in a child process. Arrays are exchanged as .npy files in a temporary folder, which keep shapes and
types. A message to or from the child has the name of the file in place of the array.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from skill_train.core.console import Bar
from skill_train.core.files import scratch_folder
from skill_train.core.worker import run_worker

Array = Any  # a numpy array; numpy is not imported here
WORKER = "skill_train.llama.pictures.compare_worker"
MARKER = "<__media__>"  # llama.cpp's own marker for a picture in the text of a prompt


class Picture(msgspec.Struct, frozen=True):
    """A picture for llama.cpp, uint8 [height, width, 3]."""

    pixels: Array
    overview: Array = None  # a smaller version, of a tile's size, in place of the overview that llama.cpp would make


class PicturePrompt(msgspec.Struct, frozen=True):
    """A text with `MARKER` in place of each picture. Special tokens are recognised, and none is added."""

    text: str
    pictures: list[Picture]
    # If given: embeddings for each picture or tile in order, float32 [tokens, width]. The prompt is then read a second
    # time, with these embeddings in place of llama.cpp's own.
    embeddings: list[Array] = []


class PictureJob(msgspec.Struct, frozen=True, kw_only=True):
    """All prompts for one load of the pair. `text` and `projector` are its files."""

    text: str
    projector: str
    threads: int
    any_size: bool  # no picture is resized. Otherwise llama.cpp's own limits of a picture's tokens apply.
    prompts: list[PicturePrompt]
    folder: str  # the folder for the arrays of the answers


class PictureChunk(msgspec.Struct, frozen=True):
    """A part of a prompt as llama.cpp divides it: text, a picture, or one tile of a picture."""

    ids: list[int] | None  # the token ids of text; None for a picture
    tokens: int  # the number of embeddings that the model reads
    pixels: Array = None  # the vision tower's input, float32 [3, height, width]; None for text, or if it is unreadable
    embeddings: Array = None  # the projector's output, float32 [tokens, width]; None for text


class PictureAnswer(msgspec.Struct, frozen=True):
    chunks: list[PictureChunk]
    logits: Array  # after each token of the text that follows the last picture, float32 [tokens, vocabulary]
    logits_of_given: Array  # `logits` with the embeddings in the prompt; None without them, or if their shapes differ
    unread: str  # why a picture's `pixels` are None; empty if all could be read

    @property
    def pictures(self) -> list[PictureChunk]:
        """The chunks that are pictures or tiles."""
        return [chunk for chunk in self.chunks if chunk.ids is None]

    @property
    def following(self) -> list[int]:
        """The token ids of the text after the last picture."""
        return self.chunks[-1].ids or []

    def tokens(self, picture: int) -> list[int]:
        """The token ids of the whole prompt, with the id `picture` for each embedding of a picture."""
        return [token for chunk in self.chunks for token in chunk.ids or [picture] * chunk.tokens]


@dataclass(frozen=True)
class Pair:
    """A language model and its projector, as GGUF files."""

    text: Path
    projector: Path


def ask_pictures(
    pair: Pair, prompts: list[PicturePrompt], *, any_size: bool, threads: int, progress: Bar | None = None
) -> list[PictureAnswer]:
    """Runs the prompts in a child process. Returns the answers in the same order. Without prompts it only loads the
    pair.

    Raises:
        NativeCrash: llama.cpp crashed.
        VerificationFailed: llama.cpp refuses one of the files, or a prompt; or the projector reads no pictures.
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
    """Turns a message into JSON values. Each array is saved to a file in the folder and replaced by the file's name."""
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
