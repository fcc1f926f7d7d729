"""`plan`: reads the facts, decides, and keeps the decision. Spends nothing and needs neither torch nor a GPU."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from skill_train.commands import tables
from skill_train.core.console import Console, Result
from skill_train.core.errors import DecisionNeeded, UsageError
from skill_train.core.files import write_json
from skill_train.core.resources import train_module
from skill_train.data import read_rows as rows
from skill_train.data import scan as dataset
from skill_train.data import token_stats as tokens
from skill_train.facts import DatasetFacts, ModelFacts
from skill_train.hub import flavors
from skill_train.machine import read as machine
from skill_train.model import folder as model
from skill_train.model.causal_types import causal_model_types
from skill_train.model.convertible import from_config as convertible
from skill_train.model.convertible.vocabulary import why_no_vocabulary
from skill_train.model.lora_targets import TARGETS, linear_layers
from skill_train.plan import make as planner
from skill_train.plan.file import require_free
from skill_train.plan.placement import Choices, with_precision
from skill_train.recipe import fields as recipes
from skill_train.recipe.fields import Recipe
from skill_train.recipe.formats import BARE, for_model
from skill_train.run.folder import open_run
from skill_train.run.records import read_json
from skill_train.train import measured_speed as calibration

_MANY_EPOCHS = 10
_FEW_HELD_OUT = 10


def plan(
    console: Console,
    *,
    recipe: Path | None,
    out: Path | None,
    device: str | None,
    dtype: str | None,
    where: str | None,
    flavor: str | None,
    max_hours: float,
    **flags: Any,
) -> Result:
    """Decides, and writes the plan when asked to. A run directory shows what was estimated and what was measured."""
    said = {key: value for key, value in flags.items() if value is not None}
    here = {key: value for key, value in {"device": device, "dtype": dtype}.items() if value is not None}
    if recipe is not None and recipe.is_dir():
        return _of_run(recipe, said | here | {"where": where, "flavor": flavor, "out": out})
    if flavor is not None and where == "local":
        raise UsageError(
            "--flavor is of the cloud", code="bad_usage", got="--where local", hint="leave one of them out"
        )
    wanted = where or ("cloud" if flavor else None)
    because = f"--flavor {flavor}" if flavor and where is None else None
    choices = Choices(device, dtype, where=wanted, flavor=flavor, max_hours=max_hours, where_because=because)
    if out is not None:
        require_free(out)
    made = decided(console, load_recipe(recipe, said), choices)
    if out is not None:
        write_json(out, made)
    return _result(console, made, out, recipe, said | here)


def decided(console: Console, recipe: Recipe, choices: Choices) -> dict[str, Any]:
    """The plan of a recipe, from metadata only: no weights are read and nothing is downloaded whole.

    Prices are asked for where the Hub is needed anyway or the cloud was asked for; a plan of local files stays offline.
    """
    choices = with_precision(choices, pure_bf16=recipe.pure_bf16)
    on_hub = not Path(recipe.model).is_dir()
    if on_hub:
        from skill_train.hub import models as hub

        hub.check_id(recipe.model)
        console.status(f"asking the Hub about {recipe.model}")
        about = hub.model_facts(recipe.model, recipe.revision)
        about = _with_layers(recipe, about, lambda: hub.tensor_shapes(recipe.model, about.revision))
    else:
        about = model.read_model(Path(recipe.model), weights_needed=False)
        about = _with_layers(recipe, about, lambda: model.tensor_shapes(Path(recipe.model)))
        about = _with_vocabulary(about, Path(recipe.model))
    data = dataset_facts(console, recipe, about)
    to_cloud = choices.where == "cloud" and not recipe.sensitive
    offered, why = flavors.current(live=on_hub or data.revision is not None or to_cloud)
    console.status(f"prices: {why}")
    this, probe = machine.read_machine(), None
    if planner.wants_probe(this, about, choices):
        from skill_train.train import local

        probe = local.known_probe(choices.device or this.device, this, about)
    return _made(pinned(recipe, about.revision, data.revision), about, data, choices, offered, probe)


def local_plan(console: Console, recipe: Recipe, choices: Choices) -> dict[str, Any]:
    """The plan for this machine, with the model's files at hand; bf16 is timed where that could change the plan."""
    from skill_train.hub import models as hub
    from skill_train.train import local

    choices = with_precision(choices, pure_bf16=recipe.pure_bf16)
    folder, commit = hub.model_folder(recipe.model, recipe.revision)
    about = model.read_model(folder)
    about = _with_vocabulary(_with_layers(recipe, about, lambda: model.tensor_shapes(folder)), folder)
    if commit is not None:  # of a model on the Hub the revision says which it is, as in a plan made without its files
        about = dataclasses.replace(about, source=recipe.model, revision=commit, fingerprint=None)
    data = dataset_facts(console, recipe, about)
    recipe = pinned(recipe, commit, data.revision)
    this = machine.read_machine()
    probe = None
    if planner.wants_probe(this, about, choices):
        console.status("timing bf16 on this machine (once for this model)")
        safe = _made(recipe, about, data, dataclasses.replace(choices, dtype="float32"), ())
        probe = local.probe_precision(safe, this, about)
    return _made(recipe, about, data, choices, (), probe)


