"""Reads a dataset row by row. An unreadable line is returned as a `Broken`, and reading continues."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from skill_train.core.errors import Temporary, UsageError
from skill_train.program.events import Refused
from skill_train.program.examples import Row, require_distinct, with_distinct_keys
from skill_train.program.pictures.beside import HubFile, brought_file, hub_file, named_as, rename, with_files
from skill_train.program.rows import (
    CELL_CHARACTERS,
    broken_table,
    delimiter_of,
    iter_parquet,
    iter_rows,
    iter_slice,
    json_items,
    not_an_object,
    not_utf8,
    numbered_lines,
    other_columns,
    parse_object,
)
from skill_train.recipe.fields import Recipe

LINES = (".jsonl", ".ndjson")
SUFFIXES = (*LINES, ".json", ".csv", ".tsv", ".parquet")


@dataclass(frozen=True)
class Broken:
    """A line that is not a row. Training would end with the `refusal`."""

    kind: Literal["broken_json", "not_utf8", "not_an_object"]
    refusal: Refused


# The line number, from 1 as an editor counts; the row; its bytes in a file with one row on each line. A plain tuple,
# because a million are created.
Line = tuple[int, Row | Broken, bytes | None]


def read(recipe: Recipe) -> Iterator[Line]:
    """Every row of the chosen split, in constant memory for files with one row a line.

    Raises:
        UsageError: the dataset does not exist.
        Refused: by the training program: the split does not exist, the kind of file is unknown, or a line or a document
            is too long.
        Temporary: the Hub cannot be reached.
    """
    path = Path(recipe.data)
    if recipe.data_file is not None and path.exists():
        raise UsageError(
            f"data_file is for a dataset on the Hub, and {path} is here",
            code="bad_recipe",
            expected="data: OWNER/NAME, or no data_file",
            got=f"data_file: {recipe.data_file[:200]}",
            hint="remove data_file from the recipe",
        )
    if path.is_file() and path.suffix.lower() in (*LINES, ".json", ".csv", ".tsv"):
        if not recipe.split.startswith("train"):
            next(iter_rows(recipe.data, split=recipe.split))  # raises the refusal
        lines = _file(path)
        yield from lines if recipe.split == "train" else _sliced(lines, recipe.split)
    else:
        if path.exists() and not (path.is_dir() or path.is_file()):
            raise UsageError(
                f"{path} is a pipe or a device, and a dataset must be readable more than once",
                code="missing_file",
                expected="a dataset file or folder, or a Hub id such as owner/name",
                got=recipe.data,
                hint="write the rows to a .jsonl file and use that file",
            )
        if recipe.data_file is not None and not path.exists():
            yield from _hub_file(hub_file(recipe.data, recipe.data_revision, recipe.data_file), recipe.split)
            return
        rows = iter_rows(recipe.data, split=recipe.split, config=recipe.data_config, revision=recipe.data_revision)
        yield from ((number, row, None) for number, row in (rows if path.exists() else _from_hub(recipe, rows)))


def _hub_file(file: HubFile, split: str) -> Iterator[Line]:
    """The rows of one file on the Hub, as those of a file here, with their pictures in the cache."""
    path = brought_file(file)
    rows = _file(path) if path.suffix.lower() != ".parquet" else ((*row, None) for row in iter_parquet(path))
    with named_as(path, str(file)):
        for line in with_files(rows if split == "train" else _sliced(rows, split), file):
            if isinstance(line[1], Broken):
                rename(line[1].refusal, path, str(file))
            yield line


def is_id(name: str) -> bool:
    """Whether a text that is not a local path can be a dataset id on the Hub."""
    path = Path(name)
    return name.count("/") == 1 and not path.is_absolute() and name[0] != "." and path.suffix.lower() not in SUFFIXES


def _from_hub(recipe: Recipe, rows: Iterator[tuple[int, Row]]) -> Iterator[tuple[int, Row]]:
    if not is_id(recipe.data):
        raise UsageError(
            f"{recipe.data} does not exist",
            code="missing_file",
            expected="a dataset file or folder, or a Hub id such as owner/name",
            got=recipe.data,
            hint="check the path; Hub ids have the form NAMESPACE/NAME",
        )
    try:
        yield from rows
    except (ConnectionError, OSError) as error:
        raise Temporary(
            f"the dataset {recipe.data} cannot be read from the Hub: {str(error).splitlines()[0]}",
            code="hub_unreachable",
            expected="a dataset on the Hub, or a file on this machine",
            hint="try again when the Hub can be reached, or use a local file",
        ) from None


def _sliced(lines: Iterator[Line], split: str) -> Iterator[Line]:
    """The rows of a slice, and each broken line before its end, because training is refused for those too."""
    broken: list[Line] = []

    def whole() -> Iterator[tuple[int, Line]]:
        for line in lines:
            if isinstance(line[1], Broken):
                broken.append(line)
            else:
                yield line[0], line

    for _, line in iter_slice(whole(), split):
        yield from broken
        broken.clear()
        yield line
    yield from broken


def _file(path: Path) -> Iterator[Line]:
    kind = path.suffix.lower()
    if kind in LINES:
        return _json_lines(path)
    return _json(path) if kind == ".json" else _csv(path, delimiter_of(path))


def _json_lines(path: Path) -> Iterator[Line]:
    """One object for each line. Usual lines are read here; all others by the training program's reader."""
    # The function inside json.loads, without its checks: half the time.
    decoder = json.JSONDecoder(object_pairs_hook=with_distinct_keys)
    scan_once: Callable[[str, int], tuple[Any, int]] = decoder.scan_once  # type: ignore[attr-defined]
    for number, raw in numbered_lines(path):
        try:
            text = str(raw, "utf-8")
            row, end = scan_once(text, 0)
            usual = type(row) is dict and text[end:] in ("\n", "\r\n", "")
        except (ValueError, StopIteration, RecursionError):
            usual = False
        if usual:
            yield number, row, raw
        elif raw.strip():
            yield number, _parsed(raw, f"line {number} of {path}"), raw


