"""`skill-train data` as a user meets it: real files in, one JSON answer and an exit code out. No tokenizer here."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import tiny
from one_command import answered, called
from peak_memory import peak_mb
from skill_train.core.console import MAX_JSON_BYTES
from skill_train.core.errors import SkillTrainError
from skill_train.data import scan as dataset
from skill_train.data.errors import MAPPING
from skill_train.recipe.fields import Recipe
from skill_train.recipe.formats import WHOLE_CHAT
from training import write_data

TURNS = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
SPOKEN = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
ALPACA = {"instruction": "Add", "input": "2 2", "output": "4"}
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]}
TOOLS = [TURNS[0], CALL, {"role": "tool", "name": "add", "content": "4"}, TURNS[1]]
SAYING = [TURNS[0], CALL | {"content": "I add."}]

# A good row, the verdict on sft, the format, and the row as it is shown.
GOOD: list[tuple[str, dict[str, Any], str, str, str]] = [
    ("messages", {"messages": TURNS}, "ready", "messages", "user: 2+2?\nassistant: ⟦4⟧"),
    ("sharegpt", {"conversations": SPOKEN}, "ready", "sharegpt", "user: 2+2?\nassistant: ⟦4⟧"),
    ("JSON text", {"messages": json.dumps(TURNS), "id": 7}, "ready", "messages", "user: 2+2?\nassistant: ⟦4⟧"),
    ("sharegpt as JSON", {"conversations": json.dumps(SPOKEN)}, "ready", "sharegpt", "user: 2+2?\nassistant: ⟦4⟧"),
    (
        "an answer that does not train",
        {"conversations": [SPOKEN[0], SPOKEN[1] | {"train": False}, *SPOKEN]},
        "ready",
        "sharegpt",
        "user: 2+2?\nassistant: 4\nuser: 2+2?\nassistant: ⟦4⟧",
    ),
    ("alpaca", ALPACA, "ready", "instruction", "user: Add\n\n2 2\nassistant: ⟦4⟧"),
    ("prompt and completion", {"prompt": "2+2 is", "completion": " 4"}, "ready", "prompt_completion", "2+2 is⟦ 4⟧"),
    ("odd names", {"Q": "2+2?", "A": "4"}, "needs_mapping", "question_answer", "user: 2+2?\nassistant: ⟦4⟧"),
    ("text", {"text": "Once."}, "ready", "text", "⟦Once.⟧"),
    ("dpo", {"prompt": "2+2?", "chosen": "4", "rejected": "5"}, "needs_mapping", "prompt_completion", "2+2?⟦4⟧"),
    (
        "dpo, conversational",
        {"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": TURNS[1:]},
        "needs_mapping",
        "prompt_completion",
        "user: 2+2?\nassistant: ⟦4⟧",
    ),
    ("kto", {"prompt": "2+2?", "completion": "4", "label": True}, "ready", "prompt_completion", "2+2?⟦4⟧"),
    (
        "tools",
        {"messages": TOOLS, "tools": []},
        "ready",
        "messages",
        f"user: 2+2?\nassistant: ⟦{CALL['tool_calls']}⟧\ntool: 4\nassistant: ⟦4⟧",
    ),
    (
        "text and a call",
        {"messages": SAYING},
        "ready",
        "messages",
        f"user: 2+2?\nassistant: ⟦I add.\n{CALL['tool_calls']}⟧",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("row", "verdict", "data_format", "example"), [g[1:] for g in GOOD], ids=[g[0] for g in GOOD])
def test_a_good_dataset_ends_with_0(tmp_path: Path, row: Any, verdict: str, data_format: str, example: str) -> None:
    code, answer = _data(write_data(tmp_path, [row, row]))
    data = answer["data"]
    assert (code, answer["ok"], data["rows"], data["usable_rows"]) == (0, True, 2, 2)
    assert (data["methods"]["sft"]["verdict"], data["format"]["name"]) == (verdict, data_format)
    assert data["example"] == example
    assert data["problems"]["duplicate"] == {
        "rows": 1, "refused": 0, "lines": [2], "first": "the same row as an earlier one",
    }  # fmt: skip
    assert {name for name, count in data["problems"].items() if count and count["rows"]} == {"duplicate"}
    texts = {warning["code"]: warning["message"] for warning in answer["warnings"]}
    assert texts["duplicates"].startswith("1 row repeats an earlier row") and "--fix drops it" in texts["duplicates"]
    assert answer["next"] == ([] if verdict == "ready" else ["skill-train data rows.jsonl --fix rows.fixed.jsonl"])


def test_rows_that_train_alike_are_counted_as_fix_drops_them(tmp_path: Path) -> None:
    """`data` compared the bytes of the lines, so it said less than `--fix` dropped and than the training repeated."""
    row = {"prompt": "2+2?", "completion": "4"}
    alike = [row | {"id": 1}, row | {"id": 2}, {"completion": "4", "prompt": "2+2?", "tools": None}]
    path = write_data(tmp_path, [*alike, row | {"completion": "5"}])
    _, answer = _data(path, "--fix", "out.jsonl")
    assert answer["data"]["problems"]["duplicate"]["lines"] == [2, 3]
    assert (answer["data"]["fix"]["rows"], answer["data"]["fix"]["left_out"]) == (2, {"duplicate": 2})
    others = write_data(tmp_path, [row, {"other": 1}, {"other": 2}, row | {"prompt": ["2+2?"]}])
    assert _data(others)[1]["data"]["problems"]["duplicate"] == {"rows": 0}
    kto = [row | {"label": label} for label in (True, False)]
    assert _data(write_data(tmp_path, kto), "--method", "kto")[1]["data"]["problems"]["duplicate"] == {"rows": 0}


@pytest.mark.parametrize("row", [g[1] for g in GOOD], ids=[g[0] for g in GOOD])
def test_the_fixed_file_is_ready_and_scanned(tmp_path: Path, row: Any) -> None:
    path = write_data(tmp_path, [row, row])
    before = path.read_bytes()
    code, answer = _data(path, "--fix", "out.jsonl")
    assert (code, answer["data"]["fix"]["rows"], answer["data"]["fix"]["left_out"]) == (0, 1, {"duplicate": 1})
    assert answer["next"] == ["skill-train data out.jsonl"]
    assert path.read_bytes() == before
    code, again = _data(tmp_path / "out.jsonl")
    assert (code, again["data"]["methods"]["sft"]["verdict"], again["data"]["not_read"]) == (0, "ready", [])
    assert again["data"]["example"] == answer["data"]["example"]
    assert dataset.scan(Recipe(data="out.jsonl")).rows == 1


def test_turns_as_the_text_of_python_are_refused_with_a_way_out(tmp_path: Path) -> None:
    """As pandas writes a list to a .csv file. `--fix` would leave no row."""
    path = write_data(tmp_path, [{"messages": repr(TURNS)}])
    code, answer = _data(path)
    assert (code, answer["data"]["usable_rows"]) == (2, 0)
    with pytest.raises(SkillTrainError, match="messages is text that is not JSON") as caught:
        dataset.scan(Recipe(data="rows.jsonl"))
    assert "json.dumps" in caught.value.hint and "--fix" not in caught.value.hint


@pytest.mark.parametrize(
    "row",
    [
        {"question": "2+2?", "answer": ["4", "four"]},
        {"prompt": "2+2?", "completion": 4},
        {"instruction": "Add", "output": "", "target": "4"},
        {"conversations": SPOKEN[:1], "chosen": SPOKEN[1], "rejected": SPOKEN[1]},
    ],
)
def test_rows_that_are_all_broken_alike_name_no_fix(tmp_path: Path, row: dict[str, Any]) -> None:
    """`--fix` would leave none. With one whole row it leaves that."""
    path = write_data(tmp_path, [row, row, row])
    with pytest.raises(SkillTrainError, match=r"line 1 of rows\.jsonl") as caught:
        dataset.scan(Recipe(data="rows.jsonl"))
    _, answer = _data(path)
    for hint in (caught.value.hint, answer["error"]["hint"]):
        assert hint.startswith("no row can be used") and "columns: {" in hint
    whole = {name: TURNS if name == "conversations" else "4" for name in row} | {"conversations": SPOKEN}
    write_data(tmp_path, [row, {name: whole[name] for name in row}, row])
    with pytest.raises(SkillTrainError) as caught:
        dataset.scan(Recipe(data="rows.jsonl"))
    _, answer = _data(path)
    assert "--fix" in caught.value.hint and "no row" not in caught.value.hint
    assert "--fix" in answer["error"]["hint"] and "no row" not in answer["error"]["hint"]


@pytest.mark.parametrize(
    ("row", "way"),
    [
        ({"messages": [TURNS[0], {"role": "model", "content": "4"}]}, "rename the role"),
        ({"messages": repr(TURNS)}, "json.dumps"),
        ({"question": "2+2?", "answer": "photos/4.png"}, "vision model"),
    ],
)
def test_rows_that_are_all_broken_alike_name_their_own_way(tmp_path: Path, row: dict[str, Any], way: str) -> None:
    """`data` said to name other columns, where `plan` knew what to do."""
    path = write_data(tmp_path, [row, row])
    with pytest.raises(SkillTrainError) as caught:
        dataset.scan(Recipe(data="rows.jsonl"))
    assert _data(path)[1]["error"]["hint"] == caught.value.hint and way in caught.value.hint


@pytest.mark.parametrize("indent", [None, 1])
def test_a_document_under_the_name_of_lines_names_no_fix(tmp_path: Path, indent: int | None) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps([ALPACA, ALPACA], indent=indent))
    with pytest.raises(SkillTrainError, match=r"line 1 of rows\.jsonl") as caught:
        dataset.scan(Recipe(data="rows.jsonl"))
    code, answer = _data(tmp_path / "rows.jsonl")
    assert code == 2
    for hint in (caught.value.hint, answer["error"]["hint"]):
        assert "one JSON document is a .json file" in hint and "--fix" not in hint
    (tmp_path / "rows.jsonl").rename(tmp_path / "rows.json")
    assert dataset.scan(Recipe(data="rows.json")).rows == 2


BROKEN = [
    (b'{"messages": [\n', "broken_json"),
    (b"[1, 2]\n", "not_an_object"),
    (b'{"messages": "caf\xe9"}\n', "not_utf8"),
    (b'{"text": "no"}\n', "missing_column"),
    (b'{"messages": []}\n', "empty"),
    (b"{}\n", "empty"),
    (b'{"messages": [{"role": "user", "content": "2+2?"}]}\n', "wrong_role_order"),
    (b'{"messages": [{"role": "user"}, {"role": "assistant", "content": "4"}]}\n', "empty"),
    (b'{"messages": [{"content": "2+2?"}, {"role": "assistant", "content": "4"}]}\n', "malformed"),
    (b'{"messages": [{"role": "user", "content": "\\ud83d"}, {"role": "assistant", "content": "4"}]}\n', "not_utf8"),
]


@pytest.mark.parametrize(("line", "kind"), BROKEN, ids=[f"{b[1]} {n}" for n, b in enumerate(BROKEN)])
def test_a_row_that_training_refuses_is_counted_with_its_line(tmp_path: Path, line: bytes, kind: str) -> None:
    path = tmp_path / "rows.jsonl"
    whole = [json.dumps({"messages": [TURNS[0], {"role": "assistant", "content": str(n)}]}).encode() for n in range(3)]
    path.write_bytes(whole[0] + b"\n\n" + line + whole[1] + b"\n" + line + whole[2])
    code, answer = _data(path)
    count = answer["data"]["problems"][kind]
    assert (code, count["rows"], count["refused"], count["lines"]) == (2, 2, 2, [3, 5])
    assert (answer["data"]["rows"], answer["data"]["usable_rows"]) == (5, 3)
    assert answer["error"]["code"] == "bad_row"
    assert "training would reject 2 of 5 rows; the first: line 3" in answer["error"]["message"]
    sft = answer["data"]["methods"]["sft"]
    assert sft["because"].endswith("; 2 rows would be rejected") == (sft["verdict"] == "ready")
    other_encoding = kind == "not_utf8" and not line.isascii()  # which iconv mends, and keeps the rows
    expected = "iconv " if other_encoding else "skill-train data rows.jsonl --fix rows.fixed.jsonl"
    assert answer["error"]["hint"].startswith(expected)
    with pytest.raises(SkillTrainError, match="line 3") as caught:  # training would refuse it there
        dataset.scan(Recipe(data="rows.jsonl"))
    assert caught.value.hint == answer["error"]["hint"]
    with pytest.raises(SkillTrainError) as told:  # with a folder as its model, tokens are counted too
        dataset.scan(Recipe(model=str(tmp_path), data="rows.jsonl"))
    assert (expected if other_encoding else f" --model {tmp_path} --fix ") in told.value.hint
    code, answer = _data(path, "--fix", "rows.fixed.jsonl")
    assert (code, answer["data"]["fix"]["rows"], answer["data"]["fix"]["left_out"]) == (0, 3, {kind: 2})
    assert (tmp_path / "rows.fixed.jsonl").read_bytes() == b"\n".join(whole) + b"\n"
    assert dataset.scan(Recipe(data="rows.fixed.jsonl")).rows == 3


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_what_looks_like_personal_data_is_told_with_its_lines(tmp_path: Path, suffix: str) -> None:
    """A warning: whether it may be trained on, and where, is for its owner to say. The rows stay usable."""
    texts = ["4", "write to jane.doe@example.org", "4", "call +49 170 1234567"]
    path = tmp_path / f"rows.{suffix}"
    rows = [{"prompt": f"{n} of 4?", "completion": text} for n, text in enumerate(texts)]
    header = "prompt,completion\n" if suffix == "csv" else ""
    written = [",".join(row.values()) if suffix == "csv" else json.dumps(row) for row in rows]
    path.write_text(header + "".join(f"{line}\n" for line in written))
    code, answer = _data(path)
    count, first = answer["data"]["problems"]["personal_data"], 2 + (suffix == "csv")
    assert (code, count["rows"], count["refused"], count["lines"]) == (0, 2, 0, [first, first + 2])
    (warning,) = [one for one in answer["warnings"] if one["code"] == "personal_data"]
    assert f"(lines {first}, {first + 2})" in warning["message"] and "sensitive: true" in warning["message"]
    assert answer["data"]["usable_rows"] == 4


def test_many_problems_keep_their_count_and_ten_lines(tmp_path: Path) -> None:
    path = write_data(tmp_path, [{"text": "Once."}, *({"text": ""} for _ in range(30))])
    count = _data(path)[1]["data"]["problems"]["empty"]
    assert (count["rows"], count["refused"], count["lines"]) == (30, 30, list(range(2, 12)))


def test_odd_orders_are_counted_and_not_refused(tmp_path: Path) -> None:
    rows = [{"messages": m} for m in (TURNS, TURNS[::-1], [*TURNS, TURNS[0]], TOOLS)]
    code, answer = _data(write_data(tmp_path, rows))
    count = answer["data"]["problems"]["wrong_role_order"]
    assert (code, count["rows"], count["refused"], count["lines"]) == (0, 2, 0, [2, 3])


@pytest.mark.parametrize(("usual", "told"), [(0, True), (2, True), (3, False)])
def test_odd_orders_of_half_of_the_rows_are_told(tmp_path: Path, usual: int, told: bool) -> None:
    """As where all roles are swapped: the model learned the questions. A few are in many datasets."""
    swapped, right = (
        [{"from": role, "value": f"{role} speaks."} for role in pair] for pair in (("gpt", "human"), ("human", "gpt"))
    )
    code, answer = _data(
        write_data(tmp_path, [{"conversations": turns} for turns in [*[right] * usual, swapped, swapped]])
    )
    said = [one["message"] for one in answer["warnings"] if one["code"] == "template"]
    assert code == 0 and len(said) == told
    for message in said:
        assert message.startswith(
            f"2 of {usual + 2} rows have an unusual order of speakers (line {usual + 1}: assistant speaks"
        )


@pytest.mark.parametrize("name", ["table.csv", "table.tsv", "table.parquet", "bom.jsonl", "list.json", "saved"])
def test_every_kind_of_file_is_looked_at(tmp_path: Path, name: str) -> None:
    rows = [{"question": f"{n}, once?", "answer": f"„{n}”"} for n in range(3)]
    _write(tmp_path / name, rows)
    code, answer = _data(tmp_path / name, "--fix", "out.jsonl")
    assert (code, answer["data"]["rows"], answer["data"]["format"]["name"]) == (0, 3, "question_answer")
    assert answer["data"]["columns"] == {"question": "text", "answer": "text"}
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert written == rows


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n")
    code, answer = _data(tmp_path / "rows.jsonl")
    assert (code, answer["error"]["code"]) == (2, "empty_dataset")


def test_a_file_without_a_whole_row_is_refused_with_its_problems(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("x\ny\n")
    code, answer = _data(tmp_path / "rows.jsonl")
    assert (code, answer["error"]["code"]) == (2, "bad_row")
    assert answer["data"]["problems"]["broken_json"]["lines"] == [1, 2]
    assert answer["data"]["problems"]["empty"] is None
    assert answer["data"]["unknown"]["empty"]


def test_what_no_tokenizer_counted_is_unknown_with_the_reason(tmp_path: Path) -> None:
    data = _data(write_data(tmp_path, [{"text": "x" * 100}]))[1]["data"]
    assert (data["problems"]["truncated"], data["problems"]["fully_masked"]) == (None, None)
    assert "--model" in data["unknown"]["truncated"]
    assert (data["tokens"]["counted"], data["tokens"]["mean"]) == (False, [21.0, 52.0])


@pytest.mark.parametrize(
    ("row", "hint"),
    [
        ({"id": 1, "question": "Sky?", "answers": {"text": ["Blue."]}}, f"name them {MAPPING}"),  # SQuAD
        ({"chosen": {"text": "Blue."}, "rejected": {"text": "Green."}}, f"name them {MAPPING}"),
        ({"source": "a forum", "conversation": [{"input": "Sky?", "output": "Blue."}]}, WHOLE_CHAT),  # Capybara
        ({"conversations": ["Sky?", "Blue."]}, WHOLE_CHAT),
        ({"prompt": "Sky?"}, "another dataset; this one is for grpo"),
    ],
)
def test_the_hint_for_columns_without_an_answer_can_be_followed(tmp_path: Path, row: dict[str, Any], hint: str) -> None:
    """It called rows with answers a dataset for another method, or named a --fix that fails."""
    code, answer = _data(write_data(tmp_path, [row, row | {"id": 2}]))
    assert code == 2 and answer["error"]["hint"].startswith(hint)


def test_what_only_sft_counts_says_so_for_another_method(tmp_path: Path) -> None:
    """`no row that sft could train on` contradicted `methods.sft` in the same answer."""
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    code, answer = _data(write_data(tmp_path, [pair]), "--model", tiny.cached("qwen2"), "--method", "dpo")
    assert (code, answer["data"]["methods"]["sft"]["verdict"]) == (0, "needs_mapping")
    assert set(answer["data"]["unknown"].values()) == {"counted for sft alone"}
    assert answer["next"] == [f"skill-train data rows.jsonl --model {tiny.cached('qwen2')}"]
    assert _data(write_data(tmp_path, [{"prompt": "q"}]), "--method", "grpo")[1]["next"] == []


@pytest.mark.parametrize(
    ("row", "method", "code"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "dpo", 0),
        ({"prompt": "q", "completion": "a", "label": True}, "kto", 0),
        ({"prompt": "q"}, "grpo", 0),
        ({"prompt": "q"}, "sft", 2),
        ({"text": "q"}, "dpo", 2),
        ({"question": "q", "better": "a", "worse": "b"}, "reward", 0),
    ],
)
def test_the_method_decides_the_exit_code(tmp_path: Path, row: Any, method: str, code: int) -> None:
    got, answer = _data(write_data(tmp_path, [row]), "--method", method)
    assert got == code
    if code:
        assert answer["error"]["code"] == "wrong_columns"
        hint = answer["error"]["hint"]  # to no method that is not trained either
        assert hint == "skill-train data rows.jsonl --method sft" or hint.startswith("another dataset; this one is")
    else:
        fixed = _data(tmp_path / "rows.jsonl", "--method", method, "--fix", "out.jsonl")
        assert fixed[0] == 0
        again = _data(tmp_path / "out.jsonl", "--method", method)
        assert (again[0], again[1]["data"]["methods"][method]["verdict"]) == (0, "ready")


def test_a_guess_is_called_one(tmp_path: Path) -> None:
    code, answer = _data(write_data(tmp_path, [{"Frage": "q", "Antwort": "a"}]))
    assert code == 0
    assert [warning["code"] for warning in answer["warnings"]] == ["guessed_mapping", "needs_mapping"]


def test_a_column_that_the_first_row_lacks_is_not_forgotten(tmp_path: Path) -> None:
    """With the mapping of the first row alone every system message would be dropped."""
    path = write_data(tmp_path, [{"conversations": SPOKEN}, {"conversations": SPOKEN, "system": "Count."}])
    data = _data(path, "--fix", "out.jsonl")[1]["data"]
    both = {"conversations": "conversations", "system": "system"}
    assert (data["methods"]["sft"]["verdict"], data["format"]["columns"], data["not_read"]) == ("ready", both, [])
    assert dataset.scan(Recipe(data=str(path))).columns == both
    assert dataset.scan(Recipe(data="out.jsonl")).columns == both


def test_a_first_row_of_other_columns_does_not_decide(tmp_path: Path) -> None:
    code, answer = _data(write_data(tmp_path, [{"text": "header"}, {"messages": TURNS}, {"messages": TOOLS}]))
    assert (code, answer["data"]["format"]["name"]) == (2, "messages")
    assert answer["data"]["problems"]["missing_column"]["lines"] == [1]
    code, answer = _data(write_data(tmp_path, [{"text": "header"}, ALPACA, ALPACA]))
    assert answer["data"]["methods"]["sft"]["recipe"] == [
        "format: instruction", "columns: {instruction: instruction, output: output, input: input}",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["rows.jsonl", "old.jsonl", "out.csv"])
def test_an_output_is_never_overwritten(tmp_path: Path, name: str) -> None:
    path = write_data(tmp_path, [{"text": "Once."}])
    (tmp_path / "old.jsonl").write_text("mine")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    code, answer = _data(path, "--fix", name)
    assert (code, answer["error"]["code"]) == (2, "bad_usage" if name == "out.csv" else "output_exists")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_link_to_the_input_is_no_output(tmp_path: Path) -> None:
    path = write_data(tmp_path, [{"text": "Once."}])
    (tmp_path / "link.jsonl").symlink_to(path)
    assert _data(path, "--fix", "link.jsonl")[0] == 2
    assert path.read_text() == '{"text": "Once."}\n'


def test_nothing_usable_writes_nothing(tmp_path: Path) -> None:
    code, answer = _data(write_data(tmp_path, [{"text": " "}, {"text": ""}]), "--fix", "out.jsonl")
    assert (code, answer["error"]["code"]) == (2, "bad_row")
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]


def test_the_same_file_gives_the_same_answer_of_at_most_8_kb(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [json.dumps({f"column {n}": "x" * 300 for n in range(60)} | {"messages": TURNS}) for _ in range(40)]
    path.write_text("\n".join([*rows, *(line.decode("latin-1") for line, _ in BROKEN)]), encoding="latin-1")
    first, second = (called("data", os.path.relpath(path), "--format", "json").stdout for _ in range(2))
    assert first == second
    assert len(first.encode()) <= MAX_JSON_BYTES


def test_a_person_sees_the_same(tmp_path: Path) -> None:
    path = write_data(tmp_path, [{"messages": TURNS}, {"messages": []}])
    done = called("data", os.path.relpath(path), "--format", "human")
    assert done.code == 2
    for words in ("rows.jsonl: 2 rows", "impossible", "empty", "2 to 5 bytes a token", "⟦4⟧"):
        assert words in done.stdout, words


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    """Twice the rows, the same peak within 4 MB; measured 47 MB from 100 thousand rows on, where the longest list that
    it keeps is full."""
    peaks = []
    for count in (100_000, 200_000):
        path = tmp_path / f"{count}.jsonl"
        with open(path, "w") as file:
            for number in range(count):
                turns = [{"role": "user", "content": f"{number} or not?"}, {"role": "assistant", "content": "x" * 90}]
                file.write(json.dumps({"messages": turns}) + "\n")
        peaks.append(peak_mb("data", str(path)))
    assert abs(peaks[1] - peaks[0]) < 4, peaks


def _data(path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    return answered("data", os.path.relpath(path), *options)


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    if path.suffix in (".csv", ".tsv"):
        mark = "," if path.suffix == ".csv" else "\t"
        lines = [mark.join(rows[0]), *(mark.join(f'"{value}"' for value in row.values()) for row in rows)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    elif path.suffix == ".parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    elif path.suffix == ".jsonl":
        path.write_text("\ufeff" + "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        import datasets

        datasets.Dataset.from_list(rows).save_to_disk(str(path))


HEADS = {
    "a quote": ('"Frage "kurz"";Antwort', "utf-8", "its header, is broken"),
    "open quote": ('"Frage,\n kurz;Antwort', "utf-8", "its header, is broken"),
    "mark": ("Frage;Antwort", "utf-16", "most likely UTF-16"),
    "LE": ("Frage;Antwort", "utf-16-le", "most likely UTF-16LE"),
    "BE": ("Frage;Antwort", "utf-16-be", "most likely UTF-16BE"),
    "umlaut": ("Prüfung;Antwort", "windows-1252", "most likely WINDOWS-1252"),
}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("options", [(), ("--fix", "new.jsonl"), ("--recipe", "map.yaml", "--fix", "new.jsonl")])
def test_a_header_that_cannot_be_read_ends_it(tmp_path: Path, name: str, options: tuple[str, ...]) -> None:
    """The first row that could be read was taken as the header."""
    head, encoding, told = HEADS[name]
    rows = "".join(f"Was kostet {n}?;{n},50 {'€' if n == 7 else 'Euro'}\n" for n in range(9))
    (tmp_path / "rows.csv").write_bytes(f"{head}\n{rows}".encode(encoding))
    (tmp_path / "map.yaml").write_text(
        "model: m\ndata: rows.csv\nformat: prompt_completion\ncolumns: {prompt: Frage, completion: Antwort}\n"
    )
    code, answer = _data(tmp_path / "rows.csv", *options)
    error = answer["error"]
    assert code == 2 and told in error["message"] and not (tmp_path / "new.jsonl").exists()
    assert "usable_rows" not in (answer["data"] or {}) or not answer["data"]["usable_rows"]
    with pytest.raises(SkillTrainError) as caught:
        dataset.scan(Recipe(model="m", data="rows.csv"))
    assert told in caught.value.message and caught.value.hint == error["hint"]
    assert error["hint"].startswith("iconv -f " if encoding != "utf-8" else "mend the header")
    assert "--fix" not in str(error)
    if encoding != "utf-8":
        subprocess.run(["sh", "-c", error["hint"]], check=True)
        assert (tmp_path / "rows.utf8.csv").read_text("utf-8-sig") == f"{head}\n{rows}"


@pytest.mark.parametrize(
    ("name", "text", "way"),
    [
        ("rows.tsv", 'question\tanswer\nWarm?\t"Yes" he said\nCold?\t"No" he said\n', "with quoting=3 and dtype=str"),
        ("rows.csv", "text\nWell, it is warm.\nWell, it is cold.\n", "quotes around its cells, which a comma"),
    ],
)
def test_a_table_whose_header_is_right_is_told_of_its_quotes(tmp_path: Path, name: str, text: str, way: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SkillTrainError) as caught:
        dataset.scan(Recipe(model="m", data=name))
    assert way in _data(tmp_path / name)[1]["error"]["hint"] and way in caught.value.hint


@pytest.mark.parametrize(
    ("name", "text"),
    [("rows.json", '[["2+2?", "4"]]'), ("rows.jsonl", "{'question': '2+2?'}\n"), ("rows.jsonl", "[1]\n")],
)
def test_json_without_a_row_is_told_of_no_table(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SkillTrainError) as caught:
        dataset.scan(Recipe(model="m", data=name))
    for hint in (_data(tmp_path / name)[1]["error"]["hint"], caught.value.hint):
        assert "one object per line" in hint and "table" not in hint


def test_rows_of_another_encoding_that_fix_leaves_out_are_told(tmp_path: Path) -> None:
    rows = "".join(f"{'Grün' if n % 3 else 'Rot'} {n}?;{n}\n" for n in range(9))
    (tmp_path / "rows.csv").write_bytes(f"Frage;Antwort\n{rows}".encode("windows-1252"))
    code, answer = _data(tmp_path / "rows.csv", "--fix", "new.jsonl")
    assert (code, answer["data"]["fix"]["left_out"]) == (0, {"not_utf8": 6})
    (warning,) = [one["message"] for one in answer["warnings"] if one["code"] == "not_utf8"]
    assert "6 rows" in warning and "iconv -f WINDOWS-1252 -t UTF-8 rows.csv > rows.utf8.csv" in warning
    (tmp_path / "odd.csv").write_bytes(f"x;y;z\n{rows}".replace("?;", "?;nun;").encode("windows-1252"))
    error = _data(tmp_path / "odd.csv")[1]["error"]
    assert error["code"] == "wrong_columns" and "most likely WINDOWS-1252" in error["message"]
    with pytest.raises(SkillTrainError) as caught:
        dataset.scan(Recipe(model="m", data="odd.csv"))
    assert caught.value.hint.startswith("iconv -f WINDOWS-1252 -t UTF-8 odd.csv > odd.utf8.csv, and name them")
