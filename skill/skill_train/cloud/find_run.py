"""Finds the run that a command's RUN names: a run directory, or the id of one of its jobs, `NAMESPACE/ID` or `ID`."""

import re
from pathlib import Path

import msgspec
from msgspec.structs import replace

from skill_train.cloud import bucket as stored_files
from skill_train.cloud.poll import job_now, patiently
from skill_train.cloud.start_once import started_job
from skill_train.core import waiting
from skill_train.core.errors import UsageError, quoted
from skill_train.core.files import write_json, write_text
from skill_train.hub import jobs
from skill_train.hub.jobs import Job
from skill_train.recipe.fields import to_yaml
from skill_train.run import cloud_record, plan_record
from skill_train.run.cloud_record import CloudData, CloudJob, CloudRecord
from skill_train.run.folder import RUNS, RunDir, require_unused
from skill_train.run.lock import locked
from skill_train.run.plan_record import Plan
from skill_train.run.progress import dollars
from skill_train.run.records import timestamp

_JOB = re.compile(r"(?:(?P<namespace>[\w.-]+)/)?(?P<id>[0-9a-f]{24})")


class CloudRun(msgspec.Struct, frozen=True):
    """A run in the cloud, with one of its jobs."""

    name: str  # the run as the user named it; suggested commands use the same name
    run: RunDir | None  # the run directory; None if the user gave only the id of a job
    record: CloudRecord
    job: CloudJob  # the last job, or the job whose id the user gave
    now: Job  # the job's state on the Hub, or DELETED if the Hub does not have it any more

    @property
    def word(self) -> str:
        return quoted(self.name)


def find(name: str) -> CloudRun:
    """Finds a run, with the current state of its job.

    For a run directory it is the newest job. Jobs that the directory does not record are looked up by their labels if
    a request had no answer, or if the last job ended without a result.

    Raises:
        UsageError: this is neither a submitted run nor a job that skill-train started, or the job no longer exists.
        AccessError: the token may not see the job; or there is no token, and the id has no namespace.
    """
    match = _JOB.fullmatch(name)
    if match and not Path(name).is_dir():
        return _by_id(name, match["namespace"] or _namespace(), match["id"])
    run = RunDir(Path(name))
    if (run.path / "skypilot").is_dir() and not cloud_record.record_path(run).is_file():
        from skill_train.cloud.elsewhere import skypilot  # late: `status` of a job does without it

        skypilot.require_not_launched(run.path)
    record = cloud_record.submitted(run)
    if record.last is None:
        raise never_started(name)
    if record.last.job_id is None:
        record = with_unrecorded_jobs(record)
    if record.last_begun is None:
        raise never_started(name)
    cloud = _asked_for(name, run, record, record.last_begun)
    if cloud.now.live or cloud.now.stage == "COMPLETED":
        return cloud
    cloud = replace(cloud, record=with_unrecorded_jobs(cloud.record))
    newest = cloud.record.last_begun
    return cloud if newest in (None, cloud.job) else with_newest_job(cloud)


def newest_job(record: CloudRecord) -> Job | None:
    """The current state of the record's newest job; None if no job has begun, or the Hub does not have it any more."""
    job_id = record.last_begun.job_id if record.last_begun else None
    return None if job_id is None else job_now(record, job_id)


def with_current_job(cloud: CloudRun) -> CloudRun:
    return _asked_for(cloud.name, cloud.run, cloud.record, cloud.job)


def _asked_for(name: str, run: RunDir | None, record: CloudRecord, job: CloudJob) -> CloudRun:
    now = job_now(record, job.job_id or "") or deleted_job(record, job)
    return with_recorded_end(CloudRun(name, run, with_bucket(record, now), job, now))


