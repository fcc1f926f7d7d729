"""Child process: times one GGUF file in llama.cpp."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from skill_train.core.worker import report_progress, worker_main
from skill_train.llama.llama_cpp import Llama, as_users_run, uses_gpu
from skill_train.llama.sampling import require_numbers
from skill_train.llama.speed.measure import Round, SpeedJob, SpeedResult, Timing
from skill_train.machine.load import busy_seconds

if TYPE_CHECKING:
    import numpy as np

_BATCH = 512  # llama.cpp's own default of a micro-batch


def run(job: SpeedJob) -> SpeedResult:
    gpu = uses_gpu(job.device)
    tokens = job.prompt_tokens + job.answer_tokens
    with as_users_run(
        Path(job.gguf), context_tokens=tokens, threads=job.threads, gpu=gpu, repacked=job.repacked
    ) as llama:
        return _measured(llama, job, "gpu" if gpu else "cpu")


def _measured(llama: Llama, job: SpeedJob, device: str) -> SpeedResult:
    last = _read(llama, job.prompt_tokens)  # warms caches, and compiles what a GPU needs
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
    """Reads a prompt of so many tokens; the last one is answered. Returns its logits."""
    llama.forget()
    row = llama.read([_token(llama, place) for place in range(count)], at_once=_BATCH)
    llama.wait()
    return row


def _write(llama: Llama, count: int) -> None:
    """Writes so many tokens one after the other, from an empty context."""
    llama.forget()
    for place in range(count):
        llama.decode([_token(llama, place)], place, last=1)
        llama.wait()


def _token(llama: Llama, place: int) -> int:
    """Any token: the time does not depend on it, but in a mixture of experts always the same one would ask always the
    same experts."""
    return (7919 * (place + 1)) % llama.tokens


if __name__ == "__main__":
    worker_main(run, SpeedJob)
