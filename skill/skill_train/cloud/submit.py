"""Submits a run so that it is never lost and never started twice: first the record, then the data, then the job."""

import json
import secrets
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import msgspec

from skill_train.cloud import claim, find_run, stage_data, start_once
from skill_train.cloud.stage_data import Staged
from skill_train.core import waiting
from skill_train.core.errors import SkillTrainError, UsageError, quoted
from skill_train.core.files import scratch_folder
from skill_train.core.units import megabytes
from skill_train.hub import flavors, jobs, repositories
from skill_train.hub.client import patiently
from skill_train.hub.jobs import LIVE, Job
from skill_train.machine.training_program import train_program
from skill_train.plan.file import write_plan
from skill_train.run import cloud_record, plan_record, records
from skill_train.run.cloud_record import CloudData, CloudJob, CloudRecord
from skill_train.run.folder import RunDir
from skill_train.run.job_spec import Mount
from skill_train.run.lock import locked
from skill_train.run.plan_record import Plan


@dataclass(frozen=True)
class Order:
    """A plan to submit, and the user's choices for it."""

    plan: Plan  # the plan with its final timeout and `policy.hub_model_id`
    namespace: str
    usd_per_hour: float | None  # None if no price is known
    staged: Staged | None  # the local data; None for data on the Hub
    data_repo: str | None  # the dataset repository for the local data; None for the bucket
    max_cost: float | None = None  # dollars that the job may never exceed; None if the user set no limit

    @property
    def plan_hash(self) -> str:
        return cloud_record.plan_hash(self.plan)


@dataclass(frozen=True)
class Sent:
    """A job of a run."""

    record: CloudRecord
    stage: str | None  # the last known stage on the Hub; None if the Hub did not answer
    reused: bool  # the job already existed


class Upload(TypedDict):
    """Files to upload, and their destination. `left_out` are files in the data's folder that are not uploaded."""

    what: str
    name: str | None
    files: int | None
    bytes: int | None
    to: str
    left_out: NotRequired[list[str]]


def uploads(order: Order) -> list[Upload]:
    """The files that leave this machine and where they go. The last entry is the result of the job, whose size is not
    known yet."""
    bucket = f"the private bucket {order.namespace}/jobs-artifacts"
    program, plan_text = train_program(), json.dumps(order.plan.as_dict(), indent=1, ensure_ascii=False)
    listed: list[Upload] = [
        {"what": "program", "name": program.name, "files": 1, "bytes": program.stat().st_size, "to": bucket},
        {"what": "plan", "name": "plan.json", "files": 1, "bytes": len(plan_text.encode()) + 1, "to": bucket},
    ]
    if (staged := order.staged) is not None:
        to = f"the private dataset {order.data_repo}" if order.data_repo else bucket
        name, rows = order.plan.recipe.data, staged.files.keys() - staged.pictures
        listed.append({"what": "data", "name": name, "files": len(rows), "bytes": staged.bytes_of(rows), "to": to})
        if staged.left_out:
            listed[-1]["left_out"] = list(staged.left_out)
        if count := len(staged.pictures):
            size = staged.bytes_of(staged.pictures)
            listed.append({"what": "pictures", "name": None, "files": count, "bytes": size, "to": to})
    repository = order.plan.policy.hub_model_id
    to = "a private repository of the Hub, which the job makes"
    return [*listed, {"what": "result", "name": repository, "files": None, "bytes": None, "to": to}]


def submit(run: RunDir, order: Order, *, force_new: bool) -> Sent:
    """Starts the job of a run, or finds the existing one.

    Raises:
        UsageError: the run directory holds another run.
        AccessError: the Hub refuses the job.
        Temporary: the Hub does not answer. The same command continues where this one stopped.
    """
    with locked(run, "submit"), start_once.told_if_interrupted(run):
        sent = _existing(run, order, force_new=force_new)
        if sent is not None:
            return sent
        record = _new_record(run, order)
        write_plan(run, order.plan)
        cloud_record.write(run, record)
        if order.staged is not None:
            data = upload(order.staged, order.namespace, order.data_repo)
            record = msgspec.structs.replace(record, data=data)
            cloud_record.write(run, record)
        job = CloudJob(
            number=1,
            state="starting",
            flavor=order.plan.flavor or "",
            timeout_seconds=order.plan.timeout_seconds,
            asked_at=records.timestamp(),
            usd_per_hour=order.usd_per_hour,
            max_cost=order.max_cost,
        )
        return _asked_for(run, order, record, job, of_plan=not force_new)


