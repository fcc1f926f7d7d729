"""Matches the names that a vision model's parameters have in memory with the names of the tensors in its files.

In memory a tower is `model.visual.blocks.0…`; in the published files of Qwen2-VL it is `visual.blocks.0…`. transformers
renames tensors while it loads them (`conversion_mapping` of 5.23). An adapter has the names in memory.
"""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from skill_train.model.adapter import read_adapter
from skill_train.model.config import is_vision
from skill_train.model.folder import read_config
from skill_train.model.foreign_files import block_hub_kernels, require_sound
from skill_train.program.folders.base import config_with
from skill_train.reference.causal_types import causal_model_types

TEXT, PICTURES = "CausalLM", "ImageTextToText"  # endings of transformers' classes AutoModelFor…


def task_of(base: Path, parameters: Collection[str] = ()) -> str:
    """The task whose class loads this model: `TEXT` if that class knows the model and all the parameters.

    Args:
        parameters: the parameters that an adapter changes, by their names in memory.
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
    """The model on torch's `meta` device: parameters have names and shapes, but no values."""
    require_sound(base)
    block_hub_kernels()
    import torch
    import transformers

    config = config_with(str(base), None, "eager")
    with torch.device("meta"):
        return getattr(transformers, f"AutoModelFor{task}").from_config(config, trust_remote_code=False)


def unknown_parameters(model: Any, parameters: Iterable[str]) -> list[str]:
    """The names among `parameters` that the model does not have."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return [name for name in parameters if name not in names]


def stored_names(model: Any, tensors: Iterable[str]) -> dict[str, str]:
    """The name of the tensor in the files, by the parameter's name in memory. Parameters that transformers joins from
    several tensors, or transposes, are left out.

    Args:
        model: the result of `empty_model`.
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
