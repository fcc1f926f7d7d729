"""Whose pixels a vision model is trained on: those that llama.cpp will make of a picture, or those of the model's own
processor."""

from __future__ import annotations

from typing import NamedTuple

from skill_train.core.errors import UsageError
from skill_train.program.pictures.engine import ENGINE_FAMILIES, ENGINE_LIMITS
from skill_train.recipe.fields import Recipe


class Preprocess(NamedTuple):
    """`engine` or `model`, and why."""

    value: str
    because: str


def preprocess_of(recipe: Recipe, family: str) -> Preprocess:
    """The recipe's choice; where it has none, the pixels of llama.cpp if the training can make them.

    Args:
        family: `model_type` of config.json.

    Raises:
        UsageError: the recipe asks for pixels of llama.cpp that the training cannot make.
    """
    ignored = (key for key in ("min_pixels", "max_pixels") if key not in ENGINE_LIMITS.get(family, ()))
    limit = next((key for key in ignored if getattr(recipe, key) is not None), None)
    known = family in ENGINE_FAMILIES
    if recipe.preprocess == "model":
        return Preprocess("model", "asked for: the model's own image processor")
    if recipe.preprocess == "engine":
        if known and limit is None:
            return Preprocess("engine", "asked for: the pixels and the text that llama.cpp makes of a picture")
        raise UsageError(
            f"{limit} and preprocess: engine exclude each other: llama.cpp ignores the limit"
            if known
            else f"preprocess: engine is not known for the family {family}",
            code="bad_recipe",
            expected="one of the two" if known else ", ".join(ENGINE_FAMILIES),
            got=f"{limit}: {getattr(recipe, limit)}" if known and limit else family,
            hint="remove the limit and make the pictures smaller, or set preprocess: model"
            if known
            else "set preprocess: model, or remove preprocess",
        )
    if not known:
        return Preprocess("model", f"llama.cpp's own pixels were not reproduced for {family}")
    if limit is not None:
        return Preprocess("model", f"llama.cpp ignores {limit}, so it will show other pixels than the training")
    return Preprocess("engine", "trains on the pixels and the text that llama.cpp will make of a picture")
