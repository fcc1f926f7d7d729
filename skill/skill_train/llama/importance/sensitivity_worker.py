"""Child process: rounds the matrices of a loaded model, one at a time, and measures how its probabilities change.

The weights are in memory, and llama.cpp's callback gives their addresses (`importance.nodes`). ggml's own functions
round a matrix, and it is written back in the type of the file, f16 for example. A quantized file differs in two ways:
its inputs are rounded to 8 bits, and the errors of several matrices add up. So the finished file is measured again.
"""

from __future__ import annotations

import ctypes
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from skill_train.core.worker import report_progress, worker_main
from skill_train.llama.gguf_header import GgufFile, read_gguf
from skill_train.llama.importance.file import ImportanceMatrix, read_matrix, shape_of
from skill_train.llama.importance.nodes import Nodes, weight_name
from skill_train.llama.llama_cpp import Llama, bindings, ggml, in_context, loaded_model

if TYPE_CHECKING:
    import numpy as np

_TAKES_WEIGHTS = ("MUL_MAT", "MUL_MAT_ID", "GET_ROWS")  # GET_ROWS reads an embedding
_ROOM = 8  # tokens of context to spare


class TypeTrial(msgspec.Struct, frozen=True):
    """A matrix, and the type to round it to."""

    tensor: str
    kind: str


class Outcome(msgspec.Struct, frozen=True):
    """`kl` is the mean KL divergence, in nats per token, of the model with only this matrix rounded."""

    tensor: str
    kind: str
    kl: float


class SensitivityJob(msgspec.Struct, frozen=True, kw_only=True):
    """The model, the texts and the trials."""

    gguf: str
    matrix: str  # the file of an importance matrix; empty for none
    sequences: list[list[int]]
    threads: int
    trials: list[TypeTrial]
    # Each outcome is appended to this file as a line, as soon as it is known. A matrix has no outcome if no node of
    # the graph takes it whole, because it cannot be replaced.
    out: str
    most_seconds: float  # no trial begins after this time


