"""Tiny models of many architectures, two layers deep, with random weights: what is not in `tiny.KINDS`.

`folder("mixtral")` is a model that transformers loads and llama.cpp converts; `gguf("mixtral", "f16")` is its file.
Every weight differs from every other one and from zero and one, so that a tensor in the wrong place shows.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

import gguf_maker
import tiny
import tiny_templates
import tiny_vocab
from skill_train.llama.gguf_header import GgufFile, read_gguf

_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_MLA = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
_DELTA = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
_SHARED_EXPERT = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
_QWEN35_ROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * number for number in range(8)],
    "long_factor": [1.0 + 0.5 * number for number in range(8)],
    "original_max_position_embeddings": 256,
}
_GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0156,
    "logits_scaling": 8.0,
}
_GEMMA4 = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 64,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
_NEMOTRON_H = {
    "vocab_size": 50264,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 1,
    "head_dim": 16,
}
# Name: (class of transformers without `Config`, vocabulary, what differs from `_SHAPE`).
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma1": ("Gemma", "gemma", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2",
        "gemma",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "tie_word_embeddings": True, "sliding_window": 64},
    ),
    "gemma3": (
        "Gemma3Text",
        "gemma",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "tie_word_embeddings": True, "sliding_window": 64},
    ),
    "gemma4": (  # as E2B and E4B: input of each layer, and layers with the keys of earlier ones
        "Gemma4Text",
        "gemma4",
        _GEMMA4
        | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 2116}
        | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    ),
    "gemma4moe": (  # as 26B-A4B; 31B is the same without experts
        "Gemma4Text",
        "gemma4",
        _GEMMA4
        | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    ),
    "llama3": ("Llama", "gpt2", {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "llama-bias": ("Llama", "spm", {"attention_bias": True, "mlp_bias": True}),
    "mixtral": ("Mixtral", "spm", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "stablelm": ("StableLm", "gpt2", {"use_qkv_bias": True}),
    "cohere": ("Cohere", "gpt2", {"tie_word_embeddings": True}),
    "cohere2": ("Cohere2", "gpt2", {"tie_word_embeddings": True}),
    "starcoder2": ("Starcoder2", "gpt2", {"use_bias": True}),
    "qwen2moe": (
        "Qwen2Moe",
        "gpt2",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 128,
            "rope_parameters": _YARN,
        },
    ),
    "qwen3moe": (
        "Qwen3Moe",
        "gpt2",
        {
            "norm_topk_prob": True,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "head_dim": 32,
        },
    ),
    "phi2": ("Phi", "gpt2", {"intermediate_size": 256, "num_key_value_heads": 4}),
    "phi3": ("Phi3", "spm", {"original_max_position_embeddings": 512, "pad_token_id": 0}),
    "phi3-long": (
        "Phi3",
        "spm",
        {"rope_parameters": _LONG, "original_max_position_embeddings": 256, "pad_token_id": 0},
    ),
    "gpt2-plain": (
        "GPT2",
        "gpt2",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "tie_word_embeddings": True},
    ),
    "gptneox": ("GPTNeoX", "gpt2", {}),
    "falcon": (
        "Falcon",
        "gpt2",
        {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "alibi": False,
            "bias": False,
            "max_position_embeddings": 2048,
        },
    ),
    "falcon7": (
        "Falcon",
        "gpt2",
        {
            "new_decoder_architecture": False,
            "multi_query": True,
            "alibi": False,
            "bias": False,
            "max_position_embeddings": 2048,
        },
    ),
    "bloom": ("Bloom", "gpt2", {"n_layer": 2, "n_head": 4}),
    "mpt": ("Mpt", "gpt2", {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512}),
    "olmo": ("Olmo", "gpt2", {}),
    "olmo2": ("Olmo2", "gpt2", {}),
    "olmoe": ("Olmoe", "gpt2", {"num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2}),
    "granite": ("Granite", "gpt2", _GRANITE),
    "granitemoe": ("GraniteMoe", "gpt2", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granitemoeshared": (
        "GraniteMoeShared",
        "gpt2",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 96},
    ),
    "granitehybrid": (
        "GraniteMoeHybrid",
        "gpt2",
        {
            "vocab_size": 50264,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 96,
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_expand": 2,
            "mamba_n_groups": 1,
            "position_embedding_type": "nope",
        },
    ),
    "nemotron": ("Nemotron", "spm", {}),
    "deepseek2": ("DeepseekV2", "gpt2", _MLA | {"topk_method": "greedy", "n_group": 1, "topk_group": 1}),
    "deepseek3": ("DeepseekV3", "gpt2", _MLA | {"n_group": 1, "topk_group": 1}),
    "mamba": ("Mamba", "gpt2", {"vocab_size": 50264, "state_size": 16, "tie_word_embeddings": True}),
    "mamba2": (
        "Mamba2",
        "gpt2",
        {
            "vocab_size": 50272,
            "state_size": 16,
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 1,
            "tie_word_embeddings": True,
        },
    ),
    "falconmamba": ("FalconMamba", "gpt2", {"vocab_size": 50264, "state_size": 16, "tie_word_embeddings": True}),
    "lfm2": (
        "Lfm2",
        "gpt2",
        {"layer_types": ["conv", "full_attention"], "block_ff_dim": 128, "tie_word_embeddings": True},
    ),
    "lfm2moe": (
        "Lfm2Moe",
        "gpt2",
        {
            "layer_types": ["conv", "full_attention"],
            "num_dense_layers": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "tie_word_embeddings": True,
        },
    ),
    "gptoss": (
        "GptOss",
        "gpt2",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 64},
    ),
    "glm": ("Glm", "glm", {"head_dim": 16, "rms_norm_eps": 0.01, "pad_token_id": 0}),
    "glm4": ("Glm4", "glm", {"head_dim": 16, "partial_rotary_factor": 0.5, "pad_token_id": 0}),
    "glm4moe": (
        "Glm4Moe",
        "glm",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "head_dim": 16,
            "use_qk_norm": True,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "exaone": ("Exaone", "gpt2", {"head_dim": 16}),  # its files have other names than its modules
    "exaone4": (
        "Exaone4",
        "gpt2",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2, "tie_word_embeddings": True},
    ),
    "ernie": ("Ernie4_5", "spm", {"head_dim": 16, "tie_word_embeddings": True}),
    "erniemoe": (
        "Ernie4_5_Moe",
        "spm",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 64,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 1,
        },
    ),
    "arcee": ("Arcee", "gpt2", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "smollm3": ("SmolLM3", "gpt2", {"pad_token_id": 0}),
    "seedoss": ("SeedOss", "gpt2", {"head_dim": 16}),
    "hunyuan": ("HunYuanDenseV1", "gpt2", {"head_dim": 16}),
    "apertus": ("Apertus", "gpt2", {"rope_parameters": _LLAMA3, "head_dim": 16}),
    "qwen3next": ("Qwen3Next", "gpt2", _SHARED_EXPERT | _DELTA),
    "qwen35": ("Qwen3_5Text", "qwen", _DELTA | {"rope_parameters": _QWEN35_ROPE, "tie_word_embeddings": True}),
    "qwen35moe": (
        "Qwen3_5MoeText",
        "qwen",
        _SHARED_EXPERT | _DELTA | {"linear_num_value_heads": 8, "rope_parameters": _QWEN35_ROPE},
    ),
    "jamba": (
        "Jamba",
        "spm",
        {
            "num_experts": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    "gptbigcode": (
        "GPTBigCode",
        "gpt2",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "tie_word_embeddings": True},
    ),
    "llama4": (
        "Llama4Text",
        "gpt2",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 128,
            "interleave_moe_layer_step": 1,
            "head_dim": 16,
            "pad_token_id": 0,
        },
    ),
    "ministral3": ("Ministral3", "gpt2", {"head_dim": 16}),
    "bamba": (
        "Bamba",
        "gpt2",
        {
            "vocab_size": 50264,
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_expand": 2,
            "mamba_n_groups": 1,
        },
    ),
    "dots1": (
        "Dots1",
        "gpt2",
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "head_dim": 16,
        },
    ),
    "falconh1": (
        "FalconH1",
        "gpt2",
        {
            "vocab_size": 50264,
            "mamba_d_ssm": 128,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "head_dim": 16,
            "embedding_multiplier": 5.5,
            "lm_head_multiplier": 0.7,
            "key_multiplier": 0.4,
            "attention_in_multiplier": 1.25,
            "attention_out_multiplier": 0.9,
            "mlp_multipliers": [0.9, 0.2],
            "ssm_in_multiplier": 1.5,
            "ssm_out_multiplier": 0.25,
            "ssm_multipliers": [0.35, 0.25, 0.2, 0.5, 0.35],
        },
    ),
    "jais2": ("Jais2", "gpt2", {"head_dim": 16}),
    "minimaxm2": ("MiniMaxM2", "gpt2", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
    "olmo3": ("Olmo3", "gpt2", {"sliding_window": 64}),
    "glm4moelite": ("Glm4MoeLite", "glm", _MLA | {"n_group": 1, "topk_group": 1}),
    "youtu": ("Youtu", "gpt2", {key: _MLA[key] for key in _MLA if key.endswith(("rank", "dim", "heads"))}),
    "exaonemoe": (
        "ExaoneMoe",
        "gpt2",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "moe_intermediate_size": 64,
            "head_dim": 16,
            "n_group": 1,
            "topk_group": 1,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "nemotronh": (
        "NemotronH",
        "gpt2",
        _NEMOTRON_H | {"layers_block_type": ["linear_attention", "full_attention", "mlp"]},
    ),
    "nemotronhmoe": (
        "NemotronH",
        "gpt2",
        _NEMOTRON_H
        | {
            "layers_block_type": ["linear_attention", "full_attention", "moe"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "moe_shared_expert_intermediate_size": 96,
            "moe_latent_size": 32,
        },
    ),
    "minicpm3": (
        "MiniCPM3",
        "spm",
        {key: _MLA[key] for key in _MLA if key.endswith(("rank", "dim", "heads"))}
        | {"v_head_dim": 16, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
    ),
    "afmoe": (
        "Afmoe",
        "gpt2",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "moe_intermediate_size": 64,
            "num_dense_layers": 1,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "sliding_window": 64,
            "mup_enabled": True,
        },
    ),
    "mellum": (
        "Mellum",
        "gpt2",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "head_dim": 16,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                key: {"rope_type": "default", "rope_theta": 10000.0} for key in ("sliding_attention", "full_attention")
            },
        },
    ),
    "graniteswa": ("GraniteSWA", "gpt2", _GRANITE | {"sliding_window": 64}),
    "granitemoeswa": (
        "GraniteMoeSWA",
        "gpt2",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64},
    ),
}


# What a published config.json has and transformers 5 does not write; None takes a key away. Without `model_type` the
# converter reads the file itself.
PUBLISHED: dict[str, dict[str, Any]] = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True},
    "bamba": {"model_type": None, "attn_rotary_emb": 8},
    "cohere2": {"model_type": None, "rotary_pct": 1.0},
    "deepseek3": {"model_type": None, "scoring_func": "sigmoid"},
    "falcon7": {"model_type": None, "num_kv_heads": None},
    "glm": {"model_type": None, "seq_length": 512, "layernorm_epsilon": 0.01},
    "gpt2-plain": {"n_ctx": 512},
    "exaonemoe": {"scoring_func": "sigmoid"},
    "glm4moelite": {"scoring_func": "sigmoid"},
    "granitehybrid": {"model_type": None, "layer_types": ["mamba", "attention"]},
    "gptneox": {"model_type": None, "rotary_pct": 0.25},
    "minimaxm2": {"model_type": None, "rotary_dim": 16},
    "nemotronh": {
        "model_type": None,
        "layers_block_type": None,
        "hybrid_override_pattern": "M*-",
        "num_hidden_layers": 3,
    }
    | dict.fromkeys(("num_experts_per_tok", "n_routed_experts", "n_group", "topk_group")),
    "mpt": {"model_type": None, "architectures": ["MPTForCausalLM"]},
}
# Of those whose files are made for `make test`, one of each kind: `make walks` has all.
ALWAYS = ("deepseek3", "falcon", "gemma3", "granitehybrid", "llama3", "mpt", "qwen2moe")
_ROOT = Path(tempfile.gettempdir()) / f"skill-train-tiny-{os.getuid()}" / "families"


def by_default(names: Iterable[str] = FAMILIES, chosen: Collection[str] = ALWAYS) -> list[Any]:
    """Parameters of a test: of those that are not chosen, one for `make walks`."""
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.torture) for name in sorted(names)]


def model_type(name: str) -> str:
    """As its config.json has it. Nothing is built."""
    import transformers

    return str(getattr(transformers, f"{FAMILIES[name][0]}Config").model_type)


@cache
def folder(name: str) -> Path:
    """The model's folder, made once. Never change it."""
    return tiny.made_once(_ROOT / f"{name}-{_key(name)}", lambda part: _build(name, part))


