"""`plan`: reads the facts, makes the decisions, and writes them. Spends nothing and needs neither torch nor a GPU."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from skill_train.commands._command import HOURS, PATH, argument, command, option, option_of, set_options, words_of
from skill_train.commands._drawing import rich_table
from skill_train.commands._ended_training import MeasuredFigure, measured_beside_estimates
from skill_train.commands._for_device import (
    CANDIDATES,
    DeviceAnswer,
    DeviceOptions,
    DeviceQuestion,
    answer_of,
    candidates_of,
    device_question,
    draw_answer,
    estimated,
    with_i_quants,
)
from skill_train.commands._planning import (
    DEFAULT_HOURS,
    RECIPE_OPTIONS,
    RecipeFlags,
    blocked,
    device_option,
    flavor_option,
    lacking,
    load_recipe,
    mapping_in,
    plan_from_metadata,
    warn_of_plan,
)
from skill_train.core.console import Console, Result
from skill_train.core.errors import DecisionNeeded, UsageError, quoted
from skill_train.core.units import dollars, duration, megabytes, size, speed
from skill_train.plan.few_steps import few_steps
from skill_train.plan.file import require_free
from skill_train.plan.placement import Choices
from skill_train.program.encode import SYSTEM_UNREAD
from skill_train.program.plan import held_out_count
from skill_train.recipe.formats import BARE
from skill_train.recipe.resolved import ResolvedRecipe
from skill_train.run import plan_record, train_record
from skill_train.run.evaluate_record import FEW_ROWS
from skill_train.run.folder import open_run
from skill_train.run.plan_record import Blocker, Estimate, Estimates, Number, Offer, Plan, Prices, Reason

if TYPE_CHECKING:
    from skill_train.cloud.stage_data import Listed

_MANY_EPOCHS = 10
_DEVICE_OPTIONS = ("for_device", "memory", "bandwidth", "context", "max_size", "min_speed", "quant")


@dataclass(frozen=True)
class _WhereOptions(RecipeFlags):
    """The options that the help shows before the options of a device."""

    recipe: Path | None = argument(PATH, required=False)
    device: str | None = device_option()
    where: str | None = option(None, "Override the rules.  [default: the rules decide]", ("local", "cloud"))
    flavor: str | None = flavor_option()
    max_hours: float = option(
        DEFAULT_HOURS, "Longest acceptable run, in hours; a longer one is planned for the cloud.", HOURS
    )


@dataclass(frozen=True)
class PlanOptions(DeviceOptions, _WhereOptions):
    quant: str | None = option(
        None,
        f"Types of file for --for, separated by commas.  [default: {','.join(CANDIDATES)}, and up to two i-quants]",
    )
    out: Path | None = option(None, "File for the plan; `skill-train local PLAN` runs it.", PATH)


@command(
    PlanOptions,
    "skill-train plan --model Qwen/Qwen2.5-7B-Instruct --data tickets.jsonl",
    "skill-train plan recipe.yaml --where cloud --max-hours 2 --out plan.json",
    'skill-train plan --model Qwen/Qwen2.5-0.5B-Instruct --data tickets.jsonl --for "iPhone 15"',
)
def plan(options: PlanOptions, console: Console) -> Result:
    """Decide whether to train here or in the cloud, and estimate memory, time and cost; spends nothing.

    RECIPE is a recipe file, or the folder of a run, whose estimates are then shown beside what was measured.
    """
    if options.recipe is not None and options.recipe.is_dir():
        return _plan_of_run(options.recipe, options)
    if options.flavor is not None and options.where == "local":
        raise UsageError(
            "--flavor and --where local cannot be used together: --flavor chooses a cloud machine",
            code="bad_usage",
            got="--where local",
            hint="omit one of them",
        )
    types = None if options.quant is None else candidates_of(options.quant)
    if options.out is not None:
        require_free(options.out)
    recipe = load_recipe(options.recipe, set_options(options, RECIPE_OPTIONS))
    with mapping_in(options.recipe):
        plan, sent = _with_pictures(plan_from_metadata(console, recipe, _choices(options)))
    question = device_question(options, plan.facts.model, plan.facts.machine)
    if question is None and options.quant is not None:
        hint = "skill-train plan --help"
        raise UsageError("--quant needs a device", code="bad_usage", expected="--for, or --memory", hint=hint)
    if options.out is not None:
        plan_record.write(options.out, plan)
    _warn(console, plan)
    return _result(plan, options, sent, _on_device(question, plan, types))


def _with_pictures(plan: Plan) -> tuple[Plan, Listed | None]:
    """The plan, with a blocker if its pictures cannot be sent to a job, and the files that would be sent."""
    if plan.where != "cloud" or not plan.recipe.images or plan.fingerprints["data"] is None:
        return plan, None
    from skill_train.cloud.stage_data import list_files  # a plan without pictures need not load it

    try:
        return plan, list_files(Path(plan.recipe.data), plan.recipe)
    except UsageError as error:
        return replace(plan, blockers=[*plan.blockers, Blocker(error.code, error.message, error.hint)]), None


def _choices(options: PlanOptions) -> Choices:
    """The user's choices. A flavor implies the cloud."""
    return Choices(
        options.device,
        options.dtype,
        where=options.where or ("cloud" if options.flavor else None),
        flavor=options.flavor,
        max_hours=options.max_hours,
        where_because=f"--flavor {options.flavor}" if options.flavor and options.where is None else None,
    )


