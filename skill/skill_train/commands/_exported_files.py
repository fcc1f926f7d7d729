"""GGUF files in the answer of `export-gguf`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from skill_train.commands._drawing import rich_table
from skill_train.commands._outputs import OutputFile
from skill_train.run.export_record import ExportedFile


class ListedFile(OutputFile):
    """A GGUF file in the answer."""

    quant: str


def listed(outputs: Mapping[str, ExportedFile], root: Path) -> list[ListedFile]:
    """The files of a record, with whole paths."""
    return [
        {"path": str(root / name), "bytes": made["bytes"], "sha256": made["sha256"], "quant": made["quant"]}
        for name, made in outputs.items()
    ]


def files_table(files: list[ListedFile]) -> Callable[[Any], None]:
    """Draws a table of them."""

    def draw(rich: Any) -> None:
        table = rich_table("file", "type", "bytes", "sha256")
        for file in files:
            table.add_row(file["path"], file["quant"], f"{file['bytes']:,}", file["sha256"][:12])
        rich.print(table)

    return draw
