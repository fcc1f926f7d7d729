"""A worker for tests: does what the job says, as `python -m crashing_worker JOB RESULT`."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from typing import Any

from skill_train.core.errors import UsageError
from skill_train.core.worker import report_progress, worker_main


def run(job: dict[str, Any]) -> dict[str, Any]:
    if "signal" in job:
        print(job.get("says", "the last words of native code"), file=sys.stderr, flush=True)
        number = signal.Signals[job["signal"]]
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)  # who starts tests in the background may have it ignored
        os.kill(os.getpid(), number)
    _without_memory(job)
    if "errno" in job:
        raise OSError(job["errno"], os.strerror(job["errno"]))
    if "most_bytes" in job:
        return _on_a_full_disk(job["most_bytes"], job.get("writes"))
    if "exit" in job:
        os._exit(job["exit"])
    if "refuse" in job:
        raise UsageError(job["refuse"], code="refused", hint="try something else")
    if "sleep_seconds" in job:
        report_progress(0, 1, str(os.getpid()))
        time.sleep(job["sleep_seconds"])
    held = b"x" * (job.get("megabytes", 0) << 20)  # and given back before the end
    del held
    for done in range(job["steps"]):
        print("native code prints what it likes")
        report_progress(done + 1, job["steps"], f"tensor {done}")
    return {"pid": os.getpid(), "doubled": 2 * job["steps"]}


def _without_memory(job: dict[str, Any]) -> None:
    if "bad_alloc" in job:
        print("  what():  std::bad_alloc", file=sys.stderr, flush=True)
        os.abort()
    if "glibc" in job:  # elf/dl-tls.c, dl_fatal: with no room for thread-local data, its own exit code
        print("cannot allocate memory for thread-local data: ABORT", file=sys.stderr, flush=True)
        os._exit(127)
    if "memory" in job:
        raise MemoryError


def _on_a_full_disk(most_bytes: int, file: str | None) -> dict[str, Any]:
    """A limit of the size of files, as a disk with so little room has it."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    if file is not None:
        with open(file, "wb", buffering=0) as opened:
            opened.write(b"x" * most_bytes)
            opened.write(b"x")
    return {"answer": "x" * (most_bytes + 1)}


if __name__ == "__main__":
    worker_main(run, dict)
