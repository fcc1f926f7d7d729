"""Reads a whole dataset once and counts its problems: which kinds, how often, on which lines."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from skill_train.data import read_rows
from skill_train.data.check_row import Check, Checked, Trouble
from skill_train.data.repeats import Repeats
from skill_train.data.row_pictures import PROBLEMS, REPEATED, RowPictures, problem_of
from skill_train.data.unread import SeenRows
from skill_train.program.chat.choices import ROW_MARKS
from skill_train.program.chat.row_notes import RowNotes, findings
from skill_train.program.events import Refused
from skill_train.program.examples import Row, to_example
from skill_train.program.pictures.in_rows import lift_pictures
from skill_train.program.rows import Broken, canonical
from skill_train.recipe.fields import Recipe
from skill_train.recipe.formats import DetectedFormat, kind, with_pictures

READING = ("broken_json", "not_utf8", "not_an_object", "duplicate", "personal_data")  # known without a mapping
MAPPED = ("missing_column", "empty", "malformed", "not_text", "unknown_role", "wrong_role_order", "untrained")
LENGTHS = ("truncated", "fully_masked", "picture_cut")  # known with a tokenizer; the last one only for pictures
LINES = 10  # line numbers kept of each problem
_SHAPES = 4096
LOOKED_AT = 4_000_000  # bytes of text; without a model, `row_notes` reads every row up to there
# Personal data: e-mail addresses, and telephone numbers with a country code. Names, streets and account numbers look
# like any other text, so a dataset without a finding may still contain personal data.
PERSONAL = "an e-mail address or a telephone number"
_ADDRESS = re.compile(rb"[\w.%+-]@[\w-]{1,63}(?:\.[\w-]{1,63}){0,8}\.[A-Za-z]{2,}", re.ASCII)
# E.164: at most 15 digits after the plus. Fewer than 8 digits are hardly a telephone number.
_NUMBER = re.compile(rb"(?:(?<![\w+])|(?<=\\[nrt]))\+[1-9](?:[ ()./-]{0,2}\d){7,14}(?!\d)", re.ASCII)


class RefusedRows(msgspec.Struct):
    """The rows with one kind of problem. `refused` of them would end the training; `why` is the first reason."""

    rows: int = 0
    refused: int = 0
    lines: list[int] = []
    why: str = ""

    def add(self, line: int, why: str, *, refused: bool) -> None:
        self.rows += 1
        self.refused += refused
        if len(self.lines) < LINES:
            self.lines.append(line)
        self.why = self.why or why


class Survey(msgspec.Struct):
    rows: int = 0  # lines that are not blank; `usable` of them are taken by training
    usable: int = 0
    problems: dict[str, RefusedRows] = {}
    columns: dict[str, list[str]] = {}  # the kinds of value of each, in the order of appearance
    text_bytes: int = 0
    longest_text_bytes: int = 0
    longest_row: int = 0  # the ordinal, among the usable rows, of the one with most text
    turns: int = 0
    longest_turns: int = 0
    # how rows with pictures are read; the column of pictures is that of the first row that has one
    detected: DetectedFormat | None = None
    row_notes: RowNotes | None = None  # of rows of text with tools or a mark; None for another method than sft
    open_quote: int | None = None  # the line of a table at which `--fix` cannot count the rows
    seen: SeenRows = msgspec.field(default_factory=SeenRows)

    @property
    def refused(self) -> int:
        return sum(count.refused for count in self.problems.values())


def typical(peeked: list[Row]) -> Row:
    """A row with the most frequent set of columns, each with its first value that is not null."""
    usual = Counter(tuple(row) for row in peeked).most_common(1)[0][0]
    alike = [row for row in peeked if tuple(row) == usual]
    return {name: next((row[name] for row in alike if row[name] is not None), None) for name in usual}


def survey(
    recipe: Recipe,
    check: Check | None,
    detected: DetectedFormat | None = None,
    pictures: RowPictures | None = None,
    row_notes: RowNotes | None = None,
) -> Survey:
    """Reads every row once. Without `check` only reading problems are seen.

    Args:
        pictures: decodes the pictures of each row, which is read as `detected`.
    """
    names = READING + (MAPPED if check else ()) + (PROBLEMS if check and pictures else ())
    result = Survey(problems={name: RefusedRows() for name in names}, detected=detected, row_notes=row_notes)
    repeats, shapes = Repeats(), set[tuple[Any, ...]]()
    for line, row, raw in read_rows.read(recipe):
        result.rows += 1
        if type(row) is not dict:
            assert isinstance(row, Broken)
            result.problems[row.kind].add(line, row.refusal.error["message"], refused=True)
            if row.lines > 1 and result.open_quote is None:
                result.open_quote = line
            continue
        result.seen.add(row)
        shape = (*row, *map(type, row.values()))
        if shape not in shapes and (len(shapes) < _SHAPES or _has_new(result.columns, row)):
            shapes.add(shape)
            _note_columns(result.columns, row)
        text = content(row, raw)
        repeats.add(text if row_notes is None or detected is None else _trained(row, detected) or text, line)
        if holds_personal(text if pictures is None or detected is None else _texts(row, detected)):
            result.problems["personal_data"].add(line, PERSONAL, refused=False)
        if check is not None:
            checked = check(row)
            if pictures is not None and result.detected is not None:
                result.detected = with_pictures(result.detected, row)
                checked = _decoded(line, row, checked, result.detected, pictures)
            _count(result, line, row, checked)
    for line in repeats.places():
        result.problems["duplicate"].add(line, "the same row as an earlier one", refused=False)
    for line in pictures.repeated() if check and pictures else ():
        result.problems["repeated_picture"].add(line, REPEATED, refused=False)
    return result


def _texts(row: Row, detected: DetectedFormat) -> bytes:
    """The content of a row without its pictures."""
    try:
        return canonical(lift_pictures(row, detected.columns)[0])
    except Refused:
        return canonical({name: value for name, value in row.items() if name != detected.columns.get("images")})


def _decoded(line: int, row: Row, checked: Checked, detected: DetectedFormat, pictures: RowPictures) -> Checked:
    """The result of the check. If it took the row, the row's pictures are decoded, which may refuse it, and counted."""
    if checked[2] is not None and checked[2].refused:
        return checked
    sources = lift_pictures(row, detected.columns)[1]
    try:
        pictures.decode(line, sources)
    except Refused as refusal:
        return 0, 0, Trouble(problem_of(refusal), True, refusal.error["message"])
    pictures.count(sources)
    return checked


