"""Memory estimates against arithmetic done by hand, and against the rules that the parts must keep."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import models
from skill_train.estimate import memory as estimate
from skill_train.estimate.memory import layer_bytes_per_token, training_memory
from skill_train.estimate.modules import adapter_parameters
from skill_train.estimate.step import MicroStep, total
from skill_train.estimate.trained import trained_bytes
from skill_train.facts import ModelFacts

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


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_an_embedding_and_a_head_stand_in_a_model_once(name: str) -> None:
    """Llama 3.1 8B: 128,256 words of 4096 numbers, rank 8: 8 x 132,352 in all 32 layers together."""
    assert adapter_parameters(LLAMA, (name,), 8) == 8 * (128_256 + 4096) == 1_058_816
    assert adapter_parameters(LLAMA, (*QKVO, name), 8) == 1_058_816 + 8 * 32 * (2 * 8192 + 2 * 5120)


@pytest.mark.parametrize(
    ("name", "hidden", "inner", "kept"),
    [("gpt_neox", 1024, 4096, 1), ("gpt2", 768, 3072, 4), ("phi", 2560, 10240, 4), ("starcoder2", 3072, 12288, 1)],
)
def test_an_mlp_without_a_gate_keeps_what_its_function_needs(name: str, hidden: int, inner: int, kept: int) -> None:
    """Pythia 410M and StarCoder2 3B: the input of torch's gelu. GPT-2 and Phi-2: four terms of `gelu_new`."""
    gpt2 = models.recorded_model("gpt2")
    shape = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "heads": hidden // 64,
        "kv_heads": hidden // 64,
        "head_dim": 64,
    }
    model = msgspec.structs.replace(gpt2, model_type=name, **shape)
    bare = msgspec.structs.replace(STEP, target_modules=())
    norms, attention = 2 * hidden * 4, 2 * 4 * hidden + 4 * (model.heads or 0)
    assert layer_bytes_per_token(model, bare) == norms + attention + 2 * kept * inner


@pytest.mark.parametrize(
    ("dtype", "four_bit", "each"),
    [
        ("bfloat16", False, 16),  # 4 + 4 + 8 bytes in float32
        ("float16", False, 16),
        ("bfloat16", True, 8),  # 2 + 2 + 4 in the bfloat16 that TRL gives the adapter of a 4-bit base
        ("float16", True, 16),  # the scaler of float16's gradients takes float32 alone
        ("float32", True, 16),
    ],
)
def test_the_adapter_trains_in_float32_unless_trl_made_it_bfloat16(dtype: str, four_bit: bool, each: int) -> None:
    step = msgspec.structs.replace(STEP, dtype=dtype, four_bit=four_bit)
    assert _parts(QWEN, step)["adapter"].low == 2_162_688 * each
    assert trained_bytes(QWEN, step) == 2_162_688 * each / 4


@pytest.mark.parametrize(
    ("optim", "low", "high"),
    [
        ("adamw_torch", 16, 24),  # two moments of 4 bytes, and up to two copies for a step
        ("adamw_torch_fused", 16, 16),
        ("adagrad", 12, 20),
        ("rmsprop", 12, 20),
        ("sgd", 8, 8),  # the trainer gives it no momentum
        ("adamw_8bit", 8 + 2 + 2 * 4 / 256, 8 + 2 + 2 * 4 / 256),  # two bytes, and two scales for 256 numbers
        ("paged_adamw_8bit", 8, 8 + 2 + 2 * 4 / 256),  # pages may lie in host memory
        ("paged_adamw_32bit", 8, 16),
    ],
)
def test_the_adapter_and_its_optimizer_by_hand(optim: str, low: float, high: float) -> None:
    """2,162,688 parameters in float32: 4 bytes and 4 of gradient, and what the optimizer keeps."""
    part = _parts(QWEN, msgspec.structs.replace(STEP, optim=optim))["adapter"]
    assert (part.low, part.high) == (2_162_688 * low, 2_162_688 * high)


def test_adafactor_keeps_edges_of_matrices() -> None:
    """q and o: A is 16 x 896, B 896 x 16, so 2 x 896 + 2 x 16 numbers; k and v 896 + 128 + 2 x 16; 24 layers."""
    edges = 24 * 2 * (2 * 896 + 32 + 896 + 128 + 32)
    assert _parts(QWEN, msgspec.structs.replace(STEP, optim="adafactor"))["adapter"].low == 2_162_688 * 8 + 4 * edges


