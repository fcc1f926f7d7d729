"""Importance matrices of a run whose data is on the Hub: the rows of the plan's commit, or those that the run keeps."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fed_runs
import tiny
from fed_runs import edit_plan, fed
from hub_emulator import Hub
from hub_emulator.repos import Repository
from skill_train.gguf.quality.texts import SAMPLES, TRAINING
from skill_train.run.folder import RunDir

pytestmark = pytest.mark.slow

pytest.importorskip("huggingface_hub")
pytest.importorskip("datasets")

ROWS = 90  # of which a fifth is held out, so that samples.jsonl does not keep all that train


class Child:
    """A process that reads the texts of runs, with the Hub of its environment."""

    def __init__(self, environment: dict[str, str]) -> None:
        command = [sys.executable, fed_runs.__file__]
        self._child = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def texts(self, run: RunDir) -> dict[str, Any]:
        assert self._child.stdin and self._child.stdout
        self._child.stdin.write(f"{run.path}\n")
        self._child.stdin.flush()
        texts: dict[str, Any] = json.loads(self._child.stdout.readline())
        return texts

    def close(self) -> None:
        self._child.communicate(timeout=20)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with Hub(tmp_path_factory.mktemp("hub") / "hub") as hub:
        yield hub
    assert hub.unknown == []


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def child(hub: Hub, home: Path) -> Iterator[Child]:
    child = Child(hub.environment(home))
    yield child
    child.close()


@pytest.fixture(scope="module")
def repository(trained: RunDir, hub: Hub) -> Repository:
    """The dataset of the run, and a later commit with the rows of nobody."""
    rows = (trained.path.parent / "rows.jsonl").read_bytes()
    card = b"---\nlicense: mit\n---\n"
    repository = hub.add("dataset", "me/rows", {"train.jsonl": rows, "README.md": card})
    edit_plan(trained, "recipe", "data", "me/rows")
    edit_plan(trained, "recipe", "data_revision", repository.commit("main"))
    edit_plan(trained, "fingerprints", "data", None)
    other = rows.replace(b"many", b"few")
    assert other != rows
    repository.add_commit("main", {"train.jsonl": other, "README.md": card}, "other words", "me")
    return repository


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return fed(tmp_path_factory.mktemp("trained"), tiny.rows(ROWS))[0]


@pytest.fixture
def run(trained: RunDir, repository: Repository, tmp_path: Path) -> RunDir:
    shutil.copytree(trained.path, tmp_path / "run", symlinks=True)
    return RunDir(tmp_path / "run")


def _ids(file: Path) -> list[list[int]]:
    return [json.loads(line)["input_ids"] for line in file.read_text().splitlines()]


def test_they_are_the_rows_of_the_planned_commit_and_none_that_was_held_out(run: RunDir, child: Child) -> None:
    texts = child.texts(run)
    assert (texts["source"], texts["lacking"]) == (TRAINING, "")
    drawn = [*texts["computed"], *texts["compared"]]
    held_out, kept = _ids(run.held_out), _ids(run.samples)
    assert len(held_out) > 10 and not [ids for ids in drawn if ids in held_out]
    assert len(drawn) == json.loads(run.record("train").read_text())["data"]["train_rows"] > len(kept)
    assert all(ids in drawn for ids in kept)  # the later commit has other words in each row


def test_the_file_of_the_plan_is_read_alone(run: RunDir, child: Child, hub: Hub, trained: RunDir) -> None:
    rows = (trained.path.parent / "rows.jsonl").read_bytes()
    files = {"train-0.jsonl": rows.replace(b"many", b"few"), "train-1.jsonl": rows}
    repository = hub.add("dataset", "me/several", files)
    edit_plan(run, "recipe", "data", "me/several")
    edit_plan(run, "recipe", "data_revision", repository.commit("main"))
    edit_plan(run, "recipe", "data_file", "train-1.jsonl")
    texts = child.texts(run)
    assert (texts["source"], texts["lacking"]) == (TRAINING, "")


CHANGES: dict[str, tuple[Callable[[RunDir], object], str]] = {
    "the commit is gone": (
        lambda run: edit_plan(run, "recipe", "data_revision", "5" * 40),
        "the dataset me/rows has no such revision",
    ),
    "a branch, which moves": (
        lambda run: edit_plan(run, "recipe", "data_revision", "main"),
        "the plan does not say at which commit",
    ),
    "another dataset of that name": (
        lambda run: edit_plan(run, "recipe", "data", "me/none"),
        "there is no dataset me/none on the Hub",
    ),
    "no such split": (
        lambda run: edit_plan(run, "recipe", "split", "best"),
        "the dataset me/rows has no such split or configuration",
    ),
    "too large to download": (
        lambda run: _edit_bytes(run, 30_000_000_000),
        "has 30.0 GB on the Hub, and at most 2.0 GB are downloaded",
    ),
}


def _edit_bytes(run: RunDir, n_bytes: int) -> None:
    dataset = json.loads(run.plan.read_text())["facts"]["dataset"]
    edit_plan(run, "facts", "dataset", dataset | {"bytes": n_bytes})


@pytest.mark.parametrize("change", CHANGES)
def test_where_they_are_gone_the_kept_rows_are_used_and_it_is_said(run: RunDir, child: Child, change: str) -> None:
    alter, words = CHANGES[change]
    alter(run)
    _assert_only_kept(run, child.texts(run), words)


def test_the_words_of_another_commit_are_not_taken_for_them(run: RunDir, child: Child, repository: Repository) -> None:
    edit_plan(run, "recipe", "data_revision", repository.commit("main"))
    _assert_only_kept(run, child.texts(run), "is not encoded as the trainer was fed it")


def test_without_the_hub_the_cache_has_them_or_nobody(run: RunDir, hub: Hub, child: Child, tmp_path: Path) -> None:
    """The cache of `datasets` has the later commit alone: it takes that one for any other."""
    later = RunDir(shutil.copytree(run.path, tmp_path / "later", symlinks=True))
    edit_plan(later, "recipe", "data_revision", hub.repositories["dataset", "me/rows"].commit("main"))
    online = Child(hub.environment(tmp_path / "home"))
    online.texts(later)
    online.close()
    for home, words in (("home", "the Hub does not give me/rows at commit"), ("empty", "HF_HUB_OFFLINE is set")):
        offline = Child(hub.environment(tmp_path / home) | {"HF_HUB_OFFLINE": "1"})
        _assert_only_kept(run, offline.texts(run), words)
        offline.close()


@pytest.mark.parametrize("cached", [True, False])
def test_a_hub_that_cannot_be_reached_is_asked_once(run: RunDir, hub: Hub, tmp_path: Path, cached: bool) -> None:
    """It was tried six times, for at least 23 s. What the cache has of the commit is used even then. One such Hub says
    nothing, the other refuses."""
    environment = hub.environment(tmp_path / "home")
    if cached:
        online = Child(environment)
        online.texts(run)
        online.close()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if cached:
            silent.listen()
        away = Child(environment | {"HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}"})
        started = time.monotonic()
        texts = away.texts(run)
        seconds = time.monotonic() - started
        away.close()
    assert seconds < 20  # the process starts meanwhile
    if cached:
        assert (texts["source"], texts["lacking"]) == (TRAINING, "")
    else:
        _assert_only_kept(run, texts, "the Hub cannot be reached for the dataset me/rows")


def _assert_only_kept(run: RunDir, texts: dict[str, Any], words: str) -> None:
    assert texts["source"] == SAMPLES and words in texts["lacking"], texts["lacking"]
    drawn, kept = [*texts["computed"], *texts["compared"]], _ids(run.samples)
    assert drawn and all(ids in kept for ids in drawn)
