"""Room for torch is asked for before it is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="macOS keeps no limit of the address space")

ASKED = """
import resource, sys
if BYTES:
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
from skill_train.machine.limits import require_room_for_torch
from skill_train.core.errors import DecisionNeeded
try:
    require_room_for_torch()
    print("room")
except DecisionNeeded as error:
    print(error.code, error.exit_code, error.expected, error.got)
"""


@pytest.mark.parametrize("gigabytes", [None, 64])
def test_without_a_limit_or_with_a_wide_one_there_is_room(gigabytes: int | None) -> None:
    assert _asked(gigabytes and gigabytes << 30) == "room"


def test_a_limit_that_leaves_no_room_is_told() -> None:
    """400 MB: libtorch_cpu.so alone has 414 (torch 2.13 for CPU), and 1.6 GB for CUDA."""
    code, exit_code, *figures = _asked(400 << 20).split()
    assert (code, exit_code) == ("out_of_memory", "3")
    assert float(figures[0]) > 0.6 and 0.3 <= float(figures[-2]) <= 0.4  # GB


def test_who_has_torch_has_room_for_it() -> None:
    loaded = "import sys, types; sys.modules['torch'] = types.ModuleType('torch')"
    assert _asked(400 << 20, first=loaded) == "room"


def _asked(limit: int | None, first: str = "") -> str:
    program = [sys.executable, "-c", f"{first}\n{ASKED.replace('BYTES', str(limit or 0))}"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