SAVED = ("embed_tokens", "lm_head")


@pytest.mark.parametrize(
    ("change", "low", "high"),
    [
        # A number of a copy: 2 bytes, 2 of gradient, 4 of moments, and for a step 4 more. The head: 4 made whole.
        ({"dtype": "bfloat16"}, 8 + 8 + 4, 12 + 12),
        ({"dtype": "float32"}, 16 + 16 + 4, 24 + 24),
        ({"dtype": "float16"}, 16 + 16 + 4, 24 + 24),  # float16 does not train: its copies are float32
        ({"dtype": "bfloat16", "optim": "sgd"}, 4 + 4 + 4, 4 + 4 + 4),
        # 8 bit: the embedding's moments stay in 32 bit, and the head's are 2 bytes and 2 scales for 256.
        ({"optim": "adamw_8bit", "four_bit": True}, 12 + 6 + 8 / 256 + 4, 12 + 6 + 8 / 256 + 4),
    ],
)
def test_an_embedding_and_a_head_that_train_by_hand(change: dict[str, Any], low: float, high: float) -> None:
    """Llama 3.1 8B: 128,256 x 4096 = 525,336,576 each; 8.4 to 12.6 GB more in bfloat16."""
    step = msgspec.structs.replace(STEP, **({"optim": "adamw_torch"} | change), modules_to_save=SAVED)
    part = _parts(LLAMA, step)["saved modules"]
    assert (part.low, part.high) == (pytest.approx(525_336_576 * low), pytest.approx(525_336_576 * high))


def test_other_modules_that_train_whole_stand_in_each_layer() -> None:
    """Qwen2.5 0.5B in float32, 16 bytes a number: v_proj 24 x 896 x 128, the MLP 24 x 3 x 896 x 4864."""
    for name, count in (("v_proj", 24 * 896 * 128), ("mlp", 24 * 3 * 896 * 4864)):
        part = _parts(QWEN, msgspec.structs.replace(STEP, dtype="float32", modules_to_save=(name,)))["saved modules"]
        assert part.low == 16 * count


def test_dora_by_hand() -> None:
    """A magnitude for each output: 24 x (2 x 896 + 2 x 128) = 49,152. A token keeps twice as many numbers as outputs
    more in each layer. With dropout autograd keeps a 16-bit copy of each layer with an adapter, 24 x 2 x (896 + 128) x
    896 x 2 bytes, one layer's with checkpointing; in float32 none. The norm takes two of 896 x 896 at least."""
    dora = msgspec.structs.replace(STEP, dora=True)
    assert _parts(QWEN, dora)["adapter"].low - _parts(QWEN, STEP)["adapter"].low == 16 * 49_152
    assert layer_bytes_per_token(QWEN, dora) - layer_bytes_per_token(QWEN, STEP) == 2 * 2 * (2 * 896 + 2 * 128)
    copies, norm = 2 * (896 + 128) * 896 * 2, 2 * 2 * 896 * 896
    assert _parts(QWEN, dora)["DoRA"].low == 24 * copies + norm
    assert _parts(QWEN, msgspec.structs.replace(dora, checkpointing=True))["DoRA"].low == copies + norm
    assert _parts(QWEN, msgspec.structs.replace(dora, lora_dropout=0.0))["DoRA"].low == norm
    assert _parts(QWEN, msgspec.structs.replace(dora, dtype="float32"))["DoRA"].low == 2 * norm
    assert "DoRA" not in _parts(QWEN, STEP)


def test_attention_that_is_written_out_keeps_its_scores() -> None:
    """Gemma 2 2B, 8 heads, 26 layers, 512 x 512: softmax in float32, its bfloat16 copy, and the tanh of the cap."""
    gemma = models.recorded_model("gemma-2-2b")
    scores = _parts(gemma, STEP)["attention scores"]
    assert scores.low == 26 * 8 * 512 * 512 * (4 + 2 + 2)
    assert _parts(gemma, msgspec.structs.replace(STEP, checkpointing=True))["attention scores"].low == scores.low / 26
    assert _parts(gemma, msgspec.structs.replace(STEP, length=1024))["attention scores"].low == 4 * scores.low
    bloom = msgspec.structs.replace(QWEN, model_type="bloom")
    assert _parts(bloom, STEP)["attention scores"].low == 24 * 14 * 512 * 512 * (4 + 2)


