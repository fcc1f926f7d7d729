"""The step of `export-gguf --quant auto`: chooses a type for each matrix, by measured divergence, within a size. It can
also repeat the types of an earlier mix from a file."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from skill_train.core.console import Bar
from skill_train.core.digests import file_digest
from skill_train.core.errors import UsageError
from skill_train.core.units import enough_megabytes
from skill_train.core.worker import run_worker
from skill_train.gguf.importance import Matrix
from skill_train.gguf.quality import mix as mixing
from skill_train.gguf.quality.distance import Judge, distance
from skill_train.gguf.quality.sensitivity import MOST_SECONDS, Basis, in_order, measured
from skill_train.gguf.quality.texts import FEWEST, RunTexts
from skill_train.gguf.quantize_worker import DryRun, QuantizeJob
from skill_train.llama.gguf_header import GgufFile, Tensor, read_gguf
from skill_train.llama.importance.sensitivity_worker import SensitivityJob
from skill_train.machine.read import physical_cores
from skill_train.run.export_record import MixFigures, QuantizedFile

WORKER = "skill_train.gguf.quantize_worker"
FILE = "sensitivity.jsonl"
# _WORK: weights x tokens of one measurement, about half a second on 2 cores. There are some hundred measurements. With
# 2 million weights, 4096 tokens chose no better mix than 1024.
_WORK, _MOST_TOKENS, _LEAST_TOKENS = 4e10, 1024, 256
_SPARE_BYTES = 4096  # for metadata that the quantizer adds, and for padding between tensors
# The type for `general.file_type`, by the largest bits per weight of a mix: plain files of the type have about as many.
_NOMINAL = ((2.9, "q2_k"), (3.7, "q3_k_m"), (5.2, "q4_k_m"), (6.1, "q5_k_m"), (7.5, "q6_k"))


@dataclass(frozen=True)
class MixTarget:
    """The largest size of a mix. Exactly one field is set."""

    most_bytes: int | None = None  # bytes of the whole file
    bits: float | None = None  # bits per weight, over all matrices

    @property
    def name(self) -> str:
        """The part of the file's name that follows the model's name."""
        return f"auto-{self.bits:g}bpw" if self.bits is not None else f"auto-{(self.most_bytes or 0) / 1e6:g}mb"


@dataclass(frozen=True)
class Mix:
    types: dict[str, str]  # the type of each matrix, by its name
    nominal: str  # the type for `general.file_type`, which must be one of llama.cpp's types
    most_bytes: int | None
    texts: list[list[int]]  # token ids of other texts, on which the finished file is measured
    origin: QuantizedFile  # the entries for the record that say where the types come from


def identity(types: Mapping[str, str]) -> str:
    """A digest of the types of a mix."""
    return hashlib.sha256(json.dumps(dict(types), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class MixRequest:
    """An unquantized GGUF file, the size of the mix, and the texts to measure on."""

    source: Path
    target: MixTarget
    matrix: Matrix | None
    texts: RunTexts
    file: Path  # stores the measured divergences


def choose_mix(request: MixRequest, progress: Bar) -> Mix:
    """Chooses the mix with the least estimated divergence.

    Raises:
        UsageError: even the coarsest types are too large, no matrix can be quantized, or there is too little text.
    """
    gguf = read_gguf(request.source)
    matrices = quantizable(gguf)
    tokens = min(request.texts.tokens, sum(map(len, request.texts.compared)))
    if not matrices or tokens < FEWEST:
        raise UsageError(
            "a mix of types cannot be chosen: there is "
            + ("too little text to measure on" if matrices else "no matrix to quantize"),
            code="cannot_quantize",
            expected=f"an unquantized model, and {FEWEST} tokens or more of training rows of either kind",
            hint="skill-train export-gguf RUN --quant q4_k_m",
        )
    room = _room(gguf, matrices, request.target)
    bits = 8 * room / sum(matrices.values())
    kinds_by_tensor = _kinds_to_try(gguf, matrices, bits, request.matrix)
    stays = sum(gguf.tensors[name].n_bytes for name in matrices if name not in kinds_by_tensor)
    elements = {name: matrices[name] for name in kinds_by_tensor}
    least = sum(min(mixing.bytes_of(elements[name], kind) for kind in kinds) for name, kinds in kinds_by_tensor.items())
    if least + stays > room:  # checked before the measurement, which takes minutes
        raise _too_small(gguf, matrices, request.target, least + stays - room)
    divergences = measured(*_measurement(request, kinds_by_tensor, sum(matrices.values())), progress)
    chosen = mixing.choose(elements, mixing.completed(divergences, kinds_by_tensor), room - stays)
    figures: MixFigures = {
        "target": request.target.name,
        "estimated_kl": chosen.kl,
        "measured_pairs": len(divergences),
        "pairs": sum(map(len, kinds_by_tensor.values())),
    }
    return _mix(gguf, chosen.types, request.target.most_bytes, request.texts, {"mix": figures})


def _kinds_to_try(gguf: GgufFile, matrices: dict[str, int], bits: float, matrix: Matrix | None) -> dict[str, list[str]]:
    """The types to measure for each matrix. A matrix whose rows fit no type is left out, and keeps its type."""
    without_entry = set(matrices) if matrix is None else set(matrix.missing)
    wanted: dict[str, list[str]] = {}
    for name in matrices:
        with_matrix = name.startswith("blk.") and name not in without_entry
        if kinds := mixing.candidates(gguf.tensors[name].shape[0], bits, with_matrix=with_matrix):
            wanted[name] = kinds
    return wanted


def _measurement(request: MixRequest, kinds: dict[str, list[str]], weights: int) -> tuple[SensitivityJob, Basis]:
    """The job that measures the types `kinds` of each matrix. `weights` is the number of weights of all matrices."""
    job = SensitivityJob(
        gguf=str(request.source),
        matrix=str(request.matrix.file) if request.matrix else "",
        sequences=_shortened(request.texts.computed, int(_WORK / weights)),
        threads=physical_cores(),
        trials=in_order(kinds),
        out=str(request.file),
        most_seconds=MOST_SECONDS,
    )
    matrix = request.matrix.use["sha256"] if request.matrix else ""
    return job, Basis(model=file_digest(request.source)["sha256"], matrix=matrix, data=request.texts.sha256)


def replayed(
    types: dict[str, str], origin: QuantizedFile, source: Path, texts: RunTexts, most_bytes: int | None
) -> Mix:
    """Makes a mix from types that were chosen before.

    Raises:
        UsageError: there is too little text to measure the file on.
    """
    if sum(map(len, texts.compared)) < FEWEST:
        raise UsageError(
            "a mix of types cannot be replayed: there is too little text to measure the file on",
            code="cannot_quantize",
            expected=f"{FEWEST} tokens or more in every fourth training row",
            hint="skill-train export-gguf RUN --quant q4_k_m",
        )
    return _mix(read_gguf(source), types, most_bytes, texts, origin)


def _mix(gguf: GgufFile, types: dict[str, str], most: int | None, texts: RunTexts, origin: QuantizedFile) -> Mix:
    elements = {name: gguf.tensors[name].elements for name in types}
    bits = 8 * sum(mixing.bytes_of(elements[name], kind) for name, kind in types.items()) / sum(elements.values())
    nominal = next((kind for most_bits, kind in _NOMINAL if bits <= most_bits), "q8_0")
    return Mix(types, nominal, most, texts.compared, origin)


def entry_of(mix: Mix, file: GgufFile, judge: Judge, progress: Bar) -> QuantizedFile:
    """Checks a mix's file and measures its distance on other texts. Returns the entries for the record.

    Raises:
        UsageError: the file has other types than the mix, or is too large.
    """
    other = [name for name, kind in mix.types.items() if file.tensors[name].kind.lower() != kind]
    too_large = mix.most_bytes is not None and file.size_bytes > mix.most_bytes
    if other or too_large:
        raise UsageError(
            "the file that llama.cpp made is not the mix that was chosen",
            code="cannot_quantize",
            expected=f"{other[0]} as {mix.types[other[0]]}" if other else f"at most {mix.most_bytes} bytes",
            got=file.tensors[other[0]].kind.lower() if other else f"{file.size_bytes} bytes",
            hint="export with a type of llama.cpp: --quant q4_k_m",
        )
    return {"measured": distance(judge, file.path, progress), "tensor_types": mix.types, **mix.origin}


def quantizable(gguf: GgufFile) -> dict[str, int]:
    """The number of weights of each matrix that llama.cpp would round, by its own dry run. A mix names all of them:
    llama.cpp counts only unnamed matrices to choose their types, so a partial list would shift its choices."""
    plan = dry_run({"source": str(gguf.path), "types": {"q8_0": 7}, "out": ""})["q8_0"]
    return {name: gguf.tensors[name].elements for name in plan["targets"]}


def dry_run(job: QuantizeJob) -> dict[str, DryRun]:
    """llama.cpp's dry run for each type of the job. It reads only the header of the file."""
    return run_worker(WORKER, job, dict[str, DryRun])


