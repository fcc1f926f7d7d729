"""`convert.json`, `quantize.json`, `mmproj.json` and `lora_gguf.json`: the GGUF files that a step made."""

import re
from pathlib import Path
from typing import TypedDict

import msgspec

from skill_train.core.digests import FileDigest, file_digest
from skill_train.core.errors import quoted
from skill_train.run import records
from skill_train.run.records import FileName, Number, StepSchema, Whole

MIX_KEY = "skill_train.mix"  # the key in the metadata of a GGUF file that names its mix of types


class Fallback(TypedDict):
    """A tensor that is stored in a larger type than the wanted one."""

    tensor: str
    wanted: str
    got: str
    why: str


class MatrixUse(TypedDict):
    """The importance matrix that a file was made with."""

    file: str  # the name of the matrix's file
    sha256: str
    model: str  # sha256 of the GGUF file that it was computed with; empty if the matrix does not state it
    data: str  # the text that it was computed from, as the matrix states it


class Measured(TypedDict):
    """The distance of a file from the unquantized file, on rows that its importance matrix was not computed from."""

    mean_kl: Number  # in nats per token
    same_top1: Number  # share of the tokens for which both files predict the same next token
    tokens: Whole


class MatrixChoice(TypedDict):
    """The figures of the file with the importance matrix and of the file without. The nearer file was kept."""

    with_matrix: Measured
    without_matrix: Measured


class MixFigures(TypedDict):
    """How the types of a mix were chosen."""

    target: str  # the wanted size, as in the name of the file
    estimated_kl: Number  # the sum of the measured KL of each matrix alone; the KL of the whole file is in `measured`
    measured_pairs: Whole  # how many of the `pairs` were measured; the others were estimated
    pairs: Whole  # pairs of a matrix and a type


class MixSource(TypedDict):
    """The file that the types of a replayed mix were read from."""

    file: str  # its name
    sha256: str
    mix: str  # the name of the mix in that file; empty if the file is only a list of types


class QuantizedFile(TypedDict, total=False):
    types: dict[str, Whole]  # how many tensors the file stores in each type
    fallbacks: list[Fallback]  # tensors that are stored in a larger type
    bits_per_weight: Number  # of the file's matrices
    seconds: Number
    imatrix: MatrixUse  # the importance matrix that the file was made with; absent without one
    choice: MatrixChoice  # the measurements that decided whether the file uses the importance matrix
    # measured, tensor_types, mix, replayed: only for a mix of types
    measured: Measured
    tensor_types: dict[str, str]  # the type of each matrix
    mix: MixFigures  # how the types were chosen
    replayed: MixSource  # the file that the types were read from, if they were not chosen


class ExportedFile(FileDigest, QuantizedFile):
    quant: str  # llama.cpp's short name of its type, or the name of a mix


class ExportReason(msgspec.Struct, frozen=True):
    """The reason for a value, and the source of the rule."""

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
    options: dict[str, str] = {}  # `data`: the sha256 of the token ids; `dataset`: their source
    outputs: dict[FileName, FileDigest]
    # tokens, rows: the size of the text
    tokens: Whole
    rows: Whole
    entries: Whole
    unused_experts: Whole = 0  # experts that no token was sent to: all their columns have the same weight
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
    """The files that the records of these steps, or of all four, name, by their names relative to `run`."""
    files = [run / f"{step}.json" for step in steps or ("convert", "quantize", "mmproj", "lora_gguf")]
    return {name: exported for file in files if file.is_file() for name, exported in read(file).outputs.items()}


def size_option(mix: str) -> str:
    """The option that a mix is named after; empty for a mix that was read from a file."""
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
