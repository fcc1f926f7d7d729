"""`resume`: continues an unfinished cloud run with a new job."""

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path

import msgspec

from skill_train.cloud import bucket, find_run, preflight, stage_data
from skill_train.cloud import budget as cloud_budget
from skill_train.cloud.budget import Budget, Need, Price
from skill_train.cloud.failure_reason import Story, larger
from skill_train.cloud.find_run import CloudRun
from skill_train.commands._command import AGREED, DOLLARS, RUN, argument, command, option, run_dir_option
from skill_train.commands._job_snapshot import Snapshot, from_bucket, from_repository, snapshot, why_not_pushed
from skill_train.commands._spent import require_as_asked, spent_by_jobs
from skill_train.core.console import Console, Result
from skill_train.core.errors import AccessError, DecisionNeeded, UsageError, VerificationFailed, quoted
from skill_train.hub import flavors
from skill_train.plan.file import require_same_recipe
from skill_train.run import plan_record, progress
from skill_train.run.cloud_record import CloudData, CloudJob, CloudRecord
from skill_train.run.earlier_start import trained
from skill_train.run.folder import RunDir
from skill_train.run.plan_record import Estimate


@dataclass(frozen=True)
class ResumeOptions:
    run: str = argument(RUN)
    run_dir: Path | None = run_dir_option()
    flavor: str | None = option(None, "Another machine with the same number of GPUs.  [default: that of the last job]")
    timeout: str | None = option(
        None, "Time limit, such as 30m, 2h or 5400 (seconds).  [default: as before; longer after a timeout]"
    )
    max_cost: float | None = option(None, "Most dollars for all jobs of the plan.  [default: as before]", DOLLARS)
    yes: bool = option(False, "Start the job. Without this option the cost is shown and nothing is started.")
    agreed: float | None = option(None, AGREED, DOLLARS)


@command(
    ResumeOptions,
    "skill-train resume runs/tickets-cloud",
    "skill-train resume runs/tickets-cloud --flavor a100-large --max-cost 5 --yes",
)
def resume(options: ResumeOptions, console: Console) -> Result:
    """Start a new job that continues from the newest checkpoint, with the same recipe.

    A run on this machine goes on with `skill-train local --resume --run-dir RUN`.
    """
    from skill_train.cloud import resume

    cloud = find_run.find(options.run)
    newest = cloud.record.last_begun
    if newest is not None and newest.job_id != cloud.job.job_id:  # an id of an earlier job was given
        cloud = find_run.with_newest_job(cloud)
    if cloud.now.live:
        if cloud.run is not None:
            resume.with_missing_jobs(cloud.run)
        _require_as_asked(options, console, cloud)
        return _running_job(cloud, cloud.job, reused=True)
    cloud, run = find_run.with_run_dir(cloud, options.run_dir)
    ended = _ended_job(cloud, run, console)
    if ended.story is None:
        return _finished(cloud)
    require_same_recipe(run, plan_record.read(run.plan), f"skill-train submit {quoted(run.recipe)}")
    _require_program(cloud)
    _require_data(cloud, run)
    preflight.require_places_of_next_job(plan_record.read(run.plan), cloud.record.bucket)
    _check_flavor(ended, options.flavor)
    budget, command = _budget(options, ended)
    console.status(f"the last job: {ended.story.message}")
    if ended.story.remedy in ("recipe", "data"):
        console.warn("same_again", f"the same recipe may fail in the same way: {ended.story.help}")
    if not options.yes or budget.beyond(options.agreed):
        return _agreement(ended, budget, options, command)
    record, reused = resume.resume(
        run,
        flavor=budget.flavor,
        timeout_seconds=budget.timeout_seconds,
        usd_per_hour=budget.usd_per_hour,
        max_cost=_ceiling(options, cloud.record),
    )
    assert record.last_begun is not None  # a job was started
    if reused:
        _require_as_asked(options, console, msgspec.structs.replace(cloud, record=record, job=record.last_begun))
    return _running_job(cloud, record.last_begun, reused=reused, budget=None if reused else budget)


def _require_as_asked(options: ResumeOptions, console: Console, cloud: CloudRun) -> None:
    """Warns if a running job has another timeout or machine than the requested one, which it keeps."""
    job, timeout = cloud.job, cloud_budget.seconds_of(options.timeout) if options.timeout else None
    require_as_asked(console, cloud.word, cloud.record, job, max_cost=options.max_cost, timeout=timeout)
    if options.flavor not in (None, job.flavor):
        console.warn("another_flavor", f"job {job.job_id} is already running on {job.flavor}, not on {options.flavor}")


