"""The lock of a run directory, or of a folder for results: one process at a time, and who it is."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from skill_train.core.errors import UsageError
from skill_train.core.files import is_alive, place
from skill_train.run.folder import RunDir

_TRIES = 5


@contextlib.contextmanager
def locked(run: RunDir, command: str) -> Iterator[TextIO | None]:
    """One process at a time in a run directory. The lock is the system's own, so a killed process leaves none behind.

    Yields the lock: a child that inherits it holds it as long as it lives, also when this process is killed. None where
    there is none: in a folder that cannot be written, and on Windows, which has no flock.

    Raises:
        UsageError: another process holds it; the message names it.
    """
    with _locked(run.path / ".lock", run.path, "another --run-dir", command) as file:
        yield file


@contextlib.contextmanager
def locked_out(out: Path, command: str) -> Iterator[None]:
    """As `locked`, of a folder for results that is no run. The lock lies beside it, and goes with the command.

    Raises:
        UsageError: another process makes something there; the message names it.
    """
    out = out.resolve()
    if not out.name:  # the root of a disk, which the command refuses
        yield
        return
    lock = out.with_name(f".{out.name}.lock")
    made = [folder for folder in lock.parents if not folder.exists()]
    try:
        with _locked(lock, out, "another --out", command) as file:
            try:
                yield
            finally:
                if file is not None and file.writable():
                    lock.unlink(missing_ok=True)
    finally:
        for folder in made:
            with contextlib.suppress(OSError):  # there is something in it now
                folder.rmdir()


@contextlib.contextmanager
def _locked(lock: Path, subject: Path, otherwise: str, command: str) -> Iterator[TextIO | None]:
    import socket

    file = None if importlib.util.find_spec("fcntl") is None else _held(lock, subject, otherwise)
    if file is None:
        yield None
        return
    with file:
        if file.writable():
            file.truncate(0)
            file.write(f"{place()}\nprocess {os.getpid()} on {socket.gethostname()} (skill-train {command})")
            file.flush()
        yield file


def is_locked(run: RunDir) -> bool | None:
    """Whether a process works in it now; None where locks do not tell."""
    lock = run.path / ".lock"
    try:
        import fcntl

        with open(lock, encoding="utf-8", opener=_at_once) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # given back at once, with the file
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except (ImportError, OSError):
        return None
    return False


def _at_once(path: str, flags: int) -> int:
    """A pipe in the place of a lock is not waited for."""
    return os.open(path, flags | os.O_NONBLOCK)


def _held(lock: Path, subject: Path, otherwise: str) -> TextIO | None:
    """The lock, taken. Who held it before may have removed the file and the folder: a lock on a file without a name
    would keep out nobody."""
    for left in reversed(range(_TRIES)):
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = _lock_file(lock)
        if file is not None and not _taken(file):
            with file:
                raise _in_use(subject, otherwise, file)
        if left == 0 or (lock.parent.is_dir() if file is None else _has_name(file, lock)):
            return file
        if file is not None:
            file.close()
    return None


def _has_name(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def _lock_file(path: Path) -> TextIO | None:
    """Open for writing; for reading where it is somebody else's; None where nothing can be written."""
    for mode in ("a+", "r"):
        try:
            return open(path, mode, encoding="utf-8")
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT):
                raise
    return None


def _taken(lock: TextIO) -> bool:
    """Tries twice: `is_locked` of another process may hold it for a moment."""
    import fcntl

    for pause in (0.05, 0.0):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(pause)
        except OSError:  # a file system without locks, such as some of networks: two processes are not told apart
            return True
    return False


def _was_left(where: str, holder: str) -> bool:
    """The command that took the lock has ended, and the training that it started has not. The number of a process says
    nothing of one in another container."""
    found = re.fullmatch(r"process (\d+) on .+ \(skill-train \w+\), training in process \d+", holder)
    return found is not None and where == place() and not is_alive(int(found[1]))


def _in_use(subject: Path, otherwise: str, lock: TextIO) -> UsageError:
    lock.seek(0)
    where, _, holder = lock.read().partition("\n")
    left = "a command was killed, and its training is saving a checkpoint: run the same command again in a moment"
    elsewhere = "" if where == place() else ", in another container or on another machine"
    return UsageError(
        f"{subject} is in use by {holder or 'another process'}{elsewhere}",
        code="run_in_use",
        expected="one process for each folder",
        got=holder or "another process",
        hint=left if _was_left(where, holder) else f"wait for it to end, or use {otherwise}",
    )
