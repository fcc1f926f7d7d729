"""Checks a model folder from elsewhere before any library reads it, by the rules of the training program."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skill_train.core.errors import from_exit_code
from skill_train.facts import JsonObject
from skill_train.program import model_files
from skill_train.program.events import Refused


def require_sound(folder: Path) -> None:
    """Refuses a model folder that would make libraries read files outside of it.

    Raises:
        UsageError: a file is a device, a pipe, a link to elsewhere, too large, or invalid JSON, or its settings name
            code to load; or the index names files that are no safetensors files of this folder.
    """
    with _as_ours():
        model_files.check_model(folder)


def require_sound_files(folder: Path) -> None:
    """Does the same as `require_sound` for a folder without an index of weights, which is an adapter.

    Raises: as `require_sound`.
    """
    with _as_ours():
        model_files.check_files(folder)


def foreign_json(file: Path) -> Any:
    """A JSON document from elsewhere.

    Raises:
        UsageError: it is not a regular file, too large, not UTF-8, not JSON, or nested too deep.
    """
    with _as_ours():
        return model_files.foreign_json(file)


def object_in(path: Path) -> JsonObject:
    """A JSON object from a file that is checked elsewhere; empty if there is none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def safetensors_header(file: Path) -> model_files.Header:
    """The header of a safetensors file: dtype, shape and byte range by tensor, and its `__metadata__`.

    Raises:
        UsageError: it is not a regular file, or has another format.
    """
    with _as_ours():
        return model_files.safetensors_header(file)


def weight_files(folder: Path) -> list[Path]:
    """The files from which transformers loads the weights: the single file, or those in the index. They may be missing.

    Raises:
        UsageError: the index names a file outside of this folder, or does not name a single file that exists.
    """
    with _as_ours():
        return model_files.weight_files(folder)


def block_hub_kernels() -> None:
    """Keeps transformers from downloading compiled code from the Hub. Call before importing it."""
    model_files.block_hub_kernels()


@contextlib.contextmanager
def _as_ours() -> Iterator[None]:
    try:
        yield
    except Refused as refusal:
        raise from_exit_code(refusal.exit_code, refusal.error) from None
