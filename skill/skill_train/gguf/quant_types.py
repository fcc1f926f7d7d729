"""The names of llama.cpp's quantization types, and the tensors that do not fit one."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from skill_train.core.errors import UsageError, nearest, not_installed
from skill_train.run.export_record import Fallback

if TYPE_CHECKING:
    from skill_train.llama.gguf_header import GgufFile

# llama-quantize's short names (tools/quantize/quantize.cpp).
_ALIASES = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m"}

# These types are in the enumeration, but llama_ftype_get_default_type does not know them. Only converters write them.
_NOT_MADE_BY_QUANTIZING = ("guessed", "nvfp4")

_SUPER_BLOCK = 256  # weights in a block of a K-quant or i-quant (QK_K in ggml-common.h)


def quantization_types() -> dict[str, int]:
    """The numbers, by name, of the types that the installed llama.cpp can quantize to and that gguf-py can read. They
    are read from the source text of the bindings, because an import would load the native library.

    Raises:
        NotInstalled: llama-cpp-python or gguf is missing.
    """
    from skill_train.core.worker import llama_cpp_folder  # `plan` starts no child

    try:
        from gguf.constants import LlamaFileType
    except ImportError:
        raise not_installed("gguf", "gguf") from None
    numbers = {int(kind) for kind in LlamaFileType}
    text = (llama_cpp_folder() / "llama_cpp.py").read_text(encoding="utf-8")
    types = re.findall(r"^LLAMA_FTYPE_(?:MOSTLY_|ALL_)?(\w+) = (\d+)", text, re.MULTILINE)
    return {
        kind.lower(): int(number)
        for kind, number in types
        if kind.lower() not in _NOT_MADE_BY_QUANTIZING and int(number) in numbers
    }


def plain_type(name: str) -> str:
    """llama.cpp's name of a type: `Q4-K-M` and `q4_k` become `q4_k_m`. Does not check that the type exists."""
    plain = name.strip().lower().replace("-", "_")
    return _ALIASES.get(plain, plain)


def type_names(quants: list[str]) -> list[str]:
    """llama.cpp's names of the types in lower case, in the given order, without repetitions.

    Raises:
        UsageError: a name is unknown. The message has the nearest known name, and `expected` lists all.
    """
    types = quantization_types()
    names = []
    for quant in quants:
        plain = plain_type(quant)
        if plain not in types:
            raise UsageError(
                f"{quant!r} is not a type that llama.cpp can make and gguf can read here{nearest(plain, types)}",
                code="cannot_quantize",
                expected=", ".join(sorted(types)),
                got=quant,
                hint="skill-train export-gguf RUN --quant q8_0,q4_k_m",
            )
        names.append(plain)
    return list(dict.fromkeys(names))


def fallbacks_of(file: GgufFile, planned: list[Fallback], quant: str) -> list[Fallback]:
    """The tensors that the file stores in another type than the intended one. `got` is read from the file.

    The dry run's log (`planned`) does not mention an output matrix, or the embedding of a tied model, that becomes q8_0
    because its rows are not divisible by 256. Such a tensor is in the list too.
    """
    announced: list[Fallback] = [
        {**fallback, "got": file.tensors[fallback["tensor"]].kind.lower()} for fallback in planned
    ]
    named = {fallback["tensor"] for fallback in planned}
    silent: list[Fallback] = [
        {
            "tensor": tensor.name,
            "wanted": "q6_k",
            "got": tensor.kind.lower(),
            "why": f"rows of {tensor.shape[0]} weights are not divisible by {_SUPER_BLOCK}",
        }
        for tensor in file.tensors.values()
        if "_k" in quant or quant.startswith(("iq", "tq"))
        if tensor.name in ("output.weight", "token_embd.weight") and tensor.name not in named
        if tensor.kind == "Q8_0" and tensor.shape[0] % _SUPER_BLOCK
    ]
    return announced + silent
