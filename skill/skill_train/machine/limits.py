"""Refuses a step before it starts if there is not enough memory, or not enough address space for torch."""

import importlib.util
import sys
from pathlib import Path

from skill_train.core.errors import DecisionNeeded
from skill_train.core.units import gigabytes
from skill_train.machine.read import available_memory_bytes
from skill_train.program.events import linux_figure

_TIMES_ITS_LIBRARIES = 1.5  # 446 MB of libraries mapped 611 MB (torch 2.13 for CPU, Linux, 2026-11)


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


def require_room_for_torch() -> None:
    """Refuses a limit on the address space (`ulimit -v`, some batch systems) that is too low for torch. Without this
    check, libraries that do not fit end the process without an explanation. Call it before this process, or a child
    that inherits the limit, imports torch."""
    free = None if "torch" in sys.modules else _free_bytes()
    need = None if free is None else _needed_bytes()
    if free is None or need is None or free >= need:
        return
    raise DecisionNeeded(
        "out of memory: the limit on the address space is too low for torch",
        code="out_of_memory",
        expected=f"{gigabytes(need)} for the libraries of torch alone",
        got=gigabytes(max(0, free)),
        hint="raise the limit (ulimit -v unlimited) and run the same command again",
    )


def _free_bytes() -> int | None:
    """The free address space; None without a limit, or if the system does not report it."""
    limit, mapped = linux_figure("self/limits", "Max address space"), linux_figure("self/status", "VmSize:")
    return None if limit is None or mapped is None else limit - 1024 * mapped


def _needed_bytes() -> int | None:
    """The address space that torch needs; None if torch is not installed."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    libraries = Path(spec.submodule_search_locations[0], "lib").glob("*.so*")
    return int(_TIMES_ITS_LIBRARIES * sum(file.stat().st_size for file in libraries))
