"""Computes the disk space of an export before it starts: the merged model, one unquantized file, the quantized
files."""

from __future__ import annotations

import shutil
from pathlib import Path

from skill_train.core.units import gigabytes
from skill_train.estimate.artifacts import BITS, file_bytes
from skill_train.facts import ModelFacts
from skill_train.run.folder import require_space


def room(model: ModelFacts, types: list[str]) -> dict[str, int | None]:
    """The bytes of each result by its name, each at its upper estimate; None for a type of unknown size.

    Args:
        types: the requested types; f16 is added in front if none of them is unquantized.
    """
    plain = [kind for kind in types if BITS.get(kind, 0.0) >= BITS["f16"]]
    wanted = types if plain else ["f16", *types]
    sizes = {kind: file_bytes(model, kind) for kind in wanted}
    merged = {"merged": model.weight_bytes or (2 * model.parameters if model.parameters else None)}
    return merged | {kind: None if size is None else round(size.high) for kind, size in sizes.items()}


def require_room(sizes: dict[str, int | None], folder: Path) -> str:
    """One sentence on the needed and the free disk space.

    Args:
        folder: the folder for the results, which exists.

    Raises:
        DecisionNeeded: there is not enough disk space.
    """
    known_sizes = {name: size for name, size in sizes.items() if size is not None}
    parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in known_sizes.items())
    unknown = [name for name, size in sizes.items() if size is None]
    require_space(folder, sum(known_sizes.values()), f"the export ({parts} GB)")
    need = f"needs up to {gigabytes(sum(known_sizes.values()), 2)} of disk ({parts})"
    beside = f", and what {', '.join(unknown)} take" if unknown else ""
    return f"{need}{beside}; {gigabytes(shutil.disk_usage(folder).free, 2)} are free"
