"""Pairs of texts become turns of a chat for a model with a chat template, whatever their columns are called.

The same rows written as `messages` say what is right: equal token ids and equal labels, by three templates.
"""

from __future__ import annotations

import csv
import functools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

import tiny
import training
from command_child import Commands
from skill_train.commands._chosen_model import chosen
from skill_train.core.errors import SkillTrainError
from skill_train.data.scan import PERHAPS_RENDERED
from skill_train.program.encode import ALREADY_RENDERED, SYSTEM_UNREAD, WITHOUT_TEMPLATE
from skill_train.program.events import Refused
from skill_train.program.main import load_data

pytestmark = pytest.mark.slow

# Ten pairs of column names in six languages, and what the columns hold.
PAIRS = [
    ("question", "answer"),
    ("prompt", "completion"),
    ("src", "tgt"),
    ("frage", "antwort"),
    ("Eingabe", "Ausgabe"),
    ("pregunta", "respuesta"),
    ("demande", "réponse"),
    ("вопрос", "ответ"),
    ("質問", "回答"),
    ("质询", "答复"),
]
TEXTS = [
    ("Wie lange dauert eine Lieferung nach München?", "Zwei Tage."),
    ("¿Dónde está mi pedido 7?\nGracias", "En Sevilla.\nLlega mañana."),
    ("  荷物は どこですか？ ", "東京です。"),
]
TEMPLATES = ["qwen2", "llama-bpe", "mistral"]


def _rows(asked: str, answered: str) -> list[dict[str, Any]]:
    return [{asked: f"{question} {n}", answered: answer} for n in range(8) for question, answer in TEXTS]


def _messages() -> list[dict[str, Any]]:
    turns = [(row["q"], row["a"]) for row in _rows("q", "a")]
    return [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in turns]


def _encoded(kind: str, data: Path, **values: Any) -> list[tuple[list[int], list[int]]]:
    recipe = training.resolved(tiny.cached(kind), data, max_steps=1, held_out_fraction=0.0, **values)
    loaded = load_data(recipe, training.tokenizer(kind))
    return [(row["input_ids"], row["labels"]) for row in loaded["train"]]


@functools.cache
def _expected(kind: str) -> list[tuple[list[int], list[int]]]:
    with tempfile.TemporaryDirectory() as folder:
        return _encoded(kind, training.write_data(Path(folder), _messages(), "messages.jsonl"))


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("names", PAIRS, ids="/".join)
def test_a_mapping_makes_turns(tmp_path: Path, kind: str, names: tuple[str, str]) -> None:
    data = training.write_data(tmp_path, _rows(*names))
    columns = {"prompt": names[0], "completion": names[1]}
    assert _encoded(kind, data, format="prompt_completion", columns=columns) == _expected(kind)


