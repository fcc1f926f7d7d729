"""How llama.cpp's converter arranges weights. This depends on the architecture and never on the values.

Each function takes a weight of transformers and returns what the file holds. llama.cpp rotates query and key of some
architectures by pairs of neighbours where transformers rotates halves (`permuted`). Fused weights have their parts in
another order. Norms that multiply by 1 + weight hold the sum.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

Arrange = Callable[[Any], Any]

# Rows of query and key change places.
_PERMUTED = frozenset((
    "arcee", "granite", "granite_swa", "granitehybrid", "granitemoe", "llama", "mistral3", "nemotron_h",
    "nemotron_h_moe", "olmo", "smollm3",
))  # fmt: skip
# A norm multiplies by 1 + weight in transformers, and by the tensor in llama.cpp.
_ONE_MORE = frozenset(("gemma", "gemma2", "gemma3", "nemotron", "qwen35", "qwen35moe", "qwen3next"))
_TILED = frozenset(("qwen35", "qwen35moe"))  # value heads of linear attention change places
_EXPERTS = ("ffn_gate_exps", "ffn_up_exps")
# Weights of experts and routers that a file stores as they are, under names that gguf-py's map does not know.
_WHOLE = {
    ".experts.up_proj": "ffn_up_exps.weight",
    ".experts.down_proj_bias": "ffn_down_exps.bias",
    ".router.scale": "ffn_gate_inp.scale",
    ".router.per_expert_scale": "ffn_down_exps.scale",
}


def as_in_model(weight: Any) -> Any:
    return weight


def arrangement(arch: str, config: Any, name: str) -> Arrange:
    """How the converter arranges one weight.

    Args:
        name: the published name of the weight.
    """
    heads = config.num_attention_heads if hasattr(config, "num_attention_heads") else 0
    if arch in _PERMUTED and name.endswith((".q_proj.weight", ".q_proj.bias")):
        return partial(permuted, heads=heads)
    if arch in _PERMUTED and name.endswith((".k_proj.weight", ".k_proj.bias")):
        return partial(permuted, heads=getattr(config, "num_key_value_heads", None) or heads)
    if arch in _ONE_MORE and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return one_more
    if arch == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        return turned
    if ".query_key_value." in name:
        return _query_key_value(arch, config, heads)
    if arch == "falcon-h1" and name.endswith(".weight"):
        return _multiplied(config, name)
    if arch in _TILED and ".linear_attn." in name:
        return partial(_tiled, config=config, layer=name.split(".linear_attn.")[1].split(".")[0])
    return minus_exp if name.endswith(".A_log") else as_in_model


def parts_of(arch: str, config: Any, name: str) -> Iterator[tuple[tuple[str, ...], tuple[Arrange, ...]]]:
    """The ways in which a file may store a fused weight: names of the tensors in their layer, and the part in each."""
    whole = next((tensor for end, tensor in _WHOLE.items() if name.endswith(end)), None)
    if whole is not None:
        yield (whole,), (as_in_model,)
    elif name.endswith(".experts.gate_up_proj"):
        yield ("ffn_gate_up_exps.weight",), (as_in_model,)
        yield tuple(f"{stem}.weight" for stem in _EXPERTS), _gate_and_up(arch)
    elif name.endswith(".experts.gate_up_proj_bias"):
        yield tuple(f"{stem}.bias" for stem in _EXPERTS), (partial(every_other, first=0), partial(every_other, first=1))
    elif name.endswith(".experts.down_proj"):
        yield ("ffn_down_exps.weight",), (turned if arch in ("gpt-oss", "llama4") else as_in_model,)
    elif name.endswith(".shared_mlp.input_linear.weight"):
        halves = (partial(half, number=0), partial(half, number=1))
        yield ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), halves
        yield ("ffn_gate.weight", "ffn_up.weight"), halves
    elif name.endswith(".shared_mlp.output_linear.weight"):
        yield ("ffn_down_shexp.weight",), (as_in_model,)
        yield ("ffn_down.weight",), (as_in_model,)
    elif name.endswith(".kv_b_proj.weight") and hasattr(config, "qk_nope_head_dim"):
        split = {"heads": config.num_attention_heads, "keys": config.qk_nope_head_dim}
        yield ("attn_k_b.weight", "attn_v_b.weight"), (partial(key_part, **split), partial(value_part, **split))
    elif name.endswith(".in_proj_qkvz.weight") and hasattr(config, "linear_num_key_heads"):
        yield (
            ("attn_qkv.weight", "attn_gate.weight"),
            (partial(qkv_of_qkvz, config=config), partial(z_of_qkvz, config=config)),
        )


def permuted(weight: Any, heads: int) -> Any:
    """Orders the rows of each head as 0, n/2, 1, n/2 + 1 …"""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def one_more(weight: Any) -> Any:
    return weight.float() + 1


def minus_exp(weight: Any) -> Any:
    return -weight.float().exp()


def turned(weight: Any) -> Any:
    return weight.transpose(-1, -2)


def half(weight: Any, number: int) -> Any:
    """The first or the second half of the rows."""
    return weight.chunk(2, dim=-2)[number]


def every_other(weight: Any, first: int) -> Any:
    return weight[..., first::2]


def grouped(weight: Any, groups: int, width: int) -> Any:
    """All queries, then all keys, then all values. The weight has groups of queries, a key and a value."""
    rows = weight.reshape(groups, -1, width, *weight.shape[1:])
    return _together(rows[:, :-2], rows[:, -2], rows[:, -1], weight.shape[1:])


def _together(*parts: Any) -> Any:
    import torch

    *blocks, rest = parts
    return torch.cat([block.reshape(-1, *rest) for block in blocks])


def key_part(weight: Any, heads: int, keys: int) -> Any:
    """The keys of DeepSeek's fused keys and values, turned, because llama.cpp multiplies queries by them."""
    return weight.reshape(heads, -1, weight.shape[-1])[:, :keys].transpose(1, 2)


