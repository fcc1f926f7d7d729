"""The runs that made a base, one on top of another."""

from __future__ import annotations

from pathlib import Path

from skill_train.run import plan_record
from skill_train.run.folder import RunDir


def made_by(model: str) -> list[RunDir]:
    """The runs that made a model, its base, the base of that and so on (`merged/` or a checkpoint); latest first."""
    runs: list[RunDir] = []
    while run := _run_of(Path(model).resolve()):
        if run in runs:
            break  # somebody edited a plan
        runs.append(run)
        model = plan_record.read(run.plan).recipe.model
    return runs


def sensitive_run(model: str) -> Path | None:
    """The latest run of `made_by` whose recipe has `sensitive: true`; None if there is none."""
    return next((run.path for run in made_by(model) if plan_record.read(run.plan).policy.sensitive), None)


def _run_of(folder: Path) -> RunDir | None:
    run = folder.parent.parent if folder.parent.name == "checkpoints" else folder.parent
    of_a_run = folder.name == "merged" or folder.parent.name == "checkpoints"
    return RunDir(run) if of_a_run and RunDir.is_one(run) else None
