"""bench/training says what it measures: the shapes are the published ones, and a target is met or not by its figure."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from by_path import load

FOLDER = Path(__file__).resolve().parents[2] / "bench" / "training"


@pytest.fixture(scope="module")
def measure() -> ModuleType:
    return load(FOLDER / "measure.py", "bench_training")


@pytest.mark.parametrize(("size", "count"), [("0.5B", 494_032_768), ("1.5B", 1_543_714_304)])
def test_the_shapes_are_those_of_qwen(measure: ModuleType, size: str, count: int) -> None:
    """The parameters that the Hub shows for the safetensors of Qwen/Qwen2.5-0.5B and -1.5B (read 2026-11)."""
    assert measure.parameters(measure.SIZES[size]) == count


@pytest.mark.parametrize(
    ("ours", "seed", "met"),
    [
        ((130.0, 2.0e9, [12.0, 11.0]), (52.0, 3.7e9, [12.0, 11.0]), [True, True, True]),
        ((129.0, 3.8e9, [12.0, 11.06]), (52.0, 3.7e9, [12.0, 11.0]), [False, False, False]),
    ],
)
def test_targets(measure: ModuleType, ours: Any, seed: Any, met: list[bool]) -> None:
    """130 / 52 is 2.5, 129 / 52 is 2.48; 11.06 is 0.55 % off 11."""
    keys = ("tokens_per_second", "peak_bytes", "losses")
    rows = [
        {"size": "0.5B", "way": way, **dict(zip(keys, figures, strict=True))}
        for way, figures in (("ours", ours), ("seed", seed))
    ]
    by_name = {target["name"]: target["met"] for target in measure.targets(rows)}
    names = ("tokens/s", "loss of each step", "peak memory")
    assert {f"training 0.5B, {name}": one for name, one in zip(names, met, strict=True)}.items() <= by_name.items()
    assert by_name["training 41M in float32, whole command"] is None
