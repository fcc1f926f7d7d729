"""The vision tower, read from published configs, and the defaults of what they leave out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import tiny_vision
from skill_train.estimate.memory import training_memory
from skill_train.estimate.step import MicroStep
from skill_train.facts import TowerFacts
from skill_train.model import config, tower
from skill_train.model.folder import read_model, tensor_shapes

CONFIGS = Path(__file__).parents[1] / "support" / "data" / "configs"
# HuggingFaceTB/SmolVLM-256M-Instruct, config.json, as far as sizes go; the tower's MLP and depth are left out there.
SMOLVLM_256M = {
    "model_type": "idefics3",
    "scale_factor": 4,
    "vision_config": {"hidden_size": 768, "image_size": 512, "num_attention_heads": 12, "patch_size": 16},
}


def _published(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())["config"]
    return found


def _sizes(found: TowerFacts | None) -> tuple[int, ...]:
    assert found is not None
    return found.layers, found.hidden_size, found.intermediate_size, found.patches_per_token, found.values_per_patch


def test_published_towers() -> None:
    """By hand: Gemma 3 makes 16 x 16 tokens of 64 x 64 patches; a patch of Qwen is 14 x 14 pixels of two frames."""
    assert _sizes(tower.read_tower(_published("gemma-3-4b"))) == (27, 1152, 4304, 16, 3 * 14 * 14)
    qwen = tower.read_tower(_published("qwen2.5-vl-7b"))
    assert _sizes(qwen) == (32, 1280, 3420, 4, 3 * 14 * 14 * 2)
    assert qwen is not None and (qwen.windowed_layers, qwen.window, qwen.gated) == (28, 8 * 8, True)
    assert _sizes(tower.read_tower(SMOLVLM_256M)) == (12, 768, 3072, 16, 3 * 16 * 16)


# Qwen/Qwen2-VL-7B-Instruct, config.json, as far as sizes go.
QWEN2_VL_7B = {
    "model_type": "qwen2_vl",
    "hidden_size": 3584,
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": 3584,
        "mlp_ratio": 4,
        "num_heads": 16,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}


def test_published_numbers_of_parameters() -> None:
    """Qwen2-VL's paper, table 1: 675 million of the tower, with the part that merges patches. SigLIP's so400m, which
    Gemma 3 has, is named after its 400 million, of which 413 are in these matrices. Both within 3 %, for norms and
    positions; the projector of Gemma 3 is one matrix of 1152 x 2560."""
    qwen, gemma = tower.read_tower(QWEN2_VL_7B), tower.read_tower(_published("gemma-3-4b"))
    assert qwen is not None and gemma is not None
    assert qwen.parameters == pytest.approx(675e6, rel=0.005)
    assert gemma.projector_parameters == 1152 * 2560
    assert gemma.patch_parameters == pytest.approx(413e6, rel=0.005) and 400e6 < gemma.patch_parameters < 428e6


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*tiny_vision.KINDS, "idefics3", "mistral3"])
def test_the_matrices_are_those_of_the_modules(kind: str) -> None:
    """Of the tensors of tiny models: every matrix of tower and projector, but the tables of positions."""
    folder = tiny_vision.cached(kind)
    found = read_model(folder).tower
    assert found is not None
    parts = ("visual", "vision", "connector", "projector")
    matrices = 0
    for name, shape in tensor_shapes(folder).items():
        if (
            any(part in name for part in parts)
            and len(shape) > 1
            and "position" not in name
            and "pos_embed" not in name
        ):
            matrices += math.prod(shape)
    assert found.parameters == matrices


def test_no_tower_of_a_text_model_or_of_an_unknown_one() -> None:
    assert tower.read_tower({"model_type": "qwen2"}) is None
    assert tower.read_tower({"model_type": "new_vl", "vision_config": {"hidden_size": 64}}) is None


PIXTRAL_12B = {"model_type": "llava", "vision_config": {"model_type": "pixtral", "patch_size": 16, "head_dim": 64}}


def test_a_llava_is_read_with_pixtrals_tower_alone() -> None:
    """By hand: a token for each patch of 16 x 16 pixels. LLaVA 1.5 has CLIP's tower, and other tokens for a picture."""
    clip = {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model", "hidden_size": 1024}}
    pixtral = TowerFacts(24, 1024, 4096, 1, 3 * 16 * 16, gated=True, attends_all=True)
    assert tower.read_tower(PIXTRAL_12B) == pixtral
    assert tower.read_tower(clip) is None
    facts = [config.read(about, source="here") for about in (PIXTRAL_12B, clip)]
    assert [tower.trains_on_pictures(one) for one in facts] == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(tower.DEFAULTS))
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    from transformers import CONFIG_MAPPING

    made = CONFIG_MAPPING[model_type]()
    vision = getattr(made, "vision_config", made).to_dict()
    assert {name: vision[name] for name in tower.DEFAULTS[model_type]} == tower.DEFAULTS[model_type]


def test_pictures_need_memory_and_a_tower_that_trains_more() -> None:
    """By hand: 1,000 tokens of Gemma 3 are 16,000 patches of 588 values, 12 bytes each in float32, and one layer."""
    model = config.read(_published("gemma-3-4b"), source="here", stored=config.StoredWeights({"BF16": 4_300_079_472}))
    step = MicroStep("cpu", "float32", rows=1, length=1000, checkpointing=False, images=True)
    parts = {part.name: part for part in training_memory(model, step) or []}
    layer = 16_000 * 4 * (8 * 1152 + 2 * 4304)
    assert parts["pictures"].high == 16_000 * 588 * 12 + layer
    tuned = MicroStep("cpu", "float32", rows=1, length=1000, checkpointing=False, images=True, tower_trains=True)
    parts = {part.name: part for part in training_memory(model, tuned) or []}
    assert parts["pictures"].high == 16_000 * 588 * 12 + 27 * layer
