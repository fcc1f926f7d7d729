"""How busy the processor is, so that a measurement can tell whether other programs ran beside it."""

import os
from pathlib import Path

_STAT = Path("/proc/stat")
_IDLE = (3, 4)  # idle and iowait; guest times (8, 9) are in user and nice already (man 5 proc)
_LAST = 8


def busy_seconds() -> float | None:
    """Processor seconds that all programs of this machine used since its start, with the seconds that the host took
    from a virtual machine (steal). None if /proc/stat does not report them."""
    try:
        words = _STAT.read_text(encoding="ascii").split("\n", 1)[0].split()
        ticks = [int(word) for word in words[1 : 1 + _LAST]]
    except (OSError, ValueError):
        return None
    if not words or words[0] != "cpu" or len(ticks) < _LAST:
        return None
    return sum(count for place, count in enumerate(ticks) if place not in _IDLE) / os.sysconf("SC_CLK_TCK")
