"""What a job costs, in words for a reader."""

from __future__ import annotations

from skill_train.cloud.budget import Budget
from skill_train.core.units import dollars


def cost_in_words(found: Budget) -> str:
    """For a reader: the estimate, and the most that it can be."""
    if found.most_usd is None:
        return found.basis
    most = f"{dollars(found.most_usd)} at most, when it runs until its timeout"
    return most if found.cost_usd is None else f"{dollars(found.cost_usd[0])} to {dollars(found.cost_usd[1])}; {most}"
