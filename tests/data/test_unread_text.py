"""Text that is not read is told: the passage of a question is as easily lost as an id, and is no id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skill_train.data import inspect as data_subject
from skill_train.data.scan import scan
from skill_train.data.unread import SeenRows, unread_text, unread_text_warning
from skill_train.recipe.fields import Recipe

READ = {"question": "question", "answer": "answer"}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("context", "The depot in Munich has shelf {}."),
        ("passage", "Regal {} steht im Lager."),
        ("背景", "仓库的第{}个货架在慕尼黑"),
        ("background", "полка номер {} стоит на складе"),
    ],
)
def test_sentences_that_differ_are_told(name: str, values: str) -> None:
    assert unread_text([_row(n) | {name: values.format(n)} for n in range(20)], READ) == [name]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("id", "{}"),
        ("uuid", "5f0c6a5e-7e0f-4f0c-9a55-0000000000{}"),
        ("date", "2026-11-{} 10:00"),
        ("source", "the customers of our shop"),
        ("url", "https://example.org/tickets/{}"),
        ("rejected", "That is not what was asked {}."),
    ],
)
def test_names_and_numbers_are_not(name: str, values: str) -> None:
    assert unread_text([_row(n) | {name: values.format(n)} for n in range(20)], READ) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("history", [["Where is parcel {}?", "It left Munich at noon."]]),
        ("answers", {"text": ["It is on shelf {}."], "start": [7]}),
        ("references", [{"said": "Shelf {} is in Munich."}]),
    ],
)
def test_sentences_in_lists_and_objects_are_told(name: str, value: Any) -> None:
    rows = [_row(n) | {name: json.loads(json.dumps(value).replace("{}", str(n)))} for n in range(20)]
    assert unread_text(rows, READ) == [name]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("label", [True, False]),  # of KTO
        ("weight", [1.0, 0.0]),
        ("loss_mask", [[0, 1], [0, 0]]),
        ("label", ["True", "False"]),  # of a table, whose cells are texts
        ("weight", ["1.0", "0"]),
        ("loss_mask", ["[0, 1]", "[0, 0]"]),
        ("train", [True, False]),
        ("masked", [False, True]),
        ("kto_tag", [True, False]),  # of LLaMA-Factory
        ("history", [[], [["Who are you?", "A machine."]]]),  # of LLaMA-Factory: a minority has some
    ],
)
def test_a_mark_of_rows_and_earlier_turns_are_told(name: str, values: list[Any]) -> None:
    """Rows that the author calls bad were trained like the good ones, and a question without what it goes on from."""
    rows = [_row(n) | {name: values[n % 5 == 4]} for n in range(20)]
    assert unread_text(rows, READ) == [name]
    said = unread_text_warning([name], READ)
    assert (f"Rows that {name} marks as bad are trained" in said) is (name != "history")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("label", [1, 2]),
        ("label", [0, 1]),  # a class
        ("weight", [0.5, 1]),
        ("masked", [False, 0]),
        ("train", ["the train to Munich", "a"]),
        ("history", [[], None]),
    ],
)
def test_other_marks_are_not(name: str, values: list[Any]) -> None:
    assert unread_text([_row(n) | {name: values[n % 2]} for n in range(20)], READ) == []


@pytest.mark.parametrize(("name", "values"), [("label", [0, 1]), ("Sentiment", ["good", "bad"]), ("stars", [1, 5])])
def test_the_label_of_a_text_is_told(name: str, values: list[Any]) -> None:
    rows = [{"text": f"Parcel {n} came late.", name: values[n % 2], "lang": "en"} for n in range(20)]
    assert unread_text(rows, {"text": "text"}) == [name]
    assert f"columns: {{prompt: text, completion: {name}}}" in unread_text_warning([name], {"text": "text"})
    assert "write words for numbers first" in unread_text_warning([name], {"text": "text"})  # they cannot be answers
    assert unread_text([row | {name: values[0]} for row in rows], {"text": "text"}) == []


@pytest.mark.parametrize("name", ["answer", "completion", "Response", "outputs", "summary", "reply"])
def test_the_short_answer_beside_a_text_is_told(name: str) -> None:
    """The texts were trained alone, without a word, where the answers have fewer than three words."""
    rows = [{"text": f"Where is parcel {n}?", name: f"Shelf {n}"} for n in range(20)]
    assert unread_text(rows, {"text": "text"}) == [name]
    said = unread_text_warning([name], {"text": "text"})
    assert f"columns: {{prompt: text, completion: {name}}}" in said and "numbers" not in said
    whole = [row | {"text": f"{row['text']} {row[name]}"} for row in rows]  # rendered: the answer is read
    assert unread_text(whole, {"text": "text"}) == []
    assert unread_text([row | {name: ""} for row in rows], {"text": "text"}) == []


@pytest.mark.parametrize("name", ["label_text", "label_name", "emotion", "gold_label"])
def test_the_words_of_a_class_are_told_before_its_number(name: str) -> None:
    rows = [{"text": f"Parcel {n} came late.", "label": n % 2, name: ("angry", "calm")[n % 2]} for n in range(20)]
    told = unread_text(rows, {"text": "text"})
    assert told == ["label", name]
    said = unread_text_warning(told, {"text": "text"})
    assert f"columns: {{prompt: text, completion: {name}}}" in said and "numbers" not in said


@pytest.mark.parametrize("name", ["response", "solution", "Complex_CoT", "reasoning", "chain_of_thought", "rationale"])
def test_another_answer_and_its_thoughts_do_not_belong_into_the_question(name: str) -> None:
    rows = [_row(n) | {name: f"The list of the depot has it on shelf {n}."} for n in range(20)]
    assert unread_text(rows, READ) == [name]
    said = unread_text_warning([name], READ)
    assert "put it into the question" not in said and "into the answers" in said
    assert "put it into the question" in unread_text_warning(["context", name], READ)


def test_a_rendering_of_what_is_read_is_not_told() -> None:
    """Alpaca has one in `text`."""
    rows = [_row(n) | {"text": "### Question:\n{question}\n### Answer:\n{answer}".format(**_row(n))} for n in range(20)]
    assert unread_text(rows, READ) == []
    assert unread_text([*rows, _row(20) | {"text": "Parcel 20 is lost since May."}], READ) == ["text"]


@pytest.mark.parametrize(
    "row",
    [
        {"context": "Shelf {} is in Munich.", "question": "Where is it?", "answers": {"text": ["Munich {}"]}},
        {"question": "Where is {}?", "hint": "Look at {}.", "answers": ["in Munich", "at home"]},
        {"passage": "Shelf {} is in Munich.", "question": "Where is {}?"},
    ],
)
def test_two_texts_are_no_pair_where_the_answer_is_no_text(tmp_path: Path, row: dict[str, Any]) -> None:
    """As in SQuAD, whose `answers` is an object."""
    lines = [json.dumps(row).replace("{}", str(n)) for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    verdict = data_subject.inspect_dataset(Recipe(model="m", data=str(tmp_path / "rows.jsonl")), "sft", None).verdict
    assert verdict.verdict == "impossible"


@pytest.mark.parametrize("name", ["context", "passage", "Absatz"])
def test_a_passage_of_several_questions_is_told(name: str) -> None:
    """As in SQuAD, which asks five questions about each."""
    passage = (
        "The depot of Munich lies north of the river and has {} halls, of which the last one is for large parcels."
    )
    assert unread_text([_row(n) | {name: passage.format(n // 5)} for n in range(20)], READ) == [name]
    assert unread_text([_row(n) | {name: f"hall number {n // 5}"} for n in range(20)], READ) == []


@pytest.mark.parametrize("name", ["system_message", "System Prompt", "sys_prompt", "persona", "functions"])
def test_what_stands_before_each_question_is_told(name: str) -> None:
    """Also where it is the same in all rows: the model would be used with it, and was trained without."""
    value = [{"name": "find", "description": "Find a parcel by number"}] if name == "functions" else "You are a clerk."
    assert unread_text([_row(n) | {name: value} for n in range(20)], READ) == [name]
    assert unread_text([_row(n) | {name: None} for n in range(20)], READ) == []


@pytest.mark.parametrize("name", ["system", "system_prompt", "system_message", "Systemprompt", "sys_prompt"])
@pytest.mark.parametrize("first", ["You are a clerk.", "You are clerk {}."])
def test_a_system_prompt_that_a_mapping_leaves_out_is_told(tmp_path: Path, name: str, first: str) -> None:
    """A mapping that names question and answer says nothing of it, and whoever wrote the column meant it."""
    rows = [{"Frage": f"Wo ist {n}?", "Antwort": f"Im Regal {n}.", name: first.format(n)} for n in range(20)]
    columns = {"question": "Frage", "answer": "Antwort"}
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row | {"note": f"seen in hall {row}"}) + "\n" for row in rows)
    )
    recipe = Recipe(model="m", data=str(tmp_path / "rows.jsonl"), format="question_answer", columns=columns)
    assert data_subject.inspect_dataset(recipe, "sft", None).unread == (name,)  # of the note it says so
    assert unread_text(rows, columns | {"system": name}, named=True) == []
    said = unread_text_warning([name], columns, named=True)
    assert f"add system: {name} to the columns" in said and "to say that it is not needed" not in said


@pytest.mark.parametrize("lost", [False, True])
def test_a_text_that_is_read_elsewhere_too_is_not(lost: bool) -> None:
    """The `prompt` of ultrachat_200k is the first of its `messages`. One that is not there would be lost."""
    rows = [
        {"prompt": f"Where is parcel {n}?", "messages": [{"role": "user", "content": f"Where is parcel {n}?"}]}
        for n in range(20)
    ]
    rows[7]["prompt"] += " Be short." if lost else ""
    rows = [row | {"history": [row["prompt"]]} for row in rows]
    assert unread_text(rows, {"messages": "messages"}) == (["prompt", "history"] if lost else [])


def test_what_only_some_rows_have_is_not() -> None:
    rows: list[dict[str, Any]] = [_row(n) | {"note": None if n % 2 else f"look at it again {n}"} for n in range(20)]
    assert unread_text(rows, READ) == []


LONG = "The depot of Munich lies north of the river, has {} halls, and the last of them is for large parcels."


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("context", "Hall {} is full.", True),  # as in Dolly, of which a third has one
        ("input", "Hall {} is full.", True),
        ("Absatz", LONG, True),
        ("context", "", False),
        ("note", "Hall {} is full.", False),
        ("url", "https://example.org/tickets/of/the/hall/of/parcels/in/the/north/of/munich/beside/the/river/{}", False),
    ],
)
@pytest.mark.parametrize("empty", ["", None])
def test_what_a_question_is_about_is_told_though_few_rows_have_it(
    name: str, value: str, told: bool, empty: str | None
) -> None:
    rows = [_row(n) | {name: value.format(n) if n % 3 == 2 else empty} for n in range(30)]
    assert unread_text(rows, READ) == [name] * told


ALIKE = {"instruction": "Classify the product."}
GIVEN = {"instruction": "Classify it.", "input": "It is shoe {}."}
ASKS = {"instruction": "Where is parcel {}?"}


@pytest.mark.parametrize(
    ("row", "other", "told"),
    [
        (ALIKE, {"text": "shoe {}"}, True),
        (ALIKE, {"keywords": ["Munich", "hall {}"]}, True),
        (ALIKE, {"id": "ticket-{}"}, False),
        (ALIKE, {"day": "2026-11-{} 10:00"}, False),
        (ALIKE, {"url": "https://example.org/{}"}, False),
        (ALIKE, {"number": 7}, False),
        (ALIKE, {"model": "teacher {}"}, False),
        (ALIKE, {"source": "our shop"}, False),
        (GIVEN, {"text": "shoe {}"}, False),
        (GIVEN, {"tone": "kind {}"}, True),
        (GIVEN, {"tone": "polite"}, False),
        (GIVEN, {"tgt_lang": "Language {}"}, True),
        (GIVEN, {"language": "Language {}"}, False),
        (ASKS, {"choices": ["hall {}", "9{}"]}, True),
        (ASKS, {"B": "9{}"}, True),
        (ASKS, {"option_b": "hall {}"}, True),
        (ASKS, {"choice_type": "single {}"}, False),
        (ASKS, {"options": ["parcel {}", "Where"]}, False),  # the question has them
    ],
)
def test_short_text_that_changes_the_answer_is_told(row: dict[str, Any], other: dict[str, Any], told: bool) -> None:
    """Without it every row asks the same, or a test has no choices."""
    whole = json.dumps(row | other | {"output": "It is {}."})
    rows = [json.loads(whole.replace("{}", str(n))) for n in range(20)]
    columns = {name: name for name in (*row, "output")}
    assert unread_text(rows, columns) == list(other) * told


@pytest.mark.parametrize("image", ["{}.png", None])
def test_pictures_tell_rows_apart(image: str | None) -> None:
    """One question about each of many pictures is asked with its picture."""
    rows = [{"question": "What is it?", "image": f"{n}.png", "alt": f"shoe {n}", "answer": "It."} for n in range(9)]
    columns = READ | ({"images": "image"} if image else {})
    assert unread_text(rows, columns) == ([] if image else ["alt"])


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        ("split", ["train", "test"], True),
        ("Set", ["Training", "Validation"], True),
        ("fold", ["dev", "dev"], True),
        ("split", ["train", "train"], False),
        ("fold", [1, 2], False),
        ("subset", ["forum", "mail"], False),
        ("kind", ["train", "test"], False),
    ],
)
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("begin", [20, 400])
def test_rows_that_their_author_tests_with_are_told(
    tmp_path: Path, name: str, values: list[Any], told: bool, named: bool, begin: int
) -> None:
    """Files of all splits are joined, and the test rows would train."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(_row(n) | {name: values[n >= begin]}) + "\n" for n in range(450)))
    recipe = Recipe(model="m", data=str(file), **({"format": "question_answer", "columns": READ} if named else {}))
    assert data_subject.inspect_dataset(recipe, "sft", None).unread == (name,) * told
    said = unread_text_warning(["system", name], READ, named=named)
    assert said.startswith(f"rows that {name} marks for tests are trained") is (name != "kind")


