"""Measures how far the token probabilities of two models are apart. Uses only numpy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypedDict, TypeVar

if TYPE_CHECKING:
    import numpy as np

# In nats per token: a smaller difference of the loss counts as none. `verify` accepts a file whose perplexity differs
# by less. A correct q8_0 file, whose answers show no difference, differs by 0.0013.
SAME_LOSS = 0.002
_BLOCK = 1 << 20  # logits at a time: 8 MB in float64 fit the processor's cache, which is 3 times as fast as 78 MB


@dataclass
class TokenFigures:
    """One value for each position. Arrays have shape [positions]."""

    # Kullback-Leibler divergence of the other model from the reference, in nats, over the whole vocabulary
    kl: np.ndarray
    same_top1: np.ndarray  # both models rank the same token first
    nll_reference: np.ndarray  # -log p of the following token in nats, by the reference
    nll_other: np.ndarray  # the same by the other model


Figures = TypeVar("Figures", TokenFigures, "ShareFigures")


def compare_logits(reference: np.ndarray, compared: np.ndarray, following: np.ndarray) -> TokenFigures:
    """Compares two models on one sequence.

    Args:
        reference: logits [positions, vocabulary], any float type.
        compared: logits [positions, vocabulary] for the same tokens.
        following: the token id [positions] that follows each position in the text.

    Sums are in float64, because a correct f16 file is 4e-8 nats from its reference, below float32's noise.
    """
    parts = normalized(reference=reference, compared=compared)
    return join([distance_of(log_p["reference"], log_p["compared"], following[rows]) for rows, log_p in parts])


def distance_of(log_p: np.ndarray, log_q: np.ndarray, following: np.ndarray) -> TokenFigures:
    """The figures of `compare_logits` for positions whose logits are `normalized`."""
    import numpy as np

    at = np.arange(len(log_p)), following
    return TokenFigures(
        kl=(np.exp(log_p) * (log_p - log_q)).sum(axis=1),
        same_top1=log_p.argmax(axis=1) == log_q.argmax(axis=1),
        nll_reference=-log_p[at],
        nll_other=-log_q[at],
    )


def losses(logits: np.ndarray, following: list[int]) -> np.ndarray:
    """-log p in nats [positions] of the token that follows each position; `logits` are [positions, vocabulary]."""
    import numpy as np

    tokens = np.array(following, np.int64)
    parts = [-log_p["own"][np.arange(len(log_p["own"])), tokens[rows]] for rows, log_p in normalized(own=logits)]
    return np.concatenate(parts)


def join(parts: list[Figures]) -> Figures:
    """Concatenates the figures of one or more sequences."""
    import numpy as np

    kind = type(parts[0])
    names = (field.name for field in fields(kind))
    return kind(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


class Distance(TypedDict):
    """How far a model is from another one.

    KL divergences are in nats; `trimmed_kl` is the mean without the largest hundredth of the values. `same_top1` is a
    share from 0 to 1. `perplexity_ratio` is other / reference; its half width is that of the 95 % interval. A figure
    that is NaN or infinite is None, which no threshold accepts.
    """

    mean_kl: float | None
    p99_kl: float | None
    trimmed_kl: float | None
    median_kl: float | None
    max_kl: float | None
    same_top1: float | None
    perplexity: float | None
    perplexity_reference: float | None
    perplexity_ratio: float | None
    perplexity_ratio_half_width: float | None
    tokens: int


def summarize(figures: TokenFigures) -> Distance:
    """Summarizes the figures. The interval is paired: the standard error of the mean difference of -log p, times
    1.96."""
    import numpy as np

    difference = figures.nll_other - figures.nll_reference
    ratio = float(np.exp(difference.mean()))
    error = float(difference.std(ddof=1) / np.sqrt(len(difference))) if len(difference) > 1 else float("inf")
    return {
        "mean_kl": finite(figures.kl.mean()),
        "p99_kl": finite(np.quantile(figures.kl, 0.99)),
        "trimmed_kl": finite(_trimmed(figures.kl)),
        "median_kl": finite(np.median(figures.kl)),
        "max_kl": finite(figures.kl.max()),
        "same_top1": finite(figures.same_top1.mean()),
        "perplexity": finite(np.exp(figures.nll_other.mean())),
        "perplexity_reference": finite(np.exp(figures.nll_reference.mean())),
        "perplexity_ratio": finite(ratio),
        "perplexity_ratio_half_width": finite(ratio * 1.96 * error),
        "tokens": len(figures.kl),
    }


def finite(value: float | np.floating) -> float | None:
    """The value, or None for one that is NaN or infinite, which JSON cannot hold and no threshold accepts."""
    return float(value) if math.isfinite(value) else None


def _trimmed(values: np.ndarray) -> float:
    """The mean without the largest hundredth of the values; NaN if one of them is NaN."""
    import numpy as np

    count = max(1, len(values) - -(-len(values) // 100))
    return float(np.sort(values)[:count].mean()) if np.isfinite(values).all() else float("nan")


@dataclass
class ShareFigures:
    """One value for each position, from which `share` is computed. Arrays have shape [positions]."""

    along: np.ndarray  # the inner product of the other model's change with the tuned model's change
    squared: np.ndarray  # the inner product of the tuned model's change with itself
    kl_tuned: np.ndarray  # divergence of the other model from the tuned one, in nats
    kl_base: np.ndarray  # divergence of the other model from the base, in nats
    kl_between: np.ndarray  # divergence of the base from the tuned model, in nats: how much tuning changed


class TuningShare(TypedDict):
    """How much of the tuning a model contains. `share` is 1 for the tuned model, 0 for the base, and about 2 if the
    change was applied twice. `share_half_width` is half of its 95 % interval. The divergences are means in nats. A
    figure that is not finite is None."""

    share: float | None
    share_half_width: float | None
    kl_tuned: float | None
    kl_base: float | None
    kl_between: float | None
    tokens: int


def summarize_change(parts: list[ShareFigures]) -> TuningShare:
    """Summarizes the figures. The interval is that of a ratio: its standard error over positions, times 1.96."""
    import numpy as np

    all_ = join(parts)
    total = float(all_.squared.sum())
    share = float(all_.along.sum()) / total if total else float("nan")
    error = float(np.sqrt(((all_.along - share * all_.squared) ** 2).sum())) / total if total else float("nan")
    return {
        "share": finite(share),
        "share_half_width": finite(1.96 * error),
        "kl_tuned": finite(all_.kl_tuned.mean()),
        "kl_base": finite(all_.kl_base.mean()),
        "kl_between": finite(all_.kl_between.mean()),
        "tokens": len(all_.along),
    }


def change_of(log_t: np.ndarray, log_b: np.ndarray, log_o: np.ndarray) -> ShareFigures:
    """How much of the change from the base (`log_b`) to the tuned model (`log_t`) is in the other model (`log_o`).

    A change is a difference of log-probabilities. Products are weighted with the tuned model's probabilities and
    centred, so a constant that is added to all logits has no effect.
    """
    import numpy as np

    weight = np.exp(log_t)
    change, other_change = log_t - log_b, log_o - log_b
    between = (weight * change).sum(axis=1)
    centred = change - between[:, None]
    weighted = weight * centred
    return ShareFigures(
        along=(weighted * other_change).sum(axis=1),
        squared=(weighted * centred).sum(axis=1),
        kl_tuned=(weight * (change - other_change)).sum(axis=1),
        kl_base=-(np.exp(log_b) * other_change).sum(axis=1),
        kl_between=between,
    )


def normalized(**logits: np.ndarray) -> Iterator[tuple[slice, dict[str, np.ndarray]]]:
    """The log-probabilities of several models by name, for a slice of the positions at a time. If there is no position,
    it yields one empty slice."""
    positions, vocabulary = next(iter(logits.values())).shape
    step = max(1, _BLOCK // len(logits) // vocabulary)
    for start in range(0, max(1, positions), step):
        rows = slice(start, start + step)
        yield rows, {name: _log_softmax(each[rows]) for name, each in logits.items()}


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    import numpy as np

    shifted = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):  # an infinite logit becomes NaN, which no threshold accepts
        shifted -= shifted.max(axis=1, keepdims=True)
        shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted
