"""Differences between what config.json of a Gemma says and what llama.cpp computes: the rules of `differences`."""

from collections.abc import Callable, Mapping

from skill_train.model.tower import Config, positive


def _is_scaled_otherwise(config: Config) -> bool:
    """Whether llama.cpp scales the attention of Gemma 2 or 3 differently. They scale by `query_pre_attn_scalar`.
    llama.cpp scales by the width of a head, and in the 27B models, which it knows by their layers, by the width of the
    model over its heads. A config leaves both keys out if they are 256."""
    heads, width = positive(config, ("num_attention_heads",)), positive(config, ("hidden_size",))
    of_27b = 46 if "gemma2" in str(config.get("model_type")) else 62
    scale = config.get("head_dim", 256)
    if config.get("num_hidden_layers") == of_27b and heads and width:
        scale = width / heads
    return bool(config.get("query_pre_attn_scalar", 256) != scale)


def _scales_windows(config: Config) -> bool:
    ropes = config.get("rope_parameters")
    own = ropes.get("sliding_attention") if isinstance(ropes, Mapping) else None
    return isinstance(own, Mapping) and own.get("rope_type", "default") != "default"


def _of_one_width(config: Config) -> bool:
    """Whether all layers of a Gemma 4 have heads of one width. transformers then writes no width for those that see
    everything."""
    layers = config.get("per_layer_config")
    if isinstance(layers, Mapping):
        return not any(isinstance(own, Mapping) and own.get("head_dim") for own in layers.values())
    return bool(config.get("global_head_dim", 512) == config.get("head_dim", 256))


def _turns_otherwise(config: Config) -> bool:
    ropes = config.get("rope_parameters")
    own = ropes.get("full_attention") if isinstance(ropes, Mapping) else None
    usual = {"rope_type": "proportional", "factor": 1}
    return isinstance(own, Mapping) and (
        "partial_rotary_factor" not in own or any(own.get(key, value) != value for key, value in usual.items())
    )


def _borrows_otherwise(config: Config) -> bool:
    """Whether layers of a Gemma 4 have the keys of other layers than in llama.cpp: of the last one before them, which
    sees everything, and of the one before that, which has a window."""
    kinds, borrowing = config.get("layer_types"), positive(config, ("num_kv_shared_layers",))
    if not isinstance(kinds, list) or not borrowing:
        return False
    before, last = kinds[:-borrowing], ["sliding_attention", "full_attention"]
    return before[-1:] != last[1:] or (last[0] in kinds[-borrowing:] and before[-2:] != last)


_SCALE = (
    _is_scaled_otherwise,
    "llama.cpp scales the attention of Gemma by head_dim, and this one has another query_pre_attn_scalar",
)
# By architecture: conditions on config.json, and why a model that meets one cannot be converted.
GEMMA: dict[str, tuple[tuple[Callable[[Config], bool], str], ...]] = {
    "Gemma2ForCausalLM": (_SCALE,),
    "Gemma3ForCausalLM": (
        _SCALE,
        (
            lambda config: bool(config.get("attn_logit_softcapping")),
            "llama.cpp's converter takes no Gemma 3 whose attention is capped (attn_logit_softcapping)",
        ),
        (
            _scales_windows,
            "llama.cpp leaves out how Gemma 3 scales the positions of layers with a window "
            "(rope_parameters.sliding_attention)",
        ),
    ),
    "Gemma3ForConditionalGeneration": (
        (
            lambda config: bool(config.get("final_logit_softcapping")),
            "llama.cpp caps the logits of Gemma 3, and transformers does not where it reads pictures "
            "(final_logit_softcapping)",
        ),
    ),
    "Gemma4ForCausalLM": (
        (_of_one_width, "llama.cpp's converter takes no Gemma 4 with heads of one width (global_head_dim, head_dim)"),
        (
            _turns_otherwise,
            "llama.cpp's converter writes only one kind of positions for the layers of Gemma 4 that see everything: "
            "rope_type proportional, with partial_rotary_factor and without factor (rope_parameters.full_attention)",
        ),
        (
            _scales_windows,
            "llama.cpp leaves out how Gemma 4 scales the positions of layers with a window "
            "(rope_parameters.sliding_attention)",
        ),
        (
            lambda config: config.get("use_bidirectional_attention") == "all",
            "llama.cpp computes Gemma 4 with causal attention (use_bidirectional_attention: all)",
        ),
        (
            lambda config: not config.get("final_logit_softcapping"),
            "llama.cpp caps the logits of a Gemma 4 at 30 where its config.json has no final_logit_softcapping",
        ),
        (
            lambda config: (
                config.get("hidden_size_per_layer_input", 256) != 0
                and config.get("vocab_size_per_layer_input", 262_144) != config.get("vocab_size", 262_144)
            ),
            "llama.cpp needs as many embeddings for the layers of Gemma 4 as tokens (vocab_size_per_layer_input)",
        ),
        (
            lambda config: set(config.get("layer_types") or ()) == {"full_attention"},
            "llama.cpp needs a layer with a window in Gemma 4 (layer_types)",
        ),
        (
            _borrows_otherwise,
            "llama.cpp takes the keys of other layers for those that have none of their own "
            "(num_kv_shared_layers, layer_types)",
        ),
    ),
}
