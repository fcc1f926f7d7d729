"""What a finished run leaves for the next estimate. The speeds are worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

import models
import planning
from skill_train.estimate import time as estimate_time
from skill_train.estimate.step import MicroStep
from skill_train.facts import MachineFacts, ModelFacts, Reading
from skill_train.run.plan_record import Plan
from skill_train.run.train_record import StepLine
from skill_train.train import measured_speed

MACHINE = MachineFacts("Linux", "a processor", "cpu", 16 << 30, 12 << 30, None, 2, False)
MODEL = ModelFacts(
    source="models/small",
    fingerprint="f",
    model_type="llama",
    architecture="LlamaForCausalLM",
    parameters=1100,
    layers=2,
    hidden_size=4,
    vocab_size=10,
    context=64,
    stored_dtype="F32",
    quantization=None,
    has_chat_template=True,
    embedding_parameters=40,
    intermediate_size=8,
    heads=1,
    kv_heads=1,
    head_dim=4,
)
LARGER = msgspec.structs.replace(MODEL, source="models/larger", layers=3, parameters=4400)
# Three steps of 4 rows, 40 tokens, 20 of them trained. The first warms up.
LINES = [StepLine(step=1, steps=9, seconds=seconds, tokens=40, trained_tokens=20) for seconds in (9.0, 2.0, 3.0)]
# One row of 10 tokens, forward and backward (2 passes), a multiply-add counted twice:
#   the 1060 parameters that are no embedding   2 x 1060 x 10 x 2                    = 42,400
#   the adapter, 2 x (4 + 4) in 2 layers, and its own gradient   2 x 32 x 10 x 3     =  1,920
#   attention, 2 x width 4 x 10 x 10 x 2 layers x (1 + 2.5)                          =  5,600
#   the head, 10 x 4, for 5 trained tokens   2 x 40 x 5 x 2                          =    800
A_STEP = 4 * (42_400 + 1_920 + 5_600 + 800)
# What reading takes of it: 1060 weights in 2 passes, the head's 40 twice, 4 bytes each, at 4e9 bytes a core and second.
READING = 2 * (1060 * 2 + 40 * 2) * 4 / (4e9 * 2)
SPEED = 2 * A_STEP / (2.0 + 3.0 - READING)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SKILL_TRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "calibration"


def _plan(model: ModelFacts = MODEL, **placement: Any) -> Plan:
    usual = {"device": "cpu", "dtype": "float32", "gradient_checkpointing": False, "num_processes": 1}
    usual |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    recipe = {"effective_batch_size": 4, "lora_r": 2, "target_modules": ["q_proj"]}
    facts = {"model": msgspec.to_builtins(model), "machine": msgspec.to_builtins(MACHINE)}
    return planning.plan_with(facts=facts, recipe=recipe, placement=usual | placement)


def _remember(*arguments: Any, **placement: Any) -> measured_speed.Calibration | None:
    return measured_speed.remember(_plan(*arguments, **placement), LINES, "2026-11-21T10:00:00Z")


def test_the_speed_is_that_of_the_steps_after_the_first() -> None:
    found = _remember()
    assert found is not None
    assert found.flops_per_second == pytest.approx(SPEED)
    assert (found.basis, found.same_shape) == ("2 steps of small in float32, 2026-11-21", True)
    assert measured_speed.known_speeds(MACHINE, MODEL, "cpu") == {"float32": found}


def test_recomputation_counts_as_work() -> None:
    """A third pass: 2 x 1060 x 10 and 2 x 32 x 10 more, and the attention's forward again."""
    found = _remember(gradient_checkpointing=True)
    more = 4 * (21_200 + 640 + 1_600)
    assert found is not None
    assert found.flops_per_second == pytest.approx(2 * (A_STEP + more) / 5.0)


def test_reading_the_weights_is_not_the_speed() -> None:
    """A run of 4 micro-steps a step reads the weights 4 times. At a bandwidth of 1000 bytes a second that is 35.2 s of
    a step of 100: the speed is that of the other 64.8."""
    lines = [replace(line, seconds=100.0) for line in LINES]
    split = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate_time, "_CPU_READS", 500.0)
        found = measured_speed.remember(_plan(**split), lines, "2026-11-21T10:00:00Z")
    assert found is not None
    assert found.flops_per_second == pytest.approx(A_STEP / (100 - 4 * (1060 * 2 + 40 * 2) * 4 / 1000))


