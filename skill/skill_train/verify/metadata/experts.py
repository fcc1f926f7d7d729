"""What config.json states about experts. `config` is a `Stated` of expected.py, which imports this module."""

from collections.abc import Callable
from typing import Any

from skill_train.llama.gguf_header import GgufFile

_GATING = {"softmax": 1, "sigmoid": 2, "sqrtsoftplus": 4}  # llama.cpp, llama_expert_gating_func_type
# The code of these models has no switch.
_ALWAYS_SIGMOID = {
    "afmoe", "deepseek_v3", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite", "lfm2_moe", "minimax_m2",
}  # fmt: skip


def shared_width(config: Any, _: GgufFile) -> Any:
    own = config("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
    each = config("moe_intermediate_size")
    count = config("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    return own or (each * count if each and count else None)


def gating(config: Any, _: GgufFile) -> Any:
    if config.model_type in _ALWAYS_SIGMOID:
        return _GATING["sigmoid"]
    name = config("scoring_func", "score_function", "moe_router_activation_func", "score_func")
    return _GATING.get(str(name), 1 if config.model_type in ("deepseek_v2", "gpt_oss") else None)


def number_of_experts(*names: str) -> Callable[[Any, GgufFile], Any]:
    """A number of experts. The class of Nemotron-H has one even where no layer has experts."""
    return lambda config, _: 0 if "mlp" in config.layer_kinds and "moe" not in config.layer_kinds else config(*names)
