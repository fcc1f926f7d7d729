"""Merges an adapter into its base, for `merge` and for an export without a merged model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from skill_train.commands._base_model import base_of
from skill_train.commands._outputs import beside, put_aside
from skill_train.commands._shell import quoted
from skill_train.core.console import Console
from skill_train.core.errors import UsageError, VerificationFailed
from skill_train.program.pictures.tokens import PixelLimits
from skill_train.run import merge_record, plan_record
from skill_train.run.begun import trained
from skill_train.run.folder import RunDir, StepResult
from skill_train.run.lock import locked
from skill_train.run.merge_record import MergeRecord, MergeSettings
from skill_train.run.train_record import FedRow, read_fed_rows


@dataclass(frozen=True)
class MergeTask:
    """The inputs and the output of a merge.

    Attributes:
        rows: on which the logits of the result are compared.
        dtype: of the stored weights; None for that of the base.
        limits: of the size of a picture in the training.
    """

    base: Path
    adapter: Path
    out: Path
    rows: Sequence[FedRow] = ()
    dtype: str | None = None
    gate: str = "auto"
    limits: PixelLimits = PixelLimits(None, None)


def merge_run(console: Console, run: RunDir, dtype: str | None = None, gate: str = "auto") -> StepResult[MergeRecord]:
    """Merges the adapter of a run into `merged/`.

    Raises:
        UsageError: not trained yet, or there is no adapter because every weight was trained; or the run is in use.
    """
    with locked(run, "merge"):
        return merge_locked(console, run, dtype, gate)


def merge_locked(console: Console, run: RunDir, dtype: str | None, gate: str) -> StepResult[MergeRecord]:
    """`merge_run` for a caller that has the lock of the run."""
    trained(run)
    if run.is_full:
        raise UsageError(
            f"{run.path} has no adapter to merge: every weight was trained, and merged/ is the whole model",
            code="no_adapter",
            expected="a run that trained an adapter",
            got="finetuning_type full",
            hint=f"skill-train export-gguf {quoted(run.path)}",
        )
    rows = read_fed_rows(run.held_out) or read_fed_rows(run.samples)
    put_aside(console, run.merged, run.record("merge"))
    try:
        recipe = plan_record.read(run.plan).recipe
        limits = PixelLimits(recipe.min_pixels, recipe.max_pixels)
        return merge_folders(console, MergeTask(base_of(run), run.adapter, run.merged, rows, dtype, gate, limits))
    except VerificationFailed as failure:
        if failure.code == "merge_gate" and dtype != "float32":
            failure.hint = f"skill-train merge {quoted(run.path)} --dtype float32"
        raise


def merge_folders(console: Console, task: MergeTask) -> StepResult[MergeRecord]:
    """Merges an adapter in a folder into a base in a folder."""
    from skill_train.merge.step import MergeRequest, merge

    out = task.out
    record = RunDir(out.parent).record("merge") if out.name == "merged" else beside(out, ".merge.json")
    with console.progress("merging") as progress:
        return merge(
            MergeRequest(
                base=task.base,
                adapter=task.adapter,
                out=out,
                record=record,
                rows=task.rows,
                dtype=task.dtype,
                gate=task.gate,
                limits=task.limits,
            ),
            progress=progress,
            warn=console.warn,
        )


class MergeChoices(TypedDict):
    dtype: str | None
    gate: str


def merge_choices(run: RunDir) -> MergeChoices:
    """The options of an existing merge, so that it can be reused."""
    record = run.record("merge")
    asked = merge_record.read(record).options if record.is_file() else MergeSettings()
    return {"dtype": asked.dtype, "gate": asked.gate or "auto"}
