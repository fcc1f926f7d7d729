"""The checks of `submit` before anything is sent, and its answers: the decision that the user must make, the job that
would be sent, or the existing job."""

import dataclasses
import json
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NotRequired, TypedDict

import msgspec
from msgspec.structs import replace

from skill_train.cloud import budget as cloud_budget
from skill_train.cloud import preflight, stage_data, start_once
from skill_train.cloud.budget import Budget, Cost, Need, Price
from skill_train.cloud.submit import Order, Sent, Upload, uploads
from skill_train.commands._planning import warn_of_plan
from skill_train.commands._spent import spent_by_jobs
from skill_train.commands._submit_plan import SubmitOptions, command_of, warn_of_personal
from skill_train.core.console import Console, Result
from skill_train.core.errors import DecisionNeeded, SkillTrainError, quoted
from skill_train.core.units import dollars, megabytes
from skill_train.facts import Flavor
from skill_train.hub import flavors, jobs
from skill_train.hub.account import Account
from skill_train.run import plan_record, records
from skill_train.run.cloud_record import CloudData, CloudJob, CloudRecord
from skill_train.run.folder import RunDir
from skill_train.run.job_spec import JobSpec
from skill_train.run.plan_record import Estimate, Plan

_AT_START = "(made at the start)"


@dataclass(frozen=True)
class Checked:
    """The findings of the checks. `unchecked` has the checks that the Hub did not answer; only a dry run allows any."""

    order: Order
    budget: Budget
    unchecked: list[str]


class JobShown(TypedDict):
    """A job that would be sent, or an existing one. Each has its own optional keys."""

    flavor: str | None
    timeout_seconds: int | None
    cost_usd: Cost
    namespace: str
    hub_model_id: str | None
    uploads: list[Upload]
    recipe_hash: str
    seconds: NotRequired[object]
    run_dir: NotRequired[str]
    job_id: NotRequired[str | None]
    url: NotRequired[str | None]
    reused: NotRequired[bool]
    stage: NotRequired[str | None]
    expected_end: NotRequired[dict[str, str | None]]
    plan_hash: NotRequired[str]


# --- The checks ---


def account_of(options: SubmitOptions) -> Account:
    """The account of the token. If the Hub does not answer, a dry run uses the namespace of the options."""
    unchecked: list[str] = []
    if not (options.dry_run and options.namespace):
        return preflight.signed_in_account()
    account = preflight.unless_unavailable(preflight.signed_in_account, "token", unchecked)
    return account or Account("unchecked", options.namespace, why="; ".join(unchecked))


def check_order(
    console: Console, options: SubmitOptions, order: Order, account: Account, timeout: int | None
) -> Checked:
    """Runs every check before the first upload. Each has its own error."""
    unchecked = [f"token: {account.why}"] if account.state == "unchecked" else []

    def ask(what: str, check: Any) -> Any:
        return preflight.unless_unavailable(check, what, unchecked) if options.dry_run else check()

    plan, repository = order.plan, order.plan.policy.hub_model_id or ""
    there, rows_there = (), ()
    if account.state == "valid":
        method = plan.recipe.finetuning_type
        there = ask("repository", lambda: preflight.result_repository(account, repository, method)) or ()
        with_data = order.staged is not None
        places = partial(
            preflight.require_private_places, order.namespace, order.data_repo, account, with_data=with_data
        )
        rows_there = ask("bucket", places) or ()
        ask("model and dataset", lambda: preflight.require_readable(plan))
    offer = ask("flavor and price", lambda: preflight.flavor(plan.flavor or "")) or flavors.known_flavor(plan.flavor)
    spent = 0.0
    if options.max_cost is not None and account.state == "valid":
        jobs = partial(spent_by_jobs, order.namespace, order.plan_hash, None)
        spent = ask("cost of earlier jobs", jobs) or 0.0
    job_budget = budget_of(options, plan, offer, timeout, spent)
    _warn(console, order, job_budget, there)
    _warn_of_names(console, order, rows_there)
    sent = replace(plan, timeout_seconds=job_budget.timeout_seconds)
    return Checked(dataclasses.replace(order, plan=sent, usd_per_hour=job_budget.usd_per_hour), job_budget, unchecked)


def budget_of(
    options: SubmitOptions, plan: Plan, offer: Flavor | None, timeout: int | None, spent: float = 0.0
) -> Budget:
    """The budget at this price, after the cost of earlier jobs."""
    return cloud_budget.budget(
        Need(plan.flavor or "", plan.estimates.seconds, plan.timeout_seconds),
        price=Price(None, "") if offer is None else Price(offer.usd_per_hour, f"price of {offer.read_at}"),
        timeout=timeout,
        max_cost=options.max_cost,
        spent=spent,
        command=command_of(options, timeout=None),
    )


