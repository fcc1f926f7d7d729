"""The size and the sha256 of files, each read once."""

import hashlib
import os
from collections.abc import Callable, Iterable
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec

# A file system's clock ticks every few milliseconds, so the time stamp shows a change only if reading takes longer.
_LARGE_BYTES = 1 << 26
# Each block waits for its turn among Python's threads. A block of 1 MB waits as long as the digest of 14 blocks takes.
_BLOCK_BYTES = 1 << 24


class FileDigest(TypedDict):
    bytes: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    sha256: str


_digests: dict[tuple[int, int, int, int], FileDigest] = {}


def file_digest(path: Path, unwanted: Callable[[], bool] = lambda: False) -> FileDigest:
    """The digest of one file, read in constant memory. A process reads a large file only once while its inode, size and
    time stay the same.

    Args:
        unwanted: called after each block; if it returns true, the work stops.

    Raises:
        InterruptedError: the work was stopped.
    """
    with open(path, "rb") as file:
        stat = os.fstat(file.fileno())
        if _key(stat) in _digests:
            return _digests[_key(stat)].copy()
        sha256 = _sha256(file, unwanted)
        if stat.st_size >= _LARGE_BYTES and _key(os.fstat(file.fileno())) == _key(stat):
            _digests[_key(stat)] = {"bytes": stat.st_size, "sha256": sha256}
    return {"bytes": stat.st_size, "sha256": sha256}


def is_file_of(path: Path, digest: Any) -> bool:
    """Whether the file exists and has this digest, which may have further fields. A file of another size is not read,
    because it may never end."""
    stated = {key: digest.get(key) for key in ("bytes", "sha256")} if isinstance(digest, dict) else {"bytes": None}
    return path.is_file() and path.stat().st_size == stated["bytes"] and file_digest(path) == stated


def _key(stat: os.stat_result) -> tuple[int, int, int, int]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _sha256(file: BufferedReader, unwanted: Callable[[], bool]) -> str:
    digest, buffer = hashlib.sha256(), bytearray(min(_BLOCK_BYTES, os.fstat(file.fileno()).st_size + 1))
    while count := file.readinto(buffer):
        digest.update(memoryview(buffer)[:count])
        if unwanted():
            raise InterruptedError(f"{file.name} need not be read to its end")
    return digest.hexdigest()


def digests(
    root: Path, files: Iterable[Path] | None = None, unwanted: Callable[[], bool] = lambda: False
) -> dict[str, FileDigest]:
    """The digest of each file, by its name relative to `root`: of the given files, or of all files below `root`.
    `unwanted` as in `file_digest`."""
    chosen = files if files is not None else (p for p in root.rglob("*") if p.is_file())
    return {str(path.relative_to(root)): file_digest(path, unwanted) for path in sorted(chosen)}
