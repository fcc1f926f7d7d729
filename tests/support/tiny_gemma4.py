"""A tiny Gemma 4 as it is published: with the keys that its last layers do not use, or with a tower for pictures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

import tiny_families

LAST = ("k_proj", "v_proj", "k_norm")


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
