"""How much of the processor everybody takes, so that a measurement can tell whether it was alone."""

from __future__ import annotations

import os
from pathlib import Path

_STAT = Path("/proc/stat")
_IDLE = (3, 4)  # idle and iowait; guest times (8, 9) are in user and nice already (man 5 proc)
_LAST = 8


def busy_seconds() -> float | None:
    """Processor seconds that all programs of this machine took since its start, and those that the host took from a
    virtual machine (steal); None where /proc/stat does not say."""
    try:
        words = _STAT.read_text(encoding="ascii").split("\n", 1)[0].split()
        ticks = [int(word) for word in words[1 : 1 + _LAST]]
    except (OSError, ValueError):
        return None
    if not words or words[0] != "cpu" or len(ticks) < _LAST:
        return None
    return sum(count for place, count in enumerate(ticks) if place not in _IDLE) / os.sysconf("SC_CLK_TCK")
