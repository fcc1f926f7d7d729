"""The plan: its fields, and the smaller layout for a second try after memory ran out."""

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import NotRequired, TypedDict

from skill_train.program.events import ErrorWords, linux_figure


class Recipe(TypedDict):
    """What is trained. `skill_train.recipe.fields` holds the meaning of each field, and the defaults."""

    model: str
    revision: str | None
    data: str
    data_revision: str | None
    data_config: str | None
    split: str
    format: str
    columns: dict[str, str]
    loss_on: str
    method: str
    finetuning_type: str
    pure_bf16: bool
    max_length: int
    max_steps: int
    effective_batch_size: int
    learning_rate: float | int
    lr_scheduler_type: str
    warmup_steps: int
    weight_decay: float | int
    adam_beta1: float | int
    adam_beta2: float | int
    adam_epsilon: float | int
    max_grad_norm: float | int
    optim: str
    lora_r: int
    lora_alpha: float | int
    lora_dropout: float | int
    target_modules: list[str]
    modules_to_save: list[str] | None
    use_rslora: bool
    use_dora: bool
    load_in_4bit: bool
    held_out_fraction: float | int
    skip_untrained_rows: bool
    seed: int
    images: NotRequired[bool]
    lora_parts: NotRequired[list[str] | None]
    preprocess: NotRequired[str]
    min_pixels: NotRequired[int | None]
    max_pixels: NotRequired[int | None]
    data_file: NotRequired[str | None]


class Placement(TypedDict):
    """The device, the precision, the processes and the batches with which the recipe is computed."""

    backend: str
    device: str
    dtype: str
    attn_implementation: str
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    num_processes: int
    strategy: str
    offload: bool
    gradient_checkpointing: bool
    threads: int | None
    save_steps: int
    save_total_limit: int
    report_to: str


class Policy(TypedDict):
    """Choices of the user that do not affect the training."""

    sensitive: bool
    hub_model_id: str | None
    score: str | None
    score_pattern: str | None
    report_to: str


class Reason(TypedDict):
    """Why a value is what it is, and where the rule comes from."""

    rule: str
    value: str
    because: str
    source: str


class Launch(TypedDict):
    """Arguments of `accelerate launch` and variables of the environment."""

    arguments: list[str]
    environment: dict[str, str]
    reasons: list[Reason]


class Plan(TypedDict):
    """`plan.json`, as far as the program reads it. `recipe` and `placement` must be there, with all their fields."""

    schema: str
    recipe: Recipe
    placement: Placement
    recipe_hash: NotRequired[str]
    fingerprints: NotRequired[dict[str, str | None]]
    policy: NotRequired[Policy]
    launch: NotRequired[Launch]
    reasons: NotRequired[list[Reason]]
    asked: NotRequired[dict[str, object]]


# Elements of logits. The whole head is read for each chunk of logits, so chunks are large: 105 tokens of Qwen2.5's
# 151,936 words take half the time of 4 chunks of 26 in bf16, two thirds in fp32.
LOGITS_AT_ONCE = 16_000_000
# Model types with a table of position embeddings, which ends. Other types compute the embedding of any position.
POSITIONS_IN_TABLE = ("gpt2", "gpt_neo", "gpt_bigcode", "gptj", "codegen", "opt", "biogpt", "openai-gpt")
TUNED = {"lora": "adapter", "full": "merged"}  # the folder of what was trained
HELD_OUT_ROWS = 200  # rows held out at most
SAMPLE_ROWS = 32  # rows that train, kept in samples.jsonl
MEASURING, TRAINS = "measuring the model before training", "training"  # the stages with a batch in memory
# Variables by which torchrun, accelerate and MPI tell a process which one it is, and accelerate how to compute.
OF_LAUNCHERS = re.compile(
    r"(ACCELERATE|FSDP|DEEPSPEED|MEGATRON_LM|PARALLELISM_CONFIG|TORCHELASTIC|PET|PMI|OMPI_COMM_WORLD|MV2_COMM_WORLD)_.+"
    r"|((GROUP|ROLE|LOCAL)_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|FORK_LAUNCHED"
)
SMALLER = "smaller_layout"  # the rule in the reason of a smaller layout, after the first one ran out of memory


def without_launchers(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of the environment without those of another launch, such as ACCELERATE_MIXED_PRECISION=bf16 of the
    user's shell: transformers (5.23) would train by it, whatever its arguments say. The plan holds all that counts."""
    return {name: value for name, value in variables.items() if not OF_LAUNCHERS.fullmatch(name)}


def forget_launchers() -> None:
    for name in set(os.environ) - set(without_launchers(os.environ)):
        del os.environ[name]


def held_out_count(rows: int, fraction: float) -> int:
    """How many rows never train. Fewer than 20 all train: one row less would cost more than its loss shows."""
    return min(HELD_OUT_ROWS, int(rows * fraction)) if rows >= 20 else 0


def smaller_plan(plan: Plan, error: ErrorWords, stage: str | None) -> Plan | None:
    """The plan for another try of a training that ran out of memory, with its reason; None if a smaller layout would
    not help. `stage` is the last stage that it reported: only in `MEASURING` and `TRAINS` a batch needs memory."""
    placement = smaller_layout(plan["placement"]) if stage in (MEASURING, TRAINS) else None
    if placement is None:
        return None
    reason: Reason = {
        "rule": SMALLER,
        "value": layout_words(placement),
        "because": f"{error['message']}; it was {layout_words(plan['placement'])}",
        "source": "this run",
    }
    return plan | {"placement": placement, "reasons": [*(plan.get("reasons") or []), reason]}


def smaller_layout(placement: Placement) -> Placement | None:
    """The next layout in the planner's order that needs less memory: first recomputed activations, then fewer rows at a
    time. Each step trains the same rows. None after the smallest layout."""
    if not placement["gradient_checkpointing"]:
        return placement | {"gradient_checkpointing": True}
    rows = placement["per_device_train_batch_size"]
    whole = rows * placement["gradient_accumulation_steps"]
    fewer = next((count for count in range(rows // 2, 0, -1) if whole % count == 0), None)
    if fewer is None:
        return None
    return placement | {"per_device_train_batch_size": fewer, "gradient_accumulation_steps": whole // fewer}


def layout_words(placement: Placement) -> str:
    rows, times = placement["per_device_train_batch_size"], placement["gradient_accumulation_steps"]
    with_or_without = "with" if placement["gradient_checkpointing"] else "without"
    return f"{rows} x {times} rows {with_or_without} gradient_checkpointing"


def memory_ended(error: ErrorWords, kills: int | None) -> bool:
    """Whether a training certainly ran out of memory. A killed one gave no reason, and anybody may have killed it.
    `kills` is `kills_for_memory` from before the training."""
    if error["code"] != "out_of_memory" or "SIGKILL" not in error["message"]:
        return error["code"] == "out_of_memory"
    now = kills_for_memory()
    return kills is not None and now is not None and now > kills


def kills_for_memory() -> int | None:
    """How many processes this computer has killed for memory since it started; None if the system hides it."""
    return linux_figure("vmstat", "oom_kill")


def last_stage(output: str) -> str | None:
    """The last stage that a training reported in its output, in which libraries write too."""
    for line in reversed(output.splitlines()):
        if line.startswith('{"event": "stage"'):
            with suppress(ValueError, KeyError):
                return str(json.loads(line)["text"])
    return None


def second_try_message(plan: Plan) -> str:
    reason = plan["reasons"][-1]
    return f"{reason['because']}; once more, with {reason['value']}"
