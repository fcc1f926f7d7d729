"""Rows from the start of a file."""

from __future__ import annotations

import csv
import json
from typing import Any

import pytest

from skill_train.core.errors import UsageError
from skill_train.hub.rows import first_rows

ROWS = [{"prompt": f"Größe {n}?", "completion": "line\nline"} for n in range(50)]
LINES = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS).encode()
TABLE = ("prompt,completion\n" + "".join(f'Größe {n}?,"line\nline"\n' for n in range(50))).encode()
FILES = {
    "a.jsonl": LINES,
    "a.ndjson": b"\xef\xbb\xbf" + LINES + b"\n\n",
    "a.json": json.dumps(ROWS, indent=1, ensure_ascii=False).encode(),
    "b.json": LINES,  # lines under that name are usual
    "a.csv": TABLE,
    "a.tsv": TABLE.replace(b",", b"\t"),
}


def parse(data: bytes, name: str, *, whole: bool) -> list[Any]:
    return [row for _, row in first_rows.numbered(data, name, whole=whole)]


@pytest.mark.parametrize("name", FILES)
def test_a_whole_file(name: str) -> None:
    assert parse(FILES[name], name, whole=True) == ROWS


@pytest.mark.parametrize("name", FILES)
def test_a_cut_file_gives_its_whole_rows_wherever_it_is_cut(name: str) -> None:
    for cut in range(len(FILES[name]) // 2, len(FILES[name]) // 2 + 90):
        rows = parse(FILES[name][:cut], name, whole=False)
        assert rows == ROWS[: len(rows)]
        assert len(rows) >= 10


def test_a_long_cell_is_read_as_training_reads_it() -> None:
    csv.field_size_limit(131_072)  # as in a new process
    text = "word " * 40_000
    assert parse(f"text\n{text}\n".encode(), "a.csv", whole=True) == [{"text": text}]


def test_text_has_a_row_a_line() -> None:
    assert parse(b"one\ntwo\n", "a.txt", whole=True) == [{"text": "one"}, {"text": "two"}]


@pytest.mark.parametrize(
    ("name", "data", "code", "words"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a"', "unreadable_dataset", "line 2 is not JSON"),
        ("a.jsonl", b"[1]", "unreadable_dataset", "line 1 is not a JSON object"),
        ("a.json", b"[1]", "unreadable_dataset", "not a JSON object"),
        ("a.json", b'[{"a": 1', "unreadable_dataset", "it is not JSON"),
        ("a.json", b'[{"a": 1}, {"a": 2}, {"a": 3', "unreadable_dataset", "it is not JSON"),
        ("a.json", b'[{"a": 1}, {"a": 2} {"a": 3}]', "unreadable_dataset", "it is not JSON"),
        ("a.json", b'[{"a": 1}]\n[{"a": 2}]', "unreadable_dataset", "it is not JSON"),
        ("a.jsonl", b'{"a": "\xff"}', "unreadable_dataset", "byte 7"),
        (
            "a.csv",
            b"a,b\n1,2,\n3,4,\n",
            "unreadable_dataset",
            "line 2 of {} does not have as many columns as the header",
        ),
        (
            "a.tsv",
            b"a\tb\n1\t2\n3\t4\t5\n",
            "unreadable_dataset",
            "line 3 of {} does not have as many columns as the header",
        ),
        ("a.csv", b"a,b\n1\n3,4\n", "unreadable_dataset", "line 2 of {} does not have as many columns as the header"),
        ("a.csv", b"a,b,a\n1,2,3\n", "unreadable_dataset", "{} has 2 columns with the name 'a'"),
        ("a.csv", b'a,b\n1,"2\n', "unreadable_dataset", "unexpected end of data"),
        ("a.jsonl", b'{"b": 1}\n{"a": 1, "a": 2}', "unreadable_dataset", "line 2 has the key 'a' twice"),
        ("a.json", b'[{"b": 1}, {"c": [{"a": 1, "a": 2}]}]', "unreadable_dataset", "item 2 has the key 'a' twice"),
    ],
)
def test_what_is_not_rows_is_refused(name: str, data: bytes, code: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(data, name, whole=True)
    assert caught.value.code == code
    assert words.format(name) in caught.value.message


@pytest.mark.parametrize("data", [b"a,b\n1,2\n3\n5,6\n", b"a,a\n1,2\n3,4\n"])
def test_a_mistake_in_the_start_of_a_table_is_refused(data: bytes) -> None:
    """Of a table that is too large to be read whole."""
    with pytest.raises(UsageError) as caught:
        parse(data, "a.csv", whole=False)
    assert caught.value.code == "unreadable_dataset"


def test_an_empty_table_and_empty_lines() -> None:
    assert parse(b"", "a.csv", whole=True) == parse(b"a,b\n", "a.csv", whole=True) == []
    assert parse(b"a,b\n\n1,2\n\n", "a.csv", whole=True) == [{"a": "1", "b": "2"}]


def test_a_start_that_ends_in_the_first_row_of_a_list_is_refused() -> None:
    with pytest.raises(UsageError, match="its first row is not JSON, or larger than what was read"):
        parse(b'[{"a": 1', "a.json", whole=False)
