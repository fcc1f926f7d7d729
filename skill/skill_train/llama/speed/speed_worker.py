"""Measures how fast llama.cpp reads a prompt and writes an answer with one file on this machine, in a child process.

The file runs as users run it: on the GPU if llama.cpp has one, with repacked weights, the key-value cache in f16, and
llama.cpp's choice of flash attention. `inference` runs files exactly and slowly instead.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from skill_train.core.console import Bar
from skill_train.core.errors import NativeCrash
from skill_train.core.worker import report_progress, run_worker, worker_main
from skill_train.llama.llama_cpp import Llama, as_users_run, uses_gpu
from skill_train.llama.sampling import require_numbers
from skill_train.machine.linux import busy_seconds

if TYPE_CHECKING:
    import numpy as np

WORKER = "skill_train.llama.speed.speed_worker"
LEAST_SHARE = 0.9  # with a smaller share, other programs slowed the measurement
_BATCH = 512  # llama.cpp's own default of a micro-batch


class SpeedJob(msgspec.Struct, frozen=True, kw_only=True):
    gguf: str
    prompt_tokens: int
    answer_tokens: int
    rounds: int
    threads: int
    device: str | None = None  # `cpu` or `gpu`; None for the GPU where llama.cpp has one
    repacked: bool = True  # llama.cpp may repack weights for the processor


class Round(msgspec.Struct, frozen=True):
    """One run. `busy_seconds` is the processor time of all programs, this run included; None if it is unknown."""

    seconds: float
    processor_seconds: float
    busy_seconds: float | None


class Timing(msgspec.Struct, frozen=True):
    """The runs that read a prompt, or those that wrote an answer. `tokens` is the length of the prompt or answer."""

    tokens: int
    rounds: list[Round]

    @property
    def rate(self) -> float:
        """Tokens per second of the median run."""
        return self.tokens / statistics.median(round_.seconds for round_ in self.rounds)


class SpeedResult(msgspec.Struct, frozen=True, kw_only=True):
    device: str  # `cpu` or `gpu`
    repacked: bool  # llama.cpp was allowed to repack weights for the processor
    threads: int
    prompt: Timing
    answer: Timing


def measure(job: SpeedJob, progress: Bar | None = None) -> SpeedResult:
    """Measures one file. On some processors llama-cpp-python crashes when it repacks weights. Then the file is measured
    without repacking.

    Raises:
        NativeCrash: llama.cpp also crashed without repacking.
        VerificationFailed: llama.cpp refuses the file.
    """
    try:
        return run_worker(WORKER, job, SpeedResult, progress=progress)
    except NativeCrash:
        if not job.repacked:
            raise
        return measure(msgspec.structs.replace(job, repacked=False), progress)


def share(timing: Timing, threads: int) -> float:
    """The run's share of all processor time that was used, for the run with the least. If the time of other programs is
    unknown: the run's processor time / (its seconds x its threads)."""
    return min(_share(round_, threads) for round_ in timing.rounds)


def _share(round_: Round, threads: int) -> float:
    if round_.busy_seconds is None:
        return round_.processor_seconds / (round_.seconds * threads)
    others = max(0.0, round_.busy_seconds - round_.processor_seconds)
    return round_.processor_seconds / (round_.processor_seconds + others) if round_.processor_seconds else 0.0


def run(job: SpeedJob) -> SpeedResult:
    gpu = uses_gpu(job.device)
    tokens = job.prompt_tokens + job.answer_tokens
    with as_users_run(
        Path(job.gguf), context_tokens=tokens, threads=job.threads, gpu=gpu, repacked=job.repacked
    ) as llama:
        return _measured(llama, job, "gpu" if gpu else "cpu")


def _measured(llama: Llama, job: SpeedJob, device: str) -> SpeedResult:
    last = _read(llama, job.prompt_tokens)  # fills caches, and compiles a GPU's kernels
    require_numbers(last, Path(job.gguf).name)
    _write(llama, 1)
    prompt, answer = list[Round](), list[Round]()
    for number in range(job.rounds):
        report_progress(number, job.rounds, "measuring")
        prompt.append(_timed(lambda: _read(llama, job.prompt_tokens)))
        answer.append(_timed(lambda: _write(llama, job.answer_tokens)))
    return SpeedResult(
        device=device,
        repacked=job.repacked,
        threads=job.threads,
        prompt=Timing(job.prompt_tokens, prompt),
        answer=Timing(job.answer_tokens, answer),
    )


def _timed(work: Callable[[], object]) -> Round:
    busy, processor, started = busy_seconds(), time.process_time(), time.monotonic()
    work()
    seconds, own = time.monotonic() - started, time.process_time() - processor
    after = busy_seconds()
    return Round(seconds, own, None if busy is None or after is None else after - busy)


def _read(llama: Llama, count: int) -> np.ndarray:
    """Reads a prompt of `count` tokens from an empty context. Returns the logits of its last token."""
    llama.forget()
    row = llama.read([_token(llama, place) for place in range(count)], at_once=_BATCH)
    llama.wait()
    return row


def _write(llama: Llama, count: int) -> None:
    """Decodes `count` tokens one after the other, from an empty context."""
    llama.forget()
    for place in range(count):
        llama.decode([_token(llama, place)], place, last=1)
        llama.wait()


def _token(llama: Llama, place: int) -> int:
    """An arbitrary token. Different places have different tokens, because in a mixture of experts a single token would
    always use the same experts."""
    return (7919 * (place + 1)) % llama.tokens


if __name__ == "__main__":
    worker_main(run, SpeedJob)
