"""PEFT adapters of the tiny vision models, and what PEFT itself makes of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import tiny
import tiny_vision

_PARTS = ("text_config", "vision_config")

LANGUAGE = r".*(?:language_model|text_model)\..*(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


def load(folder: Path, task: str = "ImageTextToText") -> Any:
    import torch
    import transformers

    return getattr(transformers, f"AutoModelFor{task}").from_pretrained(str(folder), dtype=torch.float32).eval()


def everywhere(base: Path) -> list[str]:
    """All linear layers of language model, tower and projector, by their full names."""
    import torch

    modules = load(base).named_modules()
    return [name for name, module in modules if isinstance(module, torch.nn.Linear) and name != "lm_head"]


def adapter(
    base: Path, folder: Path, *, targets: str | list[str], task: str = "ImageTextToText", **lora_config: Any
) -> Path:
    """Writes an adapter whose weights are all random, and returns its folder.

    Args:
        task: of the class that was trained.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", **lora_config)
    tuned = get_peft_model(load(base, task), config)
    generator = torch.Generator().manual_seed(1)
    for name, weight in tuned.named_parameters():
        if weight.requires_grad:
            tiny.perturb(name, weight, generator, size=0.5, r=4, alpha=8)
    tuned.save_pretrained(str(folder))
    return folder


def peft_merged(base: Path, adapter: Path, task: str = "ImageTextToText") -> dict[str, Any]:
    """Every tensor of PEFT's own merge, by its name in memory."""
    from peft import PeftModel

    merged = PeftModel.from_pretrained(load(base, task), str(adapter)).merge_and_unload(safe_merge=True)
    state: dict[str, Any] = merged.state_dict()
    return state


def with_experts(folder: Path) -> Path:
    """The tiny Qwen3-VL with a mixture of four experts in each layer of the language model."""
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": []}
    return _like_qwen3_vl("Qwen3VLMoeConfig", folder, text=mixture, left_out=())


def with_two_classes(folder: Path) -> Path:
    """Qwen3.5, of which transformers loads the language model alone too, under other names."""
    layers = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 32}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    widths = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    left_out = ("rope_parameters", "deepstack_visual_indexes")
    return _like_qwen3_vl("Qwen3_5Config", folder, text=layers | heads | widths, left_out=left_out)


def _like_qwen3_vl(config_class: str, folder: Path, *, text: dict[str, Any], left_out: tuple[str, ...]) -> Path:
    """A model of another config, with the sizes, tokenizer and processor of the tiny Qwen3-VL."""
    import torch
    import transformers

    known = tiny_vision.cached("qwen3-vl")
    shutil.copytree(known, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((known / "config.json").read_text())
    skipped = ("model_type", *left_out)
    language, vision = ({k: v for k, v in config[part].items() if k not in skipped} for part in _PARTS)
    places = {name: value for name, value in config.items() if name.endswith("_token_id")}
    options = {"text_config": language | text, "vision_config": vision, "tie_word_embeddings": True, **places}
    model = transformers.AutoModelForImageTextToText.from_config(getattr(transformers, config_class)(**options))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5)
    model.save_pretrained(str(folder))
    return folder
