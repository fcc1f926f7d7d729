"""The job of the child process that measures how much each matrix of a model minds each type, and its result.

One matrix at a time is rounded in memory, and the model is run on the same text: no file is written for that.
"""

from __future__ import annotations

import msgspec

from skill_train.core.console import Bar
from skill_train.core.worker import run_worker

WORKER = "skill_train.llama.importance.sensitivity_worker"


class TypeTrial(msgspec.Struct, frozen=True):
    """A matrix, and the type to round it to."""

    tensor: str
    kind: str


class Outcome(msgspec.Struct, frozen=True):
    """The mean KL divergence, in nats a token, of the model with this one matrix rounded."""

    tensor: str
    kind: str
    kl: float


class SensitivityJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured.

    Attributes:
        matrix: the file of an importance matrix; empty for none.
        out: the file to which each outcome is added as a line, as soon as it is known.
        most_seconds: no trial begins after that.
    """

    gguf: str
    matrix: str
    sequences: list[list[int]]
    threads: int
    trials: list[TypeTrial]
    out: str
    most_seconds: float


def measure(job: SensitivityJob, progress: Bar) -> None:
    """Adds the outcomes to `job.out`, but for trials that there was no time for, and matrices that no node of the graph
    takes whole, so that they cannot be exchanged.

    Raises:
        NativeCrash: llama.cpp crashed.
        VerificationFailed: llama.cpp refuses the file.
        DecisionNeeded: there was not enough memory.
    """
    run_worker(WORKER, job, object, progress=progress)
