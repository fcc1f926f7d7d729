"""Rows that repeat: a row, a variant of it, or its question stands on one side of the split alone.

Each variant is made by hand from a row that carries its own number, so what belongs together is known without the
program's own comparison.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny
import training
from skill_train.program.main import load_data, main
from skill_train.program.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow

FRACTION = 0.3
PAIRS = 30

Row = dict[str, Any]


def _row(number: int) -> Row:
    question, answer = f"Wo ist Paket {number} für das Café? It's late", f"Es liegt im Depot {number}."
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def _written(change: Callable[[str], str]) -> Callable[[Row], Row]:
    """The row with every text written in another way."""
    return lambda row: {"messages": [m | {"content": change(m["content"])} for m in row["messages"]]}


def _answered(row: Row) -> Row:
    return {"messages": [row["messages"][0], {"role": "assistant", "content": "Das weiß ich nicht."}]}


def _longer(row: Row) -> Row:
    more = [{"role": "user", "content": "Danke."}, {"role": "assistant", "content": "Gern."}]
    return {"messages": [*row["messages"], *more]}


VARIANTS: dict[str, Callable[[Row], Row]] = {
    "the same": lambda row: row,
    "case": _written(str.upper),
    "spaces": _written(lambda text: "  " + text.replace(" ", " \u00a0 ") + "\n"),
    "decomposed": _written(lambda text: text.replace("é", "e\u0301").replace("ü", "u\u0308")),
    "fullwidth": _written(lambda text: text.replace("?", "\uff1f").replace("W", "\uff37")),
    "invisible": _written(lambda text: text.replace("a", "a\u200b").replace("P", "\ufeffP")),
    "quotes": _written(lambda text: text.replace("'", "\u2019")),
    "a column that is not read": lambda row: row | {"id": 7, "source": "export"},
    "a key that no template reads": lambda row: {"messages": [m | {"id": 3} for m in row["messages"]]},
    "parts of a text": lambda row: {
        "messages": [m | {"content": [{"type": "text", "text": m["content"]}]} for m in row["messages"]]
    },
    "another answer": _answered,
    "a longer conversation": _longer,
}


def _load(folder: Path, rows: list[Row], **values: Any) -> dict[str, Any]:
    data = training.write_data(folder, rows)
    recipe = training.resolved(tiny.cached("gemma"), data, held_out_fraction=FRACTION, max_steps=2, **values)
    return dict(load_data(recipe, load_tokenizer(recipe["model"], recipe["revision"])))


def _numbers(rows: list[Row]) -> set[int]:
    return {int(number) for row in rows for number in re.findall(r"(?i)paket\s+(\d+)", row["rendered"])}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seed", [1, 42])
def test_what_repeats_is_on_one_side(tmp_path: Path, variant: str, seed: int) -> None:
    """30 rows and a variant of each. 18 of 60 rows are held out: 9 whole pairs."""
    rows = [_row(number) for number in range(PAIRS)]
    data = _load(tmp_path, rows + [VARIANTS[variant](row) for row in rows], seed=seed)
    held_out, train = _numbers(data["held_out"]), _numbers(data["train"])
    assert held_out.isdisjoint(train) and len(held_out | train) == PAIRS
    assert (len(data["held_out"]), len(data["train"])) == (18, 42)
    same = variant not in ("another answer", "a longer conversation")
    figures = data["figures"]
    assert (figures["repeated_rows"], figures["repeated_groups"]) == ((30, 30) if same else (0, 0))
    assert (figures["held_out_trained"], figures["held_out_asked"]) == (0, 0)


@pytest.mark.parametrize(
    "make",
    [
        lambda n, more: {"question": f"Wo ist Paket {n}?" + more, "answer": f"Im Depot {n}."},
        lambda n, more: {"prompt": f"Paket {n} liegt ", "completion": f"im Depot {n}." + more},
        lambda n, more: {"text": f"Paket {n} liegt im Depot." + more},
        lambda n, more: {"instruction": "Wo liegt es?", "input": f"Paket {n}" + more, "output": f"Im Depot {n}."},
        lambda n, more: {
            "conversations": [{"from": "human", "value": f"Paket {n}" + more}, {"from": "gpt", "value": "Gut."}]
        },
    ],
    ids=["question_answer", "prompt_completion", "text", "instruction", "sharegpt"],
)
def test_it_is_so_in_every_format(tmp_path: Path, make: Callable[[int, str], Row]) -> None:
    data = _load(tmp_path, [make(number, more) for more in ("", " ", "\t\n") for number in range(20)])
    held_out = _numbers(data["held_out"])
    assert held_out.isdisjoint(_numbers(data["train"]))
    assert (len(held_out), len(data["held_out"])) == (6, 18)  # 0.3 of 60 rows, three of each
    assert (data["figures"]["repeated_rows"], data["figures"]["repeated_groups"]) == (40, 20)


CHATS = [
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n",
    "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n{}",
    "[INST] {} [/INST] {}",
    "<|user|>\n{}<|end|>\n<|assistant|>\n{}<|end|>",
    "<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n{}<end_of_turn>",
    "<｜User｜>{}<｜Assistant｜>{}",
    "### Instruction:\n{}\n\n### Response:\n{}",
]


@pytest.mark.parametrize("chat", CHATS)
def test_a_rendered_chat_is_held_out_with_its_other_answers(tmp_path: Path, chat: str) -> None:
    answers = ("Im Depot.", "Das weiß ich nicht.", "Es kam an.")
    data = _load(tmp_path, [{"text": chat.format(f"Wo ist Paket {n}?", said)} for said in answers for n in range(20)])
    held_out = _numbers(data["held_out"])
    assert held_out.isdisjoint(_numbers(data["train"])) and len(held_out) == 6
    assert (data["figures"]["repeated_rows"], data["figures"]["held_out_asked"]) == (0, 0)


def _ticket(number: int, system: str, answer: str = "{}") -> Row:
    row = _row(number)
    row["messages"][1]["content"] = answer.format(row["messages"][1]["content"])
    return {"messages": [{"role": "system", "content": system}, *row["messages"]]}


def test_a_row_with_another_system_message_is_not_new(tmp_path: Path) -> None:
    rows = [_ticket(number % 20, f"Ticket {index}") for index, number in enumerate(range(40))]
    data = _load(tmp_path, [*rows, *map(_row, range(20))])
    held_out = _numbers(data["held_out"])
    assert held_out.isdisjoint(_numbers(data["train"]))
    assert (len(held_out), len(data["held_out"])) == (6, 18)


def test_another_answer_after_another_system_message_is_another_row(tmp_path: Path) -> None:
    """As of a system message that says how to answer. The split is the one of rows that are all different."""
    told = [_ticket(number, "Sei kurz.") for number in range(20)]
    rows = [*told, *(_ticket(number, "Sei höflich.", "Gern: {}") for number in range(20))]
    data = _load(tmp_path, rows)
    assert len(data["held_out"]) == 12 and not _numbers(data["held_out"]).isdisjoint(_numbers(data["train"]))


def test_a_system_message_may_be_what_is_asked(tmp_path: Path) -> None:
    """All rows are then one exchange, or a few, and rows are held out all the same."""
    said = [{"role": "user", "content": "Is it there?"}, {"role": "assistant", "content": "Yes."}]
    data = _load(tmp_path, [{"messages": [{"role": "system", "content": f"Paket {n}"}, *said]} for n in range(40)])
    assert len(data["held_out"]) == 12


def test_a_text_that_only_answers_is_no_question(tmp_path: Path) -> None:
    data = _load(tmp_path, [{"text": f"### Response:\nPaket {n} liegt im Depot."} for n in range(40)])
    assert (len(data["held_out"]), data["figures"]["held_out_asked"]) == (12, 0)


def test_rows_that_max_length_makes_equal_are_one(tmp_path: Path) -> None:
    ends, middle = ("und kam.", "bis heute."), "lag lange im Depot " * 20
    rows = [{"text": f"Paket {n} {middle}{end}"} for end in ends for n in range(20)]
    data = _load(tmp_path, rows, max_length=32)
    assert data["figures"]["truncated_rows"] == 40 and data["figures"]["repeated_rows"] == 20
    assert _numbers(data["held_out"]).isdisjoint(_numbers(data["train"]))


def test_an_instruction_that_all_rows_share_is_no_question(tmp_path: Path) -> None:
    """One prompt and 40 answers: content decides, or nothing could be held out. The record says what was shared."""
    data = _load(tmp_path, [{"question": "Tell me of a parcel.", "answer": f"Paket {n} kam."} for n in range(40)])
    assert len(data["held_out"]) == 12
    assert (data["figures"]["held_out_trained"], data["figures"]["held_out_asked"]) == (0, 12)


def test_one_row_that_stands_often_is_trained_whole(tmp_path: Path) -> None:
    often = [_row(99)] * 25
    data = _load(tmp_path, often + [_row(number) for number in range(15)])
    assert len(data["held_out"]) == 12 and 99 not in _numbers(data["held_out"])


def test_a_resumed_run_keeps_the_rows_that_its_checkpoint_held_out(tmp_path: Path) -> None:
    """A run of an earlier version, whose split was drawn by position: rows 0 to 7 are held out, 20 to 27 repeat them.
    Its checkpoint says nothing of the split, and held_out.jsonl does. The record says what was trained too."""
    run = _stopped(tmp_path, [_row(number % 20) for number in range(40)])
    (run / "checkpoints" / "checkpoint-2" / "held_out.json").unlink()
    _mark_again(run)
    (run / "held_out.jsonl").write_text("".join(json.dumps({"row": number}) + "\n" for number in range(8)))
    for name in ("metrics.jsonl", "environment.json"):  # both are of the other split
        (run / name).unlink()
    assert main([str(run / "plan.json"), "--resume"]) == 0
    now = [json.loads(line)["row"] for line in (run / "held_out.jsonl").read_text().splitlines()]
    assert now == list(range(8))
    assert json.loads((run / "train.json").read_text())["data"]["held_out_trained"] == 8


def test_a_checkpoint_says_its_own_split(tmp_path: Path) -> None:
    """In a cloud job held_out.jsonl is lost with the disk, and the checkpoint is not."""
    run = _stopped(tmp_path, [_row(number) for number in range(40)])
    earlier = [json.loads(line)["row"] for line in (run / "held_out.jsonl").read_text().splitlines()]
    (run / "held_out.jsonl").unlink()
    other = sorted({*range(40)} - {*earlier})[: len(earlier)]
    (run / "checkpoints" / "checkpoint-2" / "held_out.json").write_text(json.dumps(other))
    _mark_again(run)
    for name in ("metrics.jsonl", "environment.json"):  # both are of the other split
        (run / name).unlink()
    assert main([str(run / "plan.json"), "--resume"]) == 0
    assert [json.loads(line)["row"] for line in (run / "held_out.jsonl").read_text().splitlines()] == other


def test_going_on_with_other_rows_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing says the split of the checkpoint, and the lines of its steps are of another one."""
    run = _stopped(tmp_path, [_row(number % 20) for number in range(40)])
    (run / "checkpoints" / "checkpoint-2" / "held_out.json").unlink()
    _mark_again(run)
    (run / "held_out.jsonl").unlink()
    lines = [line | {"tokens": line["tokens"] + 1} for line in training.metrics(run)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    capsys.readouterr()
    assert main([str(run / "plan.json"), "--resume"]) == 2
    assert training.events(capsys.readouterr().out)[-1]["error"]["code"] == "another_run"


def test_rows_that_changed_after_the_plan_are_not_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The record would name rows that were not trained."""
    rows, run = training.write_data(tmp_path, [_row(number) for number in range(40)]), tmp_path / "run"
    training.write_plan(run, tiny.cached("gemma"), rows, max_steps=4)
    text = rows.read_text()
    rows.write_text(text.replace("Depot 7.", "Depot 8."))
    assert rows.read_text() != text and main([str(run / "plan.json")]) == 2
    error = training.events(capsys.readouterr().out)[-1]["error"]
    assert (error["code"], error["message"]) == ("input_changed", f"{rows} is not the data that was planned")
    rows.rename(tmp_path / "moved.jsonl")
    assert main([str(run / "plan.json")]) == 2
    assert training.events(capsys.readouterr().out)[-1]["error"]["code"] == "missing_file"
    assert not (run / "samples.jsonl").exists()


def test_going_on_with_other_tokens_of_the_rows_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As many as before: another system message of the template, or a library that reads the rows in another way."""
    base = Path(shutil.copytree(tiny.cached("qwen2"), tmp_path / "base"))
    run = _stopped(tmp_path, [_row(number) for number in range(40)], base)
    config = base / "tokenizer_config.json"
    text = config.read_text()
    config.write_text(text.replace("helpful assistant", "friendly assistant"))
    assert config.read_text() != text
    capsys.readouterr()
    assert main([str(run / "plan.json"), "--resume"]) == 2
    error = training.events(capsys.readouterr().out)[-1]["error"]
    assert (error["code"], "the tokens of the rows" in error["message"]) == ("input_changed", True)
    config.write_text(text)
    assert main([str(run / "plan.json"), "--resume"]) == 0


def _stopped(folder: Path, rows: list[Row], base: Path | None = None) -> Path:
    """A run whose last checkpoint is that of step 2 of 4."""
    data = training.write_data(folder, rows)
    values = {"max_steps": 4, "effective_batch_size": 4, "split": (4, 1, 1), "held_out_fraction": 0.2}
    plan = training.write_plan(
        folder / "run", base or tiny.cached("gemma"), data, placement={"save_steps": 2}, **values
    )
    assert main([str(plan)]) == 0
    shutil.rmtree(folder / "run" / "checkpoints" / "checkpoint-4")
    shutil.rmtree(folder / "run" / "adapter")
    (folder / "run" / "train.json").unlink()
    return folder / "run"


def _mark_again(run: Path) -> None:
    checkpoint = run / "checkpoints" / "checkpoint-2"
    (checkpoint / "sha256.json").unlink()
    sizes = {p.name: p.stat().st_size for p in checkpoint.iterdir() if p.name != "complete.json"}
    (checkpoint / "complete.json").write_text(json.dumps(sizes))
