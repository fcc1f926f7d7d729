"""The step that makes smaller files from an unquantized GGUF file, through llama-cpp-python's bindings.

First a dry run of llama.cpp reports for every type the exact size, the tensors that do not fit the type, and whether
llama.cpp would refuse. Then each file is made in its own child process, and is recorded as soon as it is complete.
"""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skill_train.core.console import Bar, Warn
from skill_train.core.digests import FileDigest, digests, file_digest
from skill_train.core.errors import UsageError, quoted
from skill_train.core.files import require_writable, scratch_file, whole_file
from skill_train.core.memory import peak_memory_bytes
from skill_train.core.worker import ending, run_worker
from skill_train.gguf.convert import refuse_existing
from skill_train.gguf.importance import Matrix, require_same_matrix, takes_matrix
from skill_train.gguf.mix import WORKER, Mix, dry_run, entry_of, identity
from skill_train.gguf.quality.distance import Judge, distance, judging
from skill_train.gguf.quant_types import fallbacks_of, quantization_types, type_names
from skill_train.gguf.quantize_worker import DryRun, QuantizeJob
from skill_train.llama.gguf_header import read_gguf
from skill_train.machine.limits import require_memory
from skill_train.machine.read import available_memory_bytes
from skill_train.run import export_record, records
from skill_train.run.export_record import MIX_KEY, ExportedFile, ExportRecord, MatrixChoice, QuantizedFile
from skill_train.run.folder import (
    RunDir,
    StepResult,
    note_of,
    noted,
    or_another_out,
    require_space,
    require_unchanged,
    versions,
)

_AT_ONCE = 2
_WORKER_BYTES = 400_000_000  # 0.12 GB measured; the source is mapped, not loaded


@dataclass(frozen=True)
class QuantizeRequest:
    """An unquantized GGUF file, and the types to make of it."""

    source: Path  # an unquantized GGUF file
    out: Path
    record: Path
    name: str
    quants: list[str]  # names of types, such as `q4_k_m`; upper case and `-` are understood
    matrix: Matrix | None = None  # an importance matrix for the types that take one
    without_matrix: bool = False  # refuse to reuse a file that was made with an importance matrix
    mixes: dict[str, Mix] = field(default_factory=dict)  # mixes to make too, by the name for the file's name


def quantize(request: QuantizeRequest, *, progress: Bar, warn: Warn) -> StepResult[ExportRecord]:
    """Writes `out/<name>-<type>.gguf` for each type. Files that are already recorded are reused. No file is written for
    a type that the source already has.

    Raises:
        UsageError: a type is unknown or needs an importance matrix, or the record belongs to another source.
        DecisionNeeded: there is not enough disk or memory.
    """
    started = time.monotonic()
    types = _types(request)
    inputs = digests(request.source.parent, [request.source])
    outputs = _earlier_outputs(request.record, inputs)
    files = {quant: request.out / f"{request.name}-{quant}.gguf" for quant in types}
    names = {quant: str(file.relative_to(request.record.parent)) for quant, file in files.items()}
    for file in files.values():
        if note := noted(file, request.record, ExportRecord, inputs=inputs, options={}):
            outputs = note.outputs | outputs
    reused = [quant for quant in types if names[quant] in outputs]
    for quant in reused:
        _check_recorded(files[quant], outputs[names[quant]], request)
    if len(reused) < len(types):
        require_writable(request.out)
    plans = _plans(request, {quant: types[quant] for quant in types if quant not in reused}, progress)
    to_make = [quant for quant, plan in plans.items() if plan["changed"]]
    for quant in to_make:
        refuse_existing(files[quant], request.record)
    _check_room(request.source, request.out, {quant: plans[quant] for quant in to_make})
    compared = [quant for quant in to_make if not plans[quant]["needs_imatrix"]]
    with _judge(request, compared, progress) as judge:
        entries = _make_all(
            [
                _ToMake(
                    quant,
                    _job(request, {quant: types[quant]}),
                    files[quant],
                    plans[quant],
                    *_matrix_for(request, quant, plans[quant]["needs_imatrix"], judge),
                    request.mixes.get(quant),
                    judge,
                )
                for quant in to_make
            ],
            at_once=_at_once(request.source),
            progress=progress,
            warn=warn,
            note=lambda quant, entry: _write(
                note_of(files[quant], request.record), inputs, {names[quant]: entry}, started
            ),
            keep=lambda done: _write(
                request.record, inputs, outputs | {names[quant]: done[quant] for quant in done}, started
            ),
        )
    outputs |= {names[quant]: entry for quant, entry in entries.items()}
    recorded = export_record.read(request.record) if request.record.is_file() else None
    if recorded is None or recorded.outputs != outputs:  # no file was made, but a recorded file was removed
        recorded = _write(request.record, inputs, outputs, started)
    for note_file in (note_of(file, request.record) for file in files.values()):
        if note_file.is_file():  # on a read-only disk nothing is removed
            note_file.unlink()
    return StepResult(recorded, reused=not to_make)


