"""Rows from Arrow: one column has one type, so each call and each tool gets the keys of all the others, with null."""

from __future__ import annotations

import json
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from skill_train.core.errors import UsageError
from skill_train.data import scan as dataset
from skill_train.program.events import Refused
from skill_train.program.examples import to_example
from skill_train.program.rows import iter_rows
from skill_train.recipe.fields import Recipe

pyarrow = pytest.importorskip("pyarrow")


def _row(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    properties = {key: {"type": "string"} for key in arguments}
    tool = {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    asked = {"role": "user", "content": "Do it."}
    return {"messages": [asked, {"role": "assistant", "tool_calls": [call]}], "tools": [tool], "id": None}


ROWS = [
    _row("get_weather", {"city": "Paris", "days": [{"n": 1}, {"n": 2, "long": True}]}),
    _row("convert", {"amount": 10, "to": "USD", "rates": ["1", None]}),
]


@pytest.mark.parametrize("name", ["rows.parquet", "saved"])
def test_a_call_has_its_own_arguments_and_no_others(tmp_path: Path, name: str) -> None:
    _write(tmp_path / name, pyarrow.Table.from_pylist(ROWS))
    rows = [row for _, row in iter_rows(str(tmp_path / name), split="train")]
    assert rows == ROWS
    examples = [to_example(row, "messages", {"messages": "messages", "tools": "tools"}) for row in rows]
    assert [example["tools"] for example in examples] == [row["tools"] for row in ROWS]
    assert [e["messages"][1]["tool_calls"] for e in examples] == [row["messages"][1]["tool_calls"] for row in ROWS]
    assert dataset.scan(Recipe(model="m", data=str(tmp_path / name))).columns["tools"] == "tools"


@pytest.mark.parametrize("name", ["rows.parquet", "saved"])
def test_json_in_a_column_is_read_as_it_was_written(tmp_path: Path, name: str) -> None:
    """So `datasets` stores what has another shape in each row; a null in it was written."""
    call = {"function": {"name": "add", "arguments": {"a": 2, "unit": None}}}
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    words = [json.dumps(message) for message in messages]
    stored = pyarrow.array([words, words], pyarrow.list_(pyarrow.string())).cast(pyarrow.list_(pyarrow.json_()))
    _write(tmp_path / name, pyarrow.table({"messages": stored}))
    rows = [row for _, row in iter_rows(str(tmp_path / name), split="train")]
    assert rows == [{"messages": messages}] * 2


def test_objects_that_are_maps_are_read_as_objects(tmp_path: Path) -> None:
    """As Spark writes dictionaries of Python. A map beside the texts made the whole file one that cannot be read."""
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    texts = pyarrow.map_(pyarrow.string(), pyarrow.string())
    messages = pyarrow.array([[list(turn.items()) for turn in turns]] * 3, pyarrow.list_(texts))
    numbers = pyarrow.array([[(1, "a")], None, []], pyarrow.map_(pyarrow.int64(), pyarrow.string()))
    beside = pyarrow.array([[("a", "b")], None, []], texts)
    table = pyarrow.table({"messages": messages, "numbers": numbers, "beside": beside})
    _write(tmp_path / "rows.parquet", table)
    rows = [row for _, row in iter_rows(str(tmp_path / "rows.parquet"), split="train")]
    pairs = [([(1, "a")], {"a": "b"}), (None, None), ([], {})]
    assert rows == [{"messages": turns, "numbers": n, "beside": b} for n, b in pairs]
    assert dataset.scan(Recipe(model="m", data=str(tmp_path / "rows.parquet"))).rows == 3


def test_a_map_with_a_key_twice_is_refused(tmp_path: Path) -> None:
    texts = pyarrow.map_(pyarrow.string(), pyarrow.string())
    _write(tmp_path / "rows.parquet", pyarrow.table({"a": pyarrow.array([[("b", "1"), ("b", "2")]], texts)}))
    with pytest.raises(Refused, match=r"row 1 of .* has the key 'b' twice"):
        list(iter_rows(str(tmp_path / "rows.parquet"), split="train"))


def test_a_null_in_jsonl_stays_as_it_is_written(tmp_path: Path) -> None:
    row = _row("get_weather", {"city": "Paris", "unit": None})
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert [row for _, row in iter_rows(str(tmp_path / "rows.jsonl"), split="train")] == [row]


@pytest.mark.parametrize("value", [datetime(2024, 1, 2, 3, 4), date(2024, 1, 2), Decimal("1.50"), b"\x00\xff"])
def test_what_no_json_has_is_refused_in_calls_and_tools(tmp_path: Path, value: Any) -> None:
    """transformers writes `<datetime>` for a date, which DuckDB and pyarrow make of a text in JSON lines."""
    called, described = _row("now", {"at": [value]}), _row("now", {"at": "12"})
    described["tools"][0]["function"]["parameters"]["properties"]["at"]["default"] = value
    for row in (called, described):
        _write(tmp_path / "rows.parquet", pyarrow.Table.from_pylist([row]))
        with pytest.raises(UsageError, match=f"a call or a tool has a value of the type {type(value).__name__}"):
            dataset.scan(Recipe(model="m", data=str(tmp_path / "rows.parquet")))


def test_a_date_beside_the_text_of_a_message_is_not(tmp_path: Path) -> None:
    """As in WildChat; no chat template writes it."""
    messages = [{"role": role, "content": "Hi", "timestamp": datetime(2024, 1, 2)} for role in ("user", "assistant")]
    _write(tmp_path / "rows.parquet", pyarrow.Table.from_pylist([{"messages": messages}]))
    assert dataset.scan(Recipe(model="m", data=str(tmp_path / "rows.parquet"))).rows == 1


def test_an_argument_called_bytes_has_no_nulls_of_others(tmp_path: Path) -> None:
    """The data of a picture is called so too, and stays."""
    rows = [_row("read", {"bytes": {"from": 1}}), _row("read", {"bytes": {"to": 2}})]
    _write(tmp_path / "rows.parquet", pyarrow.Table.from_pylist(rows))
    assert [row for _, row in iter_rows(str(tmp_path / "rows.parquet"), split="train")] == rows


def test_an_answer_that_is_a_date_is_shown(tmp_path: Path) -> None:
    _write(tmp_path / "rows.parquet", pyarrow.table({"question": ["When?"], "answer": [date(2024, 1, 2)]}))
    with pytest.raises(UsageError, match=r"answer is datetime\.date\(2024, 1, 2\) and not text") as caught:
        dataset.scan(Recipe(model="m", data=str(tmp_path / "rows.parquet")))
    assert caught.value.expected == "text in answer, such as '2024-01-02'"


def test_json_that_is_none_is_refused(tmp_path: Path) -> None:
    stored = pyarrow.ExtensionArray.from_storage(pyarrow.json_(), pyarrow.array(["{", "[" * 100_000]))
    for index in range(2):
        _write(tmp_path / "rows.parquet", pyarrow.table({"messages": stored[index : index + 1]}))
        with pytest.raises(Refused) as caught:
            list(iter_rows(str(tmp_path / "rows.parquet"), split="train"))
        assert caught.value.error["code"] == "unreadable_dataset"


def test_a_key_twice_in_a_column_of_json_is_refused(tmp_path: Path) -> None:
    """As in a file of JSON lines: Python's reader would drop one of the values."""
    words = ['{"role": "user", "content": "a"}', '{"role": "user", "content": "b", "content": "c"}']
    stored = pyarrow.ExtensionArray.from_storage(pyarrow.json_(), pyarrow.array(words))
    _write(tmp_path / "rows.parquet", pyarrow.table({"messages": stored}))
    with pytest.raises(Refused, match=r"row 2 of .*rows\.parquet has the key 'content' twice") as caught:
        list(iter_rows(str(tmp_path / "rows.parquet"), split="train"))
    assert caught.value.error["code"] == "unreadable_dataset"


def _write(path: Path, table: Any) -> None:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(table, path)
    else:
        import datasets

        datasets.Dataset(table).save_to_disk(str(path))


PNG = b"\x89PNG\r\n\x1a\n\0\0"
GIF = b"GIF89a\x01\0\x01\0"


@pytest.mark.parametrize("name", ["rows.parquet", "saved"])
def test_a_text_in_a_column_of_bytes_is_a_text(tmp_path: Path, name: str) -> None:
    """As Impala, and pandas with bytes, write texts; bytes of pictures stay."""
    columns = {
        "question": pyarrow.array(["Wie viel sind zwei Äpfel?".encode(), None], pyarrow.binary()),
        "answer": pyarrow.array([b"Two.", b""], pyarrow.large_binary()),
        "image": pyarrow.array([PNG, GIF], pyarrow.binary()),
        "images": pyarrow.array([[{"bytes": b"<svg/>", "path": "a.svg"}], [{"bytes": GIF, "path": None}]]),
    }
    _write(tmp_path / name, pyarrow.table(columns))
    rows = [row for _, row in iter_rows(str(tmp_path / name), split="train")]
    assert [row["question"] for row in rows] == ["Wie viel sind zwei Äpfel?", None]
    assert [row["answer"] for row in rows] == ["Two.", ""]
    assert [row["image"] for row in rows] == [PNG, GIF]
    assert [row["images"][0]["bytes"] for row in rows] == [b"<svg/>", GIF]


@pytest.mark.parametrize("name", ["rows.parquet", "saved"])
def test_numbers_of_classes_are_their_names(tmp_path: Path, name: str) -> None:
    """A column of `ClassLabel`: -1 stands for no class."""
    import datasets

    labels = datasets.ClassLabel(names=["bad", "good"])
    features = datasets.Features({"question": datasets.Value("string"), "answer": labels, "more": [labels]})
    values = {"question": ["Is it?", "Was it?", "Who?"], "answer": [1, 0, -1], "more": [[0], [1], []]}
    made = datasets.Dataset.from_dict(values, features=features)
    if name == "saved":
        made.save_to_disk(str(tmp_path / name))
    else:
        made.to_parquet(str(tmp_path / name))
    rows = [row for _, row in iter_rows(str(tmp_path / name), split="train")]
    assert [row["answer"] for row in rows] == ["good", "bad", None]
    assert [row["more"] for row in rows] == [[0], [1], []]


@pytest.mark.parametrize("said", ["{", "[]", '{"info": {"features": {"answer": {"_type": "ClassLabel", "names": 3}}}}'])
def test_classes_without_names_stay_numbers(tmp_path: Path, said: str) -> None:
    table = pyarrow.table({"question": ["Is it?"], "answer": [1]}).replace_schema_metadata({"huggingface": said})
    _write(tmp_path / "rows.parquet", table)
    assert [row["answer"] for _, row in iter_rows(str(tmp_path / "rows.parquet"), split="train")] == [1]
