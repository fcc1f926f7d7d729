"""Every key and list of a correct file of each family is changed, one at a time; the check must name what changed."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import listed_families
from skill_train.llama.gguf_header import GgufFile, read_gguf
from skill_train.reference.load import load_tokenizer
from skill_train.run.verify_record import Check
from skill_train.verify.metadata.check import check_metadata
from skill_train.verify.metadata.vocabulary import check_vocabulary, read_files

pytestmark = pytest.mark.slow


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.torture) if name in listed_families.LIKE_ANOTHER else name
        for name in listed_families.NAMES
    ]
)
def model(request: pytest.FixtureRequest) -> tuple[Path, GgufFile]:
    folder, file = listed_families.converted(request.param)
    return folder, read_gguf(file)


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def changed(gguf: GgufFile, key: str, value: Any) -> GgufFile:
    return replace(gguf, metadata={**gguf.metadata, key: value})


def other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, list):
        return [other(value[0]), *value[1:]]
    return value + 1 if isinstance(value, int) else value * 1.05


def test_a_correct_file_passes(model: tuple[Path, GgufFile]) -> None:
    folder, gguf = model
    for check in (check_metadata(gguf, config_of(folder)), vocabulary(folder, gguf)):
        assert check.verdict == "pass", check.detail


def test_each_number_of_the_architecture_is_compared(model: tuple[Path, GgufFile]) -> None:
    folder, gguf = model
    config, prefix = config_of(folder), f"{gguf.architecture}."
    keys = [key for key, value in gguf.metadata.items() if key.startswith(prefix) and not isinstance(value, str)]
    assert len(keys) >= 6
    for key in keys:
        check = check_metadata(changed(gguf, key, other(gguf.metadata[key])), config)
        assert check.verdict == "fail", key
        assert key.removeprefix(prefix) in check.detail


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("cohere", "logit_scale"),
        ("granite", "embedding_scale"),
        ("granite", "residual_scale"),
        ("granite", "attention.scale"),
        ("deepseek-v3", "expert_weights_scale"),
        ("deepseek-v3", "expert_gating_func"),
        ("deepseek-v3", "expert_weights_norm"),
        ("stablelm", "rope.dimension_count"),
        ("llama-bpe", "rope.freq_base"),
        ("qwen2-yarn", "rope.scaling.factor"),
        ("gemma", "attention.sliding_window"),
        ("lfm2", "attention.head_count_kv"),
    ],
)
def test_a_key_that_is_left_out_where_llama_cpp_takes_another_value(name: str, key: str) -> None:
    folder, file = listed_families.converted(name)
    gguf = read_gguf(file)
    left = {one: value for one, value in gguf.metadata.items() if one != f"{gguf.architecture}.{key}"}
    assert len(left) == len(gguf.metadata) - 1
    check = check_metadata(replace(gguf, metadata=left), config_of(folder))
    assert check.verdict == "fail" and key in check.detail


@pytest.mark.parametrize(
    ("name", "table"),
    [("llama-3.1", "rope_freqs.weight"), ("phi3-long", "rope_factors_long.weight")],
)
def test_rope_factors_that_are_all_one(name: str, table: str, tmp_path: Path) -> None:
    folder, file = listed_families.converted(name)
    gguf, copy = read_gguf(file), tmp_path / "model-f16.gguf"
    tensor, data = gguf.tensors[table], bytearray(file.read_bytes())
    data[tensor.offset : tensor.offset + tensor.n_bytes] = np.ones(tensor.elements, np.float32).tobytes()
    copy.write_bytes(data)
    check = check_metadata(read_gguf(copy), config_of(folder))
    assert check.verdict == "fail" and f"{table}: rope factor" in check.detail


def test_a_key_without_a_statement_is_told() -> None:
    folder, file = listed_families.converted("qwen2")
    check = check_metadata(changed(read_gguf(file), "qwen2.swin_norm", True), config_of(folder))
    assert check.verdict == "warn" and "swin_norm" in check.detail


@lru_cache(2)
def reference_of(folder: Path) -> tuple[Any, list[str], Any]:
    """Its tokenizer, its tokens and its files, which the check only reads."""
    tokenizer = load_tokenizer(folder)
    return tokenizer, tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))), read_files(folder)


def vocabulary(folder: Path, gguf: GgufFile) -> Check:
    return check_vocabulary(gguf, *reference_of(folder), config_of(folder))


@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(n, marks=pytest.mark.torture) for n in ("qwen2", "llama-bpe"))]
)
def test_merges_in_another_order_or_left_out(name: str) -> None:
    folder, file = listed_families.converted(name)
    gguf, key = read_gguf(file), "tokenizer.ggml.merges"
    merges = gguf.metadata[key]
    for at in (0, 137, len(merges) - 2):
        exchanged = [*merges[:at], merges[at + 1], merges[at], *merges[at + 2 :]]
        check = vocabulary(folder, changed(gguf, key, exchanged))
        assert check.verdict == "fail" and f"merge {at} is {merges[at + 1]!r}" in check.detail
    fewer = [merge for number, merge in enumerate(merges) if number % 50]
    assert f"({len(fewer)} instead of {len(merges)})" in vocabulary(folder, changed(gguf, key, fewer)).detail


@pytest.mark.parametrize("name", ["gemma", "mixtral", "phi3"])
def test_scores_in_another_order(name: str) -> None:
    folder, file = listed_families.converted(name)
    gguf, key = read_gguf(file), "tokenizer.ggml.scores"
    scores = gguf.metadata[key]
    for wrong in ([*scores[:300], *reversed(scores[300:600]), *scores[600:]], [*scores[:400], -1.5, *scores[401:]]):
        check = vocabulary(folder, changed(gguf, key, wrong))
        assert check.verdict == "fail" and "score of token" in check.detail


@pytest.mark.parametrize("name", ["gemma", "mixtral", "gpt2"])
def test_an_ordinary_token_that_became_a_control_token(name: str) -> None:
    folder, file = listed_families.converted(name)
    gguf, key = read_gguf(file), "tokenizer.ggml.token_type"
    types = gguf.metadata[key]
    check = vocabulary(folder, changed(gguf, key, [*types[:400], 3, *types[401:]]))
    assert check.verdict == "fail" and "token 400 is of type 3" in check.detail


@pytest.mark.parametrize("name", ["gemma", "gpt2"])
@pytest.mark.parametrize("kind", [float, str], ids=["numbers with a point", "texts"])
def test_token_types_of_another_kind(name: str, kind: type) -> None:
    """llama.cpp reads the bytes of the array as 32-bit integers, whatever they are (llama-vocab.cpp)."""
    folder, file = listed_families.converted(name)
    gguf, key = read_gguf(file), "tokenizer.ggml.token_type"
    check = vocabulary(folder, changed(gguf, key, [kind(each) for each in gguf.metadata[key]]))
    assert check.verdict == "fail" and "tokenizer.ggml.token_type" in check.detail


@pytest.mark.parametrize("kind", [int, str], ids=["integers", "texts"])
def test_scores_of_another_kind(kind: type) -> None:
    """Read as 32-bit floats; here each has its own value, which a comparison of values lets pass."""
    folder, file = listed_families.converted("gemma")
    gguf, key = read_gguf(file), "tokenizer.ggml.scores"
    check = vocabulary(folder, changed(gguf, key, [kind(each) for each in gguf.metadata[key]]))
    assert check.verdict == "fail" and "tokenizer.ggml.scores" in check.detail


@pytest.mark.parametrize("name", ["gemma", "gpt2"])
def test_token_types_left_out(name: str) -> None:
    """Every token is then an ordinary one, and a turn's end is written as text (llama-vocab.cpp)."""
    folder, file = listed_families.converted(name)
    gguf, key = read_gguf(file), "tokenizer.ggml.token_type"
    assert set(gguf.metadata[key]) > {1}  # both have control tokens
    without = replace(gguf, metadata={name: value for name, value in gguf.metadata.items() if name != key})
    check = vocabulary(folder, without)
    assert check.verdict == "fail" and "is of type 1" in check.detail


def test_merges_that_no_file_of_the_reference_has_are_not_passed(tmp_path: Path) -> None:
    folder, file = listed_families.converted("gpt2")
    tokenizer = load_tokenizer(folder)
    own = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    check = check_vocabulary(read_gguf(file), tokenizer, own, read_files(tmp_path), config_of(folder))
    assert check.verdict != "pass"