def _warn_of_names(console: Console, order: Order, there: tuple[str, ...]) -> None:
    """Warns if the dataset repository already has files with the names of the uploads."""
    names = sorted(set(there) & set(order.staged.files if order.staged else ()))
    if names:
        more = f" and {len(names) - 1} more of these files" if len(names) > 1 else ""
        console.warn(
            "repository_in_use", f"{order.data_repo} already holds {names[0]}{more}; a new commit replaces what differs"
        )


def _warn(console: Console, order: Order, job_budget: Budget, there: tuple[str, ...]) -> None:
    warn_of_plan(console, order.plan)
    warn_of_personal(console, order)
    if job_budget.tight and job_budget.seconds is not None:
        console.warn(
            "tight_timeout",
            f"the timeout of {job_budget.timeout_seconds} s is below the upper estimate of "
            f"{job_budget.seconds[1]:.0f} s; a job that is stopped keeps its checkpoints",
        )
    if job_budget.lowered:
        console.warn(
            "lowered_timeout", f"the timeout was lowered to {job_budget.timeout_seconds} s to stay within --max-cost"
        )
    if there:
        name = order.plan.policy.hub_model_id
        console.warn(
            "repository_in_use", f"{name} already holds {len(there)} files; the result is added as a new commit"
        )
    if order.data_repo is not None and order.staged is None:
        console.warn("unused_data_repo", "--data-repo is ignored, because the data is already on the Hub")


# --- The answers ---


def _job_shown(checked: Checked) -> JobShown:
    order = checked.order
    return {
        "flavor": order.plan.flavor,
        "timeout_seconds": checked.budget.timeout_seconds,
        "cost_usd": checked.budget.as_dict(),
        "seconds": msgspec.to_builtins(order.plan.estimates.seconds),
        "namespace": order.namespace,
        "hub_model_id": order.plan.policy.hub_model_id,
        "uploads": uploads(order),
        "recipe_hash": order.plan.recipe_hash,
    }


def decision(options: SubmitOptions, checked: Checked) -> Result:
    """The answer without --yes, or if the cost is above the agreed amount: nothing is sent."""
    data = _job_shown(checked)
    agreed = None if options.max_cost is not None else checked.budget.to_agree  # --max-cost is a bound too
    again = command_of(options, yes=True, agreed=agreed)
    error = DecisionNeeded(
        f"this costs {'more than was agreed to' if options.yes else 'money'}: {checked.budget.in_words}",
        code="confirm_cost",
        expected="--yes, once the user has agreed to the cost and the uploads",
        got=f"{data['flavor']}, stopped after {data['timeout_seconds']} s",
        hint=again,
    )
    return Result(data, human=lambda rich: _draw(rich, data), quiet="", error=error)


def not_allowed(budget: Budget, error: SkillTrainError) -> Result:
    """The answer without access: the estimated cost and the error. Without access no other check is possible."""
    data = {"flavor": budget.flavor, "timeout_seconds": budget.timeout_seconds, "cost_usd": budget.as_dict()}
    summary = f"{budget.flavor}: {budget.in_words}"
    return Result(data, human=lambda rich: rich.print(summary), quiet="", error=error)


def dry_run(run: RunDir, checked: Checked) -> Result:
    """The answer of --dry-run: the job as it would be sent. Values that only the start creates are placeholders."""
    order = checked.order
    spec = specification(run, order, _AT_START)
    request = jobs.as_request(spec, (f"{order.namespace}/jobs-artifacts", _AT_START))
    data = {"job": request, "not_checked": checked.unchecked, "run_dir": str(run.path), **_job_shown(checked)}
    return Result(data, human=lambda rich: rich.print_json(data=data), quiet=json.dumps(request))


def specification(run: RunDir, order: Order, run_id: str) -> JobSpec:
    plan = order.plan
    record = CloudRecord(run_id, order.plan_hash, order.namespace, plan.policy.hub_model_id or "", data=_data(order))
    limits = plan.timeout_seconds or 0, records.timestamp(), order.usd_per_hour
    job = CloudJob(1, "starting", plan.flavor or "", *limits, max_cost=order.max_cost)
    return start_once.specification(run, plan, record, job)


def _data(order: Order) -> CloudData | None:
    staged = order.staged
    if staged is None:
        return None
    about = CloudData(stage_data.mount_path(staged), staged.bytes, len(staged.files))
    if order.data_repo is not None:
        return msgspec.structs.replace(about, repository=order.data_repo, revision=_AT_START)
    return msgspec.structs.replace(about, bucket=f"{order.namespace}/jobs-artifacts", folder=staged.name)


