"""How long a question that fails is asked again, and what ends that."""

from __future__ import annotations

import itertools
import time

import pytest

from skill_train.cloud import poll
from skill_train.cloud.poll import Patience, patiently, pauses
from skill_train.core.errors import SkillTrainError, Temporary, UsageError
from skill_train.hub.errors import OfflineMode

TROUBLE = Temporary("no answer", code="hub_unreachable", got="nothing", hint="again")


def test_the_pauses_grow_to_a_quarter_of_a_minute() -> None:
    """The Hub allows 1,000 questions in 5 minutes."""
    assert list(itertools.islice(pauses(), 8)) == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]


def test_the_last_pause_ends_with_the_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the question is asked once more then."""
    monkeypatch.setattr(poll, "FIRST_PAUSE_SECONDS", 30.0)
    asked, began = [], time.monotonic()

    def question() -> None:
        asked.append(time.monotonic() - began)
        raise TROUBLE

    with pytest.raises(Temporary):
        patiently(question, seconds=0.3)
    assert len(asked) == 2 and 0.25 < asked[1] < 15


@pytest.mark.parametrize(
    "trouble",
    [
        OfflineMode("HF_HUB_OFFLINE is set", code="hub_unreachable", got="", hint="unset it"),
        UsageError("no such job", code="unknown_job", hint="check the id"),
    ],
)
def test_what_does_not_pass_is_not_waited_for(trouble: SkillTrainError) -> None:
    asked = []

    def question() -> None:
        asked.append(1)
        raise trouble

    with pytest.raises(type(trouble)):
        patiently(question, seconds=60)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("between", "goes_on"), [("a long connection", True), ("a success", True), ("nothing of both", False)]
)
def test_only_failures_without_a_success_between_them_add_up(
    monkeypatch: pytest.MonkeyPatch, between: str, goes_on: bool
) -> None:
    """A log may be silent for an hour: a connection that broke after so long was there all the time."""
    monkeypatch.setattr(poll, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(poll, "HEALTHY_SECONDS", 0.2 if between == "a long connection" else 60.0)
    patience = Patience(0.3)
    patience.bear(TROUBLE)
    if between == "a success":
        patience.well()
    time.sleep(0.5)
    if goes_on:
        patience.bear(TROUBLE)
        return
    with pytest.raises(Temporary):
        patience.bear(TROUBLE)
