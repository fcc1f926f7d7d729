"""Draws the state of a run for `status` and `wait`."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NotRequired, TypedDict

from skill_train.commands._drawing import draw_bar
from skill_train.core.console import Result
from skill_train.core.errors import SkillTrainError
from skill_train.core.units import dollars, duration
from skill_train.run.records import Number


class Ends(TypedDict):
    """The ends of an estimate; None if unknown."""

    low: float | None
    high: float | None


class Times(TypedDict, total=False):
    """Times in seconds. A local run has only `left`."""

    ran: float | None
    left: float | None
    expected: float | None
    estimated: Ends | None
    limit: int | None


class Costs(TypedDict):
    """Dollars of a job, and of all jobs of its run."""

    so_far: float | None
    expected: float | None
    estimated: Ends | None
    at_most: float | None
    per_hour: float | None
    all_jobs: float | None


class Source(TypedDict):
    """The source of the figures, and their age."""

    source: str | None
    age_seconds: float | None


class State(TypedDict):
    """The state of a run. Only jobs have the `NotRequired` keys."""

    run_dir: str | None
    job_id: str | None
    stage: str
    message: str | None
    step: int | None
    steps: int | None
    loss: float | None
    tokens_per_second: float | None
    memory_bytes: dict[str, Number] | None
    progress: Source
    seconds: Times
    why: dict[str, str] | None
    url: NotRequired[str | None]
    attempt: NotRequired[int]
    flavor: NotRequired[str | None]
    ends_by: NotRequired[str | None]
    cost_usd: NotRequired[Costs]
    waiting: NotRequired[str | None]
    hub_model_id: NotRequired[str | None]


def state_result(data: State, following: Sequence[str], error: SkillTrainError | None = None) -> Result:
    draw = partial(_draw, data=data)
    return Result(data, human=draw, quiet=data["stage"], next=list(following), error=error)


def _draw(rich: Any, data: State) -> None:
    step, steps = data["step"], data["steps"]
    for name, value in _status_lines(data):
        if value:
            rich.print(f"{name:<10}{value}", soft_wrap=True)
        if name == "step" and step is not None and steps is not None and rich.is_terminal:
            draw_bar(rich, step, steps, indent=10)


def _status_lines(data: State) -> Iterator[tuple[str, str]]:
    seconds, cost, progress = data["seconds"], data.get("cost_usd"), data["progress"]
    message = f": {data['message']}" if data.get("message") else ""
    yield "stage", f"{data['stage']}{message}"
    yield "job", " · ".join(str(part) for part in (data["job_id"], data.get("flavor"), data.get("url")) if part)
    loss = "" if data["loss"] is None else f" · loss {data['loss']:.4f}"
    speed = "" if data["tokens_per_second"] is None else f" · {data['tokens_per_second']:,.0f} tokens/s"
    yield "step", "" if data["step"] is None else f"{data['step']} of {data['steps']}{loss}{speed}"
    age = progress["age_seconds"]
    yield "from", (progress["source"] or "") + ("" if age is None else f", {duration(age, estimated=True)} old")
    yield "time", _progress_of(seconds.get("ran"), seconds.get("expected"), seconds.get("estimated"), duration)
    left = seconds.get("left")
    yield "left", "" if left is None else f"about {duration(left, estimated=True)}"
    if cost is not None:
        in_all = cost["all_jobs"] if data.get("attempt", 1) > 1 else None
        before = "" if in_all is None else f"; {dollars(in_all)} with the jobs before it"
        yield "cost", _progress_of(cost["so_far"], cost["expected"], cost["estimated"], dollars) + before
    yield "ends by", data.get("ends_by") or ""
    yield "waiting", data.get("waiting") or ""
    why = data["why"] or {}
    yield "why", why.get("message", "")
    yield "helps", why.get("help", "")


def _progress_of(
    so_far: float | None, expected: float | None, estimated: Ends | None, words: Callable[[float], str]
) -> str:
    """A measured value, the expected value and the estimate, in words."""
    if so_far is None:
        return ""
    of = "" if expected is None else f" of {words(expected)}"
    low, high = (estimated["low"], estimated["high"]) if estimated else (None, None)
    estimate = "" if low is None or high is None else f" (estimated {words(low)} to {words(high)})"
    return words(so_far) + of + estimate
