"""Intervals against all resamples there are: with four rows, 4^4 equally likely ones."""

from __future__ import annotations

import itertools

import pytest

from skill_train.evaluate.bootstrap import Interval, paired


def every_mean(gaps: list[float], weights: list[int]) -> list[float]:
    """The mean difference of each of the n^n ordered resamples, sorted: the bootstrap's exact distribution."""
    draws = itertools.product(range(len(gaps)), repeat=len(gaps))
    return sorted(sum(gaps[i] for i in draw) / sum(weights[i] for i in draw) for draw in draws)


@pytest.mark.parametrize(
    ("ours", "theirs", "weights"),
    [
        ([1.0, 5.0, 2.5, 9.0], [0.5, 7.0, 2.0, 4.0], [1, 1, 1, 1]),
        ([3.0, 8.0, 40.0, 11.0], [4.0, 6.5, 31.0, 15.0], [2, 5, 20, 7]),
        ([0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0], [1, 1, 1, 1]),
    ],
)
def test_the_ends_are_those_of_all_resamples(ours: list[float], theirs: list[float], weights: list[int]) -> None:
    """The ends of 10 000 drawn ones lie between the exact distribution's values at 2 and 3 % (97 and 98 %): the drawn
    share below an end has a standard error of sqrt(0.025 x 0.975 / 10 000) = 0.16 %."""
    exact = every_mean([a - b for a, b in zip(ours, theirs, strict=True)], weights)
    got = paired(ours, theirs, weights)
    last, close = len(exact) - 1, 1e-12
    assert exact[int(0.020 * last)] - close <= got.low <= exact[int(0.030 * last) + 1] + close
    assert exact[int(0.970 * last)] - close <= got.high <= exact[int(0.980 * last) + 1] + close
    assert got.difference == pytest.approx((sum(ours) - sum(theirs)) / sum(weights))


def test_a_row_counts_for_its_tokens() -> None:
    """Sums 10 over 10 tokens and 1 over 90: 11 nats over 100 tokens, not the mean of 1 and 1/90."""
    assert paired([10.0, 1.0], [0.0, 0.0], [10, 90]).difference == pytest.approx(0.11)


def test_hard_rows_are_hard_for_both() -> None:
    """Unpaired, a spread of 0 to 1000 would drown a difference of 1."""
    theirs = [10.0 * row for row in range(100)]
    got = paired([value + 1 + (row % 2) / 10 for row, value in enumerate(theirs)], theirs)
    assert (got.is_noise, got.difference) == (False, pytest.approx(1.05))
    assert 1.0 < got.low < 1.05 < got.high < 1.1


@pytest.mark.parametrize(
    ("low", "high", "noise"), [(-1.0, 1.0, True), (0.0, 0.0, True), (0.1, 2.0, False), (-2.0, -0.1, False)]
)
def test_what_contains_zero_is_noise(low: float, high: float, noise: bool) -> None:
    assert Interval(0.0, low, high).is_noise is noise


def test_the_same_rows_give_the_same_interval() -> None:
    ours, theirs = [float(n * n % 7) for n in range(40)], [float(n * n % 5) for n in range(40)]
    assert paired(ours, theirs) == paired(ours, theirs)


@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([1.0], [1.0, 2.0])])
def test_what_is_not_paired_is_refused(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError, match="cannot be paired"):
        paired(ours, theirs)
