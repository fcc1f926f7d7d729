"""Samples the next token, with the settings that a model's files name.

The same code samples for transformers and llama.cpp, so two files of one model differ only by their logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from skill_train.core.errors import UsageError, VerificationFailed
from skill_train.facts import JsonObject
from skill_train.run.records import read_json

if TYPE_CHECKING:
    import numpy as np

FILE = "generation_config.json"
# The defaults of transformers 5.23 if the file samples without a value (`_get_default_generation_params`).
_TEMPERATURE, _TOP_K = 1.0, 50
# Settings that change an answer of transformers, but not one of ours or of llama.cpp. The last four need sampling.
_NOT_DONE = (
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "suppress_tokens",
    "begin_suppress_tokens", "bad_words_ids", "sequence_bias", "min_length", "min_new_tokens", "num_beams",
    "exponential_decay_length_penalty", "guidance_scale", "watermarking_config", "penalty_alpha",
    "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h",
)  # fmt: skip

# The keys of a GGUF file, by the names in generation_config.json.
KEYS = {
    "temperature": "general.sampling.temp",
    **{name: f"general.sampling.{name}" for name in ("top_k", "top_p", "min_p")},
    "repetition_penalty": "general.sampling.penalty_repeat",
}


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling settings, in the meaning of transformers."""

    temperature: float = 0.0  # 0 takes the most likely token
    top_k: int = 0  # how many of the most likely tokens are kept; 0 for all
    top_p: float = 1.0  # the share of the probability that is kept
    min_p: float = 0.0  # the least probability that is kept, as a share of the highest
    repetition_penalty: float = 1.0  # divides the logits of tokens in the context (multiplies negative ones)
    seed: int = 0
    stops: tuple[str, ...] = ()  # texts that end an answer


def sampling_of(folder: Path) -> tuple[Sampling, str]:
    """Reads the settings in a model's generation_config.json as transformers does. Also returns the source as a text.

    Raises:
        UsageError: a value is out of range.
    """
    file = folder / FILE
    stated = read_json(file) if file.is_file() else None
    if not isinstance(stated, dict):
        return Sampling(), f"the model has no {FILE}: greedy"
    sampling, left_out = read_sampling(stated), not_done(stated)
    source = f"{FILE} without its {', '.join(left_out)}" if left_out else FILE
    return _checked(sampling, file), source if sampling.temperature else f"{source}: greedy"


def read_sampling(stated: JsonObject) -> Sampling:
    """The settings of a generation_config.json. If it samples, missing values are the defaults of transformers."""
    words = stated.get("stop_strings")
    greedy = Sampling(
        repetition_penalty=_number(stated, "repetition_penalty", 1.0),
        stops=tuple(word for word in (words if isinstance(words, list) else [words]) if word and isinstance(word, str)),
    )
    if not stated.get("do_sample"):
        return greedy
    return msgspec.structs.replace(
        greedy,
        temperature=_number(stated, "temperature", _TEMPERATURE),
        top_k=_count(stated, "top_k", _TOP_K),
        top_p=_number(stated, "top_p", 1.0),
        min_p=_number(stated, "min_p", 0.0),
    )


def not_done(stated: JsonObject) -> list[str]:
    """The settings of a generation_config.json that change an answer of transformers, but not one of ours."""
    names = _NOT_DONE if stated.get("do_sample") else _NOT_DONE[:-4]
    return [name for name in names if changes(stated.get(name))]


def changes(value: object) -> bool:
    """Whether a setting changes an answer: nothing, 0 and a factor of 1 do not."""
    return bool(value) and not (type(value) in (int, float) and value == 1)


def gguf_settings(stated: JsonObject) -> dict[str, float]:
    """The settings of a generation_config.json as the keys of a GGUF file, from which llama.cpp's programs take them.

    A greedy model has temperature 0. What else it states counts if a user sets a temperature.
    """
    greedy, sampling = not stated.get("do_sample"), read_sampling({**stated, "do_sample": True})
    named = [name for name in KEYS if not greedy or type(stated.get(name)) in (int, float)]
    settings = {KEYS[name]: getattr(sampling, name) for name in named}
    if sampling.repetition_penalty != 1:
        settings["general.sampling.penalty_last_n"] = -1  # the whole text, as in transformers
    return settings | ({KEYS["temperature"]: 0.0} if greedy else {})


