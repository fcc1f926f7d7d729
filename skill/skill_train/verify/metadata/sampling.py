"""What a GGUF file says of sampling, against generation_config.json. llama.cpp samples so, unless told otherwise."""

from __future__ import annotations

from typing import Any

from skill_train.facts import JsonObject

_PREFIX, _SUPPRESSED = "general.sampling.", "tokenizer.ggml.suppress_tokens"
# Keys that have other names in generation_config.json. Of two, the first one that it has counts.
_OTHER_NAMES = {
    "general.sampling.temp": ("temperature",),
    "general.sampling.penalty_repeat": ("penalty_repeat", "repetition_penalty"),
    _SUPPRESSED: ("suppress_tokens",),
}


def is_sampling(key: str) -> bool:
    return key.startswith(_PREFIX) or key == _SUPPRESSED


def expected_sampling(key: str, generation: JsonObject) -> Any:
    """The value that generation_config.json states for a key of the file; None where it states none."""
    names = _OTHER_NAMES.get(key, (key.removeprefix(_PREFIX),))
    return next((generation[name] for name in names if generation.get(name) is not None), None)