def with_recorded_end(cloud: CloudRun) -> CloudRun:
    """Records the end of the run's job, also in `cloud.json` if there is a run directory.

    A recorded end stays if the Hub does not have the job any more. A recorded DELETED can be replaced, because the
    token of that time may not have been allowed to see the job.
    """
    now, job = cloud.now, cloud.job
    if now.live or (job.stage is not None and now.stage in (job.stage, "DELETED")):
        return cloud
    seconds = None
    if now.started_at is not None and now.finished_at is not None:
        seconds = max((now.finished_at - now.started_at).total_seconds(), 0.0)
    ended = msgspec.structs.replace(
        job,
        stage=now.stage,
        ended_at=timestamp(now.finished_at) if now.finished_at else None,
        seconds=seconds,
        cost_usd=dollars(seconds, job.usd_per_hour),
    )
    if cloud.run is not None:
        _write_end(cloud.run, ended)
    return replace(cloud, job=ended, record=cloud.record.with_job(ended))


def _write_end(run: RunDir, ended: CloudJob) -> None:
    """Writes the end to `cloud.json`. Skips it if the run directory was moved, is in use or not writable, because the
    command's answer does not depend on it."""
    if not cloud_record.record_path(run).is_file():
        return
    try:
        with locked(run, "status"):
            record = cloud_record.read(run)
            if record is not None and any(job.job_id == ended.job_id for job in record.jobs):
                cloud_record.write(run, record.with_job(ended))
    except OSError:
        return
    except UsageError as error:
        if error.code != "run_in_use":
            raise


def with_newest_job(cloud: CloudRun) -> CloudRun:
    job = cloud.record.last_begun or cloud.job
    name = cloud.name if cloud.run is not None else f"{cloud.record.namespace}/{job.job_id}"
    return _asked_for(name, cloud.run, cloud.record, job)


def with_unrecorded_jobs(record: CloudRecord) -> CloudRecord:
    """Adds the jobs of this run that the record lacks, because their request had no answer or another folder started
    them."""
    listed = patiently(lambda: jobs.find(record.namespace, {"run": record.run_id}))
    live = {job.id for job in listed if job.live}
    for job in reversed(listed):  # the oldest first
        entry = _as_record(job)
        there = next((recorded for recorded in record.jobs if recorded.number == entry.number), None)
        if there is not None and there.job_id is None:
            entry = started_job(there, job)
        elif there is not None and (not job.live or there.job_id in live):
            if job.live and job.id != there.job_id:
                running = f"another job of this run is {job.stage} and costs money"
                waiting.tell(f"{running}; to stop it: skill-train cancel {job.id}")
            continue  # two folders used this number: the running job counts, and our own if both run
        if there is None or there.job_id != job.id:
            record = with_bucket(record.with_job(entry), job)
    return record


def plan_of(cloud: CloudRun, stored: stored_files.StoredRecords) -> Plan | None:
    """The plan in the run directory, or the one in the bucket; None if neither exists."""
    if cloud.run is not None and cloud.run.plan.is_file():
        return plan_record.read(cloud.run.plan)
    document = stored.document("plan.json")
    if document is None:
        return None
    try:
        plan = plan_record.from_dict(document, Path("plan.json"))
    except UsageError:  # a bucket can hold anything
        return None
    return plan if plan.policy.hub_model_id else None


def with_run_dir(cloud: CloudRun, folder: Path | None) -> tuple[CloudRun, RunDir]:
    """The run with a run directory, and the directory: the run's own, or a new one if the user gave a job id.

    Raises:
        UsageError: the folder holds another run or is in use, or the plan is no longer in the bucket.
    """
    if cloud.run is not None and folder in (None, cloud.run.path):
        run, record = cloud.run, cloud.record
    else:
        run = RunDir(folder or RUNS / cloud.record.run_id)
        record = _record_in(run, cloud.record.run_id) or cloud.record
    if run.plan.is_file():
        return replace(cloud, name=str(run.path), run=run, record=record), run
    there = stored_files.stored_records(record, ("plan.json",))
    plan = plan_of(cloud, there)
    if plan is None:
        raise UsageError(
            f"the plan of {cloud.name} is missing from its bucket, or damaged",
            code="bad_plan",
            expected="plan.json beside the program of the job",
            hint="use the run directory that submitted it",
        )
    record = msgspec.structs.replace(record, hub_model_id=record.hub_model_id or plan.policy.hub_model_id or "")
    if _record_in(run, record.run_id) is None:
        require_unused(run)
    with locked(run, "pull"):
        if _record_in(run, record.run_id) is None:
            cloud_record.write(run, record)  # first, so that after a kill the folder belongs to this run
        write_text(run.recipe, to_yaml(plan.recipe_file()))
        write_json(run.plan, there.document("plan.json"))  # the same document that the job has
    return replace(cloud, name=str(run.path), run=run, record=record), run


