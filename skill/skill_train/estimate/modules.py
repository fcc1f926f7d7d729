"""The modules of a decoder by their usual names: their widths, and what an adapter or a whole copy of them holds."""

import math
from collections.abc import Iterable
from functools import cache

from skill_train.facts import ModelFacts

EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings")
HOLD_EXPERTS = ("mlp", "experts", "block_sparse_moe", "feed_forward", "moe")
HEADS = ("lm_head", "embed_out", "output_projection")
# MLPs with two layers and no gate, and the number of tensors of the MLP's width that their activation function keeps.
# torch's own functions keep their input. `gelu_new` of transformers is not fused and keeps four terms. Observed on the
# MLPs of transformers 5.23 with `torch.autograd.graph.saved_tensors_hooks` (2026-11-24).
GATELESS = {
    "arcee": 1, "biogpt": 1, "bloom": 1, "falcon": 1, "gpt_bigcode": 1, "gpt_neox": 1, "mpt": 1, "nemotron": 1,
    "opt": 1, "persimmon": 1, "starcoder2": 1, "xglm": 1, "codegen": 4, "gpt2": 4, "gptj": 4, "phi": 4,
}  # fmt: skip
# Decoders for which transformers 5.23 has no fused attention (`_supports_sdpa` of the class). For these train.py uses
# the eager attention.
EAGER = (
    "bloom", "codegen", "deepseek_v4", "flint", "gemma2", "gpt_neo", "gpt_neox_japanese", "gpt_oss", "gptj",
    "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash", "mpt", "openai-gpt", "vaultgemma", "xglm",
)  # fmt: skip
CAPPED_SCORES = ("gemma2", "vaultgemma")  # their tanh keeps its result too
# Models whose recurrent layers plain torch functions compute, because no job installs their kernels. They keep the
# states of a scan. One forward and one backward pass took up to so many times the activations of as many layers of
# attention: four layers of each but Qwen 3.5, in float32 on a CPU (torch 2.13, transformers 5.23, 2026-11-30). Mamba 1
# keeps every state of every token: 14 times, and with checkpointing, where one layer is at work, as from 18 times.
SCANNED = {
    **dict.fromkeys(("mamba", "falcon_mamba"), 18.0),
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid", "jamba", "mamba2", "zamba2"), 6.0),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), 6.0),
}
_GATED = 3  # the gate's result, the activation of it, and the factor that it is multiplied with


def mlp_tensors_per_token(model: ModelFacts) -> int:
    """Tensors of the MLP's width that the forward pass keeps for one token, without adapters' inputs."""
    return GATELESS.get(model.model_type, _GATED)


def widths(model: ModelFacts) -> tuple[int, int, int, int]:
    """The hidden size, and the widths of all queries, of all keys, and of the MLP that one token passes."""
    h = model.hidden_size or 0
    heads = model.heads or 1
    head = model.head_dim or h // heads
    f = model.intermediate_size or 4 * h
    return h, heads * head, (model.kv_heads or heads) * head, f * (model.experts_per_token or 1) + model.shared_width


