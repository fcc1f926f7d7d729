"""The facts in a `config.json`. Pure: the caller has read the file, from a folder or from the Hub."""

from collections.abc import Collection, Mapping
from typing import Any, TypedDict

import msgspec
from msgspec.structs import asdict, replace

from skill_train.facts import ModelFacts
from skill_train.model import parameter_count
from skill_train.model.convertible import cache, from_config
from skill_train.model.parameter_count import ParameterCount, TextShape
from skill_train.model.tower import Config, positive, read_tower

# Each field with the keys that configs use for it.
_KEYS: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "vocab_size": ("vocab_size",),
    "context": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
    "intermediate_size": ("moe_intermediate_size", "intermediate_size", "n_inner", "ffn_dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "n_head_kv", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"),
}
# The values of transformers 5.23 for keys that published configs of a type leave out
# (source: the class defaults in models/<type>/configuration_<type>.py). `kv_heads: 0` means as many as heads.
_LLAMA = {"kv_heads": 0, "tied_embeddings": False}
_QWEN = {"tied_embeddings": False}
_GEMMA = {"head_dim": 256, "tied_embeddings": True}
_TIED = ("bloom", "cohere", "cohere2", "ernie4_5", "falcon", "gemma3n_text", "gemma4_text", "gpt_bigcode", "lfm2",
         "smollm3", "starcoder2")  # fmt: skip
_DEFAULTS: dict[str, Mapping[str, int]] = {
    **dict.fromkeys(("gpt_neox", "granite", "llama", "olmo2", "phi", "phi3"), _LLAMA),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3_moe"), _QWEN),
    **{kind: {"tied_embeddings": True} for kind in _TIED},
    "gemma": _GEMMA,
    "gemma2": _GEMMA | {"sliding_window": 4096},
    "gemma3_text": _GEMMA
    | {"sliding_window": 4096, "vocab_size": 262_208, "heads": 8, "kv_heads": 4, "context": 131_072},
    "glm": {"head_dim": 128, "kv_heads": 2, "tied_embeddings": False},
    "gpt2": {"kv_heads": 0, "tied_embeddings": True},
    "mistral": {"kv_heads": 8, "tied_embeddings": False, "sliding_window": 4096},
    "mixtral": {"kv_heads": 8, "tied_embeddings": False},
    "qwen3": _QWEN | {"head_dim": 128},
}
# Types whose window counts only if the config enables it.
_SWITCHED_WINDOW = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "qwen2_vl", "qwen2_5_vl")
# The first layer with a window, if config.json leaves max_window_layers out.
_WINDOW_FROM = {"qwen2": 28, "qwen3": 28, "qwen2_vl": 80, "qwen2_5_vl": 80, "dots1": 62}
# One of so many layers sees everything, if config.json has neither layer_types nor sliding_window_pattern
# (configuration_<type>.py, transformers 5.23).
_ONE_FULL_OF = {"gemma2": 2, "gemma3_text": 6, "gemma4_text": 6, "cohere2": 4, "gpt_oss": 2, "olmo3": 4, "exaone4": 4}
_NESTED_TEXT = ("text_config", "llm_config", "language_config")
# Vision models that AutoModelForCausalLM, and so train.py, loads for their text (transformers 5.23,
# MODEL_FOR_CAUSAL_LM_MAPPING_NAMES). It refuses all others.
TEXT_OF_VISION = (
    "dots3_note", "fuyu", "gemma3", "gemma3n", "gemma4", "git", "llama4", "mllama", "phi4_multimodal", "qwen3_5",
    "qwen3_5_moe", "qwen4_exp",
)  # fmt: skip
# Keys under which models describe how they read images.
_VISION = ("vision_config", "img_processor", "mm_vision_tower", "vision_tower", "visual", "vision_lora")
# torch's names, safetensors' names
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}


class StoredWeights(msgspec.Struct, frozen=True):
    """The known facts of the weight files; none by default."""

    elements: Mapping[str, int] = {}  # the count of stored numbers by safetensors' name of their dtype
    bytes: int | None = None  # the size of the files
    unknown: str = "no weight files were looked at"  # why nothing is known about the files

    @property
    def total(self) -> int:
        return sum(self.elements.values())

    @property
    def main_dtype(self) -> str | None:
        return max(self.elements, key=lambda name: self.elements[name]) if self.total else None


