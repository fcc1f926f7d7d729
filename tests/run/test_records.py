"""What the steps write is read back: the shapes of `records` refuse nothing of ours."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import planning
import whole_records
from skill_train.core.errors import UsageError
from skill_train.core.files import write_json
from skill_train.merge import check_weights as merge_weights
from skill_train.run import evaluate_record
from skill_train.run.folder import write_record
from skill_train.run.records import read_json


def test_a_plan_of_a_model_on_the_hub_has_no_fingerprint(tmp_path: Path) -> None:
    made = planning.decided("qwen2.5-0.5b", "rtx_4090")
    write_json(tmp_path / "plan.json", made | {"fingerprints": {"model": None, "data": None}})
    assert read_json(tmp_path / "plan.json")["fingerprints"] == {"model": None, "data": None}


@pytest.mark.parametrize("kept", [None, 0.999])
def test_a_merge_that_was_judged_by_its_weights(kept: float | None, tmp_path: Path) -> None:
    found = merge_weights.Found(
        tensors=2, changed=1, worst=(0.001, "model.norm.weight"), sums=(1.0, 1.0, 1.0, 1.0, 1.0)
    )
    outcome = merge_weights.outcome(found, stored="BF16", kept=kept)
    write_record(tmp_path / "merge.json", inputs={}, options={}, gate=outcome, outputs={})
    assert read_json(tmp_path / "merge.json")["gate"]["figures"]["worst_tensor"] == "model.norm.weight"


def test_an_evaluation_before_the_merge(tmp_path: Path) -> None:
    """Base and tuned are one folder then, and the second is named by a word."""
    models = {"base": {"model": {}, "adapter": None}, "tuned": {"model": "the folder of base", "adapter": {}}}
    write_json(tmp_path / "evaluate.json", whole_records.evaluation(inputs={"models": models}))
    assert msgspec.to_builtins(evaluate_record.read(tmp_path / "evaluate.json").inputs.models) == models


def test_a_record_with_more_in_it_still_says_what_it_lacks(tmp_path: Path) -> None:
    """A step that is found done adds `reused`; the fuzzing of `local --resume` found a traceback there."""
    write_record(tmp_path / "train.json", inputs={}, checks=[])
    found = read_json(tmp_path / "train.json") | {"reused": True}
    assert found["reused"] and found["checks"] == []
    with pytest.raises(UsageError, match=r"train\.json.*no figures"):
        found["figures"]
