"""`data` does not answer plain ok for a dataset that `plan` refuses: one is asked before the other, and trusted.

Each file is a mistake that people make. Both commands are asked about the same bytes, and training's own reader too.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

import tiny
from command_child import Commands, Done
from hostile_rows import ROWS

pytestmark = pytest.mark.slow

PAIR = {"prompt": "2+2?", "completion": "4"}
TALK = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
OF_LINES: dict[str, list[Any]] = {
    "a broken line": [PAIR, '{"prompt":'],
    "a line that is no object": [PAIR, "[1]"],
    "a row without columns": [PAIR, {}],
    "first a row without columns": [{}, PAIR, PAIR],
    "a later row lacks a column": [PAIR, PAIR, {"prompt": "2+2?"}],
    "the first row lacks a column": [{"prompt": "2+2?"}, PAIR, PAIR],
    "two formats": [PAIR, TALK],
    "the first row is of another format": [{"text": "Once."}, PAIR, PAIR],
    "an empty answer": [PAIR, PAIR | {"completion": ""}],
    "a number for an answer": [PAIR, PAIR | {"completion": 4}],
    "null first": [{"messages": None}, TALK, TALK],
    "no messages": [{"messages": []}, TALK],
    "half a surrogate pair": [PAIR, '{"prompt": "2+2?", "completion": "\\ud83d"}'],
    "a late optional column": [{"instruction": "i", "output": "o"}, {"instruction": "i", "output": "o", "input": 5}],
    "a late picture": [*[PAIR] * 210, PAIR | {"image": "a.png"}],
    "names in capitals": [{"Prompt": "2+2?", "Completion": "4"}],
    "other names": [{"Q": "2+2?", "A": "4"}] * 2,
    "preference pairs": [{"prompt": "2+2?", "chosen": "4", "rejected": "5"}],
    "prompts alone": [{"prompt": "2+2?"}] * 2,
    "one column of text": [{"body": "Once.", "n": 1}],
    "no answer to learn from": [{"messages": TALK["messages"][:1]}],
    "only a row without columns": [{}],
    "no row": [],
}
OF_TEXT = {
    "rows.csv": "prompt,completion\na,b\nc\n",
    "empty cell.csv": "prompt,completion\na,b\nc,\n",
    "no header.csv": "a,b\nc,d\n",
    "one name twice.csv": "prompt,prompt\na,b\n",
    "header alone.csv": "prompt,completion\n",
    "rows.tsv": "prompt,completion\na,b\n",
    "an object.json": "{}",
    "a list of nothing.json": "[]",
    "an empty list in an object.json": '{"rows": []}',
    "a list of texts.json": '["a", "b"]',
    "rows.txt": "Once.\n",
    "rows.parquet": "no Parquet",
}


def _ask(commands: Commands, folder: Path, data: str, *more: str) -> tuple[Done, Done]:
    env = os.environ | {"SKILL_TRAIN_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    model = ("--model", str(tiny.cached("gemma")))
    looked = commands.run(folder, env, "data", data, *more, "--format", "json")
    planned = commands.run(folder, env, "plan", *model, "--data", data, "--where", "local", *more, "--format", "json")
    return looked, planned


def _plain_ok(done: Done) -> bool:
    return done.code == 0 and not {"needs_mapping"} & {warning["code"] for warning in done.answer["warnings"]}


def _require_agreement(looked: Done, planned: Done) -> None:
    assert not (_plain_ok(looked) and planned.code), (looked.stdout, planned.stdout)
    assert looked.code == 0 or planned.code, (looked.stdout, planned.stdout)


@pytest.mark.parametrize("name", OF_LINES)
def test_rows_that_plan_refuses(commands: Commands, tmp_path: Path, name: str) -> None:
    lines = [line if isinstance(line, str) else json.dumps(line) for line in OF_LINES[name]]
    (tmp_path / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines))
    looked, planned = _ask(commands, tmp_path, "rows.jsonl")
    assert planned.code == 2, planned.stdout
    _require_agreement(looked, planned)


@pytest.mark.parametrize("name", OF_TEXT)
def test_files_that_plan_refuses(commands: Commands, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(OF_TEXT[name])
    looked, planned = _ask(commands, tmp_path, name)
    assert planned.code == 2, planned.stdout
    _require_agreement(looked, planned)


def test_rows_with_a_value_changed_at_random(commands: Commands, tmp_path: Path) -> None:
    """Rows of every format with a key or a value taken away, emptied or of another kind: 60 files."""
    draw, refused = random.Random(23), 0
    for _ in range(60):
        kind = draw.choice(ROWS)
        rows = [dict(kind) for _ in range(4)]
        row = rows[draw.randrange(4)]
        column = draw.choice(list(row))
        change = draw.choice(["drop", "rename", None, "", " ", 5, [], {}, [None], True, "text"])
        if change in ("drop", "rename"):
            value = row.pop(column)
            row |= {column.upper(): value} if change == "rename" else {}
        else:
            row[column] = change
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        looked, planned = _ask(commands, tmp_path, "rows.jsonl")
        _require_agreement(looked, planned)
        refused += planned.code == 2
    assert refused > 20  # else the changes were none


def test_a_split_without_rows(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(PAIR) + "\n")
    for split in ("train[5:]", "train[0:0]", "test"):
        looked, planned = _ask(commands, tmp_path, "rows.jsonl", "--split", split)
        assert (looked.code, planned.code) == (2, 2), (looked.stdout, planned.stdout)


@pytest.mark.parametrize(
    "mapping",
    [
        "format: prompt_completion\ncolumns: {prompt: prompt, completion: reply}",
        "format: messages",
        "columns: {prompt: prompt, completion: completion}",
        "format: text\ncolumns: {text: completion, system: nothing}",
        "format: prompt_completion\ncolumns: {prompt: prompt}",
        "format: question_answer\ncolumns: {question: prompt, answer: completion, system: nowhere}",
    ],
)
def test_a_mapping_that_plan_refuses(commands: Commands, tmp_path: Path, mapping: str) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(PAIR) + "\n")
    (tmp_path / "recipe.yaml").write_text(f"model: {tiny.cached('gemma')}\ndata: rows.jsonl\n{mapping}\n")
    env = os.environ | {"SKILL_TRAIN_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    looked = commands.run(tmp_path, env, "data", "--recipe", "recipe.yaml", "--format", "json")
    planned = commands.run(tmp_path, env, "plan", "recipe.yaml", "--format", "json")
    assert planned.code == 2, planned.stdout
    assert looked.code == 2, looked.stdout


def test_columns_that_need_a_mapping_are_no_plain_ok(commands: Commands, tmp_path: Path) -> None:
    """What the warning says is what `plan` refuses, and following it ends in a plan."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"Q": "2+2?", "A": "4"}) + "\n")
    looked, planned = _ask(commands, tmp_path, "rows.jsonl")
    (warning,) = [one for one in looked.answer["warnings"] if one["code"] == "needs_mapping"]
    assert "plan" in warning["message"] and planned.error == (2, "wrong_columns")
    fixed, _ = _ask(commands, tmp_path, "rows.jsonl", "--fix", "fixed.jsonl")
    assert "needs_mapping" not in {one["code"] for one in fixed.answer["warnings"]}
    looked, planned = _ask(commands, tmp_path, "fixed.jsonl")
    assert (_plain_ok(looked), planned.code) == (True, 0)


@pytest.mark.parametrize("said", [True, False])
def test_unread_pictures_are_told_by_data_as_by_plan(commands: Commands, tmp_path: Path, said: bool) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(PAIR | {"image": "a.png"} if said else PAIR) + "\n")
    mapping = "format: prompt_completion\ncolumns: {prompt: prompt, completion: completion}\n"
    (tmp_path / "recipe.yaml").write_text(f"model: {tiny.cached('gemma')}\ndata: rows.jsonl\n{mapping}")
    env = os.environ | {"SKILL_TRAIN_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    told = []
    for words in (("data", "--recipe", "recipe.yaml"), ("plan", "recipe.yaml")):
        done = commands.run(tmp_path, env, *words, "--format", "json")
        assert done.code == 0, done.stdout
        assert words[0] == "plan" or done.data["problems"]["truncated"] is not None, done.stdout  # tokens were counted
        told.append([one for one in done.answer["warnings"] if one["code"] == "pictures"])
    assert told[0] == told[1]
    assert bool(told[0]) is said
