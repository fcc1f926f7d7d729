"""Where the weights of a vision tower and its projector lie in a projector's GGUF file, and how they are arranged.

Names are those of the model's own safetensors files. They go through gguf-py's map; what it does not know is below.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, Literal

from skill_train.verify.weights.arrangements import as_in_model, one_more, permuted

Part = Literal["tower", "projector", "deepstack"]

_VISION = re.compile(
    r"(^|\.)(visual|vision_tower|vision_model|multi_modal_projector|connector)\.(?!.*vision_model\.head\.)"
)
_PROJECTOR = re.compile(r"\.merger\.|multi_modal_projector\.|connector\.")
_DEEPSTACK = re.compile(r"visual\.deepstack_merger_list\.(\d+)\.(linear_fc1|linear_fc2|norm)\.(weight|bias)$")
_BLOCK = re.compile(r"\.(?:blocks|layers)\.(\d+)\.")
_PATCHES = "v.patch_embd.weight"
# Patterns of names in the model's files, with names that gguf-py's map knows, or the names in the projector's file.
_PLACES: tuple[tuple[str, str], ...] = (
    (r"^model\.(?=visual\.|vision_tower\.|multi_modal_projector\.)", ""),
    (r"^vision_tower\.(?=embeddings\.|encoder\.|post_layernorm\.)", "vision_tower.vision_model."),
    (r"mm_input_projection_weight$", "mm_input_projection.weight"),
    (r"^visual\.merger\.norm\.", "v.post_ln."),
    (r"^visual\.merger\.linear_fc1\.", "mm.0."),
    (r"^visual\.merger\.linear_fc2\.", "mm.2."),
)
_LINE_END = "v.token_embd.img_break"  # a row of the embedding of the language model
_EMBEDDING = re.compile(r"(?:^|\.)embed_tokens\.weight$")
_PERMUTED = re.compile(r"^vision_tower\.transformer\.layers\.\d+\.attention\.[qk]_proj\.weight$")  # Pixtral's
_OWN_NAME = re.compile(r"^(v|mm)\.[a-z0-9_]+\.(weight|bias)$")


@dataclass(frozen=True)
class ProjectorPlace:
    """A weight of the model, or a part of it, in a tensor of the file."""

    tensor: str
    source: str  # name of the weight in the model's files
    part: Part  # what it belongs to
    arrange: Callable[[Any], Any]  # from the weight to what the file holds


@dataclass(frozen=True)
class TowerShape:
    """What the places of the weights depend on."""

    layers: int
    heads: int
    deepstack: list[int]  # layers of the tower whose output is added in the language model
    line_end: int | None  # the id of the token at the end of a line of a picture; None for a family without any


def is_embedding(name: str) -> bool:
    """Whether a weight is the embedding of the language model's tokens."""
    return _EMBEDDING.search(name) is not None


def is_vision(name: str) -> bool:
    """Whether a weight is of the tower or of the projector."""
    return _VISION.search(name) is not None and "language_model." not in name


def part_of(source: str) -> Part:
    if "deepstack_merger_list." in source:
        return "deepstack"
    return "projector" if _PROJECTOR.search(source) or is_embedding(source) else "tower"


def places(sources: list[str], shape: TowerShape, tensors: set[str]) -> Iterator[ProjectorPlace]:
    """The tensors that each weight of the model becomes. Weights without a known tensor are left out.

    Args:
        tensors: names of the tensors of the file.
    """
    from gguf.constants import MODEL_ARCH
    from gguf.tensor_mapping import get_tensor_name_map

    names = get_tensor_name_map(MODEL_ARCH.MMPROJ, shape.layers)
    for source in sources:
        for tensor, arrange in _targets(source, shape, names, tensors):
            yield ProjectorPlace(tensor, source, part_of(source), arrange)


def _targets(
    source: str, shape: TowerShape, names: Any, tensors: set[str]
) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    name, block = _common_name(source), _BLOCK.search(source)
    if inner := _DEEPSTACK.search(source):
        yield f"v.deepstack.{shape.deepstack[int(inner[1])]}.{inner[2].removeprefix('linear_')}.{inner[3]}", as_in_model
    elif shape.line_end is not None and is_embedding(source):
        yield _LINE_END, itemgetter(shape.line_end)
    elif ".qkv." in name and block and f"v.blk.{block[1]}.attn_q.weight" in tensors:
        end = name.rpartition(".")[2]
        for number, letter in enumerate("qkv"):
            yield f"v.blk.{block[1]}.attn_{letter}.{end}", partial(_third, number=number)
    elif name.endswith("patch_embed.proj.weight"):
        yield _PATCHES, partial(_moment, number=0)
        yield f"{_PATCHES}.1", partial(_moment, number=1)
    elif _OWN_NAME.match(name):
        yield name, as_in_model
    else:
        tensor = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if tensor is not None:
            arrange: Callable[[Any], Any] = one_more if name.endswith("soft_emb_norm.weight") else as_in_model
            yield tensor, partial(permuted, heads=shape.heads) if _PERMUTED.match(name) else arrange


def _common_name(source: str) -> str:
    for pattern, put in _PLACES:
        source = re.sub(pattern, put, source)
    return source


def _third(weight: Any, number: int) -> Any:
    """A third of the rows: query, key or value."""
    return weight.chunk(3)[number]


def _moment(weight: Any, number: int) -> Any:
    """The weights for one of the two moments of a film in Qwen's patches, [out, colours, moments, height, width]."""
    return weight[:, :, number]


def other_colours(tensor: str, weight: Any) -> Any | None:
    """The patches with the colours in reverse order; None for another tensor."""
    return weight.flip(1) if tensor.startswith(_PATCHES) else None
