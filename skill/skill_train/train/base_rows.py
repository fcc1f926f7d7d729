"""Held-out rows of a run that its base may have been trained on, if the base is the merged model of earlier runs."""

from __future__ import annotations

from collections.abc import Iterator

from skill_train.plan.ancestry import made_by
from skill_train.run import plan_record, train_record
from skill_train.run.folder import RunDir
from skill_train.run.plan_record import Plan


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


def _data_of(plan: Plan) -> tuple[object, ...]:
    recipe = plan.recipe
    content = plan.fingerprints.get("data") or (recipe.data, recipe.data_revision, recipe.data_file)
    return content, recipe.data_config, recipe.split
