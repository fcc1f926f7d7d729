"""Makes the plan of a recipe: reads the facts, makes the decisions, and reports why a plan cannot run."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from skill_train.commands._command import Whole, option
from skill_train.commands._of_hub import require_on_hub, with_flags
from skill_train.core.console import Console
from skill_train.core.errors import DecisionNeeded, UsageError, in_hints, quoted
from skill_train.core.units import gigabytes
from skill_train.data import read_rows, scan, token_stats
from skill_train.data.errors import THE_RECIPE
from skill_train.data.token_stats import PictureCounter, counter_of
from skill_train.data.unread import SeenRows, unread_text, unread_text_warning
from skill_train.estimate.modules import EMBEDDINGS, HEADS
from skill_train.facts import DatasetFacts, JsonObject, MachineFacts, ModelFacts
from skill_train.hub import flavors
from skill_train.llama.speed.cached import known_reading
from skill_train.machine.read import read_machine
from skill_train.model.convertible.differences import why_not_untied
from skill_train.model.convertible.from_config import LINE_ENDS_WARNING, PROVEN, unread_window_warning
from skill_train.model.convertible.vocabulary import why_no_picture, why_no_vocabulary
from skill_train.model.folder import read_model, tensor_shapes
from skill_train.model.lora_targets import TARGETS, linear_layers, linear_sizes, require_saved, require_targets
from skill_train.model.parameter_count import loaded, with_files
from skill_train.model.tower import trains_on_pictures, unread_pictures
from skill_train.plan import make
from skill_train.plan.ancestry import sensitive_run
from skill_train.plan.placement import Choices, with_precision
from skill_train.plan.where import stays_here
from skill_train.program.events import Refused
from skill_train.program.pictures.engine import LINED, TILED
from skill_train.program.tokenizer import has_tokenizer
from skill_train.recipe import fields
from skill_train.recipe.fields import ALL_LINEAR, Recipe
from skill_train.recipe.formats import BARE, for_model
from skill_train.reference.causal_types import require_known_type
from skill_train.run.folder import require_space
from skill_train.run.plan_record import Facts, Plan
from skill_train.train import measured_speed

RECIPE_OPTIONS = ("model", "data", "split", "max_steps", "max_length")  # without dtype, which is part of the plan
DEFAULT_HOURS = 8.0


@dataclass(frozen=True)
class RecipeFlags:
    """The options that `plan`, `local` and `submit` share."""

    model: str | None = option(None, "Base model: folder or Hub id.")
    data: str | None = option(None, "Dataset: file, folder or Hub id.")
    split: str | None = option(None, "Part of the dataset, such as train[:500].  [default: train]")
    max_steps: int | None = option(None, "Optimizer steps.  [default: from num_train_epochs]", Whole(min=1))
    max_length: int | None = option(None, "Longest row, in tokens.  [default: 1024]", Whole(min=2))
    dtype: str | None = option(None, "Precision.  [default: depends on the device]", ("float32", "bfloat16", "float16"))


def device_option() -> str | None:
    return option(None, "Device to train on.  [default: the best available]", ("cuda", "mps", "cpu"))


def flavor_option() -> str | None:
    return option(None, "Machine of Hugging Face Jobs.  [default: the cheapest that fits and is fast enough]")


def load_recipe(file: Path | None, flags: dict[str, object]) -> Recipe:
    """The recipe in a file, with the options of the command line instead of its values."""
    recipe = fields.from_dict(flags if file is None else with_flags(fields.read(file), flags))
    if recipe.hub_model_id and "hub_model_id" not in flags:
        from skill_train.hub import repositories

        repositories.check_name(recipe.hub_model_id, "write hub_model_id: NAMESPACE/NAME in the recipe")
    return recipe


def mapping_in(recipe: Path | None) -> AbstractContextManager[None]:
    """Names the recipe's file, which has the mapping of columns, in hints about refused rows."""
    return nullcontext() if recipe is None else in_hints(THE_RECIPE, f"--recipe {quoted(recipe)}")


