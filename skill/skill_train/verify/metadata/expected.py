"""What config.json states about each key of a GGUF file's architecture.

The names are those of config.json and of transformers' configuration classes. These classes also know the values that
config.json leaves out. Nothing here is taken from the converter.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from skill_train.facts import JsonObject
from skill_train.llama.gguf_header import GgufFile
from skill_train.model.config import text_config
from skill_train.verify.metadata.class_config import class_config_of
from skill_train.verify.metadata.experts import gating, number_of_experts, shared_width
from skill_train.verify.metadata.rope import kind_of, of_full_layers, rope_of, scaling_of

_DOWN = re.compile(r"blk\.(\d+)\.ffn_down(_exps)?\.weight")
_UNLIMITED = 1 << 20  # context of recurrent models. They have no longest text, and the file needs some number
_RECURRENT = {"mamba", "mamba2", "falcon_mamba", "rwkv"}
_ALIBI = {"bloom", "mpt"}
_HYBRID = {"granitemoehybrid", "nemotron_h"}
_ROTATES = {"bamba": True, "nemotron_h": False}  # hybrids whose config.json does not say it
# Layer types without keys and values.
_WITHOUT_KV = {"conv", "mamba", "mamba2", "linear_attention", "recurrent", "mlp", "moe"}
_FIXED_EPSILON = {"olmo": 1e-5}  # the model's code has no field for it
_LISTED = {"qwen3next", "qwen35", "qwen35moe"}  # architectures that list their recurrent layers themselves
_IN_WEIGHTS = {"falcon-h1"}  # architectures whose files have the factors of their layers in the weights
# What Qwen3_5TextRotaryEmbedding takes if config.json has no sections.
_SECTIONS = dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), (11, 11, 10))
_TENTH = {"deepseek2"}  # architectures whose files have a tenth of mscale_all_dim


@dataclass(frozen=True)
class Stated:
    """What config.json and its class in transformers state about the language part. A missing value is None."""

    config: JsonObject
    defaults: JsonObject
    # names that the class reads; empty if transformers has no class. Other names in a config.json change nothing.
    fields: frozenset[str] = frozenset()

    @cached_property
    def text(self) -> JsonObject:
        return {**self.config, **text_config(self.config)}

    @property
    def model_type(self) -> str:
        return str(self.text.get("model_type", ""))

    @property
    def recurrent(self) -> bool:
        return self.model_type in _RECURRENT

    def __call__(self, *names: str) -> Any:
        """The value of the first name that config.json has, or else of the first that the class has."""
        for source in (self.text, self.defaults):
            value = next((source[name] for name in names if source.get(name) is not None), None)
            if value is not None:
                return value
        return None

    def of_class(self, *names: str) -> Any:
        """The same, but only for names that the class reads, if the class is known."""
        return self(*(name for name in names if not self.fields or name in self.fields))

    @cached_property
    def layer_kinds(self) -> list[str]:
        return list(self("layer_types", "layers_block_type") or [])

    @cached_property
    def rope(self) -> JsonObject:
        return rope_of(self.text, self.defaults)


def stated(config: JsonObject) -> Stated:
    """What a config.json states, with the defaults of transformers' class if there is one for this model type."""
    whole = class_config_of(config)
    if whole is None:
        return Stated(config, {})
    class_config = whole.get_text_config()
    names = {*getattr(class_config, "attribute_map", {}), "layers_block_type"}  # the second is computed by some classes
    aliases = {name: getattr(class_config, name, None) for name in names}
    fields = frozenset({*getattr(type(class_config), "__dataclass_fields__", {}), *aliases})
    return Stated(config, {**aliases, **class_config.to_dict()}, fields)


def divided(config: Stated) -> Any:
    width, heads = config("hidden_size", "n_embd", "d_model"), config("num_attention_heads", "n_head", "n_heads")
    return width // heads if width and heads else None


def _mla(config: Stated) -> bool:
    """Whether keys and values share one compressed vector, which llama.cpp stores as one head."""
    return config("kv_lora_rank") is not None and config("qk_rope_head_dim") is not None


def _head(config: Stated) -> Any:
    return of_full_layers(config.defaults).get("head_dim") or config("head_dim") or divided(config)


def _window_head(config: Stated, _: GgufFile | None = None) -> Any:
    return config("swa_head_dim") or config("head_dim") or divided(config)


def _key_length(config: Stated, gguf: GgufFile) -> Any:
    if not _mla(config):
        return _head(config)
    if gguf.of_architecture("attention.key_length_mla") is None:
        return config("qk_nope_head_dim") + config("qk_rope_head_dim")
    return config("kv_lora_rank") + config("qk_rope_head_dim")


