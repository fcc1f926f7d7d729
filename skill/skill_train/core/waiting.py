"""How long one command waits for the Hub in vain, and what it says meanwhile.

Each question has a limit of its own; without one for all of them, a command that asks ten times would wait ten times as
long. `cli` opens one `Waiting` for each command. Where there is none, as for a function that a program calls, nothing
is told, and only the limits of the questions hold.
"""

from __future__ import annotations

import contextlib
import math
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

IN_VAIN_SECONDS = 60.0  # of a command that answers once: questions without an answer, and the pauses between them
TOLD_SECONDS = 10.0  # between two words on what is waited for


@dataclass
class Waiting:
    """Of one command.

    Attributes:
        say: shows one line to the user.
        again: the command itself, for the hint of what ran out of time.
        most: seconds that it may wait in vain; `vain` is how many of them are over.
        end: when it must have its answer, by the monotonic clock.
    """

    say: Callable[[str], None]
    again: str = ""
    most: float = math.inf
    vain: float = 0.0
    end: float = math.inf


_now = Waiting(lambda text: None)  # one command at a time: threads of the client tell through it too


@contextlib.contextmanager
def of_command(say: Callable[[str], None], words: list[str]) -> Iterator[None]:
    """For all that one command does; `words` are what it was called with."""
    global _now
    before, _now = _now, Waiting(say, shlex.join(words), IN_VAIN_SECONDS)
    try:
        yield
    finally:
        _now = before


@contextlib.contextmanager
def until(end: float) -> Iterator[None]:
    """Nothing is waited for beyond this moment of the monotonic clock."""
    waiting, before = _now, _now.end
    waiting.end = min(before, end)
    try:
        yield
    finally:
        waiting.end = before


@contextlib.contextmanager
def for_hours() -> Iterator[None]:
    """For what stays with a job: who waits there has a patience of their own (`follow`)."""
    waiting, before = _now, _now.most
    waiting.most = math.inf
    try:
        yield
    finally:
        waiting.most, waiting.vain = before, 0.0


def seconds_left() -> float:
    """Seconds for the next question; none or fewer when the time is over."""
    return min(_now.most - _now.vain, _now.end - time.monotonic())


def in_vain(seconds: float) -> None:
    _now.vain += seconds


def well() -> None:
    """Something large has come or gone: what was waited in vain before it does not count any more."""
    _now.vain = 0.0


def pause(seconds: float) -> None:
    """Sleeps before something is asked again, and no longer than there is time."""
    seconds = max(min(seconds, seconds_left()), 0.0)
    time.sleep(seconds)
    in_vain(seconds)


def tell(text: str) -> None:
    _now.say(text)


def again() -> str:
    """The command that ran out of time, for its hint; empty where there is none."""
    return _now.again
