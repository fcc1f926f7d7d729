"""Refuses a step before it starts if there is not enough memory."""

from __future__ import annotations

from skill_train.core.errors import DecisionNeeded
from skill_train.machine.read import available_memory_bytes


def require_memory(need_bytes: int, purpose: str) -> None:
    """Raises if less memory is available. Does nothing if the system does not report it.

    Raises:
        DecisionNeeded: available memory below `need_bytes`.
    """
    have = available_memory_bytes()
    if have is not None and have < need_bytes:
        raise DecisionNeeded(
            f"not enough memory for {purpose}: needs {need_bytes / 1e9:.2f} GB, {have / 1e9:.2f} GB available",
            code="no_memory",
            expected=f"{need_bytes} bytes available",
            got=f"{have} bytes available",
            hint="close other programs, or run this step on a machine with more memory",
        )
