"""Chooses the pixels that a vision model is trained on: llama.cpp's pixels of a picture, or the pixels of the model's
own processor."""

from typing import NamedTuple

from skill_train.core.errors import refusals
from skill_train.program.pictures.engine import ENGINE_FAMILIES, ignored_limit, require_engine
from skill_train.recipe.fields import Recipe


class Preprocess(NamedTuple):
    """`value` is `engine` or `model`; `because` is the reason."""

    value: str
    because: str


def preprocess_of(recipe: Recipe, family: str) -> Preprocess:
    """The recipe's choice. Without one, the pixels of llama.cpp if the training can make them for this `family` (the
    `model_type` of config.json).

    Raises:
        UsageError: the recipe asks for pixels of llama.cpp that the training cannot make.
    """
    limits = {"min_pixels": recipe.min_pixels, "max_pixels": recipe.max_pixels}
    if recipe.preprocess == "model":
        return Preprocess("model", "asked for: the model's own image processor")
    if recipe.preprocess == "engine":
        with refusals():
            require_engine(limits, family)
        return Preprocess("engine", "asked for: the pixels and the text that llama.cpp makes of a picture")
    if family not in ENGINE_FAMILIES:
        return Preprocess("model", f"llama.cpp's own pixels were not reproduced for {family}")
    limit = ignored_limit(limits, family)
    if limit is not None:
        return Preprocess("model", f"llama.cpp ignores {limit}, so it will show other pixels than the training")
    return Preprocess("engine", "trains on the pixels and the text that llama.cpp will make of a picture")