@pytest.mark.parametrize(
    ("optim", "kept"), [("sgd", 0), ("adagrad", 4), ("rmsprop", 4), ("adamw_torch", 8), ("adamw_torch_fused", 8)]
)
def test_what_an_optimizer_keeps_of_every_weight(optim: str, kept: int) -> None:
    step = msgspec.structs.replace(FULL, optim=optim)
    assert sum(part.low for name, part in _parts(QWEN, step).items() if name == "optimizer") == kept * PARAMETERS


def test_adafactor_of_every_weight_is_small() -> None:
    assert 0 < _parts(QWEN, msgspec.structs.replace(FULL, optim="adafactor"))["optimizer"].high < 0.01 * 4 * PARAMETERS


@pytest.mark.parametrize(
    ("dtype", "four_bit", "expected"),
    [
        ("float32", False, 494_032_768 * 4),
        ("bfloat16", False, 494_032_768 * 2),
        # The embedding is tied: 151,936 x 896 = 136,134,656 stay in 16 bit, 357,898,112 x 4.127 / 8 are quantized.
        # One layer of 896 x 4864 is computed with in the same type.
        ("bfloat16", True, 136_134_656 * 2 + 357_898_112 * 4.127 / 8 + 896 * 4864 * 2),
        ("float16", True, 136_134_656 * 2 + 357_898_112 * 4.127 / 8 + 896 * 4864 * 2),
        ("float32", True, 136_134_656 * 4 + 357_898_112 * 4.127 / 8 + 896 * 4864 * 4),
    ],
)
def test_weights_by_hand(dtype: str, four_bit: bool, expected: float) -> None:
    parts = _parts(QWEN, msgspec.structs.replace(STEP, dtype=dtype, four_bit=four_bit))
    assert parts["weights"].low == parts["weights"].high == pytest.approx(expected)


def test_nf4_of_llama_8b_as_worked_out_from_its_parts() -> None:
    """6.98e9 quantized and 1.05e9 of embedding and head: 3.60 + 2.10 GB (transformers leaves the head out), and one
    layer of 4096 x 14336 in 16 bit, 0.12 GB."""
    assert _parts(LLAMA, msgspec.structs.replace(STEP, four_bit=True))["weights"].low == pytest.approx(
        5.82e9, rel=0.005
    )


def test_experts_are_not_quantized() -> None:
    """Qwen3 30B A3B: 48 layers of 128 experts of 3 x 2048 x 768, and twice 151,936 x 2048, stay in 16 bits:
    transformers 5.23 quantizes modules whose type is nn.Linear, and the experts of a layer are two parameters."""
    model = models.recorded_model("qwen3-30b-a3b")
    kept = 48 * 128 * 3 * 2048 * 768 + 2 * 151_936 * 2048
    least = 2 * kept + (30_532_122_624 - kept) * 4.127 / 8
    weights = _parts(model, msgspec.structs.replace(STEP, four_bit=True))["weights"]
    assert weights.low == weights.high == pytest.approx(least, rel=0.001)
    unknown = msgspec.structs.replace(model, expert_parameters=None)  # where neither the config nor a header says them
    weights = _parts(unknown, msgspec.structs.replace(STEP, four_bit=True))["weights"]
    assert weights.low < 17e9 and weights.high == pytest.approx(2 * 30_532_122_624, rel=0.001)


def test_an_embedding_that_may_be_tied_is_not_quantized() -> None:
    """Command R's config.json says nothing of its head: 256,000 x 8192 in 16 bits, once or twice."""
    model = msgspec.structs.replace(QWEN, tied_embeddings=None, embedding_parameters=None)
    weights = _parts(model, msgspec.structs.replace(STEP, four_bit=True))["weights"]
    one, layer = 151_936 * 896, 896 * 4864 * 2
    assert weights.low == pytest.approx(one * 2 + (494_032_768 - one) * 4.127 / 8 + layer)
    assert weights.high == pytest.approx(2 * one * 2 + (494_032_768 - 2 * one) * 4.127 / 8 + layer)


