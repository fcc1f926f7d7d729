"""The step that computes a run's importance matrix, and the checks of a matrix for an export."""

import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from skill_train.core.console import Bar, Warn
from skill_train.core.digests import FileDigest, digests, file_digest, is_file_of
from skill_train.core.errors import UsageError, quoted
from skill_train.core.files import require_writable, whole_file
from skill_train.core.memory import peak_memory_bytes
from skill_train.core.worker import run_worker
from skill_train.gguf.quality.texts import FEWEST, SAMPLES, TRAINING, RunTexts
from skill_train.llama.gguf_header import read_gguf
from skill_train.llama.importance.collect_worker import CONTEXT, WORKER, Collected, CollectJob
from skill_train.llama.importance.file import read_matrix, require_fit
from skill_train.machine.limits import require_memory
from skill_train.machine.read import physical_cores
from skill_train.run import records
from skill_train.run.export_record import ExportedFile, ExportReason, MatrixRecord, MatrixUse
from skill_train.run.folder import StepResult, note_of, noted, set_aside, versions

FILE = "imatrix.gguf"
# Types below q6 that llama.cpp rounds with the matrix (ggml-quants.c). Ternary types and mxfp4 do not use it.
_WEIGHED = re.compile(r"q[2345]_k(_[sml])?|q[45]_[01]|iq\d_\w+")
_WORK_BYTES = 700_000_000  # the memory that `verify` also expects for one file in llama.cpp


@dataclass(frozen=True)
class Matrix:
    file: Path
    use: MatrixUse
    # token ids of other texts, on which files with and without the matrix are compared; empty for no comparison
    texts: list[list[int]] = field(default_factory=list)
    is_explicit: bool = False  # every type that takes a matrix uses this one, not only where it helps or is needed
    missing: list[str] = field(default_factory=list)  # matrices of the model without an entry


@dataclass(frozen=True)
class MatrixRequest:
    """An unquantized GGUF file, the texts to run it on, and the paths for the matrix and its record."""

    source: Path
    texts: RunTexts
    file: Path
    record: Path


def takes_matrix(quant: str) -> bool:
    """Whether a type is below q6 and llama.cpp rounds it with an importance matrix."""
    return _WEIGHED.fullmatch(quant) is not None


def compute_matrix(request: MatrixRequest, *, progress: Bar) -> StepResult[MatrixRecord]:
    """Computes the importance matrix of `source`. A matrix that is recorded for this file and these texts is reused.

    Raises:
        UsageError: there is too little text.
        NativeCrash, VerificationFailed: llama.cpp crashed, or refuses the file.
    """
    started = time.monotonic()
    if request.texts.tokens < FEWEST:
        raise UsageError(
            f"an importance matrix of {request.texts.tokens} tokens says nothing",
            code="cannot_quantize",
            expected=f"{FEWEST} tokens or more of training rows",
            got=why_of(request.texts),
            hint="skill-train export-gguf RUN --imatrix none, or --imatrix FILE of llama-imatrix",
        )
    inputs = digests(request.source.parent, [request.source])
    options = {"data": request.texts.sha256, "dataset": request.texts.source}
    if done := _made_before(request, inputs, options):
        return StepResult(done, reused=True)
    require_writable(request.file.parent)
    require_memory(_WORK_BYTES, "computing the importance matrix")
    with whole_file(request.file) as part:
        sha256, texts = next(iter(inputs.values()))["sha256"], request.texts
        # Names the data for readers who have only the file.
        dataset = f"{texts.source} sha256 {texts.sha256[:12]}, {texts.tokens} tokens of {texts.rows} rows"
        job = CollectJob(
            gguf=str(request.source),
            sequences=[ids[:CONTEXT] for ids in texts.computed],
            threads=physical_cores(),
            out=str(part),
            datasets=[dataset],
            model=sha256,
            data=texts.sha256,
        )
        collected = run_worker(WORKER, job, Collected, progress=progress)
        record = MatrixRecord(
            inputs=inputs,
            options=options,
            outputs={str(request.file.relative_to(request.record.parent)): file_digest(part)},
            tokens=collected.tokens,
            rows=request.texts.rows,
            entries=collected.entries,
            unused_experts=collected.unused_experts,
            unseen=collected.unseen,
            reasons=_reasons(request.texts),
            versions=versions("llama-cpp-python", "gguf"),
            seconds=round(time.monotonic() - started, 3),
            peak_memory_bytes=peak_memory_bytes(children=True),
            finished_at=records.timestamp(),
        )
        records.write(note_of(request.file, request.record), record)
        request.record.unlink(missing_ok=True)  # an earlier one, which would describe the new file wrongly
    os.replace(note_of(request.file, request.record), request.record)
    return StepResult(record)


