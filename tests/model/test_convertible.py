"""What cannot become a GGUF file is known from config.json, before the training, and only that.

Walks over every family with LoRA targets, and those of the tiny models: each converts, and llama.cpp computes what
transformers computes, or `plan` had said that it does not.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

import gguf_maker
import tiny
import tiny_families
import tiny_templates
import tiny_vocab
from converting import converted
from skill_train.core.errors import NativeCrash, UsageError, VerificationFailed
from skill_train.llama import inference
from skill_train.model.config import TEXT_OF_VISION
from skill_train.model.convertible import from_config
from skill_train.model.convertible.from_config import PROVEN
from skill_train.model.convertible.vocabulary import why_no_vocabulary
from skill_train.model.folder import read_model
from skill_train.model.lora_targets import TARGETS
from skill_train.program.pictures.processor import PROCESSOR_DEFAULTS
from skill_train.reference import load as reference
from skill_train.verify.step import VerifyRequest, verify

pytestmark = pytest.mark.slow

SAME = 1e-5  # of mean KL in nats, in f32: equal computations differ by 3e-8 at most
IDS = [464, 3290, 318, 922, 287, 262, 1110, 290, 2740, 546, 340]
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = SHAPE | {"num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
MPT = {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512}
DBRX = MPT | {"ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2}}
DBRX |= {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}}
FALCON = SHAPE | {"alibi": False, "bias": False, "multi_query": True, "new_decoder_architecture": False}
BLOOM = {"hidden_size": 64, "n_layer": 2, "n_head": 4}
NEOX = SHAPE | {"max_position_embeddings": 512, "tie_word_embeddings": False}
GEMMA = GROUPED | {"head_dim": 16, "tie_word_embeddings": True}
GLM = GROUPED | {"head_dim": 16}
TURNED = {"rope_theta": 5e6, "partial_rotary_factor": 1.0}
ROUTED = GROUPED | {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1, "head_dim": 16}
ROUTED |= {"num_local_experts": 4, "n_routed_experts": 4, "num_experts": 4, "first_k_dense_replace": 1}
ROUTED |= {"n_group": 1, "topk_group": 1}
GEMMA2 = GEMMA | {"query_pre_attn_scalar": 16}


def _turned(kind: str, **fields: Any) -> dict[str, Any]:
    """The positions of a config."""
    return {"rope_parameters": {"rope_theta": 1e4, "rope_type": kind, "factor": 4.0} | fields}


WIDE = GROUPED | {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
YARN = {"original_max_position_embeddings": 64}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LONG_TABLES = {"long_factor": [1 + 0.3 * n for n in range(8)], "short_factor": [1 + 0.1 * n for n in range(8)]}
LFM2 = {"layer_types": ["conv", "full_attention"], "tie_word_embeddings": True, "num_dense_layers": 1}
MLA = ROUTED | {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
MLA |= {"num_key_value_heads": 4} | dict.fromkeys(("n_routed_experts", "num_local_experts", "num_experts"), 32)
H1 = GROUPED | {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
NEXT = ROUTED | {"shared_expert_intermediate_size": 64, "head_dim": 32, "linear_num_key_heads": 2}
NEXT |= {"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
NEXT |= {"layer_types": ["linear_attention", "full_attention"]}
DELTA = GROUPED | {key: NEXT[key] for key in NEXT if key.startswith(("linear_", "layer_types", "head_dim"))}
HYBRID = ROUTED | {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "vocab_size": 50264}
HYBRID |= {"layers_block_type": ["linear_attention", "full_attention", "moe"]}
CPM3 = (
    GROUPED
    | {key: MLA[key] for key in MLA if key.endswith(("rank", "_dim")) and key != "head_dim"}
    | {"num_key_value_heads": 4}
)
CPM3 |= {"v_head_dim": 16}
WINDOWED = GROUPED | {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 16}
LAGUNA = WINDOWED | ROUTED | {"shared_expert_intermediate_size": 64, "layer_types": WINDOWED["layer_types"][::-1]}
ONE_BASE = WINDOWED | ROUTED
ONE_BASE |= {
    "rope_parameters": {key: {"rope_type": "default", "rope_theta": 10000.0} for key in WINDOWED["layer_types"]}
}
LONGER = _turned("longrope", original_max_position_embeddings=64, factor=8.0, **LONG_TABLES)
AFMOE = ROUTED | {"num_hidden_layers": 4, "num_dense_layers": 1, "mup_enabled": True, "sliding_window": 8}
GEMMA4 = GEMMA | {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA4 |= {"global_head_dim": 32, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0}


def _gemma4_turned(window: dict[str, Any], full: dict[str, Any]) -> dict[str, Any]:
    """Its positions, where layers with a window or without one have others."""
    usual = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    windowed = {"rope_type": "default", "rope_theta": 1e4, "factor": 4.0}
    return {"rope_parameters": {"full_attention": usual | full, "sliding_attention": windowed | window}}


# Name: type, fields, and what `plan` says of it.
STOPPED: dict[str, tuple[str, dict[str, Any], str]] = {
    "opt": ("opt", SHAPE | {"ffn_dim": 128, "word_embed_proj_dim": 64}, "OPTForCausalLM"),
    "gptj": ("gptj", GPT2 | {"rotary_dim": 8}, "GPTJForCausalLM"),
    "phimoe": ("phimoe", ROUTED, "PhimoeForCausalLM"),
    "codegen": ("codegen", GPT2 | {"rotary_dim": 8}, "CodeGenForCausalLM"),
    "falcon-rw": ("falcon", FALCON | {"alibi": True, "bias": True, "parallel_attn": False}, "ALiBi"),
    "falcon-alibi": ("falcon", FALCON | {"alibi": True}, "ALiBi"),
    "falcon-sequential": ("falcon", FALCON | {"parallel_attn": False}, "parallel_attn"),
    "falcon-bias": ("falcon", FALCON | {"bias": True}, "bias: true"),
    "falcon-width": ("falcon", FALCON | {"ffn_hidden_size": 128}, "ffn_hidden_size"),
    "bitnet": ("bitnet", GROUPED | {"tie_word_embeddings": True}, "BitNet"),
    "gpt2-width": ("gpt2", GPT2 | {"n_inner": 96}, "n_inner"),
    "gpt2-scale": ("gpt2", GPT2 | {"scale_attn_weights": False}, "scale"),
    "bigcode-heads": ("gpt_bigcode", GPT2 | {"multi_query": False}, "multi_query"),
    "mpt-alibi": ("mpt", MPT | {"attn_config": {"alibi": False}}, "alibi"),
    "phi-norms": ("phi", GROUPED | {"num_key_value_heads": 4, "qk_layernorm": True}, "qk_layernorm"),
    "stablelm-norms": ("stablelm", GROUPED | {"qk_layernorm": True}, "qk_layernorm"),
    "gemma2-scale": ("gemma2", GEMMA | {"query_pre_attn_scalar": 256}, "query_pre_attn_scalar"),
    "gemma3-scale": ("gemma3_text", GEMMA | {"query_pre_attn_scalar": 256}, "query_pre_attn_scalar"),
    "gemma-untied": ("gemma", GEMMA | {"tie_word_embeddings": False}, "tie_word_embeddings"),
    "gemma2-untied": (
        "gemma2",
        GEMMA | {"query_pre_attn_scalar": 16, "tie_word_embeddings": False},
        "tie_word_embeddings",
    ),
    "cohere-untied": ("cohere", GROUPED, "tie_word_embeddings"),
    "cohere2-untied": ("cohere2", GROUPED, "tie_word_embeddings"),
    "starcoder2-bias": ("starcoder2", GROUPED | {"use_bias": False}, "use_bias"),
    "glm-heads": ("glm", GLM | {"head_dim": 32}, "head_dim"),
    "glm-positions": ("glm", GLM | {"rope_parameters": TURNED | {"rope_type": "linear", "factor": 4.0}}, "rope_type"),
    "glm-relu": ("glm", GLM | {"hidden_act": "relu"}, "hidden_act"),
    "gemma-vocabulary": ("gemma", GEMMA, "tokenizer.model"),
    "nemotron-vocabulary": ("nemotron", GROUPED, "tokenizer.model"),
    "qwen2-moe-shares": (
        "qwen2_moe",
        ROUTED | {"shared_expert_intermediate_size": 128, "norm_topk_prob": True},
        "norm_topk_prob",
    ),
    "qwen3-moe-shares": ("qwen3_moe", ROUTED | {"norm_topk_prob": False}, "norm_topk_prob"),
    "olmoe-shares": ("olmoe", ROUTED | {"num_key_value_heads": 4, "norm_topk_prob": True}, "norm_topk_prob"),
    "olmoe-heads": ("olmoe", ROUTED, "num_key_value_heads"),
    "dots1-heads": ("dots1", ROUTED, "num_key_value_heads"),
    "qwen2-moe-dense": (
        "qwen2_moe",
        ROUTED | {"shared_expert_intermediate_size": 128, "mlp_only_layers": [1]},
        "mlp_only_layers",
    ),
    "qwen3-moe-step": ("qwen3_moe", ROUTED | {"norm_topk_prob": True, "decoder_sparse_step": 2}, "decoder_sparse_step"),
    "llama-relu": ("llama", GROUPED | {"hidden_act": "relu"}, "hidden_act"),
    "qwen2-gelu": ("qwen2", GROUPED | {"hidden_act": "gelu"}, "hidden_act"),
    "exaone4-gelu": ("exaone4", GROUPED | {"hidden_act": "gelu"}, "hidden_act"),
    "seed-oss-gelu": ("seed_oss", GLM | {"hidden_act": "gelu"}, "hidden_act"),
    "qwen3-moe-relu": ("qwen3_moe", ROUTED | {"norm_topk_prob": True, "hidden_act": "relu"}, "hidden_act"),
    "gemma-relu": ("gemma", GEMMA | {"hidden_act": "relu"}, "hidden_act"),
    "gemma2-silu": ("gemma2", GEMMA2 | {"hidden_activation": "silu"}, "hidden_activation"),
    "gemma3-relu": ("gemma3_text", GEMMA2 | {"hidden_activation": "relu"}, "hidden_activation"),
    "gpt2-relu": ("gpt2", GPT2 | {"activation_function": "relu"}, "activation_function"),
    "bigcode-silu": ("gpt_bigcode", GPT2 | {"activation_function": "silu"}, "activation_function"),
    "neox-relu": ("gpt_neox", NEOX | {"hidden_act": "relu"}, "hidden_act"),
    "starcoder2-silu": ("starcoder2", GROUPED | {"use_bias": True, "hidden_act": "silu"}, "hidden_act"),
    "arcee-silu": ("arcee", GROUPED | {"hidden_act": "silu"}, "hidden_act"),
    "qwen3-bias": ("qwen3", GLM | {"attention_bias": True}, "attention_bias"),
    "gemma2-bias": ("gemma2", GEMMA2 | {"attention_bias": True}, "attention_bias"),
    "olmo2-bias": ("olmo2", GROUPED | {"attention_bias": True}, "attention_bias"),
    "smollm3-bias": ("smollm3", GROUPED | {"mlp_bias": True}, "mlp_bias"),
    "seed-oss-bias": ("seed_oss", GLM | {"attention_out_bias": True}, "attention_out_bias"),
    "neox-bias": ("gpt_neox", NEOX | {"attention_bias": False}, "attention_bias"),
    "gemma2-heads": ("gemma2", GEMMA2 | {"head_dim": 32}, "query_pre_attn_scalar"),
    "gemma3-heads": ("gemma3_text", GEMMA2 | {"head_dim": 32}, "query_pre_attn_scalar"),
    "gemma3-both-ways": ("gemma3_text", GEMMA2 | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    "bigcode-scale": ("gpt_bigcode", GPT2 | {"scale_attn_weights": False}, "scale_attn_weights"),
    "bloom-residual": ("bloom", BLOOM | {"apply_residual_connection_post_layernorm": True}, "post_layernorm"),
    "cohere-norms": ("cohere", GROUPED | {"tie_word_embeddings": True, "use_qk_norm": True}, "use_qk_norm"),
    "smollm3-layers": ("smollm3", GROUPED | {"no_rope_layer_interval": 2}, "no_rope_layers"),
    "llama-yarn-factor": ("llama", WIDE | _turned("yarn", **YARN, attention_factor=1.0), "attention_factor"),
    "llama-yarn-mscale": ("llama", WIDE | _turned("yarn", **YARN, mscale=1.0, mscale_all_dim=1.0), "mscale"),
    "qwen2-yarn-fast": ("qwen2", WIDE | _turned("yarn", **YARN, beta_fast=2.0), "beta_fast"),
    "qwen3-yarn-slow": ("qwen3", WIDE | _turned("yarn", **YARN, beta_slow=4.0), "beta_slow"),
    "llama-longrope": ("llama", GROUPED | _turned("longrope", **LONG_TABLES, **YARN), "longrope"),
    "qwen3-llama3": ("qwen3", GLM | _turned("llama3", **LLAMA3), "llama3"),
    "olmo2-llama3": ("olmo2", GROUPED | _turned("llama3", **LLAMA3), "llama3"),
    "gemma-linear": ("gemma", GEMMA | _turned("linear"), "linear"),
    "gemma2-yarn": ("gemma2", GEMMA2 | _turned("yarn", **YARN), "yarn"),
    "cohere-linear": (
        "cohere",
        GROUPED | {"tie_word_embeddings": True, "logit_scale": 1.0} | _turned("linear"),
        "linear",
    ),
    "stablelm-linear": ("stablelm", GROUPED | _turned("linear", partial_rotary_factor=1.0), "linear"),
    "neox-linear": ("gpt_neox", NEOX | _turned("linear", partial_rotary_factor=1.0), "linear"),
    "gemma2-base": ("gemma2", GEMMA2 | _turned("default", rope_theta=77.0), "rope_theta"),
    # As the published config.json of tiiuae/falcon-11B has one (500042).
    "falcon-base": (
        "falcon",
        FALCON | {"new_decoder_architecture": True} | _turned("default", rope_theta=77.0),
        "rope_theta",
    ),
    "qwen2-moe-tied": (
        "qwen2_moe",
        ROUTED | {"shared_expert_intermediate_size": 128, "tie_word_embeddings": True},
        "tie_word_embeddings",
    ),
    "olmo2-tied": ("olmo2", GROUPED | {"tie_word_embeddings": True}, "tie_word_embeddings"),
    "olmoe-tied": ("olmoe", ROUTED | {"num_key_value_heads": 4, "tie_word_embeddings": True}, "tie_word_embeddings"),
    "phi-tied": ("phi", GROUPED | {"num_key_value_heads": 4, "tie_word_embeddings": True}, "tie_word_embeddings"),
    "stablelm-tied": ("stablelm", GROUPED | {"tie_word_embeddings": True}, "tie_word_embeddings"),
    "gpt-oss-tied": ("gpt_oss", ROUTED | {"tie_word_embeddings": True}, "tie_word_embeddings"),
    "dots1-tied": ("dots1", ROUTED | {"num_key_value_heads": 4, "tie_word_embeddings": True}, "tie_word_embeddings"),
    "apertus-tied": ("apertus", GROUPED | {"tie_word_embeddings": True}, "tie_word_embeddings"),
    "falcon-h1-tied": ("falcon_h1", H1 | {"tie_word_embeddings": True}, "tie_word_embeddings"),
    "lfm2-moe-untied": ("lfm2_moe", ROUTED | LFM2 | {"tie_word_embeddings": False}, "tie_word_embeddings"),
    "neox-tied": ("gpt_neox", NEOX | {"tie_word_embeddings": True}, "tie_word_embeddings"),
    **{
        f"{kind}-heads": (kind, GROUPED | {"head_dim": 32} | more, "head_dim: 32")
        for kind, more in (
            ("cohere", {"tie_word_embeddings": True}),
            ("starcoder2", {"use_bias": True}),
            ("phi3", {}),
            ("olmo", {}),
            ("olmo2", {}),
            ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
            ("granite", {}),
            ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
            ("lfm2", LFM2),
        )
    },
    "deepseek2-greedy": ("deepseek_v2", MLA | {"topk_method": "greedy", "n_group": 2}, "topk_group"),
    "deepseek2-shares": ("deepseek_v2", MLA | {"norm_topk_prob": True}, "norm_topk_prob"),
    "lfm2-bias": ("lfm2", GROUPED | LFM2 | {"conv_bias": True}, "conv_bias"),
    "lfm2-moe-shares": ("lfm2_moe", ROUTED | LFM2 | {"norm_topk_prob": False}, "norm_topk_prob"),
    "lfm2-moe-scale": ("lfm2_moe", ROUTED | LFM2 | {"routed_scaling_factor": 1.7}, "routed_scaling_factor"),
    "lfm2-moe-bias": ("lfm2_moe", ROUTED | LFM2 | {"use_expert_bias": False}, "use_expert_bias"),
    "qwen3-next-shares": ("qwen3_next", NEXT | {"norm_topk_prob": False}, "norm_topk_prob"),
    "qwen3-next-relu": ("qwen3_next", NEXT | {"hidden_act": "relu"}, "hidden_act"),
    "qwen3-next-widths": ("qwen3_next", NEXT | {"linear_value_head_dim": 32}, "linear_value_head_dim"),
    "qwen3.5-bias": ("qwen3_5_text", DELTA | {"attention_bias": True}, "attention_bias"),
    "qwen3.5-relu": ("qwen3_5_text", DELTA | {"hidden_act": "relu"}, "hidden_act"),
    "qwen3.5-widths": ("qwen3_5_text", DELTA | {"linear_value_head_dim": 32}, "linear_value_head_dim"),
    "qwen3.5-yarn-fast": (
        "qwen3_5_text",
        DELTA | {"head_dim": 64} | _turned("yarn", **YARN, beta_fast=2.0, partial_rotary_factor=0.5),
        "beta_fast",
    ),
    "qwen3.5-moe-bias": ("qwen3_5_moe_text", NEXT | {"attention_bias": True}, "attention_bias"),
    "qwen3.5-moe-relu": ("qwen3_5_moe_text", NEXT | {"hidden_act": "relu"}, "hidden_act"),
    "gemma4-bias": ("gemma4_text", GEMMA4 | {"attention_bias": True}, "attention_bias"),
    "gemma4-relu": ("gemma4_text", GEMMA4 | {"hidden_activation": "relu"}, "hidden_activation"),
    "gemma4-both-ways": ("gemma4_text", GEMMA4 | {"use_bidirectional_attention": "all"}, "causal attention"),
    "gemma4-uncapped": (
        "gemma4_text",
        GEMMA4 | {"hidden_size": 512, "final_logit_softcapping": None},
        "final_logit_softcapping",
    ),
    "gemma4-one-width": ("gemma4_text", GEMMA4 | {"global_head_dim": 16}, "global_head_dim"),
    "gemma4-window-linear": ("gemma4_text", GEMMA4 | _gemma4_turned({"rope_type": "linear"}, {}), "sliding_attention"),
    "gemma4-default": ("gemma4_text", GEMMA4 | _gemma4_turned({}, {"rope_type": "default"}), "full_attention"),
    "gemma4-factor": ("gemma4_text", GEMMA4 | _gemma4_turned({}, {"factor": 4.0}), "full_attention"),
    "gemma4-no-window": ("gemma4_text", GEMMA4 | {"layer_types": ["full_attention"] * 4}, "layer_types"),
    "gemma4-inputs": (
        "gemma4_text",
        GEMMA4 | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 2200},
        "vocab_size_per_layer_input",
    ),
    "gemma4-other-keys": (
        "gemma4_text",
        GEMMA4
        | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 2116, "num_kv_shared_layers": 2}
        | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]},
        "num_kv_shared_layers",
    ),
    "olmoe-bias": ("olmoe", ROUTED | {"num_key_value_heads": 4, "attention_bias": True}, "attention_bias"),
    "gpt-oss-bias": ("gpt_oss", ROUTED | {"attention_bias": False}, "attention_bias"),
    "granitemoe-llama3": ("granitemoe", ROUTED | _turned("llama3", **LLAMA3), "llama3"),
    "olmoe-llama3": ("olmoe", ROUTED | {"num_key_value_heads": 4} | _turned("llama3", **LLAMA3), "llama3"),
    "lfm2-llama3": ("lfm2", GROUPED | LFM2 | _turned("llama3", **LLAMA3), "llama3"),
    "olmo3-tied": ("olmo3", GROUPED | {"sliding_window": 64, "tie_word_embeddings": True}, "tie_word_embeddings"),
    "qwen3-next-bias": ("qwen3_next", NEXT | {"attention_bias": True}, "attention_bias"),
    "nemotron-h-mixed": (
        "nemotron_h",
        HYBRID | {"layers_block_type": ["linear_attention", "mlp", "moe"]},
        "Nemotron-H",
    ),
    "nemotron-h-silu": ("nemotron_h", HYBRID | {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
    "nemotron-h-gelu": ("nemotron_h", HYBRID | {"mamba_hidden_act": "gelu"}, "mamba_hidden_act"),
    "nemotron-h-bias": ("nemotron_h", HYBRID | {"use_bias": True}, "use_bias"),
    "nemotron-h-no-bias": ("nemotron_h", HYBRID | {"use_conv_bias": False}, "use_conv_bias"),
    "nemotron-h-vocabulary": ("nemotron_h", HYBRID | {"vocab_size": 50257}, "vocab_size"),
    "granite-hybrid-vocabulary": (
        "granitemoehybrid",
        GROUPED | {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_n_groups": 1},
        "vocab_size",
    ),
    "granite-swa-positions": ("granite_swa", WINDOWED | {"no_rope_layers": [0, 1]}, "no_rope_layers"),
    "granite-swa-full": ("granite_swa", WINDOWED | {"layer_types": ["full_attention"] * 2}, "layer_types"),
    "granite-swa-relu": ("granite_swa", WINDOWED | {"hidden_act": "relu"}, "hidden_act"),
    "granite-swa-head": ("granite_swa", WINDOWED | {"head_dim": 32}, "head_dim"),
    "granite-swa-yarn-fast": ("granite_swa", WINDOWED | _turned("yarn", **YARN, beta_fast=2.0), "beta_fast"),
    "granite-moe-swa-positions": ("granitemoe_swa", ROUTED | WINDOWED | {"no_rope_layers": [0, 1]}, "no_rope_layers"),
    "exaone-moe-full": ("exaone_moe", ROUTED | WINDOWED | {"layer_types": ["full_attention"] * 2}, "layer_types"),
    "exaone-moe-tied": ("exaone_moe", ROUTED | WINDOWED | {"tie_word_embeddings": True}, "tie_word_embeddings"),
    "exaone-moe-dense": ("exaone_moe", ROUTED | WINDOWED | {"mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types"),
    "glm4-lite-relu": ("glm4_moe_lite", MLA | {"hidden_act": "relu"}, "hidden_act"),
    "glm4-lite-bias": ("glm4_moe_lite", MLA | {"attention_bias": True}, "attention_bias"),
    "glm4-lite-queries": ("glm4_moe_lite", MLA | {"q_lora_rank": None}, "q_lora_rank"),
    "glm4-lite-halves": ("glm4_moe_lite", MLA | {"rope_interleave": False}, "rope_interleave"),
    "glm4-lite-dense": ("glm4_moe_lite", MLA | {"mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types"),
    "glm4-lite-yarn": ("glm4_moe_lite", MLA | _turned("yarn", **YARN), "mscale_all_dim"),
    "youtu-yarn": ("youtu", CPM3 | _turned("yarn", **YARN), "mscale_all_dim"),
    "afmoe-bias": ("afmoe", AFMOE | {"attention_bias": True}, "attention_bias"),
    "youtu-relu": ("youtu", CPM3 | {"hidden_act": "relu"}, "hidden_act"),
    "youtu-bias": ("youtu", CPM3 | {"attention_bias": True}, "attention_bias"),
    "youtu-halves": ("youtu", CPM3 | {"rope_interleave": False}, "rope_interleave"),
    "afmoe-relu": ("afmoe", AFMOE | {"hidden_act": "relu"}, "hidden_act"),
    "mellum-bases": ("mellum", WINDOWED | ROUTED, "rope_theta"),
    "mellum-full": ("mellum", ONE_BASE | {"layer_types": ["full_attention"] * 2}, "layer_types"),
    "mellum-dense": ("mellum", ONE_BASE | {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types"),
    "mellum-shares": ("mellum", ONE_BASE | {"norm_topk_prob": False}, "norm_topk_prob"),
    "mellum-tied": ("mellum", ONE_BASE | {"tie_word_embeddings": True}, "tie_word_embeddings"),
    "laguna-windows": ("laguna", WINDOWED | ROUTED | {"shared_expert_intermediate_size": 64}, "layer_types"),
    "laguna-cap": ("laguna", LAGUNA | {"moe_router_logit_softcapping": 0.5}, "softcapping"),
    "hunyuan-moe": ("hunyuan_v1_moe", ROUTED | {"moe_topk": 2}, "vocabulary"),
    "minicpm3-bias": ("minicpm3", CPM3 | {"attention_bias": True}, "attention_bias"),
    "minicpm3-queries": ("minicpm3", CPM3 | {"q_lora_rank": None}, "q_lora_rank"),
    "minicpm3-longer": ("minicpm3", CPM3 | LONGER, "original_max"),
    "minicpm3-scales": ("minicpm3", CPM3 | {"scale_emb": 1}, "scale_emb"),
    "minicpm3-values": ("minicpm3", CPM3 | {"v_head_dim": 32}, "v_head_dim"),
    "afmoe-embedding": ("afmoe", AFMOE | {"mup_enabled": False}, "mup_enabled"),
    "afmoe-windows": ("afmoe", AFMOE | {"layer_types": ["full_attention"] + ["sliding_attention"] * 3}, "layer_types"),
    "afmoe-shares": ("afmoe", AFMOE | {"route_norm": False}, "route_norm"),
    "neox-base": ("gpt_neox", NEOX | _turned("default", rope_theta=77.0, partial_rotary_factor=1.0), "rope_theta"),
}
# Of the same types, and those whose routers' function transformers 5 leaves out of config.json.
TAKEN: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", GROUPED),
    "mistral": ("mistral", GROUPED),
    "falcon-one-norm": ("falcon", FALCON | {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}),
    "gpt2-width": ("gpt2", GPT2 | {"n_inner": 256}),
    "gpt2": ("gpt2", GPT2),
    "gemma2-scale": ("gemma2", GEMMA | {"query_pre_attn_scalar": 16}),
    "stablelm-parallel": ("stablelm", GROUPED | {"use_parallel_residual": True}),
    "minimax-m2": ("minimax_m2", ROUTED | {"rotary_dim": 16}),
    "dots1": ("dots1", ROUTED | {"num_key_value_heads": 4}),
    "exaone-moe": ("exaone_moe", ROUTED | {"sliding_window": 64}),
    "glm": ("glm", GLM | {"rms_norm_eps": 0.01, "rope_parameters": TURNED | {"rope_type": "default"}}),
    "llama-yarn": ("llama", WIDE | _turned("yarn", **YARN)),
    # What YaRN computes for this factor, as OLMo 3 states it: 0.1 x ln(4) + 1.
    "qwen3-yarn": ("qwen3", WIDE | _turned("yarn", **YARN, attention_factor=1.138629, beta_fast=32.0, beta_slow=1.0)),
    "youtu-yarn": ("youtu", CPM3 | _turned("yarn", **YARN, mscale=1.0, mscale_all_dim=1.0)),
    "minicpm3-long": (
        "minicpm3",
        CPM3 | _turned("longrope", original_max_position_embeddings=512, factor=1.0, **LONG_TABLES),
    ),
    "mellum": ("mellum", ONE_BASE),
    "laguna": ("laguna", LAGUNA),
    "mistral-llama3": ("mistral", GROUPED | _turned("llama3", **LLAMA3)),
    "exaone4-llama3": ("exaone4", GROUPED | _turned("llama3", **LLAMA3)),
    "qwen2-linear": ("qwen2", GROUPED | _turned("linear")),
    "gemma2-gelu": ("gemma2", GEMMA2 | {"hidden_activation": "gelu"}),
    "gemma4-untied": ("gemma4_text", GEMMA4 | {"tie_word_embeddings": False}),
    "gemma4-31b": ("gemma4_text", GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4-default-layers": (
        "gemma4_text",
        {key: GEMMA4[key] for key in GEMMA4 if key != "layer_types"} | {"num_hidden_layers": 6},
    ),
    "gemma3-bias": ("gemma3_text", GEMMA2 | {"attention_bias": False}),
    "neox": ("gpt_neox", NEOX),
    "arcee": ("arcee", GROUPED),
    "llama-bias": ("llama", GROUPED | {"attention_bias": True, "mlp_bias": True}),
    "llama4": (
        "llama4_text",
        ROUTED | {"num_hidden_layers": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1},
    ),
}


LONG = [(464 + 7919 * number) % 50_000 for number in range(48)]
WINDOW = GROUPED | {"sliding_window": 8, "head_dim": 16}
EXPERTS = ROUTED | {"sliding_window": 8}
SWITCHED = {"use_sliding_window": True, "max_window_layers": 0}
HALF = {"layer_types": ["sliding_attention", "full_attention"]}
WINDOWS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", WINDOW),
    "mixtral": ("mixtral", EXPERTS),
    "ministral3": ("ministral3", WINDOW),
    "qwen2": ("qwen2", WINDOW | SWITCHED),
    "qwen2-half": ("qwen2", WINDOW | SWITCHED | {"max_window_layers": 1}),
    "qwen2-moe": ("qwen2_moe", EXPERTS | SWITCHED | {"max_window_layers": 2, "shared_expert_intermediate_size": 128}),
    "qwen3": ("qwen3", WINDOW | SWITCHED),
    "qwen3-moe": ("qwen3_moe", EXPERTS | SWITCHED | {"norm_topk_prob": True}),
    "smollm3": (
        "smollm3",
        WINDOW | {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2, "no_rope_layers": [1, 1]},
    ),
    "phi3": ("phi3", WINDOW | {"original_max_position_embeddings": 512}),
    "starcoder2": ("starcoder2", WINDOW | {"use_bias": True}),
    "dots1": ("dots1", EXPERTS | {"num_key_value_heads": 4, "max_window_layers": 0}),
    "gemma2": ("gemma2", GEMMA | {"query_pre_attn_scalar": 16, "sliding_window": 8}),
    "gemma3": ("gemma3_text", GEMMA | {"query_pre_attn_scalar": 16, "sliding_window": 8, "num_hidden_layers": 6}),
    "gemma4": ("gemma4_text", GEMMA4 | {"sliding_window": 8}),
    "gemma2-pruned": (
        "gemma2",
        GEMMA
        | {"query_pre_attn_scalar": 16, "sliding_window": 8, "num_hidden_layers": 3}
        | {"layer_types": [*HALF["layer_types"], "full_attention"]},
    ),
    "gpt-oss": ("gpt_oss", EXPERTS | HALF),
    "gpt-oss-turned": ("gpt_oss", EXPERTS | HALF | {"layer_types": HALF["layer_types"][::-1]}),
    "exaone-moe": ("exaone_moe", EXPERTS | HALF),
    "afmoe": ("afmoe", AFMOE),
    "granite-swa": ("granite_swa", WINDOW | HALF),
    "laguna": ("laguna", LAGUNA | {"sliding_window": 8}),
    "mellum": ("mellum", ONE_BASE | {"sliding_window": 8}),
    "granite-moe-swa": ("granitemoe_swa", EXPERTS | HALF),
    "olmo3": (
        "olmo3",
        WINDOW | {"num_hidden_layers": 4, "layer_types": HALF["layer_types"][:1] * 3 + HALF["layer_types"][1:]},
    ),
}


def built(folder: Path, kind: str, fields: dict[str, Any]) -> Path:
    """A tiny model as transformers saves it; Gemma has its own vocabulary, GLM its tokens, and others GPT-2's."""
    import torch
    import transformers

    folder.mkdir()
    if kind.startswith("gemma4"):
        ids = words(folder, tiny_families.folder("gemma4"))
    elif kind == "minicpm3":
        ids = tiny_vocab.write_llama_spm(folder, tiny.vocab_folder(), template=tiny_templates.LLAMA_2)
    elif kind.startswith("gemma"):
        ids = tiny_vocab.write_gemma(folder)
    elif kind.startswith("qwen3_5"):  # transformers takes no GPT-2 words for its experts
        ids = tiny_vocab.write_qwen(folder, tiny.vocab_folder(), thinking=True)
    else:
        ids = words(folder, tiny.cached("gpt2"))
    if kind == "glm":
        ids["vocab_size"] = tiny_families.add_glm(folder)
    tokens = {"vocab_size": ids["vocab_size"], "bos_token_id": ids["bos"], "eos_token_id": ids["eos"]}
    config = transformers.AutoConfig.for_model(kind, **tokens | {"pad_token_id": ids["pad"]} | fields)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape)
            weight.copy_(1 + 0.1 * noise if weight.ndim == 1 else noise / weight.shape[-1] ** 0.5)
    model.save_pretrained(str(folder))
    return folder


