"""Every key of the recipe: the estimated memory moves as it is known to, or the key stands here with its reason."""

from __future__ import annotations

from typing import Any

import pytest

from machines import recorded_machine
from models import recorded_model
from planning import rows_of
from skill_train.plan.make import make_plan
from skill_train.plan.placement import HERE
from skill_train.recipe import fields as recipe
from skill_train.recipe.fields import FIELDS
from skill_train.run.plan_record import Facts

# What is changed, from which recipe, and whether the memory of a step grows or shrinks.
MOVES: list[tuple[str, Any, dict[str, Any], str]] = [
    ("max_length", 2048, {}, "grows"),
    ("effective_batch_size", 1, {}, "shrinks"),
    ("finetuning_type", "full", {}, "grows"),
    ("pure_bf16", True, {"finetuning_type": "full"}, "shrinks"),
    ("lora_r", 64, {}, "grows"),
    ("lora_dropout", 0.0, {}, "shrinks"),
    ("target_modules", ["q_proj"], {}, "shrinks"),
    ("target_modules", ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"], {}, "grows"),
    ("modules_to_save", ["embed_tokens", "lm_head"], {}, "grows"),
    ("modules_to_save", ["v_proj"], {"target_modules": ["q_proj"]}, "grows"),
    ("use_dora", True, {}, "grows"),
    ("load_in_4bit", True, {}, "shrinks"),
    ("optim", "sgd", {}, "shrinks"),
    ("optim", "sgd", {"finetuning_type": "full"}, "shrinks"),
    ("optim", "adafactor", {"finetuning_type": "full"}, "shrinks"),
    ("optim", "adagrad", {"finetuning_type": "full", "optim": "adamw_torch"}, "shrinks"),
    ("optim", "rmsprop", {"modules_to_save": ["lm_head"]}, "shrinks"),
    ("optim", "adamw_8bit", {"load_in_4bit": True}, "shrinks"),
    ("optim", "paged_adamw_32bit", {"load_in_4bit": True}, "shrinks"),
    ("optim", "paged_adamw_8bit", {"load_in_4bit": True, "optim": "adamw_bnb_8bit"}, "shrinks"),
]
# Another value, and why a step needs as much memory with it.
STAYS: dict[str, tuple[Any, str]] = {
    "model": ("Qwen/another", "its shape counts, not its name: the facts are read from its config"),
    "data": ("other.jsonl", "the lengths of the rows count, which are facts of the dataset"),
    "revision": ("1" * 40, "a name of the same facts"),
    "images": (False, "the rows of this test are text"),
    "lora_parts": (["language"], "others are read where rows have pictures: tests/model/test_tower.py"),
    "preprocess": ("model", "the tokens of pictures count, as facts of the dataset"),
    "min_pixels": (100, "the tokens of pictures count, as facts of the dataset"),
    "max_pixels": (1000, "the tokens of pictures count, as facts of the dataset"),
    "data_revision": ("1" * 40, "a name of the same facts"),
    "data_config": ("other", "a name of the same facts"),
    "data_file": ("rows.jsonl", "a name of the same facts"),
    "split": ("test", "a name of the same facts"),
    "format": ("messages", "the rendered rows count, as facts of the dataset"),
    "columns": ({"messages": "talk"}, "the rendered rows count, as facts of the dataset"),
    "loss_on": ("all", "the share of trained tokens counts, a fact of the dataset"),
    "method": ("sft", "there is only one"),
    "max_steps": (500, "a step is like another"),
    "num_train_epochs": (2.0, "a step is like another"),
    "learning_rate": (1e-3, "a number that is multiplied with"),
    "lr_scheduler_type": ("cosine", "a number that is multiplied with"),
    "warmup_steps": (5, "a number that is multiplied with"),
    "warmup_ratio": (0.1, "a number that is multiplied with"),
    "weight_decay": (0.1, "weights are decayed in place"),
    "adam_beta1": (0.8, "a number that is multiplied with"),
    "adam_beta2": (0.99, "a number that is multiplied with"),
    "adam_epsilon": (1e-6, "a number that is added in place"),
    "max_grad_norm": (0.5, "gradients are clipped in place"),
    "lora_alpha": (8.0, "a number that is multiplied with"),
    "use_rslora": (True, "a number that is multiplied with"),
    "held_out_fraction": (0.2, "held-out rows are scored without gradients, which takes less than a step"),
    "skip_untrained_rows": (True, "which rows train, not how long they are"),
    "seed": (7, "the order of the rows: the longest row counts, whenever it comes"),
    "sensitive": (True, "where results may go"),
    "hub_model_id": ("me/it", "where results go"),
    "report_to": ("trackio", "metrics are sent from the host's memory"),
    "score": ("json", "of evaluate, after the training"),
    "score_pattern": ("a(.*)", "of evaluate, after the training"),
}


def test_every_key_is_here() -> None:
    named = {key for key, *_ in MOVES} | set(STAYS)
    assert named == set(FIELDS), "a field that changes the memory belongs into MOVES, another one into STAYS"
    assert not {key for key, *_ in MOVES} & set(STAYS)
    assert all(reason for _, reason in STAYS.values())


@pytest.mark.parametrize(("key", "value", "beside", "direction"), MOVES)
def test_the_memory_moves_as_it_is_known_to(key: str, value: Any, beside: dict[str, Any], direction: str) -> None:
    before, after = _memory(**beside), _memory(**beside | {key: value})
    assert (after > before) == (direction == "grows") and after != before, (before, after)


@pytest.mark.parametrize("key", STAYS)
def test_the_memory_stays_where_nothing_of_it_changes(key: str) -> None:
    value, _ = STAYS[key]
    beside = {"score": "regex"} if key == "score_pattern" else {}
    assert _memory(**beside, **{key: value}) == _memory()


def _memory(**said: Any) -> float:
    """The middle, in bytes, on an A100 with 80 GB and plenty of room."""
    asked = recipe.from_dict({"model": "a", "data": "rows.jsonl", "max_length": 1024, "max_steps": 50} | said)
    plan = make_plan(
        asked,
        Facts(
            recorded_model("qwen2.5-0.5b"),
            rows_of(1000, asked.max_length, asked.max_length),
            recorded_machine("a100_80gb"),
        ),
        choices=HERE,
    )
    memory = plan.estimates.memory_bytes
    assert memory.low is not None and memory.high is not None
    return (memory.low + memory.high) / 2
