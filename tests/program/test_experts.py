"""Mixtures of experts train with the balancing loss of their own forward pass, and models without a fused attention
kernel train with eager attention. transformers' own loss says what is right."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import tiny_families
import training
from command_child import Commands
from skill_train.program.chat.labels import IGNORED
from skill_train.program.model import score_trained_tokens_only

pytestmark = pytest.mark.slow

EXPERTS = ("mixtral", "qwen2moe", "qwen3moe", "olmoe", "granitemoe", "granitemoeshared", "gptoss")
WITHOUT_SDPA = ("gemma2", "gptoss")


@pytest.mark.parametrize("fused", [False, True], ids=["processor", "gpu"])
@pytest.mark.parametrize("name", EXPERTS)
def test_loss_and_gradients_are_those_of_the_models_own_forward_pass(name: str, fused: bool) -> None:
    """TRL's sum: what is trained, over its number, and the balancing loss times the model's own coefficient."""
    import torch

    own, ours = _model(name), _model(name)
    _fused_head_of_trl(ours)
    score_trained_tokens_only(ours, fused=fused)
    coefficient = ours.config.router_aux_loss_coef
    assert coefficient > 0
    ids = torch.randint(5, 300, (2, 24), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :9] = IGNORED
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "output_router_logits": True}
    expected = own(**batch, labels=labels).loss
    outputs = ours(**batch, labels=labels, fused_lm_head=True)
    loss = -outputs.log_probs.sum() / outputs.label_mask.sum() + coefficient * outputs.aux_loss
    assert float(outputs.aux_loss.detach()) > 0
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    expected.backward()
    loss.backward()
    theirs = dict(own.named_parameters())
    for parameter, value in ours.named_parameters():
        if value.grad is not None and "lm_head" not in parameter:
            torch.testing.assert_close(value.grad, theirs[parameter].grad, rtol=1e-3, atol=1e-5, msg=parameter)


@pytest.mark.parametrize("name", tiny_families.by_default([*EXPERTS, "llama4", "deepseek2"], ("mixtral", "deepseek2")))
def test_a_mixture_of_experts_trains(commands: Commands, tmp_path: Path, name: str) -> None:
    """With the coefficient of Mixtral 8x7B, whose balancing loss is no part of the cross-entropy of a row."""
    base = Path(shutil.copytree(tiny_families.folder(name), tmp_path / name))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"router_aux_loss_coef": 0.02}))
    record = _local(commands, tmp_path, base)
    assert record["figures"]["last_loss"] > 0
    checks = {check["name"]: check for check in record["checks"]}
    assert checks["batches_are_valid"]["verdict"] == "pass"
    state = json.loads(next((tmp_path / "run").glob("checkpoints/checkpoint-2/trainer_state.json")).read_text())
    more = 0.02 * state["log_history"][-1]["aux_loss"]  # some models have none, such as DeepSeek's
    told = f"; the loss of the last step holds {more:.4f} more, for the balance of the experts"
    assert (told in checks["loss_falls"]["detail"]) == (more > 0)
    assert ("balance" in checks["loss_falls"]["detail"]) == (more > 0) == (name not in ("deepseek2", "llama4"))


@pytest.mark.parametrize("name", tiny_families.by_default(WITHOUT_SDPA, ("gptoss",)))
def test_a_model_without_a_fused_kernel_trains_with_eager_attention(
    commands: Commands, tmp_path: Path, name: str
) -> None:
    _local(commands, tmp_path, tiny_families.folder(name))
    built = json.loads((tmp_path / "run" / "environment.json").read_text())["model"]
    assert built["attn_implementation"] == "eager"


def _local(commands: Commands, folder: Path, base: Path) -> dict[str, Any]:
    rows = [{"prompt": f"Where is parcel {n}?", "completion": f" In depot {n}."} for n in range(12)]
    data = training.write_data(folder, rows)
    values = f"model: {base}\ndata: {data}\nmax_steps: 2\neffective_batch_size: 4\ntarget_modules: [{_target(base)}]\n"
    (folder / "recipe.yaml").write_text(values + "max_length: 64\n")
    words = ("local", "recipe.yaml", "--dtype", "float32", "--run-dir", "run", "--format", "json")
    done = commands.run(folder, dict(os.environ), *words)
    assert done.code in (0, 5), done.stdout  # two steps of random weights need not pass the smoke checks
    assert "data" in done.answer or done.answer["error"]["code"] == "smoke_failed", done.stdout
    return dict(json.loads((folder / "run" / "train.json").read_text()))


def _target(base: Path) -> str:
    return "q_proj" if "deepseek" not in base.name else "kv_b_proj"


def _model(name: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_families.folder(name), attn_implementation="eager")


def _fused_head_of_trl(model: Any) -> None:
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
