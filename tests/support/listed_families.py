"""Tiny models of families that `tiny` does not have, and their GGUF files by llama.cpp's converter. Static checks only.

`converted("cohere")` is `(model folder, f16 file)`, kept beside the tiny models. Never change them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import gguf_maker
import tiny

_SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 512}
_GROUPED = {**_SMALL, "num_attention_heads": 4, "num_key_value_heads": 2}
_FULL = {**_SMALL, "num_attention_heads": 4, "num_key_value_heads": 4}
_EXPERTS = {**_GROUPED, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0156}
_GRANITE |= {"logits_scaling": 8.0}
_MLA = {**_FULL, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_MLA |= {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
_MLA |= {"first_k_dense_replace": 1, "topk_group": 1}
_LLAMA_3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
_LLAMA_3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 128}
_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
_LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [1.5] * 8}
_LONG |= {"original_max_position_embeddings": 256, "factor": 4.0}

# Name: the tiny model whose tokenizer it has, the model type, and its fields. Without a type it is the tiny model.
_FAMILIES: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    **{name: (name, None, {}) for name in ("gemma", "llama-bpe", "qwen2", "phi3", "gpt2")},
    "mixtral": ("llama-spm", "mixtral", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "stablelm": ("gpt2", "stablelm", {**_GROUPED, "partial_rotary_factor": 0.25, "use_qkv_bias": True}),
    "cohere": ("gpt2", "cohere", {**_GROUPED, "logit_scale": 0.0625}),
    "cohere2": ("gpt2", "cohere2", {**_GROUPED, "logit_scale": 0.25, "sliding_window": 64, "rotary_pct": 1.0}),
    "starcoder2": ("gpt2", "starcoder2", {**_GROUPED, "norm_epsilon": 1e-5, "sliding_window": 256}),
    "qwen2-moe": ("qwen2", "qwen2_moe", {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 128}),
    "deepseek-v2": ("gpt2", "deepseek_v2", {**_MLA, "n_group": 1, "routed_scaling_factor": 1.0, "topk_method": "greedy",
                                            "norm_topk_prob": False, "scoring_func": "softmax"}),
    "deepseek-v3": ("gpt2", "deepseek_v3", {**_MLA, "n_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
                                            "scoring_func": "sigmoid"}),
    "lfm2": ("gpt2", "lfm2", {**_GROUPED, "layer_types": ["conv", "full_attention"],
                              "block_auto_adjust_ff_dim": False}),
    "granite": ("gpt2", "granite", {**_GROUPED, **_GRANITE}),
    "granite-hybrid": ("gpt2", "granitemoehybrid", {**_GROUPED, **_GRANITE, "vocab_size": 50264, "mamba_n_heads": 4,
        "layer_types": ["mamba", "attention"], "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_d_head": 32,
        "shared_intermediate_size": 128, "mamba_d_state": 16, "mamba_n_groups": 1, "position_embedding_type": "nope"}),
    "gemma2": ("gemma", "gemma2", {**_GROUPED, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64}),
    "gpt-oss": ("gpt2", "gpt_oss", {**_GROUPED, "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama-3.1": ("llama-bpe", "llama", {**_GROUPED, "rope_parameters": _LLAMA_3}),
    "qwen2-yarn": ("qwen2", "qwen2", {**_GROUPED, "rope_parameters": _YARN}),
    "phi3-long": ("phi3", "phi3", {**_GROUPED, "max_position_embeddings": 1024, "rope_parameters": _LONG,
                                   "original_max_position_embeddings": 256}),
}  # fmt: skip
NAMES = tuple(_FAMILIES)
LIKE_ANOTHER = ("cohere2", "starcoder2", "qwen2-moe", "deepseek-v2", "gemma2")  # these only `make walks` converts


def converted(name: str) -> tuple[Path, Path]:
    kind, model_type, fields = _FAMILIES[name]
    source = tiny.cached(kind)
    key = hashlib.sha256(json.dumps([source.name, model_type, fields]).encode()).hexdigest()[:16]
    final = source.parent / f"listed-{name}-{key}"

    def make(part: Path) -> None:
        part.mkdir()
        if model_type is None:
            shutil.copytree(source, part / "model")
        else:
            _write(source, part / "model", model_type, fields)
        gguf_maker.export(part / "model", part)

    tiny.made_once(final, make)
    return final / "model", final / "model-f16.gguf"


def _write(source: Path, folder: Path, model_type: str, fields: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    said = json.loads((source / "config.json").read_text())
    tokens = {key: said.get(key) for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**tokens, **fields}))
    model.save_pretrained(folder)
    if "mamba" in fields.get("layer_types", ()):  # as published; transformers 5 writes names of its own
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**written, "layer_types": fields["layer_types"]}))
    for path in source.iterdir():
        if not (folder / path.name).exists() and path.suffix != ".safetensors":
            shutil.copy(path, folder / path.name)
