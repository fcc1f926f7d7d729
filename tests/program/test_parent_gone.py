"""A training whose `skill-train` is gone: it saves a checkpoint, says so, and gives the folder free."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import tiny
import training
from command_child import program
from skill_train.run.folder import RunDir
from skill_train.run.lock import is_locked

pytestmark = [pytest.mark.slow, pytest.mark.real_python]

STEPS = 100
SOON = 30  # seconds, on a busy machine


@pytest.fixture
def _hears_of_its_terminal() -> Iterator[None]:
    """What `nohup` ignores for the tests, the commands that they start would ignore too."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_it_stops_at_a_checkpoint_and_goes_on_at_once(warm_python: Path, tmp_path: Path) -> None:
    _write(tmp_path)
    processes = _kill(tmp_path, "training: ", signal.SIGKILL)
    run = tmp_path / "run"
    _, alive = psutil.wait_procs(processes, timeout=SOON)
    assert alive == [] and is_locked(RunDir(run)) is False
    error = _failed(run)
    assert error["code"] == "interrupted" and "command that started it has ended" in error["message"]
    step = _newest(run)
    assert 0 < step < STEPS
    assert "Traceback" not in (run / "train.log").read_text()
    command = [str(warm_python), *program("local", "--resume", "--run-dir", "run", "--format", "json")[1:]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert json.loads(done.stdout)["data"]["steps"] == STEPS and f"resuming from checkpoint-{step}" in done.stderr
    assert [line["step"] for line in training.metrics(run)] == list(range(1, STEPS + 1))


@pytest.mark.parametrize(
    ("at", "how"),
    [
        ("training: ", signal.SIGHUP),
        ("loading the model", signal.SIGTERM),
        pytest.param("training: ", signal.SIGTERM, marks=pytest.mark.torture),
        pytest.param("loading the model", signal.SIGHUP, marks=pytest.mark.torture),
    ],
)
@pytest.mark.usefixtures("_hears_of_its_terminal")
def test_a_command_that_is_asked_to_end_says_how_to_go_on(warm_python: Path, tmp_path: Path, how: int, at: str) -> None:
    """A terminal that closes, and a polite kill: one document, the checkpoint, the command that resumes."""
    _write(tmp_path)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with _started(tmp_path, warm_python, pipes) as process:
        next(line for line in process.stderr or () if line.startswith(at))
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(how)
        assert process.stderr is not None and process.stdout is not None
        process.stderr.close()  # as a terminal that is gone: what is said from here on reaches nobody
        document = json.loads(process.stdout.read())
        process.wait(SOON)
    assert psutil.wait_procs(started, timeout=SOON)[1] == [] and is_locked(RunDir(tmp_path / "run")) is False
    assert "error" in document, (tmp_path / "run" / "train.log").read_text()[-4000:]
    error = document["error"]
    assert (process.returncode, error["code"]) == (5, "interrupted")
    assert "skill-train local --resume --run-dir run" in error["hint"]
    assert (_newest(tmp_path / "run") > 0) == (at == "training: ")


def test_before_its_first_step_it_ends_at_once(warm_python: Path, tmp_path: Path) -> None:
    """There is nothing to save yet."""
    _write(tmp_path)
    processes = _kill(tmp_path, "loading the model", signal.SIGKILL, training=warm_python)
    _, alive = psutil.wait_procs(processes, timeout=SOON)
    assert alive == [] and is_locked(RunDir(tmp_path / "run")) is False
    assert "command that started it has ended" in _failed(tmp_path / "run")["message"]


def test_all_of_several_processes_end(tmp_path: Path) -> None:
    """The launcher of accelerate, and both processes that it started."""
    values = {"max_steps": STEPS, "save_steps": STEPS, "split": (2, 1, 2)}
    training.write_run(tmp_path / "run", base=tiny.cached("gemma"), **values)
    processes = _kill(tmp_path, "training: ", signal.SIGKILL, driver=True)
    assert len(processes) == 3
    _, alive = psutil.wait_procs(processes, timeout=SOON)
    assert alive == [] and is_locked(RunDir(tmp_path / "run")) is False
    assert "command that started it has ended" in _failed(tmp_path / "run")["message"]
    assert 0 < _newest(tmp_path / "run") < STEPS


def test_a_program_that_nobody_attends_trains_to_its_end(tmp_path: Path) -> None:
    """In a cloud job, or by hand in the background: its standard input is closed from the start.

    Its output is events alone, which may fail to be written. A print of a library would end the training.
    """
    run = training.write_run(tmp_path / "run", max_steps=2)
    from skill_train.machine.training_program import train_program

    command = [program()[0], str(train_program()), str(run / "plan.json")]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert json.loads((run / "train.json").read_text())["steps"] == 2
    assert all("event" in json.loads(line) for line in done.stdout.splitlines())


def _write(folder: Path) -> None:
    tiny.write_rows(folder / "rows.jsonl", 24)
    recipe = f"model: {tiny.cached('gemma')}\ndata: rows.jsonl\nmax_steps: {STEPS}\neffective_batch_size: 2\n"
    (folder / "recipe.yaml").write_text(recipe + "max_length: 96\n")


# `local` with a plan for two processes on this processor, which the planner makes for GPUs alone.
_DRIVER = """
import json, sys
from pathlib import Path
from skill_train.train import local
from skill_train.run import plan_record
from skill_train.run.folder import RunDir
plan = plan_record.read(Path("run/plan.json"))
tell = lambda step, *_: print(f"training: {step}", file=sys.stderr, flush=True)
local.train(RunDir(Path("run")), plan, resume=False, progress=tell, say=lambda _: None)
"""


def _kill(
    folder: Path, at: str, how: int, *, driver: bool = False, training: Path | None = None
) -> list[psutil.Process]:
    """Kills the command alone when it says something that begins so. Returns all that it had started.

    A test that the system left waiting can be too late: the whole training takes 5 s. It then begins again.
    """
    fresh = folder / "fresh"
    shutil.copytree(folder / "run", fresh) if driver else fresh.mkdir()
    for _ in range(3):
        started = _kill_once(folder, at, how, driver=driver, training=training)
        steps = folder / "run" / "metrics.jsonl"
        if not steps.is_file() or steps.read_text().count("\n") < STEPS / 2:
            return started
        psutil.wait_procs(started)
        shutil.rmtree(folder / "run")
        shutil.copytree(fresh, folder / "run")
    raise AssertionError(f"three times the test heard {at!r} only after half of the training")


def _kill_once(folder: Path, at: str, how: int, *, driver: bool, training: Path | None) -> list[psutil.Process]:
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with _started(folder, training, pipes, *(["-c", _DRIVER] if driver else ())) as process:
        for line in process.stderr or ():
            if line.startswith(at):
                started = psutil.Process(process.pid).children(recursive=True)
                process.send_signal(how)
                break
        process.wait(timeout=SOON)
    assert process.returncode == -how
    return started


def _started(folder: Path, training: Path | None, pipes: dict[str, Any], *words: str) -> subprocess.Popen[str]:
    """The command, or other words, in a process of its own, which starts the training with this Python or its own."""
    own, *local = program("local", "recipe.yaml", "--run-dir", "run", "--format", "json")
    command = [str(training or own), *(words or local)]
    return subprocess.Popen(command, executable=own, cwd=folder, start_new_session=True, **pipes)


def _failed(run: Path) -> dict[str, str]:
    end = time.monotonic() + SOON
    while not (run / "train.failed.json").is_file() and time.monotonic() < end:
        time.sleep(0.1)
    assert (run / "train.failed.json").is_file(), (run / "train.log").read_text()[-4000:]
    return dict(json.loads((run / "train.failed.json").read_text())["error"])


def _newest(run: Path) -> int:
    return max((int(p.parent.name.split("-")[1]) for p in run.glob("checkpoints/*/complete.json")), default=0)
