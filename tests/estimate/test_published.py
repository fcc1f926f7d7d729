"""The range of CUDA memory, and what a published run proves to fit."""

from __future__ import annotations

import msgspec
import pytest

from machines import recorded_machine
from models import recorded_model
from planning import decided
from skill_train.estimate.memory import training_memory
from skill_train.estimate.published import Proven, proven_bytes, spread
from skill_train.estimate.step import MicroStep, Part, total

STEP = MicroStep("cuda", "bfloat16", 4, 1024, checkpointing=True, trained_share=0.5)
EIGHT = recorded_model("llama-3.1-8b")


@pytest.mark.parametrize(
    "step", [STEP, msgspec.structs.replace(STEP, four_bit=True), msgspec.structs.replace(STEP, full=True)]
)
def test_the_range_is_no_narrower_than_30_percent(step: MicroStep) -> None:
    """By hand, around the middle of what is counted; but of weights whose number is known nothing is taken away."""
    parts = training_memory(EIGHT, step)
    assert parts is not None
    counted = [part for part in parts if part.name != "spread"]
    middle, found = total(counted, "").middle, total(parts, "")
    assert found.high == pytest.approx(1.3 * middle)
    weights = next(part.low for part in counted if part.name == "weights")
    assert found.low == pytest.approx(max(0.7 * middle, weights))


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_only_cuda_waits_for_measurements(device: str) -> None:
    parts = training_memory(EIGHT, msgspec.structs.replace(STEP, device=device))
    assert parts is not None and "spread" not in {part.name for part in parts}


def test_what_is_counted_is_never_cut_off() -> None:
    """From 10 to 30 GB, the middle 20: 14 to 26 would be narrower than what the terms say themselves."""
    part = spread([Part("activations", 10e9, 30e9, "")])
    assert (part.low, part.high) == (0, 0)


def test_a_run_that_needs_as_much_proves_it() -> None:
    """Llama 3.1 8B: LLaMA-Factory's 7B with 4 x 1,024 tokens took 17 GB, 18.79e9 bytes as GiB at most. 8,030,261,248 of
    its weights for 6,738,415,616 are 2.58 GB more."""
    parts = training_memory(EIGHT, STEP)
    assert parts is not None
    found = proven_bytes(STEP, parts)
    assert found is not None and found[1] == "LLaMA-Factory 7B LoRA 4x1024"
    assert found[0] == pytest.approx(18.79e9 + 2 * (8_030_261_248 - 6_738_415_616), rel=0.001)


@pytest.mark.parametrize(
    "step",
    [
        msgspec.structs.replace(STEP, full=True),
        msgspec.structs.replace(STEP, shards=2),
        msgspec.structs.replace(STEP, rows=16, checkpointing=False),  # more than any published run's passes
    ],
)
def test_what_was_not_published_proves_nothing(step: MicroStep) -> None:
    parts = training_memory(EIGHT, step)
    assert parts is not None and proven_bytes(step, parts) is None


def test_attention_that_is_written_out_was_not_published() -> None:
    gemma = recorded_model("gemma-2-2b")
    parts = training_memory(gemma, STEP)
    assert parts is not None and proven_bytes(STEP, parts) is None


def test_a_run_of_the_other_kind_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Proven("4-bit", True, 6 * 10**9, 10**9, 9 * 10**9, 12 * 10**9)
    monkeypatch.setattr("skill_train.estimate.published.PROVEN", (run,))
    for four_bit in (False, True):
        step = msgspec.structs.replace(STEP, four_bit=four_bit)
        parts = training_memory(EIGHT, step)
        assert parts is not None and (proven_bytes(step, parts) is not None) == four_bit


def test_4_bit_weights_must_not_be_more_than_the_runs() -> None:
    """14B in 4 bit is 8 GB of weights or more; the largest such run that was published had 8B, in 5.8 GB."""
    step = msgspec.structs.replace(STEP, four_bit=True, rows=1)
    for name, proven in (("llama-3.1-8b", True), ("qwen2.5-14b", False)):
        parts = training_memory(recorded_model(name), step)
        assert parts is not None and (proven_bytes(step, parts) is not None) == proven, name


def test_the_plan_names_the_run_that_proves_it() -> None:
    """torchtune and the guide: 7B and 8B train on 24 GB. The range goes on to say what is not sure."""
    plan = decided("llama-3.1-8b", "rtx_4090")
    memory, usable = plan["estimates"]["memory_bytes"], plan["estimates"]["usable_bytes"]
    assert plan["where"] == "local" and plan["blockers"] == []
    assert memory["high"] > usable
    said = {reason["rule"]: reason["because"] for reason in plan["reasons"]}
    for rule in ("memory", "batch", "gradient_checkpointing"):
        assert said[rule].endswith("GB by what was published of LLaMA-Factory 7B LoRA 4x1024"), said[rule]
    small = decided("qwen2.5-0.5b", "rtx_4090")
    assert not any("published" in reason["because"] for reason in small["reasons"] if reason["rule"] == "batch")


@pytest.mark.parametrize(
    ("machine", "meant"),
    [("rtx_4090", "nvidia-smi"), ("m2_pro_16gb", "Metal's driver"), ("bare_cpu", "resident memory of the process")],
)
def test_the_range_says_which_memory_is_meant(machine: str, meant: str) -> None:
    plan = decided("qwen2.5-0.5b", recorded_machine(machine), where="local")
    assert meant in plan["estimates"]["memory_bytes"]["basis"]
