"""Programs in forks of one process that has imported torch, and nothing that looks for an optional package or reads an
environment: for tests of what transformers finds when it is imported.

`TorchForks` is the parent's side; see `warm_start.py` for all other programs.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from warm_start import FIRST


class TorchForks:
    """A child process that runs programs in turn, each in a fork of its own."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._child = subprocess.Popen(
            [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, folder: Path, environment: dict[str, str], *words: object) -> subprocess.CompletedProcess[str]:
        """What Python would be given: `-c` and a program or the path of one, and its arguments. Its output goes through
        files of this folder."""
        files = [folder / "stdout", folder / "stderr"]
        arguments = [str(word) for word in words]
        request = {"arguments": arguments, "environment": environment, "files": list(map(str, files))}
        assert self._child.stdin and self._child.stdout
        self._child.stdin.write(json.dumps(request | {"folder": os.getcwd()}) + "\n")
        self._child.stdin.flush()
        code = int(self._child.stdout.readline())
        return subprocess.CompletedProcess(arguments, code, *(file.read_text(encoding="utf-8") for file in files))

    def close(self) -> None:
        assert self._child.stdin and self._child.stdout
        self._child.stdin.close()
        self._child.stdout.close()
        self._child.wait(20)


def _serve() -> None:
    for name in FIRST["training"]:
        __import__(name)
    assert not {"transformers", "kernels"} & set(sys.modules)
    answers = os.dup(1)
    for line in sys.stdin:
        number = os.fork()
        if number == 0:
            os._exit(_run(json.loads(line)))
        _, status = os.waitpid(number, 0)
        os.write(answers, f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _run(request: dict[str, Any]) -> int:
    """The exit code of the program."""
    for number, path in zip((0, 1, 2), (os.devnull, *request["files"]), strict=True):
        file = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # torch has looked for it
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
    first, *rest = request["arguments"]
    sys.argv = ["-c", *rest[1:]] if first == "-c" else [first, *rest]
    code: object = 0
    try:
        if first == "-c":
            exec(rest[0], {"__name__": "__main__"})  # noqa: S102 - as Python does
        else:
            runpy.run_path(first, run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    except BaseException:  # noqa: BLE001 - Python ends so; its own end would take torch apart, for a second
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else 1


if __name__ == "__main__":
    _serve()
