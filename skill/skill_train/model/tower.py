"""The vision tower of a model, from its config.json, and the image processor, from the files beside it."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from skill_train.facts import ModelFacts, TowerFacts
from skill_train.program.events import Refused
from skill_train.program.pictures.engine import LINED
from skill_train.program.pictures.processor import PROCESSOR_DEFAULTS, read_processor

Config = Mapping[str, Any]

# What a published vision_config may leave out: the defaults of transformers 5.23, which a test compares.
_SIGLIP = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "image_size": 224, "patch_size": 16}
_PIXTRAL = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "patch_size": 16}
DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "depth": 32, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4, "patch_size": 14, "temporal_patch_size": 2,
    },
    "qwen2_5_vl": {
        "depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "patch_size": 14, "temporal_patch_size": 2,
        "out_hidden_size": 3584, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "qwen3_vl": {
        "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16, "temporal_patch_size": 2,
        "out_hidden_size": 3584, "deepstack_visual_indexes": [8, 16, 24],
    },
    "gemma3": _SIGLIP,
    "smolvlm": _SIGLIP | {"hidden_size": 1152, "patch_size": 32},
    "idefics3": _SIGLIP | {"hidden_size": 1152, "patch_size": 32},
    "mistral3": _PIXTRAL | {"patch_size": 14},
    "pixtral": _PIXTRAL,  # the tower of a Llava, which may have another one
}  # fmt: skip


def trains_on_pictures(model: ModelFacts) -> bool:
    """Whether the training program reads the pictures of rows for this model."""
    has_processor = model.vision and model.model_type in PROCESSOR_DEFAULTS
    return has_processor and (model.model_type != "llava" or model.tower is not None)


def unread_pictures(model: ModelFacts) -> str:
    """Why the training program reads no pictures for this model."""
    families = ", ".join(PROCESSOR_DEFAULTS) + " with Pixtral's tower"
    kind = model.model_type + " with another tower" * (model.model_type in PROCESSOR_DEFAULTS)
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
    own = str(stated.get("model_type")) if kind == "llava" else kind
    if kind == "llava" and own != "pixtral":
        return None
    vision = {**DEFAULTS.get(own, {}), **stated}
    layers, patch = positive(vision, ("depth", "num_hidden_layers")), positive(vision, ("patch_size",))
    hidden = positive(vision, ("embed_dim", "hidden_size"))
    inner = positive(vision, ("intermediate_size",))
    if not inner and hidden and (ratio := positive(vision, ("mlp_ratio",))):
        inner = hidden * ratio
    merged = _patches_per_token(config, vision, patch)
    if not (layers and hidden and inner and patch and merged):
        return None
    window = (positive(vision, ("window_size",)) or 0) // patch if kind == "qwen2_5_vl" else 0
    return TowerFacts(
        layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        patches_per_token=merged,
        values_per_patch=3 * patch**2 * (positive(vision, ("temporal_patch_size",)) or 1),
        gated=kind in ("qwen2_5_vl", *LINED),
        projector_parameters=_projector(config, vision, hidden, merged),
        windowed_layers=max(0, layers - _listed(vision, "fullatt_block_indexes")) if window else 0,
        window=window**2,
        attends_all=kind in LINED,
    )


def _projector(config: Config, vision: Config, hidden: int, merged: int) -> int | None:
    """The parameters of the matrices between tower and language model, by the modules of transformers 5.23. None for
    another family, or if config.json leaves out a width."""
    kind, text = str(config.get("model_type")), config.get("text_config")
    wide = hidden * merged
    own = positive(vision, ("hidden_size",) if kind == "qwen2_vl" else ("out_hidden_size",))
    if kind.startswith("qwen"):  # Qwen3-VL has one more for each layer whose output it adds to the language model
        merger = None if own is None else wide**2 + wide * own
        return None if merger is None else merger * (1 + _listed(vision, "deepstack_visual_indexes"))
    width = positive(text if isinstance(text, Mapping) else config, ("hidden_size",))
    if width is None:
        return None
    matrices = {
        "gemma3": hidden * width,
        "smolvlm": wide * width,
        "idefics3": wide * width,
        "mistral3": wide * hidden + hidden * width + width**2,
        "llava": hidden * width + width**2,
    }
    return matrices.get(kind)


def reads_processor(config: Config) -> bool:
    """Whether skill-train knows how the image processor of this family reads its files."""
    return config.get("model_type") in PROCESSOR_DEFAULTS


def with_image_processor(facts: ModelFacts, config: Config, files: Config) -> ModelFacts:
    """The facts of a vision model with its image processor, or with the reason why that is unknown.

    Args:
        files: the documents of the image processor, by file name.
    """
    if not config.get("vision_config"):
        return facts
    why = f"the tokens of a picture are not known for the family {config.get('model_type')}"
    if reads_processor(config):
        try:
            return replace(facts, image_processor=read_processor(config, files))
        except Refused as refusal:
            why = refusal.error["message"]
    return replace(facts, unknown={**facts.unknown, "image_processor": why})


def _patches_per_token(config: Config, vision: Config, patch: int | None) -> int | None:
    if config.get("model_type") == "llava":
        return 1
    side = positive(vision, ("spatial_merge_size",)) or positive(config, ("spatial_merge_size", "scale_factor"))
    if side:
        return side**2
    tokens, pixels = positive(config, ("mm_tokens_per_image",)), positive(vision, ("image_size",))
    if tokens and pixels and patch:
        return (pixels // patch) ** 2 // tokens
    return None


def _listed(config: Config, key: str) -> int:
    """How many layers a list names."""
    value = config.get(key)
    return len(value) if isinstance(value, list) else 0


def positive(config: Config, keys: tuple[str, ...]) -> int | None:
    """The first positive whole number under these keys."""
    values = (config.get(key) for key in keys)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)
