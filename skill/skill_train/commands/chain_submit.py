"""`submit`: plan for the cloud, checks, what it costs and what is uploaded, and, when that was accepted, the job."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any

from skill_train.cloud import budget as cloud_budget
from skill_train.cloud import find_run as cloud_run
from skill_train.cloud import preflight
from skill_train.cloud import rehearse as rehearsal
from skill_train.cloud import spent as cloud_spent
from skill_train.cloud import stage_data as staging
from skill_train.cloud import submit as submission
from skill_train.cloud.budget import Budget
from skill_train.cloud.order import Order, Sent
from skill_train.commands import chain_elsewhere, cloud_answer, tables
from skill_train.commands.chain_follow import look
from skill_train.commands.chain_plan import (
    decided,
    load_recipe,
    local_plan,
    require_no_blockers,
    require_room,
    warn_of_export,
)
from skill_train.commands.cloud_answer import Asked, Checked
from skill_train.core.console import Console, Result
from skill_train.core.errors import AccessError, DecisionNeeded, UsageError
from skill_train.core.resources import train_program
from skill_train.facts import Flavor
from skill_train.hub import flavors
from skill_train.hub.account import Account
from skill_train.hub.jobs import LIVE
from skill_train.plan import where as rubric
from skill_train.plan.file import given_plan, is_plan
from skill_train.plan.placement import HERE, Choices
from skill_train.recipe import fields as recipes
from skill_train.recipe.fields import Recipe
from skill_train.run import cloud_record
from skill_train.run.folder import RunDir, open_run, require_unused
from skill_train.run.records import read_json


def submit(console: Console, **options: Any) -> Result:
    """Ends with the job, with the one that is there already, or with the decision that is needed.

    Args:
        options: the fields of `Asked`.
    """
    asked = Asked(**options)
    timeout = None if asked.timeout is None else cloud_budget.seconds_of(asked.timeout)
    asked = chain_elsewhere.checked(asked)
    made = _plan(console, asked)
    require_no_blockers(made)
    if asked.rehearse:
        return _rehearse(console, asked, made)
    run = RunDir(_run_dir(asked, made))
    if not run.plan.is_file() and not cloud_record.record_path(run).is_file():
        require_unused(run)
    if asked.backend != "hf_jobs":
        return chain_elsewhere.write(console, asked, _order_elsewhere(asked, made), run.path)
    try:
        account = _account(asked)
    except AccessError as error:
        priced = _budget(asked, made, _kept_offer(made["flavor"]), timeout)  # too much is too much, whoever pays
        return cloud_answer.not_allowed(priced, error)
    order = _order(asked, made, account)
    if asked.force_new:
        submission.require_new(run, order.plan_hash)
    if not asked.dry_run:
        known = submission.existing(run, order, console.status, force_new=asked.force_new)
        if known is not None:
            return _sent(console, asked, run, known, order, timeout)
    checked = _check(console, asked, order, account, timeout)
    if asked.dry_run:
        return cloud_answer.dry_run(run, checked)
    if not asked.yes:
        return cloud_answer.decision(asked, checked)
    sent = submission.submit(run, checked.order, console.status, force_new=asked.force_new)
    return _sent(console, asked, run, sent, checked.order, timeout)


def _sent(console: Console, asked: Asked, run: RunDir, sent: Sent, order: Order, timeout: int | None) -> Result:
    """The job. One that was there is only the answer where it is, or did, what was asked for.

    Raises:
        DecisionNeeded: it may cost more than was allowed.
    """
    if sent.reused and sent.stage in (None, *LIVE):
        spent = 0.0 if asked.max_cost is None else _spent_before(console, order, sent)
        cloud_answer.require_as_asked(console, run, sent, max_cost=asked.max_cost, spent=spent, timeout=timeout)
    found = cloud_answer.result(console, run, sent, order)
    if sent.stage in (None, "COMPLETED", *LIVE):
        return found
    story = look(cloud_run.find(str(run.path), console.status), console).story
    ways = [command for command in story.next if command.startswith("skill-train ")] if story else []
    found.next = ways or [f"skill-train resume {shlex.quote(str(run.path))}"]
    found.error = DecisionNeeded(
        f"the job of {run.path} has ended, and no other was started: {story.message if story else sent.stage}",
        code="job_ended",
        expected=story.help if story else "a job that runs, or has done its work",
        got=str(sent.stage),
        hint=found.next[0],
    )
    return found


def _spent_before(console: Console, order: Order, sent: Sent) -> float:
    """Dollars of the jobs of this plan before the one that is there."""
    record, last = sent.record, sent.record.last_begun
    but = last.job_id if last is not None else None
    return cloud_spent.by_jobs(record.namespace, order.plan_hash, record, console.status, but=but)


# --- The plan ---


def _plan(console: Console, asked: Asked) -> dict[str, Any]:
    """A plan for the cloud: the given one as it is, or one that is made now."""
    source = asked.source
    file = open_run(source).plan if source is not None and source.is_dir() else source
    if file is None or not is_plan(file):
        return _planned(console, asked, load_recipe(file, asked.recipe_flags))
    there = read_json(file)
    if there.get("where") == "cloud":
        chosen = {"flavor": asked.flavor, "dtype": asked.dtype}
        made = given_plan(file, asked.recipe_flags | chosen, where="cloud")
        _require_remote(made["recipe"]["model"], sensitive=made["policy"]["sensitive"], owner=asked.namespace)
        return made
    console.status(f"{source} is for this machine; its recipe is planned again, for the cloud")
    if asked.recipe_flags:
        return _planned(console, asked, _recipe_with(there, asked.recipe_flags))
    with contextlib.suppress(UsageError):  # other data may have other columns
        made = _planned(console, asked, _recipe_of(there))
        if made["recipe_hash"] == there["recipe_hash"]:
            return made
    made = _planned(console, asked, _recipe_with(there, {}))
    console.warn("another_recipe", f"model or data have changed since {source}: this is not the same run")
    return made


def _planned(console: Console, asked: Asked, recipe: Recipe) -> dict[str, Any]:
    _require_remote(recipe.model, sensitive=recipe.sensitive, owner=asked.namespace)
    why = "this command sends a job"
    choices = Choices(
        dtype=asked.dtype, where="cloud", where_because=why, flavor=asked.flavor, max_hours=asked.max_hours
    )
    return decided(console, recipe, choices)


def _recipe_of(there: dict[str, Any], **values: Any) -> Recipe:
    """The recipe of a plan, every choice in it as it was made."""
    known = there["recipe"] | there.get("policy", {}) | values
    return recipes.from_dict({key: value for key, value in known.items() if key in recipes.FIELDS})


def _recipe_with(there: dict[str, Any], flags: dict[str, Any]) -> Recipe:
    """The recipe as it was said, with changes. What the planner chose by the old model and data is chosen anew, and
    another model or dataset has other revisions."""
    of_old = {"model": ("revision",), "data": ("data_revision", "data_config")}
    gone = {name: None for key, names in of_old.items() if key in flags for name in names}
    return _recipe_of(there, **(there.get("asked", {}) | gone | flags))


def _require_remote(model: str, *, sensitive: bool, owner: str | None) -> None:
    """Refuses, before the Hub is asked anything, what cannot or may not leave this machine."""
    if sensitive:
        raise rubric.stays_here("submit")
    if Path(model).is_dir():
        raise preflight.local_model(model, owner)


def _order(asked: Asked, made: dict[str, Any], account: Account) -> Order:
    """The plan with its repository and its data, and the price that was known last; the checks ask for today's."""
    place = preflight.namespace(account, asked.namespace) if account.state == "valid" else account.name
    staged = staging.stage(Path(made["recipe"]["data"])) if preflight.local_data(made) else None
    if staged is not None:
        staging.require_no_secrets(staged)
    offer = _kept_offer(made["flavor"])
    price = None if offer is None else offer.usd_per_hour
    return Order(_with_repository(made, asked, place), place, price, staged, asked.data_repo, asked.max_cost)


