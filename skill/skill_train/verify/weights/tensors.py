"""Checks that the weights in a GGUF file are finite, not emptied, and complete.

The weights of a quantized file must also be near the unquantized ones. A figure over all logits only suggests that
something is wrong; this check names the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from skill_train.llama.gguf_header import GgufFile, Tensor
from skill_train.model.adapter import WEIGHTS, read_adapter
from skill_train.model.config import text_config
from skill_train.model.folder import read_config
from skill_train.model.weight_files import FLOAT_BYTES, read_tensor, stored_tensors
from skill_train.run.verify_record import Check
from skill_train.verify.check import problems
from skill_train.verify.weights.rows import PLAIN, Rows, row_errors, too_far, wrong_length

if TYPE_CHECKING:
    import numpy as np

_CHUNK = 1 << 18  # weights at a time, so that they stay in the processor's cache

_ONLY_ZEROS = "holds only zeros"


def check_tensors(
    gguf: GgufFile, *, unquantized: GgufFile | None, needs_output: str, reference: Path, confirmed: bool = False
) -> Check:
    """Reads the weights of every tensor.

    Args:
        confirmed: whether the check `weights` found every tensor of this file and of the unquantized one to be that of
            the trained model, row by row. Such tensors are finite, not emptied and near each other, so they are not
            read again.
        unquantized: the f32, f16 or bf16 file of the same model, when there is one.
        needs_output: why the file must have an output layer of its own; empty if it need not.
        reference: model folder. A matrix of zeros is right if this model has one of the same size.
    """
    faults, worst = [], 0.0
    if needs_output and "output.weight" not in gguf.tensors:
        faults.append(f"output.weight is missing, but {needs_output}")
    for tensor in [] if confirmed else gguf.tensors.values():
        fault, error = _read(gguf, tensor, unquantized)
        if fault == _ONLY_ZEROS and tensor.elements in _zero_sizes(reference):
            continue
        worst = max(worst, error)
        faults += [f"{tensor.name} {fault}"] if fault else []
    looked_at = len(gguf.tensors)
    good = f"{looked_at} tensors are finite and not empty" + ", as `weights` found" * confirmed
    if unquantized is not None:
        faults += [f"{name} is missing" for name in unquantized.tensors if name not in gguf.tensors]
        good += f", none of {unquantized.path.name} is missing"
        good += "" if confirmed else f", the worst row {worst:.2g} from it"
    return problems("tensors", gguf.path.name, faults, looked_at=looked_at, good=good)


def output_of_its_own(reference: Path, adapter: Path | None) -> str:
    """Why the output layer is not the embedding; empty when the two are tied."""
    config = read_config(reference)
    if {**text_config(config), **config}.get("tie_word_embeddings") is False:
        return "config.json has tie_word_embeddings false"
    trained = _trained_ends(adapter) if adapter is not None else []
    return f"the adapter trained {trained[0]}" if trained else ""


def _zero_sizes(folder: Path) -> set[int]:
    """Numbers of elements of the tensors in a model folder that hold only zeros."""
    import torch

    floats = [stored for stored in stored_tensors(folder).values() if stored.dtype in FLOAT_BYTES]
    return {stored.elements for stored in floats if not torch.count_nonzero(read_tensor(stored))}


def _trained_ends(adapter: Path) -> list[str]:
    """Tensors of an adapter that change only the embedding, or only the output layer. Trained rows of the embedding are
    those of a tied output layer too, and so is a matrix that was saved because it got more rows."""
    if not (adapter / WEIGHTS).is_file():
        return []
    tuned = read_adapter(adapter)
    if tuned.config.get("ensure_weight_tying"):
        return []
    rows = {module for module, parts in tuned.modules.items() if parts.keys() == {"token_rows"}}
    tied_rows = rows if any(not module.endswith(("lm_head", "embed_out")) for module in rows) else set()
    changed = [next(iter(parts.values())) for module, parts in tuned.modules.items() if module not in tied_rows]
    changed += [tensor for name, tensor in tuned.replaced.items() if name not in tuned.shared]
    return sorted(
        name for name in changed if any(end in name for end in ("lm_head", "embed_tokens", "embed_out", ".wte."))
    )


def _read(gguf: GgufFile, tensor: Tensor, unquantized: GgufFile | None) -> tuple[str, float]:
    """What is wrong with one tensor (empty if nothing is), and the error of its worst row."""
    import numpy as np

    twin = unquantized.tensors.get(tensor.name) if unquantized is not None else None
    if unquantized is not None and twin is None:
        return f"is not in {unquantized.path.name}", 0.0
    if twin is not None and _without_ones(twin.shape) != _without_ones(tensor.shape):
        return f"has shape {list(tensor.shape)}, {list(twin.shape)} unquantized", 0.0
    largest, worst, fault = 0.0, 0.0, ""
    read, read_twin = weights_of(gguf, tensor), weights_of(unquantized, twin) if unquantized and twin else None
    length: float | None = None
    for rows in row_chunks(tensor.elements // tensor.shape[0], tensor.shape[0]):
        weights = read(rows)
        largest = float(np.maximum(largest, np.abs(weights).max()))  # a NaN wins over every number
        if read_twin is not None:
            expected = Rows(read_twin(rows))
            off = expected.off(weights)
            length = wrong_length(tensor.kind, rows.start, off, expected) if length is None else length
            errors = row_errors(off, expected)
            wrong, worst = too_far(tensor.kind, off, expected, errors), max(worst, float(errors.max()))
            if not fault and wrong.any():
                row = int(wrong.argmax())
                error = f"row {rows.start + row} is {errors[row]:.2g} of its length off"
                fault = f"is not the unquantized one: {error}, more than {tensor.kind} may be"
    if not np.isfinite(largest):
        return "holds values that are not finite", 0.0
    if largest == 0 and len(tensor.shape) > 1:
        return _ONLY_ZEROS, worst
    if not fault and length is not None:
        fault = f"is {length:.3g} times the unquantized one"
    return fault, worst


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    """A shape without its last dimensions of one, which llama.cpp's quantizer drops."""
    sizes = list(shape)
    while len(sizes) > 1 and sizes[-1] == 1:
        sizes.pop()
    return sizes


