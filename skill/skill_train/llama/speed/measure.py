"""How fast llama.cpp reads a prompt and writes an answer with one file on this machine.

The file runs as users run it: on the GPU where llama.cpp has one, with repacked weights, the cache in float16 and
flash attention where llama.cpp chooses it. `inference` runs files exactly and slowly instead.
"""

from __future__ import annotations

import statistics

import msgspec

from skill_train.core.console import Bar
from skill_train.core.errors import NativeCrash
from skill_train.core.worker import run_worker

WORKER = "skill_train.llama.speed.speed_worker"
LEAST_SHARE = 0.9  # below, others took the processor


class SpeedJob(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure.

    Attributes:
        device: `cpu` or `gpu`; None for the GPU where llama.cpp has one.
        repacked: weights are packed anew for this processor.
    """

    gguf: str
    prompt_tokens: int
    answer_tokens: int
    rounds: int
    threads: int
    device: str | None = None
    repacked: bool = True


class Round(msgspec.Struct, frozen=True):
    """One run. `busy_seconds` is the processor time of everybody, this run included; None where nobody knows it."""

    seconds: float
    processor_seconds: float
    busy_seconds: float | None


class Timing(msgspec.Struct, frozen=True):
    """The runs of one kind: `tokens` were read, or written one after the other."""

    tokens: int
    rounds: list[Round]

    @property
    def rate(self) -> float:
        """Tokens a second, by the median run."""
        return self.tokens / statistics.median(round_.seconds for round_ in self.rounds)


class SpeedResult(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes:
    device: where it ran.
    repacked: llama.cpp was allowed to pack the weights anew.
    """

    device: str
    repacked: bool
    threads: int
    prompt: Timing
    answer: Timing


def measure(job: SpeedJob, progress: Bar | None = None) -> SpeedResult:
    """The speeds of one file. On some processors llama-cpp-python crashes when it packs weights anew; then it is
    measured without.

    Raises:
        NativeCrash: llama.cpp crashed without that too.
        VerificationFailed: llama.cpp refuses the file.
    """
    try:
        return run_worker(WORKER, job, SpeedResult, progress=progress)
    except NativeCrash:
        if not job.repacked:
            raise
        return measure(msgspec.structs.replace(job, repacked=False), progress)


def share(timing: Timing, threads: int) -> float:
    """The least share of the processor time that a run had for itself. Where nobody knows what others took: its
    processor time by what its threads could have taken."""
    return min(_share(round_, threads) for round_ in timing.rounds)


def _share(round_: Round, threads: int) -> float:
    if round_.busy_seconds is None:
        return round_.processor_seconds / (round_.seconds * threads)
    others = max(0.0, round_.busy_seconds - round_.processor_seconds)
    return round_.processor_seconds / (round_.processor_seconds + others) if round_.processor_seconds else 0.0
