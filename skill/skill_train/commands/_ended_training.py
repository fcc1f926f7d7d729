"""A training that has ended: its estimates beside its measurements, and the error of its smoke test."""

from __future__ import annotations

from typing import TypedDict

from skill_train.commands._shell import quoted
from skill_train.core.errors import TrainingFailed
from skill_train.run.folder import RunDir
from skill_train.run.plan_record import Estimate, Number, Plan
from skill_train.run.train_record import TrainRecord


class MeasuredFigure(TypedDict):
    """`within` is None where the estimate or the measurement is unknown."""

    low: Number | None
    high: Number | None
    actual: Number | None
    within: bool | None


def measured_beside_estimates(plan: Plan, record: TrainRecord) -> dict[str, MeasuredFigure]:
    """The measurements beside the estimates. The smaller layout of a second try has no estimates."""
    peaks = record.figures.peak_memory_bytes
    device = plan.placement.device
    measured = {"memory_bytes": peaks.get(device, peaks.get("rss")), "seconds": record.seconds}
    estimates = {"memory_bytes": plan.estimates.memory_bytes, "seconds": plan.estimates.seconds}
    if record.smaller_layout:
        estimates = dict.fromkeys(estimates, Estimate(None, None, "the layout was made smaller"))
    return {
        key: {
            "low": estimate.low,
            "high": estimate.high,
            "actual": measured[key],
            "within": _within(estimate, measured[key]),
        }
        for key, estimate in estimates.items()
    }


def _within(estimate: Estimate, value: float | None) -> bool | None:
    if value is None or estimate.low is None or estimate.high is None:
        return None
    return estimate.low <= value <= estimate.high


def smoke_failure(run: RunDir, record: TrainRecord) -> TrainingFailed | None:
    """The error of a finished run, local or a job, whose smoke checks failed."""
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