def test_a_layer_by_hand_on_cuda() -> None:
    """One token of a Qwen2.5 0.5B layer in bfloat16: two norms keep 896 x 4 each; queries, output 896 x 2, keys, values
    128 x 2; 14 heads' logsumexp x 4; the MLP 3 x 4864 x 2; four adapters' inputs 896 x (2 + 1), their 16 x 2."""
    norms, attention, mlp = 2 * 896 * 4, 2 * (2 * 896 + 2 * 128) + 14 * 4, 3 * 4864 * 2
    adapters = 4 * (896 * 3 + 16 * 2)
    assert layer_bytes_per_token(QWEN, STEP) == norms + attention + mlp + adapters


def test_without_dropout_an_input_is_kept_once() -> None:
    """Four inputs of 896 x (2 + 1) with masks become one of 896 x 2: queries, keys and values read the same, and the
    attention keeps its own output. DoRA casts its inputs, so each layer keeps a copy: only the masks go."""
    plain = msgspec.structs.replace(STEP, lora_dropout=0.0)
    assert layer_bytes_per_token(QWEN, STEP) - layer_bytes_per_token(QWEN, plain) == 4 * 896 * 3 - 896 * 2
    dora, plain_dora = msgspec.structs.replace(STEP, dora=True), msgspec.structs.replace(plain, dora=True)
    assert layer_bytes_per_token(QWEN, dora) - layer_bytes_per_token(QWEN, plain_dora) == 4 * 896


@pytest.mark.parametrize("dropout", [0.0, 0.05])
def test_an_adapter_of_the_embedding_keeps_no_row_of_the_vocabulary(dropout: float) -> None:
    """Its input are ids, and PEFT drops none of them. On a tiny Qwen2 of 151,936 words it keeps 540 bytes a token, seen
    with `torch.autograd.graph.saved_tensors_hooks` (peft 0.21)."""
    step = msgspec.structs.replace(STEP, lora_dropout=dropout)
    whole = msgspec.structs.replace(step, target_modules=(*QKVO, "embed_tokens"))
    assert layer_bytes_per_token(QWEN, whole) - layer_bytes_per_token(QWEN, step) == 16 * 2


@pytest.mark.parametrize(("dtype", "noise"), [("float32", 4), ("bfloat16", 2)])
def test_on_a_processor_dropout_keeps_its_noise_in_the_type_of_the_input(dtype: str, noise: int) -> None:
    """Dropped inputs and noise, 4 x 896 x (size + noise), in place of one input of 896 x size."""
    step = msgspec.structs.replace(STEP, device="cpu", dtype=dtype)
    plain = msgspec.structs.replace(step, lora_dropout=0.0)
    assert layer_bytes_per_token(QWEN, step) - layer_bytes_per_token(QWEN, plain) == 896 * (8 * noise - noise)


def test_logits_on_cuda_are_a_tile() -> None:
    """256 trained tokens x 32768 x 2 bytes; never vocabulary x tokens."""
    step = msgspec.structs.replace(STEP, trained_share=0.5)
    assert _parts(QWEN, step)["logits"].low == 256 * 32768 * 2
    many = msgspec.structs.replace(STEP, length=32768)
    assert _parts(QWEN, many)["logits"].low == 4096 * 32768 * 2


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_logits_on_a_processor_are_some_megabytes(dtype: str, size: int) -> None:
    """16e6 // 151936 = 105 rows of 151,936 numbers, and the kept gradient of 512 x 896."""
    part = _parts(QWEN, msgspec.structs.replace(STEP, device="cpu", dtype=dtype))["logits"]
    assert part.low == 105 * 151936 * size + 512 * 896 * size


def test_logits_that_trl_scores_itself_need_a_large_tile() -> None:
    """Gemma 2 caps its logits, so off CUDA TRL's head scores all 512 tokens: 32 bytes x 512 x 32768."""
    gemma = models.recorded_model("gemma-2-2b")
    assert _parts(gemma, msgspec.structs.replace(STEP, device="cpu"))["logits"].low == 32 * 512 * 32768


