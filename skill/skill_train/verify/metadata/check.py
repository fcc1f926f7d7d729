"""Compares every number, list and switch of a GGUF file's architecture with what config.json states."""

import math
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from skill_train.facts import JsonObject
from skill_train.llama.gguf_header import GgufFile
from skill_train.llama.sampling import KEYS, gguf_settings
from skill_train.model.config import text_config, unread_window
from skill_train.model.convertible import from_config
from skill_train.model.convertible.differences import computed_otherwise
from skill_train.run.records import Verdict
from skill_train.run.verify_record import Check
from skill_train.verify.check import first_few
from skill_train.verify.metadata.absent import lacking
from skill_train.verify.metadata.expected import (
    EXPECTED,
    Stated,
    attention_factor,
    attention_scale,
    divided,
    expected,
    stated,
    window,
)
from skill_train.verify.metadata.experts import gating
from skill_train.verify.metadata.rope import kind_of, table_faults

_TOLERANCE = 1e-5  # relative: a float32 in the file against a decimal in config.json
# Architectures with layers of a window, and those whose files say how experts are weighed.
_WINDOWED = {"gemma2", "gemma3", "gemma3n", "cohere2", "gpt-oss", "exaone4"}
_ROUTED = {"deepseek2", "glm4moe", "dots1", "bailingmoe2"}
# Values that the converter writes whatever config.json says. llama.cpp computes the same with every other number.
_CONSTANTS = {("falcon", "context_length"): 2048}
# llama.cpp samples by these keys, unless told otherwise. The values hold where generation_config.json has none.
_SAMPLING, _SUPPRESSED, _TEMPERATURE = "general.sampling.", "tokenizer.ggml.suppress_tokens", KEYS["temperature"]
_NOT_SAMPLING = {"general.sampling.penalty_repeat": 1.0, "general.sampling.xtc_probability": 0.0}
_NOT_SAMPLING |= {"general.sampling.mirostat": 0}


def check_metadata(gguf: GgufFile, config: JsonObject, generation: JsonObject | None = None) -> Check:
    """Checks that each key of the architecture has the value that config.json states, and each key of sampling the
    value that generation_config.json states.

    A key that they do not state must have a value that changes nothing. If that value is not known, the check warns.
    """
    values, sampling = stated(config), _sampling(generation or {})
    prefix = f"{gguf.architecture}."
    faults, equal, unknown, notes = list[str](), list[str](), list[str](), list[str]()
    for name, value in gguf.metadata.items():
        key, source = name.removeprefix(prefix), "config.json"
        if name.startswith(_SAMPLING) or name == _SUPPRESSED:
            in_config, source = sampling.get(name), "generation_config.json"
        elif key == name or (isinstance(value, str) and key not in EXPECTED):
            continue
        else:
            in_config = expected(key, values, gguf)
            if in_config is None:
                in_config, source = lacking(key, value, values, gguf), "the model"
        if in_config is None:
            unknown.append(key)
        elif same(value, in_config):
            equal.append(key)
        else:
            fault = f"{key} is {_short(value)}, {source} has {_short(in_config)}"
            constant = _CONSTANTS.get((gguf.architecture, key)) == value
            notes += [f"{fault}, and llama.cpp computes the same"] if constant else []
            faults += [] if constant else [fault]
    if _TEMPERATURE not in gguf.metadata and any(key.startswith(_SAMPLING) for key in gguf.metadata):
        notes.append(f"{_TEMPERATURE} is missing, generation_config.json has {sampling[_TEMPERATURE]}")
    faults += _missing(gguf, values) + table_faults(gguf, values.rope) + _vocabulary_size(gguf, values)
    return _with_differences(_verdict(gguf, faults, equal, unknown, notes), config)


