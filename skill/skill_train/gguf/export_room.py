"""Computes the disk space of an export before it starts: merged model, one unquantized file, quantized files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from skill_train.core.units import size
from skill_train.estimate.artifacts import BITS, file_bytes
from skill_train.facts import ModelFacts
from skill_train.run.folder import require_space

if TYPE_CHECKING:
    from skill_train.gguf.mix import MixTarget
    from skill_train.gguf.mix_file import MixFile

_BESIDE_WEIGHTS = 12_000_000  # bytes of a tokenizer, at most


def room(model: ModelFacts, types: list[str], mix: MixTarget | MixFile | None = None) -> dict[str, int | None]:
    """The upper estimate of each result's bytes, by its name; None if its size is unknown.

    Args:
        types: the requested types; f16 is added in front if none of them is unquantized.
        mix: the requested mix of types, if any.
    """
    plain = [kind for kind in types if BITS.get(kind, 0.0) >= BITS["f16"]]
    kinds = types if plain else ["f16", *types]
    sizes = {kind: file_bytes(model, kind) for kind in kinds}
    merged = {"merged": model.weight_bytes or (2 * model.parameters if model.parameters else None)}
    files = {kind: None if size is None else round(size.high) for kind, size in sizes.items()}
    return merged | files | ({mix.name: _most_of(mix, model)} if mix is not None else {})


def _most_of(mix: MixTarget | MixFile, model: ModelFacts) -> int | None:
    """The most bytes of a mix; None if it was given no size, or the number of the model's weights is unknown."""
    if mix.most_bytes is not None or mix.bits is None or not model.parameters:
        return mix.most_bytes
    return round(mix.bits * model.parameters / 8) + _BESIDE_WEIGHTS


def require_room(sizes: dict[str, int | None], folder: Path) -> str:
    """Checks the disk space. Returns a sentence with the needed and the free space.

    Args:
        folder: the folder for the results, which must exist.

    Raises:
        DecisionNeeded: there is not enough disk space.
    """
    counted = {name: count for name, count in sizes.items() if count is not None}
    parts = ", ".join(f"{name} {size(count)}" for name, count in counted.items())
    unknown = [name for name, count in sizes.items() if count is None]
    require_space(folder, sum(counted.values()), f"the export ({parts})")
    need = f"needs up to {size(sum(counted.values()))} of disk ({parts})"
    beside = f", and what {', '.join(unknown)} take" if unknown else ""
    return f"{need}{beside}; {size(shutil.disk_usage(folder).free)} are free"
