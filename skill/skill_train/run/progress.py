"""How far a run is, what it has cost, and how long the rest takes, from the lines that it wrote. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from skill_train.core.errors import UsageError
from skill_train.run.records import Number, convert
from skill_train.run.train_record import StepLine

MARGIN, SAVING_SECONDS = 1.25, 600  # as `candidates.timeout_seconds`: a quarter more, and time for saving and uploading


@dataclass(frozen=True)
class Speed:
    """What the steps so far tell.

    Attributes:
        step, steps: the last step that was made, and how many there will be.
        made: steps of the last start of the program, earlier ones may have had another machine; None when unknown.
        seconds_per_step: mean of that start without its first step, which warms up; None before the second.
        memory_bytes: the highest use that was measured, by kind.
    """

    step: int
    steps: int
    made: int | None
    loss: float | None
    tokens_per_second: float | None
    seconds_per_step: float | None
    memory_bytes: dict[str, Number]

    @property
    def left_seconds(self) -> float | None:
        """Of training alone."""
        return None if self.seconds_per_step is None else (self.steps - self.step) * self.seconds_per_step


def speed(lines: Iterable[str], others: Collection[str | None] = ()) -> Speed | None:
    """From the lines of metrics.jsonl, or from a log that has its `step` events; None before the first step.

    Args:
        others: ids of jobs whose speed is not asked for: a further job that has made no step yet has none.
    """
    read = [step for line in lines if (step := _step(line)) is not None]
    if not read:
        return None
    last = read[-1]
    of_another = last.job is not None and last.job in others
    own = [] if of_another else [line for line in read if line.start == last.start]
    seconds = [line.seconds for line in own[1:] if line.seconds is not None and line.seconds > 0]
    made = last.step if own and last.start == 1 else None
    if own and own[0] is not read[0]:  # else the lines may begin in the middle of a start, as the tail of a log does
        made = last.step - own[0].step + 1
    kinds: dict[str, Number] = {}
    for line in read:
        for kind, used in (line.memory_bytes or {}).items():
            kinds[kind] = max(used or 0, kinds.get(kind, 0))
    return Speed(
        step=last.step,
        steps=last.steps,
        made=made,
        loss=last.loss,
        tokens_per_second=last.tokens_per_second,
        seconds_per_step=sum(seconds) / len(seconds) if seconds else None,
        memory_bytes=kinds,
    )


def dollars(seconds: float | None, usd_per_hour: float | None) -> float | None:
    """Of so many seconds. The Hub bills minutes (huggingface.co/docs/hub/jobs-pricing, 2026-08)."""
    if seconds is None or usd_per_hour is None:
        return None
    return round(math.ceil(max(seconds, 0.0) / 60) * usd_per_hour / 60, 4)


def longer_timeout(measured: Speed | None, *, kept_step: int, ran_seconds: float, before: int, first: bool) -> int:
    """Seconds for a job that goes on from a checkpoint, after one that ran out of time. Whole minutes.

    By what was measured: the steps that are left, and what the job took beside its steps. Twice the time before where
    that is not known: no step was timed, or nobody says how many an earlier job made.

    Args:
        kept_step: of the newest checkpoint that is kept; 0 without one.
        ran_seconds: of the job that ran out of time.
        before: its timeout.
        first: whether it was the first job of the run, which made all the steps.
    """
    if measured is None or measured.seconds_per_step is None:
        return 2 * before
    made = measured.step if first else measured.made
    beside = max(ran_seconds - (made or 0) * measured.seconds_per_step, 0.0)
    needed = (measured.steps - kept_step) * measured.seconds_per_step + beside
    minutes = math.ceil((needed * MARGIN + SAVING_SECONDS) / 60)
    return max(minutes * 60, 2 * before if made is None else before)


def _step(line: str) -> StepLine | None:
    """A line of metrics; None for another one, and for one that a copy cut in two."""
    if not line.startswith("{"):
        return None
    try:
        return convert(json.loads(line), StepLine, Path("metrics.jsonl"))
    except (ValueError, RecursionError, UsageError):
        return None