def result(console: Console, run: RunDir, sent: Sent, order: Order) -> Result:
    """The answer about the job that was started, or about the existing job."""
    record, plan = sent.record, plan_record.read(run.plan)
    last = record.last_begun
    assert last is not None
    repository = order.plan.policy.hub_model_id
    if record.hub_model_id != repository:
        console.warn("another_repository", f"the job pushes to {record.hub_model_id} instead of {repository}")
    budget = _budget_of(plan, last)
    data: JobShown = {
        "run_dir": str(run.path),
        "job_id": last.job_id,
        "url": last.url,
        "reused": sent.reused,
        "stage": sent.stage,
        "namespace": record.namespace,
        "hub_model_id": record.hub_model_id,
        "flavor": last.flavor,
        "timeout_seconds": last.timeout_seconds,
        "expected_end": _expected_end(last, budget, sent.stage),
        "cost_usd": budget.as_dict(),
        "recipe_hash": plan.recipe_hash,
        "plan_hash": record.plan_hash,
        "uploads": [] if sent.reused else uploads(order),
    }
    return Result(data, human=lambda rich: _draw(rich, data), quiet=str(last.job_id), next=_next(run, sent))


def _budget_of(plan: Plan, job: CloudJob) -> Budget:
    """The budget of an existing job. The estimate is for the whole plan, so it does not apply to a continued job."""
    limit, seconds = job.timeout_seconds, plan.estimates.seconds
    if job.number > 1 or limit is None:
        why = "it goes on from a checkpoint" if job.number > 1 else "the plan of the job cannot be read"
        seconds = Estimate(None, None, why)
    job_budget = cloud_budget.budget(
        Need(job.flavor, seconds, plan.timeout_seconds),
        price=Price(job.usd_per_hour, f"asked {job.asked_at[:10]}"),
        timeout=limit or 1,  # without an estimate any will do
        max_cost=None,
    )
    return job_budget if limit is not None else dataclasses.replace(job_budget, most_usd=None)


def _expected_end(job: CloudJob, budget: Budget, stage: str | None) -> dict[str, str | None]:
    """The expected end in UTC. It does not include the wait for a machine, whose length is unknown."""
    if budget.seconds is None or stage not in (None, *jobs.LIVE):
        return {"low": None, "high": None, "basis": budget.basis if budget.seconds is None else f"it is {stage}"}
    began = records.moment_of(job.created_at or job.asked_at)
    ends = (min(end, budget.timeout_seconds) for end in budget.seconds)  # the job is stopped at its timeout
    low, high = (records.timestamp(began + timedelta(seconds=end)) for end in ends)
    return {"low": low, "high": high, "basis": "the estimate, from when it was created, without the wait for a machine"}


def _next(run: RunDir, sent: Sent) -> list[str]:
    name = quoted(run.path)
    words: tuple[str, ...] = ("status {}", "resume {}")
    if sent.stage in (None, *jobs.LIVE):
        words = ("status {}", "logs {} --follow", "wait {}", "pull {}")
    elif sent.stage == "COMPLETED":
        words = ("pull {}",)
    return [f"skill-train {word.format(name)}" for word in words]


def _draw(rich: Any, data: JobShown) -> None:
    cost = data["cost_usd"]
    low, high = cost["low"], cost["high"]
    estimate = "not known" if low is None or high is None else f"{dollars(low)} to {dollars(high)}"
    most = "" if cost["most"] is None else f"; at most {dollars(cost['most'])}, at its timeout"
    limit = data["timeout_seconds"]
    stopped = "a time that is not known" if limit is None else f"{limit / 3600:.2f} h"
    lines = [f"job: {data['job_id']}, {data.get('stage')}, {data.get('url')}"] if "job_id" in data else []
    lines += [f"run directory: {data['run_dir']}"] if "run_dir" in data else []
    lines += [
        f"machine: {data['flavor']} of {data['namespace']}, stopped after {stopped}",
        f"cost: {estimate}{most} ({cost['basis']})",
        f"result: the private repository {data['hub_model_id']}, which the job makes",
    ]
    end = data.get("expected_end")
    lines += [f"expected end: {end['low']} to {end['high']}"] if end and end["low"] is not None else []
    for upload in data["uploads"]:
        if upload["bytes"] is None or upload["files"] is None:  # the result
            continue
        size = megabytes(upload["bytes"], 2) + (f" in {upload['files']} files" if upload["files"] > 1 else "")
        lines.append(f"upload: {upload['what']} {upload['name'] or 'of the rows'}, {size}, to {upload['to']}")
    rich.print("\n".join(lines), soft_wrap=True)
