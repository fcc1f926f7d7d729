"""What an MLP without a gate keeps for the backward pass, counted tensor by tensor, against the estimate's table."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import models
from skill_train.estimate.modules import mlp_tensors_per_token

pytestmark = pytest.mark.slow

HIDDEN, INNER, TOKENS = 32, 128, 16


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox", "phi", "starcoder2", "nemotron", "gptj", "persimmon"])
def test_an_mlp_keeps_what_the_table_says(kind: str) -> None:
    """gpt2 drops out behind its MLP, whose mask is a quarter of the inner width in width."""
    facts = msgspec.structs.replace(models.recorded_model("gpt2"), model_type=kind)
    kept = _kept_bytes(kind) / (TOKENS * INNER * 4)
    assert kept == pytest.approx(mlp_tensors_per_token(facts) + (0.25 if kind == "gpt2" else 0))


def _kept_bytes(kind: str) -> int:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 4}
    names = {"n_embd": HIDDEN, "n_layer": 1, "n_head": 4, "num_key_value_heads": 4, "intermediate_size": INNER}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    wanted = names if kind in ("gpt2", "gptj") else sizes | names
    config = AutoConfig.for_model(kind, **wanted, **ends, **({"rotary_dim": 4} if kind == "gptj" else {}))
    model = AutoModelForCausalLM.from_config(config).train().requires_grad_(False)
    mlp = next(module for name, module in model.named_modules() if name.endswith(".mlp"))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = tensor  # held, so that no address is given twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        mlp(torch.randn(2, TOKENS // 2, HIDDEN, requires_grad=True))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
