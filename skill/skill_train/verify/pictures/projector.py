"""A projector's GGUF file against the model's own files: what it states, and every weight of tower and projector."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from skill_train.facts import JsonObject
from skill_train.llama.gguf_header import GgufFile, Value
from skill_train.model.convertible.from_config import why_no_projector
from skill_train.model.folder import processor_files, read_config
from skill_train.model.weight_files import StoredTensor, read_tensor, stored_tensors
from skill_train.program.pictures.engine import LINED, TILED
from skill_train.program.pictures.processor import ImageProcessor, read_processor
from skill_train.program.pictures.tokens import LINE_END
from skill_train.reference.load import load_tokenizer
from skill_train.run.records import Verdict
from skill_train.run.verify_record import Check
from skill_train.verify.check import first_few, problems
from skill_train.verify.check_header import file_type, main_kind, name_type
from skill_train.verify.metadata.check import same
from skill_train.verify.metadata.class_config import class_config_of
from skill_train.verify.pictures.places import (
    ProjectorPlace,
    TowerShape,
    is_embedding,
    is_vision,
    other_colours,
    places,
)
from skill_train.verify.weights.arrangements import as_in_model
from skill_train.verify.weights.rows import Rows, errors, wrong_length
from skill_train.verify.weights.tensors import row_chunks, weights_of

_NAMES = 4  # names of tensors in a sentence
_MOST_ARE_OTHERS = 0.9  # share of the tensors: a trained tower keeps no weight, but nobody trains both without a base
_PIXTRAL_LAYERS, _PIXTRAL_HEADS = 24, 16  # where config.json leaves them out (transformers 5.23)
_TYPES = {
    "qwen2_vl": "qwen2vl_merger",
    "qwen2_5_vl": "qwen2.5vl_merger",
    "qwen3_vl": "qwen3vl_merger",
    "gemma3": "gemma3",
    **dict.fromkeys(TILED, "idefics3"),
    **dict.fromkeys(LINED, "pixtral"),
}
# Of norms, where no field of the tower's config has it (transformers 5.23).
_EPSILONS = {**dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), 1e-6), **dict.fromkeys(LINED, 1e-5)}
# The switch of a file for an activation (llama.cpp, tools/mtmd/clip.cpp). Without one it is the quick form of GELU.
_SWITCHES = {"gelu": "use_gelu", "gelu_pytorch_tanh": "use_gelu", "silu": "use_silu", "quick_gelu": ""}

# Keys that other functions compare, and those that change nothing or show in every picture.
_COMPARED_ELSEWHERE = {
    *("has_vision_encoder", "feed_forward_length", "image_size", "projection_dim"),
    *("use_gelu", "use_silu", "is_deepstack_layers"),
}


def check_projector(gguf: GgufFile, text: GgufFile, folder: Path) -> Check:
    """Checks that the file states what config.json and preprocessor_config.json say, and that it fits `text`."""
    config = read_config(folder)
    processor, tower = read_processor(config, processor_files(folder)), _tower(config)
    expected = dict(_stated(config, processor, tower))
    compared = [_fault(key, gguf.metadata.get(key), value) for key, value in expected.items()]
    faults = [fault for fault in compared if fault]
    width = text.of_architecture("embedding_length")
    if gguf.metadata.get("clip.vision.projection_dim") != width:
        width_made = gguf.metadata.get("clip.vision.projection_dim")
        faults.append(f"it makes embeddings of {width_made} numbers, and {text.path.name} reads {width}")
    faults += _type_faults(gguf)
    faults += _activation_faults(gguf, tower.get("hidden_act"))
    faults += _deepstack_faults(gguf, text, config)
    good = f"{len(expected)} values are those of config.json and preprocessor_config.json"
    check = problems("projector", gguf.path.name, faults, looked_at=len(expected), good=good)
    names = [key for key in gguf.metadata if key.startswith("clip.") and key not in expected]
    unknown = [key for key in names if key.rpartition(".")[2] not in _COMPARED_ELSEWHERE]
    doubts = [f"not compared: {first_few(unknown, _NAMES)}"] if unknown else []
    doubts += [why] if (why := why_no_projector(config)) else []
    if check.verdict == "pass" and doubts:  # a small picture may hardly show it
        return replace(check, verdict="warn", detail="; ".join([*doubts, check.detail]))
    return check


def _type_faults(gguf: GgufFile) -> Iterator[str]:
    """The stated type chooses how far the embeddings may be off."""
    stated, named = file_type(gguf), name_type(gguf.path)
    if main_kind(stated) not in {tensor.kind for tensor in gguf.tensors.values()}:
        yield f"it states the type {stated}, which none of its tensors has"
    elif named not in (None, stated):
        yield f"its name says {named}, and its metadata {stated}"


def _activation_faults(gguf: GgufFile, activation: str | None) -> Iterator[str]:
    if activation not in _SWITCHES:
        return
    on = [name for name in ("use_gelu", "use_silu") if gguf.metadata.get(f"clip.{name}")]
    if on != [_SWITCHES[activation]] * bool(_SWITCHES[activation]):
        yield f"the tower has the activation of {' and '.join(on) or 'no switch'}, and the model has {activation}"


def _tower(config: JsonObject) -> JsonObject:
    """The tower's config, with what its class in transformers has where config.json leaves a value out."""
    own: JsonObject = config.get("vision_config", {})
    of_class = getattr(class_config_of(config), "vision_config", None)
    return own if of_class is None else {**of_class.to_dict(), **own}


