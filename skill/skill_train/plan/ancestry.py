"""The runs that made a base, one on top of another, and the held-out rows that they may have been trained on."""

from collections.abc import Iterator
from pathlib import Path

from skill_train.run import plan_record, train_record
from skill_train.run.folder import RunDir
from skill_train.run.plan_record import Plan
from skill_train.run.train_record import FedRow


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
    return _not_held_out(run, made_by(plan_record.read(run.plan).recipe.model))


def known_to_file(run: RunDir, gguf: Path) -> Iterator[str]:
    """The same for a file in the folder of another run, of that run and of those that made its base."""
    other = next((RunDir(folder) for folder in gguf.resolve().parents if RunDir.is_one(folder)), None)
    if other is None or other.path == run.path.resolve():
        return iter(())
    return _not_held_out(run, [other, *made_by(plan_record.read(other.plan).recipe.model)])


def _not_held_out(run: RunDir, others: list[RunDir]) -> Iterator[str]:
    plan, rows = plan_record.read(run.plan), train_record.read_fed_rows(run.held_out)
    for other in others if rows else ():
        training, held_out = other.record("train"), train_record.read_fed_rows(other.held_out)
        same_data = _data_of(plan_record.read(other.plan)) == _data_of(plan)
        never_trained = {_name(row, same_data) for row in held_out}
        unheld = sum(_name(row, same_data) not in never_trained for row in rows)
        if not training.is_file() or len(held_out) != train_record.read(training).data.held_out_rows:
            why, unknown = "lost rows that it held out", len(rows)
        elif not unheld:
            continue
        elif same_data:
            yield f"{other.path} did not hold out {unheld} of the {len(rows)} held-out rows, which its data has"
            continue
        else:
            why, unknown = "has other data", unheld
        yield f"{other.path} {why}, so whether it trained on {unknown} of the {len(rows)} held-out rows is not known"


def _name(row: FedRow, same_data: bool) -> object:
    """A row is known by its number in the same data, and by its tokens in other data."""
    return row["row"] if same_data else tuple(row["input_ids"])


def _run_of(folder: Path) -> RunDir | None:
    run = folder.parent.parent if folder.parent.name == "checkpoints" else folder.parent
    of_a_run = folder.name == "merged" or folder.parent.name == "checkpoints"
    return RunDir(run) if of_a_run and RunDir.is_one(run) else None


def _data_of(plan: Plan) -> tuple[object, ...]:
    recipe = plan.recipe
    content = plan.fingerprints.get("data") or (recipe.data, recipe.data_revision, recipe.data_file)
    return content, recipe.data_config, recipe.split