def _order_elsewhere(asked: Asked, made: dict[str, Any]) -> Order:
    """Of a run on machines of others. Who pushes must be known, and need not be asked for when it was said."""
    owner = asked.namespace or (asked.hub_model_id or "").rpartition("/")[0]
    return _order(asked, made, Account("unchecked", owner) if owner else preflight.token())


def _with_repository(made: dict[str, Any], asked: Asked, place: str) -> dict[str, Any]:
    """The plan with the repository that its result goes to."""
    known = asked.hub_model_id or made["policy"]["hub_model_id"]
    return made | {"policy": made["policy"] | {"hub_model_id": known or _repository(made, place)}}


def _repository(made: dict[str, Any], place: str) -> str:
    """`NAMESPACE/<model>-<data>-<recipe hash>`; the Hub takes 96 characters (huggingface_hub 2.4, validate_repo_id)."""
    words = [_slug(made["recipe"]["model"].split("/")[-1]), _slug(_data_name(made))]
    name = "-".join((*words, made["recipe_hash"][:8]))
    return f"{place}/{name[-(96 - len(place) - 1) :].strip('-.')}"


def _data_name(made: dict[str, Any]) -> str:
    data = made["recipe"]["data"]
    return Path(data).stem if preflight.local_data(made) else data.split("/")[-1]