def _record_in(run: RunDir, run_id: str) -> CloudRecord | None:
    """The record of this run in a folder; None for a new folder.

    Raises:
        UsageError: the folder holds another run.
    """
    record = cloud_record.read(run)
    if record is not None and record.run_id == run_id:
        return record
    if record is not None or run.plan.exists() or run.adapter.exists():
        raise UsageError(
            f"{run.path} holds another run",
            code="another_run",
            expected="a new folder, or one of the same run",
            got=f"run {record.run_id}" if record else "a run of this machine",
            hint="give another --run-dir",
        )
    return None


def never_started(name: str) -> UsageError:
    hint = f"skill-train submit {quoted(name)}"
    return UsageError(f"{name} has never had a job", code="missing_step", expected="a run with a job", hint=hint)


def with_bucket(record: CloudRecord, job: Job) -> CloudRecord:
    """Adds the bucket and folder of a job to the record, unless the record has them or the job has none."""
    if job.bucket is None or record.folder is not None:
        return record
    return msgspec.structs.replace(record, bucket=job.bucket[0], folder=job.bucket[1])


def _by_id(name: str, namespace: str, job_id: str) -> CloudRun:
    """The run of a job id, with a record that is made from the labels of its jobs."""
    now = patiently(lambda: jobs.inspect(namespace, job_id))
    run_id, plan_hash = now.labels.get("run", ""), now.labels.get("plan", "")
    has_our_labels = re.fullmatch("[0-9a-f]{12}", run_id) and re.fullmatch("[0-9a-f]{16}", plan_hash)
    if "skill-train" not in now.labels or not has_our_labels:
        raise UsageError(
            f"job {name} was not started by skill-train",
            code="unknown_job",
            expected="a job with its labels: skill-train, run and plan",
            got=", ".join(sorted(now.labels)) or "no labels",
            hint=f"hf jobs logs {namespace}/{job_id}",
        )
    others = patiently(lambda: jobs.find(namespace, {"run": run_id}))
    jobs_by_id = {job.id: _as_record(job) for job in (*others, now)}
    ordered = tuple(sorted(jobs_by_id.values(), key=lambda job: job.number))
    data = CloudData.of_mount(now.mounts[0]) if now.mounts else None
    record = CloudRecord(run_id, plan_hash, namespace, "", data=data, jobs=ordered)
    return with_recorded_end(CloudRun(f"{namespace}/{job_id}", None, with_bucket(record, now), jobs_by_id[job_id], now))


def _as_record(job: Job) -> CloudJob:
    created = timestamp(job.created_at) if job.created_at else ""
    return started_job(CloudJob(job.number, "starting", job.flavor or "", None, created), job)


def deleted_job(record: CloudRecord, job: CloudJob) -> Job:
    """The state of a recorded job that is not on the Hub any more."""
    return Job(
        id=job.job_id or "",
        namespace=record.namespace,
        url=job.url or "",
        stage="DELETED",
        message="the Hub has no such job, or your token may not see it",
        flavor=job.flavor,
        labels={},
    )


def _namespace() -> str:
    from skill_train.cloud.preflight import signed_in_account  # late: `status` of a run directory does without it

    return signed_in_account().name
