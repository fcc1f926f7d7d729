"""What the layers of a state-space model keep for the backward pass, counted tensor by tensor, against the estimate."""

from __future__ import annotations

from typing import Any

import pytest

import tiny_families
from skill_train.estimate.memory import training_memory
from skill_train.estimate.step import MicroStep
from skill_train.model import config as config_facts

pytestmark = pytest.mark.slow

HIDDEN, TOKENS = 64, 256  # a chunk of Mamba 2
SIZES = {"vocab_size": 96, "hidden_size": HIDDEN, "num_hidden_layers": 4, "pad_token_id": 0}
HEADS = {"num_heads": 2, "head_dim": 64, "n_groups": 1}


@pytest.mark.parametrize(("name", "more"), [("mamba", {}), ("falconmamba", {}), ("mamba2", HEADS)])
def test_the_states_of_a_scan_are_within_the_estimate(name: str, more: dict[str, Any]) -> None:
    """One forward and one backward pass took 1.0 to 2.6 times what is kept between them (2026-11-30)."""
    model, facts = _built(name, more)
    step = MicroStep("cpu", "float32", 1, TOKENS, checkpointing=False, lora_r=8, target_modules=("in_proj",))
    part = next(part for part in training_memory(facts, step) or [] if part.name == "activations")
    kept = _kept_bytes(model)
    assert part.low <= kept
    assert kept <= part.high


def _built(name: str, more: dict[str, Any]) -> tuple[Any, Any]:
    import transformers
    from peft import LoraConfig, get_peft_model

    family = tiny_families.FAMILIES[name][0]
    config = getattr(transformers, f"{family}Config")(**SIZES, **more)
    model = transformers.AutoModelForCausalLM.from_config(config)
    stored = config_facts.StoredWeights(elements={"F32": sum(weight.numel() for weight in model.parameters())})
    facts = config_facts.read(config.to_dict(), source=name, stored=stored)
    return get_peft_model(model, LoraConfig(r=8, target_modules=["in_proj"], lora_dropout=0.05)).train(), facts


def _kept_bytes(model: Any) -> int:
    import torch

    weights = {weight.untyped_storage().data_ptr() for weight in (*model.parameters(), *model.buffers())}
    kept: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = tensor  # held, so that no address is given twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=torch.ones(1, TOKENS, dtype=torch.long), use_cache=False, logits_to_keep=1)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
