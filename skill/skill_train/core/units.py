"""Formats dollars, durations and sizes for a reader. Pure."""

import math


def dollars(value: float) -> str:
    """`$12.50` or `$0.40`; below ten cents with two significant digits: `$0.067`, `$0.0050`."""
    if value == 0 or abs(value) >= 0.1:
        return f"${value:,.2f}"
    return f"${value:.{1 - math.floor(math.log10(abs(value)))}f}"


def bill(seconds: float, usd_per_hour: float) -> float:
    """Dollars of a job. The Hub bills begun minutes (huggingface.co/docs/hub/jobs-pricing, 2026-08)."""
    return math.ceil(max(seconds, 0.0) / 60) / 60 * usd_per_hour


def duration(seconds: float, *, estimated: bool = False) -> str:
    """`35.7 s`, `1.5 min`, `1.5 h`; whole seconds and minutes for an estimate."""
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    if estimated:
        return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds >= 90 else f"{seconds:.3g} s"


def gigabytes(count: float, digits: int = 1) -> str:
    """`1.5 GB`, of 10^9 bytes each."""
    return f"{count / 1e9:.{digits}f} GB"


def megabytes(count: float, digits: int = 1) -> str:
    """`1.5 MB`, of 10^6 bytes each."""
    return f"{count / 1e6:.{digits}f} MB"


def enough_megabytes(count: int) -> str:
    """`1.235 MB` for 1,234,321 bytes: four digits, rounded up, so that the bytes fit."""
    step = 10 ** max(0, len(str(count)) - 4)
    return f"{-(-count // step) * step / 1e6:g} MB"


def size(count: float) -> str:
    """`1.50 GB`, or `15.0 MB` below 0.1 GB, or `15.0 kB` below 0.1 MB."""
    return gigabytes(count, 2) if count >= 1e8 else megabytes(count) if count >= 1e5 else f"{count / 1e3:.1f} kB"


def speed(rate: float) -> str:
    """`1,234` tokens a second, and `0.4` below ten."""
    return f"{rate:,.{int(rate < 10)}f}"