def _key_length_mla(config: Stated, _: GgufFile) -> Any:
    return config("qk_nope_head_dim") + config("qk_rope_head_dim") if _mla(config) else None


def _sections(config: Stated, _: GgufFile) -> Any:
    sections = config.rope.get("mrope_section") or _SECTIONS.get(config.model_type)
    return [*sections, 0, 0][:4] if sections else None


def _deepstack(config: Stated, _: GgufFile) -> Any:
    """The layers of Qwen3-VL's tower whose output is added in later layers of the language model."""
    layers = (config.config.get("vision_config") or {}).get("deepstack_visual_indexes")
    return None if layers is None else len(layers)


def _value_length(config: Stated, gguf: GgufFile) -> Any:
    if not _mla(config):
        return _head(config)
    return config("kv_lora_rank" if gguf.of_architecture("attention.key_length_mla") is not None else "v_head_dim")


def _heads(config: Stated, _: GgufFile) -> Any:
    return 0 if config.recurrent else config("num_attention_heads", "n_head", "n_heads")


def _heads_kv(config: Stated, gguf: GgufFile) -> Any:
    """The number of key and value heads; 0 in layers that have none."""
    if config.recurrent:
        return 0
    if _mla(config) and gguf.of_architecture("attention.key_length_mla") is not None:
        return 1
    heads = 1 if config.text.get("multi_query") is True and not config.text.get("new_decoder_architecture") else None
    heads = heads or (config("attn_config") or {}).get("kv_n_heads")  # of DBRX
    heads = heads or config.of_class("num_key_value_heads", "num_kv_heads", "n_head_kv") or _heads(config, gguf)
    if own := of_full_layers(config.defaults).get("num_key_value_heads"):
        return [own if kind == "full_attention" else heads for kind in config.layer_kinds]
    if gguf.architecture in _LISTED or not _WITHOUT_KV & set(config.layer_kinds):
        return heads
    return [0 if layer in _WITHOUT_KV else heads for layer in config.layer_kinds]


def _context(config: Stated, gguf: GgufFile) -> Any:
    if config.recurrent or (config.model_type in _HYBRID and config("position_embedding_type") != "rope"):
        return _UNLIMITED
    if config.model_type in _ALIBI:  # positions without an end: llama.cpp computes the same with every number
        return gguf.of_architecture("context_length")
    return config("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len", "seq_length")


def _layers(config: Stated, gguf: GgufFile) -> Any:
    layers = config("num_hidden_layers", "n_layer", "n_layers", "num_layers") or len(config.layer_kinds) or None
    extra = gguf.of_architecture("nextn_predict_layers")
    return layers + extra if layers and isinstance(extra, int) else layers


def _further(config: Stated, gguf: GgufFile) -> Any:
    """The layers that predict further tokens. llama.cpp answers without them, so a file may leave them out."""
    layers, written = config("num_hidden_layers"), gguf.of_architecture("nextn_predict_layers")
    if written == 0 and not any(name.startswith(f"blk.{layers}.") for name in gguf.tensors):
        return 0
    return config("num_nextn_predict_layers", "mtp_num_hidden_layers")


def _feed_forward(config: Stated, gguf: GgufFile) -> Any:
    """The width of the file's own tensors, which another check compares; config.json's width if they have several
    widths or there are none."""
    layers = [(_DOWN.fullmatch(name), tensor) for name, tensor in gguf.tensors.items()]
    rows = {int(layer[1]): tensor.shape[0] for layer, tensor in layers if layer}
    lengths = {tensor.shape[0] for layer, tensor in layers if layer and not layer[2]}
    own = config("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff")
    if config.recurrent:
        return 0
    if isinstance(gguf.of_architecture("feed_forward_length"), list) and rows:
        return [rows.get(layer, 0) for layer in range(_layers(config, gguf) or 0)]
    return lengths.pop() if len(lengths) == 1 else own


def _rotated(config: Stated, _: GgufFile) -> Any:
    if _mla(config):
        return config("qk_rope_head_dim")
    if kind_of(config.rope) == "proportional":  # the table of factors says which part turns
        return _head(config)
    share = config.rope.get("partial_rotary_factor") or config("partial_rotary_factor", "rotary_pct", "rope_pct") or 1.0
    head = _head(config)
    return None if head is None else int(head * share)


