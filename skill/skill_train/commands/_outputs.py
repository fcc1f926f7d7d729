"""The output files of a step: their places and names, and GGUF files in an answer."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skill_train.commands._drawing import rich_table
from skill_train.core.console import Console
from skill_train.core.digests import FileDigest
from skill_train.core.errors import quoted
from skill_train.core.files import write_text
from skill_train.run import export_record, merge_record
from skill_train.run.export_record import ExportedFile
from skill_train.run.folder import RunDir, renamed_aside, require_only, require_unchanged, set_aside


class ListedFile(FileDigest):
    """A GGUF file in an answer."""

    path: str
    quant: str


def listed(outputs: Mapping[str, ExportedFile], root: Path) -> list[ListedFile]:
    return [
        {"path": str(root / name), "bytes": file["bytes"], "sha256": file["sha256"], "quant": file["quant"]}
        for name, file in outputs.items()
    ]


def draw_files(rich: Any, files: list[ListedFile]) -> None:
    table = rich_table("file", "type", "bytes", "sha256")
    for file in files:
        table.add_row(file["path"], file["quant"], f"{file['bytes']:,}", file["sha256"][:12])
    rich.print(table)


def put_aside(console: Console, result: Path, record: Path) -> None:
    """Renames a result without a record, which a killed step left, so that it can be made again."""
    aside = set_aside(result, record)
    if aside is not None:
        console.warn("set_aside", f"{result} has no {record.name}; it was renamed to {aside.name}, and is made again")


def write_modelfile(console: Console, path: Path, text: str) -> None:
    """Writes a Modelfile. If the old one differs in more than file names, the user may have edited it, and it is
    renamed."""
    there = path.read_bytes() if path.is_file() else text.encode()
    if len({re.sub(rb"(?m)^(FROM|ADAPTER) \./[^/\n]+$", rb"\1", each) for each in (there, text.encode())}) > 1:
        aside = renamed_aside(path)
        console.warn("set_aside", f"{path} was edited, or is of another training; it was renamed to {aside.name}")
    if not path.is_file() or there != text.encode():
        write_text(path, text)


def recorded_name(run: RunDir, record: Path) -> str:
    """The beginning of the names of exported files: the name of the run's folder at the first export."""
    earlier = export_record.read(record).options.get("name") if record.is_file() else None
    return earlier or slug(run.path)


def beside(folder: Path, ending: str) -> Path:
    """A path beside the folder: its name plus an ending. Works for `.` and `..` too."""
    place = folder.parent if folder.name not in ("", "..") else folder.resolve().parent
    return place / f"{folder.resolve().name}{ending}"


def merge_record_of(out: Path) -> Path:
    return RunDir(out.parent).record("merge") if out.name == "merged" else beside(out, ".merge.json")


def require_as_merged(folder: Path) -> None:
    """Refuses a merged model folder that has changed since its merge.

    Raises:
        UsageError: a file was replaced, edited, removed or added.
    """
    record = merge_record_of(folder)
    outputs = merge_record.read(record).outputs if record.is_file() else {}
    hint = f"merge again into another --out; or, if the change is meant, move {quoted(record)} away"
    for name, digest in outputs.items():
        require_unchanged(folder / Path(name).name, digest, record, hint)
    if outputs:
        require_only(folder, (folder / Path(name).name for name in outputs), record)


def slug(path: Path) -> str:
    """A file name made from a folder's name."""
    return re.sub(r"[^\w.-]+", "-", path.resolve().name).strip("-.") or "model"