def _with_layers(recipe: Recipe, about: ModelFacts, shapes: Callable[[], Mapping[str, Sequence[int]]]) -> ModelFacts:
    """With the linear layers of a family that has no list of LoRA targets, where transformers can run it."""
    if recipe.target_modules or recipe.finetuning_type == "full" or about.model_type in TARGETS:
        return about
    types = causal_model_types()
    if types is not None and about.model_type not in types:
        return about
    found = linear_layers(shapes(), vocab_size=about.vocab_size, experts=about.experts)
    return dataclasses.replace(about, linear_layers=tuple(found) or None)


def _with_vocabulary(about: ModelFacts, folder: Path) -> ModelFacts:
    """With what of the folder's tokenizer keeps llama.cpp's converter from making a GGUF file."""
    why = why_no_vocabulary(folder, about.architecture) if about.convertible else None
    return about if why is None else dataclasses.replace(about, convertible=False, not_convertible=why)


def _made(
    recipe: Recipe, about: ModelFacts, data: DatasetFacts, choices: Choices, offered: Any, probe: Any = None
) -> dict[str, Any]:
    this = machine.read_machine()
    known = calibration.known(this, about, choices.device or this.device)
    return planner.make_plan(
        recipe,
        model=about,
        dataset=data,
        machine=this,
        choices=choices,
        probe=probe,
        offered=offered,
        calibrations=known,
    )


def load_recipe(file: Path | None, flags: dict[str, Any]) -> Recipe:
    """A recipe file with what the command line says in its place."""
    if file is None:
        return recipes.from_dict(flags)
    loaded = dataclasses.asdict(recipes.load(file))
    return recipes.from_dict({key: value for key, value in loaded.items() if value is not None} | flags)


def pinned(recipe: Recipe, model_commit: str | None, data_commit: str | None) -> Recipe:
    """Paths made absolute and revisions made commits, so that the plan means the same later and elsewhere."""
    here = {key: str(Path(getattr(recipe, key)).resolve()) for key in ("model", "data")}
    return dataclasses.replace(
        recipe,
        model=here["model"] if model_commit is None else recipe.model,
        revision=model_commit,
        data=here["data"] if Path(recipe.data).exists() else recipe.data,
        data_revision=data_commit or recipe.data_revision,
    )


def dataset_facts(console: Console, recipe: Recipe, about: ModelFacts) -> DatasetFacts:
    """Every row of a file; of a dataset on the Hub its metadata and first rows. Tokens as they were counted by
    `skill-train data`, else a range."""
    if Path(recipe.data).exists() or not rows.is_id(recipe.data):
        found = dataset.scan(recipe)
        if (media := dataset.unread_media(recipe, found.columns)) is not None:
            console.warn("pictures", media)
        first: Sequence[dict[str, Any]] = dataset.first_rows_of(recipe)
    else:
        from skill_train.hub import datasets as hub_dataset

        console.status(f"asking the Hub about {recipe.data}")
        looked = hub_dataset.look(recipe, dataset.first_format)
        found, first = dataset.with_text_of(looked.facts, recipe, looked.first), looked.first
    if not recipe.columns and (unread := dataset.unread_text(first, found.columns)):
        console.warn("unread_text", dataset.unread_text_told(unread, found.columns))
    found = for_model(found, has_chat_template=about.has_chat_template)
    key = tokens.tokenizer_key(recipe.model, about.revision)
    if key is None and Path(recipe.model).is_dir():
        console.warn("no_tokenizer", f"{recipe.model} has no tokenizer: it can be planned, and not trained")
    counted = tokens.known_tokens(found, key, split=recipe.split, loss_on=recipe.loss_on, max_length=recipe.max_length)
    if counted is None and found.text_bytes is not None:
        sizes = (found.rows, found.text_bytes, found.longest_text_bytes or found.text_bytes)
        counted = tokens.token_range(*sizes, recipe.max_length, found.turns or 0, found.longest_turns or 0)
    return dataclasses.replace(found, tokens=counted)