@cache
def gguf(name: str, kind: str = "f16") -> Path:
    """Its file, by llama.cpp's converter and quantizer."""
    model = folder(name)
    return tiny.made_once(model.with_name(f"{model.name}-{kind}"), partial(_convert, name, kind)) / f"model-{kind}.gguf"


def converted(name: str) -> tuple[Path, GgufFile]:
    """A model of either kind, of `tiny` or of these, and its f16 file."""
    if name in ("gemma", "gpt2", "qwen2"):  # of which other tests have one
        made = gguf_maker.exported(name)
        return made.merged, read_gguf(made.file("f16"))
    if name in tiny.KINDS:
        model = tiny.cached(name)
        made_of_it = tiny.made_once(model.with_name(f"{model.name}-f16"), partial(gguf_maker.export, model))
        return model, read_gguf(made_of_it / "model-f16.gguf")
    return folder(name), read_gguf(gguf(name))


def _convert(name: str, kind: str, part: Path) -> None:
    part.mkdir()
    file = part / f"model-{kind}.gguf"
    if kind not in ("f32", "f16", "bf16"):
        gguf_maker.quantize(gguf(name), {kind: file})
        return
    view = Path(shutil.copytree(folder(name), part / "model", copy_function=os.link))
    _publish(view / "config.json", PUBLISHED.get(name, {}))
    options = ("--no-mtp",) if name in ("qwen35", "qwen35moe", "qwen3next") else ()  # transformers reads no such layers
    gguf_maker.export(view, part / "gguf", outtype=kind, options=options).rename(file)
    for rest in (part / "gguf", view):
        shutil.rmtree(rest)