def plan_from_metadata(console: Console, recipe: Recipe, choices: Choices) -> Plan:
    """The plan of a recipe from metadata only: no weights are read and nothing is downloaded completely.

    Prices are requested only if the Hub is needed anyway or the user chose the cloud. Otherwise the plan stays offline.
    """
    require_on_hub(recipe)
    recipe = _with_policy_of_base(recipe, choices)
    choices = with_precision(choices, pure_bf16=recipe.pure_bf16)
    on_hub = not Path(recipe.model).is_dir()
    if on_hub:
        from skill_train.hub import models

        models.check_id(recipe.model)
        console.status(f"asking the Hub about {recipe.model}")
        model = models.model_facts(recipe.model, recipe.revision)
        require_known_type(model.source, model.model_type, vision=model.vision)
        model = _with_layers(recipe, model, lambda: models.tensor_shapes(recipe.model, model.revision))
        settings = models.tokenizer_settings(recipe.model, model.revision) if model.model_type in TILED else None
        model = model if settings is None else _not_convertible(model, why_no_picture(settings, model.model_type))
    else:
        model = _facts_of_folder(recipe, Path(recipe.model), weights_needed=False)
    data = dataset_facts(console, recipe, model)
    to_cloud = choices.where == "cloud" and not recipe.sensitive
    offered, why = flavors.current(live=on_hub or data.revision is not None or to_cloud)
    console.status(f"prices: {why}")
    this, probe = machine_with_speeds(), None
    if make.wants_probe(this, model, choices):
        from skill_train.train.precision_probe import known_probe

        probe = known_probe(choices.device or this.device, this, model)
    return _plan(pinned(recipe, model.revision, data.revision), Facts(model, data, this), choices, offered, probe)


def _with_policy_of_base(recipe: Recipe, choices: Choices) -> Recipe:
    """The recipe, made sensitive if a sensitive run made its base, because the base contains what that run learned."""
    base_of = sensitive_run(recipe.model)
    if base_of is None:
        return recipe
    if choices.where == "cloud":
        raise stays_here(choices.where_because or "--where cloud", base_of)
    return fields.from_dict(dataclasses.asdict(recipe) | {"sensitive": True})


def machine_with_speeds() -> MachineFacts:
    """The facts of this machine, with the speed at which llama.cpp reads weights if `bench` measured it."""
    this = read_machine()
    return replace(this, reading=known_reading(this))


def plan_with_files(console: Console, recipe: Recipe, choices: Choices) -> Plan:
    """The plan for this machine, with the model's files. Times bf16 if that could change the plan."""
    from skill_train.hub import models
    from skill_train.train import local

    require_on_hub(recipe)
    recipe = _with_policy_of_base(recipe, choices)
    choices = with_precision(choices, pure_bf16=recipe.pure_bf16)
    folder, commit = models.model_folder(recipe.model, recipe.revision)
    model = _facts_of_folder(recipe, folder, weights_needed=True)
    if commit is not None:  # a model on the Hub has a revision instead of a fingerprint, as in `plan_from_metadata`
        model = replace(model, source=recipe.model, revision=commit, fingerprint=None)
    data = dataset_facts(console, recipe, model)
    recipe = pinned(recipe, commit, data.revision)
    this = machine_with_speeds()
    probe = None
    if make.wants_probe(this, model, choices):
        console.status("timing bf16 on this machine (once for this model)")
        safe = _plan(recipe, Facts(model, data, this), replace(choices, dtype="float32"), ())
        probe = local.probe_precision(safe, this, model)
    return _plan(recipe, Facts(model, data, this), choices, (), probe)


def _facts_of_folder(recipe: Recipe, folder: Path, *, weights_needed: bool) -> ModelFacts:
    model = read_model(folder, weights_needed=weights_needed)
    require_known_type(model.source, model.model_type, vision=model.vision)
    return _with_vocabulary(_with_layers(recipe, model, lambda: tensor_shapes(folder)), folder)


