"""Compares the estimates of a run with its measurements."""

from __future__ import annotations

from typing import TypedDict

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
