"""A limit of the size of files, which a system or a container may set: wherever a step meets it, it is told like a full
disk, nothing half-written stays under a final name, and with a higher limit the same command ends well."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import shared_runs
from command_child import Commands

pytestmark = pytest.mark.slow

EXPORTED = ("gguf", "convert.json", "quantize.json", "verify.json")
LATER = ("train.json", "adapter", "merged", "merge.json", *EXPORTED)


@pytest.fixture(scope="module")
def trained() -> Path:
    """A run that is trained and exported."""
    return shared_runs.chain().run


@pytest.mark.parametrize(
    "at", ["adapter/adapter_model.safetensors", pytest.param("samples.jsonl", marks=pytest.mark.torture)]
)
def test_what_was_trained_is_kept_when_its_adapter_or_record_cannot_be(
    commands: Commands, trained: Path, tmp_path: Path, at: str
) -> None:
    run = _copy(trained, tmp_path, without=LATER)
    limit = (trained / at).stat().st_size - 10
    code, answer = _call(commands, limit, "local", "--resume", "--run-dir", str(run))
    assert (code, answer["error"]["code"], "ulimit -f" in answer["error"]["hint"]) == (3, "no_disk", True), answer
    assert not (run / "adapter").exists() and not (run / "train.json").exists()
    assert _call(commands, None, "local", "--resume", "--run-dir", str(run))[0] == 0
    assert list(run.rglob(".*.part")) == []
    weights = "adapter/adapter_model.safetensors"
    assert (run / weights).read_bytes() == (trained / weights).read_bytes()


@pytest.mark.parametrize(
    ("step", "left", "limits"),
    [
        ("merge", ("merged", "merge.json"), (500, 200_000)),
        ("export-gguf", ("gguf", "convert.json", "quantize.json"), (500, 200_000)),
        ("verify", ("verify.json",), (500, 20_000)),
        ("report", (), (500, 60_000)),
    ],
)
def test_each_step_tells_it(
    commands: Commands, trained: Path, tmp_path: Path, step: str, left: tuple[str, ...], limits: Any
) -> None:
    run = _copy(trained, tmp_path, without=left)
    for limit in limits:
        code, answer = _call(commands, limit, step, str(run))
        assert (code, answer["error"]["code"]) == (3, "no_disk"), (limit, answer)
        assert not [name for name in left if (run / name).is_file()]
    code, answer = _call(commands, None, step, str(run))
    assert code == 0, answer


@pytest.mark.parametrize("step", ["verify", "evaluate"])
def test_a_disk_without_room_for_a_record_is_told_before_the_work(
    commands: Commands, trained: Path, tmp_path: Path, step: str
) -> None:
    run = _copy(trained, tmp_path, without=("verify.json",))
    done = commands.run(Path.cwd(), dict(os.environ), step, run, "--format", "json", file_limit=500)
    assert done.error == (3, "no_disk") and str(run) in done.answer["error"]["message"]
    assert not any(word in done.stderr for word in ("verifying:", "evaluating:")), done.stderr


def _copy(run: Path, place: Path, *, without: tuple[str, ...]) -> Path:
    return Path(shutil.copytree(run, place / "run", ignore=lambda _, names: set(names) & {*without, "train.log"}))


def _call(commands: Commands, limit: int | None, *words: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the one document."""
    done = commands.run(Path.cwd(), dict(os.environ), *words, "--format", "json", file_limit=limit)
    return done.code, done.answer
