"""`submit --backend skypilot|colab`: the same run on machines of other providers, as a task or as a notebook."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from skill_train.cloud import preflight
from skill_train.cloud.budget import seconds_of
from skill_train.cloud.elsewhere import colab, skypilot
from skill_train.cloud.submit import Order
from skill_train.commands._command import option_of
from skill_train.commands._submit_plan import SubmitOptions, command_of, given_plan, order_of, warn_of_personal
from skill_train.core.console import Console, Result
from skill_train.core.errors import DecisionNeeded, UsageError, quoted
from skill_train.facts import Flavor
from skill_train.hub import account, flavors
from skill_train.hub.errors import not_signed_in
from skill_train.plan.file import write_plan
from skill_train.run import cloud_record, plan_record
from skill_train.run.folder import RunDir
from skill_train.run.job_spec import packages
from skill_train.run.lock import locked
from skill_train.run.plan_record import Plan

_JOBS_ONLY = ("data_repo", "max_cost", "force_new", "dry_run", "rehearse", "agreed")
_SKYPILOT_ONLY = ("nodes", "infra")


def with_backend(options: SubmitOptions) -> SubmitOptions:
    """The options with the values that the backend requires, for the planning. Refuses options of other backends."""
    fields = {field.name: field.default for field in dataclasses.fields(options)}
    useless = {"hf_jobs": _SKYPILOT_ONLY, "skypilot": _JOBS_ONLY, "colab": (*_JOBS_ONLY, *_SKYPILOT_ONLY)}
    for name in useless[options.backend]:
        if getattr(options, name) != fields[name]:
            option = option_of(name)
            raise UsageError(
                f"{option} cannot be used with --backend {options.backend}", code="bad_usage", hint=f"omit {option}"
            )
    if options.backend == "colab" and options.flavor is None and not _names_a_machine(options.source):
        return dataclasses.replace(options, flavor=colab.FLAVOR)
    return options


def _names_a_machine(source: Path | None) -> bool:
    """Whether this is a plan for the cloud or its run, so that a flavor is already chosen."""
    plan = None if source is None else given_plan(source)
    return plan is not None and plan.where == "cloud"


def write_elsewhere(console: Console, options: SubmitOptions, plan: Plan, run: RunDir) -> Result:
    """Writes the task or the notebook to the run directory; with --yes launches the task."""
    order = _checked_order(console, options, plan)
    flavor = _flavor(order.plan.flavor)
    with locked(run, "submit"):
        if options.backend == "colab":
            return _notebook(run, order, flavor)
        return _task(console, options, run, order, flavor)


def _checked_order(console: Console, options: SubmitOptions, plan: Plan) -> Order:
    """The order, after checking that the Hub accepts the run and keeps it private. A notebook uses its own token."""
    unchecked: list[str] = []
    launches = options.yes and options.backend == "skypilot"

    def ask(what: str, check: Callable[[], Any]) -> Any:
        return check() if launches else preflight.unless_unavailable(check, what, unchecked)

    owner = options.namespace or (options.hub_model_id or "").rpartition("/")[0]
    there = account.Account("unchecked", owner)
    if not owner:
        if account.token() is None:
            raise not_signed_in("so add --namespace NAME, the owner of the result")
        there = preflight.signed_in_account()
    elif options.backend == "skypilot" and account.token() is not None:
        there = ask("token", preflight.signed_in_account) or there
        if owner in there.orgs:
            options = dataclasses.replace(options, namespace=owner)
    order = order_of(options, plan, there)
    warn_of_personal(console, order)
    is_ours = options.backend == "skypilot" and there.state == "valid"
    if is_ours:
        ask("bucket", lambda: preflight.require_private_places(order.namespace, None, there, with_data=False))
    if options.nodes == 1:  # a run on several machines does not push
        name, method = order.plan.policy.hub_model_id or "", plan.recipe.finetuning_type
        of_ours = partial(preflight.result_repository, there, name, method)
        ask("repository", of_ours if is_ours else partial(preflight.require_places_of_next_job, order.plan, None))
    for what in unchecked:
        console.warn("hub_unreachable", f"not checked, {what}")
    return order


def _flavor(name: str | None) -> Flavor:
    offered = {each.name: each for each in flavors.current(live=False)[0]}
    if name not in offered:  # the plan was made when the Hub offered this flavor
        raise UsageError(
            f"the plan names the machine {name}, which is unknown here",
            code="unknown_flavor",
            expected=", ".join(offered),
            got=str(name),
            hint="plan again, with one of these as --flavor",
        )
    return offered[name]


def _notebook(run: RunDir, order: Order, flavor: Flavor) -> Result:
    gpu = colab.gpu_of(flavor)
    plan = replace(order.plan, placement=replace(order.plan.placement, backend="colab"))
    order = dataclasses.replace(order, plan=plan)
    _keep_plan(run, plan)
    path = run.path / "colab.ipynb"
    files = colab.write_notebook(
        path, run.plan, gpu=gpu, run_id=order.plan_hash[:12], data=_data(order), packages=packages(plan)
    )
    how = "open the notebook in Colab (File, Upload notebook), then Runtime, Run all; once more after a disconnect"
    data = _order_facts(run, order) | {"notebook": str(path), "gpu": gpu, "files": files, "launched": False, "how": how}
    lines = [f"notebook: {path}, for a {gpu}"]
    return Result(data, human=lambda rich: _draw(rich, run, plan, lines, how), quiet=str(path))


def _task(console: Console, options: SubmitOptions, run: RunDir, order: Order, flavor: Flavor) -> Result:
    nodes = options.nodes if options.nodes > 1 else skypilot.nodes_of(order.plan)
    named, timeout = _asked(options, run)
    places = skypilot.clouds(named, nodes)
    plan = skypilot.spread(order.plan, flavor, nodes)
    order = dataclasses.replace(order, plan=plan)
    _keep_plan(run, plan)
    timeout = _timeout(timeout, plan)
    run_id = order.plan_hash[:12]  # so that writing the task again changes nothing
    folder = run.path / "skypilot"
    bucket = f"hf://buckets/{order.namespace}/jobs-artifacts/{skypilot.name_of(run_id)}"
    staged = _data(order)
    rows = f"data/{next(iter(staged)).split('/')[0]}" if staged else None
    sky_run = skypilot.SkyRun(run_id, bucket, rows, timeout)
    task = skypilot.task(plan, flavor, sky_run, nodes=nodes, places=places)
    skypilot.write_task(folder, task, run.plan, staged, packages(plan))
    if nodes > 1:
        console.warn("not_pushed", f"a run on several machines does not push its result, which stays in {bucket}")
    if options.yes:
        skypilot.run_sky(folder, task["name"], account.token())
    data = _order_facts(run, order) | {
        "task": str(folder / "task.yaml"),
        "cluster": task["name"],
        "kept_in": bucket,
        "resources": task["resources"],
        "nodes": nodes,
        "timeout_seconds": timeout,
        "launched": options.yes,
    }
    back = f"hf buckets sync {bucket} {quoted(run.path)}"
    stop = f"sky down {task['name']}"
    data["how"] = how = f"follow the run: sky queue, sky logs {task['name']}; stop it: {stop}; fetch its files: {back}"
    resources = task["resources"]
    lines = [
        f"task: {folder / 'task.yaml'}, {nodes} x {resources['accelerators']}",
        f"machines of: {', '.join(place['infra'] for place in resources['any_of'])}",
        f"training is stopped after {timeout / 3600:.2f} h; all files are stored in {bucket}",
    ]
    return Result(
        data,
        human=lambda rich: _draw(rich, run, plan, lines, how),
        quiet=str(folder / "task.yaml"),
        next=list(skypilot.ways_to(run.path) or ()) if options.yes else [],
        error=None if options.yes else _confirm(options, task, folder / "task.yaml"),
    )


def _confirm(options: SubmitOptions, task: skypilot.Task, file: Path) -> DecisionNeeded:
    see = f"sky launch --dryrun {quoted(file)}"
    return DecisionNeeded(
        f"this rents machines at the price of a cloud, which is not known here and which --yes accepts; {see} shows it",
        code="confirm_cost",
        expected="--yes, once the user has agreed to the price, to launch the task with the `sky` of this machine",
        got=f"{task['num_nodes']} x {task['resources']['accelerators']}",
        hint=command_of(options, yes=True),
    )


def _order_facts(run: RunDir, order: Order) -> dict[str, object]:
    plan = order.plan
    return {
        "run_dir": str(run.path),
        "recipe_hash": plan.recipe_hash,
        "hub_model_id": plan.policy.hub_model_id,
        "placement": msgspec.to_builtins(plan.placement),
        "seconds": msgspec.to_builtins(plan.estimates.seconds),
    }


def _asked(options: SubmitOptions, run: RunDir) -> tuple[list[str] | None, int | None]:
    """The requested clouds, and the timeout in seconds; None for each that was not given. For a run that continues, the
    defaults are those of its written task."""
    before = skypilot.written_task(run.path / "skypilot") if options.source in (run.path, run.plan) else None
    named = None if before is None else skypilot.chosen_places(before)
    timeout = None if before is None else skypilot.timeout_of(before)
    if options.infra:
        named = [name.strip() for name in options.infra.split(",")]
    return named, timeout if options.timeout is None else seconds_of(options.timeout)


def _timeout(asked: int | None, plan: Plan) -> int:
    """The timeout of the training in seconds: the requested one, or else the plan's."""
    seconds = asked or plan.timeout_seconds
    if seconds is None:
        raise DecisionNeeded(
            "the duration of this run is unknown, so a time limit is needed",
            code="bad_timeout",
            expected="--timeout, such as 8h",
            hint="add --timeout",
        )
    return seconds


