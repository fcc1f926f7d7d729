"""The job of the child process that runs vLLM on one model folder, and its result."""

from __future__ import annotations

import msgspec

from skill_train.core.console import Bar
from skill_train.core.worker import run_worker
from skill_train.llama.inference import Prompt, Scored

WORKER = "skill_train.evaluate.vllm_worker"


class VllmJob(msgspec.Struct, frozen=True):
    """Rows whose losses are measured, and prompts to answer."""

    folder: str
    context_tokens: int
    scored: list[Scored]
    prompts: list[Prompt]


class VllmResult(msgspec.Struct, frozen=True):
    """The losses and answers, in the order of the job.

    Attributes:
        losses: the sum of -log p in nats over each row's trained tokens; None where it is not finite.
    """

    losses: list[float | None]
    answers: list[list[int]]
    answer_seconds: float


def ask(job: VllmJob, progress: Bar) -> VllmResult:
    """The result of one job, from a child process that gives the GPU's memory back."""
    return msgspec.convert(run_worker(WORKER, msgspec.to_builtins(job), progress=progress), VllmResult)
