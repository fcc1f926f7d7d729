"""Counts repeated rows of a dataset exactly, in memory that hardly grows with the number of rows.

The digests are sorted, 24 bytes for each row, so that equal ones are neighbours. For many rows this uses a temporary
file.
"""

import hashlib
import heapq
from collections.abc import Iterator
from typing import BinaryIO

_DIGEST, _PLACE = 16, 8  # bytes
_RECORD = _DIGEST + _PLACE
_SORTED_AT_ONCE = 1 << 15  # records: 3 MB
_READ_AT_ONCE = 128


class Repeats:
    """Finds repeated rows: `add` every row, then call `places` once for the rows that repeat an earlier one."""

    def __init__(self) -> None:
        self._rows = _Sorter()

    def add(self, content: bytes, place: int) -> None:
        """`place`: the row's place in the dataset. Rows must be added in the order of their places."""
        self._rows.add(hashlib.sha256(content).digest()[:_DIGEST] + place.to_bytes(_PLACE, "big"))

    def places(self) -> Iterator[int]:
        """The places of all rows that equal an earlier row, in ascending order."""
        repeated, before = _Sorter(), b""
        for record in self._rows:
            digest, place = record[:_DIGEST], record[_DIGEST:]
            if digest == before:
                repeated.add(place.rjust(_RECORD, b"\0"))
            before = digest
        return (int.from_bytes(record, "big") for record in repeated)


class _Sorter:
    """Sorts records of one length in parts, each in a file, and merges them when they are read."""

    def __init__(self) -> None:
        self._part: list[bytes] = []
        self._file: BinaryIO | None = None

    def add(self, record: bytes) -> None:
        self._part.append(record)
        if len(self._part) == _SORTED_AT_ONCE:
            import tempfile  # late: it takes 10 ms

            self._file = self._file or tempfile.TemporaryFile(prefix="skill-train-")  # noqa: SIM115 - read later
            self._file.write(b"".join(sorted(self._part)))
            self._part.clear()

    def __iter__(self) -> Iterator[bytes]:
        size, written = _SORTED_AT_ONCE * _RECORD, self._file.tell() if self._file else 0
        return heapq.merge(sorted(self._part), *(self._read(at, at + size) for at in range(0, written, size)))

    def _read(self, start: int, end: int) -> Iterator[bytes]:
        assert self._file is not None
        for place in range(start, end, _READ_AT_ONCE * _RECORD):
            self._file.seek(place)
            block = self._file.read(min(_READ_AT_ONCE * _RECORD, end - place))
            yield from (block[at : at + _RECORD] for at in range(0, len(block), _RECORD))
