"""Checks a GGUF file without running it: whether it is complete, and has the type that its name states."""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from skill_train.core.digests import FileDigest
from skill_train.llama.gguf_header import GgufFile, Tensor
from skill_train.run.export_record import MIX_KEY
from skill_train.run.records import Verdict
from skill_train.run.verify_record import Check, Finding, NotChecked

# A type at the end of a file name: model-q4_k_m.gguf, Qwen2-0.5B-Instruct.Q4_K_M.gguf.
_TYPE_IN_NAME = re.compile(r"[-._]((?:f16|bf16|f32|i?q\d\w*|tq\d\w*|mxfp4\w*|nvfp4))\.gguf$", re.IGNORECASE)
# Types that store most weights in another type than their name begins with (llama.cpp, src/llama-quant.cpp).
_STORED_AS = {"IQ2_M": "IQ2_S", "IQ2_S": "IQ2_XS", "IQ3_M": "IQ3_S", "IQ3_XS": "IQ3_S"}
# A row length that is not a multiple of 256 makes llama.cpp fall back (tensor_type_fallback in the same file).
# Older versions took IQ4_NL for Q2_K and Q3_K.
_FALLBACKS = {
    "Q4_K": ("Q5_0",),
    "Q5_K": ("Q5_1",),
    "Q6_K": ("Q8_0",),
    **dict.fromkeys(("TQ1_0", "TQ2_0"), ("Q4_0",)),
    **dict.fromkeys(("Q2_K", "Q3_K"), ("Q4_0", "IQ4_NL")),
}
_DEFAULT_FALLBACK = ("IQ4_NL",)
# Matrices that mixed types store in a finer type, and the file types that do so for all, or almost all (Falcon).
_FINER = ("ffn_down", "attn_output")
_FINER_KINDS = {"q2_k": ("Q3_K",), "q3_k_m": ("Q4_K", "Q5_K"), "q3_k_l": ("Q5_K", "Q4_K")}
_PLAIN = ("F32", "F16", "BF16")
_KINDS = ("model", "adapter", "mmproj")  # gguf.GGUFType, without the matrix
_SHORTEST = 32  # weights of a block. Rows of Mamba's kernels and decays are shorter, and stay F32


def file_type(gguf: GgufFile) -> str:
    """`general.file_type` as a name such as `q4_k_m`; `unknown` when it is a number without a name.

    For some architectures, such as MPT, the converter writes no file type. Then the type of most matrices counts, if it
    is an unquantized one.
    """
    from gguf.constants import LlamaFileType

    names = {int(kind): kind.name.removeprefix("MOSTLY_").removeprefix("ALL_").lower() for kind in LlamaFileType}
    stated = gguf.metadata.get("general.file_type")
    if stated is not None:
        return names.get(stated, "unknown") if isinstance(stated, int) else "unknown"
    stored = Counter(tensor.kind for tensor in _block_matrices(gguf)).most_common(1)
    return stored[0][0].lower() if stored and stored[0][0] in _PLAIN else "unknown"