def _with_layers(recipe: Recipe, model: ModelFacts, shapes: Callable[[], Mapping[str, Sequence[int]]]) -> ModelFacts:
    """Adds facts from the headers of the weights: the parameters of experts if no formula counts them, the parameters
    that transformers does not load, and the linear layers for all-linear or a family without a list of LoRA targets.
    Adds the reason if llama.cpp has no place for the head that an adapter of the embedding, or of the head, parts."""
    trained = [name.rpartition(".")[2] for name in [*(recipe.modules_to_save or ()), *(recipe.target_modules or ())]]
    if model.tied_embeddings and recipe.finetuning_type == "lora" and {*trained} & {*EMBEDDINGS, *HEADS}:
        model = _not_convertible(model, why_not_untied(model.architecture))
    uncounted, listed = model.experts is not None and model.expert_parameters is None, model.model_type in TARGETS
    targets = recipe.target_modules if recipe.finetuning_type == "lora" else None
    saved = recipe.modules_to_save if listed else None  # transformers renames modules of some other families
    if listed and not uncounted and not targets and not saved:
        return model
    read = shapes()
    require_saved(saved or (), read)
    if not model.further_parameters and not (listed and not uncounted):
        model = with_files(model, read)
    if recipe.finetuning_type == "full" or (listed and not targets):
        return model
    read = loaded(read, model.layers, model.borrowing_layers)
    found = linear_layers(read, vocab_size=model.vocab_size, experts=model.experts)
    if targets == ALL_LINEAR:
        targets = None
    elif listed:
        require_targets(targets or [], read, found)
        placed = [name for name in targets or () if "." in name or model.experts]
        return replace(model, linear_sizes=linear_sizes(read, placed))
    sizes = linear_sizes(read, targets or found)
    found = [] if targets else found
    return replace(model, linear_layers=tuple(found) or None, linear_sizes=sizes)


def _with_vocabulary(model: ModelFacts, folder: Path) -> ModelFacts:
    """Adds the reason if llama.cpp cannot convert the tokenizer, or cannot read pictures with it."""
    if not model.convertible:
        return model
    why = why_no_vocabulary(folder, model.architecture) or why_no_picture(folder, model.model_type)
    return _not_convertible(model, why)


def _not_convertible(model: ModelFacts, why: str | None) -> ModelFacts:
    """The facts with this reason, unless it is None or another reason is already there."""
    if why is None or not model.convertible:
        return model
    return replace(model, convertible=False, not_convertible=why)


def _plan(recipe: Recipe, facts: Facts, choices: Choices, offered: Any, probe: Any = None) -> Plan:
    calibrations = measured_speed.known_speeds(facts.machine, facts.model, choices.device or facts.machine.device)
    return make.make_plan(recipe, facts, choices=choices, probe=probe, offered=offered, calibrations=calibrations)


def pinned(recipe: Recipe, model_commit: str | None, data_commit: str | None) -> Recipe:
    """The recipe with absolute paths and commits as revisions, so that the plan has the same meaning later and
    elsewhere."""
    here = {key: str(Path(getattr(recipe, key)).resolve()) for key in ("model", "data")}
    return dataclasses.replace(
        recipe,
        model=here["model"] if model_commit is None else recipe.model,
        revision=model_commit,
        data=here["data"] if Path(recipe.data).exists() else recipe.data,
        data_revision=data_commit or recipe.data_revision,
    )


def dataset_facts(console: Console, recipe: Recipe, model: ModelFacts) -> DatasetFacts:
    """The facts of a dataset: from every row of a file, or from metadata and first rows on the Hub. Token counts come
    from an earlier `skill-train data`, or else are a range."""
    pictures = trains_on_pictures(model) and recipe.images is not False
    try:
        return _dataset_facts(console, recipe, model, pictures=pictures)
    except UsageError as error:
        if error.code != "not_text" or not model.vision or trains_on_pictures(model):
            raise
        raise UsageError(
            unread_pictures(model),
            code="vision",
            expected="a base model of one of these families, or rows of text",
            got=error.message,
            hint=error.hint,
        ) from None


