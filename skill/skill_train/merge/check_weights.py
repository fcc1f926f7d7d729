"""Checks that every merged tensor is the base's tensor with the adapter's change, and nothing else. Both are read back
from disk and compared row by row, in fp32, a few MB at a time.

The expected change is computed again, from PEFT's names in the adapter's file and the fields of its config. This finds
a single lost row, which the logits of a large model hardly show, and names the tensor. It cannot find a mistake that is
in both computations. `check_logits` can, because it runs PEFT and transformers. It runs if the model is small enough
or the adapter is more than A and B, and `verify` does the same for every exported file.

The error of a row is the length of W' - (W + s·B·A) over the length of the row. Rounding to bf16 errs by at most 2^-9
of a weight, to f16 by 2^-12, and fp32 sums in another order by 1e-6; the bounds are four times as large. A zeroed row
errs by 1, and an exchanged row by 1.4. A small change moves a row by less than rounding does, so the check also counts
the rounded weights that are not the expected ones. The share of the change reveals even smaller errors of the scale.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skill_train.llama.logit_distance import finite
from skill_train.merge.plan import Base, is_conv1d
from skill_train.model.adapter import Adapter, pattern_value
from skill_train.model.weight_files import (
    BLOCK_BYTES,
    Shard,
    StoredTensor,
    read_rows,
    read_shard,
    same_bytes,
    torch_dtype,
    wide_rows,
)
from skill_train.run.merge_record import Gate

ROW_ERROR = {"F64": 1e-5, "F32": 1e-5, "F16": 2**-10, "BF16": 2**-7}
_SMALLEST_F16 = 2.0**-24  # every f16 below 6e-5 errs by up to half of this
_BLOCK = BLOCK_BYTES // 4  # weights at a time
_ROUNDED = ("F16", "BF16")
_ROUNDED_OTHERWISE = 0.05  # the most weights of a row that may be rounded otherwise, as a share of the row
_WRONG_SHARE = 0.25  # how far the share of one tensor may be from the share that rounding kept in all tensors


@dataclass
class WeightComparison:
    """The result of the comparison so far."""

    tensors: int = 0
    changed: int = 0
    seconds: float = 0.0
    worst: tuple[float, str] = (0.0, "")  # the error of the worst row, and its tensor
    other: float = 0.0  # `_rounded_otherwise` of the worst row
    # the sums over rows of along², along·squared, squared², along and squared. For each row, `along` is the product of
    # the actual and the expected change, and `squared` is the product of the expected change with itself.
    sums: tuple[float, ...] = (0.0,) * 5
    failures: list[str] = field(default_factory=list)
    shares: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, other: WeightComparison) -> None:
        """Adds the result for other tensors."""
        for name in ("tensors", "changed", "seconds", "failures"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.worst, self.other = max(self.worst, other.worst), max(self.other, other.other)
        self.sums = tuple(mine + theirs for mine, theirs in zip(self.sums, other.sums, strict=True))
        self.shares |= other.shares


def why_not(base: Base, adapter: Adapter, reasons: list[str]) -> str:
    """Why this comparison is not possible; empty if it is.

    Args:
        reasons: why the merge was not streamed.
    """
    if reasons:
        return reasons[0]
    if adapter.replaced or any(set(parts) != {"a", "b"} for parts in adapter.modules.values()):
        return "the adapter holds more than A and B"
    if adapter.config.get("use_dora") or adapter.config.get("lora_bias"):
        return "the adapter changes more than the product of A and B"
    tensors = base.tensors
    for module in adapter.modules:
        name = f"{module}.weight"
        if name not in tensors:
            return f"the checkpoint stores {module} under another name"
        if is_conv1d(base, name):
            return f"{module} lies transposed in the checkpoint"
    return ""


def scales_of(adapter: Adapter, names: list[str]) -> dict[str, float]:
    """The scale s of each tensor of the base that the adapter changes. Call it in the main thread, because it limits
    the time that patterns of module names may take."""
    return {name: _scale(adapter, name) for name in names if _parts(adapter, name)}


def compare_tensors(
    names: list[str], before: Shard, written: Path, adapter: Adapter, scales: dict[str, float], pool: ThreadPoolExecutor
) -> WeightComparison:
    """Compares tensors of one shard of the base with the file that was written for it, each tensor in one thread."""
    started, after = time.monotonic(), read_shard(written)
    comparison = WeightComparison(
        failures=[f"{name} is not in the base" for name in names if name not in before.tensors]
    )

    def compare(name: str) -> WeightComparison:
        return _compare(name, before.tensors[name], after.tensors.get(name), adapter, scales.get(name))

    for result in pool.map(compare, [name for name in names if name in before.tensors]):
        comparison.add(result)
    comparison.seconds = time.monotonic() - started
    return comparison


def _compare(
    name: str, stored: StoredTensor, new: StoredTensor | None, adapter: Adapter, scale: float | None
) -> WeightComparison:
    comparison, parts = WeightComparison(tensors=1), _parts(adapter, name)
    if new is None or new.shape != stored.shape:
        comparison.failures.append(f"{name} is missing, or has another shape")
    elif scale is not None:
        b, a = (adapter.tensor(parts[kind]).float() for kind in ("b", "a"))
        _compare_changed(name, stored, new, (b * scale, a), comparison)
    elif not _same_values(stored, new):
        comparison.failures.append(f"{name} differs from the base's, although the adapter does not change it")
    return comparison


def outcome(comparison: WeightComparison, *, stored: str, kept_share: float | None) -> Gate:
    """Figures, limits, failures and verdict, in the form of `check_logits.gate`.

    Args:
        stored: safetensors' dtype of the changed weights.
        kept_share: the share of the change that remained after rounding, according to the writer.
    """
    share, width = share_of(comparison.sums)
    expected = 1.0 if kept_share is None else kept_share
    tolerance = 0.05 + abs(1 - expected) / 2
    failures = list(comparison.failures)
    if comparison.sums[4]:
        if not abs(share - expected) - width <= tolerance:
            failures.append(f"{share:.3g} of the adapter is in the merged model, expected {expected:.3f} ± {tolerance}")
        elif expected < 0.5:
            failures.append(f"rounding leaves only {expected:.2f} of the adapter in the stored weights")
        failures += _wrong_shares(comparison, expected)
    return {
        "by": "weights",
        "stored_dtype": stored,
        "figures": {"tensors": comparison.tensors, "changed": comparison.changed,
                    "worst_row": finite(comparison.worst[0]), "worst_tensor": comparison.worst[1],
                    "rounded_otherwise": comparison.other},
        "effect": {"share": finite(share), "share_half_width": finite(width),
                   "kl_between": None if comparison.sums[4] else 0.0},
        "limits": {"worst_row": ROW_ERROR[stored], "rounded_otherwise": _ROUNDED_OTHERWISE, "share": expected,
                   "share_tolerance": tolerance},
        "failures": failures,
        "verdict": "fail" if failures else "pass",
        "seconds": round(comparison.seconds, 2),
    }  # fmt: skip


def share_of(sums: tuple[float, ...]) -> tuple[float, float]:
    """The share of the change, with the half width of its 95 % interval (the error of a ratio over rows)."""
    aa, ab, bb, along, squared = sums
    if not squared:
        return math.nan, math.nan
    share = along / squared
    return share, 1.96 * math.sqrt(max(0.0, aa - 2 * share * ab + share**2 * bb)) / squared


def _wrong_shares(comparison: WeightComparison, expected: float) -> list[str]:
    tolerance = _WRONG_SHARE + abs(1 - expected)
    wrong = [
        f"{share:.3g} of the adapter is in {name}"
        for name, (share, width) in comparison.shares.items()
        if abs(share - expected) - width > tolerance
    ]
    return wrong[:3]


def _parts(adapter: Adapter, name: str) -> dict[str, str]:
    """The adapter's tensors for a tensor of the base; empty if the adapter does not change it."""
    return adapter.modules.get(name.removesuffix(".weight"), {}) if name.endswith(".weight") else {}