def check_file(gguf: GgufFile) -> Check:
    """Checks that the file is complete, not longer than its tensors, and of a kind that llama.cpp knows. Its header was
    checked when it was read."""
    end = -(-gguf.needed_bytes // gguf.alignment) * gguf.alignment
    whole = gguf.size_bytes in (gguf.needed_bytes, end)
    detail = f"version {gguf.version}, {len(gguf.tensors)} tensors, aligned to {gguf.alignment} bytes, {end} bytes"
    if not whole:
        detail = f"{gguf.size_bytes - end} bytes follow the last tensor: the file is not what its header says"
    kind = gguf.metadata.get("general.type", "model")
    has_known_type = kind in _KINDS
    if not has_known_type:
        detail = f"general.type is {str(kind)[:40]!r}, and {', '.join(_KINDS)} are the kinds of file that can be run"
    return Check(
        "file",
        gguf.path.name,
        "pass" if whole and has_known_type else "fail",
        gguf.size_bytes,
        end,
        detail,
        {"tensors": len(gguf.tensors)},
    )


def check_types(gguf: GgufFile, mix: Mapping[str, str] | None = None) -> Check:
    """Checks that the file name, the metadata and the weights agree on the type.

    Args:
        mix: the type of each matrix as the export recorded it, for a mix of types. The type that the metadata of such a
            file states is not one that llama.cpp makes, so it is not compared.
    """
    if mix is not None or MIX_KEY in gguf.metadata:
        return _check_mix(gguf, mix)
    name, stated, named = gguf.path.name, file_type(gguf), name_type(gguf.path)
    blocks = _block_matrices(gguf, only_experts=stated == "mxfp4_moe")
    stored = Counter(t.kind for t in blocks)
    figures = {"types": dict(Counter(t.kind for t in gguf.tensors.values())), "file_type": stated}
    if named not in (None, stated):
        return Check("types", name, "fail", stated, named, f"the name says {named}, its metadata {stated}", figures)
    main, fitting = main_kind(stated), Counter(t.kind for t in blocks if _fits(t))
    fallbacks = _FALLBACKS.get(main, _DEFAULT_FALLBACK)
    either = f"{main} or {' or '.join(fallbacks)}"
    most = (fitting or stored).most_common(1)[0][0] if stored else "nothing"
    regular = [t for t in blocks if not any(part in t.name for part in _FINER)]
    unfit = Counter() if any(map(_fits, regular)) else Counter(t.kind for t in regular)
    kinds = {main, *_FINER_KINDS.get(stated, ())} if unfit else {main}
    verdict: Verdict = "fail"
    expected = main
    # A mixture such as q4_k_m stores half of the down projections in a finer type. In models whose width is not a
    # multiple of 256 (Qwen2.5-0.5B: 896) the down projections are the only rows that fit.
    if fitting and 3 * sum(fitting[kind] for kind in kinds) < fitting.total():
        why = f"a {stated} file holds {main}; most matrices are {most}"
    elif fitting and 3 * sum(unfit[kind] for kind in (main, *fallbacks)) < unfit.total():
        expected, why = fallbacks[0], f"most rows that are not divisible by 256 are not {either}"
    elif not fitting and most not in (main, *fallbacks):
        expected, why = fallbacks[0], f"most matrices are {most}, not {either}"
    elif not fitting and most != main:
        verdict, why = "warn", f"no row length is divisible by 256, so llama.cpp took {most} in place of {main}"
    else:
        verdict, why = "pass", f"{stored[main]} of {stored.total()} matrices are {main}"
        others = "".join(f", {unfit[kind]} {kind}" for kind in fallbacks if unfit[kind])
        why += f"{others}, because rows are not divisible by 256" * bool(others)
    return Check("types", name, verdict, most, expected, why, figures)


def _fits(tensor: Tensor) -> bool:
    """Whether its rows can be stored in any type."""
    return tensor.shape[0] % 256 == 0


def _check_mix(gguf: GgufFile, mix: Mapping[str, str] | None) -> Check:
    name, kinds = gguf.path.name, {tensor.name: tensor.kind.lower() for tensor in gguf.tensors.values()}
    figures = {"types": dict(Counter(t.kind for t in gguf.tensors.values())), "file_type": file_type(gguf)}
    if mix is None:
        why = "the file says that it is a mix of types, but no export record lists them"
        return Check("types", name, "warn", len(kinds), "a record", why, figures)
    other = [tensor for tensor, kind in mix.items() if kinds.get(tensor) != kind]
    detail = f"a mix: {len(mix)} matrices have the types that quantize.json records"
    if other:
        detail = f"{other[0]} is {kinds.get(other[0], 'missing')}, and quantize.json records {mix[other[0]]}"
    return Check("types", name, "fail" if other else "pass", len(mix) - len(other), len(mix), detail, figures)


def name_type(path: Path) -> str | None:
    """The type that a file's name ends with, in lower case; None when it names none."""
    match = _TYPE_IN_NAME.search(path.name)
    return match.group(1).lower() if match else None


def check_digest(gguf: GgufFile, digest: FileDigest, exports: Mapping[str, FileDigest]) -> Finding:
    """Checks that the file has the bytes that were exported, under its own name or another one."""
    file, found = gguf.path.name, digest["sha256"]
    if not exports:
        return NotChecked("digest", file, "no export record names this file")
    same = [name for name, each in exports.items() if (each["bytes"], each["sha256"]) == (digest["bytes"], found)]
    if same:
        detail = "the file that was exported" if file in same else f"the file that was exported as {same[0]}"
        return Check("digest", file, "pass", found, found, detail)
    if file in exports:
        return Check("digest", file, "fail", found, exports[file]["sha256"], "the file changed after it was exported")
    expected = f"one of {len(exports)} exported files"
    return Check("digest", file, "warn", found, expected, "no export record names this file or has its bytes")


def _block_matrices(gguf: GgufFile, *, only_experts: bool = False) -> list[Tensor]:
    """The matrices of the layers whose rows can be quantized. Embeddings and the output layer have types of their
    own. In a file of mxfp4_moe all but the stacks of experts are Q8_0."""
    blocks = [t for t in gguf.matrices if t.name.startswith("blk.") and t.name.endswith(".weight")]
    blocks = [t for t in blocks if len(t.shape) > 2] or blocks if only_experts else blocks
    return [tensor for tensor in blocks if tensor.shape[0] >= _SHORTEST]


def main_kind(stated: str) -> str:
    """The type of tensors that a file type is named after: `Q4_K` for q4_k_m."""
    from gguf.constants import GGMLQuantizationType

    name = stated.upper()
    if name in _STORED_AS:
        return _STORED_AS[name]
    return next((kind.name for kind in GGMLQuantizationType if f"{name}_".startswith(f"{kind.name}_")), name)
