"""Which bytes a file holds: its size and sha256, read once."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path
from typing import Any

# A file system's clock ticks every few milliseconds: only a file that takes longer to read can be told by its time.
_LARGE_BYTES = 1 << 26
# Each block waits for its turn between Python's threads: one of 1 MB for as long as 14 blocks take to add up.
_BLOCK_BYTES = 1 << 24
_LOOK_SECONDS = 0.02
_digests: dict[tuple[int, int, int, int], dict[str, Any]] = {}


def file_digest(path: Path, unwanted: Callable[[], bool] = lambda: False) -> dict[str, Any]:
    """`{"bytes": size, "sha256": hex}` of one file, read in constant memory; a large one once in a process while its
    inode, size and time stay.

    Args:
        unwanted: asked after each block; when it is true the work is given up.

    Raises:
        InterruptedError: it was given up.
    """
    with open(path, "rb") as file:
        stat = os.fstat(file.fileno())
        if _key(stat) in _digests:
            return dict(_digests[_key(stat)])
        sha256 = _sha256(file, unwanted)
        if _key(os.fstat(file.fileno())) == _key(stat):
            _keep(stat, stat.st_size, sha256)
    return {"bytes": stat.st_size, "sha256": sha256}


def is_file_of(path: Path, digest: Any) -> bool:
    """Whether a file is there and has this digest. One of another size is not read: it may have no end."""
    told = digest.get("bytes") if isinstance(digest, dict) else None
    return path.is_file() and path.stat().st_size == told and file_digest(path) == digest


def _key(stat: os.stat_result) -> tuple[int, int, int, int]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _keep(stat: os.stat_result, size: int, sha256: str) -> None:
    if stat.st_size == size >= _LARGE_BYTES:
        _digests[_key(stat)] = {"bytes": size, "sha256": sha256}


def _sha256(file: BufferedReader, unwanted: Callable[[], bool]) -> str:
    digest, buffer = hashlib.sha256(), bytearray(min(_BLOCK_BYTES, os.fstat(file.fileno()).st_size + 1))
    while count := file.readinto(buffer):
        digest.update(memoryview(buffer)[:count])
        if unwanted():
            raise InterruptedError(f"{file.name} need not be read to its end")
    return digest.hexdigest()


@contextlib.contextmanager
def digested_as_it_grows(path: Path) -> Iterator[None]:
    """While the block appends to a new file, its digest is added up; `file_digest` then knows it. It is that of the
    bytes as they came: a file that is changed behind its end would not match it, and be found out."""
    ended, given_up = threading.Event(), threading.Event()

    def follow() -> None:
        while not path.exists():
            if ended.wait(_LOOK_SECONDS):
                return
        with open(path, "rb") as file:
            digest, buffer, whole = hashlib.sha256(), bytearray(_BLOCK_BYTES), False
            while not given_up.is_set():
                count = file.readinto(buffer)
                digest.update(memoryview(buffer)[:count])
                if not count and whole:
                    return _keep(os.fstat(file.fileno()), file.tell(), digest.hexdigest())
                if not count:
                    whole = ended.wait(_LOOK_SECONDS)  # what is there after the end is all

    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(follow)
        try:
            yield
        except BaseException:  # nobody wants the digest of a file that is about to go
            given_up.set()
            raise
        finally:
            ended.set()
    following.result()


class PartialDigest:
    """The digest of one file, added up part by part from its beginning, while others read it or fill it in.

    Args:
        filled_in: it is being written, so its time changes.
    """

    def __init__(self, path: Path, *, filled_in: bool) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - what is read ahead may be filled in later
        self._stat, self._filled_in = os.fstat(self._file.fileno()), filled_in
        self._digest, self._at = hashlib.sha256(), 0
        self._buffer = bytearray(min(_BLOCK_BYTES, self._stat.st_size + 1))

    def read_to(self, end: int, unwanted: Callable[[], bool]) -> None:
        """Adds what stands before `end`. At the end of the file, `file_digest` knows it.

        Raises:
            InterruptedError: `unwanted` said after a block that it is.
        """
        while left := min(end, self._stat.st_size) - self._at:
            count = self._file.readinto(memoryview(self._buffer)[:left])
            if not count:
                return  # it became shorter: `file_digest` reads what is there
            self._digest.update(memoryview(self._buffer)[:count])
            self._at += count
            if unwanted():
                raise InterruptedError(f"{self._file.name} need not be read to its end")
        if self._at == self._stat.st_size:
            stat = os.fstat(self._file.fileno())
            if self._filled_in or _key(stat) == _key(self._stat):
                _keep(stat, self._at, self._digest.hexdigest())

    def close(self) -> None:
        self._file.close()


def digests(root: Path, files: Iterable[Path] | None = None) -> dict[str, dict[str, Any]]:
    """Digest of each file, by its name relative to `root`; all files below `root` unless some are named."""
    chosen = files if files is not None else (p for p in root.rglob("*") if p.is_file())
    return {str(path.relative_to(root)): file_digest(path) for path in sorted(chosen)}
