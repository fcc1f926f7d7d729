"""What earlier starts left in a run directory: nothing, a part of the run, the whole run, or another run."""

import contextlib
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from skill_train.core.digests import file_digest
from skill_train.core.errors import UsageError, quoted
from skill_train.program.chat.labels import fed_digest
from skill_train.recipe.fields import recipe_hash
from skill_train.run import cloud_record, plan_record, train_record
from skill_train.run.folder import RunDir, require_only, require_unchanged, require_unused
from skill_train.run.plan_record import Plan
from skill_train.run.records import read_json
from skill_train.run.train_record import FedRow, TrainRecord

_STARTED = (".lock", "recipe.yaml", "train.log", "checkpoints")  # not plan.json, because `plan --out` writes it too


def require_resumable(run: RunDir, plan: Plan, otherwise: str) -> None:
    """Refuses to resume a run that has not begun, or a run of another recipe.

    Args:
        otherwise: the command that begins a run in this folder.

    Raises:
        UsageError: the run has not begun, or has another recipe.
    """
    if not run.plan.is_file():
        require_unused(run)
    if not run.plan.is_file() or not any((run.path / name).exists() for name in _STARTED):
        raise UsageError(
            f"{run.path} has no run to resume",
            code="missing_step",
            expected="a folder with plan.json and the checkpoints of an earlier run",
            got="a folder without a run" if run.path.is_dir() else "no such folder",
            hint=otherwise,
        )
    _require_same(run, plan)


def _require_same(run: RunDir, plan: Plan) -> None:
    earlier = plan_record.read(run.plan)
    if earlier.recipe_hash != plan.recipe_hash:
        raise UsageError(
            f"{run.path} holds a run of another recipe",
            code="another_run",
            expected="the same recipe and data, or another --run-dir",
            got="; ".join(_differences(earlier, plan)),
            hint=f"the same command with --run-dir {quoted(run.free_name())}",
        )


def already_there(run: RunDir, plan: Plan, resume: bool) -> TrainRecord | None:
    if not has_begun(run):
        return None
    _require_same(run, plan)
    if run.record("train").is_file() and run.tuned.is_dir():
        return trained(run)
    if not resume:
        raise UsageError(
            f"{run.path} holds an unfinished run of this recipe",
            code="unfinished_run",
            hint=cloud_record.continue_command(run),
        )
    return None


def has_begun(run: RunDir) -> bool:
    """Whether the run has a checkpoint or a result. An attempt that ended before its first checkpoint does not count:
    its plan may change."""
    return run.plan.is_file() and (any(run.checkpoints.glob("checkpoint-*")) or run.tuned.is_dir())


def trained(run: RunDir) -> TrainRecord:
    """`train.json` of a finished run.

    Raises:
        UsageError: the run is not trained yet, or its files or its recipe have changed since.
    """
    recorded = run.record("train").is_file()
    if not recorded or not run.tuned.is_dir():
        raise UsageError(
            f"{run.path} {f'has no {run.tuned.name}/' if recorded else 'has not been trained yet'}",
            code="missing_step",
            expected=f"train.json and {run.tuned.name}/",
            hint=cloud_record.continue_command(run),
        )
    record = train_record.read(run.record("train"))
    require_as_trained(run, record, list(record.outputs))
    if run.is_full:
        require_only(run.tuned, map(run.path.joinpath, record.outputs), run.record("train"))
    return record


def require_as_trained(run: RunDir, record: TrainRecord, names: Iterable[str]) -> None:
    """Refuses a run if its recipe, or one of these files, has changed since the training. Steps and rows may be gone.

    Raises:
        UsageError: the recipe is another one; a file is missing, or has another content.
    """
    _require_trained_recipe(run, record)
    for name in names:
        file, may_be_gone = run.path / name, name.endswith(".jsonl")
        if file.exists() or not may_be_gone:
            hint = f"put the trained file back, or move {quoted(file if may_be_gone else run.record('train'))} away"
            hint += "" if may_be_gone else " and train again"
            require_unchanged(file, record.outputs[name], run.record("train"), hint)


