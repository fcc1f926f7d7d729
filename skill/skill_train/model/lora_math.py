"""Computes what an adapter does to one tensor of the base, in fp32, for any block of its rows.

    LoRA   W' = W + s·B·A                 https://arxiv.org/abs/2106.09685, s = alpha / r
    rsLoRA s = alpha / sqrt(r)            https://arxiv.org/abs/2312.03732
    DoRA   W' = m · (W + s·B·A) / ‖·‖     https://arxiv.org/abs/2402.09353, one norm an output feature

A weight is stored as [out, in] (Linear), [in, out] (GPT-2's Conv1D) or [tokens, width] (Embedding). The change of all
three is `before + scale · left @ right` with left [rows, r], so rows can be changed a block at a time.
"""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Change:
    """The change of one tensor. Every value is a torch tensor or None; the steps apply in this order."""

    replace: Any = None  # the new value, instead of the base's
    # left, right, scale: the low-rank update
    left: Any = None
    right: Any = None
    scale: float = 1.0
    magnitude: Any = None  # DoRA's vector, with one value for each row, or for each column if `by_column`
    by_column: bool = False
    add: Any = None  # is added to a bias without a scale
    # token_ids, token_rows: rows that get a new value. LoRA on a head is added to the rows that follow the embedding
    # (peft 0.21, TrainableTokensWrapper inside a LoRA layer).
    token_ids: Any = None
    token_rows: Any = None

    @property
    def empty(self) -> bool:
        return all(tensor is None for tensor in _tensors(self))

    @property
    def low_rank(self) -> bool:
        """Whether the change is only the product of two thin matrices."""
        others = (self.replace, self.magnitude, self.add, self.token_ids)
        return self.left is not None and all(tensor is None for tensor in others)

    @property
    def whole(self) -> bool:
        """Whether all rows are needed at once, for the norm of a column."""
        return self.magnitude is not None and self.by_column


def scaling(alpha: float, rank: int, use_rslora: bool) -> float:
    return alpha / math.sqrt(rank) if use_rslora else alpha / rank


def linear(a: Any, b: Any, scale: float, *, transposed: bool, magnitude: Any = None) -> Change:
    """The change of a weight [out, in], or [in, out] when transposed, for A [r, in] and B [out, r]. An embedding counts
    as transposed: its weight is [tokens, width] for A [r, tokens] and B [width, r]."""
    left, right = (a.T, b.T) if transposed else (b, a)
    return Change(left=left, right=right, scale=scale, magnitude=magnitude, by_column=transposed)


def apply(change: Change, before: Any, start: int) -> Any:
    """The new rows, in fp32.

    Args:
        before: rows `start` to `start + len(before)` of the base's tensor (or of `replace`), in fp32. Not changed.
    """
    import torch

    stop = start + len(before)
    after = before.clone()
    if change.token_ids is not None:
        here = (change.token_ids >= start) & (change.token_ids < stop)
        after[change.token_ids[here] - start] = change.token_rows[here].float()
    if change.left is not None:
        # [rows, r] @ [r, columns]
        after.addmm_(change.left[start:stop].float(), change.right.float(), alpha=change.scale)
    if change.magnitude is not None:
        axis = 0 if change.by_column else 1
        magnitude = change.magnitude.float() if change.by_column else change.magnitude[start:stop].float()
        after *= (magnitude / torch.linalg.norm(after, dim=axis)).unsqueeze(axis)
    if change.add is not None:
        after += change.add[start:stop].float()
    return after


def same(first: Change | None, other: Change | None) -> bool:
    """Whether both make the same change, bit for bit."""
    import torch

    if first is None or other is None:
        return first is other
    pairs = zip(_tensors(first), _tensors(other), strict=True)
    equal = all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)
    return equal and (first.left is None or first.scale == other.scale) and first.whole == other.whole


def _tensors(change: Change) -> tuple[Any, ...]:
    low_rank = (change.left, change.right, change.magnitude)
    return (change.replace, *low_rank, change.add, change.token_ids, change.token_rows)
