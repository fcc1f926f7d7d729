"""The way without skill-train, a program a step: PEFT's merge, and llama.cpp's quantizer through its bindings.

    python bench/peers.py merge BASE ADAPTER OUT       load, merge_and_unload, save_pretrained, and the tokenizer
    python bench/peers.py quantize SOURCE OUT q8_0
    python bench/peers.py copy FOLDER OUT              the files as they are

Between them stands llama.cpp's own convert_hf_to_gguf.py, called as its README says.
"""

from __future__ import annotations

import sys


def merge(base: str, adapter: str, out: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    model.merge_and_unload().save_pretrained(out)
    AutoTokenizer.from_pretrained(base).save_pretrained(out)


def quantize(source: str, out: str, kind: str) -> None:
    import ctypes

    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
    if llama_cpp.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(parameters)):
        raise SystemExit("llama.cpp did not quantize")


def copy(folder: str, out: str) -> None:
    import shutil

    shutil.copytree(folder, out)


if __name__ == "__main__":
    {"merge": merge, "quantize": quantize, "copy": copy}[sys.argv[1]](*sys.argv[2:])
