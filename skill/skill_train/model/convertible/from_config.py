"""Predicts from config.json alone whether llama.cpp converts a model correctly, so that `plan` can warn before the
training and `export-gguf` can refuse with the same words.

The converter's registry lists the architectures that have a class. It accepts some models whose layers it cannot name,
or that llama.cpp computes differently. We found each of them by converting a tiny model of the type and comparing its
logits with those of transformers (llama-cpp-python 0.3.36, transformers 5.23), as tests/model/test_convertible.py does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from skill_train.facts import JsonObject
from skill_train.model.convertible import architectures as llama_architectures
from skill_train.model.tower import Config, positive

# Names that transformers 5 writes, and the converter's names for them: architectures, and layer types of Granite's
# hybrids.
RENAMED = {"MptForCausalLM": "MPTForCausalLM"}
LAYERS = {"linear_attention": "mamba", "full_attention": "attention"}

# Architectures whose sliding window llama.cpp uses, and those whose window it ignores, including Phi-3, although its
# files contain the number. Found with texts of six windows' length, as the same test does.
WINDOWED = frozenset(
    f"{name}ForCausalLM" for name in ("Cohere2", "Exaone4", "ExaoneMoe", "GptOss", "GraniteSWA", "Olmo3")
) | {f"{name}For{task}" for name in ("Gemma2", "Gemma3", "Gemma4") for task in ("CausalLM", "ConditionalGeneration")}
# Of these, llama.cpp itself decides which layers see the window: all but every second, fourth or sixth
# (load_arch_hparams in its src/models). The converter writes no pattern of them.
_ONE_FULL_OF = {
    "Gemma2ForCausalLM": 2,
    "GptOssForCausalLM": 2,
    "Cohere2ForCausalLM": 4,
    "Gemma3ForCausalLM": 6,
    "Gemma3ForConditionalGeneration": 6,
}
WINDOW_LEFT_OUT = frozenset(
    f"{name}ForCausalLM"
    for name in ("Mistral", "Mixtral", "Ministral3", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "SmolLM3", "Phi3")
) | {"Starcoder2ForCausalLM", "Dots1ForCausalLM"}

# The converter's classes for these read no other vocabulary (set_vocab in
# conversion/{gemma,nemotron,ernie,minicpm}.py).
PIECES_ALONE = frozenset(
    f"{name}ForCausalLM"
    for name in ("Gemma", "Gemma2", "Nemotron", "Ernie4_5_", "Ernie4_5", "Ernie4_5_Moe", "MiniCPM3")
)

# The converter makes their projectors for Pixtral's tower alone. The layer of the tower that transformers reads, where
# config.json does not say one.
_PIXTRAL = {"LlavaForConditionalGeneration": -2, "Mistral3ForConditionalGeneration": -1}
# clip_graph_pixtral multiplies a new tensor by 0 to clear it (tools/mtmd/models/pixtral.cpp, read 2026-11-26).
# A processor gave rows of NaN for pictures of 500 x 400 pixels and a tiny tower.
LINE_ENDS_WARNING = (
    "llama.cpp 0.3.36 reads uninitialised memory at the ends of a picture's lines; where it holds NaN or infinity, "
    "the answer is nonsense: try the pair in the program that will run it"
)
_PIXTRAL_THETA = 10_000.0  # of the tower's positions; llama.cpp has no other

# Model types whose epsilon of the norms llama.cpp 0.3.36 does not read: src/models/qwen2vl.cpp, load_arch_hparams (read
# 2026-11-26). It computes with 0.
EPSILON_LEFT_OUT = frozenset(("qwen2_vl", "qwen2_5_vl"))


def has_other_windows(text: Config, name: str) -> bool:
    """Whether the window belongs to other layers than those that llama.cpp gives it to."""
    of, kinds = _ONE_FULL_OF.get(name), text.get("layer_types")
    if of is None:
        return False
    if isinstance(kinds, list) and kinds:
        return any((kind == "full_attention") != (number % of == 0) for number, kind in enumerate(kinds, start=1))
    return bool(text.get("sliding_window_pattern", of) != of)


def unread_epsilon(config: Config) -> float | None:
    """The epsilon of a model's norms, if llama.cpp computes with 0 in its place; None if it reads it."""
    if config.get("model_type") not in EPSILON_LEFT_OUT:
        return None
    text = config.get("text_config")
    value = text.get("rms_norm_eps") if isinstance(text, Mapping) else None
    value = config.get("rms_norm_eps", 1e-6) if value is None else value
    return value if isinstance(value, (int, float)) and value > 0 else None


