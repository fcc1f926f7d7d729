"""How far rows of a file may be from those of the model, because of the types that they were rounded to on the way.

- For an unquantized type each weight is compared with the error of that rounding.
- For a quantized type the error of each row is compared with a bound, and the length of all rows with 1.
- A change by the adapter that is smaller than the rounding shows in no row. Rounding has nothing to do with the change:
  its errors cancel out when they are summed over the weight. Only one does not: a coarse type makes rows shorter, and
  the magnitude of DoRA changes their length too. Of such a change only the part across each row is looked at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

# Types that numpy reads as they lie, which round nothing. Whole numbers are in tables, such as that of fixed experts.
PLAIN = {"F32": "<f4", "F64": "<f8", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
# Half the distance of two neighbours, relative to the number: 24, 11 and 8 bits. F32 has room for sums in another
# order, and for the exp of another library.
_RELATIVE = {**dict.fromkeys(PLAIN, 2**-21), "F16": 2**-11, "BF16": 2**-8}
_SUBNORMAL = {"F16": 2**-25}
_MERGED = 2**-8  # an adapter may have been merged in bf16
_PRODUCT = 1e-5  # of the row's largest weight: s·B·A in another order
_COMPUTED = 2**-10  # the converter adds and takes exp in f16 if the model is stored in f16

# Largest error of one row relative to its length (root of summed squares), by storage type. Rounding to b bits in
# blocks errs by about 2^-b of the block's largest weight; the factor 3 covers rows with few large weights. A row that
# is zeroed errs by 1, one that is exchanged for another by 1.4. Measured on normal weights: Q8_0 0.006, Q6_K 0.02,
# Q5_K 0.04, Q4_K 0.08, Q3_K 0.17, Q2_K 0.32.
_ROW_ERROR = {"Q8": 0.03, "Q6": 0.08, "Q5": 0.15, "Q4": 0.3, "MX": 0.4, "NV": 0.4, "Q3": 0.55}
_WIDEST_ROW_ERROR = 0.8
_FLOATS = {**dict.fromkeys(PLAIN, 1e-6), "F16": 2e-3, "BF16": 1e-2}
# The error of the scale of a block when its weights are almost zero, as embeddings of untrained tokens are: half of the
# smallest number in f16, times the largest factor (Q6_K: 127 * 32).
_LEAST = {**dict.fromkeys(PLAIN, 0.0), "BF16": 0.0, "F16": 2**-25, "Q8_0": 2**-25 * 128}
_LEAST_OF_OTHERS = 2**-25 * 4096
# How far the length of quantized rows may be off 1. llama.cpp made them shorter by at most 5.5 times the square of the
# error (MXFP4; others 4.2), for weights with heavy tails and outliers, and importances from 1 to 1e6.
_OFF, _SHORTER, _SIGMAS = 0.01, 6.0, 6.0
_ENOUGH = 1 << 16  # weights of the last rows of a tensor
# Each weight is the nearest of -1, 0 and 1 times the largest of its 256, in f16. bf16 may have rounded it before.
_TERNARY, _NEAR = ("TQ1_0", "TQ2_0"), 2**-8 + 2**-10
_PART, _SHORTEST_PART = 256, 64  # weights of a row that are compared apart: a block of K-quants, or 8 of other types

# For the share of the adapter's change in the file. A coarse type makes weights shorter: its squared error is added.
_TOLERANCE = 0.25
ENOUGH_OF_CHANGE = 1 << 21  # weights. Of Q4_K they show a change that is a thousandth of the weight


class Rows:
    """Some rows of a weight of the model, float32 [rows, width]. What follows from them alone is computed once, and not
    for each file.

    Attributes:
        base: the same rows without the adapter's change; None where they are not looked at.
        across: the part of the change along each row is left out.
    """

    def __init__(self, values: np.ndarray, base: np.ndarray | None = None, *, across: bool = False) -> None:
        self.values, self.base, self.across = values, base, across

    def off(self, stored: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """The rows of a file minus these, in the memory of `out`, which may be `stored`."""
        import numpy as np

        with np.errstate(over="ignore", invalid="ignore"):
            off: np.ndarray = np.subtract(stored, self.values, out=out)
            return off

    @cached_property
    def squares(self) -> np.ndarray:
        """The square of the length of each row; infinite where float32 has no such number."""
        import numpy as np

        with np.errstate(over="ignore", invalid="ignore"):
            squares: np.ndarray = np.vecdot(self.values, self.values)
            return squares

    @cached_property
    def lengths(self) -> np.ndarray:
        import numpy as np

        lengths: np.ndarray = np.maximum(np.sqrt(self.squares), np.finfo(np.float32).tiny)
        return lengths

    @cached_property
    def parts(self) -> Rows:
        """Equal parts of the rows, one after the other. Of a length without small enough divisors, the rows."""
        width = math.gcd(self.values.shape[1], _PART)
        return Rows(self.values.reshape(-1, width)) if width >= _SHORTEST_PART else self

    @cached_property
    def sizes(self) -> np.ndarray:
        import numpy as np

        sizes: np.ndarray = np.abs(self.values)
        return sizes

    @cached_property
    def change(self) -> np.ndarray:
        """The adapter's change of these rows, which need a `base`."""
        import numpy as np

        change: np.ndarray = self.values - self.base
        if self.across:
            along = np.vecdot(change, self.values) / np.maximum(self.squares, np.finfo(np.float32).tiny)
            change -= along[:, None] * self.values
        return change

    @cached_property
    def change_squared(self) -> float:
        return _dot(self.change, self.change)

    @cached_property
    def change_kept(self) -> float:
        """What a merge in bf16 keeps of `change_squared`. It loses a change that is smaller than half a step."""
        import numpy as np
        import torch

        rounded = torch.from_numpy(np.ascontiguousarray(self.values)).bfloat16().float().numpy()
        rounded -= self.base
        return _dot(rounded, self.change)


