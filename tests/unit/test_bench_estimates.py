"""The promise of the estimates, on the measurements in the repository: in the range always, near in the middle."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from statistics import median
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench" / "estimates"


@pytest.fixture(scope="module")
def compare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare", BENCH / "compare.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["compare"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_measured_peaks_lie_inside_the_range(compare: ModuleType) -> None:
    rows = compare.memory_rows()
    assert len(rows) >= 24
    assert len({line["configuration"]["shape"] for line in compare.measured()}) >= 4
    assert [row.name for row in rows if not row.inside] == []
    errors = [abs(row.error) for row in rows]
    assert median(errors) <= 0.10
    assert max(errors) <= 0.25


def test_a_range_is_narrow_enough_to_decide_with(compare: ModuleType) -> None:
    """Everything lies in a range from nothing to infinity; these end at most 2.5 times above where they start."""
    assert max(row.estimate.high / row.estimate.low for row in compare.memory_rows()) < 2.5


def test_times_before_and_after_calibration(compare: ModuleType) -> None:
    before, after = compare.time_rows(), compare.calibrated_rows()
    assert len(before) >= 24 and len(after) >= 16
    assert [row.name for row in before if not 0.5 <= row.estimate.middle / row.actual <= 2] == []
    errors = [abs(row.error) for row in after]
    assert median(errors) <= 0.10
    assert max(errors) <= 0.25
    assert sum("1x128" in row.name for row in after) >= 4  # the short ones too
    assert [row.name for row in before if not row.inside] == []


def test_full_fine_tuning_is_among_what_was_measured_and_published(compare: ModuleType) -> None:
    """Seed, hardware guide, A100: 7B full in bf16 about 56 GB, 13B about 104; LLaMA-Factory's README: 60 and 120 GB."""
    assert sum("full" in row.name for row in compare.memory_rows()) >= 4
    published = {row.name: row for row in compare.published("memory") if row.name.split(":")[-1].count("B full")}
    assert {row.actual / 1e9 for row in published.values()} == {56, 60, 104, 120}
    assert max(abs(row.error) for row in published.values()) <= 0.10
    assert published["seed: 7B full in bf16"].inside


def test_published_figures_are_all_there(compare: ModuleType) -> None:
    memory, seconds = compare.published("memory"), compare.published("seconds")
    assert len(memory) >= 15 and len(seconds) == 4
    assert all("http" in row.note or "README" in row.note or "seed" in row.note or "wiki" in row.note for row in memory)


def test_the_page_shows_what_the_command_prints(compare: ModuleType) -> None:
    page = (BENCH / "README.md").read_text(encoding="utf-8")
    assert compare.report() in page


def test_a_peak_outside_its_range_is_told(compare: ModuleType, monkeypatch, capsys) -> None:
    line = compare.measured()[0]
    monkeypatch.setattr(compare, "measured", lambda: [line | {"peak_bytes": 10 * line["peak_bytes"]}])
    assert compare.main([]) == 1
    assert "| no |" in capsys.readouterr().out
