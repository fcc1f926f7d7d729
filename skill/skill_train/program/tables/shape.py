"""How a table is written: the sign between its cells, its quotes, and the JSON that pandas makes of one."""

import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from skill_train.program.events import Refused
from skill_train.program.examples import MEND, Row, unreadable

SIGN_SAID = re.compile(r'"?sep=(?P<sign>\t|[^\w\s"])"?\s*')  # a first line for Excel
QUOTED = re.compile(r'(?<![^,;|\t])"[^"]*(?:""[^"]*)*"')  # a cell, whose signs are text
SPLITS_ALONE = {"train", "validation", "valid", "val", "dev", "test", "eval"}  # keys of a document
Record = tuple[int, list[str], list[str], csv.Error | None]  # of a row: its first line's number, cells, lines, fault


def sign_of(first_line: str, suffix: str, lines: Iterable[str]) -> str:
    """The sign between cells. In a .csv it is one that the header has outside of quotes: Excel writes a semicolon where
    the comma is for decimals. Of several signs it is the first that most `lines` have as often as the header."""
    if (sign_line := SIGN_SAID.fullmatch(first_line)) is not None:
        return sign_line["sign"]
    header = QUOTED.sub("", first_line)
    signs = "\t" if suffix == ".tsv" else [sign for sign in ",;\t|" if sign in header] or ","
    rows = [QUOTED.sub("", line) for line in islice(lines, 1, 100)] if len(signs) > 1 else []
    return max(signs, key=lambda sign: sum(row.count(sign) == header.count(sign) for row in rows))


MARKED = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


def utf16(raw: bytes) -> str | None:
    """The kind of UTF-16 or UTF-32, or None. Plain letters without a mark are UTF-8 too, with zeros."""
    zeros = raw[::2].count(0), raw[1::2].count(0)
    width = 32 if 3 * sum(zeros) > 2 * len(raw) else 16
    unmarked = f"UTF-{width}{('BE', 'LE')[zeros[1] > zeros[0]]}" if max(zeros) - min(zeros) > len(raw) // 8 else None
    return next((kind for mark, kind in MARKED.items() if raw.startswith(mark)), unmarked)


# Encodings of any other text, by the names of iconv: that of Windows, which includes Latin-1; of DOS (Excel's "CSV
# (MS-DOS)"); of old Macs ("CSV (Macintosh)").
OLD_ENCODINGS = {"WINDOWS-1252": "cp1252", "CP850": "cp850", "MACINTOSH": "mac_roman"}
IN_WORDS = "’\xad"  # an apostrophe, and the sign for a soft hyphen


def old_encoding(raw: bytes) -> str | None:
    """The encoding in `OLD_ENCODINGS` in which a text reads most like words; of equal ones the first. None if
    it is not the first one of all, and no letter inside a word speaks for it."""
    odd: dict[str, tuple[int, int]] = {}
    for name, codec in OLD_ENCODINGS.items():
        with suppress(UnicodeDecodeError):
            odd[name] = odd_letters(raw.decode(codec))
    best = min(odd, key=lambda name: odd[name][0], default=None)
    return best if best == "WINDOWS-1252" or (best is not None and odd[best][1]) else None


def odd_letters(text: str) -> tuple[int, int]:
    """Counts the characters beyond ASCII inside a word. The first number is of those that no word has there: signs, and
    letters of another case than their neighbours. The second is of all."""
    odd = count = 0
    for before, one, after in zip(text, text[1:], text[2:], strict=False):
        if not one.isascii() and one not in IN_WORDS and before.isalpha() and after.isalpha():
            odd += not one.isalpha() or one.isupper() != (before + after).isupper()
            count += 1
    return odd, count


def require_distinct(names: Iterable[str], table: Path) -> None:
    """Refuses a table with two columns of one name: a row would keep only the last of them."""
    for name, count in Counter(filter(None, names)).most_common(1):
        if count > 1:
            message = f"{table} has {count} columns with the name {name[:200]!r}"
            raise unreadable(message, "one name for each column", hint="rename or remove one of them")


def records_of(lines: Iterable[str], sign: str) -> Iterator[Record]:
    taken = list[str]()

    def taking() -> Iterator[str]:
        for line in lines:
            taken.append(line)
            yield line

    reader = csv.reader(taking(), delimiter=sign, strict=True)
    while True:
        start, cells, error = reader.line_num + 1, list[str](), None
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as caught:
            error = caught
        yield start, cells, taken[:], error
        taken.clear()


def vote(record: Record, sign: str, columns: int) -> int:
    """1 for a row that needs its quotes, -1 for lines that would be rows too if quotes were text, 0 for others. All
    programs that write commas quote a text with a line break, so with commas two lines may well be one row: 0 too."""
    _, cells, lines, _ = record
    counts = [line.count(sign) + 1 for line in lines if line.strip()]
    if columns == 1 or len(cells) != columns:
        return 0
    return 1 if set(counts) != {columns} else -(len(counts) > (2 if sign == "," else 1))


