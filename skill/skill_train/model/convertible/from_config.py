"""Predicts from config.json alone whether llama.cpp converts a model correctly, so that `plan` can warn before the
training and `export-gguf` can refuse with the same words.

The converter's registry lists the architectures that have a class. It accepts some models whose layers it cannot name,
or that llama.cpp computes differently. We found each of them by converting a tiny model of the type and comparing its
logits with those of transformers (llama-cpp-python 0.3.36, transformers 5.23), as tests/model/test_convertible.py does.
"""

from collections.abc import Collection, Mapping

from skill_train.facts import JsonObject
from skill_train.model.convertible import architectures as llama_architectures
from skill_train.model.convertible.differences import computed_otherwise
from skill_train.model.convertible.rules import causal
from skill_train.model.convertible.towers import tower_computed_otherwise
from skill_train.model.tower import Config

# Names that transformers 5 writes, and the converter's names for them: architectures, and layer types of Granite's
# hybrids.
RENAMED = {"MptForCausalLM": "MPTForCausalLM"}
LAYERS = {"linear_attention": "mamba", "full_attention": "attention"}

# Architectures whose sliding window llama.cpp uses, and those whose window it ignores, including Phi-3, although its
# files contain the number. Found with texts of six windows' length, as the same test does.
WINDOWED = causal("Afmoe Cohere2 Exaone4 ExaoneMoe GptOss GraniteMoeSWA GraniteSWA Laguna Mellum Olmo3") | {
    f"{name}For{task}" for name in ("Gemma2", "Gemma3", "Gemma4") for task in ("CausalLM", "ConditionalGeneration")
}
# Of these, llama.cpp itself decides which layers see the window: all but every second, fourth or sixth
# (load_arch_hparams in its src/models). The converter writes no pattern of them.
_ONE_FULL_OF = {
    "Gemma2ForCausalLM": 2,
    "GptOssForCausalLM": 2,
    "Cohere2ForCausalLM": 4,
    "Gemma3ForCausalLM": 6,
    "Gemma3ForConditionalGeneration": 6,
}
WINDOW_LEFT_OUT = causal("Dots1 Ministral3 Mistral Mixtral Phi3 Qwen2 Qwen2Moe Qwen3 Qwen3Moe SmolLM3 Starcoder2")

# Types of which `verify` is known to judge every weight and number of a file: tests build each, and damage its files.
PROVEN = frozenset((
    "afmoe", "apertus", "arcee", "bamba", "bloom", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "dots1",
    "ernie4_5", "ernie4_5_moe", "exaone", "exaone4", "exaone_moe", "falcon", "falcon_h1", "falcon_mamba", "gemma",
    "gemma2", "gemma3", "gemma3_text", "gemma4", "gemma4_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2",
    "gpt_bigcode", "gpt_neox", "gpt_oss", "granite", "granite_swa", "granitemoe", "granitemoe_swa",
    "granitemoehybrid", "granitemoeshared", "hunyuan_v1_dense", "idefics3", "jais2", "jamba", "lfm2", "lfm2_moe",
    "llama", "llama4", "llama4_text", "llava", "mamba", "mamba2", "mellum", "minicpm3", "minimax_m2", "ministral3",
    "mistral", "mistral3", "mixtral", "mpt", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3", "olmoe", "phi",
    "phi3", "qwen2", "qwen2_5_vl", "qwen2_moe", "qwen2_vl", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl", "seed_oss", "smollm3", "smolvlm",
    "stablelm", "starcoder2", "youtu",
))  # fmt: skip

# The converter's classes for these read the vocabulary only from tokenizer.model (set_vocab in
# conversion/{gemma,nemotron,ernie,minicpm}.py).
PIECES_ALONE = causal("Ernie4_5 Ernie4_5_ Ernie4_5_Moe Gemma Gemma2 MiniCPM3 Nemotron")

# clip_graph_pixtral multiplies a new tensor by 0 to clear it (tools/mtmd/models/pixtral.cpp, read 2026-11-26).
# A processor gave rows of NaN for pictures of 500 x 400 pixels and a tiny tower.
LINE_ENDS_WARNING = (
    "llama.cpp 0.3.36 reads uninitialised memory at the ends of a picture's lines; where it holds NaN or infinity, "
    "the answer is nonsense: try the pair in the program that will run it"
)

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
    return computed_otherwise(name, text)


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
    return tower_computed_otherwise(name, config)


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
    if config.get("model_type") == "llava" and "spatial_merge_size" in config:  # which is a key of Mistral 3
        changes["spatial_merge_size"] = 1
    if config.get("model_type") == "granitemoehybrid" and isinstance(layers, list):
        changes["layer_types"] = [LAYERS.get(kind, kind) for kind in layers]
    return changes
