"""Pairs of GGUF files, which llama.cpp's converter makes of the tiny vision models, and pictures to ask about.

Never change a kept file: copy it first.
"""

from __future__ import annotations

import io
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import gguf_maker
import tiny
import tiny_vision
from skill_train.evaluate.pictures import RunPictures
from skill_train.gguf.convert import convert_with
from skill_train.llama import get_converter
from skill_train.llama.pictures.compare import Pair
from skill_train.reference.pictures import PictureQuestion

_QUESTION, _ANSWER = "What is the colour of the sky here?", "It is blue and 12 birds fly."


@cache
def pair(kind: str, *, seed: int = 0, projector: str = "f16", text: str = "f16") -> Pair:
    """The files of `tiny_vision.cached(kind, seed=seed)`, of these types."""
    folder = tiny_vision.cached(kind, seed=seed)
    made = folder.with_name(f"{folder.name}-pair")
    return Pair(
        _file(folder, made / f"model-{text}.gguf", text), _file(folder, made / f"mmproj-{projector}.gguf", projector)
    )


def _file(folder: Path, file: Path, kind: str) -> Path:
    def make(part: Path) -> None:
        with tempfile.TemporaryDirectory(dir=file.parent) as work:
            if file.name.startswith("mmproj"):
                projector(folder, Path(work) / file.name, kind).rename(part)
            else:
                gguf_maker.export(folder, Path(work), outtype=kind).rename(part)

    return tiny.made_once(file, make)


def projector(folder: Path, file: Path, kind: str = "f16") -> Path:
    """As `export-gguf` makes it: what llama.cpp's converter leaves out of Pixtral's is in it."""
    options = ["--mmproj", "--outtype", kind]
    convert_with(get_converter.find_or_fetch(), folder, file, options, lambda done, total, text: None)
    return file


def question(*pictures: Any) -> PictureQuestion:
    """One about these pictures, with its answer."""
    shown = [{"type": "image"} for _ in pictures]
    return PictureQuestion(
        [
            {"role": "user", "content": [*shown, {"type": "text", "text": _QUESTION}]},
            {"role": "assistant", "content": [{"type": "text", "text": _ANSWER}]},
        ],
        list(pictures),
    )


def read_by(base: Path, folder: Path, preprocess: str = "model") -> RunPictures:
    """The pictures in a folder, as a base reads them."""
    return RunPictures(folder, {"model": str(base), "revision": None, "preprocess": preprocess})


def picture(width: int, height: int, *, seed: int = 0) -> Any:
    """Soft patches of colour, in RGB."""
    import numpy as np
    from PIL import Image

    colours = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(colours).resize((width, height), Image.Resampling.BICUBIC)


def stored(kind: str) -> Any:
    """A picture as Pillow reads it from a file of this kind, before it is turned upright and made RGB."""
    from PIL import Image

    plain = picture(300, 200, seed=3)
    if kind == "rotated":
        exif = Image.Exif()
        exif[0x0112] = 6
        return _through(plain, "JPEG", exif=exif)
    if kind == "RGBA":
        plain.putalpha(plain.convert("L"))
        return _through(plain, "PNG")
    if kind == "webp":
        return _through(plain, "WEBP")
    return _through(plain.convert(kind), "JPEG")


def _through(image: Any, kind: str, **options: Any) -> Any:
    from PIL import Image

    file = io.BytesIO()
    image.save(file, kind, **options)
    return Image.open(file)


def changed(folder: Path, out: Path, *parts: str) -> Path:
    """A copy of a model folder with other weights, as after training, where the name contains one of `parts`."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, out)
    file = out / "model.safetensors"
    weights = load_file(str(file))
    generator = torch.Generator().manual_seed(7)
    for name, weight in weights.items():
        if any(part in name for part in parts) and weight.ndim > 1:
            weights[name] = weight + 0.05 * torch.randn(weight.shape, generator=generator).to(weight.dtype)
    save_file(weights, str(file), metadata={"format": "pt"})
    return out
