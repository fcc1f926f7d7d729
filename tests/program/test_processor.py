"""The tokens of a picture by arithmetic, against the image processors of transformers: equal, for every size and every
form of a model's files."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

import tiny_vision
from skill_train.program.events import Refused
from skill_train.program.pictures.decode import PICTURE_RATIO, PictureSize
from skill_train.program.pictures.engine import Engine
from skill_train.program.pictures.processor import (
    PROCESSOR_DEFAULTS,
    ImageProcessor,
    grid_of,
    limited_processor,
    limited_size,
    picture_tokens,
    read_processor,
)

PATCHES = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
PIXELS = {"min_pixels": 3136, "max_pixels": 12845056}
TILES = {"max_image_size": {"longest_edge": 512}, "size": {"longest_edge": 2048}, "do_image_splitting": True}
# As far as sizes go, what the published models have (Hugging Face, 2026-11): family, own file, processor_config.json.
PUBLISHED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Qwen2-VL-2B": ("qwen2_vl", {"image_processor_type": "Qwen2VLImageProcessor"} | PATCHES | PIXELS, {}),
    "Qwen2.5-VL-3B": ("qwen2_5_vl", {"image_processor_type": "Qwen2VLImageProcessorFast"} | PATCHES | PIXELS, {}),
    "Qwen3-VL-2B": (
        "qwen3_vl",
        {"image_processor_type": "Qwen2VLImageProcessorFast"}
        | {**PATCHES, "patch_size": 16, "size": {"longest_edge": 16777216, "shortest_edge": 65536}},
        {},
    ),
    "gemma-3-4b": (
        "gemma3",
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 896, "width": 896}}
        | {"do_pan_and_scan": None, "do_resize": True},
        {"image_seq_length": 256},
    ),
    "SmolVLM-256M": ("idefics3", {"image_processor_type": "Idefics3ImageProcessor"} | TILES, {"image_seq_len": 64}),
    "SmolVLM2-500M": ("smolvlm", {"image_processor_type": "SmolVLMImageProcessor"} | TILES, {"image_seq_len": 64}),
    "Mistral-Small-3.1": (
        "mistral3",
        {"image_processor_type": "PixtralImageProcessorFast", "patch_size": 14, "size": {"longest_edge": 1540}},
        {"patch_size": 14, "spatial_merge_size": 2},
    ),
    "pixtral-12b": (
        "llava",
        {"image_processor_type": "PixtralImageProcessor", "patch_size": {"height": 16, "width": 16}}
        | {"size": {"longest_edge": 1024}},
        {"patch_size": 16},
    ),
}


def _read(name: str) -> ImageProcessor:
    kind, own, whole = PUBLISHED[name]
    files = {"preprocessor_config.json": own, "processor_config.json": whole}
    return read_processor({"model_type": kind}, files)


@pytest.mark.parametrize(
    ("name", "size", "tokens", "around"),
    [
        ("Qwen2-VL-2B", (1280, 720), 46 * 26, 2),  # 45.7 and 25.7 squares of 28 pixels
        ("Qwen2.5-VL-3B", (10, 10), 4, 2),  # 56 x 56 pixels at least: 2 x 2 squares
        ("Qwen3-VL-2B", (640, 480), 20 * 15, 2),  # squares of 32 pixels
        ("gemma-3-4b", (640, 480), 256, 4),
        ("SmolVLM-256M", (640, 480), 64 * 13, 26 + 3 + 2),  # 2048 x 1536: 4 x 3 tiles, and the whole picture
        ("SmolVLM2-500M", (480, 640), 64 * 13, 26 + 4 + 2),
        ("Mistral-Small-3.1", (640, 480), 23 * 18, 18),  # squares of 28 pixels; an end of each line
        ("pixtral-12b", (640, 480), 40 * 30, 30),  # patches of 16 pixels
    ],
)
def test_published_models(name: str, size: tuple[int, int], tokens: int, around: int) -> None:
    """By hand, with the marks and ends of lines that are written around them."""
    assert picture_tokens(_read(name), PictureSize(*size))[:2] == (tokens, around)


@pytest.mark.parametrize(
    ("name", "tokens", "around"), [("Qwen2-VL-2B", 46 * 26, 2), ("gemma-3-4b", 256, 2), ("SmolVLM2-500M", 64 * 13, 32)]
)
def test_what_llama_cpp_makes_is_counted_too(name: str, tokens: int, around: int) -> None:
    """By hand: 2048 x 1152 pixels are 4 x 3 tiles, each with two marks, and three lines end."""
    processor = _read(name)
    counted = picture_tokens(processor, PictureSize(1280, 720), Engine(processor))
    assert (counted.parts, counted.around) == (tokens, around - (name == "SmolVLM2-500M"))


@pytest.mark.parametrize(
    ("kind", "files", "said"),
    [
        ("qwen2_vl", {}, "no such file"),
        ("qwen2_vl", {"preprocessor_config.json": {"size": {"shortest_edge": 3136}}}, "longest_edge of size"),
        ("qwen2_vl", {"preprocessor_config.json": {"image_processor_type": "CLIPImageProcessor"}}, "CLIPImage"),
        ("gemma3", {"preprocessor_config.json": {"do_pan_and_scan": True}}, "do_pan_and_scan is True"),
        ("gemma3", {"preprocessor_config.json": {}, "processor_config.json": {"image_seq_length": "9"}}, "image_seq"),
        ("smolvlm", {"preprocessor_config.json": {"do_resize": False}}, "do_resize is False"),
        ("gemma3", {"preprocessor_config.json": {"size": None}}, "height of size is None"),
        ("qwen3_vl", {"preprocessor_config.json": {"merge_size": None}}, "merge_size of"),
        ("qwen3_vl", {"preprocessor_config.json": {"image_mean": None}}, "image_mean"),
        ("smolvlm", {"preprocessor_config.json": {"max_image_size": {"height": 5}}}, "max_image_size"),
        ("mistral3", {"preprocessor_config.json": {"size": 1024}}, "longest_edge of size is None"),
        ("mistral3", {"preprocessor_config.json": {}, "processor_config.json": {"patch_size": {}}}, "patch_size"),
        ("qwen3_vl", {"preprocessor_config.json": {"do_normalize": False}}, "do_normalize is False"),
        ("smolvlm", {"preprocessor_config.json": {"do_rescale": False}}, "do_rescale is False"),
        ("gemma3", {"preprocessor_config.json": {"rescale_factor": 1 / 127.5}}, "rescale_factor is 0.00784"),
    ],
)
def test_what_is_not_known_is_said(kind: str, files: dict[str, Any], said: str) -> None:
    with pytest.raises(Refused) as caught:
        read_processor({"model_type": kind}, files)
    assert said in caught.value.error["message"] and caught.value.error["code"] == "not_a_model"


@pytest.mark.parametrize("kind", tiny_vision.KINDS)
def test_files_that_disagree_about_the_tokens_of_a_picture_are_refused(kind: str) -> None:
    """The model refuses its own processor's tokens then: "Image features and image tokens do not match"."""
    folder = tiny_vision.cached(kind)
    config, own, whole = (
        json.loads(file.read_text()) if (file := folder / name).is_file() else {}
        for name in ("config.json", "preprocessor_config.json", "processor_config.json")
    )
    about = {"preprocessor_config.json": own, "processor_config.json": whole}
    assert read_processor(config, about).kind == config["model_type"]
    changed = {
        "gemma3": (whole, "image_seq_length"),
        **dict.fromkeys(("smolvlm", "idefics3"), (whole, "image_seq_len")),
        **dict.fromkeys(("mistral3", "pixtral"), (whole, "patch_size")),
    }
    document, name = changed.get(kind, (own, "merge_size"))
    document[name] *= 4
    with pytest.raises(Refused) as caught:
        read_processor(config, about)
    words = caught.value.error
    assert words["code"] == "not_a_model" and f"disagree about the tokens of a picture: {name}" in words["message"]


