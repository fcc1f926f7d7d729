"""The plan: recipe + placement + estimates + reasons, as data. Pure: the same facts always give the same plan."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from skill_train.core.errors import UsageError, nearest
from skill_train.core.program_events import Probed
from skill_train.core.units import duration, gigabytes
from skill_train.facts import Calibration, DatasetFacts, Flavor, MachineFacts, ModelFacts
from skill_train.model.config import TEXT_OF_VISION
from skill_train.model.lora_targets import TARGETS
from skill_train.model.tower import trains_on_pictures, unread_pictures
from skill_train.plan import places
from skill_train.plan.estimates import estimates
from skill_train.plan.launch_args import launch
from skill_train.plan.pictures import pictures_of
from skill_train.plan.placement import (
    HERE,
    PROBE_FROM_PARAMETERS,
    Choices,
    Workload,
    has_device,
    placement,
    split_of,
    with_precision,
)
from skill_train.plan.places import Candidate
from skill_train.plan.refusals import require_adaptable, require_feedable, require_full_precision, require_positions
from skill_train.plan.where import decide
from skill_train.program.plan import held_out_count
from skill_train.recipe.fields import ALL_LINEAR, FIELDS, NOT_HASHED, OF_ADAMW, OF_LORA, POLICY, Recipe, recipe_hash
from skill_train.recipe.formats import BARE, for_model
from skill_train.recipe.resolved import ResolvedRecipe
from skill_train.run.plan_record import Blocker, Facts, Plan, Policy, Reason

EPOCHS = ((500, 3.0), (1000, 2.0))  # the epochs for fewer than so many rows; references/training_methods.md
_WHY_SDPA = "torch's own fused kernels; eager where the model has none"
WHOLE_STEPS = "whole_steps"  # the rule in the reason of more epochs than were asked for
FEW_STEPS = 10  # with so many or fewer, warmup_ratio warms nothing up


def make_plan(
    recipe: Recipe,
    facts: Facts,
    *,
    choices: Choices = HERE,
    probe: Probed | None = None,
    offered: tuple[Flavor, ...] = (),
    calibrations: dict[str, Calibration] | None = None,
) -> Plan:
    """A plan with every field resolved. Its `blockers` say what prevents it from being run.

    Args:
        offered: the flavors of the cloud, with their prices.
        calibrations: measured speeds of this machine, by dtype.

    Raises:
        UsageError: the recipe requests something that this model cannot do, or the named flavor does not exist.
        DecisionNeeded: an unsafe choice was requested.
    """
    choices = with_precision(choices, pure_bf16=recipe.pure_bf16)
    model, machine = facts.model, facts.machine
    dataset = for_model(facts.dataset, has_chat_template=model.has_chat_template)
    reasons: list[Reason] = []
    require_full_precision(recipe, model)
    require_adaptable(recipe, model)
    require_positions(recipe, model, dataset)
    resolved = _resolve(recipe, model, dataset, reasons)
    workload = Workload(resolved, model, dataset)
    here = places.local_candidate(workload, machine, choices, probe, calibrations or {})
    cloud = places.flavors(workload, offered, choices)
    counted = dataset.tokens is not None and dataset.tokens.counted
    where, fired = decide(
        resolved, sensitive=recipe.sensitive, model=model, here=here, choices=choices, counted=counted
    )
    chosen = here if where == "local" else _flavor(cloud, offered, choices)
    place = chosen or here
    reasons = [*fired, *reasons, *_placed(resolved, model, place, choices)]
    backend = "local" if place.flavor is None else "hf_jobs"
    placed = placement(resolved, place.machine, place.fit, backend, recipe.report_to)
    started = launch(placed, place.machine)
    fingerprints = {"model": model.fingerprint, "data": dataset.fingerprint}
    offers = [] if recipe.sensitive else cloud
    return Plan(
        where=where,
        recipe=resolved,
        recipe_hash=recipe_hash(resolved.as_dict(), fingerprints),
        fingerprints=fingerprints,
        asked=_asked_choices(recipe, resolved.as_dict()),
        policy=Policy(**{key: getattr(recipe, key) for key in POLICY}),
        placement=placed,
        launch=started,
        flavor=place.flavor.name if place.flavor else None,
        timeout_seconds=places.timeout_seconds(place.seconds, choices.max_hours) if place.flavor else None,
        blockers=_unread(model, resolved) + _blockers(where, chosen, here, cloud) + _too_slow(chosen, choices),
        estimates=estimates(model, machine, place, offers, context=resolved.max_length, plain=_is_plain(resolved)),
        facts=Facts(model, dataset, machine),
        reasons=reasons + started.reasons,
    )


def wants_probe(machine: MachineFacts, model: ModelFacts, choices: Choices) -> bool:
    """Whether timing bf16 on this processor could change the plan."""
    device = choices.device or machine.device
    if device == "mps":
        return choices.dtype == "bfloat16" and not choices.force
    on_cpu = device == "cpu" and machine.bf16_matrix
    return on_cpu and choices.dtype is None and (model.parameters or 0) >= PROBE_FROM_PARAMETERS


def _flavor(cloud: list[Candidate], offered: tuple[Flavor, ...], choices: Choices) -> Candidate | None:
    if choices.flavor is None:
        return places.cheapest(cloud, choices.max_hours)
    chosen = next((candidate for candidate in cloud if candidate.name == choices.flavor), None)
    if chosen is None:
        names = [flavor.name for flavor in offered]  # includes flavors without a GPU, which the user can name
        exists = choices.flavor in names
        reason = "cannot train in the requested precision" if exists else "is not a flavor"
        raise UsageError(
            f"{choices.flavor} {reason}{'' if exists else nearest(choices.flavor, names)}",
            code="unknown_flavor",
            expected=", ".join(candidate.name for candidate in cloud) if exists else ", ".join(names),
            got=choices.flavor,
            hint="omit --flavor to get the cheapest machine that fits",
        )
    return chosen


def _unread(model: ModelFacts, resolved: ResolvedRecipe) -> list[Blocker]:
    """The blocker of a model that the training program cannot load, or whose pictures it cannot read."""
    if resolved.images and not trains_on_pictures(model):
        return [Blocker("vision", unread_pictures(model))]
    if resolved.images or not model.vision or model.model_type in TEXT_OF_VISION:
        return []
    message = (
        f"the rows are text, and {model.architecture} has no text model that can be loaded alone; rows with pictures "
        "can be trained"
        if trains_on_pictures(model)
        else f"only its text could be trained, and {model.architecture} has no text model that can be loaded alone"
    )
    return [Blocker("vision", message)]


def _blockers(where: str, chosen: Candidate | None, here: Candidate, cloud: list[Candidate]) -> list[Blocker]:
    """The blockers of a plan. Nothing is guessed, so an unknown need is a blocker too."""
    if chosen is None:
        problems = [candidate.problems[0][1] for candidate in cloud if candidate.problems]
        why = problems[-1] if problems else "none is offered"
        if here.fit.memory is None:
            why = "; ".join(here.unknown.values())
        return [Blocker("no_flavor", f"no flavor of Hugging Face Jobs can run this: {why}")]
    blockers = [Blocker(code, message) for code, message in chosen.problems]
    if chosen.fit.memory is None:
        message = chosen.unknown.get("seconds", "the model's shape is unknown")
        blockers.append(Blocker("unknown_memory", f"what {where} training needs is unknown: {message}"))
    return blockers


def _too_slow(chosen: Candidate | None, choices: Choices) -> list[Blocker]:
    """The blocker of a rented machine that may not finish in time, unless the user chose it."""
    if chosen is None or chosen.flavor is None or choices.flavor is not None or chosen.seconds is None:
        return []
    if chosen.seconds.high <= choices.max_hours * 3600:
        return []
    limit = f"{duration(choices.max_hours * 3600, estimated=True)} (--max-hours)"
    most = max(chosen.time, key=lambda part: part.high)
    all_of_it, part = (duration(seconds, estimated=True) for seconds in (chosen.seconds.high, most.high))
    up_to = f"{all_of_it}, {part} of it {most.name}"
    message = f"no flavor is sure to end within {limit}; {chosen.name} takes up to {up_to}"
    return [Blocker("too_slow", message)]


def _placed(resolved: ResolvedRecipe, model: ModelFacts, place: Candidate, choices: Choices) -> list[Reason]:
    fit, reasons = place.fit, list[Reason]()
    step, effective = fit.step, resolved.effective_batch_size
    best = f"the best of {place.machine.chip}"
    if "device" in place.machine.unknown:
        best += f" ({place.machine.unknown['device']})"
    if choices.device and place.flavor is not None:
        best += f"; --device {choices.device} is of this machine"
    asked = choices.device and place.flavor is None
    _because(reasons, "device", step.device, "asked for" if asked else best, "machine")
    _because(reasons, "dtype", step.dtype, place.dtype_because, "references/local_training.md")
    _because(reasons, "attn_implementation", "sdpa", _WHY_SDPA, "transformers")
    capacity = place.machine.memory_bytes if has_device(place.machine, step.device) else None
    memory = "an unknown amount of" if capacity is None else f"{gigabytes(capacity, 0)} of"
    why = f"{memory} {step.device} memory; the effective batch stays {effective}"
    why += "" if fit.quicker is None else f"; {fit.quicker}"
    why += "" if fit.proof is None else f"; {fit.proof}"
    _because(reasons, "batch", split_of(fit), why, "references/local_training.md")
    _because(reasons, "gradient_checkpointing", step.checkpointing, _why_checkpointing(place), "estimate")
    if fit.strategy != "single":
        why = "one GPU holds the model" if fit.strategy == "ddp" else "one GPU does not hold the model"
        _because(reasons, "strategy", fit.strategy + " with offload" * step.offload, why, "Hardware guide: DDP or FSDP")
    if model.convertible is False:
        _because(reasons, "convertible", False, f"{model.not_convertible}: no GGUF", "llama.cpp")
    if place.flavor is not None and place.cost is not None:
        why = "asked for" if choices.flavor else _why_flavor(place, choices.max_hours)
        _because(reasons, "flavor", place.name, f"{why}: {place.cost.basis}", place.flavor.source)
    return reasons


def _why_flavor(place: Candidate, max_hours: float) -> str:
    if places.in_hours(place, max_hours):
        return f"the cheapest that fits and ends within {max_hours:g} h"
    return f"the fastest that fits; none is sure to end within {max_hours:g} h"


def _why_checkpointing(place: Candidate) -> str:
    memory, usable = place.fit.memory, place.fit.usable_bytes
    if memory is None or usable is None:
        return "the needed or the usable memory is unknown, so this is the safe choice"
    how = "with" if place.fit.step.checkpointing else "without"
    why = f"up to {gigabytes(memory.high, 2)} {how} it by the estimate, {gigabytes(usable)} usable"
    return why if place.fit.proof is None else f"{why}; {place.fit.proof}"


def _resolve(recipe: Recipe, model: ModelFacts, dataset: DatasetFacts, reasons: list[Reason]) -> ResolvedRecipe:
    """The recipe for the training program: every choice is made."""
    values = {k: v for k, v in dataclasses.asdict(recipe).items() if k not in NOT_HASHED}
    values["format"], values["columns"] = dataset.format, dict(dataset.columns)
    _because(reasons, "format", f"{dataset.format} {dataset.columns}", dataset.reason, dataset.source)
    if dataset.format not in BARE and not model.has_chat_template:
        raise UsageError(
            f"{recipe.model} has no chat template, so the conversations in {recipe.data} cannot be rendered",
            code="no_chat_template",
            expected="a model with a chat template (most Instruct models), or rows of plain text",
            got=f"format {dataset.format}",
            hint="use the model's Instruct version, or data with the columns prompt and completion, or text",
        )
    values["data_file"] = recipe.data_file or dataset.data_file
    values |= pictures_of(recipe, model, dataset, reasons)
    values["loss_on"] = _loss_on(recipe, dataset, reasons)
    values |= _tuning(recipe, model, reasons)
    rows = dataset.rows - held_out_count(dataset.rows, recipe.held_out_fraction)
    if recipe.max_steps is None:
        passes, passes_text, source = _epochs(recipe, dataset.rows)
        values["max_steps"] = max(1, math.ceil(round(rows * passes, 6) / recipe.effective_batch_size))
        why = f"{_training_rows(rows, dataset)} x {passes_text} / {recipe.effective_batch_size} rows a step"
        _because(reasons, "max_steps", values["max_steps"], why, source)
        fed = values["max_steps"] * recipe.effective_batch_size
        if 0 < 1.25 * rows * passes < fed:  # the last step is filled up
            why = f"{values['max_steps']} x {recipe.effective_batch_size} rows from {_training_rows(rows, dataset)}"
            _because(reasons, WHOLE_STEPS, f"{fed / rows:.3g}", why, "recipe")
    elif rows:
        epochs = recipe.max_steps * recipe.effective_batch_size / rows
        why = f"{recipe.max_steps} steps x {recipe.effective_batch_size} rows / {_training_rows(rows, dataset)}"
        why += "" if recipe.num_train_epochs is None else f"; num_train_epochs {recipe.num_train_epochs:g} is not read"
        _because(reasons, "epochs", round(epochs, 2), why, "recipe")
    require_feedable(values["max_steps"], recipe)
    values["warmup_steps"] = _warmup_steps(recipe, values["max_steps"], reasons)
    return ResolvedRecipe(**{key: values[key] for key in ResolvedRecipe.__struct_fields__})


def _warmup_steps(recipe: Recipe, steps: int, reasons: list[Reason]) -> int:
    if recipe.lr_scheduler_type == "constant" and (recipe.warmup_steps or recipe.warmup_ratio):
        raise UsageError(
            "the recipe has a warm-up, and lr_scheduler_type: constant has none",
            code="bad_recipe",
            expected="lr_scheduler_type: constant_with_warmup, or no warmup_steps and no warmup_ratio",
            got=f"warmup_steps {recipe.warmup_steps}, warmup_ratio {recipe.warmup_ratio:g}",
            hint="set lr_scheduler_type: constant_with_warmup in the recipe",
        )
    if recipe.warmup_steps is not None:
        return recipe.warmup_steps
    if steps > FEW_STEPS or not recipe.warmup_ratio:
        return math.ceil(round(steps * recipe.warmup_ratio, 6))
    why = f"no warm-up in {FEW_STEPS} steps or fewer, whatever warmup_ratio says; warmup_steps sets one"
    _because(reasons, "warmup_steps", 0, why, "recipe")
    return 0


def _training_rows(rows: int, dataset: DatasetFacts) -> str:
    if dataset.rows_estimated is None:
        return f"{rows} training rows"
    return f"about {rows} training rows ({dataset.rows_estimated})"


def _epochs(recipe: Recipe, rows: int) -> tuple[float, str, str]:
    """The passes over the data, the same as a text, and the source. With few rows each row is read more often, because
    otherwise there would be few steps."""
    if recipe.num_train_epochs is not None:
        return recipe.num_train_epochs, f"{recipe.num_train_epochs:g} epochs", "recipe"
    below, epochs = next(((below, times) for below, times in EPOCHS if rows < below), (None, 1.0))
    table = f"from {EPOCHS[-1][0]:,} rows on" if below is None else f"below {below:,} rows"
    return epochs, f"{epochs:g} epochs ({table})", "references/training_methods.md"


def _asked_choices(recipe: Recipe, resolved: Mapping[str, object]) -> dict[str, object]:
    """The user's original values of fields that were resolved, so that they can be resolved again for other data or
    another model."""
    values = {key: value for key, value in dataclasses.asdict(recipe).items() if key not in POLICY}
    return {key: value for key, value in values.items() if key not in resolved or value != resolved[key]}


def _tuning(recipe: Recipe, model: ModelFacts, reasons: list[Reason]) -> dict[str, object]:
    """The fields for the trained weights and the learning rate. Fields that full fine-tuning does not read get fixed
    values, so that equal runs have equal hashes.

    Learning rates: TRL's default for full fine-tuning, 2e-5, and ten times that for adapters (TRL docs, "LoRA Without
    Regret"; Schulman et al. 2025 measured about that factor).
    """
    full = recipe.finetuning_type == "full"
    changed = [key for key in OF_ADAMW if getattr(recipe, key) != FIELDS[key].default]
    if changed and "adamw" not in (recipe.optim or "adamw_torch"):
        _because(reasons, "optim", recipe.optim, f"it does not read {', '.join(changed)}", "transformers")
    rate = recipe.learning_rate or (2e-5 if full else 2e-4)
    if recipe.learning_rate is None:
        why = "the usual one where every weight trains" if full else "the usual one for adapters"
        _because(reasons, "learning_rate", f"{rate:g}", why, "TRL docs, LoRA Without Regret")
    if not full:
        asks_for_all = recipe.target_modules == ALL_LINEAR
        named = None if asks_for_all else recipe.target_modules
        targets = named or _targets(model, reasons, everything=asks_for_all)
        return {"learning_rate": rate, "target_modules": targets, "optim": recipe.optim or "adamw_torch"}
    weights = "bfloat16, AdamW's moments too" if recipe.pure_bf16 else "float32"
    why = f"every weight trains, in {weights}; the fields of LoRA are not read"
    _because(reasons, "finetuning_type", "full", why, "recipe")
    if recipe.optim is None:
        _because(reasons, "optim", "adamw_torch_fused", "one pass, and no second copy of every weight", "torch docs")
    unread = {key: FIELDS[key].default for key in OF_LORA}
    return unread | {"learning_rate": rate, "target_modules": [], "optim": recipe.optim or "adamw_torch_fused"}


def _loss_on(recipe: Recipe, dataset: DatasetFacts, reasons: list[Reason]) -> str:
    if dataset.format == "text" and recipe.loss_on not in (None, "all"):
        raise UsageError(
            f"loss_on: {recipe.loss_on}, but the rows in {recipe.data} are plain text, of which everything is trained",
            code="bad_recipe",
            expected="loss_on: all, or rows whose answers stand apart: conversations, or prompts and completions",
            got=f"format text, loss_on {recipe.loss_on}",
            hint="remove loss_on from the recipe, or part the texts into the columns prompt and completion",
        )
    if dataset.format in ("messages", "sharegpt") and recipe.loss_on == "completion":
        raise UsageError(
            f"loss_on: completion, but the rows in {recipe.data} are conversations, which may have several answers",
            code="bad_recipe",
            expected="loss_on: assistant, which trains every answer, or rows of a prompt and its completion",
            got=f"format {dataset.format}, loss_on completion",
            hint='loss_on: assistant; a message with "weight": 0 is not trained',
        )
    if recipe.loss_on is not None:
        return recipe.loss_on
    chosen = {"text": "all", **dict.fromkeys(BARE[1:], "completion")}.get(dataset.format, "assistant")
    why = {
        "all": "plain text has no answer to single out",
        "completion": "the prompt is given, the completion is learned",
        "assistant": "only the assistant's words are the model's to learn",
    }[chosen]
    _because(reasons, "loss_on", chosen, why, f"format {dataset.format}")
    return chosen


def _targets(model: ModelFacts, reasons: list[Reason], *, everything: bool) -> list[str]:
    targets = None if everything else TARGETS.get(model.model_type)
    why, source = f"the attention projections of {model.model_type}", "config.json"
    if targets is None and model.linear_layers:
        targets, source = list(model.linear_layers), "safetensors headers"
        why = "all-linear" if everything else f"no list is known for {model.model_type}"
        why += ": the linear layers of its blocks, without routers and experts"
    if targets is None:
        what = "linear layers" if everything else "LoRA targets"
        raise UsageError(
            f"the {what} of the model type {model.model_type!r} are unknown",
            code="no_such_target",
            expected="weight files, whose headers name them" if everything else f"one of {', '.join(sorted(TARGETS))}",
            got=model.model_type,
            hint="name the modules in the recipe, such as target_modules: [q_proj, v_proj]",
        )
    _because(reasons, "target_modules", targets, why, source)
    return list(targets)


def _because(reasons: list[Reason], rule: str, value: Any, why: str, source: str) -> None:
    text = ", ".join(value) if isinstance(value, list) else str(value)
    reasons.append(Reason(rule, text, why, source))


def _is_plain(resolved: ResolvedRecipe) -> bool:
    """Whether the adapter will consist of A and B only. An adapter on an embedding or the output layer saves that layer
    completely (peft 0.21)."""
    whole = {"lm_head", "embed_tokens", "embed_out", "wte"} & set(resolved.target_modules or ())
    return resolved.finetuning_type == "lora" and not (resolved.use_dora or resolved.modules_to_save or whole)
