"""The checks of `submit` before anything is sent, and the cost of the job."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from msgspec.structs import replace

from skill_train.cloud import budget, preflight
from skill_train.cloud.budget import Budget, Price
from skill_train.cloud.order import Order
from skill_train.commands._blockers import warn_of_export
from skill_train.commands._spent import spent_by_jobs
from skill_train.commands._submit_answer import Checked
from skill_train.commands._submit_plan import SubmitOptions, command_of
from skill_train.core.console import Console
from skill_train.facts import Flavor
from skill_train.hub import flavors
from skill_train.hub.account import Account
from skill_train.run.plan_record import Plan


def account_of(options: SubmitOptions) -> Account:
    """The account of the token. A dry run without an answer uses the given namespace."""
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
        there = ask("repository", lambda: preflight.result_repository(account, repository)) or ()
        with_data = order.staged is not None
        places = partial(
            preflight.require_private_places, order.namespace, order.data_repo, account, with_data=with_data
        )
        rows_there = ask("bucket", places) or ()
        ask("model and dataset", lambda: preflight.require_readable(plan))
    offer = ask("flavor and price", lambda: preflight.flavor(plan.flavor or "")) or flavors.known(plan.flavor)
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
    """The budget at this price, after the cost of earlier jobs.

    Raises:
        DecisionNeeded: it may cost more than was allowed.
    """
    return budget.budget(
        budget.need_of(plan),
        price=Price(None, "") if offer is None else Price(offer.usd_per_hour, f"price of {offer.read_at}"),
        timeout=timeout,
        max_cost=options.max_cost,
        spent=spent,
        command=command_of(options, timeout=None),
    )


def _warn_of_names(console: Console, order: Order, there: tuple[str, ...]) -> None:
    """Warns if the dataset repository has files of the names that are uploaded."""
    names = sorted(set(there) & set(order.staged.files if order.staged else ()))
    if names:
        more = f" and {len(names) - 1} more of these files" if len(names) > 1 else ""
        console.warn(
            "repository_in_use", f"{order.data_repo} already holds {names[0]}{more}; a new commit replaces what differs"
        )


def _warn(console: Console, order: Order, job_budget: Budget, there: tuple[str, ...]) -> None:
    warn_of_export(console, order.plan)
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
