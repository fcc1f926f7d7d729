"""The metadata of a correct file of every family are config.json's, and each number of them is compared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_families
from skill_train.llama.gguf_header import GgufFile, read_gguf
from skill_train.run.verify_record import Check
from skill_train.verify.metadata.check import check_metadata

pytestmark = pytest.mark.slow

# Of those whose numbers `make test` compares, one of each kind of number.
CHOSEN = {
    *tiny_families.ALWAYS,
    "cohere",
    "gpt2-plain",
    "gptoss",
    "granite",
    "lfm2",
    "mixtral",
    "phi3-long",
    "stablelm",
}
# What llama.cpp computes the same with, whatever the number is.
WITHOUT_EFFECT = {
    "bloom": {"context_length"},  # ALiBi
    "mpt": {"context_length"},
    "exaone4": {"attention.sliding_window"},  # of no layer
    # attention.recurrent_layers says which they are
    **{family: {"full_attention_interval"} for family in ("qwen35", "qwen35moe", "qwen3next")},
}


def files(family: str) -> tuple[dict[str, Any], GgufFile]:
    folder, gguf = tiny_families.converted(family)
    return json.loads((folder / "config.json").read_text()), gguf


def others(value: Any) -> list[Any]:
    """Wrong values in place of a right one."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, list):
        ends = (0, len(value) - 1)
        return [[*value[:at], wrong, *value[at + 1 :]] for at in ends for wrong in others(value[at])]
    if isinstance(value, int):
        return [value + 1, 10 * value or 7]
    return [1.05 * value or 0.05, 10 * value or 10.0, 0.9 * value or -1.0]


@pytest.mark.parametrize("family", tiny_families.by_default(chosen=CHOSEN))
def test_a_correct_file_passes(family: str) -> None:
    config, gguf = files(family)
    check = check_metadata(gguf, config)
    assert check.verdict == "pass", check.detail


@pytest.mark.parametrize("family", tiny_families.by_default(chosen=CHOSEN))
def test_each_number_is_compared(family: str) -> None:
    config, gguf = files(family)
    prefix, missed = f"{gguf.architecture}.", []
    for name, value in gguf.metadata.items():
        key = name.removeprefix(prefix)
        if key == name or isinstance(value, str) or key in WITHOUT_EFFECT.get(family, ()):
            continue
        for wrong in others(value):
            check = check_metadata(replace(gguf, metadata={**gguf.metadata, name: wrong}), config)
            if check.verdict != "fail" or key not in check.detail:
                missed.append((key, value, wrong, check.verdict))
    assert missed == []


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("cohere", "logit_scale"),
        ("granite", "embedding_scale"),
        ("granite", "residual_scale"),
        ("granite", "attention.scale"),
        ("deepseek3", "expert_weights_scale"),
        ("deepseek3", "expert_gating_func"),
        ("deepseek3", "expert_weights_norm"),
        ("stablelm", "rope.dimension_count"),
        ("qwen2moe", "rope.freq_base"),
        ("qwen2moe", "rope.scaling.factor"),
        ("qwen2moe", "rope.scaling.type"),  # linear
        ("gemma3", "attention.sliding_window"),
        ("lfm2", "attention.head_count_kv"),
    ],
)
def test_a_key_that_is_left_out_where_llama_cpp_takes_another_value(family: str, key: str) -> None:
    config, gguf = files(family)
    left = {one: value for one, value in gguf.metadata.items() if one != f"{gguf.architecture}.{key}"}
    assert len(left) == len(gguf.metadata) - 1
    check = check_metadata(replace(gguf, metadata=left), config)
    assert check.verdict == "fail" and key in check.detail


@pytest.mark.parametrize(
    ("family", "table"),
    [("llama3", "rope_freqs.weight"), ("phi3-long", "rope_factors_long.weight"), ("gemma4", "rope_freqs.weight")],
)
def test_rope_factors_that_are_all_one(family: str, table: str, tmp_path: Path) -> None:
    config, gguf = files(family)
    copy = tmp_path / "model-f16.gguf"
    tensor, data = gguf.tensors[table], bytearray(gguf.path.read_bytes())
    data[tensor.offset : tensor.offset + tensor.n_bytes] = np.ones(tensor.elements, np.float32).tobytes()
    copy.write_bytes(data)
    check = check_metadata(read_gguf(copy), config)
    assert check.verdict == "fail" and f"{table}: rope factor" in check.detail


