"""What stands for Python in tests starts the same program, and ends as it ends."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import warm_start

pytestmark = pytest.mark.slow

SHOW = """
import json, os, sys
os.write(int(sys.argv[1]), b"kept")
print(json.dumps([sys.argv, os.getcwd(), os.environ["OWN"], sys.stdin.read(), "torch" in sys.modules]))
print("to stderr", file=sys.stderr)
sys.exit(7)
"""
SLEEP = """
import os, signal, time
signal.signal(signal.SIGINT, signal.SIG_DFL)
print(os.getpid(), flush=True)
time.sleep(60)
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(warm_python: Path, tmp_path: Path) -> Start:
    def started(source: str, *words: str, pass_fds: tuple[int, ...] = (), **more: str) -> subprocess.Popen[str]:
        (tmp_path / "train.py").write_text(source)
        return subprocess.Popen(
            [str(warm_python), str(tmp_path / "train.py"), *words],
            env=os.environ | warm_start.OF_CHILDREN | {"OWN": "value"} | more,
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=pass_fds,
        )

    return started


def test_arguments_files_and_exit_code(start: Start, tmp_path: Path) -> None:
    read, write = os.pipe()
    process = start(SHOW, str(write), pass_fds=(write,))
    out, err = process.communicate("from stdin")
    os.close(write)
    assert os.read(read, 10) == b"kept"
    assert json.loads(out) == [[str(tmp_path / "train.py"), str(write)], str(tmp_path), "value", "from stdin", True]
    assert (process.returncode, err) == (7, "to stderr\n")


def test_the_limit_of_the_size_of_files(start: Start, tmp_path: Path) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, most))
    process = start("import resource; print(resource.getrlimit(resource.RLIMIT_FSIZE)[0])")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, most))
    assert process.communicate()[0] == "5000\n"


def test_another_environment_of_the_libraries_is_left_to_python(start: Start) -> None:
    process = start("import sys; print('torch' in sys.modules)", HF_ENDPOINT="http://127.0.0.1:1")
    assert process.communicate()[0] == "False\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_reaches_the_program(start: Start, number: int) -> None:
    process = start(SLEEP)
    assert process.stdout is not None
    other = Path("/proc") / process.stdout.readline().strip()
    process.send_signal(number)
    assert process.wait(20) == -number
    end = time.monotonic() + 10
    while other.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not other.exists()


def test_an_error_keeps_its_traceback(start: Start) -> None:
    process = start("raise ValueError('so')")
    _, err = process.communicate()
    assert process.returncode == 1 and "ValueError: so" in err