def test_launching_kernels_is_not_the_speed() -> None:
    """Two micro-steps of 24 layers x 3 ms, 0.144 s, and all in 0.5 s: the root of 0.25 - 0.0207 is 0.4788."""
    model, machine = msgspec.structs.replace(MODEL, layers=24), msgspec.structs.replace(MACHINE, device="cuda")
    step = MicroStep("cuda", "bfloat16", 1, 512, checkpointing=False, lora_r=0)
    assert measured_speed.computing_seconds(model, machine, 0.5, [(2, step)]) == pytest.approx(0.4788, abs=1e-4)


def test_two_readings_of_a_gpus_seconds() -> None:
    """24 layers, one micro-step without checkpointing: launches take 0.072 to 0.12 s. An A100 computes at 312 TFLOPS x
    0.30, and 1.6 times as fast or slow. 0.15 s are mostly launches: computing took its slowest, or its fastest."""
    model = msgspec.structs.replace(MODEL, layers=24, parameters=500_000_000)
    machine = msgspec.structs.replace(MACHINE, device="cuda", chip="NVIDIA A100-SXM4-80GB")
    step = MicroStep("cuda", "bfloat16", 1, 512, checkpointing=False, lora_r=0)
    flops = estimate_time.micro_step_flops(model, step)
    assert flops is not None
    computing = flops / (312e12 * 0.30)
    slow, fast = measured_speed.read_seconds(model, machine, 0.15, [(1, step)])
    assert flops / slow.speed == pytest.approx(1.6 * computing)
    assert flops / fast.speed == pytest.approx(computing / 1.6)
    for each in (slow, fast):  # each explains the seconds
        assert (flops / each.speed) ** 2 + (each.launches * 0.12) ** 2 == pytest.approx(0.15**2)
    # 1 s is more than launches and published speeds allow, 1.6 x the root of 0.12² and computing²: the GPU is slow
    slow, fast = measured_speed.read_seconds(model, machine, 1.0, [(1, step)])
    assert flops / slow.speed == pytest.approx((1 - 0.072**2) ** 0.5)
    assert flops / fast.speed == pytest.approx((1 - (1.6 * 0.12) ** 2) ** 0.5)
    unknown = msgspec.structs.replace(machine, chip="NVIDIA Something New")
    assert measured_speed.read_seconds(model, unknown, 0.15, [(1, step)]) == ()
    assert measured_speed.read_seconds(MODEL, MACHINE, 0.15, [(1, msgspec.structs.replace(step, device="cpu"))]) == ()


def test_a_step_of_many_micro_steps_is_read_as_one_of_them() -> None:
    """Launches and the 4-bit weights take their time in each micro-step."""
    model = msgspec.structs.replace(MODEL, layers=24, parameters=500_000_000)
    machine = msgspec.structs.replace(MACHINE, device="cuda", chip="NVIDIA A100-SXM4-80GB")
    step = MicroStep("cuda", "bfloat16", 1, 512, checkpointing=True, lora_r=0, four_bit=True)
    for seconds in (0.02, 0.2, 2.0):
        one, many = (measured_speed.read_seconds(model, machine, n * seconds, [(n, step)]) for n in (1, 16))
        for a, b in zip(one, many, strict=True):
            assert (a.speed, a.launches) == (pytest.approx(b.speed), pytest.approx(b.launches))


