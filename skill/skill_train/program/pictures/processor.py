"""The image processor that a model's files describe, and the number of tokens of a picture, by arithmetic alone.

Nothing is loaded for it, so a plan counts tokens without transformers. The arithmetic follows the image processors of
transformers 5.23 in their Pillow version, and a test compares it with them over many sizes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from skill_train.program.events import Refused
from skill_train.program.pictures.decode import PictureSize, bad_picture
from skill_train.program.pictures.engine import LINED, TILED, Engine, TileGrid, reduced_size

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
OWN_FILE, WHOLE_FILE = PROCESSOR_FILES
_CLIP = {"image_mean": (0.48145466, 0.4578275, 0.40821073), "image_std": (0.26862954, 0.26130258, 0.27577711)}
_HALF = {"image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5)}
_QWEN = _CLIP | {
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
}
_TILES = _HALF | {
    "size": {"longest_edge": 4 * 364},
    "max_image_size": {"longest_edge": 364},
    "do_image_splitting": True,
}
# Defaults of the processor classes, for settings that a file leaves out. A null counts as set, except Qwen's `size`.
PROCESSOR_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "gemma3": _HALF | {"size": {"height": 224, "width": 224}},
    "smolvlm": _TILES,
    "idefics3": _TILES,
    **dict.fromkeys(LINED, _CLIP | {"size": {"longest_edge": 1024}}),  # Llava is last: messages add which tower it has
}
# The classes of each family's image processors, without the endings Fast and Pil. The first files of Qwen2.5-VL name
# its second class, which transformers does not know: it uses the class of the family then.
_CLASSES = {
    "qwen2_vl": ("Qwen2VLImageProcessor",),
    "qwen2_5_vl": ("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor"),
    "qwen3_vl": ("Qwen2VLImageProcessor", "Qwen3VLImageProcessor"),
    "gemma3": ("Gemma3ImageProcessor",),
    "smolvlm": ("SmolVLMImageProcessor", "Idefics3ImageProcessor"),
    "idefics3": ("Idefics3ImageProcessor", "SmolVLMImageProcessor"),
    "mistral3": ("PixtralImageProcessor", "Mistral3ImageProcessor"),
    "llava": ("PixtralImageProcessor",),
}
_NUMBERS = ("patch_size", "merge_size", "temporal_patch_size")
_TILED_SIDE = 4096  # MAX_IMAGE_SIZE of SmolVLM's and Idefics3's processors: the longest side that is divided


@dataclass
class ImageProcessor:
    """The settings of a model's image processor, by the names that transformers gives them. A family without a setting
    has the value below."""

    kind: str  # the model type in config.json
    size: dict[str, int]  # of Qwen-VL the least and the most pixels, under its names `shortest_edge`, `longest_edge`
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    patch_size: int = 1
    merge_size: int = 1
    temporal_patch_size: int = 1
    max_image_size: dict[str, int] | None = None  # the side of a tile (SmolVLM, Idefics3)
    do_image_splitting: bool = False
    count: int = 0  # tokens of a picture (Gemma 3) or of a tile (SmolVLM, Idefics3)
    square: int = 0  # pixels along the square of patches that one token stands for (Mistral 3, Pixtral)
    tower_side: int | None = None  # `image_size` in config.json, where llama.cpp's converter finds a picture's side


class PictureTokens(NamedTuple):
    """How many tokens the language model reads for a picture."""

    parts: int  # tokens that stand for parts of it
    around: int  # tokens that are written around them: marks, and ends of lines
    read: int = 1  # pictures that the tower reads one by one: the picture, or its tiles and a small copy of it


def read_processor(config: Mapping[str, Any], files: Mapping[str, Any]) -> ImageProcessor:
    """The image processor of a model of `PROCESSOR_DEFAULTS`, from its config.json and those of `PROCESSOR_FILES` that
    it has, by name."""
    kind, whole = str(config.get("model_type")), _object(files.get(WHOLE_FILE))
    nested = whole.get("image_processor")
    own = nested if nested is not None else files.get(OWN_FILE)
    if not isinstance(own, Mapping):
        raise _unknown(OWN_FILE, "no such file" if own is None else repr(own)[:80])
    _require_family(kind, own)
    defaults = PROCESSOR_DEFAULTS[kind]
    values = defaults | {name: own[name] for name in defaults if name in own}
    size = _object(values["size"])
    if kind.startswith("qwen"):
        earlier = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}  # names of earlier files; they win
        size = dict(defaults["size"]) if values["size"] is None else size
        size |= {name: own[key] for key, name in earlier.items() if own.get(key) is not None}
    sides = ("shortest_edge", "longest_edge") if kind.startswith("qwen") else ("longest_edge",)
    for name in ("height", "width") if kind == "gemma3" else sides:
        _positive(size, name, "size")
    if kind in TILED:
        _positive(_object(values["max_image_size"]), "longest_edge", "max_image_size")
    for name in _NUMBERS:
        if name in values:
            _positive(values, name, OWN_FILE)
    tower = _object(config.get("vision_config")).get("image_size")
    processor = ImageProcessor(
        kind=kind,
        size=size,
        **{name: values[name] for name in (*_NUMBERS, "max_image_size") if name in values},
        do_image_splitting=bool(values.get("do_image_splitting")),
        image_mean=_colours(values["image_mean"]),
        image_std=_colours(values["image_std"]),
        count=_count(kind, whole),
        square=_square(whole) if kind in LINED else 0,
        tower_side=tower if isinstance(tower, int) and tower > 0 else None,
    )
    _require_agreement(config, processor)
    return processor


def _require_agreement(config: Mapping[str, Any], processor: ImageProcessor) -> None:
    """Refuses files that disagree about the tokens of a picture: the model would expect another number than the text
    has. Values that config.json leaves out are not compared."""
    kind, vision = processor.kind, _object(config.get("vision_config"))
    patch, scale = vision.get("patch_size"), config.get("scale_factor")
    compared: list[tuple[str, int, list[Any]]] = []
    if kind.startswith("qwen"):
        stated = (("patch_size", patch), ("merge_size", vision.get("spatial_merge_size")))
        compared = [(name, getattr(processor, name), [value]) for name, value in stated]
    elif kind == "gemma3":
        compared = [("image_seq_length", processor.count, [config.get("mm_tokens_per_image")])]
    elif kind in LINED and isinstance(patch, int):
        merged = 1 if kind == "llava" else config.get("spatial_merge_size")
        compared = [("patch_size with spatial_merge_size", processor.square, [merged and patch * merged])]
    elif kind in TILED and isinstance(patch, int) and isinstance(scale, int) and min(patch, scale) > 0:
        sides = (_object(processor.max_image_size).get("longest_edge"), processor.tower_side)
        counts = [(side // patch // scale) ** 2 for side in sides if side]
        compared = [("image_seq_len", processor.count, counts)]
    for name, value, right in compared:
        if value not in right and None not in right:
            raise Refused(
                f"the files of the model disagree about the tokens of a picture: {name} of its processor is {value}, "
                f"and config.json makes it {right[0]}",
                code="not_a_model",
                expected=str(right[0]),
                got=f"{name}: {value}",
                hint=f"download the whole model, or copy {OWN_FILE} and {WHOLE_FILE} from its base model",
            )


def _require_family(kind: str, own: Mapping[str, Any]) -> None:
    """Refuses a processor of another class, and steps that this arithmetic leaves out."""
    name = own.get("image_processor_type")
    if name is not None and str(name).removesuffix("Fast").removesuffix("Pil") not in _CLASSES.get(kind, ()):
        raise _unknown(f"image_processor_type of {kind}", repr(name)[:80], " or ".join(_CLASSES.get(kind, ("none",))))
    usual_steps = {"do_resize": True, "do_rescale": True, "do_normalize": True}
    for step, usual in (usual_steps | {"do_pan_and_scan": False, "do_center_crop": False}).items():
        value = own.get(step)
        if value is not None and bool(value) is not usual:
            raise _unknown(step, repr(value)[:80], str(usual).lower())
    factor = own.get("rescale_factor")
    if factor is not None and not (isinstance(factor, (int, float)) and math.isclose(255 * factor, 1, rel_tol=1e-4)):
        raise _unknown("rescale_factor", repr(factor)[:80], "1/255")


def _object(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _positive(values: Mapping[str, Any], name: str, where: str) -> int:
    value = values.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _unknown(f"{name} of {where}", repr(value)[:80], "a whole number above 0")
    return value


def _square(whole: dict[str, Any]) -> int:
    side = _positive({"patch_size": 16} | whole, "patch_size", WHOLE_FILE)
    return side * _positive({"spatial_merge_size": 1} | whole, "spatial_merge_size", WHOLE_FILE)


def _count(kind: str, whole: dict[str, Any]) -> int:
    names = {"gemma3": ("image_seq_length", 256), "smolvlm": ("image_seq_len", 169), "idefics3": ("image_seq_len", 169)}
    if kind not in names:
        return 0
    name, default = names[kind]
    return _positive({name: default} | whole, name, WHOLE_FILE)


def _colours(value: Any) -> tuple[float, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(each, (int, float)) for each in value):
        raise _unknown("image_mean or image_std", repr(value)[:80], "three numbers")
    return tuple(float(each) for each in value)


def _unknown(what: str, got: str, expected: str = "the file of an image processor") -> Refused:
    return Refused(
        f"how this model prepares a picture is not known: {what} is {got}",
        code="not_a_model",
        expected=expected,
        got=got,
        hint="download the whole model, or copy preprocessor_config.json from its base model",
    )


def grid_of(processor: ImageProcessor, size: PictureSize, engine: Engine | None = None) -> TileGrid:
    """How a picture is divided: into tokens (Qwen-VL, Mistral 3, Pixtral) or tiles (SmolVLM, Idefics3; 0 x 0 of a
    picture that is not divided). Gemma 3 divides none. A picture of which nothing would be left is refused."""
    if processor.kind == "gemma3":
        return TileGrid(1, 1)
    if engine is not None:
        return engine.grid(size)
    if processor.kind.startswith("qwen"):
        return _squares(processor, size)
    return _lines(processor, size) if processor.kind in LINED else _tiles(processor, size)


def picture_tokens(processor: ImageProcessor, size: PictureSize, engine: Engine | None = None) -> PictureTokens:
    """The tokens of a picture of this size, once it is upright."""
    rows, columns = grid_of(processor, size, engine)
    if processor.kind == "gemma3":  # two marks; the processor adds a blank line before and behind
        return PictureTokens(processor.count, 2 if engine is not None else 4)
    if processor.kind.startswith("qwen"):
        return PictureTokens(rows * columns, 2)
    if processor.kind in LINED:
        return PictureTokens(rows * columns, rows)
    read = rows * columns + 1  # two marks a part, a line end a row and one after all, and a last mark
    return PictureTokens(processor.count * read, 2 * read + rows + bool(rows) + 1, read)


def _squares(processor: ImageProcessor, size: PictureSize) -> TileGrid:
    """`smart_resize` of Qwen2-VL's processor, divided by the square of a token."""
    side = processor.patch_size * processor.merge_size
    least, most = processor.size["shortest_edge"], processor.size["longest_edge"]
    rows, columns = round(size.height / side), round(size.width / side)
    if rows * side * columns * side > most:
        shrink = math.sqrt(size.height * size.width / most)
        rows = max(1, math.floor(size.height / shrink / side))
        columns = max(1, math.floor(size.width / shrink / side))
    elif rows * side * columns * side < least:
        grow = math.sqrt(least / (size.height * size.width))
        rows, columns = math.ceil(size.height * grow / side), math.ceil(size.width * grow / side)
    return TileGrid(rows, columns)


