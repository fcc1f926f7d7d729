"""A run directory that holds files of the user's: what no run made is neither written over nor taken away."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import killing
import tiny
from command_child import Commands, Done

pytestmark = pytest.mark.slow


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder of the user's, with a recipe and rows beside other things."""
    folder = tmp_path / "here"
    folder.mkdir()
    tiny.write_rows(folder / "samples.jsonl", 24)
    (folder / "recipe.yaml").write_text(_recipe(folder / "samples.jsonl"))
    (folder / "notes.txt").write_text("mine\n")
    return folder


@pytest.mark.parametrize("options", ["", "--max-length 3", "--resume"])
def test_a_recipe_and_rows_in_the_run_directory_are_kept(commands: Commands, here: Path, options: str) -> None:
    """With three tokens a row there is nothing to train, and what a run began is taken away again."""
    before = _contents(here)
    done = _call(commands, here, f"local recipe.yaml --run-dir . {options}")
    assert done.error == (2, "output_exists")
    assert done.answer["error"]["got"] == "recipe.yaml, samples.jsonl"
    assert _contents(here) == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "train.log", "environment.json", "adapter", "checkpoints", "gguf"])
def test_each_name_that_a_run_writes_must_be_free(commands: Commands, here: Path, name: str) -> None:
    place = here / "place"
    (place / name).mkdir(parents=True) if "." not in name else _write(place / name, "mine\n")
    assert _call(commands, here, "local recipe.yaml --run-dir place").error == (2, "output_exists")
    assert [path.name for path in place.iterdir()] == [name]


def test_a_plan_beside_its_recipe_is_no_run(commands: Commands, here: Path) -> None:
    assert _call(commands, here, "plan recipe.yaml --where local --out plan.json").code == 0
    before = _contents(here)
    assert _call(commands, here, "local plan.json --run-dir .").error == (2, "output_exists")
    assert _contents(here) == before


def test_a_plan_of_another_recipe_is_kept(commands: Commands, here: Path) -> None:
    assert _call(commands, here, "plan recipe.yaml --where local --out place/plan.json").code == 0
    before = _contents(here)
    done = _call(commands, here, "local recipe.yaml --max-length 50 --run-dir place")
    assert done.error == (2, "output_exists")
    assert _contents(here) == before


@pytest.mark.skipif(sys.platform != "linux", reason="macOS keeps no limit of the address space")
def test_without_room_for_torch_nothing_is_begun(here: Path) -> None:
    """In 0.4 GB, of which libtorch takes more than all."""
    before = _contents(here)
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (400 << 20,) * 2); "
    program = [sys.executable, "-c", limit + "from skill_train.cli import main; main()"]
    words = ["local", "recipe.yaml", "--run-dir", "place", "--format", "json"]
    done = subprocess.run([*program, *words], cwd=here, capture_output=True, text=True, timeout=60)
    assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (3, "out_of_memory"), done.stderr
    assert _contents(here) == before and not (here / "place").exists()


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac may have it")
def test_on_a_device_that_torch_cannot_use_nothing_is_begun(commands: Commands, here: Path) -> None:
    before = _contents(here)
    assert _call(commands, here, "local recipe.yaml --device mps --run-dir place").error == (7, "device_unavailable")
    assert _contents(here) == before and not (here / "place").exists()


def test_what_was_there_stays_when_the_rows_are_refused(commands: Commands, here: Path) -> None:
    """A plan alone may become a run, and is the user's."""
    line = "plan recipe.yaml --max-length 3 --where local --out place/plan.json"
    assert _call(commands, here, line).code == 0
    (here / "place" / "notes.txt").write_text("mine\n")
    assert _call(commands, here, "local place/plan.json --run-dir place").error == (2, "nothing_to_train")
    assert {path.name for path in (here / "place").iterdir()} == {"plan.json", "notes.txt"}


def test_the_folder_of_the_model_is_no_run_directory(commands: Commands, here: Path) -> None:
    """Its records would be taken for files of the model, which then is another one."""
    base = Path(shutil.copytree(tiny.cached("gemma"), here / "base"))
    (here / "recipe.yaml").write_text(_recipe(here / "samples.jsonl", base))
    before = _contents(here)
    assert _call(commands, here, "local recipe.yaml --run-dir base").error == (2, "bad_usage")
    assert _contents(here) == before


@pytest.mark.parametrize("moment", ["open .recipe.yaml", "open train.log"])
def test_a_start_that_was_killed_is_no_hindrance(here: Path, tmp_path: Path, moment: str) -> None:
    step = killing.Step("again", ("local", "recipe.yaml", "--run-dir", "run"), here, dict(os.environ))
    assert not killing.struck(step, here, tmp_path / "log", killing.Moment(operation=moment))
    assert (here / "run" / "plan.json").is_file() and not (here / "run" / "train.log").exists()
    assert killing.finish(step, here) == []
    assert (here / "run" / "train.json").is_file()


def _recipe(data: Path, base: Path | None = None) -> str:
    return f"model: {base or tiny.cached('gemma')}\ndata: {data}\nmax_steps: 2\nmax_length: 96\n"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir()
    path.write_text(text)


def _call(commands: Commands, folder: Path, line: str) -> Done:
    return commands.run(folder, dict(os.environ), *line.split(), "--format", "json")


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
