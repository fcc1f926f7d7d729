"""What an export will need on disk, before it starts: the merged model, one unquantized file, the quantized ones."""

from __future__ import annotations

import shutil
from pathlib import Path

from skill_train.core.units import gigabytes
from skill_train.estimate.artifacts import BITS, file_bytes
from skill_train.facts import ModelFacts
from skill_train.run.folder import require_space


def room(model: ModelFacts, types: list[str]) -> dict[str, int | None]:
    """Bytes by what is written, each at its upper estimate; None for a type of unknown size.

    Args:
        types: as asked for; f16 comes first when no unquantized type is among them.
    """
    plain = [kind for kind in types if BITS.get(kind, 0.0) >= BITS["f16"]]
    wanted = types if plain else ["f16", *types]
    sizes = {kind: file_bytes(model, kind) for kind in wanted}
    merged = {"merged": model.weight_bytes or (2 * model.parameters if model.parameters else None)}
    return merged | {kind: None if size is None else round(size.high) for kind, size in sizes.items()}


def require_room(sizes: dict[str, int | None], folder: Path) -> str:
    """One sentence on the need and what is free.

    Args:
        folder: where it will be written; it exists.

    Raises:
        DecisionNeeded: not enough disk.
    """
    known = {name: size for name, size in sizes.items() if size is not None}
    parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in known.items())
    unknown = [name for name, size in sizes.items() if size is None]
    require_space(folder, sum(known.values()), f"the export ({parts} GB)")
    need = f"needs up to {gigabytes(sum(known.values()), 2)} of disk ({parts})"
    beside = f", and what {', '.join(unknown)} take" if unknown else ""
    return f"{need}{beside}; {gigabytes(shutil.disk_usage(folder).free, 2)} are free"