def _plan_of_run(folder: Path, options: PlanOptions) -> Result:
    run = open_run(folder)
    others = set_options(options, (*RECIPE_OPTIONS, "device", "dtype", "where", "flavor", "out", *_DEVICE_OPTIONS))
    if others:
        hint = f"skill-train plan {quoted(folder)}"
        option = option_of(next(iter(others)))
        raise UsageError(f"{folder} is a run with a plan, so {option} cannot be used", code="bad_usage", hint=hint)
    plan = plan_record.read(run.plan)
    data, actual = _summary(plan) | {"plan": str(run.plan)}, dict[str, MeasuredFigure]()
    if run.record("train").is_file():
        data["actual"] = actual = measured_beside_estimates(plan, train_record.read(run.record("train")))
    return Result(data, human=lambda rich: _draw(rich, plan, actual), quiet=plan.where)


def _on_device(
    question: DeviceQuestion | None, plan: Plan, types: list[str] | None
) -> tuple[DeviceAnswer | None, DecisionNeeded | None]:
    """The answer about the files that could be exported for the device, and the error if none fits."""
    if question is None:
        return None, None
    model, question = plan.facts.model, dataclasses.replace(question, pictures=plan.recipe.images)
    if types is None:
        question = with_i_quants(question, model, matrix=True)  # the matrix will be computed from the training rows
        types = [*CANDIDATES, *question.i_quants]
    return answer_of(question, [estimated(question, model, quant) for quant in types])


def _result(
    plan: Plan, options: PlanOptions, sent: Listed | None, on_device: tuple[DeviceAnswer | None, DecisionNeeded | None]
) -> Result:
    data = _summary(plan) | {"plan": str(options.out) if options.out else None}
    if sent is not None:
        data["upload"] = {"files": len(sent.files), "picture_files": len(sent.pictures), "bytes": sent.bytes}
    answer, nothing_fits = on_device
    data |= {} if answer is None else {"for": answer}
    error = blocked(plan) if plan.blockers else nothing_fits

    def draw(rich: Any) -> None:
        _draw(rich, plan, {}, sent)
        if answer is not None:
            draw_answer(rich, answer)

    return Result(data, human=draw, quiet=plan.where, next=[] if error else _next(plan, options), error=error)


