"""Figures worked out by hand from logits that are logarithms of simple fractions."""

from __future__ import annotations

from math import exp, log, sqrt

import numpy as np
import pytest

from skill_train.llama.logit_distance import TokenFigures, compare_logits, join, losses, summarize


def test_kl_of_two_tokens_by_hand() -> None:
    """P = (1/2, 1/2), Q = (1/4, 3/4): KL = 1/2·ln 2 + 1/2·ln(2/3) = 1/2·ln(4/3)."""
    figures = compare_logits(_logits([1, 1]), _logits([1, 3]), np.array([1]))
    assert figures.kl[0] == pytest.approx(0.5 * log(4 / 3), abs=1e-12)
    assert figures.nll_reference[0] == pytest.approx(log(2), abs=1e-12)
    assert figures.nll_other[0] == pytest.approx(log(4 / 3), abs=1e-12)


def test_kl_of_three_tokens_by_hand_and_its_direction() -> None:
    """P = (1/2, 1/4, 1/4), Q = (1/4, 1/4, 1/2): KL = 1/2·ln 2 + 1/4·0 - 1/4·ln 2. It goes from reference to other."""
    figures = compare_logits(_logits([2, 1, 1]), _logits([1, 1, 2]), np.array([2]))
    assert figures.kl[0] == pytest.approx(0.25 * log(2), abs=1e-12)
    lopsided = _logits([1, 1, 2]), _logits([1, 1, 6])
    forth = compare_logits(*lopsided, np.array([0])).kl[0]
    back = compare_logits(*lopsided[::-1], np.array([0])).kl[0]
    # P = (1/4, 1/4, 1/2), Q = (1/8, 1/8, 3/4)
    assert forth == pytest.approx(0.5 * log(2) + 0.5 * log(2 / 3), abs=1e-12)
    assert back == pytest.approx(0.25 * log(1 / 2) + 0.75 * log(3 / 2), abs=1e-12)


def test_logits_have_no_origin() -> None:
    """Adding a constant to all logits of a position changes nothing, however large."""
    a, b = _logits([1, 2, 5]), _logits([2, 2, 3])
    plain = compare_logits(a, b, np.array([0]))
    shifted = compare_logits(a + 1000.0, b - 1000.0, np.array([0]))
    assert shifted.kl[0] == pytest.approx(plain.kl[0], abs=1e-10)


def test_equal_logits_are_exactly_equal() -> None:
    logits = np.random.default_rng(0).normal(size=(7, 50)).astype(np.float32)
    figures = compare_logits(logits, logits.copy(), np.arange(7))
    assert figures.kl.tolist() == [0.0] * 7
    assert figures.same_top1.all()


def test_same_top1_compares_the_winners() -> None:
    reference = np.concatenate([_logits([3, 1]), _logits([1, 3]), _logits([2, 5])])
    other = np.concatenate([_logits([2, 1]), _logits([3, 1]), _logits([1, 9])])
    assert compare_logits(reference, other, np.array([0, 0, 0])).same_top1.tolist() == [True, False, True]


def test_long_sequences_are_done_in_parts_with_the_same_figures() -> None:
    """200 positions pass through in several blocks; each position must keep its own figure."""
    weights = np.arange(1, 201)[:, None]
    reference = np.log(np.concatenate([weights, np.ones_like(weights)], axis=1))
    following = (np.arange(200) % 3 == 0).astype(int)
    figures = compare_logits(reference, np.zeros_like(reference), following)
    w = np.arange(1, 201)
    p = w / (w + 1)
    expected = p * np.log(2 * p) + (1 - p) * np.log(2 * (1 - p))
    assert figures.kl == pytest.approx(expected, abs=1e-12)
    assert figures.nll_reference == pytest.approx(-np.log(np.where(following == 0, p, 1 - p)), abs=1e-12)


def test_no_position_has_no_figures() -> None:
    """Where two engines read no common text behind a picture."""
    figures = compare_logits(np.empty((0, 3)), np.empty((0, 3)), np.array([], np.int64))
    assert [len(column) for column in vars(figures).values()] == [0, 0, 0, 0]
    assert len(losses(np.empty((0, 3)), [])) == 0


def test_summary_by_hand() -> None:
    """-log p of ln 2 and ln 8 mean a perplexity of 4; ln 3 and ln 12 mean 6; their ratio is 3/2."""
    figures = TokenFigures(
        kl=np.array([0.1, 0.3]),
        same_top1=np.array([True, False]),
        nll_reference=np.array([log(2), log(8)]),
        nll_other=np.array([log(3), log(12)]),
    )
    summary = summarize(figures)
    assert summary["mean_kl"] == pytest.approx(0.2)
    assert summary["max_kl"] == pytest.approx(0.3)
    assert summary["p99_kl"] == pytest.approx(0.298)
    assert summary["same_top1"] == 0.5
    assert summary["perplexity_reference"] == pytest.approx(4)
    assert summary["perplexity"] == pytest.approx(6)
    assert summary["perplexity_ratio"] == pytest.approx(1.5)
    assert summary["perplexity_ratio_half_width"] == pytest.approx(0, abs=1e-12)  # both differences are ln 3/2
    assert summary["tokens"] == 2


def test_the_interval_is_paired() -> None:
    """Differences 0.1 and 0.3: mean 0.2, standard deviation sqrt(0.02), standard error 0.1."""
    zeros = np.zeros(2)
    figures = TokenFigures(kl=zeros, same_top1=zeros == 0, nll_reference=zeros, nll_other=np.array([0.1, 0.3]))
    half_width = summarize(figures)["perplexity_ratio_half_width"]
    assert half_width == pytest.approx(exp(0.2) * 1.96 * sqrt(0.02) / sqrt(2))


def test_nan_and_infinity_become_none() -> None:
    broken = compare_logits(np.array([[0.0, 0.0]]), np.array([[np.nan, 0.0]]), np.array([0]))
    summary = summarize(broken)
    assert summary["mean_kl"] is None
    assert summary["perplexity"] is None
    assert summary["perplexity_reference"] == pytest.approx(2)
    assert summary["perplexity_ratio_half_width"] is None


def test_join_keeps_the_order() -> None:
    one = compare_logits(_logits([1, 1]), _logits([1, 3]), np.array([0]))
    two = compare_logits(_logits([1, 1]), _logits([1, 1]), np.array([0]))
    assert join([one, two]).kl == pytest.approx([0.5 * log(4 / 3), 0.0], abs=1e-12)


def _logits(weights: list[int]) -> np.ndarray:
    """One position whose probabilities are in the ratio of the weights; [1, len(weights)]."""
    return np.log(np.array([weights], dtype=np.float64))
