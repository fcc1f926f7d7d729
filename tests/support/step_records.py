"""Records of steps for tests that need one to be there, and not the step itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from skill_train.core.digests import FileDigest
from skill_train.run.folder import StepResult
from skill_train.run.merge_record import MergeInputs, MergeRecord, MergeSettings
from skill_train.run.train_record import TrainedData, TrainFigures, TrainRecord


def trained(outputs: dict[str, FileDigest], *, rows: int = 40, steps: int = 1, **figures: float) -> TrainRecord:
    """`train.json` of a run that passed."""
    return TrainRecord(
        recipe_hash="0" * 64,
        steps=steps,
        verdict="pass",
        outputs=outputs,
        data=TrainedData(
            rows=rows,
            train_rows=rows,
            held_out_rows=0,
            repeated_rows=0,
            repeated_groups=0,
            held_out_trained=0,
            held_out_asked=0,
        ),
        figures=TrainFigures(**figures),
    )


def put_environment(run: Path, record: Any) -> None:
    """Another `environment.json` in a run, as an earlier version wrote it: `train.json` has no digest of it."""
    (run / "environment.json").write_text(json.dumps(record))
    training = json.loads((run / "train.json").read_text())
    training["outputs"].pop("environment.json", None)
    (run / "train.json").write_text(json.dumps(training))


def merged(adapter: dict[str, FileDigest], outputs: dict[str, FileDigest]) -> MergeRecord:
    """`merge.json` of a merge that its gate accepted."""
    return MergeRecord(
        inputs=MergeInputs(base={}, adapter=adapter),
        options=MergeSettings(),
        how="streamed",
        reasons=[],
        changes={"stored_dtype": "F32"},
        gate={
            "stored_dtype": "F32",
            "figures": {},
            "effect": {"share": 1.0, "share_half_width": 0.0, "kl_between": None},
            "limits": {},
            "failures": [],
            "verdict": "pass",
        },
        outputs=outputs,
    )


def as_dict(result: StepResult[Any]) -> dict[str, Any]:
    """The record as JSON has it, with `reused`."""
    document: dict[str, Any] = msgspec.to_builtins(result.record)
    return document | {"reused": result.reused}