def test_only_mps_keeps_attention_scores() -> None:
    """14 heads x 512 x 512 x 4 bytes in each of 24 layers, once or twice; in one with checkpointing."""
    mps = msgspec.structs.replace(STEP, device="mps", dtype="float32")
    scores = _parts(QWEN, mps)["attention scores"]
    assert (scores.low, scores.high) == (24 * 14 * 512 * 512 * 4, 2 * 24 * 14 * 512 * 512 * 4)
    assert _parts(QWEN, msgspec.structs.replace(mps, checkpointing=True))["attention scores"].low == 14 * 512 * 512 * 4
    assert "attention scores" not in _parts(QWEN, STEP)


def test_checkpointing_keeps_inputs_and_one_layer() -> None:
    """8 x 2048 tokens of Llama 3.1 8B: 32 x 16384 x 4096 x 2 bytes = 4.29 GB of inputs, instead of 32 layers whole."""
    step = msgspec.structs.replace(STEP, rows=8, length=2048)
    whole = _parts(LLAMA, step)["activations"].low
    kept = _parts(LLAMA, msgspec.structs.replace(step, checkpointing=True))["activations"].low
    assert kept == 4_294_967_296 + 16384 * (layer_bytes_per_token(LLAMA, step) + 4096 * 6)
    assert kept < whole / 5


def test_sharded_weights_are_divided_and_gathered_by_layer() -> None:
    """16.06 GB over 8 processes: 2.0 GB each, and two layers of 1/32 in flight."""
    whole = 8_030_261_248 * 2
    part = _parts(LLAMA, msgspec.structs.replace(STEP, shards=8))["weights"]
    assert part.low == pytest.approx(whole / 8 + 2 * whole / 32)
    assert _parts(LLAMA, msgspec.structs.replace(STEP, shards=8, offload=True))["weights"].low == pytest.approx(
        whole / 16
    )


def test_experts_that_a_token_passes_count_not_all() -> None:
    """Qwen3 30B A3B: a token passes 8 experts of width 768 of the 128."""
    mixture = models.recorded_model("qwen3-30b-a3b")
    dense = msgspec.structs.replace(mixture, experts_per_token=1)
    more = layer_bytes_per_token(mixture, STEP) - layer_bytes_per_token(dense, STEP)
    assert more == 2 * 3 * 768 * 7


def test_keys_and_values_are_repeated_without_the_flash_kernel_and_beside_padding() -> None:
    """Qwen2.5 0.5B has 14 heads of 64 that share 2 of keys and of values: 2 x (896 - 128) numbers more a token in each
    of 24 layers, or with checkpointing in one. Heads that share nothing have none, and a CPU reads shared ones."""
    one = msgspec.structs.replace(STEP, device="cuda", dtype="bfloat16", rows=1, length=512, checkpointing=False)
    more = 2 * (896 - 128) * 512 * 24
    assert "repeated keys" not in _parts(QWEN, one)
    padded = _parts(QWEN, msgspec.structs.replace(one, rows=2))["repeated keys"]
    assert (padded.low, padded.high) == (0, 2 * 2 * more)
    for dtype, size in (("float16", 2), ("float32", 4)):
        always = _parts(QWEN, msgspec.structs.replace(one, dtype=dtype))["repeated keys"]
        assert always.low == always.high == size * more
    frugal = _parts(QWEN, msgspec.structs.replace(one, dtype="float16", checkpointing=True))["repeated keys"]
    assert frugal.high == 2 * more / 24
    own = msgspec.structs.replace(QWEN, kv_heads=QWEN.heads)
    for model, step in (
        (own, msgspec.structs.replace(one, rows=2)),
        (QWEN, msgspec.structs.replace(one, device="cpu", rows=2)),
    ):
        assert "repeated keys" not in _parts(model, step)


FULL = msgspec.structs.replace(STEP, rows=4, dtype="float32", full=True)
PARAMETERS, HEAD = 494_032_768, 136_134_656  # of Qwen2.5 0.5B; its head is its embedding, 151,936 x 896


