"""The progress of a run, its cost, and the time that is left, from its lines of metrics. Pure."""

import json
import math
from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec

from skill_train.core.errors import UsageError
from skill_train.core.units import bill
from skill_train.run.records import Number, convert
from skill_train.run.train_record import StepLine

MARGIN, SAVING_SECONDS = 1.25, 600  # as for `timeout_seconds` of a plan; the seconds are for saving and uploading


class Speed(msgspec.Struct, frozen=True):
    """The speed of the steps so far."""

    # step, steps: the last finished step, and the number of all steps
    step: int
    steps: int
    # steps since the last start of the program; earlier steps may have run on another machine. None when unknown.
    steps_since_start: int | None
    loss: float | None
    tokens_per_second: float | None
    # mean since the last start, without its first step, which warms up; None before the second step
    seconds_per_step: float | None
    memory_bytes: dict[str, Number]  # the highest measured use, by kind

    @property
    def left_seconds(self) -> float | None:
        """The time that the remaining steps take, without saving and uploading."""
        return None if self.seconds_per_step is None else (self.steps - self.step) * self.seconds_per_step


def speed(lines: Iterable[str], others: Collection[str | None] = ()) -> Speed | None:
    """The speed from the lines of metrics.jsonl, or from a log with `step` events; None before the first step.

    Args:
        others: ids of other jobs. If one of them made the last step, the current job has no step yet, and no speed.
    """
    read = [step for line in lines if (step := _step(line)) is not None]
    if not read:
        return None
    last = read[-1]
    of_another = last.job is not None and last.job in others
    own = [] if of_another else [line for line in read if line.start == last.start]
    seconds = [line.seconds for line in own[1:] if line.seconds is not None and line.seconds > 0]
    steps_since_start = last.step if own and last.start == 1 else None
    if own and own[0] is not read[0]:  # otherwise the lines may be the tail of a log and lack the start
        steps_since_start = last.step - own[0].step + 1
    kinds: dict[str, Number] = {}
    for line in read:
        for kind, used in (line.memory_bytes or {}).items():
            kinds[kind] = max(used or 0, kinds.get(kind, 0))
    return Speed(
        step=last.step,
        steps=last.steps,
        steps_since_start=steps_since_start,
        loss=last.loss,
        tokens_per_second=last.tokens_per_second,
        seconds_per_step=sum(seconds) / len(seconds) if seconds else None,
        memory_bytes=kinds,
    )


def dollars(seconds: float | None, usd_per_hour: float | None) -> float | None:
    """The cost of so many seconds."""
    return None if seconds is None or usd_per_hour is None else round(bill(seconds, usd_per_hour), 4)


def longer_timeout(measured: Speed | None, *, kept_step: int, ran_seconds: float, before: int, first: bool) -> int:
    """The timeout of a job that continues from a checkpoint, in seconds of whole minutes: the measured time of the
    remaining steps, and the time outside of steps. It is twice the last timeout if no step was timed, and at least that
    if the number of the job's steps is unknown.

    Args:
        kept_step: the step of the newest stored checkpoint; 0 without one.
        ran_seconds: the running time of the job that ran out of time.
        before: the timeout of that job.
        first: whether that job was the first of the run, and so made all the steps.
    """
    if measured is None or measured.seconds_per_step is None:
        return 2 * before
    steps_made = measured.step if first else measured.steps_since_start
    beside = max(ran_seconds - (steps_made or 0) * measured.seconds_per_step, 0.0)
    needed = (measured.steps - kept_step) * measured.seconds_per_step + beside
    minutes = math.ceil((needed * MARGIN + SAVING_SECONDS) / 60)
    return max(minutes * 60, 2 * before if steps_made is None else before)


def _step(line: str) -> StepLine | None:
    """The metrics in a line; None if the line holds none, or if a copy cut it in two."""
    if not line.startswith("{"):
        return None
    try:
        return convert(json.loads(line), StepLine, Path("metrics.jsonl"))
    except (ValueError, RecursionError, UsageError):
        return None
