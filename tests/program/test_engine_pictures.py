"""The sizes, tiles and borders of llama.cpp's pictures, worked out by hand from its source. That the tensors are
llama.cpp's own is in tests/verify/test_engine_pictures.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import tiny_vision
from skill_train.program.events import Refused
from skill_train.program.pictures.decode import PictureSize
from skill_train.program.pictures.engine import ENGINE_VERSION, Engine, aligned_size, reduced_size
from skill_train.program.pictures.processor import ImageProcessor
from skill_train.program.pictures.tokens import Pictures
from skill_train.program.tokenizer import load_tokenizer


def _engine(kind: str, **processor: Any) -> Engine:
    usual = {"size": {}, "image_mean": (0.5,) * 3, "image_std": (0.5,) * 3} | processor
    return Engine(ImageProcessor(kind, tower_side=112 if kind == "gemma3" else 64, **usual))


def test_it_follows_the_llama_cpp_that_is_installed_with_this_version() -> None:
    lock = (Path(__file__).parents[2] / "requirements.lock").read_text().splitlines()
    assert f"llama-cpp-python=={ENGINE_VERSION}" in lock


QWEN = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}


@pytest.mark.parametrize(
    ("size", "resized"),
    [
        ((300, 200), (308, 196)),  # 10.7 and 7.1 squares of 28
        ((70, 70), (84, 84)),  # 2.5 squares are 3; transformers rounds to an even number, 2
        ((28, 28), (84, 84)),  # 8 tokens at least: 28 x 2.83 is 2.83 squares, made whole upwards
        ((4000, 3000), (2044, 1540)),  # 4096 tokens at most: divided by 1.933, made whole downwards
        ((1, 200), (28, 1120)),  # 200 pixels times 5.6, and one square at least
    ],
)
def test_sizes_of_qwen(size: tuple[int, int], resized: tuple[int, int]) -> None:
    engine = _engine("qwen2_vl", **QWEN)
    assert engine.size(PictureSize(*size)) == resized
    assert engine.grid(PictureSize(*size)) == (resized[1] // 28, resized[0] // 28)


def test_sizes_are_of_single_precision() -> None:
    """6 x 3 pixels times 18.67, for 8 tokens, are exactly 4 and 2 squares. In single precision they are a hair more: 5
    and 3."""
    assert aligned_size(PictureSize(6, 3), 28, (8 * 28**2, 4096 * 28**2)) == (140, 84)


def test_a_picture_lies_amid_black_in_its_own_shape() -> None:
    """300 x 150 in a square of 112: 112 x 56, with 28 black lines above and below."""
    [part] = _engine("gemma3").parts(Image.new("RGB", (300, 150), (200, 100, 50)))
    assert part.size == (112, 112)
    lines = [part.getpixel((60, y)) for y in range(112)]
    assert lines == [(0, 0, 0)] * 28 + [(200, 100, 50)] * 56 + [(0, 0, 0)] * 28


def test_a_picture_of_the_right_size_is_copied() -> None:
    image = Image.effect_noise((112, 112), 90).convert("RGB")
    [part] = _engine("gemma3").parts(image)
    assert part.tobytes() == image.tobytes()


@pytest.mark.parametrize("kind", ["smolvlm", "idefics3"])
@pytest.mark.parametrize(
    ("size", "reduced", "grid"),
    [((40, 30), (256, 192), (3, 4)), ((33, 400), (22, 256), (4, 1)), ((300, 300), (256, 256), (4, 4))],
)
def test_tiles(kind: str, size: tuple[int, int], reduced: tuple[int, int], grid: tuple[int, int]) -> None:
    """The longer side is 256, the other an even number: 256 * 33 / 400 is 21.1. Tiles have 64 pixels."""
    engine = _engine(kind, size={"longest_edge": 256})
    assert (reduced_size(PictureSize(*size), engine.longest), engine.grid(PictureSize(*size))) == (reduced, grid)
    parts = engine.parts(Image.new("RGB", size))
    assert len(parts) == grid[0] * grid[1] + 1 and {part.size for part in parts} == {(64, 64)}


def test_a_small_picture_is_one_tile_too() -> None:
    """Where the model's own processor divides nothing."""
    engine = _engine("smolvlm", size={"longest_edge": 64})
    assert engine.grid(PictureSize(64, 40)) == (1, 1)
    assert len(engine.parts(Image.new("RGB", (64, 40)))) == 2


def test_colours_are_normalized_in_single_precision() -> None:
    """255 is (1 - 0.5) / 0.5; each colour has its own plane."""
    engine = _engine("gemma3")
    pixels = engine.pixels(Image.new("RGB", (112, 112), (255, 0, 51)))
    assert pixels.dtype == "float32" and pixels.shape == (3, 112, 112)
    assert [float(plane[0, 0]) for plane in pixels] == pytest.approx([1, -1, -0.6], abs=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "limits", "said"),
    [
        ("mistral3", {"max_pixels": 10_000}, "llama.cpp ignores the limit"),
        ("qwen2-vl", {"max_pixels": 10_000}, "llama.cpp ignores the limit"),
        ("qwen3-vl", {"min_pixels": 10_000}, "llama.cpp ignores the limit"),
    ],
)
def test_what_llama_cpp_would_not_show_is_not_trained(kind: str, limits: dict[str, int], said: str) -> None:
    folder = str(tiny_vision.cached(kind))
    recipe: Any = {"model": folder, "revision": None, "preprocess": "engine", **limits}
    with pytest.raises(Refused, match=said) as caught:
        Pictures(recipe, load_tokenizer(folder, None))
    assert caught.value.error["code"] == "bad_recipe"
