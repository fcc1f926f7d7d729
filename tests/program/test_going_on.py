"""`local` called again in a run directory: what goes on is the run that began there, and the answer is of that run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import tiny
from command_child import Commands, Done, program
from skill_train.run.folder import RunDir
from skill_train.run.lock import is_locked

pytestmark = pytest.mark.slow

STEPS = 30


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, rows, and a run in fp32 that Ctrl-C ended after its first steps."""
    folder = tmp_path_factory.mktemp("stopped")
    _write(folder, max_steps=STEPS)
    assert _stop(folder, "training: ", signal.SIGINT, "--dtype", "float32") == 130
    assert list((folder / "run" / "checkpoints").glob("checkpoint-*"))
    return folder


# --- The plan ---


def test_before_its_first_checkpoint_a_run_takes_the_new_recipe(commands: Commands, tmp_path: Path) -> None:
    """Nothing is lost by it, and the recipe that was given is the one that the answer names."""
    _write(tmp_path, max_steps=STEPS)
    assert _stop(tmp_path, "loading the model", signal.SIGTERM) == 5
    old = _json(tmp_path / "run" / "plan.json")
    _write(tmp_path, max_steps=3)
    data = _call(commands, tmp_path, "local recipe.yaml --run-dir run").data
    plan = _json(tmp_path / "run" / "plan.json")
    assert (data["steps"], plan["recipe"]["max_steps"], old["recipe"]["max_steps"]) == (3, 3, STEPS)
    assert data["recipe_hash"] == plan["recipe_hash"] == _json(tmp_path / "run" / "train.json")["recipe_hash"]
    assert yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())["max_steps"] == 3


def test_the_answer_is_of_the_plan_that_was_trained(commands: Commands, stopped: Path, tmp_path: Path) -> None:
    """Another precision does not change the recipe, so the run goes on, as it was planned."""
    place = Path(shutil.copytree(stopped, tmp_path / "place"))
    cache = {"SKILL_TRAIN_CACHE": str(tmp_path / "cache")}
    for options, reused in (("--resume --dtype bfloat16", False), ("--dtype bfloat16", True)):
        done = _call(commands, place, f"local recipe.yaml {options} --run-dir run", **cache)
        assert (done.data["reused"], done.data["steps"], done.data["placement"]["dtype"]) == (reused, STEPS, "float32")
        said = {warning["code"]: warning["message"] for warning in done.answer["warnings"]}
        assert "started with dtype float32 and keeps it" in said["kept_plan"]
    measured = [_json(path)["dtype"] for path in (tmp_path / "cache" / "calibration").iterdir()]
    assert measured == ["float32"]


# --- Nothing to go on from ---


@pytest.mark.parametrize(
    "place", [" --run-dir empty", *(pytest.param(p, marks=pytest.mark.torture) for p in ("", " --run-dir new"))]
)
def test_without_a_run_there_is_nothing_to_resume(commands: Commands, tmp_path: Path, place: str) -> None:
    """A fresh adapter would look like the one that was gone on with. The hint begins one, and is run as it stands."""
    _write(tmp_path, max_steps=2)
    (tmp_path / "empty").mkdir()
    before = _names(tmp_path)
    done = _call(commands, tmp_path, f"local recipe.yaml --max-steps 1 --resume{place}")
    assert done.error == (2, "missing_step"), done.stdout
    assert _names(tmp_path) == before
    error = done.answer["error"]
    assert error["hint"] == f"skill-train local recipe.yaml --max-steps 1{place}"
    assert _call(commands, tmp_path, error["hint"].removeprefix("skill-train ")).data["steps"] == 1
    assert _call(commands, tmp_path, f"local recipe.yaml --max-steps 1 --resume{place}").data["reused"] is True


def test_new_data_in_a_new_folder_are_not_gone_on_with(commands: Commands, stopped: Path, tmp_path: Path) -> None:
    """What `another_run` says in the folder of the first run leads to a new one, without --resume, as it stands."""
    place = Path(shutil.copytree(stopped, tmp_path / "place"))
    tiny.write_rows(place / "other.jsonl", 24, seed=3)
    words = f"local --model {place / 'base'} --data other.jsonl --max-steps 1 --dtype float32"
    done = _call(commands, place, f"{words} --resume --run-dir run")
    assert done.error == (2, "another_run"), done.stdout
    assert done.answer["error"]["hint"] == f"skill-train {words} --run-dir run-2"
    assert _call(commands, place, f"{words} --resume --run-dir run-2").error == (2, "missing_step")
    data = _call(commands, place, done.answer["error"]["hint"].removeprefix("skill-train ")).data
    assert (data["run_dir"], data["steps"], data["reused"]) == ("run-2", 1, False)


def test_an_edit_of_the_runs_recipe_is_not_ignored(commands: Commands, stopped: Path, tmp_path: Path) -> None:
    """Training follows the plan, so the edit would change nothing, and nobody would say so."""
    place = Path(shutil.copytree(stopped, tmp_path / "place"))
    recipe = place / "run" / "recipe.yaml"
    was = recipe.read_text()
    assert "learning_rate: 0.0002" in was
    recipe.write_text(was.replace("learning_rate: 0.0002", "learning_rate: 0.001"))
    done = _call(commands, place, "local --resume --run-dir run")
    assert done.error == (2, "another_run"), done.stdout
    assert (done.answer["error"]["expected"], done.answer["error"]["got"]) == (
        "learning_rate: 0.0002",
        "learning_rate: 0.001",
    )
    assert done.answer["error"]["hint"].endswith("skill-train local run/recipe.yaml --run-dir NEW_RUN")


