"""The plan: its fields, its checks, the device that it names, and the smaller layout for a second try after memory ran
out."""

from __future__ import annotations

import json
import math
import os
import re
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NotRequired, TypedDict, get_args, get_origin, get_type_hints

from skill_train.program.events import EXIT_DOES_NOT_FIT, EXIT_NOT_INSTALLED, ErrorWords, Refused, event
from skill_train.program.model_files import ATTENTION, block_hub_kernels, foreign_json

PLAN_SCHEMA = "skill-train/plan/1"


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
    """Where and in which pieces the recipe is computed."""

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
    """What the user decided that no training depends on."""

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
# Model types with a table of positions, which end where the table ends. Others compute a position of any number.
POSITIONS_IN_TABLE = ("gpt2", "gpt_neo", "gpt_bigcode", "gptj", "codegen", "opt", "biogpt", "openai-gpt")
STRATEGIES = ("single", "ddp", "fsdp")
TUNED = {"lora": "adapter", "full": "merged"}  # the folder of what was trained
HELD_OUT_ROWS = 200  # rows held out at most
MEASURING, TRAINS = "measuring the model before training", "training"  # the stages with a batch in memory
SMALLER = "smaller_layout"  # the rule in the reason of a smaller layout, after the first one ran out of memory


def load_plan(path: Path) -> Plan:
    """The plan, with every field present and of its type. It needs only the standard library, so a bad plan fails at
    once."""
    plan: Plan = plan_document(path)
    tuning = plan["recipe"]["finetuning_type"]
    if tuning not in TUNED:
        raise bad_plan("recipe.finetuning_type is unknown", expected=" or ".join(TUNED), got=tuning)
    check_batch(plan["recipe"], plan["placement"])
    attention = plan["placement"]["attn_implementation"]
    if attention not in ATTENTION:  # the name of a repository would be fetched from the Hub and run
        expected = " or ".join(ATTENTION)
        raise bad_plan("placement.attn_implementation is unknown", expected=expected, got=attention)
    return plan


def require_hub_inputs(plan: Plan) -> None:
    """Refuses a folder or file here that has the name of what was planned on the Hub: whoever loads that name takes
    what lies here, and would train on other rows or another model."""
    prints = plan.get("fingerprints", {})
    places: list[tuple[Literal["model", "data"], str]] = [("model", "the model"), ("data", "the dataset")]
    for key, noun in places:
        name = plan["recipe"][key]
        if key in prints and prints[key] is None and Path(name).exists():
            raise Refused(
                f"the plan means {noun} {name} on the Hub, and {Path(name).resolve()} has the same name",
                code="input_changed",
                expected=f"no folder or file {name} where the training starts",
                got=str(Path(name).resolve()),
                hint="start the training from another folder; to train on what lies here, plan again",
            )


def plan_document(path: Path) -> Any:
    """The JSON object of a plan. Its recipe and placement have all their fields."""
    document = read_document(path)
    if not isinstance(document, dict) or document.get("schema") != PLAN_SCHEMA:
        got = str(document.get("schema")) if isinstance(document, dict) else type(document).__name__
        raise bad_plan(f"{path} is not a plan", expected=PLAN_SCHEMA, got=got)
    check_fields(document.get("recipe"), Recipe, "recipe")
    check_fields(document.get("placement"), Placement, "placement")
    return document


def read_document(path: Path) -> Any:
    try:
        return foreign_json(path)
    except FileNotFoundError:
        raise Refused(
            f"{path} does not exist",
            code="missing_file",
            expected="the plan of a run",
            got=str(path),
            hint="check the path; skill-train local RECIPE makes a plan and trains it",
        ) from None
    except Refused as refusal:
        raise bad_plan(refusal.error["message"], expected="a plan in JSON", got=refusal.error["got"]) from None
    except OSError as error:  # a folder, a file of another user
        raise bad_plan(f"{path} cannot be read: {error.strerror}", expected="a plan in JSON") from None


def bad_plan(message: str, *, expected: str = "", got: str = "") -> Refused:
    hint = "make the plan again: skill-train local RECIPE, which trains it too"
    return Refused(message, code="bad_plan", expected=expected, got=got, hint=hint)


def json_types(fields: type) -> dict[str, tuple[type, ...]]:
    """The types of each field for `isinstance`, such as `list` for `list[str]`."""
    hints = get_type_hints(fields, globals()).items()
    parts = {name: get_args(hint) if isinstance(hint, UnionType) else (hint,) for name, hint in hints}
    return {name: tuple(get_origin(part) or part for part in types) for name, types in parts.items()}


def may_be_missing(fields: type) -> set[str]:
    """The fields that are newer than the first plans that were written."""
    hints = get_type_hints(fields, globals(), include_extras=True).items()
    return {name for name, hint in hints if get_origin(hint) is NotRequired}


def check_fields(values: Any, described: Any, name: str) -> None:
    """Refuses what is not an object with the fields of the TypedDict `described`."""
    if not isinstance(values, dict):
        raise bad_plan(f"the plan has no {name}", expected=f"an object called {name}")
    fields, newer = json_types(described), may_be_missing(described)
    for key in sorted(set(values) ^ set(fields)):
        if key in values or key not in newer:
            raise bad_plan(f"{name}.{key} is {'unknown' if key in values else 'missing'}")
    for key, value in values.items():
        types = fields[key]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            expected = " or ".join(t.__name__ for t in types)
            raise bad_plan(f"{name}.{key} has the wrong type", expected=expected, got=repr(value))