def _warn(console: Console, plan: Plan) -> None:
    if plan.facts.model.vision and not plan.recipe.images:
        console.warn("vision", "the rows have no pictures that are read, so the vision model is trained on text alone")
    epochs = next((reason for reason in plan.reasons if reason.rule == "epochs"), None)
    if epochs is not None and float(epochs.value) > _MANY_EPOCHS:
        console.warn("many_epochs", f"this is {epochs.value} epochs: {epochs.because}; TRL's default is 3")
    warn_of_plan(console, plan)
    _warn_of_few(console, plan.recipe, plan.facts.dataset.rows)
    if plan.recipe.format in BARE and "system" in plan.recipe.columns:
        console.warn("unread_text", SYSTEM_UNREAD)
    if few := few_steps(plan.recipe, plan.recipe.max_steps):
        console.warn("few_steps", few)
    if plan.facts.machine.on_battery and plan.where == "local":
        console.warn("on_battery", "this machine runs on battery, and training drains it")
    if _is_out_of_reach(plan):
        upload = f"hf upload {quoted('NAMESPACE/' + Path(plan.recipe.model).name)} FOLDER --private"
        console.warn("local_model", f"a job cannot read a local model: plan with its Hub id, after {upload}")


def _warn_of_few(console: Console, recipe: ResolvedRecipe, rows: int) -> None:
    """Warns about few held-out rows, because `evaluate` can then say little."""
    fraction = recipe.held_out_fraction
    held_out = held_out_count(rows, fraction)
    if 0 < held_out < FEW_ROWS:
        points = 98 / math.sqrt(held_out)  # 1.96 standard errors of a share of one half
        few = f"{held_out} of {rows} rows are held out, which tell a share of right answers to ±{points:.0f} points"
        more = min(4 * fraction, 0.5, math.ceil(100 * FEW_ROWS / rows) / 100)
        more_rows = f"; set held_out_fraction: {more:g} to hold out more" if more > fraction else ""
        console.warn("few_held_out", few + more_rows)


def _is_out_of_reach(plan: Plan) -> bool:
    """Whether the plan's job needs a model folder that exists only on this machine."""
    return plan.where == "cloud" and plan.fingerprints["model"] is not None


def _next(plan: Plan, options: PlanOptions) -> list[str]:
    """The command that runs this plan, or its recipe if no plan was written. Empty if that command would fail."""
    if _is_out_of_reach(plan) or lacking(plan.recipe.model, plan.facts.model):
        return []
    command = "local" if plan.where == "local" else "submit"
    if options.out is not None:
        return [shlex.join(["skill-train", command, str(options.out)])]
    values = set_options(options, (*RECIPE_OPTIONS, "device", "dtype"))
    if plan.where == "cloud":  # the flavor of the plan replaces the device of this machine
        values = {key: value for key, value in values.items() if key != "device"} | {"flavor": plan.flavor}
    return [shlex.join(words_of(command, options.recipe, values))]


def _summary(plan: Plan) -> dict[str, object]:
    """The parts of the plan that a reader needs, short enough for one answer. The reasons for the launch of several
    processes are only in the plan file."""
    estimates, tokens = msgspec.to_builtins(plan.estimates), plan.facts.dataset.tokens
    keys = ("memory_bytes", "memory_parts", "usable_bytes", "seconds", "seconds_parts", "cost_usd")
    later = ("merge_bytes", "convert_bytes", "verify_bytes", "disk_bytes", "adapter_parameters", "files", "flavors")
    return {
        "where": plan.where,
        "flavor": plan.flavor,
        "timeout_seconds": plan.timeout_seconds,
        "blockers": msgspec.to_builtins(plan.blockers),
        "parameters": plan.facts.model.parameters,
        "recipe_hash": plan.recipe_hash,
        **{key: estimates[key] for key in keys},
        "reasons": msgspec.to_builtins(_reasons(plan)),
        "placement": msgspec.to_builtins(plan.placement),
        "launch": plan.launch.arguments,
        **{key: estimates[key] for key in later},
        "prices": estimates["prices"],
        "tokens": msgspec.to_builtins(tokens),
        **({"picture_tokens": msgspec.to_builtins(plan.facts.dataset.picture_tokens)} if plan.recipe.images else {}),
    }


def _reasons(plan: Plan) -> list[Reason]:
    return [reason for reason in plan.reasons if reason not in plan.launch.reasons]