# A value that no model of these has, by key: llama.cpp computes otherwise with it, where it reads the key.
FOREIGN: dict[str, Any] = {
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping"), 5.0),
    **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale", "expert_weights_scale"), 0.37),
    **dict.fromkeys(("attention.clamp_kqv", "attention.temperature_scale", "attention.scale"), 0.37),
    **dict.fromkeys(("expert_count", "expert_used_count", "expert_shared_count", "expert_group_count"), 3),
    **dict.fromkeys(("attention.sliding_window", "attention.shared_kv_layers", "attention.key_length_swa"), 7),
    **dict.fromkeys((f"rope.scaling.{name}" for name in ("factor", "attn_factor", "yarn_attn_factor")), 1.1),
    **dict.fromkeys((f"rope.scaling.yarn_{name}" for name in ("beta_fast", "beta_slow", "log_multiplier")), 7.5),
    **dict.fromkeys(("rope.freq_base_swa", "rope.dimension_count_swa", "attention.max_alibi_bias"), 6),
    "rope.scaling.yarn_ext_factor": 0.5,
    "rope.scaling.type": "unheard-of",
}
NO_ROTATION = {
    "bloom",
    "mpt",
    "gpt2-plain",
    "gptbigcode",
    "jamba",
    "mamba",
    "mamba2",
    "falconmamba",
    "nemotronh",
    "nemotronhmoe",
}
# Of recurrent models, and of keys and values in one vector, no scale is known.
UNKNOWN_SCALE = {"mamba", "mamba2", "falconmamba", "deepseek2", "deepseek3", "glm4moelite", "minicpm3", "youtu"}


@pytest.mark.parametrize("family", tiny_families.by_default(chosen=CHOSEN))
def test_a_key_of_what_the_model_does_not_have(family: str) -> None:
    """Whether config.json states a null, or nothing at all."""
    config, gguf = files(family)
    missed = []
    for key, value in FOREIGN.items():
        if family in NO_ROTATION and key.startswith(("rope.", "attention.max_alibi", "attention.key_length")):
            continue
        if (key == "attention.scale" and family in UNKNOWN_SCALE) or key in WITHOUT_EFFECT.get(family, ()):
            continue
        check = check_metadata(replace(gguf, metadata=gguf.metadata | {f"{gguf.architecture}.{key}": value}), config)
        if check.verdict != "fail" or key not in check.detail:
            missed.append((key, check.verdict))
    assert missed == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("final_logit_softcapping", 0.0),
        ("logit_scale", 1.0),
        ("attention.scale", 32**-0.5),
        ("rope.scaling.type", "none"),
        ("rope.scaling.attn_factor", 1.0),
        ("rope.freq_base_swa", 10000.0),
        ("expert_count", 0),
        ("expert_group_count", 1),
    ],
)
def test_a_key_that_changes_nothing_passes(key: str, value: Any) -> None:
    config, gguf = files("gemma1")
    check = check_metadata(replace(gguf, metadata=gguf.metadata | {f"gemma.{key}": value}), config)
    assert check.verdict == "pass", check.detail


def test_what_an_untried_architecture_lacks_is_not_known() -> None:
    """Its config.json may state the number by another name."""
    config, gguf = files("gemma1")
    untried = {key.replace("gemma.", "orion."): value for key, value in gguf.metadata.items()}
    untried |= {"general.architecture": "orion", "orion.logit_scale": 0.3}
    check = check_metadata(replace(gguf, metadata=untried), config)
    assert check.verdict == "warn" and "logit_scale" in check.detail


@pytest.mark.parametrize(("heads", "wrong"), [(2, False), (4, True)])
def test_the_key_heads_of_dbrx_stand_in_its_attn_config(heads: int, wrong: bool) -> None:
    config = {"model_type": "dbrx", "n_heads": 4, "attn_config": {"kv_n_heads": 2}}
    gguf = files("gemma1")[1]
    metadata = {"general.architecture": "dbrx", "dbrx.attention.head_count": 4, "dbrx.attention.head_count_kv": heads}
    detail = check_metadata(replace(gguf, metadata=metadata), config).detail
    assert ("attention.head_count_kv is 4, config.json has 2" in detail) == wrong


def test_a_key_without_a_statement_is_told() -> None:
    config, gguf = files("qwen2moe")
    check = check_metadata(replace(gguf, metadata={**gguf.metadata, "qwen2moe.swin_norm": True}), config)
    assert check.verdict == "warn" and "swin_norm" in check.detail


