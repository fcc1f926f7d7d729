"""Draws the state of a run for `status` and `wait`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from skill_train.commands._drawing import draw_bar, draw_line
from skill_train.core.units import dollars, duration


def draw_status(rich: Any, data: dict[str, Any]) -> None:
    """Draws the state of a run: one line for each fact."""
    for name, value in _status_lines(data):
        if value:
            draw_line(rich, f"{name:<10}{value}")
        if value and name == "step" and rich.is_terminal:
            draw_bar(rich, data["step"], data["steps"], indent=10)


def _status_lines(data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    seconds, cost, progress = data["seconds"], data.get("cost_usd") or {}, data["progress"]
    said = f": {data['message']}" if data.get("message") else ""
    yield "stage", f"{data['stage']}{said}"
    yield "job", " · ".join(str(part) for part in (data["job_id"], data.get("flavor"), data.get("url")) if part)
    loss = "" if data["loss"] is None else f" · loss {data['loss']:.4f}"
    speed = "" if data["tokens_per_second"] is None else f" · {data['tokens_per_second']:,.0f} tokens/s"
    yield "step", "" if data["step"] is None else f"{data['step']} of {data['steps']}{loss}{speed}"
    age = progress["age_seconds"]
    yield "from", (progress["source"] or "") + ("" if age is None else f", {duration(age, estimated=True)} old")
    yield "time", _of(seconds.get("ran"), seconds.get("expected"), seconds.get("estimated"), duration)
    left = seconds.get("left")
    yield "left", "" if left is None else f"about {duration(left, estimated=True)}"
    in_all = cost.get("all_jobs")
    before = f"; {dollars(in_all)} with the jobs before it" if in_all is not None and data.get("attempt", 1) > 1 else ""
    yield "cost", _of(cost.get("so_far"), cost.get("expected"), cost.get("estimated"), dollars) + before
    yield "ends by", data.get("ends_by") or ""
    yield "waiting", data.get("waiting") or ""
    why = data["why"] or {}
    yield "why", why.get("message", "")
    yield "helps", why.get("help", "")


def _of(so_far: Any, expected: Any, estimated: Any, words: Callable[[float], str]) -> str:
    """A measured value beside the estimated one."""
    if so_far is None:
        return ""
    of = "" if expected is None else f" of {words(expected)}"
    known = estimated and estimated["low"] is not None
    return (
        words(so_far) + of + (f" (estimated {words(estimated['low'])} to {words(estimated['high'])})" if known else "")
    )