def row_chunks(count: int, width: int) -> Iterator[slice]:
    """All of `count` rows of `width` weights, a few at a time."""
    step = max(1, _CHUNK // width)
    return (slice(start, min(count, start + step)) for start in range(0, count, step))


def weights_of(gguf: GgufFile, tensor: Tensor) -> Callable[[slice], np.ndarray]:
    """A function from rows to their weights as float32 [rows, row length], which the caller may overwrite.

    The file is mapped as long as the function lives. Mode `c` is for torch, which warns about read-only memory.
    """
    import numpy as np

    row_bytes = tensor.n_bytes // (tensor.elements // tensor.shape[0])
    # A name, because a Path would be resolved for each tensor.
    map_ = np.memmap(str(gguf.path), dtype=np.uint8, mode="c", offset=tensor.offset, shape=(tensor.n_bytes,))
    data = np.asarray(map_).reshape(-1, row_bytes)
    return lambda rows: _widened(data[rows], tensor)


def _widened(stored: np.ndarray, tensor: Tensor) -> np.ndarray:
    """The weights as float32.

    Args:
        stored: uint8 [rows, bytes of a row].
    """
    import numpy as np
    import torch
    from gguf import quants

    if tensor.kind in PLAIN:
        return stored.view(PLAIN[tensor.kind]).astype(np.float32)
    if tensor.kind == "F16":
        widened: np.ndarray = torch.from_numpy(stored.view(np.float16)).float().numpy()  # numpy takes ten times as long
        return widened
    if tensor.kind == "Q8_0":  # a scale in f16, and 32 weights; gguf-py (0.19) takes three times as long
        blocks = torch.from_numpy(stored.reshape(-1, 34))
        scales, weights = blocks[:, :2].view(torch.float16).float(), blocks[:, 2:].view(torch.int8).float()
        widened = weights.mul_(scales).numpy()
    elif tensor.kind == "Q1_0":  # gguf-py (0.19) knows its size only
        widened = _signs(stored)
    else:
        quant = getattr(quants, tensor.kind)  # `quants.dequantize` copies what this gives
        quant.init_grid()
        widened = quant.dequantize_rows(stored).astype(np.float32, copy=False)
    return widened.reshape(len(stored), tensor.shape[0])


def _signs(stored: np.ndarray) -> np.ndarray:
    """The weights of Q1_0. A block is a scale in f16, and the signs of 128 weights (ggml-common.h, block_q1_0)."""
    import numpy as np

    blocks = stored.reshape(-1, 18)
    scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    signs = np.unpackbits(np.ascontiguousarray(blocks[:, 2:]), axis=1, bitorder="little")
    weights: np.ndarray = np.where(signs, scales, -scales)
    return weights