def _require_trained_recipe(run: RunDir, record: TrainRecord) -> None:
    """Refuses a plan whose recipe was not trained. The plan's own hash proves nothing: an edit does not change it.

    Raises:
        UsageError: the recipe has another hash than the one in `train.json`.
    """
    fingerprints = plan_record.read(run.plan).fingerprints
    planned = recipe_hash(read_json(run.plan)["recipe"], fingerprints)  # its own fields: earlier plans have fewer
    if record.recipe_hash != planned:
        raise UsageError(
            f"the recipe in {run.plan} is not the one that train.json describes",
            code="another_run",
            expected=f"a recipe with the hash {record.recipe_hash!s:.12}…",
            got=f"{planned:.12}…: plan.json was edited, or train.json belongs to another run",
            hint="put plan.json back as the training left it, or train again into a new --run-dir",
        )


def _differences(earlier: Plan, plan: Plan) -> list[str]:
    """The differences, as `key: value in the folder → requested value`. Not every recipe has every key."""
    kinds = sorted(earlier.fingerprints.keys() | plan.fingerprints.keys())
    changed = [f"the {key} has changed" for key in kinds if earlier.fingerprints.get(key) != plan.fingerprints.get(key)]
    old, new = earlier.recipe.as_dict(), plan.recipe.as_dict()
    pairs = {key: (old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys())}
    return changed + [f"{key}: {before!r} → {after!r}" for key, (before, after) in pairs.items() if before != after]


def forget(run: RunDir, there: set[Path]) -> None:
    """Removes the files that a refused run has written. Files that were `there` before it stay.

    Nothing is removed once it has a checkpoint.
    """
    if has_begun(run):
        return
    files = {run.plan, run.recipe, run.samples, run.held_out, run.metrics, run.log, run.path / ".lock"}
    files |= {run.record("environment"), run.record("train.failed")}
    for path in files - there:
        path.unlink(missing_ok=True)
    if run.checkpoints not in there:
        shutil.rmtree(run.checkpoints, ignore_errors=True)
    with contextlib.suppress(OSError):  # the user's own files stay, and so does the folder
        run.path.rmdir()


def require_rows(rows: Sequence[FedRow], run: Path, recorded: int) -> None:
    """Refuses a run that held out no rows, that has lost held-out rows, or that has other rows in their place.

    Args:
        rows: the rows in `held_out.jsonl`.
        recorded: how many rows were held out, according to `train.json`.

    Raises:
        UsageError: there are no rows, fewer rows than recorded, or rows that may have been trained on.
    """
    require_whole(run / "held_out.jsonl", len(rows), recorded, "were held out")
    if not rows:
        raise UsageError(
            f"{run} has no held-out rows: every row was trained on, so a score would say nothing about new rows",
            code="no_held_out",
            expected="a recipe with held_out_fraction above 0, and 20 rows of data or more",
            got=f"{run / 'held_out.jsonl'} is missing or empty",
            hint="with 20 rows or more, held_out_fraction: 0.1 in the recipe, and a new run with another --run-dir",
        )
    environment = train_record.read_environment(run / "environment.json")
    fed = environment.data if environment is not None and environment.data is not None else {}
    for key, digest, what in (
        ("held_out_sha256", fed_digest(rows), "has other rows than were held out, which may have been trained on"),
        ("held_out_file_sha256", file_digest(run / "held_out.jsonl")["sha256"], "was changed after the training"),
    ):
        if digest != fed.get(key, digest):  # earlier versions recorded none
            raise UsageError(
                f"{run / 'held_out.jsonl'} {what}",
                code="broken_record",
                expected=f"the digest {fed[key]!s:.12}…, as environment.json says",
                got=f"{digest:.12}…",
                hint=train_record.way_back(run / "held_out.jsonl"),
            )


def require_whole(file: Path, there: int, recorded: int, which: str) -> None:
    """Requires the recorded number of rows: a file that was cut between two rows can still be read."""
    if there < recorded:
        raise UsageError(
            f"{file} has {there} of the {recorded} rows that {which}",
            code="broken_record",
            expected=f"{recorded} rows, as train.json says",
            got=f"{there} rows" if file.is_file() else "no such file",
            hint=train_record.way_back(file),
        )
