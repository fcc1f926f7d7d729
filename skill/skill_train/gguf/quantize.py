"""The step that makes smaller files from an unquantized GGUF file, through llama-cpp-python's bindings.

First a dry run of llama.cpp reports for every type the exact size, the tensors that do not fit the type, and whether
llama.cpp would refuse. Then each file is made in its own child process, and is recorded as soon as it is complete.
"""

from __future__ import annotations

import re
import shlex
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from skill_train.core.console import Bar
from skill_train.core.digests import FileDigest, digests, file_digest
from skill_train.core.errors import UsageError, nearest
from skill_train.core.files import whole_file
from skill_train.core.memory import peak_memory_bytes
from skill_train.core.worker import ending, llama_cpp_folder, run_worker
from skill_train.gguf.quantize_worker import DryRun, QuantizeJob
from skill_train.llama.gguf_header import GgufFile, read_gguf
from skill_train.machine.limits import require_memory
from skill_train.machine.read import available_memory_bytes
from skill_train.run import export_record, records
from skill_train.run.export_record import ExportedFile, ExportRecord, Fallback
from skill_train.run.folder import note_of, noted, require_space, require_writable, versions

WORKER = "skill_train.gguf.quantize_worker"

# llama-quantize's short names (tools/quantize/quantize.cpp).
_ALIASES = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m"}

# These are in the enumeration, but llama_ftype_get_default_type does not know them. Only a converter writes such files.
_NOT_MADE_BY_QUANTIZING = ("guessed", "nvfp4")

_ONE_DIMENSION = 1
_SUPER_BLOCK = 256  # weights in a block of a K-quant or i-quant (QK_K in ggml-common.h)
_AT_ONCE = 2
_WORKER_BYTES = 400_000_000  # 0.12 GB measured; the source is mapped, not loaded


@dataclass(frozen=True)
class Quantized:
    """The result of quantizing.

    Attributes:
        reused: every file already existed.
        reused_files: the names of the files that already existed.
        same_as_source: the types that the source already has.
    """

    record: ExportRecord
    reused: bool
    reused_files: list[str]
    same_as_source: list[str]


@dataclass(frozen=True)
class QuantizeRequest:
    """An unquantized GGUF file, and the types to make of it.

    Attributes:
        source: an unquantized GGUF file.
        quants: names of types, such as `q4_k_m`; upper case and `-` are understood.
        threads: 0 lets llama.cpp use all.
    """

    source: Path
    out: Path
    record: Path
    name: str
    quants: list[str]
    threads: int = 0


def quantize(request: QuantizeRequest, *, progress: Bar, warn: Callable[[str, str], None]) -> Quantized:
    """Writes `out/<name>-<type>.gguf` for each type. Files that are already recorded are reused. No file is written for
    a type that the source already has.

    Raises:
        UsageError: a type is unknown or needs an importance matrix, or the record belongs to another source.
        DecisionNeeded: there is not enough disk or memory.
    """
    started = time.monotonic()
    types = {quant: quantization_types()[quant] for quant in type_names(request.quants)}
    inputs = digests(request.source.parent, [request.source])
    outputs = _earlier_outputs(request.record, inputs)
    files = {quant: request.out / f"{request.name}-{quant}.gguf" for quant in types}
    names = {quant: str(file.relative_to(request.record.parent)) for quant, file in files.items()}
    for file in files.values():
        if note := noted(file, request.record, ExportRecord, inputs=inputs, options={}):
            outputs = note.outputs | outputs
    reused = [quant for quant in types if names[quant] in outputs]
    for quant in reused:
        _check_unchanged(files[quant], outputs[names[quant]], request.record)
    if len(reused) < len(types):
        require_writable(request.out)
    plans = _plans(request.source, {quant: number for quant, number in types.items() if quant not in reused}, progress)
    same = [quant for quant, plan in plans.items() if plan["changed"] == 0]
    to_make = [quant for quant in plans if quant not in same]
    _check_room(request.source, request.out, files, {quant: plans[quant] for quant in to_make})
    entries = _make_all(
        [
            _ToMake(quant, _job(request.source, {quant: types[quant]}, request.threads), files[quant], plans[quant])
            for quant in to_make
        ],
        at_once=_at_once(request.source),
        progress=progress,
        warn=warn,
        note=lambda quant, entry: _write(note_of(files[quant], request.record), inputs, {names[quant]: entry}, started),
        keep=lambda done: _write(
            request.record, inputs, outputs | {names[quant]: done[quant] for quant in done}, started
        ),
    )
    outputs |= {names[quant]: entry for quant, entry in entries.items()}
    recorded = export_record.read(request.record) if request.record.is_file() else None
    if recorded is None or recorded.outputs != outputs:  # no file was made, but a recorded file was removed
        recorded = _write(request.record, inputs, outputs, started)
    for file in files.values():
        note_of(file, request.record).unlink(missing_ok=True)
    return Quantized(recorded, not to_make, [names[quant] for quant in reused], same)