def _tiles(processor: ImageProcessor, size: PictureSize) -> TileGrid:
    """As `_preprocess` of both processors resizes and divides. Their `get_number_of_image_patches` rounds one side
    from the size before the other was rounded, and counts fewer tiles where `size` is not a multiple of a tile."""
    if not processor.do_image_splitting or processor.max_image_size is None:
        return TileGrid(0, 0)
    tile = processor.max_image_size["longest_edge"]
    width, height = _reduced(size, processor.size["longest_edge"])
    ratio = width / height
    if width >= height:
        columns = math.ceil(width / tile)
        rows = math.ceil(int(columns * tile / ratio) / tile)
    else:
        rows = math.ceil(height / tile)
        columns = math.ceil(int(rows * tile * ratio) / tile)
    return TileGrid(rows, columns) if max(rows, columns) > 1 else TileGrid(0, 0)


def _reduced(size: PictureSize, longest: int) -> PictureSize:
    """The size as llama.cpp reduces it, then made smaller until no side is above `_TILED_SIDE`."""
    width, height = (max(side, 1) for side in reduced_size(size, longest))
    ratio = width / height
    if width >= height and width > _TILED_SIDE:
        width, height = _TILED_SIDE, int(_TILED_SIDE / ratio)
    elif height > width and height > _TILED_SIDE:
        width, height = int(_TILED_SIDE * ratio), _TILED_SIDE
    return PictureSize(max(width, 1), max(height, 1))


