"""What was estimated of a run beside what was measured."""

from __future__ import annotations

from typing import Any


def measured_beside_estimates(plan: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """What was estimated beside what was measured. Nothing was estimated of the smaller layout of a second try."""
    figures = record["figures"]
    peaks = figures["peak_memory_bytes"]
    device = plan["placement"]["device"]
    measured = {"memory_bytes": peaks.get(device, peaks.get("rss")), "seconds": record["seconds"]}
    estimates = {} if record.get("smaller_layout") else plan.get("estimates", {})
    return {
        key: {
            "low": estimates.get(key, {}).get("low"),
            "high": estimates.get(key, {}).get("high"),
            "actual": value,
            "within": _within(estimates.get(key, {}), value),
        }
        for key, value in measured.items()
    }


def _within(estimate: dict[str, Any], value: float | None) -> bool | None:
    if value is None or estimate.get("low") is None:
        return None
    return bool(estimate["low"] <= value <= estimate["high"])
