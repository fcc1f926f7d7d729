"""The vision tower, read from published configs, and the defaults of what they leave out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skill_train.estimate.memory import training_memory
from skill_train.estimate.step import MicroStep
from skill_train.facts import TowerFacts
from skill_train.model import config, tower

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


def test_published_towers() -> None:
    """By hand: Gemma 3 makes 16 x 16 tokens of 64 x 64 patches; a patch of Qwen is 14 x 14 pixels of two frames."""
    assert tower.read_tower(_published("gemma-3-4b")) == TowerFacts(27, 1152, 4304, 16, 3 * 14 * 14)
    assert tower.read_tower(_published("qwen2.5-vl-7b")) == TowerFacts(32, 1280, 3420, 4, 3 * 14 * 14 * 2)
    assert tower.read_tower(SMOLVLM_256M) == TowerFacts(12, 768, 3072, 16, 3 * 16 * 16)


def test_no_tower_of_a_text_model_or_of_an_unknown_one() -> None:
    assert tower.read_tower({"model_type": "qwen2"}) is None
    assert tower.read_tower({"model_type": "new_vl", "vision_config": {"hidden_size": 64}}) is None


PIXTRAL_12B = {"model_type": "llava", "vision_config": {"model_type": "pixtral", "patch_size": 16, "head_dim": 64}}


def test_a_llava_is_read_with_pixtrals_tower_alone() -> None:
    """By hand: a token for each patch of 16 x 16 pixels. LLaVA 1.5 has CLIP's tower, and other tokens for a picture."""
    clip = {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model", "hidden_size": 1024}}
    assert tower.read_tower(PIXTRAL_12B) == TowerFacts(24, 1024, 4096, 1, 3 * 16 * 16)
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
