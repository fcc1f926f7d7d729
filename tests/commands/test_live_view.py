"""`status` on a real terminal: it draws a run again while it trains, and ends with it; Ctrl-C ends the watching."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import shutil
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import cloud_runs
import planning
import step_records
from skill_train.run import records
from skill_train.run.folder import RunDir
from skill_train.run.lock import locked

pytestmark = pytest.mark.slow

PROGRAM = "from skill_train.cli import main; main()"
FIRST_LOOK_SECONDS = 60.0


@dataclass
class Screen:
    """A command on a terminal of its own, and all that it wrote there."""

    process: subprocess.Popen[bytes]
    keyboard: int
    text: str = ""

    def shows(self, words: str) -> bool:
        """Reads until the words are there; False when the terminal is closed or a minute is over."""
        end = time.monotonic() + FIRST_LOOK_SECONDS
        while words not in self.text and time.monotonic() < end:
            if not select.select([self.keyboard], [], [], 0.2)[0]:
                continue
            try:
                self.text += os.read(self.keyboard, 65536).decode(errors="replace")
            except OSError:  # the other end is closed
                break
        return words in self.text

    def ends(self) -> int:
        self.shows("\0")  # never there: everything that comes until the end
        return self.process.wait(timeout=30)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of ten steps that is at its fourth."""
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.plan.write_text(json.dumps(planning.plan_document(recipe={"max_steps": 10})))
    run.metrics.write_bytes(cloud_runs.metrics(4))
    return run


@pytest.fixture
def screens() -> Iterator[list[Screen]]:
    opened: list[Screen] = []
    yield opened
    for screen in opened:
        screen.process.kill()
        os.close(screen.keyboard)


def _on_a_terminal(screens: list[Screen], *words: str) -> Screen:
    keyboard, screen = pty.openpty()
    termios.tcsetwinsize(screen, (40, 120))

    def own_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words],
        stdin=screen,
        stdout=screen,
        stderr=screen,
        start_new_session=True,
        preexec_fn=own_terminal,
        env=os.environ | {"TERM": "xterm"},
    )
    os.close(screen)
    screens.append(Screen(process, keyboard))
    return screens[-1]


def test_it_follows_a_run_to_its_end(run: RunDir, screens: list[Screen]) -> None:
    with locked(run, "local"):
        screen = _on_a_terminal(screens, "status", str(run.path))
        assert screen.shows("4 of 10") and screen.shows("Ctrl-C stops looking")
        run.metrics.write_bytes(cloud_runs.metrics(7))
        assert screen.shows("7 of 10")
        run.metrics.write_bytes(cloud_runs.metrics(10))
        run.adapter.mkdir()
        ended = RunDir(Path(shutil.copytree(run.path, run.path.with_name("ended"))))
        records.write(ended.record("train"), step_records.trained({}))
        planning.write_recipe_hash(ended.path)
        ended.record("train").rename(run.record("train"))  # it may be looked at in any moment
    assert screen.ends() == 0
    last = screen.text.rpartition("stage")[2]
    assert "COMPLETED" in last and "10 of 10" in last and "next: skill-train export-gguf" in last


def test_ctrl_c_ends_the_watching(run: RunDir, screens: list[Screen]) -> None:
    with locked(run, "local"):
        screen = _on_a_terminal(screens, "status", str(run.path))
        assert screen.shows("Ctrl-C stops looking")
        os.write(screen.keyboard, termios.tcgetattr(screen.keyboard)[6][termios.VINTR])
        assert screen.ends() == 0
    last = screen.text.rpartition("stage")[2]
    assert "RUNNING" in last and f"next: skill-train status {run.path}" in last


PRESSED_ANYWHERE = """
import signal, sys
from skill_train.core.console import _ctrl_c

def press_at(number):
    lines = 0
    def trace(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        if lines == number and event == "line":
            signal.raise_signal(signal.SIGINT)
        return trace
    with _ctrl_c() as pressed:
        sys.settrace(trace)
        told = pressed.wait(0.05)
        sys.settrace(None)
    assert told or lines < number
    return lines >= number

number = 1
while press_at(number) and number < 100:
    number += 1
print("lines", number - 1)
"""


def test_ctrl_c_is_heard_in_whatever_line_the_waiting_is() -> None:
    """A lock that the waiting holds, and that the handler wants too, would never be free."""
    done = subprocess.run([sys.executable, "-c", PRESSED_ANYWHERE], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and int(done.stdout.split()[1]) > 2, done.stdout + done.stderr


def test_a_run_that_nobody_trains_is_shown_once(run: RunDir, screens: list[Screen]) -> None:
    """Such as one whose process was killed: to wait for it would never end."""
    screen = _on_a_terminal(screens, "status", str(run.path))
    assert screen.ends() == 0
    assert "STOPPED: no process trains it any more" in screen.text and "Ctrl-C" not in screen.text


def test_without_a_terminal_it_looks_once(run: RunDir) -> None:
    with locked(run, "local"):
        words = [sys.executable, "-c", PROGRAM, "status", str(run.path)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=FIRST_LOOK_SECONDS)
    data = json.loads(done.stdout)["data"]
    assert (done.returncode, data["stage"], data["step"]) == (0, "RUNNING", 4)


def test_looking_disturbs_no_start(run: RunDir) -> None:
    """A look holds the lock for a moment; a command that starts in that moment is not refused."""
    looking = "import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_SH); print(1, flush=True)"
    (run.path / ".lock").touch()
    words = [sys.executable, "-c", f"{looking}; sys.stdin.read(1)", str(run.path / ".lock")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None and other.stdout is not None
        other.stdout.readline()
        threading.Timer(0.01, other.kill).start()
        with locked(run, "local"):
            pass
