"""Exports made without our own steps: PEFT merges, llama.cpp's converter and its bindings write the files.

`exported("qwen2")` is a fine-tuned tiny model with its GGUF files, kept beside the tiny models. Never change its files.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny
import warm_python

QUANTIZE_CODE = """
import sys, ctypes, llama_cpp
source, *wanted = sys.argv[1:]
for kind, name in zip(wanted[::2], wanted[1::2]):
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = getattr(llama_cpp, "LLAMA_FTYPE_MOSTLY_" + kind.upper()), 2
    if llama_cpp.llama_model_quantize(source.encode(), name.encode(), ctypes.byref(params)):
        sys.exit(f"no {kind}")
"""


@dataclass(frozen=True)
class Export:
    """A tiny base, its adapter, and what was made of the two."""

    base: Path
    adapter: Path
    merged: Path
    folder: Path
    quants: tuple[str, ...]

    @property
    def ggufs(self) -> list[Path]:
        return sorted(map(self.file, ("f16", *self.quants)))

    def file(self, kind: str) -> Path:
        """A quantized one is made when it is first asked for: of a large vocabulary that takes seconds."""
        unquantized = self.folder / "model-f16.gguf"
        if kind == "f16":
            return unquantized
        assert kind in self.quants
        return tiny.made_once(self.folder / f"model-{kind}.gguf", lambda part: quantize(unquantized, {kind: part}))


def exported(kind: str, *, quants: tuple[str, ...] = ("q8_0", "q4_k_m"), times: int = 1, **adapter: Any) -> Export:
    """An export of the tiny model `kind` (256 wide, so that K-quants apply) with an adapter of `tiny.adapter`.

    `times` is how often the adapter is applied: 0 and 2 are faults.
    """
    base = tiny.cached(kind, hidden=256)
    wanted = json.dumps([base.name, times, adapter, Path(__file__).read_text()])
    final = base.parent / f"export-{kind}-{hashlib.sha256(wanted.encode()).hexdigest()[:16]}"

    def make(part: Path) -> None:
        part.mkdir()
        tiny.adapter(base, part / "adapter", **{"size": 0.1} | adapter)
        merge(base, part / "adapter", part / "merged", times=times)
        export(part / "merged", part / "gguf")

    tiny.made_once(final, make)
    return Export(base, final / "adapter", final / "merged", final / "gguf", quants)


def merge(base: Path, adapter: Path, out: Path, *, times: int = 1) -> Path:
    """base + adapter by PEFT. The base's other files are copied as they are."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(base), dtype=torch.float32)
    for _ in range(times):
        model = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    model.save_pretrained(str(out))
    made = {path.name for path in out.iterdir()} - {"config.json", "generation_config.json"}
    for path in base.iterdir():
        if path.name not in made:
            shutil.copy(path, out / path.name)
    return out


def export(
    model: Path, out: Path, *, quants: tuple[str, ...] = (), outtype: str = "f16", options: tuple[str, ...] = ()
) -> Path:
    """`model-<type>.gguf` files by llama.cpp's converter and quantizer; returns the unquantized one.

    Args:
        options: further ones of the converter.
    """
    out.mkdir(exist_ok=True)
    source = tiny.vocab_folder().parent
    unquantized = out / f"model-{outtype}.gguf"
    environment = dict(os.environ, PYTHONPATH=str(source / "gguf-py"), HF_HUB_OFFLINE="1")
    script = source / "convert_hf_to_gguf.py"
    log = out / ".convert.log"
    words = (model, "--outfile", unquantized, "--outtype", outtype, *options)
    assert warm_python.run(script, *words, log=log, environment=environment) == 0, log.read_text()[-2000:]
    log.unlink()
    if quants:
        quantize(unquantized, {kind: out / f"model-{kind}.gguf" for kind in quants})
    return unquantized


def quantize(source: Path, wanted: dict[str, Path]) -> None:
    """Files by their types, all in one process, because each takes half a second to import llama.cpp."""
    words = [str(word) for pair in wanted.items() for word in pair]
    command = [sys.executable, "-c", QUANTIZE_CODE, str(source), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
