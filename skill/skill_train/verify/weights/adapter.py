"""Compares the tensors of an adapter's GGUF file with PEFT's own, module by module, up to the rounding of their type.

gguf-py's name map says which tensor is which. A converter may rearrange the rows of a weight, as it does with Llama's
query and key. The base's own GGUF file and checkpoint show the order, and B must have the same order.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skill_train.llama.gguf_header import GgufFile, Tensor
from skill_train.model.adapter import Adapter, read_adapter, scale_of
from skill_train.model.weight_files import StoredTensor, read_tensor, stored_tensors
from skill_train.run.verify_record import Check
from skill_train.verify.check import problems
from skill_train.verify.weights.places import name_map
from skill_train.verify.weights.rows import Rows, row_bound, row_errors
from skill_train.verify.weights.tensors import weights_of

if TYPE_CHECKING:
    import numpy as np

# Largest error of a row relative to its length. f16 and bf16 round each value by at most 2^-11 and 2^-8 of it.
_ROUNDING = {"F32": 1e-6, "F16": 2**-11, "BF16": 2**-8}
_SMALLEST_F16 = 2.0**-25  # below 6e-5 an f16 is off by up to this, whatever its size
_SCALE = 1e-5  # of the scale: alpha is a float32 in the file
_KEY = 64  # columns that tell rows apart
_OF_TEXT = re.compile(r"\b(?:language_model|text_model)\.")  # in names of a vision model, whose text alone was trained


@dataclass
class _ModuleComparison:
    """The adapter's file, the base's file, and the adapter as PEFT saved it; and the result so far. `faults` are wrong
    for sure; `unknown` could not be compared."""

    lora: GgufFile
    base: GgufFile
    tuned: Adapter
    worst: float = 0.0
    compared: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def check_lora_weights(lora: GgufFile, base: GgufFile, reference: Path, adapter: Path) -> Check:
    """Checks that the file holds every module of the adapter once, with its scale, and nothing else.

    Args:
        lora: the adapter's file.
        base: the file of the model that it is loaded beside.
        reference: that model's folder.
    """
    tuned = read_adapter(adapter)
    stored = {_OF_TEXT.sub("", name): tensor for name, tensor in stored_tensors(reference).items()}
    comparison = _ModuleComparison(lora, base, tuned)
    names = name_map(base.architecture, base.of_architecture("block_count"))
    for module, parts in sorted(tuned.modules.items()):
        name = _OF_TEXT.sub("", f"{module}.weight")
        mapped = names.get_name(name, try_suffixes=(".weight",)) if names is not None else None
        if set(parts) != {"a", "b"}:
            comparison.faults.append(f"{module} is more than A and B, which such a file cannot hold")
        elif mapped not in base.tensors or (weight := stored.get(name)) is None:
            comparison.unknown.append(f"the tensor of {module} in a GGUF file is unknown")
        else:
            _compare(comparison, module, base.tensors[mapped], weight)
    comparison.faults += [
        f"{name} is stored whole in the adapter, and not in the file" for name in sorted(tuned.replaced)
    ]
    if not comparison.unknown:
        extra = [name for name in lora.tensors if name not in comparison.compared]
        comparison.faults += [f"{name} is in the file, and not in the adapter" for name in extra]
    file, modules = lora.path.name, len(tuned.modules)
    good = f"{modules} modules are those of the adapter, the worst row {comparison.worst:.2g} off"
    if comparison.unknown and not comparison.faults:
        detail = f"{comparison.unknown[0]}: {len(comparison.unknown)} of {modules} modules were not compared"
        return Check("weights", file, "warn", len(comparison.unknown), 0, detail, {"looked_at": modules})
    return problems("weights", file, comparison.faults, looked_at=modules, good=good)


def _compare(comparison: _ModuleComparison, module: str, target: Tensor, weight: StoredTensor) -> None:
    """Adds the comparison of one module.

    Args:
        target: the module's tensor in the base's file. `weight` is that of the checkpoint.
    """
    lora, tuned = comparison.lora, comparison.tuned
    a, b = (lora.tensors.get(f"{target.name}.lora_{part}") for part in "ab")
    if a is None or b is None:
        comparison.faults.append(f"{module} is not in the file: {target.name}.lora_a and .lora_b")
        return
    comparison.compared |= {a.name, b.name}
    own_a, own_b = (tuned.tensor(tuned.modules[module][part]).float().numpy() for part in "ab")
    if (a.shape, b.shape) != (own_a.shape[::-1], own_b.shape[::-1]):
        shapes = f"{list(a.shape)} and {list(b.shape)}"
        comparison.faults.append(f"{a.name} and its B are {shapes}, not those of {module}")
        return
    # llama.cpp multiplies by alpha / rank (https://github.com/ggml-org/llama.cpp, src/llama-adapter.h).
    rank, scale, alpha = own_a.shape[0], scale_of(tuned.config, module), lora.metadata.get("adapter.lora.alpha")
    if not isinstance(alpha, float) or not math.isclose(alpha / rank, scale, rel_tol=_SCALE):
        comparison.faults.append(f"alpha is {alpha}, and {module} needs {scale * rank:g}")
    order = _order(comparison.base, target, weight)
    if order is None:
        comparison.unknown.append(f"the row order of {target.name} is unknown")
        return
    for tensor, expected in ((a, own_a), (b, own_b[order])):
        error, row = _distance(lora, tensor, expected)
        comparison.worst, bound = max(comparison.worst, error), _ROUNDING.get(tensor.kind, row_bound(tensor.kind))
        if error > bound:
            comparison.faults.append(f"{tensor.name}: row {row} is {error:.2g} of its length off, at most {bound:.2g}")


def _order(base: GgufFile, target: Tensor, weight: StoredTensor) -> np.ndarray | None:
    """For each row of the base's tensor in the file, its number in the checkpoint; None if the rows do not match."""
    import numpy as np

    if len(weight.shape) != 2 or target.shape != weight.shape[::-1]:
        return None
    stored = _as_kind(read_tensor(weight).float(), target.kind)
    there = weights_of(base, target)(slice(0, len(stored)))
    if np.array_equal(there, stored):
        return np.arange(len(stored))
    numbers = {row.tobytes(): number for number, row in enumerate(stored[:, :_KEY])}
    order = np.array([numbers.get(row.tobytes(), -1) for row in np.ascontiguousarray(there[:, :_KEY])])
    matched = len(numbers) == len(stored) and order.min() >= 0 and np.array_equal(there, stored[order])
    return order if matched else None


def _as_kind(weights: Any, kind: str) -> np.ndarray:
    """The weights in fp32, rounded as a file of that type holds them."""
    import torch

    types = {"F16": torch.float16, "BF16": torch.bfloat16}
    rounded: np.ndarray = weights.to(types.get(kind, torch.float32)).float().numpy()
    return rounded


def _distance(lora: GgufFile, tensor: Tensor, expected: np.ndarray) -> tuple[float, int]:
    """The error of the worst row, and the number of that row."""
    import numpy as np

    weights = weights_of(lora, tensor)(slice(0, len(expected)))
    if tensor.kind == "F16":  # what an f16 cannot hold any nearer is no fault
        near = np.abs(weights - expected) <= _SMALLEST_F16
        weights = np.where(near, expected, weights)
    rows = Rows(np.ascontiguousarray(expected))
    errors = row_errors(rows.off(weights), rows)
    return float(errors.max()), int(errors.argmax())
