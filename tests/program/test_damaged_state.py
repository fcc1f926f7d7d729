"""What an earlier start of a training left, damaged: it is left out or refused by its name, and never a traceback."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

import shared_runs
from command_child import Commands, Done
from skill_train.program.folders.checkpoints import is_complete

FORMS = {
    "empty": b"",
    "cut": b'{"a": 1, "b',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "list": b"[]",
    "null": b"null",
    "object": b"{}",
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_with_a_damaged_marker_is_torn(tmp_path: Path, form: str) -> None:
    (tmp_path / "complete.json").write_bytes(FORMS[form])
    assert not is_complete(tmp_path)
    (tmp_path / "a").write_bytes(b"123")
    (tmp_path / "complete.json").write_text('{"a": 3}')
    assert is_complete(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "form", "moved"),
    [
        ("checkpoints/before.json", "cut", "checkpoints/before.json"),
        ("checkpoints/checkpoint-2/trainer_state.json", "object", "checkpoints/checkpoint-2"),
        pytest.param(
            *("checkpoints/checkpoint-2/held_out.json", "null", "checkpoints/checkpoint-2"), marks=pytest.mark.torture
        ),
    ],
)
def test_what_it_needs_is_named(commands: Commands, tmp_path: Path, name: str, form: str, moved: str) -> None:
    """The hint leads on."""
    run = _unfinished(tmp_path)
    _damage(run, name, form)
    done = _resume(commands, run)
    error = done.answer["error"]
    assert (done.code, error["code"], error["message"]) == (2, "broken_record", f"{run / name} is damaged"), done.stdout
    assert error["hint"] == f"put it back, or move {run / moved} away, then skill-train local --resume --run-dir {run}"
    (run / moved).rename(tmp_path / "away")
    assert _resume(commands, run).data["verdict"] == "pass"


@pytest.mark.slow
def test_other_weights_do_not_hide_behind_a_damaged_record(commands: Commands, tmp_path: Path) -> None:
    run = _unfinished(tmp_path)
    _damage(run, "environment.json", "null")
    error = _resume(commands, run).answer["error"]
    assert (error["code"], error["hint"]) == ("broken_record", "put it back, or train into a new --run-dir")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["list", pytest.param("UTF-16", marks=pytest.mark.torture)])
def test_lines_that_cannot_be_read_are_the_trainers_own(commands: Commands, tmp_path: Path, form: str) -> None:
    run = _unfinished(tmp_path)
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    _damage(run, "metrics.jsonl", form)
    assert _resume(commands, run).data["steps"] == 3
    found = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert found == pytest.approx(losses, abs=1e-4)


def _unfinished(folder: Path) -> Path:
    """A run that ended after its second step of three."""
    run = Path(shutil.copytree(shared_runs.chain().run, folder / "run"))
    for name in ("adapter", "checkpoints/checkpoint-3", "merged", "gguf"):
        shutil.rmtree(run / name)
    for name in ("train", "merge", "convert", "quantize", "verify"):
        (run / f"{name}.json").unlink()
    return run


def _damage(run: Path, name: str, form: str) -> None:
    """In a checkpoint of an earlier version, which had no digests; its marker goes with the file."""
    (run / name).write_bytes(FORMS[form])
    marker = (run / name).with_name("complete.json")
    if marker.is_file():
        marker.with_name("sha256.json").unlink()
        sizes = json.loads(marker.read_text())
        del sizes["sha256.json"]
        marker.write_text(json.dumps(sizes | {Path(name).name: len(FORMS[form])}))


def _resume(commands: Commands, run: Path) -> Done:
    return commands.run(Path.cwd(), dict(os.environ), "local", "--resume", "--run-dir", run, "--format", "json")
