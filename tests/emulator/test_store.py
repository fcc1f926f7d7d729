"""The Xet store of the Hub for tests, on xorbs and shards made by hand (formats: hub-docs, `docs/xet`)."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from hub_emulator.cas import Store
from hub_emulator.wire import Refused

# The hash of four numbers, and how it is printed.
XORB, XORB_NAME = struct.pack("<4Q", 1, 2, 3, 4), "0000000000000001000000000000000200000000000000030000000000000004"
FILE, FILE_NAME = struct.pack("<4Q", 5, 0, 0, 0xF), "0" * 15 + "5" + "0" * 32 + "0" * 15 + "f"
# Chunks of 100, 200 and 300 bytes that are stored in 10, 20 and 30, each after 8 bytes of header.
STORED, LENGTHS = (10, 20, 30), (100, 200, 300)


def _xorb() -> bytes:
    chunks = zip(STORED, LENGTHS, strict=True)
    return b"".join(
        b"\0" + stored.to_bytes(3, "little") + b"\1" + length.to_bytes(3, "little") + bytes(stored)
        for stored, length in chunks
    )


def _shard(terms: list[tuple[int, int]], *, flags: int = 0, extra: bytes = b"") -> bytes:
    """A header, one file with its terms of the one xorb, and the end mark."""
    entries = b"".join(XORB + struct.pack("<IIII", 0, sum(LENGTHS[a:b]), a, b) for a, b in terms)
    file = FILE + struct.pack("<IIQ", flags, len(terms), 0) + entries + extra
    return bytes(48) + file + b"\xff" * 32 + bytes(16)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path, "http://nowhere")
    assert made.add_xorb(XORB_NAME, _xorb()) is True
    return made


def test_a_xorb_is_kept_once(store: Store) -> None:
    assert store.add_xorb(XORB_NAME, _xorb()) is False


def test_terms_that_overlap_are_asked_for_in_one_range(store: Store) -> None:
    """Chunks 0 and 1, then 1 and 2: 300 + 500 bytes, out of the 84 that the xorb has with its headers."""
    store.add_shard(_shard([(0, 2), (1, 3)]))
    assert store.size(FILE_NAME) == 800
    plan = store.plan(FILE_NAME, 0, 800, "http://here")
    assert [(t["range"]["start"], t["range"]["end"], t["unpacked_length"]) for t in plan["terms"]] == [
        (0, 2, 300),
        (1, 3, 500),
    ]
    url = f"http://here/{XORB_NAME}"
    assert plan["fetch_info"] == {
        XORB_NAME: [{"range": {"start": 0, "end": 3}, "url": url, "url_range": {"start": 0, "end": 83}}]
    }


@pytest.mark.parametrize(
    ("start", "end", "offset", "chunks", "stored"),
    [
        (0, 100, 0, (0, 1), (0, 17)),  # the first chunk: 8 + 10 bytes
        (150, 160, 50, (1, 2), (18, 45)),  # inside the second: 8 + 20 bytes after the first
        (99, 301, 99, (0, 3), (0, 83)),
        (300, 600, 0, (2, 3), (46, 83)),
    ],
)
def test_a_part_of_a_file_needs_only_its_chunks(
    store: Store, start: int, end: int, offset: int, chunks: tuple[int, int], stored: tuple[int, int]
) -> None:
    store.add_shard(_shard([(0, 3)]))
    plan = store.plan(FILE_NAME, start, end, "http://here")
    [term], [fetch] = plan["terms"], plan["fetch_info"][XORB_NAME]
    assert plan["offset_into_first_range"] == offset
    assert (term["range"]["start"], term["range"]["end"]) == chunks
    assert (fetch["url_range"]["start"], fetch["url_range"]["end"]) == stored


def test_the_sha256_of_a_file_is_found_behind_its_verification(store: Store) -> None:
    sha256 = struct.pack("<4Q", 7, 7, 7, 7) + bytes(16)
    store.add_shard(_shard([(0, 1)], flags=1 << 31 | 1 << 30, extra=bytes(48) + sha256))
    assert store.file_of_sha256("0000000000000007" * 4) == FILE_NAME


@pytest.mark.parametrize("shard", [_shard([(0, 1)])[:-48], _shard([(0, 1)]).replace(XORB, FILE)])
def test_a_shard_that_cannot_be(store: Store, shard: bytes) -> None:
    """Without its end; of a xorb that nobody sent."""
    with pytest.raises(Refused):
        store.add_shard(shard)


def test_a_xorb_that_was_cut(tmp_path: Path) -> None:
    with pytest.raises(Refused):
        Store(tmp_path, "").add_xorb(XORB_NAME, _xorb()[:-1])
