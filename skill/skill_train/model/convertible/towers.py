"""Differences between what config.json says of a vision tower and its projector, and what llama.cpp computes.

Each was found by converting a tiny pair and comparing its embeddings of a picture with those of transformers
(llama-cpp-python 0.3.36, transformers 5.23), as tests/model/test_projectors.py does. Sources: conversion/{qwenvl,
qwen3vl,llava}.py and tools/mtmd/clip.cpp.
"""

import math
from typing import Any

from skill_train.model.tower import DEFAULTS, Config, positive

_QWEN = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe")
_TILED = ("SmolVLM", "Idefics3")
_OF_PIXTRAL = ("Llava", "Mistral3")  # the converter makes their projectors for Pixtral's tower alone
_GELU = "gelu"  # by its tanh approximation, so every form of it but the quick one
# The functions of the tower's MLP that llama.cpp computes, whatever config.json says. Of Pixtral it reads which of two.
_ACTIVATIONS = {
    "Qwen2VL": ("quick_gelu",),
    "Qwen2_5_VL": ("silu",),
    **dict.fromkeys(("Qwen3VL", "Qwen3VLMoe", "Gemma3", *_TILED), (_GELU,)),
    **dict.fromkeys(_OF_PIXTRAL, ("silu", _GELU)),
}
_THETA = 10_000.0  # of the tower's positions
_MERGED = 2  # patches along a side of what becomes one token, and moments of a film in a patch
_WINDOW = 112  # pixels, of Qwen2.5-VL
_LAYER = {"Llava": -2, "Mistral3": -1}  # that transformers reads, where config.json does not say one


def tower_computed_otherwise(architecture: str, config: Config) -> str | None:
    """Why llama.cpp computes something else of a picture; None if no reason is known."""
    name = architecture.removesuffix("ForConditionalGeneration")
    vision: Config = config.get("vision_config") or {}
    if name in _OF_PIXTRAL and (kind := vision.get("model_type")) != "pixtral":
        return (
            f"llama.cpp's converter makes a projector of {architecture} with Pixtral's tower alone, and this one has "
            f"{kind}"
        )
    tower = {**DEFAULTS.get(str(config.get("model_type")), {}), **vision}
    of_qwen = _other_patches(tower) if name in _QWEN else None
    return (
        _other_activation(name, tower)
        or _other_positions(name, tower)
        or of_qwen
        or (_other_windows(tower) if name == "Qwen2_5_VL" else None)
        or (_other_projector(name, config) if name in _OF_PIXTRAL else None)
        or (
            "llama.cpp joins the patches of this family, and this model keeps them apart (scale_factor: 1)"
            if config.get("scale_factor") == 1 and name in _TILED
            else None
        )
    )


def _other_activation(name: str, tower: Config) -> str | None:
    functions, named = _ACTIVATIONS.get(name), tower.get("hidden_act")
    if not functions or named is None:
        return None
    if named in functions or (name not in _OF_PIXTRAL and _GELU in functions and str(named).startswith(_GELU)):
        return None
    computed = " or ".join(functions)
    return (
        f"llama.cpp computes the vision tower of this family with {computed}, and vision_config.hidden_act says {named}"
    )


def _other_positions(name: str, tower: Config) -> str | None:
    rope = tower.get("rope_parameters") or {}
    theta = rope.get("rope_theta", tower.get("rope_theta", _THETA))
    if name not in (*_QWEN, *_OF_PIXTRAL) or theta == _THETA:
        return None
    return (
        f"llama.cpp uses rope_theta 10000 for the vision tower of this family, and this model uses {theta} (rope_theta)"
    )


def _other_patches(tower: Config) -> str | None:
    for key in ("spatial_merge_size", "temporal_patch_size"):
        if tower.get(key, _MERGED) != _MERGED:
            return f"llama.cpp takes {_MERGED} for this number of every tower of this family ({key}: {tower[key]})"
    places = positive(tower, ("num_position_embeddings",)) or 1
    if math.isqrt(places) ** 2 != places:
        return f"llama.cpp needs a square of positions in the tower (num_position_embeddings: {places})"
    return None


def _other_windows(tower: Config) -> str | None:
    """llama.cpp lets every so many layers see the whole picture, and the others windows of 112 pixels."""
    if tower.get("window_size") != _WINDOW:
        return (
            f"llama.cpp lets the tower's layers see windows of {_WINDOW} pixels, and config.json says another size "
            f"(window_size: {tower.get('window_size')})"
        )
    whole: Any = tower.get("fullatt_block_indexes")
    depth = tower.get("depth")
    every = whole[0] + 1 if isinstance(whole, list) and whole else 1
    if every > 1 and isinstance(depth, int) and whole == list(range(every - 1, depth, every)):
        return None
    return (
        "llama.cpp lets every second, third or further layer of this tower see the whole picture, and this model "
        f"others (fullatt_block_indexes: {whole})"
    )


def _other_projector(name: str, config: Config) -> str | None:
    layer = config.get("vision_feature_layer", _LAYER[name])
    if layer not in (-1, [-1]):
        return (
            f"llama.cpp reads the last layer of Pixtral's tower, and this model another (vision_feature_layer: {layer})"
        )
    if not str(config.get("projector_hidden_act", _GELU)).startswith(_GELU):
        return "llama.cpp computes Pixtral's projector with GELU, and projector_hidden_act says another function"
    return None