def why_not(
    text: Config,
    config: Config,
    architectures: Collection[str] = llama_architectures.NAMES,
    files: Collection[str] | None = None,
) -> str | None:
    """Why llama.cpp cannot compute this model; None if no reason is known.

    Args:
        text: the part of `config` that describes the text decoder, which may be the whole config.
        architectures: the architectures of the converter's registry.
        files: the file names beside config.json; None if they are unknown.
    """
    name = architecture(text, config)
    if name is None:
        return None
    if name not in architectures:
        return f"llama.cpp's converter does not know the architecture {name}"
    if files is not None and name in PIECES_ALONE and "tokenizer.model" not in files:
        return f"llama.cpp's converter reads the vocabulary of {name} from tokenizer.model, which is not there"
    rules = _COMPUTED_OTHERWISE.get(name, ()) + (_ACTIVATION,) * (name in _SILU)
    return next((reason for applies, reason in rules if applies(text)), None)


def why_no_projector(config: Config, projectors: Collection[str] = llama_architectures.PROJECTORS) -> str | None:
    """Why llama.cpp cannot read pictures with this model; None if no reason is known.

    Args:
        projectors: the architectures of the converter's registry of them.
    """
    # The converter looks up the name of the vision part, if it has its own.
    name = architecture(config.get("vision_config") or {}, config)
    if name is None:
        return None
    if name not in projectors:
        return f"llama.cpp's converter makes no projector of {name}, without which a GGUF file reads no pictures"
    return _why_no_pixtral(config, name) if name in _PIXTRAL else None


def _why_no_pixtral(config: Config, name: str) -> str | None:
    """Source: conversion/llava.py, and PROJECTOR_TYPE_PIXTRAL in tools/mtmd/clip.cpp, of llama.cpp in llama-cpp-python
    0.3.36."""
    tower = config.get("vision_config") or {}
    kind, layer = tower.get("model_type"), config.get("vision_feature_layer", _PIXTRAL[name])
    rope = tower.get("rope_parameters") or {}
    theta = rope.get("rope_theta", tower.get("rope_theta", _PIXTRAL_THETA))
    if kind != "pixtral":
        return f"llama.cpp's converter makes a projector of {name} with Pixtral's tower alone, and this one has {kind}"
    if layer != -1:
        return (
            f"llama.cpp reads the last layer of Pixtral's tower, and this model another (vision_feature_layer: {layer})"
        )
    if theta != _PIXTRAL_THETA:
        return f"llama.cpp uses rope_theta 10000 for Pixtral's tower, and this model uses {theta} (rope_theta)"
    if config.get("projector_hidden_act", "gelu") != "gelu":
        return "llama.cpp computes Pixtral's projector with GELU, and projector_hidden_act says another function"
    return None


def unread_window_warning(window: int, name: str, longest: int = 0) -> str:
    """The warning for a model whose sliding window llama.cpp does not use, or is not known to use.

    Args:
        window: the tokens that a layer sees.
        name: the architecture.
        longest: the tokens of the longest training text.
    """
    beyond = f"from a GGUF file, a text of more than {window:,} tokens"
    if name in WINDOW_LEFT_OUT:
        warning = (
            f"llama.cpp computes {name} without its sliding window: {beyond} gets other answers than from the model"
        )
    else:
        warning = f"llama.cpp is not known to compute {name} with its sliding window: {beyond} may get other answers"
    return f"{warning}; max_length {longest:,} trains on such texts" if longest > window else warning