def _dataset_facts(console: Console, recipe: Recipe, model: ModelFacts, *, pictures: bool) -> DatasetFacts:
    picture_tokens, seen = _counter(recipe, model) if pictures else None, SeenRows()
    if Path(recipe.data).exists() or not read_rows.is_id(recipe.data):
        facts = scan.scan(recipe, pictures=pictures, tokens=picture_tokens, seen=seen)
        if (media := scan.unread_media(recipe, facts.columns)) is not None:
            console.warn("pictures", media)
        first: Sequence[JsonObject] = seen.first
    else:
        from skill_train.hub import datasets

        console.status(f"asking the Hub about {recipe.data}")
        inspected = datasets.inspect_dataset(recipe, partial(scan.first_format, pictures=pictures), pictures=pictures)
        first, facts, seen_pictures = inspected.first, inspected.facts, inspected.pictures
        if facts.data_file is not None:
            recipe = dataclasses.replace(recipe, data_file=facts.data_file, data_revision=facts.revision)
        facts = scan.with_text_of(facts, recipe, first, seen_pictures, picture_tokens)
    named = bool(recipe.columns)
    if names := unread_text([*first, *seen.later], facts.columns, named=named):
        console.warn("unread_text", unread_text_warning(names, facts.columns, named=named))
    facts = for_model(facts, has_chat_template=model.has_chat_template)
    if facts.format in BARE and model.has_chat_template:
        console.warn("without_template", scan.bare_warning(first, facts.columns))
    if (rendered := scan.rendered_warning(first, facts.columns)) is not None:
        console.warn("template", rendered)
    key = token_stats.tokenizer_key(recipe.model, model.revision)
    if missing := lacking(recipe.model, model):
        code = "no_weights" if has_tokenizer(Path(recipe.model)) else "no_tokenizer"
        console.warn(code, f"{recipe.model} has {' and '.join(missing)}, so it can be planned but not trained")
    counted = token_stats.known_tokens(
        facts, key, split=recipe.split, loss_on=recipe.loss_on, max_length=recipe.max_length
    )
    pictures_taken = facts.picture_tokens
    if counted is None and facts.text_bytes is not None and not (facts.images and pictures_taken is None):
        sizes = (facts.rows, facts.text_bytes, facts.longest_text_bytes or facts.text_bytes)
        counted = token_stats.token_range(*sizes, recipe.max_length, facts.turns or 0, facts.longest_turns or 0)
        counted = counted if pictures_taken is None else token_stats.with_pictures(counted, pictures_taken)
    if pictures_taken is not None and pictures_taken.longest_fed > recipe.max_length:
        many = f"the pictures of a row take {pictures_taken.longest_fed} tokens, and max_length is {recipe.max_length}"
        console.warn("picture_cut", f"{many}: the training refuses the row; skill-train data --model lists such rows")
    return replace(facts, tokens=counted)


def lacking(model: str, facts: ModelFacts) -> list[str]:
    """The parts that a model folder lacks for a training; empty for a model on the Hub."""
    if not (folder := Path(model)).is_dir():
        return []
    return ["no tokenizer"] * (not has_tokenizer(folder)) + ["no whole weights"] * (not facts.at_hand)


def _counter(recipe: Recipe, model: ModelFacts) -> PictureCounter | None:
    """The counter of picture tokens. None also for a recipe that the plan refuses later if its rows have pictures."""
    try:
        return counter_of(recipe, model)
    except (Refused, UsageError):
        return None


def require_room(console: Console, plan: Plan, folder: Path, *, force: bool) -> None:
    """Refuses a run whose lower estimate does not fit into memory or on the disk of `folder`. Warns if only the upper
    estimate does not fit into memory. The plan itself knows only the disk of the current folder."""
    memory, usable = plan.estimates.memory_bytes, plan.estimates.usable_bytes
    later = {"unknown_memory", "device_unavailable", "no_disk"}  # torch, or require_space below, checks these
    if memory.low is not None and memory.high is not None and usable is not None and memory.low <= usable < memory.high:
        later.add("no_memory")
        console.warn("little_memory", f"the run may need {gigabytes(memory.high)}; {gigabytes(usable)} can be used")
    stopping = [blocker for blocker in plan.blockers if blocker.code not in later]
    if stopping and not force:
        raise blocked(replace(plan, blockers=stopping))
    if plan.estimates.disk_bytes.low is not None and not force:
        require_space(folder, int(plan.estimates.disk_bytes.low), "the run")


def require_no_blockers(plan: Plan) -> None:
    if plan.blockers:
        raise blocked(plan)


