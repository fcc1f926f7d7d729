"""Starts a program that serves GGUF files, and ends it."""

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

_END_SECONDS = 10.0
_ASK_SECONDS = 60.0


def version_of(program: str, *words: str) -> str:
    """The last line of the program's output that has the word `version`; empty if there is none."""
    try:
        done = subprocess.run(
            [program, *words], capture_output=True, text=True, check=False, timeout=_ASK_SECONDS, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if "version" in line.lower()]
    return lines[-1] if lines else ""


def run_once(words: list[str], environment: Mapping[str, str], log: Path) -> int:
    """Runs a program to its end, and returns its exit code."""
    with log.open("a", encoding="utf-8") as file:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env={**os.environ, **environment}, check=False
        )
    return done.returncode


def free_port() -> int:
    """A port of this machine that no program uses now."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


@contextlib.contextmanager
def started(words: list[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a program in a new process group. The whole group ends with the block."""
    with (
        log.open("a", encoding="utf-8") as file,
        subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, **environment},
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
