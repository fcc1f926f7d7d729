"""Limits how long one command waits for the Hub without success, and reports the waiting.

Each request has its own limit. Without a common limit, a command with ten requests would wait ten times as long. `cli`
opens one `Waiting` for each command. Without one, such as in a function that a program calls, nothing is reported, and
only the limits of the requests apply.
"""

import contextlib
import math
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

IN_VAIN_SECONDS = 60.0  # for a command that answers once: requests without an answer, and the pauses between them
NOTICE_SECONDS = 10.0  # between two notices about what the command waits for


@dataclass
class Waiting:
    """The waiting of one command."""

    say: Callable[[str], None]  # shows one line to the user
    again: str = ""  # the command itself, for the hint of an error after the time ran out
    most: float = math.inf  # seconds that the command may wait in vain; `vain` is the number of seconds used
    vain: float = 0.0
    end: float = math.inf  # the time of the monotonic clock by which the command needs its answer


_now = Waiting(lambda text: None)  # one command runs at a time; threads of the client report through this object too


@contextlib.contextmanager
def of_command(say: Callable[[str], None], words: list[str]) -> Iterator[None]:
    """The limit for everything that one command does; `words` is its command line."""
    global _now
    before, _now = _now, Waiting(say, shlex.join(words), IN_VAIN_SECONDS)
    try:
        yield
    finally:
        _now = before


@contextlib.contextmanager
def until(end: float) -> Iterator[None]:
    """Sets the moment of the monotonic clock at which all waiting ends."""
    waiting, before = _now, _now.end
    waiting.end = min(before, end)
    try:
        yield
    finally:
        waiting.end = before


@contextlib.contextmanager
def for_hours() -> Iterator[None]:
    """For commands that stay with a job: `cloud/poll.py` has its own limit there."""
    waiting, before = _now, _now.most
    waiting.most = math.inf
    try:
        yield
    finally:
        waiting.most, waiting.vain = before, 0.0


def seconds_left() -> float:
    """Seconds left for the next request; zero or less when the time is over."""
    return min(_now.most - _now.vain, _now.end - time.monotonic())


def in_vain(seconds: float) -> None:
    _now.vain += seconds


def well() -> None:
    """Resets the time waited in vain after a large transfer has made progress."""
    _now.vain = 0.0


def pause(seconds: float) -> None:
    """Sleeps before a request is repeated, but not longer than the time that is left."""
    seconds = max(min(seconds, seconds_left()), 0.0)
    time.sleep(seconds)
    in_vain(seconds)


def tell(text: str) -> None:
    _now.say(text)


def again() -> str:
    """The command that ran out of time, for the hint; empty outside a command."""
    return _now.again
