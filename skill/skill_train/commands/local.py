"""`local`: reads the facts, plans, trains on this machine, and gives the smoke verdict."""

import contextlib
import dataclasses
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from skill_train.commands._command import PATH, argument, command, option, set_options, words_of
from skill_train.commands._drawing import STYLE, figure, folding_table
from skill_train.commands._ended_training import (
    measured_beside_estimates,
    smoke_failure,
    warn_of_base_rows,
    warn_of_run,
)
from skill_train.commands._planning import (
    RECIPE_OPTIONS,
    RecipeFlags,
    device_option,
    load_recipe,
    mapping_in,
    plan_with_files,
    require_room,
    warn_of_plan,
)
from skill_train.core.console import Console, Result
from skill_train.core.errors import UsageError, quoted
from skill_train.plan.file import is_plan, read_unchanged_plan, require_same_inputs, require_same_recipe
from skill_train.plan.placement import HERE
from skill_train.run import cloud_record, plan_record, train_record
from skill_train.run.earlier_start import require_resumable
from skill_train.run.folder import RUNS, RunDir, StepResult, open_run
from skill_train.run.plan_record import Plan
from skill_train.run.train_record import SmokeCheck, TrainRecord
from skill_train.train import measured_speed


@dataclass(frozen=True)
class LocalOptions(RecipeFlags):
    """`recipe` is a recipe file, or a plan that `skill-train plan --out` wrote."""

    recipe: Path | None = argument(PATH, required=False)
    device: str | None = device_option()
    force: bool = option(False, "Train in spite of a known risk: a --dtype that may end in NaN, or too little memory.")
    run_dir: Path | None = option(None, "Folder of the run.  [default: runs/<data>-<recipe hash>]", PATH)
    resume: bool = option(False, "Continue the run in --run-dir from its newest complete checkpoint.")

    @property
    def names_a_recipe(self) -> bool:
        return self.recipe is not None or bool(set_options(self, RECIPE_OPTIONS))

    @property
    def goes_on(self) -> bool:
        """Whether to continue the run in --run-dir with its original plan."""
        return self.resume and self.run_dir is not None and not self.names_a_recipe


@command(
    LocalOptions,
    "skill-train local --model Qwen/Qwen2.5-0.5B-Instruct --data tickets.jsonl --max-steps 50 --run-dir runs/first",
    "skill-train local recipe.yaml",
)
def local(options: LocalOptions, console: Console) -> Result:
    """Train an adapter or all weights here and end with a smoke verdict. RECIPE is a recipe file or a plan."""
    if options.resume and options.run_dir is None and not options.names_a_recipe:
        raise UsageError(
            "--resume needs a run to continue",
            code="bad_usage",
            expected="--run-dir, or the recipe and options of the run",
            hint="skill-train local --resume --run-dir RUN",
        )
    if options.run_dir is not None:
        cloud_record.require_not_submitted(RunDir(options.run_dir))
        alone = options.recipe is None and None in (options.model, options.data)
        if options.resume and alone and not options.goes_on:  # the options change settings of the run's own recipe
            run = open_run(options.run_dir)
            options = dataclasses.replace(options, recipe=run.recipe if run.recipe.is_file() else run.plan)
    plan = _plan(options, console)
    folder = _run_at(options.run_dir or _default_run_dir(plan))
    trained = _train(options, console, folder, plan)
    plan = plan_record.read(folder.plan)  # a run that had begun keeps its original plan
    epochs = _epochs(plan, trained.record)
    _warn(options, console, plan, trained.record)
    warn_of_base_rows(console, folder)
    whole = _whole_training(options) if epochs < 1 and not options.goes_on else []
    return _result(folder, plan, trained, epochs, whole)


