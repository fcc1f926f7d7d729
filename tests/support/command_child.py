"""The command line, many times in one process, so that the libraries load once: a JSON request a line, and its answer.

`Commands` is the parent's side. What must die or run beside another is started by itself, with `program`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PAUSE_SECONDS = 0.05  # in place of the 2 s between two looks for a job
IN_VAIN_SECONDS = 60.0  # as it is
SETTLED_SECONDS = 3.0  # in place of the 120 s in which a job may come that nobody heard of


@dataclass
class Done:
    code: int
    stdout: str
    stderr: str

    @property
    def answer(self) -> dict[str, Any]:
        """The one document on stdout."""
        assert self.stdout.count("\n") == 1 and len(self.stdout.encode()) <= 8192, self.stdout + self.stderr
        document: dict[str, Any] = json.loads(self.stdout)
        return document

    @property
    def data(self) -> dict[str, Any]:
        assert self.code == 0, self.stdout + self.stderr
        return dict(self.answer["data"])

    @property
    def error(self) -> tuple[int, str]:
        """Exit code, and the error's own."""
        return self.code, self.answer["error"]["code"]


class Commands:
    """A child process that runs commands in turn, with an environment that each brings."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._child = subprocess.Popen(
            [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, folder: Path, environment: dict[str, str], *arguments: object, file_limit: int | None = None) -> Done:
        """`file_limit` is the largest size of a file that the command and its children may write."""
        request: dict[str, Any] = {"folder": str(folder), "environment": environment}
        request["arguments"] = [str(argument) for argument in arguments]
        request["file_limit"] = resource.RLIM_INFINITY if file_limit is None else file_limit
        assert self._child.stdin and self._child.stdout
        self._child.stdin.write(json.dumps(request) + "\n")
        self._child.stdin.flush()
        done = Done(**json.loads(self._child.stdout.readline()))
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def close(self) -> None:
        assert self._child.stdin and self._child.stdout
        self._child.stdin.close()
        self._child.stdout.close()
        self._child.wait(20)


def program(*arguments: object) -> list[str]:
    """One command as a process of its own."""
    return [sys.executable, __file__, *map(str, arguments)]


def _run(request: dict[str, Any]) -> dict[str, Any]:
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    out, err = io.StringIO(), io.StringIO()
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_limit"], most))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = _main(request["arguments"])
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, most))
    return {"code": code, "stdout": out.getvalue(), "stderr": err.getvalue()}


def _main(arguments: list[str]) -> int:
    from skill_train.cli import main
    from skill_train.cloud import start_once
    from skill_train.core import waiting
    from skill_train.hub import client as hub_client

    start_once.PAUSE_SECONDS = hub_client.PAUSE_SECONDS = PAUSE_SECONDS
    settled = float(os.environ.get("TEST_SETTLED_SECONDS", SETTLED_SECONDS))
    start_once.SETTLED_LOOKS = round(settled / PAUSE_SECONDS)
    hub_client.REQUEST_SECONDS = float(os.environ.get("TEST_REQUEST_SECONDS", hub_client.REQUEST_SECONDS))
    waiting.IN_VAIN_SECONDS = float(os.environ.get("TEST_IN_VAIN_SECONDS", IN_VAIN_SECONDS))
    hub_client.STALLED_SECONDS, waiting.NOTICE_SECONDS = waiting.IN_VAIN_SECONDS, waiting.IN_VAIN_SECONDS / 6
    if seconds := os.environ.get("TEST_CANCEL_SECONDS"):
        _end_jobs_within(float(seconds))
    if patience := os.environ.get("TEST_PATIENCE_SECONDS"):
        _lose_patience(float(patience))
    try:
        main(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    raise AssertionError("main always exits")


def _end_jobs_within(seconds: float) -> None:
    """A job that is told to end has so long, and not a minute, for its checkpoint."""
    from skill_train.commands import cancel

    cancel.CANCEL_SECONDS = seconds


def _lose_patience(seconds: float) -> None:
    """A Hub that does not answer is given up after so long, and asked often until then, by the client too."""
    from huggingface_hub.utils import _http

    from skill_train.cloud import poll as follow

    _http.time = SimpleNamespace(**vars(time) | {"sleep": lambda pause: time.sleep(min(pause, 0.02))})

    follow.FIRST_PAUSE_SECONDS, follow.LONGEST_PAUSE_SECONDS, follow.OUTAGE_SECONDS = 0.05, 0.2, seconds
    follow.patiently.__kwdefaults__["seconds"] = seconds


def _tell_arguments(path: str) -> None:
    """Of each process that this one starts, as it starts it."""

    def told(name: str, given: tuple[Any, ...]) -> None:
        if name in ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.system"):
            with open(path, "a") as file:
                file.write(json.dumps([name, [str(each) for each in given[:2]]]) + "\n")

    sys.addaudithook(told)


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(_main(sys.argv[1:]))
    if place := os.environ.get("TEST_ARGUMENTS"):
        _tell_arguments(place)
    answers = sys.stdout
    for line in sys.stdin:
        answers.write(json.dumps(_run(json.loads(line))) + "\n")
        answers.flush()
