"""Chooses a type for each matrix, so that the sum of measured divergences is least within a size. Pure functions."""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

# Bits per weight of each type (ggml-common.h). The types of the first line are never chosen, but a mix from a file may
# have them.
BITS = {
    "iq1_s": 1.5625, "iq1_m": 1.75, "iq2_xxs": 2.0625, "q4_1": 5.0, "f16": 16.0, "bf16": 16.0,
    "iq2_xs": 2.3125, "iq2_s": 2.5625, "q2_k": 2.625, "iq3_xxs": 3.0625, "iq3_s": 3.4375, "q3_k": 3.4375,
    "iq4_xs": 4.25, "q4_k": 4.5, "iq4_nl": 4.5, "q4_0": 4.5, "q5_k": 5.5, "q5_0": 5.5, "q5_1": 6.0, "q6_k": 6.5625,
    "q8_0": 8.5,
}  # fmt: skip
# llama.cpp refuses these types without an importance matrix (tensor_requires_imatrix, src/llama-quant.cpp).
NEED_MATRIX = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs")
_OF_SUPER_BLOCKS = ("iq2_xs", "iq2_s", "q2_k", "iq3_xxs", "iq3_s", "q3_k", "iq4_xs", "q4_k", "q5_k", "q6_k")
_OF_BLOCKS = ("iq4_nl", "q4_0", "q5_0", "q5_1")
_SUPER_BLOCK, _BLOCK = 256, 32
_WITHOUT_BLOCKS = ("f16", "bf16")
_BELOW, _ABOVE = 2.0, 3.0  # bits around the mean; types farther away are never chosen, so they are not measured
_MORE_BITS = 4.0  # the factor of the divergence for one bit less: the error doubles, and its square is 4 times as large


@dataclass(frozen=True)
class Choice:
    """A mix of types."""

    types: dict[str, str]  # by the name of the matrix
    n_bytes: int  # the size of all these matrices
    kl: float  # the sum of their divergences in nats, which estimates the divergence of the mix


def candidates(columns: int, bits: float, *, with_matrix: bool) -> list[str]:
    """The types to try for a matrix with `columns` columns, the coarsest first; empty if no type fits.

    Args:
        bits: the mean bits per weight of the mix.
        with_matrix: the importance matrix has an entry for the matrix.
    """
    if columns % _BLOCK:
        return []
    fitting = (_OF_SUPER_BLOCKS if columns % _SUPER_BLOCK == 0 else _OF_BLOCKS) + ("q8_0",)
    usable = [kind for kind in fitting if with_matrix or kind not in NEED_MATRIX]
    near = [kind for kind in usable if bits - _BELOW <= BITS[kind] <= bits + _ABOVE]
    return sorted(near or [min(usable, key=lambda kind: abs(BITS[kind] - bits))], key=lambda kind: BITS[kind])


def block_of(kind: str) -> int:
    """The weights in a block of a type. The rows of a matrix must be whole blocks."""
    if kind in _WITHOUT_BLOCKS:
        return 1
    return _BLOCK if kind in (*_OF_BLOCKS, "q4_1", "q8_0") else _SUPER_BLOCK


def bytes_of(elements: int, kind: str) -> int:
    return int(elements * BITS[kind] / 8)


def completed(
    measured: Mapping[tuple[str, str], float], kinds_by_tensor: Mapping[str, list[str]]
) -> dict[tuple[str, str], float]:
    """The divergence of every pair of matrix and type: measured, or estimated if there was no time to measure it.

    An estimate is the divergence of the nearest measured type of the same matrix, times the ratio of the two types in
    other matrices. For a matrix without any measurement it is the upper quartile of the other matrices.
    """
    at_least_0 = {pair: max(kl, 0.0) for pair, kl in measured.items()}
    kinds = sorted({kind for kinds in kinds_by_tensor.values() for kind in kinds}, key=lambda kind: BITS[kind])
    complete: dict[tuple[str, str], float] = {}
    for tensor, types in kinds_by_tensor.items():
        own = [kind for kind in kinds if (tensor, kind) in at_least_0]
        for kind in types:
            if (tensor, kind) in at_least_0:
                complete[tensor, kind] = at_least_0[tensor, kind]
            elif own:
                near = min(own, key=lambda other: abs(BITS[other] - BITS[kind]))
                complete[tensor, kind] = at_least_0[tensor, near] * _ratio(at_least_0, kind, near)
            else:
                of_others = sorted(kl for (_, other), kl in at_least_0.items() if other == kind)
                complete[tensor, kind] = of_others[len(of_others) * 3 // 4] if of_others else 4.0 ** -BITS[kind]
    return complete


def _ratio(divergences: Mapping[tuple[str, str], float], kind: str, other: str) -> float:
    """The median ratio of the divergences of `kind` and `other`, over the matrices that were measured with both. If
    there is no such matrix, the ratio follows from the bits of the types."""
    both = [
        kl / divergences[tensor, other]
        for (tensor, its), kl in divergences.items()
        if its == kind and divergences.get((tensor, other))
    ]
    return median(both) if both else _MORE_BITS ** (BITS[other] - BITS[kind])


def choose(elements: Mapping[str, int], divergences: Mapping[tuple[str, str], float], most_bytes: int) -> Choice:
    """Finds a mix with a small sum of divergences by a greedy search.

    Every matrix begins with its smallest type. Each step gives one matrix its next larger type: the step that removes
    the most divergence per byte and still fits. Only types on the lower convex hull of bytes and divergence are used.

    Args:
        elements: the number of weights, by matrix.
        divergences: by matrix and type.
        most_bytes: the limit for all matrices, at least the size with the smallest types.
    """
    of: dict[str, dict[str, float]] = {}
    for (tensor, kind), kl in divergences.items():
        of.setdefault(tensor, {})[kind] = kl
    steps = {tensor: _hull(count, of[tensor]) for tensor, count in elements.items()}
    at = dict.fromkeys(steps, 0)
    total = sum(own[0][0] for own in steps.values())
    queue = [(_gain(own, 0), tensor) for tensor, own in steps.items() if len(own) > 1]
    heapq.heapify(queue)
    while queue:
        _, tensor = heapq.heappop(queue)
        own, here = steps[tensor], at[tensor]
        more = own[here + 1][0] - own[here][0]
        if total + more > most_bytes:
            continue  # a smaller matrix may still fit
        total, at[tensor] = total + more, here + 1
        if here + 2 < len(own):
            heapq.heappush(queue, (_gain(own, here + 1), tensor))
    chosen = {tensor: own[at[tensor]] for tensor, own in steps.items()}
    return Choice(
        {tensor: kind for tensor, (_, _, kind) in chosen.items()}, total, sum(kl for _, kl, _ in chosen.values())
    )


_Option = tuple[int, float, str]  # bytes, divergence, type


def _hull(elements: int, kinds: Mapping[str, float]) -> list[_Option]:
    """The options of one matrix on the lower convex hull of bytes and divergence, from the smallest on."""
    options = sorted((bytes_of(elements, kind), kl, kind) for kind, kl in kinds.items())
    hull: list[_Option] = []
    for option in options:
        if hull and option[1] >= hull[-1][1]:
            continue  # larger, with no less divergence
        while len(hull) > 1 and _slope(hull[-2], option) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(option)
    return hull


def _slope(one: _Option, other: _Option) -> float:
    return (other[1] - one[1]) / max(1, other[0] - one[0])


def _gain(own: list[_Option], at: int) -> float:
    return _slope(own[at], own[at + 1])
