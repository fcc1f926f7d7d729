"""The files of a step: where they go, how they are called, and what its record names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skill_train.core.console import Console
from skill_train.core.digests import FileDigest
from skill_train.run.folder import set_aside


def outputs_of(outputs: Mapping[str, FileDigest], root: Path) -> list[dict[str, Any]]:
    """For an answer: what a record names, with the whole path."""
    return [{"path": str(root / name), **digest} for name, digest in outputs.items()]


def put_aside(console: Console, made: Path, record: Path) -> None:
    """A result of ours without its record is made again; it stays beside, under another name."""
    aside = set_aside(made, record)
    if aside is not None:
        console.warn("set_aside", f"{made} has no {record.name}; it is now {aside.name}, and is made again")


def beside(folder: Path, ending: str) -> Path:
    """The folder's own name and an ending, beside it. `.` and `..` lead to a folder that has a name."""
    place = folder.parent if folder.name not in ("", "..") else folder.resolve().parent
    return place / f"{folder.resolve().name}{ending}"


def slug(path: Path) -> str:
    """A file name from a folder's name."""
    return re.sub(r"[^\w.-]+", "-", path.resolve().name).strip("-.") or "model"
