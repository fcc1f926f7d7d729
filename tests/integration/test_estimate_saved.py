"""What autograd really keeps for the backward pass, counted tensor by tensor, against the formula of the estimate."""

from __future__ import annotations

from typing import Any

import pytest

import tiny
from skill_train.estimate import MicroStep, layer_bytes_per_token
from skill_train.model import read_model
from skill_train.plan import TARGETS

ROWS, LENGTH = 2, 96


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama-bpe", "mistral", "gemma"])
@pytest.mark.parametrize("dropout", [0.0, 0.05])
def test_the_layers_keep_what_the_formula_says(kind: str, dropout: float) -> None:
    folder = tiny.cached(kind)
    facts = read_model(folder)
    step = MicroStep(
        "cpu",
        "float32",
        ROWS,
        LENGTH,
        checkpointing=False,
        lora_r=8,
        lora_dropout=dropout,
        target_modules=tuple(TARGETS[facts.model_type]),
    )
    kept = _kept_bytes(folder, step)
    assert facts.layers is not None and facts.hidden_size is not None
    ends = step.tokens * facts.hidden_size * 4  # the last norm's input
    expected = facts.layers * step.tokens * layer_bytes_per_token(facts, step) + ends
    assert kept == pytest.approx(expected, rel=0.05)


def _kept_bytes(folder: Any, step: MicroStep) -> int:
    """Bytes of all tensors that the layers keep, each storage once, without the weights."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    lora = LoraConfig(r=step.lora_r, lora_dropout=step.lora_dropout, target_modules=list(step.target_modules))
    model = get_peft_model(base, lora).train()
    model.enable_input_require_grads()  # as in any layer but the first
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = tensor  # held, so that no address is given twice
        return tensor

    ids = torch.randint(10, 200, (step.rows, step.length), generator=torch.manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.get_base_model().model(input_ids=ids, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
