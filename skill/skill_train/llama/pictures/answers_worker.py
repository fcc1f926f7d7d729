"""Answers the questions of `evaluate` about pictures, in a child process that loads the pair of GGUF files once. The
answers are the same that users of llama.cpp get."""

import time
from pathlib import Path

import msgspec

from skill_train.core.console import Bar
from skill_train.core.worker import report_progress, run_worker, worker_main
from skill_train.llama.llama_cpp import Llama, in_context, loaded_model
from skill_train.llama.logit_distance import finite, losses
from skill_train.llama.pictures.compare import Pair
from skill_train.llama.pictures.mtmd import Chunk, Projector, projector
from skill_train.program.pictures.decode import read_picture

WORKER = "skill_train.llama.pictures.answers_worker"


class PairQuestion(msgspec.Struct, frozen=True):
    """One question about pictures."""

    text: str  # the prompt, with llama.cpp's marker in place of each picture
    pictures: list[str]  # files in the folder of the job
    answer: list[int]  # the right answer, as tokens; may be empty
    most: int  # tokens that an answer may have


class PairQuestionsJob(msgspec.Struct, frozen=True, kw_only=True):
    """All questions for one load of the pair. `text` and `projector` are its files; `folder` holds the pictures."""

    text: str
    projector: str
    threads: int
    folder: str
    questions: list[PairQuestion]


class PairAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """The results, in the order of the questions."""

    losses: list[float | None]  # the sum of -log p in nats over the right answer; None if it is not finite
    answers: list[list[int]]  # the greedy answer as token ids, with the token that ends it
    stopped: list[bool]  # whether the answer ends with an end-of-generation token
    prompt_tokens: list[int]  # the length of each prompt, with the tokens of its pictures
    answer_seconds: float  # the time of all answers, with the reading of the prompts


def ask(
    pair: Pair, questions: list[PairQuestion], *, folder: Path, threads: int, progress: Bar | None = None
) -> PairAnswers:
    """Answers the questions in a child process. llama.cpp resizes the pictures by its own rules.

    Raises:
        NativeCrash: llama.cpp crashed.
        VerificationFailed: llama.cpp refuses one of the files, or a prompt.
        DecisionNeeded: there was not enough memory.
    """
    job = PairQuestionsJob(
        text=str(pair.text), projector=str(pair.projector), threads=threads, folder=str(folder), questions=questions
    )
    return run_worker(WORKER, job, PairAnswers, progress=progress)


def run(job: PairQuestionsJob) -> PairAnswers:
    with (
        loaded_model(Path(job.text)) as file,
        projector(file, Path(job.projector), threads=job.threads, any_size=False) as encoder,
    ):
        prompts = [_chunks(encoder, question, Path(job.folder)) for question in job.questions]
        step = encoder.step_of(prompts)
        rooms = [max(len(question.answer), question.most) for question in job.questions]
        longest = max(sum(chunk.tokens for chunk in chunks) + room for chunks, room in zip(prompts, rooms, strict=True))
        with in_context(file, context_tokens=longest + step, threads=job.threads, at_once=step) as llama:
            return _answered(llama, encoder, step, job.questions, prompts)


def _chunks(encoder: Projector, question: PairQuestion, folder: Path) -> list[Chunk]:
    import numpy as np

    return encoder.tokenize(question.text, [np.asarray(read_picture(picture, folder)) for picture in question.pictures])


def _answered(
    llama: Llama, encoder: Projector, step: int, questions: list[PairQuestion], prompts: list[list[Chunk]]
) -> PairAnswers:
    """Answers all questions. `step` is the number of tokens that are read at once."""
    sums, answers, seconds = list[float | None](), list[list[int]](), 0.0
    for number, (question, chunks) in enumerate(zip(questions, prompts, strict=True)):
        report_progress(number, len(questions), "reading pictures")
        started = time.monotonic()
        following, position = encoder.read_prompt(llama, chunks, step)
        answers.append(llama.greedy_after(following, position, most=question.most))
        seconds += time.monotonic() - started
        sums.append(_loss(llama, encoder, step, chunks, question.answer) if question.answer else 0.0)
    return PairAnswers(
        losses=sums,
        answers=answers,
        stopped=[bool(answer) and llama.ends(answer[-1]) for answer in answers],
        prompt_tokens=[sum(chunk.tokens for chunk in chunks) for chunks in prompts],
        answer_seconds=seconds,
    )


def _loss(llama: Llama, encoder: Projector, step: int, chunks: list[Chunk], answer: list[int]) -> float | None:
    import numpy as np

    first, position = encoder.read_prompt(llama, chunks, step)
    others = llama.read(answer[:-1], position, at_once=step, last=len(answer) - 1)
    return finite(losses(np.concatenate([first[None], others]), answer).sum())


if __name__ == "__main__":
    worker_main(run, PairQuestionsJob)