def architecture(text: Config, config: Config) -> str | None:
    """The name that the converter looks up: the name of the text part if it has one, else that of the model.

    Source: get_model_architecture in llama.cpp's conversion/base.py.
    """
    named = (part.get("architectures") for part in (text, config))
    first = next((str(names[0]) for names in named if isinstance(names, list) and names), None)
    return first if first is None else RENAMED.get(first, first)


def as_published(config: Config) -> JsonObject:
    """Keys that transformers 5 has renamed, under the names that the converter expects."""
    names, layers = config.get("architectures"), config.get("layer_types")
    changes: JsonObject = {}
    if isinstance(names, list):
        changes["architectures"] = [RENAMED.get(name, name) for name in names]
    if config.get("model_type") == "granitemoehybrid" and isinstance(layers, list):
        changes["layer_types"] = [LAYERS.get(kind, kind) for kind in layers]
    return changes


def _is_scaled_otherwise(config: Config) -> bool:
    """Whether llama.cpp scales the attention of Gemma 2 or 3 differently. They scale by `query_pre_attn_scalar`.
    llama.cpp scales by the width of a head, and in the 27B models by the width of the model over its heads. A config
    leaves both keys out if they are 256."""
    heads, width = positive(config, ("num_attention_heads",)), positive(config, ("hidden_size",))
    allowed = [config.get("head_dim", 256), width / heads if heads and width else None]
    return config.get("query_pre_attn_scalar", 256) not in allowed


def _has_inner_width(config: Config) -> bool:
    width, inner = positive(config, ("n_embd",)), config.get("n_inner")
    return width is not None and inner not in (None, 4 * width)


def _has_other_heads(config: Config) -> bool:
    """Whether the heads are not the width divided by their number. A config leaves 128 out."""
    heads, width = positive(config, ("num_attention_heads",)), positive(config, ("hidden_size",))
    return heads is not None and width is not None and (positive(config, ("head_dim",)) or 128) * heads != width


def _scales_positions(config: Config) -> bool:
    ropes = [rope for key in ("rope_parameters", "rope_scaling") if isinstance(rope := config.get(key), dict)]
    return any((rope.get("rope_type") or rope.get("type")) not in (None, "default") for rope in ropes)


# A condition on config.json, and why a model that meets it cannot be converted.
_Rule = tuple[Callable[[Config], bool], str]


def _says(key: str, value: bool, why: str) -> _Rule:
    return lambda config: config.get(key) is value, f"{why} ({key}: {str(value).lower()})"


def _lacks_rotated(key: str) -> _Rule:
    why = f"llama.cpp's converter reads the rotated part of a head from {key}, which config.json lacks"
    return lambda config: key not in config, why


# Families whose MLP llama.cpp computes with SiLU, whatever config.json says.
_SILU = frozenset(
    f"{name}ForCausalLM"
    for name in ("Glm", "Granite", "Llama", "Mistral", "Mixtral", "Olmo", "Olmo2", "Phi3", "Qwen2", "Qwen3", "StableLm")
)
_ACTIVATION = (
    lambda config: config.get("hidden_act", "silu") not in ("silu", "swish"),
    "llama.cpp computes the MLP of this family with SiLU, and hidden_act says another function",
)
_NORMS = _says("qk_layernorm", True, "llama.cpp's converter cannot write the norms of queries and keys")
_TIED = _says("tie_word_embeddings", False, "llama.cpp has no output matrix for this family but the embedding")
_SCALE = (
    _is_scaled_otherwise,
    "llama.cpp scales the attention of Gemma by head_dim, and this one has another query_pre_attn_scalar",
)
# llama.cpp decides for a whole family whether the shares of the chosen experts are scaled to sum to one.
_SHARES_KEPT = (
    lambda config: config.get("norm_topk_prob", False) is not False,
    "llama.cpp keeps the shares of this family's experts as they are, and this one scales them (norm_topk_prob: true)",
)
_SHARES_SCALED = (
    lambda config: config.get("norm_topk_prob", False) is not True,
    "llama.cpp scales the shares of this family's experts, and this one keeps them (norm_topk_prob: false)",
)
_AS_MANY_HEADS = (
    lambda config: config.get("num_key_value_heads") not in (None, config.get("num_attention_heads")),
    "llama.cpp needs as many key heads as query heads for this family; this model has fewer (num_key_value_heads)",
)


