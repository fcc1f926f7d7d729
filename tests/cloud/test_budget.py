"""Timeouts and ceilings of a job, by hand arithmetic."""

from __future__ import annotations

from typing import Any

import pytest

from skill_train.cloud.budget import Need, Price, budget, seconds_of
from skill_train.core.errors import DecisionNeeded, UsageError
from skill_train.run.plan_record import Estimate


def _plan(low: float | None = 3600, high: float | None = 7200, timeout: int | None = 9600) -> Need:
    return Need("a10g-large", Estimate(low, high, "assumed"), timeout)


def _budget(made: Need, timeout: int | None = None, max_cost: float | None = None, usd: Any = 1.5) -> Any:
    return budget(made, price=Price(usd, "price of today"), timeout=timeout, max_cost=max_cost)


def test_an_estimate_and_its_bound() -> None:
    """1 to 2 hours at 1.50 dollars; 9600 s are 2 h 40 min."""
    found = _budget(_plan())
    assert (found.timeout_seconds, found.tight, found.lowered) == (9600, False, False)
    assert found.cost_usd == pytest.approx((1.5, 3.0))
    assert found.most_usd == pytest.approx(4.0)
    assert found.as_dict() == {
        "low": 1.5, "high": 3.0, "most": 4.0, "usd_per_hour": 1.5, "basis": "$1.50 an hour, price of today"
    }  # fmt: skip


def test_minutes_are_billed_whole() -> None:
    assert _budget(_plan(), timeout=7201).most_usd == pytest.approx(121 / 60 * 1.5)


@pytest.mark.parametrize(
    ("low", "high", "timeout", "minutes"),
    [
        (65, 130, 600, (2, 3, 10)),  # each minute that is begun
        (0, 60, 600, (1, 1, 10)),  # no step is left, and the job begins all the same
        (0.9, 451, 440, (1, 8, 8)),  # it is stopped after 8 minutes, and costs no more
        (3600, 7200, 5400, (60, 90, 90)),
    ],
)
def test_the_estimate_is_of_minutes_that_are_billed(
    low: float, high: float, timeout: int, minutes: tuple[int, ...]
) -> None:
    cost = _budget(_plan(low, high), timeout=timeout).as_dict()
    assert [cost["low"], cost["high"], cost["most"]] == pytest.approx([each / 60 * 1.5 for each in minutes])


@pytest.mark.parametrize(
    ("timeout", "max_cost", "expected"),
    [
        (None, 4.0, 9600),
        (None, 3.0, 7200),  # 2 h for 3 dollars, which is the upper estimate
        (None, 3.3, 7920),  # 2 h 12 min
        (7200, 3.0, 7200),
        (5400, None, 5400),  # between the estimates: told, and taken
        (3600, 1.5, 3600),  # the lower estimate itself, for exactly its price
    ],
)
def test_the_timeout_that_is_taken(timeout: int | None, max_cost: float | None, expected: int) -> None:
    found = _budget(_plan(), timeout, max_cost)
    assert found.timeout_seconds == expected
    assert found.lowered is (timeout is None and expected < 9600)
    assert found.tight is (expected < 7200)
    assert max_cost is None or found.most_usd <= max_cost + 1e-9


@pytest.mark.parametrize(
    ("made", "timeout", "max_cost", "usd", "code"),
    [
        (_plan(), 3599, None, 1.5, "bad_timeout"),
        (_plan(), None, 2.99, 1.5, "over_budget"),
        (_plan(), 9600, 3.99, 1.5, "over_budget"),
        (_plan(), None, 4.0, None, "over_budget"),
        (_plan(None, None, None), None, None, 1.5, "bad_timeout"),
        (_plan(None, None, None), 3600, 1.0, 1.5, "over_budget"),
    ],
)
def test_what_is_not_taken(made: Any, timeout: int | None, max_cost: float | None, usd: Any, code: str) -> None:
    with pytest.raises(DecisionNeeded) as caught:
        _budget(made, timeout, max_cost, usd)
    assert caught.value.code == code
    assert caught.value.expected and caught.value.got and caught.value.hint