def _stated(config: JsonObject, processor: ImageProcessor, tower: JsonObject) -> Iterator[tuple[str, Value]]:
    kind, vision = str(config.get("model_type")), config.get("vision_config", {})
    if kind in _TYPES:
        yield "clip.projector_type", _TYPES[kind]
    yield "clip.vision.image_mean", [*processor.image_mean]
    yield "clip.vision.image_std", [*processor.image_std]
    qwen = kind.startswith("qwen")
    # A Pixtral, which is a llava, merges nothing, whatever its config.json says.
    merging = {
        "qwen3_vl": vision,
        "mistral3": config,
        "llava": dict.fromkeys(config.keys() & {"spatial_merge_size"}, 1),
    }
    lengths = {
        "patch_size": vision.get("patch_size"),
        "embedding_length": vision.get("embed_dim", vision.get("hidden_size")),
        "block_count": vision.get("depth" if qwen else "num_hidden_layers"),
        "attention.head_count": vision.get("num_heads" if qwen else "num_attention_heads"),
        "attention.layer_norm_epsilon": _EPSILONS.get(kind, tower.get("layer_norm_eps")),
        "image_size": None if qwen else vision.get("image_size"),
        "projector.scale_factor": config.get("scale_factor") if _TYPES.get(kind) == "idefics3" else None,
        "preproc_image_size": processor.size["longest_edge"] if _TYPES.get(kind) == "idefics3" else None,
        "spatial_merge_size": merging.get(kind, {}).get("spatial_merge_size"),
        "n_wa_pattern": vision["fullatt_block_indexes"][0] + 1 if vision.get("fullatt_block_indexes") else None,
    }
    yield from ((f"clip.vision.{key}", value) for key, value in lengths.items() if value is not None)


def _fault(key: str, got: Value | None, expected: Value) -> str:
    if got is not None and same(got, expected):
        return ""
    if key == "clip.projector_type":
        return f"it is of another model: a projector of the type {got}, and the model has {expected}"
    colours = " (the model would see other colours)" if key.endswith(("image_mean", "image_std")) else ""
    return f"{key} is {_short(got)}, and the model has {_short(expected)}{colours}"