@pytest.mark.parametrize(
    ("change", "each", "copies", "beside"),
    [
        ({"dtype": "float32"}, 4, 0, 0),
        # Autocast's copies of the layers. TRL's head casts tiles, and computes the gradient of one in float32.
        ({"dtype": "bfloat16"}, 4, 2 * (PARAMETERS - HEAD), 4 * 32_768 * 896),
        ({"dtype": "float16"}, 4, 2 * (PARAMETERS - HEAD), 4 * 32_768 * 896),
        ({"dtype": "bfloat16", "pure_bf16": True}, 2, 0, 2 * HEAD),  # the gradient's copy in bfloat16
        # Off CUDA the head is cast as a whole.
        ({"device": "cpu", "dtype": "bfloat16"}, 4, 2 * PARAMETERS, 0),
    ],
)
def test_every_weight_by_hand(change: dict[str, Any], each: int, copies: int, beside: int) -> None:
    """16 bytes a parameter in float32, 8 with pure_bf16: weights, gradients, two moments. The head's gradient is made
    in float32 before it is added, 4 x 136,134,656."""
    parts = _parts(QWEN, msgspec.structs.replace(FULL, **change))
    assert parts["weights"].low == parts["weights"].high == each * PARAMETERS
    assert parts["optimizer"].low == parts["optimizer"].high == 2 * each * PARAMETERS
    assert parts["gradients"].low == each * PARAMETERS + 4 * HEAD + beside
    # The tied embedding makes a second one, when the rest of the pass is gone; on a CPU the heap stays as it is.
    assert parts["gradients"].high == each * PARAMETERS + (8 if "device" in change else 4) * HEAD + beside
    assert (parts["copies"].low if "copies" in parts else 0) == copies
    assert "adapter" not in parts


def test_without_accumulation_gradients_grow_while_activations_shrink() -> None:
    """1 x 8 tokens need 10 MB: of the gradients all but that comes on top. 16 x 2048 need 50 GB: nothing does but the
    head's."""
    alone = msgspec.structs.replace(FULL, accumulates=False)
    few = _parts(QWEN, msgspec.structs.replace(alone, length=8))
    moving = few["activations"].low + few["logits"].low + few["repeated keys"].low
    assert few["gradients"].high == pytest.approx(4 * PARAMETERS + 8 * HEAD - moving)
    many = _parts(QWEN, msgspec.structs.replace(alone, rows=16, length=2048))
    assert many["gradients"].low == many["gradients"].high == 4 * HEAD


def test_an_optimizer_that_is_not_fused_needs_one_more_of_every_weight() -> None:
    """torch's foreach kernels take the root of all second moments at once: 4 x 494,032,768 bytes, less what the passes
    need, which is gone by then."""
    short = msgspec.structs.replace(FULL, length=8)
    fused, plain = (
        _parts(QWEN, msgspec.structs.replace(short, optim=name)) for name in ("adamw_torch_fused", "adamw_torch")
    )
    moving = fused["activations"].low + fused["logits"].low + fused["repeated keys"].low
    assert plain["gradients"].high == pytest.approx(8 * PARAMETERS - moving)
    assert fused["gradients"].high == pytest.approx(4 * PARAMETERS + max(4 * HEAD, 8 * HEAD - moving))


def test_sharded_it_is_divided_and_layers_are_gathered() -> None:
    """Llama 3.1 8B over 8 GPUs: 16 x 8.03e9 / 8 = 16.1 GB each, and two layers of 6.98e9 / 32 in bfloat16."""
    parts = _parts(LLAMA, msgspec.structs.replace(FULL, dtype="bfloat16", shards=8))
    gradient = 4 * 128_256 * 4096 + 4 * 32_768 * 4096  # of the head, and the float32 product of one of its tiles
    held = parts["weights"].low + parts["optimizer"].low + parts["gradients"].low - gradient
    assert held == 16 * 8_030_261_248 / 8
    assert parts["gathered"].low == pytest.approx(2 * 2 * (8_030_261_248 - 2 * 128_256 * 4096) / 32)
    waiting = _parts(LLAMA, msgspec.structs.replace(FULL, dtype="bfloat16", shards=8, offload=True))
    assert "weights" not in waiting and "optimizer" not in waiting


