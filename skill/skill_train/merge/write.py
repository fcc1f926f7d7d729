"""Writes the weights of a merge plan: new shards with the base's names, a block of rows at a time, and their index.

Several tensors are processed at once, each by one thread, because torch cannot divide a small block among threads. The
sums in `Tally` are added in the order of the file, so they do not depend on the number of threads.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from skill_train.core.console import Bar
from skill_train.core.errors import VerificationFailed
from skill_train.core.files import write_json
from skill_train.machine.read import physical_cores
from skill_train.merge.plan import Base, MergePlan
from skill_train.model.lora_math import Change, apply
from skill_train.model.weight_files import (
    BLOCK_BYTES,
    FLOAT_BYTES,
    Shard,
    StoredTensor,
    copy_bytes,
    in_order,
    new_shard,
    read_rows,
    tensor_bytes,
    torch_dtype,
    wide_rows,
    written_to,
)
from skill_train.program.model_files import INDEX
from skill_train.run.merge_record import Changes
from skill_train.run.records import read_json

Layout = dict[str, dict[str, tuple[str, tuple[int, ...]]]]
_PART_BYTES = 1 << 28
_AT_ONCE = 4  # tensors at once; more would not help, because only one thread at a time can write to a file
_COARSENESS = ("F64", "F32", "F16", "BF16")


@dataclass
class Tally:
    """The sums over the written tensors."""

    changed: int = 0  # the number of tensors that the adapter changed
    converted: int = 0  # the number of tensors that only got another dtype
    stored_dtype: str = "F32"  # the coarsest dtype of the changed and converted tensors; F32 if there are none
    # base_square, change_square: sums of squares of the base's values and of the exact change, over changed tensors
    base_square: float = 0.0
    change_square: float = 0.0
    kept_product: float = 0.0  # the sum of the stored change times the exact change, which shows what rounding left
    stored_square: float = 0.0  # the sum of squares of the stored change

    def changes(self) -> Changes:
        """The figures for the record. `kept_after_rounding` is the share of the change that is stored.
        `rounding_error_of_change` is the length of the difference between stored and exact change, over the length of
        the exact change. Both are None without a change. All three ratios are None if a sum exceeds fp32.

        A bf16 weight moves in steps of 1/256 to 1/128 of its size, so smaller changes are lost, not averaged out.
        """
        error = self.stored_square - 2 * self.kept_product + self.change_square
        base, change = (each if math.isfinite(error) else 0.0 for each in (self.base_square, self.change_square))
        return {
            "changed_tensors": self.changed,
            "converted_tensors": self.converted,
            "stored_dtype": self.stored_dtype,
            "change_of_weights": math.sqrt(change / base) if base else None,
            "kept_after_rounding": self.kept_product / change if change else None,
            "rounding_error_of_change": math.sqrt(max(0.0, error) / change) if change else None,
        }

    def note(self, dtype: str) -> None:
        self.stored_dtype = max(self.stored_dtype, dtype, key=_COARSENESS.index)

    def add(self, other: Tally) -> None:
        """Adds the sums of another tensor."""
        self.note(other.stored_dtype)
        for name in ("changed", "converted", "base_square", "change_square", "kept_product", "stored_square"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@contextlib.contextmanager
def computing_threads() -> Iterator[ThreadPoolExecutor]:
    """A pool of threads in which torch uses one thread each, because dividing each small block would be slower."""
    import torch

    before = torch.get_num_threads()
    count = min(_AT_ONCE, physical_cores())
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            try:
                yield pool
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        torch.set_num_threads(before)


class Target(NamedTuple):
    """The folder to write to, and safetensors' dtype for every float tensor; None keeps the dtype of each tensor."""

    folder: Path
    dtype: str | None


