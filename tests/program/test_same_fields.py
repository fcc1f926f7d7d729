"""The training program cannot import msgspec, so it declares its plan and its records a second time, as `TypedDict`s.
These are held to the classes that write the plan and read the records: the same fields, of the same types."""

from __future__ import annotations

import typing
from types import UnionType
from typing import Any, Literal, TypedDict, get_args, get_origin, get_type_hints

import msgspec
import pytest

from skill_train.core import digests
from skill_train.program import checks, events, examples, main, plan, split, trainer, watch
from skill_train.recipe.resolved import ResolvedRecipe
from skill_train.run import plan_record, train_record

# What skill-train writes and the program reads.
READ = [
    (plan.Recipe, ResolvedRecipe),
    (plan.Placement, plan_record.Placement),
    (plan.Policy, plan_record.Policy),
    (plan.Launch, plan_record.Launch),
    (plan.Reason, plan_record.Reason),
]
# What the program writes. The classes also read what earlier versions wrote, so they allow more.
WRITTEN = [
    (events.FileDigest, digests.FileDigest),
    (events.Failure, train_record.TrainFailure),
    (events.ErrorWords, train_record.FailureWords),
    (checks.TrainingCheck, train_record.SmokeCheck),
    (checks.Answer, train_record.PromptAnswers),
    (split.DataFigures, train_record.TrainedData),
    (main.TrainFigures, train_record.TrainFigures),
    (main.TrainRecord, train_record.TrainRecord),
    (watch.StepLine, train_record.StepLine),
    (examples.EncodedRow, train_record.Row),
]
NOT_READ = {"where", "flavor", "timeout_seconds", "blockers", "estimates", "facts"}  # of a plan
JOINS_LATER = {"optimizer", "schedule"}  # environment.json, when training starts
AS_TEXT = {"day"}  # a date


def _names(pair: tuple[type, type]) -> str:
    return pair[0].__name__


@pytest.mark.parametrize("pair", READ, ids=_names)
def test_what_it_reads_has_the_fields_of_the_plan(pair: tuple[type, type]) -> None:
    ours, theirs = map(get_type_hints, pair)
    assert list(ours) == list(theirs)
    assert [name for name in ours if not _fits(ours[name], theirs[name]) or not _fits(theirs[name], ours[name])] == []


def test_it_reads_the_parts_of_the_plan_that_it_needs() -> None:
    ours, theirs = get_type_hints(plan.Plan), get_type_hints(plan_record.Plan)
    assert set(theirs) - set(ours) == NOT_READ
    assert [name for name in ours if not _fits(ours[name], theirs[name]) or not _fits(theirs[name], ours[name])] == []


@pytest.mark.parametrize("pair", WRITTEN, ids=_names)
def test_what_it_writes_has_the_fields_of_the_record(pair: tuple[type, type]) -> None:
    ours, theirs = map(get_type_hints, pair)
    assert set(ours) == set(theirs)
    assert [name for name in ours if not _fits(ours[name], theirs[name])] == []


def test_its_environment_has_the_fields_of_the_record() -> None:
    ours, theirs = get_type_hints(trainer.Environment), get_type_hints(train_record.Environment)
    assert set(theirs) - set(ours) == JOINS_LATER
    assert {name for name in ours if not _fits(ours[name], theirs[name])} == AS_TEXT


class _Object(TypedDict):
    name: str


@pytest.mark.parametrize(
    ("written", "read", "fits"),
    [
        (int, int | None, True),
        (int | None, int, False),
        (int, float, False),
        (Literal["a"], Literal["a", "b"], True),
        (Literal["a", "c"], Literal["a", "b"], False),
        (Literal["a"], str, True),
        (str, Literal["a"], False),
        (list[int], list[int | str], True),
        (list[int | str], list[int], False),
        (dict[str, int], dict[str, int | None], True),
        (dict[str, int], list[int], False),
        (list[_Object], list[plan_record.Reason], True),
        (list[_Object], list[str], False),
        (object, Any, True),
        (int, msgspec.UnsetType, False),
    ],
)
def test_a_type_that_does_not_fit_is_found(written: Any, read: Any, fits: bool) -> None:
    assert _fits(written, read) is fits


def _fits(written: Any, read: Any) -> bool:
    """Whether JSON of one type can be read as the other. The fields of objects are compared by themselves."""
    return all(any(_fits_one(one, other) for other in _choices(read)) for one in _choices(written))


def _choices(hint: Any) -> list[Any]:
    return list(get_args(hint)) if isinstance(hint, UnionType) or get_origin(hint) is typing.Union else [hint]


def _fits_one(written: Any, read: Any) -> bool:
    if read is Any or written == read:
        return True
    if get_origin(written) is Literal:
        return read is str or (get_origin(read) is Literal and set(get_args(written)) <= set(get_args(read)))
    if get_origin(written) in (list, dict) and get_origin(written) is get_origin(read):
        return all(_fits(one, other) for one, other in zip(get_args(written), get_args(read), strict=True))
    return _is_object(written) and (_is_object(read) or get_origin(read) is dict)


def _is_object(hint: Any) -> bool:
    return typing.is_typeddict(hint) or (isinstance(hint, type) and issubclass(hint, msgspec.Struct))
