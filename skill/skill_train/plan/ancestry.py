"""The runs that made a base, one on top of another, and the held-out rows that they may have been trained on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from skill_train.run import plan_record, train_record
from skill_train.run.folder import RunDir
from skill_train.run.plan_record import Plan


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


def known_to_base(run: RunDir) -> Iterator[str]:
    """A sentence for each run that made the base and did not hold out the same rows, or for which this is unknown.

    Raises:
        UsageError: a record of one of these runs cannot be read.
    """
    plan, rows = plan_record.read(run.plan), {row["row"] for row in train_record.read_fed_rows(run.held_out)}
    for base in made_by(plan.recipe.model) if rows else ():
        earlier, training = plan_record.read(base.plan), base.record("train")
        held_out = {row["row"] for row in train_record.read_fed_rows(base.held_out)}
        whole = training.is_file() and len(held_out) == train_record.read(training).data.held_out_rows
        if not whole or _data_of(earlier) != _data_of(plan):
            why = "has other data" if whole else "lost rows that it held out"
            yield f"{base.path} {why}, so whether it trained on the {len(rows)} held-out rows is not known"
        elif unheld := len(rows - held_out):
            yield f"{base.path} did not hold out {unheld} of the {len(rows)} held-out rows, which its data has"


def _run_of(folder: Path) -> RunDir | None:
    run = folder.parent.parent if folder.parent.name == "checkpoints" else folder.parent
    of_a_run = folder.name == "merged" or folder.parent.name == "checkpoints"
    return RunDir(run) if of_a_run and RunDir.is_one(run) else None


def _data_of(plan: Plan) -> tuple[object, ...]:
    recipe = plan.recipe
    content = plan.fingerprints.get("data") or (recipe.data, recipe.data_revision, recipe.data_file)
    return content, recipe.data_config, recipe.split