def _key(name: str) -> str:
    return hashlib.sha256(json.dumps([FAMILIES[name], PUBLISHED.get(name), _SHAPE]).encode()).hexdigest()[:16]


def _publish(file: Path, changes: dict[str, Any]) -> None:
    config = json.loads(file.read_text()) | changes
    file.unlink()  # a link to the model's own
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}, indent=2) + "\n")


def _build(name: str, part: Path) -> None:
    import torch
    import transformers

    family, vocabulary, own = FAMILIES[name]
    part.mkdir()
    ids = _tokenizer(vocabulary, part)
    tokens = {"vocab_size": ids["vocab_size"], "bos_token_id": ids["bos"], "eos_token_id": ids["eos"]}
    config_class = getattr(transformers, f"{family}Config")
    config = config_class(**_SHAPE | tokens | {"pad_token_id": ids["pad"]} | own)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        factors = [weight for name, weight in model.named_buffers() if name.endswith("layer_scalar")]
        for weight in (*model.parameters(), *factors):
            noise = torch.randn(weight.shape)
            weight.copy_((1 + 0.1 * noise if weight.ndim == 1 else noise / weight.shape[-1] ** 0.5).to(torch.bfloat16))
    model.generation_config.update(bos_token_id=ids["bos"], eos_token_id=ids["eos"], pad_token_id=ids["pad"])
    model.save_pretrained(str(part))


def _tokenizer(vocabulary: str, part: Path) -> dict[str, Any]:
    if vocabulary == "gemma":
        return tiny_vocab.write_gemma(part)
    if vocabulary == "gemma4":
        return tiny_vocab.write_gemma4(part, tiny.vocab_folder())
    if vocabulary == "spm":
        return tiny_vocab.write_llama_spm(part, tiny.vocab_folder(), template=tiny_templates.LLAMA_2)
    if vocabulary == "qwen":
        return tiny_vocab.write_qwen(part, tiny.vocab_folder(), thinking=True)
    ids = tiny_vocab.write_gpt2(part, tiny.vocab_folder())
    return ids if vocabulary == "gpt2" else ids | {"vocab_size": add_glm(part)}


def add_glm(part: Path) -> int:
    """The tokens that the converter looks for in GLM-4's vocabulary; returns how many there are."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(part))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|observation|>", "[gMASK]", "<sop>"]})
    tokenizer.save_pretrained(str(part))
    return len(tokenizer)
