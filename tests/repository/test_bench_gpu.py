"""bench/gpu says what it measures: operations by hand and as TRL counts them, figures of steps, targets met or not."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from by_path import load

FOLDER = Path(__file__).resolve().parents[2] / "bench" / "gpu"


@pytest.fixture(scope="module")
def measure() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])  # it puts bench/ there
        return load(FOLDER / "measure.py", "bench_gpu")


def test_operations_of_a_token(measure: ModuleType) -> None:
    """Qwen2.5-7B, rows of 1,000 tokens. TRL counts 6 for each weight and the whole matrix of attention three times, of
    a training of all weights; of frozen ones no gradients are made, and half of attention is masked."""
    from transformers import AutoConfig
    from trl.trainer.utils import compute_flops_per_token

    config = measure.models.config_of("7B")
    layer = 2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944
    weights = 28 * layer + 152064 * 3584
    attention = 2 * 1000 * 3584 * 28
    assert measure.flops_per_token(config, 1000) == 4 * weights + 3 * attention
    assert compute_flops_per_token(AutoConfig.for_model(**config), 1000) == 6 * weights + 2 * 3 * attention


def test_figures_leave_the_first_steps_out(measure: ModuleType) -> None:
    steps = [
        {"tokens": 800, "seconds": seconds, "loss": 3.0 - n, "memory_bytes": {"cuda": 5 + n}}
        for n, seconds in enumerate((9.0, 9.0, 1.0, 3.0))
    ]
    found = measure.figures(steps, 30.0)
    assert (found["tokens_per_second"], found["length"], found["peak_bytes"]) == (400.0, 100.0, 8)
    assert measure.figures([{**step, "memory_bytes": {}} for step in steps], 30.0)["peak_bytes"] is None


@pytest.mark.parametrize(
    ("ours", "share", "met"),
    [(1500.0, 45.0, [True, True]), (1489.0, 44.9, [False, False]), (1500.0, None, [True, None])],
)
def test_targets(measure: ModuleType, ours: float, share: float | None, met: list[bool | None]) -> None:
    """1,500 of 1,000 is 1.5 times; 1,489 is 1.49."""
    rows: list[dict[str, Any]] = [
        {"size": "7B LoRA", "way": "ours", "tokens_per_second": ours, "utilisation_percent": share},
        {"size": "7B LoRA", "way": "trl", "tokens_per_second": 1000.0, "utilisation_percent": 30.0},
    ]
    assert [target["met"] for target in measure.targets(rows)] == met
    assert [(target["met"], target["why"]) for target in measure.targets([])] == [(None, "no GPU was at hand")] * 2


def test_without_a_gpu_what_was_measured_stays(
    measure: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_gpu_name", lambda: None)
    monkeypatch.setattr(sys, "argv", ["measure.py", "--out", str(tmp_path / "results.json")])
    (tmp_path / "results.json").write_text("{}")
    assert measure.main() == 0
    assert (tmp_path / "results.json").read_text() == "{}"


def test_an_unknown_job_is_refused_before_anything_is_made(
    measure: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["measure.py", "--device", "cpu", "--only", "7B", "--out", str(tmp_path / "r")])
    with pytest.raises(SystemExit):
        measure.main()
    assert "unknown: 7B; expected some of 1.5B LoRA, 7B LoRA" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()