def require_room(console: Console, made: dict[str, Any], *, force: bool) -> None:
    """Refuses a run that cannot fit even by the lower estimate; warns where the upper one does not.

    Raises:
        DecisionNeeded: it does not fit, or needs what this machine lacks.
    """
    memory, usable = made["estimates"]["memory_bytes"], made["estimates"]["usable_bytes"]
    tight = memory["low"] is not None and usable is not None and memory["low"] <= usable < memory["high"]
    later = {"unknown_memory", "device_unavailable"} | ({"no_memory"} if tight else set())  # torch itself will tell
    stopping = [blocker for blocker in made["blockers"] if blocker["code"] not in later]
    if tight:
        console.warn(
            "little_memory", f"the run may need {memory['high'] / 1e9:.1f} GB; {usable / 1e9:.1f} GB can be used"
        )
    if stopping and not force:
        raise _blocked({**made, "blockers": stopping})


def require_no_blockers(made: dict[str, Any]) -> None:
    """Refuses a plan that something would stop, as `plan` does.

    Raises:
        DecisionNeeded: it has blockers.
    """
    if made["blockers"]:
        raise _blocked(made)


def _blocked(made: dict[str, Any]) -> DecisionNeeded:
    """The plan stands, and something would stop it. With the way out that the plan knows."""
    first = made["blockers"][0]
    cloud = made["where"] == "cloud"
    elsewhere = "" if cloud or made["policy"]["sensitive"] else ", or --where cloud"
    larger = "a larger flavor, " if cloud else ""
    hint = {
        "needs_cuda": f"load_in_4bit: false with a smaller model{elsewhere}",
        "no_memory": f"{larger}a smaller model, a shorter max_length, load_in_4bit: true on an NVIDIA GPU{elsewhere}",
        "no_host_ram": f"{larger}a smaller model, or load_in_4bit: true, which reads a weight at a time{elsewhere}",
        "no_disk": "free some space, or choose another place for the run",
        "device_unavailable": "plan on the machine that has it; for another one compare memory_bytes with its memory",
        "no_torch": f"a Python built for arm64 on Apple silicon{elsewhere}",
        "too_slow": "a larger --max-hours, --flavor for the one that you accept, or fewer steps",
        "vision": "the text model of the same family, such as Qwen2.5 for Qwen2.5-VL",
    }.get(first["code"], "a smaller model, a shorter max_length, or load_in_4bit: true")
    return DecisionNeeded(
        f"this plan cannot run: {'; '.join(blocker['message'] for blocker in made['blockers'])}",
        code=first["code"],
        expected="a model and rows that fit",
        got=f"{made['where']}, {made['flavor'] or made['facts']['machine']['chip']}",
        hint=hint,
    )


def warn_of_export(console: Console, made: dict[str, Any]) -> None:
    """What cannot be had from this training, said before it."""
    model = made["facts"]["model"]
    why = model.get("not_convertible")
    if why:
        console.warn("not_convertible", f"{why}; training and merging work, and export-gguf refuses this model")
    elif window := model.get("unread_window"):
        longest = made["recipe"]["max_length"]
        console.warn("unread_window", convertible.unread_window_told(window, model["architecture"], longest))


def _warn_of_few(console: Console, recipe: dict[str, Any], rows: int) -> None:
    """What `evaluate` can say depends on how many rows it has."""
    fraction = recipe["held_out_fraction"]
    held = train_module().held_out_count(rows, fraction)
    if 0 < held < _FEW_HELD_OUT:
        points = 98 / math.sqrt(held)  # 1.96 standard errors of a share of one half
        few = f"{held} of {rows} rows are held out, which tell a share of right answers to ±{points:.0f} points"
        console.warn("few_held_out", f"{few}; held_out_fraction: {min(4 * fraction, 0.5):g} holds out more")


