"""`convert.json`, `quantize.json`, `mmproj.json` and `lora_gguf.json`: the GGUF files that a step made."""

from __future__ import annotations

from pathlib import Path
from typing import Required, TypedDict

import msgspec

from skill_train.core.digests import FileDigest, file_digest
from skill_train.run import records
from skill_train.run.records import FileName, Number, StepSchema, Whole


class Fallback(TypedDict):
    """A tensor that is stored in a larger type than the wanted one."""

    tensor: str
    wanted: str
    got: str
    why: str


class ExportedFile(FileDigest, total=False):
    """One GGUF file.

    Attributes:
        quant: its type, in llama.cpp's short name.
        types: how many tensors it stores in each type. This and the next fields are for quantized files only.
        fallbacks: tensors that are stored in a larger type.
        bits_per_weight: of its matrices.
    """

    quant: Required[str]
    types: dict[str, Whole]
    fallbacks: list[Fallback]
    bits_per_weight: Number
    seconds: Number


class ExportReason(msgspec.Struct, frozen=True):
    """Why a value is what it is, and where the rule comes from."""

    rule: str
    because: str
    source: str


ExportFigures = dict[str, Number | dict[str, Whole] | None]


class ExportRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one of the four steps. Quantizing has no figures and no reasons.

    Attributes:
        options: `name` and `outtype`; empty for quantizing.
    """

    schema: StepSchema = "skill-train/step/1"
    step: str = ""
    inputs: dict[str, FileDigest] = {}
    options: dict[str, str] = {}
    outputs: dict[FileName, ExportedFile]
    figures: ExportFigures | msgspec.UnsetType = msgspec.UNSET
    reasons: list[ExportReason] | msgspec.UnsetType = msgspec.UNSET
    versions: dict[str, str | None] = {}
    seconds: Number | None = None
    peak_memory_bytes: Whole | None = None
    finished_at: str | None = None


def read(path: Path) -> ExportRecord:
    """The record in a file.

    Raises:
        UsageError: missing, no JSON, or not as its step writes it.
    """
    return records.read(path, ExportRecord)


def exported_file(file: Path, quant: str) -> ExportedFile:
    """The entry of a file that was not quantized."""
    digest = file_digest(file)
    return {"bytes": digest["bytes"], "sha256": digest["sha256"], "quant": quant}


def outputs(run: Path) -> dict[str, ExportedFile]:
    """Every file that the records in a folder name, by its name there."""
    files = [run / f"{step}.json" for step in ("convert", "quantize", "mmproj", "lora_gguf")]
    return {name: exported for file in files if file.is_file() for name, exported in read(file).outputs.items()}
