"""What the steps write is read back: nothing of ours is refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import planning
import step_records
import whole_records
from skill_train.core.errors import UsageError
from skill_train.core.files import write_json
from skill_train.merge import check_weights
from skill_train.run import evaluate_record, merge_record, records, train_record
from skill_train.run.records import read_json

RUNS = Path(__file__).resolve().parents[1] / "support" / "data" / "runs"


def test_a_plan_of_a_model_on_the_hub_has_no_fingerprint(tmp_path: Path) -> None:
    made = planning.decided("qwen2.5-0.5b", "rtx_4090")
    write_json(tmp_path / "plan.json", made | {"fingerprints": {"model": None, "data": None}})
    assert read_json(tmp_path / "plan.json")["fingerprints"] == {"model": None, "data": None}


@pytest.mark.parametrize("kept", [None, 0.999])
def test_a_merge_that_was_judged_by_its_weights(kept: float | None, tmp_path: Path) -> None:
    found = check_weights.WeightComparison(
        tensors=2, changed=1, worst=(0.001, "model.norm.weight"), sums=(1.0, 1.0, 1.0, 1.0, 1.0)
    )
    outcome = check_weights.outcome(found, stored="BF16", kept_share=kept)
    record = msgspec.structs.replace(step_records.merged({}, {}), gate=outcome)
    records.write(tmp_path / "merge.json", record)
    assert merge_record.read(tmp_path / "merge.json") == record


def test_an_evaluation_before_the_merge(tmp_path: Path) -> None:
    """Base and tuned are one folder then, and the second is named by a word."""
    base, tuned = {"model": {}, "adapter": None}, {"model": "the folder of base", "adapter": {}}
    models = {"base": base | {"perhaps_trained": False}, "tuned": tuned | {"perhaps_trained": True}}
    write_json(tmp_path / "evaluate.json", whole_records.evaluation(inputs={"models": models}))
    assert msgspec.to_builtins(evaluate_record.read(tmp_path / "evaluate.json").inputs.models) == models


def test_rows_that_were_cut_off_are_not_fewer_rows() -> None:
    """The trainer writes these files whole. A half copy of one would be measured on its first rows, and nothing said
    so."""
    whole, file = (RUNS / "tiny" / "samples.jsonl").read_bytes(), Path("held_out.jsonl")
    count = whole.count(b"\n")
    file.write_bytes(whole)
    assert len(train_record.read_fed_rows(file)) == count
    file.write_bytes(whole[:-40])
    with pytest.raises(UsageError, match=f"line {count} of held_out.jsonl is not JSON") as caught:
        train_record.read_fed_rows(file)
    assert caught.value.code == "broken_record"


def test_a_broken_record_names_its_run(tmp_path: Path) -> None:
    """`report` and `diff` take several runs, and no option says which of them RUN is."""
    run = tmp_path / "my run"
    run.mkdir()
    for name in ("plan.json", "train.json"):
        (run / name).write_text("{")
    for read in (lambda: records.read_json(run / "train.json"), lambda: records.read_lines(run / "train.json", dict)):
        with pytest.raises(UsageError) as caught:
            read()
        assert caught.value.hint.endswith(f"skill-train pull '{run}'")
