"""Verdicts of the gate from figures written by hand, without a model. In a real merge several go red at once."""

from __future__ import annotations

import math
from typing import Any

import pytest

from skill_train.merge.check_logits import _failures, _limits, has_effect
from skill_train.merge.check_weights import WeightComparison, outcome, share_of
from skill_train.merge.judge import _rounding_cost

GOOD = {"median_kl": 1e-10, "mean_kl": 1e-10, "p99_kl": 1e-9}


def compared(share: float | None = 1.0, moved: float | None = 0.1, width: float | None = 0.001, **figures: Any) -> Any:
    effect = {"share": share, "share_half_width": width, "kl_between": moved}
    return {"figures": GOOD | figures, "effect": effect, "rounded": None}


def rounded(share: float = 1.0, **figures: Any) -> Any:
    """With a model after rounding, which moves half of the tokens by 1e-4 and all of them by 1e-3 nats on average."""
    cost = {"median_kl": 1e-4, "mean_kl": 1e-3}
    own = GOOD | {"share": share, "share_half_width": 0.001, "cost": cost} | figures
    return compared(mean_kl=1.0) | {"rounded": own}


@pytest.mark.parametrize(
    ("seen", "kept", "words"),
    [
        (compared(), 1.0, None),
        (compared(mean_kl=1.1e-8), 1.0, "mean KL"),
        (compared(p99_kl=1.1e-7), 1.0, "99th percentile"),
        (compared(mean_kl=None), 1.0, "not a number"),
        (compared(p99_kl=None), 1.0, "not a number"),
        (compared(share=0.94), 1.0, "0.94 of the adapter"),
        (compared(share=1.06), 1.0, "1.06 of the adapter"),
        (compared(share=0.94, width=0.02), 1.0, None),  # the tokens are too few to tell
        (compared(share=None), 1.0, "not a number"),
        (compared(share=None), None, "not a number"),
        (compared(share=0.0, moved=1e-10), 1.0, None),  # an adapter without effect has no share
        (compared(), 0.49, "rounding leaves only 0.49"),
        (compared(), None, None),
        (rounded(), 1.0, None),  # whatever the distance of the model before it was rounded
        (rounded(median_kl=0.9e-6, mean_kl=0.9e-3 / 2), 1.0, None),  # a hundredth, and half of what rounding costs
        (rounded(median_kl=1.1e-6), 1.0, "median KL"),
        (rounded(mean_kl=1.1e-3 / 2), 1.0, "mean KL"),
        (rounded(median_kl=1.1e-8), None, "median KL"),  # PEFT's own merge has the same sums
        (rounded(mean_kl=1.1e-8), None, "mean KL"),
        (rounded(share=0.94), 1.0, "0.94 of the adapter"),
    ],
)
def test_what_the_answers_show(seen: Any, kept: float | None, words: str | None) -> None:
    failures = _failures(seen, _limits(seen["rounded"], same_sums=kept is None), kept)
    assert [words in failure for failure in failures] == [True] if words else failures == []


def test_what_is_left_of_the_adapter_is_taken_from_the_answers_where_nobody_counted() -> None:
    """PEFT's merge tells no share: of half of it, with its interval, nothing surely is lost."""
    for share, lost in ((0.48, True), (0.4995, False)):
        seen = rounded() | {"effect": compared(share=share)["effect"]}
        failures = _failures(seen, _limits(seen["rounded"], same_sums=True), None)
        assert [failure.startswith("rounding leaves only") for failure in failures] == [True] * lost


@pytest.mark.parametrize(("moved", "effect"), [(None, True), (1.1e-9, True), (0.9e-9, False), (0.0, False)])
def test_an_adapter_without_effect(moved: float | None, effect: bool) -> None:
    assert has_effect(compared(moved=moved)["effect"]) is effect


def weights(share: float, *, of_each: dict[str, float] | None = None, failures: tuple[str, ...] = ()) -> Any:
    """100 rows with a change of length 1 each, of which `share` is there."""
    sums = (100 * share**2, 100 * share, 100.0, 100 * share, 100.0)
    shares = {name: (each, 0.01) for name, each in (of_each or {}).items()}
    return WeightComparison(2, 1, 0.5, (1e-6, "w"), 0.0, sums, list(failures), shares)


