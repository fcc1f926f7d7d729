"""The tables of bench/README.md are those of the results, and a target is met only when its figure says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from by_path import load

pytestmark = pytest.mark.real_python

BENCH = Path(__file__).resolve().parents[2] / "bench"


def module(file: Path) -> Any:
    return load(file, f"bench_{file.stem}")


run = module(BENCH / "run.py")


def test_the_page_is_what_the_results_say() -> None:
    text = (BENCH / "README.md").read_text(encoding="utf-8")
    shown = text.split(run.MARKS[0])[1].split(run.MARKS[1])[0].strip("\n")
    assert shown == run.page(), "python bench/run.py --page"


@pytest.mark.parametrize("one", run.results(), ids=lambda one: one["bench"])
def test_results_keep_the_form(one: dict[str, Any]) -> None:
    assert (BENCH / one["bench"] / "measure.py").is_file()
    assert {"date", "hardware", "versions", "rows", "targets"} <= set(one)
    for target in one["targets"]:
        assert {"name", "target", "measured", "unit", "met"} <= set(target)
        assert (target["met"] is None) == (target["measured"] is None)


def test_a_target_is_judged_by_its_figure() -> None:
    target = module(BENCH / "side.py").target
    assert target("a", "at most 2", 1.9, 2.0, "x")["met"] is True
    assert target("a", "at most 2", 2.1, 2.0, "x")["met"] is False
    assert target("a", "at most 2", None, 2.0, "x")["met"] is None


@pytest.mark.slow
def test_a_program_that_hangs_ends_with_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "measure.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(run, "HERE", tmp_path)
    assert run.run_all(["slow"], 1.0, False) == ["slow"]


@pytest.mark.parametrize(("budget", "arguments"), [(1200.0, ""), (600.0, "--rounds 1")])
def test_training_runs_once_where_little_time_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: float, arguments: str
) -> None:
    """All its rounds took 1,050 s in a slow hour of 2 cores (2026-11-23), one of them 600."""
    (tmp_path / "training").mkdir()
    program = "import pathlib, sys\npathlib.Path(__file__).with_name('seen').write_text(' '.join(sys.argv[1:]))\n"
    (tmp_path / "training" / "measure.py").write_text(program)
    monkeypatch.setattr(run, "HERE", tmp_path)
    assert run.run_all(["training"], budget, False) == []
    assert (tmp_path / "training" / "seen").read_text() == arguments


@pytest.mark.slow
def test_what_is_timed_at_the_start_still_works() -> None:
    """A measurement that ends with a traceback is else found by whoever measures next. No results are written."""
    program = [sys.executable, str(BENCH / "startup" / "measure.py"), "--rounds", "1", "--only", "skill-train"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    timed = [line.split("  ")[0] for line in done.stdout.splitlines() if line.startswith("skill-train")]
    rows = next(one["rows"] for one in run.results() if one["bench"] == "startup")
    assert timed == [row["command"] for row in rows if row["command"].startswith("skill-train")]
