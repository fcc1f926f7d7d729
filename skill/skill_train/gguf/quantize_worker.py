"""Child process: llama.cpp quantizes a GGUF file, or does a dry run for several types.

The result of a dry run is read from llama.cpp's own log.
"""

import ctypes
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from skill_train.core.errors import DecisionNeeded, SkillTrainError, UsageError
from skill_train.core.worker import report_progress, worker_main
from skill_train.llama.importance.file import read_matrix
from skill_train.llama.llama_cpp import bindings
from skill_train.run.export_record import Fallback

_MIB = 1 << 20
# The bytes of a tensor's rows that are processed at once. With 1 GiB, allocating that memory for a large vocabulary
# took a fifth of the processor time of q8_0.
_BUFFER_BYTES = 1 << 26

# The log lines of llama_model_quantize_impl and tensor_type_fallback in llama.cpp's src/llama-quant.cpp.
_TENSOR = re.compile(r"\[ *(\d+)/ *(\d+)\] (\S+)")
_FALLBACK = re.compile(r"warning: (\S+) +- ncols +(\d+) not divisible by +(\d+) \(required for type +(\w+)\)")
_FALLS_TO = re.compile(r"-> falling back to +(\w+)")
_CHANGED = re.compile(r"MiB -> ")
_SIZE = re.compile(r"quant size += +([\d.]+) MiB")
_TARGET = re.compile(r"\[ *\d+/ *\d+\] (\S+) .* MiB -> +[\d.]+ MiB \((\w+)\)$")

_INTEGER, _TEXT = 0, 3  # enum llama_model_kv_override_type
_LONGEST_TEXT = 127  # the most bytes of a text value in llama_model_kv_override
_PLAIN_NAME = re.compile(r"[\w.-]+")


class QuantizeJob(TypedDict):
    """The types to quantize `source` to. If `out` is empty, it is a dry run, which may have several types."""

    source: str
    types: dict[str, int]  # llama.cpp's number of each type by its name
    out: str
    matrix: NotRequired[str]  # the file of an importance matrix
    tensor_types: NotRequired[dict[str, str]]  # the type of every matrix by its name, in place of llama.cpp's choice
    metadata: NotRequired[dict[str, str]]  # texts for the file's metadata


class DryRun(TypedDict):
    """What llama.cpp would do for one type."""

    size_bytes: int  # the size of the tensors' data, to a hundredth of a MiB
    changed: int  # the number of tensors that get another type
    targets: dict[str, str]  # the new type of each such tensor, by its name
    fallbacks: list[Fallback]
    needs_imatrix: bool


class _Log:
    """Joins the pieces of llama.cpp's log to lines, and parses them. Calls `on_tensor` with the number of finished
    tensors, the number of all, and the name of the next one."""

    def __init__(self, on_tensor: Callable[[int, int, str], None]) -> None:
        self.on_tensor = on_tensor
        self.line = ""
        self.errors: list[str] = []
        self.plan: DryRun = {"size_bytes": 0, "changed": 0, "targets": {}, "fallbacks": [], "needs_imatrix": False}

    def take(self, text: str) -> None:
        self.line += text
        while "\n" in self.line:
            line, self.line = self.line.split("\n", 1)
            self._read(line)
        started = _TENSOR.match(self.line)
        if started:
            self.on_tensor(int(started[1]) - 1, int(started[2]), started[3])

    def _read(self, line: str) -> None:
        fallback, falls_to, size = _FALLBACK.search(line), _FALLS_TO.search(line), _SIZE.search(line)
        if fallback and falls_to:
            name, columns, needed, wanted_type = fallback.groups()
            why = f"rows of {columns} weights are not divisible by {needed}"
            self.plan["fallbacks"].append(
                {"tensor": name, "wanted": wanted_type.lower(), "got": falls_to[1].lower(), "why": why}
            )
        if _CHANGED.search(line):
            self.plan["changed"] += 1
        if target := _TARGET.match(line):
            self.plan["targets"][target[1]] = target[2].lower()
        if size:
            self.plan["size_bytes"] = math.ceil((float(size[1]) + 0.01) * _MIB)
        if "will require an imatrix" in line:
            self.plan["needs_imatrix"] = True
        if "failed to quantize" in line:
            self.errors.append(line.partition("failed to quantize: ")[2].strip())


def run(job: QuantizeJob) -> dict[str, DryRun]:
    """Quantizes to one type, or does a dry run for each type. Returns what llama.cpp logged, by the type's name.

    Raises:
        NotInstalled: llama-cpp-python is missing.
        UsageError: llama.cpp refuses a type for this file.
        DecisionNeeded: the file could not be written.
    """
    api = bindings()
    return {name: _quantize(api, job, name, number) for name, number in job["types"].items()}


