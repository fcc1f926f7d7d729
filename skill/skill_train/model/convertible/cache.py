"""What llama.cpp keeps of each token: which layers cache keys and values, and how many numbers. Pure: from config.json.

Found by loading a tiny file of each kind and reading the sizes that llama.cpp prints (llama-cpp-python 0.3.36).
"""

from collections.abc import Mapping

from skill_train.model.tower import Config, positive

# Kinds of layers that keep a state of fixed size, or nothing (`layer_types`, and Nemotron's `layers_block_type`).
_WITHOUT = ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "mlp", "moe")
# Types whose keys and values llama.cpp keeps as one latent vector of a token: kv_lora_rank, and the rotated part of a
# key. Others with a kv_lora_rank may keep every head's (MiniCPM3 does).
_LATENT = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_linear", "youtu")


def cached_layers(text: Config, layers: int | None) -> list[str] | None:
    """The kinds of the layers that cache keys and values of their own; None where nothing says it, and all may."""
    kinds = _kinds(text, layers)
    if kinds is None:
        return None
    shared = positive(text, ("num_kv_shared_layers",)) or 0  # the last ones read what an earlier layer keeps (Gemma)
    return [kind for kind in kinds[: len(kinds) - shared] if kind not in _WITHOUT]


def _kinds(text: Config, layers: int | None) -> list[str] | None:
    """The kind of each layer, under whichever key a family states it."""
    for key in ("layer_types", "layers_block_type"):
        kinds = text.get(key)
        if isinstance(kinds, list) and kinds:
            return [str(kind) for kind in kinds]
    pattern = text.get("hybrid_override_pattern")  # Nemotron-H: `M` a mixer, `-` an MLP, `E` experts
    if isinstance(pattern, str) and pattern:
        return ["full_attention" if kind == "*" else "mamba" for kind in pattern]
    if layers is None:
        return None
    attending = _attending(text, layers)
    return None if attending is None else ["full_attention" if n in attending else "mamba" for n in range(layers)]


def _attending(text: Config, layers: int) -> set[int] | None:
    """The layers with attention of a hybrid that states them by number."""
    interval, period = (positive(text, (key,)) for key in ("full_attention_interval", "attn_layer_period"))
    if interval:  # Qwen3-Next
        return set(range(interval - 1, layers, interval))
    if period:  # Jamba
        return set(range(positive(text, ("attn_layer_offset",)) or 0, layers, period))
    own = text.get("linear_attn_config")
    if isinstance(own, Mapping) and isinstance(own.get("full_attn_layers"), list):  # Kimi counts from one
        return {n - 1 for n in own["full_attn_layers"] if isinstance(n, int)}
    listed = next(
        (text[key] for key in ("attn_layer_indices", "full_attn_idxs") if isinstance(text.get(key), list)), None
    )
    return None if listed is None else {n for n in listed if isinstance(n, int)}


def numbers_per_token(
    text: Config, heads: int | None, kv_heads: int | None, head_dim: int | None
) -> tuple[int, int] | None:
    """The least and the most numbers that a layer which sees everything keeps of a token; None where these are keys and
    values of the usual width."""
    rank, rotated = positive(text, ("kv_lora_rank",)), positive(text, ("qk_rope_head_dim",))
    if rank and rotated and heads:
        least = rank + rotated
        if text.get("model_type") in _LATENT:
            return least, least
        inner = [positive(text, (key,)) or 0 for key in ("qk_nope_head_dim", "v_head_dim")]
        return least, max(least, heads * (rotated + sum(inner)))
    if not (kv_heads and head_dim):
        return None
    layers = text.get("per_layer_config")  # as transformers 5.23 writes Gemma 4; its published config.json has names
    if not isinstance(layers, Mapping):
        named = {"head_dim": text.get("global_head_dim"), "num_key_value_heads": text.get("num_global_key_value_heads")}
        layers = {"": {key: value for key, value in named.items() if value}}
    sizes = [
        2 * (positive(own, ("head_dim",)) or head_dim) * (positive(own, ("num_key_value_heads",)) or kv_heads)
        for own in layers.values()
        if isinstance(own, Mapping) and own
    ]
    return (min(sizes), max(sizes)) if sizes else None


def one_key_head(text: Config) -> bool:
    """Whether all heads share one head of keys, whatever the number in config.json says (Falcon 7B, StarCoder)."""
    kind = text.get("model_type")
    if kind not in ("falcon", "gpt_bigcode") or (kind == "falcon" and text.get("new_decoder_architecture") is True):
        return False
    return bool(text.get("multi_query", True))
