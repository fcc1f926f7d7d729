"""Memory of processes: the peak of this process and of its children, and the memory that the allocator keeps.

On Linux `ru_maxrss` survives fork and exec. It begins with the value of the parent, so children seem as large as the
parent. VmHWM counts only the program itself, and exists while it runs. macOS counts each program separately.
"""

import contextlib
import sys
import threading
import time

from skill_train.program.events import linux_figure

_PAUSE_SECONDS = 0.05
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h of glibc
_KEPT_BYTES = 256 << 20
_LARGEST_BYTES = 32 << 20  # the most that glibc takes
_CHILDREN: list[int] = []  # holds only the largest value


def peak_memory_bytes(children: bool = False) -> int | None:
    """The highest resident memory in bytes of this process, or of the watched children; None if the system does not
    report it."""
    if sys.platform == "linux":
        return max(_CHILDREN, default=None) if children else _high_water("self")
    import resource

    who = resource.RUSAGE_CHILDREN if children else resource.RUSAGE_SELF
    return resource.getrusage(who).ru_maxrss or None  # bytes on macOS


def watch_memory(pid: int) -> None:
    """Samples the memory of a child until it ends. Misses its last moments, unless the child reports them with
    `note_memory`."""

    def watch() -> None:
        while (peak := _high_water(pid)) is not None:
            note_memory(peak)
            time.sleep(_PAUSE_SECONDS)

    if sys.platform == "linux":
        threading.Thread(target=watch, daemon=True).start()


def note_memory(peak: int) -> None:
    _CHILDREN[:] = [max(peak, *_CHILDREN)] if _CHILDREN else [peak]


def _high_water(process: int | str) -> int | None:
    """The peak memory of a process on Linux; None if it has ended."""
    peak = linux_figure(f"{process}/status", "VmHWM:")
    return None if peak is None else 1024 * peak


def limit_process(memory_bytes: int, *, seconds: int | None = None) -> None:
    """Limits the address space of this process, and its seconds of the processor. The system enforces both even inside
    one long operation."""
    import resource

    with contextlib.suppress(ValueError, OSError):  # macOS does not always accept the memory limit
        if seconds is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))


def keep_freed() -> None:
    """Makes glibc keep freed memory for the next block of its size. Other allocators are left as they are.

    glibc returns blocks above 128 kB, and the end of its heap, to the system as soon as they are free. Work on blocks
    of a few MB then asks for new pages again and again. `verify` of 10 million weights took 57 s of the processor
    without this function, 25 of them in the system, and 38 s with it (2 cores, 2026-11-25).

    In glibc each thread has its own heap and keeps the memory that it freed. `verify` of 0.5 billion weights took
    2.02 GB with one heap for all threads, and 2.30 GB without (2026-11-23).
    """
    import ctypes

    with contextlib.suppress(OSError, AttributeError):  # no glibc
        glibc = ctypes.CDLL("libc.so.6")
        glibc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES)
        glibc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        glibc.mallopt(_M_ARENA_MAX, 1)
