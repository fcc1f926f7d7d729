"""What a dataset is taken for, and the line that is named when it is not whole."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from skill_train.core.errors import UsageError
from skill_train.data import errors
from skill_train.data import scan as dataset
from skill_train.data.inspect import inspect_dataset
from skill_train.facts import DatasetFacts
from skill_train.program.rows import iter_rows
from skill_train.recipe.fields import Recipe, from_dict
from training import write_data

TURNS = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
SPOKEN = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
GOOD = {"messages": TURNS}


@pytest.mark.parametrize("turns", [TURNS, SPOKEN])
@pytest.mark.parametrize("name", ["chat.json", "chat.jsonl"])
def test_messages_are_no_rows(tmp_path: Path, name: str, turns: list[dict[str, str]]) -> None:
    """Of a role and its content no question and answer are made."""
    text = json.dumps(turns) if name == "chat.json" else "\n".join(map(json.dumps, turns))
    (tmp_path / name).write_text(text)
    recipe = Recipe(model="m", data=str(tmp_path / name))
    with pytest.raises(UsageError, match="a row is one message, and must be a whole conversation") as caught:
        dataset.scan(recipe)
    assert caught.value.code == "wrong_columns" and '{"messages": [' in caught.value.hint
    verdict = inspect_dataset(recipe, "sft", None).verdict
    assert (verdict.verdict, verdict.columns) == ("impossible", {}) and "whole conversation" in verdict.because


TREE = [
    {"message_id": "a", "parent_id": None, "role": "prompter", "text": "2+2?"},
    {"message_id": "b", "parent_id": "a", "role": "assistant", "text": "4"},
]


def test_messages_of_a_tree_are_no_texts(tmp_path: Path) -> None:
    """As OpenAssistant's files have them. A recipe may ask for their texts."""
    recipe = Recipe(model="m", data=str(write_data(tmp_path, TREE)))
    with pytest.raises(UsageError, match="a row is one message, and must be a whole conversation"):
        dataset.scan(recipe)
    verdict = inspect_dataset(recipe, "sft", None).verdict
    assert verdict.verdict == "impossible" and "whole conversation" in verdict.because
    asked = from_dict({"model": "m", "data": recipe.data, "format": "text"})
    assert dataset.scan(asked).format == "text"


@pytest.mark.parametrize(
    "beside",
    [
        {"role": "nurse"},
        {"message_id": "a"},
        {"from": "a@example.org", "message_id": "a"},
        {"role": "x", "content": "y"},
    ],
)
def test_a_text_may_say_who_wrote_it(tmp_path: Path, beside: dict[str, Any]) -> None:
    recipe = Recipe(model="m", data=str(write_data(tmp_path, [beside | {"text": "It is warm."}])))
    assert dataset.scan(recipe).format == "text"
    assert inspect_dataset(recipe, "sft", None).verdict.verdict == "ready"


def test_conversations_may_have_ids_and_roles(tmp_path: Path) -> None:
    row = TREE[0] | GOOD
    assert dataset.scan(Recipe(model="m", data=str(write_data(tmp_path, [row])))).format == "messages"


