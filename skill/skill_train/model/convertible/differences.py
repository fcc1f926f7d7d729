"""Differences between what config.json says and what llama.cpp computes, by architecture.

Each was found by converting a tiny model of the type and comparing its logits with those of transformers
(llama-cpp-python 0.3.36, transformers 5.23), as tests/model/test_convertible.py does.
"""

import math

from skill_train.model.convertible.rules import DELTA_NET, RULES, SCALED, causal, number, ropes
from skill_train.model.tower import Config, positive


def computed_otherwise(name: str, text: Config) -> str | None:
    """Why llama.cpp computes something else for this model, or cannot load it; None if no reason is known.

    Args:
        name: the architecture.
        text: the part of config.json that describes the text decoder.
    """
    own, name = RULES.get(name, ()), _TEXT_OF_VISION.get(name, name)
    reasons = (reason for applies, reason in (*own, *RULES.get(name, ())) if applies(text))
    return (
        next(reasons, None)
        or _other_activation(name, text)
        or _other_value(name, text)
        or _other_heads(name, text)
        or _other_positions(name, text)
    )


# Vision models, and the family whose text llama.cpp computes in the same way. Qwen's experts differ: those of Qwen3-VL
# scale their shares whatever config.json says, in transformers too.
_TEXT_OF_VISION = {"VLlama3ForCausalLM": "LlamaForCausalLM"} | {
    f"{vision}ForConditionalGeneration": f"{text}ForCausalLM"
    for vision, text in (
        *(("Qwen2VL", "Qwen2"), ("Qwen2_5_VL", "Qwen2"), ("Qwen3VL", "Qwen3"), ("Qwen3VLMoe", "Qwen3")),
        *(("Gemma3", "Gemma3"), ("Gemma4", "Gemma4"), ("Llava", "Mistral"), ("Mistral3", "Ministral3")),
        *(("Qwen3_5", "Qwen3_5"), ("Qwen3_5Moe", "Qwen3_5Moe")),
    )
}
# The function of the MLP that llama.cpp computes, whatever config.json says (`build_ffn` in its src/models).
_ACTIVATIONS = {
    ("silu", "swish"): causal(
        "Cohere Cohere2 DeepseekV2 DeepseekV3 Dots1 Ernie4_5 Ernie4_5_Moe Exaone4 ExaoneMoe FalconH1 Glm Glm4 Glm4Moe "
        "Afmoe Glm4MoeLite GraniteMoeSWA GraniteSWA Youtu "
        "Granite Jamba Llama MiniCPM3 Ministral3 Mistral Mixtral Olmo Olmo2 Olmo3 Olmoe Phi3 Qwen2 Qwen2Moe Qwen3 "
        "Qwen3Moe Qwen3Next Qwen3_5 Qwen3_5Moe SeedOss SmolLM3 StableLm"
    ),
    ("gelu",): causal("Falcon GPTBigCode GPTNeoX Gemma Gemma2 Gemma3 Gemma4 Phi Starcoder2") | {"GPT2LMHeadModel"},
    ("relu2",): causal("Arcee Nemotron NemotronH"),
}
_ACTIVATION_KEYS = ("hidden_activation", "hidden_act", "mlp_hidden_act", "activation_function", "activation")


def _other_activation(name: str, text: Config) -> str | None:
    key = next((key for key in _ACTIVATION_KEYS if text.get(key)), None)
    functions = next((functions for functions, names in _ACTIVATIONS.items() if name in names), None)
    if key is None or functions is None or str(text[key]).startswith(functions):
        return None
    return f"llama.cpp computes the MLP of this family with {functions[0]}, and {key} says another function"


_OWN_HEAD = (
    "Apertus Dots1 ExaoneMoe Mellum FalconH1 GPTNeoX GptOss Llama4 Nemotron Olmo2 Olmo3 Olmoe Phi Qwen2Moe StableLm"
)
_ONE_MATRIX = "Cohere Cohere2 Gemma Gemma2 Lfm2Moe"
_LATENT = "Glm4MoeLite MiniCPM3 Youtu"
_UNBIASED = (
    f"Afmoe Arcee Cohere Cohere2 Gemma Gemma2 Gemma3 Gemma4 Olmo Olmo2 Olmoe Qwen3 Qwen3Moe SmolLM3 {DELTA_NET} "
    f"{_LATENT}"
)
_NO_BIAS = "llama.cpp has no place for these biases in this family"
_NEEDED = "llama.cpp needs these biases in this family"
_NORMS = "llama.cpp's converter cannot write the norms of queries and keys"
# Values of config.json that llama.cpp ignores in whole families: why, the key, the value, the families.
_VALUES = (
    (_NO_BIAS, "attention_bias", True, _UNBIASED),
    (_NO_BIAS, "attention_out_bias", True, "SeedOss"),
    (_NO_BIAS, "mlp_bias", True, "Arcee SeedOss SmolLM3"),
    ("llama.cpp's converter cannot arrange these biases", "bias", True, "Falcon"),
    ("llama.cpp's converter cannot write these biases", "conv_bias", True, "Lfm2 Lfm2Moe"),
    (_NEEDED, "attention_bias", False, "GPTNeoX GptOss"),
    (_NEEDED, "use_bias", False, "Starcoder2"),
    (_NEEDED, "use_conv_bias", False, "NemotronH"),
    (_NO_BIAS, "use_bias", True, "NemotronH"),
    (_NEEDED, "use_expert_bias", False, "Lfm2Moe"),
    (_NORMS, "qk_layernorm", True, "Phi StableLm"),
    (_NORMS, "use_qk_norm", True, "Cohere"),
    ("llama.cpp needs an output matrix beside the embedding", "tie_word_embeddings", True, _OWN_HEAD),
    ("llama.cpp has no output matrix but the embedding", "tie_word_embeddings", False, _ONE_MATRIX),
    ("llama.cpp turns the positions of this family by pairs of neighbours", "rope_interleave", False, _LATENT),
    ("llama.cpp keeps the shares of experts as they are", "norm_topk_prob", True, "Olmoe Qwen2Moe"),
    ("llama.cpp scales the shares of experts, and transformers keeps them", "norm_topk_prob", True, "DeepseekV2"),
    (SCALED, "norm_topk_prob", False, "Lfm2Moe Mellum Qwen3Next"),
    ("llama.cpp scales the attention of this family", "scale_attn_weights", False, "GPTBigCode"),
    ("llama.cpp takes one head of keys for every GPTBigCode", "multi_query", False, "GPTBigCode"),
    ("llama.cpp computes Gemma 3 with causal attention", "use_bidirectional_attention", True, "Gemma3"),
    ("llama.cpp uses rotary positions for every Falcon, and this model uses ALiBi", "alibi", True, "Falcon"),
    ("llama.cpp adds what comes before the norm", "apply_residual_connection_post_layernorm", True, "Bloom"),
)