def _slug(text: str) -> str:
    """Of the characters that the Hub takes in a name, without two of `-` and `.` in a row."""
    return re.sub(r"[-.]*-[-.]*|\.{2,}", "-", re.sub(r"[^A-Za-z0-9.]+", "-", text)).strip("-.").lower() or "data"


def _run_dir(asked: Asked, made: dict[str, Any]) -> Path:
    """The one that was said, that of a submitted run, or a name made of data and recipe.

    With --force-new it is a new one, or the one of this very command, whose job had no answer before.
    """
    if asked.run_dir is not None:
        return asked.run_dir
    kind = "cloud" if asked.backend == "hf_jobs" else asked.backend
    source = asked.source if kind == "cloud" and not asked.force_new else None
    if source is not None and cloud_record.record_path(RunDir(source)).is_file():
        return source
    first = Path("runs") / f"{_slug(_data_name(made))}-{made['recipe_hash'][:8]}-{kind}"
    if not asked.force_new:
        return first
    later = (first.with_name(f"{first.name}-{number}") for number in range(2, 1000))
    plan_hash = cloud_record.plan_hash(made)
    return next(
        path for path in (first, *later) if not path.exists() or submission.never_began(RunDir(path), plan_hash)
    )


def _rehearse(console: Console, asked: Asked, made: dict[str, Any]) -> Result:
    """Two steps of the job on this machine. Nothing is sent."""
    made = _with_repository(made, asked, asked.namespace or "me")
    here = _plan_here(console, _recipe_of(made, max_steps=rehearsal.STEPS))
    for part in ("device", "dtype", "num_processes"):
        console.status(f"{part}: {here['placement'][part]} here, {made['placement'][part]} in the job")
    staged = staging.stage(Path(made["recipe"]["data"])) if preflight.local_data(made) else None
    spec = cloud_answer.specification(RunDir(_run_dir(asked, made)), Order(made, "me", None, staged, None), "rehearsal")
    figures = rehearsal.rehearse(rehearsal.shortened(made, here), spec, staged, console.status)
    data = {"verdict": "pass", **figures, "not_rehearsed": rehearsal.differences(made, here, train_program())}
    again = cloud_answer.command_of(asked, rehearse=False)
    return Result(data, human=lambda rich: tables.draw_rehearsal(rich, data), quiet=data["verdict"], next=[again])