def require_quotes(records: Iterable[Record], several: Record, sign: str, table: object) -> None:
    """Refuses a table whose row `several` may be several rows, unless more rows need their quotes. Most programs write
    a .tsv without quotes, and readers make one row of all text between two quotes. In a table with commas, one other
    row of several lines is enough: then nobody forgot to close a quote."""
    start, cells, lines, _ = several
    if sign == ",":
        needed = sum(len(record[2]) > 1 for record in records) > 1
    else:
        needed = sum(vote(record, sign, len(cells)) for record in records) > 0
    if not needed:
        raise unreadable(
            f"a quote in line {start} of {table} and one in line {start + len(lines) - 1} may make one row of several",
            "a table that shows whether its quotes hold line breaks",
            lines[0][:80].rstrip(),
            "write the rows to a .jsonl file: if each line is one, pandas reads the table with quoting=3 and dtype=str",
        )


def require_no_space(record: Record, sign: str, columns: int, table: object) -> None:
    """Refuses quotes behind a sign and a space: they would be text. In a .tsv, mostly without quotes, they may be."""
    start, cells, lines, _ = record
    text = sign + "".join(lines)
    spaced = [cell for cell in cells if cell.lstrip(" ")[:1] == '"' != cell[:1]] if ' "' in text else []
    if sign == "\t" or not any(sign + cell in text for cell in spaced):  # a quoted cell has its own quotes twice
        return
    if len(next(csv.reader(lines, delimiter=sign, skipinitialspace=True))) == columns:
        found = f"in line {start} of {table} a space stands before the quote of a cell, so the quote would be text"
        hint = "remove such spaces; pandas reads the table with skipinitialspace=True and dtype=str"
        raise unreadable(found, "no space there", lines[0][:80].rstrip(), hint)


# Keys beside the rows of a document, whose value is meant for all rows and stands in none.
FOR_ALL = re.compile(r"sys(?:tem|[_ -]).*|instructions?|prompt|persona|context|tools|functions", re.IGNORECASE)


def items_of(document: Any, path: object) -> list[Any]:
    """The rows of a document: the list that it is or holds, alone or as `train`, a table of pandas, or itself alone."""
    if not isinstance(document, dict):
        return document if isinstance(document, list) else [document]
    if len(document) == 1 and isinstance(splits := next(iter(document.values())), dict) and "train" in splits:
        return items_of(splits, path) if splits.keys() <= SPLITS_ALONE else [document]
    if rows := by_lists(document):
        return rows
    lists = [value for value in document.values() if isinstance(value, list)]
    if isinstance(train := document.get("train"), list) and document.keys() <= SPLITS_ALONE:
        return train
    if len(lists) == 1 and not is_chat(lists[0]):
        texts = (name for name, value in document.items() if value and isinstance(value, (str, dict)))
        name = next(filter(FOR_ALL.fullmatch, texts), None)
        if name is not None and lists[0] and isinstance(lists[0][0], dict):
            hint = "write it into each row, a system prompt as its column `system`, or remove it"
            raise unreadable(f"{path} has {name!r} beside its rows", "rows alone", str(document[name])[:80], hint)
        return lists[0]
    return by_columns(document) or by_index(document) or by_cells(document) or [document]


def is_message(names: Iterable[str]) -> bool:
    """Whether these are the columns of one message, which is no row."""
    there = {*names}
    part = {"role", "text"} <= there and not there.isdisjoint({"message_id", "parent_id", "conversation_id"})
    return part or {"role", "content"} <= there or {"from", "value"} <= there


def is_chat(item: Any) -> bool:
    return isinstance(item, list) and item != [] and all(isinstance(each, dict) and is_message(each) for each in item)


def not_an_object(where: str, item: Any) -> Refused:
    found, row = "not a JSON object", '{"column": value, …}'
    if is_chat(item):
        row = '{"messages": […]}'
        found = f"a list of messages, and a row is {row}"
    return unreadable(f"{where} is {found}", row, repr(item)[:80], MEND)


def by_columns(table: Row) -> list[Row]:
    """The rows of `{"column": {"0": value, "1": …}, …}`; empty for anything else."""
    columns = list(table.values())
    if not all(isinstance(column, dict) and column.keys() == columns[0].keys() for column in columns):
        return []
    index = list(columns[0]) if columns else []
    return [{name: table[name][key] for name in table} for key in index] if all(map(str.isdigit, index)) else []


def by_lists(table: Row) -> list[Row]:
    """The same of `{"column": [value, …], …}`, where no value is an object: messages and tools are lists of one row."""
    columns = list(table.values())
    if table.keys() >= {"columns", "data"} or not all(isinstance(column, list) for column in columns):
        return []
    plain = not any(isinstance(value, dict) for column in columns for value in column)
    alike = plain and len({*map(len, columns)}) == 1
    return [dict(zip(table, values, strict=True)) for values in zip(*columns, strict=True)] if alike else []


def by_index(table: Row) -> list[Row]:
    """The same of `{"0": {"column": value, …}, "1": …}`."""
    rows = list(table.values())
    return rows if all(map(str.isdigit, table)) and all(isinstance(row, dict) for row in rows) else []


def by_cells(table: Row) -> list[Row]:
    """The same of `{"columns": […], "index": […], "data": [[…], …]}`."""
    names, rows = table.get("columns"), table.get("data")
    if not (isinstance(names, list) and isinstance(rows, list) and table.keys() <= {"columns", "index", "data"}):
        return []
    alike = all(isinstance(row, list) and len(row) == len(names) for row in rows)
    alike = alike and all(isinstance(name, str) for name in names) and len({*names}) == len(names)
    return [dict(zip(names, row, strict=True)) for row in rows] if alike else []
