"""What `local` says of a run beside its verdict: repeated rows, and whether the held-out rows are new."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import tiny
import training
from command_child import Commands, Done

pytestmark = pytest.mark.slow

ROWS = [tiny.rows(24)[number % 20] for number in range(24)]  # the first four stand twice


def _local(commands: Commands, folder: Path, rows: list[dict[str, Any]], *options: object) -> Done:
    data = training.write_data(folder, rows)
    words = ("local", "--model", tiny.cached("gemma"), "--data", data, "--run-dir", "run", "--format", "json")
    return commands.run(folder, dict(os.environ), *words, *options)


@pytest.fixture(scope="module")
def one_step(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """A folder with a run of one step, and the answer. Nobody changes it."""
    folder = tmp_path_factory.mktemp("one-step")
    return folder, _local(commands, folder, tiny.rows(24), "--max-steps", "1")


def _warnings(done: Done) -> dict[str, str]:
    return {warning["code"]: warning["message"] for warning in done.answer["warnings"]}


def test_rows_that_repeat_are_counted(commands: Commands, tmp_path: Path) -> None:
    done = _local(commands, tmp_path, ROWS, "--max-steps", "1")
    figures = done.data["data"]
    assert (figures["repeated_rows"], figures["repeated_groups"]) == (4, 4)
    assert (figures["held_out_trained"], figures["held_out_asked"]) == (0, 0)
    assert "4 of 24 rows repeat an earlier one, in 4 groups" in _warnings(done)["repeated_rows"]
    assert "4 repeat an earlier row" in done.stderr


def test_rows_that_were_cut_are_told(commands: Commands, one_step: tuple[Path, Done], tmp_path: Path) -> None:
    """The plan knows bytes: 80 of them are 16 tokens or 40. The training has counted, and 24 tokens are half a row."""
    rows = [{"text": f"{number} {'letter number ' * 5}"} for number in range(24)]
    done = _local(commands, tmp_path, rows, "--max-steps", "1", "--max-length", "24")
    assert done.data["data"]["truncated_rows"] == 24
    assert _warnings(done)["truncated"] == "24 of 24 rows were cut at max_length: their ends were not trained"
    assert "truncated" not in _warnings(one_step[1])


def test_rows_that_were_left_out_are_told_with_the_epochs_that_they_made(commands: Commands, tmp_path: Path) -> None:
    """The plan made the steps of all rows: three epochs of them are twelve of the quarter that has answers left."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": "long " * 60 * bool(n % 4) + str(n)},
                {"role": "assistant", "content": "a"},
            ]
        }
        for n in range(16)
    ]
    (tmp_path / "recipe.yaml").write_text(
        f"model: {tiny.cached('gemma')}\ndata: {training.write_data(tmp_path, rows)}\nmax_length: 48\n"
        "effective_batch_size: 4\nnum_train_epochs: 1\nskip_untrained_rows: true\n"
    )
    words = ("local", "recipe.yaml", "--run-dir", "run", "--format", "json")
    warned = _warnings(commands.run(tmp_path, dict(os.environ), *words))
    assert warned["skipped"] == "12 of 16 rows were left out, because nothing of them was left to train"
    assert warned["epochs"] == "4 steps are 4 epochs of the 4 rows, so rows are repeated"


def test_one_row_more_than_all_is_no_second_epoch(commands: Commands, tmp_path: Path) -> None:
    """24 rows are fed of 23, which was told as "1 epochs"."""
    tiny.write_rows(tmp_path / "rows.jsonl", 24)
    (tmp_path / "recipe.yaml").write_text(
        f"model: {tiny.cached('gemma')}\ndata: rows.jsonl\neffective_batch_size: 8\nmax_steps: 3\n"
    )
    words = ("local", "recipe.yaml", "--run-dir", "run", "--format", "json")
    done = commands.run(tmp_path, dict(os.environ), *words)
    assert done.data["epochs"] == 1.043 and "epochs" not in _warnings(done)


