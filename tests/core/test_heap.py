"""Memory that glibc keeps for the next block. What a test changes, it changes in a process of its own."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from skill_train.core.worker import run_worker

BLOCKS = """
import resource, sys
import numpy as np
if sys.argv[1] == "kept":
    from skill_train.core.memory import keep_freed
    keep_freed()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
np.ones(1 << 18) + 1
before = faults()
for number in range(100):
    blocks = [np.ones(1 << 18) for _ in range(4)]  # 2 MB each: more than glibc keeps by itself
    del blocks
print(faults() - before)
"""
THREADS = """
import resource, threading
import numpy as np
from skill_train.core.memory import keep_freed
keep_freed()
done = threading.Event()
def work(after):
    blocks = [np.ones(1 << 18) for _ in range(20)]
    del blocks
    after()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
freed, first = threading.Event(), threading.Thread(target=work, args=(lambda: (freed.set(), done.wait()),))
first.start()
freed.wait()
before = faults()
second = threading.Thread(target=work, args=(lambda: None,))
second.start()
second.join()
print(faults() - before)
done.set()
"""
WORKER = f"""
import io, sys
from contextlib import redirect_stdout
from skill_train.core.worker import worker_main
def run(job):
    sys.argv[1], output = "as the worker is", io.StringIO()
    with redirect_stdout(output):
        exec({BLOCKS!r}, {{"__name__": "blocks"}})
    return {{"faults": int(output.getvalue())}}
worker_main(run, dict)
"""
# With huge pages for everything, 2 MB are one first touch.
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
GLIBC = platform.libc_ver()[0] == "glibc" and not (HUGE.is_file() and "[always]" in HUGE.read_text())


@pytest.mark.skipif(not GLIBC, reason="only glibc is told what to keep, and page by page")
def test_freed_blocks_are_used_again() -> None:
    """By hand: 100 x 4 blocks of 512 pages are 204,800 first touches, or 2,048 where the first four are kept."""
    usual, kept = (int(_said("-c", BLOCKS, way)) for way in ("usual", "kept"))
    assert kept < 10_000 < 50_000 < usual


@pytest.mark.skipif(not GLIBC, reason="only glibc has a heap for each thread")
def test_one_thread_takes_what_another_freed() -> None:
    """By hand: 20 blocks of 512 pages are 10,240 first touches in a heap of its own."""
    assert int(_said("-c", THREADS)) < 2_000


@pytest.mark.skipif(not GLIBC, reason="only glibc is told what to keep, and page by page")
def test_a_worker_keeps_what_is_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "block_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    answer = run_worker("block_worker", {}, dict)
    assert answer["faults"] < 10_000


def _said(*words: str) -> str:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True).stdout
