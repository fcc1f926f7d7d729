"""`pull` and `resume`: what a run in the cloud has made comes here; a run that ended early goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from pathlib import Path
from typing import Any

from skill_train.cloud import bucket as kept
from skill_train.cloud import budget as cloud_budget
from skill_train.cloud import find_run as cloud_run
from skill_train.cloud import spent as cloud_spent
from skill_train.cloud.bucket import Kept
from skill_train.cloud.failure_reason import Story, larger
from skill_train.cloud.find_run import CloudRun
from skill_train.cloud.poll import patiently
from skill_train.commands import tables
from skill_train.commands.chain import require_trained, smoke_failure
from skill_train.commands.chain_follow import About, look
from skill_train.commands.cloud_answer import money
from skill_train.core.console import Console, Result
from skill_train.core.errors import AccessError, DecisionNeeded, UsageError, VerificationFailed
from skill_train.hub import flavors
from skill_train.hub import repositories as hub_repository
from skill_train.run import progress as job_figures
from skill_train.run.cloud_record import CloudJob, CloudRecord
from skill_train.run.folder import RunDir
from skill_train.run.records import read_json


def pull(console: Console, *, run: str, run_dir: Path | None) -> Result:
    """Everything that is kept, digests checked; from the repository of the model when the bucket has no result."""
    cloud = cloud_run.in_folder(cloud_run.find(run, console.status), run_dir, console.status)
    here = cloud.run
    assert here is not None  # in_folder gave it one
    fetched = _fetched(cloud, here, console)
    source = fetched["inputs"]
    done, failure = source["state"] == "done", None
    if done:
        require_trained(here)
        record = read_json(here.record("train"))
        failure = smoke_failure(here, record)
    else:
        step = source["checkpoint"]
        what = "nothing but records" if step is None else f"a checkpoint of step {step}"
        console.warn("unfinished", f"the run has no result yet ({source['state']}); what is here: {what}")
    data = {
        "run_dir": str(here.path),
        "state": source["state"],
        "trained": done,
        "verdict": record.get("verdict") if done else None,
        "checkpoint": source["checkpoint"],
        "from": source.get("bucket") or source.get("repository"),
        "fetched": len(fetched["fetched"]),
        "files": [{"path": str(here.path / name), **digest} for name, digest in fetched["outputs"].items()],
    }
    word = shlex.quote(str(here.path))
    unfinished = f"skill-train {'wait' if _is_live(cloud) else 'resume'} {word}"
    return Result(
        data,
        human=lambda rich: tables.draw_pulled(rich, data),
        quiet=str(here.path),
        next=[] if failure else [f"skill-train export-gguf {word}"] if done else [unfinished],
        error=failure,
    )


def _fetched(cloud: CloudRun, here: RunDir, console: Console) -> dict[str, Any]:
    """`pull.json`. A run that has ended may have its result in the repository only: its bucket took no more, say."""
    from skill_train.cloud import pull as step

    try:
        there, missing = _in_bucket(cloud, console), None
    except VerificationFailed as error:
        if error.code != "kept_file_missing" or _is_live(cloud):
            raise
        there, missing = None, error
    if there is not None and (there.state == "done" or _is_live(cloud)):
        return _from_bucket(console, here, there)
    try:
        why = _not_pushed(cloud, here, console)
    except AccessError as error:
        if there is None:
            raise missing or error from None
        why = error.message
    if not why:
        return _from_repository(cloud, here)
    if there is None:
        raise missing or step.nothing_kept(here.path, why)
    console.status(why)
    return _from_bucket(console, here, there)


def _is_live(cloud: CloudRun) -> bool:
    return cloud.now is not None and cloud.now.live


def _in_bucket(cloud: CloudRun, console: Console) -> Kept | None:
    record = cloud.record
    return kept.look(record.bucket, record.folder, console.status) if record.bucket and record.folder else None


def _not_pushed(cloud: CloudRun, here: RunDir, console: Console) -> str:
    """Why the repository of the model cannot give the result of this run; empty when it can.

    Raises:
        AccessError: the token may not read it.
    """
    from skill_train.cloud import pull as step
    from skill_train.hub import models as hub

    repository = cloud.record.hub_model_id
    if not repository or _is_live(cloud):
        return "the job has not kept anything yet" if repository else "its bucket has no result"
    console.status(f"the bucket has no result; asking for {repository}")
    try:
        found = patiently(lambda: hub_repository.find("model", repository), console.status)
        files = found.files if found else ()
        if "train.json" not in files or step.PUSHING in files:
            return f"neither its bucket nor {repository} has its result"
        trained = read_json(hub.model_file(repository, "train.json"))
    except UsageError as error:
        return f"its bucket has no result, and {error.message}"
    same = trained.get("recipe_hash") == read_json(here.plan)["recipe_hash"]
    return "" if same else f"its bucket has no result, and {repository} has that of another recipe"


def _from_bucket(console: Console, here: RunDir, there: Kept) -> dict[str, Any]:
    from skill_train.cloud import pull as step

    with console.progress("fetching") as progress:
        return step.from_bucket(here, there, progress=progress, say=console.status)


def _from_repository(cloud: CloudRun, here: RunDir) -> dict[str, Any]:
    from skill_train.cloud import pull as step
    from skill_train.hub import models as hub

    repository = cloud.record.hub_model_id
    pushed = step.in_repository(read_json(hub.model_file(repository, "train.json")))
    folder, commit = hub.model_folder(repository, None, files=tuple(pushed.values()))
    return step.from_repository(here, repository, folder, commit)


def resume(
    console: Console,
    *,
    run: str,
    run_dir: Path | None,
    flavor: str | None,
    timeout: str | None,
    max_cost: float | None,
    yes: bool,
) -> Result:
    """A new job from the newest checkpoint, after its cost was agreed to."""
    from skill_train.cloud import resume as step

    cloud = cloud_run.find(run, console.status)
    newest = cloud.record.last_begun
    if newest is not None and newest.job_id != cloud.job.job_id:  # an id of an earlier job was given
        cloud = cloud_run.with_now(cloud_run.latest(cloud), console.status)
    if cloud.now is not None and cloud.now.live:
        if cloud.run is not None:
            step.noted(cloud.run, console.status)
        return _there(cloud, cloud.job, reused=True)
    cloud = cloud_run.in_folder(cloud, run_dir, console.status)
    about = _ended(cloud, console)
    if about.story is None:
        return _finished(cloud)
    _check_flavor(about, flavor)
    chosen = flavor or cloud.job.flavor
    price, source = _price(chosen)
    max_cost = _ceiling(cloud.record) if max_cost is None else max_cost
    spent = 0.0 if max_cost is None else _spent(cloud, console)
    asked = _command(cloud, chosen, max_cost)
    budget = cloud_budget.budget(
        _rest(about, chosen),
        usd_per_hour=price,
        price=source,
        timeout=cloud_budget.seconds_of(timeout) if timeout else None,
        max_cost=max_cost,
        spent=spent,
        command=asked,
    )
    console.status(f"the last job: {about.story.message}")
    if about.story.remedy in ("recipe", "data"):
        console.warn("same_again", f"the same recipe may end the same way: {about.story.help}")
    if not yes:
        return _agreement(about, budget, f"{asked} --timeout {timeout} --yes" if timeout else f"{asked} --yes")
    assert cloud.run is not None  # in_folder gave it one
    record, reused = step.resume(
        cloud.run,
        flavor=chosen,
        timeout_seconds=budget.timeout_seconds,
        usd_per_hour=price,
        max_cost=max_cost,
        say=console.status,
    )
    assert record.last_begun is not None  # a job was started
    return _there(cloud, record.last_begun, reused=reused, budget=None if reused else budget)


def _ceiling(record: CloudRecord) -> float | None:
    """What was said last. A job that another folder started tells nothing of it."""
    return next((job.max_cost for job in reversed(record.jobs) if job.max_cost is not None), None)


def _spent(cloud: CloudRun, console: Console) -> float:
    record = cloud.record
    return cloud_spent.by_jobs(record.namespace, record.plan_hash, record, console.status)


def _ended(cloud: CloudRun, console: Console) -> About:
    """One look. Of a job that ended well and left no result, with a story all the same: then there is more to do."""
    about = look(cloud, console)
    if about.story is not None or _has_result(cloud, console):
        return about
    story = Story(
        code="nothing_kept",
        message="the job ended well, and its result is neither in its bucket nor in its repository",
        help="another job, which goes on from the newest checkpoint",
    )
    return dataclasses.replace(about, story=story)


def _has_result(cloud: CloudRun, console: Console) -> bool:
    """Whether it is here, or can be fetched."""
    assert cloud.run is not None  # in_folder gave it one
    with contextlib.suppress(UsageError):
        require_trained(cloud.run)
        return True
    with contextlib.suppress(VerificationFailed):  # a file of it is gone
        there = _in_bucket(cloud, console)
        if there is not None and there.state == "done":
            return True
    return not _not_pushed(cloud, cloud.run, console)


def _rest(about: About, flavor: str) -> dict[str, Any]:
    """What is left of the run, in the form of a plan: its time as it was measured, and the timeout of a job for it."""
    measured, from_step = about.speed, about.kept_step
    before = about.cloud.job.timeout_seconds or (about.plan or {}).get("timeout_seconds")
    same = flavor == about.cloud.job.flavor
    if measured is not None and measured.seconds_per_step is not None and same:
        low = (measured.steps - from_step) * measured.seconds_per_step
        timed = f"{measured.seconds_per_step:.3g} s a step measured, {measured.steps - from_step} steps to go"
        estimate = {"low": low, "high": low * job_figures.MARGIN + job_figures.SAVING_SECONDS, "basis": timed}
    else:
        why = "no step was timed" if same else f"the steps were timed on {about.cloud.job.flavor}"
        estimate = {"low": None, "high": None, "basis": why}
    if before is not None and about.story is not None and about.story.remedy == "time":
        ran, first = about.ran_seconds or 0.0, about.cloud.job.number == 1
        before = job_figures.longer_timeout(measured, kept_step=from_step, ran_seconds=ran, before=before, first=first)
    return {"flavor": flavor, "timeout_seconds": before, "estimates": {"seconds": estimate}}


def _check_flavor(about: About, flavor: str | None) -> None:
    """After a lack of memory the same machine would fail again; a machine that is named must exist.

    Raises:
        DecisionNeeded: another flavor must be named.
        UsageError: there is no such flavor.
    """
    story, cloud = about.story, about.cloud
    offered = flavors.current(live=False)[0]
    if story is not None and story.remedy in ("gpu", "ram") and flavor is None:
        bigger = larger(offered, cloud.job.flavor, story.remedy)
        raise DecisionNeeded(
            f"{story.message}; the same flavor would fail again",
            code=story.code,
            expected=story.help,
            got=cloud.job.flavor,
            hint=f"skill-train resume {cloud.word} --flavor {bigger.name}" if bigger else story.help,
        )
    known = {each.name: each for each in offered}
    now = known.get(cloud.job.flavor)
    if flavor is None or now is None:
        return
    same = [each.name for each in offered if each.gpus == now.gpus and bool(each.gpu) == bool(now.gpu)]
    if flavor not in same:
        raise UsageError(
            f"a run planned for {now.name} cannot go on on {flavor!r}",
            code="unknown_flavor" if flavor not in known else "another_shape",
            expected=f"one of {', '.join(same)}: with as many GPUs as the plan",
            got=flavor,
            hint=f"skill-train resume {cloud.word} --flavor {now.name}",
        )


def _price(flavor: str) -> tuple[float | None, str]:
    offered, source = flavors.current(live=True, kept_for=0)  # a ceiling holds for the price of now
    return next((each.usd_per_hour for each in offered if each.name == flavor), None), source


def _command(cloud: CloudRun, flavor: str, max_cost: float | None) -> str:
    """This, without a timeout, with the ceiling of the last job or the one that was said now."""
    words = ["skill-train", "resume", cloud.word]
    words += ["--flavor", flavor] if flavor != cloud.job.flavor else []
    words += ["--max-cost", f"{max_cost:g}"] if max_cost is not None else []
    return " ".join(words)


def _agreement(about: About, budget: cloud_budget.Budget, command: str) -> Result:
    """What the new job is and may cost, and the command that starts it."""
    cloud, cost = about.cloud, budget.as_dict()
    error = DecisionNeeded(
        f"a new job on {budget.flavor} would go on from step {about.kept_step}: {money(budget)}",
        code="confirm_cost",
        expected="--yes",
        got=f"{budget.flavor}, stopped after {budget.timeout_seconds} s",
        hint=command,
    )
    data = {
        "run_dir": str(cloud.run.path) if cloud.run else None,
        "from_step": about.kept_step,
        "flavor": budget.flavor,
        "timeout_seconds": budget.timeout_seconds,
        "cost_usd": cost,
        "why": about.story.as_dict() if about.story else None,
    }
    return Result(data, human=lambda rich: None, quiet=command, error=error)


def _finished(cloud: CloudRun) -> Result:
    data = {"run_dir": str(cloud.run.path) if cloud.run else None, "job_id": cloud.job.job_id, "finished": True}
    return Result(
        data | {"reused": True},
        human=lambda rich: tables.draw_line(rich, f"{cloud.name} has finished; nothing is left to do"),
        quiet=cloud.job.job_id or "",
        next=[f"skill-train pull {cloud.word}"],
    )


def _there(cloud: CloudRun, job: CloudJob, *, reused: bool, budget: cloud_budget.Budget | None = None) -> Result:
    """The answer of a job that runs now."""
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
    told = f"{'already there' if reused else 'started'}: job {job.job_id} on {job.flavor}, {job.url}"
    return Result(
        data,
        human=lambda rich: tables.draw_line(rich, told),
        quiet=job.job_id or "",
        next=[f"skill-train {command} {cloud.word}" for command in ("wait", "logs", "pull")],
    )
