"""Quotes words of commands for a shell."""

from __future__ import annotations

import shlex


def quoted(value: object) -> str:
    """The value as one word for a shell."""
    return shlex.quote(str(value))