@pytest.mark.parametrize("chip", ["NVIDIA A100-SXM4-80GB", "Tesla T4"])
@pytest.mark.parametrize("four_bit", [False, True])
def test_a_measurement_as_assumed_predicts_as_is_assumed(chip: str, four_bit: bool) -> None:
    """A step of 512 tokens that took the middle of its range: one of 16 times as many is where it was without it."""
    model = models.recorded_model("qwen2.5-7b")
    machine = msgspec.structs.replace(MACHINE, device="cuda", chip=chip)
    dtype = "float16" if chip == "Tesla T4" else "bfloat16"
    step = MicroStep("cuda", dtype, 1, 512, checkpointing=True, four_bit=four_bit)
    long = msgspec.structs.replace(step, rows=16)
    assumed, before = (estimate_time.micro_step_seconds(model, each, machine, None) for each in (step, long))
    assert assumed is not None and before is not None
    middle = (assumed.low * assumed.high) ** 0.5
    readings = measured_speed.read_seconds(model, machine, middle, [(1, step)])
    measured = measured_speed.Calibration(1.0, "a run", same_shape=True, readings=readings)
    after = estimate_time.micro_step_seconds(model, long, machine, measured)
    assert after is not None and after.low < (before.low * before.high) ** 0.5 < after.high
    again = estimate_time.micro_step_seconds(model, step, machine, measured)
    assert (
        again is not None and again.low == pytest.approx(middle / 1.25) and again.high == pytest.approx(middle * 1.25)
    )


def test_a_step_that_is_quicker_than_assumed_computes_as_quickly() -> None:
    """Less than the least that launches are assumed to take, 24 x 0.003: of it all may be computing."""
    model = msgspec.structs.replace(MODEL, layers=24, parameters=500_000_000)
    machine = msgspec.structs.replace(MACHINE, device="cuda", chip="NVIDIA A100-SXM4-80GB")
    step = MicroStep("cuda", "bfloat16", 8, 512, checkpointing=False, lora_r=0)
    flops = estimate_time.micro_step_flops(model, step)
    assert flops is not None
    for seconds in (0.01, 0.05, 0.071, 0.073):
        slow, fast = measured_speed.read_seconds(model, machine, seconds, [(1, step)])
        assert flops / seconds <= slow.speed <= fast.speed
    assert slow.speed == pytest.approx(flops / min(0.073, 1.6 * flops / (312e12 * 0.30)))


def test_readings_are_kept_and_a_torn_one_is_not(cache: Path) -> None:
    _remember()
    [file] = cache.glob("*.json")
    document = json.loads(file.read_text())
    [measured] = document["shapes"].values()
    assert measured["readings"] == []
    measured["readings"] = [{"speed": 2e12, "launches": 0.5}, {"speed": 4e12, "launches": 1.5}]
    file.write_text(json.dumps(document))
    kept = measured_speed.known_speeds(MACHINE, MODEL, "cpu")["float32"].readings
    assert kept == (Reading(2e12, 0.5), Reading(4e12, 1.5))
    for torn in ({"speed": 0.0, "launches": 0.5}, {"speed": 1.0, "launches": -1.0}, {"speed": 1.0}, "x"):
        measured["readings"] = [torn]
        file.write_text(json.dumps(document))
        assert measured_speed.known_speeds(MACHINE, MODEL, "cpu") == {}, torn
    del measured["readings"]  # as earlier versions wrote it
    file.write_text(json.dumps(document))
    assert measured_speed.known_speeds(MACHINE, MODEL, "cpu")["float32"].readings == ()


def test_another_shape_is_a_hint_when_it_is_of_about_that_size() -> None:
    _remember()
    _remember(LARGER)
    same = measured_speed.known_speeds(MACHINE, MODEL, "cpu")["float32"]
    assert (same.same_shape, same.flops_per_second) == (True, pytest.approx(SPEED))
    for parameters, nearest in ((300, "small"), (2000, "small"), (3000, "larger"), (17_000, "larger")):
        other = msgspec.structs.replace(MODEL, hidden_size=8, parameters=parameters)
        found = measured_speed.known_speeds(MACHINE, other, "cpu")["float32"]
        assert (found.same_shape, found.basis.split(" in ")[0]) == (False, f"2 steps of {nearest}")
    for parameters in (270, 18_000, None):  # more than four times away from both, or unknown
        other = msgspec.structs.replace(MODEL, hidden_size=8, parameters=parameters)
        assert measured_speed.known_speeds(MACHINE, other, "cpu") == {}


def test_the_newest_run_of_a_shape_counts() -> None:
    _remember()
    slower = [replace(line, seconds=(line.seconds or 0) * 2) for line in LINES]
    measured_speed.remember(_plan(), slower, "2026-11-22T10:00:00Z")
    found = measured_speed.known_speeds(MACHINE, MODEL, "cpu")["float32"]
    assert (found.flops_per_second, found.basis[-10:]) == (pytest.approx(SPEED / 2), "2026-11-22")


