"""The short form of the hostile input: a few hundred inputs for each kind of file, in this process, without torch.

`make torture` makes more than 20,000, guided by coverage, and those of a Hub that lies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import hostile_files
import hostile_hub
import hostile_records

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform == "win32", reason="needs signals")]

TARGETS = {**hostile_files.TARGETS, **hostile_records.TARGETS, "markers": hostile_hub.markers}
COUNTS = {
    "recipe": 40, "plan_command": 10, "plan": 20, "rows": 30, "start_of_rows": 60, "adapter": 60, "model": 20,
    "gguf": 60, "archive": 15, "diff": 8, "push": 15, "status": 10, "markers": 60,
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_hostile_input_ends_in_an_answer_or_an_error_of_ours(name: str, tmp_path: Path) -> None:
    @seed(20261121)
    @settings(max_examples=COUNTS[name], database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.binary(min_size=1, max_size=24))
    def one(data: bytes) -> None:
        hostile_files.in_folder(TARGETS[name], data, tmp_path)

    hostile_files.in_folder(TARGETS[name], b"", tmp_path)  # what is made once
    one()


def test_a_hub_that_does_not_lie_is_believed(tmp_path: Path) -> None:
    """Else its lies would show nothing. In a process of its own, because the client keeps the address of the Hub."""
    answers = "(hub.answer(bytes([route]), Path(sys.argv[1])) for route in range(len(hub.ROUTES)))"
    script = f"import sys; from pathlib import Path; import hostile_hub as hub; print(*{answers})"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1] / "support")}
    program = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["done"] * len(hostile_hub.ROUTES), done.stdout + done.stderr
