"""The tables of bench/quantize/README.md are those of its results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from by_path import load

BENCH = Path(__file__).resolve().parents[2] / "bench" / "quantize"


def test_the_page_is_what_the_results_say() -> None:
    measure = _measure()
    results = json.loads((BENCH / "results.json").read_text(encoding="utf-8"))
    text = (BENCH / "README.md").read_text(encoding="utf-8")
    shown = text.split(measure.MARKS[0])[1].split(measure.MARKS[1])[0].strip("\n")
    assert shown == measure.tables(results), "python bench/quantize/measure.py --page"
    assert results["targets"] == measure.targets(results["rows"])


def _measure() -> Any:
    """The program, under a name of its own: other benches have a `measure` too."""
    return load(BENCH / "measure.py", "bench_quantize")
