"""A reference whose weights stay in 16 bits says what the one read in fp32 says, to the last bit."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from skill_train.model.families import KEPT_IN_16_BITS
from skill_train.reference.load import reference_model
from skill_train.reference.low_memory import (
    _Room,
    _wide_linear,
    frugal_model,
    is_plain,
    merged_weights,
    parts_of,
    peak_bytes,
)
from skill_train.verify.weights.check import compare_weights

pytestmark = pytest.mark.slow

KINDS = ("qwen2", "qwen3", "llama", "mistral", "phi3")
TOKENS = 20_000  # an output layer of three parts; the published vocabularies, which nothing here reads, take seconds
IDS = [[5, 9, 2, 40, 11, 7, 0, 0], list(range(20, 28))]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    root = tmp_path_factory.mktemp("bases")

    @cache
    def made(kind: str, dtype: str) -> Path:
        return tiny.build_without_words(kind, root / f"{kind}-{dtype}", tokens=TOKENS, dtype=dtype)

    return made


def said(model: Any) -> np.ndarray:
    with torch.no_grad():
        found: np.ndarray = model(input_ids=torch.tensor(IDS), use_cache=False).logits.numpy()
    return found


def types(model: Any) -> set[torch.dtype]:
    """Of the matrices, without the adapter's."""
    return {weight.dtype for name, weight in model.named_parameters() if weight.ndim > 1 and "lora_" not in name}