def test_only_what_the_user_said_is_called_asked(one_step: tuple[Path, Done]) -> None:
    """`local` trains here because it is that command. `plan --flavor` names a flavor, and no place."""
    folder, done = one_step
    plan = json.loads((folder / "run" / "plan.json").read_text())
    assert "asked" not in [reason["rule"] for reason in plan["reasons"]] and "--where" not in done.stderr
    chosen = {reason["rule"]: reason for reason in plan["reasons"]}["command"]
    assert (chosen["value"], chosen["source"]) == ("local", "command line")
    assert chosen["because"].startswith("this command trains here")


@pytest.mark.parametrize(
    ("options", "rule", "because"),
    [
        (("--where", "local"), "asked", "--where local"),
        (("--where", "cloud"), "asked", "--where cloud"),
        (("--flavor", "t4-small"), "asked", "--flavor t4-small"),
        ((), None, ""),
    ],
)
def test_a_plan_names_the_option_that_was_given(
    commands: Commands, tmp_path: Path, options: tuple[str, ...], rule: str | None, because: str
) -> None:
    data = training.write_data(tmp_path, tiny.rows(24))
    words = ("plan", "--model", tiny.cached("gemma"), "--data", data, *options, "--out", "plan.json")
    commands.run(tmp_path, dict(os.environ), *words, "--format", "json")
    reasons = json.loads((tmp_path / "plan.json").read_text())["reasons"]
    found = [reason["because"] for reason in reasons if reason["rule"] in ("asked", "command")]
    assert [one.split(",")[0].split(";")[0] for one in found] == ([because] if rule else [])


def test_after_a_part_of_the_rows_comes_the_whole_training(
    commands: Commands, one_step: tuple[Path, Done], tmp_path: Path
) -> None:
    """One step of 16 rows, of 23: a smoke run. Its export is no result, and says so. Each command runs as it stands."""
    folder, done = one_step
    data = folder / "rows.jsonl"
    shutil.copytree(folder / "run", tmp_path / "run")
    whole, export = done.answer["next"]
    assert whole == f"skill-train plan --model {tiny.cached('gemma')} --data {data}"
    assert export == "skill-train export-gguf run"
    planned = commands.run(tmp_path, dict(os.environ), *whole.split()[1:], "--format", "json")
    assert planned.data["where"] == "local"
    made = commands.run(tmp_path, dict(os.environ), *export.split()[1:], "--quant", "f16", "--format", "json")
    assert made.code == 0, made.stdout
    assert _warnings(made)["smoke_run"].startswith("1 steps of 16 rows are less than the 23 training rows")


def test_a_failed_smoke_test_is_told_by_what_comes_after(
    commands: Commands, one_step: tuple[Path, Done], tmp_path: Path
) -> None:
    """`local` ended with exit 5. A later `status` called the run completed, and its export was told as any other."""
    run = shutil.copytree(one_step[0] / "run", tmp_path / "run")
    trained = json.loads((run / "train.json").read_text())
    trained["checks"][0] |= {"verdict": "fail", "detail": "the loss rose"}
    (run / "train.json").write_text(json.dumps(trained))
    told = f"the smoke test failed: {trained['checks'][0]['name']}"
    state = commands.run(tmp_path, dict(os.environ), "status", "run", "--format", "json")
    assert (state.data["stage"], state.data["why"]["message"], state.answer["next"]) == ("COMPLETED", told, [])
    made = commands.run(tmp_path, dict(os.environ), "export-gguf", "run", "--quant", "f16", "--format", "json")
    assert _warnings(made)["smoke_failed"] == f"{told}: the loss rose"


