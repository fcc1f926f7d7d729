"""The choice of the next token, held against transformers' own."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skill_train.core.errors import UsageError
from skill_train.llama.sampling import Sampling, _penalized, _sampled, next_token, sampling_of, sampling_of_gguf

LOGITS = np.random.default_rng(7).normal(size=200).astype(np.float32) * 3
CONTEXT = [3, 3, 17, 150, 199]


def probabilities(sampling: Sampling) -> np.ndarray:
    """By which `next_token` takes each token where the temperature is above 0."""
    return _sampled(_penalized(LOGITS, sampling, CONTEXT), sampling)


def by_transformers(**values: Any) -> np.ndarray:
    """As `generate` orders its processors."""
    import torch
    from transformers import (
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    made = {
        "repetition_penalty": RepetitionPenaltyLogitsProcessor,
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
    }
    scores = torch.tensor(LOGITS)[None].double()
    for name, kind in made.items():
        if name in values:
            scores = kind(values[name])(torch.tensor([CONTEXT]), scores)
    return scores.softmax(-1)[0].numpy()


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 1.0},
        {"temperature": 0.3},
        {"temperature": 2.5, "top_k": 5},
        {"temperature": 1.0, "top_k": 1000},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.0, "top_p": 0.01},
        {"temperature": 0.7, "min_p": 0.1},
        {"temperature": 0.7, "repetition_penalty": 1.3},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.1},
    ],
)
def test_the_probabilities_are_those_of_transformers(values: dict[str, float]) -> None:
    own = probabilities(Sampling(**values))
    assert own == pytest.approx(by_transformers(**values), abs=1e-9)
    assert own.sum() == pytest.approx(1)


def test_tokens_are_drawn_by_their_probabilities() -> None:
    sampling, random = Sampling(temperature=1.0, top_k=4), np.random.default_rng(0)
    drawn = Counter(next_token(LOGITS, sampling, random, CONTEXT) for _ in range(4000))
    expected = probabilities(sampling)
    assert set(drawn) == set(np.flatnonzero(expected).tolist())
    assert all(abs(count / 4000 - expected[token]) < 0.03 for token, count in drawn.items())


def test_temperature_0_takes_the_most_likely_token() -> None:
    for seed in range(5):
        assert next_token(LOGITS, Sampling(), np.random.default_rng(seed), CONTEXT) == LOGITS.argmax()
    best = int(LOGITS.argmax())
    assert next_token(LOGITS, Sampling(repetition_penalty=50.0), np.random.default_rng(0), [best]) != best


def test_a_token_beyond_the_vocabulary_is_no_context() -> None:
    """A picture's place has a number that a padded vocabulary does not have."""
    assert next_token(LOGITS, Sampling(repetition_penalty=1.5), np.random.default_rng(0), [5000, -1]) >= 0


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (None, Sampling()),
        ({}, Sampling()),
        ({"eos_token_id": 2}, Sampling()),
        ({"do_sample": False, "temperature": 0.7}, Sampling()),
        ({"do_sample": True}, Sampling(temperature=1.0, top_k=50)),
        ({"temperature": 0.7}, Sampling()),  # `generate` (5.23) answers the same for every seed
        ({"stop_strings": ["###", "", 3]}, Sampling(stops=("###",))),
        ({"do_sample": True, "stop_strings": "User:"}, Sampling(temperature=1.0, top_k=50, stops=("User:",))),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20},
            Sampling(temperature=0.6, top_p=0.9, top_k=20),
        ),
        ({"repetition_penalty": 1.05}, Sampling(repetition_penalty=1.05)),
        ({"do_sample": True, "min_p": 0.1, "top_k": 0}, Sampling(temperature=1.0, min_p=0.1)),
    ],
)
def test_generation_config_is_read_as_transformers_reads_it(
    tmp_path: Path, document: dict[str, Any] | None, expected: Sampling
) -> None:
    if document is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(document))
    assert sampling_of(tmp_path)[0] == expected


@pytest.mark.parametrize(
    "document",
    [
        {"do_sample": True, "temperature": -1},
        {"do_sample": True, "top_p": 0},
        {"repetition_penalty": 0},
        {"do_sample": True, "top_k": math.inf},
        {"do_sample": True, "top_k": math.nan},
        {"do_sample": True, "min_p": 10**400},
    ],
)
def test_settings_that_no_answer_can_be_sampled_with_are_refused(tmp_path: Path, document: dict[str, Any]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(document))
    with pytest.raises(UsageError, match="sampled with") as caught:
        sampling_of(tmp_path)
    assert caught.value.code == "broken_model"
    assert "--temperature" not in caught.value.hint  # which was refused for the same reason


@pytest.mark.parametrize("top_k", [math.inf, math.nan, -1])
def test_a_gguf_file_with_such_settings_is_refused(top_k: float) -> None:
    with pytest.raises(UsageError, match="sampled with"):
        sampling_of_gguf({"general.sampling.temp": 1.0, "general.sampling.top_k": top_k}, Path("x.gguf"))


@pytest.mark.parametrize(
    ("document", "source"),
    [
        ({"no_repeat_ngram_size": 3, "typical_p": 0.5}, " without its no_repeat_ngram_size: greedy"),
        ({"do_sample": True, "typical_p": 0.5, "num_beams": 4}, " without its num_beams, typical_p"),
        ({"do_sample": True, "num_beams": 1, "guidance_scale": 1.0, "typical_p": 1.0, "bad_words_ids": []}, ""),
        ({"do_sample": True, "max_length": 4096, "pad_token_id": 0, "suppress_tokens": None, "min_length": 0}, ""),
    ],
)
def test_what_is_left_out_of_it_is_said(tmp_path: Path, document: dict[str, Any], source: str) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(document))
    assert sampling_of(tmp_path)[1] == f"generation_config.json{source}"


def test_a_gguf_file_may_name_its_own() -> None:
    keys = {"general.sampling.temp": 0.5, "general.sampling.top_k": 7, "general.sampling.penalty_repeat": 1.2}
    expected = Sampling(temperature=0.5, top_k=7, repetition_penalty=1.2)
    assert sampling_of_gguf(keys, Path("x.gguf"))[0] == expected
    assert sampling_of_gguf({"general.name": "x"}, Path("x.gguf")) == (
        Sampling(),
        "the file names no temperature: greedy",
    )
    alone = sampling_of_gguf({"general.sampling.penalty_repeat": 1.1}, Path("x.gguf"))  # of a greedy model
    assert alone == (Sampling(repetition_penalty=1.1), "the file names no temperature: greedy")
    without = sampling_of_gguf({"general.sampling.temp": 0.7}, Path("x.gguf"))  # as the model it was made of
    assert without == (Sampling(temperature=0.7, top_k=50), "general.sampling of the file")