def write_shards(
    base: Base,
    plan: MergePlan,
    target: Target,
    bar: Bar,
    pool: ThreadPoolExecutor,
    on_written: Callable[[Shard, Path, list[str]], None] = lambda shard, file, names: None,
) -> Tally:
    """Writes all shards and the index into the folder of `target`.

    Args:
        pool: the threads of `computing_threads`.
        on_written: called with a shard of the base, the new file, and the names of tensors that were just written to
            it, while these are in the system's file cache.

    Raises:
        VerificationFailed: a value is not finite, or the dtype cannot hold it; the message names the tensor.
    """
    tally = Tally()
    layout = _layout(base, plan, target.dtype)
    total = _total(layout)
    done = 0
    for shard in base.shards:
        places = new_shard(target.folder / shard.name, layout[shard.name], shard.metadata)

        def write(name: str, shard: Shard = shard, places: dict[str, StoredTensor] = places) -> Tally:
            return _write_tensor(name, shard.tensors[plan.copies.get(name, name)], plan.changes.get(name), places[name])

        for names in _parts(places):
            for name, part_tally in zip(names, pool.map(write, names), strict=True):
                tally.add(part_tally)
                done += places[name].size
                bar(done / max(1, total), 1, name)
            on_written(shard, target.folder / shard.name, names)
    _write_index(base, layout, target.folder)
    return tally


def planned_bytes(base: Base, plan: MergePlan, dtype: str | None) -> int:
    """The bytes of the merged weights in `dtype`, or with the dtype of each tensor if it is None."""
    return _total(_layout(base, plan, dtype))


def _layout(base: Base, plan: MergePlan, dtype: str | None) -> Layout:
    """Dtype and shape of every tensor to write, by file, in the order of the bytes."""
    layout: Layout = {}
    for shard in base.shards:
        names = [*shard.tensors, *(new for new, source in plan.copies.items() if source in shard.tensors)]
        entries = {}
        for name in names:
            stored, change = shard.tensors[plan.copies.get(name, name)], plan.changes.get(name)
            kind = dtype if dtype and stored.dtype in FLOAT_BYTES else stored.dtype
            replaced = change is not None and change.replace is not None
            entries[name] = (kind, tuple(change.replace.shape) if replaced and change else stored.shape)
        layout[shard.name] = in_order(entries)
    return layout


def _total(layout: Layout) -> int:
    return sum(tensor_bytes(*entry) for tensors in layout.values() for entry in tensors.values())


def _parts(places: dict[str, StoredTensor]) -> Iterator[list[str]]:
    """Groups of neighbouring tensors in the order of the file, each of at least _PART_BYTES but for the last."""
    names: list[str] = []
    size = 0
    for name, place in places.items():
        names.append(name)
        size += place.size
        if size >= _PART_BYTES:
            yield names
            names, size = [], 0
    if names:
        yield names


def _write_tensor(name: str, stored: StoredTensor, change: Change | None, place: StoredTensor) -> Tally:
    """Writes one tensor, which `change` changes; None only copies or converts it."""
    with written_to(place) as write:
        if (change is None or change.empty) and place.dtype == stored.dtype:
            copy_bytes(stored, write)
            return Tally()
        tally = Tally(changed=int(change is not None), converted=int(change is None))
        tally.note(place.dtype)
        if change is not None and change.low_rank and stored.shape == place.shape:
            _write_low_rank(name, stored, change, place.dtype, write, tally)
        else:
            _write_any(name, stored, change or Change(), place, write, tally)
    return tally


def _write_any(
    name: str, stored: StoredTensor, change: Change, place: StoredTensor, write: Callable[[Any], None], tally: Tally
) -> None:
    import torch

    for start, stop in _blocks(place.shape, change):
        before, after = _rows(stored, change, place.shape, start, stop)
        rounded = after.to(torch_dtype(place.dtype))
        wide = rounded.float()
        # The sum of squares is not finite if a value is not, and is 5 times as fast as checking each value.
        if not math.isfinite(_product(wide, wide)) and not bool(torch.isfinite(rounded).all()):
            raise _not_finite(name, after, place.dtype)
        if before is not None and not change.empty:
            exact = after - before
            tally.base_square += _product(before, before)
            tally.change_square += _product(exact, exact)
            moved = wide - before
            tally.kept_product += _product(moved, exact)
            tally.stored_square += _product(moved, moved)
        write(memoryview(rounded.contiguous().reshape(-1).view(torch.uint8).numpy()))