def test_a_layer_that_trains_by_hand() -> None:
    """Beyond the frozen layer: each norm's result before its weight, 2 x 896 x 4; in float32 the inputs of the linear
    layers, 2 x 896 and 4864; with autocast five copies of the first two and one of the last, in 2 bytes."""
    frozen = msgspec.structs.replace(STEP, dtype="float32", target_modules=())
    assert layer_bytes_per_token(QWEN, FULL) - layer_bytes_per_token(QWEN, frozen) == 4 * (2 * 896 + 2 * 896 + 4864)
    mixed, half = (msgspec.structs.replace(s, dtype="bfloat16", target_modules=()) for s in (FULL, STEP))
    assert layer_bytes_per_token(QWEN, mixed) - layer_bytes_per_token(QWEN, half) == 4 * 2 * 896 + 2 * (5 * 896 + 4864)


@pytest.mark.parametrize("missing", ["parameters", "layers", "hidden_size", "vocab_size"])
def test_an_unknown_shape_has_no_estimate(missing: str) -> None:
    assert training_memory(msgspec.structs.replace(QWEN, **{missing: None}), STEP) is None


@pytest.mark.parametrize("device", ["cpu", "mps", "cuda"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_part_is_a_range_and_the_sum_grows_with_the_tokens(device: str, checkpointing: bool) -> None:
    step = msgspec.structs.replace(STEP, device=device, checkpointing=checkpointing)
    sums = []
    for length in (1, 128, 512, 4096):
        parts = training_memory(QWEN, msgspec.structs.replace(step, length=length))
        assert parts is not None and all(part.low <= part.high and part.because for part in parts)
        assert all(part.low >= 0 for part in parts if part.name != "spread")  # which widens to both sides
        assert total(parts, "").low > 0
        sums.append(total(parts, "").middle)
    assert sums == sorted(sums)


@pytest.mark.parametrize(
    ("kind", "sizes", "length", "peak"),
    [
        ("granitemoehybrid", (1536, 4096, 12, 4), 512, 1046e6),
        ("granitemoehybrid", (1536, 4096, 12, 4), 1024, 1031e6),
        ("falcon_h1", (2048, 4096, 8, 2), 512, 1695e6),
        ("falcon_h1", (2048, 4096, 8, 2), 1024, 1504e6),
    ],
)
def test_layers_that_scan_states_may_keep_more(
    kind: str, sizes: tuple[int, int, int, int], length: int, peak: float
) -> None:
    """Peaks of a forward and a backward pass of LoRA, in float32 on a CPU (torch 2.13, transformers 5.23, 2026-11-29).

    Four layers with the sizes of Granite 4.0 H 1B and of Falcon-H1 1.5B; the longer rows with checkpointing."""
    hidden, mlp, heads, kv_heads = sizes
    four_layers: Any = {"model_type": kind, "layers": 4, "hidden_size": hidden, "intermediate_size": mlp,
                        "heads": heads, "kv_heads": kv_heads, "head_dim": hidden // heads}  # fmt: skip
    step = MicroStep("cpu", "float32", 1, length, checkpointing=length == 1024, target_modules=QKVO, lora_r=8)
    part = _parts(msgspec.structs.replace(LLAMA, **four_layers), step)["activations"]
    assert part.low < peak < part.high and "6 times" in part.because
    plain = _parts(msgspec.structs.replace(LLAMA, **four_layers | {"model_type": "llama"}), step)["activations"]
    assert plain.high < peak and plain.low == part.low  # as it was estimated before


@pytest.mark.parametrize(("kind", "kept"), [("mamba", 479.5e6), ("mamba2", 389.8e6)])
def test_layers_of_mamba_keep_the_states_of_each_token(kind: str, kept: float) -> None:
    """Bytes of saved tensors, counted with hooks: four layers of 256, and 2 x 512 tokens (transformers 5.23)."""
    sizes: Any = {
        "model_type": kind,
        "layers": 4,
        "hidden_size": 256,
        "heads": None,
        "kv_heads": None,
        "head_dim": None,
    }
    sizes["intermediate_size"] = 512 if kind == "mamba" else None
    step = MicroStep("cpu", "float32", 2, 512, checkpointing=False, target_modules=("in_proj",), lora_r=8)
    part = _parts(msgspec.structs.replace(LLAMA, **sizes), step)["activations"]
    assert part.low < kept < part.high


def _parts(model: ModelFacts, step: MicroStep) -> dict[str, estimate.Part]:
    parts = training_memory(model, step)
    assert parts is not None
    return {part.name: part for part in parts}
