"""What config.json states of each key of a GGUF file's architecture.

The names are those of config.json and of transformers' configuration classes, which also know the values that
config.json leaves out. Nothing here is taken from the converter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from skill_train.core.foreign import JsonObject
from skill_train.llama.gguf_header import GgufFile
from skill_train.verify.metadata.rope import kind_of, rope_of, scaling_of

_UNLIMITED = 1 << 20  # context of recurrent models, which have no longest text; the file needs some number
_RECURRENT = {"mamba", "mamba2", "falcon_mamba", "rwkv"}
_ALIBI = {"bloom", "mpt"}
_HYBRID = {"granitemoehybrid"}
_ROTATES = {"bamba": True}  # hybrids whose config.json does not say it
_WITHOUT_KV = {"conv", "mamba", "mamba2", "linear_attention", "recurrent"}  # layer types without keys and values
_GATING = {"softmax": 1, "sigmoid": 2, "sqrtsoftplus": 4}  # llama.cpp, llama_expert_gating_func_type
_ALWAYS_SIGMOID = {"deepseek_v3", "glm4_moe", "glm4_moe_lite", "lfm2_moe"}  # the model's code has no switch
_FIXED_EPSILON = {"olmo": 1e-5}  # the same
_LISTED = {"qwen3next", "qwen35", "qwen35moe"}  # architectures that list their recurrent layers themselves
_IN_WEIGHTS = {"falcon-h1"}  # architectures whose files have the factors of their layers in the weights
_TENTH = {"deepseek2"}  # architectures whose files have a tenth of mscale_all_dim


@dataclass(frozen=True)
class Stated:
    """What config.json and its class in transformers say of the language part; None is said nowhere.

    Attributes:
        fields: names that the class reads; empty where transformers has no class. A config.json may state others,
            which then change nothing.
    """

    config: JsonObject
    defaults: JsonObject
    fields: frozenset[str] = frozenset()

    @cached_property
    def text(self) -> JsonObject:
        return {**self.config, **self.config.get("text_config", {})}

    @property
    def model_type(self) -> str:
        return str(self.text.get("model_type", ""))

    @property
    def recurrent(self) -> bool:
        return self.model_type in _RECURRENT

    def __call__(self, *names: str) -> Any:
        """The value of the first name that config.json has; then of the first that the class has."""
        for source in (self.text, self.defaults):
            found = next((source[name] for name in names if source.get(name) is not None), None)
            if found is not None:
                return found
        return None

    def of_class(self, *names: str) -> Any:
        """The same of the names that the class reads, where it is known."""
        return self(*(name for name in names if not self.fields or name in self.fields))

    @cached_property
    def layer_kinds(self) -> list[str]:
        return list(self("layer_types", "layers_block_type") or [])

    @cached_property
    def rope(self) -> JsonObject:
        return rope_of(self.text, self.defaults)


def stated(config: JsonObject) -> Stated:
    """With the defaults of the class of transformers, where it has one for this model type."""
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        return Stated(config, {})
    own = {key: _numbers(value) for key, value in config.items() if key not in ("model_type", "quantization_config")}
    try:
        made = CONFIG_MAPPING[kind].from_dict(own).get_text_config()
    except Exception:  # noqa: BLE001 - what a class of another library raises for old keys is not documented
        return Stated(config, {})
    names = {*getattr(made, "attribute_map", {}), "layers_block_type"}  # the second is computed by some classes
    aliases = {name: getattr(made, name, None) for name in names}
    fields = frozenset({*getattr(type(made), "__dataclass_fields__", {}), *aliases})
    return Stated(config, {**aliases, **made.to_dict()}, fields)


def _numbers(value: Any) -> Any:
    """With infinity as a number, which transformers 5 writes as `{"__float__": "Infinity"}`."""
    if isinstance(value, list):
        return [_numbers(one) for one in value]
    if isinstance(value, dict):
        return (
            float(value["__float__"]) if value.keys() == {"__float__"} else {k: _numbers(v) for k, v in value.items()}
        )
    return value


def divided(said: Stated) -> Any:
    width, heads = said("hidden_size", "n_embd", "d_model"), said("num_attention_heads", "n_head", "n_heads")
    return width // heads if width and heads else None


def _mla(said: Stated) -> bool:
    """Keys and values in one compressed vector, which llama.cpp keeps as one head."""
    return said("kv_lora_rank") is not None and said("qk_rope_head_dim") is not None


def _head(said: Stated) -> Any:
    return said("head_dim") or divided(said)


def _key_length(said: Stated, gguf: GgufFile) -> Any:
    if not _mla(said):
        return _head(said)
    if gguf.of_architecture("attention.key_length_mla") is None:
        return said("qk_nope_head_dim") + said("qk_rope_head_dim")
    return said("kv_lora_rank") + said("qk_rope_head_dim")


def _key_length_mla(said: Stated, _: GgufFile) -> Any:
    return said("qk_nope_head_dim") + said("qk_rope_head_dim") if _mla(said) else None


def _sections(said: Stated, _: GgufFile) -> Any:
    sections = said.rope.get("mrope_section")
    return [*sections, 0, 0][:4] if sections else None


def _value_length(said: Stated, gguf: GgufFile) -> Any:
    if not _mla(said):
        return _head(said)
    return said("kv_lora_rank" if gguf.of_architecture("attention.key_length_mla") is not None else "v_head_dim")


def _heads(said: Stated, _: GgufFile) -> Any:
    return 0 if said.recurrent else said("num_attention_heads", "n_head", "n_heads")


def _heads_kv(said: Stated, gguf: GgufFile) -> Any:
    """0 in layers without keys and values."""
    if said.recurrent:
        return 0
    if _mla(said) and gguf.of_architecture("attention.key_length_mla") is not None:
        return 1
    one = 1 if said.text.get("multi_query") is True and not said.text.get("new_decoder_architecture") else None
    one = one or said.of_class("num_key_value_heads", "num_kv_heads", "n_head_kv") or _heads(said, gguf)
    if gguf.architecture in _LISTED or not _WITHOUT_KV & set(said.layer_kinds):
        return one
    return [0 if layer in _WITHOUT_KV else one for layer in said.layer_kinds]


def _context(said: Stated, gguf: GgufFile) -> Any:
    if said.recurrent or (said.model_type in _HYBRID and said("position_embedding_type") != "rope"):
        return _UNLIMITED
    if said.model_type in _ALIBI:  # positions without an end: llama.cpp computes the same with every number
        return gguf.of_architecture("context_length")
    return said("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len", "seq_length")


def _layers(said: Stated, gguf: GgufFile) -> Any:
    layers = said("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    extra = gguf.of_architecture("nextn_predict_layers")
    return layers + extra if layers and isinstance(extra, int) else layers


def _feed_forward(said: Stated, gguf: GgufFile) -> Any:
    """As the tensors of the file have it, which are compared themselves; else by config.json."""
    rows = {}
    for name, tensor in gguf.tensors.items():
        parts = name.split(".")
        if parts[0] == "blk" and ".".join(parts[2:]) == "ffn_down.weight":
            rows[int(parts[1])] = tensor.shape[0]
    lengths = set(rows.values())
    own = said("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff")
    if said.recurrent:
        return 0
    if isinstance(gguf.of_architecture("feed_forward_length"), list) and rows:
        return [rows.get(layer, 0) for layer in range(_layers(said, gguf) or 0)]
    return lengths.pop() if len(lengths) == 1 else own


def _rotated(said: Stated, _: GgufFile) -> Any:
    if _mla(said):
        return said("qk_rope_head_dim")
    share = said.rope.get("partial_rotary_factor") or said("partial_rotary_factor", "rotary_pct", "rope_pct") or 1.0
    head = _head(said)
    return None if head is None else int(head * share)


def _experts_width(said: Stated, _: GgufFile) -> Any:
    return said("moe_intermediate_size", "expert_intermediate_size", "intermediate_size")


def _shared_width(said: Stated, _: GgufFile) -> Any:
    own = said("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
    each = said("moe_intermediate_size")
    count = said("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    return own or (each * count if each and count else None)


def gating(said: Stated, _: GgufFile) -> Any:
    if said.model_type in _ALWAYS_SIGMOID:
        return _GATING["sigmoid"]
    name = said("scoring_func", "score_function", "moe_router_activation_func", "score_func")
    return _GATING.get(str(name), 1 if said.model_type in ("deepseek_v2", "gpt_oss") else None)


def window(said: Stated, gguf: GgufFile) -> Any:
    if said.text.get("use_sliding_window") is False:
        return 0
    pattern = gguf.of_architecture("attention.sliding_window_pattern")
    if isinstance(pattern, list) and not any(pattern) and set(said.layer_kinds) == {"full_attention"}:
        return gguf.of_architecture("attention.sliding_window")  # of no layer
    return said("sliding_window", "sliding_window_size") or 0


def _pattern(said: Stated, gguf: GgufFile) -> Any:
    """A switch for each layer, or the number of layers after which a layer sees everything."""
    layers = said.layer_kinds
    if layers and isinstance(gguf.of_architecture("attention.sliding_window_pattern"), list):
        return [layer == "sliding_attention" for layer in layers]
    return said("sliding_window_pattern") or (layers.index("full_attention") + 1 if layers else None)


def _recurrent_layers(said: Stated, _: GgufFile) -> Any:
    return [kind == "linear_attention" for kind in said.layer_kinds] or None


def _interval(said: Stated, gguf: GgufFile) -> Any:
    """llama.cpp reads it of files that do not list their recurrent layers."""
    if gguf.of_architecture("attention.recurrent_layers") is not None:
        return gguf.of_architecture("full_attention_interval")
    full = [number + 1 for number, kind in enumerate(said.layer_kinds) if kind == "full_attention"]
    return full[0] if full else said("full_attention_interval")


def attention_scale(said: Stated, _: GgufFile) -> Any:
    scalar = said("query_pre_attn_scalar")
    return said("attention_multiplier") or (scalar**-0.5 if scalar else None)


def _residual(said: Stated, _: GgufFile) -> Any:
    depth = said("scale_depth")
    return depth / math.sqrt(_layers(said, _)) if depth else said("residual_multiplier")


def _logit_scale(said: Stated, _: GgufFile) -> Any:
    base = said("dim_model_base")
    return said("hidden_size") / base if base else said("logit_scale", "logits_scaling")


def _embedding_scale(said: Stated, gguf: GgufFile) -> Any:
    return None if gguf.architecture in _IN_WEIGHTS else said("embedding_multiplier", "scale_emb")


def _inner(said: Stated, _: GgufFile) -> Any:
    stated_size, grows = said("mamba_d_ssm", "d_inner"), said("mamba_expand", "expand")
    if said.recurrent and said("intermediate_size"):
        return said("intermediate_size")
    linear = said("linear_num_value_heads"), said("linear_value_head_dim")
    if all(linear):
        return linear[0] * linear[1]
    return stated_size or (int(grows * said("hidden_size")) if grows else None)


def _positions(said: Stated, _: GgufFile) -> Any:
    """llama.cpp's Granite hybrid takes this key as the switch of rotary positions."""
    kind = said("position_embedding_type")
    return _ROTATES.get(said.model_type) if kind is None else kind == "rope"