def _short(value: Value | None) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_short(one) for one in value) + "]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _deepstack_faults(gguf: GgufFile, text: GgufFile, config: JsonObject) -> Iterator[str]:
    """Qwen3-VL adds outputs of inner layers of its tower in its first language layers."""
    indexes = _deepstack(config)
    if not indexes:
        return
    stated = gguf.metadata.get("clip.vision.is_deepstack_layers")
    layers = [number for number, used in enumerate(stated) if used] if isinstance(stated, list) else []
    if layers != sorted(indexes):
        yield f"deepstack was dropped: the file takes the tower's layers {layers}, the model {indexes}"
    read = text.of_architecture("n_deepstack_layers")
    if read != len(indexes):
        count = len(indexes)
        yield f"deepstack was dropped: {text.path.name} adds {read or 0} of the tower's layers, the model {count}"


def _deepstack(config: JsonObject) -> list[int]:
    return list(config.get("vision_config", {}).get("deepstack_visual_indexes") or [])


@dataclass(frozen=True)
class _ComparedTensor:
    """A tensor beside the model's weight."""

    place: ProjectorPlace
    matrix: bool  # it is neither a norm nor a bias
    error: float  # of the worst row, relative to its length
    fault: str  # what is wrong; empty for nothing
    of_base: bool = False  # it is the base's weight, which is another
    turned: bool = False  # it is the model's weight with the colours in reverse order


@dataclass
class _Comparison:
    compared: list[_ComparedTensor] = field(default_factory=list)
    # tensors that the file lacks, with the part that they belong to
    missing: list[ProjectorPlace] = field(default_factory=list)
    # weights of the model, and tensors of the file, without a known counterpart
    unknown: list[str] = field(default_factory=list)


def check_projector_weights(gguf: GgufFile, folder: Path, base: Path | None = None) -> Check:
    """Checks that every weight of tower and projector is the trained model's.

    Args:
        base: the model before training. With it, a part that was trained but not exported is identified for sure.
    """
    comparison = _compare(gguf, folder, base)
    wrong = [one for one in comparison.compared if one.fault]
    count, file = len(comparison.compared), gguf.path.name
    figures = {
        "looked_at": count,
        "different": len(wrong),
        "missing": len(comparison.missing),
        "of_the_base": sum(one.of_base for one in wrong),
    }
    if what := _whole_fault(comparison, wrong, base is not None):
        names = [one.tensor for one in comparison.missing] + [one.fault for one in wrong]
        return Check("projector_weights", file, "fail", len(names), 0, f"{what}: {first_few(names, _NAMES)}", figures)
    worst = max((one.error for one in comparison.compared), default=0.0)
    verdict: Verdict = "warn" if comparison.unknown or not count else "pass"
    detail = f"{count} of {len(gguf.tensors)} tensors are those of the trained model, the worst row {worst:.2g} off"
    detail += f"; not compared: {first_few(comparison.unknown, _NAMES)}" * bool(comparison.unknown)
    return Check("projector_weights", file, verdict, len(comparison.unknown), 0, detail, figures)


def _whole_fault(comparison: _Comparison, wrong: list[_ComparedTensor], with_base: bool) -> str:
    """What is wrong as a whole; empty for nothing."""
    parts = {one.part for one in comparison.missing}
    if parts:
        return "deepstack was dropped" if parts == {"deepstack"} else "weights of the model are missing"
    if not wrong:
        return ""
    if any(one.turned for one in wrong):
        return "the colours are exchanged: the patches are read from blue to red"
    parts = {one.place.part for one in wrong}
    part = "tower" if parts == {"tower"} else "projector" if parts <= {"projector", "deepstack"} else ""
    share = f"{len(wrong)} of {len(comparison.compared)} tensors"
    if all(one.of_base for one in wrong):
        what = f"the {part} was" if part else "tower and projector were"
        return f"{what} trained and not exported: {share} are the base's"
    if len(wrong) > _MOST_ARE_OTHERS * len(comparison.compared):
        return f"it is of another model: {share} are not the model's"
    if part and not with_base and _most_differ(part, comparison, wrong):
        rest = "projector" if part == "tower" else "tower"
        what = f"the {part} was trained and not exported, or is another's"
        return f"{what}: the {rest} is the model's, and {share} are not"
    return f"{share} are not the model's"


