"""Reads and writes importance matrices in the format of llama.cpp's tools: a GGUF file of the type `imatrix`.

For each matrix NAME of the model the file holds NAME.in_sum2, the sums of the squares of the inputs [counts, columns],
and NAME.counts, the number of inputs that were summed. Format: tools/imatrix/imatrix.cpp and
common/imatrix-loader.cpp in llama-cpp-python 0.3.36. Two metadata keys are our own: the sha256 of the model's file, and
the sha256 of the token ids. Other readers ignore them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING

from skill_train.core.errors import UsageError, VerificationFailed, quoted
from skill_train.llama.gguf_header import GgufFile, Tensor, read_gguf

if TYPE_CHECKING:
    import numpy as np

_SUMS, _COUNTS, _MEANS = ".in_sum2", ".counts", ".in_sum"  # newer llama.cpp writes the third; it is not read here
_MODEL_KEY, _DATA_KEY = "skill_train.imatrix.model_sha256", "skill_train.imatrix.data_sha256"
_SHOWN = 300  # characters of a reason: a name in the file may have any length
_LEAST = 1e-6  # the least importance of a column, as a share of the mean: blocks of columns without any become NaN
_USUAL = 1e12  # with means between 1 / this and this, the quantizer rounds as with means of 1
# Matrices of layers that the quantizer never rounds (tensor_allows_quantization in src/llama-quant.cpp).
_NEVER_QUANTIZED = (
    "_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d", "shortconv.conv.weight", "attn_rel_b.weight", "altup",
    "laurel",
    "time_mix_first", "time_mix_w0", "time_mix_w1", "time_mix_w2", "time_mix_v0", "time_mix_v1", "time_mix_v2",
    "time_mix_a0", "time_mix_a1", "time_mix_a2", "time_mix_g1", "time_mix_g2", "time_mix_decay_w", "time_mix_lerp",
    "per_layer_model_proj", "indexer.k_proj", "indexer.q_proj", "ffn_gate_tid2eid",
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """The sums and counts for one matrix tensor of the model. A mixture has one count for each expert."""

    sums: np.ndarray  # float32 [matrices, columns]
    counts: np.ndarray  # float32 [matrices], or [1] for all of them

    def means(self) -> np.ndarray:
        """The means of the squares, float32 [matrices x columns], for the quantizer. An expert without any input has
        the same mean for every column, as in llama.cpp's load_imatrix (tools/quantize/quantize.cpp).

        Only the proportions matter. Very large or small means are scaled by a power of two, because the quantizer's
        sums would leave the range of float32: with means of 3e38 or 1e-44 it rounds all weights of a block to nearly 0.
        """
        import numpy as np

        counts = np.broadcast_to(self.counts[:, None], (len(self.sums), 1))
        counted = (counts > 0) & self.sums.any(axis=1, keepdims=True)
        means = np.where(counted, self.sums / np.maximum(counts, 1), 1.0)
        centres = means.mean(axis=1, keepdims=True, dtype=np.float64)
        usual = (centres > 1 / _USUAL) & (centres < _USUAL)
        means = (means * np.where(usual, 1.0, np.exp2(-np.round(np.log2(centres))))).astype(np.float32)
        floored: np.ndarray = np.maximum(means, _LEAST * means.mean(axis=1, keepdims=True))
        return floored.astype(np.float32).ravel()


@dataclass(frozen=True)
class ImportanceMatrix:
    """The entries by the name of the matrix, and the data that they were computed from."""

    entries: dict[str, Entry]
    datasets: list[str]  # names of the data, without folders
    chunk_count: int
    chunk_size: int
    # model, data: sha256 of the model's file and of the token ids; empty if another program wrote the matrix
    model: str = ""
    data: str = ""


def wanted_matrices(gguf: GgufFile) -> dict[str, Tensor]:
    """The matrices of layers that a quantizer rounds. As in llama.cpp's tool, embedding and output are left out."""
    return {
        name: tensor
        for name, tensor in gguf.tensors.items()
        if name.startswith("blk.") and name.endswith("weight") and len(tensor.shape) > 1
        if not any(part in name for part in _NEVER_QUANTIZED)
    }


def shape_of(tensor: Tensor) -> tuple[int, int]:
    """The number of matrices in a tensor, and the columns of each."""
    return tensor.elements // (tensor.shape[0] * tensor.shape[1]), tensor.shape[0]


