"""Memory that was freed is kept for the next block of its size.

glibc gives blocks above 128 kB, and the end of its heap, back to the system as soon as they are free. Work on blocks of
a few MB then asks for new pages again and again, and the system zeroes each: it was a quarter of the processor time of
`verify`'s workers (0.5B, 2 cores of a virtual machine, 2026-11-22), and half of that on the worst days.

Threads have heaps of their own there, and each would keep what it freed: with one heap for all, `verify` took 2.02 GB
and 2.30 without (the same model and machine, 2026-11-23).
"""

from __future__ import annotations

import contextlib
import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h of glibc
_KEPT_BYTES = 256 << 20
_LARGEST_BYTES = 32 << 20  # the most that glibc takes


def keep_freed() -> None:
    """For a process that works on many blocks. Other systems' allocators are left as they are."""
    with contextlib.suppress(OSError, AttributeError):  # no glibc
        glibc = ctypes.CDLL("libc.so.6")
        glibc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES)
        glibc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        glibc.mallopt(_M_ARENA_MAX, 1)
