"""A run directory that is moved while it is trained: there is no second one, and the training goes on there."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import tiny
import training
from command_child import program

pytestmark = [pytest.mark.slow, pytest.mark.real_python]

STEPS = 60


@pytest.mark.parametrize("at", [pytest.param("loading the model", marks=pytest.mark.torture), "training: "])
def test_it_stops_and_goes_on_where_the_run_is_now(warm_python: Path, tmp_path: Path, at: str) -> None:
    local = ("local", "--model", tiny.cached("gemma"), "--data", tiny.write_rows(tmp_path / "rows.jsonl", 24))
    recipe = ("--max-steps", STEPS, "--max-length", 96, "--run-dir", "run", "--format", "json")
    own, *words = program(*map(str, (*local, *recipe)))
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = subprocess.Popen(
        [str(warm_python), *words],
        executable=own,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert command.stderr is not None
    next(line for line in command.stderr if line.startswith(at))
    (tmp_path / "run").rename(tmp_path / "moved")
    out, err = command.communicate(timeout=120)
    error = json.loads(out)["error"]
    assert (command.returncode, error["code"]) == (2, "not_a_run"), err
    assert "moved, renamed or removed" in error["message"] and "--resume --run-dir run" in error["hint"]
    assert not (tmp_path / "run").exists()

    resume = program("local", "--resume", "--run-dir", "moved", "--format", "json")[1:]
    done = subprocess.run([str(warm_python), *resume], executable=own, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["data"]["steps"] == STEPS
    assert [line["step"] for line in training.metrics(tmp_path / "moved")] == list(range(1, STEPS + 1))
