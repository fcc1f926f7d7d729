"""A folder of pictures on the Hub, as the `imagefolder` of `datasets` 5.2 reads it: a table whose column `file_name`,
or another that ends so, names files beside the table. The rows have the pictures in a column of another name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any

from skill_train.core.errors import UsageError
from skill_train.program.examples import Row
from skill_train.program.rows import FILE_NAME, TABLES

_ENDINGS = {"file_name": "image", "file_names": "images"}  # and the column's name where it is no more than that


def is_table(names: list[str]) -> bool:
    """Whether the files of a split are tables of pictures."""
    return all(PurePosixPath(name).name in TABLES for name in names)


def names_pictures(row: Row) -> bool:
    return any(FILE_NAME.fullmatch(name) for name in row)


def picture_names(row: Row, table: str, where: str) -> Iterator[str]:
    """The files that a row names, as the repository calls them.

    Raises:
        UsageError: a name leaves the folder of the table.
    """
    for column, value in row.items():
        if FILE_NAME.fullmatch(column):
            for name in value if isinstance(value, list) else [value] if value else []:
                yield _in_repository(str(name), table, where)


def as_read(row: Row, table: str, where: str, read: Callable[[str], bytes]) -> Row:
    """The row as `datasets` makes it, with the bytes of its pictures.

    Args:
        table: the name of the file of the row.
        where: the row, for messages.
        read: the content of a file of the repository.
    """

    def picture(name: Any) -> Row:
        return {"bytes": read(_in_repository(str(name), table, where)), "path": str(name)}

    made: Row = {}
    for column, value in row.items():
        if not FILE_NAME.fullmatch(column):
            made[column] = value
        elif isinstance(value, list):
            made[_column(column)] = [picture(name) for name in value]
        else:
            made[_column(column)] = picture(value) if value else None
    return made


def _column(name: str) -> str:
    ending = next(ending for ending in _ENDINGS if name.endswith(ending))
    return name.removesuffix(ending).rstrip("_") or _ENDINGS[ending]


def _in_repository(name: str, table: str, where: str) -> str:
    folder = str(PurePosixPath(table).parent)
    path = os.path.normpath(f"{folder}/{name}").replace(os.sep, "/")
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
