"""Memory estimates against arithmetic done by hand, and against the rules that the parts must keep."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import models
from skill_train import estimate
from skill_train.estimate import MicroStep, adapter_parameters, layer_bytes_per_token, total, training_memory
from skill_train.facts import ModelFacts
from skill_train.resources import train_module

QWEN = models.recorded_model("qwen2.5-0.5b")
LLAMA = models.recorded_model("llama-3.1-8b")
STEP = MicroStep("cuda", "bfloat16", 1, 512, checkpointing=False)
QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")


def test_adapter_parameters_by_hand() -> None:
    """Qwen2.5 0.5B: width 896, keys 2 x 64. q and o: 896 + 896 each; k and v: 896 + 128 each. 24 layers, rank 16."""
    assert adapter_parameters(QWEN, QKVO, 16) == 24 * 16 * (2 * 1792 + 2 * 1024) == 2_162_688


def test_adapter_parameters_as_peft_counts_them() -> None:
    """PEFT printed `trainable params: 41,943,040` for Llama 3.1 8B with r 16 on all linear layers (Unsloth's and
    Hugging Face's fine-tuning guides, 2024): 16 x (2 x 8192 + 2 x 5120 + 3 x 18432) x 32."""
    every = (*QKVO, "gate_proj", "up_proj", "down_proj")
    assert adapter_parameters(LLAMA, every, 16) == 41_943_040


def test_the_adapter_and_its_optimizer_by_hand() -> None:
    """2,162,688 parameters: 4 + 4 + 8 bytes in float32; 2 + 2 + 4 in the bfloat16 that TRL gives it on a 4-bit base."""
    assert _parts(QWEN, STEP)["adapter"].low == 2_162_688 * 16
    assert _parts(QWEN, dataclasses.replace(STEP, four_bit=True))["adapter"].low == 2_162_688 * 8


@pytest.mark.parametrize(
    ("dtype", "four_bit", "expected"),
    [
        ("float32", False, 494_032_768 * 4),
        ("bfloat16", False, 494_032_768 * 2),
        # The embedding is tied: 151,936 x 896 = 136,134,656 stay in 16 bit, 357,898,112 x 4.127 / 8 are quantized.
        ("bfloat16", True, 136_134_656 * 2 + 357_898_112 * 4.127 / 8),
    ],
)
def test_weights_by_hand(dtype: str, four_bit: bool, expected: float) -> None:
    parts = _parts(QWEN, dataclasses.replace(STEP, dtype=dtype, four_bit=four_bit))
    assert parts["weights"].low == parts["weights"].high == pytest.approx(expected)


def test_nf4_of_llama_8b_as_worked_out_from_its_parts() -> None:
    """6.98e9 quantized and 1.05e9 of embedding and head: 3.60 + 2.10 GB (transformers leaves the head out)."""
    assert _parts(LLAMA, dataclasses.replace(STEP, four_bit=True))["weights"].low == pytest.approx(5.70e9, rel=0.005)


def test_a_layer_by_hand_on_cuda() -> None:
    """One token of a Qwen2.5 0.5B layer in bfloat16: two norms keep 896 x 4 each; queries, output 896 x 2, keys, values
    128 x 2; 14 heads' logsumexp x 4; the MLP 3 x 4864 x 2; four adapters' inputs 896 x (2 + 1), their 16 x 2."""
    norms, attention, mlp = 2 * 896 * 4, 2 * (2 * 896 + 2 * 128) + 14 * 4, 3 * 4864 * 2
    adapters = 4 * (896 * 3 + 16 * 2)
    assert layer_bytes_per_token(QWEN, STEP) == norms + attention + mlp + adapters


def test_without_dropout_no_mask_is_kept() -> None:
    plain = dataclasses.replace(STEP, lora_dropout=0.0)
    assert layer_bytes_per_token(QWEN, STEP) - layer_bytes_per_token(QWEN, plain) == 4 * 896


def test_logits_on_cuda_are_a_tile() -> None:
    """256 trained tokens x 32768 x 2 bytes; never vocabulary x tokens."""
    step = dataclasses.replace(STEP, trained_share=0.5)
    assert _parts(QWEN, step)["logits"].low == 256 * 32768 * 2
    many = dataclasses.replace(STEP, length=32768)
    assert _parts(QWEN, many)["logits"].low == 4096 * 32768 * 2


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_logits_on_a_processor_are_some_megabytes(dtype: str, size: int) -> None:
    """16e6 // 151936 = 105 rows of 151,936 numbers, and the kept gradient of 512 x 896."""
    part = _parts(QWEN, dataclasses.replace(STEP, device="cpu", dtype=dtype))["logits"]
    assert part.low == 105 * 151936 * size + 512 * 896 * size


def test_the_chunk_is_the_training_programs() -> None:
    assert train_module().LOGITS_AT_ONCE == estimate.LOGITS_AT_ONCE


def test_logits_that_trl_scores_itself_need_a_large_tile() -> None:
    """Gemma 2 caps its logits, so off CUDA TRL's head scores all 512 tokens: 32 bytes x 512 x 32768."""
    gemma = models.recorded_model("gemma-2-2b")
    assert _parts(gemma, dataclasses.replace(STEP, device="cpu"))["logits"].low == 32 * 512 * 32768


def test_only_mps_keeps_attention_scores() -> None:
    """14 heads x 512 x 512 x 4 bytes in each of 24 layers, once or twice; in one with checkpointing."""
    mps = dataclasses.replace(STEP, device="mps", dtype="float32")
    scores = _parts(QWEN, mps)["attention scores"]
    assert (scores.low, scores.high) == (24 * 14 * 512 * 512 * 4, 2 * 24 * 14 * 512 * 512 * 4)
    assert _parts(QWEN, dataclasses.replace(mps, checkpointing=True))["attention scores"].low == 14 * 512 * 512 * 4
    assert "attention scores" not in _parts(QWEN, STEP)


def test_checkpointing_keeps_inputs_and_one_layer() -> None:
    """8 x 2048 tokens of Llama 3.1 8B: 32 x 16384 x 4096 x 2 bytes = 4.29 GB of inputs, instead of 32 layers whole."""
    step = dataclasses.replace(STEP, rows=8, length=2048)
    whole = _parts(LLAMA, step)["activations"].low
    kept = _parts(LLAMA, dataclasses.replace(step, checkpointing=True))["activations"].low
    assert kept == 4_294_967_296 + 16384 * (layer_bytes_per_token(LLAMA, step) + 4096 * 6)
    assert kept < whole / 5


def test_sharded_weights_are_divided_and_gathered_by_layer() -> None:
    """16.06 GB over 8 processes: 2.0 GB each, and two layers of 1/32 in flight."""
    whole = 8_030_261_248 * 2
    part = _parts(LLAMA, dataclasses.replace(STEP, shards=8))["weights"]
    assert part.low == pytest.approx(whole / 8 + 2 * whole / 32)
    assert _parts(LLAMA, dataclasses.replace(STEP, shards=8, offload=True))["weights"].low == pytest.approx(whole / 16)


def test_experts_that_a_token_passes_count_not_all() -> None:
    """Qwen3 30B A3B: a token passes 8 experts of width 768 of the 128."""
    mixture = models.recorded_model("qwen3-30b-a3b")
    dense = dataclasses.replace(mixture, experts_per_token=1)
    more = layer_bytes_per_token(mixture, STEP) - layer_bytes_per_token(dense, STEP)
    assert more == 2 * 3 * 768 * 7


FULL = dataclasses.replace(STEP, rows=4, dtype="float32", full=True)
PARAMETERS, HEAD = 494_032_768, 136_134_656  # of Qwen2.5 0.5B; its head is its embedding, 151,936 x 896


@pytest.mark.parametrize(
    ("change", "each", "copies"),
    [
        ({"dtype": "float32"}, 4, 0),
        ({"dtype": "bfloat16"}, 4, 2 * (PARAMETERS - HEAD)),  # autocast's copies of the layers; TRL's head casts tiles
        ({"dtype": "float16"}, 4, 2 * (PARAMETERS - HEAD)),
        ({"dtype": "bfloat16", "pure_bf16": True}, 2, 0),
        # Off CUDA the head is cast as a whole.
        ({"device": "cpu", "dtype": "bfloat16"}, 4, 2 * PARAMETERS),
    ],
)
def test_every_weight_by_hand(change: dict[str, Any], each: int, copies: int) -> None:
    """16 bytes a parameter in float32, 8 with pure_bf16: weights, gradients, two moments. The head's gradient is made
    in float32 before it is added, 4 x 136,134,656."""
    parts = _parts(QWEN, dataclasses.replace(FULL, **change))
    assert parts["weights"].low == parts["weights"].high == each * PARAMETERS
    assert parts["optimizer"].low == parts["optimizer"].high == 2 * each * PARAMETERS
    assert parts["gradients"].low == each * PARAMETERS + 4 * HEAD
    # The tied embedding makes a second one, when the rest of the pass is gone; on a CPU the heap stays as it is.
    assert parts["gradients"].high == each * PARAMETERS + (8 if "device" in change else 4) * HEAD
    assert (parts["copies"].low if "copies" in parts else 0) == copies
    assert "adapter" not in parts


def test_without_accumulation_gradients_grow_while_activations_shrink() -> None:
    """1 x 8 tokens need 10 MB: of the gradients all but that comes on top. 16 x 2048 need 50 GB: nothing does but the
    head's."""
    alone = dataclasses.replace(FULL, accumulates=False)
    few = _parts(QWEN, dataclasses.replace(alone, length=8))
    moving = few["activations"].low + few["logits"].low
    assert few["gradients"].high == pytest.approx(4 * PARAMETERS + 8 * HEAD - moving)
    many = _parts(QWEN, dataclasses.replace(alone, rows=16, length=2048))
    assert many["gradients"].low == many["gradients"].high == 4 * HEAD


def test_an_optimizer_that_is_not_fused_needs_one_more_of_every_weight() -> None:
    """torch's foreach kernels take the root of all second moments at once: 4 x 494,032,768 bytes, less what the passes
    need, which is gone by then."""
    short = dataclasses.replace(FULL, length=8)
    fused, plain = (_parts(QWEN, dataclasses.replace(short, fused=value)) for value in (True, False))
    moving = fused["activations"].low + fused["logits"].low
    assert plain["gradients"].high == pytest.approx(8 * PARAMETERS - moving)
    assert fused["gradients"].high == pytest.approx(4 * PARAMETERS + max(4 * HEAD, 8 * HEAD - moving))


def test_sharded_it_is_divided_and_layers_are_gathered() -> None:
    """Llama 3.1 8B over 8 GPUs: 16 x 8.03e9 / 8 = 16.1 GB each, and two layers of 6.98e9 / 32 in bfloat16."""
    parts = _parts(LLAMA, dataclasses.replace(FULL, dtype="bfloat16", shards=8))
    held = parts["weights"].low + parts["optimizer"].low + parts["gradients"].low - 4 * 128_256 * 4096
    assert held == 16 * 8_030_261_248 / 8
    assert parts["gathered"].low == pytest.approx(2 * 2 * (8_030_261_248 - 2 * 128_256 * 4096) / 32)
    waiting = _parts(LLAMA, dataclasses.replace(FULL, dtype="bfloat16", shards=8, offload=True))
    assert "weights" not in waiting and "optimizer" not in waiting


def test_a_layer_that_trains_by_hand() -> None:
    """Beyond the frozen layer: each norm's result before its weight, 2 x 896 x 4; in float32 the inputs of the linear
    layers, 2 x 896 and 4864; with autocast five copies of the first two and one of the last, in 2 bytes."""
    frozen = dataclasses.replace(STEP, dtype="float32", target_modules=())
    assert layer_bytes_per_token(QWEN, FULL) - layer_bytes_per_token(QWEN, frozen) == 4 * (2 * 896 + 2 * 896 + 4864)
    mixed, half = (dataclasses.replace(s, dtype="bfloat16", target_modules=()) for s in (FULL, STEP))
    assert layer_bytes_per_token(QWEN, mixed) - layer_bytes_per_token(QWEN, half) == 4 * 2 * 896 + 2 * (5 * 896 + 4864)


@pytest.mark.parametrize("missing", ["parameters", "layers", "hidden_size", "vocab_size"])
def test_an_unknown_shape_has_no_estimate(missing: str) -> None:
    assert training_memory(dataclasses.replace(QWEN, **{missing: None}), STEP) is None


@pytest.mark.parametrize("device", ["cpu", "mps", "cuda"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_part_is_a_range_and_the_sum_grows_with_the_tokens(device: str, checkpointing: bool) -> None:
    step = dataclasses.replace(STEP, device=device, checkpointing=checkpointing)
    sums = []
    for length in (1, 128, 512, 4096):
        parts = training_memory(QWEN, dataclasses.replace(step, length=length))
        assert parts is not None and all(0 <= part.low <= part.high and part.because for part in parts)
        sums.append(total(parts, "").middle)
    assert sums == sorted(sums)


def _parts(model: ModelFacts, step: MicroStep) -> dict[str, estimate.Part]:
    parts = training_memory(model, step)
    assert parts is not None
    return {part.name: part for part in parts}
