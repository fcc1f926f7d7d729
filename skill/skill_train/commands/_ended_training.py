"""Reports on a training that has ended: measurements beside estimates, the error of its smoke test, and warnings."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypedDict

from msgspec import UNSET

from skill_train.core.console import Console
from skill_train.core.errors import TrainingFailed, UsageError, quoted
from skill_train.core.units import duration
from skill_train.plan.ancestry import known_to_base, known_to_file
from skill_train.plan.few_steps import few_steps
from skill_train.run import plan_record, train_record
from skill_train.run.folder import RunDir
from skill_train.run.plan_record import Number, Plan
from skill_train.run.train_record import TrainedData, TrainRecord


class MeasuredFigure(TypedDict):
    """`within` is None if the estimate or the measurement is unknown."""

    low: Number | None
    high: Number | None
    actual: Number | None
    within: bool | None


def measured_beside_estimates(plan: Plan, record: TrainRecord) -> dict[str, MeasuredFigure]:
    """The measurements beside the estimates. The smaller layout of a second try has no estimates."""
    peaks, estimates = record.figures.peak_memory_bytes, plan.estimates
    both = {
        "memory_bytes": (estimates.memory_bytes, peaks.get(plan.placement.device, peaks.get("rss"))),
        "seconds": (estimates.seconds, record.seconds),
    }
    figures: dict[str, MeasuredFigure] = {}
    for name, (estimate, actual) in both.items():
        low, high = (None, None) if record.smaller_layout else (estimate.low, estimate.high)
        within = None if low is None or high is None or actual is None else low <= actual <= high
        figures[name] = {"low": low, "high": high, "actual": actual, "within": within}
    return figures


def smoke_failure(run: RunDir, record: TrainRecord) -> TrainingFailed | None:
    """The error of a finished run, local or in the cloud, if a smoke check failed; otherwise None."""
    failed = [check for check in record.checks if check.verdict == "fail"]
    if not failed:
        return None
    return TrainingFailed(
        f"the smoke test failed: {', '.join(check.name for check in failed)}",
        code="smoke_failed",
        expected="every check to pass",
        got="; ".join(check.detail for check in failed),
        hint=f"read {quoted(run.record('train'))}",
    )


def warn_of_run(console: Console, plan: Plan, record: TrainRecord) -> None:
    """Prints all warnings about a trained run."""
    if smaller := record.smaller_layout:
        console.warn("smaller_layout", f"trained with {smaller.value}, because memory ran out: {smaller.because}")
    if few := few_steps(plan.recipe, record.steps):
        console.warn("few_steps", few)
    for check in record.checks:
        if check.verdict == "warn":
            console.warn(check.name, f"{check.name}: {check.detail}")
    warn_of_repeats(console, record.data)
    cut, skipped = record.data.truncated_rows or 0, record.data.skipped_rows or 0
    if 100 * cut >= max(record.data.rows, 1):
        console.warn(
            "truncated", f"{cut} of {record.data.rows} rows were cut at max_length: their ends were not trained"
        )
    if skipped:
        rows = f"{skipped} of {record.data.rows + skipped} rows were left out"
        console.warn("skipped", f"{rows}, because nothing of them was left to train")
    figures = measured_beside_estimates(plan, record)
    if missed := [_missed(name, figure) for name, figure in figures.items() if figure["within"] is False]:
        console.warn(
            "estimate_missed", f"{'; '.join(missed)}: do not rely on the estimates for a longer run on this machine"
        )


def warn_of_smoke_run(console: Console, run: RunDir) -> None:
    """Warns about a failed smoke test, and about a smoke run, which has not seen all its rows."""
    recipe, record = plan_record.read(run.plan).recipe, train_record.read(run.record("train"))
    if failure := smoke_failure(run, record):
        console.warn("smoke_failed", f"{failure.message}: {failure.got}")
    steps, batch, rows = record.steps, recipe.effective_batch_size, record.data.train_rows
    if steps * batch < rows:
        part = f"{steps} steps of {batch} rows are less than the {rows:,} training rows"
        console.warn("smoke_run", f"{part}: these files come from a smoke run, not from the whole training")


def _missed(name: str, figure: MeasuredFigure) -> str:
    """A sentence about a wrong estimate, with the measured value."""
    values = (value for value in (figure["low"], figure["high"], figure["actual"]) if value is not None)
    if name == "seconds":
        low, high, actual = (duration(seconds, estimated=True) for seconds in values)
        return f"time: {actual}, {_just(actual, low, high)}estimated {low} to {high}"
    low, high, actual = (f"{size / 1e9:.2f}" for size in values)
    return f"memory: {actual} GB, {_just(actual, low, high)}estimated {low} to {high} GB"


def _just(actual: str, low: str, high: str) -> str:
    """`just outside the ` if the rounded value equals an end of the range; otherwise empty."""
    return "just outside the " if actual in (low, high) else ""


def warn_of_repeats(console: Console, data: TrainedData) -> None:
    """Warns about repeated rows, and about held-out rows that the model has seen."""
    if data.repeated_rows:
        groups = f"{data.repeated_rows} of {data.rows} rows repeat an earlier one, in {data.repeated_groups} groups"
        console.warn("repeated_rows", f"{groups}; each group is trained whole or held out whole")
    warn_of_seen(console, data)
    if data.held_out_asked:
        repeated = f"{data.held_out_asked} of {data.held_out_rows} held-out rows have the question of a trained row"
        console.warn("held_out_asked", f"{repeated} with another answer, because too few rows have a unique question")


def warn_of_seen(console: Console, data: TrainedData) -> None:
    """Warns if a run of an earlier version trained, or may have trained, on held-out rows."""
    if data.held_out_trained:
        repeated = f"{data.held_out_trained} of {data.held_out_rows} held-out rows were trained too"
        anew = "train in a new --run-dir for a fair evaluation"
        console.warn("held_out_trained", f"{repeated}: this run was split by an earlier version; {anew}")
    elif data.held_out_trained is UNSET:
        why = "an earlier version trained this run, and did not keep rows that repeat together"
        console.warn("held_out_unknown", f"{why}: held-out rows may have been trained")


def warn_of_base_rows(console: Console, run: RunDir) -> bool:
    """Warns of held-out rows that the runs which made the base may have trained on. Returns whether it warned."""
    why = ", and the base was merged there"
    return _warn_of_rows(console, "base_trained", lambda: known_to_base(run), "the base", why)


def warn_of_file_rows(console: Console, run: RunDir, gguf: Path) -> bool:
    """Warns of held-out rows that the run of another run's file may have trained on. Returns whether it warned."""
    why = f", and {gguf.name} comes from there"
    return _warn_of_rows(console, "file_trained", lambda: known_to_file(run, gguf), str(gguf), why)


def _warn_of_rows(console: Console, code: str, found: Callable[[], Iterator[str]], model: str, why: str) -> bool:
    again = "a run with the same data, held_out_fraction and seed holds out the same rows"
    try:
        warnings = [f"{each}{why}; {again}" for each in found()]
    except UsageError as error:  # only a warning, because the training is done
        warnings = [f"whether {model} was trained on held-out rows is not known: {error.message}"]
    for warning in warnings:
        console.warn(code, warning)
    return bool(warnings)