@pytest.mark.parametrize(
    ("setting", "difference"), [("--max-steps 2", "max_steps: 1 → 2"), ("--max-length 64", "max_length: 1024 → 64")]
)
def test_a_setting_does_not_change_on_resume(
    commands: Commands, one_step: tuple[Path, Done], setting: str, difference: str
) -> None:
    """A setting alone is one of the run's own recipe, and its value there changes nothing. The hint begins anew."""
    folder, _ = one_step
    words = ("local", "--resume", "--run-dir", "run", "--format", "json")
    done = commands.run(folder, dict(os.environ), *words, *setting.split())
    assert done.error == (2, "another_run"), done.stdout
    assert done.answer["error"]["got"] == difference
    assert done.answer["error"]["hint"] == f"skill-train local run/recipe.yaml {setting} --run-dir run-2"
    same = commands.run(folder, dict(os.environ), *words, "--max-steps", "1")
    assert same.data["reused"] is True, same.stdout


def test_resume_in_a_folder_without_a_run_is_refused(commands: Commands, tmp_path: Path) -> None:
    words = ("local", "--resume", "--run-dir", "nowhere", "--max-steps", "2", "--format", "json")
    assert commands.run(tmp_path, dict(os.environ), *words).error == (2, "not_a_run")


def test_warnings_of_few_steps_of_a_check_and_of_a_missed_estimate(commands: Commands, tmp_path: Path) -> None:
    recipe = {"model": str(tiny.cached("gemma")), "data": "rows.jsonl", "effective_batch_size": 1}
    (tmp_path / "single.yaml").write_text(json.dumps(recipe))
    done = _local(commands, tmp_path, tiny.rows(24), "single.yaml", "--max-steps", "4")
    assert _warnings(done)["accumulation"] == "accumulation: one row only: nothing to accumulate"
    assert "4 steps are too few to learn from, by a rule of thumb: AdamW averages 10" in _warnings(done)["few_steps"]
    file = tmp_path / "run" / "plan.json"
    plan = json.loads(file.read_text())
    memory = done.data["estimates"]["memory_bytes"]["actual"]
    plan["estimates"]["memory_bytes"] |= {"low": 1.0, "high": 2e6}
    plan["estimates"]["seconds"] |= {"low": 7200.0, "high": 10800.0}
    file.write_text(json.dumps(plan))
    again = commands.run(tmp_path, dict(os.environ), "local", "--resume", "--run-dir", "run", "--format", "json")
    assert again.data["estimates"]["memory_bytes"]["within"] is False
    told = _warnings(again)["estimate_missed"]
    assert f"memory: {memory / 1e9:.2f} GB, estimated 0.00 to 0.00 GB" in told and "estimated 2.0 h to 3.0 h" in told
    plan["estimates"]["memory_bytes"] |= {"low": 1.0, "high": 1e12}
    plan["estimates"]["seconds"] |= {"low": 0.0, "high": 1e9}
    file.write_text(json.dumps(plan))
    again = commands.run(tmp_path, dict(os.environ), "local", "--resume", "--run-dir", "run", "--format", "json")
    assert "estimate_missed" not in _warnings(again)


def test_rows_without_repeats_are_not_mentioned(one_step: tuple[Path, Done]) -> None:
    _, done = one_step
    assert done.data["data"]["repeated_rows"] == 0
    assert not {"repeated_rows", "held_out_asked", "held_out_trained"} & _warnings(done).keys()


def test_a_run_of_an_earlier_version_may_have_trained_its_held_out_rows(
    commands: Commands, one_step: tuple[Path, Done], tmp_path: Path
) -> None:
    """Its record does not say whether rows that repeat stood on both sides of the split, so nobody can say it."""
    shutil.copytree(one_step[0] / "run", tmp_path / "run")
    file = tmp_path / "run" / "train.json"
    record = json.loads(file.read_text())
    for name in ("repeated_rows", "repeated_groups", "held_out_trained", "held_out_asked"):
        del record["data"][name]
    file.write_text(json.dumps(record))
    done = commands.run(tmp_path, dict(os.environ), "evaluate", "run", "--format", "json")
    assert "held-out rows may have been trained" in _warnings(done)["held_out_unknown"]
    record["data"] |= {"held_out_trained": 1}
    file.write_text(json.dumps(record))
    done = commands.run(tmp_path, dict(os.environ), "evaluate", "run", "--format", "json")
    assert "1 of 1 held-out rows were trained too" in _warnings(done)["held_out_trained"]
