"""Reads the first rows from the start of a text file, and makes the rows of a folder of pictures. Pure functions.

A folder of pictures is read as by the `imagefolder` of `datasets` 5.2. A column `file_name`, or one whose name ends
with it, names files beside the table. The rows have the pictures themselves, in a column of another name.
"""

import json
import posixpath
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from skill_train.core.errors import UsageError, refusals
from skill_train.program.examples import RepeatedKey, Row, with_distinct_keys
from skill_train.program.pictures.locations import FILE_NAME, TABLES
from skill_train.program.rows import LFS_POINTER, Broken, table_rows

_ENDINGS = {"file_name": "image", "file_names": "images"}  # and the new name of a column that is called only that


def numbered(data: bytes, name: str, *, whole: bool) -> list[tuple[int, Row]]:
    """The rows in these bytes, each with its line in the file, or with its number if rows are not lines.

    Args:
        data: the file, or its start.
        name: the file name; its extension tells the format: .jsonl, .ndjson, .json, .csv, .tsv or .txt.
        whole: `data` is the complete file. Otherwise a truncated last row is left out.

    Raises:
        UsageError: the data is not UTF-8, not JSON, or has no rows.
    """
    if data.startswith(LFS_POINTER):
        raise _broken(name, "it is a pointer of Git LFS, not the file itself", "the file, uploaded to the repository")
    text = _text(data, name, whole=whole)
    kind = name.rsplit(".", 1)[-1]
    if kind == "json" and text.lstrip().startswith("["):
        if whole:  # checks the text after the rows too, because training reads all of it
            try:
                json.loads(text)
            except (ValueError, RecursionError) as error:
                raise _broken(name, f"it is not JSON: {error}") from None
        return list(enumerate(_array(text, name), start=1))
    if kind in ("csv", "tsv"):
        return _table(text, name, whole=whole)
    lines = enumerate(_lines(text, whole=whole), start=1)
    if kind == "txt":
        return [(number, {"text": line}) for number, line in lines]
    return [(number, _object(line, number, name)) for number, line in lines if line.strip()]


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
        row = json.loads(line, object_pairs_hook=with_distinct_keys)
    except RepeatedKey as error:
        raise _broken(name, _repeated(f"line {number}", error)) from None
    except (ValueError, RecursionError) as error:
        raise _broken(name, f"line {number} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise _broken(name, f"line {number} is not a JSON object")
    return row


def _array(text: str, name: str) -> list[Row]:
    decoder, rows = json.JSONDecoder(object_pairs_hook=with_distinct_keys), list[Row]()
    at = _skip(text, text.index("[") + 1)
    while at < len(text) and text[at] != "]":
        try:
            row, at = decoder.raw_decode(text, at)
        except RepeatedKey as error:
            raise _broken(name, _repeated(f"item {len(rows) + 1}", error)) from None
        except (ValueError, RecursionError):
            break  # the rest is missing
        if not isinstance(row, dict):
            raise _broken(name, "an entry of the list is not a JSON object")
        rows.append(row)
        at = _skip(text, at)
    if not rows:
        raise _broken(name, "its first row is not JSON, or larger than what was read")
    return rows


def _repeated(where: str, error: RepeatedKey) -> str:
    return f"{where} has the key {str(error)[:80]!r} twice in one object"


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n,":
        at += 1
    return at


def _table(text: str, name: str, *, whole: bool) -> list[tuple[int, Row]]:
    """The rows as training reads them. Of a table that is not whole, the last one may be cut."""
    rows = list[tuple[int, Row]]()
    with refusals():
        lines = list(table_rows(Path(name), text, whole=whole))
        for number, row, _ in lines if whole else lines[:-1]:
            if isinstance(row, Broken):
                raise row.refusal
            rows.append((number, row))
    return rows


def _broken(name: str, why: str, expected: str = "JSON objects, one a line or in a list") -> UsageError:
    return UsageError(
        f"{name}: {why}",
        code="unreadable_dataset",
        expected=expected,
        hint="download the dataset, repair it and use the local file",
    )


def is_picture_table(names: list[str]) -> bool:
    """Whether the files of a split are tables of pictures."""
    return all(PurePosixPath(name).name in TABLES for name in names)


def picture_names(row: Row, table: str, where: str) -> Iterator[str]:
    """The paths in the repository of the files that a row names.

    Raises:
        UsageError: a name leads out of the table's folder.
    """
    for column, value in row.items():
        if FILE_NAME.fullmatch(column):
            for name in value if isinstance(value, list) else [value] if value else []:
                yield _in_repository(str(name), table, where)


def with_bytes(row: Row, table: str, where: str, read: Callable[[str], bytes]) -> Row:
    """The row as `datasets` makes it, with the bytes of its pictures.

    Args:
        table: the name of the file of the row.
        where: the row, for messages.
        read: the content of a file of the repository.

    Raises:
        UsageError: a name leads out of the table's folder, or two columns get the same name.
    """

    def picture(name: Any) -> Row:
        return {"bytes": read(_in_repository(str(name), table, where)), "path": str(name)}

    changed: Row = {}
    for column, value in row.items():
        column_name = _column(column)
        if column_name in changed:
            raise UsageError(
                f"{where} has two columns that `datasets` calls {column_name[:80]}, and keeps one of them",
                code="unreadable_dataset",
                expected="one column of that name once file_name has become image, and x_file_name x",
                got=column[:80],
                hint="rename or remove one of them in the table",
            )
        if not FILE_NAME.fullmatch(column):
            changed[column_name] = value
        elif isinstance(value, list):
            changed[column_name] = [picture(name) for name in value]
        else:
            changed[column_name] = picture(value) if value else None
    return changed


def _column(name: str) -> str:
    """The name that `datasets` gives a column."""
    if not FILE_NAME.fullmatch(name):
        return name
    ending = next(ending for ending in _ENDINGS if name.endswith(ending))
    return name.removesuffix(ending).rstrip("_") or _ENDINGS[ending]


def _in_repository(name: str, table: str, where: str) -> str:
    folder = str(PurePosixPath(table).parent)
    path = posixpath.normpath(f"{folder}/{name}")
    below = folder == "." or path.startswith(f"{folder}/")
    if "://" in name or name.startswith("/") or path.startswith("../") or not below:
        raise UsageError(
            f"{where}: {name[:200]} lies outside the folder of {table}",
            code="bad_picture",
            expected="a file beside the table, or below it",
            got=name[:200],
            hint="upload the picture beside the table, and write its name",
        )
    return path
