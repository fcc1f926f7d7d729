"""The plan: recipe + placement + reasons, as data. Pure: the same facts always give the same plan."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from skill_train.errors import DecisionNeeded, UsageError
from skill_train.estimate import training_bytes
from skill_train.facts import DatasetFacts, MachineFacts, ModelFacts, PrecisionProbe
from skill_train.launch import launch
from skill_train.recipe import NOT_HASHED, Recipe, recipe_hash
from skill_train.resources import train_module

PLAN_SCHEMA = "skill-train/plan/1"
HEADROOM = 0.8  # of the memory that is free: the rest is the framework's, fragmentation's and the user's
PROBE_FROM_PARAMETERS = 100_000_000  # below, a pass is overhead and bf16 saves nothing worth a probe
PROBE_FASTER = 1.1
PROBE_LOSS_TOLERANCE = 0.005

# LoRA targets by model_type: the attention projections under the names that each architecture gives them (transformers'
# modeling files; PEFT's own table is in peft/utils/constants.py).
_QKVO = ["q_proj", "k_proj", "v_proj", "o_proj"]
TARGETS: dict[str, list[str]] = {
    **dict.fromkeys(
        (
            "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3",
            "gemma3_text", "smollm3", "olmo", "olmo2", "granite", "cohere", "cohere2", "stablelm", "starcoder2",
        ),
        _QKVO,
    ),
    "phi": ["q_proj", "k_proj", "v_proj", "dense"],
    "phi3": ["qkv_proj", "o_proj"],
    "opt": ["q_proj", "k_proj", "v_proj", "out_proj"],
    "gptj": ["q_proj", "k_proj", "v_proj", "out_proj"],
    "gpt2": ["c_attn", "c_proj"],
    "gpt_neox": ["query_key_value", "dense"],
    "bloom": ["query_key_value", "dense"],
    "falcon": ["query_key_value", "dense"],
}  # fmt: skip


@dataclass(frozen=True)
class Choices:
    """What the user says about the placement. None leaves it to the plan; `force` takes an unsafe precision."""

    device: str | None = None
    dtype: str | None = None
    force: bool = False


def make_plan(
    recipe: Recipe,
    *,
    model: ModelFacts,
    dataset: DatasetFacts,
    machine: MachineFacts,
    choices: Choices = Choices(),
    probe: PrecisionProbe | None = None,
) -> dict[str, Any]:
    """A local plan with every field resolved.

    Raises:
        UsageError: the recipe asks for something that this model cannot do.
        DecisionNeeded: a choice that is not safe was asked for.
    """
    reasons: list[dict[str, str]] = []
    resolved = _resolve(recipe, model, dataset, reasons)
    placement = _place(resolved, model, machine, choices, probe, reasons)
    started = launch(placement, machine, four_bit=resolved["load_in_4bit"])
    fingerprints = {"model": model.fingerprint, "data": dataset.fingerprint}
    return {
        "schema": PLAN_SCHEMA,
        "where": "local",
        "recipe": resolved,
        "recipe_hash": recipe_hash(resolved, fingerprints),
        "fingerprints": fingerprints,
        "policy": {"sensitive": recipe.sensitive, "hub_model_id": recipe.hub_model_id},
        "placement": placement,
        "launch": started,
        "facts": {"model": dataclasses.asdict(model), "machine": dataclasses.asdict(machine)},
        "reasons": reasons,
    }


def wants_probe(machine: MachineFacts, model: ModelFacts, choices: Choices) -> bool:
    """Whether timing bf16 on this processor could change the plan."""
    device = choices.device or machine.device
    if device == "mps":
        return choices.dtype == "bfloat16" and not choices.force
    on_cpu = device == "cpu" and machine.bf16_matrix
    return on_cpu and choices.dtype is None and (model.parameters or 0) >= PROBE_FROM_PARAMETERS


def _resolve(recipe: Recipe, model: ModelFacts, dataset: DatasetFacts, reasons: list[dict[str, str]]) -> dict[str, Any]:
    """The recipe as the program reads it: no None where a choice is left."""
    values = {k: v for k, v in dataclasses.asdict(recipe).items() if k not in NOT_HASHED}
    values["format"], values["columns"] = dataset.format, dict(dataset.columns)
    _because(reasons, "format", f"{dataset.format} {dataset.columns}", dataset.reason, dataset.source)
    if dataset.format not in ("text", "prompt_completion") and not model.has_chat_template:
        raise UsageError(
            f"{recipe.model} has no chat template, so the conversations in {recipe.data} cannot be rendered",
            code="no_chat_template",
            expected="a model with a chat template (most Instruct models), or rows of plain text",
            got=f"format {dataset.format}",
            hint="use the model's Instruct version, or data with prompt and completion, or with text",
        )
    values["loss_on"] = recipe.loss_on or _loss_on(dataset.format, reasons)
    values["target_modules"] = recipe.target_modules or _targets(model, reasons)
    rows = dataset.rows - _held_out(dataset.rows, recipe)
    if recipe.max_steps is None:
        values["max_steps"] = max(1, math.ceil(rows * recipe.num_train_epochs / recipe.effective_batch_size))
        why = f"{rows} training rows x {recipe.num_train_epochs:g} epochs / {recipe.effective_batch_size} rows a step"
        _because(reasons, "max_steps", values["max_steps"], why, "recipe")
    if recipe.warmup_steps is None:
        values["warmup_steps"] = math.ceil(values["max_steps"] * recipe.warmup_ratio) if values["max_steps"] > 10 else 0
    if model.quantization and not recipe.load_in_4bit:
        raise UsageError(
            f"{recipe.model} is a quantized checkpoint ({model.quantization}); a LoRA on it has no exact merge",
            code="quantized_base",
            expected="the full-precision model it was made from",
            hint="use the original model; load_in_4bit: true quantizes it while training (QLoRA)",
        )
    return {key: values[key] for key in train_module().RECIPE_FIELDS}


def _loss_on(data_format: str, reasons: list[dict[str, str]]) -> str:
    chosen = {"text": "all", "prompt_completion": "completion"}.get(data_format, "assistant")
    why = {
        "all": "plain text has no answer to single out",
        "completion": "the prompt is given, the completion is learned",
        "assistant": "only the assistant's words are the model's to learn",
    }[chosen]
    _because(reasons, "loss_on", chosen, why, f"format {data_format}")
    return chosen


def _targets(model: ModelFacts, reasons: list[dict[str, str]]) -> list[str]:
    targets = TARGETS.get(model.model_type)
    if targets is None:
        raise UsageError(
            f"no LoRA targets are known for model type {model.model_type!r}",
            code="unknown_model_type",
            expected=f"one of {', '.join(sorted(TARGETS))}",
            got=model.model_type,
            hint="name the modules in the recipe, such as target_modules: [q_proj, v_proj]",
        )
    _because(reasons, "target_modules", targets, f"the attention projections of {model.model_type}", "config.json")
    return list(targets)


def _held_out(rows: int, recipe: Recipe) -> int:
    return len(train_module().held_out_rows(rows, recipe.held_out_fraction, recipe.seed))


def _place(
    recipe: dict[str, Any],
    model: ModelFacts,
    machine: MachineFacts,
    choices: Choices,
    probe: PrecisionProbe | None,
    reasons: list[dict[str, str]],
) -> dict[str, Any]:
    device = choices.device or machine.device
    _because(reasons, "device", device, "asked for" if choices.device else f"the best of {machine.chip}", "machine")
    dtype, why = precision(device, machine, choices, probe)
    _because(reasons, "dtype", dtype, why, "references/local_training.md")
    if recipe["load_in_4bit"] and device != "cuda":
        raise DecisionNeeded(
            f"load_in_4bit needs CUDA; this machine would train on {device}",
            code="needs_cuda",
            expected="an NVIDIA GPU for 4-bit QLoRA (bitsandbytes)",
            got=device,
            hint="load_in_4bit: false with a smaller model here, or a cloud GPU",
        )
    batch = _batch(recipe["effective_batch_size"], device, machine, model, reasons)
    return {
        "backend": "local",
        "device": device,
        "dtype": dtype,
        "attn_implementation": "sdpa",
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": recipe["effective_batch_size"] // batch,
        "num_processes": 1,
        "strategy": "single",
        "offload": False,
        "gradient_checkpointing": _checkpointing(recipe, model, machine, dtype, batch, reasons),
        "threads": machine.cores if device == "cpu" else None,
        "save_steps": max(1, min(200, math.ceil(recipe["max_steps"] / 4))),
        "save_total_limit": 2,
        "report_to": "none",
    }


def precision(device: str, machine: MachineFacts, choices: Choices, probe: PrecisionProbe | None) -> tuple[str, str]:
    """`(dtype, reason)` for training on a device.

    Raises:
        DecisionNeeded: float16 on MPS or on a CPU, which ends in NaN; bfloat16 on MPS without a good probe.
    """
    asked = choices.dtype
    if asked == "bfloat16" and device == "mps" and not choices.force:
        return asked, _mps_bf16(probe)
    if asked == "float16" and device != "cuda" and not choices.force:
        raise DecisionNeeded(
            f"float16 training on {device} often ends in NaN losses: there is no reliable gradient scaling",
            code="unsafe_precision",
            expected="float32 (safe), or bfloat16 after a probe",
            got="float16",
            hint="skill-train local --dtype float32, or --force to take the risk",
        )
    if asked is not None:
        return asked, "asked for" + (", against the advice" if choices.force else "")
    if device == "cuda":
        capability = machine.compute_capability
        if capability is None:
            return "float32", "the GPU's compute capability is unknown, and float32 works on all"
        if capability >= 8.0:
            return "bfloat16", f"compute capability {capability} has bf16: the range of float32, no gradient scaling"
        return "float16", f"compute capability {capability} is older than Ampere: float16 with gradient scaling"
    if device == "mps":
        return "float32", "the safe default on MPS; --dtype bfloat16 on M2 or newer after a short trial"
    return _cpu_precision(machine, probe)


def _mps_bf16(probe: PrecisionProbe | None) -> str:
    drift = _drift(probe) if probe else math.nan
    if not drift <= PROBE_LOSS_TOLERANCE:
        raise DecisionNeeded(
            "bfloat16 on MPS is taken only after a probe on this machine gives the loss of float32",
            code="unsafe_precision",
            expected=f"a loss at most {PROBE_LOSS_TOLERANCE:.1%} off",
            got=f"{drift:.2%} off" if probe else "the probe did not run",
            hint="skill-train local --dtype float32, or --force to take the risk",
        )
    return f"asked for, and the probe on this machine is {drift:.2%} off in the loss"


def _drift(probe: PrecisionProbe) -> float:
    return abs(probe.loss["bfloat16"] / probe.loss["float32"] - 1)


def _cpu_precision(machine: MachineFacts, probe: PrecisionProbe | None) -> tuple[str, str]:
    if not machine.bf16_matrix:
        return "float32", "this processor has no bf16 matrix instructions"
    if probe is None:
        return "float32", "no probe was made: below 100M parameters bf16 saves little on a CPU"
    ratio = probe.seconds["float32"] / probe.seconds["bfloat16"]
    drift = _drift(probe)
    figures = f"probe: bf16 {ratio:.2f} times as fast, loss {drift:.2%} off"
    if ratio >= PROBE_FASTER and drift <= PROBE_LOSS_TOLERANCE:
        return "bfloat16", figures
    return "float32", figures + f" (needs {PROBE_FASTER} times and at most {PROBE_LOSS_TOLERANCE:.1%})"


# Rows at a time by device memory, up to a limit in 1e9 bytes: the tables of the user's guide. A GPU has its memory for
# itself; a Mac shares it with everything else.
_ROWS_AT_ONCE: dict[str, tuple[tuple[float, int], ...]] = {
    "mps": ((18, 1), (38, 2), (60, 4), (150, 8), (math.inf, 16)),
    "cuda": ((14, 1), (20, 2), (38, 4), (75, 8), (math.inf, 16)),
}


def _batch(effective: int, device: str, machine: MachineFacts, model: ModelFacts, reasons: list[dict[str, str]]) -> int:
    """Rows at a time, a divisor of the effective batch: 1x16 at 8-16 GB to 16x1 at 80 GB. CPUs: small models are bound
    by overhead and take 8; large ones take 1, where padding would be waste."""
    gigabytes = (machine.memory_bytes or 0) / 1e9
    if device == "cpu":
        small = (model.parameters or PROBE_FROM_PARAMETERS) < PROBE_FROM_PARAMETERS
        wanted, why = (8, "a small model on a CPU is bound by overhead") if small else (1, "padding is waste on a CPU")
    else:
        wanted = next(rows for limit, rows in _ROWS_AT_ONCE[device] if gigabytes < limit)
        why = f"{gigabytes:.0f} GB of {device} memory"
    batch = max(n for n in range(1, min(wanted, effective) + 1) if effective % n == 0)
    _because(
        reasons, "batch", f"{batch} x {effective // batch}", f"{why}; the effective batch stays {effective}", "plan"
    )
    return batch


def _checkpointing(
    recipe: dict[str, Any],
    model: ModelFacts,
    machine: MachineFacts,
    dtype: str,
    batch: int,
    reasons: list[dict[str, str]],
) -> bool:
    """Recomputing activations costs about a third more time, so only when memory needs it."""
    shape = {"dtype": dtype, "max_length": recipe["max_length"], "batch": batch, "four_bit": recipe["load_in_4bit"]}
    need = training_bytes(model, checkpointing=False, **shape)
    have = machine.available_bytes or machine.memory_bytes
    if need is None or have is None:
        _because(reasons, "gradient_checkpointing", True, "memory need or memory unknown: the careful choice", "plan")
        return True
    needed = need > HEADROOM * have
    why = f"{need / 1e9:.2f} GB without it, {have / 1e9:.1f} GB free, {HEADROOM:.0%} of it used at most"
    _because(reasons, "gradient_checkpointing", needed, why, "estimate")
    return needed


def _because(reasons: list[dict[str, str]], rule: str, value: Any, why: str, source: str) -> None:
    reasons.append({"rule": rule, "value": str(value), "because": why, "source": source})
