"""Surroundings that Python has no class of error for: one clear error, and no bug."""

from __future__ import annotations

import json
import os
import pwd
import shutil
from pathlib import Path

import pytest

import containers
import shared_runs
import tiny
from one_command import answered

RUNS = Path(__file__).resolve().parents[1] / "support" / "data" / "runs"


def test_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that runs as a user whom its image does not know."""

    def unknown(uid: int) -> pwd.struct_passwd:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    run = shutil.copytree(RUNS / "tiny", tmp_path / "run")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "SKILL_TRAIN_CACHE"):
        monkeypatch.delenv(name, raising=False)
    calls = (("report", run), ("skills", "check"), ("plan", "--model", tiny.cached("gemma"), "--data", _rows(tmp_path)))
    for words in calls:
        code, answer = answered(*words)
        assert (code, answer["error"]["code"]) == (2, "system_error"), answer
        assert "HOME is not set" in answer["error"]["message"] and "export HOME=" in answer["error"]["hint"]


@pytest.mark.parametrize("command", ["report", "local"])
def test_a_current_directory_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    run, here = Path(shutil.copytree(RUNS / "tiny", tmp_path / "run")), tmp_path / "here"
    recipe = ("--model", tiny.cached("gemma"), "--data", _rows(tmp_path), "--run-dir", tmp_path / "new")
    here.mkdir()
    monkeypatch.chdir(here)
    here.rmdir()
    code, answer = answered(command, *(recipe if command == "local" else (run,)))
    assert (code, answer["error"]["code"]) == (2, "system_error"), answer
    assert "current directory was removed" in answer["error"]["message"] and not (tmp_path / "new").exists()


def test_a_folder_whose_name_is_not_utf8(tmp_path: Path) -> None:
    run = Path(shutil.copytree(RUNS / "tiny", tmp_path / os.fsdecode(b"run-\xff")))
    before = sorted(run.iterdir())
    code, answer = answered("report", run)
    assert (code, answer["error"]["code"]) == (2, "system_error"), answer
    assert "not UTF-8" in answer["error"]["message"] and r"run-\udcff" in answer["error"]["got"]
    assert sorted(run.iterdir()) == before


@pytest.mark.slow
@pytest.mark.skipif(not containers.may_mount(), reason="needs a mount of its own")
def test_a_finished_export_on_a_read_only_disk_is_found(tmp_path: Path) -> None:
    """It has nothing to write. What has is told with the name of its file, and not of a temporary one."""
    run = Path(shutil.copytree(shared_runs.chain().run, tmp_path / "run"))
    export = [shared_runs.script(), "export-gguf", str(run), "--quant", "q8_0,q4_k_m", "--format", "json"]
    done = containers.run_read_only(run, export)
    assert done.returncode == 0 and json.loads(done.stdout)["data"]["reused"], done.stdout + done.stderr
    done = containers.run_read_only(run, [shared_runs.script(), "report", str(run), "--format", "json"])
    assert (done.returncode, json.loads(done.stdout)["error"]["got"]) == (2, str(run / "report.html")), done.stdout


def _rows(folder: Path) -> Path:
    return tiny.write_rows(folder / "rows.jsonl", 4)