def value_part(weight: Any, heads: int, keys: int) -> Any:
    return weight.reshape(heads, -1, weight.shape[-1])[:, keys:]


def qkv_of_qkvz(weight: Any, config: Any) -> Any:
    """Query, key and value of Qwen3-Next, where each key head has its query, key, values and gates."""
    rows, keys, values = _qkvz(weight, config)
    return _together(rows[:, :keys], rows[:, keys : 2 * keys], rows[:, 2 * keys : 2 * keys + values], weight.shape[1:])


def z_of_qkvz(weight: Any, config: Any) -> Any:
    rows, keys, values = _qkvz(weight, config)
    return _together(rows[:, 2 * keys + values :], weight.shape[1:])


def _qkvz(weight: Any, config: Any) -> tuple[Any, int, int]:
    heads, keys = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // heads * config.linear_value_head_dim
    return weight.reshape(heads, 2 * keys + 2 * values, *weight.shape[1:]), keys, values


def _tiled(weight: Any, config: Any, layer: str) -> Any:
    """A weight of Qwen3.5's linear attention. transformers has all value heads of the first key head first, llama.cpp
    the first value head of each key head first."""
    if layer == "norm":
        return weight
    if layer == "out_proj":
        return turned(_tiled(turned(weight), config, "in_proj_z"))
    heads = config.linear_num_key_heads
    first = 2 * heads * config.linear_key_head_dim if layer in ("in_proj_qkv", "conv1d") else 0
    values = weight[first:].reshape(heads, config.linear_num_value_heads // heads, -1, *weight.shape[1:])
    tiled = _together(weight[:first], values.transpose(0, 1), weight.shape[1:])
    return minus_exp(tiled) if layer == "A_log" else tiled


def _gate_and_up(arch: str) -> tuple[Arrange, Arrange]:
    """The gate and the up projection of experts, which are one weight."""
    if arch == "gpt-oss":  # [experts, width, gate and up in turns]
        return (partial(turned_every_other, first=0), partial(turned_every_other, first=1))
    if arch == "llama4":  # [experts, width, gate then up]
        return (partial(turned_half, number=0), partial(turned_half, number=1))
    return (partial(half, number=0), partial(half, number=1))


def turned_every_other(weight: Any, first: int) -> Any:
    return turned(every_other(weight, first))


def turned_half(weight: Any, number: int) -> Any:
    return half(turned(weight), number)


def _query_key_value(arch: str, config: Any, heads: int) -> Arrange:
    """BLOOM and GPT-NeoX have query, key and value of each head; Falcon has groups."""
    width = config.hidden_size // heads
    if arch in ("bloom", "gptneox"):
        return partial(grouped, groups=heads, width=width)
    if arch == "falcon":
        return partial(grouped, groups=_falcon_groups(config), width=width)
    return as_in_model


def _multiplied(config: Any, name: str) -> Arrange:
    """Falcon-H1 multiplies what goes into its layers or comes out of them. A file has these factors in the weights."""
    factors = {
        "embed_tokens": config.embedding_multiplier,
        "lm_head": config.lm_head_multiplier,
        "gate_proj": config.mlp_multipliers[0],
        "down_proj": config.mlp_multipliers[1],
        "q_proj": config.attention_in_multiplier,
        "k_proj": config.key_multiplier * config.attention_in_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
    }
    layer = name.split(".")[-2]
    if layer == "in_proj":
        return partial(rows_times, factors=_state_row_factors(config))
    return partial(rows_times, factors=[(factors[layer], None)]) if layer in factors else as_in_model


def _state_row_factors(config: Any) -> list[tuple[float, int | None]]:
    """The factors of the gate, x, B, C and the step, each with its number of rows. The last one has the rest."""
    inner, states = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    counts = (inner, inner, states, states, None)
    factors = [config.ssm_in_multiplier * multiplier for multiplier in config.ssm_multipliers]
    return list(zip(factors, counts, strict=True))


def rows_times(weight: Any, factors: list[tuple[float, int | None]]) -> Any:
    """The weight with its rows multiplied.

    Args:
        factors: each with the number of its rows, one after the other; None for all rows that are left.
    """
    scaled, first = weight.float().clone(), 0
    for factor, count in factors:
        end = len(weight) if count is None else first + count
        scaled[first:end] *= factor
        first = end
    return scaled


def _falcon_groups(config: Any) -> int:
    if getattr(config, "new_decoder_architecture", False):
        return int(config.num_kv_heads)
    return 1 if getattr(config, "multi_query", False) else int(config.num_attention_heads)
