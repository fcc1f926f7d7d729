"""The files of a step: where they go, how they are called, and what its record names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from skill_train.core.console import Console
from skill_train.run.folder import set_aside


def outputs_of(record: dict[str, Any], root: Path) -> list[dict[str, Any]]:
    return [{"path": str(root / name), **digest} for name, digest in record.get("outputs", {}).items()]


def put_aside(console: Console, result: Path, record: Path) -> None:
    """A result of ours without its record is made again; it stays beside, under another name."""
    aside = set_aside(result, record)
    if aside is not None:
        console.warn("set_aside", f"{result} has no {record.name}; it was renamed to {aside.name}, and is made again")


def beside(folder: Path, ending: str) -> Path:
    """The folder's own name and an ending, beside it. `.` and `..` lead to a folder that has a name."""
    place = folder.parent if folder.name not in ("", "..") else folder.resolve().parent
    return place / f"{folder.resolve().name}{ending}"


def slug(path: Path) -> str:
    """A file name from a folder's name."""
    return re.sub(r"[^\w.-]+", "-", path.resolve().name).strip("-.") or "model"