def _plan(options: LocalOptions, console: Console) -> Plan:
    recipe_values, placement = set_options(options, RECIPE_OPTIONS), {"device": options.device, "dtype": options.dtype}
    if options.goes_on and options.run_dir is not None:
        return _plan_to_go_on_with(options.run_dir)
    if options.recipe is not None and is_plan(options.recipe):
        return read_unchanged_plan(options.recipe, recipe_values | placement)
    choices = msgspec.structs.replace(HERE, device=options.device, dtype=options.dtype, force=options.force)
    with mapping_in(options.recipe):
        return plan_with_files(console, load_recipe(options.recipe, recipe_values), choices)


def _train(options: LocalOptions, console: Console, folder: RunDir, plan: Plan) -> StepResult[TrainRecord]:
    words = words_of("local", options.recipe, set_options(options, (*RECIPE_OPTIONS, "device", "dtype")))
    words += ["--force"] * options.force
    place = ["--run-dir", str(options.run_dir)] if options.run_dir is not None else []
    with _elsewhere(folder, words):
        if options.resume and not options.goes_on:
            require_resumable(folder, plan, shlex.join([*words, *place]))
        if not options.goes_on and not _is_finished(folder, plan):
            require_room(console, plan, folder.path, force=options.force)
            warn_of_plan(console, plan)
            if options.recipe is not None and is_plan(options.recipe):  # the files of a recipe's model are here already
                from skill_train.hub.models import model_folder

                model_folder(plan.recipe.model, plan.recipe.revision)
        return train_run(console, folder, plan, resume=options.resume)


def _warn(options: LocalOptions, console: Console, plan: Plan, record: TrainRecord) -> None:
    began = plan.placement
    for key, value, had in (("device", options.device, began.device), ("dtype", options.dtype, began.dtype)):
        if value not in (None, had):
            console.warn("kept_plan", f"the run started with {key} {had} and keeps it; {value} is ignored")
    epochs = _epochs(plan, record)
    if epochs >= 1.05 and (_steps_were_set(plan) or 10 * (record.data.skipped_rows or 0) > record.data.rows):
        rows, times = record.data.train_rows, f"{epochs:.2g}" if epochs < 10 else f"{epochs:.0f}"
        console.warn("epochs", f"{record.steps} steps are {times} epochs of the {rows} rows, so rows are repeated")
    warn_of_run(console, plan, record)


def _run_at(path: Path) -> RunDir:
    if path.exists() and not path.is_dir():
        raise UsageError(
            f"{path} is a file",
            code="bad_usage",
            expected="a new folder, or one of an earlier run",
            hint="another --run-dir",
        )
    return RunDir(path)


@contextlib.contextmanager
def _elsewhere(run: RunDir, words: list[str]) -> Iterator[None]:
    """If the folder holds another run, sets the hint to the same command with a new folder and without --resume."""
    try:
        yield
    except UsageError as error:
        if error.code == "another_run":
            error.hint = shlex.join([*words, "--run-dir", run.free_name()])
        raise


def _plan_to_go_on_with(folder: Path) -> Plan:
    """The original plan of a run. Refuses an unfinished run whose model, data or recipe has changed."""
    try:
        run = open_run(folder)
    except UsageError as error:
        error.hint = error.hint.replace("--run-dir runs/first", f"--run-dir {quoted(folder)}")
        raise
    plan = plan_record.read(run.plan)
    if not _is_finished(run, plan):
        if plan.where == "cloud":
            raise UsageError(
                f"{folder} holds a plan for the cloud ({plan.flavor})",
                code="cloud_plan",
                expected="a run that began on this machine",
                got=plan.placement.backend,
                hint=cloud_record.continue_command(run),
            )
        anew = f"skill-train local {quoted(run.recipe)} --run-dir NEW_RUN"
        require_same_inputs(run.plan, plan, f"restore what it began with, or start a new run: {anew}")
        require_same_recipe(run, plan, f"begin anew with the edited recipe: {anew}")
    return plan


def _epochs(plan: Plan, record: TrainRecord) -> float:
    """How many times the training saw each row."""
    return record.steps * plan.recipe.effective_batch_size / record.data.train_rows