def row_errors(off: np.ndarray, rows: Rows) -> np.ndarray:
    """The length of each row's error divided by the length of the row; 0 for rows that are zero in both. It is infinite
    where there is no number, or one that is too large for float32's squares.

    Args:
        off: the result of `rows.off`.
    """
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):
        error = np.sqrt(np.vecdot(off, off))
        errors: np.ndarray = np.where(error == 0, 0.0, error / rows.lengths)
    errors[np.isnan(errors)] = np.inf  # no comparison would ever choose it
    return errors


def row_bound(kind: str) -> float:
    """The largest allowed error of a row of usual length, relative to its length."""
    if kind in _FLOATS:
        return _FLOATS[kind]
    return _ROW_ERROR.get(kind.removeprefix("I")[:2], _WIDEST_ROW_ERROR)


def row_bounds(kind: str, rows: Rows) -> np.ndarray:
    """The largest allowed error of each row, relative to its length; wider for rows that are almost zero."""
    least = _LEAST.get(kind, _LEAST_OF_OTHERS) * math.sqrt(rows.values.shape[1])
    bounds: np.ndarray = row_bound(kind) + least / rows.lengths
    return bounds


def too_far(kind: str, off: np.ndarray, rows: Rows, distances: np.ndarray) -> np.ndarray:
    """Whether each row is further off than its type explains; `distances` are its `row_errors`."""
    import numpy as np

    near: np.ndarray = distances <= row_bounds(kind, rows)
    if kind in _TERNARY:
        values, largest = rows.parts.values, rows.parts.sizes.max(axis=1)
        off, room = off.reshape(values.shape), _NEAR * largest + 2 * _SUBNORMAL["F16"]
        blocks = np.abs(off).max(axis=1) <= largest / 2 + room
        blocks &= np.abs(np.abs(values + off).max(axis=1) - largest) <= room
        near = np.logical_and.reduce(blocks.reshape(len(distances), -1), axis=1)
    return ~near


