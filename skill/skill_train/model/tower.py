"""The vision tower of a model, from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skill_train.facts import ModelFacts, TowerFacts
from skill_train.program.pictures.tokens import EXPANSIONS

Config = Mapping[str, Any]

# What a published vision_config may leave out: the defaults of transformers 5.23, which a test compares.
_SIGLIP = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "image_size": 224, "patch_size": 16}
_PIXTRAL = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "patch_size": 16}
DEFAULTS: dict[str, dict[str, int]] = {
    "qwen2_vl": {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "patch_size": 14, "temporal_patch_size": 2},
    "qwen2_5_vl": {
        "depth": 32,
        "hidden_size": 3584,
        "intermediate_size": 3420,
        "patch_size": 14,
        "temporal_patch_size": 2,
    },
    "qwen3_vl": {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "patch_size": 16,
        "temporal_patch_size": 2,
    },
    "gemma3": _SIGLIP,
    "smolvlm": _SIGLIP | {"hidden_size": 1152, "patch_size": 32},
    "idefics3": _SIGLIP | {"hidden_size": 1152, "patch_size": 32},
    "mistral3": _PIXTRAL | {"patch_size": 14},
    "pixtral": _PIXTRAL,  # that of a Llava, which may have another
}


def trains_on_pictures(model: ModelFacts) -> bool:
    """Whether the training program reads the pictures of rows for this model."""
    return model.vision and model.model_type in EXPANSIONS and (model.model_type != "llava" or model.tower is not None)


def unread_pictures(model: ModelFacts) -> str:
    """Why the training program reads no pictures for this model."""
    families = ", ".join(EXPANSIONS) + " with Pixtral's tower"
    kind = model.model_type + " with another tower" * (model.model_type in EXPANSIONS)
    return f"pictures can be trained with {families}, and this model is of the type {kind}"


def read_tower(config: Config) -> TowerFacts | None:
    """The sizes of the vision tower. None for a text model, for a Llava without Pixtral's tower, and where neither
    config.json nor its type says one.

    Source: the config classes of Qwen2-VL to Qwen3-VL, SigLIP (Gemma 3, SmolVLM, Idefics3) and Pixtral in transformers
    5.23. Qwen2-VL calls the width of the tower embed_dim, and the width of its output hidden_size.
    """
    stated = config.get("vision_config")
    if not isinstance(stated, Mapping):
        return None
    kind = str(config.get("model_type"))
    if kind == "llava":
        kind = str(stated.get("model_type"))
        if kind != "pixtral":
            return None
    vision = {**DEFAULTS.get(kind, {}), **stated}
    layers, patch = _positive(vision, ("depth", "num_hidden_layers")), _positive(vision, ("patch_size",))
    hidden = _positive(vision, ("embed_dim", "hidden_size"))
    inner = _positive(vision, ("intermediate_size",))
    if not inner and hidden and _positive(vision, ("mlp_ratio",)):
        inner = hidden * (_positive(vision, ("mlp_ratio",)) or 0)
    merged = _patches_per_token(config, vision, patch)
    if not (layers and hidden and inner and patch and merged):
        return None
    values = 3 * patch**2 * (_positive(vision, ("temporal_patch_size",)) or 1)
    return TowerFacts(layers, hidden, inner, merged, values)


def _patches_per_token(config: Config, vision: Config, patch: int | None) -> int | None:
    side = _positive(vision, ("spatial_merge_size",)) or _positive(config, ("spatial_merge_size", "scale_factor"))
    if side:
        return side**2
    if config.get("model_type") == "llava":
        return 1
    tokens, pixels = _positive(config, ("mm_tokens_per_image",)), _positive(vision, ("image_size",))
    if tokens and pixels and patch:
        return (pixels // patch) ** 2 // tokens
    return None


def _positive(config: Config, keys: tuple[str, ...]) -> int | None:
    """The first of these keys with a positive whole number."""
    values = (config.get(key) for key in keys)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)
