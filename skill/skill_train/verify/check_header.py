"""What can be said of a GGUF file without running it: whole, and of the type that its name says."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from skill_train.core.digests import FileDigest
from skill_train.llama.gguf_header import GgufFile
from skill_train.run.verify_record import Check, NotChecked

# A type at the end of a file name: model-q4_k_m.gguf, Qwen2-0.5B-Instruct.Q4_K_M.gguf.
_TYPE_IN_NAME = re.compile(r"[-._]((?:f16|bf16|f32|i?q\d\w*|tq\d\w*|mxfp4\w*|nvfp4))\.gguf$", re.IGNORECASE)
# Types whose weights are mostly stored as another one than the name begins with (llama.cpp, src/llama-quant.cpp).
_STORED_AS = {"IQ2_M": "IQ2_S", "IQ2_S": "IQ2_XS", "IQ3_M": "IQ3_S", "IQ3_XS": "IQ3_S"}
# A row length that is no multiple of 256 makes llama.cpp fall back (tensor_type_fallback in the same file).
_FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "TQ1_0": "Q4_0", "TQ2_0": "Q4_0"}
_DEFAULT_FALLBACK = "IQ4_NL"
_PLAIN = ("F32", "F16", "BF16")
_SHORTEST = 32  # weights of a row that a block holds; kernels and decays of Mamba have shorter ones, and stay F32


def file_type(gguf: GgufFile) -> str:
    """`general.file_type` as a name such as `q4_k_m`; `unknown` when it is a number without a name.

    The converter writes none for some architectures, such as MPT: then the type of most matrices, where that says it.
    """
    from gguf.constants import LlamaFileType

    names = {int(kind): kind.name.removeprefix("MOSTLY_").removeprefix("ALL_").lower() for kind in LlamaFileType}
    said = gguf.metadata.get("general.file_type")
    if said is not None:
        return names.get(said, "unknown") if isinstance(said, int) else "unknown"
    stored = Counter(tensor.kind for tensor in _block_matrices(gguf)).most_common(1)
    return stored[0][0].lower() if stored and stored[0][0] in _PLAIN else "unknown"


def check_file(gguf: GgufFile) -> Check:
    """Whole and not longer than its tensors. Its header was checked when it was read."""
    end = -(-gguf.needed_bytes // gguf.alignment) * gguf.alignment
    whole = gguf.size_bytes in (gguf.needed_bytes, end)
    detail = f"version {gguf.version}, {len(gguf.tensors)} tensors, aligned to {gguf.alignment} bytes, {end} bytes"
    if not whole:
        detail = f"{gguf.size_bytes - end} bytes follow the last tensor: the file is not what its header says"
    return Check(
        "file",
        gguf.path.name,
        "pass" if whole else "fail",
        gguf.size_bytes,
        end,
        detail,
        {"tensors": len(gguf.tensors)},
    )


def check_types(gguf: GgufFile) -> Check:
    """The type that the name says, the type that the metadata say, and the type that the weights have are one."""
    said, named, stored = file_type(gguf), name_type(gguf.path), Counter(t.kind for t in _block_matrices(gguf))
    fitting, main = Counter(t.kind for t in _block_matrices(gguf) if t.shape[0] % 256 == 0), _main_kind(said)
    name = gguf.path.name
    most = (fitting or stored).most_common(1)[0][0] if stored else "nothing"
    figures = {"types": dict(Counter(t.kind for t in gguf.tensors.values())), "file_type": said}
    if named not in (None, said):
        return Check("types", name, "fail", said, named, f"the name says {named}, its metadata {said}", figures)
    # A mixture such as q4_k_m keeps half of the down projections in a finer type, and in models whose width is no
    # multiple of 256 (Qwen2.5-0.5B: 896) those are the only rows that fit.
    if fitting and 3 * fitting[main] < fitting.total():
        return Check(
            "types", name, "fail", most, main, f"a {said} file holds {main}; most matrices are {most}", figures
        )
    fallback = _FALLBACKS.get(main, _DEFAULT_FALLBACK)
    if not fitting and most not in (main, fallback):
        return Check(
            "types", name, "fail", most, fallback, f"most matrices are {most}, not {main} or {fallback}", figures
        )
    if not fitting and most != main:
        why = f"no row length is divisible by 256, so llama.cpp took {fallback} in place of {main}"
        return Check("types", name, "warn", most, main, why, figures)
    return Check("types", name, "pass", most, main, f"{stored[main]} of {stored.total()} matrices are {main}", figures)


def name_type(path: Path) -> str | None:
    """The type that a file's name ends with, in lower case; None when it names none."""
    found = _TYPE_IN_NAME.search(path.name)
    return found.group(1).lower() if found else None


def check_digest(gguf: GgufFile, digest: FileDigest, recorded: FileDigest | None) -> Check | NotChecked:
    """The bytes that were exported are the bytes that are checked."""
    name = gguf.path.name
    if recorded is None:
        return NotChecked("digest", name, "no export record names this file")
    same = (digest["bytes"], digest["sha256"]) == (recorded["bytes"], recorded["sha256"])
    detail = "the file that was exported" if same else "the file changed after it was exported"
    return Check("digest", name, "pass" if same else "fail", digest["sha256"], recorded["sha256"], detail)


def _block_matrices(gguf: GgufFile) -> list[Any]:
    """Weights of the layers, of rows that can be quantized. Embeddings and the output have types of their own."""
    blocks = [t for t in gguf.tensors.values() if t.name.startswith("blk.") and t.name.endswith(".weight")]
    return [tensor for tensor in blocks if len(tensor.shape) > 1 and tensor.shape[0] >= _SHORTEST]


def _main_kind(said: str) -> str:
    from gguf.constants import GGMLQuantizationType

    name = said.upper()
    if name in _STORED_AS:
        return _STORED_AS[name]
    kinds = [kind.name for kind in GGMLQuantizationType if name == kind.name or name.startswith(kind.name + "_")]
    return max(kinds, key=len, default=name)
