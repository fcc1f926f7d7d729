"""Conditions on config.json under which llama.cpp computes something else, by architecture: those that are no value of
one key."""

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import dropwhile
from typing import Any

from skill_train.model.convertible.gemma import GEMMA
from skill_train.model.tower import Config, positive

SCALED = "llama.cpp scales the shares of this family's experts"
DELTA_NET = "Qwen3Next Qwen3_5 Qwen3_5Moe"


def causal(names: str) -> frozenset[str]:
    return frozenset(f"{name}ForCausalLM" for name in names.split())


def ropes(text: Config) -> Iterator[Config]:
    """What config.json says about positions. Some families have an object for each type of layer."""
    yield {"rope_theta": text.get("rope_theta") or text.get("rotary_emb_base")}
    for own in (text.get("rope_parameters"), text.get("rope_scaling")):
        if isinstance(own, Mapping):
            yield from [each for each in own.values() if isinstance(each, Mapping)] or [own]


def number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 1.0


def _has_inner_width(config: Config) -> bool:
    width, inner = positive(config, ("n_embd",)), config.get("n_inner")
    return width is not None and inner not in (None, 4 * width)


def _turns_other_layers(config: Config) -> bool:
    turned = config.get("no_rope_layers")
    return isinstance(turned, list) and any(bool(each) != (n % 4 != 0) for n, each in enumerate(turned, start=1))


def _has_dense_layers(config: Config) -> bool:
    """Whether a Qwen has layers without experts: transformers puts experts in each `decoder_sparse_step`-th layer."""
    return config.get("decoder_sparse_step", 1) != 1 or bool(config.get("mlp_only_layers"))


def _has_other_axes(config: Config) -> bool:
    """Whether llama.cpp turns a part of a Qwen3-VL's head by another axis of a picture. Each third part is of one axis,
    as long as that has some left; then transformers takes time, and llama.cpp nothing (ggml_rope_multi). What never
    turns once is not seen: the published [24, 20, 20] leaves two such parts."""
    rope = next((own for own in ropes(config) if own.get("mrope_section")), {})
    half, sections = (positive(config, ("head_dim",)) or 128) // 2, rope.get("mrope_section")
    if not isinstance(sections, list) or len(sections) < 3 or not any(isinstance(n, int) and n > 0 for n in sections):
        return False
    theta = number(rope.get("rope_theta") or config.get("rope_theta") or 500_000)
    slowest = (positive(config, ("max_position_embeddings",)) or 128_000) / (2 * math.pi)

    def axis(part: int) -> int | None:
        return part % 3 if part < 3 * sections[part % 3] else None

    seen = (part for part in range(half) if theta ** (part / half) < slowest)
    return any(axis(part % sum(sections)) != (axis(part) or 0) for part in seen)


# A condition on config.json, and why a model that meets it cannot be converted.
_Rule = tuple[Callable[[Config], bool], str]


def _lacks_rotated(key: str) -> _Rule:
    why = f"llama.cpp's converter reads the rotated part of a head from {key}, which config.json lacks"
    return lambda config: key not in config, why


_AXES = (
    _has_other_axes,
    "llama.cpp turns parts of a head otherwise, where the first of mrope_section is too small for the others",
)
_EXPERTS_EVERYWHERE = (
    _has_dense_layers,
    "llama.cpp needs experts in every layer of this family (decoder_sparse_step: 1, and no mlp_only_layers)",
)


def _has_both_mlps(config: Config) -> bool:
    layers = config.get("layers_block_type") or config.get("hybrid_override_pattern") or ""
    return ("mlp" in layers or "-" in layers) and ("moe" in layers or "E" in layers)


def _scales_otherwise(config: Config) -> bool:
    usual = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}
    return any(config.get(key, value) != value for key, value in usual.items())


def _grows(config: Config) -> bool:
    longest, original = positive(config, ("max_position_embeddings",)), "original_max_position_embeddings"
    return any(longest != (positive(rope, (original,)) or longest) for rope in ropes(config))


def _has_other_values(config: Config) -> bool:
    heads, width = positive(config, ("num_attention_heads",)), positive(config, ("hidden_size",))
    own = positive(config, ("v_head_dim",))
    return bool(heads and width and own and own * heads != width)


