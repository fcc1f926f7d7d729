"""What a config says. Sizes and counts are those that the models' publishers state, not what our code prints."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from models import NAMES, recorded, recorded_model
from skill_train.core.errors import NotInstalled
from skill_train.estimate.modules import widths
from skill_train.llama import get_converter
from skill_train.model import config as model_config
from skill_train.model.config import StoredWeights
from skill_train.model.convertible import architectures as llama_architectures

VISION = {"gemma-3-4b", "qwen2.5-vl-7b", "llama-3.2-11b-vision"}
# Files that hold more than the model: a copy of the tied head, and GPT-2's masks. What is left is what
# `sum(p.numel() for p in model.parameters())` gives, and for GPT-2 the well-known 124M.
WITHOUT_COPIES = {"qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "gpt2": 124_439_808}


@pytest.mark.parametrize("name", sorted(set(NAMES) - VISION))
def test_arithmetic_gives_the_published_count(name: str) -> None:
    data = recorded(name)
    facts = model_config.read(data["config"], source=data["model"])
    assert facts.parameters == WITHOUT_COPIES.get(name, data["published_parameters"])
    assert facts.parameters_from == "config arithmetic"
    assert set(facts.unknown) == {"weight_bytes"} | ({"stored_dtype"} if name == "gpt2" else set())


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["Gemma2ForCausalLM"], "num_attention_heads": "8", "hidden_size": 32},
        {"architectures": ["GPT2LMHeadModel"], "n_embd": {}, "n_inner": 128},
        {"architectures": ["MPTForCausalLM"], "attn_config": "x"},
    ],
)
def test_a_value_of_another_kind_says_nothing(config: dict[str, Any]) -> None:
    facts = model_config.read(config, source="x")
    assert (facts.hidden_size, facts.heads) == (config.get("hidden_size"), None)


@pytest.mark.parametrize("name", NAMES)
def test_stored_numbers_count_and_copies_do_not(name: str) -> None:
    facts = recorded_model(name)
    assert facts.parameters == WITHOUT_COPIES.get(name, recorded(name)["published_parameters"])
    assert facts.parameters_from == "safetensors headers"
    assert facts.unknown == {}


@pytest.mark.parametrize(
    ("name", "sizes"),  # layers, hidden, heads, kv heads, head dim, MLP, vocabulary, context: from the model cards
    [
        ("qwen2.5-0.5b", (24, 896, 14, 2, 64, 4864, 151_936, 32_768)),
        ("qwen2.5-72b", (80, 8192, 64, 8, 128, 29_568, 152_064, 32_768)),
        ("qwen3-0.6b", (28, 1024, 16, 8, 128, 3072, 151_936, 40_960)),
        ("qwen3-30b-a3b", (48, 2048, 32, 4, 128, 768, 151_936, 40_960)),
        ("llama-3.1-8b", (32, 4096, 32, 8, 128, 14_336, 128_256, 131_072)),
        ("gemma-2-27b", (46, 4608, 32, 16, 128, 36_864, 256_000, 8192)),
        ("gemma-3-4b", (34, 2560, 8, 4, 256, 10_240, 262_208, 131_072)),
        ("phi-3-mini-4k", (32, 3072, 32, 32, 96, 8192, 32_064, 4096)),
        ("mixtral-8x7b", (32, 4096, 32, 8, 128, 14_336, 32_000, 32_768)),
        ("llama-3.2-11b-vision", (40, 4096, 32, 8, 128, 14_336, 128_256, 131_072)),
        ("gpt2", (12, 768, 12, 12, 64, 3072, 50_257, 1024)),
    ],
)
def test_the_sizes(name: str, sizes: tuple[int, ...]) -> None:
    facts = recorded_model(name)
    found = (facts.layers, facts.hidden_size, facts.heads, facts.kv_heads, facts.head_dim)
    assert (*found, facts.intermediate_size, facts.vocab_size, facts.context) == sizes


def test_active_parameters_of_mixtures_of_experts() -> None:
    """The cards say 12.9B of 46.7B, 3.3B of 30.5B and 2.7B of 14.3B."""
    for name, experts, billions in (
        ("mixtral-8x7b", (8, 2), 12.9),
        ("qwen3-30b-a3b", (128, 8), 3.3),
        ("qwen1.5-moe-a2.7b", (60, 4), 2.7),
    ):
        facts = recorded_model(name)
        assert (facts.experts, facts.experts_per_token) == experts
        assert facts.active_parameters is not None
        assert facts.active_parameters / 1e9 == pytest.approx(billions, abs=0.06)


def test_a_dense_model_passes_all_its_parameters() -> None:
    facts = recorded_model("qwen2.5-7b")
    assert (facts.active_parameters, facts.experts, facts.experts_per_token) == (7_615_616_512, None, None)


@pytest.mark.parametrize(
    ("name", "tied", "embedding"),  # the Qwen2.5 cards: 0.36B of 0.49B and 6.53B of 7.61B without embeddings
    [("qwen2.5-0.5b", True, 151_936 * 896), ("qwen2.5-7b", False, 2 * 152_064 * 3584)],
)
def test_embeddings(name: str, tied: bool, embedding: int) -> None:
    facts = recorded_model(name)
    assert (facts.tied_embeddings, facts.embedding_parameters) == (tied, embedding)


_V3 = {"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1}
_SCOUT = {"model_type": "llama4_text", "num_local_experts": 16, "num_experts_per_tok": 1, "intermediate_size": 8192}
_TINY_H = {"num_local_experts": 62, "num_experts_per_tok": 6, "intermediate_size": 512}
_MICRO = {
    "num_local_experts": 0,
    "intermediate_size": 8192,
    "shared_intermediate_size": 8192,
}  # Granite without experts


@pytest.mark.parametrize(
    ("config", "width"),
    [
        (recorded("qwen1.5-moe-a2.7b")["config"], 4 * 1408 + 5632),
        (recorded("qwen3-30b-a3b")["config"], 8 * 768),
        (_V3, 9 * 2048),
        (_SCOUT, 2 * 8192),
        (_TINY_H | {"shared_intermediate_size": 1024}, 6 * 512 + 1024),
        (_MICRO, 8192),
    ],
)
def test_the_width_that_a_token_passes(config: dict[str, Any], width: int) -> None:
    """The chosen experts, and those that every token passes (modeling_<type>.py of transformers 5.23)."""
    assert widths(model_config.read(config, source="x"))[3] == width


def test_the_heads_of_latent_attention() -> None:
    """DeepSeek-V3: 128 heads of 128 + 64; its config.json calls the rotated 64 head_dim, or leaves that out."""
    heads = {"num_attention_heads": 128, "num_key_value_heads": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    for said in ({}, {"head_dim": 64}):
        facts = model_config.read({"model_type": "deepseek_v3", "hidden_size": 7168} | heads | said, source="x")
        assert widths(facts)[1:3] == (128 * 192, 128 * 192)


def test_the_embeddings_of_each_layer() -> None:
    """Gemma 4 E2B: 5.1B with them and 2.3B without, by its card: 262,144 x (1536 + 35 x 256). Its config.json may leave
    out that the head is tied."""
    text = {"model_type": "gemma4_text", "vocab_size": 262_144, "hidden_size": 1536, "num_hidden_layers": 35}
    text |= {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144}
    facts = model_config.read({"model_type": "gemma4", "text_config": text}, source="x")
    assert facts.embedding_parameters == 402_653_184 + 2_348_810_240
    text["hidden_size_per_layer_input"] = 0  # as in the larger ones
    facts = model_config.read({"model_type": "gemma4", "text_config": text}, source="x")
    assert facts.embedding_parameters == 402_653_184


@pytest.mark.parametrize(
    ("name", "window"),
    [
        ("qwen2.5-7b", None),  # switched off
        ("gemma-2-9b", 4096),
        ("gemma-3-1b", 512),
        ("gemma-3-4b", 1024),
        ("phi-3-mini-4k", 2047),
        ("phi-4-mini", None),  # wider than the context
        ("mistral-7b-v0.3", None),
        ("llama-3.1-8b", None),
    ],
)
def test_the_window_is_one_that_cuts(name: str, window: int | None) -> None:
    assert recorded_model(name).sliding_window == window


@pytest.mark.parametrize(
    ("said", "window"),
    [
        ({"use_sliding_window": True, "max_window_layers": 21}, 4096),
        ({"use_sliding_window": False, "max_window_layers": 21}, None),
        ({"use_sliding_window": None, "max_window_layers": 21}, None),
        ({"use_sliding_window": True, "max_window_layers": 28}, None),  # it begins behind the last of 28 layers
        ({"use_sliding_window": True, "layer_types": ["full_attention"] * 28}, None),
        ({"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"] * 14}, 4096),
    ],
)
def test_qwens_window_counts_when_it_is_switched_on_and_a_layer_has_it(
    said: dict[str, Any], window: int | None
) -> None:
    config = recorded("qwen2.5-7b")["config"] | {"sliding_window": 4096} | said
    assert model_config.read(config, source="x").sliding_window == window


@pytest.mark.parametrize(("first", "window"), [(0, None), (21, 4096)])  # of Qwen2-MoE the first layers have it
def test_of_qwen2_moe_the_first_layers_have_the_window(first: int, window: int | None) -> None:
    config = recorded("qwen1.5-moe-a2.7b")["config"]
    config |= {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": first}
    assert model_config.read(config, source="x").sliding_window == window


MISTRAL_V01 = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4096}
MISTRAL_V01 |= {"max_position_embeddings": 32_768}  # huggingface.co/mistralai/Mistral-7B-v0.1


# Of its 26 layers every second sees everything; huggingface.co/google/gemma-2-2b.
GEMMA_2 = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "sliding_window": 4096}
GEMMA_2 |= {"max_position_embeddings": 8192, "num_hidden_layers": 26}
BOTH = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("config", "window"),
    [
        (GEMMA_2, None),
        (GEMMA_2 | {"layer_types": BOTH * 13}, None),
        (GEMMA_2 | {"layer_types": [*BOTH * 6, *BOTH[1:], *BOTH * 6]}, 4096),  # one layer was taken out
        (GEMMA_2 | {"layer_types": BOTH[1:] * 26}, 4096),
        (GEMMA_2 | {"architectures": ["Gemma3ForCausalLM"], "sliding_window_pattern": 2}, 4096),
        (GEMMA_2 | {"architectures": ["Gemma3ForCausalLM"], "layer_types": (BOTH[:1] * 5 + BOTH[1:]) * 2}, None),
        (MISTRAL_V01, 4096),
        ({key: MISTRAL_V01[key] for key in MISTRAL_V01 if key != "sliding_window"}, 4096),  # the class fills it in
        (MISTRAL_V01 | {"sliding_window": None}, None),
        (recorded("phi-3-mini-4k")["config"], 2047),  # in the file's metadata, and not computed with
        (recorded("phi-4-mini")["config"], None),
        (recorded("gemma-3-1b")["config"], None),  # computed with
        (recorded("gemma-3-4b")["config"], None),
        (recorded("qwen2.5-7b")["config"], None),
    ],
)
def test_the_window_that_llama_cpp_does_not_compute_with(config: dict[str, Any], window: int | None) -> None:
    assert model_config.read(config, source="x").unread_window == window


@pytest.mark.parametrize("name", NAMES)
def test_vision_is_seen(name: str) -> None:
    assert recorded_model(name).vision is (name in VISION)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "phi3_v", "img_processor": {"name": "clip_vision_model"}},
        {"model_type": "phi4mm", "embd_layer": {"image_embd_layer": {"crop_size": 448}}, "img_processor": None},
        {"model_type": "llava", "mm_vision_tower": "openai/clip-vit-large-patch14"},
        {"model_type": "qwen2_5_omni", "thinker_config": {"vision_config": {}}},
        {"model_type": "idefics3", "text_config": {"model_type": "llama"}, "vision_config": {"hidden_size": 768}},
    ],
)
def test_other_ways_to_describe_vision(config: dict[str, Any]) -> None:
    assert model_config.is_vision(config)


def test_the_vision_part_has_no_arithmetic() -> None:
    facts = model_config.read(recorded("gemma-3-4b")["config"], source="x")
    assert (facts.parameters, facts.parameters_from, facts.active_parameters) == (None, None, None)
    assert facts.unknown["parameters"] == "no arithmetic for the vision part of gemma3"


def test_a_type_without_a_formula_is_not_guessed() -> None:
    config = recorded("llama-3.1-8b")["config"] | {"model_type": "mamba2"}
    facts = model_config.read(config, source="x")
    assert (facts.parameters, facts.active_parameters) == (None, None)
    assert facts.unknown["parameters"] == "no arithmetic for model type mamba2"
    assert (facts.layers, facts.heads) == (32, 32)


def test_a_missing_size_is_not_guessed() -> None:
    config = {k: v for k, v in recorded("qwen2.5-7b")["config"].items() if k != "num_key_value_heads"}
    facts = model_config.read(config, source="x")
    assert (facts.kv_heads, facts.parameters) == (None, None)
    assert facts.unknown["kv_heads"] == "config.json does not say"
    assert facts.unknown["parameters"] == "config.json leaves out a size that the arithmetic needs"


def test_an_unknown_mixture_of_experts_has_no_active_count() -> None:
    config = {"model_type": "new_moe", "num_experts": 8, "num_experts_per_tok": 2}
    facts = model_config.read(config, source="x", stored=StoredWeights({"BF16": 1000}, 2000))
    assert (facts.parameters, facts.active_parameters) == (1000, None)
    assert facts.unknown["active_parameters"] == "no arithmetic for model type new_moe"


def test_packed_weights_are_not_counted() -> None:
    """A 4-bit file holds bytes with two numbers each; the config knows the model's true size."""
    config = recorded("llama-3.1-8b")["config"] | {"quantization_config": {"quant_method": "bitsandbytes"}}
    facts = model_config.read(config, source="x", stored=StoredWeights({"U8": 4_000_000_000, "BF16": 1_050_000_000}, 1))
    assert (facts.quantization, facts.parameters, facts.parameters_from) == (
        "bitsandbytes", 8_030_261_248, "config arithmetic",
    )  # fmt: skip
    unknown = model_config.read(config | {"model_type": "new"}, source="x", stored=StoredWeights({"U8": 9}, 9))
    assert unknown.unknown["parameters"] == (
        "no arithmetic for model type new, and the weights are packed (bitsandbytes)"
    )