def _steps_were_set(plan: Plan) -> bool:
    """Whether the user set the steps. Otherwise the plan has a reason for them: it computed them from epochs."""
    return all(reason.rule != "max_steps" for reason in plan.reasons)


def _whole_training(options: LocalOptions) -> list[str]:
    """The next command after a smoke run: the plan of the full training, here or in the cloud."""
    if options.max_steps is None:
        return []
    rest = tuple(name for name in RECIPE_OPTIONS if name != "max_steps")
    return [shlex.join(words_of("plan", options.recipe, set_options(options, rest)))]


def _is_finished(run: RunDir, plan: Plan) -> bool:
    """Whether a run of this recipe is finished, so that no memory is needed."""
    done = run.plan.is_file() and run.record("train").is_file() and run.tuned.is_dir()
    return done and plan_record.read(run.plan).recipe_hash == plan.recipe_hash


def plan_of(console: Console, recipe: Path, **values: object) -> Plan:
    """The plan of a recipe. `values` replace its own values."""
    with mapping_in(recipe):
        return plan_with_files(console, load_recipe(recipe, values), HERE)


def train_run(console: Console, run: RunDir, plan: Plan, *, resume: bool) -> StepResult[TrainRecord]:
    """Trains a plan in its run directory, shows the reason for each value, and remembers the measured speed."""
    from skill_train.train.local import train

    for reason in plan.reasons:
        console.status(f"{reason.rule}: {reason.value} ({reason.because})")
    with console.progress("training") as progress:
        trained = train(run, plan, resume=resume, progress=progress, say=console.status)
    for note in trained.record.data.notes:
        console.warn("template", note)
    if not trained.reused:
        steps, ended = train_record.read_steps(run.metrics), trained.record.finished_at or ""
        measured_speed.remember(plan_record.read(run.plan), steps, ended)
    return trained


def _default_run_dir(plan: Plan) -> Path:
    name = re.sub(r"[^\w.-]+", "-", Path(plan.recipe.data).stem).strip("-") or "run"
    return RUNS / f"{name}-{plan.recipe_hash[:8]}"


def _result(run: RunDir, plan: Plan, trained: StepResult[TrainRecord], epochs: float, whole: list[str]) -> Result:
    record = trained.record
    error = smoke_failure(run, record)
    data = {
        "run_dir": str(run.path),
        "recipe_hash": plan.recipe_hash,
        "verdict": record.verdict,
        "checks": msgspec.to_builtins(record.checks),
        "figures": msgspec.to_builtins(record.figures),
        "steps": record.steps,
        "epochs": round(epochs, 3),
        "example": record.example,
        "answer": msgspec.to_builtins(record.answer),
        "data": msgspec.to_builtins(record.data),
        "placement": msgspec.to_builtins(plan.placement),
        "estimates": measured_beside_estimates(plan, record),
        "reused": trained.reused,
    }
    following = [] if error else [*whole, f"skill-train export-gguf {quoted(run.path)}"]
    return Result(data, human=lambda rich: _draw(rich, record), quiet=str(run.path), next=following, error=error)


def _draw(rich: Any, record: TrainRecord) -> None:
    draw_checks(rich, f"smoke test: {record.verdict}", record.checks)
    if record.example is not None:
        rich.print("one row as it was fed, ⟦trained parts⟧ marked:\n" + record.example[:600])
    if record.answer is not None:
        rich.print("prompt: " + record.answer.prompt[-300:])
        for when, answer in (("before", record.answer.before), ("after", record.answer.after)):
            rich.print(f"{when}: {'not measured' if answer is None else repr(answer[:200])}")


def draw_checks(rich: Any, title: str, checks: list[SmokeCheck]) -> None:
    table = folding_table("check", "verdict", "figure", "detail", title=title)
    for check in checks:
        table.add_row(check.name, check.verdict, figure(check.figure), check.detail, style=STYLE[check.verdict])
    rich.print(table)