def _result(
    console: Console, made: dict[str, Any], out: Path | None, recipe: Path | None, said: dict[str, Any]
) -> Result:
    data = summary(made) | {"plan": str(out) if out else None}
    if made["facts"]["model"]["vision"]:
        console.warn("vision", "this version trains on text only; images in the rows are not read")
    epochs = next((reason for reason in made["reasons"] if reason["rule"] == "epochs"), None)
    if epochs is not None and float(epochs["value"]) > _MANY_EPOCHS:
        console.warn("many_epochs", f"this is {epochs['value']} epochs: {epochs['because']}; TRL's default is 3")
    warn_of_export(console, made)
    _warn_of_few(console, made["recipe"], made["facts"]["dataset"]["rows"])
    if made["recipe"]["format"] in BARE and made["facts"]["model"]["has_chat_template"]:
        console.warn("without_template", train_module().WITHOUT_TEMPLATE)
    if few := planner.few_steps(made["recipe"], made["recipe"]["max_steps"]):
        console.warn("few_steps", few)
    if made["facts"]["machine"]["on_battery"] and made["where"] == "local":
        console.warn("on_battery", "this machine runs on battery; training empties it")
    if made["where"] == "cloud" and made["fingerprints"]["model"] is not None:
        upload = f"hf upload {_word('NAMESPACE/' + Path(made['recipe']['model']).name)} FOLDER --private"
        console.warn("local_model", f"a job cannot read this model: plan with its id on the Hub, after {upload}")
    error = _blocked(made) if made["blockers"] else None
    return Result(
        data,
        human=lambda rich: tables.draw_plan(rich, data),
        quiet=made["where"],
        next=[] if error else _next(made, out, recipe, said),
        error=error,
    )


def _next(made: dict[str, Any], out: Path | None, recipe: Path | None, said: dict[str, Any]) -> list[str]:
    """The command that runs this plan, or the same recipe where no plan was written."""
    if made["where"] == "cloud" and made["fingerprints"]["model"] is not None:
        return []  # a job cannot read a folder of this machine, and the plan warns of it
    command = "skill-train local" if made["where"] == "local" else "skill-train submit"
    if out is not None:
        return [f"{command} {_word(out)}"]
    if made["where"] == "cloud":  # the machine of the plan, and nothing of this one
        said = {key: value for key, value in said.items() if key != "device"} | {"flavor": made["flavor"]}
    options = [f"--{key.replace('_', '-')} {_word(value)}" for key, value in said.items()]
    return [" ".join([command, *([_word(recipe)] if recipe else []), *options])]


def summary(made: dict[str, Any]) -> dict[str, Any]:
    """What a reader of a plan wants to know, short enough for one answer. How the processes of a plan with several are
    started has ten reasons of its own; they stand in the plan."""
    estimates = made["estimates"]
    keys = ("memory_bytes", "memory_parts", "usable_bytes", "seconds", "seconds_parts", "cost_usd")
    later = ("merge_bytes", "convert_bytes", "verify_bytes", "disk_bytes", "adapter_parameters", "files", "flavors")
    return {
        "where": made["where"],
        "flavor": made["flavor"],
        "timeout_seconds": made["timeout_seconds"],
        "blockers": made["blockers"],
        "parameters": made["facts"]["model"]["parameters"],
        "recipe_hash": made["recipe_hash"],
        **{key: estimates[key] for key in keys},
        "reasons": [reason for reason in made["reasons"] if reason not in made["launch"]["reasons"]],
        "placement": made["placement"],
        "launch": made["launch"]["arguments"],
        **{key: estimates[key] for key in later},
        "prices": estimates.get("prices"),  # older plans do not say whose they are
        "tokens": made["facts"]["dataset"]["tokens"],
    }


def actual(made: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """What was estimated beside what was measured. Nothing was estimated of the smaller layout of a second try."""
    figures = record["figures"]
    peaks = figures["peak_memory_bytes"]
    device = made["placement"]["device"]
    measured = {"memory_bytes": peaks.get(device, peaks.get("rss")), "seconds": record["seconds"]}
    estimates = {} if record.get("smaller_layout") else made.get("estimates", {})
    return {
        key: {
            "low": estimates.get(key, {}).get("low"),
            "high": estimates.get(key, {}).get("high"),
            "actual": value,
            "within": _within(estimates.get(key, {}), value),
        }
        for key, value in measured.items()
    }


def _within(estimate: dict[str, Any], value: float | None) -> bool | None:
    if value is None or estimate.get("low") is None:
        return None
    return bool(estimate["low"] <= value <= estimate["high"])


def _of_run(folder: Path, said: dict[str, Any]) -> Result:
    """The plan of a run as it was made, and what was measured."""
    run = open_run(folder)
    others = [f"--{key.replace('_', '-')}" for key, value in said.items() if value is not None]
    if others:
        hint = f"skill-train plan {_word(folder)}"
        raise UsageError(f"{folder} is a run, whose plan is made; it takes no {others[0]}", code="bad_usage", hint=hint)
    made = read_json(run.plan)
    data = summary(made) | {"plan": str(run.plan)}
    if run.record("train").is_file():
        data["actual"] = actual(made, read_json(run.record("train")))
    return Result(data, human=lambda rich: tables.draw_plan(rich, data), quiet=made["where"])


def _word(value: Any) -> str:
    return shlex.quote(str(value))