def test_a_short_run_does_not_replace_a_longer_one() -> None:
    """Two settled steps against nine; ten are always enough."""
    measured_speed.remember(_plan(), LINES[:1] + LINES[1:2] * 9, "2026-11-21T10:00:00Z")
    assert _remember() is None
    assert measured_speed.known_speeds(MACHINE, MODEL, "cpu")["float32"].basis.startswith("9 steps")
    for steps, kept in ((30, 30), (9, 30), (10, 10)):
        measured_speed.remember(_plan(), LINES[:1] + LINES[1:2] * steps, "2026-11-22T10:00:00Z")
        assert measured_speed.known_speeds(MACHINE, MODEL, "cpu")["float32"].basis.startswith(f"{kept} steps")


def test_the_first_step_of_each_start_warms_up() -> None:
    seconds = [(9.0, 1), (2.0, 1), (3.0, 1), (90.0, 2), (2.0, 2), (3.0, 2)]
    lines = [replace(LINES[0], seconds=taken, start=start) for taken, start in seconds]
    found = measured_speed.remember(_plan(), lines, "2026-11-21T10:00:00Z")
    assert found is not None and found.flops_per_second == pytest.approx(SPEED)


def test_another_machine_device_or_dtype_says_nothing() -> None:
    _remember(dtype="bfloat16")
    assert measured_speed.known_speeds(MACHINE, MODEL, "cpu").keys() == {"bfloat16"}
    assert measured_speed.known_speeds(MACHINE, MODEL, "mps") == {}
    for change in ({"chip": "another"}, {"cores": 4}, {"system": "Darwin"}):
        assert measured_speed.known_speeds(msgspec.structs.replace(MACHINE, **change), MODEL, "cpu") == {}


@pytest.mark.parametrize("lines", [LINES[:2], [], [replace(line, seconds=None) for line in LINES]])
def test_a_run_too_short_to_tell_is_not_kept(lines: list[StepLine], cache: Path) -> None:
    assert measured_speed.remember(_plan(), lines, "2026-11-21T10:00:00Z") is None
    assert not cache.exists()


def test_several_processes_are_not_kept(cache: Path) -> None:
    assert _remember(num_processes=2) is None
    assert not cache.exists()


def test_an_unknown_shape_is_not_kept(cache: Path) -> None:
    assert _remember(msgspec.structs.replace(MODEL, layers=None)) is None
    assert not cache.exists()


def _cache(schema: str = measured_speed.SCHEMA, **entry: Any) -> str:
    usual = {"flops_per_second": 1.0, "basis": "a run", "parameters": 1100}
    return json.dumps({"schema": schema, "shapes": {"a shape": usual | entry}})


TORN = [
    "",
    _cache()[:-9],
    "[]",
    json.dumps({"schema": measured_speed.SCHEMA, "shapes": []}),
    json.dumps({"schema": measured_speed.SCHEMA, "shapes": {"a shape": None}}),
    _cache("skill-train/calibration/0"),
    _cache(flops_per_second="fast"),
    _cache(flops_per_second=0),
    _cache(parameters=None),
    _cache(basis=""),
]


@pytest.mark.parametrize("kept", TORN)
def test_a_torn_or_old_cache_says_nothing_and_is_written_again(kept: str, cache: Path) -> None:
    _remember()
    (path,) = cache.iterdir()
    path.write_text(_cache())
    assert measured_speed.known_speeds(MACHINE, MODEL, "cpu").keys() == {"float32"}
    path.write_text(kept)
    assert measured_speed.known_speeds(MACHINE, MODEL, "cpu") == {}
    found = _remember()
    assert measured_speed.known_speeds(MACHINE, MODEL, "cpu") == {"float32": found}


def test_a_cache_that_cannot_be_written_does_not_fail_the_run(cache: Path) -> None:
    cache.parent.write_text("a file")
    found = _remember()
    assert found is not None and found.flops_per_second == pytest.approx(SPEED)
    assert measured_speed.known_speeds(MACHINE, MODEL, "cpu") == {}