def write_matrix(path: Path, matrix: ImportanceMatrix) -> None:
    """Writes to `path` directly. The caller gives the file its final name."""
    import numpy as np
    from gguf import GGUFWriter

    writer = GGUFWriter(str(path), "")
    writer.kv_data[0].clear()  # a matrix has no architecture
    writer.add_type("imatrix")
    # As bytes, because a file name may not be UTF-8.
    writer.add_array("imatrix.datasets", [name.encode("utf-8", "surrogateescape") for name in matrix.datasets])
    writer.add_uint32("imatrix.chunk_count", matrix.chunk_count)
    writer.add_uint32("imatrix.chunk_size", matrix.chunk_size)
    for key, value in ((_MODEL_KEY, matrix.model), (_DATA_KEY, matrix.data)):
        if value:
            writer.add_string(key, value)
    for name in sorted(matrix.entries):
        entry = matrix.entries[name]
        writer.add_tensor(name + _SUMS, entry.sums.reshape(len(entry.counts), -1).astype(np.float32))
        writer.add_tensor(name + _COUNTS, entry.counts[:, None].astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_matrix(path: Path) -> ImportanceMatrix:
    """Reads and checks an importance matrix.

    Raises:
        UsageError: the file is not an importance matrix, is damaged, or holds numbers that cannot be sums of squares.
    """
    if not path.is_file():
        raise _no_matrix(path, "no such file" if not path.exists() else "it is not a file")
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise _no_matrix(path, error.strerror or str(error)) from None
    if magic != b"GGUF":
        raise _no_matrix(path, "it does not begin with GGUF: perhaps it is in llama.cpp's older form, .dat or .imatrix")
    try:
        gguf = read_gguf(path)
    except VerificationFailed as error:
        raise _no_matrix(path, error.message) from None
    kind = gguf.metadata.get("general.type", "model")
    if kind != "imatrix":
        raise _no_matrix(path, f"general.type is {kind!r}")
    numbers = [gguf.metadata.get(f"imatrix.{key}") for key in ("chunk_count", "chunk_size")]
    if not all(isinstance(number, int) and 0 <= number < 2**31 for number in numbers):
        raise _no_matrix(path, "imatrix.chunk_count or imatrix.chunk_size is missing")
    names = {tensor.removesuffix(_SUMS) for tensor in gguf.tensors if tensor.endswith(_SUMS)}
    expected = {name + part for name in names for part in (_SUMS, _COUNTS, _MEANS)}
    odd = [tensor for tensor in gguf.tensors if tensor not in expected]
    odd += [name + _COUNTS for name in names if name + _COUNTS not in gguf.tensors]
    if odd or not names:
        raise _no_matrix(path, f"{odd[0]} has no partner" if odd else "it has no entry")
    entries = {name: _entry(gguf, name) for name in sorted(names)}
    return ImportanceMatrix(
        entries,
        [_without_folder(name) for name in gguf.strings("imatrix.datasets")],
        int(numbers[0] or 0),  # type: ignore[arg-type]
        int(numbers[1] or 0),  # type: ignore[arg-type]
        str(gguf.metadata.get(_MODEL_KEY, "")),
        str(gguf.metadata.get(_DATA_KEY, "")),
    )


def require_fit(path: Path, matrix: ImportanceMatrix, model: GgufFile) -> list[str]:
    """Checks that the importance matrix fits the model. Returns the names of the model's matrices without an entry.

    Raises:
        UsageError: an entry has another name or width than the model's matrices, or no matrix of a layer has an entry.
    """
    matrices = wanted_matrices(model)
    for name, entry in matrix.entries.items():
        tensor = model.tensors.get(name)
        if tensor is None or len(tensor.shape) < 2:
            raise _other_model(path, model, f"{name} is not a matrix of the model")
        count, columns = shape_of(tensor)
        if entry.sums.size != count * columns or len(entry.counts) not in (1, count):
            shape = f"{len(entry.counts)} x {entry.sums.size // len(entry.counts)}"
            raise _other_model(path, model, f"{name} has {count} x {columns} columns, and the entry {shape}")
    missing = [name for name in matrices if name not in matrix.entries]
    if len(missing) == len(matrices):
        raise _other_model(path, model, "it has an entry for no matrix of a layer")
    return missing


def _without_folder(name: str) -> str:
    """The file name of the data. llama.cpp's tool writes an absolute path, which is private to its user."""
    for path in (PurePosixPath(name), PureWindowsPath(name)):
        if path.is_absolute():
            return path.name
    return name


def _entry(gguf: GgufFile, name: str) -> Entry:
    import numpy as np

    sums, counts = (_values(gguf, gguf.tensors[name + part]) for part in (_SUMS, _COUNTS))
    if not sums.size or sums.size % max(1, counts.size):
        raise _no_matrix(gguf.path, f"{name} has {sums.size} sums and {counts.size} counts")
    if not (np.isfinite(sums).all() and np.isfinite(counts).all()):
        raise _no_matrix(gguf.path, f"{name} holds NaN or infinity")
    if (sums < 0).any() or (counts < 0).any():
        raise _no_matrix(gguf.path, f"{name} holds negative numbers, which sums of squares cannot be")
    if not counts.any() or not sums.any():
        raise _no_matrix(
            gguf.path, f"{name} was computed of nothing: its {'counts' if sums.any() else 'sums'} are zeros"
        )
    return Entry(sums.reshape(counts.size, -1), counts)


def _values(gguf: GgufFile, tensor: Tensor) -> np.ndarray:
    import numpy as np

    if tensor.kind != "F32":
        raise _no_matrix(gguf.path, f"{tensor.name} is {tensor.kind}, not F32")
    with open(gguf.path, "rb") as file:
        file.seek(tensor.offset)
        data = file.read(tensor.n_bytes)
    if len(data) != tensor.n_bytes:
        raise _no_matrix(gguf.path, f"it ends inside {tensor.name}")
    return np.frombuffer(data, dtype="<f4")


def _no_matrix(path: Path, why: str) -> UsageError:
    why = why[:_SHOWN]
    return UsageError(
        f"{path} is not an importance matrix that can be used: {why}",
        code="cannot_quantize",
        expected="a GGUF file of llama.cpp's llama-imatrix, or of export-gguf --imatrix auto",
        got=why,
        hint="llama-imatrix turns an older file into a GGUF file; or compute one of the run's rows: --imatrix auto",
    )


def _other_model(path: Path, model: GgufFile, why: str) -> UsageError:
    why = why[:_SHOWN]
    return UsageError(
        f"the importance matrix {path} is not of this model: {why}",
        code="cannot_quantize",
        expected=f"an importance matrix of {model.path.name}",
        got=why,
        hint=f"compute one of this model: --imatrix auto, or llama-imatrix -m {quoted(model.path)}",
    )
