"""A run that is trained here and on machines of others, and what differs between the two."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import training
from skill_train.machine.training_program import train_program
from skill_train.run import compare_runs
from skill_train.run.folder import RunDir

STEPS = 4


def trained_here(folder: Path) -> Path:
    """The run as `local` makes it, by the same file."""
    run = planned(folder)
    subprocess.run([sys.executable, train_program(), run / "plan.json"], check=True, stdout=subprocess.DEVNULL)
    return run


def planned(folder: Path, **values: Any) -> Path:
    """Without dropout: it is drawn by process."""
    run = training.write_run(folder / "run", max_steps=STEPS, save_steps=1, lora_dropout=0.0, **values)
    plan = json.loads((run / "plan.json").read_text())
    plan["policy"] = {"sensitive": False, "hub_model_id": "me/tuned"}
    (run / "plan.json").write_text(json.dumps(plan, indent=1))
    return run


def compared(a: Path, b: Path) -> compare_runs.Comparison:
    return compare_runs.compare(compare_runs.read_run(RunDir(a)), compare_runs.read_run(RunDir(b)))