def words(folder: Path, made: Path) -> dict[str, int]:
    """Copied from a model that has them, because they take up to seconds to write."""
    for file in made.glob("tokenizer*"):
        shutil.copy(file, folder)
    said = json.loads((made / "config.json").read_text())
    return {name: said[f"{name}_token_id"] for name in ("bos", "eos", "pad")} | {"vocab_size": said["vocab_size"]}


def distance(model: Path, gguf: Path, work: Path, tokens: Collection[int] = IDS) -> float:
    """Mean KL in nats between transformers' logits and llama.cpp's."""
    size = read_model(model).vocab_size
    ids = [number % (size or 1) for number in tokens]
    with reference.reference_model(model) as loaded:
        logits = reference.logits(loaded, ids)
    logits.tofile(work / "tuned.bin")
    job = inference.InferenceJob(
        gguf=str(gguf),
        context_tokens=64,
        threads=1,
        vocabulary=logits.shape[1],
        tuned=str(work / "tuned.bin"),
        sequences=[inference.Sequence(ids, 0)],
    )
    return float(inference.ask(job).figures["mean_kl"])


def require_same(model: Path, work: Path) -> None:
    file = converted(model, work)
    assert distance(model, file, work) < SAME
    file.unlink()


# Those that a mend of ours made right, and one that is refused. `make walks` has all.
ALWAYS = ("mpt", "granitehybrid", "deepseek3", "nemotron")


