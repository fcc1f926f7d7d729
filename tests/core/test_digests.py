"""Digests, against hashlib's of the whole file."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from skill_train.core.digests import file_digest

LARGE = 70_000_000  # above the size from which a digest is kept


def test_a_large_file_is_read_once(tmp_path: Path) -> None:
    file, data = tmp_path / "large", os.urandom(LARGE)
    file.write_bytes(data)
    expected = {"bytes": LARGE, "sha256": hashlib.sha256(data).hexdigest()}
    assert file_digest(file) == expected
    os.replace(file, tmp_path / "final")
    assert file_digest(tmp_path / "final", _not_read) == expected


def test_a_large_file_that_changes_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "large"
    file.write_bytes(bytes(LARGE))
    file_digest(file)
    with open(file, "r+b") as out:
        out.write(b"1")
    assert file_digest(file)["sha256"] == hashlib.sha256(b"1" + bytes(LARGE - 1)).hexdigest()


def test_a_small_file_is_always_read(tmp_path: Path) -> None:
    """Changed within a tick of the file system's clock, it has the inode, the size and the time that it had."""
    file = tmp_path / "small"
    file.write_bytes(b"one")
    assert file_digest(file)["sha256"] == hashlib.sha256(b"one").hexdigest()
    before = file.stat()
    file.write_bytes(b"two")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert file_digest(file)["sha256"] == hashlib.sha256(b"two").hexdigest()


def test_a_digest_that_nobody_wants_any_more_is_given_up(tmp_path: Path) -> None:
    file = tmp_path / "large"
    file.write_bytes(bytes(9_000_000))
    with pytest.raises(InterruptedError):
        file_digest(file, lambda: True)
    assert file_digest(file) == {"bytes": 9_000_000, "sha256": hashlib.sha256(bytes(9_000_000)).hexdigest()}


def _not_read() -> bool:
    """Asked after each block that is read; true gives up."""
    return True