SUPPRESS = "tokenizer.ggml.suppress_tokens"
SAMPLES = {"do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05}
SAMPLED = {"temp": 0.7, "top_k": 20, "top_p": 1.0, "min_p": 0.0, "penalty_repeat": 1.05, "penalty_last_n": -1}


def of_sampling(generation: dict[str, Any], **settings: Any) -> Check:
    config, gguf = files("gemma3")
    own = {key: value for key, value in gguf.metadata.items() if not key.startswith("general.sampling.")}
    keys = {key if "." in key else f"general.sampling.{key}": value for key, value in settings.items()}
    return check_metadata(replace(gguf, metadata=own | keys), config, generation)


def test_sampling_is_that_of_generation_config() -> None:
    """llama-cli and llama-server sample by it (common/common.cpp and common/sampling.cpp of llama.cpp)."""
    assert of_sampling(SAMPLES).verdict == "pass"  # the program chooses
    assert of_sampling(SAMPLES, **SAMPLED).verdict == "pass"
    for key, wrong in {"temp": 1.9, "top_k": 1, "top_p": 0.1, "min_p": 0.5, "penalty_repeat": 1.5}.items():
        check = of_sampling(SAMPLES, **SAMPLED | {key: wrong})
        assert check.verdict == "fail" and f"{key} is {wrong}, generation_config.json has" in check.detail
    check = of_sampling(SAMPLES, top_k=20, top_p=1.0)  # llama.cpp then has 0.8
    assert check.verdict == "warn" and "general.sampling.temp is missing" in check.detail
    assert of_sampling({"suppress_tokens": [300, 301]}, **{SUPPRESS: [300, 301]}).verdict == "pass"
    assert of_sampling({"suppress_tokens": [300, 301]}, **{SUPPRESS: [300, 302]}).verdict == "fail"
    assert of_sampling({}, **{SUPPRESS: [300]}).verdict == "warn"


@pytest.mark.parametrize("generation", [{}, {"temperature": 0.7, "top_p": 0.8}, {"do_sample": False, "top_p": 0.8}])
def test_a_file_of_a_greedy_model_does_not_sample(generation: dict[str, Any]) -> None:
    """transformers takes a temperature only with do_sample."""
    right = {"temp": 0.0} | {key: value for key, value in generation.items() if key == "top_p"}
    assert of_sampling(generation, **right).verdict == "pass"
    more = {"temp": 0.7, "penalty_repeat": 1.3, "xtc_probability": 0.5, "mirostat": 2}
    for key, wrong in more.items():
        check = of_sampling(generation, **right | {key: wrong})
        assert check.verdict == "fail" and f"general.sampling.{key} is {wrong}" in check.detail
    check = of_sampling(generation, penalty_repeat=1.0)
    assert check.verdict == "warn" and "general.sampling.temp is missing" in check.detail


def test_a_step_between_full_layers_of_a_model_without_any() -> None:
    """Two layers of Gemma 3, both of a window: config.json does not say where the first full one would be."""
    config, gguf = files("gemma3")
    assert set(config["layer_types"]) == {"sliding_attention"}
    metadata = gguf.metadata | {"gemma3.attention.sliding_window_pattern": 6}
    check = check_metadata(replace(gguf, metadata=metadata), config)
    assert check.verdict == "warn" and "attention.sliding_window_pattern" in check.detail
    for step in (1, 2):  # with which llama.cpp takes the first layer, or the second, for a full one
        metadata = gguf.metadata | {"gemma3.attention.sliding_window_pattern": step}
        check = check_metadata(replace(gguf, metadata=metadata), config)
        assert check.verdict == "fail" and f"attention.sliding_window_pattern is {step}" in check.detail


@pytest.mark.parametrize(
    "family", tiny_families.by_default(("bloom", "gpt2-plain", "gptneox", "mpt"), {*CHOSEN, "bloom"})
)
def test_heads_that_the_model_does_not_know_change_nothing(family: str) -> None:
    """A config.json may state what its class in transformers never reads."""
    config, gguf = files(family)
    check = check_metadata(gguf, {**config, "num_key_value_heads": 2})
    assert check.verdict == "pass", check.detail


def test_a_constant_of_the_converter_is_told_and_no_failure() -> None:
    """Falcon's context is 2048 in every file: config.json of Falcon 11B has 8192."""
    config, gguf = files("falcon")
    check = check_metadata(gguf, {**config, "max_position_embeddings": 8192})
    assert check.verdict == "warn" and "context_length is 2048, config.json has 8192" in check.detail
    other = replace(gguf, metadata={**gguf.metadata, "falcon.context_length": 4096})
    assert check_metadata(other, {**config, "max_position_embeddings": 8192}).verdict == "fail"


def test_infinity_as_transformers_writes_it() -> None:
    """Mamba's longest step of time is infinite: without its class, what config.json leaves out would not be known."""
    config, gguf = files("granitehybrid")
    assert config["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    assert config.pop("mamba_d_conv") == 4
    assert check_metadata(gguf, config).verdict == "pass"
    wrong = replace(gguf, metadata={**gguf.metadata, "granitehybrid.ssm.conv_kernel": 5})
    assert check_metadata(wrong, config).verdict == "fail"


@pytest.mark.parametrize(("layers", "known"), [(47, True), (46, False)])
def test_glm_flash_needs_no_key_for_its_router(layers: int, known: bool) -> None:
    """llama.cpp takes a file of 47 layers and 154880 tokens for GLM-4.7-Flash, whose router is a sigmoid."""
    config, gguf = files("deepseek3")
    config |= {"model_type": "glm4_moe_lite", "num_hidden_layers": layers, "vocab_size": 154880}
    said = {key: value for key, value in gguf.metadata.items() if not key.endswith("expert_gating_func")}
    said |= {"deepseek2.block_count": layers, "tokenizer.ggml.tokens": ["a"] * 154880}
    assert ("expert_gating_func" not in check_metadata(replace(gguf, metadata=said), config).detail) is known
