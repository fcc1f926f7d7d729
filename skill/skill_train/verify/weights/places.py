"""Where each weight of a model lies in a GGUF file, and how llama.cpp's converter arranges it on the way.

The reference is the model as transformers computes it. So its names and shapes are those in memory, where the experts
are one weight. Names go through gguf-py's own map; names that this map does not know are below. If an architecture is
not in `TRIED`, the converter may arrange a weight in a way that is not known here, and the weight then seems to differ.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from skill_train.verify.weights.arrangements import Arrange, arrangement, parts_of

# A correct file of each was compared whole, and the same file answered as the model does.
TRIED = frozenset((
    "afmoe", "apertus", "arcee", "bloom", "chatglm", "cohere2", "command-r", "deepseek2", "dots1", "ernie4_5",
    "ernie4_5-moe", "exaone", "exaone-moe", "exaone4", "falcon", "falcon-h1", "gemma", "gemma2", "gemma3", "gemma4",
    "glm4", "glm4moe", "gpt-oss", "gpt2", "gptneox", "granite", "granite_swa", "granitehybrid", "granitemoe",
    "hunyuan-dense",
    "jais2", "jamba", "lfm2", "lfm2moe", "llama", "llama4", "mamba", "mamba2", "mellum", "minicpm3", "minimax-m2",
    "mistral3", "mpt", "nemotron", "nemotron_h", "nemotron_h_moe", "olmo", "olmo2", "olmoe", "phi2", "phi3", "qwen2",
    "qwen2moe", "qwen2vl", "qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next", "qwen3vl", "seed_oss", "smollm3",
    "stablelm", "starcoder", "starcoder2",
))  # fmt: skip
# Architectures that gguf-py 0.19 does not know, and one whose tensors have the same names.
_LIKE = {"granite_swa": "mimo2", "mellum": "qwen3moe"}

# Weights of a model that no text file holds: pictures and sound, and masks and angles that the code computes.
_ELSEWHERE = re.compile(
    r"vision_|vision\.|visual\.|audio_|audio\.|multi_modal_projector|mm_projector|embed_vision|embed_audio"
    r"|rotary_emb\.|\.masked_bias$|\.attn\.bias$|\.attention\.bias$|\.tokens_per_expert$"
)
# Names of transformers, and those of published files that gguf-py's map knows.
_PUBLISHED: tuple[tuple[str, str], ...] = (
    (r"\b(?:language_model|text_model)\.", ""),
    (r"\.dt_bias$", ".dt_proj.bias"),
    (r"\.e_score_correction_bias$", ".e_score_correction.bias"),
    (r"\.expert_bias$", ".expert_bias.bias"),
    (r"\.gate\.moe_statics\.", ".moe_statics."),
    (r"\.layer_scalar$", ".layer_scalar.weight"),
    (r"\.sinks$", ".sinks.weight"),
    (r"\.block_sparse_moe\.router\.weight$", ".block_sparse_moe.router.layer.weight"),
)
_EXPERT = re.compile(r"\.experts\.\d+(?=\.)")
_LAYER = re.compile(r"\.(\d+)\.")
_FURTHER = re.compile(r"model\.layers\.(\d+)\.(eh_proj|enorm|hnorm|shared_head\.(?:norm|head)|embed_tokens)\.weight")
EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
VOCABULARY = (EMBEDDING, OUTPUT)  # may have more or fewer rows than the model, if the vocabulary was filled up


@dataclass(frozen=True)
class Place:
    """A weight of the model, or a part of it, in a tensor of a file.

    Attributes:
        tensor: its name in the file.
        source: name of the weight in the model.
        start: row of the tensor where it begins.
        arrange: from the weight to what the file holds.
    """

    tensor: str
    source: str
    start: int
    arrange: Arrange


@dataclass(frozen=True)
class Places:
    """The places of all weights of a model.

    Attributes:
        placed: the weights that lie in the file.
        missing: the tensors that the file lacks, by the name of the weight in the model.
        unplaced: weights of the model for which no place is known.
    """

    placed: list[Place]
    missing: dict[str, str]
    unplaced: list[str]


def places(arch: str, config: Any, shapes: Mapping[str, tuple[int, ...]], widths: Mapping[str, int]) -> Places:
    """Finds the place of each weight in a file.

    Args:
        config: transformers' config of the text part.
        shapes: of the weights of the model, by name.
        widths: row lengths of the tensors of the file, by name.
    """
    layers = {source: int(layer[1]) for source in shapes if (layer := _LAYER.search(source))}
    names = name_map(arch, max([config.num_hidden_layers - 1, *layers.values()]) + 1)
    result = Places([], {}, [])
    ends: dict[str, int] = {}
    for source, shape in sorted(shapes.items(), key=_numbers_in_order):
        if _ELSEWHERE.search(source):
            continue
        targets = list(_targets(arch, config, source, names, widths)) if names else []
        if layers.get(source, 0) >= config.num_hidden_layers:  # a converter need not write these layers
            targets = [(tensor, arrange) for tensor, arrange in targets if tensor in widths]
        elif not targets:
            result.unplaced.append(source)
        for tensor, arrange in targets:
            if tensor not in widths:
                result.missing[source] = tensor
                continue
            start = ends.get(tensor, 0)
            result.placed.append(Place(tensor, source, start, arrange))
            ends[tensor] = start + prod(shape) // len(targets) // widths[tensor]
    return result


def _targets(
    arch: str, config: Any, source: str, names: Any, widths: Mapping[str, int]
) -> Iterator[tuple[str, Arrange]]:
    """The tensors of the file that a weight becomes; none if none is known."""
    published = _published(source)
    layer = _LAYER.search(published)
    for leaves, arranges in parts_of(arch, config, published):
        tensors = [f"blk.{layer[1]}.{leaf}" if layer else leaf for leaf in leaves]
        if any(tensor in widths for tensor in tensors):
            yield from zip(tensors, arranges, strict=True)
            return
    mapped = _mapped(published, names)
    if mapped is not None:
        yield mapped, arrangement(arch, config, published)


def _mapped(name: str, names: Any) -> str | None:
    if name in ("lm_head.weight", "embed_out.weight"):  # the map has no output layer where llama.cpp ties it
        return OUTPUT
    if (further := _FURTHER.fullmatch(name)) is not None:  # the map has them for some architectures alone
        return f"blk.{further[1]}.nextn.{further[2].replace('.', '_')}.weight"
    candidates = (
        name,
        name.removeprefix("transformer."),
        name.replace("model.", "backbone.", 1),
        name.replace(".mlp.experts.", ".feed_forward.experts."),
    )
    tensors = (names.get_name(candidate, try_suffixes=(".weight", ".bias")) for candidate in candidates)
    return next(filter(None, tensors), None)


def _published(source: str) -> str:
    for pattern, put in _PUBLISHED:
        source = re.sub(pattern, put, source)
    return _EXPERT.sub(".experts", source)


def _numbers_in_order(item: tuple[str, Any]) -> list[Any]:
    """A key that sorts expert 10 after expert 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", item[0])]


def name_map(arch: str, blocks: object) -> Any:
    """gguf-py's map of names; None for an architecture that it does not know."""
    from gguf.constants import MODEL_ARCH_NAMES
    from gguf.tensor_mapping import get_tensor_name_map

    wanted = arch if arch in MODEL_ARCH_NAMES.values() else _LIKE.get(arch)
    number = next((key for key, name in MODEL_ARCH_NAMES.items() if name == wanted), None)
    return get_tensor_name_map(number, blocks) if number is not None and isinstance(blocks, int) else None