def _scale(adapter: Adapter, name: str) -> float:
    module, config = name.removesuffix(".weight"), adapter.config
    rank = pattern_value(config["rank_pattern"], module, config["r"])
    alpha = pattern_value(config["alpha_pattern"], module, config["lora_alpha"])
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _compare_changed(
    name: str, stored: StoredTensor, new: StoredTensor, change: tuple[Any, Any], comparison: WeightComparison
) -> None:
    """Compares one changed tensor. Args: change: s·B [out, r] and A [r, in], fp32."""
    import torch

    b, a = change
    if (len(b), a.shape[1]) != stored.shape:
        comparison.failures.append(f"{name} is {list(stored.shape)}, the adapter's change {[len(b), a.shape[1]]}")
        return
    columns, bound = stored.shape[1], ROW_ERROR.get(new.dtype, 0.0)
    smallest = _SMALLEST_F16 * math.sqrt(columns) if new.dtype == "F16" else 0.0
    other, most = 0.0, max(1, _BLOCK // max(1, columns))
    product, expected, spare = (torch.empty(most, columns) for _ in range(3))
    rounded = torch.empty(most, columns, dtype=torch_dtype(new.dtype))
    errors, lengths, along = (torch.empty(len(b)) for _ in range(3))
    norm = torch.linalg.vector_norm
    with wide_rows(stored, most) as read, wide_rows(new, most) as read_new:
        for start, stop in _blocks(*stored.shape):
            here, (_, before), (as_stored, there) = slice(0, stop - start), read(start, stop), read_new(start, stop)
            exact = torch.mm(b[start:stop], a, out=product[here])
            should = torch.add(before, exact, out=expected[here])
            if new.dtype in _ROUNDED:
                other = _rounded_otherwise(as_stored, rounded[here].copy_(should), other)
            rows, error = slice(start, stop), there.sub_(should)
            norm(error, dim=1, out=errors[rows]), norm(should, dim=1, out=lengths[rows])
            torch.sum(torch.mul(error, exact, out=spare[here]), dim=1, out=along[rows])
    worst, squared = _worst(errors - smallest, lengths), _row_squares(b, a)
    along = along.double() + squared
    sums = torch.stack([along @ along, along @ squared, squared @ squared, along.sum(), squared.sum()])
    comparison.changed, comparison.worst, comparison.other = 1, (worst, name), other
    comparison.sums = tuple(sums.tolist())
    comparison.shares = {name: share_of(comparison.sums)}
    if not worst <= bound:
        comparison.failures.append(f"a row of {name} is {worst:.2g} of its length off, {new.dtype} may be {bound:.2g}")
    elif other > _ROUNDED_OTHERWISE:
        comparison.failures.append(f"{other:.0%} of a row of {name} are not base + adapter, rounded to {new.dtype}")


def _worst(errors: Any, lengths: Any) -> float:
    """The largest error of a row relative to its length. A row that should be zero but is not has an infinite error."""
    import torch

    off = torch.where(errors <= 0, 0.0, errors / lengths.clamp_min(torch.finfo(torch.float32).tiny))
    return float(torch.nan_to_num(off, nan=math.inf).max()) if len(off) else 0.0


def _rounded_otherwise(there: Any, expected: Any, least: float) -> float:
    """The largest share of a row's weights that differ from the expected rounded ones. Three weights of a row do not
    count, because fp32 sums in another order round one in thousands to its neighbour. If the change is missing, all
    weights count that it would have moved.

    Args:
        there, expected: [rows, columns] in a type of two bytes, compared without conversion.
        least: the least result, which is the share of earlier rows.
    """
    import numpy as np
    import torch

    columns = int(there.shape[1])
    wrong = there.view(torch.int16).numpy() != expected.view(torch.int16).numpy()
    if np.count_nonzero(wrong) - 3 <= least * columns:  # even if all were in one row
        return least
    return max(least, (int(np.count_nonzero(wrong, axis=1).max()) - 3) / columns)


def _row_squares(b: Any, a: Any) -> Any:
    """The square of the length of each row of B·A, float64 [out], without computing B·A: b·(A·Aᵀ)·bᵀ."""
    b, a = b.double(), a.double()
    return ((b @ (a @ a.T)) * b).sum(dim=1)


def _same_values(stored: StoredTensor, new: StoredTensor) -> bool:
    """Whether the tensor has the base's values, in its dtype or rounded to the new one."""
    import torch

    if stored.dtype == new.dtype:
        return same_bytes(stored, new)
    for start, stop in _blocks(stored.elements, 1):
        before, after = (read_rows(tensor.flat, start, stop) for tensor in (stored, new))
        if not torch.equal(before.to(torch_dtype(new.dtype)), after):
            return False
    return True


def _blocks(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    step = max(1, _BLOCK // max(1, columns))
    return ((start, min(rows, start + step)) for start in range(0, rows, step))