class _Traits(ctypes.Structure):
    """The first fields of `struct ggml_type_traits` (ggml/include/ggml.h)."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )


class Rounder:
    """Quantizes matrices with ggml's own functions, and converts them back to float32."""

    def __init__(self, library: Any, matrix: ImportanceMatrix | None, threads: int) -> None:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        self.library, self.matrix, self.threads = library, matrix, threads
        self.numbers = {kind.name.lower(): int(kind) for kind in GGMLQuantizationType}
        self.blocks = {kind.name.lower(): sizes for kind, sizes in GGML_QUANT_SIZES.items()}
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        library.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, number, number, number, pointer]
        library.ggml_quantize_chunk.restype = ctypes.c_size_t
        library.ggml_get_type_traits.argtypes = [ctypes.c_int]
        library.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)

    def rounded(self, name: str, weights: np.ndarray, kind: str) -> np.ndarray:
        """The weights [matrices, rows, columns], float32, after rounding to the type."""
        import numpy as np

        result = np.empty_like(weights)
        means = self._means(name, len(weights), weights.shape[2])
        pieces = [
            (number, rows)
            for number in range(len(weights))
            for rows in _shares(weights.shape[1], self.threads)
        ]  # fmt: skip
        with ThreadPoolExecutor(self.threads) as pool:
            work = [
                pool.submit(self._round, weights[number, rows], result[number, rows], means[number], kind)
                for number, rows in pieces
            ]
        for piece in work:
            piece.result()
        return result

    def _means(self, name: str, count: int, columns: int) -> list[np.ndarray | None]:
        entry = self.matrix.entries.get(name) if self.matrix else None
        return [None] * count if entry is None else list(entry.means().reshape(count, columns))

    def _round(self, weights: np.ndarray, result: np.ndarray, means: np.ndarray | None, kind: str) -> None:
        import numpy as np

        rows, columns = weights.shape
        block, size = self.blocks[kind]
        data = np.empty(rows * columns // block * size, dtype=np.uint8)
        pointer = means.ctypes.data if means is not None else None
        number = self.numbers[kind]
        self.library.ggml_quantize_chunk(number, weights.ctypes.data, data.ctypes.data, 0, rows, columns, pointer)
        traits = self.library.ggml_get_type_traits(number).contents
        traits.to_float(data.ctypes.data, result.ctypes.data, rows * columns)


class Reference:
    """Keeps the logits of the unchanged model, and measures the distance of the model with changed weights."""

    def __init__(self, llama: Llama, sequences: list[list[int]]) -> None:
        self.llama, self.sequences = llama, sequences
        self.parts = [(logits.copy(), _softmax(logits)) for logits in self._logits()]

    def _logits(self) -> Any:
        for ids in self.sequences:
            for _, logits in self.llama.logits(ids):
                yield logits

    def distance(self) -> float:
        """The mean KL divergence of the model with its present weights, in nats per token: E[d] + log E[exp(-d)]. d is
        the decrease of a logit. E is the mean under the unchanged model's probabilities."""
        import numpy as np

        total, tokens = 0.0, 0
        for (logits, probabilities), now in zip(self.parts, self._logits(), strict=True):
            fell = logits - now
            first = np.einsum("tv,tv->t", probabilities, fell, dtype=np.float64)
            second = np.einsum("tv,tv->t", probabilities, np.expm1(-fell), dtype=np.float64)
            total += float((first + np.log1p(second)).sum())
            tokens += len(now)
        return total / tokens


def run(job: SensitivityJob) -> None:
    started, gguf = time.monotonic(), read_gguf(Path(job.gguf))
    matrix = read_matrix(Path(job.matrix)) if job.matrix else None
    nodes, places = Nodes(ggml()), dict[str, int]()
    rounder = Rounder(nodes.ggml, matrix, job.threads)

    def find(pointer: int, asks: bool, _: Any) -> bool:
        node = nodes.at(pointer)
        if nodes.op(node) in _TAKES_WEIGHTS:
            places.setdefault(weight_name(nodes.at(node.src[0]).name), node.src[0])
        return False

    callback = bindings().ggml_backend_sched_eval_callback(find)
    context = max(map(len, job.sequences)) + _ROOM
    with (
        loaded_model(Path(job.gguf), writable=True) as file,
        in_context(file, context_tokens=context, threads=job.threads, on_node=callback) as llama,
        open(job.out, "a", encoding="utf-8") as out,
    ):
        reference = Reference(llama, job.sequences)
        reachable = [trial for trial in job.trials if trial.tensor in places]
        for done, trial in enumerate(reachable):
            if time.monotonic() - started > job.most_seconds:
                break
            report_progress(done, len(reachable), f"{trial.tensor} as {trial.kind}")
            kl = _measure(gguf, trial, (nodes, places[trial.tensor]), rounder, reference)
            out.write(json.dumps(msgspec.to_builtins(Outcome(trial.tensor, trial.kind, kl))) + "\n")
            out.flush()


def _measure(
    gguf: GgufFile, trial: TypeTrial, place: tuple[Nodes, int], rounder: Rounder, reference: Reference
) -> float:
    """Writes the rounded matrix into the model, measures the distance, and restores the weights of the file."""
    import numpy as np
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    nodes, pointer = place
    tensor = gguf.tensors[trial.tensor]
    kind = GGMLQuantizationType[tensor.kind]
    stored = np.fromfile(gguf.path, dtype=np.uint8, count=tensor.n_bytes, offset=tensor.offset)
    weights = dequantize(stored.reshape(1, -1), kind).reshape(shape_of(tensor)[0], tensor.shape[1], tensor.shape[0])
    _write_values(nodes, pointer, quantize(rounder.rounded(trial.tensor, weights, trial.kind), kind))
    try:
        return reference.distance()
    finally:
        _write_values(nodes, pointer, stored)


def _write_values(nodes: Nodes, pointer: int, values: np.ndarray) -> None:
    nodes.ggml.ggml_backend_tensor_set(pointer, values.ctypes.data, 0, values.nbytes)


def _softmax(logits: np.ndarray) -> np.ndarray:
    import numpy as np

    shifted: np.ndarray = np.exp(logits - logits.max(axis=1, keepdims=True))
    shifted /= shifted.sum(axis=1, keepdims=True)
    return shifted


def _shares(rows: int, count: int) -> list[slice]:
    step = -(-rows // count)
    return [slice(start, min(rows, start + step)) for start in range(0, rows, step)]


if __name__ == "__main__":
    worker_main(run, SensitivityJob)
