"""`submit --rehearse`: two steps of the job on this machine."""

from __future__ import annotations

from pathlib import Path

from skill_train.cloud import rehearse, stage_data
from skill_train.cloud.submit import Order
from skill_train.commands._drawing import draw_lines
from skill_train.commands._ended_training import smoke_failure
from skill_train.commands._planning import plan_with_files, require_room
from skill_train.commands._submit_answer import specification
from skill_train.commands._submit_plan import SubmitOptions, command_of, recipe_of, run_dir_of, with_repository
from skill_train.core.console import Console, Result
from skill_train.core.errors import DecisionNeeded
from skill_train.plan.placement import HERE
from skill_train.recipe.fields import Recipe
from skill_train.run.folder import RunDir
from skill_train.run.plan_record import Plan


def rehearsed(console: Console, options: SubmitOptions, plan: Plan) -> Result:
    """Runs two steps of the job on this machine. Nothing is sent."""
    plan = with_repository(plan, options, options.namespace or "me")
    here = _plan_here(console, recipe_of(plan, max_steps=rehearse.STEPS))
    for part in ("device", "dtype", "num_processes"):
        console.status(f"{part}: {getattr(here.placement, part)} here, {getattr(plan.placement, part)} in the job")
    staged = stage_data.stage_plan(plan)
    spec = specification(RunDir(run_dir_of(options, plan)), Order(plan, "me", None, staged, None), "rehearsal")
    figures, record = rehearse.rehearse(rehearse.shortened(plan, here), spec, staged, console.status)
    failure, verdict = smoke_failure(RunDir(Path()), record), record.verdict
    if failure is not None:
        failure.hint = "change the recipe: the job would train in the same way"
    differences = rehearse.differences(plan, here)
    data = {"verdict": verdict, **figures, "not_rehearsed": differences}
    lines = [
        f"rehearsal: {verdict}, {figures['steps']} steps in {figures['seconds']} s, {figures['kept_files']} files kept",
        *(f"not rehearsed: {text}" for text in differences),
    ]
    again = [] if failure else [command_of(options, rehearse=False)]
    return Result(data, human=lambda rich: draw_lines(rich, lines), quiet=verdict, next=again, error=failure)


def _plan_here(console: Console, recipe: Recipe) -> Plan:
    """A plan of the same recipe for this machine."""
    try:
        here = plan_with_files(console, recipe, HERE)
        require_room(console, here, Path(), force=False)
    except DecisionNeeded as error:
        raise DecisionNeeded(
            f"the run cannot be rehearsed on this machine: {error.message}",
            code="cannot_rehearse",
            expected=error.expected,
            got=error.got,
            hint="use --dry-run instead of --rehearse, which checks everything except the training",
        ) from None
    return here
