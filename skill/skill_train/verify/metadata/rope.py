"""Rotary positions: what config.json says about them, and the tables of factors in a GGUF file."""

import math
from typing import Any

from skill_train.facts import JsonObject
from skill_train.llama.gguf_header import GgufFile

_NAMES = {"default": "none", "linear": "linear", "yarn": "yarn", "longrope": "longrope", "su": "longrope"}
_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_NEVER = 1e30  # the divisor of a frequency of 0
_TOLERANCE = 1e-4  # relative: factors are computed in float32


def rope_of(text: JsonObject, defaults: JsonObject) -> JsonObject:
    """The rope fields in one flat object. `local_theta` is the base of layers with a window, if they have their own."""
    own = {**(defaults.get("rope_parameters") or {}), **(text.get("rope_scaling") or {})}
    own |= text.get("rope_parameters") or {}
    full = {**own, **own["full_attention"]} if isinstance(own.get("full_attention"), dict) else own
    theta = text.get("rope_theta") or text.get("rotary_emb_base") or full.get("rope_theta")
    local = (own.get("sliding_attention") or {}).get("rope_theta") or text.get("rope_local_base_freq")
    fields = {**full, "rope_theta": theta, "local_theta": local, "head": _rotated_head(text, defaults, full)}
    for name in ("original_max_position_embeddings", "max_position_embeddings"):
        fields.setdefault(name, text.get(name) or defaults.get(name))
    return fields if theta is not None else {}


def of_full_layers(defaults: JsonObject) -> JsonObject:
    """What layers that see everything have of their own (Gemma 4), as transformers' class knows it."""
    layers = defaults.get("per_layer_config") or {}
    return next(iter(layers.values()), {})


def kind_of(rope: JsonObject) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def scaling_of(name: str, rope: JsonObject, context: int | None) -> Any:
    """The value of `rope.scaling.<name>`; None when config.json does not state it."""
    kind, original = kind_of(rope), rope.get("original_max_position_embeddings")
    if name == "type":
        return _NAMES.get(kind)
    if name == "factor":
        return rope.get("factor") if kind in ("linear", "yarn") else None
    if name == "original_context_length":
        return original
    if name == "attn_factor" and kind in ("longrope", "su") and context and original:
        scale = context / original
        return rope.get("attention_factor") or (
            math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        )
    names = {"yarn_attn_factor": ("attention_factor", "attn_factor"), "yarn_ext_factor": ("extrapolation_factor",)}
    names |= {"yarn_beta_fast": ("beta_fast",), "yarn_beta_slow": ("beta_slow",)}
    return next((rope[field] for field in names.get(name, ()) if rope.get(field) is not None), None)


def table_faults(gguf: GgufFile, rope: JsonObject) -> list[str]:
    """Faults of scaled positions: they must be in the file, as metadata or as the table of factors of config.json."""
    kind = kind_of(rope)
    expected = _expected_tables(rope)
    stated = any(key.startswith(f"{gguf.architecture}.rope.scaling.") for key in gguf.metadata)
    tables = {name for name in _TABLES if name in gguf.tensors}
    if kind not in ("default", "mrope") and not stated and not tables:
        return [f"rope scaling is missing, config.json has {kind}"]
    faults = [f"{name} is missing, config.json has {kind} rope scaling" for name in expected if name not in tables]
    for name in sorted(tables):
        faults += _compared(gguf, name, expected.get(name), kind)
    return faults


def _compared(gguf: GgufFile, name: str, expected: list[float] | None, kind: str) -> list[str]:
    if expected is None:
        return [f"{name} changes the rope frequencies, config.json has {kind} rope"] if kind == "default" else []
    factors = _floats(gguf, name)
    if len(factors) != len(expected):
        return [f"{name} has {len(factors)} rope factors, config.json gives {len(expected)}"]
    for number, (factor, other) in enumerate(zip(factors, expected, strict=True)):
        if not abs(factor - other) <= _TOLERANCE * abs(other):  # a NaN is not a number either
            return [f"{name}: rope factor {number} is {factor:.6g}, config.json gives {other:.6g}"]
    return []


def _floats(gguf: GgufFile, name: str) -> list[float]:
    import numpy as np

    tensor = gguf.tensors[name]
    kind = {"F32": np.float32, "F16": np.float16}.get(tensor.kind)
    if kind is None:
        return []
    values = np.fromfile(gguf.path, dtype=kind, count=tensor.elements, offset=tensor.offset)
    return [float(value) for value in values]


def _expected_tables(rope: JsonObject) -> dict[str, list[float]]:
    kind = kind_of(rope)
    if kind == "llama3" and rope.get("head"):
        return {"rope_freqs.weight": _llama3(rope)}
    if kind == "proportional" and rope.get("head"):
        half, turned = rope["head"] // 2, int(rope["head"] * rope.get("partial_rotary_factor", 1.0) // 2)
        return {"rope_freqs.weight": [float(rope.get("factor", 1.0))] * turned + [_NEVER] * (half - turned)}
    if kind in ("longrope", "su") and rope.get("long_factor"):
        return {f"rope_factors_{name}.weight": list(map(float, rope[f"{name}_factor"])) for name in ("long", "short")}
    return {}


def _llama3(rope: JsonObject) -> list[float]:
    """The divisor of each frequency, as in Meta's llama-models and in transformers' `llama3` scaling."""
    factor, low, high = (float(rope[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    original, divisors = float(rope["original_max_position_embeddings"]), []
    for number in range(0, int(rope["head"]), 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (number / rope["head"])
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors


def _rotated_head(text: JsonObject, defaults: JsonObject, rope: JsonObject) -> int | None:
    head = of_full_layers(defaults).get("head_dim") or text.get("head_dim") or defaults.get("head_dim")
    width, heads = text.get("hidden_size"), text.get("num_attention_heads")
    head = head or (width // heads if width and heads else None)
    turned = 1.0 if kind_of(rope) == "proportional" else rope.get("partial_rotary_factor") or 1.0
    return None if head is None else int(head * turned)