class Origin(msgspec.Struct, frozen=True):
    """The state of a model: the `fingerprint` of a folder, or the `revision` of a repository on the Hub."""

    fingerprint: str | None = None
    revision: str | None = None
    gated: bool | None = None


def read(
    config: Config,
    *,
    source: str,
    stored: StoredWeights | None = None,
    has_chat_template: bool = False,
    origin: Origin | None = None,
    files: Collection[str] | None = None,
) -> ModelFacts:
    """The facts of a model with this config. A fact that the config does not state is None, with the reason in
    `unknown`.

    Args:
        files: the file names beside config.json; None if they are unknown.
    """
    stored, origin = stored or StoredWeights(), origin or Origin()
    text = text_config(config)
    sizes = _sizes(config, text)
    quantization = _quantization(config, text)
    parameters, unknown = _parameters(config, text, sizes, stored, quantization)
    refused = from_config.why_not(text, config, files=files)
    unread = from_config.why_no_projector(config) if is_vision(config) else None
    if config.get("model_type") not in TEXT_OF_VISION:
        refused, unread = refused or unread, None  # a GGUF file that reads no pictures is useless then
    borrowing = positive(text, ("num_kv_shared_layers",)) if text.get("model_type") == "gemma4_text" else None
    kinds, names = cache.cached_layers(text, sizes["layers"]), config.get("architectures")
    dtype = stored.main_dtype or _DTYPES.get(str(_first(text, config, keys=("dtype", "torch_dtype"))))
    facts = ModelFacts(
        source=source,
        fingerprint=origin.fingerprint,
        model_type=str(config.get("model_type", "unknown")),
        architecture=str(names[0]) if isinstance(names, list) and names else "unknown",
        stored_dtype=dtype,
        quantization=quantization,
        has_chat_template=has_chat_template,
        weight_bytes=stored.bytes,
        vision=is_vision(config),
        tower=read_tower(config),
        gated=origin.gated,
        revision=origin.revision,
        sliding_window=_sliding_window(text, sizes),
        windowed_layers=_windowed_layers(text, sizes),
        borrowing_layers=borrowing or 0,
        cached_layers=None if kinds is None else len(kinds),
        cached_numbers=cache.numbers_per_token(text, *(sizes[key] for key in ("heads", "kv_heads", "head_dim"))),
        unread_window=unread_window(config),
        convertible=None if from_config.architecture(text, config) is None else refused is None,
        not_convertible=refused,
        no_projector=unread,
        shared_width=parameter_count.shared_width(text, sizes["intermediate_size"]) if sizes["experts"] else 0,
        **sizes,
        **parameters,
    )
    return _with_reasons(facts, unknown, stored)


def text_config(config: Config) -> Config:
    """The config of the text decoder: the config itself, or a nested one."""
    return next((config[key] for key in _NESTED_TEXT if isinstance(config.get(key), Mapping)), config)


def is_vision(config: Config) -> bool:
    """Whether the model reads images: it has a vision config, also under older names."""
    if any(config.get(key) for key in _VISION) or "vision_config" in (config.get("thinker_config") or ()):
        return True
    embedding = config.get("embd_layer")  # Phi-4-multimodal
    return isinstance(embedding, Mapping) and bool(embedding.get("image_embd_layer"))


class _Sizes(TypedDict):
    """The facts with these names; None if neither the config nor its type states them."""

    layers: int | None
    hidden_size: int | None
    vocab_size: int | None
    context: int | None
    intermediate_size: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    experts: int | None
    experts_per_token: int | None
    tied_embeddings: bool | None


