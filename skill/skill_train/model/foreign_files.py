"""Checks a model folder from elsewhere before any library reads it, by the rules of the training program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skill_train.core.errors import UsageError, refusals
from skill_train.facts import JsonObject
from skill_train.program import model_files
from skill_train.program.model_files import block_hub_kernels as block_hub_kernels


def require_sound(folder: Path) -> None:
    """Refuses a model folder that would make libraries read files outside of it, or compute without end.

    Raises:
        UsageError: as `check_model` of the training program.
    """
    with refusals():
        model_files.check_model(folder)


def require_sound_files(folder: Path) -> None:
    """As `require_sound`, for a folder without an index of weights, which is an adapter."""
    with refusals():
        model_files.check_files(folder)


def foreign_json(file: Path) -> Any:
    """A JSON document from elsewhere. Raises UsageError as that of the training program."""
    with refusals():
        return model_files.foreign_json(file)


def object_in(path: Path) -> JsonObject:
    """The JSON object in a file; empty if the file is missing or broken, which is reported elsewhere."""
    try:
        document = foreign_json(path)
    except (OSError, UsageError):
        return {}
    return document if isinstance(document, dict) else {}


def safetensors_header(file: Path) -> model_files.Header:
    """The header of a safetensors file. Raises UsageError as that of the training program."""
    with refusals():
        return model_files.safetensors_header(file)


def weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor that an index names. Raises UsageError as that of the training program."""
    with refusals():
        return model_files.weight_map(index)


def weight_files(folder: Path) -> list[Path]:
    """The files from which transformers loads the weights, which may be missing. Raises UsageError as that of the
    training program."""
    with refusals():
        return model_files.weight_files(folder)
