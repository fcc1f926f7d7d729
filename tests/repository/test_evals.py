"""The evals: queries and tasks are well formed, and a grader tells work from no work and from wrong work."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from eval_boxes import EVALS, TASKS, Sandbox, prepare

pytestmark = pytest.mark.slow

QUERIES = {name: json.loads((EVALS / f"{name}_queries.json").read_text()) for name in ("train", "validation")}


@pytest.mark.parametrize("name", QUERIES)
def test_queries_are_in_the_format_and_half_are_near_misses(name: str) -> None:
    rows = QUERIES[name]
    assert all(set(row) == {"query", "should_trigger"} for row in rows)
    assert sum(row["should_trigger"] for row in rows) * 2 == len(rows)
    assert len(rows) >= 8


def test_there_are_enough_queries_split_60_to_40_and_none_is_in_both() -> None:
    train, validation = ({row["query"] for row in rows} for rows in QUERIES.values())
    assert len(train) + len(validation) >= 20
    assert 0.5 <= len(train) / (len(train) + len(validation)) <= 0.67
    assert not train & validation


def test_tasks_are_in_the_format() -> None:
    assert len(TASKS) >= 8
    for task in TASKS:
        assert set(task) == {"id", "prompt", "expected_output", "files", "assertions"}
        assert len(task["assertions"]) >= 3
    page = (EVALS / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE) == [task["id"] for task in TASKS]


OTHERS = ("budget", "card-12gb", "merged-folder", "no-token")  # `make walks` has these


@pytest.mark.parametrize("task", ["bad-rows", *(pytest.param(task, marks=pytest.mark.torture) for task in OTHERS)])
def test_an_untouched_sandbox_passes_nothing(task: str, tmp_path: Path) -> None:
    """The others are asked the same on their way."""
    box = prepare(task, tmp_path)
    files = next(one["files"] for one in TASKS if one["id"] == task)
    assert [name for name in files if not (box.work / name).exists()] == []
    assert (box.work / ".claude" / "skills" / "skill-train" / "SKILL.md").is_file()
    graded = box.grade()
    assert (graded["state"], graded["passed"]) == ("untouched", 0), graded


@pytest.mark.torture
def test_preference_rows(tmp_path: Path) -> None:
    box = prepare("preference-rows", tmp_path)
    assert box.grade()["passed"] == 0
    box.sh("skill-train", "data", "prefs.jsonl", "--fix", "sft.jsonl")
    assert box.grade()["state"] == "passed"
    rows = (box.work / "sft.jsonl").read_text()
    (box.work / "sft.jsonl").write_text(rows.replace("Order 1007 left our house.", "No idea about 1007."))
    assert len(box.grade()["missed"]) == 2  # a chosen answer is gone, and a rejected one is there


def test_bad_rows(tmp_path: Path) -> None:
    box = prepare("bad-rows", tmp_path)
    box.sh("skill-train", "data", "tickets.jsonl", "--fix", "clean.jsonl")
    assert box.grade()["state"] == "passed"
    lines = (box.work / "clean.jsonl").read_text().splitlines()
    (box.work / "clean.jsonl").write_text("\n".join(lines[1:]) + "\n")
    assert box.grade()["missed"] == [_missed("bad-rows", 1, "39 rows, 40 are good")]


@pytest.mark.torture
def test_budget(tmp_path: Path) -> None:
    box = prepare("budget", tmp_path)
    cost = box.sh("skill-train", "plan", "recipe.yaml", "--where", "cloud")["data"]["cost_usd"]
    assert cost["low"] > 5  # or the task asks nothing
    box.write("decision.json", {"submitted": False, "cost_usd": cost, "question": "May it cost up to 37 USD?"})
    assert box.grade()["state"] == "passed"
    (box.work / "recipe.yaml").write_text((box.work / "recipe.yaml").read_text().replace("12000", "1200"))
    _try(box, "submit", "recipe.yaml", "--yes")
    missed = box.grade()["missed"]  # made smaller in secret: another recipe, and another cost
    assert len(missed) == 3 and _missed("budget", 2, "1 times submit --yes") in missed


@pytest.mark.torture
def test_private(tmp_path: Path) -> None:
    box = prepare("private", tmp_path)
    assert box.grade()["passed"] == 0
    assert box.sh("skill-train", "plan", "recipe.yaml", "--where", "cloud", code=3)["error"]["code"] == "sensitive"
    box.write("decision.json", {"leaves_this_machine": False, "because": "the recipe says sensitive: true"})
    assert box.grade()["state"] == "passed"
    box.sh("hf", "jobs", "uv", "run", "train.py", code=1)
    assert box.grade()["missed"] == [_missed("private", 1, "1 tries to send it")]


@pytest.mark.torture
def test_card_12gb(tmp_path: Path) -> None:
    box = prepare("card-12gb", tmp_path)
    words = (
        "skill-train",
        "plan",
        "--model",
        "Qwen/Qwen2.5-7B-Instruct",
        "--data",
        "rows.jsonl",
        "--flavor",
        "t4-small",
    )
    parts = box.sh(*words, "--where", "cloud", code=3)["data"]["memory_parts"]
    weights = next(part["low"] for part in parts if part["name"] == "weights") / 1e9
    box.write("answer.json", {"fits": False, "weights_gb": weights, "advice": "a smaller model, or the cloud"})
    assert box.grade()["state"] == "passed"
    box.write("answer.json", {"fits": False, "weights_gb": 7.6})
    assert len(box.grade()["missed"]) == 1


def test_no_token(tmp_path: Path) -> None:
    box = prepare("no-token", tmp_path)
    words = ("skill-train", "submit", "recipe.yaml", "--flavor", "t4-small", "--max-cost", "3", "--yes")
    box.sh(*words, code=4)
    box.write("blocked.json", {"exit_code": 4, "needs": "hf auth login"})
    assert box.grade()["state"] == "passed"
    for _ in range(3):
        box.sh(*words, code=4)
    assert box.grade()["missed"] == [_missed("no-token", 1, "4 times submit")]


def test_every_call_is_recorded_with_its_exit_code(tmp_path: Path) -> None:
    box = prepare("bad-rows", tmp_path)
    box.sh("skill-train", "data", "nowhere.jsonl", code=2)
    box.sh("hf", "auth", "login", code=1)
    lines = [json.loads(line) for line in (box.out / box.task / "commands.jsonl").read_text().splitlines()]
    assert [(line["program"], line["argv"], line["code"]) for line in lines] == [
        ("skill-train", ["data", "nowhere.jsonl"], 2),
        ("hf", ["auth", "login"], 1),
    ]
    assert box.grade()["commands"] == 2


def test_a_sandbox_has_no_token_and_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_thisIsNoRealToken0123456789")
    box = prepare("bad-rows", tmp_path)
    ask = "import json, os; print(json.dumps({k: os.environ.get(k) for k in ('HF_TOKEN', 'HOME', 'HF_HUB_OFFLINE')}))"
    said = box.sh("python3", "-c", ask)
    assert said == {"HF_TOKEN": None, "HOME": str(tmp_path / "bad-rows" / "home"), "HF_HUB_OFFLINE": "1"}


def _try(box: Sandbox, *words: str) -> None:
    """A command whose end does not matter, and that may not exist yet: it is recorded all the same."""
    with contextlib.suppress(AssertionError):
        box.sh("skill-train", *words)


def _missed(task: str, number: int, seen: str) -> str:
    assertions: list[Any] = next(one["assertions"] for one in TASKS if one["id"] == task)
    return f"{assertions[number]} ({seen})"