def _plan_here(console: Console, recipe: Recipe) -> dict[str, Any]:
    """The placement of this machine for the recipe.

    Raises:
        DecisionNeeded: it does not fit here.
    """
    try:
        here = local_plan(console, recipe, HERE)
        require_room(console, here, force=False)
    except DecisionNeeded as error:
        raise DecisionNeeded(
            f"this machine cannot rehearse the run: {error.message}",
            code="cannot_rehearse",
            expected=error.expected,
            got=error.got,
            hint="--dry-run in the place of --rehearse checks everything but the training",
        ) from None
    return here


# --- The checks ---


def _account(asked: Asked) -> Account:
    """Whose token it is. A dry run without an answer takes the namespace that was said."""
    unchecked: list[str] = []
    if not (asked.dry_run and asked.namespace):
        return preflight.token()
    found = preflight.tolerant(preflight.token, "token", unchecked)
    return found or Account("unchecked", asked.namespace, why="; ".join(unchecked))


def _check(console: Console, asked: Asked, order: Order, account: Account, timeout: int | None) -> Checked:
    """Every check before the first upload, each with its own error."""
    unchecked = [f"token: {account.why}"] if account.state == "unchecked" else []

    def ask(what: str, check: Any) -> Any:
        return preflight.tolerant(check, what, unchecked) if asked.dry_run else check()

    made, repository = order.plan, order.plan["policy"]["hub_model_id"]
    there = ()
    if account.state == "valid":
        there = ask("repository", lambda: preflight.result_repository(account, repository)) or ()
        with_data = order.staged is not None
        ask(
            "bucket",
            lambda: preflight.private_places(order.namespace, order.data_repo, account, with_data=with_data),
        )
        ask("model and dataset", lambda: preflight.readable(made))
    offer = ask("flavor and price", lambda: preflight.flavor(made["flavor"])) or _kept_offer(made["flavor"])
    spent = 0.0
    if asked.max_cost is not None and account.state == "valid":
        spent = ask("cost of earlier jobs", lambda: _spent(console, order)) or 0.0
    found = _budget(asked, made, offer, timeout, spent)
    _warn(console, order, found, there)
    sent = made | {"timeout_seconds": found.timeout_seconds}
    return Checked(dataclasses.replace(order, plan=sent, usd_per_hour=found.usd_per_hour), found, there, unchecked)


def _spent(console: Console, order: Order) -> float:
    return cloud_spent.by_jobs(order.namespace, order.plan_hash, None, console.status)


def _budget(
    asked: Asked, made: dict[str, Any], offer: Flavor | None, timeout: int | None, spent: float = 0.0
) -> Budget:
    """By this price, after so many dollars for earlier jobs.

    Raises:
        DecisionNeeded: it may cost more than was allowed.
    """
    return cloud_budget.budget(
        made,
        usd_per_hour=None if offer is None else offer.usd_per_hour,
        price="" if offer is None else f"price of {offer.read_at}",
        timeout=timeout,
        max_cost=asked.max_cost,
        spent=spent,
        command=cloud_answer.command_of(asked, timeout=None),
    )


def _kept_offer(name: str) -> Flavor | None:
    return next((flavor for flavor in flavors.current(live=False)[0] if flavor.name == name), None)


def _warn(console: Console, order: Order, found: Budget, there: tuple[str, ...]) -> None:
    warn_of_export(console, order.plan)
    if found.tight and found.seconds is not None:
        console.warn(
            "tight_timeout",
            f"the timeout of {found.timeout_seconds} s is below the upper estimate of {found.seconds[1]:.0f} s; "
            "a job that is stopped keeps its checkpoints",
        )
    if found.lowered:
        console.warn("lowered_timeout", f"the timeout is {found.timeout_seconds} s, so that --max-cost is kept")
    if there:
        name = order.plan["policy"]["hub_model_id"]
        console.warn("repository_in_use", f"{name} holds {len(there)} files; the result is a new commit on them")
    if order.data_repo is not None and order.staged is None:
        console.warn("unused_data_repo", "the data is on the Hub already; --data-repo is not used")
