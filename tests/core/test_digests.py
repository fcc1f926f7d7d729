"""Digests, against hashlib's of the whole file."""

from __future__ import annotations

import hashlib
import os
import random
import time
from pathlib import Path

import pytest

from skill_train.core.digests import PartialDigest, digested_as_it_grows, file_digest

LARGE = 70_000_000  # above the size from which a digest is kept


def test_a_digest_is_added_up_while_a_file_grows(tmp_path: Path) -> None:
    """Whatever the pieces; and then it is known, so that nothing is read again."""
    file, chance, data = tmp_path / "grows", random.Random(3), os.urandom(LARGE)
    with digested_as_it_grows(file):
        time.sleep(0.1)  # it is not there yet
        at = 0
        with open(file, "wb", buffering=0) as out:
            while at < len(data):
                at += out.write(data[at : at + chance.choice((1, 999, 4_000_000, 20_000_000))])
                time.sleep(chance.choice((0, 0.03)))
    os.replace(file, tmp_path / "final")
    assert file_digest(tmp_path / "final", _not_read) == {"bytes": LARGE, "sha256": hashlib.sha256(data).hexdigest()}


def test_a_file_that_changes_afterwards_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "grows"
    with digested_as_it_grows(file):
        file.write_bytes(bytes(LARGE))
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


def test_a_file_that_nobody_wants_any_more_is_not_read_to_its_end(tmp_path: Path) -> None:
    file, started = tmp_path / "large", time.process_time()
    with pytest.raises(KeyboardInterrupt), digested_as_it_grows(file):
        with open(file, "wb") as out:
            out.truncate(20_000_000_000)  # a hole: there at once, and 15 seconds of one core to add up
        time.sleep(0.3)  # it is being read
        raise KeyboardInterrupt
    assert time.process_time() - started < 3


def test_what_does_not_come_or_fails_is_waited_for_no_longer(tmp_path: Path) -> None:
    with digested_as_it_grows(tmp_path / "never"):
        pass
    with pytest.raises(KeyError), digested_as_it_grows(tmp_path / "fails"):
        (tmp_path / "fails").write_bytes(b"half")
        raise KeyError
    assert file_digest(tmp_path / "fails")["bytes"] == 4


def test_a_digest_that_nobody_wants_any_more_is_given_up(tmp_path: Path) -> None:
    file = tmp_path / "large"
    file.write_bytes(bytes(9_000_000))
    with pytest.raises(InterruptedError):
        file_digest(file, lambda: True)
    assert file_digest(file) == {"bytes": 9_000_000, "sha256": hashlib.sha256(bytes(9_000_000)).hexdigest()}


def test_a_digest_is_added_up_in_parts(tmp_path: Path) -> None:
    """Of a file that has its size and is filled in meanwhile, as of one that stays."""
    file, data = tmp_path / "filled", os.urandom(LARGE)
    with open(file, "wb") as out:
        out.truncate(LARGE)
    parts, at = PartialDigest(file, filled_in=True), 0
    for end in (0, 5, 5, 20_000_001, LARGE - 1, LARGE):
        with open(file, "r+b") as out:
            out.seek(at)
            out.write(data[at:end])
        parts.read_to(end, lambda: False)
        at = end
    parts.close()
    assert file_digest(file, _not_read) == {"bytes": LARGE, "sha256": hashlib.sha256(data).hexdigest()}
    other = tmp_path / "stays"
    other.write_bytes(data)
    whole = PartialDigest(other, filled_in=False)
    whole.read_to(10**12, lambda: False)
    assert file_digest(other, _not_read)["sha256"] == hashlib.sha256(data).hexdigest()
    with pytest.raises(InterruptedError):
        PartialDigest(other, filled_in=False).read_to(LARGE, lambda: True)


@pytest.mark.parametrize("size", [LARGE - 1, LARGE, LARGE + 1])
def test_parts_of_two_files_make_no_digest(size: int, tmp_path: Path) -> None:
    """Changed between two parts by somebody else."""
    file = tmp_path / "changes"
    file.write_bytes(bytes(LARGE))
    parts = PartialDigest(file, filled_in=False)
    parts.read_to(1_000_000, lambda: False)
    file.write_bytes(b"1" * size)
    parts.read_to(LARGE, lambda: False)
    assert file_digest(file)["sha256"] == hashlib.sha256(b"1" * size).hexdigest()


def _not_read() -> bool:
    """Asked after each block that is read; true gives up."""
    return True
