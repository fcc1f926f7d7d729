"""Reads the rows at the start of a text file of which only the beginning is available. Pure."""

from __future__ import annotations

import csv
import io
import json

from skill_train.core.errors import UsageError
from skill_train.program.examples import Row
from skill_train.program.rows import CELL_CHARACTERS


def parse(data: bytes, name: str, *, whole: bool) -> list[Row]:
    """The rows in these bytes.

    Args:
        data: the file, or its start.
        name: the file name; its extension tells the format: .jsonl, .ndjson, .json, .csv, .tsv or .txt.
        whole: `data` is the complete file. Otherwise a truncated last row is left out.

    Raises:
        UsageError: the data is not UTF-8, not JSON, or has no rows.
    """
    text = _text(data, name, whole=whole)
    kind = name.rsplit(".", 1)[-1]
    if kind == "json" and text.lstrip().startswith("["):
        return _array(text, name)
    if kind in ("csv", "tsv"):
        return _table(text, name, "\t" if kind == "tsv" else ",", whole=whole)
    lines = _lines(text, whole=whole)
    if kind == "txt":
        return [{"text": line} for line in lines]
    return [_object(line, number, name) for number, line in enumerate(lines, start=1) if line.strip()]


def _text(data: bytes, name: str, *, whole: bool) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        cut_in_two = not whole and error.start >= len(data) - 3
        if not cut_in_two:
            raise UsageError(
                f"{name} is not UTF-8 at byte {error.start}",
                code="unreadable_dataset",
                expected="text in UTF-8",
                hint="save the file as UTF-8 and upload it again",
            ) from None
        text = data[: error.start].decode("utf-8")
    return text.removeprefix("\ufeff")  # the byte order mark that some editors write


def _lines(text: str, *, whole: bool) -> list[str]:
    lines = text.split("\n")
    return lines if whole and lines[-1] else lines[:-1]


def _object(line: str, number: int, name: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _broken(name, f"line {number} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise _broken(name, f"line {number} is not a JSON object")
    return row


def _array(text: str, name: str) -> list[Row]:
    decoder, rows = json.JSONDecoder(), []
    at = _skip(text, text.index("[") + 1)
    while at < len(text) and text[at] != "]":
        try:
            row, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            break  # the rest is missing
        if not isinstance(row, dict):
            raise _broken(name, "an entry of the list is not a JSON object")
        rows.append(row)
        at = _skip(text, at)
    if not rows:
        raise _broken(name, "its first row is not JSON, or larger than what was read")
    return rows


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n,":
        at += 1
    return at


def _table(text: str, name: str, delimiter: str, *, whole: bool) -> list[Row]:
    csv.field_size_limit(CELL_CHARACTERS)
    try:
        rows: list[Row] = list(csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter))
    except csv.Error as error:
        raise _broken(name, str(error)) from None
    return rows if whole else rows[:-1]


def _broken(name: str, why: str) -> UsageError:
    return UsageError(
        f"{name}: {why}",
        code="unreadable_dataset",
        expected="JSON objects, one a line or in a list",
        hint="download the dataset, repair it and use the local file",
    )
