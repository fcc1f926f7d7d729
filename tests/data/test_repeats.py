"""Repeats are counted exactly, also when the table of marks is full of chance hits."""

from __future__ import annotations

import random

import pytest

from skill_train.data import repeats
from skill_train.data.repeats import Repeats


@pytest.mark.parametrize("bits", [1 << 27, 1 << 10])
def test_the_count_is_that_of_a_set(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 1024 bits nearly every row is noted in vain, and the second pass must sort it out."""
    monkeypatch.setattr(repeats, "BITS", bits)
    draw = random.Random(3)
    rows = [b"%d" % draw.randrange(4000) for _ in range(5000)]
    found, seen, expected = Repeats(), set[bytes](), []
    for row in rows:
        found.note(row)
        expected.append(row in seen)
        seen.add(row)
    assert [found.is_repeat(row) for row in rows] == expected
    assert not found.full


def test_different_rows_are_hardly_ever_noted() -> None:
    """Two of 2^27 bits a row: of 100,000 rows 4/3 n^3 / 2^54 are noted by chance, less than one in ten files."""
    found = Repeats()
    for number in range(100_000):
        found.note(b"row %d" % number)
    assert len(found.noted) <= 1


def test_the_table_of_repeats_is_bounded_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "NOTED", 10)
    found = Repeats()
    for number in [*range(20), *range(20)]:
        found.note(b"row %d" % number)
    assert (len(found.noted), found.full) == (10, True)
    assert sum(found.is_repeat(b"row %d" % n) for n in [*range(20), *range(20)]) == 10
