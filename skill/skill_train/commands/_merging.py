"""Merges an adapter into its base, for `merge` and for an export without a merged model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skill_train.commands._base_model import base_of, require_adapter
from skill_train.commands._outputs import put_aside
from skill_train.commands._shell import quoted
from skill_train.core.console import Console
from skill_train.core.errors import VerificationFailed
from skill_train.program.pictures.tokens import PixelLimits
from skill_train.run import merge_record, plan_record
from skill_train.run.begun import trained
from skill_train.run.folder import RunDir, StepResult
from skill_train.run.lock import locked
from skill_train.run.merge_record import MergeRecord, MergeSettings
from skill_train.run.train_record import read_fed_rows

if TYPE_CHECKING:
    from skill_train.merge.step import MergeRequest


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
    require_adapter(run, f"skill-train export-gguf {quoted(run.path)}")
    rows = read_fed_rows(run.held_out) or read_fed_rows(run.samples)
    put_aside(console, run.merged, run.record("merge"))
    try:
        recipe, base = plan_record.read(run.plan).recipe, base_of(run)
        from skill_train.merge.step import MergeRequest  # numpy, once it is known that there is something to merge

        request = MergeRequest(
            base=base,
            adapter=run.adapter,
            out=run.merged,
            record=run.record("merge"),
            rows=rows,
            dtype=dtype,
            gate=gate,
            limits=PixelLimits(recipe.min_pixels, recipe.max_pixels),
        )
        return merge_folders(console, request)
    except VerificationFailed as failure:
        if failure.code == "merge_gate" and dtype != "float32":
            failure.hint = f"skill-train merge {quoted(run.path)} --dtype float32"
        raise


def merge_folders(console: Console, request: MergeRequest) -> StepResult[MergeRecord]:
    from skill_train.merge.step import merge

    with console.progress("merging") as progress:
        return merge(request, progress=progress, warn=console.warn)


def merge_choices(run: RunDir) -> tuple[str | None, str]:
    record = run.record("merge")
    options = merge_record.read(record).options if record.is_file() else MergeSettings()
    return options.dtype, options.gate or "auto"
