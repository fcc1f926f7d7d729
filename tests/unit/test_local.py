"""What `local` says of a run directory and of a training process that ended badly, without training anything."""

from __future__ import annotations

import hashlib
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from skill_train import local
from skill_train.errors import DecisionNeeded, NativeCrash, SkillTrainError, TrainingFailed, UsageError
from skill_train.run_dir import RunDir

PLAN: dict[str, Any] = {"recipe_hash": "a", "recipe": {"max_steps": 40}, "fingerprints": {"data": "x"}, "policy": {}}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A finished run whose adapter is the two bytes `42`."""
    adapter = tmp_path / "adapter" / "adapter_model.safetensors"
    adapter.parent.mkdir()
    adapter.write_bytes(b"42")
    digest = {"bytes": 2, "sha256": hashlib.sha256(b"42").hexdigest()}
    (tmp_path / "train.json").write_text(json.dumps({"outputs": {"adapter/adapter_model.safetensors": digest}}))
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    (tmp_path / "train.log").write_text("some words\n")
    return RunDir(tmp_path)


def test_a_finished_run_is_found(run: RunDir) -> None:
    assert "outputs" in local.trained(run)


@pytest.mark.parametrize("content", [b"43", b"4", None])
def test_another_adapter_in_its_place_is_noticed(run: RunDir, content: bytes | None) -> None:
    """Else the adapter of another run would be merged, exported and proven as this one's."""
    file = run.adapter / "adapter_model.safetensors"
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        local.trained(run)
    assert caught.value.code == "output_changed"
    assert caught.value.got == ("missing" if content is None else "another content")


def test_another_recipe_in_the_same_folder_is_told_apart(run: RunDir) -> None:
    other = PLAN | {"recipe_hash": "b", "recipe": {"max_steps": 41}, "fingerprints": {"data": "y"}}
    with pytest.raises(UsageError) as caught:
        local.train(run, other, resume=False, progress=lambda *_: None, say=lambda _: None)
    assert caught.value.code == "another_run"
    assert caught.value.got == "the data has changed; max_steps: 40 → 41"


@pytest.mark.parametrize(
    ("ended", "kind", "code"),
    [
        (-signal.SIGINT, TrainingFailed, "interrupted"),
        (-signal.SIGTERM, TrainingFailed, "interrupted"),
        (-signal.SIGKILL, DecisionNeeded, "out_of_memory"),
        (-signal.SIGSEGV, NativeCrash, "native_crash"),
        (1, NativeCrash, "program_failed"),
    ],
)
def test_how_a_training_process_ended(run: RunDir, ended: int, kind: type[SkillTrainError], code: str) -> None:
    error = local._failure(run, ended, None, "some words\n")
    assert isinstance(error, kind)
    assert error.code == code
    assert error.hint


def test_the_words_of_the_program_count_before_its_exit_code(run: RunDir) -> None:
    said = {"code": "no_disk", "message": "full", "expected": "", "got": "", "hint": "skill-train local --run-dir RUN"}
    error = local._failure(run, 3, {"exit_code": 3, "error": said}, "")
    assert isinstance(error, DecisionNeeded)
    assert error.hint == f"skill-train local --run-dir {run.path}"
