"""Starts a job exactly once; shared by `submit` and `resume`.

A failed request may still have created the job (huggingface_hub#3972). So the job is written to `cloud.json` before it
is requested, and after an error it is looked up by its labels before it is requested again. A request without an answer
may create its job up to two minutes later, so no other job is created until then.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from skill_train.core import waiting
from skill_train.core.errors import Interrupted, SkillTrainError, Temporary, quoted
from skill_train.hub import jobs
from skill_train.hub.client import patiently
from skill_train.hub.errors import StillAsking
from skill_train.hub.jobs import Job
from skill_train.machine.training_program import train_program
from skill_train.run import cloud_record, records
from skill_train.run.cloud_record import CloudJob, CloudRecord
from skill_train.run.folder import RunDir
from skill_train.run.job_spec import ENVIRONMENT, JobSpec, dependencies
from skill_train.run.plan_record import Plan

TRIES = 3
PAUSE_SECONDS = 2.0  # before each look, because a listing may lag behind
LATE_LOOKS = 15  # half a minute, after an error of a server that may have forwarded the request
SETTLED_LOOKS = 60  # two minutes, after which a request without an answer creates no job any more
NOTICE_LOOKS = 5  # ten seconds between two notices about the search


@contextlib.contextmanager
def told_if_interrupted(run: RunDir) -> Iterator[None]:
    """If Ctrl-C comes after the request for a job, this block warns that the job may start. A request cannot be taken
    back."""
    before = cloud_record.read(run)
    try:
        yield
    except KeyboardInterrupt:
        now = cloud_record.read(run)
        if now is None or now.last in (None, before and before.last):
            raise
        raise Interrupted(
            "interrupted, but the job was already requested: it may start, and then it costs money",
            code="interrupted",
            expected="no job, or one that you know of",
            got=f"a job on {now.last.flavor}, requested at {now.last.asked_at}",
            hint=f"skill-train cancel {quoted(run.path)}",
        ) from None


def start(run: RunDir, record: CloudRecord, requested: CloudJob, post: Callable[[], Job]) -> CloudRecord:
    """Starts a job. Returns the record with the started job.

    Args:
        record: the record of the run; `requested` is its new job, in state `starting`.
        post: creates the job. It is called again only if no job with these labels exists.

    Raises:
        AccessError, UsageError: the Hub refuses the job. It does not exist, and the record does not contain it.
        Temporary: the job may or may not exist. The record says `starting`, and the next call looks for the job.
    """
    before, began, doubtful = record, time.monotonic(), False
    for attempt in range(1, TRIES + 1):
        posted = msgspec.structs.replace(requested, asked_at=records.timestamp())
        record = before.with_job(posted)
        cloud_record.write(run, record)
        try:
            job = post()
        except StillAsking as error:
            waiting.tell(f"{error.message} ({error.got}); looking whether the job is there")
            existing = find_job(record, requested.number, times=SETTLED_LOOKS)
            if existing is None:
                error.hint = "run the same command again: it looks for the job before it asks for one"
                raise
            return record_started(run, record, posted, existing)
        except Temporary as error:
            waiting.tell(f"{error.message} ({error.got}); looking whether the job is there (try {attempt} of {TRIES})")
            refused = error.code == "rate_limit"  # after any other error the server may have forwarded the request
            existing = find_job(record, requested.number, times=2 if refused else LATE_LOOKS)
            if existing is not None:
                return record_started(run, record, posted, existing)
            late = time.monotonic() - began > settled_seconds() * 3 / 4 > 0  # soon others ignore our claim
            if attempt == TRIES or late:
                raise
            doubtful = doubtful or not refused
        except SkillTrainError:
            cloud_record.write(run, before)
            raise
        else:
            record = record_started(run, record, posted, job)
            return _watched(run, record, posted, job, began) if doubtful else record
    raise AssertionError("the last try returns or raises")


def _watched(run: RunDir, record: CloudRecord, new_job: CloudJob, job: Job, began: float) -> CloudRecord:
    """Watches the new job until the earlier failed requests cannot create another. Returns the record with the
    remaining job."""
    end, next_notice = began + settled_seconds(), 0.0
    while (rest := end - time.monotonic()) > 0:
        if time.monotonic() >= next_notice:
            waiting.tell(f"job {job.id} was started; watching {rest:.0f} s for a duplicate from the failed request")
            next_notice = time.monotonic() + NOTICE_LOOKS * PAUSE_SECONDS
        time.sleep(min(PAUSE_SECONDS, rest))
        job = keep_the_oldest(record, new_job.number, job, of_plan=False)
    return record if record.last and record.last.job_id == job.id else record_started(run, record, new_job, job)


def settled_seconds() -> float:
    """Seconds within which a request without an answer may still create its job."""
    return SETTLED_LOOKS * PAUSE_SECONDS


def find_job_until_settled(record: CloudRecord, requested: CloudJob) -> Job | None:
    """Looks for a requested job until it cannot appear any more.

    Raises:
        Temporary: the Hub does not answer, so it is unknown whether the job exists.
    """
    passed = (datetime.now(UTC) - records.moment_of(requested.asked_at)).total_seconds()
    age = max(passed - 1, 0.0)  # `asked_at` has whole seconds, and the clock may have been set back
    times = math.ceil((settled_seconds() - age) / PAUSE_SECONDS) if PAUSE_SECONDS else 0
    return find_job(record, requested.number, times=max(times, 2))


def keep_the_oldest(record: CloudRecord, number: int, job: Job, *, of_plan: bool) -> Job:
    """Returns the oldest of the jobs that were started for the same purpose on any machine. Other jobs of this run are
    cancelled before they cost anything. A job of another run is cancelled by the command that started it.

    Args:
        job: the job that was just started.
        of_plan: all jobs of the plan have the same purpose. Otherwise only this run's jobs with this number have it.
    """
    labels = cloud_record.labels(record, number)
    own = {key: labels[key] for key in ("run", "attempt")}
    try:
        listed = jobs.find(record.namespace, {"plan": labels["plan"]} if of_plan else own)
    except SkillTrainError:  # the caller has already looked for it
        return job
    living = {each.id: each for each in (job, *listed) if each.live}
    if not living:
        return job
    first = min(living.values(), key=lambda each: each.age_key)
    for other in living.values():
        if other.id != first.id and (other.id == job.id or own.items() <= other.labels.items()):
            _cancel(other, first)
    return first


def _cancel(job: Job, first: Job) -> None:
    waiting.tell(f"cancelling job {job.id}: job {first.id} was started earlier for the same plan")
    try:
        jobs.cancel(job.namespace, job.id)
    except SkillTrainError as error:
        waiting.tell(f"it could not be cancelled ({error.message}) and costs money: skill-train cancel {job.id}")


def specification(run: RunDir, plan: Plan, record: CloudRecord, job: CloudJob) -> JobSpec:
    timeout_seconds = job.timeout_seconds or plan.timeout_seconds
    assert timeout_seconds is not None  # an order has one
    mount = record.data.mount if record.data else None
    where = () if mount is None else ("--data", f"{mount.mount_path}/{Path(plan.recipe.data).name}")
    return JobSpec(
        namespace=record.namespace,
        program=train_program(),
        plan=run.plan,
        arguments=(str(run.plan), "--job", *where),
        flavor=job.flavor,
        timeout_seconds=timeout_seconds,
        environment=ENVIRONMENT | {"SKILL_TRAIN_RUN": record.run_id},
        labels=cloud_record.labels(record, job.number) | cloud_record.limits(timeout_seconds, job.max_cost),
        name=(plan.policy.hub_model_id or "").split("/")[-1],
        dependencies=dependencies(plan),
        mounts=() if mount is None else (mount,),
    )


def find_job(record: CloudRecord, number: int, *, times: int) -> Job | None:
    """The job with this number; None if it does not exist. Looks at most `times` times, each time after a pause.

    Raises:
        Temporary: the Hub does not answer, so it is unknown whether the job exists.
    """
    labels = {key: value for key, value in cloud_record.labels(record, number).items() if key in ("run", "attempt")}
    for done in range(times):
        time.sleep(PAUSE_SECONDS)
        matching = patiently(lambda: jobs.find(record.namespace, labels))
        if matching:
            return matching[-1]  # the oldest, if there are two
        if done % NOTICE_LOOKS == NOTICE_LOOKS - 1 and done + 1 < times:
            waiting.tell(f"not there yet; looking for {(times - done - 1) * PAUSE_SECONDS:.0f} s more")
    return None


def record_started(run: RunDir, record: CloudRecord, requested: CloudJob, job: Job) -> CloudRecord:
    bucket, folder = job.bucket or (record.bucket, record.folder)
    record = msgspec.structs.replace(record, bucket=bucket, folder=folder).with_job(started_job(requested, job))
    cloud_record.write(run, record)
    return record


def inspect_new_job(record: CloudRecord) -> Job | None:
    """Reads the state of a job that was just started; None if the Hub does not answer."""
    last = record.last
    assert last is not None and last.job_id is not None
    job_id = last.job_id
    try:
        return patiently(lambda: jobs.inspect(record.namespace, job_id))
    except SkillTrainError:
        return None


def started_job(requested: CloudJob, job: Job) -> CloudJob:
    """The record of a requested job that now exists. If the job has another flavor, another folder requested it, and
    only that folder knows its timeout. The job's own `max_cost` is recorded, unless this request has one."""
    created = records.timestamp(job.created_at) if job.created_at else None
    started = msgspec.structs.replace(requested, state="started", job_id=job.id, url=job.url, created_at=created)
    if requested.max_cost is None:
        started = msgspec.structs.replace(started, max_cost=job.max_cost)
    if job.flavor in (None, requested.flavor):
        return started
    return msgspec.structs.replace(started, flavor=job.flavor, timeout_seconds=None, usd_per_hour=None)