def quantization_types() -> dict[str, int]:
    """The number by name of every type that the installed llama.cpp can quantize to. They are read from the text of its
    bindings, because importing the bindings would load the native library.

    Raises:
        NotInstalled: llama-cpp-python is missing.
    """
    text = (llama_cpp_folder() / "llama_cpp.py").read_text(encoding="utf-8")
    types = re.findall(r"^LLAMA_FTYPE_(?:MOSTLY_|ALL_)?(\w+) = (\d+)", text, re.MULTILINE)
    return {kind.lower(): int(number) for kind, number in types if kind.lower() not in _NOT_MADE_BY_QUANTIZING}


def type_names(quants: list[str]) -> list[str]:
    """llama.cpp's names of the types in lower case, each once, in the given order.

    Raises:
        UsageError: a name is unknown; the message has the nearest known name and the list.
    """
    types = quantization_types()
    names = []
    for quant in quants:
        plain = quant.strip().lower().replace("-", "_")
        plain = _ALIASES.get(plain, plain)
        if plain not in types:
            raise UsageError(
                f"{quant!r} is not a type that the installed llama.cpp can make{nearest(plain, types)}",
                code="cannot_quantize",
                expected=", ".join(sorted(types)),
                got=quant,
                hint="skill-train export-gguf RUN --quant q8_0,q4_k_m",
            )
        names.append(plain)
    return list(dict.fromkeys(names))


def fallbacks_of(file: GgufFile, planned: list[Fallback], quant: str) -> list[Fallback]:
    """The tensors that the file stores in another type than the intended one: `tensor`, `wanted`, `got`, `why`.

    `got` is read from the file. llama.cpp logs nothing if it stores an output matrix (or the embedding of a tied model)
    as q8_0 because its rows are not divisible by 256. Such a tensor is in the list too.
    """
    announced: list[Fallback] = [
        {**fallback, "got": file.tensors[fallback["tensor"]].kind.lower()} for fallback in planned
    ]
    named = {fallback["tensor"] for fallback in planned}
    silent: list[Fallback] = [
        {
            "tensor": tensor.name,
            "wanted": "q6_k",
            "got": tensor.kind.lower(),
            "why": f"rows of {tensor.shape[0]} weights are not divisible by {_SUPER_BLOCK}",
        }
        for tensor in file.tensors.values()
        if "_k" in quant or quant.startswith(("iq", "tq"))
        if tensor.name in ("output.weight", "token_embd.weight") and tensor.name not in named
        if tensor.kind == "Q8_0" and tensor.shape[0] % _SUPER_BLOCK
    ]
    return announced + silent


def _job(source: Path, types: dict[str, int], threads: int) -> QuantizeJob:
    return {"source": str(source), "types": types, "out": "", "threads": threads}


def _plans(source: Path, types: dict[str, int], progress: Bar) -> dict[str, DryRun]:
    """The dry run of llama.cpp for each type, which reads only the header."""
    if not types:
        return {}
    progress(0, len(types), f"asking llama.cpp about {', '.join(types)}")
    answers = run_worker(WORKER, _job(source, types, 1))
    plans = msgspec.convert(answers, dict[str, DryRun])
    for quant, plan in plans.items():
        if plan["needs_imatrix"]:
            raise UsageError(
                f"llama.cpp cannot make {quant} without an importance matrix, which skill-train does not make",
                code="cannot_quantize",
                expected="a type that works without one, such as q4_k_m, q3_k_m, q2_k or iq4_xs",
                got=quant,
                hint="skill-train export-gguf RUN --quant q4_k_m; for this type use llama.cpp's llama-imatrix and "
                "llama-quantize --imatrix on the f16 file",
            )
    return plans


@dataclass(frozen=True)
class _ToMake:
    """A file to make, and the result of llama.cpp's dry run for it."""

    quant: str
    job: QuantizeJob
    file: Path
    plan: DryRun


