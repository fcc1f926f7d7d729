"""What `evaluate` asks of a pair of GGUF files: answers to questions about pictures, as their users would get them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from skill_train.core.console import Bar
from skill_train.core.worker import run_worker
from skill_train.llama.pictures.compare import Pair

WORKER = "skill_train.llama.pictures.answers_worker"


class PairQuestion(msgspec.Struct, frozen=True):
    """One question.

    Attributes:
        text: the prompt, with llama.cpp's marker in place of each picture.
        pictures: files in the folder of the job.
        answer: the right answer, as tokens; may be empty.
        most: tokens that an answer may have.
    """

    text: str
    pictures: list[str]
    answer: list[int]
    most: int


class PairQuestionsJob(msgspec.Struct, frozen=True, kw_only=True):
    """All questions for one load of the pair. `folder` holds the pictures."""

    text: str
    projector: str
    threads: int
    folder: str
    questions: list[PairQuestion]


class PairAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """In the order of the questions.

    Attributes:
        losses: the sum of -log p in nats over the right answer; None where it is not finite.
        answers: the most likely tokens, with the one that ends an answer.
        stopped: the last one ends it.
        prompt_tokens: of each prompt, with those of its pictures.
        answer_seconds: of all answers, with the reading of the prompts.
    """

    losses: list[float | None]
    answers: list[list[int]]
    stopped: list[bool]
    prompt_tokens: list[int]
    answer_seconds: float


def ask(
    pair: Pair, questions: list[PairQuestion], *, folder: Path, threads: int, progress: Bar | None = None
) -> PairAnswers:
    """The answers of the pair, from a child process. llama.cpp resizes the pictures by itself.

    Raises:
        NativeCrash: llama.cpp crashed.
        VerificationFailed: it refuses one of the files, or a prompt.
        DecisionNeeded: there was not enough memory.
    """
    job = PairQuestionsJob(
        text=str(pair.text), projector=str(pair.projector), threads=threads, folder=str(folder), questions=questions
    )
    return run_worker(WORKER, job, PairAnswers, progress=progress)