def _with_differences(check: Check, config: JsonObject) -> Check:
    """A warning if llama.cpp is known to compute something else than config.json says. The logits of a quantized file
    may not show it, because the difference can be smaller than the loss of its type."""
    text = text_config(config)
    reason = computed_otherwise(str(from_config.architecture(text, config)), text)
    if reason is None or reason.startswith("llama.cpp's converter"):  # what that leaves out shows in the file itself
        return check
    verdict: Verdict = "fail" if check.verdict == "fail" else "warn"
    return replace(check, verdict=verdict, detail=f"{reason}; {check.detail}")


def _sampling(generation: JsonObject) -> JsonObject:
    """The value that each key of sampling must have. Keys of which nothing is known are missing."""
    named = {f"{_SAMPLING}{name}": value for name, value in generation.items() if value is not None}
    suppressed = {_SUPPRESSED: generation.get("suppress_tokens")}
    return {**_NOT_SAMPLING, **named, **suppressed, **gguf_settings(generation)}


def check_window(file: str, config: JsonObject) -> Check | None:
    """A warning if llama.cpp is not known to compute the model's sliding window; otherwise None.

    The texts that the other checks compare are usually shorter than a window.
    """
    window = unread_window(config)
    if window is None:
        return None
    name = str(from_config.architecture(text_config(config), config))
    detail = f"{from_config.unread_window_warning(window, name)}; what the other checks say holds within it"
    return Check("window", file, "warn", 0, window, detail)


def _verdict(gguf: GgufFile, faults: list[str], equal: list[str], unknown: list[str], notes: list[str]) -> Check:
    good = "equal to the model's files: " + ", ".join(equal)
    left_out = f"not compared, because the model's files do not state it: {', '.join(unknown)}"
    detail = "; ".join([good, *([left_out] if unknown else []), *notes])
    verdict: Verdict = "fail" if faults else "warn" if unknown or notes else "pass"
    figures = {"looked_at": len(equal) + len(faults), "not_compared": unknown}
    return Check("metadata", gguf.path.name, verdict, len(faults), 0, first_few(faults) or detail, figures)


def same(value: Any, expected: Any) -> bool:
    """Whether two values are equal. Numbers are compared as a float32 holds them, and lists by element. A single value
    counts as the same value for every layer."""
    if isinstance(value, list):
        each = expected if isinstance(expected, list) else [expected] * len(value)
        return len(each) == len(value) and all(map(same, value, each))
    if isinstance(expected, list):
        return bool(expected) and all(same(value, element) for element in expected)
    if isinstance(value, bool) or isinstance(expected, bool) or isinstance(value, str) or isinstance(expected, str):
        return bool(value == expected)
    if not isinstance(value, int | float) or not isinstance(expected, int | float):
        return False
    if isinstance(value, float) or isinstance(expected, float):
        return abs(value - expected) <= _TOLERANCE * max(abs(expected), 1e-12)
    return value == expected


def _short(value: Any) -> str:
    return f"[{len(value)} values: {', '.join(map(str, value[:4]))}…]" if isinstance(value, list) else str(value)