def _types(request: QuantizeRequest) -> dict[str, int]:
    """llama.cpp's number of each type by its name. A mix has the number of its nominal type."""
    numbers = quantization_types()
    types = {quant: numbers[quant] for quant in type_names(request.quants)}
    return types | {name: numbers[mix.nominal] for name, mix in request.mixes.items()}


def _job(request: QuantizeRequest, types: dict[str, int]) -> QuantizeJob:
    job: QuantizeJob = {"source": str(request.source), "types": types, "out": ""}
    mix = request.mixes.get(next(iter(types)))
    if mix is None:
        return job
    return {**job, "tensor_types": mix.types, "metadata": {MIX_KEY: identity(mix.types)}}


def _plans(request: QuantizeRequest, types: dict[str, int], progress: Bar) -> dict[str, DryRun]:
    """llama.cpp's dry run for each type. It reads only the header of the source."""
    if not types:
        return {}
    progress(0, len(types), f"asking llama.cpp about {', '.join(types)}")
    matrix, plain = request.matrix, {quant: number for quant, number in types.items() if quant not in request.mixes}
    plans = dry_run(_job(request, plain)) if plain else {}
    needing = [quant for quant, plan in plans.items() if plan["needs_imatrix"]]
    for quant in needing:
        if matrix is None or matrix.missing:
            raise _needs_matrix(request, quant)
    if needing and matrix:  # with an importance matrix, llama.cpp gives some tensors other types
        job = _job(request, {quant: types[quant] for quant in needing})
        again = dry_run({**job, "matrix": str(matrix.file)})
        plans |= {quant: {**again[quant], "needs_imatrix": True} for quant in needing}
    for name in types.keys() - plain.keys():
        job = _job(request, {name: types[name]})
        plans |= dry_run({**job, "matrix": str(matrix.file)} if matrix else job)
    return plans


def _needs_matrix(request: QuantizeRequest, quant: str) -> UsageError:
    matrix = request.matrix
    lacking = f"{len(matrix.missing)} matrices are not in {matrix.file.name}" if matrix else "there is none"
    other = "give one of llama-imatrix: --imatrix FILE"
    if RunDir.is_one(request.record.parent):
        other = "compute a matrix from the run's rows: --imatrix auto"
    return UsageError(
        f"llama.cpp cannot make {quant} without an importance matrix, and {lacking}",
        code="cannot_quantize",
        expected="a type that works without one, such as q4_k_m, q3_k_m, q2_k or iq4_xs",
        got=quant,
        hint=f"take such a type: --quant q4_k_m; or {other}",
    )