def _most_differ(part: str, comparison: _Comparison, wrong: list[_ComparedTensor]) -> bool:
    """Whether most matrices of this part differ from the model's."""
    of_part = [one for one in comparison.compared if (one.place.part == "tower") == (part == "tower")]
    matrices = [one for one in of_part if one.matrix]
    return 2 * len([one for one in matrices if one in wrong]) > len(matrices)


def _compare(gguf: GgufFile, folder: Path, base: Path | None) -> _Comparison:
    config, comparison = read_config(folder), _Comparison()
    shape = _shape(config, folder)
    weights = _weights(folder, shape)
    others = _weights(base, shape) if base is not None else {}
    compared = list(places(list(weights), shape, set(gguf.tensors)))
    for place in compared:
        stored = weights[place.source]
        if place.tensor in gguf.tensors:
            comparison.compared.append(_compared(gguf, place, stored, others.get(place.source)))
        elif not place.source.endswith("bias") or read_tensor(stored).any():
            comparison.missing.append(place)
    sources, tensors = {place.source for place in compared}, {place.tensor for place in compared}
    comparison.unknown += [name for name in (*weights, *gguf.tensors) if name not in sources | tensors]
    return comparison


def _shape(config: JsonObject, folder: Path) -> TowerShape:
    vision = config.get("vision_config", {})
    layers = int(vision.get("depth") or vision.get("num_hidden_layers") or 0)
    if config.get("model_type") not in LINED:
        return TowerShape(layers, 0, _deepstack(config), None)
    end = load_tokenizer(folder).convert_tokens_to_ids(LINE_END)
    return TowerShape(layers or _PIXTRAL_LAYERS, int(vision.get("num_attention_heads") or _PIXTRAL_HEADS), [], end)


def _weights(folder: Path, shape: TowerShape) -> dict[str, StoredTensor]:
    """The weights of tower and projector in a model's folder, and the embedding with the end of a line."""
    tensors = stored_tensors(folder).items()
    ends = shape.line_end is not None
    return {name: stored for name, stored in tensors if is_vision(name) or (ends and is_embedding(name))}


def _compared(
    gguf: GgufFile, place: ProjectorPlace, stored: StoredTensor, other: StoredTensor | None
) -> _ComparedTensor:
    """`other`: the base's weight of that name; None if it has none."""
    weight = place.arrange(read_tensor(stored))
    error, fault = _difference(gguf, place, weight)
    matrix = len(gguf.tensors[place.tensor].shape) > 1
    if not fault:
        return _ComparedTensor(place, matrix, error, "")
    turned = other_colours(place.tensor, weight)
    return _ComparedTensor(
        place,
        matrix,
        error,
        fault,
        of_base=other is not None and not _difference(gguf, place, place.arrange(read_tensor(other)))[1],
        turned=turned is not None and not _difference(gguf, place, turned)[1],
    )


def _difference(gguf: GgufFile, place: ProjectorPlace, weight: Any) -> tuple[float, str]:
    """The error of the worst row, and what is wrong; empty for nothing."""
    tensor = gguf.tensors[place.tensor]
    width = tensor.shape[0]
    if weight.numel() != tensor.elements or weight.numel() % width:
        return float("inf"), f"{tensor.name} has shape {list(tensor.shape)}, {place.source} {list(weight.shape)[::-1]}"
    expected, read, worst = weight.reshape(-1, width), weights_of(gguf, tensor), 0.0
    for rows in row_chunks(len(expected), width):
        values = Rows(expected[rows.start : rows.stop].float().numpy())
        computed = place.arrange is not as_in_model
        off = values.off(read(rows))
        distances, wrong = errors(tensor.kind, off, values, tuned=False, computed=computed)
        worst = max(worst, float(distances.max()))
        if wrong.any():
            return worst, f"{tensor.name} is not {place.source}"
        if (length := wrong_length(tensor.kind, rows.start, off, values)) is not None:
            return worst, f"{tensor.name} is {length:.3g} times {place.source}"
    return worst, ""