# The value that llama.cpp uses when the key is missing. If another key is missing, llama.cpp refuses the file, or the
# architecture does not read that key.
_WITHOUT: dict[str, Callable[[Stated, GgufFile], Any]] = {
    "block_count": lambda *_: None,
    "context_length": lambda *_: None,
    "embedding_length": lambda *_: None,
    "attention.head_count": lambda *_: None,
    "attention.head_count_kv": lambda config, _: config("num_attention_heads", "n_head"),
    "attention.key_length": lambda config, _: divided(config),
    "attention.value_length": lambda config, _: divided(config),
    "rope.dimension_count": lambda config, gguf: gguf.of_architecture("attention.key_length") or divided(config),
    "rope.dimension_count_swa": lambda config, gguf: gguf.of_architecture("rope.dimension_count"),
    "attention.shared_kv_layers": lambda *_: 0,
    "rope.freq_base": lambda *_: 10000.0,
    "rope.freq_base_swa": lambda _, gguf: (
        10000.0 if gguf.architecture.startswith("gemma3") else gguf.of_architecture("rope.freq_base") or 10000.0
    ),
    "rope.scaling.type": lambda config, gguf: (
        "linear" if kind_of(config.rope) == "yarn" else expected("rope.scaling.type", config, gguf)
    ),
    "rope.scaling.factor": lambda *_: 1.0,
    "rope.scaling.original_context_length": lambda config, gguf: _original(config, gguf),
    "attn_logit_softcapping": lambda _, gguf: 50.0 if gguf.architecture == "gemma2" else 0.0,
    "final_logit_softcapping": lambda _, gguf: 30.0 if gguf.architecture in ("gemma2", "gemma4") else 0.0,
    "logit_scale": lambda config, gguf: config("hidden_size") / 256 if gguf.architecture == "minicpm3" else 1.0,
    "embedding_scale": lambda _, gguf: 12.0 if gguf.architecture == "minicpm3" else 1.0,
    "residual_scale": lambda config, gguf: (
        1.4 / math.sqrt(config("num_hidden_layers")) if gguf.architecture == "minicpm3" else 1.0
    ),
    "attention.scale": lambda config, _: None if config("attention_multiplier") else attention_scale(config, _),
    "attention.sliding_window": lambda config, gguf: 0 if gguf.architecture in _WINDOWED else window(config, gguf),
    "rope.scaling.attn_factor": lambda config, gguf: (
        1.0 if gguf.architecture == "phi3" else attention_factor(config, gguf)
    ),
    "expert_weights_scale": lambda *_: 1.0,
    "expert_weights_norm": lambda config, gguf: False if gguf.architecture in _ROUTED else config("norm_topk_prob"),
    "expert_gating_func": lambda config, gguf: (
        _deepseek_gating(gguf) if gguf.architecture == "deepseek2" else gating(config, gguf)
    ),
    "expert_group_count": lambda config, _: min(config("n_group"), 1),
    "expert_count": lambda *_: 0,
    "expert_used_count": lambda *_: 0,
    "attention.clamp_kqv": lambda *_: 0.0,
    "attention.temperature_scale": lambda *_: 0.0,
}


def _missing(gguf: GgufFile, config: Stated) -> list[str]:
    """Keys that the file lacks, although llama.cpp then uses another value than config.json has."""
    if config.recurrent:
        return []
    faults, scaled = [], any(key.startswith(f"{gguf.architecture}.rope.scaling.") for key in gguf.metadata)
    rotates = bool(config.rope) and config("position_embedding_type") not in ("nope", "alibi")
    for key, without in _WITHOUT.items():
        unread = (key.startswith("rope.") and not rotates) or (key.startswith("rope.scaling.") and not scaled)
        if gguf.of_architecture(key) is not None or unread:
            continue
        in_config = expected(key, config, gguf)
        if in_config is None:
            continue
        assumed = without(config, gguf)
        if not same(assumed, in_config):
            faults.append(f"{key} is {'missing' if assumed is None else assumed}, config.json has {_short(in_config)}")
    return faults


def _deepseek_gating(gguf: GgufFile) -> int:
    """Softmax; sigmoid for a model that llama.cpp takes for GLM-4.7-Flash because of its size."""
    layers, tokens = gguf.of_architecture("block_count"), len(gguf.tokens)
    return 2 if layers in (47, 48) and tokens == 154880 else 1


def _original(config: Stated, gguf: GgufFile) -> Any:
    used = kind_of(config.rope) in ("yarn", "longrope", "su")
    return gguf.of_architecture("context_length") if used else config.rope.get("original_max_position_embeddings")


def _vocabulary_size(gguf: GgufFile, config: Stated) -> list[str]:
    rows = gguf.tensors["token_embd.weight"].shape[-1] if "token_embd.weight" in gguf.tensors else None
    tokens = len(gguf.tokens)
    faults = [] if rows in (None, tokens) else [f"{tokens} tokens in the vocabulary, {rows} rows in the embedding"]
    expected = config.text.get("vocab_size")
    if expected is not None and tokens < expected:
        faults.append(f"{tokens} tokens in the vocabulary, config.json has {expected}")
    return faults
