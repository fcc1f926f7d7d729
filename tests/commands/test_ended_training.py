"""What is said of a training that has ended."""

from __future__ import annotations

import pytest

from skill_train.commands._ended_training import MeasuredFigure, _missed


@pytest.mark.parametrize(
    ("name", "low", "high", "actual", "said"),
    [
        ("seconds", 6.0, 54.8, 55.2, "time: 55 s, just outside the estimated 6 s to 55 s"),
        ("seconds", 36.0, 110.0, 130.0, "time: 2 min, just outside the estimated 36 s to 2 min"),
        ("seconds", 36.0, 110.0, 400.0, "time: 7 min, estimated 36 s to 2 min"),
        ("memory_bytes", 5.0e8, 9.8e8, 4.99e8, "memory: 0.50 GB, just outside the estimated 0.50 to 0.98 GB"),
        ("memory_bytes", 5.0e8, 9.8e8, 2e9, "memory: 2.00 GB, estimated 0.50 to 0.98 GB"),
    ],
)
def test_a_near_miss_does_not_read_as_a_hit(name: str, low: float, high: float, actual: float, said: str) -> None:
    figure = MeasuredFigure(low=low, high=high, actual=actual, within=False)
    assert _missed(name, figure) == said
