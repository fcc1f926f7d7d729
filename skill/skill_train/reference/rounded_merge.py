"""Base + adapter as a merge in 16 bits must be: each weight added up in fp32, then rounded once to its stored type.

A correct merge has these very weights, so its answers are those of this model, whatever rounding costs. The distance
from the model that was not rounded says nothing of that: in a mixture of experts a router's near-tie falls the other
way, and one token alone is then 0.1 nats off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skill_train.model.weight_files import read_folder, torch_dtype
from skill_train.reference.low_memory import is_plain
from skill_train.run import merge_record

KINDS = ("F16", "BF16")


@dataclass(frozen=True)
class Rounding:
    """How a merge stored its weights.

    Attributes:
        stored: safetensors' dtype of the changed ones, of `KINDS`.
        kinds: dtype by the name of a tensor; of those without a name here it is `stored`.
    """

    stored: str
    kinds: dict[str, str]


def rounding_of(record: Path, base: Path) -> Rounding | None:
    """Of a merge by its record; None when it rounded nothing, or there is no record."""
    merge = merge_record.read(record) if record.is_file() else None
    stored = merge.changes["stored_dtype"] if merge else None
    if merge is None or stored not in KINDS:
        return None
    # PEFT stores all of a model in one type, and so does --dtype.
    one_type = merge.how == "peft" or merge.options.dtype is not None
    return Rounding(stored, {} if one_type else stored_kinds(base))


def stored_kinds(folder: Path) -> dict[str, str]:
    """Safetensors' dtype of each tensor of a model folder."""
    return {name: stored.dtype for shard in read_folder(folder) for name, stored in shard.tensors.items()}


@contextlib.contextmanager
def rounded(model: Any, adapter: Path, kinds: dict[str, str], otherwise: str) -> Iterator[Any]:
    """The same model with its adapter merged and every weight rounded. It cannot be taken back.

    Args:
        model: PEFT's, of `frugal_model`.
        kinds: dtype by the name of a parameter; those of other names (experts that a file holds one by one) are
            rounded to `otherwise`.
    """
    import torch

    plain = is_plain(adapter)
    # PEFT itself would add in the type in which a frugal model keeps its weights.
    whole = model.get_base_model() if plain else model.merge_and_unload()
    with torch.no_grad():
        for name, module in list(whole.named_modules()):
            if plain and hasattr(module, "lora_A"):
                _merge_layer(module, torch_dtype(_kind(f"{name}.weight", kinds, otherwise)))
        for name, tensor in whole.state_dict().items():  # buffers too: they are stored like weights
            if tensor.is_floating_point() and ".lora_" not in name and not name.endswith(".base_layer.weight"):
                dtype = torch_dtype(_kind(name.replace(".base_layer.", "."), kinds, otherwise))
                if dtype != tensor.dtype:  # a frugal model's weights are a map of their file
                    tensor.copy_(tensor.to(dtype))
    with model.disable_adapter() if plain else contextlib.nullcontext():
        yield model if plain else whole


def _kind(name: str, kinds: dict[str, str], otherwise: str) -> str:
    found = kinds.get(name, otherwise)
    return found if found in KINDS else "F32"


def _merge_layer(layer: Any, dtype: Any) -> None:
    """A new parameter in place of the old one, which an embedding may share."""
    import torch

    base = layer.get_base_layer()
    merged = layer.get_delta_weight("default").float().add_(base.weight).to(dtype)
    kept = merged if base.weight.dtype in (torch.float16, torch.bfloat16) else merged.float()
    base.weight = torch.nn.Parameter(kept, requires_grad=False)