def _sizes(config: Config, text: Config) -> _Sizes:
    """The sizes from the config, else from the defaults of the type, else computed from each other."""
    defaults = _DEFAULTS.get(str(text.get("model_type")), {})
    stated = {name: positive(text, keys) or defaults.get(name) for name, keys in _KEYS.items()}
    hidden, heads, inner, head_dim = (stated[k] for k in ("hidden_size", "heads", "intermediate_size", "head_dim"))
    rotated, plain = (positive(text, (f"qk_{part}_head_dim",)) for part in ("rope", "nope"))
    if rotated and plain:  # of queries and keys; `head_dim` of these configs is the rotated part alone
        head_dim = rotated + plain
    if not head_dim and hidden and heads:
        head_dim = hidden // heads
    if not inner and text.get("model_type") == "gpt2" and hidden:
        inner = 4 * hidden
    kinds = text.get("layers_block_type")  # Nemotron-H of transformers 5 states no number of layers
    return {
        "layers": stated["layers"] or (len(kinds) if isinstance(kinds, list) else 0) or None,
        "hidden_size": hidden,
        "vocab_size": stated["vocab_size"],
        "context": stated["context"],
        "intermediate_size": inner,
        "heads": heads,
        "kv_heads": 1 if cache.one_key_head(text) else heads if stated["kv_heads"] == 0 else stated["kv_heads"],
        "head_dim": head_dim,
        "experts": None if text.get("enable_moe_block") is False else stated["experts"],
        "experts_per_token": stated["experts_per_token"] if stated["experts"] else None,
        "tied_embeddings": _tied(config, text),
    }


def _shape(model_type: str, sizes: _Sizes) -> TextShape | None:
    experts, per_token = sizes["experts"] or 0, sizes["experts_per_token"] or 0
    needed: dict[str, Any] = {name: size for name, size in sizes.items() if not name.startswith("experts")}
    if not parameter_count.knows(model_type) or None in needed.values() or (experts and not per_token):
        return None
    return TextShape(model_type, **needed, experts=experts, experts_per_token=per_token)