def _asked_for(run: RunDir, order: Order, record: CloudRecord, job: CloudJob, *, of_plan: bool) -> Sent:
    """Requests the job. If another folder requested a job of the same plan at the same time, returns the older one."""
    spec = start_once.specification(run, order.plan, record, job)
    place = patiently(lambda: jobs.upload(spec))
    with claim.claimed(record, job.number, of_plan=of_plan) as theirs:
        if theirs is not None:
            return _adopt(run, order, theirs)
        waiting.tell(f"starting the job on {job.flavor}")
        record = start_once.start(run, record, job, lambda: jobs.start(spec, place))
        if record.folder is None:  # the answer left it out
            record = msgspec.structs.replace(record, bucket=place[0], folder=place[1])
            cloud_record.write(run, record)
    begun = start_once.inspect_new_job(record)
    if begun is None:
        return Sent(record, None, reused=False)
    stays = start_once.keep_the_oldest(record, job.number, begun, of_plan=of_plan)
    return Sent(record, begun.stage, reused=False) if stays.id == begun.id else _adopt(run, order, stays)


def existing(run: RunDir, order: Order, *, force_new: bool) -> Sent | None:
    """The job that this order already has: a job in this run directory, or a job of the same plan that is running or
    has succeeded; None if there is none.

    Args:
        force_new: only a job in this run directory counts.

    Raises:
        UsageError: the run directory holds another run.
    """
    if not run.path.exists() and (force_new or _same_plan(order) is None):
        return None
    with locked(run, "submit"):
        return _existing(run, order, force_new=force_new)


def never_began(run: RunDir, plan_hash: str) -> bool:
    """Whether a run directory belongs to this plan and has no job yet, or only a request without an answer."""
    record = cloud_record.read(run)
    return record is not None and record.plan_hash == plan_hash and record.last_begun is None


def require_new(run: RunDir, plan_hash: str) -> None:
    """Refuses a folder with a run, except a run of this plan that never started.

    Raises:
        UsageError: the folder holds such a run.
    """
    if never_began(run, plan_hash):
        return
    if RunDir.is_one(run.path) or cloud_record.record_path(run).is_file():
        raise UsageError(
            f"{run.path} already holds a run",
            code="another_run",
            expected="a new folder for a new run",
            hint="use another --run-dir, or omit --force-new",
        )


def _existing(run: RunDir, order: Order, *, force_new: bool) -> Sent | None:
    record = cloud_record.read(run)
    if record is None:
        _require_free(run)
    elif record.plan_hash != order.plan_hash:
        _require_never_started(run, record, order)
    elif (sent := _sent_before(run, record)) is not None:
        return sent
    job = None if force_new else _same_plan(order)
    return None if job is None else _adopt(run, order, job)


def _sent_before(run: RunDir, record: CloudRecord) -> Sent | None:
    """The newest job of a run directory; None if it has none. A requested job is looked up, and counts if it exists."""
    last = record.last
    if last is not None and last.state == "starting":
        job = start_once.find_job_until_settled(record, last)
        if job is not None:
            return Sent(start_once.record_started(run, record, last, job), job.stage, reused=True)
    if record.last_begun is None:
        return None
    stage = _stage(record)
    whole = record if stage in (*LIVE, "COMPLETED") else find_run.with_unrecorded_jobs(record)
    if whole != record:  # another folder continued the run
        cloud_record.write(run, whole)
        stage = _stage(whole)
    return Sent(whole, stage, reused=True)


def _stage(record: CloudRecord) -> str:
    """The stage of the newest job. If the Hub does not have it any more: its recorded end, or DELETED."""
    now, job = find_run.newest_job(record), record.last_begun
    return now.stage if now else (job and job.stage) or "DELETED"


def _same_plan(order: Order) -> Job | None:
    """A running job of the same plan, or else a completed one, from any folder or machine."""
    labels = {"skill-train": "1", "plan": order.plan_hash}
    matching = [job for job in patiently(lambda: jobs.find(order.namespace, labels)) if "run" in job.labels]
    done = [job for job in matching if job.stage == "COMPLETED"]
    return next((job for job in matching if job.live), done[0] if done else None)


