"""The most memory of a child is its own: on Linux `ru_maxrss` of a child begins with what its parent had."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PARENT = """
import subprocess, sys, time
from skill_train.core import worker as native
from skill_train.core import memory
big = b"x" * (400 << 20)
if sys.argv[1] == "worker":
    native.run_worker("crashing_worker", {"steps": 1, "megabytes": int(sys.argv[2])}, dict)
else:
    hold = "import time; big = b'x' * (int(%s) << 20); time.sleep(0.5)" % sys.argv[2]
    process = subprocess.Popen([sys.executable, "-c", hold])
    memory.watch_memory(process.pid)
    process.wait()
del big
print(memory.peak_memory_bytes(), memory.peak_memory_bytes(children=True))
"""


@pytest.mark.parametrize("child", ["worker", "program"])
@pytest.mark.parametrize("megabytes", [1, 200, 600])
def test_a_small_child_of_a_large_parent_is_small(child: str, megabytes: int) -> None:
    """The parent holds 400 MiB. A Python that imports little takes 10 to 60."""
    own, children = _peaks(child, megabytes)
    assert 400 << 20 < own < 500 << 20
    assert megabytes << 20 < children < (megabytes + 90) << 20


def test_a_process_does_not_count_what_its_parent_had() -> None:
    parent = f"import subprocess, sys; big = b'x' * (400 << 20); subprocess.run([sys.executable, '-c', {SMALL!r}])"
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, timeout=60)
    assert 5 << 20 < int(done.stdout) < 90 << 20


SMALL = "from skill_train.core import memory; print(memory.peak_memory_bytes())"


def test_without_children_nothing_is_said() -> None:
    words = "from skill_train.core import memory; print(memory.peak_memory_bytes(children=True))"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, timeout=60)
    assert done.stdout == "None\n"


def _peaks(*arguments: object) -> tuple[int, int]:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "support")}
    command = [sys.executable, "-c", PARENT, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    own, children = done.stdout.split()
    return int(own), int(children)
