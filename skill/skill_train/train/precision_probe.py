"""How long a step in fp32 and in bf16 took on this machine. It is in the cache, so that `plan` need not time it."""

from __future__ import annotations

import contextlib
import math
from importlib import metadata
from pathlib import Path
from typing import Literal

from skill_train.core.errors import UsageError
from skill_train.core.files import write_json
from skill_train.core.program_events import Probed
from skill_train.facts import MachineFacts, ModelFacts, PrecisionProbe
from skill_train.machine.read import cache_file
from skill_train.run.records import read_json

_TIMED: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")


def known_probe(device: str, machine: MachineFacts, model: ModelFacts) -> PrecisionProbe | None:
    """The result of an earlier probe; None if there is none."""
    try:
        return _as_probe(read_json(_probe_file(device, machine, model)))
    except (OSError, UsageError, ValueError, TypeError, KeyError, ArithmeticError, metadata.PackageNotFoundError):
        return None  # a cache may be lost or torn, and without torch nothing was probed


def remember(device: str, machine: MachineFacts, model: ModelFacts, figures: Probed) -> PrecisionProbe:
    """Keeps what the probe measured."""
    with contextlib.suppress(OSError):  # a cache that cannot be written costs another probe next time
        write_json(_probe_file(device, machine, model), figures)
    return _as_probe(figures)


def _as_probe(figures: Probed) -> PrecisionProbe:
    return PrecisionProbe(
        seconds={name: float(figures[name]["seconds"]) for name in _TIMED},
        loss={name: math.nan if (loss := figures[name]["loss"]) is None else float(loss) for name in _TIMED},
    )


def _probe_file(device: str, machine: MachineFacts, model: ModelFacts) -> Path:
    where = [machine.system, machine.chip, machine.cores, device]
    return cache_file("probes", where, model.fingerprint or [model.source, model.revision], metadata.version("torch"))
