"""Computes the expected result of a merge in 16 bits: each weight is summed in fp32, then rounded once to its type.

A correct merge has exactly these weights, so it has the answers of this model. The distance from the model without
rounding does not show whether a merge is correct: in a mixture of experts, rounding can decide a router's near-tie
differently, and then a single token is 0.1 nats off.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skill_train.model.weight_files import stored_tensors, torch_dtype
from skill_train.reference.low_memory import is_plain, merged
from skill_train.run import merge_record

KINDS = ("F16", "BF16")


@dataclass(frozen=True)
class Rounding:
    """How a merge stored its weights."""

    stored: str  # safetensors' dtype of the changed weights, one of `KINDS`
    kinds: dict[str, str]  # the dtype by the name of a tensor; a tensor without an entry has `stored`


def rounding_of(record: Path, base: Path) -> Rounding | None:
    """The rounding of a merge according to its record; None if it rounded nothing, or there is no record."""
    merge = merge_record.read(record) if record.is_file() else None
    stored = merge.changes["stored_dtype"] if merge else None
    if merge is None or stored not in KINDS:
        return None
    # PEFT and --dtype store the whole model in one type.
    one_type = merge.how == "peft" or merge.options.dtype is not None
    return Rounding(stored, {} if one_type else stored_kinds(base))


def stored_kinds(folder: Path, names: Mapping[str, str] | None = None) -> dict[str, str]:
    """Safetensors' dtype of each tensor of a model folder.

    Args:
        names: for a vision model, the tensor by the parameter's name in memory. The result then has both names.
    """
    kinds = {name: stored.dtype for name, stored in stored_tensors(folder).items()}
    return kinds | {name: kinds[tensor] for name, tensor in (names or {}).items() if tensor in kinds}


@contextlib.contextmanager
def rounded(model: Any, adapter: Path, kinds: dict[str, str], otherwise: str) -> Iterator[Any]:
    """Merges the adapter into the model and rounds every weight. This cannot be undone.

    Args:
        model: PEFT's model from `frugal_model`.
        kinds: the dtype by the name of a parameter; parameters with other names (experts that a file stores one by one)
            are rounded to `otherwise`.
    """
    import torch

    plain = is_plain(adapter)
    # PEFT itself would compute the sum in the stored type of a frugal model's weights.
    whole = model.get_base_model() if plain else merged(model)
    with torch.no_grad():
        for name, module in list(whole.named_modules()):
            if plain and hasattr(module, "lora_A"):
                _merge_layer(module, torch_dtype(_kind(f"{name}.weight", kinds, otherwise)))
        for name, tensor in whole.state_dict().items():  # includes buffers, which are stored like weights
            if tensor.is_floating_point() and ".lora_" not in name and not name.endswith(".base_layer.weight"):
                dtype = torch_dtype(_kind(name.replace(".base_layer.", "."), kinds, otherwise))
                if dtype != tensor.dtype:  # a frugal model's weights are a memory map of their file
                    tensor.copy_(tensor.to(dtype))
    with model.disable_adapter() if plain else contextlib.nullcontext():
        yield model if plain else whole


def _kind(name: str, kinds: dict[str, str], otherwise: str) -> str:
    kind = kinds.get(name, otherwise)
    return kind if kind in KINDS else "F32"


def _merge_layer(layer: Any, dtype: Any) -> None:
    """Merges one layer. Sets a new parameter, because an embedding may share the old one."""
    import torch

    base = layer.get_base_layer()
    merged = layer.get_delta_weight("default").float().add_(base.weight).to(dtype)
    stored = merged if base.weight.dtype in (torch.float16, torch.bfloat16) else merged.float()
    base.weight = torch.nn.Parameter(stored, requires_grad=False)