def _keep_plan(run: RunDir, plan: Plan) -> None:
    """Writes plan and recipe as in every run directory. A plan with the same hash is not replaced, because only its
    measurements would differ. Refuses a folder of another run, and of a run on this machine or as a Hub job."""
    there = plan_record.read(run.plan) if run.plan.is_file() else None
    other = ""
    if cloud_record.record_path(run).is_file():
        other = "a run in Hugging Face Jobs"
    elif there is not None and there.where != "cloud":
        other = "a run of this machine"
    elif there is not None and there.recipe_hash != plan.recipe_hash:
        other = "a run of another recipe"
    if other:
        raise UsageError(
            f"{run.path} holds {other}",
            code="another_run",
            expected="a new folder, or a folder of the same recipe for another cloud",
            hint="use another --run-dir",
        )
    same = there is not None and cloud_record.plan_hash(there) == cloud_record.plan_hash(plan)
    if not same or not run.recipe.is_file():
        write_plan(run, plan)


def _data(order: Order) -> dict[str, Path]:
    return dict(order.staged.files) if order.staged else {}


def _draw(rich: Any, run: RunDir, plan: Plan, lines: list[str], how: str) -> None:
    result = f"result: the repository {plan.policy.hub_model_id}"
    rich.print("\n".join([f"run directory: {run.path}", *lines, result, how]), soft_wrap=True)