def _log_multiplier(said: Stated, gguf: GgufFile) -> Any:
    """llama.cpp divides DeepSeek's by 0.1 when it loads the file, and takes others as they are."""
    every = said.rope.get("mscale_all_dim")
    return None if every is None else every * (0.1 if gguf.architecture in _TENTH else 1)


def _epsilon(*names: str) -> Callable[[Stated, GgufFile], Any]:
    return lambda said, _: _FIXED_EPSILON.get(said.model_type) or said(*names)


def _steps(said: Stated, _: GgufFile) -> Any:
    """Mamba 2 has a step of time for each head. Its config.json may have the rank of Mamba 1 too, which it ignores."""
    heads = said("mamba_n_heads", "mamba_num_heads") or (said("num_heads") if said.model_type == "mamba2" else None)
    return heads or said("mamba_dt_rank", "time_step_rank", "linear_num_value_heads", "num_heads")


def _scaling(name: str) -> Callable[[Stated, GgufFile], Any]:
    return lambda said, gguf: scaling_of(name, said.rope, _context(said, gguf))


attention_factor = _scaling("attn_factor")

EXPECTED: dict[str, tuple[str, ...] | Callable[[Stated, GgufFile], Any]] = {
    "vocab_size": lambda said, gguf: said("vocab_size") or len(gguf.strings("tokenizer.ggml.tokens")),
    "block_count": _layers,
    "context_length": _context,
    "embedding_length": ("hidden_size", "n_embd", "d_model"),
    "feed_forward_length": _feed_forward,
    "use_parallel_residual": ("use_parallel_residual",),
    "attention.head_count": _heads,
    "attention.head_count_kv": _heads_kv,
    "attention.key_length": _key_length,
    "attention.value_length": _value_length,
    "attention.key_length_mla": _key_length_mla,
    "attention.value_length_mla": ("v_head_dim",),
    "attention.key_length_swa": ("swa_head_dim", "head_dim"),
    "attention.value_length_swa": ("swa_head_dim", "head_dim"),
    "attention.q_lora_rank": ("q_lora_rank",),
    "attention.kv_lora_rank": ("kv_lora_rank",),
    "attention.layer_norm_rms_epsilon": (
        "rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layer_norm_eps", "block_norm_eps", "norm_epsilon",
    ),
    "attention.layer_norm_epsilon": _epsilon(
        "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps", "rms_norm_eps",
    ),
    "attention.clamp_kqv": ("clip_qkv",),
    "attention.max_alibi_bias": lambda said, _: (said("attn_config") or {}).get("alibi_bias_max"),
    "attention.temperature_scale": lambda said, _: said.rope.get("llama_4_scaling_beta"),
    "attention.causal": lambda said, _: said("is_causal") is not False,
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
    "rope.dimension_sections": _sections,
    "rope.freq_base": lambda said, _: said.rope.get("rope_theta") if kind_of(said.rope) != "dynamic" else None,
    "rope.freq_base_swa": lambda said, _: said.rope.get("local_theta"),
    **{f"rope.scaling.{name}": _scaling(name) for name in (
        "type", "factor", "original_context_length", "attn_factor", "yarn_ext_factor", "yarn_attn_factor",
        "yarn_beta_fast", "yarn_beta_slow",
    )},
    "rope.scaling.finetuned": _positions,
    "rope.scaling.yarn_log_multiplier": _log_multiplier,
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "expert_used_count": (
        "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k", "top_k_experts",
    ),
    "expert_shared_count": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_weights_scale": ("routed_scaling_factor", "route_scale"),
    "expert_weights_norm": ("norm_topk_prob", "route_norm"),
    "expert_gating_func": gating,
    "expert_feed_forward_length": _experts_width,
    "expert_shared_feed_forward_length": _shared_width,
    "full_attention_interval": _interval,
    "attention.recurrent_layers": _recurrent_layers,
    "leading_dense_block_count": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    "interleave_moe_layer_step": ("interleave_moe_layer_step", "moe_layer_interval"),
    "nextn_predict_layers": ("num_nextn_predict_layers",),
    "ssm.conv_kernel": ("mamba_d_conv", "conv_kernel", "linear_conv_kernel_dim", "d_conv"),
    "ssm.state_size": ("mamba_d_state", "ssm_state_size", "state_size", "linear_key_head_dim", "d_state"),
    "ssm.group_count": ("mamba_n_groups", "n_groups", "linear_num_key_heads"),
    "ssm.time_step_rank": _steps,
    "ssm.inner_size": _inner,
    "ssm.dt_b_c_rms": lambda said, _: said.model_type == "falcon_mamba",
    "shortconv.l_cache": ("conv_L_cache",),
}  # fmt: skip


def expected(key: str, said: Stated, gguf: GgufFile) -> Any:
    rule = EXPECTED.get(key)
    if rule is None:
        return None
    return said(*rule) if isinstance(rule, tuple) else rule(said, gguf)
