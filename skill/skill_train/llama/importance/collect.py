"""The job of the child process that computes an importance matrix, and its result."""

from __future__ import annotations

from pathlib import Path

import msgspec

from skill_train.core.console import Bar
from skill_train.core.worker import run_worker
from skill_train.machine.read import physical_cores

WORKER = "skill_train.llama.importance.collect_worker"
CONTEXT = 512  # tokens of one text, as llama.cpp's own tool takes them (tools/imatrix, n_ctx)


class CollectJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is run, and the file for the matrix.

    Attributes:
        gguf: an unquantized file.
        sequences: token ids, at most `CONTEXT` of each.
        datasets: the names of the data, for the metadata of the file.
        model, data: the sha256 of the model's file and of the token ids.
    """

    gguf: str
    sequences: list[list[int]]
    threads: int
    out: str
    datasets: list[str]
    model: str
    data: str


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen.

    Attributes:
        tokens: that were read.
        entries: matrices whose inputs were seen.
        unused_experts: experts that no token was sent to.
        unseen: matrices of layers whose inputs were not seen.
    """

    tokens: int
    entries: int
    unused_experts: int
    unseen: list[str]


def collect(job: CollectJob, progress: Bar) -> Collected:
    """Writes the importance matrix to `job.out`.

    Raises:
        NativeCrash: llama.cpp crashed.
        VerificationFailed: llama.cpp refuses the file.
        UsageError: the activations are not finite, or cannot be read in this version of llama.cpp.
    """
    return run_worker(WORKER, job, Collected, progress=progress)


def windows(ids: list[int], first_token: int | None) -> list[list[int]]:
    """A row in parts of `CONTEXT` tokens, as llama.cpp's tool reads its text: each from an empty context, and each with
    the token that begins every text of the model.

    Args:
        first_token: that token; None if the model has none. A row that begins without it has no part with it.
    """
    lead = ids[:1] if ids[:1] == [first_token] else []
    width = CONTEXT - len(lead)
    return [lead + ids[at : at + width] for at in range(len(lead), max(len(ids), len(lead) + 1), width)]


def job(gguf: Path, sequences: list[list[int]], out: Path, *, dataset: str, model: str, data: str) -> CollectJob:
    return CollectJob(
        gguf=str(gguf),
        sequences=[ids[:CONTEXT] for ids in sequences],
        threads=physical_cores(),
        out=str(out),
        datasets=[dataset],
        model=model,
        data=data,
    )