def _lines(processor: ImageProcessor, size: PictureSize) -> TileGrid:
    """Mistral 3 and Pixtral: PixtralProcessor resizes pictures to whole squares of patches."""
    longest = processor.size["longest_edge"]
    ratio = max(size.height / longest, size.width / longest)
    width, height = (math.floor(edge / ratio) for edge in size) if ratio > 1 else size
    if not width or not height:
        expected = f"a side of at least a pixel, once the longer one has {longest}"
        raise bad_picture("a picture", "is too narrow", f"{size.width} x {size.height}", expected)
    return TileGrid((height - 1) // processor.square + 1, (width - 1) // processor.square + 1)


def limited_size(kind: str, size: Any, tile: Any, least: int | None, most: int | None) -> Any:
    """The `size` of an image processor with the recipe's limits, each family in its own terms. `tile` is its
    `max_image_size`. Refuses a limit that the family does not have."""
    if least is None and most is None:
        return size
    if kind.startswith("qwen"):
        edges = {"shortest_edge": least, "longest_edge": most}  # Qwen's names for numbers of pixels
        return {**dict(size), **{name: value for name, value in edges.items() if value is not None}}
    if least is not None or kind == "gemma3":
        name = "min_pixels" if least is not None else "max_pixels"
        raise Refused(
            f"{name} has no meaning for the family {kind}",
            code="bad_recipe",
            expected="every picture is resized to one size" if kind == "gemma3" else "max_pixels alone",
            got=f"{name}: {least if least is not None else most}",
            hint="remove the limit from the recipe",
        )
    edge = math.isqrt(most or 0)
    if kind in TILED:
        side = int(tile["longest_edge"])
        edge = max(1, edge // side) * side
    return {"longest_edge": edge}


def limited_processor(processor: ImageProcessor, least: int | None, most: int | None) -> ImageProcessor:
    """The image processor with the limits of a recipe. Raises as `limited_size`."""
    return replace(processor, size=limited_size(processor.kind, processor.size, processor.max_image_size, least, most))
