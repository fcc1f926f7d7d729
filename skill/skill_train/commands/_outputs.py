"""The output files of a step: their places and names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from skill_train.core.console import Console
from skill_train.core.digests import FileDigest
from skill_train.run.folder import set_aside


class OutputFile(FileDigest):
    """A file in an answer, with the whole path."""

    path: str


def outputs_of(outputs: Mapping[str, FileDigest], root: Path) -> list[OutputFile]:
    """For an answer: what a record names."""
    return [
        {"path": str(root / name), "bytes": digest["bytes"], "sha256": digest["sha256"]}
        for name, digest in outputs.items()
    ]


def put_aside(console: Console, result: Path, record: Path) -> None:
    """Renames a result without a record, which a killed step left, so that it can be made again."""
    aside = set_aside(result, record)
    if aside is not None:
        console.warn("set_aside", f"{result} has no {record.name}; it was renamed to {aside.name}, and is made again")


def beside(folder: Path, ending: str) -> Path:
    """A path beside the folder: its name plus an ending. Works for `.` and `..` too."""
    place = folder.parent if folder.name not in ("", "..") else folder.resolve().parent
    return place / f"{folder.resolve().name}{ending}"


def slug(path: Path) -> str:
    """A file name made from a folder's name."""
    return re.sub(r"[^\w.-]+", "-", path.resolve().name).strip("-.") or "model"