def test_every_known_family_is_here(bases: Any) -> None:
    import json

    found = {json.loads((bases(kind, "bfloat16") / "config.json").read_text())["model_type"] for kind in KINDS}
    assert found == set(KEPT_IN_16_BITS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_as_the_model_in_fp32(kind: str, dtype: str, bases: Any, tmp_path: Path) -> None:
    base = bases(kind, dtype)
    adapter = tiny.adapter(base, tmp_path / "adapter")
    for tuned in (None, adapter):
        with reference_model(base, tuned) as model:
            expected = said(model)
        with frugal_model(base, tuned) as model:
            assert types(model) == {getattr(torch, dtype)}
            assert np.array_equal(said(model), expected)
            if tuned is not None:
                with model.disable_adapter():
                    assert not np.array_equal(said(model), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", [{}, {"use_rslora": True, "r": 4}], ids=str)
def test_merged_weights_are_those_of_peft(kind: str, config: dict[str, Any], bases: Any, tmp_path: Path) -> None:
    base = bases(kind, "bfloat16")
    adapter = tiny.adapter(base, tmp_path / "adapter", **config)
    assert is_plain(adapter)
    with reference_model(base, adapter) as model:
        expected = model.merge_and_unload().state_dict()
    with frugal_model(base, adapter) as model:
        found = {name: make() for name, make in merged_weights(model, adapter)}
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            assert torch.equal(found[name].float(), weight), name
        changed = sum(weight.dtype == torch.float32 and weight.ndim > 1 for weight in found.values())
    assert changed >= 8  # two layers of four matrices at least


EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    "config",
    [
        {"use_dora": True},
        {"targets": ["lm_head"]},
        {"modules_to_save": ["lm_head"]},
        {"bias": "all"},
        {"init_lora_weights": "pissa"},
    ],
    ids=str,
)
def test_an_adapter_that_is_more_than_a_and_b_is_read_in_fp32(
    config: dict[str, Any], bases: Any, tmp_path: Path
) -> None:
    base = bases("qwen2", "bfloat16")
    adapter = tiny.adapter(base, tmp_path / "adapter", **config)
    assert not is_plain(adapter)
    with reference_model(base, adapter) as model:
        expected = said(model)
        weights = dict(model.merge_and_unload().state_dict())
    if config.get("targets") == ["lm_head"]:  # PEFT merges into the matrix of both ends; this one was not trained
        weights[EMBEDDING] = load_file(base / "model.safetensors")[EMBEDDING].float()
    with frugal_model(base, adapter) as model:
        assert types(model) == {torch.float32}
        assert np.array_equal(said(model), expected)
        assert {name for name, make in merged_weights(model, adapter) if torch.equal(make(), weights[name])} == set(
            weights
        )


def test_what_is_not_known_or_not_of_one_type_is_read_in_fp32(bases: Any, tmp_path: Path) -> None:
    """Gemma makes its embedding's scale in the type of the weights; and a float32 norm would be rounded to bf16."""
    mixed = shutil.copytree(bases("qwen2", "bfloat16"), tmp_path / "mixed")
    tensors = load_file(mixed / "model.safetensors")
    norm = "model.norm.weight"
    tensors[norm] = tensors[norm].float() * 1.001
    save_file(tensors, mixed / "model.safetensors", metadata={"format": "pt"})
    for base in (mixed, tiny.cached("gemma", dtype="bfloat16"), bases("qwen2", "float32")):
        with frugal_model(base) as model:
            assert types(model) == {torch.float32}
            stored = {weight.dtype for weight in model.state_dict().values()}
        assert stored == {torch.float32}


def test_peak_is_that_of_the_weights(bases: Any) -> None:
    """By hand: the model of Qwen2, and half of its bytes with 8192 rows of its vocabulary, 64 wide, in fp32."""
    whole, half = bases("qwen2", "float32"), bases("qwen2", "bfloat16")
    counts = [weight.numel() for weight in load_file(half / "model.safetensors").values()]
    assert peak_bytes(whole, None) == 4 * sum(counts)
    assert max(counts) == 20_000 * 64
    assert peak_bytes(half, None) == 2 * sum(counts) + 4 * 8192 * 64


@pytest.mark.parametrize("rows", [8193, 8200, 16385, 24580, 49153, 50257, 151936])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_parts_of_a_large_layer_are_the_whole(rows: int, bias: bool) -> None:
    """A product with a few rows, of a vocabulary with one token more, adds up in another order."""
    parts = parts_of(rows)
    assert [part.stop for part in parts[:-1]] == [part.start for part in parts[1:]] and parts[-1].stop == rows
    assert all(1000 < part.stop - part.start <= 8192 for part in parts)
    torch.manual_seed(rows)
    layer = torch.nn.Linear(96, rows, bias=bias).bfloat16()
    exact = torch.nn.Linear(96, rows, bias=bias)
    exact.load_state_dict({name: weight.float() for name, weight in layer.state_dict().items()})
    layer.__class__, layer.room = _wide_linear(), _Room()
    with torch.no_grad():
        for shape in ((1, 96), (7, 96), (2, 29, 96)):
            given = torch.randn(shape)
            if shape[0] == 1 and len(shape) == 2:  # MKL adds up one row by the number of columns on some processors
                most = 2 * 96 * 2.0**-24 * (given.abs() @ exact.weight.abs().T)
                assert bool(((layer(given) - exact(given)).abs() <= most).all())
            else:
                assert torch.equal(layer(given), exact(given))


def test_it_is_freed_at_the_end(bases: Any) -> None:
    """Without a collector of cycles: another model may be read next."""
    base = bases("qwen2", "bfloat16")
    with frugal_model(base) as model:
        said(model)
        left = [weakref.ref(model), weakref.ref(model.lm_head.room)]
        memory = weakref.ref(model.lm_head.room._memory)
        gc.disable()
    try:
        assert memory() is None
        del model
        assert [one() for one in left] == [None, None]
    finally:
        gc.enable()


def test_threads_are_given_back(bases: Any) -> None:
    base = bases("qwen2", "bfloat16")
    before = torch.get_num_threads()
    with frugal_model(base) as model:
        compare_weights([], model, base, None, None)
    with ThreadPoolExecutor(1) as pool:  # a new thread takes what was set last
        assert pool.submit(torch.get_num_threads).result() == before