def _make_all(
    wanted: list[_ToMake],
    *,
    at_once: int,
    progress: Bar,
    warn: Callable[[str, str], None],
    note: Callable[[str, ExportedFile], Any],
    keep: Callable[[dict[str, ExportedFile]], Any],
) -> dict[str, ExportedFile]:
    """Makes the files, several at once. Returns their entries for the record, in the order of `wanted`.

    Args:
        note: called with the entry of a file before the file gets its final name.
        keep: called with the entries so far whenever a file is complete, so that the failure of another file loses
            nothing.
    """
    done: dict[str, ExportedFile] = {}
    bars = _parts_of(progress, len(wanted))
    with ending(ThreadPoolExecutor(at_once)) as pool:
        pending = {pool.submit(_make, task, bars(task.quant), warn, note): task.quant for task in wanted}
        for future in as_completed(pending):
            if future.exception() is None:
                done[pending[future]] = future.result()
                done = {task.quant: done[task.quant] for task in wanted if task.quant in done}
                keep(done)
    for future in pending:
        future.result()  # raises the error of a failed file
    return done


def _at_once(source: Path) -> int:
    """The number of files to make at once. llama.cpp reads and writes with one thread, so two files keep two cores
    busy, if there is memory for both."""
    have = available_memory_bytes()
    return 1 if have is None or have < 2 * _worker_bytes(source.stat().st_size) else _AT_ONCE


def _worker_bytes(source_bytes: int) -> int:
    return min(_WORKER_BYTES, 4 * source_bytes)


def _make(
    wanted: _ToMake,
    progress: Bar,
    warn: Callable[[str, str], None],
    note: Callable[[str, ExportedFile], Any],
) -> ExportedFile:
    """Quantizes one file and returns its entry in the record."""
    started, quant = time.monotonic(), wanted.quant
    with whole_file(wanted.file) as part:
        run_worker(WORKER, {**wanted.job, "out": str(part)}, progress=progress)
        progress(1, 1, "written, reading it back")
        gguf = read_gguf(part)
        fallbacks = fallbacks_of(gguf, wanted.plan["fallbacks"], quant)
        matrices = [tensor for tensor in gguf.tensors.values() if len(tensor.shape) > _ONE_DIMENSION]
        entry: ExportedFile = {
            **file_digest(part),
            "quant": quant,
            "types": dict(Counter(tensor.kind.lower() for tensor in gguf.tensors.values())),
            "fallbacks": fallbacks,
            "bits_per_weight": round(8 * sum(t.n_bytes for t in matrices) / sum(t.elements for t in matrices), 3),
            "seconds": round(time.monotonic() - started, 3),
        }
        note(quant, entry)
    if fallbacks:
        stored_as = ", ".join(sorted({fallback["got"] for fallback in fallbacks}))
        warn(
            "quant_fallback",
            f"{wanted.file.name}: {len(fallbacks)} of {len(matrices)} matrices are stored as {stored_as}, which is "
            f"larger, because {fallbacks[0]['why']}",
        )
    return entry


def _earlier_outputs(record: Path, inputs: dict[str, FileDigest]) -> dict[str, ExportedFile]:
    """The recorded entries of files that still exist. A file that was removed may be made again."""
    if not record.is_file():
        return {}
    earlier = export_record.read(record)
    if earlier.inputs != inputs:
        raise UsageError(
            f"{record} describes files made from another GGUF file",
            code="output_exists",
            expected=f"the source {', '.join(earlier.inputs)} as it was",
            got=", ".join(inputs),
            hint=f"move {shlex.quote(str(record))} and its files away, or use another --run-dir or --out",
        )
    return {name: entry for name, entry in earlier.outputs.items() if (record.parent / name).is_file()}


def _check_unchanged(file: Path, entry: ExportedFile, record: Path) -> None:
    digest = file_digest(file)
    if digest != {"bytes": entry["bytes"], "sha256": entry["sha256"]}:
        raise UsageError(
            f"{file} is not the file that {record.name} describes",
            code="output_changed",
            expected=f"{entry['bytes']} bytes, sha256 {entry['sha256'][:12]}…",
            got=f"{digest['bytes']} bytes, sha256 {digest['sha256'][:12]}…",
            hint=f"move {shlex.quote(str(file))} away and run the same command, which makes it again",
        )


def _check_room(source: Path, out: Path, files: dict[str, Path], plans: dict[str, DryRun]) -> None:
    for quant in plans:
        if files[quant].exists():
            raise UsageError(
                f"{files[quant]} already exists, and no record describes it",
                code="output_exists",
                expected="a path where no file exists",
                hint=f"move {shlex.quote(str(files[quant]))} away, or use another --out",
            )
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
