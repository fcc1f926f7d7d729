"""`convert.json`, `quantize.json`, `mmproj.json` and `lora_gguf.json`: the GGUF files that a step made."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypedDict

import msgspec

from skill_train.core.digests import FileDigest, file_digest
from skill_train.core.errors import quoted
from skill_train.run import records
from skill_train.run.records import FileName, Number, StepSchema, Whole

MIX_KEY = "skill_train.mix"  # in the metadata of a mix of types: which one it is


class Fallback(TypedDict):
    """A tensor that is stored in a larger type than the wanted one."""

    tensor: str
    wanted: str
    got: str
    why: str


class MatrixUse(TypedDict):
    """The importance matrix that a file was made with."""

    file: str  # its name, with its sha256
    sha256: str
    model: str  # sha256 of the GGUF file that it was computed with; empty where the matrix does not say it
    data: str  # what it was computed of, in its own words


class Measured(TypedDict):
    """How far a file is from the unquantized one, on rows that its importance matrix was not computed of."""

    mean_kl: Number  # in nats a token
    same_top1: Number  # share of the tokens whose most likely next token is the same
    tokens: Whole


class MatrixChoice(TypedDict):
    """The file with the importance matrix and the one without. The nearer one was kept."""

    with_matrix: Measured
    without_matrix: Measured


class MixFigures(TypedDict):
    """How the types of a mix were chosen."""

    target: str  # what it was to weigh, as in the name of the file
    estimated_kl: Number  # the sum of what was measured of each matrix alone; that of the file is `measured`
    measured_pairs: Whole  # of `pairs` of a matrix and a type; the others were estimated
    pairs: Whole


class MixSource(TypedDict):
    """The file that the types of a replayed mix were read from."""

    file: str  # its name, with its sha256
    sha256: str
    mix: str  # the name of the mix there; empty where the file is a list of types alone


class QuantizedFile(TypedDict, total=False):
    """What is recorded of a quantized file."""

    types: dict[str, Whole]  # how many tensors it stores in each type
    fallbacks: list[Fallback]  # tensors that are stored in a larger type
    bits_per_weight: Number  # of its matrices
    seconds: Number
    imatrix: MatrixUse  # the importance matrix that it was made with; absent without one
    choice: MatrixChoice  # what was measured to choose between a file with and one without
    measured: Measured  # of a mix of types
    tensor_types: dict[str, str]  # of a mix, the type of each matrix
    mix: MixFigures  # how they were chosen
    replayed: MixSource  # where they were read from, in place of a choice


class ExportedFile(FileDigest, QuantizedFile):
    """One GGUF file."""

    quant: str  # its type, in llama.cpp's short name, or the name of a mix


class ExportReason(msgspec.Struct, frozen=True):
    """Why a value is what it is, and where the rule comes from."""

    rule: str
    because: str
    source: str


ExportFigures = dict[str, Number | dict[str, Whole] | None]


class ExportRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one of the four steps. Quantizing has no figures and no reasons."""

    schema: StepSchema = "skill-train/step/1"
    step: str = ""
    inputs: dict[str, FileDigest] = {}
    options: dict[str, str] = {}  # `name` and `outtype`; empty for quantizing
    outputs: dict[FileName, ExportedFile]
    figures: ExportFigures | msgspec.UnsetType = msgspec.UNSET
    reasons: list[ExportReason] | msgspec.UnsetType = msgspec.UNSET
    versions: dict[str, str | None] = {}
    seconds: Number | None = None
    peak_memory_bytes: Whole | None = None
    finished_at: str | None = None


class MatrixRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`imatrix.json`: the importance matrix of a run."""

    schema: StepSchema = "skill-train/step/1"
    step: str = "imatrix"
    inputs: dict[str, FileDigest] = {}  # the GGUF file that was run
    options: dict[str, str] = {}  # `data`, the sha256 of the token ids, and `dataset`, where they are from
    outputs: dict[FileName, FileDigest]
    # tokens, rows: of the text
    tokens: Whole
    rows: Whole
    entries: Whole
    unused_experts: Whole = 0  # experts that no token was sent to: for them every column counts alike
    unseen: list[str] = []  # matrices without an entry
    reasons: list[ExportReason] = []
    versions: dict[str, str | None] = {}
    seconds: Number | None = None
    peak_memory_bytes: Whole | None = None
    finished_at: str | None = None


def read(path: Path) -> ExportRecord:
    """The record in a file. Raises as `records.read`."""
    return records.read(path, ExportRecord)


def exported_file(file: Path, quant: str) -> ExportedFile:
    """The entry of a file that was not quantized."""
    digest = file_digest(file)
    return {"bytes": digest["bytes"], "sha256": digest["sha256"], "quant": quant}


def outputs(run: Path, *steps: str) -> dict[str, ExportedFile]:
    """Every file that the records of these steps, or of all of them, name in a folder, by its name there."""
    files = [run / f"{step}.json" for step in steps or ("convert", "quantize", "mmproj", "lora_gguf")]
    return {name: exported for file in files if file.is_file() for name, exported in read(file).outputs.items()}


def size_option(mix: str) -> str:
    """The option after which a mix was named; empty for one that was read from a file."""
    match = re.fullmatch(r"auto-([0-9.]{1,12})(bpw|mb)", mix)
    return "" if match is None else f" --bits {match[1]}" if match[2] == "bpw" else f" --max-size {match[1]}MB"


def quant_option(quant: str) -> str:
    """The option of `export-gguf` that makes a file of this type again; empty for a mix that was read from a file."""
    size = size_option(quant)
    return f" --quant auto{size}" if size else "" if quant.startswith("mix-") else f" --quant {quoted(quant)}"


def converted_from(file: Path) -> dict[str, FileDigest]:
    """The files of the model that a GGUF file was converted from, as the records beside it say; empty if unknown."""
    convert, quantize = (file.with_name(f"{step}.json") for step in ("convert", "quantize"))
    if not convert.is_file():
        return {}
    record = read(convert)
    quantized = read(quantize) if quantize.is_file() else None
    sources = {source["sha256"] for source in quantized.inputs.values()} if quantized else set()
    of_these = quantized is not None and file.name in quantized.outputs
    is_recorded = file.name in record.outputs or (
        of_these and sources <= {each["sha256"] for each in record.outputs.values()}
    )
    return record.inputs if is_recorded else {}
