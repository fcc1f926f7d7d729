"""Child process: answers the questions of `evaluate` about pictures in one load of a pair of GGUF files."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from skill_train.core.worker import report_progress, worker_main
from skill_train.llama.llama_cpp import Llama, in_context, loaded_model
from skill_train.llama.logit_distance import finite, losses
from skill_train.llama.pictures.answers import Asked, AskedJob, AskedResult
from skill_train.llama.pictures.mtmd import Chunk, Projector, projector
from skill_train.program.pictures.decode import read_picture


def run(document: object) -> object:
    job = msgspec.convert(document, AskedJob)
    with (
        loaded_model(Path(job.text)) as file,
        projector(file, Path(job.projector), threads=job.threads, any_size=False) as seen,
    ):
        prompts = [_chunks(seen, asked, Path(job.folder)) for asked in job.asked]
        step = seen.step_of(prompts)
        rooms = [max(len(asked.wanted), asked.most) for asked in job.asked]
        longest = max(sum(chunk.tokens for chunk in chunks) + room for chunks, room in zip(prompts, rooms, strict=True))
        with in_context(file, context_tokens=longest + step, threads=job.threads, at_once=step) as llama:
            result = _Answerer(llama, seen, step).result(job.asked, prompts)
    return msgspec.to_builtins(result)


def _chunks(seen: Projector, asked: Asked, folder: Path) -> list[Chunk]:
    import numpy as np

    return seen.tokenize(asked.text, [np.asarray(read_picture(picture, folder)) for picture in asked.pictures])


@dataclass
class _Answerer:
    """The language model and the projector. `step` is the number of tokens that are read at once."""

    llama: Llama
    seen: Projector
    step: int

    def result(self, questions: list[Asked], prompts: list[list[Chunk]]) -> AskedResult:
        sums, answers, seconds = list[float | None](), list[list[int]](), 0.0
        for number, (asked, chunks) in enumerate(zip(questions, prompts, strict=True)):
            report_progress(number, len(questions), "reading pictures")
            started = time.monotonic()
            following, position = self.seen.read_prompt(self.llama, chunks, self.step)
            answers.append(self.llama.greedy_after(following, position, most=asked.most))
            seconds += time.monotonic() - started
            sums.append(self.loss(chunks, asked.wanted) if asked.wanted else 0.0)
        return AskedResult(
            losses=sums,
            answers=answers,
            stopped=[bool(answer) and self.llama.ends(answer[-1]) for answer in answers],
            prompt_tokens=[sum(chunk.tokens for chunk in chunks) for chunks in prompts],
            answer_seconds=seconds,
        )

    def loss(self, chunks: list[Chunk], wanted: list[int]) -> float | None:
        import numpy as np

        first, position = self.seen.read_prompt(self.llama, chunks, self.step)
        rows = [first[None]]
        for start in range(0, len(wanted) - 1, self.step):
            ids = wanted[start : start + self.step][: len(wanted) - 1 - start]
            rows.append(self.llama.decode(ids, position + start, last=len(ids)).copy())
        return finite(losses(np.concatenate(rows), wanted).sum())


if __name__ == "__main__":
    worker_main(run)
