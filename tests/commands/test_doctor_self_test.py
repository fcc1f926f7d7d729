"""`doctor --self-test`: the chain on the demo's model, which leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from light import SOURCE

pytestmark = pytest.mark.slow

_MAIN = "from skill_train.cli import main; main()"
_MOUNT = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs"]  # too small for a checkpoint of the demo's model


def test_the_self_test_goes_through_the_chain_and_leaves_nothing(tmp_path: Path) -> None:
    started = time.monotonic()
    done = _doctor("--self-test", TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    figures = _figures(done)
    assert [stage["stage"] for stage in figures["stages"]] == [
        "find the converter", "plan", "train", "merge", "convert and quantize", "verify",
    ]  # fmt: skip
    assert {stage["verdict"] for stage in figures["stages"]} == {figures["verdict"]} == {"pass"}
    assert time.monotonic() - started < 120  # measured on 2 cores: 25 s
    assert list(tmp_path.glob("skill-train*")) == []  # torch leaves an empty folder of its own


def test_the_self_test_without_a_converter_names_the_command_that_fetches_it(tmp_path: Path) -> None:
    done = _doctor("--self-test", SKILL_TRAIN_CACHE=str(tmp_path / "empty"), PATH="/nowhere")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (7, "no_converter")
    assert error["hint"].startswith("skill-train export-gguf --fetch")
    assert _figures(done)["stages"] == [{"stage": "find the converter", "verdict": "fail"}]


@pytest.mark.torture
def test_a_full_disk_ends_the_self_test_at_the_stage_that_meets_it() -> None:
    if not _can_mount():
        pytest.skip("needs the right to make a small file system, to fill it")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*_MOUNT, folder], check=True)
        try:
            done = _doctor("--self-test", TMPDIR=folder)
        finally:
            subprocess.run(["umount", folder], check=True)
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (3, "no_disk")
    assert error["hint"].endswith(": skill-train demo") and folder not in error["hint"]
    assert _figures(done)["stages"][-1] == {"stage": "train", "verdict": "fail"}


def _can_mount() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        made = shutil.which("mount") and subprocess.run([*_MOUNT, folder], capture_output=True).returncode == 0
        return bool(made) and subprocess.run(["umount", folder], capture_output=True).returncode == 0


def _figures(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads(done.stdout)["data"]["self_test"]
    return figures


def _doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _MAIN, "doctor", *arguments, "--format", "json"]
    full = os.environ | {"PYTHONPATH": SOURCE} | environment
    return subprocess.run(command, env=full, capture_output=True, text=True, timeout=280, check=False)
