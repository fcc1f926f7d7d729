"""Dollars for a reader. Pure."""

from __future__ import annotations

import math


def dollars(value: float) -> str:
    """`$12.50`, `$0.40`, and below ten cents two digits that count: `$0.067`, `$0.0050`."""
    if value == 0 or abs(value) >= 0.1:
        return f"${value:,.2f}"
    return f"${value:.{1 - math.floor(math.log10(abs(value)))}f}"