def _windows_other_than(first: int) -> Callable[[Config], bool]:
    """Whether other layers have a window than all but each fourth one. `first` is the first one without a window."""

    def differ(config: Config) -> bool:
        kinds = config.get("layer_types")
        if not isinstance(kinds, list) or not config.get("sliding_window", True):
            return bool(config.get("global_attn_every_n_layers", 4) != 4)
        return any(
            (kind == "full_attention") != (number % 4 == first % 4) for number, kind in enumerate(kinds, start=1)
        )

    return differ


_AS_MANY_HEADS = (
    lambda config: config.get("num_key_value_heads") not in (None, config.get("num_attention_heads")),
    "llama.cpp needs as many key heads as query heads for this family; this model has fewer (num_key_value_heads)",
)
_SOME_WINDOW = (
    lambda config: "sliding_attention" not in (config.get("layer_types") or ("sliding_attention",)),
    "llama.cpp needs a layer with a window in this family (layer_types)",
)
_DENSE_FIRST = (
    lambda config: "dense" in (*dropwhile("dense".__eq__, config.get("mlp_layer_types") or ()),),
    "llama.cpp needs the layers without experts before all others (mlp_layer_types)",
)
_NO_QUERY_RANK = (
    lambda config: "q_lora_rank" in config and config["q_lora_rank"] is None,
    "llama.cpp needs compressed queries in this family (q_lora_rank: null)",
)
_OF_DEEPSEEK = (
    lambda config: any(rope.get("rope_type") == "yarn" and not rope.get("mscale_all_dim") for rope in ropes(config)),
    "llama.cpp computes this family's YaRN as DeepSeek's, which has mscale_all_dim",
)
_FILLED_UP = (
    lambda config: (positive(config, ("vocab_size",)) or 0) % 8 != 0,
    "llama.cpp's converter fills up the tokens of this family to a multiple of 8, but not the embedding (vocab_size)",
)
_ONE_WIDTH = (  # both are 128 if unsaid
    lambda config: config.get("linear_key_head_dim", 128) != config.get("linear_value_head_dim", 128),
    "llama.cpp needs heads of one width in the linear attention of this family (linear_key_head_dim, "
    "linear_value_head_dim)",
)


