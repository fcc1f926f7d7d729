"""The measurements of bench/ run from end to end on their smallest model, so that none is left behind by a change. What
takes long is not asked here, and no results are written. `make test` runs one, `make walks` all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from by_path import load

pytestmark = [pytest.mark.slow, pytest.mark.real_python]  # whose memory is measured

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.parametrize(
    "name, other, figures",
    [
        pytest.param("merge", "PEFT", {"gate_seconds", "memory_ratio"}, marks=pytest.mark.torture),
        pytest.param("export", "four programs", {"disk_ratio", "peak_disk_bytes"}, marks=pytest.mark.torture),
        pytest.param("verify", "export", {"perplexity", "mean_kl_q4_k_m"}, marks=pytest.mark.torture),
    ],
)
def test_a_measurement_of_the_smallest_model(
    name: str, other: str, figures: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every way was run and timed, each row has what bench/README.md prints, and 10M is held against no target."""
    measure = _program(name, monkeypatch)
    rows = measure.measure("10M", tmp_path, 1)
    ways = {row["what"]: row for row in rows}
    ours = next(row for what, row in ways.items() if what != other)
    assert set(ways) == {other, ours["what"]}
    assert all(row["seconds"] > 0.1 and row["peak_bytes"] > 1e8 for row in rows)
    assert figures <= set(ours)
    assert ours["time_ratio"] == pytest.approx(ours["seconds"] / ways[other]["seconds"], abs=0.01)
    assert ours.get("verdict", "pass") == "pass"
    assert {one["measured"] for one in measure.targets(rows)} == {None}


def test_the_measurement_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours and the peer's way look at both files, and both see that each took time and memory."""
    measure = _program("data", monkeypatch)
    rows = measure.measure(tmp_path, 1, 1000, ["ours", "peer"])
    ways = ("datasets.load_dataset", "skill-train data")
    assert sorted((row["way"], row["rows"]) for row in rows) == [(way, count) for way in ways for count in (100, 1000)]
    assert all(one["measured"] > 0 for one in measure.targets(rows))


@pytest.mark.torture
def test_the_measurement_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways train the same rows in the same order, so the losses are about those of one model; TRL ends each row of
    plain text, as the seed has them, with one more token."""
    measure = _program("training", monkeypatch)
    ours, seed = measure.measure("10M", tmp_path, ["ours", "seed", "trl"], 1)  # trl is measured at 41M alone
    assert (ours["way"], seed["way"]) == ("ours", "seed")
    assert seed["tokens"] == ours["tokens"] + 4 * 8 > 1000
    assert all(row["tokens_per_second"] > 10 and row["peak_bytes"] > 1e8 for row in (ours, seed))
    assert len(ours["losses"]) == 4 and ours["losses"] == pytest.approx(seed["losses"], rel=2e-4)
    assert {one["measured"] for one in measure.targets([ours, seed])} == {None}


def _program(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    return load(BENCH / name / "measure.py", f"measure_{name}")