@pytest.mark.parametrize("names", PAIRS, ids="/".join)
def test_what_data_writes_makes_turns(commands: Commands, tmp_path: Path, names: tuple[str, str]) -> None:
    """`data --fix` of a CSV file, as its own `next` says, then each template."""
    with open(tmp_path / "rows.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, delimiter=";")
        table.writerows([names, *(row.values() for row in _rows(*names))])
    done = commands.run(tmp_path, dict(os.environ), "data", "rows.csv", "--fix", "fixed.jsonl", "--format", "json")
    assert done.code == 0, done.stderr
    for kind in TEMPLATES:
        assert _encoded(kind, tmp_path / "fixed.jsonl") == _expected(kind)


@pytest.mark.parametrize("kind", TEMPLATES)
def test_chosen_answers_make_turns(commands: Commands, tmp_path: Path, kind: str) -> None:
    rows = [{"prompt": row["q"], "chosen": row["a"], "rejected": "No."} for row in _rows("q", "a")]
    training.write_data(tmp_path, rows, "pairs.jsonl")
    done = commands.run(tmp_path, dict(os.environ), "data", "pairs.jsonl", "--fix", "fixed.jsonl", "--format", "json")
    assert done.code == 0, done.stderr
    assert _encoded(kind, tmp_path / "fixed.jsonl") == _expected(kind)


def test_texts_beside_messages_are_turns_too(tmp_path: Path) -> None:
    texts = _rows("prompt", "completion")
    lists = [{"prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in _messages()]
    data = training.write_data(tmp_path, [*texts[:12], *lists[12:]])
    assert _encoded("qwen2", data) == _expected("qwen2")


def test_messages_in_the_cells_of_a_table_are_turns(tmp_path: Path) -> None:
    with open(tmp_path / "rows.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["prompt", "completion"])
        table.writerows([json.dumps(row["messages"][:1]), json.dumps(row["messages"][1:])] for row in _messages())
    assert _encoded("qwen2", tmp_path / "rows.csv") == _expected("qwen2")


def test_messages_as_python_writes_them_are_refused(tmp_path: Path) -> None:
    """As pandas writes a list to a .csv file: the model learned to answer with the text of a list."""
    row = {"prompt": repr(_messages()[0]["messages"][:1]), "completion": repr(_messages()[0]["messages"][1:])}
    with pytest.raises(SkillTrainError, match="prompt is text that is not JSON") as caught:
        _encoded("qwen2", training.write_data(tmp_path, [row]))
    assert "json.dumps" in caught.value.hint


@pytest.mark.parametrize("text", ['[{"role": "user"', "[1, 2]", '[{"name": "a"}]'])
def test_one_text_that_looks_like_messages_stays_a_text(tmp_path: Path, text: str) -> None:
    """It may be what a model is to read or to write."""
    [(ids, _)] = _encoded("qwen2", training.write_data(tmp_path, [{"prompt": text, "completion": "No JSON."}]))
    assert text in training.tokenizer("qwen2").decode(ids)


@pytest.mark.parametrize("sides", [(True, False), (False, True), (True, True)], ids=["prompt", "completion", "both"])
@pytest.mark.parametrize("whole", [False, True], ids=["answer alone", "whole conversation"])
def test_each_side_may_be_json_text(tmp_path: Path, sides: tuple[bool, bool], whole: bool) -> None:
    """As UltraFeedback in a table has its chosen answers: the model learned to answer with the text of a list."""
    rows = list[dict[str, Any]]()
    for turns in (row["messages"] for row in _messages()):
        prompt, completion = turns[:1], turns if whole else turns[1:]
        asked = json.dumps(prompt) if sides[0] else turns[0]["content"]
        answered = json.dumps(completion) if sides[1] else completion if whole else turns[1]["content"]
        rows.append({"prompt": asked, "completion": answered})
    assert _encoded("qwen2", training.write_data(tmp_path, rows)) == _expected("qwen2")


@pytest.mark.parametrize("side", ["prompt", "completion"])
def test_one_side_as_python_writes_it_is_refused(tmp_path: Path, side: str) -> None:
    turns = _messages()[0]["messages"]
    row = {"prompt": "What?", "completion": "That."} | {side: repr(turns[:1] if side == "prompt" else turns[1:])}
    with pytest.raises(SkillTrainError, match=f"{side} is text that is not JSON"):
        _encoded("qwen2", training.write_data(tmp_path, [row]))


@pytest.mark.parametrize(
    "text",
    [
        '[{"content": "Buy milk", "done": false}]',
        '[{"role": "Engineer", "content": "Builds bridges"}]',
        '[{"role": "user", "content": "Hi"}]\nWhat does this payload do?',
        "[{'role': 'user', 'content': 'Hi'}].pop()",
    ],
)
@pytest.mark.parametrize("side", ["prompt", "completion"])
def test_other_json_and_code_stays_a_text(tmp_path: Path, side: str, text: str) -> None:
    row = {"prompt": "What?", "completion": "That."} | {side: text}
    [(ids, _)] = _encoded("qwen2", training.write_data(tmp_path, [row]))
    assert text in training.tokenizer("qwen2").decode(ids)


@pytest.mark.parametrize("as_text", [False, True])
def test_a_prompt_that_its_conversation_repeats_is_read_once(tmp_path: Path, as_text: bool) -> None:
    rows = [
        {"prompt": turns[0]["content"] if as_text else turns[:1], "completion": turns}
        for turns in (row["messages"] for row in _messages())
    ]
    assert _encoded("qwen2", training.write_data(tmp_path, rows)) == _expected("qwen2")


KIND: dict[str, Any] = {"role": "system", "content": "Be kind."}


@pytest.mark.parametrize(
    ("column", "before", "within", "blanks"),
    [
        (True, [], [KIND], ""),
        (False, [KIND], [], ""),
        (False, [], [KIND], ""),
        (False, [KIND], [KIND], "\n"),
        (True, [KIND], [KIND], " "),
        (True, [], [], " "),
    ],
)
def test_neither_blanks_nor_a_system_message_make_another_prompt(
    tmp_path: Path, column: bool, before: list[Any], within: list[Any], blanks: str
) -> None:
    """The question was asked twice, as of two users."""
    rows, right = list[dict[str, Any]](), list[dict[str, Any]]()
    for user, answer in (row["messages"] for row in _messages()):
        asked = [*before, user | {"content": user["content"] + blanks, "name": None}]
        rows.append(
            {"prompt": asked, "completion": [*within, user, answer]} | ({"system": "Be kind."} if column else {})
        )
        right.append({"messages": [KIND, asked[-1], answer]})
    expected = _encoded("qwen2", training.write_data(tmp_path, right, "right.jsonl"))
    assert _encoded("qwen2", training.write_data(tmp_path, rows)) == expected


@pytest.mark.parametrize(
    "completion",
    [
        [{"role": "user", "content": "And a tree?"}, {"role": "assistant", "content": "An oak."}],
        [
            KIND | {"content": "Be short."},
            {"role": "user", "content": "A fruit?"},
            {"role": "assistant", "content": "A pear."},
        ],
    ],
    ids=["another question", "another system message"],
)
@pytest.mark.parametrize("write", [list, json.dumps])
def test_a_completion_that_asks_something_else_is_refused(tmp_path: Path, completion: list[Any], write: Any) -> None:
    row = {"prompt": [KIND, {"role": "user", "content": "A fruit?"}], "completion": write(completion)}
    with pytest.raises(SkillTrainError, match="the completion begins with another question than its prompt"):
        _encoded("qwen2", training.write_data(tmp_path, [row]))


def test_a_completion_may_go_on_with_further_questions(tmp_path: Path) -> None:
    user, answer, further, last = (
        {"role": role, "content": text}
        for role, text in (
            ("user", "A fruit?"),
            ("assistant", "A pear."),
            ("user", "A tree?"),
            ("assistant", "An oak."),
        )
    )
    rows: list[Any] = [
        {"prompt": prompt, "completion": completion}
        for prompt, completion in (
            ([user], [answer, further, last]),
            ([user, answer], [further, last]),
            ([user, answer, further], [last]),
            ([user, answer, further], [user, answer, further, last]),
        )
    ]
    made = _encoded("qwen2", training.write_data(tmp_path, rows))
    (whole, trained), *_ = _encoded(
        "qwen2", training.write_data(tmp_path, [{"messages": [user, answer, further, last]}])
    )
    assert [ids for ids, _ in made] == [whole] * 4
    assert made[0][1] == trained and made[1][1] == made[2][1] == made[3][1] != trained


@pytest.mark.parametrize(("kind", "values"), [("qwen2", {"format": "completion"}), ("gpt2", {})], ids=["asked", "none"])
def test_bare_text_is_joined_as_it_stands(tmp_path: Path, kind: str, values: dict[str, Any]) -> None:
    """GPT-2 has no template. Both texts are tokenized by hand: the prompt is not trained, the completion is."""
    data = training.write_data(tmp_path, [{"prompt": "Two and two is", "completion": f" four, {n}"} for n in range(3)])
    recipe = training.resolved(tiny.cached(kind), data, max_steps=1, **values)
    tokenizer = training.tokenizer(kind)
    loaded = load_data(recipe, tokenizer)
    prompt, answer = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("Two and two is", " four, 0"))
    row = loaded["train"][0]
    assert row["input_ids"] == [*prompt, *answer, tokenizer.eos_token_id]
    assert row["labels"] == [*[-100] * len(prompt), *answer, tokenizer.eos_token_id]
    assert loaded["figures"]["notes"] == ([WITHOUT_TEMPLATE] if values else [])


def test_a_system_message_that_is_not_read_is_told(tmp_path: Path) -> None:
    rows = [{"system": "Count.", "prompt": "Two and two is", "completion": " four"}] * 3
    recipe = training.resolved(tiny.cached("gpt2"), training.write_data(tmp_path, rows), max_steps=1)
    loaded = load_data(recipe, training.tokenizer("gpt2"))
    assert loaded["train"][0]["rendered"] == "Two and two is four"
    assert loaded["figures"]["notes"] == [SYSTEM_UNREAD]


def test_bare_text_is_told(commands: Commands, tmp_path: Path) -> None:
    training.write_data(tmp_path, _rows("prompt", "completion"))
    (tmp_path / "recipe.yaml").write_text(f"model: {tiny.cached('gemma')}\ndata: rows.jsonl\nformat: completion\n")
    for words in (["data", "--recipe"], ["plan"], ["local"]):
        more = ["--max-steps", "1", "--run-dir", "run"] if words == ["local"] else []
        done = commands.run(tmp_path, dict(os.environ), *words, "recipe.yaml", *more, "--format", "json")
        said = [warning["message"] for warning in done.answer["warnings"]]
        assert WITHOUT_TEMPLATE in said, (words, done.stdout)


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_question_that_is_rendered_already_is_refused(tmp_path: Path, kind: str) -> None:
    recipe = training.resolved(tiny.cached(kind), training.write_data(tmp_path, _rows("prompt", "completion")))
    tokenizer = training.tokenizer(kind)
    turn = [{"role": "user", "content": "Wo ist Paket 7?"}]
    prompt = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    training.write_data(tmp_path, [{"prompt": prompt, "completion": "Im Depot."}])
    with pytest.raises(Refused) as caught:
        load_data(recipe, tokenizer)
    assert caught.value.error["code"] == "template_mismatch" and "format: completion" in caught.value.error["hint"]


@pytest.mark.parametrize("kind", TEMPLATES)
def test_rows_that_are_rendered_already_begin_once(tmp_path: Path, kind: str) -> None:
    """The template writes the first token, and the tokenizer put a second one in front of it: the ids are those of the
    same turns as messages."""
    rows, tokenizer = _rendered(kind), training.tokenizer(kind)
    training.write_data(tmp_path, rows)
    for values in ({"format": "completion"}, {"format": "text", "columns": {"text": "whole"}}):
        data = load_data(training.resolved(tiny.cached(kind), tmp_path / "rows.jsonl", **values), tokenizer)
        assert data["figures"]["notes"] == [ALREADY_RENDERED]
        row = next(row for row in data["train"] if row["row"] == 0)
        turns = tokenizer(rows[0]["whole"], add_special_tokens=False)["input_ids"]
        assert row["input_ids"] in (turns, [*turns, tokenizer.eos_token_id])


@pytest.mark.parametrize("kind", ["gemma", "mistral"])
def test_rendered_rows_pass_with_their_file(commands: Commands, tmp_path: Path, kind: str) -> None:
    """Mistral's template ends no question, so a row of one turn has its end token at its end alone."""
    training.write_data(tmp_path, _rendered(kind))
    (tmp_path / "recipe.yaml").write_text(f"model: {tiny.cached(kind)}\ndata: rows.jsonl\nformat: completion\n")
    planned = commands.run(tmp_path, dict(os.environ), "plan", "recipe.yaml", "--format", "json").answer
    told = [warning["message"] for warning in planned["warnings"] if warning["code"] == "without_template"]
    assert told == [PERHAPS_RENDERED]
    for words in (
        ["local", "recipe.yaml", "--max-steps", "1", "--run-dir", "run"],
        ["export-gguf", "run", "--quant", "f16"],
    ):
        assert commands.run(tmp_path, dict(os.environ), *words, "--format", "json").code == 0
    assert _shipped(commands.run(tmp_path, dict(os.environ), "verify", "run", "--format", "json").answer) == "pass"
    assert "TEMPLATE {{ .Prompt }}" not in (tmp_path / "run" / "gguf" / "Modelfile").read_text()
    assert not chosen(tmp_path / "run", None).raw


def _rendered(kind: str) -> list[dict[str, str]]:
    """Turns as this template writes them, whole and in two parts."""
    tokenizer, rows = training.tokenizer(kind), []
    for row in _messages():
        whole = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        prompt = tokenizer.apply_chat_template(row["messages"][:1], tokenize=False, add_generation_prompt=True)
        rows.append({"prompt": prompt, "completion": whole.removeprefix(prompt), "whole": whole})
    return rows


def test_a_shipped_template_that_was_not_trained_does_not_pass(commands: Commands, tmp_path: Path) -> None:
    """Asked for, it is a warning, and the Modelfile sends a prompt bare. Rows of a run that never asked fail."""
    training.write_data(tmp_path, _rows("prompt", "completion"))
    (tmp_path / "recipe.yaml").write_text(f"model: {tiny.cached('gemma')}\ndata: rows.jsonl\nformat: completion\n")
    environment = dict(os.environ)
    for words in (
        ["local", "recipe.yaml", "--max-steps", "1", "--run-dir", "run"],
        ["export-gguf", "run", "--quant", "f16"],
    ):
        done = commands.run(tmp_path, environment, *words, "--format", "json")
        assert done.code == 0, done.stdout
    assert "TEMPLATE {{ .Prompt }}" in (tmp_path / "run" / "gguf" / "Modelfile").read_text()
    assert chosen(tmp_path / "run", None).raw
    assert _shipped(commands.run(tmp_path, environment, "verify", "run", "--format", "json").answer) == "warn"
    samples = tmp_path / "run" / "samples.jsonl"
    rows = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    samples.write_text("".join(json.dumps(row | {"without_template": False}) + "\n" for row in rows))
    record = json.loads((tmp_path / "run" / "train.json").read_text(encoding="utf-8"))
    del record["outputs"]["samples.jsonl"]  # its digest, which would refuse the rows
    (tmp_path / "run" / "train.json").write_text(json.dumps(record), encoding="utf-8")
    done = commands.run(tmp_path, environment, "verify", "run", "--format", "json")
    assert (done.code, _shipped(done.answer)) == (6, "fail")


def _shipped(answer: dict[str, Any]) -> str:
    return str(next(one["verdict"] for one in answer["data"]["checks"] if one["name"] == "trained_is_shipped"))
