"""Reads a whole dataset once and counts its problems: which kinds, how often, on which lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from skill_train.data import read_rows
from skill_train.data.check_row import Checked
from skill_train.data.personal import WHAT, holds_personal
from skill_train.data.repeats import Repeats
from skill_train.data.scan import canonical
from skill_train.program.examples import Row
from skill_train.recipe.fields import Recipe
from skill_train.recipe.formats import kind

Check = Callable[[Row], Checked]
READING = ("broken_json", "not_utf8", "not_an_object", "duplicate", "personal_data")  # detected without a mapping
MAPPED = ("missing_column", "empty", "malformed", "not_text", "unknown_role", "wrong_role_order")
LINES = 10  # line numbers stored for each problem
PEEKED = 200  # the typical row is determined from so many rows
_SHAPES = 4096


@dataclass
class RefusedRows:
    """The rows with one kind of problem. `refused` of them would end the training; `why` is the first reason."""

    rows: int = 0
    refused: int = 0
    lines: list[int] = field(default_factory=list)
    why: str = ""

    def add(self, line: int, why: str, *, refused: bool) -> None:
        self.rows += 1
        self.refused += refused
        if len(self.lines) < LINES:
            self.lines.append(line)
        self.why = self.why or why


@dataclass
class Survey:
    """The counts over a whole dataset.

    Attributes:
        rows: lines that are not blank; the training accepts `usable` of them.
        columns: the kinds of values in each column, in the order of appearance.
        longest_row: the ordinal of the row with most text among the usable rows.
    """

    rows: int = 0
    usable: int = 0
    problems: dict[str, RefusedRows] = field(default_factory=dict)
    columns: dict[str, list[str]] = field(default_factory=dict)
    text_bytes: int = 0
    longest_text_bytes: int = 0
    longest_row: int = 0
    turns: int = 0
    longest_turns: int = 0

    @property
    def refused(self) -> int:
        return sum(count.refused for count in self.problems.values())


def peek(recipe: Recipe) -> list[Row]:
    """The first complete rows."""
    whole = (row for _, row, _ in read_rows.read(recipe) if isinstance(row, dict))
    return list(islice(whole, PEEKED))


def typical(peeked: list[Row]) -> Row:
    """A row with the most frequent set of columns, each with its first value that is not null."""
    usual = Counter(tuple(row) for row in peeked).most_common(1)[0][0]
    alike = [row for row in peeked if tuple(row) == usual]
    return {name: next((row[name] for row in alike if row[name] is not None), None) for name in usual}


def survey(recipe: Recipe, check: Check | None) -> Survey:
    """Reads every row once. Without `check` only reading problems are found."""
    seen = Survey(problems={name: RefusedRows() for name in (READING + MAPPED if check else READING)})
    repeats, shapes = Repeats(), set[tuple[Any, ...]]()
    for line, row, raw in read_rows.read(recipe):
        seen.rows += 1
        if type(row) is not dict:
            assert isinstance(row, read_rows.Broken)
            seen.problems[row.kind].add(line, row.refusal.error["message"], refused=True)
            continue
        shape = (*row, *map(type, row.values()))
        if shape not in shapes and (len(shapes) < _SHAPES or _has_new(seen.columns, row)):
            shapes.add(shape)
            _note_columns(seen.columns, row)
        written = content(row, raw)
        repeats.add(written, line)
        if holds_personal(written):
            seen.problems["personal_data"].add(line, WHAT, refused=False)
        if check is not None:
            _count(seen, line, check(row))
    for line in repeats.places():
        seen.problems["duplicate"].add(line, "the same row as an earlier one", refused=False)
    return seen


def usable(recipe: Recipe, check: Check) -> Iterator[tuple[int, Row]]:
    """`(line, row)` of each row that training accepts."""
    for line, row, _ in read_rows.read(recipe):
        if isinstance(row, dict):
            trouble = check(row)[2]
            if trouble is None or not trouble.refused:
                yield line, row


def content(row: Row, raw: bytes | None) -> bytes:
    """The content that makes two rows equal: the bytes of the line, or the values if a row is not a line."""
    return canonical(row) if raw is None else raw.strip()


def _count(seen: Survey, line: int, checked: Checked) -> None:
    size, turns, trouble = checked
    if trouble is not None:
        seen.problems[trouble.kind].add(line, trouble.why, refused=trouble.refused)
        if trouble.refused:
            return
    if size > seen.longest_text_bytes:
        seen.longest_text_bytes, seen.longest_row = size, seen.usable
    seen.usable += 1
    seen.text_bytes += size
    seen.turns += turns
    if turns > seen.longest_turns:
        seen.longest_turns = turns


def _has_new(columns: dict[str, list[str]], row: Row) -> bool:
    return len(columns) < _SHAPES and not row.keys() <= columns.keys()


def _note_columns(columns: dict[str, list[str]], row: Row) -> None:
    for name, value in row.items():
        kinds = columns.setdefault(name, [])
        if kind(value) not in kinds:
            kinds.append(kind(value))
