"""Rows that stand in a dataset twice, found exactly in memory that does not grow with the rows.

A first pass keeps two bits of each row's digest in a table of fixed size and notes the digests whose bits were set
already. Nearly always there are none, or true repeats. A second pass counts the noted ones exactly.
"""

from __future__ import annotations

import hashlib
import struct

BITS = 1 << 27  # 16 MiB; of 1 million different rows about 100 are noted in vain, of 10 million about 70,000
NOTED = 200_000  # about 40 MB at most; repeats of further rows are not counted, and the report says so
_TWO_WORDS = struct.Struct("<QQ").unpack_from


class Repeats:
    """`note` every row, then, when `noted` is not empty, `is_repeat` every row again in the same order."""

    def __init__(self) -> None:
        self.noted: set[int] = set()
        self.full = False
        self._bits = bytearray(BITS >> 3)
        self._seen: set[bytes] = set()

    def note(self, content: bytes) -> None:
        first, second = _TWO_WORDS(hashlib.sha256(content).digest())
        bits = self._bits
        place, other = (first >> 3) % (BITS >> 3), (second >> 3) % (BITS >> 3)
        mark, other_mark = 1 << (first & 7), 1 << (second & 7)
        if bits[place] & mark and bits[other] & other_mark:
            if len(self.noted) < NOTED:
                self.noted.add(first)
            else:
                self.full = self.full or first not in self.noted
        bits[place] |= mark
        bits[other] |= other_mark

    def is_repeat(self, content: bytes) -> bool:
        """Whether the same bytes were asked for before."""
        digest = hashlib.sha256(content).digest()
        if _TWO_WORDS(digest)[0] not in self.noted:
            return False
        if digest in self._seen:
            return True
        self._seen.add(digest)
        return False
