"""Two-layer models of further families, with a made-up vocabulary of 128 tokens or with Mistral's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import merging
import tiny

FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "nemotron", "gpt_oss", "olmoe", "glm4")
_SIZES = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 256}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_OWN: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 96},
    "deepseek_v3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 64,
        "first_k_dense_replace": 1, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 16, "intermediate_size": 96, "num_key_value_heads": 4,
    },
    "nemotron": {"intermediate_size": 96},
    "gpt_oss": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "head_dim": 16, "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
    "glm4": {"intermediate_size": 96, "head_dim": 16, "pad_token_id": 0},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
}  # fmt: skip
_CLASSES = {
    "qwen3_moe": "Qwen3Moe", "mixtral": "Mixtral", "deepseek_v3": "DeepseekV3", "nemotron": "Nemotron",
    "gpt_oss": "GptOss", "olmoe": "Olmoe", "glm4": "Glm4", "granitemoe": "GraniteMoe",
}  # fmt: skip


def base(family: str, folder: Path, *, dtype: str = "bfloat16", tokenizer: bool = False) -> Path:
    """A model of the family with random weights. With Mistral's tokenizer it can be exported."""
    import transformers

    sizes = _SIZES | _HEADS | _OWN[family] | {"bos_token_id": 1, "eos_token_id": 2}
    if tokenizer:
        sizes |= {"vocab_size": 32000, "max_position_embeddings": 2048}
    config = getattr(transformers, f"{_CLASSES[family]}Config")(**sizes)
    made = merging.save(config, folder, dtype=dtype)
    for file in tiny.cached("mistral").iterdir() if tokenizer else ():
        if not (made / file.name).exists() and file.suffix != ".safetensors":
            shutil.copy(file, made)
    return made