def sampling_of_gguf(metadata: Mapping[str, object], file: Path) -> tuple[Sampling, str]:
    """Reads the settings in a GGUF file (`general.sampling.*`). Also returns the source as a text.

    Raises:
        UsageError: a value is out of range.
    """
    stated = {name: metadata[key] for name, key in KEYS.items() if key in metadata}
    sampling = read_sampling({**stated, "do_sample": "temperature" in stated})
    source = "general.sampling of the file" if "temperature" in stated else "the file names no temperature"
    return _checked(sampling, file), source if sampling.temperature else f"{source}: greedy"


def shown(sampling: Sampling) -> dict[str, float]:
    """The settings in use, other than the defaults. With temperature 0 most settings have no effect."""
    values: dict[str, float] = {name: getattr(sampling, name) for name in Sampling.__struct_fields__ if name != "stops"}
    return {
        name: value
        for name, value in values.items()
        if name == "temperature"
        or (value != getattr(Sampling(), name) and (sampling.temperature or name == "repetition_penalty"))
    }


def require_numbers(logits: np.ndarray, of: str = "the model") -> None:
    """Refuses logits of damaged weights or settings, because the choice of a token would be arbitrary.

    Raises:
        VerificationFailed: a logit is NaN, or the largest one is infinite.
    """
    if not math.isfinite(largest := float(logits.max())):  # the maximum is NaN if any logit is NaN
        raise VerificationFailed(
            f"{of} computes {largest:g} in place of a score of the next token",
            code="not_finite",
            expected="finite numbers",
            got=f"{largest:g}",
            hint="the weights or the settings in the file are damaged: make it again: skill-train export-gguf RUN",
        )


def next_token(logits: np.ndarray, sampling: Sampling, random: np.random.Generator, context: Sequence[int]) -> int:
    """Chooses the next token.

    Args:
        logits: the model's logits [vocabulary].
        context: the tokens so far, with the prompt.

    Raises:
        VerificationFailed: as for `require_numbers`.
    """
    require_numbers(logits)
    row = _penalized(logits, sampling, context)
    if sampling.temperature == 0:
        return int(row.argmax())
    return int(random.choice(len(row), p=_sampled(row, sampling)))


def _penalized(logits: np.ndarray, sampling: Sampling, context: Sequence[int]) -> np.ndarray:
    import numpy as np

    row: np.ndarray = np.array(logits, dtype=np.float64)
    if sampling.repetition_penalty != 1.0:
        tokens = sorted({token for token in context if 0 <= token < len(row)})
        rows = row[tokens]
        row[tokens] = np.where(rows < 0, rows * sampling.repetition_penalty, rows / sampling.repetition_penalty)
    return row


def _sampled(row: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The probability of each token: temperature, top_k, top_p, min_p, in transformers' order. `row` is penalized."""
    import numpy as np

    row = row / sampling.temperature
    if 0 < sampling.top_k < len(row):
        row[row < np.partition(row, -sampling.top_k)[-sampling.top_k]] = -np.inf
    if sampling.top_p < 1:
        order = np.argsort(-row, kind="stable")
        shares = _probabilities(row[order])
        left_out = np.cumsum(shares) - shares >= sampling.top_p
        row[order[1:][left_out[1:]]] = -np.inf
    if sampling.min_p > 0:
        shares = _probabilities(row)
        row[shares < sampling.min_p * shares.max()] = -np.inf
    return _probabilities(row)


def _probabilities(row: np.ndarray) -> np.ndarray:
    import numpy as np

    shares: np.ndarray = np.exp(row - row.max())
    shares /= shares.sum()
    return shares


def _number(stated: Mapping[str, object], name: str, otherwise: float) -> float:
    """The number under a key; `otherwise` if the key is missing or has another type; infinity if it is too large."""
    value = stated.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return otherwise
    try:
        return float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return math.inf


def _count(stated: Mapping[str, object], name: str, otherwise: int) -> int:
    """`_number` as a whole number. An infinite or NaN number becomes -1, which `_checked` refuses."""
    value = _number(stated, name, otherwise)
    return int(value) if math.isfinite(value) else -1


def _checked(sampling: Sampling, file: Path) -> Sampling:
    good = (
        0 <= sampling.temperature < 100
        and sampling.top_k >= 0
        and 0 < sampling.top_p <= 1
        and 0 <= sampling.min_p <= 1
        and 0 < sampling.repetition_penalty < 100
    )
    if not good:
        raise UsageError(
            f"{file} has settings that no answer can be sampled with",
            code="broken_model",
            expected="temperature 0 or more, top_k 0 or more, top_p above 0, min_p from 0 to 1, a penalty above 0",
            got=", ".join(
                f"{name} {value}" for name, value in msgspec.to_builtins(sampling).items() if name != "stops"
            ),
            hint="correct generation_config.json of the model, and export a GGUF file of it again",
        )
    return sampling
