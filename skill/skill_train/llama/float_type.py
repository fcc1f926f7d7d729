"""Chooses the type of a GGUF file's weights by their magnitudes."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from skill_train.core.errors import UsageError
from skill_train.model.weight_files import StoredTensor

OUTTYPES = ("auto", "f16", "bf16", "f32", "q8_0")
F16_LARGEST = 65504.0  # IEEE 754 binary16

# Bytes of a weight in a matrix; q8_0 has blocks of 32 values and one f16 scale. Vectors stay f32 in every file.
BYTES_PER_WEIGHT = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32}

_PIECE = 1 << 20  # weights read at a time: they fit the processor's cache
_AT_ONCE = 2  # tensors read at the same time
_KEEP_BITS = (
    "f16 keeps 10 bits of the mantissa where bf16 keeps 7 (a weight below 6e-5 is rounded by at most 3e-8), "
    "and llama.cpp computes bf16 in bf16"
)


@dataclass(frozen=True)
class WeightType:
    outtype: str  # `f16`, `bf16`, `f32` or `q8_0`
    reason: str  # one sentence
    largest_weight: float | None  # the largest |weight| of all matrices; None if the checkpoint stores no plain floats


def choose(weights: dict[str, StoredTensor], requested: str) -> WeightType:
    """Chooses the type to convert to. Reads every weight once, a block at a time.

    Raises:
        UsageError: a weight is NaN or infinite, or `requested` is f16 and a weight is too large for it.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        sizes = dict(zip(weights, pool.map(largest_magnitude, weights.values()), strict=True))
    bad = [name for name, size in sizes.items() if size is not None and not math.isfinite(size)]
    if bad:
        raise UsageError(
            f"{len(bad)} of {len(sizes)} tensors hold NaN or infinity, such as {bad[0]}",
            code="bad_weights",
            expected="finite weights",
            got=", ".join(bad[:5]),
            hint="the training diverged: check its loss, then train again with a lower learning_rate",
        )
    # The converter keeps vectors (norms, biases) in f32, so only matrices can be too large.
    matrices = {name: size for name, size in sizes.items() if size is not None and len(weights[name].shape) > 1}
    name, largest = max(matrices.items(), key=lambda item: item[1], default=("", None))
    fits = largest is None or largest <= F16_LARGEST
    if requested == "f16" and not fits:
        raise UsageError(
            f"{name} holds a weight of {largest:g}, too large for f16",
            code="bad_weights",
            expected=f"every |weight| <= {F16_LARGEST:g}",
            got=f"{largest:g}",
            hint="export with --quant bf16, or remove f16 from --quant",
        )
    if requested != "auto":
        return WeightType(requested, "asked for", largest)
    stored = {weights[name].dtype for name in weights if len(weights[name].shape) > 1}
    return _automatic(stored, name, largest, fits)


def largest_magnitude(stored: StoredTensor) -> float | None:
    """The largest |value|. It is infinite or NaN if the tensor contains such a value, and None if the tensor is not
    BF16, F16, F32 or F64."""
    import numpy as np

    codes = {"BF16": "<u2", "F16": "<f2", "F32": "<f4", "F64": "<f8"}
    if stored.dtype not in codes:
        return None
    count = stored.elements
    if count == 0:
        return 0.0
    try:
        values = np.memmap(stored.file, dtype=codes[stored.dtype], mode="r", offset=stored.start, shape=(count,))
    except ValueError:  # the file was truncated after its header was read
        raise UsageError(
            f"{stored.file} is incomplete", code="broken_model", expected="a whole file", hint="download it again"
        ) from None
    pieces = (values[start : start + _PIECE] for start in range(0, count, _PIECE))
    if stored.dtype != "BF16":
        return float(np.max([np.abs(piece).max() for piece in pieces]))  # a NaN wins over every number
    # bfloat16 is the upper half of a float32, and without the sign its bits grow with the value.
    bits = max(int((piece & 0x7FFF).max()) for piece in pieces)
    return float(np.uint32(bits << 16).view(np.float32))


def _automatic(stored: set[str], name: str, largest: float | None, fits: bool) -> WeightType:
    kinds = " and ".join(sorted(stored)) or "nothing"
    if not stored <= {"BF16", "F16", "F32", "F64"}:
        return WeightType("bf16", f"the checkpoint stores {kinds}, whose range may exceed that of f16", largest)
    if fits:
        because = _KEEP_BITS if "BF16" in stored else "the usual type for a checkpoint of this precision"
        size = f"the largest weight is {largest:g}" if largest is not None else "there is no matrix"
        return WeightType("f16", f"the checkpoint stores {kinds} and {size}, inside f16's range; {because}", largest)
    if stored == {"BF16"}:
        return WeightType("bf16", f"{name} holds {largest:g}, too large for f16; bf16 holds it exactly", largest)
    return WeightType("f32", f"{name} holds {largest:g}, too large for f16, and bf16 would lose 16 bits", largest)