def errors(kind: str, off: np.ndarray, rows: Rows, *, tuned: bool, computed: bool) -> tuple[np.ndarray, np.ndarray]:
    """`row_errors`, and whether each row is too far off.

    Args:
        tuned: the model is base and adapter, and the file was made of a merge.
        computed: the converter did more than move the weights.
    """
    import numpy as np

    distances = row_errors(off, rows)
    if kind not in _RELATIVE:
        return distances, too_far(kind, off, rows, distances)
    most = rows.sizes + 1 if computed else rows.sizes
    most = most * np.float32(_RELATIVE[kind] + _MERGED * tuned + _COMPUTED * computed)
    with np.errstate(invalid="ignore"):  # of an infinite weight, which is never near enough
        of_row = rows.sizes.max(axis=1) * np.float32(_PRODUCT * tuned) + np.float32(_SUBNORMAL.get(kind, 0.0))
        beyond = np.abs(off)
        beyond -= most
        return distances, ~(beyond.max(axis=1) <= of_row)


def wrong_part(kind: str, off: np.ndarray, rows: Rows) -> tuple[int, int, float] | None:
    """The first part of a row that is further off than a row may be: the row, the part's first weight, and its error;
    None if there is none. A few blocks of zeros are less than a long row may be off.

    It is for quantized types of 4 bits and more, and for files without an importance matrix: other right parts may be
    as far off (measured: Q2_K 1.0 of normal weights with columns of log-normal size, Q4_K 0.35 with importances).
    """
    if kind in _FLOATS or row_bound(kind) > _ROW_ERROR["Q4"]:
        return None
    parts = rows.parts
    width, distances = parts.values.shape[1], row_errors(off.reshape(parts.values.shape), parts)
    wrong = ~(distances <= row_bounds(kind, parts))
    if not wrong.any():
        return None
    first = int(wrong.argmax())
    return *divmod(first * width, rows.values.shape[1]), float(distances[first])


def wrong_length(kind: str, start: int, off: np.ndarray, rows: Rows) -> float | None:
    """The factor between rows from `start` of a quantized tensor and the model's, if it is surely not 1; else None."""
    import numpy as np

    if kind in (*_FLOATS, *_TERNARY) or (start and off.size < _ENOUGH):
        return None
    with np.errstate(all="ignore"):
        squares, along = rows.squares.sum(dtype=np.float64), _dot(off, rows.values)
        length = 1 + along / squares
        if not abs(length - 1) > _OFF:  # the rest only widens that
            return None
        error = np.maximum(0, (squares + 2 * along + _dot(off, off)) / squares / length**2 - 1)
        products = off * rows.values
        noise = np.sqrt(_dot(products, products)) / squares
        least = _LEAST.get(kind, _LEAST_OF_OTHERS) * np.sqrt(off.size / squares)
        return float(length) if abs(length - 1) > _OFF + _SHORTER * error + _SIGMAS * noise + least else None


@dataclass
class ChangeSums:
    """How much of the adapter's change of one weight is in a file: sums of products with the change, over some of its
    rows.

    Attributes:
        off: the file's difference from base and change, times the change.
        noise: the squares of these products.
        kept: what a merge in bf16 keeps of the change, times the change.
        change: the change, times itself.
    """

    off: float = 0.0
    noise: float = 0.0
    kept: float = 0.0
    change: float = 0.0

    def add(self, off: np.ndarray, rows: Rows) -> None:
        """Adds some rows of the weight.

        Args:
            off: the result of `rows.off`.
        """
        import numpy as np

        with np.errstate(over="ignore", invalid="ignore"):  # `wrong_share` looks for it
            self.off += _dot(off, rows.change)
            noise = off * rows.change
            self.noise += _dot(noise, noise)
            self.kept += rows.change_kept
            self.change += rows.change_squared

    def wrong_share(self, kind: str) -> float | None:
        """The share of the change that a file of this type holds, if it is surely neither all nor what rounding
        keeps."""
        if kind in _TERNARY or not self.change or not math.isfinite(self.off + self.kept + self.change):
            return None  # rows show what is no number
        share, survived = 1 + self.off / self.change, self.kept / self.change
        room = _TOLERANCE + row_bound(kind) ** 2 + _SIGMAS * math.sqrt(self.noise) / self.change
        return None if min(1.0, survived) - room <= share <= max(1.0, survived) + room else share


def _dot(a: np.ndarray, b: np.ndarray) -> float:
    """The inner product of all rows. One product of so many numbers would start threads of its own."""
    import numpy as np

    return float(np.vecdot(a, b).sum(dtype=np.float64))
