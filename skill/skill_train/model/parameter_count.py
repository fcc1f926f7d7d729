"""Computes the number of parameters of a model from its config: one formula for each family of decoders.

The formulas follow the modules of transformers 5.23 (`models/<type>/modeling_<type>.py`). Tests compare them with the
published counts of real models and with models that transformers builds from the same config.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from skill_train.facts import ModelFacts

OF_EXPERTS = re.compile(r"(?:^|\.)(?:experts|local_experts)\.")
# What predicts further tokens, as the files name it: a part of its own, or a layer behind the last one.
_FURTHER_PART = re.compile(r"(?:^|\.)(?:mtp\w*|nextn)\.")
_KEYS = re.compile(r"\.self_attn\.(?:k_proj|v_proj|k_norm)\.")
HEADERS = "safetensors headers"  # where a count is from
_LAYER = re.compile(r"(?:model\.|language_model\.|backbone\.)*layers\.(\d+)\.")


class TextShape(msgspec.Struct, frozen=True):
    """The text decoder of a model, with every number that the formulas need."""

    model_type: str
    layers: int
    hidden_size: int
    vocab_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    tied_embeddings: bool
    context: int
    experts: int = 0
    experts_per_token: int = 0

    @property
    def embedding(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def head(self) -> int:
        """The parameters of the output head, if it is separate from the input embedding."""
        return 0 if self.tied_embeddings else self.embedding


class ParameterCount(msgspec.Struct, frozen=True):
    total: int  # all parameters
    experts: int = 0  # the parameters in all experts


class _Block(msgspec.Struct, frozen=True):
    """The differences of one family of gated decoders from Llama."""

    # queries, keys and values have a bias unless the config switches it off, the output has none
    qkv_bias: bool = False
    qkv_switch: str = "qkv_bias"  # the key of the config that switches it off
    reads_bias: bool = True  # `attention_bias` and `mlp_bias` of the config count
    norms: int = 2  # the number of RMS norms of the hidden size in a layer
    head_norms: bool = False  # a layer has one norm over a head for queries and one for keys
    width_norms: bool = False  # a layer has the same norms over all heads together


_GATED: dict[str, _Block] = {
    **dict.fromkeys(("gemma", "granite", "llama", "smollm3"), _Block()),
    # The fused projections of Phi-3 have as many numbers as separate ones.
    **dict.fromkeys(("mistral", "mixtral", "phi3"), _Block(reads_bias=False)),
    **dict.fromkeys(("qwen2", "qwen2_moe"), _Block(qkv_bias=True, reads_bias=False)),
    **dict.fromkeys(("qwen3", "qwen3_moe"), _Block(head_norms=True)),
    "gemma2": _Block(norms=4),
    "gemma3_text": _Block(norms=4, head_norms=True),
    "glm": _Block(qkv_bias=True, qkv_switch="attention_bias", reads_bias=False),
    "olmo2": _Block(width_norms=True),
}


def count(shape: TextShape, config: Mapping[str, Any]) -> ParameterCount:
    """The parameters of a decoder of a known type.

    Args:
        config: the keys that only some families have: biases, and which layers contain experts.

    Raises:
        KeyError: there is no formula for this model type; call `knows` first.
    """
    if shape.model_type in _GATED:
        return _gated(shape, config)
    return ParameterCount(_PLAIN[shape.model_type](shape, config))


def knows(model_type: str) -> bool:
    return model_type in _GATED or model_type in _PLAIN


_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")  # how many


def shared_width(config: Mapping[str, Any], expert: int | None) -> int:
    """The width of the experts that every token passes beside those that are chosen; 0 where there are none.

    Args:
        expert: the width of one expert.
    """
    if config.get("model_type") == "gemma4_text":  # its MLP stands beside the experts
        return _number(config, "intermediate_size")
    stated = [_number(config, f"{key}_intermediate_size") for key in ("shared_expert", "shared")]
    if any(stated) or config.get("model_type") == "llama4_text":
        return max(stated) or expert or 0
    return (expert or 0) * next((_number(config, key) for key in _SHARED if _number(config, key)), 0)


def loaded(shapes: Mapping[str, Sequence[int]], layers: int | None, borrowing: int = 0) -> dict[str, Sequence[int]]:
    """The tensors of the weight files without those that predict further tokens (DeepSeek-V3, GLM-4.5, Qwen3-Next), and
    without the keys and values of layers that use those of others. transformers loads none of these
    (`_keys_to_ignore_on_load_unexpected` of 5.23), so they are not trained.

    Args:
        layers: the number in the config; None where it does not say one.
        borrowing: how many of the last ones use the keys and values of others (`ModelFacts.borrowing_layers`).
    """

    def further(name: str) -> bool:
        layer = _LAYER.match(name)
        number = int(layer[1]) - layers if layer is not None and layers is not None else -borrowing - 1
        unused = number >= -borrowing and _KEYS.search(name) is not None
        return number >= 0 or unused or _FURTHER_PART.search(name) is not None

    return {name: shape for name, shape in shapes.items() if not further(name)}


def in_experts(shapes: Mapping[str, Sequence[int]], experts: int) -> int:
    """The parameters in experts by the tensors of the weight files: those of a module of that name, and stacks of as
    many matrices (Granite's)."""
    return sum(
        math.prod(shape)
        for name, shape in shapes.items()
        if OF_EXPERTS.search(name) or (len(shape) == 3 and shape[0] == experts)
    )


def idle(in_experts: int, experts: int, per_token: int) -> int:
    """The parameters in the experts that a token does not use."""
    return in_experts * (experts - per_token) // experts


def with_files(facts: ModelFacts, shapes: Mapping[str, Sequence[int]]) -> ModelFacts:
    """Adds the facts that only the tensors of the weight files show: the parameters that transformers does not load,
    and for a mixture of experts the parameters in experts, and those that a token passes.

    Args:
        shapes: the shape of every tensor by its name; empty where nobody knows them.
    """
    loaded_shapes = loaded(shapes, facts.layers, facts.borrowing_layers)
    further = sum(math.prod(shape) for name, shape in shapes.items() if name not in loaded_shapes)
    if further and facts.parameters is not None and facts.parameters_from == HEADERS:
        active = None if facts.active_parameters is None else facts.active_parameters - further
        facts = replace(
            facts, parameters=facts.parameters - further, active_parameters=active, further_parameters=further
        )
    if facts.experts and facts.expert_parameters is None:
        return _with_experts(facts, loaded_shapes, facts.experts)
    return facts


def _with_experts(facts: ModelFacts, shapes: Mapping[str, Sequence[int]], experts: int) -> ModelFacts:
    per_token, total, inside = facts.experts_per_token, facts.parameters, in_experts(shapes, experts)
    if not inside or total is None or inside > total:
        return facts
    facts = replace(facts, expert_parameters=inside)
    if facts.active_parameters is not None or per_token is None or per_token > experts:
        return facts
    unknown = {key: why for key, why in facts.unknown.items() if key != "active_parameters"}
    return replace(facts, active_parameters=total - idle(inside, experts, per_token), unknown=unknown)


def without_copies(stored: int, shape: TextShape, counted: ParameterCount) -> int:
    """The parameters of a model whose files hold `stored` numbers.

    A file can contain more than the model: a copy of the tied head (Qwen3-0.6B), or each layer's triangular mask and a
    few other numbers (GPT-2, Pythia). Any other difference belongs to the model and is counted.
    """
    extra = stored - counted.total
    if shape.tied_embeddings and extra == shape.embedding:
        return counted.total
    masks = shape.layers * shape.context**2
    if shape.model_type in ("gpt2", "gpt_neox") and masks <= extra <= masks + shape.layers * 1024:
        return counted.total
    return stored


def _gated(shape: TextShape, config: Mapping[str, Any]) -> ParameterCount:
    block = _GATED[shape.model_type]
    norms = block.norms * shape.hidden_size
    feed_forward, experts = _feed_forward(shape, config, biased=block.reads_bias and bool(config.get("mlp_bias")))
    layers = shape.layers * (_attention(shape, block, config) + norms) + feed_forward
    return ParameterCount(shape.embedding + layers + shape.hidden_size + shape.head, experts)


def _attention(shape: TextShape, block: _Block, config: Mapping[str, Any]) -> int:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = shape.hidden_size * (2 * queries + 2 * keys)  # q, o, k, v
    inner_biases = queries + 2 * keys
    if block.qkv_bias and config.get(block.qkv_switch, True):
        weights += inner_biases
    if block.reads_bias and config.get("attention_bias"):
        weights += inner_biases + shape.hidden_size
    if block.head_norms:
        weights += 2 * shape.head_dim
    if block.width_norms:
        weights += queries + keys
    return weights


def _feed_forward(shape: TextShape, config: Mapping[str, Any], *, biased: bool) -> tuple[int, int]:
    """`(all, in experts)` over all layers. With experts the `intermediate_size` of the shape is that of one of them."""
    if not shape.experts:
        return shape.layers * _mlp(shape.hidden_size, shape.intermediate_size, biased=biased), 0
    sparse = _sparse_layers(shape, config)
    expert = _mlp(shape.hidden_size, shape.intermediate_size)
    shared = _number(config, "shared_expert_intermediate_size") if shape.model_type == "qwen2_moe" else 0
    beside = shape.hidden_size * shape.experts  # the router
    if shared:
        beside += _mlp(shape.hidden_size, shared) + shape.hidden_size  # and its gate
    dense = (shape.layers - sparse) * _mlp(shape.hidden_size, _number(config, "intermediate_size"))
    return dense + sparse * (shape.experts * expert + beside), sparse * shape.experts * expert


def _sparse_layers(shape: TextShape, config: Mapping[str, Any]) -> int:
    """Layers with experts. Qwen puts them in every `decoder_sparse_step`-th layer that is not in `mlp_only_layers`."""
    step = _number(config, "decoder_sparse_step") or 1
    candidates = range(step - 1, shape.layers, step)
    dense = config.get("mlp_only_layers")
    named = {n for n in dense if isinstance(n, int)} if isinstance(dense, list) else set()
    return len(candidates) - sum(n in candidates for n in named)


def _number(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) and value > 0 else 0


def _mlp(hidden: int, inner: int, *, biased: bool = False) -> int:
    """Gate, up and down."""
    return 3 * hidden * inner + (2 * inner + hidden if biased else 0)


def _linear(inputs: int, outputs: int, *, biased: bool = True) -> int:
    return inputs * outputs + (outputs if biased else 0)


def _two_layer_mlp(shape: TextShape) -> int:
    return _linear(shape.hidden_size, shape.intermediate_size) + _linear(shape.intermediate_size, shape.hidden_size)


def _gpt2(shape: TextShape, config: Mapping[str, Any]) -> int:
    hidden, norm = shape.hidden_size, 2 * shape.hidden_size
    layer = 2 * norm + _linear(hidden, 3 * hidden) + _linear(hidden, hidden) + _two_layer_mlp(shape)
    return shape.embedding + shape.context * hidden + shape.layers * layer + norm + shape.head


def _gpt_neox(shape: TextShape, config: Mapping[str, Any]) -> int:
    hidden, norm, biased = shape.hidden_size, 2 * shape.hidden_size, bool(config.get("attention_bias", True))
    attention = _linear(hidden, 3 * hidden, biased=biased) + _linear(hidden, hidden, biased=biased)
    return shape.embedding + shape.layers * (2 * norm + attention + _two_layer_mlp(shape)) + norm + shape.head


def _phi(shape: TextShape, config: Mapping[str, Any]) -> int:
    hidden, norm = shape.hidden_size, 2 * shape.hidden_size
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = _linear(hidden, queries) + 2 * _linear(hidden, keys) + _linear(queries, hidden)
    if config.get("qk_layernorm"):
        attention += 4 * (hidden // shape.heads)
    layers = shape.layers * (norm + attention + _two_layer_mlp(shape))
    return shape.embedding + layers + norm + shape.head + shape.vocab_size  # its output head has a bias


_PLAIN: dict[str, Callable[[TextShape, Mapping[str, Any]], int]] = {"gpt2": _gpt2, "gpt_neox": _gpt_neox, "phi": _phi}