@pytest.mark.parametrize(
    ("made", "timeout", "max_cost", "hint"),
    [
        (_plan(None, None, None), 3600, 1.0, "submit x --timeout 40m"),  # 1 dollar of 1.50 an hour
        (_plan(), 9600, 2.0, "submit x --timeout 80m"),  # between the estimates
        (_plan(), 9600, 1.5, "submit x --timeout 60m"),  # the lower estimate itself
        (_plan(None, None, 7200), None, 1.0, "submit x --timeout 40m"),  # the plan has a timeout and no estimate
        (_plan(3600, None), 9600, 1.0, "submit x --timeout 40m"),  # half of an estimate is none
        (_plan(None, 7200), 9600, 1.0, "submit x --timeout 40m"),
        (_plan(), None, 1.49, "--max-cost of $1.50 or more, a cheaper --flavor"),  # the lower estimate is an hour
        (_plan(None, None, None), 60, 0.02, "--max-cost of $0.025 or more"),  # a minute
    ],
)
def test_the_hint_names_what_fits(made: Any, timeout: int | None, max_cost: float, hint: str) -> None:
    with pytest.raises(DecisionNeeded) as caught:
        budget(made, price=Price(1.5, ""), timeout=timeout, max_cost=max_cost, command="submit x")
    assert caught.value.hint.startswith(hint)
    if "--timeout" in hint:
        seconds = seconds_of(caught.value.hint.split()[-1])
        assert _budget(made, seconds, max_cost).most_usd <= max_cost


def test_what_earlier_jobs_cost_counts() -> None:
    """Of 4 dollars 1 is spent: 3 pay for 2 hours."""
    price = Price(1.5, "")
    found = budget(_plan(), price=price, timeout=None, max_cost=4.0, spent=1.0)
    assert (found.timeout_seconds, found.lowered) == (7200, True)
    assert budget(_plan(), price=price, timeout=7200, max_cost=4.0, spent=1.0).most_usd == pytest.approx(3.0)
    with pytest.raises(DecisionNeeded) as caught:
        budget(_plan(), price=price, timeout=9600, max_cost=4.0, spent=1.0, command="submit x")
    assert caught.value.hint == "submit x --timeout 120m" and "$1.00 of the jobs before it" in caught.value.got
    with pytest.raises(DecisionNeeded) as caught:
        budget(_plan(), price=price, timeout=None, max_cost=2.0, spent=1.0)
    assert caught.value.hint.startswith("--max-cost of $2.50 or more")  # the lower estimate is an hour


def test_over_the_ceiling_both_figures_are_shown() -> None:
    with pytest.raises(DecisionNeeded) as caught:
        _budget(_plan(), 9600, 3.5)
    assert caught.value.got.startswith("$1.50 to $3.00 estimated, $4.00 at its timeout of 9600 s (")
    assert caught.value.message == "this job may cost more than --max-cost 3.5"
    with pytest.raises(DecisionNeeded) as caught:
        budget(_plan(), price=Price(1.5, ""), timeout=9600, max_cost=3.5, spent=0.5)
    assert caught.value.message == "this job and those before it may cost more than --max-cost 3.5"


@pytest.mark.parametrize(("timeout", "enough"), [(9600, 9600), (None, 7200)])
def test_a_timeout_that_is_too_short_is_told_one_that_is_enough(timeout: int | None, enough: int) -> None:
    with pytest.raises(DecisionNeeded) as caught:
        budget(_plan(timeout=timeout), price=Price(1.5, ""), timeout=3599, max_cost=None, command="submit x")
    assert caught.value.hint == f"submit x --timeout {enough}"


@pytest.mark.parametrize(
    ("made", "usd", "words", "figures"),
    [
        (_plan(), 1.5, "$1.50 to $3.00; $4.00 at most, when it runs until its timeout", (1.5, 3.0, 4.0)),
        (_plan(None, None, 9600), 1.5, "$4.00 at most, when it runs until its timeout", (None, None, 4.0)),
        (_plan(), None, "no price is known", (None, None, None)),
    ],
)
def test_the_cost_in_words_and_in_figures(made: Any, usd: Any, words: str, figures: tuple[Any, ...]) -> None:
    found = _budget(made, usd=usd)
    cost = found.as_dict()
    assert found.in_words == words and (cost["low"], cost["high"], cost["most"]) == figures


def test_without_an_estimate_the_timeout_is_the_bound() -> None:
    found = _budget(_plan(None, None, None), 3600, 1.5)
    assert (found.cost_usd, found.most_usd, found.tight) == (None, 1.5, False)
    assert "no estimate: assumed" in found.basis


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90m", 5400), ("2h", 7200), ("1.5h", 5400), ("90s", 90), ("5400", 5400), ("1d", 86400), (" 60 ", 60)],
)
def test_a_timeout_as_it_is_said(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds


def test_a_year_is_the_longest_timeout() -> None:
    assert seconds_of("365d") == 31_536_000


TOO_LONG = ["366d", "8761h", "9" * 9 + "d", "9" * 20 + "d", "9" * 400, "1." + "9" * 400 + "h"]


@pytest.mark.parametrize("text", ["", "soon", "-5m", "59", "0.5m", "2w", "1e3", "m", "nan", "inf", "٣٠m", *TOO_LONG])
def test_what_is_no_timeout(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        seconds_of(text)
    assert caught.value.code == "bad_timeout"