def free_name(path: Path) -> str:
    """An unused name beside the dataset for its usable rows."""
    beside = path.with_name(path.stem if path.exists() else path.name)
    names = (beside.with_name(f"{beside.name}.fixed{n}.jsonl") for n in ["", *(f"-{i}" for i in range(2, 1000))])
    return str(next(name for name in names if not name.exists()))


def _parsed(raw: bytes, where: str) -> Row | Broken:
    try:
        row: Row = parse_object(raw, where)
    except Refused as refusal:
        cause = refusal.__context__
        if isinstance(cause, UnicodeDecodeError):
            return Broken("not_utf8", refusal)
        return Broken("not_an_object" if cause is None else "broken_json", refusal)
    return row


def _json(path: Path) -> Iterator[Line]:
    """The rows of a list of objects, of an object with one such list, or else of JSON lines, as in
    `program.rows.iter_json`."""
    items = json_items(path)
    if items is None:
        yield from _json_lines(path)
        return
    for number, row in enumerate(items, start=1):
        if not isinstance(row, dict):
            row = Broken("not_an_object", not_an_object(f"item {number} of {path}", row))
        yield number, row, None


def _csv(path: Path, delimiter: str) -> Iterator[Line]:
    """The rows of a table, as `program.rows.iter_csv` reads them. A rejected row is broken, and reading continues."""
    wrong_bytes = list[tuple[int, bytes]]()
    csv.field_size_limit(CELL_CHARACTERS)
    reader = csv.reader(_text_lines(path, wrong_bytes), delimiter=delimiter, strict=True)
    names: list[str] | None = None
    while True:
        start = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield start, Broken("broken_json", broken_table(f"line {start} of {path}", error)), None
            continue
        if wrong_bytes:
            number, raw = wrong_bytes[0]
            yield number, Broken("not_utf8", not_utf8(f"line {number} of {path}", raw)), None
            wrong_bytes.clear()
            names = cells if names is None else names
        elif names is None:
            names = cells
            require_distinct(names, path)
        elif cells and len(cells) == len(names):
            yield reader.line_num, dict(zip(names, cells, strict=True)), None
        elif cells:
            refusal = other_columns(f"line {reader.line_num} of {path}", names)
            yield reader.line_num, Broken("broken_json", refusal), None


def _text_lines(path: Path, wrong_bytes: list[tuple[int, bytes]]) -> Iterator[str]:
    """The lines of a text. Lines that are not UTF-8 go to `wrong_bytes` with their numbers."""
    for number, raw in numbered_lines(path):
        try:
            yield raw.decode("utf-8-sig")
        except UnicodeDecodeError:
            wrong_bytes.append((number, raw))
            yield raw.decode("utf-8", "replace")
