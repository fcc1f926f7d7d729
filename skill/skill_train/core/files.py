"""Writes results so that a file or a folder is complete or does not exist.

An unfinished result lies beside its final name as `.NAME.PLACE-PROCESS.TOKEN.part`. A killed process leaves its part,
and the next process that writes the same result removes it if its owner has ended. A process id shows that only in one
place: one container of one machine since its last start. Temporary folders name their owner too.
"""

import contextlib
import glob
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from skill_train.core.errors import UsageError, no_disk, quoted

_OWNER = re.compile(r"([0-9a-f]{12})-(\d+)\.[0-9a-f]+\.part")
_HALF = re.compile("[\ud800-\udfff]")
_SCRATCH = "skill-train"
_BLOCK = 4096  # bytes; hardly a record is smaller
_LEFT_ALONE: list[Path] = []


def require_writable(folder: Path) -> None:
    """Refuses a long step before it starts if its record cannot be written.

    Raises:
        UsageError: the folder is read-only, or belongs to somebody else.
        OSError: its disk is full.
    """
    import tempfile

    existing = next(place for place in (folder, *folder.parents) if place.exists())
    if not os.access(existing, os.W_OK):
        raise UsageError(
            f"{existing} is not writable",
            code="system_error",
            expected="a folder that you may write to",
            got="a read-only folder, or a folder of another user",
            hint="copy the folder to a writable place, or change its permissions",
        )
    try:
        with tempfile.TemporaryFile(dir=existing) as file:  # it never has a name, so no kill leaves it
            file.write(bytes(_BLOCK))
    except OSError as error:
        error.filename = os.fspath(existing)
        raise


@contextlib.contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """A temporary folder beside `final`. It is renamed to `final` when the block succeeds, and removed when it fails.

    Raises:
        UsageError: `final` is a file, a link or not empty, or it is the working directory of this process.
    """
    if final.is_symlink() or (any(final.iterdir()) if final.is_dir() else final.exists()):
        own = "is not empty, and this step did not make it from these inputs"
        raise UsageError(
            f"{final} {own if final.is_dir() and not final.is_symlink() else 'is not a folder'}",
            code="output_exists",
            expected="a new or empty folder",
            hint=f"move {quoted(final)} away, or choose another folder",
        )
    if final.is_dir() and final.samefile(Path.cwd()):
        raise UsageError(
            f"{final} is the current directory, and the result would replace it",
            code="output_exists",
            expected="a new or empty folder elsewhere",
            hint="choose another folder",
        )
    final.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(final)
    part = _part_of(final)
    part.mkdir()
    try:
        yield part
        if final.is_dir():
            final.rmdir()
        os.replace(part, final)
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextlib.contextmanager
def scratch_file(final: Path) -> Iterator[Path]:
    """A temporary file name beside `final`. The file is removed when the block ends. A file that a killed process left
    is removed with the other parts of `final`."""
    part = _part_of(final)
    try:
        yield part
    finally:
        with contextlib.suppress(OSError):  # a read-only disk refuses to remove even a missing file
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_file(final: Path) -> Iterator[Path]:
    """A temporary file name beside `final`. It is renamed to `final` when the block succeeds, and removed when it
    fails. An error of the file system names `final`."""
    final.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(final)
    with scratch_file(final) as part:
        try:
            yield part
            os.replace(part, final)
        except OSError as error:
            if error.filename == os.fspath(part) or (error.filename is None and no_disk(error)):
                error.filename, error.filename2 = os.fspath(final), None
            raise


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder that is removed when the block ends. First removes the folders that killed processes of this
    user left."""
    import tempfile

    _remove_left_scratch(Path(tempfile.gettempdir()))
    folder = Path(tempfile.gettempdir()) / f"{_SCRATCH}-{owner()}-{secrets.token_hex(8)}"
    try:  # not TemporaryDirectory: a signal just after it made the folder leaves it
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@cache
def _remove_left_scratch(root: Path) -> None:
    for folder in root.glob(f"{_SCRATCH}-{place()}-*"):
        pid = folder.name.split("-")[3]
        with contextlib.suppress(OSError):
            mine = folder.lstat().st_uid == os.geteuid() and pid.isdecimal()
            if mine and not is_alive(int(pid)):
                shutil.rmtree(folder, ignore_errors=True)  # a link is left alone


def _part_of(final: Path) -> Path:
    return final.with_name(f".{final.name}.{owner()}.{secrets.token_hex(4)}.part")


def write_text(path: Path, text: str) -> None:
    """Writes a text to a temporary file and renames it, so that the file is complete or unchanged."""
    with whole_file(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, document: Any) -> None:
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
    if _HALF.search(text):  # half a surrogate pair from a hostile name is not UTF-8; an escape preserves it
        text = json.dumps(document, indent=1, allow_nan=False)
    write_text(path, text + "\n")


def remove_leftovers(final: Path) -> None:
    """Removes the temporary files of this result that killed processes left. Those of another machine or container are
    kept and reported."""
    for part in sorted(final.parent.glob(f".{glob.escape(final.name)}.*.part")):
        named = _OWNER.fullmatch(part.name.removeprefix(f".{final.name}."))
        if named is None:
            continue
        if named[1] != place():
            _LEFT_ALONE.append(part)
        elif not is_alive(int(named[2])):
            shutil.rmtree(part, ignore_errors=True) if part.is_dir() else part.unlink(missing_ok=True)


def left_alone() -> list[Path]:
    """The temporary files of unknown owners that this process found, each once."""
    files = list(dict.fromkeys(_LEFT_ALONE))
    _LEFT_ALONE.clear()
    return files


def owner() -> str:
    """A name for this process that is unique among all machines that share the folder."""
    return f"{place()}-{os.getpid()}"


@cache
def place() -> str:
    """The scope in which a process id is unique: this host, since its last start, in this container."""
    import socket

    boot = namespace = ""  # only Linux reports them
    with contextlib.suppress(OSError, ValueError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return hashlib.sha256("\0".join((socket.gethostname(), boot, namespace)).encode()).hexdigest()[:12]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
