"""Real runs of tiny Gemma beside each other: each change of the recipe is named, and a change of placement is only
listed. Three steps each, through the program's own `main`."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tiny
import training
from by_path import load
from one_command import answered, called
from skill_train.machine.training_program import train_program
from skill_train.program.main import main
from skill_train.program.split import feeding_order

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_threads", "short_answers")]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("first"))


def trained(folder: Path, program: ModuleType | None = None, **values: Any) -> Path:
    """A run of three steps that keeps no checkpoint but the last."""
    run = training.write_run(folder / "run", max_steps=3, save_steps=100, **values)
    assert (program.main if program else main)([str(run / "plan.json")]) == 0
    return run


def compared(a: Path, b: Path, *, exits: int) -> dict[str, Any]:
    """The answer of `skill-train diff`."""
    code, answer = answered("diff", a, b)
    assert code == exits, answer
    return answer


def named(answer: dict[str, Any], group: str) -> set[str]:
    return {each["fact"] for each in answer["data"][group]}


def test_the_same_recipe_twice_is_the_same_run(first: Path, tmp_path: Path) -> None:
    answer = compared(first, trained(tmp_path), exits=0)
    data = answer["data"]
    assert (data["verdict"], data["recipe"], data["not_compared"]) == ("same", [], [])
    assert named(answer, "placement") == {"recipe.data.path", "trainer.output_dir"}  # two folders
    assert data["losses"] == {"steps": 3, "equal": True, "largest_difference": 0.0, "at_step": None}
    assert data["same_weights"] is True and answer["warnings"] == []


def test_the_record_of_what_is_fed_is_that_of_the_rows(first: Path) -> None:
    """Counted and digested here again, from the rows as they were kept (all 23 of them)."""
    rows = [json.loads(line) for line in (first / "samples.jsonl").read_text().splitlines()]
    order = feeding_order(23, 12, 42)  # three steps of four rows
    fed = [rows[i] for i in order]
    sorted_in_steps = [sorted(fed[at : at + 4], key=lambda row: -len(row["input_ids"])) for at in (0, 4, 8)]
    record = json.loads((first / "environment.json").read_text())["data"]
    assert (record["train_rows"], record["held_out_rows"], record["fed_rows"]) == (23, 1, 12)
    assert record["fed_tokens"] == sum(len(row["input_ids"]) for row in fed)
    assert record["fed_trained_tokens"] == sum(line["trained_tokens"] for line in training.metrics(first))
    assert record["rows_sha256"] == digest(rows)
    assert record["first_batches"] == [digest(step)[:16] for step in sorted_in_steps]
    assert record["order_sha256"] == hashlib.sha256(repr(order).encode()).hexdigest()


def digest(rows: list[dict[str, Any]]) -> str:
    lists = [values for row in rows for values in (row["input_ids"], row["labels"])]
    parts = [n.to_bytes(4, "little", signed=True) for values in lists for n in (len(values), *values)]
    return hashlib.sha256(b"".join(parts)).hexdigest()


RECIPES: list[tuple[dict[str, Any], set[str]]] = [
    (
        {"learning_rate": 3e-4},
        {"recipe.learning_rate", "trainer.learning_rate", "optimizer.groups.0.initial_lr", "step 1.learning_rate"},
    ),
    ({"lora_alpha": 64}, {"recipe.lora_alpha", "lora.lora_alpha"}),
    ({"seed": 7}, {"recipe.seed", "trainer.seed", "data.order_sha256", "data.held_out_sha256"}),
    ({"lr_scheduler_type": "cosine"}, {"recipe.lr_scheduler_type", "schedule.function", "step 2.learning_rate"}),
]


@pytest.mark.parametrize(("values", "facts"), RECIPES, ids=[next(iter(values)) for values, _ in RECIPES])
def test_another_recipe_is_refused_by_name(
    first: Path, tmp_path: Path, values: dict[str, Any], facts: set[str]
) -> None:
    answer = compared(first, trained(tmp_path, **values), exits=6)
    assert answer["error"]["code"] == "different_recipe"
    assert next(iter(values)) in answer["error"]["got"]
    assert facts | {"recipe.hash"} <= named(answer, "recipe")


def test_another_word_in_one_row_is_another_recipe(
    first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tiny.rows(24)
    rows[5]["messages"][-1]["content"] += " Yes."
    monkeypatch.setattr(tiny, "rows", lambda count: rows)
    answer = compared(first, trained(tmp_path), exits=6)
    facts = named(answer, "recipe")
    assert {"recipe.hash", "recipe.data.sha256", "data.rows_sha256"} <= facts
    assert "samples.row 5.input_ids" in " ".join(facts)
    assert not [fact for fact in facts if fact.startswith(("trainer", "lora", "optimizer"))]


def altered(folder: Path, edit: Callable[[str], str]) -> ModuleType:
    """The training program with other bytes, as a module."""
    source = train_program().read_text(encoding="utf-8")
    file = folder / "train.py"
    file.write_text(edit(source), encoding="utf-8")
    assert file.read_text(encoding="utf-8") != source
    return load(file, "altered_program")


def test_one_byte_of_the_program_is_another_recipe(first: Path, tmp_path: Path) -> None:
    answer = compared(first, trained(tmp_path, altered(tmp_path, lambda text: text + "#")), exits=6)
    assert named(answer, "recipe") == {"program.sha256", "program.bytes"}
    assert answer["data"]["same_weights"] is True


def test_another_order_of_the_same_rows_is_another_recipe(first: Path, tmp_path: Path) -> None:
    line = "shuffler = random.Random(seed)"
    program = altered(tmp_path, lambda text: text.replace(line, "shuffler = random.Random(seed + 1)"))
    answer = compared(first, trained(tmp_path, program), exits=6)
    facts = named(answer, "recipe")
    assert {"data.order_sha256", "data.first_batches.1", "data.first_batches.2", "data.first_batches.3"} <= facts
    assert "data.rows_sha256" not in facts and "recipe.hash" not in facts
    assert answer["data"]["same_weights"] is False


PLACEMENTS: list[tuple[dict[str, Any], set[str]]] = [
    (
        {"split": (2, 2, 1)},
        {"placement.gradient_accumulation_steps", "trainer.per_device_train_batch_size"},
    ),
    (
        {"placement": {"dtype": "bfloat16", "backend": "hf_jobs", "gradient_checkpointing": True}},
        {"placement.backend", "placement.dtype", "model.dtype", "trainer.bf16", "trainer.gradient_checkpointing"},
    ),
]


@pytest.mark.parametrize(("values", "facts"), PLACEMENTS, ids=["batch split", "dtype and backend"])
def test_another_placement_is_the_same_recipe(
    first: Path, tmp_path: Path, values: dict[str, Any], facts: set[str]
) -> None:
    answer = compared(first, trained(tmp_path, **values), exits=0)
    assert (answer["data"]["verdict"], answer["data"]["recipe"]) == ("same", [])
    assert facts <= named(answer, "placement")


def test_what_is_no_run_is_refused(first: Path, tmp_path: Path) -> None:
    answer = compared(first, tmp_path / "nothing", exits=2)
    assert answer["error"]["code"] == "not_a_run"
    job = "me/0123456789abcdef01234567"
    assert compared(first, Path(job), exits=2)["next"] == [f"skill-train pull {job}"]


def test_a_person_sees_a_table(first: Path, tmp_path: Path) -> None:
    plan = json.loads((first / "plan.json").read_text())
    plan["recipe"]["lora_r"] = 8
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    shown = called("diff", first, tmp_path, "--format", "human")
    assert shown.code == 6
    assert "two runs: different" in shown.stdout and "recipe.lora_r" in shown.stdout
    assert "warning: trainer: only run A has a record" in shown.stderr and "different_recipe" not in shown.stdout


def test_files_that_are_no_longer_those_of_the_records_are_not_compared_by_them(first: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(first, tmp_path / "other"))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        file = other / "adapter" / name
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        answer = compared(first, other, exits=2)
        assert answer["error"]["code"] == "output_changed" and name in answer["error"]["message"]
        file.write_bytes(whole)
    shutil.rmtree(other / "adapter")  # as of a job whose files were not fetched: the records are what there is
    assert compared(first, other, exits=0)["data"]["same_weights"] is True


def test_a_plan_and_a_training_of_two_runs_are_not_compared_as_one(first: Path, tmp_path: Path) -> None:
    """With the adapter and `train.json` of another recipe it said `same`, by the plan alone."""
    mixed, other = Path(shutil.copytree(first, tmp_path / "mixed")), trained(tmp_path, lora_r=4)
    for name in ("train.json", "adapter/adapter_config.json", "adapter/adapter_model.safetensors"):
        shutil.copyfile(other / name, mixed / name)
    for a, b in ((first, mixed), (mixed, first)):
        error = compared(a, b, exits=2)["error"]
        assert error["code"] == "another_run" and str(mixed) in error["message"]
