"""GGUF files of tiny models by our own conversion, which starts llama.cpp's converter as `export-gguf` does."""

from __future__ import annotations

from pathlib import Path

from skill_train.gguf.convert import ConvertRequest, convert
from skill_train.llama import get_converter
from told import Warnings, quiet


def converted(model: Path, out: Path, outtype: str = "f32") -> Path:
    job = ConvertRequest(model, out, out / "convert.json", "m", outtype, get_converter.find())
    convert(job, progress=quiet, warn=Warnings())
    return out / f"m-{outtype}.gguf"
