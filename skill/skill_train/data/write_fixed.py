"""Writes the usable rows of a dataset, mapped to the standard columns of their format. The dataset is only read."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from skill_train.core.digests import file_digest
from skill_train.core.errors import UsageError, quoted
from skill_train.core.files import whole_file
from skill_train.data import read_rows
from skill_train.data.check_row import Check
from skill_train.data.repeats import Repeats
from skill_train.program.examples import Row
from skill_train.program.rows import Broken
from skill_train.recipe.fields import Recipe

# Why the tokenizer would cause a row to be refused, or None. Called for rows that would otherwise be written.
Refuses = Callable[[int, Row], str | None]


def check_out(out: Path) -> None:
    """Raises UsageError if the output exists or is not a JSONL file. Called before anything is read."""
    if out.exists() or out.is_symlink():
        raise UsageError(
            f"{out} already exists",
            code="output_exists",
            expected="a new file, because nothing is overwritten",
            got=str(out),
            hint="choose another name for --fix",
        )
    if out.suffix not in read_rows.LINES:
        raise UsageError(
            f"{out} is not a .jsonl file",
            code="bad_usage",
            expected="a name that ends in .jsonl",
            got=out.suffix,
            hint=f"--fix {quoted(out.with_suffix('.jsonl'))}",
        )


class Fixed(msgspec.Struct, frozen=True):
    """The file that was written, and how many rows were left out, by kind."""

    path: str
    rows: int
    bytes: int
    sha256: str
    left_out: dict[str, int]


def write_fixed(
    recipe: Recipe, check: Check, refuses: Refuses | None, mapped: Callable[[Row], Row], out: Path
) -> Fixed:
    """Writes `out`; returns what it contains and what was left out, by kind.

    Broken rows, rows that training refuses and all but the first of equal rows are left out.

    Args:
        check, refuses: rows that one of them refuses are left out.
        mapped: gives a row with the standard columns of its format.

    Raises:
        UsageError: `out` exists, or no row is usable.
        Refused: the quotes of a table are broken in several lines, which may be any number of rows.
    """
    check_out(out)
    repeats, left_out, rows = Repeats(), Counter[str](), 0
    for place, line in _lines(recipe, check, None, mapped, Counter()):
        repeats.add(line, place)
    repeated = repeats.places()
    next_repeated = next(repeated, None)
    with whole_file(out) as part, open(part, "wb") as file:
        for place, line in _lines(recipe, check, refuses, mapped, left_out):
            while next_repeated is not None and next_repeated < place:
                next_repeated = next(repeated, None)
            if place == next_repeated:
                left_out["duplicate"] += 1
                continue
            file.write(line)
            rows += 1
        if not rows:
            raise UsageError(
                f"{recipe.data} has no usable row",
                code="bad_row",
                got=", ".join(f"{count} {kind}" for kind, count in sorted(left_out.items())),
                hint="run the same command without --fix to see what is wrong with each row",
            )
        file.flush()
        os.fsync(file.fileno())
    digest = file_digest(out)
    return Fixed(str(out), rows, digest["bytes"], digest["sha256"], dict(left_out))


def _lines(
    recipe: Recipe, check: Check, refuses: Refuses | None, mapped: Callable[[Row], Row], left_out: Counter[str]
) -> Iterator[tuple[int, bytes]]:
    """The rows to write, each with its place. The other rows are counted in `left_out`."""
    for place, (number, row, _) in enumerate(read_rows.read(recipe)):
        if isinstance(row, Broken):
            if row.lines > 1:
                raise row.refusal
            left_out[row.kind] += 1
            continue
        trouble = check(row)[2]
        why = trouble.kind if trouble is not None and trouble.refused else refuses and refuses(number, row)
        if why is not None:
            left_out[why] += 1
        else:
            yield place, _line(mapped(row))


def _line(row: Row) -> bytes:
    try:
        return (json.dumps(row, ensure_ascii=False, default=str) + "\n").encode("utf-8")
    except UnicodeEncodeError:  # half a surrogate pair outside of the messages' texts
        return (json.dumps(row, default=str) + "\n").encode("ascii")
