"""Memory estimates against arithmetic done by hand, and against the rules that the parts must keep."""

from __future__ import annotations

import dataclasses

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


def test_logits_on_a_processor_are_a_few_megabytes() -> None:
    """4e6 // 151936 = 26 rows of 151,936 x 4 bytes, and the kept gradient of 512 x 896 x 4."""
    part = _parts(QWEN, dataclasses.replace(STEP, device="cpu", dtype="float32"))["logits"]
    assert part.low == 26 * 151936 * 4 + 512 * 896 * 4


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
