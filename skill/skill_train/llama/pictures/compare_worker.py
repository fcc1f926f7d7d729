"""Child process: everything that is asked of llama.cpp about pictures, in one load of the two files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skill_train.core.worker import report_progress, worker_main
from skill_train.llama.llama_cpp import Llama, in_context, loaded_model
from skill_train.llama.pictures.compare import (
    MARKER,
    Picture,
    PictureAnswer,
    PictureChunk,
    PictureJob,
    PicturePrompt,
    in_files,
)
from skill_train.llama.pictures.mtmd import Chunk, Projector, projector

if TYPE_CHECKING:
    import numpy as np


def run(job: PictureJob) -> list[Any]:
    with (
        loaded_model(Path(job.text)) as file,
        projector(file, Path(job.projector), threads=job.threads, any_size=job.any_size) as encoder,
    ):
        prompts = [_chunks(encoder, prompt) for prompt in job.prompts]
        step = encoder.step_of(prompts)
        longest = max(sum(chunk.tokens for chunk in chunks) for chunks in prompts)
        with in_context(file, context_tokens=longest + step, threads=job.threads, at_once=step) as llama:
            reader = _Reader(llama, encoder, step)
            answers = []
            for number, (prompt, chunks) in enumerate(zip(job.prompts, prompts, strict=True)):
                report_progress(number, len(prompts), "reading pictures")
                answers.append(in_files(reader.answer(prompt, chunks), job.folder))
    return answers


def _chunks(encoder: Projector, prompt: PicturePrompt) -> list[Chunk]:
    """llama.cpp's chunks, and in place of an overview the given one where there is one."""
    import numpy as np

    chunks = encoder.tokenize(prompt.text, [np.load(picture.pixels) for picture in prompt.pictures])
    for place, chunk in _overviews(encoder, chunks, prompt.pictures):
        chunks[place] = chunk
    return chunks


def _overviews(encoder: Projector, chunks: list[Chunk], pictures: list[Picture]) -> list[tuple[int, Chunk]]:
    """Places in `chunks`, and the chunk to put there. A picture's overview comes last; llama.cpp copies one that has
    the size of a tile already."""
    import numpy as np

    picture_places, end, overviews = [place for place, chunk in enumerate(chunks) if chunk.ids is None], 0, []
    for picture in pictures:
        if picture.overview is None:
            continue
        tiles = [chunk for chunk in encoder.tokenize(MARKER, [np.load(picture.pixels)]) if chunk.ids is None]
        small = [chunk for chunk in encoder.tokenize(MARKER, [np.load(picture.overview)]) if chunk.ids is None]
        end += len(tiles)
        overviews.append((picture_places[end - 1], small[-1]))
    return overviews


@dataclass
class _Reader:
    """The language model and the projector.

    Attributes:
        step: tokens read at once.
    """

    llama: Llama
    encoder: Projector
    step: int

    def answer(self, prompt: PicturePrompt, chunks: list[Chunk]) -> PictureAnswer:
        import numpy as np

        parts, own, unread = [], [], ""
        for chunk in chunks:
            if chunk.ids is not None:
                parts.append(PictureChunk(chunk.ids, chunk.tokens, chunk.positions))
                continue
            embeddings, pixels = self.encoder.encode(chunk)
            own.append(embeddings)
            unread = unread or (self.encoder.watch.why_not if pixels is None else "")
            parts.append(PictureChunk(None, chunk.tokens, chunk.positions, pixels, embeddings))
        logits, with_given = self._logits(chunks, own), None
        others = [np.load(file) for file in prompt.embeddings]
        if others and [one.shape for one in others] == [one.shape for one in own]:
            with_given = self._logits(chunks, others)
        return PictureAnswer(parts, logits, with_given, unread)

    def _logits(self, chunks: list[Chunk], embeddings: list[np.ndarray]) -> np.ndarray:
        """After each token behind the last picture [tokens, vocabulary]."""
        import numpy as np

        self.llama.forget()
        pictures, position = iter(embeddings), 0
        last = max((place for place, chunk in enumerate(chunks) if chunk.ids is None), default=-1)
        rows = [np.empty((0, self.llama.tokens), dtype=np.float32)]
        for place, chunk in enumerate(chunks):
            if chunk.ids is None:
                self.encoder.decode(self.llama, chunk, next(pictures), position, self.step)
            else:
                behind = len(chunk.ids) if place > last else 0
                rows.append(self.llama.read(chunk.ids, position, at_once=self.step, last=behind))
            position += chunk.positions
        return np.concatenate(rows)


if __name__ == "__main__":
    worker_main(run, PictureJob)
