"""Child process: runs all prompts of `verify` about pictures in one load of the language model and its projector."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from skill_train.core.worker import report_progress, worker_main
from skill_train.llama.gguf_header import bad_gguf
from skill_train.llama.llama_cpp import Llama, in_context, loaded_model
from skill_train.llama.pictures.compare import MARKER, PictureAnswer, PictureChunk, PictureJob, PicturePrompt, in_files
from skill_train.llama.pictures.mtmd import Chunk, Projector, projector

if TYPE_CHECKING:
    import numpy as np


def run(job: PictureJob) -> list[Any]:
    with (
        loaded_model(Path(job.text)) as file,
        projector(file, Path(job.projector), threads=job.threads, any_size=job.any_size) as encoder,
    ):
        if not encoder.api.mtmd_support_vision(encoder.context):
            raise bad_gguf("the file has no vision tower", got=job.projector)
        prompts = [_chunks(encoder, prompt) for prompt in job.prompts]
        step = encoder.step_of(prompts)
        longest = max((sum(chunk.tokens for chunk in chunks) for chunks in prompts), default=0)
        with in_context(file, context_tokens=longest + step, threads=job.threads, at_once=step) as llama:
            answers = []
            for number, (prompt, chunks) in enumerate(zip(job.prompts, prompts, strict=True)):
                report_progress(number, len(prompts), "reading pictures")
                answers.append(in_files(_answer(llama, encoder, step, prompt, chunks), job.folder))
    return answers


def _chunks(encoder: Projector, prompt: PicturePrompt) -> list[Chunk]:
    """llama.cpp's chunks, with the prompt's overviews in place of llama.cpp's own. The overview is the last chunk of a
    picture. llama.cpp does not resize an overview that already has the size of a tile."""
    import numpy as np

    chunks = encoder.tokenize(prompt.text, [np.load(picture.pixels) for picture in prompt.pictures])
    picture_places, end = [place for place, chunk in enumerate(chunks) if chunk.ids is None], 0
    for picture in prompt.pictures:
        if picture.overview is None:
            continue
        tiles = [chunk for chunk in encoder.tokenize(MARKER, [np.load(picture.pixels)]) if chunk.ids is None]
        small = [chunk for chunk in encoder.tokenize(MARKER, [np.load(picture.overview)]) if chunk.ids is None]
        end += len(tiles)
        chunks[picture_places[end - 1]] = small[-1]
    return chunks


def _answer(llama: Llama, encoder: Projector, step: int, prompt: PicturePrompt, chunks: list[Chunk]) -> PictureAnswer:
    """Runs one prompt. `step` is the number of tokens that are read at once."""
    import numpy as np

    parts, own, unread = [], [], ""
    for chunk in chunks:
        if chunk.ids is not None:
            parts.append(PictureChunk(chunk.ids, chunk.tokens))
            continue
        embeddings, pixels = encoder.encode(chunk)
        own.append(embeddings)
        unread = unread or (encoder.watch.why_not if pixels is None else "")
        parts.append(PictureChunk(None, chunk.tokens, pixels, embeddings))
    logits, with_given = _logits(llama, encoder, step, chunks, own), None
    others = [np.load(file) for file in prompt.embeddings]
    if others and [one.shape for one in others] == [one.shape for one in own]:
        with_given = _logits(llama, encoder, step, chunks, others)
    return PictureAnswer(parts, logits, with_given, unread)


def _logits(
    llama: Llama, encoder: Projector, step: int, chunks: list[Chunk], embeddings: list[np.ndarray]
) -> np.ndarray:
    """The logits [tokens, vocabulary] after each token of the text that follows the last picture."""
    import numpy as np

    llama.forget()
    pictures, position = iter(embeddings), 0
    last = max((place for place, chunk in enumerate(chunks) if chunk.ids is None), default=-1)
    rows = [np.empty((0, llama.tokens), dtype=np.float32)]
    for place, chunk in enumerate(chunks):
        if chunk.ids is None:
            encoder.decode(llama, chunk, next(pictures), position, step)
        else:
            behind = len(chunk.ids) if place > last else 0
            rows.append(llama.read(chunk.ids, position, at_once=step, last=behind))
        position += chunk.positions
    return np.concatenate(rows)


if __name__ == "__main__":
    worker_main(run, PictureJob)