def _budget(options: ResumeOptions, ended: Snapshot) -> tuple[Budget, str]:
    """The budget of the new job, and the command that starts it, without a timeout."""
    cloud, record = ended.cloud, ended.cloud.record
    flavor = options.flavor or cloud.job.flavor
    max_cost = _ceiling(options, record)
    before = 0.0 if max_cost is None else spent_by_jobs(record.namespace, record.plan_hash, record)
    command = _command(cloud, flavor, max_cost)
    budget = cloud_budget.budget(
        _remaining(ended, flavor),
        price=_price(flavor),
        timeout=cloud_budget.seconds_of(options.timeout) if options.timeout else None,
        max_cost=max_cost,
        spent=before,
        command=command,
    )
    return budget, command


def _ceiling(options: ResumeOptions, record: CloudRecord) -> float | None:
    """The given `--max-cost`, or else the limit of the last job that had one."""
    if options.max_cost is not None:
        return options.max_cost
    return next((job.max_cost for job in reversed(record.jobs) if job.max_cost is not None), None)


def _ended_job(cloud: CloudRun, run: RunDir, console: Console) -> Snapshot:
    """The state of the run. A completed job without a result also gets a `story`, because the run is not finished."""
    ended = snapshot(cloud, console)
    if ended.story is not None or _has_result(cloud, run, console):
        return ended
    story = Story(
        code="nothing_kept",
        message="the job completed, but its result is neither in its bucket nor in its repository",
        help="start another job, which continues from the newest checkpoint",
    )
    return dataclasses.replace(ended, story=story)


def _has_result(cloud: CloudRun, run: RunDir, console: Console) -> bool:
    """Whether the result is on this machine, or can be fetched now. A changed file in the bucket or the repository does
    not count."""
    with contextlib.suppress(UsageError):
        trained(run)
        return True
    with contextlib.suppress(VerificationFailed):  # a file of the result is missing or was changed
        there = bucket.stored_run(cloud.record)
        if there is not None and there.state == "done":
            from_bucket(console, run, there)
            return True
    with contextlib.suppress(VerificationFailed):
        if not why_not_pushed(cloud, run):
            from_repository(cloud, run)
            return True
    return False


def _require_program(cloud: CloudRun) -> None:
    """Refuses a job whose program and plan are gone from the bucket: it would fail in its first minute, which is paid.
    A bucket that the token may not read is not checked."""
    record = cloud.record
    if record.folder is None:
        return
    with contextlib.suppress(AccessError):
        if "plan.json" in bucket.stored_records(record, ("plan.json",)).texts:
            return
        raise UsageError(
            f"the program and the plan of {cloud.name} are no longer in {record.bucket}",
            code="nothing_kept",
            expected=f"plan.json in the folder {record.folder}",
            got="no such file",
            hint=f"skill-train submit {cloud.word} --force-new",
        )


def _require_data(cloud: CloudRun, run: RunDir) -> None:
    """Refuses a job whose data is gone from the Hub or incomplete: it would fail in its first minute too. A place that
    the token may not read is not checked."""
    data = cloud.record.data
    if data is None:
        return
    with contextlib.suppress(AccessError):
        left = bucket.what_is_left_of(data)
        if not left:
            return
        raise UsageError(
            f"the data of {cloud.name} is no longer whole in {data.bucket or data.repository}",
            code="nothing_kept",
            expected=f"{data.files or 'the'} files in {data.folder or data.revision}",
            got=left,
            hint=_way_back(cloud, data, Path(plan_record.read(run.plan).recipe.data)),
        )


def _way_back(cloud: CloudRun, data: CloudData, here: Path) -> str:
    """The command that restores the data: it uploads a single file that is here unchanged, or starts a new run."""
    if data.files == 1 and here.is_file() and stage_data.stage(here).name == data.folder:
        place = f"hf://buckets/{data.bucket}/{data.folder}/{here.name}"
        return f"bring it back, and run the same command again: hf buckets cp {quoted(here)} {quoted(place)}"
    return f"skill-train submit {cloud.word} --force-new"


def _remaining(ended: Snapshot, flavor: str) -> Need:
    """The remaining time of the run by its measured speed, and a timeout for it."""
    measured, from_step = ended.speed, ended.kept_step
    before = ended.cloud.job.timeout_seconds or (ended.plan.timeout_seconds if ended.plan else None)
    same = flavor == ended.cloud.job.flavor
    if measured is not None and measured.seconds_per_step is not None and same:
        low = (measured.steps - from_step) * measured.seconds_per_step
        timed = f"{measured.seconds_per_step:.3g} s a step measured, {measured.steps - from_step} steps to go"
        estimate = Estimate(low, low * progress.MARGIN + progress.SAVING_SECONDS, timed)
    else:
        why = "no step was timed" if same else f"the steps were timed on {ended.cloud.job.flavor}"
        estimate = Estimate(None, None, why)
    if before is not None and ended.story is not None and ended.story.remedy == "time":
        ran, first = ended.ran_seconds or 0.0, ended.cloud.job.number == 1
        before = progress.longer_timeout(measured, kept_step=from_step, ran_seconds=ran, before=before, first=first)
    return Need(flavor, estimate, before)