def check_batch(recipe: Recipe, placement: Placement) -> None:
    processes = placement["num_processes"]
    parts = (placement["per_device_train_batch_size"], placement["gradient_accumulation_steps"], processes)
    if math.prod(parts) != recipe["effective_batch_size"]:
        raise bad_plan(
            "the batch split does not make the effective batch size",
            expected=f"effective_batch_size {recipe['effective_batch_size']}",
            got=" x ".join(map(str, parts)) + " (per device x accumulation x processes)",
        )
    strategy = placement["strategy"]
    if strategy not in STRATEGIES or (strategy == "single") != (processes == 1):
        raise bad_plan(
            "placement.strategy does not go with the number of processes",
            expected="single with one process, ddp or fsdp with several",
            got=f"{strategy} with {processes}",
        )


def check_processes(placement: Placement) -> None:
    """Refuses another number of processes than the plan's. A missing process would leave out its part of every batch,
    and the loss would look healthy. `accelerate launch --cpu --num_processes 2` starts one (accelerate 1.15)."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != placement["num_processes"]:
        raise wrong_launch(f"{placement['num_processes']} processes", f"{started}")


def wrong_launch(expected: str, got: str) -> Refused:
    return Refused(
        "the program was not started with the arguments of its plan",
        code="bad_plan",
        expected=expected,
        got=got,
        hint="start it with skill-train local, or with accelerate launch and the arguments under `launch` in the plan",
    )


def held_out_count(rows: int, fraction: float) -> int:
    """How many rows never train. Fewer than 20 rows are all trained: one row less would cost more than its loss
    shows."""
    return min(HELD_OUT_ROWS, int(rows * fraction)) if rows >= 20 else 0


def smaller_plan(plan: Plan, error: ErrorWords, stage: str | None) -> Plan | None:
    """The plan for another try after `error`, with its reason; None if a smaller layout would not help.

    Args:
        error: of a training that ran out of memory.
        stage: the last one that it reported. Before the model is loaded, and after training, no batch needs memory.
    """
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
    return (
        f"{rows} x {times} rows {'with' if placement['gradient_checkpointing'] else 'without'} gradient_checkpointing"
    )


def memory_ended(error: ErrorWords, kills: int | None) -> bool:
    """Whether a training certainly ran out of memory. A killed training gave no reason, and anybody may have killed it.

    Args:
        kills: `kills_for_memory` from before the training.
    """
    if error["code"] != "out_of_memory" or "SIGKILL" not in error["message"]:
        return error["code"] == "out_of_memory"
    now = kills_for_memory()
    return kills is not None and now is not None and now > kills


def kills_for_memory() -> int | None:
    """The number of processes that this computer has killed for memory since it started; None if the system hides
    it."""
    try:
        match = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None


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


def prepare_environment(placement: Placement) -> None:
    """Sets variables; call it before any library is imported. No telemetry, and MPS uses the CPU for missing
    operators."""
    for name in ("HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK"):
        os.environ[name] = "1"
    block_hub_kernels()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    # Threads that spin while they wait slow each other down on a busy machine: by a factor of 10, measured.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Rows have many lengths. Without this, 58 GB are reserved on an H100 where 33 GB are in use.
    if placement["device"] == "cuda" and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if placement["device"] == "mps":
        os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")
        event("note", text="PYTORCH_ENABLE_MPS_FALLBACK=1: operators that MPS lacks run on the CPU, slower")


def prepare_device(torch: Any, placement: Placement) -> None:
    require_device(torch, placement)
    if placement["device"] == "cuda":  # compiled anew for every length: a quarter more tokens a second without it
        torch.backends.cuda.enable_cudnn_sdp(False)
        if not flash_attention_runs(placement["dtype"], torch.cuda.get_device_capability()):
            repeat_shared_heads()
    elif placement["device"] == "cpu" and placement["threads"]:
        torch.set_num_threads(placement["threads"])


def flash_attention_runs(dtype: str, capability: tuple[int, int]) -> bool:
    """Whether torch's flash kernel computes this type on a GPU of this compute capability."""
    return dtype in ("bfloat16", "float16") and capability >= (8, 0)


def repeat_shared_heads() -> None:
    """Lets transformers repeat the keys and values that several query heads share, before attention.

    On CUDA only the flash kernel reads shared heads. Where it does not run, transformers 5.23 has torch fall back to
    the kernel that keeps every attention score for the backward pass (huggingface/transformers#45776): 0.35 GB more
    for 512 tokens of Qwen2.5-0.5B in float32 (bench/estimates), 16 times that for 2,048. The memory-efficient kernel
    keeps none, and takes repeated heads.
    """
    from transformers.integrations import sdpa_attention

    if hasattr(sdpa_attention, "use_gqa_in_sdpa"):
        sdpa_attention.use_gqa_in_sdpa = lambda *_, **__: False


def require_device(torch: Any, placement: Placement) -> None:
    device = placement["device"]
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available.get(device, False):
        raise Refused(
            f"torch {torch.__version__} cannot use {device} here",
            code="device_unavailable",
            exit_code=EXIT_NOT_INSTALLED,
            expected=f"a build of torch for {device}, and a driver",
            got=", ".join(name for name, there in available.items() if there),
            hint="use --device cpu, or install the torch build for this machine",
        )
    processes_here = int(os.environ.get("LOCAL_WORLD_SIZE", placement["num_processes"]))  # the rest are elsewhere
    if device == "cuda" and torch.cuda.device_count() < processes_here:
        raise Refused(
            "the plan has more processes than this machine has GPUs",
            code="device_unavailable",
            exit_code=EXIT_DOES_NOT_FIT,
            expected=f"{processes_here} GPUs, one a process",
            got=f"{torch.cuda.device_count()} (CUDA_VISIBLE_DEVICES {os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')})",
            hint="plan again on this machine: skill-train local RECIPE",
        )