def _too_small(gguf: GgufFile, matrices: dict[str, int], target: MixTarget, lacking: int) -> UsageError:
    """The error if even the smallest types need `lacking` bytes too many. It names a size that is enough."""
    flat = _flat(gguf, matrices)
    least = lacking + _room(gguf, matrices, target) + sum(tensor.n_bytes for tensor in flat)
    weights = sum(matrices.values()) + sum(tensor.elements for tensor in flat)
    bits = f"--bits {math.ceil(100 * 8 * (least + 1) / weights) / 100:.2f} or more"
    smallest = None if target.most_bytes is None else enough_megabytes(target.most_bytes + lacking)
    return UsageError(
        "no mix is that small" + (f": the smallest file has {smallest}" if smallest else ""),
        code="cannot_quantize",
        expected=f"--max-size of {smallest} or more, or {bits}" if smallest else bits,
        got=f"--max-size {target.most_bytes / 1e6:g} MB" if target.most_bytes else f"--bits {target.bits:g}",
        hint="ask for a larger size, or train a smaller base",
    )


def _flat(gguf: GgufFile, matrices: dict[str, int]) -> list[Tensor]:
    """The matrices that are not rounded. They count in the bits per weight of a file."""
    return [tensor for tensor in gguf.matrices if tensor.name not in matrices]


def _room(gguf: GgufFile, matrices: dict[str, int], target: MixTarget) -> int:
    """The bytes that all matrices to quantize may take together."""
    if target.bits is not None:
        flat = _flat(gguf, matrices)
        weights = sum(matrices.values()) + sum(tensor.elements for tensor in flat)
        return int(target.bits * weights / 8) - sum(tensor.n_bytes for tensor in flat)
    others = sum(tensor.n_bytes for name, tensor in gguf.tensors.items() if name not in matrices)
    header = gguf.size_bytes - sum(tensor.n_bytes for tensor in gguf.tensors.values())
    return (target.most_bytes or 0) - header - _SPARE_BYTES - others


def _shortened(texts: list[list[int]], tokens: int) -> list[list[int]]:
    """The first texts, until they have `tokens` tokens, but at least `_LEAST_TOKENS` and at most `_MOST_TOKENS`."""
    most = min(_MOST_TOKENS, max(_LEAST_TOKENS, tokens))
    chosen: list[list[int]] = []
    for ids in texts:
        if sum(map(len, chosen)) < most:
            chosen.append(ids)
    return chosen
