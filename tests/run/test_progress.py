"""How far a run is and what it costs, against arithmetic by hand."""

from __future__ import annotations

import json

import pytest

from skill_train.run.progress import dollars, longer_timeout, speed


def _lines(*seconds: float, steps: int = 100) -> list[str]:
    kinds = [{"rss": 5}, {"rss": 9, "cuda": 7}]
    return [
        json.dumps({"step": n, "steps": steps, "loss": 2.0, "seconds": taken, "memory_bytes": kinds[n % 2]})
        for n, taken in enumerate(seconds, 1)
    ]


def test_the_first_step_does_not_count_and_the_highest_memory_does() -> None:
    """(2 + 4) / 2 = 3 seconds a step, 97 steps to go."""
    found = speed(_lines(30.0, 2.0, 4.0))
    assert found is not None
    assert (found.step, found.seconds_per_step, found.left_seconds) == (3, 3.0, 291.0)
    assert found.memory_bytes == {"rss": 9, "cuda": 7}


def test_a_log_and_a_copy_that_was_cut() -> None:
    """The events of the program among other words; the last line of the copy is half."""
    event = json.dumps({"event": "step", "step": 7, "steps": 50, "loss": None, "seconds": 1.0, "memory_bytes": {}})
    noise = ["Loading weights", '{"event": "stage", "text": "training"}', "[1]", "{}", event, event[:30]]
    found = speed(noise)
    assert found is not None
    assert (found.step, found.steps, found.loss, found.seconds_per_step) == (7, 50, None, None)
    assert speed(["Loading weights"]) is None


@pytest.mark.parametrize(
    ("seconds", "price", "expected"),
    [
        (60, 0.4, 0.0067),
        (61, 0.4, 0.0133),  # a second minute has begun
        (3600, 23.5, 23.5),  # l40sx8, huggingface.co/docs/hub/jobs-pricing, 2026-08-22
        (None, 1.0, None),
        (60, None, None),
    ],
)
def test_minutes_are_billed(seconds: float | None, price: float | None, expected: float | None) -> None:
    assert dollars(seconds, price) == expected


def test_a_longer_time_by_what_was_measured() -> None:
    """Of 100 steps of 60 seconds, 20 were made in 1,800 seconds: 600 went elsewhere. From step 10 on 90 are left: 5,400
    seconds, and 600 beside; a quarter more is 7,500, and ten minutes for the end make 8,100."""
    measured = speed(_lines(60.0, *[60.0] * 19))
    assert longer_timeout(measured, kept_step=10, ran_seconds=1800, before=1800, first=True) == 8100


def test_at_least_twice_where_little_is_known() -> None:
    """No step was timed; or lines of earlier jobs do not say whose they are; or the log begins in the middle."""
    assert longer_timeout(None, kept_step=0, ran_seconds=600, before=600, first=True) == 1200
    assert longer_timeout(speed(_lines(60.0)), kept_step=0, ran_seconds=600, before=600, first=True) == 1200
    of_another = [json.dumps(json.loads(line) | {"job": "first"}) for line in _lines(60.0, 60.0)]
    assert longer_timeout(speed(of_another, {"first"}), kept_step=0, ran_seconds=600, before=600, first=True) == 1200
    almost = speed(_lines(1.0, 1.0, steps=3))
    assert longer_timeout(almost, kept_step=2, ran_seconds=3600, before=3600, first=False) == 7200


def test_each_start_has_its_own_speed() -> None:
    """Steps 1 to 4 took 60 seconds on a slow machine, 5 to 7 took 9 (which warms up), 2 and 4: of 100 steps 93 are
    left, 279 seconds. What that job took beside its 3 steps of 3 seconds is 291 of its 300: 291 + 3 x 95 from step 5
    on, a quarter more and 600 are 1,320."""
    starts = [(60.0, 1), (60.0, 1), (60.0, 1), (60.0, 1), (9.0, 2), (2.0, 2), (4.0, 2)]
    lines = [
        json.dumps({"step": n, "steps": 100, "start": start, "job": f"job-{start}", "seconds": seconds})
        for n, (seconds, start) in enumerate(starts, 1)
    ]
    found = speed(lines, {"job-1"})
    assert found is not None
    assert (found.step, found.steps_since_start, found.seconds_per_step, found.left_seconds) == (7, 3, 3.0, 279.0)
    assert longer_timeout(found, kept_step=5, ran_seconds=300, before=300, first=False) == 1320
    begun = speed(lines[:4], {"job-1"})  # the second job has made no step yet
    assert begun is not None and (begun.step, begun.steps_since_start, begun.seconds_per_step) == (4, None, None)
    first, tail = speed(lines[:4]), speed(lines[5:])
    assert first is not None and (first.steps_since_start, first.seconds_per_step) == (4, 60.0)
    assert tail is not None and tail.steps_since_start is None
    assert longer_timeout(tail, kept_step=5, ran_seconds=300, before=3000, first=False) == 6000


def test_never_less_than_before() -> None:
    """One step of a second is left: 601 seconds would do, had it not been more before."""
    almost = speed(_lines(1.0, 1.0, steps=3))
    assert longer_timeout(almost, kept_step=2, ran_seconds=2, before=3600, first=True) == 3600