@contextlib.contextmanager
def _judge(request: QuantizeRequest, quants: list[str], progress: Bar) -> Iterator[Judge | None]:
    """The judge for mixes, and for files with and without the importance matrix; None if nothing is measured."""
    texts = next((mix.texts for mix in request.mixes.values()), request.matrix.texts if request.matrix else [])
    if not texts or not any(takes_matrix(quant) or quant in request.mixes for quant in quants):
        yield None
        return
    vocabulary = len(read_gguf(request.source).tokens)
    with judging(request.source, texts, vocabulary, progress) as judge:
        yield judge


def _matrix_for(request: QuantizeRequest, quant: str, needed: bool, judge: Judge | None) -> tuple[Matrix | None, bool]:
    """The importance matrix for one type, and whether the file must be compared with one without the matrix. It must if
    the type does not need a matrix and the user did not request one."""
    matrix = request.matrix
    if matrix is None or not (takes_matrix(quant) or quant in request.mixes):
        return None, False
    is_sure = needed or matrix.is_explicit or quant in request.mixes
    return (matrix, not is_sure) if is_sure or judge is not None else (None, False)


@dataclass(frozen=True)
class _ToMake:
    """A file to make. `plan` is llama.cpp's dry run for it; `mix` is None for a plain type."""

    quant: str
    job: QuantizeJob
    file: Path
    plan: DryRun
    matrix: Matrix | None
    compares: bool  # the file is also made without the matrix, and the one nearer to the source is kept
    mix: Mix | None
    judge: Judge | None


def _make_all(
    tasks: list[_ToMake],
    *,
    at_once: int,
    progress: Bar,
    warn: Warn,
    note: Callable[[str, ExportedFile], Any],
    keep: Callable[[dict[str, ExportedFile]], Any],
) -> dict[str, ExportedFile]:
    """Makes the files, several at once. Returns their entries for the record, in the order of `tasks`.

    Args:
        note: called with the entry of a file before the file gets its final name.
        keep: called with the entries so far whenever a file is complete, so that the failure of another file loses
            nothing.
    """
    done: dict[str, ExportedFile] = {}
    bars = _parts_of(progress, len(tasks))
    with ending(ThreadPoolExecutor(at_once)) as pool:
        pending = {pool.submit(_quantize, task, bars(task.quant), warn, note): task.quant for task in tasks}
        for future in as_completed(pending):
            if future.exception() is None:
                done[pending[future]] = future.result()
                done = {task.quant: done[task.quant] for task in tasks if task.quant in done}
                keep(done)
    for future in pending:
        future.result()  # raises the error of a failed file
    return done


def _at_once(source: Path) -> int:
    """The number of files to make at once: two if the memory is enough. llama.cpp reads and writes with one thread, so
    two files keep two cores busy."""
    have = available_memory_bytes()
    return 1 if have is None or have < 2 * _worker_bytes(source.stat().st_size) else _AT_ONCE


def _worker_bytes(source_bytes: int) -> int:
    return min(_WORKER_BYTES, 4 * source_bytes)


def _quantize(task: _ToMake, progress: Bar, warn: Warn, note: Callable[[str, ExportedFile], Any]) -> ExportedFile:
    """Quantizes one file and returns its entry in the record."""
    started, quant = time.monotonic(), task.quant
    quantized: QuantizedFile = {}
    with whole_file(task.file) as part:
        if task.matrix is not None:
            quantized = _make_with(task.matrix, task, part, progress)
        else:
            run_worker(WORKER, {**task.job, "out": str(part)}, object, progress=progress)
        progress(1, 1, "written, reading it back")
        gguf = read_gguf(part)
        fallbacks = fallbacks_of(gguf, task.plan["fallbacks"], quant)
        mixed: QuantizedFile = {}
        if task.mix is not None and task.judge is not None:
            mixed = entry_of(task.mix, gguf, task.judge, progress)
        entry: ExportedFile = {
            **file_digest(part),
            "quant": quant,
            "types": dict(Counter(tensor.kind.lower() for tensor in gguf.tensors.values())),
            "fallbacks": fallbacks,
            "bits_per_weight": round(gguf.bits_per_weight, 3),
            "seconds": round(time.monotonic() - started, 3),
            **quantized,
            **mixed,
        }
        note(quant, entry)
    if fallbacks:
        stored_as = ", ".join(sorted({fallback["got"] for fallback in fallbacks}))
        warn(
            "quant_fallback",
            f"{task.file.name}: {len(fallbacks)} of {len(gguf.matrices)} matrices are stored as {stored_as}, which "
            f"is larger, because {fallbacks[0]['why']}",
        )
    return entry