@pytest.mark.parametrize("name", tiny_families.by_default(chosen=ALWAYS))
def test_a_family_converts_or_plan_had_said_so(name: str, tmp_path: Path) -> None:
    if name == "llama4":
        pytest.skip("llama.cpp needs four layers of it, as TAKEN has")
    model = tiny_families.folder(name)
    facts = read_model(model)
    if facts.convertible:
        assert why_no_vocabulary(model, facts.architecture) is None
        require_same(model, tmp_path)
    else:
        with pytest.raises(UsageError):
            require_same(model, tmp_path)


@pytest.mark.parametrize("name", tiny_families.by_default(TAKEN, ("falcon-one-norm", "gpt2", "qwen2", "qwen3-yarn")))
def test_a_model_as_transformers_saves_it_converts(name: str, tmp_path: Path) -> None:
    model = built(tmp_path / "model", *TAKEN[name])
    facts = read_model(model)
    assert facts.not_convertible is None
    assert why_no_vocabulary(model, facts.architecture) is None
    require_same(model, tmp_path)


@pytest.mark.parametrize(
    "name",
    tiny_families.by_default(
        STOPPED, ("falcon-alibi", "gpt2-width", "qwen3-moe-shares", "llama-relu", "gemma2-silu", "qwen2-yarn-fast")
    ),
)
def test_what_is_refused_before_the_training_is_rightly_refused(name: str, tmp_path: Path) -> None:
    """The converter itself, without our words: it fails, or llama.cpp cannot load or computes something else."""
    kind, fields, word = STOPPED[name]
    model = built(tmp_path / "model", kind, fields)
    if name == "gemma-vocabulary":
        (model / "tokenizer.model").unlink()
    facts = read_model(model)
    assert facts.convertible is False
    assert word in str(facts.not_convertible)
    try:
        # transformers writes no layers that predict further tokens
        options = ("--no-mtp",) if kind.startswith(("qwen3_5", "qwen3_next")) else ()
        file = gguf_maker.export(model, tmp_path / "gguf", outtype="f32", options=options)
    except AssertionError:
        return
    try:
        assert distance(model, file, tmp_path) > 100 * SAME
    except VerificationFailed as error:
        assert error.code == "bad_gguf"
    except NativeCrash as error:  # an assertion of its own, or a bias that is not there
        assert "expects" in str(error) or name == "nemotron-h-no-bias"