# One row, and what it must be taken for: format, columns.
TABLE: list[tuple[str, dict[str, Any], str, dict[str, str]]] = [
    ("messages", {"messages": TURNS}, "messages", {"messages": "messages"}),
    ("messages in conversations", {"conversations": TURNS}, "messages", {"messages": "conversations"}),
    ("tools beside messages", GOOD | {"tools": []}, "messages", {"messages": "messages", "tools": "tools"}),
    ("messages win over prompt", GOOD | {"prompt": "a", "completion": "b"}, "messages", {"messages": "messages"}),
    ("sharegpt", {"conversations": SPOKEN}, "sharegpt", {"conversations": "conversations"}),
    (
        "sharegpt with a system",
        {"system": "Count.", "conversations": SPOKEN},
        "sharegpt",
        {"conversations": "conversations", "system": "system"},
    ),
    (
        "prompt and completion",
        {"prompt": "a", "completion": "b"},
        "prompt_completion",
        {"prompt": "prompt", "completion": "completion"},
    ),
    (
        "prompt and completion, conversational",
        {"prompt": TURNS[:1], "completion": TURNS[1:]},
        "prompt_completion",
        {"prompt": "prompt", "completion": "completion"},
    ),
    (
        "instruction",
        {"instruction": "Add.", "input": "2 2", "output": "4"},
        "instruction",
        {"instruction": "instruction", "output": "output", "input": "input"},
    ),
    (
        "instruction and response",
        {"instruction": "Add.", "response": "4"},
        "instruction",
        {"instruction": "instruction", "output": "response"},
    ),
    (
        "question and answer",
        {"question": "2+2?", "answer": "4"},
        "question_answer",
        {"question": "question", "answer": "answer"},
    ),
    (
        "problem and solution",
        {"problem": "2+2?", "solution": "4"},
        "question_answer",
        {"question": "problem", "answer": "solution"},
    ),
    ("text", {"text": "Once."}, "text", {"text": "text"}),
]


@pytest.mark.parametrize(("row", "data_format", "columns"), [t[1:] for t in TABLE], ids=[t[0] for t in TABLE])
def test_the_format_is_found_from_the_columns(
    tmp_path: Path, row: dict[str, Any], data_format: str, columns: dict[str, str]
) -> None:
    facts = _scan(write_data(tmp_path, [row]))
    assert (facts.format, facts.columns, facts.rows) == (data_format, columns, 1)
    assert facts.column_names == tuple(row)
    assert all(column in facts.reason for column in columns.values())


def test_a_mapping_in_the_recipe_is_taken_and_said(tmp_path: Path) -> None:
    columns = {"prompt": "Frage", "completion": "Antwort"}
    path = write_data(tmp_path, [{"Frage": "2+2?", "Antwort": "4", "text": "not this"}])
    facts = _scan(path, format="prompt_completion", columns=columns)
    assert (facts.format, facts.columns, facts.reason) == ("prompt_completion", columns, "said in the recipe")


def test_a_format_in_the_recipe_finds_its_columns(tmp_path: Path) -> None:
    facts = _scan(write_data(tmp_path, [GOOD | {"text": "Once."}]), format="text")
    assert (facts.format, facts.columns) == ("text", {"text": "text"})


def test_columns_without_a_format_are_refused(tmp_path: Path) -> None:
    assert _refused(write_data(tmp_path, [GOOD]), columns={"text": "messages"}).code == "bad_recipe"


def test_a_column_that_is_not_there_is_refused(tmp_path: Path) -> None:
    error = _refused(write_data(tmp_path, [GOOD]), format="text", columns={"text": "body"})
    assert error.code == "wrong_columns"
    assert "'body'" in error.message
    assert error.got == "messages"


@pytest.mark.parametrize(
    "row", [{"a": 1, "b": 2}, {"prompt": "no completion"}, {"messages": [1, 2]}, {"conversations": [1, 2]}]
)
def test_columns_that_fit_nothing_are_refused(tmp_path: Path, row: dict[str, Any]) -> None:
    error = _refused(write_data(tmp_path, [row]))
    assert (error.code, error.exit_code, error.got) == ("wrong_columns", 2, ", ".join(row))
    assert "messages | prompt, completion" in error.expected


def test_preference_pairs_are_named_as_such(tmp_path: Path) -> None:
    error = _refused(write_data(tmp_path, [{"prompt": "2+2?", "chosen": "4", "rejected": "5"}]))
    assert error.code == "wrong_columns"
    assert "DPO" in error.message
    assert error.hint == f"keep the chosen answers: skill-train data {tmp_path / 'rows.jsonl'} --fix SFT.jsonl"


