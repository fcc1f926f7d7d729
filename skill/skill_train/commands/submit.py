"""`submit`: plans for the cloud, checks, shows cost and uploads, and starts the job when the user accepts them."""

from pathlib import Path

from skill_train.cloud import find_run, rehearse, stage_data
from skill_train.cloud import submit as submission
from skill_train.cloud.budget import seconds_of
from skill_train.cloud.submit import Order, Sent
from skill_train.commands import _submit_answer, _submit_elsewhere
from skill_train.commands._command import command
from skill_train.commands._ended_training import smoke_failure
from skill_train.commands._job_snapshot import snapshot
from skill_train.commands._planning import plan_with_files, require_no_blockers, require_room
from skill_train.commands._spent import require_as_asked
from skill_train.commands._submit_answer import account_of, budget_of, check_order
from skill_train.commands._submit_plan import (
    SubmitOptions,
    cloud_plan,
    command_of,
    order_of,
    recipe_of,
    run_dir_of,
    with_repository,
)
from skill_train.core.console import Console, Result
from skill_train.core.errors import AccessError, DecisionNeeded, quoted
from skill_train.hub import flavors
from skill_train.hub.jobs import LIVE
from skill_train.plan.file import require_own_folder
from skill_train.plan.placement import HERE
from skill_train.recipe.fields import Recipe
from skill_train.run import cloud_record
from skill_train.run.folder import RunDir
from skill_train.run.plan_record import Plan


@command(
    SubmitOptions,
    "skill-train submit runs/first --max-cost 5",
    "skill-train submit recipe.yaml --flavor a10g-large --timeout 2h --yes",
)
def submit(options: SubmitOptions, console: Console) -> Result:
    """Run a recipe, a plan or a local run as a Hugging Face job; without --yes only show cost and uploads."""
    timeout = None if options.timeout is None else seconds_of(options.timeout)
    options = _submit_elsewhere.with_backend(options)
    plan = cloud_plan(console, options)
    require_no_blockers(plan)
    if options.rehearse:
        return _rehearsed(console, options, plan)
    run = RunDir(run_dir_of(options, plan))
    if not cloud_record.record_path(run).is_file():
        require_own_folder(run, plan)
    if options.backend != "hf_jobs":
        return _submit_elsewhere.write_elsewhere(console, options, plan, run)
    try:
        account = account_of(options)
    except AccessError as error:
        priced = budget_of(
            options, plan, flavors.known_flavor(plan.flavor), timeout
        )  # raises if --max-cost is too low, even without an account
        return _submit_answer.not_allowed(priced, error)
    order = order_of(options, plan, account)
    if options.force_new:
        submission.require_new(run, order.plan_hash)
    if not options.dry_run:
        existing = submission.existing(run, order, force_new=options.force_new)
        if existing is not None:
            return _job_answer(console, options, run, existing, order, timeout)
    checked = check_order(console, options, order, account, timeout)
    if options.dry_run:
        return _submit_answer.dry_run(run, checked)
    if not options.yes or checked.budget.beyond(options.agreed):
        return _submit_answer.decision(options, checked)
    sent = submission.submit(run, checked.order, force_new=options.force_new)
    return _job_answer(console, options, run, sent, checked.order, timeout)


def _job_answer(
    console: Console, options: SubmitOptions, run: RunDir, sent: Sent, order: Order, timeout: int | None
) -> Result:
    """The answer with a started or existing job. It has an error if the job ended without a result."""
    if sent.reused and sent.stage in (None, *LIVE):
        job = sent.record.last_begun
        assert job is not None  # the job that was found
        require_as_asked(console, quoted(run.path), sent.record, job, max_cost=options.max_cost, timeout=timeout)
    answer = _submit_answer.result(console, run, sent, order)
    if sent.stage in (None, "COMPLETED", *LIVE):
        return answer
    story = snapshot(find_run.find(str(run.path)), console).story
    ways = [command for command in story.next if command.startswith("skill-train ")] if story else []
    answer.next = ways or [f"skill-train resume {quoted(run.path)}"]
    answer.error = DecisionNeeded(
        f"the job of {run.path} has ended, and no new job was started: {story.message if story else sent.stage}",
        code="job_ended",
        expected=story.help if story else "a job that is running or completed",
        got=str(sent.stage),
        hint=answer.next[0],
    )
    return answer


def _rehearsed(console: Console, options: SubmitOptions, plan: Plan) -> Result:
    """Runs two steps of the job on this machine. Nothing is sent."""
    plan = with_repository(plan, options, options.namespace or "me")
    here = _plan_here(console, recipe_of(plan, max_steps=rehearse.STEPS))
    for part in ("device", "dtype", "num_processes"):
        console.status(f"{part}: {getattr(here.placement, part)} here, {getattr(plan.placement, part)} in the job")
    staged = stage_data.stage_plan(plan)
    order = Order(plan, "me", None, staged, None)
    spec = _submit_answer.specification(RunDir(run_dir_of(options, plan)), order, "rehearsal")
    figures, record = rehearse.rehearse(rehearse.shortened(plan, here), spec, staged, console.status)
    failure, verdict = smoke_failure(RunDir(Path()), record), record.verdict
    if failure is not None:
        failure.hint = "change the recipe: the job would train in the same way"
    differences = rehearse.differences(plan, here)
    data = {"verdict": verdict, **figures, "not_rehearsed": differences}
    done = (
        f"rehearsal: {verdict}, {figures['steps']} steps in {figures['seconds']} s, {figures['kept_files']} files kept"
    )
    text = "\n".join([done, *(f"not rehearsed: {text}" for text in differences)])
    again = [] if failure else [command_of(options, rehearse=False)]
    return Result(data, lambda rich: rich.print(text, soft_wrap=True), quiet=verdict, next=again, error=failure)


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
