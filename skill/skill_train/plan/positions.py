"""Rows that are longer than a model has positions."""

from __future__ import annotations

from skill_train.core.errors import UsageError
from skill_train.facts import DatasetFacts, ModelFacts
from skill_train.program.plan import POSITIONS_IN_TABLE
from skill_train.recipe.fields import Recipe


def require_positions(recipe: Recipe, model: ModelFacts, dataset: DatasetFacts) -> None:
    """Refuses a `max_length` that leaves the longest row longer than the model's table of positions, as far as the
    lengths are known; the training program knows them all.

    Raises:
        UsageError: the training would end in the step with that row.
    """
    context, tokens = model.context, dataset.tokens
    if context is None or tokens is None or model.model_type not in POSITIONS_IN_TABLE:
        return
    if min(recipe.max_length, tokens.longest[0]) > context:
        raise UsageError(
            f"max_length {recipe.max_length} is more than the {context} positions of {recipe.model}",
            code="bad_recipe",
            expected=f"max_length of at most {context}",
            got=f"rows of {tokens.longest[0]} tokens and more ({tokens.basis})",
            hint=f"max_length: {context} in the recipe, or --max-length {context}",
        )