def test_the_hint_for_preference_pairs_works(tmp_path: Path) -> None:
    path = write_data(tmp_path, [{"prompt": "2+2?", "chosen": "4", "rejected": "5"}])
    facts = _scan(path, format="prompt_completion", columns={"prompt": "prompt", "completion": "chosen"})
    assert facts.rows == 1


# --- Broken files: the line is named ---

LINE = json.dumps(GOOD).encode() + b"\n"
BROKEN: list[tuple[str, bytes, int]] = [
    ("cut.jsonl", LINE + b'{"messages": [\n' + LINE, 2),
    ("blank lines count.jsonl", LINE + b"\n\n" + b"nonsense\n", 4),
    ("not an object.jsonl", LINE + LINE + b"[1, 2]\n", 3),
    ("a number.jsonl", LINE + b"7\n", 2),
    ("latin-1.jsonl", LINE + b'{"messages": "caf\xe9"}\n', 2),
    ("lines in a json file.json", LINE + LINE + b"{]\n", 3),
    ("too many.csv", b"prompt,completion\na,b\nc,d,e\n", 3),
    ("too few.csv", b"prompt,completion\na,b\nc\n", 3),
    ("too few.tsv", b"prompt\tcompletion\na\tb\nc\td\ne\n", 4),
    ("latin-1.csv", b"prompt,completion\na,b\nc,d\ncaf\xe9,e\nf,g\n", 4),
    ("open quote.csv", b'prompt,completion\na,b\nc,"d\n', 3),
    ("latin-1.tsv", b"prompt\tcompletion\na\tb\ncaf\xe9\te\n", 3),
]


@pytest.mark.parametrize(("name", "content", "line"), BROKEN, ids=[b[0] for b in BROKEN])
def test_a_broken_line_is_named_by_its_number(tmp_path: Path, name: str, content: bytes, line: int) -> None:
    (tmp_path / name).write_bytes(content)
    error = _refused(tmp_path / name)
    assert (error.code, error.exit_code) == ("unreadable_dataset", 2)
    assert f"line {line} of {tmp_path / name}" in error.message


def test_an_item_of_a_json_list_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([GOOD, "words"]))
    error = _refused(tmp_path / "rows.json")
    assert error.code == "unreadable_dataset"
    assert "item 2" in error.message


def test_a_row_of_other_columns_is_named(tmp_path: Path) -> None:
    error = _refused(write_data(tmp_path, [GOOD, GOOD, {"text": "Once."}]))
    assert error.code == "wrong_columns"
    assert "line 3" in error.message


MALFORMED: list[tuple[str, dict[str, Any]]] = [
    ("no messages", {"messages": []}),
    ("no answer", {"messages": TURNS[:1]}),
    ("no role", {"messages": [{"content": "2+2?"}, TURNS[1]]}),
    ("no content", {"messages": [{"role": "user"}, TURNS[1]]}),
    ("empty content", {"messages": [{"role": "user", "content": ""}, TURNS[1]]}),
    ("null", {"messages": None}),
    ("text", {"messages": "2+2? 4"}),
]


def test_an_image_is_named_by_its_line(tmp_path: Path) -> None:
    image = {"messages": [{"role": "user", "content": [{"type": "image"}]}, TURNS[1]]}
    error = _refused(write_data(tmp_path, [GOOD, GOOD, image]))
    assert (error.code, error.exit_code) == ("not_text", 2)
    assert error.message.startswith(f"line 3 of {tmp_path / 'rows.jsonl'}: a part of type image contains an image")


@pytest.mark.parametrize("row", [m[1] for m in MALFORMED], ids=[m[0] for m in MALFORMED])
def test_a_malformed_row_is_named_by_its_line(tmp_path: Path, row: dict[str, Any]) -> None:
    error = _refused(write_data(tmp_path, [GOOD, GOOD, row]))
    assert (error.code, error.exit_code) == ("bad_row", 2)
    assert error.message.startswith(f"line 3 of {tmp_path / 'rows.jsonl'}: ")
    assert error.hint == f"skill-train data {tmp_path / 'rows.jsonl'} --fix {tmp_path / 'rows.fixed.jsonl'}"


