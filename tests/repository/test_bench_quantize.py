"""The tables of bench/quantize/README.md are those of its results."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

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
    spec = importlib.util.spec_from_file_location("bench_quantize", BENCH / "measure.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