def test_a_folder_of_mlx_is_quantized() -> None:
    assert model_config.read({"quantization": {"bits": 4}}, source="x").quantization == "mlx"


def test_more_numbers_than_the_config_explains_all_count() -> None:
    """A head for prediction of several tokens, say: only known copies are taken off."""
    facts = model_config.read(
        recorded("qwen3-0.6b")["config"], source="x", stored=StoredWeights({"BF16": 600_000_000}, 1)
    )
    assert facts.parameters == 600_000_000


@pytest.mark.parametrize(
    ("config", "convertible"),
    [
        ({"architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True}, True),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, False),  # which transformers takes for false
        ({"architectures": ["MllamaForConditionalGeneration"]}, False),
        ({"architectures": ["NewThing"], "text_config": {"architectures": ["LlamaForCausalLM"]}}, True),
        ({}, None),
    ],
)
def test_what_llama_cpp_can_convert(config: dict[str, Any], convertible: bool | None) -> None:
    facts = model_config.read(config, source="x")
    assert facts.convertible is convertible
    assert ("convertible" in facts.unknown) is (convertible is None)


def test_the_list_of_architectures_is_that_of_the_converter() -> None:
    try:
        found = get_converter.find()
    except NotInstalled:
        pytest.skip("the converter is not in the cache")
    if found.version != llama_architectures.VERSION:
        pytest.skip(f"the cached converter is {found.version}")
    tree = ast.parse((found.folder / "conversion" / "__init__.py").read_text(encoding="utf-8"))
    tables = {ast.unparse(n.target): n.value for n in tree.body if isinstance(n, ast.AnnAssign) and n.value is not None}
    assert set(ast.literal_eval(tables["TEXT_MODEL_MAP"])) == llama_architectures.NAMES == found.architectures()
    assert set(ast.literal_eval(tables["MMPROJ_MODEL_MAP"])) == llama_architectures.PROJECTORS == found.projectors()


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": True, "hidden_size": "896", "vocab_size": -1},
        {"architectures": "LlamaForCausalLM", "quantization_config": ["x"], "text_config": []},
        {"model_type": ["llama"], "sliding_window": "4096", "tie_word_embeddings": "yes"},
    ],
)
def test_a_config_of_nonsense_says_nothing(config: dict[str, Any]) -> None:
    facts = model_config.read(config, source="x")
    assert (facts.layers, facts.parameters, facts.sliding_window, facts.tied_embeddings) == (None, None, None, None)


@pytest.mark.parametrize("name", NAMES)
def test_each_recorded_config_says_where_it_was_read(name: str) -> None:
    data = recorded(name)
    assert set(data) == {"model", "source", "date", "published_parameters", "config"}
    assert data["source"] and data["date"].startswith("202")


def test_the_layers_of_a_config_that_lists_their_kinds_alone() -> None:
    """As transformers 5 writes Nemotron-H."""
    kinds = ["linear_attention", "mlp", "full_attention"]
    assert model_config.read({"model_type": "nemotron_h", "layers_block_type": kinds}, source="x").layers == 3
    assert model_config.read({"model_type": "nemotron_h", "layers_block_type": 3}, source="x").layers is None
    assert model_config.read({"model_type": "nemotron_h"}, source="x").layers is None
