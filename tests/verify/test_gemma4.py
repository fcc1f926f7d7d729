"""Gemma 4 as it is published: with the keys that its last layers do not use, and with a tower for pictures."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import tiny_families
from converting import converted
from gguf_faults import check_weights
from skill_train.llama.gguf_header import read_gguf
from skill_train.run.verify_record import Check
from skill_train.verify.metadata.check import check_metadata

pytestmark = pytest.mark.slow

LAST = ("k_proj", "v_proj", "k_norm")
BORROWED = {f"blk.{layer}.attn_{name}.weight" for layer in (2, 3) for name in ("k", "v", "k_norm")}


def published(folder: Path) -> Path:
    """The tiny one with weights that transformers does not read, and with the names of a published config.json."""
    model = Path(shutil.copytree(tiny_families.folder("gemma4"), folder))
    weights = load_file(model / "model.safetensors")
    for layer in (2, 3):
        for name in LAST:
            own = weights[f"model.layers.{layer - 2}.self_attn.{name}.weight"]
            weights[f"model.layers.{layer}.self_attn.{name}.weight"] = torch.randn_like(own)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    del config["per_layer_config"]
    config |= {"global_head_dim": 32, "num_global_key_value_heads": None}
    (model / "config.json").write_text(json.dumps(config))
    return model


def with_tower(folder: Path) -> Path:
    source = tiny_families.folder("gemma4")
    tower = transformers.Gemma4VisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
    )
    text = json.loads((source / "config.json").read_text())
    config = transformers.Gemma4Config(text_config=text, vision_config=tower.to_dict())
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "language_model" in name:
                noise = torch.randn(weight.shape)
                weight.copy_(1 + 0.1 * noise if weight.ndim == 1 else noise / weight.shape[-1] ** 0.5)
    model.save_pretrained(str(folder))
    for file in source.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


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