@pytest.mark.parametrize("row", [{"text": " "}, {"text": None}, {"text": 7}])
def test_a_text_that_is_none_is_named_by_its_line(tmp_path: Path, row: dict[str, Any]) -> None:
    error = _refused(write_data(tmp_path, [{"text": "Once."}, row]))
    assert error.code == "bad_row"
    assert "line 2" in error.message


def test_an_unknown_speaker_is_named(tmp_path: Path) -> None:
    error = _refused(write_data(tmp_path, [{"conversations": [*SPOKEN, {"from": "narrator", "value": "End."}]}]))
    assert error.code == "unknown_role"
    assert "narrator" in error.got


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "How many legs?", "completion": 4}, "completion is 4 and not text"),
        ({"prompt": 0, "completion": "b"}, "prompt is 0 and not text"),
        (
            {"messages": [{"role": "user", "content": "Legs?"}, {"role": "assistant", "content": 2.5}]},
            "the assistant message has 2.5 and not text",
        ),
        ({"prompt": "How many legs?", "completion": None}, "completion is empty or not text"),
    ],
)
def test_a_number_in_place_of_a_text_is_named(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    """A number is easily taken for its text where the row is looked at."""
    error = _refused(write_data(tmp_path, [row]))
    assert error.code == "bad_row" and says in error.message


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv"])
@pytest.mark.parametrize("content", ["", "\n"])
def test_an_empty_file_is_refused(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    assert _refused(tmp_path / name).code == "empty_dataset"


def test_an_empty_list_and_a_bare_header_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text("[]")
    (tmp_path / "rows.csv").write_text("prompt,completion\n")
    assert _refused(tmp_path / "rows.json").code == "empty_dataset"
    assert _refused(tmp_path / "rows.csv").code == "empty_dataset"


def test_a_missing_file_is_refused_without_asking_the_hub(tmp_path: Path) -> None:
    for missing in (str(tmp_path / "none.jsonl"), "none.jsonl", "some/where/none"):
        error = _refused(Path(missing))
        assert (error.code, error.exit_code, error.got) == ("missing_file", 2, missing)


def test_an_unknown_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.xlsx").write_bytes(b"PK")
    error = _refused(tmp_path / "rows.xlsx")
    assert (error.code, error.got) == ("unreadable_dataset", ".xlsx")


# --- Kinds of files: the same rows in each ---


def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path) -> None:
    import pyarrow.parquet

    rows = [{"prompt": f"{n}, once", "completion": f"„{n}”"} for n in range(3)]
    write_data(tmp_path, rows)
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "rows.jsonl").read_bytes())
    (tmp_path / "list.json").write_text(json.dumps(rows))
    (tmp_path / "inside.json").write_text(json.dumps({"version": 1, "data": rows}))
    (tmp_path / "rows.csv").write_text("prompt,completion\n" + "".join(f'"{n}, once",„{n}”\n' for n in range(3)))
    (tmp_path / "rows.tsv").write_text("prompt\tcompletion\n" + "".join(f"{n}, once\t„{n}”\n" for n in range(3)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for name in ("rows.jsonl", "bom.jsonl", "list.json", "inside.json", "rows.csv", "rows.tsv", "rows.parquet"):
        assert [row for _, row in iter_rows(str(tmp_path / name), split="train")] == rows, name
        facts = _scan(tmp_path / name)
        assert (facts.rows, facts.format) == (3, "prompt_completion"), name


def test_a_line_in_quotes_counts_its_own_lines(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('prompt,completion\n"two\nlines",b\nc,d,e\n')
    assert "line 4 of" in _refused(tmp_path / "rows.csv").message


def test_one_file_with_windows_line_ends(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(b"prompt,completion\r\na,b\r\nc,d\r\n")
    rows = [row for _, row in iter_rows(str(tmp_path / "rows.csv"), split="train")]
    assert rows == [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]


# --- Slices ---


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train", range(10)),
        ("train_sft", range(10)),
        ("train[2:5]", [2, 3, 4]),
        ("train[:3]", [0, 1, 2]),
        ("train[8:]", [8, 9]),
        ("train[:50%]", range(5)),
        ("train[50%:]", range(5, 10)),
        ("train[20%:4]", [2, 3]),
        ("train[7:100]", [7, 8, 9]),
    ],
)
def test_a_slice_takes_these_rows(tmp_path: Path, split: str, expected: Any) -> None:
    path = write_data(tmp_path, [{"text": str(n)} for n in range(10)])
    rows = [row["text"] for _, row in iter_rows(str(path), split=split)]
    assert rows == [str(n) for n in expected]
    assert _scan(path, split=split).rows == len(rows)


def test_a_slice_keeps_the_line_numbers_of_the_file(tmp_path: Path) -> None:
    path = write_data(tmp_path, [{"text": str(n)} for n in range(10)])
    assert [line for line, _ in iter_rows(str(path), split="train[2:5]")] == [3, 4, 5]


@pytest.mark.parametrize(
    "split", ["train[5]", "train[-3:]", "train[:a]", "train[1:2", "a b", "", f"train[:{'9' * 5000}]"]
)
def test_a_slice_that_is_none_is_refused(tmp_path: Path, split: str) -> None:
    recipe = Recipe(model="m", data=str(write_data(tmp_path, [GOOD])), split=split)
    with pytest.raises(UsageError) as caught:
        dataset.scan(recipe)
    assert (caught.value.code, caught.value.exit_code) == ("bad_split", 2)


def test_a_slice_with_no_row_is_refused(tmp_path: Path) -> None:
    error = _refused(write_data(tmp_path, [GOOD]), split="train[5:]")
    assert error.code == "empty_dataset"


# --- The fingerprint ---


def test_the_fingerprint_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    path = write_data(tmp_path, [{"text": "a"}, {"text": "b"}])
    assert _scan(path).fingerprint == hashlib.sha256(b'{"text": "a"}\n{"text": "b"}\n').hexdigest()


def test_the_fingerprint_of_a_folder_is_that_of_its_rows(tmp_path: Path) -> None:
    """`datasets` writes another file each time: only the rows are the same."""
    import datasets

    for name in ("one", "two"):
        datasets.Dataset.from_list([{"text": "a"}, {"text": "b"}]).save_to_disk(str(tmp_path / name))
    datasets.Dataset.from_list([{"text": "a"}, {"text": "c"}]).save_to_disk(str(tmp_path / "three"))
    one, two, three = (_scan(tmp_path / name).fingerprint for name in ("one", "two", "three"))
    assert one == two != three


def test_the_fingerprint_changes_with_the_rows(tmp_path: Path) -> None:
    first = _scan(write_data(tmp_path, [{"text": "a"}, {"text": "b"}])).fingerprint
    (tmp_path / "moved").mkdir()
    assert _scan(write_data(tmp_path / "moved", [{"text": "a"}, {"text": "b"}])).fingerprint == first
    assert _scan(write_data(tmp_path, [{"text": "b"}, {"text": "a"}])).fingerprint != first
    assert _scan(write_data(tmp_path, [{"text": "a"}])).fingerprint != first


# --- Sizes: figures counted by hand ---

SIZES: list[tuple[str, dict[str, Any], int, int]] = [
    ("text", {"text": "Once."}, 5, 0),
    ("two bytes a letter", {"text": "äöü"}, 6, 0),
    ("an id is not read", {"text": "Once.", "id": "0000000000"}, 5, 0),
    ("pairs", {"prompt": "12", "completion": "345"}, 5, 0),
    ("messages", GOOD, 5, 2),  # "2+2?" and "4"
    ("sharegpt", {"conversations": SPOKEN, "system": "Count."}, 11, 3),
    ("instruction", {"instruction": "Add.", "input": "2 2", "output": "4"}, 4 + 2 + 3 + 1, 2),
]


@pytest.mark.parametrize(("row", "text_bytes", "turns"), [s[1:] for s in SIZES], ids=[s[0] for s in SIZES])
def test_the_text_of_a_row_is_measured(tmp_path: Path, row: dict[str, Any], text_bytes: int, turns: int) -> None:
    facts = _scan(write_data(tmp_path, [row, row]))
    assert (facts.text_bytes, facts.longest_text_bytes) == (2 * text_bytes, text_bytes)
    assert (facts.turns, facts.longest_turns) == (2 * turns, turns)


def test_the_longest_row_is_found(tmp_path: Path) -> None:
    facts = _scan(write_data(tmp_path, [{"text": "ab"}, {"text": "abcde"}, {"text": "a"}]))
    assert (facts.text_bytes, facts.longest_text_bytes) == (8, 5)


def test_half_a_surrogate_pair_is_refused_here_and_not_by_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": "\\ud83d"}\n')
    error = _refused(tmp_path / "rows.jsonl")
    assert (error.code, "line 2" in error.message) == ("bad_row", True)


def _scan(path: Path, **values: Any) -> DatasetFacts:
    return dataset.scan(from_dict({"model": "m", "data": str(path), **values}))


def _refused(path: Path, **values: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        _scan(path, **values)
    return caught.value


def test_a_file_is_the_training_split_and_no_other(tmp_path: Path) -> None:
    """Silently training on all of it, when `test` was asked for, would be worse than refusing."""
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "a"}\n', encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        dataset.scan(Recipe(model="m", data=str(data), split="test"))
    assert caught.value.code == "bad_split"


def test_a_mapped_row_is_left_out_with_the_recipe_that_maps_it(tmp_path: Path) -> None:
    path = write_data(tmp_path, [{"q": "2+2?", "a": "4"}, {"q": "", "a": "4"}])
    error = _refused(path, format="question_answer", columns={"question": "q", "answer": "a"})
    assert error.code == "bad_row"
    assert f"skill-train data --recipe RECIPE {path} --fix " in error.hint


@pytest.mark.parametrize(
    ("data_format", "columns"),
    [
        ("question_answer", {"question": "a", "answer": "a"}),
        ("prompt_completion", {"prompt": "a", "completion": "a"}),
        ("instruction", {"instruction": "a", "input": "a", "output": "b"}),
    ],
)
def test_two_names_of_a_format_are_two_columns(data_format: str, columns: dict[str, str]) -> None:
    """The answer would be trained as its own question."""
    with pytest.raises(UsageError, match="are both the column 'a'") as caught:
        dataset.find_format(Recipe(data="rows.jsonl", format=data_format, columns=columns), {"a": "1", "b": "2"})
    assert caught.value.code == "bad_recipe"


def test_the_command_that_leaves_rows_out_cuts_them_as_the_recipe_does() -> None:
    """A row without anything to learn within 256 tokens may have something within 1024."""
    assert " --max-length 256 --fix " in errors.leave_out(Recipe(data="rows.jsonl", max_length=256))
    assert "--max-length" not in errors.leave_out(Recipe(data="rows.jsonl"))


@pytest.mark.parametrize("answer", [{"chosen": "Here.", "rejected": "There."}, {"response": "Here."}])
def test_a_conversation_whose_answer_is_another_column_is_refused(answer: dict[str, str], tmp_path: Path) -> None:
    """`--fix` keeps no answer of it, so the hint does not name it."""
    turns = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    write_data(tmp_path, [{"messages": turns, **answer}])
    with pytest.raises(UsageError, match="messages ends with a question, and its answer is another column") as caught:
        dataset.scan(Recipe(data="rows.jsonl"))
    assert "put it at the end of messages" in caught.value.message and "--fix" not in caught.value.hint
