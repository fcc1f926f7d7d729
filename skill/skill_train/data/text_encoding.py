"""Guesses the encoding of a text file that is not UTF-8, and gives the command that converts it."""

from __future__ import annotations

import shlex
from pathlib import Path

from skill_train.program.events import Refused
from skill_train.program.rows import numbered_lines

_MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


def rewriting_command(path: Path) -> str | None:
    """The `iconv` command that converts the whole file to UTF-8; None if it would damage rows that already are UTF-8,
    or if a line is too long for a row.

    Nearly every file that is neither UTF-8 nor UTF-16 is Windows-1252, which includes Latin-1. If some other lines are
    UTF-8 beyond ASCII, the file was joined from two files, and no single command repairs it.
    """
    if not path.is_file() or path.suffix == ".parquet":
        return None
    try:
        encoding = _encoding(path)
    except Refused:
        return None
    if encoding is None:
        return None
    new = path.with_name(f"{path.stem}.utf8{path.suffix}")
    return f"iconv -f {encoding} -t UTF-8 {shlex.quote(str(path))} > {shlex.quote(str(new))}"


def _encoding(path: Path) -> str | None:
    with open(path, "rb") as file:
        if (mark := _MARKS.get(file.read(2))) is not None:
            return mark
    utf8 = [_is(line, "utf-8") for _, line in numbered_lines(path) if not line.isascii()]
    readable = all(_is(line, "windows-1252") for _, line in numbered_lines(path))
    return "WINDOWS-1252" if utf8 and readable and not any(utf8) else None


def _is(line: bytes, encoding: str) -> bool:
    try:
        line.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True