@pytest.mark.parametrize("name", tiny_families.by_default(WINDOWS, ("gemma2", "gemma2-pruned", "phi3")))
def test_a_window_is_computed_with_or_plan_had_said_that_it_is_not(name: str, tmp_path: Path) -> None:
    """Texts of six windows' length, in a model whose layers see one window."""
    model = built(tmp_path / "model", *WINDOWS[name])
    facts = read_model(model)
    assert (facts.sliding_window, facts.not_convertible) == (8, None)
    file = converted(model, tmp_path)
    far = distance(model, file, tmp_path, LONG)
    assert facts.unread_window == (None if far < SAME else 8)
    assert not SAME < far < 100 * SAME
    near = distance(model, file, tmp_path, LONG[:8])
    assert near < SAME


def test_plan_tells_of_a_tokenizer_that_the_converter_does_not_know(tmp_path: Path, commands: Any) -> None:
    """The converter refuses such a folder: tests/gguf/test_export.py."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    model = Path(shutil.copytree(tiny.cached("gpt2"), tmp_path / "model"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"Row {number} has {number} apples."}) + "\n" for number in range(9)))

    def warned() -> list[str]:
        answer = commands.run(tmp_path, dict(os.environ), "plan", "--model", model, "--data", rows, "--max-steps", "1")
        found = json.loads(answer.stdout)["warnings"]
        return [each["message"] for each in found if each["code"] == "not_convertible"]

    assert warned() == []
    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel()
    own.train_from_iterator(["some text of our own"] * 9, trainers.BpeTrainer(special_tokens=["<|endoftext|>"]))
    own.save(str(model / "tokenizer.json"))
    (told,) = warned()
    assert "splits text" in told
    assert "training and merging work" in told


def test_plan_export_and_verify_name_the_window_that_is_left_out(tmp_path: Path, commands: Any) -> None:
    model, made = built(tmp_path / "model", *WINDOWS["phi3"]), tmp_path / "made"
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"text": f"Row {number} tells of {number} apples."}) + "\n" for number in range(9))
    )
    planned = ("plan", "--model", model, "--data", rows, "--max-steps", "1", "--max-length", "64")
    for words in (planned, ("export-gguf", model, "--quant", "f32", "--out", made)):
        answer = json.loads(commands.run(tmp_path, dict(os.environ), *words).stdout)
        warned = [each["message"] for each in answer["warnings"] if each["code"] == "unread_window"]
        assert len(warned) == 1, words
        assert "more than 8 tokens" in warned[0]
        assert ("max_length 64" in warned[0]) is (words == planned)
    proof = verify(
        VerifyRequest(
            reference=model,
            adapter=None,
            base=None,
            ggufs=list(made.glob("*.gguf")),
            rows=[],
            held_out=[],
            record=tmp_path / "verify.json",
            tokens=64,
        ),
        progress=lambda *_: None,
        warn=lambda *_: None,
    ).record
    check = next(check for check in proof.checks if check.name == "window")
    assert (check.verdict, check.threshold) == ("warn", 8)
    assert "more than 8 tokens" in check.detail


PIXTRAL: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "vision_feature_layer": -1,
    "vision_config": {"model_type": "pixtral", "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, None),
        ({"architectures": ["Mistral3ForConditionalGeneration"], "vision_feature_layer": None}, None),
        ({"vision_config": {"model_type": "siglip_vision_model"}}, "Pixtral's tower alone, and this one has siglip"),
        ({"vision_feature_layer": -2}, "vision_feature_layer: -2"),
        ({"vision_feature_layer": None}, "vision_feature_layer: -2"),  # what transformers reads without the key
        ({"vision_config": {"model_type": "pixtral", "rope_theta": 20000}}, "this model uses 20000 (rope_theta)"),
        ({"projector_hidden_act": "silu"}, "projector_hidden_act"),
    ],
)
def test_which_projectors_llama_cpp_computes_as_pixtrals(changes: dict[str, Any], word: str | None) -> None:
    about = {key: value for key, value in (PIXTRAL | changes).items() if value is not None}
    told = from_config.why_no_projector(about)
    assert told is None if word is None else word in str(told)


def test_every_type_with_lora_targets_is_walked_over() -> None:
    walked = {tiny_families.model_type(name) for name in tiny_families.FAMILIES}
    walked |= {kind for kind, *_ in [*STOPPED.values(), *TAKEN.values()]}
    walked |= {read_model(tiny.cached(kind)).model_type for kind in tiny.KINDS}
    vision = {"mllama", *PROCESSOR_DEFAULTS}  # of most of them AutoModelForCausalLM loads no text alone
    assert TARGETS.keys() - walked <= vision
    assert not {"qwen2_vl", "qwen2_5_vl"} & set(TEXT_OF_VISION)


def test_every_type_that_tests_prove_is_called_proven_and_no_other() -> None:
    """tests/verify/test_weight_faults.py compares files of each of the tiny families whole."""
    walked = {tiny_families.model_type(name) for name in tiny_families.FAMILIES}
    walked |= {read_model(tiny.cached(kind)).model_type for kind in tiny.KINDS}
    of_vision = {"gemma4", "llama4", "qwen3_5", "qwen3_5_moe", *PROCESSOR_DEFAULTS}
    assert walked | of_vision == PROVEN


def test_plan_says_before_the_training_what_verify_cannot_judge_whole(tmp_path: Path, commands: Any) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"Row {number} of apples."}) + "\n" for number in range(9)))

    def unproven(model: Path) -> list[str]:
        answer = commands.run(tmp_path, dict(os.environ), "plan", "--model", model, "--data", rows, "--max-steps", "1")
        return [each["message"] for each in json.loads(answer.stdout)["warnings"] if each["code"] == "unproven_family"]

    assert unproven(tiny_families.folder("smollm3")) == []
    (message,) = unproven(built(tmp_path / "dbrx", "dbrx", DBRX))
    assert "dbrx" in message and "can be warn for a right file" in message


@pytest.mark.parametrize(
    ("family", "line", "parted"),
    [
        ("cohere2", "modules_to_save: [embed_tokens]", True),
        ("gemma2", "target_modules: [q_proj, embed_tokens]", True),
        ("cohere2", "target_modules: all-linear", False),
        ("cohere2", "finetuning_type: full", False),  # both remain one matrix
        ("gemma3", "modules_to_save: [embed_tokens]", False),  # llama.cpp has a place for its head
    ],
)
def test_plan_tells_of_a_head_of_its_own_that_a_file_has_no_place_for(
    family: str, line: str, parted: bool, tmp_path: Path, commands: Any
) -> None:
    """PEFT trains the embedding, or the head, apart from the other side of the tie, and `merge` unties them."""
    rows, recipe = tmp_path / "rows.jsonl", tmp_path / "recipe.yaml"
    rows.write_text("".join(json.dumps({"text": f"Row {number} of apples."}) + "\n" for number in range(9)))
    recipe.write_text(f"model: {tiny_families.folder(family)}\ndata: {rows}\nmax_steps: 1\n" + line + "\n")
    answer = json.loads(commands.run(tmp_path, dict(os.environ), "plan", recipe).stdout)
    assert answer["ok"], answer
    told = [each["message"] for each in answer["warnings"] if each["code"] == "not_convertible"]
    assert ["tie_word_embeddings: false" in message for message in told] == [True] * parted


def test_plan_local_and_export_say_the_same_words(tmp_path: Path, commands: Any) -> None:
    model, run = built(tmp_path / "model", "falcon", FALCON | {"alibi": True}), tmp_path / "run"
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"text": f"Row {number} tells of {number} apples."}) + "\n" for number in range(9))
    )
    given = ("--model", model, "--data", rows, "--max-steps", "1", "--max-length", "64")
    why = read_model(model).not_convertible
    assert why is not None

    def said(*words: object) -> dict[str, Any]:
        return dict(json.loads(commands.run(tmp_path, dict(os.environ), *words).stdout))

    for words in (("plan", *given), ("local", *given, "--run-dir", run)):
        warned = [each["message"] for each in said(*words)["warnings"] if each["code"] == "not_convertible"]
        assert len(warned) == 1, words
        assert why in warned[0]
        assert "training and merging work" in warned[0]
    assert said("merge", run)["ok"]
    for words in (("export-gguf", run), ("export-gguf", run, "--lora"), ("export-gguf", run / "merged")):
        refused = said(*words)["error"]
        assert refused["code"] == "not_convertible"
        assert why in refused["message"]
    assert not list(tmp_path.rglob("*.gguf"))
