"""One process at a time in a run directory: the second is told who is there, also when that one was left behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import containers
from one_command import answered, called
from skill_train.core.errors import UsageError
from skill_train.core.files import place
from skill_train.core.resources import demo
from skill_train.run.folder import RunDir
from skill_train.run.lock import is_locked, locked

TINY = Path(__file__).resolve().parent.parent / "support" / "data" / "runs" / "tiny"
HOLD = (
    "import pathlib, sys; from skill_train.run.folder import RunDir; from skill_train.run.lock import locked\n"
    "with locked(RunDir(pathlib.Path(sys.argv[1])), 'merge'):\n"
    "    print('held', flush=True); sys.stdin.read()\n"
)


def test_a_second_process_is_refused_and_told_who_works_there(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UsageError) as caught, locked(RunDir(tmp_path), "verify"):
            raise AssertionError("must not be entered")
        assert caught.value.code == "run_in_use"
        assert f"process {holder.pid} on {socket.gethostname()} (skill-train merge)" in caught.value.message
        holder.kill()
        holder.wait()
        with locked(RunDir(tmp_path), "verify"):  # a killed process leaves no lock
            pass


def test_a_lock_ends_with_its_block(tmp_path: Path) -> None:
    for command in ("merge", "verify"):
        with locked(RunDir(tmp_path / "run"), command):
            pass
    assert (tmp_path / "run" / ".lock").read_text().endswith("(skill-train verify)")


@pytest.mark.parametrize("gone", [".lock", "."])
def test_a_lock_on_a_file_that_is_gone_is_no_lock(tmp_path: Path, gone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was refused takes its files away while another process waits for its lock."""
    run = RunDir(tmp_path / "run")
    first = locked(run, "local")
    first.__enter__()

    def refused(seconds: float) -> None:
        (shutil.rmtree if gone == "." else os.unlink)(run.path / gone)
        first.__exit__(None, None, None)

    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", refused)
        second = locked(run, "merge")
        second.__enter__()
    with pytest.raises(UsageError) as caught, locked(run, "verify"):
        raise AssertionError("must not be entered")
    assert caught.value.got.endswith("(skill-train merge)")
    second.__exit__(None, None, None)


HOLD_OUT = (
    "import pathlib, sys; from skill_train.run.lock import locked_out\n"
    "with locked_out(pathlib.Path(sys.argv[1]), 'merge'):\n"
    "    print('held', flush=True); sys.stdin.read()\n"
)


def test_two_commands_do_not_make_one_result(tmp_path: Path) -> None:
    out = tmp_path / "new" / "merged"
    command = [sys.executable, "-c", HOLD_OUT, str(out)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None and holder.stdout is not None and holder.stdout.readline() == "held\n"
        code, answer = answered("merge", "--base", demo() / "model", "--adapter", "x", "--out", out)
        error = answer["error"]
        assert (code, error["code"]) == (2, "run_in_use") and f"process {holder.pid} " in error["message"]
        assert "another --out" in error["hint"]
        holder.stdin.close()
        holder.wait(20)
    assert list(tmp_path.iterdir()) == []  # neither the lock stays, nor a folder that was made for it


@pytest.mark.skipif(not containers.possible(), reason="needs namespaces of processes")
def test_a_lock_of_another_container_is_not_called_a_leftover(tmp_path: Path) -> None:
    """The number of its process may be of nobody here. It is no sign that the command has ended."""
    with subprocess.Popen(["true"]) as gone:
        pass
    with locked(RunDir(tmp_path), "local") as lock:
        assert lock is not None
        lock.seek(0)
        lock.truncate()
        lock.write(
            f"{place()}\nprocess {gone.pid} on {socket.gethostname()} (skill-train local), training in process 1"
        )
        lock.flush()
        program = (
            "import sys; from pathlib import Path; from skill_train.run.folder import RunDir\n"
            "from skill_train.core.errors import UsageError; from skill_train.run.lock import locked\n"
            "try:\n    locked(RunDir(Path(sys.argv[1])), 'local').__enter__()\n"
            "except UsageError as error:\n    print(error.message, error.hint, sep='|')\n"
        )
        here = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True).stdout
        there = containers.run([sys.executable, "-c", program, str(tmp_path)]).stdout
    assert "a command was killed" in here
    assert "in another container" in there and "a command was killed" not in there