def _write_low_rank(
    name: str, stored: StoredTensor, change: Change, dtype: str, write: Callable[[Any], None], tally: Tally
) -> None:
    """Writes a tensor with a change that is only a product of two thin matrices, the usual case. All blocks use the
    same memory."""
    import torch

    left, right = change.scale * change.left.float(), change.right.float()
    blocks = list(_blocks(stored.shape, change))
    most = max((stop - start for start, stop in blocks), default=0)
    product, after = (torch.empty(most, stored.shape[1]) for _ in range(2))
    rounded = torch.empty(most, stored.shape[1], dtype=torch_dtype(dtype))
    with wide_rows(stored, most) as read:
        for start, stop in blocks:
            here, (_, before) = slice(0, stop - start), read(start, stop)
            exact = torch.mm(left[start:stop], right, out=product[here])
            stored_as = rounded[here].copy_(torch.add(before, exact, out=after[here]))
            moved = after[here].copy_(stored_as).sub_(before)
            left_of_it = _product(moved, exact)
            # The product is not finite if a stored value is not, and is 5 times as fast as checking each value.
            if not math.isfinite(left_of_it) and not bool(torch.isfinite(stored_as).all()):
                raise _not_finite(name, before + exact, dtype)
            tally.base_square += _product(before, before)
            tally.kept_product += left_of_it
            tally.stored_square += _product(moved, moved)
            write(memoryview(stored_as.reshape(-1).view(torch.uint8).numpy()))
    tally.change_square += _square(left, right)


def _rows(stored: StoredTensor, change: Change, shape: tuple[int, ...], start: int, stop: int) -> tuple[Any, Any]:
    """The base's rows (None if its tensor has another shape) and the new ones, both in fp32."""
    before = read_rows(stored if stored.shape else stored.flat, start, stop).float() if stored.shape == shape else None
    first = before if change.replace is None else change.replace.reshape(shape or (1,))[start:stop].float()
    return before, apply(change, first, start)


def _blocks(shape: tuple[int, ...], change: Change) -> Iterator[tuple[int, int]]:
    """Row ranges of about BLOCK_BYTES in fp32; all rows at once if the change needs the norm of whole columns."""
    rows = shape[0] if shape else 1
    step = rows if change.whole else max(1, BLOCK_BYTES // (4 * max(1, math.prod(shape[1:]))))
    for start in range(0, rows, max(1, step)):
        yield start, min(rows, start + step)


def _product(first: Any, other: Any) -> float:
    """The sum of the elementwise products of two blocks in fp32. Its four exact digits are enough for a share."""
    import torch

    return float(torch.dot(first.reshape(-1), other.reshape(-1)))


def _square(left: Any, right: Any) -> float:
    """The sum of squares of the product of left [rows, r] and right [r, columns]: the trace of LᵀL·RRᵀ."""
    left, right = left.double(), right.double()
    return float(((left.T @ left) * (right @ right.T)).sum())


def _not_finite(name: str, after: Any, dtype: str) -> VerificationFailed:
    import torch

    bad = int((~torch.isfinite(after)).sum())
    if bad:
        return VerificationFailed(
            f"{name} is not finite after the merge",
            code="not_finite",
            expected="finite weights",
            got=f"{bad} values that are NaN or infinite",
            hint="check the adapter's training log for NaN, and merge an earlier checkpoint",
        )
    largest = float(after.abs().max())
    return VerificationFailed(
        f"{name} has values outside the range of {dtype}",
        code="not_finite",
        expected=f"at most {torch.finfo(torch_dtype(dtype)).max:g}",
        got=f"{largest:g}",
        hint="merge with --dtype bfloat16 or --dtype float32",
    )


def _write_index(base: Base, layout: Layout, part: Path) -> None:
    """Copies the base's index if it has one, with the new names and sizes if they differ."""
    if not (base.folder / INDEX).is_file():
        return
    index = read_json(base.folder / INDEX)
    weight_map = {name: file for file, tensors in layout.items() for name in tensors if name not in index["weight_map"]}
    metadata = index.get("metadata") if isinstance(index.get("metadata"), dict) else {}
    sizes = {"total_size": _total(layout)}
    if "total_parameters" in metadata:
        before = sum(stored.elements for stored in base.tensors.values())
        after = sum(math.prod(shape) for tensors in layout.values() for _, shape in tensors.values())
        sizes["total_parameters"] = metadata["total_parameters"] + after - before
    if not weight_map and metadata == metadata | sizes:
        shutil.copyfile(base.folder / INDEX, part / INDEX)
        return
    index["metadata"] = metadata | sizes
    index["weight_map"] = dict(sorted((index["weight_map"] | weight_map).items()))
    write_json(part / INDEX, index)