def test_values_as_their_files_round_them_are_the_usual_ones() -> None:
    own = {"rescale_factor": 0.00392156862745098, "do_rescale": True, "do_normalize": None, "do_convert_rgb": False}
    assert read_processor({"model_type": "gemma3"}, {"preprocessor_config.json": own}).kind == "gemma3"


def test_a_picture_of_which_nothing_is_left_is_refused() -> None:
    """200 pixels become 100, and one becomes none."""
    processor = limited_processor(_read("Mistral-Small-3.1"), None, 100 * 100)
    with pytest.raises(Refused, match="too narrow"):
        grid_of(processor, PictureSize(200, 1))


EDGES = [(a, b) for a in (1, 13, 14, 28, 41, 42, 43, 70, 512, 513, 1024) for b in (27, 98, 364, 1023)]


@pytest.mark.slow
def test_a_null_of_qwen_is_its_default(tmp_path: Path) -> None:
    own = {"image_processor_type": "Qwen2VLImageProcessor", "size": None, "min_pixels": None, "max_pixels": 5 * 28**2}
    theirs = _processor(tmp_path, "qwen2_vl", own, {})
    ours = read_processor({"model_type": "qwen2_vl"}, {"preprocessor_config.json": own})
    assert ours.size == dict(theirs.size) == {"shortest_edge": 3136, "longest_edge": 3920}


