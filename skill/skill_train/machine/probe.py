"""The queries to the operating system. A recorded machine answers the same queries from a file."""

import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_WSL = "/usr/lib/wsl/lib"  # WSL puts nvidia-smi there, and not every shell has it on PATH
_SECONDS = 10  # nvidia-smi takes 1 to 3 seconds on a machine with eight GPUs


@dataclass(frozen=True)
class ProgramOutput:
    """The exit code of a program and its output."""

    code: int
    text: str


@dataclass(frozen=True)
class Probe:
    """Queries this machine. A recorded machine is a subclass that reads a file."""

    # system, processor: as `platform` names them, such as `Darwin` and `x86_64`
    system: str
    processor: str
    cpus: tuple[int, ...]  # the numbers of the logical processors that this process may use
    environment: Mapping[str, str]
    disk_free_bytes: int | None  # the free space of the current folder; None if it is unknown

    def has(self, program: str) -> bool:
        """Whether a program is installed."""
        return _find(program) is not None

    def ask(self, program: str, *arguments: str) -> ProgramOutput | None:
        """Runs a program; None if it is missing or takes longer than 10 seconds."""
        path = _find(program)
        if path is None:
            return None
        import subprocess  # the import takes 10 ms, which a machine without such tools can save

        environment = dict(os.environ, LC_ALL="C")  # numbers with a point, messages in English
        try:
            done = subprocess.run(
                [path, *arguments], capture_output=True, text=True, errors="replace", timeout=_SECONDS, env=environment
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return ProgramOutput(done.returncode, done.stdout.strip("\n"))

    def read(self, path: str) -> str | None:
        """A small text file; None if it is missing or unreadable."""
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def names(self, folder: str) -> tuple[str, ...]:
        """The sorted names in a folder; empty if it does not exist."""
        try:
            return tuple(sorted(os.listdir(folder)))
        except OSError:
            return ()


def this_machine() -> Probe:
    return Probe(platform.system(), platform.machine(), _cpus(), os.environ, _disk_free())


def _cpus() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _disk_free() -> int | None:
    try:
        return shutil.disk_usage(".").free
    except OSError:
        return None


def _find(program: str) -> str | None:
    return shutil.which(program) or shutil.which(program, path=_WSL)
