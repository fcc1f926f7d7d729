"""The parameter counts, held against the models that transformers builds from the same configs, without memory."""

from __future__ import annotations

from typing import Any

import pytest

from models import NAMES, recorded
from skill_train.model import config as model_config
from skill_train.model.config import TEXT_OF_VISION

pytestmark = pytest.mark.slow

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 5, "vocab_size": 320,
    "intermediate_size": 200, "max_position_embeddings": 64,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 48, "n_head": 4, "n_layer": 3, "n_positions": 32, "vocab_size": 100}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
ODD: list[dict[str, Any]] = [
    {"model_type": "llama"} | SIZES,
    {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 32, "tie_word_embeddings": True}
    | SIZES,
    {"model_type": "mistral", "sliding_window": 16} | SIZES,
    {"model_type": "qwen2", "tie_word_embeddings": True} | SIZES,
    {"model_type": "qwen3", "attention_bias": True} | SIZES,
    {"model_type": "gemma", "head_dim": 16} | SIZES,
    {"model_type": "gemma2", "attention_bias": True} | SIZES,
    {"model_type": "gemma3_text", "tie_word_embeddings": False} | SIZES,
    {"model_type": "phi"} | SIZES,
    {"model_type": "phi", "qk_layernorm": True} | SIZES,
    {"model_type": "phi3", "pad_token_id": 0} | SIZES,
    {"model_type": "gpt_neox"} | SIZES,
    {"model_type": "gpt_neox", "attention_bias": False, "tie_word_embeddings": True} | SIZES,
    {"model_type": "smollm3", "pad_token_id": 0} | SIZES,
    {"model_type": "olmo2", "pad_token_id": 0} | SIZES,
    {"model_type": "granite"} | SIZES,
    {"model_type": "glm", "pad_token_id": 0} | SIZES,
    {"model_type": "glm", "pad_token_id": 0, "attention_bias": False, "head_dim": 16} | SIZES,
    {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2} | SIZES,
    {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 64, "mlp_only_layers": [1]} | EXPERTS | SIZES,
    {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 64, "qkv_bias": False} | EXPERTS | SIZES,
    {"model_type": "qwen3_moe", "decoder_sparse_step": 2, "head_dim": 8} | EXPERTS | SIZES,
    GPT2,
    GPT2 | {"n_inner": 77, "tie_word_embeddings": False},
]


@pytest.mark.parametrize("config", ODD, ids=lambda config: str(config["model_type"]))
def test_arithmetic_counts_what_transformers_builds(config: dict[str, Any]) -> None:
    facts = model_config.read(config, source="x")
    assert facts.parameters == _built(config), facts.unknown


@pytest.mark.parametrize("name", NAMES)
def test_each_recorded_config_builds_the_published_model(name: str) -> None:
    data = recorded(name)
    files_hold_more = {"gpt2": 12 * 1024**2, "qwen3-0.6b": 151_936 * 1024, "qwen3-1.7b": 151_936 * 2048}
    assert _built(data["config"]) == data["published_parameters"] - files_hold_more.get(name, 0)


def test_which_vision_models_load_for_their_text() -> None:
    """A plan blocks the others. transformers' own list of what AutoModelForCausalLM loads."""
    loads = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    assert set(TEXT_OF_VISION) <= set(loads)
    for name in NAMES:
        config = recorded(name)["config"]
        if model_config.is_vision(config):
            assert (config["model_type"] in loads) is (config["model_type"] in TEXT_OF_VISION), name
    for kind, names in loads.items():  # a class of the text alone, for a config with a tower
        if "ForCausalLM" in str(names) and kind in transformers.CONFIG_MAPPING and "assistant" not in kind:
            whole = transformers.CONFIG_MAPPING[kind]().to_dict()
            assert not model_config.is_vision(whole) or kind in TEXT_OF_VISION, kind


def _built(config: dict[str, Any]) -> int:
    keys = {key: value for key, value in config.items() if key != "model_type"}
    vision = "vision_config" in config
    auto = transformers.AutoModelForImageTextToText if vision else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(transformers.AutoConfig.for_model(config["model_type"], **keys))
    return sum(parameter.numel() for parameter in model.parameters())
