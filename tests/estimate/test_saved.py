"""What autograd really keeps for the backward pass, counted tensor by tensor, against the formula of the estimate."""

from __future__ import annotations

from typing import Any

import pytest

import tiny
import tiny_families
from skill_train.estimate.memory import layer_bytes_per_token, training_memory
from skill_train.estimate.modules import saved_parameters
from skill_train.estimate.step import MicroStep
from skill_train.model.folder import read_model
from skill_train.model.lora_targets import TARGETS

pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama-bpe", "gemma"])
@pytest.mark.parametrize(("dtype", "pure"), [("float32", False), ("bfloat16", False), ("bfloat16", True)])
def test_layers_that_train_keep_what_the_formula_says(kind: str, dtype: str, pure: bool) -> None:
    """Beside autocast's copies of the layers' matrices, which are a part of their own."""
    facts = read_model(tiny.cached(kind))
    step = MicroStep("cpu", dtype, ROWS, LENGTH, checkpointing=False, full=True, pure_bf16=pure)
    assert facts.layers is not None and facts.hidden_size is not None and facts.parameters is not None
    ends = step.tokens * (facts.hidden_size * (6 if pure else 8) + 8)  # the last norm, in and out; the token ids
    expected = facts.layers * step.tokens * layer_bytes_per_token(facts, step) + ends
    assert _kept_bytes(tiny.cached(kind), step) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("name", ["mlp", "experts"])
@pytest.mark.parametrize("family", ["mixtral", "qwen2moe", "qwen3moe"])
def test_a_saved_module_holds_all_of_its_experts(family: str, name: str) -> None:
    """And not those alone that a token passes."""
    import peft
    from transformers import AutoModelForCausalLM

    folder = tiny_families.folder(family)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=[name], task_type="CAUSAL_LM")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
    made = sum(weight.numel() for key, weight in model.named_parameters() if "modules_to_save" in key)
    assert saved_parameters(read_model(folder), name) == pytest.approx(made, rel=0.02)


@pytest.mark.parametrize("family", ["falconmamba", "mamba"])
def test_layers_of_mamba_keep_no_more_than_the_estimate(family: str) -> None:
    """Plain torch functions scan their states, and keep those of every token."""
    facts = read_model(tiny_families.folder(family))
    step = MicroStep("cpu", "float32", 1, LENGTH, checkpointing=False, lora_r=8, target_modules=("in_proj",))
    parts = {part.name: part for part in training_memory(facts, step) or []}
    kept = _kept_bytes(tiny_families.folder(family), step, "eager")
    assert parts["activations"].low < kept < parts["activations"].high


def _kept_bytes(folder: Any, step: MicroStep, attention: str = "sdpa") -> int:
    """Bytes of all tensors that the layers keep, each storage once, without the weights and their copies."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if step.pure_bf16 else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention).train()
    inner = model.base_model if step.full else _with_adapter(model, step)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    shapes = {tuple(weight.shape) for weight in model.parameters() if weight.ndim == 2}
    kept: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        a_copy = step.mixed and {tuple(tensor.shape), tuple(tensor.shape)[::-1]} & shapes
        if storage.data_ptr() not in weights and not a_copy:
            kept[storage.data_ptr()] = tensor  # held, so that no address is given twice
        return tensor

    ids = torch.randint(10, 200, (step.rows, step.length), generator=torch.manual_seed(0))
    with (
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=step.mixed),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        inner(input_ids=ids, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def _with_adapter(base: Any, step: MicroStep) -> Any:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=step.lora_r, lora_dropout=step.lora_dropout, target_modules=list(step.target_modules))
    model = get_peft_model(base, lora).train()
    model.enable_input_require_grads()  # as in any layer but the first
    return model.get_base_model().base_model
