"""Reads a model folder from elsewhere by the rules of the training program. Its refusals become UsageErrors."""

from pathlib import Path

from skill_train.core.errors import UsageError, refusals
from skill_train.facts import JsonObject
from skill_train.program import model_files
from skill_train.program.model_files import block_hub_kernels as block_hub_kernels

require_sound = refusals()(model_files.check_model)
require_sound_files = refusals()(model_files.check_files)  # also of an adapter, which has no index of weights
foreign_json = refusals()(model_files.foreign_json)
safetensors_header = refusals()(model_files.safetensors_header)
weight_map = refusals()(model_files.weight_map)
weight_files = refusals()(model_files.weight_files)


def object_in(path: Path) -> JsonObject:
    """The JSON object in a file; empty if the file is missing or broken, which is reported elsewhere."""
    try:
        document = foreign_json(path)
    except (OSError, UsageError):
        return {}
    return document if isinstance(document, dict) else {}
