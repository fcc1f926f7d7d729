"""Every number, list and switch of a GGUF file's architecture, held against what config.json states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skill_train.core.foreign import JsonObject
from skill_train.llama.gguf_header import GgufFile
from skill_train.model.config import text_config, unread_window
from skill_train.model.convertible import from_config as convertible
from skill_train.run.records import Verdict
from skill_train.run.verify_record import Check
from skill_train.verify.metadata.rope import kind_of, table_faults
from skill_train.verify.metadata.stated import (
    EXPECTED,
    Stated,
    attention_factor,
    attention_scale,
    divided,
    expected,
    gating,
    stated,
    window,
)

_TOLERANCE = 1e-5  # relative: a float32 in the file against a decimal in config.json
_SHOWN = 3
# Architectures with layers of a window, and those whose files say how experts are weighed.
_WINDOWED = {"gemma2", "gemma3", "gemma3n", "cohere2", "gpt-oss", "exaone4"}
_ROUTED = {"deepseek2", "glm4moe", "dots1", "bailingmoe2"}
# What the converter writes whatever config.json says, and llama.cpp computes the same with every other number.
_CONSTANTS = {("falcon", "context_length"): 2048}


def check_metadata(gguf: GgufFile, config: JsonObject) -> Check:
    """Each key of the architecture is what config.json states. A key without a known statement is a warning."""
    said = stated(config)
    prefix = f"{gguf.architecture}."
    found, equal, unknown, harmless = list[str](), list[str](), list[str](), list[str]()
    for name, got in gguf.metadata.items():
        key = name.removeprefix(prefix)
        if key == name or (isinstance(got, str) and key not in EXPECTED):
            continue
        wanted = expected(key, said, gguf)
        if wanted is None:
            unknown.append(key)
        elif same(got, wanted):
            equal.append(key)
        else:
            constant = _CONSTANTS.get((gguf.architecture, key)) == got
            (harmless if constant else found).append(f"{key} is {_short(got)}, config.json has {_short(wanted)}")
    found += _missing(gguf, said) + table_faults(gguf, said.rope) + _vocabulary_size(gguf, said)
    return _verdict(gguf, found, equal, unknown, harmless)


def check_window(file: str, config: JsonObject) -> Check | None:
    """A warning where llama.cpp is not known to compute the model's sliding window; None where there is nothing to say.

    The texts that the other checks compare are usually shorter than a window.
    """
    window = unread_window(config)
    if window is None:
        return None
    name = str(convertible.architecture(text_config(config), config))
    told = f"{convertible.unread_window_told(window, name)}; what the other checks say holds within it"
    return Check("window", file, "warn", 0, window, told)


def _verdict(gguf: GgufFile, found: list[str], equal: list[str], unknown: list[str], harmless: list[str]) -> Check:
    told = "; ".join(found[:_SHOWN]) + (f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
    good = "equal to config.json: " + ", ".join(equal)
    left = f"; not compared, because config.json does not state it: {', '.join(unknown)}" if unknown else ""
    left += f"; {', '.join(harmless)}, and llama.cpp computes the same" if harmless else ""
    verdict: Verdict = "fail" if found else "warn" if unknown or harmless else "pass"
    figures = {"looked_at": len(equal) + len(found), "not_compared": unknown}
    return Check("metadata", gguf.path.name, verdict, len(found), 0, told or good + left, figures)


def same(got: Any, expected: Any) -> bool:
    """Equal; numbers as a float32 holds them; lists by element; one value for every layer as each of them."""
    if isinstance(got, list):
        each = expected if isinstance(expected, list) else [expected] * len(got)
        return len(each) == len(got) and all(map(same, got, each))
    if isinstance(expected, list):
        return bool(expected) and all(same(got, one) for one in expected)
    if isinstance(got, bool) or isinstance(expected, bool) or isinstance(got, str) or isinstance(expected, str):
        return bool(got == expected)
    if not isinstance(got, int | float) or not isinstance(expected, int | float):
        return False
    if isinstance(got, float) or isinstance(expected, float):
        return abs(got - expected) <= _TOLERANCE * max(abs(expected), 1e-12)
    return got == expected


def _short(value: Any) -> str:
    return f"[{len(value)} values: {', '.join(map(str, value[:4]))}…]" if isinstance(value, list) else str(value)


# What llama.cpp takes when the key is missing. Of the keys that are not here it either refuses a file without them, or
# the architecture does not read them.
_WITHOUT: dict[str, Callable[[Stated, GgufFile], Any]] = {
    "block_count": lambda *_: None,
    "context_length": lambda *_: None,
    "embedding_length": lambda *_: None,
    "attention.head_count": lambda *_: None,
    "attention.head_count_kv": lambda said, _: said("num_attention_heads", "n_head"),
    "attention.key_length": lambda said, _: divided(said),
    "attention.value_length": lambda said, _: divided(said),
    "rope.dimension_count": lambda said, gguf: gguf.of_architecture("attention.key_length") or divided(said),
    "rope.freq_base": lambda *_: 10000.0,
    "rope.freq_base_swa": lambda _, gguf: 10000.0 if gguf.architecture.startswith("gemma3") else _base(gguf),
    "rope.scaling.factor": lambda *_: 1.0,
    "rope.scaling.original_context_length": lambda said, gguf: _original(said, gguf),
    "attn_logit_softcapping": lambda _, gguf: 50.0 if gguf.architecture == "gemma2" else 0.0,
    "final_logit_softcapping": lambda _, gguf: 30.0 if gguf.architecture == "gemma2" else 0.0,
    "logit_scale": lambda *_: 1.0,
    "embedding_scale": lambda *_: 1.0,
    "residual_scale": lambda *_: 1.0,
    "attention.scale": lambda said, _: None if said("attention_multiplier") else attention_scale(said, _),
    "attention.sliding_window": lambda said, gguf: 0 if gguf.architecture in _WINDOWED else window(said, gguf),
    "rope.scaling.attn_factor": lambda said, gguf: 1.0 if gguf.architecture == "phi3" else attention_factor(said, gguf),
    "expert_weights_scale": lambda *_: 1.0,
    "expert_weights_norm": lambda said, gguf: False if gguf.architecture in _ROUTED else said("norm_topk_prob"),
    "expert_gating_func": lambda said, gguf: (
        _deepseek_gating(gguf) if gguf.architecture == "deepseek2" else gating(said, gguf)
    ),
    "expert_group_count": lambda said, _: min(said("n_group"), 1),
    "expert_count": lambda *_: 0,
    "expert_used_count": lambda *_: 0,
    "attention.clamp_kqv": lambda *_: 0.0,
}


def _missing(gguf: GgufFile, said: Stated) -> list[str]:
    """Keys that the file leaves out, although llama.cpp then takes another value than config.json has."""
    if said.recurrent:
        return []
    found, scaled = [], any(key.startswith(f"{gguf.architecture}.rope.scaling.") for key in gguf.metadata)
    for key, without in _WITHOUT.items():
        unread = (key.startswith("rope.") and not _rotates(said)) or (key.startswith("rope.scaling.") and not scaled)
        if gguf.of_architecture(key) is not None or unread:
            continue
        wanted = expected(key, said, gguf)
        if wanted is None:
            continue
        taken = without(said, gguf)
        if not same(taken, wanted):
            found.append(f"{key} is {'missing' if taken is None else taken}, config.json has {_short(wanted)}")
    return found


def _deepseek_gating(gguf: GgufFile) -> int:
    """Softmax; and sigmoid of what llama.cpp takes for GLM-4.7-Flash by its size."""
    layers, tokens = gguf.of_architecture("block_count"), len(gguf.strings("tokenizer.ggml.tokens"))
    return 2 if layers in (47, 48) and tokens == 154880 else 1


def _original(said: Stated, gguf: GgufFile) -> Any:
    used = kind_of(said.rope) in ("yarn", "longrope", "su")
    return gguf.of_architecture("context_length") if used else said.rope.get("original_max_position_embeddings")


def _rotates(said: Stated) -> bool:
    return bool(said.rope) and said("position_embedding_type") not in ("nope", "alibi")


def _base(gguf: GgufFile) -> Any:
    return gguf.of_architecture("rope.freq_base") or 10000.0


def _vocabulary_size(gguf: GgufFile, said: Stated) -> list[str]:
    rows = gguf.tensors["token_embd.weight"].shape[-1] if "token_embd.weight" in gguf.tensors else None
    tokens = len(gguf.strings("tokenizer.ggml.tokens"))
    found = [] if rows in (None, tokens) else [f"{tokens} tokens in the vocabulary, {rows} rows in the embedding"]
    expected = said.text.get("vocab_size")
    if expected is not None and tokens < expected:
        found.append(f"{tokens} tokens in the vocabulary, config.json has {expected}")
    return found
