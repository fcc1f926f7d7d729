"""A run on a base that another run merged: of its held-out rows, those are told that the other may have trained on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import shared_runs
from one_command import answered
from skill_train.commands.push import PushOptions, gathered
from skill_train.core.console import Console
from skill_train.plan.ancestry import known_to_file
from skill_train.run.folder import RunDir

pytestmark = pytest.mark.slow


def told(*words: object, code: str = "base_trained") -> list[str]:
    exit_code, answer = answered(*words)
    assert exit_code == 0, answer
    return [warning["message"] for warning in answer["warnings"] if warning["code"] == code]


def numbers(run: Path) -> set[int]:
    return {json.loads(line)["row"] for line in (run / "held_out.jsonl").read_text().splitlines()}


def edit(file: Path, part: str, key: str, value: object) -> None:
    document = json.loads(file.read_text())
    document[part][key] = value
    file.write_text(json.dumps(document))


def test_held_out_rows_that_the_base_was_trained_on_are_counted(tmp_path: Path) -> None:
    chain = shared_runs.chain()
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    shutil.copytree(chain.run, first)
    (recipe := tmp_path / "recipe.yaml").write_text(
        f"model: {first}/merged\ndata: {chain.rows}\nheld_out_fraction: 0.4\n"
    )
    train = ("--data", chain.rows, "--max-steps", 1, "--max-length", 96)
    on_first = (*train, "--model", first / "merged")
    said = told("local", recipe, *on_first, "--run-dir", second)
    known = len(numbers(second) - numbers(first))
    assert known > 0 and len(said) == 1
    count = f"{first} did not hold out {known} of the {len(numbers(second))} held-out rows, which its data has"
    assert said[0].startswith(count)
    evaluate = ("evaluate", second, "--rows", 2)
    assert told(*evaluate) == said
    assert told("report", second) == said
    assert "which may have trained on some of these rows" in (second / "report.html").read_text()
    console = Console("quiet", "push")
    facts = gathered(PushOptions(run=second, repo="me/x"), console).facts
    assert (
        facts.base_may_know and [each["message"] for each in console.warnings if each["code"] == "base_trained"] == said
    )
    assert told("local", *on_first, "--run-dir", tmp_path / "same") == []  # the same split
    assert told("evaluate", tmp_path / "same", "--rows", 2) == told("report", tmp_path / "same") == []
    assert "which may have trained" not in (tmp_path / "same" / "report.html").read_text()
    assert not gathered(PushOptions(run=tmp_path / "same", repo="me/x"), console).facts.base_may_know

    answered("merge", second)
    chained = told("local", recipe, *train, "--model", second / "merged", "--run-dir", third)
    assert len(chained) == 1 and chained[0].startswith(count)  # of the base of its base alone

    held_out = first / "held_out.jsonl"
    held_out.rename(tmp_path / "away")
    assert [f"{first} lost rows that it held out, so whether" in each for each in told(*evaluate)] == [True]
    edit(first / "train.json", "data", "held_out_rows", 0)  # it trained on every row
    assert f"did not hold out {len(numbers(second))} of" in told(*evaluate)[0]
    edit(first / "plan.json", "fingerprints", "data", "other")
    assert [f"{first} has other data, so whether" in each for each in told(*evaluate)] == [True]
    edit(first / "plan.json", "recipe", "model", str(first / "merged"))  # no end
    assert len(told(*evaluate)) == 1
    (first / "plan.json").write_text("{")
    assert [each.startswith("whether the base was trained") for each in told(*evaluate)] == [True]


def test_held_out_rows_that_the_run_of_another_file_was_trained_on_are_counted(tmp_path: Path) -> None:
    """Rows are known by their numbers in the same data, and by their tokens in data that has grown."""
    chain = shared_runs.chain()
    first, other, apart = (tmp_path / name for name in ("first", "other", "apart"))
    shutil.copytree(chain.run, first)
    shutil.copytree(chain.run, other)
    file = next(iter(sorted((other / "gguf").glob("*.gguf"))))
    evaluate = ("evaluate", first, "--rows", 2, "--gguf", file)
    assert told(*evaluate, code="file_trained") == told("report", first, code="file_trained") == []
    assert "may have trained" not in (first / "report.html").read_text()
    lines = (first / "held_out.jsonl").read_text().splitlines()

    (other / "held_out.jsonl").write_text("".join(f"{line}\n" for line in lines[1:]))
    edit(other / "train.json", "data", "held_out_rows", len(lines) - 1)
    known = f"{other} did not hold out 1 of the {len(lines)} held-out rows, which its data has, and {file.name} comes"
    assert [each.startswith(known) for each in told(*evaluate, code="file_trained")] == [True]
    (first / "gguf" / "linked.gguf").symlink_to(file)
    linked = known.replace(f"{file.name} comes", "linked.gguf comes")
    assert [each.startswith(linked) for each in told(*evaluate[:-2], code="file_trained")] == [True]
    (first / "gguf" / "linked.gguf").unlink()
    told(*evaluate)
    shown = f"{file.name} is of another run, which may have trained on some of these rows"
    assert told("report", first, code="file_trained") == [shown]
    assert f"{shown}." in (first / "report.html").read_text()
    training = (first / "train.json").read_text()
    edit(first / "train.json", "outputs", "adapter/adapter_model.safetensors", {"bytes": 1, "sha256": "0" * 64})
    assert told("report", first, code="file_trained") == []  # the page leaves the evaluation of another adapter out
    (first / "train.json").write_text(training)

    edit(other / "plan.json", "fingerprints", "data", "other")
    unknown = f"{other} has other data, so whether it trained on 1 of the {len(lines)} held-out rows is not known"
    assert [each.startswith(unknown) for each in told(*evaluate, code="file_trained")] == [True]
    twice = [json.dumps(json.loads(lines[0]) | {"row": 7000 + number}) for number in range(2)]
    kept = (first / "held_out.jsonl").read_text()
    (first / "held_out.jsonl").write_text("".join(f"{line}\n" for line in twice))  # equal rows are two rows
    both = f"{other} has other data, so whether it trained on 2 of"
    assert [each.startswith(both) for each in known_to_file(RunDir(first), file)] == [True]
    (first / "held_out.jsonl").write_text(kept)
    moved = [json.dumps(json.loads(line) | {"row": 7000 + number}) for number, line in enumerate(lines)]
    (other / "held_out.jsonl").write_text("".join(f"{line}\n" for line in moved))
    edit(other / "train.json", "data", "held_out_rows", len(lines))
    assert told(*evaluate, code="file_trained") == []  # the same rows, at other places of the data

    apart.mkdir()
    shutil.copyfile(file, apart / file.name)  # a file without a run
    assert told(*evaluate[:-1], apart / file.name, code="file_trained") == []