def _quantize(api: Any, job: QuantizeJob, name: str, number: int) -> DryRun:
    log = _Log(lambda done, total, tensor: report_progress(done, total, tensor))
    callback = api.llama_log_callback(lambda level, text, _: log.take(text.decode("utf-8", errors="replace")))
    api.llama_log_set(callback, ctypes.c_void_p(0))
    parameters = api.llama_model_quantize_default_params()
    parameters.ftype = number
    parameters.dry_run = not job["out"]
    parameters.max_buf_size = _BUFFER_BYTES
    stated: dict[str, str | int] = dict(job.get("metadata", {}))
    keep_alive: list[Any] = [_use_types(api, parameters, job.get("tensor_types", {}))]
    if job.get("matrix"):
        keep_alive.append(_use_matrix(api, parameters, Path(job["matrix"]), stated))
    keep_alive.append(_state(api, parameters, stated))
    status = api.llama_model_quantize(job["source"].encode(), job["out"].encode(), ctypes.byref(parameters))
    keep_alive.clear()  # llama.cpp reads these arrays until here
    api.llama_log_set(api.llama_log_callback(0), ctypes.c_void_p(0))  # Python may end before llama.cpp's last line
    if status != 0:
        raise _refused(log.errors[-1] if log.errors else f"status {status}", job, name)
    return log.plan


def _use_matrix(api: Any, parameters: Any, file: Path, stated: dict[str, str | int]) -> Any:
    """Sets the importance matrix, and adds the metadata that llama-quantize writes about it to `stated`
    (tools/quantize/quantize.cpp). Returns the arrays, which must stay in memory while llama.cpp runs."""
    matrix = read_matrix(file)
    values = {name: entry.means() for name, entry in matrix.entries.items()}
    data = (api.llama_model_imatrix_data * (len(values) + 1))()  # the last one has no name, and ends the array
    for item, (name, means) in zip(data, values.items(), strict=False):
        item.name, item.size = name.encode(), len(means)
        item.data = means.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    parameters.imatrix = data
    stated["quantize.imatrix.file"] = file.name
    if matrix.datasets:
        stated["quantize.imatrix.dataset"] = matrix.datasets[0]
    stated["quantize.imatrix.entries_count"] = len(values)
    stated["quantize.imatrix.chunks_count"] = matrix.chunk_count
    return values, data


def _state(api: Any, parameters: Any, stated: dict[str, str | int]) -> Any:
    """Sets metadata of the file. Returns the array, which must stay in memory while llama.cpp runs."""
    pairs = (api.llama_model_kv_override * (len(stated) + 1))()  # the last one has no key, and ends the array
    for pair, (key, value) in zip(pairs, stated.items(), strict=False):
        pair.key = key.encode()
        if isinstance(value, int):
            pair.tag, pair.value.val_i64 = _INTEGER, value
        else:
            cut = value.encode("utf-8", errors="replace")[:_LONGEST_TEXT]
            pair.tag, pair.value.val_str = _TEXT, cut.decode(errors="ignore").encode()
    if stated:
        parameters.kv_overrides = pairs
    return pairs


def _use_types(api: Any, parameters: Any, types: dict[str, str]) -> Any:
    """Sets the type of each matrix. llama.cpp takes the first regular expression that matches a name, so each one is
    anchored at both ends. Returns the array, which must stay in memory while llama.cpp runs."""
    if not types:
        return None
    from gguf.constants import GGMLQuantizationType

    odd = [name for name in types if not _PLAIN_NAME.fullmatch(name)]
    if odd:
        raise UsageError(
            f"{odd[0]!r} is not a name of a matrix that can be given a type of its own",
            code="cannot_quantize",
            expected="names of letters, digits, dots, hyphens and underscores",
            hint="skill-train export-gguf RUN --quant q4_k_m",
        )
    numbers = {kind.name.lower(): int(kind) for kind in GGMLQuantizationType}
    overrides = (
        api.llama_model_tensor_override * (len(types) + 1)
    )()  # the last one has no pattern, and ends the array
    for override, (name, kind) in zip(overrides, types.items(), strict=False):
        escaped = name.replace(".", r"\.")
        override.pattern, override.type = f"^{escaped}$".encode(), numbers[kind]
    parameters.tt_overrides = overrides
    return overrides


def _refused(why: str, job: QuantizeJob, name: str) -> SkillTrainError:
    if "iostream" in why or "write" in why:
        return DecisionNeeded(
            f"llama.cpp could not write {job['out']}: {why}",
            code="no_disk",
            got=why,
            hint="free some space, or choose a folder on another disk",
        )
    if "validation failed" in why:
        return UsageError(
            "the file has a weight that is not finite, or too large for the type",
            code="bad_weights",
            got=why,
            hint="export again with --quant bf16, or check whether the training diverged",
        )
    return UsageError(
        f"llama.cpp refuses to quantize {job['source']} to {name}: {why}",
        code="cannot_quantize",
        expected="an unquantized GGUF file (f16, bf16 or f32) and a type that llama.cpp can make",
        got=why,
        hint=f"quantize from the f16 file; choose {_other_types(name)}, or use the f16 file itself",
    )


def _other_types(refused: str) -> str:
    return " or ".join(name for name in ("q8_0", "q4_k_m", "q5_k_m") if name != refused.lower())


if __name__ == "__main__":
    worker_main(run, QuantizeJob)
