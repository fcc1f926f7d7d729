"""The page of the pixels' measurement is what its results say, and what references/vision.md says of them too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from by_path import load

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench" / "pixels"


@pytest.fixture(scope="module")
def measure() -> Any:
    return load(BENCH / "measure.py", "bench_pixels")


def test_the_page_is_what_the_results_say(measure: Any) -> None:
    text = (BENCH / "README.md").read_text(encoding="utf-8")
    shown = text.split(measure.MARKS[0])[1].split(measure.MARKS[1])[0].strip("\n")
    assert shown == measure.table(_results()), "python bench/pixels/measure.py --page"


def test_every_task_was_measured_both_ways_on_the_same_seeds(measure: Any) -> None:
    rows = _results()["rows"]
    for name in measure.TASKS:
        seeds = {way: [row["seed"] for row in rows if (row["task"], row["way"]) == (name, way)] for way in measure.WAYS}
        assert seeds["model"] == seeds["engine"] and seeds["model"], name


def test_trained_on_the_engines_pixels_both_programs_answer_alike() -> None:
    for row in _results()["rows"]:
        if row["way"] == "engine":
            assert abs(row["right_transformers"] - row["right_llama.cpp"]) <= 0.02, row
            assert row["loss_llama.cpp"] == pytest.approx(row["loss_transformers"], abs=0.002), row


def test_pictures_are_drawn_again_from_the_same_seed(measure: Any, tmp_path: Path) -> None:
    task = measure.TASKS["gemma3, shape"]
    for name in ("a", "b"):
        measure.write_rows(tmp_path / name, task, 0)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def _results() -> Any:
    return json.loads((BENCH / "results.json").read_text(encoding="utf-8"))
