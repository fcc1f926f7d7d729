"""Reading goes on after a broken line, and reads whole rows exactly as training does."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command_child import Commands
from skill_train.core.errors import SkillTrainError, UsageError
from skill_train.data import read_rows
from skill_train.data.scan import scan
from skill_train.hub.rows.first_rows import numbered
from skill_train.program.events import Refused
from skill_train.program.rows import CELL_CHARACTERS, Broken, iter_rows, lines_of
from skill_train.recipe.fields import Recipe

ROW = {"prompt": "a", "completion": "b"}
LINE = json.dumps(ROW).encode() + b"\n"

# What the file holds, and (line, kind) of what comes out; None is a whole row.
FILES: list[tuple[str, bytes, list[tuple[int, str | None]]]] = [
    ("cut.jsonl", LINE + b'{"prompt": \n' + LINE, [(1, None), (2, "broken_json"), (3, None)]),
    ("latin-1.jsonl", b'{"prompt": "caf\xe9"}\n' + LINE, [(1, "not_utf8"), (2, None)]),
    (
        "list.jsonl",
        LINE + b"[1]\n7\nnull\n",
        [(1, None), (2, "not_an_object"), (3, "not_an_object"), (4, "not_an_object")],
    ),
    ("two in a line.jsonl", LINE.strip() + LINE, [(1, "broken_json")]),
    ("blank lines.jsonl", b"\n" + LINE + b"  \n\n" + LINE, [(2, None), (5, None)]),
    ("no end.jsonl", LINE + LINE.strip(), [(1, None), (2, None)]),
    ("bom.jsonl", b"\xef\xbb\xbf" + LINE + LINE, [(1, None), (2, None)]),
    ("windows.jsonl", LINE.strip() + b"\r\n" + LINE, [(1, None), (2, None)]),
    ("indented.jsonl", b"  " + LINE + b"\t" + LINE.strip() + b"  \n", [(1, None), (2, None)]),
    ("items.json", b'[{"prompt": "a", "completion": "b"}, "words"]', [(1, None), (2, "not_an_object")]),
    ("lines.json", LINE + b"{]\n" + LINE, [(1, None), (2, "broken_json"), (3, None)]),
    (
        "wide.csv",
        b"prompt,completion\na,b\na,b,c\na\na,b\n",
        [(2, None), (3, "broken_json"), (4, "broken_json"), (5, None)],
    ),
    ("latin-1.csv", b"prompt,completion\na,b\ncaf\xe9,b\na,b\n", [(2, None), (3, "not_utf8"), (4, None)]),
    ("semicolon.csv", b"prompt;completion\na;b\na;b;c\na;b\n", [(2, None), (3, "broken_json"), (4, None)]),
    ("quote.csv", b'prompt,completion\na,b\na,"b"c\na,b\n', [(2, None), (3, "broken_json"), (4, None)]),
    ("both.csv", b'prompt,completion\ncaf\xe9,"b"c\na,b\n', [(2, "not_utf8"), (3, None)]),
    ("blank lines.csv", b"prompt,completion\n\na,b\n\na,b,c\n", [(3, None), (5, "broken_json")]),
    ("open quote.csv", b'prompt,completion\na,b\na,"b\nc', [(2, None), (3, "broken_json")]),
]


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_a_pointer_of_git_lfs_is_not_the_file(ending: str, tmp_path: Path) -> None:
    """Git leaves it in a clone without the content. As a table it has one column of text."""
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
    (tmp_path / f"rows.{ending}").write_bytes(pointer)
    with pytest.raises(Refused, match="pointer of Git LFS") as refused:
        list(lines_of(tmp_path / f"rows.{ending}"))
    assert (refused.value.error["code"], refused.value.error["hint"]) == ("unreadable_dataset", "git lfs pull")


@pytest.mark.parametrize(("name", "content", "expected"), FILES, ids=[f[0] for f in FILES])
def test_what_is_broken_is_handed_over_with_its_line(
    tmp_path: Path, name: str, content: bytes, expected: list[tuple[int, str | None]]
) -> None:
    (tmp_path / name).write_bytes(content)
    read = list(read_rows.read(_recipe(tmp_path / name)))
    assert [(line, row.kind if isinstance(row, Broken) else None) for line, row, _ in read] == expected
    assert all(row == ROW for _, row, _ in read if isinstance(row, dict))


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train[1:]", [2, 4, 5, 6]),
        ("train[3:]", [2, 6]),
        ("train[:1]", [1, 2]),  # training looks at one row more to know that it is at the end
        ("train[3:9]", [2, 6]),
        ("train[50%:]", [2, 5, 6]),
        ("train[4:]", [2]),
    ],
)
def test_a_slice_does_not_hide_a_line_that_training_is_refused_at(
    tmp_path: Path, split: str, expected: list[int]
) -> None:
    path = tmp_path / "cut.jsonl"
    path.write_bytes(LINE + b'{"prompt": \n\n' + LINE * 3)
    read = list(read_rows.read(dataclasses.replace(_recipe(path), split=split)))
    assert [line for line, _, _ in read] == expected
    assert [line for line, row, _ in read if isinstance(row, Broken)] == [2]
    with pytest.raises(Refused, match="line 2 of"):
        list(iter_rows(str(path), split=split))
    path.write_bytes(LINE * 2 + b'{"prompt": \n')
    assert [line for line, _, _ in read_rows.read(dataclasses.replace(_recipe(path), split="train[:1]"))] == [1]
    assert [line for line, _ in iter_rows(str(path), split="train[:1]")] == [1]  # it never comes there


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_a_long_cell_is_a_text_as_in_every_other_file(tmp_path: Path, suffix: str) -> None:
    """Python's own limit is 131,072 characters."""
    sign, text = {".csv": ",", ".tsv": "\t"}[suffix], "word " * 40_000
    path = tmp_path / f"long{suffix}"
    path.write_text(f'prompt{sign}completion\na{sign}"{text}"\na{sign}b\n')
    read = [row for _, row, _ in read_rows.read(_recipe(path))]
    assert read == [{"prompt": "a", "completion": text}, ROW]
    assert [row for _, row in iter_rows(str(path), split="train")] == read


