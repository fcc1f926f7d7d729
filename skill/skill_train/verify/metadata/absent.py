"""Values for keys that the model's files do not state, because the model has no such part: no cap, no experts.

llama.cpp computes the same with these values as without the key. They hold only for architectures of which a correct
file was tried. For others, config.json may state the number by a name that is not known here.
"""

from typing import Any

from skill_train.llama.gguf_header import GgufFile
from skill_train.verify.metadata.expected import Stated, expected
from skill_train.verify.metadata.rope import kind_of
from skill_train.verify.weights.places import TRIED

_CONSTANTS: dict[str, float] = {
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping"), 0.0),
    **dict.fromkeys(("attention.clamp_kqv", "attention.temperature_scale", "rope.scaling.yarn_log_multiplier"), 0.0),
    **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale", "expert_weights_scale"), 1.0),
    **dict.fromkeys((f"rope.scaling.{name}" for name in ("factor", "attn_factor", "yarn_attn_factor")), 1.0),
    **dict.fromkeys(("expert_count", "expert_used_count", "expert_shared_count", "attention.shared_kv_layers"), 0),
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}
# Architectures whose config.json need not count the layers that predict further tokens.
_PREDICT = {"qwen3next", "qwen35", "qwen35moe"}
_UNSCALED = {"llama3", "dynamic", "mrope", "proportional"}  # llama.cpp scales none of these by metadata


def lacking(key: str, value: Any, config: Stated, gguf: GgufFile) -> Any:
    """The value that a key must have if config.json and its class do not state it; None where it is not known.

    Args:
        value: the key's value in the file.
    """
    if gguf.architecture not in TRIED or not config.fields:
        return None
    if key in _CONSTANTS:
        return _CONSTANTS[key]
    if key in ("expert_group_count", "expert_group_used_count"):
        return int(value == 1)  # no group, or one of all
    if key == "nextn_predict_layers":
        return None if gguf.architecture in _PREDICT else 0
    if key == "attention.scale":
        head = expected("attention.key_length", config, gguf)
        return head**-0.5 if head and config("kv_lora_rank") is None else None
    return _of_positions(key, config, gguf)


def _of_positions(key: str, config: Stated, gguf: GgufFile) -> Any:
    kind = kind_of(config.rope)
    if key == "rope.scaling.type":
        return "none" if kind in _UNSCALED else None
    if key == "rope.scaling.yarn_ext_factor":
        return 1.0 if kind == "yarn" else 0.0
    if key == "attention.max_alibi_bias":
        return 0.0 if config.rope else None
    if key == "rope.dimension_count_swa":
        return expected("rope.dimension_count", config, gguf)
    return config.rope.get("rope_theta") if key == "rope.freq_base_swa" else None
