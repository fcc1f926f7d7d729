"""How far a weight in a file may be from the model's, because it was rounded to the types that it passed through.

For an unquantized type each weight is compared with the error of that rounding. For a quantized type the error of each
row is compared with the bounds in `tensors`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skill_train.verify.weights.tensors import PLAIN, row_bounds, row_errors

if TYPE_CHECKING:
    import numpy as np

# Half the distance of two neighbours, relative to the number: 24, 11 and 8 bits. F32 has room for sums in another
# order, and for the exp of another library.
_RELATIVE = {**dict.fromkeys(PLAIN, 2**-21), "F16": 2**-11, "BF16": 2**-8}
_SUBNORMAL = {"F16": 2**-25}
_MERGED = 2**-8  # an adapter may have been merged in bf16
_PRODUCT = 1e-5  # of the row's largest weight: s·B·A in another order
_COMPUTED = 2**-10  # the converter adds and takes exp in f16 if the model is stored in f16


def errors(
    kind: str, weights: np.ndarray, expected: np.ndarray, *, tuned: bool, computed: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The length of each row's error divided by the length of the row, and whether it is too large.

    Args:
        tuned: the model is base and adapter, and the file was made of a merge.
        computed: the converter did more than move the weights.
    """
    import numpy as np

    distances = row_errors(weights, expected)
    if kind not in _RELATIVE:
        return distances, ~(distances <= row_bounds(kind, expected))
    size = np.abs(expected)
    most = size + 1 if computed else size
    most = most * np.float32(_RELATIVE[kind] + _MERGED * tuned + _COMPUTED * computed)
    most += np.float32(_SUBNORMAL.get(kind, 0.0))
    if tuned:
        most += size.max(axis=1, keepdims=True) * np.float32(_PRODUCT)
    with np.errstate(invalid="ignore"):  # of an infinite weight, which is never near enough
        return distances, ~(np.abs(weights - expected) <= most).all(axis=1)