def module_widths(model: ModelFacts, name: str) -> tuple[int, int]:
    """`(inputs, outputs)` of a module, on average as the weight files have it, else by its usual name; a name that is
    not known counts as the MLP's first layer."""
    if name in model.linear_sizes:
        count, inputs, outputs = model.linear_sizes[name]
        return -(-inputs // count), -(-outputs // count)
    h, q, kv, f = widths(model)
    return _by_name(h, q, kv, f, model.vocab_size or 0, model.model_type).get(name, (h, f))


@cache  # a plan with all flavors asks thousands of times
def _by_name(h: int, q: int, kv: int, f: int, vocabulary: int, model_type: str) -> dict[str, tuple[int, int]]:
    return {
        "q_proj": (h, q),
        "k_proj": (h, kv),
        "v_proj": (h, kv),
        "o_proj": (q, h),
        "out_proj": (q, h),
        "dense": (q, h),
        "qkv_proj": (h, q + 2 * kv),
        "query_key_value": (h, q + 2 * kv),
        "c_attn": (h, q + 2 * kv),
        "gate_up_proj": (h, 2 * f),
        "down_proj": (f, h),
        "fc2": (f, h),
        "fc_out": (f, h),
        "dense_4h_to_h": (f, h),
        "c_proj": (f, h) if model_type == "starcoder2" else (h + f, 2 * h),  # GPT-2 has two layers of this name
        **dict.fromkeys(EMBEDDINGS, (vocabulary, h)),
        **dict.fromkeys(HEADS, (h, vocabulary)),
    }


def times(model: ModelFacts, name: str) -> int:
    """How often a module stands in the model: the embedding and the output head once, all others in each layer, unless
    the weight files say it."""
    if name in model.linear_sizes:
        return model.linear_sizes[name][0]
    return 1 if name in (*EMBEDDINGS, *HEADS) else model.layers or 0


def adapter_parameters(model: ModelFacts, target_modules: Iterable[str], lora_r: int, *, dora: bool = False) -> int:
    """Parameters of the adapter: r x (inputs + outputs) for each target (Hu et al. 2021, LoRA), and with DoRA a
    magnitude for each output (Liu et al. 2024, DoRA, section 4)."""
    sums = [_sums(model, target) for target in target_modules]
    return sum(lora_r * (inputs + outputs) + dora * outputs for inputs, outputs in sums)


def adapted_weights(model: ModelFacts, target_modules: Iterable[str]) -> int:
    """The weights of the layers that get an adapter."""
    return sum(times(model, name) * math.prod(module_widths(model, name)) for name in target_modules)


def _sums(model: ModelFacts, name: str) -> tuple[int, int]:
    """The inputs and the outputs of all modules of a name."""
    if name in model.linear_sizes:
        return model.linear_sizes[name][1:]
    inputs, outputs = (times(model, name) * width for width in module_widths(model, name))
    return inputs, outputs


def saved_parameters(model: ModelFacts, name: str) -> int:
    """Parameters of a module that trains whole beside the adapter, counted at every place with this name."""
    h, q, kv, f = widths(model)
    leaf = name.rsplit(".", 1)[-1]
    if "norm" in leaf or leaf.startswith("ln_"):
        return h * (1 + 2 * (model.layers or 0))
    if model.experts and leaf in HOLD_EXPERTS:
        beside = 0 if leaf == "experts" else 3 * h * model.shared_width * (model.layers or 0)
        return (model.expert_parameters or model.parameters or 0) + beside
    blocks = {"mlp": (2 if model.model_type in GATELESS else 3) * h * f, "self_attn": 2 * h * (q + kv)}
    inputs, outputs = module_widths(model, leaf)
    return times(model, leaf) * blocks.get(leaf, inputs * outputs)


def per_layer_embeddings(model: ModelFacts) -> int:
    """The parameters of the embeddings that Gemma 3n and 4 have for each layer, of which a token reads one row."""
    if model.tied_embeddings is None or not (model.embedding_parameters and model.vocab_size and model.hidden_size):
        return 0
    return model.embedding_parameters - model.vocab_size * model.hidden_size * (1 if model.tied_embeddings else 2)


def unquantized(model: ModelFacts) -> tuple[int, int]:
    """The least and the most parameters that QLoRA leaves in 16 bits: embeddings, output head and experts."""
    one, counted = (model.vocab_size or 0) * (model.hidden_size or 0), model.embedding_parameters
    least, most = (one, 2 * one) if counted is None else (counted, counted)
    if not model.experts:
        return least, most
    if model.expert_parameters is None:
        return least, max(most, model.parameters or 0)
    return least + model.expert_parameters, most + model.expert_parameters


def largest_linear(model: ModelFacts) -> int:
    """The size of a layer's largest matrix, in the MLP or for the queries. Each expert has its own matrices."""
    h, q, _, _ = widths(model)
    return h * max(q, model.intermediate_size or 4 * h)
