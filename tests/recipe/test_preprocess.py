"""Whose pixels train: decided from the family and the recipe, with its reason, and written into the plan."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from skill_train.core.errors import UsageError
from skill_train.program.pictures.engine import ENGINE_FAMILIES
from skill_train.program.pictures.processor import PROCESSOR_DEFAULTS
from skill_train.recipe.fields import from_dict, recipe_hash
from skill_train.recipe.preprocess import preprocess_of
from skill_train.recipe.resolved import ResolvedRecipe


def _recipe(**values: Any) -> Any:
    return from_dict({"model": "m", "data": "d", **values})


@pytest.mark.parametrize("family", PROCESSOR_DEFAULTS)
def test_without_a_choice_it_is_what_llama_cpp_shows_where_that_is_known(family: str) -> None:
    chosen = preprocess_of(_recipe(), family)
    assert chosen.value == ("engine" if family in ENGINE_FAMILIES else "model")
    assert ("were not reproduced" in chosen.because) == (family not in ENGINE_FAMILIES)


@pytest.mark.parametrize("limit", ["min_pixels", "max_pixels"])
def test_a_limit_that_llama_cpp_ignores_decides(limit: str) -> None:
    chosen = preprocess_of(_recipe(**{limit: 50_000}), "qwen2_vl")
    assert chosen.value == "model" and f"llama.cpp ignores {limit}" in chosen.because
    with pytest.raises(UsageError, match=f"{limit} and preprocess: engine cannot be used together"):
        preprocess_of(_recipe(preprocess="engine", **{limit: 50_000}), "qwen2_vl")


def test_a_limit_that_the_projector_carries_to_llama_cpp_decides_nothing() -> None:
    """SmolVLM's and Idefics3's longest edge is in the file."""
    for family in ("smolvlm", "idefics3"):
        assert preprocess_of(_recipe(max_pixels=50_000), family).value == "engine"


def test_a_choice_stands() -> None:
    assert preprocess_of(_recipe(preprocess="model"), "gemma3").value == "model"
    assert preprocess_of(_recipe(preprocess="engine"), "gemma3").value == "engine"
    with pytest.raises(UsageError, match="not known for the family qwen3_vl_moe"):
        preprocess_of(_recipe(preprocess="engine"), "qwen3_vl_moe")
    with pytest.raises(UsageError, match="preprocess: 'llama' is not known"):
        _recipe(preprocess="llama")


RESOLVED = {
    "model": "m", "data": "d", "format": "messages", "columns": {}, "loss_on": "assistant", "max_length": 9,
    "max_steps": 9, "effective_batch_size": 9, "learning_rate": 1, "lr_scheduler_type": "linear", "warmup_steps": 0,
    "weight_decay": 0, "adam_beta1": 0.9, "adam_beta2": 0.9, "adam_epsilon": 1e-8, "max_grad_norm": 1, "optim": "sgd",
    "lora_r": 1, "lora_alpha": 1, "lora_dropout": 0, "target_modules": [], "held_out_fraction": 0, "seed": 1,
    "images": True,
}  # fmt: skip


def test_an_earlier_plan_means_the_models_own_pixels_and_keeps_its_hash() -> None:
    """Its plan.json has no such field, and its hash was made without one."""
    earlier = msgspec.convert(RESOLVED, ResolvedRecipe)
    assert earlier.preprocess == earlier.as_dict()["preprocess"] == "model"
    before = {name: value for name, value in earlier.as_dict().items() if name != "preprocess"}
    assert recipe_hash(earlier.as_dict(), {}) == recipe_hash(before, {})
    assert recipe_hash(earlier.as_dict() | {"preprocess": "engine"}, {}) != recipe_hash(before, {})


def test_a_recipe_of_text_has_no_such_field() -> None:
    assert "preprocess" not in msgspec.convert(RESOLVED | {"images": False}, ResolvedRecipe).as_dict()