def usable(recipe: Recipe, check: Check) -> Iterator[tuple[int, Row]]:
    """`(line, row)` of each row that training accepts."""
    for line, row, _ in read_rows.read(recipe):
        if isinstance(row, dict):
            trouble = check(row)[2]
            if trouble is None or not trouble.refused:
                yield line, row


def _trained(row: Row, detected: DetectedFormat) -> bytes:
    """What is trained of a row, so that another `id` or order of the keys makes no other row; empty if nothing is."""
    columns = detected.columns.values()
    if row.keys().isdisjoint(columns):
        return b""
    values = {name: row.get(name) for name in columns}
    try:
        return msgspec.json.encode(values, enc_hook=str, order="sorted")  # ten times as fast as `canonical`
    except (ValueError, TypeError):  # half a character, or a key that is no text
        return canonical(values)


def content(row: Row, raw: bytes | None) -> bytes:
    """The content that makes two rows equal: the bytes of the line, or the values if a row is not a line."""
    return canonical(row) if raw is None else raw.strip()


def _count(survey: Survey, line: int, row: Row, checked: Checked) -> None:
    size, turns, trouble = checked
    if trouble is not None:
        survey.problems[trouble.kind].add(line, trouble.why, refused=trouble.refused)
        if trouble.refused:
            return
    if size > survey.longest_text_bytes:
        survey.longest_text_bytes, survey.longest_row = size, survey.usable
    survey.usable += 1
    survey.text_bytes += size
    survey.turns += turns
    survey.longest_turns = max(survey.longest_turns, turns)
    row_notes, detected = survey.row_notes, survey.detected
    if row_notes is None or detected is None:
        return
    if survey.text_bytes < LOOKED_AT or "tools" in detected.columns or not ROW_MARKS.isdisjoint(row):
        example = to_example(row, detected.format, detected.columns)
        row_notes.add(line, findings(row, detected.columns, example))


def told_notes(survey: Survey, *, named: bool) -> Iterator[str]:
    """The warnings about the rows. If a model is named, its own encoder gives the warnings about their texts."""
    row_notes = survey.row_notes
    if row_notes is not None and not named:
        rest = "; --model looks at more rows" if row_notes.rows < survey.usable else ""
        yield from (note + rest for note in row_notes.notes(row_notes.rows))
    order = survey.problems.get("wrong_role_order", RefusedRows())
    if (odd := order.rows - order.refused) and 2 * odd >= survey.usable:
        yield (
            f"{odd} of {survey.usable} rows have an unusual order of speakers (line {order.lines[0]}: {order.why}): "
            "only what the assistant says is trained; rename the roles if they are swapped"
        )


def _has_new(columns: dict[str, list[str]], row: Row) -> bool:
    return len(columns) < _SHAPES and not row.keys() <= columns.keys()


def _note_columns(columns: dict[str, list[str]], row: Row) -> None:
    for name, value in row.items():
        kinds = columns.setdefault(name, [])
        if kind(value) not in kinds:
            kinds.append(kind(value))


def holds_personal(line: bytes) -> bool:
    """Whether one row, as written, seems to contain personal data."""
    return (b"@" in line and _ADDRESS.search(line) is not None) or (b"+" in line and _NUMBER.search(line) is not None)