def test_a_split_alone_says_nothing_of_answers() -> None:
    said = unread_text_warning(["split"], READ)
    assert said == "rows that split marks for tests are trained like the others: leave them out"


@pytest.mark.parametrize(
    ("name", "early", "late", "told"),
    [
        ("history", [], [["Who are you?", "A machine of hall {}."]], True),
        ("context", None, "Hall {} is full.", True),
        ("Absatz", "", LONG, True),
        ("system_message", None, "You are a clerk.", True),
        ("system_message", None, None, False),
        ("source", None, "the customers of our shop", False),
        ("uuid", None, "5f0c6a5e-7e0f-4f0c-9a55-0000000000{}", False),
    ],
)
def test_a_column_that_no_first_row_has_is_told(tmp_path: Path, name: str, early: Any, late: Any, told: bool) -> None:
    file = tmp_path / "rows.jsonl"
    values = [json.loads(json.dumps(late if n > 400 else early).replace("{}", str(n))) for n in range(450)]
    file.write_text("".join(json.dumps(_row(n) | {name: value}) + "\n" for n, value in enumerate(values)))
    recipe, seen = Recipe(model="m", data=str(file)), SeenRows()
    assert data_subject.inspect_dataset(recipe, "sft", None).unread == (name,) * told
    facts = scan(recipe, seen=seen)
    assert unread_text([*seen.first, *seen.later], facts.columns) == [name] * told
    assert len(seen.first) == 200 and len(seen.later) <= 20


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (("antwort", "Im Regal {}."), ("frage", "Wo ist Paket {}?"), ("frage", "antwort")),
        (("frage", "Wo ist Paket {}?"), ("antwort", "Im Regal {}."), ("frage", "antwort")),
        (("回答", "在{}号货架上。"), ("質問", "包裹{}在哪里？"), ("質問", "回答")),
        (("جواب", "على الرف {}."), ("سؤال", "أين الطرد {}؟"), ("سؤال", "جواب")),
        (("anfrage", "Zeige Kunde {}."), ("sql", "SELECT * FROM kunden WHERE id = {};"), ("anfrage", "sql")),
        (("eins", "Erzähle von {}."), ("zwei", "Es war einmal {}."), ("eins", "zwei")),
    ],
)
def test_the_question_is_the_column_that_asks(
    tmp_path: Path, first: tuple[str, str], second: tuple[str, str], expected: tuple[str, str]
) -> None:
    lines = [{name: text.format(n) for name, text in (first, second)} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    verdict = data_subject.inspect_dataset(Recipe(model="m", data=str(tmp_path / "rows.jsonl")), "sft", None).verdict
    assert tuple(verdict.columns.values()) == expected and verdict.guessed


def _row(number: int) -> dict[str, Any]:
    return {"question": f"Where is parcel {number}?", "answer": f"On shelf {number}."}