def _dense(config: Stated, gguf: GgufFile) -> Any:
    """The number of layers before the first one with experts. Without experts that is every layer."""
    if kinds := config("mlp_layer_types"):
        return [*kinds, "sparse"].index("sparse")
    number = config("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
    return _layers(config, gguf) if number is None and expected("expert_count", config, gguf) is None else number


def window(config: Stated, gguf: GgufFile) -> Any:
    if config.text.get("use_sliding_window") is False:
        return 0
    pattern = gguf.of_architecture("attention.sliding_window_pattern")
    if isinstance(pattern, list) and not any(pattern) and set(config.layer_kinds) == {"full_attention"}:
        return gguf.of_architecture("attention.sliding_window")  # no layer uses it
    return config("sliding_window", "sliding_window_size") or 0


def _pattern(config: Stated, gguf: GgufFile) -> Any:
    """A switch for each layer, or the number of layers after which a layer sees everything."""
    layers = config.layer_kinds
    if layers and isinstance(gguf.of_architecture("attention.sliding_window_pattern"), list):
        return [layer == "sliding_attention" for layer in layers]
    full = layers.index("full_attention") + 1 if "full_attention" in layers else None
    every, step = {"sliding_attention"} == set(layers), gguf.count("attention.sliding_window_pattern")
    if every and step and step <= len(layers):  # it makes a layer full
        return layers
    return config("sliding_window_pattern") or full


def _interval(config: Stated, gguf: GgufFile) -> Any:
    """llama.cpp reads this key only in files that do not list their recurrent layers."""
    if gguf.of_architecture("attention.recurrent_layers") is not None:
        return gguf.of_architecture("full_attention_interval")
    full = [number + 1 for number, kind in enumerate(config.layer_kinds) if kind == "full_attention"]
    return full[0] if full else config("full_attention_interval")


def _recurrent(config: Stated, gguf: GgufFile) -> Any:
    """A switch for each layer. The layers that predict further tokens follow, and config.json does not list them."""
    layers = [kind == "linear_attention" for kind in config.layer_kinds]
    return layers + [False] * (gguf.count("nextn_predict_layers") or 0) if layers else None


def attention_scale(config: Stated, _: GgufFile) -> Any:
    scalar = config("query_pre_attn_scalar")
    return config("attention_multiplier") or (scalar**-0.5 if scalar else None)


def _residual(config: Stated, _: GgufFile) -> Any:
    depth = config("scale_depth")
    return depth / math.sqrt(_layers(config, _)) if depth else config("residual_multiplier")


def _logit_scale(config: Stated, _: GgufFile) -> Any:
    base = config("dim_model_base")
    return config("hidden_size") / base if base else config("logit_scale", "logits_scaling")


def _embedding_scale(config: Stated, gguf: GgufFile) -> Any:
    return None if gguf.architecture in _IN_WEIGHTS else config("embedding_multiplier", "scale_emb")


def _inner(config: Stated, _: GgufFile) -> Any:
    stated_size, grows = config("mamba_d_ssm", "d_inner"), config("mamba_expand", "expand")
    if config.recurrent and config("intermediate_size"):
        return config("intermediate_size")
    linear = config("linear_num_value_heads"), config("linear_value_head_dim")
    if all(linear):
        return linear[0] * linear[1]
    return stated_size or (int(grows * config("hidden_size")) if grows else None)


def _positions(config: Stated, _: GgufFile) -> Any:
    """llama.cpp's Granite hybrid uses this key as the switch for rotary positions."""
    kind = config("position_embedding_type")
    return _ROTATES.get(config.model_type) if kind is None else kind == "rope"


def _log_multiplier(config: Stated, gguf: GgufFile) -> Any:
    """llama.cpp divides DeepSeek's value by 0.1 when it loads the file, and uses others as they are."""
    every = config.rope.get("mscale_all_dim")
    return None if every is None else every * (0.1 if gguf.architecture in _TENTH else 1)


def _epsilon(*names: str) -> Callable[[Stated, GgufFile], Any]:
    return lambda config, _: _FIXED_EPSILON.get(config.model_type) or config(*names)


def _steps(config: Stated, _: GgufFile) -> Any:
    """Mamba 2 has a time step for each head. Its config.json may also have the rank of Mamba 1, which Mamba 2
    ignores."""
    own = ("num_heads",) if config.model_type == "mamba2" else ()
    return config("mamba_n_heads", "mamba_num_heads", *own) or config(
        "mamba_dt_rank", "time_step_rank", "linear_num_value_heads", "num_heads"
    )


def _scaling(name: str) -> Callable[[Stated, GgufFile], Any]:
    return lambda config, gguf: scaling_of(name, config.rope, _context(config, gguf))


attention_factor = _scaling("attn_factor")

EXPECTED: dict[str, tuple[str, ...] | Callable[[Stated, GgufFile], Any]] = {
    "vocab_size": lambda config, gguf: config("vocab_size") or len(gguf.tokens),
    "block_count": _layers,
    "context_length": _context,
    "embedding_length": ("hidden_size", "n_embd", "d_model"),
    "embedding_length_per_layer_input": ("hidden_size_per_layer_input",),
    "feed_forward_length": _feed_forward,
    "use_parallel_residual": ("use_parallel_residual",),
    "attention.head_count": _heads,
    "attention.head_count_kv": _heads_kv,
    "attention.key_length": _key_length,
    "attention.value_length": _value_length,
    "attention.key_length_mla": _key_length_mla,
    "attention.value_length_mla": ("v_head_dim",),
    "attention.key_length_swa": _window_head,
    "attention.value_length_swa": _window_head,
    "attention.q_lora_rank": ("q_lora_rank",),
    "attention.kv_lora_rank": ("kv_lora_rank",),
    "attention.layer_norm_rms_epsilon": (
        "rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layer_norm_eps", "block_norm_eps", "norm_epsilon",
    ),
    "attention.layer_norm_epsilon": _epsilon(
        "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps", "rms_norm_eps",
    ),
    "attention.clamp_kqv": ("clip_qkv",),
    "attention.max_alibi_bias": lambda config, _: (config("attn_config") or {}).get("alibi_bias_max"),
    "attention.temperature_scale": lambda config, _: config.rope.get("llama_4_scaling_beta"),
    "attention.causal": lambda config, _: config("is_causal") is not False,
    "attention.sliding_window": window,
    "attention.sliding_window_pattern": _pattern,
    "attention.scale": attention_scale,
    "attention.shared_kv_layers": ("num_kv_shared_layers",),
    "attention.indexer.head_count": ("index_n_heads",),
    "attention.indexer.key_length": ("index_head_dim",),
    "attention.indexer.top_k": ("index_topk",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "router_logit_softcapping": ("router_logit_softcapping",),
    "logit_scale": _logit_scale,
    "embedding_scale": _embedding_scale,
    "residual_scale": _residual,
    "rope.dimension_count": _rotated,
    "rope.dimension_count_swa": lambda config, _: (
        _window_head(config) if kind_of(config.rope) == "proportional" else None
    ),
    "n_deepstack_layers": _deepstack,
    "rope.dimension_sections": _sections,
    "rope.freq_base": lambda config, _: config.rope.get("rope_theta") if kind_of(config.rope) != "dynamic" else None,
    "rope.freq_base_swa": lambda config, _: config.rope.get("local_theta"),
    **{f"rope.scaling.{name}": _scaling(name) for name in (
        "type", "factor", "original_context_length", "attn_factor", "yarn_ext_factor", "yarn_attn_factor",
        "yarn_beta_fast", "yarn_beta_slow",
    )},
    "rope.scaling.finetuned": _positions,
    "rope.scaling.yarn_log_multiplier": _log_multiplier,
    "expert_count": number_of_experts("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "expert_used_count": number_of_experts(
        "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k", "top_k_experts",
    ),
    "expert_shared_count": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_weights_scale": ("routed_scaling_factor", "route_scale"),
    "expert_weights_norm": lambda config, _: config.model_type == "afmoe" or config("norm_topk_prob", "route_norm"),
    "expert_gating_func": gating,
    "expert_feed_forward_length": ("moe_intermediate_size", "expert_intermediate_size", "intermediate_size"),
    "moe_latent_size": ("moe_latent_size",),
    "expert_shared_feed_forward_length": shared_width,
    "full_attention_interval": _interval,
    "attention.recurrent_layers": _recurrent,
    "leading_dense_block_count": _dense,
    "interleave_moe_layer_step": ("interleave_moe_layer_step", "moe_layer_interval"),
    "nextn_predict_layers": _further,
    "ssm.conv_kernel": ("mamba_d_conv", "conv_kernel", "linear_conv_kernel_dim", "d_conv"),
    "ssm.state_size": ("mamba_d_state", "ssm_state_size", "state_size", "linear_key_head_dim", "d_state"),
    "ssm.group_count": ("mamba_n_groups", "n_groups", "linear_num_key_heads"),
    "ssm.time_step_rank": _steps,
    "ssm.inner_size": _inner,
    "ssm.dt_b_c_rms": lambda config, _: config.model_type == "falcon_mamba",
    "shortconv.l_cache": ("conv_L_cache",),
}  # fmt: skip


def expected(key: str, config: Stated, gguf: GgufFile) -> Any:
    rule = EXPECTED.get(key)
    if rule is None:
        return None
    return config(*rule) if isinstance(rule, tuple) else rule(config, gguf)