def why_not_untied(name: str) -> str | None:
    """Why llama.cpp cannot compute a model of this architecture whose embedding an adapter parts from its head."""
    why = _other_value(name, {"tie_word_embeddings": False})
    return why and f"{why}, and this adapter parts the two"


def _other_value(name: str, text: Config) -> str | None:
    own = name.removesuffix("ForCausalLM")
    rows = (row for row in _VALUES if own in row[-1].split() and text.get(row[1]) is row[2])
    return next((f"{why} ({key}: {str(value).lower()})" for why, key, value, _ in rows), None)


# Families of which llama.cpp, or its converter, takes the width over their number for the width of a head.
_HEADS_OF_WIDTH = causal(
    "Cohere Cohere2 Exaone4 Glm GPTNeoX Granite GraniteMoe GraniteMoeHybrid GraniteMoeSWA GraniteMoeShared GraniteSWA "
    "Jamba Lfm2 Lfm2Moe Nemotron Olmo Olmo2 Olmo3 Phi Phi3 Qwen2Moe Starcoder2"
)


def _other_heads(name: str, text: Config) -> str | None:
    """Of a head that is not the width divided by their number. A config of GLM leaves 128 out."""
    heads, width = positive(text, ("num_attention_heads",)), positive(text, ("hidden_size",))
    own = positive(text, ("head_dim",)) or (128 if name == "GlmForCausalLM" else None)
    if name in _HEADS_OF_WIDTH and heads and width and own and own * heads != width:
        return f"llama.cpp takes hidden_size / num_attention_heads for the heads of this family (head_dim: {own})"
    return None


# The converter writes no scaling of positions for some families. Some are turned by the base 10000 in any case.
_UNSCALED = causal("Cohere Cohere2 Falcon GPTNeoX Gemma Gemma2 Glm StableLm")
_OF_BASE_10000 = causal("Falcon GPTNeoX Gemma Gemma2 StableLm")
# The families for which it writes a table of factors, all of Llama's class in it and some others.
_OF_PHI = causal("MiniCPM MiniCPM3 Phi3 PhiMoE")
_TABLES = {
    "longrope": _OF_PHI,
    "su": _OF_PHI,
    "llama3": causal(
        "Afmoe Apertus Arcee DeciLM Exaone Exaone4 ExaoneMoE ExaoneMoe IQuestCoder LLaMA Llama Llama4 Ministral3 "
        "Mistral Mixtral Nanbeige Step3p5"
    ),
}
# llama.cpp computes YaRN with transformers' defaults for these (llama-context.cpp).
_OF_USUAL_YARN = causal(
    "Arcee Exaone4 GptOss Granite GraniteMoe GraniteMoeSWA GraniteMoeShared GraniteSWA Lfm2 Lfm2Moe Llama Mistral "
    f"Mixtral Olmo Olmo2 Olmo3 Olmoe Qwen2 Qwen2Moe Qwen3 Qwen3Moe SeedOss SmolLM3 Starcoder2 {DELTA_NET}"
)


def _other_positions(name: str, text: Config) -> str | None:
    for rope in ropes(text):
        kind, base = str(rope.get("rope_type") or rope.get("type") or "default"), rope.get("rope_theta")
        tables = name not in _TABLES.get(kind, (name,)) and name.endswith("ForCausalLM")
        if tables or (name in _UNSCALED and kind != "default"):
            return (
                "llama.cpp's converter leaves out how this family scales its positions "
                f"(rope_type: {kind}), so long texts would differ"
            )
        if name in _OF_BASE_10000 and base not in (None, 10_000):
            return (
                f"llama.cpp turns the positions of this family by a base of 10000, and this one by {base} (rope_theta)"
            )
        key = _own_yarn(rope) if kind == "yarn" and name in _OF_USUAL_YARN else None
        if key is not None:
            return f"llama.cpp does not read {key} of this family's YaRN, and config.json has not the usual value"
    return None


def _own_yarn(rope: Config) -> str | None:
    """The key of YaRN with another value than llama.cpp's. Source: `_compute_yarn_parameters` of transformers, and
    llama-context.cpp."""
    for key, usual in (("beta_fast", 32), ("beta_slow", 1)):
        if (rope.get(key) or usual) != usual:
            return key
    growth = 0.1 * math.log(max(number(rope.get("factor")), 1.0))
    factor, mscale, all_dim = rope.get("attention_factor"), rope.get("mscale"), rope.get("mscale_all_dim")
    if factor is not None:
        return None if math.isclose(number(factor), growth + 1, rel_tol=1e-4) else "attention_factor"
    return "mscale_all_dim" if mscale and all_dim and growth else None