def _check_flavor(ended: Snapshot, flavor: str | None) -> None:
    """Refuses a flavor that does not fit the run's plan, and the same flavor after memory ran out."""
    story, cloud = ended.story, ended.cloud
    offered = flavors.current(live=False)[0]
    if story is not None and story.remedy in ("gpu", "ram") and flavor is None:
        bigger = larger(offered, cloud.job.flavor, story.remedy)
        raise DecisionNeeded(
            f"{story.message}; a job on the same flavor would fail again",
            code=story.code,
            expected=story.help,
            got=cloud.job.flavor,
            hint=f"skill-train resume {cloud.word} --flavor {bigger.name}" if bigger else story.help,
        )
    flavors_by_name = {each.name: each for each in offered}
    now = flavors_by_name.get(cloud.job.flavor)
    if flavor is None or now is None:
        return
    same = [each.name for each in offered if each.gpus == now.gpus and bool(each.gpu) == bool(now.gpu)]
    if flavor not in same:
        raise UsageError(
            f"a run planned for {now.name} cannot continue on {flavor!r}",
            code="unknown_flavor",
            expected=f"a flavor with the same number of GPUs: {', '.join(same)}",
            got=flavor,
            hint=f"skill-train resume {cloud.word} --flavor {now.name}",
        )


def _price(flavor: str) -> Price:
    offered, source = flavors.current(live=True, max_age=0)  # --max-cost must hold at the current price
    return Price(next((each.usd_per_hour for each in offered if each.name == flavor), None), source)


def _command(cloud: CloudRun, flavor: str, max_cost: float | None) -> str:
    """The command of this resume, without a timeout."""
    words = ["skill-train", "resume", cloud.word]
    words += ["--flavor", flavor] if flavor != cloud.job.flavor else []
    words += ["--max-cost", f"{max_cost:g}"] if max_cost is not None else []
    return " ".join(words)


def _agreement(ended: Snapshot, budget: Budget, options: ResumeOptions, command: str) -> Result:
    """The answer without --yes, or if the cost is above the agreed amount: the new job, its cost, and its command."""
    cloud, cost = ended.cloud, budget.as_dict()
    command += f" --timeout {options.timeout} --yes" if options.timeout else " --yes"
    if budget.to_agree is not None and _ceiling(options, cloud.record) is None:  # --max-cost is a bound too
        command += f" --agreed {budget.to_agree}"
    error = DecisionNeeded(
        f"a new job on {budget.flavor} would continue from step {ended.kept_step}: {budget.in_words}",
        code="confirm_cost",
        expected="--yes",
        got=f"{budget.flavor}, stopped after {budget.timeout_seconds} s",
        hint=command,
    )
    data = {
        "run_dir": str(cloud.run.path) if cloud.run else None,
        "from_step": ended.kept_step,
        "flavor": budget.flavor,
        "timeout_seconds": budget.timeout_seconds,
        "cost_usd": cost,
        "why": ended.story.as_dict() if ended.story else None,
    }
    return Result(data, human=lambda rich: None, quiet=command, error=error)


def _finished(cloud: CloudRun) -> Result:
    data = {"run_dir": str(cloud.run.path) if cloud.run else None, "job_id": cloud.job.job_id, "finished": True}
    return Result(
        data | {"reused": True},
        human=lambda rich: rich.print(f"{cloud.name} has finished; nothing is left to do", soft_wrap=True),
        quiet=cloud.job.job_id or "",
        next=[f"skill-train pull {cloud.word}"],
    )


def _running_job(cloud: CloudRun, job: CloudJob, *, reused: bool, budget: Budget | None = None) -> Result:
    data = {
        "run_dir": str(cloud.run.path) if cloud.run else None,
        "job_id": job.job_id,
        "url": job.url,
        "reused": reused,
        "finished": False,
        "attempt": job.number,
        "flavor": job.flavor,
        "timeout_seconds": job.timeout_seconds,
        "cost_usd": budget.as_dict() if budget else None,
    }
    summary = f"{'already there' if reused else 'started'}: job {job.job_id} on {job.flavor}, {job.url}"
    return Result(
        data,
        human=lambda rich: rich.print(summary, soft_wrap=True),
        quiet=job.job_id or "",
        next=[f"skill-train {command} {cloud.word}" for command in ("wait", "logs", "pull")],
    )