def _draw(rich: Any, plan: Plan, actual: dict[str, MeasuredFigure], sent: Listed | None = None) -> None:
    """Draws the decision with its reasons, the parts of memory and time, the cost, and the needs of each file. A
    finished run also has `actual` figures."""
    where = plan.where + (f" ({plan.flavor})" if plan.flavor else "")
    rules = rich_table(title=f"train: {where}")
    rules.add_column("rule", no_wrap=True)
    rules.add_column("says", overflow="fold", max_width=24)
    rules.add_column("because (source)", overflow="fold")
    for reason in _reasons(plan):
        rules.add_row(reason.rule, reason.value, f"{reason.because} ({reason.source})")
    rich.print(rules)
    for blocker in plan.blockers:
        rich.print(f"blocked: {blocker.message}", style="red")
    if sent is not None:
        beside = f"the rows and {len(sent.pictures):,} files of pictures" if sent.pictures else "the rows"
        rich.print(f"upload to the job: {beside}, {megabytes(sent.bytes)}", soft_wrap=True)
    rich.print(_estimates_table(plan.estimates))
    if plan.estimates.flavors:
        rich.print(_flavors_table(plan.estimates.flavors, plan.estimates.prices))
    if actual:
        rich.print(_measured_table(actual))


def _estimates_table(estimates: Estimates) -> Any:
    table = rich_table("what", "from", "to", "because")
    for part in estimates.memory_parts:
        table.add_row(part.name, size(part.low), size(part.high), part.because)
    table.add_row("memory", *_ends(estimates.memory_bytes, size), style="bold", end_section=True)
    for part in estimates.seconds_parts:
        table.add_row(part.name, _duration(part.low), _duration(part.high), part.because)
    table.add_row("time", *_ends(estimates.seconds, _duration), style="bold", end_section=True)
    table.add_row("cost", *_ends(estimates.cost_usd, dollars), end_section=True)
    table.add_row("merge memory", *_ends(estimates.merge_bytes, size))
    table.add_row("convert memory", *_ends(estimates.convert_bytes, size))
    table.add_row("verify memory", *_ends(estimates.verify_bytes, size))
    table.add_row("disk space", *_ends(estimates.disk_bytes, size))
    for file in estimates.files:
        table.add_row(f"{file.quant} file", *_ends(file.bytes, size))
        table.add_row(f"{file.quant} memory to run", *_ends(file.memory_bytes, size))
        table.add_row(f"{file.quant} tokens/s here", *_ends(file.tokens_per_second, speed))
    return table


def _flavors_table(offers: list[Offer], prices: Prices | None) -> Any:
    whose = f"prices of {prices.source}, {prices.read_at}" if prices else None
    table = rich_table("in the cloud", "time", "cost", caption=whose, caption_justify="left")
    for offer in offers:
        table.add_row(offer.flavor, _range(offer.seconds, _duration), _range(offer.cost_usd, dollars))
    return table


def _range(ends: list[Number | None], text_of: Callable[[float], str]) -> str:
    return " to ".join("unknown" if end is None else text_of(end) for end in ends)


def _measured_table(figures: dict[str, MeasuredFigure]) -> Any:
    table = rich_table("finished run", "estimated", "measured", "inside the range")
    for name, both in figures.items():
        text_of, word = (size, "memory") if name == "memory_bytes" else (_duration, "time")
        ends = [end for end in (both["low"], both["high"]) if end is not None]
        estimated = "unknown" if len(ends) < 2 else " to ".join(map(text_of, ends))
        measured = "unknown" if both["actual"] is None else text_of(both["actual"])
        table.add_row(word, estimated, measured, {True: "yes", False: "no", None: "unknown"}[both["within"]])
    return table


def _ends(value: Estimate, text_of: Callable[[float], str]) -> tuple[str, str, str]:
    if value.low is None or value.high is None:
        return "unknown", "unknown", value.basis
    return text_of(value.low), text_of(value.high), value.basis


def _duration(seconds: float) -> str:
    """As `duration` for an estimate, but minutes have one decimal."""
    return f"{seconds / 60:.1f} min" if 90 <= seconds < 5400 else duration(seconds, estimated=True)