# By architecture.
_COMPUTED_OTHERWISE: dict[str, tuple[_Rule, ...]] = {
    "BambaForCausalLM": (_lacks_rotated("attn_rotary_emb"),),
    "MiniMaxM2ForCausalLM": (_lacks_rotated("rotary_dim"),),
    "FalconForCausalLM": (
        _says("alibi", True, "llama.cpp uses rotary positions for every Falcon, and this model uses ALiBi"),
        (
            lambda config: not config.get("new_decoder_architecture") and config.get("parallel_attn") is False,
            "llama.cpp computes attention and MLP of every Falcon side by side, and this one has parallel_attn: false",
        ),
        _says("bias", True, "llama.cpp's converter cannot arrange the biases of a Falcon"),
    ),
    "BitNetForCausalLM": ((lambda config: True, "llama.cpp's converter has no place for the inner norms of BitNet"),),
    "GlmForCausalLM": (
        (
            _has_other_heads,
            "llama.cpp's converter assumes heads of hidden_size / num_attention_heads for GLM, and this model has "
            "another head_dim",
        ),
        (
            _scales_positions,
            "llama.cpp's converter leaves out how GLM scales its positions (rope_type), so long texts would differ",
        ),
    ),
    "GPT2LMHeadModel": (
        (
            _has_inner_width,
            "llama.cpp's converter takes the MLP of every GPT-2 for 4 x n_embd wide, and n_inner is not",
        ),
        (
            lambda config: (
                config.get("scale_attn_by_inverse_layer_idx") is True or config.get("scale_attn_weights") is False
            ),
            "llama.cpp scales the attention of every GPT-2 by its heads alone, and this config.json says another scale",
        ),
    ),
    "GPTBigCodeForCausalLM": (
        (
            lambda config: config.get("multi_query") is False,
            "llama.cpp takes one head of keys for every GPTBigCode, and this one has multi_query: false",
        ),
    ),
    "MPTForCausalLM": (
        (
            lambda config: isinstance(own := config.get("attn_config"), Mapping) and own.get("alibi") is False,
            "llama.cpp gives MPT no positions with alibi: false, and transformers computes ALiBi all the same",
        ),
    ),
    "Qwen2MoeForCausalLM": (_SHARES_KEPT,),
    "Qwen3MoeForCausalLM": (_SHARES_SCALED,),
    "OlmoeForCausalLM": (_SHARES_KEPT, _AS_MANY_HEADS),
    "Dots1ForCausalLM": (_AS_MANY_HEADS,),
    "PhiForCausalLM": (_NORMS,),
    "StableLmForCausalLM": (_NORMS,),
    "CohereForCausalLM": (_TIED,),
    "Cohere2ForCausalLM": (_TIED,),
    "GemmaForCausalLM": (_TIED,),
    "Starcoder2ForCausalLM": (
        _says("use_bias", False, "llama.cpp needs the biases of StarCoder 2, and this one has none"),
    ),
    "Gemma2ForCausalLM": (_TIED, _SCALE),
    "Gemma3ForCausalLM": (_SCALE,),
    "Gemma3ForConditionalGeneration": (_SCALE,),
}