LEFT_BEHIND = (
    "import pathlib, sys; from skill_train.train import local; from skill_train.run.folder import RunDir\n"
    "from skill_train.run.plan_record import Launch\n"
    "from skill_train.run.lock import locked\n"
    "training = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
    "with locked(RunDir(pathlib.Path(sys.argv[1])), 'local') as lock:\n"
    "    with local._child(training, Launch(), None, lock) as child:\n"
    "        print(child.process.pid, flush=True); sys.stdin.read()\n"
)


def test_a_training_that_was_left_behind_still_has_the_folder(tmp_path: Path) -> None:
    """The system kills the command alone. A second one beside its training would write the same checkpoints."""
    command = [sys.executable, "-c", LEFT_BEHIND, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        training = int(parent.stdout.readline())
        parent.kill()
    assert is_locked(RunDir(tmp_path))
    with pytest.raises(UsageError) as caught, locked(RunDir(tmp_path), "local"):
        raise AssertionError("must not be entered")
    assert caught.value.code == "run_in_use"
    assert caught.value.got.startswith(f"process {parent.pid} on ")
    assert caught.value.got.endswith(f"training in process {training}")
    assert caught.value.hint.startswith("a command was killed, and its training is saving a checkpoint")
    os.kill(training, signal.SIGKILL)
    while is_locked(RunDir(tmp_path)):
        pass
    with locked(RunDir(tmp_path), "local"):
        pass


@pytest.mark.parametrize(
    "command",
    [("merge",), ("verify",), ("evaluate",), ("export-gguf",), ("export-gguf", "--lora")],
    ids=" ".join,
)
def test_no_step_starts_beside_another(tmp_path: Path, command: tuple[str, ...]) -> None:
    run = RunDir(tmp_path / "run")
    shutil.copytree(TINY, run.path)
    before = sorted(run.path.iterdir())
    with locked(run, "another command") as lock:
        assert lock is not None
        done = called(*command, run.path, "--format", "json")
    assert done.code == 2, done
    assert '"code": "run_in_use"' in done.stdout and f"process {os.getpid()} on " in done.stdout
    assert sorted(path for path in run.path.iterdir() if path.name != ".lock") == before


@pytest.mark.parametrize("end", [None, FileNotFoundError("a file of the run")])
def test_a_run_that_is_moved_is_named_instead_of_the_files_that_are_missing(
    tmp_path: Path, end: Exception | None
) -> None:
    """A step would find no files, or write its record into another folder and call its verdict that of the run."""
    run = RunDir(shutil.copytree(TINY, tmp_path / "run"))
    with pytest.raises(UsageError) as caught, locked(run, "verify"):
        run.path.rename(tmp_path / "moved")
        if end is not None:
            raise end
    assert caught.value.code == "not_a_run" and "moved, renamed or removed" in caught.value.message


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="no folder that root may not write either")
def test_what_cannot_be_written_is_not_locked() -> None:
    """A proof that is there already can be read in a folder of somebody else."""
    with locked(RunDir(Path("/sys")), "verify") as lock:
        assert lock is None


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("merge", "wait for it to end"),
        ("export-gguf", "wait for it to end"),
        ("verify", "wait for it to end"),
        ("evaluate", "wait for it to end"),
        ("local", "wait for it to end, or use another --run-dir"),
        ("submit", "wait for it to end, or use another --run-dir"),
    ],
)
def test_another_run_directory_is_named_to_commands_that_take_one(tmp_path: Path, command: str, hint: str) -> None:
    with locked(RunDir(tmp_path), "local"), pytest.raises(UsageError) as caught, locked(RunDir(tmp_path), command):
        raise AssertionError("must not be entered")
    assert caught.value.hint == hint