def _make_with(matrix: Matrix, task: _ToMake, part: Path, progress: Bar) -> QuantizedFile:
    """Quantizes with an importance matrix, or without it if `compares` finds that nearer. Returns entries to record."""
    run_worker(WORKER, {**task.job, "out": str(part), "matrix": str(matrix.file)}, object, progress=progress)
    if not task.compares or task.judge is None:
        return {"imatrix": matrix.use}
    with scratch_file(task.file) as plain:
        run_worker(WORKER, {**task.job, "out": str(plain)}, object, progress=progress)
        near, plainly = distance(task.judge, part, progress), distance(task.judge, plain, progress)
        choice = MatrixChoice(with_matrix=near, without_matrix=plainly)
        if near["mean_kl"] < plainly["mean_kl"]:
            return {"imatrix": matrix.use, "choice": choice}
        os.replace(plain, part)
    return {"choice": choice}


def _earlier_outputs(record: Path, inputs: dict[str, FileDigest]) -> dict[str, ExportedFile]:
    """The recorded entries of files that still exist. Raises UsageError if they were made from another source."""
    if not record.is_file():
        return {}
    earlier = export_record.read(record)
    if earlier.inputs != inputs:
        raise UsageError(
            f"{record} describes files made from another GGUF file",
            code="output_exists",
            expected=f"the source {', '.join(earlier.inputs)} as it was",
            got=", ".join(inputs),
            hint=f"move {quoted(record)} and its files away{or_another_out(record)}",
        )
    return {name: entry for name, entry in earlier.outputs.items() if (record.parent / name).is_file()}


def _check_recorded(file: Path, entry: ExportedFile, request: QuantizeRequest) -> None:
    hint = f"move {quoted(file)} away and run the same command, which makes it again"
    require_unchanged(file, entry, request.record, hint)
    require_same_matrix(file, entry, request.matrix, without=request.without_matrix)


def _check_room(source: Path, out: Path, plans: dict[str, DryRun]) -> None:
    if not plans:
        return
    header = read_gguf(source)
    metadata_bytes = header.size_bytes - sum(tensor.n_bytes for tensor in header.tensors.values())
    need = sum(plan["size_bytes"] + metadata_bytes for plan in plans.values())
    require_space(out, need, f"{', '.join(plans)} files")
    require_memory(_worker_bytes(header.size_bytes), "quantizing")


def _parts_of(progress: Bar, count: int) -> Callable[[str], Bar]:
    """A progress bar for each of `count` files. Together they move the one bar that is shown."""
    shares: dict[str, float] = {}

    def part(quant: str) -> Bar:
        def bar(done: float, total: float, text: str) -> None:
            shares[quant] = done / max(total, 1)
            progress(round(sum(shares.values()), 3), count, f"{quant} {text}")

        return bar

    return part


def _write(
    record: Path, inputs: dict[str, FileDigest], outputs: dict[str, ExportedFile], started: float
) -> ExportRecord:
    quantized = ExportRecord(
        step="quantize",
        inputs=inputs,
        outputs=outputs,
        versions=versions("llama-cpp-python", "gguf"),
        seconds=round(time.monotonic() - started, 3),
        peak_memory_bytes=peak_memory_bytes(children=True),
        finished_at=records.timestamp(),
    )
    records.write(record, quantized)
    return quantized
