"""What can be said of a GGUF file without running it: whole, of the type that its name says, metadata of the model."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from skill_train.gguf_file import GgufFile
from skill_train.verdict import Check, NotChecked, problems

# A type at the end of a file name: model-q4_k_m.gguf, Qwen2-0.5B-Instruct.Q4_K_M.gguf.
_TYPE_IN_NAME = re.compile(r"[-._]((?:f16|bf16|f32|i?q\d\w*|tq\d\w*|mxfp4\w*|nvfp4))\.gguf$", re.IGNORECASE)
# Types whose weights are mostly stored as another one than the name begins with (llama.cpp, src/llama-quant.cpp).
_STORED_AS = {"IQ2_M": "IQ2_S", "IQ2_S": "IQ2_XS", "IQ3_M": "IQ3_S", "IQ3_XS": "IQ3_S"}
# A row length that is no multiple of 256 makes llama.cpp fall back (tensor_type_fallback in the same file).
_FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "TQ1_0": "Q4_0", "TQ2_0": "Q4_0"}
_DEFAULT_FALLBACK = "IQ4_NL"

# Metadata key: names of the same thing in config.json, over the families of models.
_SAME = {
    "block_count": ("num_hidden_layers", "n_layer", "num_layers"),
    "embedding_length": ("hidden_size", "n_embd", "d_model"),
    "feed_forward_length": ("intermediate_size", "n_inner", "ffn_dim"),
    "attention.head_count": ("num_attention_heads", "n_head", "num_heads"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps"),
    "context_length": ("max_position_embeddings", "n_positions", "n_ctx"),
    "rope.freq_base": ("rope_theta",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "attention.sliding_window": ("sliding_window",),
    "expert_count": ("num_local_experts", "num_experts"),
    "expert_used_count": ("num_experts_per_tok",),
}
_OPTIONAL = {"attention.head_count_kv", "attention.key_length", "attention.sliding_window", "feed_forward_length"}
_DEFAULTS = {"rope.freq_base": 10000.0}  # what llama.cpp takes when the key is missing
_FLOAT_TOLERANCE = 1e-5  # a float32 in the file against a decimal in config.json


def file_type(gguf: GgufFile) -> str:
    """`general.file_type` as a name such as `q4_k_m`; `unknown` when missing or of a number without a name."""
    from gguf.constants import LlamaFileType

    names = {int(kind): kind.name.removeprefix("MOSTLY_").removeprefix("ALL_").lower() for kind in LlamaFileType}
    return str(names.get(gguf.metadata.get("general.file_type", -1), "unknown"))


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


def check_metadata(gguf: GgufFile, config: dict[str, Any]) -> Check:
    """Layers, widths, heads, rope, norms and context as config.json has them."""
    text = {**config, **config.get("text_config", {}), **_rope(config)}
    found, compared = [], []
    for key, names in _SAME.items():
        expected = next((text[name] for name in names if text.get(name) is not None), None)
        got = gguf.of_architecture(key)
        got = _DEFAULTS.get(key) if got is None else got
        if expected is None or (got is None and key in _OPTIONAL):
            continue
        compared.append(key)
        if not _same(got, expected):
            found.append(f"{key} is {got}, config.json has {expected}")
    found += _rope_scaling(gguf, text) + _vocabulary_size(gguf, text)
    good = "equal to config.json: " + ", ".join(compared)
    return problems("metadata", gguf.path.name, found, looked_at=len(compared) + 2, good=good)


def check_digest(gguf: GgufFile, digest: dict[str, Any], recorded: dict[str, Any] | None) -> Check | NotChecked:
    """The bytes that were exported are the bytes that are checked."""
    name = gguf.path.name
    if recorded is None:
        return NotChecked("digest", name, "no export record names this file")
    same = all(digest[key] == recorded.get(key) for key in ("bytes", "sha256"))
    detail = "the file that was exported" if same else "the file changed after it was exported"
    return Check("digest", name, "pass" if same else "fail", digest["sha256"], recorded.get("sha256"), detail)


def _block_matrices(gguf: GgufFile) -> list[Any]:
    """Weights of the layers. Embeddings and the output have types of their own."""
    blocks = [t for t in gguf.tensors.values() if t.name.startswith("blk.") and t.name.endswith(".weight")]
    return [tensor for tensor in blocks if len(tensor.shape) > 1]


def _main_kind(said: str) -> str:
    from gguf.constants import GGMLQuantizationType

    name = said.upper()
    if name in _STORED_AS:
        return _STORED_AS[name]
    kinds = [kind.name for kind in GGMLQuantizationType if name == kind.name or name.startswith(kind.name + "_")]
    return max(kinds, key=len, default=name)


def _same(got: Any, expected: Any) -> bool:
    if isinstance(got, list):  # one value a layer
        return all(_same(value, expected) for value in got)
    if isinstance(got, float) or isinstance(expected, float):
        return isinstance(got, int | float) and abs(got - expected) <= _FLOAT_TOLERANCE * max(abs(expected), 1e-12)
    return bool(got == expected)


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Rope fields of config.json, flat. transformers 5 has them in `rope_parameters`, for some models by layer type."""
    rope = config.get("rope_parameters") or config.get("text_config", {}).get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    scaling = rope if rope else config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return {"rope_kind": kind} | ({"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {})


def _rope_scaling(gguf: GgufFile, text: dict[str, Any]) -> list[str]:
    """A model with stretched positions needs them in the file: as metadata or as a table of factors."""
    if text["rope_kind"] in ("default", "mrope"):
        return []
    stated = any(key.startswith(f"{gguf.architecture}.rope.scaling.") for key in gguf.metadata)
    table = any(name.startswith("rope_f") for name in gguf.tensors)
    return [] if stated or table else [f"rope scaling is missing, config.json has {text['rope_kind']}"]


def _vocabulary_size(gguf: GgufFile, text: dict[str, Any]) -> list[str]:
    rows = gguf.tensors["token_embd.weight"].shape[-1] if "token_embd.weight" in gguf.tensors else None
    tokens = len(gguf.metadata.get("tokenizer.ggml.tokens", []))
    found = [] if rows in (None, tokens) else [f"{tokens} tokens in the vocabulary, {rows} rows in the embedding"]
    expected = text.get("vocab_size")
    if expected is not None and tokens < expected:
        found.append(f"{tokens} tokens in the vocabulary, config.json has {expected}")
    return found
