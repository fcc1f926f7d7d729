"""Finds the names of a vision model's parameters in its files, which a merge needs."""

import re
from dataclasses import replace

from skill_train.facts import JsonObject
from skill_train.merge.plan import Base, wanted_parameters
from skill_train.model.adapter import Adapter, pattern_value
from skill_train.model.config import is_vision
from skill_train.reference.checkpoint_names import empty_model, stored_names, task_of

_TIED_HEAD = "lm_head.weight"  # a head that is tied to the embedding has no tensor of its own
_PATTERNS = ("rank_pattern", "alpha_pattern")


def with_names(base: Base, adapter: Adapter) -> Base:
    """Sets `task` and `names` of a vision model's base. The base of a text model is returned unchanged."""
    if not is_vision(base.config):
        return base
    task = task_of(base.folder, wanted_parameters(adapter))
    return replace(base, task=task, names=stored_names(empty_model(base.folder, task), base.tensors))


def as_stored(adapter: Adapter, base: Base) -> Adapter:
    """The adapter with the names of the base's files instead of the names in memory. It is unchanged if a parameter has
    no tensor of its own; the merge plan then reports that parameter.

    `rank_pattern` and `alpha_pattern` get an entry for each module, because their patterns match the names in memory.
    """
    if not all(name in base.names or name == _TIED_HEAD for name in wanted_parameters(adapter)):
        return adapter

    def stored(name: str) -> str:
        return base.names.get(name, name)

    modules = {module: stored(f"{module}.weight").removesuffix(".weight") for module in adapter.modules}
    return replace(
        adapter,
        config=adapter.config | {key: _written_out(adapter.config[key], modules) for key in _PATTERNS},
        modules={modules[module]: parts for module, parts in adapter.modules.items()},
        replaced={stored(name): tensor for name, tensor in adapter.replaced.items()},
        shared=frozenset(map(stored, adapter.shared)),
        originals={stored(name): tensor for name, tensor in adapter.originals.items()},
    )


def _written_out(pattern: JsonObject, modules: dict[str, str]) -> JsonObject:
    """A pattern with an entry for each module that `pattern` matches, by the module's name in the files."""
    values = {tensor: pattern_value(pattern, module, None) for module, tensor in modules.items()}
    return {f"^{re.escape(tensor)}": value for tensor, value in values.items() if value is not None}
