"""`export-gguf` that is killed while it measures: nothing half has a final name, and the same command again ends with
the bytes of an undisturbed one. The long campaign is `make torture`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

import killing
import shared_runs
from command_child import Commands

pytestmark = pytest.mark.slow


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a run that was never quantized."""
    run = Path(shutil.copytree(shared_runs.chain().run, tmp_path / "place" / "run"))
    records = [run / name for name in ("quantize.json", "imatrix.json", "imatrix.gguf", "gguf/Modelfile")]
    for made in (*records, *run.glob("gguf/*-q*.gguf")):
        made.unlink()
    return run.parent


@pytest.mark.parametrize(
    ("step", "words", "made"),
    [
        ("lora_gguf", ("--lora",), "run-lora-f16.gguf"),
        ("convert", ("--quant", "f16"), "run-f16.gguf"),
        ("quantize", ("--quant", "q4_0"), "run-q4_0.gguf"),
    ],
)
def test_a_file_that_was_made_is_taken_without_its_record(
    place: Path, commands: Commands, step: str, words: tuple[str, ...], made: str
) -> None:
    """A kill came between the two. The file is finished by its note, and not made again beside itself."""
    run, file = place / "run", place / "run" / "gguf" / made
    if step == "convert":
        for path in (file, run / "convert.json"):
            path.unlink()
    command = ("export-gguf", "run", *words)
    assert commands.run(place, dict(os.environ), *command).code == 0
    undisturbed = json.loads((run / f"{step}.json").read_text())
    (run / f"{step}.json").rename(run / f".{made}.made.json")
    before = file.stat()
    done = commands.run(place, dict(os.environ), *command, "--format", "json")
    assert done.code == 0 and "set_aside" not in {each["code"] for each in done.answer["warnings"]}, done.stdout
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert json.loads((run / f"{step}.json").read_text())["outputs"] == undisturbed["outputs"]
    assert not [path for path in run.rglob("*") if ".unrecorded-" in path.name or ".made." in path.name]


@pytest.mark.torture
def test_a_matrix_and_a_mix_go_on_where_they_were_killed(place: Path, tmp_path: Path, commands: Commands) -> None:
    """First the matrix has its name and no record. Then the command ends by SIGTERM between two figures, and a half
    line is left of the next one."""
    run, other = place / "run", Path(shutil.copytree(place, tmp_path / "undisturbed"))
    assert commands.run(other, dict(os.environ), *killing.MIX).code == 0
    whole = {name: {digest} for name, digest in killing.contents(other / "run").items()}
    step = killing.Step("mix", killing.MIX, place, dict(os.environ))

    moment = killing.Moment(operation="os.rename .imatrix.gguf.made.json")
    assert not killing.struck(step, place, tmp_path / "log", moment)
    assert (run / "imatrix.gguf").is_file() and not (run / "imatrix.json").exists()
    assert killing.torn(run, whole) == []
    matrix = (run / "imatrix.gguf").stat().st_ino

    child = killing.start(step, place, tmp_path / "second log")
    measured = run / "sensitivity.jsonl"
    while not measured.is_file() or len(measured.read_text().splitlines()) < 6:
        assert child.poll() is None
        time.sleep(0.01)
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=60)
    assert killing.torn(run, whole) == [] and not (run / "quantize.json").exists()
    figures = measured.read_text().splitlines()
    assert len(figures) < len((other / "run" / "sensitivity.jsonl").read_text().splitlines())
    measured.write_text("\n".join(figures)[:-7])  # the kill came in the middle of a line

    assert killing.finish(step, place) == []
    assert killing.differences(killing.state(other / "run"), killing.state(run)) == []
    assert killing.torn(run, whole) == [] and (run / "imatrix.gguf").stat().st_ino == matrix
    assert not [path for path in run.rglob(".*") if path.name != ".lock"]
