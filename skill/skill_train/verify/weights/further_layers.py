"""The layers of a checkpoint that predict further tokens (MTP). transformers does not load them, and llama.cpp answers
without them, but a converter may write them after the other layers, and llama.cpp guesses ahead with them."""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from skill_train.model.weight_files import read_tensor, stored_tensors

_OF_LAYER = re.compile(r"model\.layers\.(\d+)\.")
# Qwen3-Next and Qwen3.5 have them beside the model. The other names are those of DeepSeek-V3 and GLM-4.5.
_BESIDE = re.compile(r"(?:model\.)?mtp\.(?:layers\.(\d+)\.)?(.+)")
_PARTS = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head.norm"}


def further_weights(checkpoint: Path, layers: int) -> Iterator[tuple[str, partial[Any]]]:
    """The weights of these layers, by the names that gguf-py's map knows, each with a function that reads it. Its first
    argument has the shape of the weight.

    Args:
        checkpoint: the model's folder.
        layers: the number of layers that transformers loads.
    """
    for name, stored in stored_tensors(checkpoint).items():
        published = _published(name, layers)
        own = _OF_LAYER.match(published)
        if own is not None and int(own[1]) >= layers:
            yield published, partial(read_tensor, stored)


def _published(name: str, layers: int) -> str:
    beside = _BESIDE.fullmatch(name)
    if beside is None:
        return name
    leaf, _, end = beside[2].rpartition(".")
    inside = beside[2] if beside[1] else f"{_PARTS.get(leaf, leaf)}.{end}"
    return f"model.layers.{layers + int(beside[1] or 0)}.{inside}"