# By architecture.
RULES: dict[str, tuple[_Rule, ...]] = {
    **GEMMA,
    **dict.fromkeys(causal(DELTA_NET), (_ONE_WIDTH,)),
    "GraniteMoeHybridForCausalLM": (_FILLED_UP,),
    "NemotronHForCausalLM": (
        _FILLED_UP,
        (
            lambda config: config.get("mamba_hidden_act", "silu") not in ("silu", "swish"),
            "llama.cpp computes the mixers of Nemotron-H with silu, and mamba_hidden_act says another function",
        ),
        (
            _has_both_mlps,
            "llama.cpp's converter leaves out the MLPs of a Nemotron-H that has experts in other layers "
            "(layers_block_type)",
        ),
    ),
    "ExaoneMoeForCausalLM": (
        _SOME_WINDOW,
        _DENSE_FIRST,
    ),
    "Glm4MoeLiteForCausalLM": (_DENSE_FIRST, _NO_QUERY_RANK, _OF_DEEPSEEK),
    "YoutuForCausalLM": (_OF_DEEPSEEK,),
    **dict.fromkeys(
        causal("GraniteMoeSWA GraniteSWA"),
        (
            _SOME_WINDOW,
            (
                lambda config: not all(config.get("no_rope_layers") or (1,)),
                "llama.cpp computes layers of this family without positions, and transformers does not "
                "(no_rope_layers)",
            ),
        ),
    ),
    "HunYuanMoEV1ForCausalLM": (
        (lambda config: True, "llama.cpp's converter needs code of the publisher for this family's vocabulary"),
    ),
    "MellumForCausalLM": (
        _SOME_WINDOW,
        (
            lambda config: "dense" in (config.get("mlp_layer_types") or ()),
            "llama.cpp needs experts in every layer of this family (mlp_layer_types)",
        ),
        (
            lambda config: len({base for rope in ropes(config) if (base := rope.get("rope_theta"))}) > 1,
            "llama.cpp turns all layers of this family by one base, and config.json has several (rope_theta)",
        ),
    ),
    "LagunaForCausalLM": (
        (
            _windows_other_than(1),
            "llama.cpp takes every fourth layer of Laguna, from the first on, for one without window, and this one "
            "others (layer_types)",
        ),
        (
            lambda config: bool(config.get("moe_router_logit_softcapping")),
            "llama.cpp does not cap the routers of this family (moe_router_logit_softcapping)",
        ),
    ),
    "MiniCPM3ForCausalLM": (
        _NO_QUERY_RANK,
        (
            _grows,
            "llama.cpp's converter leaves out MiniCPM3's factor beyond original_max_position_embeddings",
        ),
        (
            _scales_otherwise,
            "llama.cpp computes MiniCPM3 with scale_emb 12, scale_depth 1.4 and dim_model_base 256, and config.json "
            "has other values",
        ),
        (_has_other_values, "llama.cpp takes hidden_size / num_attention_heads for the values of a head (v_head_dim)"),
    ),
    "AfmoeForCausalLM": (
        (
            lambda config: config.get("mup_enabled") is not True,
            "llama.cpp scales the embedding of every Afmoe (mup_enabled: false)",
        ),
        (
            lambda config: config.get("route_norm", True) is not True,
            f"{SCALED}, and transformers does too, but its converter writes what config.json says (route_norm: false)",
        ),
        (
            _windows_other_than(4),
            "llama.cpp takes every fourth layer of Afmoe for one without window and positions, and this one others "
            "(layer_types)",
        ),
    ),
    "BambaForCausalLM": (_lacks_rotated("attn_rotary_emb"),),
    "MiniMaxM2ForCausalLM": (_lacks_rotated("rotary_dim"),),
    "FalconForCausalLM": (
        (
            lambda config: not config.get("new_decoder_architecture") and config.get("parallel_attn") is False,
            "llama.cpp computes attention and MLP of every Falcon side by side, and this one has parallel_attn: false",
        ),
        (
            lambda config: config.get("ffn_hidden_size") not in (None, 4 * config.get("hidden_size", 4544)),
            "llama.cpp takes the MLP of every Falcon for 4 x hidden_size wide, and ffn_hidden_size is not",
        ),
    ),
    "BitNetForCausalLM": ((lambda config: True, "llama.cpp's converter has no place for the inner norms of BitNet"),),
    "GPT2LMHeadModel": (
        (
            _has_inner_width,
            "llama.cpp's converter takes the MLP of every GPT-2 for 4 x n_embd wide, and n_inner is not",
        ),
        (
            lambda config: (
                config.get("scale_attn_by_inverse_layer_idx") is True or config.get("scale_attn_weights") is False
            ),
            "llama.cpp scales the attention of every GPT-2 by its heads alone, and this config.json says another scale",
        ),
    ),
    "MPTForCausalLM": (
        (
            lambda config: isinstance(own := config.get("attn_config"), Mapping) and own.get("alibi") is False,
            "llama.cpp gives MPT no positions with alibi: false, and transformers computes ALiBi all the same",
        ),
    ),
    "Qwen2MoeForCausalLM": (_EXPERTS_EVERYWHERE,),
    "Qwen3MoeForCausalLM": (
        (lambda config: config.get("norm_topk_prob", False) is not True, f"{SCALED} (norm_topk_prob: false)"),
        _EXPERTS_EVERYWHERE,
    ),
    "DeepseekV2ForCausalLM": (
        (
            lambda config: (config.get("topk_group") or 0) < (config.get("n_group") or 0),
            "llama.cpp chooses groups of experts as DeepSeek-V3 does, and this family otherwise (topk_group)",
        ),
    ),
    "Lfm2MoeForCausalLM": (
        (
            lambda config: config.get("routed_scaling_factor", 1.0) != 1,
            "llama.cpp does not read routed_scaling_factor of this family, and config.json has another value than 1",
        ),
    ),
    "Qwen3VLForConditionalGeneration": (_AXES,),
    "Qwen3VLMoeForConditionalGeneration": (_AXES, _EXPERTS_EVERYWHERE),
    "OlmoeForCausalLM": (_AS_MANY_HEADS,),
    "Dots1ForCausalLM": (_AS_MANY_HEADS,),
    "SmolLM3ForCausalLM": (
        (
            _turns_other_layers,
            "llama.cpp leaves every fourth layer of SmolLM3 without positions, and this one others (no_rope_layers)",
        ),
    ),
}
