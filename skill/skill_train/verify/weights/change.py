"""How much of an adapter's change of one weight is in a file.

A change that is smaller than the rounding of the file's type shows in no row. Rounding has nothing to do with the
change: its errors cancel out when they are summed over the weight. Only one does not: a coarse type makes rows shorter,
and the magnitude of DoRA changes their length too. Of such a change only the part across each row is looked at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skill_train.verify.weights.tensors import row_bound

if TYPE_CHECKING:
    import numpy as np

# Of the change. A coarse type makes weights shorter, by the square of its error: that is added.
_TOLERANCE = 0.25
_SIGMAS = 6.0
ENOUGH = 1 << 21  # weights. Of Q4_K they show a change that is a thousandth of the weight


@dataclass
class ChangeSums:
    """Sums over some of the weight, each with the change as a factor.

    Attributes:
        across: the part of the change along each row is left out.
        off: of what the file differs from base and change.
        noise: of the squares of the same.
        rounded: of what a merge in bf16 keeps of the change. It loses a change that is smaller than half a step.
        change: of the change itself.
    """

    across: bool = False
    off: float = 0.0
    noise: float = 0.0
    rounded: float = 0.0
    change: float = 0.0

    def add(self, stored: np.ndarray, expected: np.ndarray, base: np.ndarray) -> None:
        """Adds some rows of the weight, each float32."""
        import numpy as np
        import torch

        with np.errstate(over="ignore", invalid="ignore"):  # `wrong_share` looks for it
            change = expected - base
            if self.across:
                change = _across(change, expected)
            off = (stored - expected) * change
            rounded = torch.from_numpy(np.ascontiguousarray(expected)).bfloat16().float().numpy()
            self.off += float(off.sum())
            self.noise += float(np.vdot(off, off))
            self.rounded += float(np.vdot(rounded - base, change))
            self.change += float(np.vdot(change, change))

    def wrong_share(self, kind: str) -> float | None:
        """The share of the change that a file of this type holds, if it is surely neither all nor what rounding
        keeps."""
        if not self.change or not math.isfinite(self.off + self.rounded + self.change):  # rows show what is no number
            return None
        share, kept = 1 + self.off / self.change, self.rounded / self.change
        room = _TOLERANCE + row_bound(kind) ** 2 + _SIGMAS * math.sqrt(self.noise) / self.change
        return None if min(1.0, kept) - room <= share <= max(1.0, kept) + room else share


def _across(change: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The change without its part along each row."""
    import numpy as np

    squares = np.maximum(np.einsum("ij,ij->i", rows, rows), np.finfo(np.float32).tiny)
    along = np.einsum("ij,ij->i", change, rows) / squares
    return np.asarray(change - along[:, None] * rows)