@pytest.mark.parametrize(
    ("seen", "kept", "failures"),
    [
        (weights(1.0), None, 0),
        (weights(0.96), 1.0, 0),
        (weights(0.94), 1.0, 1),
        (weights(1.06), None, 1),
        (weights(0.8), 0.8, 0),  # as much as the writer kept after rounding
        (weights(0.66), 0.8, 0),  # half of what rounding took, and 0.05
        (weights(0.64), 0.8, 1),
        (weights(0.6), 0.6, 0),
        (weights(0.45), 0.45, 1),  # less than half is left
        (weights(math.nan), 1.0, 1),
        (weights(1.0, of_each={"a": 0.745, "b": 1.255}), 1.0, 0),  # a quarter, and the interval of 0.01
        (weights(0.8, of_each={"a": 0.4}), 0.8, 0),  # rounding takes more of one tensor than of another
        (weights(1.0, of_each={"a": 0.70, "b": 1.30, "c": 1.0}), 1.0, 2),
        (weights(1.0, failures=("w is missing",)), 1.0, 1),
    ],
)
def test_what_the_weights_show(seen: Any, kept: float | None, failures: int) -> None:
    found = outcome(seen, stored="BF16", kept_share=kept)
    assert len(found["failures"]) == failures
    assert found["verdict"] == ("fail" if failures else "pass") and found["effect"]["kl_between"] is None


def test_an_adapter_that_changes_no_weight_has_no_share() -> None:
    found = outcome(WeightComparison(2), stored="F32", kept_share=None)
    assert (found["verdict"], found["effect"]) == (
        "pass", {"share": None, "share_half_width": None, "kl_between": 0.0}
    )  # fmt: skip


def test_the_interval_of_a_share_by_hand() -> None:
    """Two rows whose changes have the squares 1 and 1, of which 0.5 and 1.5 are there: 1 ± 1.96 · √0.5 / 2."""
    assert share_of((0.25 + 2.25, 2.0, 2.0, 2.0, 2.0)) == pytest.approx((1.0, 1.96 * math.sqrt(0.5) / 2))


def test_parts_of_a_comparison_are_added() -> None:
    whole = weights(1.0, of_each={"a": 1.0}, failures=("x",))
    other = WeightComparison(3, 2, 0.25, (0.5, "v"), 0.04, (1.0,) * 5, ["y"], {"b": (0.9, 0.1)})
    whole.add(other)
    assert (whole.tensors, whole.changed, whole.seconds, whole.failures) == (5, 3, 0.75, ["x", "y"])
    assert (whole.worst, whole.other, whole.sums) == ((0.5, "v"), 0.04, (101.0,) * 5)
    assert whole.shares == {"a": (1.0, 0.01), "b": (0.9, 0.1)}


@pytest.mark.parametrize(
    ("gate", "error", "warned"),
    [
        ({"by": "weights"}, 0.72, True),  # nats grow with the square: 0.52 of the tuning's effect
        ({"by": "weights"}, 0.70, False),
        ({"by": "weights"}, None, False),
        ({"by": "answers", "mean_kl": 0.051}, None, True),  # the tuning itself moves them by 0.1
        ({"by": "answers", "mean_kl": 0.049}, None, False),
        ({"by": "answers", "mean_kl": 0.051, "rounded": None}, None, False),
        ({"by": "answers", "mean_kl": 0.051, "moved": 1e-10}, None, False),
    ],
)
def test_a_merge_whose_rounding_costs_as_much_as_the_tuning(gate: Any, error: float | None, warned: bool) -> None:
    asked: Any = {
        "by": gate["by"],
        "figures": {"mean_kl": gate.get("mean_kl"), "tokens": 100},
        "rounded": gate.get("rounded", {}),
        "stored_dtype": "BF16",
        "effect": {"kl_between": gate.get("moved", 0.1)},
    }
    changes: Any = {} if error is None else {"rounding_error_of_change": error}
    assert bool(_rounding_cost(asked, changes)) is warned
