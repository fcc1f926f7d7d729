"""How transformers names the parameters of a vision model, and the tensors of its files.

In memory a tower is `model.visual.blocks.0…`, in the published files of Qwen2-VL `visual.blocks.0…`. transformers
renames while it loads (`conversion_mapping` of 5.23), and an adapter has the names in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from skill_train.model.adapter import read_adapter
from skill_train.model.config import is_vision
from skill_train.model.folder import read_config
from skill_train.model.foreign_files import block_hub_kernels, require_sound
from skill_train.program.folders.base import config_with
from skill_train.reference.causal_types import causal_model_types

TEXT, PICTURES = "CausalLM", "ImageTextToText"  # of transformers' AutoModelFor…


def task_of(base: Path, parameters: Collection[str] = ()) -> str:
    """The task whose class loads this model: `TEXT` wherever that knows the model and all these parameters.

    Args:
        parameters: that an adapter changes, by their names in memory.
    """
    config = read_config(base)
    if not is_vision(config):
        return TEXT
    if config.get("model_type") not in (causal_model_types() or ()):
        return PICTURES
    return PICTURES if unknown_parameters(empty_model(base, TEXT), parameters) else TEXT


def task_with(base: Path, adapter: Path | None) -> str:
    """The task whose class loads this model and the adapter on it."""
    if adapter is None or not is_vision(read_config(base)):
        return task_of(base)
    tuned = read_adapter(adapter)
    return task_of(base, [*(f"{module}.weight" for module in tuned.modules), *tuned.replaced])


def empty_model(base: Path, task: str) -> Any:
    """The model without its weights, which are only described."""
    require_sound(base)
    block_hub_kernels()
    import torch
    import transformers

    config = config_with(str(base), None, "eager")
    with torch.device("meta"):
        return getattr(transformers, f"AutoModelFor{task}").from_config(config, trust_remote_code=False)


def unknown_parameters(model: Any, parameters: Iterable[str]) -> list[str]:
    """Those of the names that the model does not have."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return [name for name in parameters if name not in names]


def stored_names(model: Any, tensors: Iterable[str]) -> dict[str, str]:
    """For each parameter that transformers takes from a file as it is, the name of the tensor there. Those that it
    makes of several tensors, or turns around, are left out.

    Args:
        model: of `empty_model`.
        tensors: the names in the files.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    prefix, state = model.base_model_prefix, model.state_dict()
    names: dict[str, str] = {}
    for tensor in tensors:  # as `convert_and_load_state_dict_in_model` does
        name, converted = rename_source_key(tensor, renamings, converters, prefix, state)
        if name not in state and tensor in state:
            name, converted = rename_source_key(tensor, [], [], prefix, state)
        if name in state and converted is None:
            names[name] = tensor
    return names