def blocked(plan: Plan) -> DecisionNeeded:
    """The error for a plan with blockers. The hint belongs to the first blocker."""
    first = plan.blockers[0]
    cloud = plan.where == "cloud"
    elsewhere = "" if cloud or plan.policy.sensitive else ", or in the cloud: plan with --where cloud, then submit"
    larger = "a larger flavor, " if cloud else ""
    hint = {
        "needs_cuda": f"load_in_4bit: false with a smaller model{elsewhere}",
        "no_memory": f"{larger}a smaller model, a shorter max_length, load_in_4bit: true on an NVIDIA GPU{elsewhere}",
        "no_host_ram": f"{larger}a smaller model, or load_in_4bit: true, which reads a weight at a time{elsewhere}",
        "no_disk": "free some space, or choose another place for the run",
        "device_unavailable": "plan on the machine that has it; for another one compare memory_bytes with its memory",
        "no_torch": f"a Python built for arm64 on Apple silicon{elsewhere}",
        "too_slow": "a larger --max-hours, --flavor for the one that you accept, or fewer steps",
        "vision": "rows with pictures, or the text model of the same family: Qwen2.5 for Qwen2.5-VL",
    }.get(first.code, "a smaller model, a shorter max_length, or load_in_4bit: true")
    if (first.code, plan.placement.device, plan.placement.dtype) == ("device_unavailable", "cuda", "float32"):
        hint += "; they are of float32: --dtype bfloat16 shows those of a card since Ampere"
    if first.hint is not None:
        hint = f"--where local, or {first.hint}"
    return DecisionNeeded(
        f"the plan cannot be run: {'; '.join(blocker.message for blocker in plan.blockers)}",
        code=first.code,
        expected="a model and rows that fit",
        got=f"{plan.where}, {plan.flavor or plan.facts.machine.chip}",
        hint=hint,
    )


def warn_of_plan(console: Console, plan: Plan) -> None:
    """Prints the warnings that `plan`, `local` and `submit` share."""
    _warn_of_length(console, plan)
    _warn_of_export(console, plan)
    if plan.facts.model.quantization:
        message = f"{plan.recipe.model} is stored in 4 bits, and an adapter merges into full precision"
        console.warn("quantized_base", f"{message}: train on the model that it was made from")
    for reason in plan.reasons:
        if reason.rule == make.WHOLE_STEPS:
            message = f"{reason.because} are {reason.value} epochs, because a step trains a whole batch"
            console.warn("epochs", f"{message}; a smaller effective_batch_size repeats fewer rows")


def _warn_of_length(console: Console, plan: Plan) -> None:
    """Warns about rows that are cut, and about rows longer than the context of the model. Beyond it, rotary positions
    continue without an error."""
    context, tokens = plan.facts.model.context, plan.facts.dataset.tokens
    if tokens is not None and (cut := token_stats.cut_away(tokens, context)):
        console.warn("truncated", cut)
    if context is None or tokens is None or min(plan.recipe.max_length, tokens.longest[0]) <= context:
        return
    longest = f"rows of {min(plan.recipe.max_length, tokens.longest[0])} tokens and more"
    console.warn("beyond_context", f"{longest} are trained, and {plan.recipe.model} was made for {context} positions")


def _warn_of_export(console: Console, plan: Plan) -> None:
    """Warns before the training about a model that llama.cpp cannot convert, or computes differently."""
    model = plan.facts.model
    if not model.not_convertible and model.model_type not in PROVEN:
        console.warn(
            "unproven_family",
            f"verify was never tried with files of {model.model_type}: it may not know all their weights and numbers, "
            "so its verdict can be warn for a right file, and for a wrong one",
        )
    if model.not_convertible:
        console.warn(
            "not_convertible", f"{model.not_convertible}; training and merging work, and export-gguf refuses this model"
        )
    elif plan.recipe.images and model.no_projector:
        alone = "export-gguf refuses this model but for a file that reads text only (--mmproj none)"
        console.warn("not_convertible", f"{model.no_projector}; training and merging work, and {alone}")
    elif window := model.unread_window:
        longest = plan.recipe.max_length
        console.warn("unread_window", unread_window_warning(window, model.architecture, longest))
    elif plan.recipe.images and model.model_type in LINED:
        console.warn("line_ends", LINE_ENDS_WARNING)