def _adopt(run: RunDir, order: Order, job: Job) -> Sent:
    """Makes a run directory for an existing job, with the plan of that job."""
    waiting.tell(
        f"the job {job.id} {'runs this plan already' if job.live else 'has done this plan; --force-new starts another'}"
    )
    theirs = _plan_of(job)
    plan, staged = theirs or order.plan, order.staged
    record = CloudRecord(
        run_id=job.labels["run"],
        plan_hash=order.plan_hash,
        namespace=job.namespace,
        hub_model_id=plan.policy.hub_model_id or "",
        data=None if staged is None or not job.mounts else _uploaded(staged, job.mounts[0]),
    )
    flavor = job.flavor or plan.flavor or ""
    new_job = CloudJob(
        job.number,
        "starting",
        flavor,
        # The plan has the timeout of the first job; a later job may have another.
        timeout_seconds=theirs.timeout_seconds if theirs is not None and job.number == 1 else None,
        asked_at=records.timestamp(),
        usd_per_hour=order.usd_per_hour if flavor == order.plan.flavor else flavors.usd_per_hour(flavor),
        max_cost=order.max_cost,
    )
    write_plan(run, plan)
    return Sent(start_once.record_started(run, record, new_job, job), job.stage, reused=True)


def _plan_of(job: Job) -> Plan | None:
    """The plan in the folder of the job; None if it cannot be read."""
    if job.bucket is None:
        return None
    bucket, folder = job.bucket
    with scratch_folder() as temporary:
        file = temporary / "plan.json"
        try:
            patiently(lambda: jobs.download(bucket, [(f"{folder}/plan.json", file)]))
            return plan_record.read(file)
        except SkillTrainError:
            return None


def _uploaded(staged: Staged, mount: Mount) -> CloudData:
    return CloudData.of_mount(mount, staged.bytes, len(staged.files))


def _new_record(run: RunDir, order: Order) -> CloudRecord:
    """The existing record, so that its run id is kept, or a new one if there is none for this plan and account. The
    jobs of the existing record never started."""
    record = cloud_record.read(run)
    if record is not None and (record.plan_hash, record.namespace) == (order.plan_hash, order.namespace):
        return msgspec.structs.replace(record, jobs=(), hub_model_id=order.plan.policy.hub_model_id or "")
    return CloudRecord(
        run_id=secrets.token_hex(6),
        plan_hash=order.plan_hash,
        namespace=order.namespace,
        hub_model_id=order.plan.policy.hub_model_id or "",
    )


def upload(staged: Staged, namespace: str, data_repo: str | None) -> CloudData:
    """Uploads local data. Files that are already there are not sent again."""
    where = stage_data.mount_path(staged)
    size = f"{megabytes(staged.bytes)} in {len(staged.files)} files"
    with stage_data.folder_of(staged) as folder:
        if data_repo is not None:
            waiting.tell(f"uploading the data to the private dataset {data_repo}: {size}")
            commit = patiently(lambda: repositories.upload_dataset(folder, data_repo))
            if changed := stage_data.changed_files(staged):
                raise stage_data.changed(changed[0])
            return _uploaded(staged, Mount(data_repo, "", where, read_only=True, kind="dataset", revision=commit))
        waiting.tell(f"uploading the data to the bucket {namespace}/jobs-artifacts: {size}")
        mount = patiently(lambda: jobs.sync_data(folder, where, namespace, staged.name))
    if changed := stage_data.changed_files(staged):  # the uploaded files do not match the folder's name
        names = [f"{mount.folder}/{name}" for name in changed]
        patiently(lambda: jobs.change_names(mount.bucket, add=[], delete=names))
        raise stage_data.changed(changed[0])
    return _uploaded(staged, mount)


def _require_free(run: RunDir) -> None:
    """Refuses a folder with a local run, because local and cloud runs are not mixed."""
    if not RunDir.is_one(run.path):
        return
    there = plan_record.read(run.plan)
    trained = run.record("train").is_file() or run.adapter.is_dir() or any(run.checkpoints.glob("checkpoint-*"))
    if trained or there.where != "cloud":
        raise UsageError(
            f"{run.path} holds a run that was trained on this machine",
            code="another_run",
            expected="a separate folder for the run in the cloud",
            got=f"{there.where}, recipe {there.recipe_hash[:8]}",
            hint=f"skill-train submit {quoted(run.path)}",
        )


def _require_never_started(run: RunDir, record: CloudRecord, order: Order) -> None:
    """Refuses to replace a record of another plan, unless that plan never had a job."""
    last = record.last_begun or record.last
    if last is None or (last.job_id is None and start_once.find_job_until_settled(record, last) is None):
        return
    raise UsageError(
        f"{run.path} belongs to another plan{f', whose job is {last.job_id}' if last.job_id else ''}",
        code="another_run",
        expected=f"plan {record.plan_hash} on {last.flavor}",
        got=f"plan {order.plan_hash} on {order.plan.flavor}",
        hint=f"use another --run-dir; skill-train status {quoted(run.path)} shows the existing run",
    )
