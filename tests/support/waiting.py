"""Waits for what another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], seconds: float, about: object = None) -> None:
    """`about` is shown where the condition is not met in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, about
        time.sleep(0.02)
