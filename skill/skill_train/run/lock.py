"""The lock of a run directory, or of a folder for results. One process at a time can hold it. The lock file names that
process."""

import contextlib
import errno
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from skill_train.core.errors import UsageError, quoted
from skill_train.core.files import is_alive, place
from skill_train.run.folder import RunDir

_TRIES = 5
_WITH_RUN_DIR = ("local", "submit", "resume", "pull")  # commands with the option --run-dir
_WITH_OUT = ("merge", "export-gguf")


@contextlib.contextmanager
def locked(run: RunDir, command: str) -> Iterator[TextIO | None]:
    """Lets one process at a time work in a run directory. The system releases the lock of a killed process.

    Yields the lock file. A child that inherits it holds the lock as long as the child lives, even if this process is
    killed. Yields None in a folder that cannot be written, where there is no lock.

    Raises:
        UsageError: another process holds the lock; the message names it. Or the run was moved or removed meanwhile.
    """
    otherwise = ", or use another --run-dir" if command in _WITH_RUN_DIR else ""
    with _locked(run.path / ".lock", run.path, otherwise, command) as file:
        was_run = RunDir.is_one(run.path)
        try:
            yield file
        finally:
            if was_run and not RunDir.is_one(run.path):
                raise _gone(run.path, command)  # the cause of other errors, such as a file that is missing


@contextlib.contextmanager
def locked_out(out: Path, command: str) -> Iterator[None]:
    """As `locked`, for a folder for results that is not a run. The lock file is beside the folder, and is removed at
    the end.

    Raises:
        UsageError: another process holds the lock; the message names it.
    """
    out = out.resolve()
    if not out.name:  # the root of a disk: the command refuses it later
        yield
        return
    lock = out.with_name(f".{out.name}.lock")
    created = [folder for folder in lock.parents if not folder.exists()]
    try:
        with _locked(lock, out, ", or use another --out" if command in _WITH_OUT else "", command) as file:
            try:
                yield
            finally:
                if file is not None and file.writable():
                    lock.unlink(missing_ok=True)
    finally:
        for folder in created:
            with contextlib.suppress(OSError):  # the folder is not empty now
                folder.rmdir()


@contextlib.contextmanager
def _locked(lock: Path, folder: Path, otherwise: str, command: str) -> Iterator[TextIO | None]:
    import socket

    file = _acquired(lock, folder, otherwise)
    if file is None:
        yield None
        return
    with file:
        if file.writable():
            file.truncate(0)
            file.write(f"{place()}\nprocess {os.getpid()} on {socket.gethostname()} (skill-train {command})")
            file.flush()
        yield file


def _gone(folder: Path, command: str) -> UsageError:
    return UsageError(
        f"{folder} was moved, renamed or removed while skill-train {command} worked in it",
        code="not_a_run",
        expected="one folder until the command has ended",
        got="a folder without plan.json" if folder.is_dir() else "no such folder",
        hint=f"move the run back to {quoted(folder)}, or give its new name, and run the same command again",
    )


def is_locked(run: RunDir) -> bool | None:
    """Whether a process works in the run now; None if locks cannot show it."""
    lock = run.path / ".lock"
    try:
        import fcntl

        # Without waiting, in case it is a pipe.
        with open(lock, encoding="utf-8", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released when the file is closed
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return False


def _acquired(lock: Path, folder: Path, otherwise: str) -> TextIO | None:
    """Takes the lock, or raises UsageError if it is in use.

    The previous holder may have removed the file and the folder. A lock on a removed file would keep nobody out, so
    the file is created and locked again.
    """
    for tries_left in reversed(range(_TRIES)):
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = _lock_file(lock)
        if file is not None and not _took_lock(file):
            with file:
                raise _in_use(folder, otherwise, file)
        if tries_left == 0 or (lock.parent.is_dir() if file is None else _has_name(file, lock)):
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
    """The lock file, open for writing, or for reading if another user owns it; None if it cannot be opened."""
    for mode in ("a+", "r"):
        try:
            return open(path, mode, encoding="utf-8")
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT):
                raise
    return None


def _took_lock(lock: TextIO) -> bool:
    """Takes the lock; False if another process holds it. Tries twice, because `is_locked` of another process may hold
    it for a moment."""
    import fcntl

    for pause in (0.05, 0.0):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(pause)
        except OSError:  # a file system without locks, such as some network file systems
            return True
    return False


def _was_left(where: str, holder: str) -> bool:
    """Whether the command that took the lock has ended and its training has not. False for another container, whose
    process ids are unknown here."""
    match = re.fullmatch(r"process (\d+) on .+ \(skill-train \w+\), training in process \d+", holder)
    return match is not None and where == place() and not is_alive(int(match[1]))


def _in_use(folder: Path, otherwise: str, lock: TextIO) -> UsageError:
    lock.seek(0)
    where, _, holder = lock.read().partition("\n")
    killed = "a command was killed, and its training is saving a checkpoint: run the same command again in a moment"
    elsewhere = "" if where == place() else ", in another container or on another machine"
    return UsageError(
        f"{folder} is in use by {holder or 'another process'}{elsewhere}",
        code="run_in_use",
        expected="one process for each folder",
        got=holder or "another process",
        hint=killed if _was_left(where, holder) else f"wait for it to end{otherwise}",
    )
