"""Columns that a format can use and need not have: whichever row has them first, none is lost."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import tiny
from one_command import answered
from skill_train.core.errors import UsageError
from skill_train.data import scan as dataset
from skill_train.facts import DatasetFacts
from skill_train.program.examples import to_example
from skill_train.recipe.fields import Recipe, from_dict, recipe_hash
from skill_train.recipe.formats import for_model
from training import write_data

TURNS = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
SPOKEN = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
ALPACA = {"instruction": "Add", "output": "4"}
ASKED = {"question": "2+2?", "answer": "4"}

# The required columns of a row, an optional one with its value, and what the format calls that.
TABLE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"messages": TURNS}, {"tools": TOOLS}, "tools"),
    ({"conversations": SPOKEN}, {"tools": TOOLS}, "tools"),
    ({"conversations": SPOKEN}, {"system": "Count."}, "system"),
    ({"prompt": TURNS[:1], "completion": TURNS[1:]}, {"tools": TOOLS}, "tools"),
    ({"messages": TURNS}, {"system": "Count."}, "system"),
    ({"prompt": TURNS[:1], "completion": TURNS[1:]}, {"system": "Count."}, "system"),
    ({"prompt": "2+2?", "response": "4"}, {"system_prompt": "Count."}, "system"),
    (ALPACA, {"input": "2 2"}, "input"),
    (ALPACA, {"context": "2 2"}, "input"),
    (ALPACA, {"system": "Count."}, "system"),
    (ASKED, {"system_prompt": "Count."}, "system"),
]
IDS = [f"{next(iter(row))} {next(iter(extra))}" for row, extra, _ in TABLE]


@pytest.mark.parametrize(("row", "extra", "wanted"), TABLE, ids=IDS)
def test_a_column_that_only_a_later_row_has_is_read(
    tmp_path: Path, row: dict[str, Any], extra: dict[str, Any], wanted: str
) -> None:
    (column,) = extra
    path = write_data(tmp_path, [row, row | {"id": 1}, row | extra])
    facts = _scan(path)
    assert facts.columns[wanted] == column
    assert column in facts.reason and column in facts.column_names
    assert facts.text_bytes == 2 * (_scan(write_data(tmp_path, [row])).text_bytes or 0) + (
        _scan(write_data(tmp_path, [row | extra])).text_bytes or 0
    )
    answer = _data(write_data(tmp_path, [row, row | {"id": 1}, row | extra]))["data"]
    assert (answer["format"]["name"], answer["format"]["columns"]) == (facts.format, facts.columns)
    assert (answer["methods"]["sft"]["verdict"], answer["not_read"]) == ("ready", ["id"])
    assert answer["format"]["because"] == facts.reason


@pytest.mark.parametrize(("row", "extra", "wanted"), TABLE, ids=IDS)
def test_the_order_of_the_rows_does_not_matter(
    tmp_path: Path, row: dict[str, Any], extra: dict[str, Any], wanted: str
) -> None:
    orders = ([row, row | extra], [row | extra, row])
    first, second = (_scan(write_data(tmp_path, rows)) for rows in orders)
    assert (first.columns, first.reason) == (second.columns, second.reason)
    hashes = {recipe_hash({"columns": facts.columns, "data": "d"}, {}) for facts in (first, second)}
    assert len(hashes) == 1


@pytest.mark.parametrize("row", [row for row, *_ in TABLE if row is not ALPACA], ids=lambda row: ",".join(row))
@pytest.mark.parametrize(("text", "roles"), [("Count.", "system user assistant"), (" ", "user assistant")])
def test_a_system_message_beside_the_turns_comes_before_them(
    tmp_path: Path, row: dict[str, Any], text: str, roles: str
) -> None:
    """Unless it says nothing. Here it is of a model with a chat template, for which prompts are turns."""
    facts = for_model(_scan(write_data(tmp_path, [row | {"system": text}])), has_chat_template=True)
    example = to_example(row | {"system": text}, facts.format, facts.columns)
    assert " ".join(message["role"] for message in example["messages"]) == roles
    assert [message["content"] for message in example["messages"]] == [text, "2+2?", "4"][-len(roles.split()) :]
    assert example["trained_messages"] == [len(roles.split()) - 1]


def test_an_input_of_blanks_adds_nothing() -> None:
    columns = {name: name for name in ("instruction", "input", "output")}
    example = to_example(ALPACA | {"input": " \n"}, "instruction", columns)
    assert [message["content"] for message in example["messages"]] == ["Add", "4"]


@pytest.mark.parametrize("row", [{"messages": TURNS}, {"conversations": SPOKEN}], ids=["messages", "sharegpt"])
def test_a_system_message_that_the_turns_have_too_is_read_once(tmp_path: Path, row: dict[str, Any]) -> None:
    [(name, turns)] = row.items()
    told = {"role": "system", "content": "Count."} if name == "messages" else {"from": "system", "value": "Count."}
    both = {name: [told, *turns], "system": "Count."}
    facts = _scan(write_data(tmp_path, [both]))
    messages = to_example(both, facts.format, facts.columns)["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]


def test_a_model_without_a_template_says_that_it_reads_no_system_message(tmp_path: Path) -> None:
    data = write_data(tmp_path, [{"system": "Count.", "prompt": "2+2?", "completion": "4"}])
    warnings = answered("plan", "--data", data, "--model", tiny.cached("gpt2"))[1]["warnings"]
    assert any("system messages" in warning["message"] for warning in warnings)


def test_two_that_come_one_after_the_other_are_both_read(tmp_path: Path) -> None:
    rows = [ALPACA, ALPACA | {"system": "Count."}, ALPACA | {"input": "2 2"}]
    both = {"instruction": "instruction", "output": "output", "input": "input", "system": "system"}
    assert _scan(write_data(tmp_path, rows)).columns == both
    assert list(_scan(write_data(tmp_path, rows)).columns) == list(both)


def test_the_usual_name_wins_over_another_one(tmp_path: Path) -> None:
    rows = [ALPACA, ALPACA | {"context": "2 2"}, ALPACA | {"input": "2 2", "context": ""}]
    facts = _scan(write_data(tmp_path, rows))
    assert facts.columns["input"] == "input"
    assert _data(write_data(tmp_path, rows))["data"]["format"]["columns"] == facts.columns


def test_rows_that_are_not_chosen_add_nothing(tmp_path: Path) -> None:
    path = write_data(tmp_path, [ALPACA, ALPACA | {"input": "2 2"}])
    assert "input" not in _scan(path, split="train[:1]").columns


def test_a_format_without_a_mapping_reads_them_too(tmp_path: Path) -> None:
    path = write_data(tmp_path, [ALPACA | {"prompt": "a"}, ALPACA | {"input": "2 2"}])
    facts = _scan(path, format="instruction")
    assert (facts.columns["input"], facts.reason) == ("input", "said in the recipe")
    (tmp_path / "recipe.yaml").write_text("format: instruction\ndata: rows.jsonl\nmodel: m\n")
    answer = _data(path, "--recipe", str(tmp_path / "recipe.yaml"))
    assert answer["data"]["format"]["columns"] == facts.columns


def test_a_mapping_in_the_recipe_is_the_whole_mapping(tmp_path: Path) -> None:
    """It may name an optional column that the first row lacks; one that no row has is a slip of the pen."""
    rows = [ALPACA, ALPACA | {"input": "2 2", "system": "Count.", "hint": "no"}]
    columns = {"instruction": "instruction", "output": "output"}
    values = {"format": "instruction", "columns": columns}
    assert _scan(write_data(tmp_path, rows), **values).columns == columns
    values["columns"] = columns | {"input": "hint"}
    assert _scan(write_data(tmp_path, rows), **values).columns == values["columns"]
    values["columns"] = columns | {"input": "inptu"}
    with pytest.raises(UsageError, match="no column 'inptu'") as caught:
        _scan(write_data(tmp_path, rows), **values)
    assert caught.value.code == "wrong_columns"
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps(values | {"data": "rows.jsonl", "model": "m"}))
    answer = _data(tmp_path / "rows.jsonl", "--recipe", str(recipe))
    assert answer["error"]["code"] == "wrong_columns"


def test_a_mapping_names_what_the_format_has(tmp_path: Path) -> None:
    """A misspelt key would be a column that nobody reads."""
    columns = {"instruction": "instruction", "output": "output", "inputs": "input"}
    with pytest.raises(UsageError, match="did you mean 'input'") as caught:
        _scan(write_data(tmp_path, [ALPACA | {"input": "2 2"}]), format="instruction", columns=columns)
    assert (caught.value.code, caught.value.expected) == ("bad_recipe", "instruction, output, input, system")


def test_a_plan_is_still_that_of_its_data(tmp_path: Path) -> None:
    """The mapping travels in the plan, and the data is read again with it."""
    path = write_data(tmp_path, [ALPACA, ALPACA | {"input": "2 2"}])
    facts = _scan(path)
    again = _scan(path, format=facts.format, columns=facts.columns)
    assert (again.columns, again.fingerprint) == (facts.columns, facts.fingerprint)


def test_the_usable_copy_keeps_what_only_later_rows_have(tmp_path: Path) -> None:
    path = write_data(tmp_path, [ALPACA, ALPACA | {"input": "2 2"}, ALPACA | {"input": "3 1"}])
    _data(path, "--fix", "out.jsonl")
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["input"] for row in written] == [None, "2 2", "3 1"]
    columns = dataset.scan(Recipe(data="out.jsonl")).columns
    questions = [to_example(row, "instruction", columns)["messages"][0]["content"] for row in written]
    assert questions == ["Add", "Add\n\n2 2", "Add\n\n3 1"]


def test_more_kinds_of_rows_than_are_told_apart_hide_no_column(tmp_path: Path) -> None:
    """13 columns that are text or null make 8192 kinds of rows."""
    wide = ({f"c{bit}": "x" if number >> bit & 1 else None for bit in range(13)} for number in range(5000))
    path = write_data(tmp_path, [*(ALPACA | row for row in wide), ALPACA | {"input": "2 2"}])
    assert _data(path)["data"]["format"]["columns"] == _scan(path).columns
    assert _scan(path).columns["input"] == "input"


def _scan(path: Path, **values: Any) -> DatasetFacts:
    return dataset.scan(from_dict({"model": "m", "data": str(path), **values}))


def _data(path: Path, *options: str) -> dict[str, Any]:
    return answered("data", os.path.relpath(path), *options)[1]
