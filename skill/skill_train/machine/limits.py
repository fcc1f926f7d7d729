"""Refuses a step before it starts if there is not enough memory."""

from __future__ import annotations

from skill_train.core.errors import DecisionNeeded
from skill_train.core.units import gigabytes
from skill_train.machine.read import available_memory_bytes


def require_memory(need_bytes: int, purpose: str) -> None:
    """Requires this much available memory. Does nothing if the system does not report it."""
    have = available_memory_bytes()
    if have is not None and have < need_bytes:
        raise DecisionNeeded(
            f"not enough memory for {purpose}: needs {gigabytes(need_bytes, 2)}, {gigabytes(have, 2)} available",
            code="no_memory",
            expected=f"{need_bytes} bytes available",
            got=f"{have} bytes available",
            hint="close other programs, or run this step on a machine with more memory",
        )
