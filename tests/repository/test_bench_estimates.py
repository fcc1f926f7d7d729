"""The promise of the estimates, on the measurements in the repository: in the range always, near in the middle."""

from __future__ import annotations

import json
import os
from pathlib import Path
from statistics import median
from types import ModuleType

import pytest

from by_path import load
from skill_train.estimate import published as estimate_published
from skill_train.program.split import Data

BENCH = Path(__file__).resolve().parents[2] / "bench" / "estimates"


@pytest.fixture(scope="module")
def compare() -> ModuleType:
    return _program("compare")


def _program(name: str) -> ModuleType:
    return load(BENCH / f"{name}.py", name)


def test_what_is_measured_is_fed_all_that_the_training_program_reads() -> None:
    measure = _program("measure")
    configuration = measure.configurations("cpu")[0]
    assert measure._data(configuration, {"effective_batch_size": 1}).keys() == Data.__annotations__.keys()


@pytest.mark.slow
def test_a_line_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2, smaller: the program runs, and its line has the fields of those in measured.jsonl."""
    measure = _program("measure")
    sizes = {"hidden_size": 36, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 512}
    shape = measure.SHAPES["SmolLM2-135M"]
    monkeypatch.setitem(measure.SHAPES, "SmolLM2-135M", shape | {"config": shape["config"] | sizes})
    configuration = measure.Configuration("cpu", "SmolLM2-135M", "float32", 256, 1, True)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    measure._save_model(configuration, tmp_path / "model")
    line = measure.measure(configuration, tmp_path / "model")
    recorded = [json.loads(text) for text in measure.RESULTS.read_text(encoding="utf-8").splitlines()]
    assert line.keys() == recorded[0].keys() and line["name"] == "cpu SmolLM2-135M float32 1x256 checkpointing"
    # by hand, of both layers: q and o 36x36, k and v 36x12, r 16 each
    assert line["trainable_parameters"] == 2 * 16 * (2 * (36 + 36) + 2 * (36 + 12))
    assert line["seconds_per_micro_step"] > 0


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


def test_a_short_step_on_a_gpu_says_little_of_a_long_one(compare: ModuleType) -> None:
    """The GPU waits for launches in 4 rows of 512 tokens. Taken for computing, their time made 4 rows of 2,048 tokens,
    and one of 8,192, up to 4.4 times as long as they were."""
    lines = {line["name"]: line for line in compare.measured()}
    for size in ("1.5B", "3B"):
        name = f"cuda Qwen2.5-{size} bfloat16"
        for longer in ("4x2048", "4x2048 checkpointing", "1x8192", "1x8192 checkpointing"):
            row = compare.calibrated(lines[f"{name} {longer}"], lines[f"{name} 4x512 checkpointing"])
            assert row.inside, row
            assert row.estimate.high / row.actual < 3


def test_full_fine_tuning_is_among_what_was_measured_and_published(compare: ModuleType) -> None:
    """Seed, hardware guide, A100: 7B full in bf16 about 56 GB, 13B about 104; LLaMA-Factory's README: 60 and 120 GB."""
    names = [row.name for row in compare.memory_rows() if "full" in row.name]
    assert sum(name.startswith("cpu") for name in names) >= 4 and sum(name.startswith("cuda") for name in names) >= 6
    published = {row.name: row for row in compare.published("memory") if row.name.split(":")[-1].count("B full")}
    assert {row.actual / 1e9 for row in published.values()} == {56, 60, 104, 120}
    assert max(abs(row.error) for row in published.values()) <= 0.10
    assert published["seed: 7B full in bf16"].inside


def test_published_figures_are_all_there(compare: ModuleType) -> None:
    memory, seconds = compare.published("memory"), compare.published("seconds")
    assert len(memory) >= 15 and len(seconds) == 4
    assert all("http" in row.note or "README" in row.note or "seed" in row.note or "wiki" in row.note for row in memory)


def test_the_range_on_cuda_is_what_the_published_runs_say(compare: ModuleType) -> None:
    """What the package holds is what the command computes from published.json."""
    spread, runs, worst = compare.spread_of(compare.residuals())
    assert (spread, runs) == (estimate_published.SPREAD, estimate_published.RUNS)
    assert len(compare.residuals()) == estimate_published.SOURCES
    assert worst == pytest.approx(estimate_published.WORST, abs=0.01) and worst <= estimate_published.WORST
    assert compare.proven() == estimate_published.PROVEN


def test_a_source_that_is_left_out_lies_inside_the_stated_range(compare: ModuleType) -> None:
    """Three sources, each judged by what the others alone would say, and no narrower than 30 %."""
    for source, rows, others in compare.sources_left_out():
        assert all(abs(off) <= max(0.30, others) for off in rows), (source, rows)
    assert compare.spread_of({"one": [0.05, -0.41], "two": [0.1]}) == (0.41, 3, 0.41)  # wider where they say so


def test_each_published_run_is_counted_with_its_own_head_or_left_out_with_a_reason(compare: ModuleType) -> None:
    """By hand, Qwen-1.8B at 4,096 tokens: 4096 x 151,936 words x 12 to 16 bytes = 7.5 to 10.0 GB of logits."""
    rows = compare.published_rows("memory")
    assert all(row.get("left_out") or row.get("printed") for row in rows)
    qwen = next(row for row in rows if row["name"] == "Qwen 1.8B LoRA 1x4096")
    logits = next(part for part in compare._counted(qwen) if part.name == "logits")
    assert (logits.low / 1e9, logits.high / 1e9) == (pytest.approx(7.47, abs=0.01), pytest.approx(9.96, abs=0.01))
    torchtune = next(row for row in rows if row["name"] == "torchtune 8B LoRA")  # torch's own count: no context
    assert not {"framework", "fragmentation"} & {part.name for part in compare._counted(torchtune)}


def test_a_published_figure_is_read_at_most(compare: ModuleType) -> None:
    """By hand: "17 GB" may be 17.5 GiB, 18.79e9 bytes."""
    runs = {run.name: run for run in compare.proven()}
    assert runs["LLaMA-Factory 7B LoRA 4x1024"].took == 18_790_481_920
    # torch's 16.25 GiB of an 8B base, the context, and activations and adapter that torch.compile and bf16 made smaller
    assert runs["torchtune 8B LoRA"].took > 16.25 * 2**30 + 0.75e9


def test_the_page_shows_what_the_command_prints(compare: ModuleType) -> None:
    page = (BENCH / "README.md").read_text(encoding="utf-8")
    assert compare.report() in page


def test_a_peak_outside_its_range_is_told(compare: ModuleType, monkeypatch, capsys) -> None:
    line = compare.measured()[0]
    monkeypatch.setattr(compare, "measured", lambda: [line | {"peak_bytes": 10 * line["peak_bytes"]}])
    assert compare.main([]) == 1
    assert "| no |" in capsys.readouterr().out