def why_of(texts: RunTexts) -> str:
    """The number of tokens, why there are no more, and why other rows are not used."""
    return f"{texts.why}; other rows are not used: {texts.lacking}" if texts.lacking else texts.why


def _reasons(texts: RunTexts) -> list[ExportReason]:
    tokens = ExportReason("tokens", texts.why, texts.source)
    return [tokens, ExportReason("data", texts.lacking, texts.source)] if texts.lacking else [tokens]


def _made_before(request: MatrixRequest, inputs: dict[str, FileDigest], options: dict[str, str]) -> MatrixRecord | None:
    """The record of the requested matrix; None if it must be computed. A matrix from training rows is also reused if
    only the samples can be read now. Another recorded matrix is replaced. A matrix without a record is set aside."""
    if not request.record.is_file() and noted(
        request.file, request.record, MatrixRecord, inputs=inputs, options=options
    ):
        os.replace(note_of(request.file, request.record), request.record)
    if not request.record.is_file():
        set_aside(request.file, request.record)
        return None
    record = records.read(request.record, MatrixRecord)
    [digest] = record.outputs.values()
    fits = record.options == options or (record.options.get("dataset"), request.texts.source) == (TRAINING, SAMPLES)
    return record if fits and record.inputs == inputs and is_file_of(request.file, digest) else None


def matrix_of(file: Path, source: Path, warn: Warn, texts: list[list[int]] | None = None) -> Matrix:
    """Reads an importance matrix from a file, and checks that it fits the model.

    Args:
        texts: token ids, on which files with and without the matrix are compared. None makes the matrix explicit.

    Raises:
        UsageError: the matrix is damaged, or of a model with other tensors.
    """
    matrix = read_matrix(file)
    model = read_gguf(source)
    missing = require_fit(file, matrix, model)
    if missing:
        warn("imatrix", f"{file.name} says nothing about {len(missing)} matrices, such as {missing[0]}")
    sha256 = file_digest(source)["sha256"]
    if not matrix.model:
        warn(
            "imatrix", f"{file.name} does not say which model it was computed with; names and widths fit {source.name}"
        )
    elif matrix.model != sha256:
        warn("imatrix", f"{file.name} was computed with another file than {source.name}, of the same names and widths")
    data = ", ".join(matrix.datasets) or "not stated"
    use = MatrixUse(file=file.name, sha256=file_digest(file)["sha256"], model=matrix.model, data=data)
    compared = texts if texts and sum(map(len, texts)) >= FEWEST else []
    return Matrix(file, use, compared, is_explicit=texts is None, missing=missing)


def require_same_matrix(file: Path, entry: ExportedFile, matrix: Matrix | None, *, without: bool) -> None:
    """Refuses to reuse a file that was made with another importance matrix than the user named.

    Args:
        without: the user requested files without a matrix.
    """
    made_with = entry.get("imatrix")
    other = without and made_with is not None
    requested = "without one"
    if matrix is not None and matrix.is_explicit and (takes_matrix(entry["quant"]) or "tensor_types" in entry):
        other = made_with is None or made_with["sha256"] != matrix.use["sha256"]
        requested = f"with {matrix.use['file']}"
    if other:
        raise UsageError(
            f"{file} was made {_made_with(made_with)}, but this export asks for it {requested}",
            code="output_exists",
            expected="the same importance matrix, or a new place for the file",
            got=_made_with(made_with),
            hint=f"move {quoted(file)} away, and run the same command again",
        )


def _made_with(use: MatrixUse | None) -> str:
    return (
        "without an importance matrix" if use is None else f"with the importance matrix {use['file']} of {use['data']}"
    )