def _sizes(count: int, largest: int = 10_000) -> list[PictureSize]:
    """Those at which a rounding turns, then of every order of magnitude, from square to 200 times as long as wide."""
    draw, found = random.Random(26), list[PictureSize]()
    edges = iter(EDGES if largest == 10_000 else [])
    while len(found) < count:
        width = math.exp(draw.uniform(0, math.log(largest)))
        height = width * math.exp(draw.uniform(-1, 1) * math.log(PICTURE_RATIO))
        size = PictureSize(*next(edges, (max(1, round(width)), max(1, round(height)))))
        if max(size) <= min(largest, PICTURE_RATIO * min(size)):
            found.append(size)
    return found


def _processor(folder: Path, kind: str, own: dict[str, Any], whole: dict[str, Any]) -> Any:
    """transformers' own image processor of a folder with these files."""
    from transformers import AutoImageProcessor

    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    for name, document in (("preprocessor_config.json", own), ("processor_config.json", whole)):
        (folder / name).write_text(json.dumps(document))
    return AutoImageProcessor.from_pretrained(str(folder), backend="pil")


LIMITS: list[tuple[int | None, int | None]] = [(None, None), (None, 256 * 28 * 28), (100_000, 200_000), (9, 50)]


@pytest.mark.slow
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("name", ["Qwen2-VL-2B", "Qwen3-VL-2B"])
def test_squares_are_those_of_transformers(name: str, limits: tuple[int | None, int | None], tmp_path: Path) -> None:
    theirs, ours = _processor(tmp_path, *PUBLISHED[name]), limited_processor(_read(name), *limits)
    theirs.size = limited_size(ours.kind, theirs.size, None, *limits)
    for size in _sizes(2_000):
        patches = theirs.get_number_of_image_patches(size.height, size.width, {})
        assert picture_tokens(ours, size).parts == patches // 4, size


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, 300_000, 90_000])
def test_lines_are_those_of_transformers(limit: int | None) -> None:
    """PixtralProcessor's own count uses this function of the image processor."""
    import numpy as np
    from transformers.image_utils import ChannelDimension
    from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

    ours = limited_processor(_read("Mistral-Small-3.1"), None, limit)
    for size in _sizes(1_000):
        picture = np.broadcast_to(np.zeros(1), (3, size.height, size.width))
        high, wide = get_resize_output_image_size(picture, ours.size["longest_edge"], 28, ChannelDimension.FIRST)
        assert grid_of(ours, size) == (high // 28, wide // 28), size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "longest", "tile", "splits", "count"),
    [
        ("smolvlm", 256, 64, True, 150),
        ("smolvlm", 250, 64, True, 150),
        ("smolvlm", 100, 64, True, 60),
        ("smolvlm", 64, 64, True, 40),
        ("smolvlm", 4200, 1025, True, 3),
        ("smolvlm", 256, 64, False, 10),
        ("idefics3", 250, 64, True, 150),
    ],
)
def test_tiles_are_those_of_transformers(
    kind: str, longest: int, tile: int, splits: bool, count: int, tmp_path: Path
) -> None:
    """Of drawn pictures, which the processor divides: its own count of tiles differs from what it makes."""
    from PIL import Image

    own = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": tile}, "do_image_splitting": splits}
    theirs = _processor(tmp_path, kind, own, {"image_seq_len": 16})
    ours = read_processor({"model_type": kind}, {"preprocessor_config.json": own})
    for size in _sizes(count, 700 if longest < 1000 else 9_000):
        made = theirs(images=[[Image.new("RGB", size)]], return_tensors="np", return_row_col_info=True)
        assert grid_of(ours, size) == (made["rows"][0][0], made["cols"][0][0]), size
        assert picture_tokens(ours, size).read == made["pixel_values"].shape[1], size


SETTINGS = ("size", "patch_size", "merge_size", "temporal_patch_size", "max_image_size", "do_image_splitting")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["as published", "nested", "nothing"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_files_are_read_as_transformers_reads_them(name: str, form: str, tmp_path: Path) -> None:
    kind, own, whole = PUBLISHED[name]
    if form != "as published":
        whole = whole | ({"image_processor": own} if form == "nested" else {})
        own = {"image_processor_type": own["image_processor_type"]}
    theirs = _processor(tmp_path, kind, own, whole)
    ours = read_processor({"model_type": kind}, {"preprocessor_config.json": own, "processor_config.json": whole})
    for setting in SETTINGS:
        if setting in PROCESSOR_DEFAULTS[kind]:
            value = getattr(theirs, setting)
            assert getattr(ours, setting) == (dict(value) if setting == "size" else value)
    assert (ours.image_mean, ours.image_std) == (tuple(theirs.image_mean), tuple(theirs.image_std))