def test_training_names_the_line_behind_empty_ones(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('prompt,completion\na,b\n\n\na,"b"c\n')
    with pytest.raises(Refused, match=f"line 5 of {path} is broken"):
        list(iter_rows(str(path), split="train"))


def test_a_cell_without_end_is_broken_and_takes_no_more_memory(tmp_path: Path) -> None:
    path = tmp_path / "open.csv"
    cell = "x" * (CELL_CHARACTERS + 1)
    path.write_text(f'prompt,completion\na,b\na,"{cell}"\na,b\n')
    read = [(line, row.kind if isinstance(row, Broken) else None) for line, row, _ in read_rows.read(_recipe(path))]
    assert read == [(2, None), (3, "broken_json"), (4, None)]
    with pytest.raises(Refused, match=f"line 3 of {path} is broken: field larger than field limit"):
        list(iter_rows(str(path), split="train"))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.ndjson", "rows.csv", "rows.tsv"])
def test_a_line_without_end_is_refused_by_its_number(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    _then_a_terabyte(path, LINE * 2 if "json" in name else b"text\na\n")
    for read in (read_rows.read(_recipe(path)), iter_rows(str(path), split="train")):
        found: list[Any] = []
        with pytest.raises(Refused, match=f"line 3 of {path} is too long") as caught:
            found.extend(read)
        assert (caught.value.error["code"], caught.value.exit_code) == ("unreadable_dataset", 2)
        assert "50,000,000 bytes" in caught.value.error["expected"] and ".jsonl" in caught.value.error["hint"]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv"])
def test_a_first_line_without_end_is_refused(tmp_path: Path, name: str) -> None:
    _then_a_terabyte(tmp_path / name, b"")
    with pytest.raises(Refused, match="line 1 of"):
        list(read_rows.read(_recipe(tmp_path / name)))


def test_a_line_may_have_as_many_bytes_as_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(LINE * 2 + LINE.strip())
    monkeypatch.setattr("skill_train.program.rows.LINE_BYTES", len(LINE))
    assert len(list(read_rows.read(_recipe(path)))) == 3
    monkeypatch.setattr("skill_train.program.rows.LINE_BYTES", len(LINE) - 1)
    with pytest.raises(Refused, match="line 1 of"):
        list(read_rows.read(_recipe(path)))


def test_a_large_document_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    _then_a_terabyte(path, b"[")
    for read in (read_rows.read(_recipe(path)), iter_rows(str(path), split="train")):
        with pytest.raises(Refused) as caught:
            list(read)
        error = caught.value.error
        assert (error["code"], error["got"]) == ("unreadable_dataset", "1,000,000,000,000 bytes")
        assert "2,000,000,000 bytes" in error["expected"] and ".jsonl" in error["hint"]
    path.write_text(json.dumps([ROW]))
    monkeypatch.setattr("skill_train.program.rows.DOCUMENT_BYTES", path.stat().st_size)
    assert len(list(read_rows.read(_recipe(path)))) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such files")
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet"])
def test_a_pipe_is_not_waited_for_and_a_device_not_read(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    (tmp_path / f"device.{name}").symlink_to("/dev/zero")
    for path in (tmp_path / name, tmp_path / f"device.{name}"):
        with pytest.raises(SkillTrainError, match="a pipe or a device"):
            list(read_rows.read(_recipe(path)))
        with pytest.raises(Refused) as caught:
            list(iter_rows(str(path), split="train"))
        assert (caught.value.error["code"], caught.value.exit_code) == ("missing_file", 2)
        assert ".jsonl" in caught.value.error["hint"]


def _then_a_terabyte(path: Path, begin: bytes) -> None:
    """These bytes and then nothing that takes room."""
    with open(path, "wb") as file:
        file.write(begin)
        try:
            file.truncate(10**12)
        except OSError:
            pytest.skip("this disk has no files with holes of that size")


REFUSED: list[tuple[str, bytes, str]] = [
    ("rows.jsonl", b"{", "unreadable_dataset"),
    ("rows.jsonl", b"[]", "unreadable_dataset"),
    ("rows.jsonl", b"\xff", "unreadable_dataset"),
    ("rows.json", b"[1]", "unreadable_dataset"),
    ("rows.csv", b"a,b\n1\n", "unreadable_dataset"),
    ("rows.csv", b'a,b\n1,"b"c\n', "unreadable_dataset"),
    ("rows.txt", b"a", "unreadable_dataset"),
]


@pytest.mark.parametrize(("name", "content", "code"), REFUSED)
def test_what_training_refuses_has_a_way_on(tmp_path: Path, name: str, content: bytes, code: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Refused) as caught:
        list(iter_rows(str(tmp_path / name), split="train"))
    assert caught.value.error["code"] == code and caught.value.error["hint"]


TWICE = [
    ("usual.jsonl", LINE + b'{"prompt": "a", "completion": "b", "completion": "c"}\n', "line 2 of", "completion"),
    ("unusual.jsonl", LINE + b' {"prompt": "a", "completion" : "b", "completion": "c"}\n', "line 2 of", "completion"),
    ("escaped.jsonl", b'{"prompt": "a", "completion": "b", "\\u0070rompt": "c"}\n', "line 1 of", "prompt"),
    ("nested.jsonl", b'{"messages": [{"role": "user", "role": "assistant", "content": "a"}]}\n', "line 1 of", "role"),
    ("list.json", b'[{"prompt": "a"},\n {"prompt": "a", "more": {"x": 1, "x": 1}}]', "item 2 of", "x"),
    ("lists.json", b'{"data": [{"prompt": "a"}], "data": [{"prompt": "b"}]}', "", "data"),
    ("dropped.json", b'[{"prompt": "a"}, {"more": {"x": 1, "x": 2}, "more": 3}]', "item 2 of", "x"),
    ("lines.json", LINE + b'{"prompt": "a", "prompt": "b"}\n', "line 2 of", "prompt"),
    # Compared each with each, as many keys as fit into a line would take hours.
    ("many.jsonl", b"{" + b"".join(b'"%d": 0, ' % n for n in range(100_000)) + b'"x": 0, "x": 0}', "line 1 of", "x"),
]


@pytest.mark.parametrize(("name", "content", "where", "key"), TWICE, ids=[t[0] for t in TWICE])
def test_a_key_twice_in_an_object_is_refused(tmp_path: Path, name: str, content: bytes, where: str, key: str) -> None:
    """Of two values Python keeps the last: an answer would be trained that nobody saw, or a turn change its role."""
    path = tmp_path / name
    path.write_bytes(content)
    words = f"{where} {path} has the key {key!r} twice in one object".strip()
    with pytest.raises(Refused) as training:
        list(iter_rows(str(path), split="train"))
    assert (str(training.value), training.value.exit_code) == (words, 2)
    try:
        refusals = [row.refusal for _, row, _ in read_rows.read(_recipe(path)) if isinstance(row, Broken)]
    except Refused as refusal:
        refusals = [refusal]
    assert [str(refusal) for refusal in refusals] == [words]


@pytest.mark.parametrize(("split", "named"), [("test", "has no split"), ("train[a:]", "is not valid")])
def test_a_split_that_is_none_has_a_way_on(tmp_path: Path, split: str, named: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(LINE)
    with pytest.raises(Refused, match=named) as caught:
        list(iter_rows(str(tmp_path / "rows.jsonl"), split=split))
    assert "train[:500]" in caught.value.error["hint"] and caught.value.error["got"] == split


WHOLE: list[tuple[str, bytes]] = [
    ("plain.jsonl", LINE * 3),
    ("bom.jsonl", b"\xef\xbb\xbf" + LINE + b"\n" + b" " + LINE),
    ("escapes.jsonl", '{"prompt": "\\u00e4\\ud83d\\ude00", "completion": "ä😀", "n": [1, 2.5, null, true]}\n'.encode()),
    ("list.json", json.dumps([ROW, ROW]).encode()),
    ("inside.json", json.dumps({"v": 1, "rows": [ROW]}).encode()),
    ("one.json", json.dumps(ROW).encode()),
    ("lines.json", LINE * 2),
    ("table.csv", b'prompt,completion\n"a, b","two\nlines"\n\nc,\n'),
    ("windows.csv", b"prompt,completion\r\na,b\r\nc,d\r\n"),
    ("bom.csv", b"\xef\xbb\xbfprompt,completion\na,b\n"),
    ("table.tsv", b"prompt\tcompletion\na\tb\n"),
    ("excel.csv", b'\xef\xbb\xbfprompt;completion\r\n"a; b";"1,5"\r\n'),
    ("quoted.csv", b'"prompt, ""short""";completion\na;1,5\n'),
]


@pytest.mark.parametrize(("name", "content"), WHOLE, ids=[w[0] for w in WHOLE])
@pytest.mark.parametrize("split", ["train", "train[1:]", "train[:50%]"])
def test_whole_files_are_read_as_training_reads_them(tmp_path: Path, name: str, content: bytes, split: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    expected = list(iter_rows(str(path), split=split))
    assert [(line, row) for line, row, _ in read_rows.read(Recipe(data=str(path), split=split))] == expected


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv"])
@pytest.mark.parametrize(
    ("encoding", "named"), [("latin-1", "WINDOWS-1252"), ("utf-16", "UTF-16"), ("utf-32", "UTF-32")]
)
def test_another_encoding_is_named(tmp_path: Path, name: str, encoding: str, named: str) -> None:
    text = '{"prompt": "café"}\n' if name == "rows.jsonl" else "prompt,completion\ncafé,b\n"
    (tmp_path / name).write_bytes(text.encode(encoding))
    broken = [row for _, row, _ in read_rows.read(_recipe(tmp_path / name)) if isinstance(row, Broken)]
    assert broken[0].kind == "not_utf8"
    assert f"not UTF-8, most likely {named}" in str(broken[0].refusal)
    assert broken[0].refusal.error["hint"] == f"iconv -f {named} -t UTF-8 FILE > NEW_FILE"


@pytest.mark.parametrize("index", [None, [3, 7]], ids=["numbered", "filtered"])
def test_a_table_by_columns_is_its_rows(tmp_path: Path, index: list[int] | None) -> None:
    """`to_json` of pandas without a word about the orientation."""
    pandas = pytest.importorskip("pandas")
    rows = [{"question": "Warm?", "answer": "Yes.", "tags": ["a"]}, {"question": "Cold?", "answer": "No.", "tags": []}]
    pandas.DataFrame(rows, index=index).to_json(tmp_path / "rows.json")
    assert [row for _, row in iter_rows(str(tmp_path / "rows.json"), split="train")] == rows


@pytest.mark.parametrize("around", [lambda splits: splits, lambda splits: {"data": splits}], ids=["bare", "in data"])
def test_the_splits_of_a_document_train_its_train(tmp_path: Path, around: Any) -> None:
    rows, held = [{"question": "Warm?", "answer": "Yes."}], [{"question": "Cold?", "answer": "No."}]
    (tmp_path / "rows.json").write_text(json.dumps(around({"test": held, "train": rows})))
    assert [row for _, row in iter_rows(str(tmp_path / "rows.json"), split="train")] == rows
    for other in ({"test": held, "rows": rows}, {"validation": [], "test": held}):  # not told apart: one item
        (tmp_path / "rows.json").write_text(json.dumps(around(other)))
        assert [row for _, row in iter_rows(str(tmp_path / "rows.json"), split="train")] == [around(other)]


@pytest.mark.parametrize("orient", ["index", "split", "table"])
def test_other_tables_of_pandas_are_their_rows(tmp_path: Path, orient: Any) -> None:
    pandas = pytest.importorskip("pandas")
    rows = [{"question": "Warm?", "answer": "Yes."}, {"question": "Cold?", "answer": "No."}]
    pandas.DataFrame(rows).to_json(tmp_path / "rows.json", orient=orient)
    read = [row for _, row in iter_rows(str(tmp_path / "rows.json"), split="train")]
    assert [{name: row[name] for name in rows[0]} for row in read] == rows


@pytest.mark.parametrize(
    "table",
    [
        {"columns": ["a", "b"], "index": [0], "data": [["x"]]},
        {"columns": ["a", "a"], "data": [["x", "y"]]},
        {"columns": [["a", "b"]], "index": [0], "data": [["x"]]},
        {"columns": ["a"], "data": [["x"]], "more": 1},
    ],
    ids=["short", "one name twice", "two headers", "another object"],
)
def test_a_broken_split_table_is_not_read_as_one(tmp_path: Path, table: dict[str, Any]) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(table))
    assert [row for _, row in iter_rows(str(tmp_path / "rows.json"), split="train")] == [table]


@pytest.mark.parametrize("quoted", ["answer", '"answer"'])
def test_the_header_of_a_second_table_is_no_row(tmp_path: Path, quoted: str) -> None:
    """Of two files that were joined with `cat`."""
    (tmp_path / "rows.csv").write_text(f"question,answer\nWarm?,Yes.\nquestion,{quoted}\nCold?,No.\n")
    assert [type(row) for _, row, _ in lines_of(tmp_path / "rows.csv")] == [dict, Broken, dict]
    with pytest.raises(Refused, match=r"line 3 of .*rows\.csv repeats the header"):
        list(iter_rows(str(tmp_path / "rows.csv"), split="train"))


_CHAT = [{"role": "user", "content": "Warm?"}, {"role": "assistant", "content": "Yes."}]


@pytest.mark.parametrize(
    "rows",
    [
        [{"prompt": "Warm?", "completion": "Yes."}, {"prompt": "Cold?", "completion": "No."}],
        [{"prompt": "Warm?", "completion": "Yes."}],
        [{"text": "It is warm."}, {"text": "It is cold."}],
        [{"messages": _CHAT}, {"messages": _CHAT}],
        [{"messages": _CHAT, "id": 1, "tags": ["a"]}, {"messages": _CHAT, "id": None, "tags": []}],
    ],
    ids=["two", "one", "one column", "conversations", "conversations with more"],
)
def test_columns_as_lists_are_their_rows(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    """`to_dict` of datasets, and of pandas with `orient="list"`."""
    pandas = pytest.importorskip("pandas")
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(rows).to_dict()
    assert table == {name: [row[name] for row in rows] for name in rows[0]}
    for columns in (table, pandas.DataFrame(rows, dtype=object).to_dict("list")):
        (tmp_path / "rows.json").write_text(json.dumps(columns))
        assert [row for _, row in iter_rows(str(tmp_path / "rows.json"), split="train")] == rows


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
@pytest.mark.parametrize("key", ["role", "from"])
def test_conversations_without_an_object_are_told(tmp_path: Path, commands: Commands, name: str, key: str) -> None:
    path, chat = tmp_path / name, _CHAT if key == "role" else [{"from": "human", "value": "Warm?"}]
    path.write_text(json.dumps([chat, chat]) if name == "rows.json" else f"{json.dumps(chat)}\n" * 2)
    with pytest.raises(Refused) as refused:
        list(iter_rows(str(path), split="train"))
    assert 'is a list of messages, and a row is {"messages": […]}' in str(refused.value)
    done = commands.run(tmp_path, dict(os.environ), "data", str(path), "--format", "json")
    assert (*done.error, str(refused.value) in done.answer["error"]["message"]) == (2, "bad_row", True)


@pytest.mark.parametrize("name", ["system", "system_prompt", "System Message", "instruction", "tools", "context"])
def test_a_prompt_beside_the_rows_is_refused(tmp_path: Path, name: str) -> None:
    """It is meant for all of them, and no row has it."""
    (tmp_path / "rows.json").write_text(json.dumps({"v": 1, name: "Rhyme!", "data": [ROW, ROW]}))
    for read in (
        lambda: list(iter_rows(str(tmp_path / "rows.json"), split="train")),
        lambda: list(read_rows.read(_recipe(tmp_path / "rows.json"))),
    ):
        with pytest.raises(Refused, match=f"rows.json has {name!r} beside its rows") as caught:
            read()
        assert caught.value.error["got"] == "Rhyme!" and "into each row" in caught.value.error["hint"]


@pytest.mark.parametrize(
    "beside",
    [
        {"version": "1.1", "description": "Rows of a system."},
        {"system": ""},
        {"system": None, "num_rows": 2},
        {"prompts": 2},
    ],
)
def test_what_tells_of_the_rows_may_stand_beside_them(tmp_path: Path, beside: dict[str, Any]) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(beside | {"data": [ROW, ROW]}))
    assert [row for _, row in iter_rows(str(tmp_path / "rows.json"), split="train")] == [ROW, ROW]


@pytest.mark.parametrize("others", [["test"], ["validation", "test"], ["val"], ["dev", "eval"]])
def test_of_splits_in_a_document_train_is_read(tmp_path: Path, others: list[str]) -> None:
    """As a `DatasetDict` on the Hub, whose split `train` is the one that a recipe asks for."""
    (tmp_path / "rows.json").write_text(
        json.dumps({name: [{"prompt": name}] for name in others} | {"train": [ROW, ROW]})
    )
    assert [row for _, row in iter_rows(str(tmp_path / "rows.json"), split="train")] == [ROW, ROW]


LIST = [{"prompt": "Warm?", "completion": "Yes."}, {"prompt": "Cold?", "completion": "No."}]


@pytest.mark.parametrize(
    "text",
    [
        "[\n" + ",\n".join(map(json.dumps, LIST)) + "\n]\n",
        "[" + ",\n".join(map(json.dumps, LIST)) + "]\n",
        json.dumps(LIST, indent=1),
        json.dumps({"data": LIST}, indent=1),
        '{"data": [\n' + ",\n".join(map(json.dumps, LIST)) + "\n]}\n",
    ],
    ids=["an object a line", "brackets beside", "indented", "in an object", "in an object, by lines"],
)
def test_a_document_that_is_called_lines_is_refused(tmp_path: Path, commands: Commands, text: str) -> None:
    """One of its lines may be an object, and would be the only row. The hint's name reads them all."""
    path = tmp_path / "all rows.jsonl"
    path.write_text(text)
    with pytest.raises(Refused, match=r"line 1 of .*all rows\.jsonl is not JSON"):
        list(iter_rows(str(path), split="train"))
    done = commands.run(tmp_path, dict(os.environ), "data", path, "--fix", tmp_path / "out.jsonl", "--format", "json")
    assert done.error == (2, "unreadable_dataset") and not (tmp_path / "out.jsonl").exists()
    assert "one JSON document is a .json file: rename it" in done.answer["error"]["hint"]
    path.rename(path.with_suffix(".json"))
    assert [row for _, row in iter_rows(str(path.with_suffix(".json")), split="train")] == LIST


def test_objects_with_commas_behind_them_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(",\n".join(map(json.dumps, LIST)) + "\n")
    with pytest.raises(Refused, match=r"line 1 of .* is not JSON") as caught:
        list(read_rows.read(_recipe(tmp_path / "rows.jsonl")))
    assert "remove the commas" in caught.value.error["hint"]


@pytest.mark.parametrize("first", ['{"prompt": "a"', "[1, 2]", '{"prompt": "a"} {}', "words"])
def test_a_first_line_that_is_broken_hides_no_others(tmp_path: Path, first: str) -> None:
    (tmp_path / "rows.jsonl").write_text(f"{first}\n{LINE.decode()}")
    assert [type(row) for _, row, _ in lines_of(tmp_path / "rows.jsonl")] == [Broken, dict]


@pytest.mark.parametrize("document", [{"v": 1, "rows": []}, {"messages": []}, []])
def test_an_empty_list_has_no_rows(tmp_path: Path, document: Any) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(document))
    assert list(iter_rows(str(tmp_path / "rows.json"), split="train")) == []


@pytest.mark.parametrize(
    "chat",
    [
        {"messages": [{"role": "user", "content": "Warm?"}, {"role": "assistant", "content": "Yes."}]},
        {"id": 7, "conversations": [{"from": "human", "value": "Warm?"}, {"from": "gpt", "value": "Yes."}]},
    ],
)
def test_an_object_of_messages_is_one_conversation(tmp_path: Path, chat: dict[str, Any]) -> None:
    """Its messages are a list alone in an object, but no rows."""
    (tmp_path / "rows.json").write_text(json.dumps(chat))
    assert [row for _, row in iter_rows(str(tmp_path / "rows.json"), split="train")] == [chat]


@pytest.mark.parametrize(
    "row",
    [
        {"question": {"0": "a"}, "answer": {"1": "b"}},
        {"answer": {"de": "b"}},
        {"a": {}},
        {},
        {"messages": _CHAT, "tools": [{"name": "f"}, {"name": "g"}]},
        {"messages": _CHAT, "images": ["a.png", "b.png"]},
        {"prompt": _CHAT[:1], "completion": _CHAT[1:]},
        {"prompt": _CHAT[:1], "answer": ["4"]},
        {"chat": [{"user": "Warm?"}, {"assistant": "Yes."}], "tags": ["a", "b"]},
        {"prompt": ["Warm?", "Cold?"], "completion": ["Yes."]},
        {"prompt": ["Warm?"], "completion": ["Yes."], "id": 1},
        {"prompt": [], "completion": []},
        {"train": [{"at": 7}], "journey": [{"to": "Bern"}]},
    ],
)
def test_another_object_is_one_row(tmp_path: Path, row: dict[str, Any]) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(row))
    assert [row for _, row in iter_rows(str(tmp_path / "rows.json"), split="train")] == [row]


def test_a_cell_with_semicolons_stays_one_cell(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt;completion\na;b\n")
    assert [row for _, row, _ in read_rows.read(_recipe(tmp_path / "rows.csv"))] == [ROW]
    (tmp_path / "rows.csv").write_text('prompt,"comple;tion"\na,b\n')
    assert [row for _, row, _ in read_rows.read(_recipe(tmp_path / "rows.csv"))] == [
        {"prompt": "a", "comple;tion": "b"}
    ]


TABLES = [
    ("sep.csv", "\ufeffsep=;\r\nprompt;completion\r\na, b;c\r\n", (3, "a, b", "c")),
    ("quoted sep.csv", '"sep=\t"\nprompt\tcompletion\na\tb, c\n', (3, "a", "b, c")),
    ("sep.tsv", "sep=,\nprompt,completion\na\tb,c\n", (3, "a\tb", "c")),
    ("tab.csv", "prompt\tcompletion\na, b\tc; d\n", (2, "a, b", "c; d")),
    ("bar.csv", "prompt|completion\na, b|c; d\n", (2, "a, b", "c; d")),
    ("comma.csv", "prompt,completion\na\tb,c;|d\n", (2, "a\tb", "c;|d")),
]


@pytest.mark.parametrize(("name", "text", "expected"), TABLES, ids=[table[0] for table in TABLES])
def test_the_sign_between_cells_is_found(tmp_path: Path, name: str, text: str, expected: tuple[int, str, str]) -> None:
    """Excel says it in a first line of its own, and writes tabs under any name."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8", newline="")
    line, prompt, completion = expected
    assert list(iter_rows(str(path), split="train")) == [(line, {"prompt": prompt, "completion": completion})]
    on_the_hub = numbered(text.encode(), name, whole=True)
    assert on_the_hub == [(line, {"prompt": prompt, "completion": completion})]


def _said(number: int) -> tuple[str, str]:
    """A remark that is given in several rows: one begins with a quote, another ends with it."""
    return f"What did he say {number}?", {0: f'"Well {number},', 2: f'and so on {number}."'}.get(number % 4, "Nothing.")


@pytest.mark.parametrize(("name", "sign"), [("rows.tsv", "\t"), ("rows.csv", ";")])
def test_rows_are_not_merged_by_quotes_that_are_text(tmp_path: Path, name: str, sign: str) -> None:
    """31 rows in which no quote belongs to the table. Python's csv, pandas and datasets make half as many of them."""
    path = tmp_path / name
    lines = [sign.join(("prompt", "completion")), *(sign.join(_said(number)) for number in range(31))]
    path.write_text("\n".join(lines) + "\n")
    with open(path, newline="") as file:
        assert len(list(csv.reader(file, delimiter=sign))) - 1 < 20
    for read in (lambda: list(iter_rows(str(path), split="train")), lambda: list(read_rows.read(_recipe(path)))):
        with pytest.raises(Refused, match=r"a quote in line 2 of .* and one in line 4 may make one row") as caught:
            read()
        assert "quoting=3" in caught.value.error["hint"]
    with pytest.raises(UsageError, match="a quote in line 2 of rows"):
        numbered(path.read_bytes(), name, whole=False)


def test_the_quotes_of_a_table_with_commas_are_its_own(tmp_path: Path) -> None:
    """Each line of these rows would be a row too, if the quotes were text."""
    rows = [[f"Two pairs {number}", f"Pairs:\na{number}, b\nc, d"] for number in range(30)]
    with open(tmp_path / "rows.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["prompt", "completion"], *rows])
    read = [[*row.values()] for _, row in iter_rows(str(tmp_path / "rows.csv"), split="train")]
    assert read == rows


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ("What is 9?,It is 9.", "line 3, where a quote opens, to line 10 of .* is broken: unexpected end of data"),
        ('What is 9?,"It is 9."', "line 3, where a quote opens, to line 10 of .* is broken: ',' expected after '\"'"),
        ('What is 9?,It is 9 feet by 9"', "a quote in line 3 of .* and one in line 10 may make one row of several"),
    ],
)
def test_a_quote_that_nobody_closes_takes_no_rows_with_it(
    tmp_path: Path, commands: Commands, last: str, words: str
) -> None:
    """Nine rows, of which the second has a quote too many: the other seven would be one row with it, or left out."""
    path = tmp_path / "rows.csv"
    lines = [f"What is {number}?,It is {number}." for number in range(1, 9)]
    lines[1] = lines[1].replace("It", '"It')
    path.write_text("\n".join(["prompt,completion", *lines, last]) + "\n")
    with pytest.raises(Refused, match=words):
        list(iter_rows(str(path), split="train"))
    with pytest.raises(UsageError):
        numbered(path.read_bytes(), path.name, whole=True)
    done = commands.run(tmp_path, dict(os.environ), "data", path, "--fix", tmp_path / "out.jsonl", "--format", "json")
    assert done.code == 2 and re.search(words, json.loads(done.stdout)["error"]["message"])
    assert not (tmp_path / "out.jsonl").exists()
    looked_at = json.loads(commands.run(tmp_path, dict(os.environ), "data", path, "--format", "json").stdout)
    with pytest.raises(UsageError) as planned:
        scan(_recipe(path))
    assert looked_at["next"] == [] and "skill-train" not in looked_at["error"]["hint"] + planned.value.hint
    if "is broken" in words:
        path.write_bytes(path.read_bytes().replace(b"is 5.", b"is f\xfcnf."))
        done = commands.run(tmp_path, dict(os.environ), "data", path, "--fix", tmp_path / "out.jsonl")
        assert done.code == 2 and "is not UTF-8" in done.stderr + done.stdout
        path.write_bytes(path.read_bytes().replace(b"is f\xfcnf.", b"is 5."))
    with path.open("a") as file:  # a text of two lines shows what the quotes are for
        file.write('What is 10?,"It is\n10."\n')
    if "may make" in words:
        assert len(list(iter_rows(str(path), split="train"))) == 3


SPACED = {
    "a row": 'prompt,completion\n"Warm?", "Yes."\n',
    "a later row": 'prompt,completion\nWarm?,Yes.\nCold?, "No."\n',
    "several lines": 'prompt,completion\n"Warm?", "Yes,\nit is."\n',
    "the header": '"prompt", "completion"\nWarm?,Yes.\n',
    "the first cell": 'prompt,completion\n "Warm?","Yes."\n',
    "a semicolon": 'prompt;completion\n"Warm?"; "Yes."\n',
}


@pytest.mark.parametrize("name", SPACED)
def test_a_space_before_a_quote_makes_no_text_of_it(tmp_path: Path, name: str) -> None:
    """Most programs write none there, and then a quote does not begin a cell. pandas reads such a table on request."""
    path = tmp_path / "rows.csv"
    path.write_text(SPACED[name])
    for read in (lambda: list(iter_rows(str(path), split="train")), lambda: list(read_rows.read(_recipe(path)))):
        with pytest.raises(Refused, match=r"in line [123] of .*rows\.csv a space stands before the quote") as caught:
            read()
        assert "skipinitialspace=True" in caught.value.error["hint"]
    with pytest.raises(UsageError, match=r"in line [123] of rows\.csv a space stands before"):
        numbered(path.read_bytes(), path.name, whole=False)


@pytest.mark.parametrize(
    ("name", "line", "cell"),
    [
        ("rows.csv", '"He said?"," ""Yes, ""he said."', ' "Yes, "he said.'),
        ("rows.csv", '"He said?","It was: ""Yes"", or, ""no""."', 'It was: "Yes", or, "no".'),
        ("rows.csv", 'He said?, It was a "yes".', ' It was a "yes".'),
        ("rows.tsv", 'He said?\t "Yes," he said.', ' "Yes," he said.'),
    ],
    ids=["begins so", "quotes within", "no quote at the beginning", "tabs"],
)
def test_a_text_may_have_spaces_and_quotes(tmp_path: Path, name: str, line: str, cell: str) -> None:
    path = tmp_path / name
    path.write_text(f"prompt,completion\n{line}\n" if name == "rows.csv" else f"prompt\tcompletion\n{line}\n")
    assert [row["completion"] for _, row in iter_rows(str(path), split="train")] == [cell]
    assert [row["completion"] for _, row in numbered(path.read_bytes(), name, whole=True)] == [cell]


def test_a_row_with_a_sign_too_many_is_no_reason_to_read_nothing(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('prompt,completion\nHe said?,It was, "yes".\nWarm?,Yes.\n')
    assert [type(row) for _, row, _ in lines_of(tmp_path / "rows.csv")] == [Broken, dict]


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
@pytest.mark.parametrize(("name", "sign"), [("rows.tsv", "\t"), ("rows.csv", ",")])
def test_line_breaks_in_quotes_are_read_where_the_table_shows_its_quotes(
    tmp_path: Path, name: str, sign: str, quoting: Any
) -> None:
    """The lines of the first answer have the sign as often as a row has. Quotes around a name show them too."""
    rows = [["Make?", f"all:\n{sign}cc x"], ["Greet?", f"Dear {sign} all{sign}\nbye"], ["List?", "one\ntwo\nthree"]]
    rows = rows[:1] if quoting == csv.QUOTE_ALL else rows
    path = tmp_path / name
    with open(path, "w", newline="") as file:
        csv.writer(file, delimiter=sign, quoting=quoting).writerows([["prompt", "completion"], *rows])
    assert [list(row.values()) for _, row in iter_rows(str(path), split="train")] == rows
    assert [list(row.values()) for _, row in numbered(path.read_bytes(), name, whole=True)] == rows


def test_a_single_column_has_line_breaks_in_quotes(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('text\n"one\ntwo"\n"three\nfour"\n')
    read = [row["text"] for _, row in iter_rows(str(tmp_path / "rows.csv"), split="train")]
    assert read == ["one\ntwo", "three\nfour"]


def _recipe(path: Path) -> Recipe:
    return Recipe(data=str(path))


def test_an_error_of_the_network_without_words_is_still_one_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limits of asyncio say nothing."""

    def stalled(*_: object, **__: object) -> Iterator[Any]:
        raise TimeoutError
        yield

    monkeypatch.setattr(read_rows, "iter_rows", stalled)
    with pytest.raises(SkillTrainError, match="cannot be read from the Hub: TimeoutError") as caught:
        list(read_rows.read(Recipe(data="owner/rows", model="m")))
    assert caught.value.code == "hub_unreachable"


@pytest.mark.parametrize(
    ("head", "names"),
    [
        ('"a, b";c', ["a, b", "c"]),
        ('"a, ""b""";c', ['a, "b"', "c"]),
        ('a;"b, c"', ["a", "b, c"]),
        ('"a; b",c', ["a; b", "c"]),
        ('5" a;3" b', ['5" a', '3" b']),
        ('5" a,3" b;c', ['5" a', '3" b;c']),
    ],
)
def test_a_sign_inside_of_quotes_parts_no_columns(tmp_path: Path, head: str, names: list[str]) -> None:
    sign = ";" if ";" in head.replace(names[0], "").replace(names[1], "") else ","
    (tmp_path / "rows.csv").write_text(f"{head}\n1{sign}2\n")
    assert list(iter_rows(str(tmp_path / "rows.csv"), split="train")) == [(2, dict(zip(names, "12", strict=True)))]


@pytest.mark.parametrize(
    ("lines", "columns"),
    [
        (["Frage, kurz;Antwort", "Warm?;Ja, sehr.", "Kalt?;Nein."], ["Frage, kurz", "Antwort"]),
        (["Frage;Antwort, lang", "Warm?;Ja, warm, sehr.", '"Kalt?";"Nein, ""nie"""'], ["Frage", "Antwort, lang"]),
        (["a, b\tc", "Warm?\tYes.", "Cold?\tNo, no, no."], ["a, b", "c"]),
        (["question,answer; short", "Warm?,Yes; it is.", "Cold?,No."], ["question", "answer; short"]),
        (["question,answer; short", "Warm?,Yes; it is."], ["question", "answer; short"]),
        (["question,answer|more", '"Warm,', 'or what?",Yes.', "Cold?,No."], ["question", "answer|more"]),
        (["question,answer;more"], ["question", "answer;more"]),
    ],
)
def test_of_two_signs_in_a_header_the_rows_have_one(tmp_path: Path, lines: list[str], columns: list[str]) -> None:
    """As often as the header. The comma, where they do not tell."""
    path = tmp_path / "rows.csv"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    rows = list(iter_rows(str(path), split="train"))
    assert all(list(row) == columns for _, row in rows) and len(rows) == sum(line[-1] != "," for line in lines) - 1
    assert numbered(path.read_bytes(), path.name, whole=True) == rows


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize(("name", "text"), [("a.jsonl", '{"text": "plain"}\n'), ("a.csv", "text,id\nplain,1\n")])
def test_utf_16_of_plain_letters_is_no_utf_8(tmp_path: Path, name: str, text: str, encoding: str) -> None:
    """Each of its bytes is UTF-8 too."""
    (tmp_path / name).write_bytes(text.encode(encoding))
    (_, broken, _), *_ = read_rows.read(_recipe(tmp_path / name))
    assert isinstance(broken, Broken) and broken.kind == "not_utf8"
    assert f"iconv -f UTF-{encoding[4:].replace('-', '').upper()} " in str(broken.refusal.error["hint"])
