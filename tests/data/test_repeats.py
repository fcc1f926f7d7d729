"""Repeats are counted exactly, also when their digests are sorted in many parts."""

from __future__ import annotations

import random

import pytest

from skill_train.data import repeats
from skill_train.data.repeats import Repeats


@pytest.mark.parametrize("at_once", [1 << 15, 7, 1])
def test_they_are_those_of_a_set(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "_SORTED_AT_ONCE", at_once)
    draw = random.Random(3)
    rows = [b"%d" % draw.randrange(400) for _ in range(500)]
    found, seen, expected = Repeats(), set[bytes](), []
    for place, row in enumerate(rows):
        found.add(row, place * 3)
        if row in seen:
            expected.append(place * 3)
        seen.add(row)
    assert len(expected) > 100
    assert list(found.places()) == expected


def test_a_part_may_be_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "_SORTED_AT_ONCE", 10)
    monkeypatch.setattr(repeats, "_READ_AT_ONCE", 3)
    found = Repeats()
    for place in range(100):
        found.add(b"%d" % (place % 60), place)
    assert list(found.places()) == list(range(60, 100))


def test_no_rows_and_no_repeats() -> None:
    found = Repeats()
    assert list(found.places()) == []
    found = Repeats()
    found.add(b"one", 1)
    found.add(b"two", 2)
    assert list(found.places()) == []
