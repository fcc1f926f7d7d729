"""The cost of a job as text."""

from __future__ import annotations

from skill_train.cloud.budget import Budget
from skill_train.core.units import dollars


def cost_in_words(budget: Budget) -> str:
    """The estimated cost and the maximum, as text."""
    if budget.most_usd is None:
        return budget.basis
    most = f"{dollars(budget.most_usd)} at most, when it runs until its timeout"
    return (
        most if budget.cost_usd is None else f"{dollars(budget.cost_usd[0])} to {dollars(budget.cost_usd[1])}; {most}"
    )
