"""How many steps a training needs at least. A module of its own, so that `status` need not load `make.py`."""

import math

from skill_train.recipe.resolved import ResolvedRecipe


def least_steps(recipe: ResolvedRecipe) -> int:
    """The least steps with which a training can teach something, by a rule of thumb that nobody measured. AdamW uses
    the mean of 1 / (1 - adam_beta1) gradients, so fewer steps end before that mean is complete. While the learning rate
    warms up, a step counts only in part."""
    beta = recipe.adam_beta1 if "adamw" in recipe.optim else 0.9  # no other optimizer reads it
    return int(recipe.warmup_steps + math.ceil(round(1 / (1 - beta), 6)))


def few_steps(recipe: ResolvedRecipe, steps: int) -> str | None:
    """The warning for a training with too few steps; None if there are enough."""
    least = least_steps(recipe)
    if steps >= least:
        return None
    why = f"{least - recipe.warmup_steps} of them"
    why = f"AdamW averages {why} (adam_beta1 {recipe.adam_beta1:g})" if "adamw" in recipe.optim else f"it takes {why}"
    why += f" after {recipe.warmup_steps} of warm-up" if recipe.warmup_steps else ""
    too_few = f"{steps} steps are too few to learn from, by a rule of thumb: {why}"
    return f"{too_few}; more epochs, or a smaller effective_batch_size"
