"""The peak memory of this process and of the processes that it started.

On Linux `ru_maxrss` outlives fork and exec: it begins with what the parent had, so its children look as large.
VmHWM is of the program itself, and is there while it runs. macOS counts each program by itself.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from pathlib import Path

_PAUSE_SECONDS = 0.05
_CHILDREN: list[int] = []  # the largest, alone


def peak_memory_bytes(children: bool = False) -> int | None:
    """The highest resident memory of this process (or of the watched children); None where the system does not report
    it."""
    if sys.platform == "linux":
        return max(_CHILDREN, default=None) if children else _high_water("self")
    try:
        import resource
    except ImportError:  # Windows
        return None
    who = resource.RUSAGE_CHILDREN if children else resource.RUSAGE_SELF
    return resource.getrusage(who).ru_maxrss or None  # bytes on macOS


def watch_memory(pid: int) -> None:
    """Samples the memory of a child until it ends. Misses its last moments, unless the child reports them with
    `note_memory`."""

    def watch() -> None:
        while (peak := _high_water(str(pid))) is not None:
            note_memory(peak)
            time.sleep(_PAUSE_SECONDS)

    if sys.platform == "linux":
        threading.Thread(target=watch, daemon=True).start()


def note_memory(peak: int) -> None:
    """Records the peak memory that a child reported."""
    _CHILDREN[:] = [max(peak, *_CHILDREN)] if _CHILDREN else [peak]


def _high_water(process: str) -> int | None:
    """None for a process that has ended, and on systems without /proc."""
    try:
        status = (Path("/proc") / process / "status").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return 1024 * int(found[1]) if found else None