def test_a_run_without_a_checkpoint_goes_on_with_its_own_plan_alone(commands: Commands, tmp_path: Path) -> None:
    """It was killed before its first checkpoint: its plan is begun again from the first step, and no other one is."""
    _write(tmp_path, max_steps=3)
    assert _stop(tmp_path, "loading the model", signal.SIGKILL) == -signal.SIGKILL
    _ended(tmp_path / "run")
    assert not list((tmp_path / "run").glob("checkpoints/checkpoint-*"))
    done = _call(commands, tmp_path, "local recipe.yaml --max-steps 2 --resume --run-dir run")
    assert done.error == (2, "another_run"), done.stdout
    assert done.answer["error"]["got"] == "max_steps: 3 → 2"
    data = _call(commands, tmp_path, "local recipe.yaml --resume --run-dir run").data
    assert (data["steps"], data["reused"]) == (3, False)


@pytest.mark.parametrize("made", [False, True])
def test_a_run_that_is_not_there_is_named(commands: Commands, tmp_path: Path, made: bool) -> None:
    if made:
        (tmp_path / "new").mkdir()
    done = _call(commands, tmp_path, "local --resume --run-dir new")
    assert done.error == (2, "not_a_run")
    trained = "check the path, or train a run: skill-train local --model MODEL --data DATA --run-dir new"
    assert done.answer["error"]["hint"] == trained


def test_resume_alone_asks_for_the_run(commands: Commands, tmp_path: Path) -> None:
    done = _call(commands, tmp_path, "local --resume")
    assert done.error == (2, "bad_usage")
    assert done.answer["error"]["hint"] == "skill-train local --resume --run-dir RUN"


# --- The base and the rows ---


@pytest.mark.parametrize(("name", "key"), [("rows.jsonl", "data"), ("base/model.safetensors", "model")])
@pytest.mark.parametrize("change", ["other words", "gone"])
def test_a_run_does_not_go_on_with_another_base_or_other_rows(
    commands: Commands, stopped: Path, name: str, key: str, change: str
) -> None:
    """Half of the steps would have seen something else, and every record would tell of the first."""
    file, before = stopped / name, (stopped / "run" / "metrics.jsonl").read_bytes()
    kept = file.read_bytes()
    if change == "gone":
        file.unlink()
    elif key == "data":
        tiny.write_rows(file, 24, seed=1)
    else:
        file.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    try:
        done = _call(commands, stopped, "local --resume --run-dir run")
    finally:
        file.write_bytes(kept)
    assert done.error == (2, "outdated_plan"), done.stdout
    error = done.answer["error"]
    assert f"the {key} changed after run/plan.json was written" in error["message"]
    assert (stopped / "run" / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", ["rows.jsonl", "base"])
def test_a_run_whose_inputs_were_moved_goes_on_as_its_hint_says(
    commands: Commands, stopped: Path, tmp_path: Path, name: str
) -> None:
    """The plan names absolute places, so a project that is moved as a whole loses them."""
    folder = Path(shutil.copytree(stopped, tmp_path / "there"))
    plan = (folder / "run" / "plan.json").read_text()
    assert str(stopped / name) in plan
    moved, before = (stopped / name).rename(tmp_path / "elsewhere"), stopped / name
    try:
        done = _call(commands, folder, "local --resume --run-dir run")
        assert done.error == (2, "outdated_plan"), done.stdout
        hint = done.answer["error"]["hint"]
        assert hint.startswith(f"if it was moved, put a link there: ln -s NEW_PLACE {before}; or ")
        before.symlink_to(moved)
        again = _call(commands, folder, "local --resume --run-dir run")
        assert again.code == 0 and again.data["verdict"] == "pass", again.stdout
    finally:
        before.unlink(missing_ok=True)
        moved.rename(before)


def test_a_finished_run_is_found_whatever_became_of_its_rows(commands: Commands, stopped: Path, tmp_path: Path) -> None:
    place, rows = Path(shutil.copytree(stopped, tmp_path / "place")), stopped / "rows.jsonl"
    assert _call(commands, place, "local --resume --run-dir run").data["steps"] == STEPS
    kept = rows.read_bytes()
    rows.unlink()
    try:
        assert _call(commands, place, "local --resume --run-dir run").data["reused"] is True
    finally:
        rows.write_bytes(kept)


def _write(folder: Path, max_steps: int) -> None:
    """The base and the rows once; the recipe."""
    if not (folder / "base").is_dir():
        shutil.copytree(tiny.cached("gemma"), folder / "base")
        tiny.write_rows(folder / "rows.jsonl", 24)
    values = {"model": str(folder / "base"), "data": str(folder / "rows.jsonl"), "max_steps": max_steps}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values | {"effective_batch_size": 2, "max_length": 96}))


def _stop(folder: Path, at: str, how: int, *options: str) -> int:
    """The exit code of a run that gets a signal when it says something that begins so."""
    command = program("local", "recipe.yaml", "--run-dir", "run", *options, "--format", "json")
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=folder, **pipes) as process:
        for line in process.stderr or ():
            if line.startswith(at):
                process.send_signal(how)
                break
        process.communicate(timeout=100)
    return process.returncode


def _call(commands: Commands, folder: Path, line: str, **environment: str) -> Done:
    return commands.run(folder, os.environ | environment, *line.split(), "--format", "json")


def _names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def _ended(run: Path) -> None:
    """Waits for the training that a killed command has left."""
    end = time.monotonic() + 60
    while is_locked(RunDir(run)) and time.monotonic() < end:
        time.sleep(0.1)


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))