def _parameters(
    config: Config, text: Config, sizes: _Sizes, stored: StoredWeights, quantization: str | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """The facts about the number of parameters, by their names, and why some are unknown."""
    shape = _shape(str(text.get("model_type", "unknown")), sizes)
    counted = parameter_count.count(shape, text) if shape else None
    total, origin, unknown = _total(config, shape, counted, stored, quantization)
    active, experts = total, None
    if sizes["experts"]:
        active, experts = None, counted.experts if counted else None
        if total is not None and experts is not None:
            active = total - parameter_count.idle(experts, sizes["experts"], sizes["experts_per_token"] or 0)
    values = {
        "parameters": total,
        "parameters_from": origin,
        "active_parameters": active,
        "embedding_parameters": _embedding(text, sizes),
        "expert_parameters": experts,
    }
    reasons = {"parameters": unknown} if total is None else {}
    reasons |= {"active_parameters": unknown or _no_arithmetic(text, shape)} if active is None else {}
    return values, reasons


def _total(
    config: Config,
    shape: TextShape | None,
    counted: ParameterCount | None,
    stored: StoredWeights,
    quantization: str | None,
) -> tuple[int | None, str | None, str]:
    """`(parameters, origin, why they are unknown)`. Stored numbers are counted, unless they are packed."""
    if stored.total and not quantization:
        without = parameter_count.without_copies(stored.total, shape, counted) if shape and counted else stored.total
        return without, parameter_count.HEADERS, ""
    if counted is not None and not is_vision(config):
        return counted.total, "config arithmetic", ""
    why = f"no arithmetic for the vision part of {config.get('model_type')}"
    if counted is None:
        why = _no_arithmetic(text_config(config), shape)
    return None, None, why + (f", and the weights are packed ({quantization})" if quantization and stored.total else "")


def _no_arithmetic(text: Config, shape: TextShape | None) -> str:
    model_type = str(text.get("model_type", "unknown"))
    if shape is None and parameter_count.knows(model_type):
        return "config.json leaves out a size that the arithmetic needs"
    return f"no arithmetic for model type {model_type}"


def _embedding(text: Config, sizes: _Sizes) -> int | None:
    vocab, hidden, tied = sizes["vocab_size"], sizes["hidden_size"], sizes["tied_embeddings"]
    if vocab is None or hidden is None or tied is None:
        return None
    words, width = (positive(text, (f"{name}_per_layer_input",)) or 0 for name in ("vocab_size", "hidden_size"))
    return vocab * hidden * (1 if tied else 2) + words * width * (sizes["layers"] or 0)  # Gemma 3n and 4


def _tied(config: Config, text: Config) -> bool | None:
    stated = _first(text, config, keys=("tie_word_embeddings",))
    if isinstance(stated, bool):
        return stated
    default = _DEFAULTS.get(str(text.get("model_type")), {}).get("tied_embeddings")
    return None if default is None else bool(default)


def unread_window(config: Config) -> int | None:
    """The sliding window in tokens, if llama.cpp is not known to use it. None if there is no window, or if llama.cpp
    uses it."""
    text = text_config(config)
    sizes, name = _sizes(config, text), from_config.architecture(text, config)
    if name in from_config.WINDOWED:
        return _stated_window(text, sizes) if from_config.has_other_windows(text, name) else None
    return _sliding_window(text, sizes)


def _sliding_window(text: Config, sizes: _Sizes) -> int | None:
    any_layer = _any_layer_windowed(str(text.get("model_type")), text, sizes["layers"])
    return _stated_window(text, sizes) if any_layer else None


def _stated_window(text: Config, sizes: _Sizes) -> int | None:
    """The window that is shorter than the context, whichever layers have it."""
    model_type, context = str(text.get("model_type")), sizes["context"]
    if model_type in _SWITCHED_WINDOW and text.get("use_sliding_window") is not True:
        return None
    window = text.get("sliding_window", _DEFAULTS.get(model_type, {}).get("sliding_window"))
    if not isinstance(window, int) or window <= 0 or (context is not None and window >= context):
        return None
    return window


def _windowed_layers(text: Config, sizes: _Sizes) -> int | None:
    """How many layers see only the window; None where nothing says it, 0 where there is no window."""
    if _sliding_window(text, sizes) is None:
        return 0
    layers = sizes["layers"]
    kinds = cache.cached_layers(text, layers)
    if kinds is not None:
        return kinds.count("sliding_attention")
    of = text.get("sliding_window_pattern", _ONE_FULL_OF.get(str(text.get("model_type"))))
    return layers - layers // of if isinstance(of, int) and of > 0 and layers is not None else None


def _any_layer_windowed(model_type: str, text: Config, layers: int | None) -> bool:
    """Whether any layer has the stated window. Source: `layer_types` of configuration_<type>.py, transformers 5.23. A
    type that is not listed here has it in every layer, or in some layers whatever config.json says."""
    kinds, first = text.get("layer_types"), text.get("max_window_layers", _WINDOW_FROM.get(model_type))
    if isinstance(kinds, list) and kinds:
        return "sliding_attention" in kinds
    if model_type == "qwen2_moe":
        return bool(first != 0)
    if model_type not in _WINDOW_FROM or layers is None or not isinstance(first, int):
        return True
    return first < layers


def _quantization(config: Config, text: Config) -> str | None:
    stated = _first(config, text, keys=("quantization_config",))
    if stated:
        old = isinstance(stated, Mapping) and (stated.get("load_in_4bit") or stated.get("load_in_8bit"))
        unnamed = "bitsandbytes" if old else "unknown"  # as older versions of transformers wrote it
        return str(stated.get("quant_method", unnamed)) if isinstance(stated, Mapping) else unnamed
    return "mlx" if isinstance(config.get("quantization"), Mapping) else None  # mlx_lm.convert writes this key


def _with_reasons(facts: ModelFacts, unknown: dict[str, str], stored: StoredWeights) -> ModelFacts:
    reasons = dict(unknown)
    values = asdict(facts)
    for name in (*_KEYS, "tied_embeddings", "embedding_parameters", "stored_dtype"):
        if values[name] is None and not name.startswith("experts"):
            reasons[name] = "config.json does not say"
    if facts.weight_bytes is None:
        reasons["weight_bytes"] = stored.unknown
    if facts.convertible is None:
        reasons["convertible"] = "config.json names no architecture"
    return replace(facts, unknown=reasons)


def _first(*configs: Config, keys: tuple[str, ...]) -> Any:
    return next((c[key] for c in configs for key in keys if c.get(key) is not None), None)
