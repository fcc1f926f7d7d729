"""Computes intervals for the difference between two models: a paired bootstrap over the rows that both were asked."""

from dataclasses import dataclass

RESAMPLES = 10_000
LEVEL = 0.95
_SEED = 0


@dataclass(frozen=True)
class Interval:
    """A difference with the two ends of its 95 % interval, in the unit of the compared values."""

    difference: float
    low: float
    high: float

    @property
    def is_noise(self) -> bool:
        """Whether the interval contains 0."""
        return self.low <= 0 <= self.high


def paired(ours: list[float], theirs: list[float], weights: list[int] | None = None) -> Interval:
    """The mean of `ours` minus the mean of `theirs`, with its percentile interval.

    Rows are drawn with replacement. Each is drawn for both models at once, because a hard row is hard for both. The
    draw is seeded, so the same rows give the same interval. Percentile intervals: Efron and Tibshirani, An Introduction
    to the Bootstrap, 1993, chapter 13. Paired, for the output of language models: Koehn, EMNLP 2004,
    aclanthology.org/W04-3250.

    Args:
        ours: one value for each row.
        theirs: the other model's values for the same rows.
        weights: how much a row counts in the mean, such as its tokens if the values are sums; None for 1 each.

    Raises:
        ValueError: there are no rows, or the lists have different lengths.
    """
    import numpy as np

    weights = weights or [1] * len(ours)
    if not len(ours) == len(theirs) == len(weights) > 0:
        raise ValueError(f"{len(ours)}, {len(theirs)} and {len(weights)} values cannot be paired")
    gaps, counts = np.asarray(ours, float) - np.asarray(theirs, float), np.asarray(weights, float)
    rows = len(gaps)
    drawn = np.random.default_rng(_SEED).multinomial(rows, np.full(rows, 1 / rows), size=RESAMPLES)  # [resamples, rows]
    means = (drawn @ gaps) / (drawn @ counts)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(gaps.sum() / counts.sum()), float(low), float(high))
