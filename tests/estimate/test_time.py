"""Time estimates against arithmetic done by hand and against published runs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import models
from machines import recorded_machine
from skill_train.estimate.devices import cpu_flops, device_speed
from skill_train.estimate.step import MicroStep
from skill_train.estimate.time import (
    Schedule,
    dequantizing_seconds,
    micro_step_flops,
    micro_step_seconds,
    optimizer_seconds,
    picture_flops,
    reading_seconds,
    training_seconds,
)
from skill_train.facts import Calibration, PictureTokenFacts

QWEN = models.recorded_model("qwen2.5-0.5b")
LLAMA = models.recorded_model("llama-3.2-3b")
A100 = recorded_machine("a100_80gb")
NO_ADAPTER = MicroStep("cuda", "bfloat16", 1, 512, checkpointing=False, lora_r=0)


def test_operations_by_hand() -> None:
    """Qwen2.5 0.5B, 512 tokens, no adapter: 357,898,112 weights without the embedding x 2 x 512 forward and again
    backward; attention 2 x 896 x 512 x 512 x 24 layers x (1 + 2.5); the head 2 x 151,936 x 896 x 512 x 3 on CUDA."""
    linear = 357_898_112 * 2 * 512 * 2
    attention = 2 * 896 * 512 * 512 * 24 * 3.5
    head = 2 * 151_936 * 896 * 512 * 3
    assert micro_step_flops(QWEN, NO_ADAPTER) == linear + attention + head
    again = msgspec.structs.replace(NO_ADAPTER, checkpointing=True)
    assert micro_step_flops(QWEN, again) == linear * 3 / 2 + attention * 4.5 / 3.5 + head


def test_operations_where_every_weight_trains() -> None:
    """The gradients of the weights are as much again as those of the inputs; the head: forward, its logits again, and
    both gradients. An adapter that is not there costs nothing."""
    full = msgspec.structs.replace(NO_ADAPTER, full=True, lora_r=16)
    linear, head = 357_898_112 * 2 * 512 * 3, 2 * 151_936 * 896 * 512 * 4
    assert micro_step_flops(QWEN, full) == linear + 2 * 896 * 512 * 512 * 24 * 3.5 + head


def test_a_processor_reads_the_weights_of_short_rows() -> None:
    """2 cores, 8e9 bytes a second. 512 tokens, 256 of them trained: the layers' 357,898,112 weights twice; the head's
    136,134,656 twice for each 105 trained tokens (16e6 // 151936), so three times twice. Half as much in bfloat16."""
    machine = msgspec.structs.replace(recorded_machine("bare_cpu"), cores=2)
    short = msgspec.structs.replace(NO_ADAPTER, device="cpu", dtype="float32", trained_share=0.5)
    seconds = 4 * (357_898_112 * 2 + 136_134_656 * 2 * 3) / 8e9
    assert reading_seconds(QWEN, short, machine) == pytest.approx(seconds)
    assert reading_seconds(QWEN, msgspec.structs.replace(short, dtype="bfloat16"), machine) == pytest.approx(
        seconds / 2
    )
    assert reading_seconds(QWEN, NO_ADAPTER, A100) == 0
    estimate = micro_step_seconds(QWEN, short, machine, Calibration(1e20, "a run", same_shape=True))
    assert estimate is not None and estimate.low == pytest.approx(seconds / 1.25)


def test_the_optimizer_of_every_weight() -> None:
    """AdamW, fused: 494,032,768 weights x 4 bytes x (7 passes, and 3 of clipping) at the A100's 2000 GB/s; each step of
    a run pays it once, whatever the accumulation."""
    full = msgspec.structs.replace(NO_ADAPTER, full=True)
    seconds = 494_032_768 * 4 * 10 / 2000e9
    assert optimizer_seconds(QWEN, full, A100) == pytest.approx(seconds)
    assert optimizer_seconds(QWEN, msgspec.structs.replace(full, shards=4), A100) == pytest.approx(seconds / 4)
    assert optimizer_seconds(QWEN, NO_ADAPTER, A100) == 0
    schedule = Schedule(steps=10, accumulation=4, row_tokens=(512.0, 512.0), rows=100, local_weights=True)
    parts, one = training_seconds(QWEN, full, A100, schedule, None), micro_step_seconds(QWEN, full, A100, None)
    assert parts is not None and one is not None
    assert parts[-1].low == pytest.approx(40 * one.low + 10 * seconds)


def test_modules_that_train_beside_an_adapter() -> None:
    """The output head of 151,936 x 896: its gradient, and its logits again, as where every weight trains; and AdamW,
    not fused, for its copy in bfloat16: 18 passes, and 3 of clipping."""
    saved = msgspec.structs.replace(NO_ADAPTER, modules_to_save=("lm_head",), optim="adamw_torch")
    alone, with_head = micro_step_flops(QWEN, NO_ADAPTER), micro_step_flops(QWEN, saved)
    assert alone is not None and with_head is not None
    assert with_head - alone == 2 * 151_936 * 896 * 512
    assert optimizer_seconds(QWEN, saved, A100) == pytest.approx(151_936 * 896 * 2 * 21 / 2000e9)
    in_float = msgspec.structs.replace(saved, dtype="float32")
    assert optimizer_seconds(QWEN, in_float, A100) == pytest.approx(151_936 * 896 * 4 * 21 / 2000e9)
    machine = msgspec.structs.replace(recorded_machine("bare_cpu"), cores=2)
    frozen, trained = (
        reading_seconds(QWEN, msgspec.structs.replace(step, device="cpu", dtype="float32", trained_share=0.2), machine)
        for step in (NO_ADAPTER, saved)
    )
    assert trained - frozen == pytest.approx(151_936 * 896 * 4 * 2 / 8e9)  # 102 trained tokens: one chunk of logits


def test_operations_of_dora_by_hand() -> None:
    """q, k, v and o of Qwen2.5 0.5B: 896 x (896 + 128 + 128 + 896) weights in 24 layers. With dropout they are passed
    once more, forward and backward. Of each forward pass 2 x 16 operations make a weight of the identity matrix times
    A, and as many of that times B."""
    weights = 24 * 896 * (896 + 128 + 128 + 896)
    plain = msgspec.structs.replace(NO_ADAPTER, lora_r=16)
    lora, dora, bare, again = (
        micro_step_flops(QWEN, msgspec.structs.replace(plain, **change))
        for change in (
            {},
            {"dora": True},
            {"dora": True, "lora_dropout": 0.0},
            {"dora": True, "lora_dropout": 0.0, "checkpointing": True},
        )
    )
    lora_again = micro_step_flops(QWEN, msgspec.structs.replace(plain, checkpointing=True))
    assert None not in (lora, dora, bare, again, lora_again)
    assert bare - lora == weights * 4 * 16  # type: ignore[operator]
    assert dora - bare == 2 * weights * 512 * 2  # type: ignore[operator]
    assert again - lora_again == 2 * weights * 4 * 16  # type: ignore[operator]


@pytest.mark.parametrize(
    ("tokens", "lora", "dora", "without_dropout"),
    [(64, 0.315, 1.229, 0.869), (256, 0.955, 2.267, 1.444), (1024, 4.000, 7.159, 4.581)],
)
def test_dora_takes_as_long_as_was_measured(tokens: int, lora: float, dora: float, without_dropout: float) -> None:
    """Seconds of the processor for a forward and backward pass in float32 with one thread of an Intel Xeon: six layers
    of Qwen2, 1,024 and 2,816 wide, 16 and 8 heads, 2,048 words, rank 16 on all linear layers (torch 2.13, transformers
    5.23, peft 0.21, 2026-11-29)."""
    body = 6 * (1024 * (1024 + 512 + 512 + 1024) + 3 * 1024 * 2816)
    model = msgspec.structs.replace(
        QWEN, layers=6, hidden_size=1024, intermediate_size=2816, heads=16, kv_heads=8, head_dim=64, vocab_size=2048,
        parameters=body + 2 * 2048 * 1024, embedding_parameters=2 * 2048 * 1024, active_parameters=None,
    )  # fmt: skip
    machine = msgspec.structs.replace(recorded_machine("bare_cpu"), cores=1)
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    step = MicroStep("cpu", "float32", 1, tokens, checkpointing=False, target_modules=targets)
    changes: list[dict[str, Any]] = [{}, {"dora": True}, {"dora": True, "lora_dropout": 0.0}]
    steps = [msgspec.structs.replace(step, **change) for change in changes]
    computing = lora - reading_seconds(model, step, machine)
    speed = Calibration((micro_step_flops(model, step) or 0) / computing, "a run", same_shape=True)
    made = [micro_step_seconds(model, each, machine, speed) for each in steps]
    for estimate, seconds in zip(made, (lora, dora, without_dropout), strict=True):
        assert estimate is not None and estimate.low < seconds < estimate.high


def test_the_norms_of_dora_on_a_gpu() -> None:
    """Seven reads and writes of four bytes for each weight, at 2000 GB/s."""
    dora = msgspec.structs.replace(NO_ADAPTER, lora_r=16, dora=True)
    seconds = 24 * 896 * (896 + 128 + 128 + 896) * 4 * 7 / 2000e9
    assert dequantizing_seconds(QWEN, dora, A100) == pytest.approx(seconds)
    assert dequantizing_seconds(QWEN, msgspec.structs.replace(dora, checkpointing=True), A100) == pytest.approx(
        2 * seconds
    )
    assert dequantizing_seconds(QWEN, NO_ADAPTER, A100) == 0


def test_the_head_sees_trained_tokens_only() -> None:
    half = msgspec.structs.replace(NO_ADAPTER, trained_share=0.5)
    whole, less = micro_step_flops(QWEN, NO_ADAPTER), micro_step_flops(QWEN, half)
    assert whole is not None and less is not None
    assert whole - less == 151_936 * 896 * 512 * 3


def test_a_mixture_of_experts_computes_its_active_parameters() -> None:
    mixture = models.recorded_model("qwen3-30b-a3b")
    dense = msgspec.structs.replace(mixture, active_parameters=mixture.parameters)
    one, all_ = micro_step_flops(mixture, NO_ADAPTER), micro_step_flops(dense, NO_ADAPTER)
    assert one is not None and all_ is not None
    assert all_ / one > 5


@pytest.mark.parametrize(
    ("machine", "model", "rows", "length", "checkpointing", "lora_r", "targets", "seconds", "source"),
    [
        # 840 tokens, a step every 840 / 7245 s: huggingface/peft, method_comparison/MetaMathQA, 2026-07-15, L40S.
        ("8x_l40s", LLAMA, 4, 210, False, 32, ("q_proj", "v_proj"), 0.116, "PEFT"),
        # 3244 and 1707 tokens a second: QwenLM/Qwen README, 7B LoRA, A100 80 GB (Llama 2 7B has the same layers).
        (
            "a100_80gb",
            models.recorded_model("qwen2.5-7b"),
            1,
            4096,
            True,
            64,
            ("q_proj", "v_proj"),
            4096 / 3244,
            "Qwen",
        ),
        ("a100_80gb", models.recorded_model("qwen2.5-7b"), 1, 256, True, 64, ("q_proj", "v_proj"), 256 / 1707, "Qwen"),
    ],
)
def test_published_runs_lie_within_a_factor_of_two(
    machine, model, rows, length, checkpointing, lora_r, targets, seconds, source
) -> None:
    step = MicroStep("cuda", "bfloat16", rows, length, checkpointing, lora_r=lora_r, target_modules=targets)
    estimate = micro_step_seconds(model, step, recorded_machine(machine), None)
    assert estimate is not None
    assert seconds / 2 < estimate.middle < seconds * 2
    assert estimate.low < seconds < estimate.high


def test_a_measurement_replaces_the_assumption() -> None:
    """1e12 operations a second measured: the middle of the range is near operations / 1e12, and says by what."""
    flops = micro_step_flops(QWEN, NO_ADAPTER)
    assert flops is not None
    estimate = micro_step_seconds(QWEN, NO_ADAPTER, A100, Calibration(1e12, "a run", same_shape=True))
    assert estimate is not None
    assert estimate.middle == pytest.approx(flops / 1e12, rel=0.03)
    assert estimate.high / estimate.low == pytest.approx(1.25**2)
    assert "a run" in estimate.basis
    other = micro_step_seconds(QWEN, NO_ADAPTER, A100, Calibration(1e12, "a run", same_shape=False))
    assert other is not None and other.high > estimate.high


def test_the_kernels_of_a_small_step_must_be_launched_all_the_same() -> None:
    """24 layers x 3 ms, however fast a large micro-batch was."""
    fast = micro_step_seconds(QWEN, NO_ADAPTER, A100, Calibration(1e20, "a run", same_shape=True))
    assert fast is not None and fast.low == pytest.approx(24 * 0.003 / 1.25)


def test_an_unknown_speed_is_unknown() -> None:
    unknown = msgspec.structs.replace(A100, chip="NVIDIA Something New")
    assert micro_step_seconds(QWEN, NO_ADAPTER, unknown, None) is None
    bare = msgspec.structs.replace(recorded_machine("bare_cpu"), cpu_mhz=None)
    assert micro_step_seconds(QWEN, msgspec.structs.replace(NO_ADAPTER, device="cpu"), bare, None) is None


def test_a_processor_by_hand() -> None:
    """4 cores at 2,500 MHz with AVX2: 4 x 2.5e9 x 2 units x 8 lanes x 2 = 320 GFLOPS."""
    machine = msgspec.structs.replace(recorded_machine("bare_cpu"), cores=4, cpu_mhz=2500.0, cpu_features=("avx2",))
    assert cpu_flops(machine) == 320e9
    assert cpu_flops(msgspec.structs.replace(machine, cpu_features=("avx2", "avx512f"))) == 640e9
    assert cpu_flops(msgspec.structs.replace(machine, cpu_features=("asimd",))) == 160e9
    assert device_speed(machine) is None


def test_the_parts_of_a_run() -> None:
    schedule = Schedule(steps=10, accumulation=4, row_tokens=(100.0, 200.0), rows=1000, local_weights=False)
    parts = training_seconds(QWEN, NO_ADAPTER, A100, schedule, None)
    assert parts is not None
    names = [part.name for part in parts]
    assert names == ["imports", "download", "loading", "tokenizing", "checks", "training"]
    one = micro_step_seconds(QWEN, msgspec.structs.replace(NO_ADAPTER, length=100), A100, None)
    assert one is not None and parts[-1].low == pytest.approx(40 * one.low)
    here = training_seconds(QWEN, NO_ADAPTER, A100, msgspec.structs.replace(schedule, local_weights=True), None)
    assert here is not None and "download" not in [part.name for part in here]


def test_rows_of_a_batch_are_padded() -> None:
    """Several rows at a time take as long as the longest of them: the upper end counts 30 % more tokens."""
    schedule = Schedule(steps=1, accumulation=1, row_tokens=(200.0, 200.0), rows=4, local_weights=True)
    four = msgspec.structs.replace(NO_ADAPTER, rows=4)
    parts = training_seconds(QWEN, four, A100, schedule, None)
    long = micro_step_seconds(QWEN, msgspec.structs.replace(four, length=260), A100, None)
    assert parts is not None and long is not None
    assert parts[-1].high == pytest.approx(long.high)


# --- Pictures ---

GEMMA, QWEN_VL = models.recorded_model("gemma-3-4b"), models.recorded_model("qwen2.5-vl-7b")
ONE_PICTURE = PictureTokenFacts(256, 256, 256.0, 256, 260.0, 260, 256.0**2)
WITH_PICTURES = msgspec.structs.replace(NO_ADAPTER, images=True, pictures=ONE_PICTURE)


def test_operations_of_a_picture_by_hand() -> None:
    """Gemma 3 4B, one picture: 64 x 64 patches of 588 values become 1152 numbers, 27 layers have 4 x 1152² and
    2 x 1152 x 4304 weights and compare each patch with all; 256 tokens pass the projector, 1152 x 2560."""
    layer = 4 * 1152**2 + 2 * 1152 * 4304
    linear = 2 * 4096 * (588 * 1152 + 27 * layer)
    attention = 4 * 1152 * 4096**2 * 27
    projector = 2 * 256 * 1152 * 2560
    assert picture_flops(GEMMA, WITH_PICTURES) == linear + attention + projector
    tuned = msgspec.structs.replace(WITH_PICTURES, projector_trains=True)
    assert picture_flops(GEMMA, tuned) == linear + attention + 2 * projector
    tuned = msgspec.structs.replace(tuned, tower_trains=True)
    assert picture_flops(GEMMA, tuned) == 2 * linear + 3.5 * attention + 2 * projector
    again = msgspec.structs.replace(tuned, checkpointing=True, full=True)
    assert picture_flops(GEMMA, again) == 4 * linear + 4.5 * attention + 3 * projector
    assert picture_flops(GEMMA, msgspec.structs.replace(WITH_PICTURES, rows=2)) == 2 * (linear + attention + projector)
    assert picture_flops(GEMMA, msgspec.structs.replace(WITH_PICTURES, images=False)) == 0


def test_operations_of_windows() -> None:
    """Qwen2.5-VL: 4 layers compare all 1,024 patches, 28 only the 64 of a window. Three matrices in the MLP; four
    patches of 1280 numbers become one token, by matrices of 5120² and 5120 x 3584."""
    layer = 4 * 1280**2 + 3 * 1280 * 3420
    linear = 2 * 1024 * (1176 * 1280 + 32 * layer)
    attention = 4 * 1280 * (4 * 1024**2 + 28 * 1024 * 64)
    projector = 2 * 256 * (5120**2 + 5120 * 3584)
    assert picture_flops(QWEN_VL, WITH_PICTURES) == linear + attention + projector


def test_a_token_passes_the_language_model_alone() -> None:
    """The tower's weights are not those of a token: 4,300,079,472 less the embedding and what the test above counts."""
    tower = 588 * 1152 + 27 * (4 * 1152**2 + 2 * 1152 * 4304) + 1152 * 2560
    body = (GEMMA.parameters or 0) - 262_208 * 2560 - tower
    text, both = micro_step_flops(GEMMA, NO_ADAPTER), micro_step_flops(GEMMA, WITH_PICTURES)
    attention = 2 * 8 * 256 * 512 * 512 * 34 * 3.5
    assert text == pytest.approx(2 * body * 512 * 2 + attention + 2 * 262_208 * 2560 * 512 * 3, rel=1e-9)
    assert both == text + picture_flops(GEMMA, WITH_PICTURES)


def test_a_processor_reads_the_tower_once_for_pictures() -> None:
    machine = msgspec.structs.replace(recorded_machine("bare_cpu"), cores=2)
    text = msgspec.structs.replace(NO_ADAPTER, device="cpu", dtype="float32")
    pictures = msgspec.structs.replace(text, images=True, pictures=ONE_PICTURE)
    tower = GEMMA.tower.parameters if GEMMA.tower else 0
    more = reading_seconds(GEMMA, pictures, machine) - reading_seconds(GEMMA, text, machine)
    assert more == pytest.approx(4 * tower / 8e9)


def test_the_time_of_pictures_is_a_part_with_its_reason() -> None:
    schedule = Schedule(steps=10, accumulation=4, row_tokens=(300.0, 400.0), rows=100, local_weights=True)
    parts = {part.name: part for part in training_seconds(GEMMA, WITH_PICTURES, A100, schedule, None) or []}
    text = msgspec.structs.replace(WITH_PICTURES, images=False)
    without = {part.name: part for part in training_seconds(GEMMA, text, A100, schedule, None) or []}
    assert parts["training"] == without["training"] and "pictures" not in without
    assert 0 < parts["pictures"].low < parts["pictures"].high
    assert parts["pictures"].because == (
        "4,096 patches a row through 27 layers, forward alone; 414.7M parameters with the projector"
    )
    unknown = msgspec.structs.replace(WITH_PICTURES, pictures=None)
    parts = {part.name: part for part in training_seconds(GEMMA, unknown, A100, schedule, None) or []}
    assert parts["pictures"].low == 0 and parts["pictures"].because.startswith("up to 8,192 patches a row")
