"""Gemma 4 as it is published: with the keys that its last layers do not use, and with a tower for pictures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import tiny
from converting import converted
from gguf_faults import check_weights
from skill_train.gguf.convert_adapter import AdapterExportRequest, export_lora
from skill_train.llama import get_converter
from skill_train.llama.gguf_header import read_gguf
from skill_train.run.verify_record import Check
from skill_train.verify.metadata.check import check_metadata
from skill_train.verify.weights.adapter import check_lora_weights
from tiny_gemma4 import published, with_tower
from told import Warnings, quiet

pytestmark = pytest.mark.slow

BORROWED = {f"blk.{layer}.attn_{name}.weight" for layer in (2, 3) for name in ("k", "v", "k_norm")}


@pytest.mark.torture
def test_keys_of_layers_that_use_those_of_others_are_named_and_no_fault(tmp_path: Path) -> None:
    model = published(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    gguf = read_gguf(converted(model, tmp_path))
    assert gguf.tensors.keys() >= BORROWED
    weights, left_out = check_weights([gguf], model, None)[gguf.path.name]
    assert isinstance(weights, Check) and weights.verdict == "warn"
    assert weights.figures["looked_at"] == len(gguf.tensors) - len(BORROWED)
    assert "llama.cpp answers without them" in left_out.reason
    assert check_metadata(gguf, config).verdict == "pass"
    without = {key: value for key, value in gguf.metadata.items() if not key.endswith("shared_kv_layers")}
    check = check_metadata(replace(gguf, metadata=without), config)  # llama.cpp would then use them
    assert check.verdict == "fail" and "shared_kv_layers is 0" in check.detail


def test_the_text_of_a_model_with_a_tower(tmp_path: Path) -> None:
    model = with_tower(tmp_path / "model")
    gguf = read_gguf(converted(model, tmp_path))
    (weights,) = check_weights([gguf], model, None)[gguf.path.name]
    assert isinstance(weights, Check) and weights.verdict == "pass", weights.detail
    assert weights.figures["looked_at"] == len(gguf.tensors)
    check = check_metadata(gguf, json.loads((model / "config.json").read_text()))
    assert check.verdict == "pass", check.detail


def test_the_adapter_of_a_model_with_a_tower(tmp_path: Path) -> None:
    """Its modules have other names than those of the text alone."""
    base = with_tower(tmp_path / "model")
    targets = ["q_proj", "down_proj", "per_layer_projection"]
    adapter = tiny.adapter(base, tmp_path / "adapter", targets=targets, exclude_modules=r".*vision_tower.*")
    request = AdapterExportRequest(
        base=base,
        adapter=adapter,
        out=tmp_path / "gguf",
        record=tmp_path / "lora_gguf.json",
        name="m",
        outtype="f16",
        toolchain=get_converter.find(),
    )
    exported = export_lora(request, progress=quiet, warn=Warnings())
    lora = read_gguf(tmp_path / next(iter(exported.record.outputs)))
    check = check_lora_weights(lora, read_gguf(converted(base, tmp_path)), base, adapter)
    assert check.verdict == "pass", check.detail
