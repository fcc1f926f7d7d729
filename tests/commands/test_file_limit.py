"""A limit of the size of files, which a system or a container may set: wherever a step meets it, it is told like a full
disk, nothing half-written stays under a final name, and with a higher limit the same command ends well."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tiny

pytestmark = pytest.mark.slow

PROGRAM = [sys.executable, "-c", "from skill_train.cli import main; main()"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is trained and exported."""
    place = tmp_path_factory.mktemp("limit")
    rows, run = tiny.write_rows(place / "rows.jsonl", 24), place / "run"
    words = ("--model", str(tiny.cached("gemma")), "--data", str(rows), "--max-steps", "4", "--run-dir", str(run))
    assert _call(None, "local", *words)[0] == 0
    assert _call(None, "export-gguf", str(run), "--quant", "f16")[0] == 0
    return run


@pytest.mark.parametrize("at", ["samples.jsonl", "adapter/adapter_model.safetensors"])
def test_what_was_trained_is_kept_when_its_adapter_or_record_cannot_be(trained: Path, tmp_path: Path, at: str) -> None:
    run = _copy(trained, tmp_path, without=("train.json", "adapter", "merged", "merge.json", "gguf", "convert.json"))
    limit = (trained / at).stat().st_size - 10
    code, answer = _call(limit, "local", "--resume", "--run-dir", str(run))
    assert (code, answer["error"]["code"], "ulimit -f" in answer["error"]["hint"]) == (3, "no_disk", True), answer
    assert not (run / "adapter").exists() and not (run / "train.json").exists()
    assert _call(None, "local", "--resume", "--run-dir", str(run))[0] == 0
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
def test_each_step_tells_it(trained: Path, tmp_path: Path, step: str, left: tuple[str, ...], limits: Any) -> None:
    run = _copy(trained, tmp_path, without=left)
    for limit in limits:
        code, answer = _call(limit, step, str(run))
        assert (code, answer["error"]["code"]) == (3, "no_disk"), (limit, answer)
        assert not [name for name in left if (run / name).is_file()]
    code, answer = _call(None, step, str(run))
    assert code == 0, answer


def _copy(run: Path, place: Path, *, without: tuple[str, ...]) -> Path:
    return Path(shutil.copytree(run, place / "run", ignore=lambda _, names: set(names) & {*without, "train.log"}))


def _call(limit: int | None, *words: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the one document."""

    def bound() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    command = [*PROGRAM, *words, "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, preexec_fn=bound)
    assert "Traceback" not in done.stderr, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, answer
