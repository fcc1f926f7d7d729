"""`cloud.json`: the Hub jobs of a run directory. It is written before the first job starts.

    {"schema", "backend", "run_id", "plan_hash", "namespace", "hub_model_id", "bucket", "folder", "data", "jobs": […]}

A job in state `starting` was requested, and it is not known whether it exists. Before another job is started, the Hub
must be searched for its labels.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from skill_train.core.errors import UsageError, quoted
from skill_train.run import plan_record, records
from skill_train.run.folder import RunDir, lost_plan
from skill_train.run.job_spec import Mount
from skill_train.run.plan_record import Plan
from skill_train.run.records import Number, Whole, convert, moment_of, read_json

SCHEMA = "skill-train/cloud/1"
BACKEND: Final = "hf_jobs"
ELSEWHERE = ("colab", "skypilot")  # backends whose runs have no record here
_NEEDED = {"schema", "backend", "data", "jobs"}  # keys that a file must have, although the class has defaults
RunId = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{12}\Z")]
PlanHash = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
Name = Annotated[str, msgspec.Meta(pattern=r"^\w[\w.-]*\Z")]  # becomes a part of an address of the Hub


class CloudJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One job of a run. `asked_at`, `created_at`, `ended_at`: UTC, such as `2026-11-21T10:00:00Z`."""

    number: Whole  # from 1; also in the label `attempt`
    state: Literal["starting", "started"]
    flavor: str
    # None for a job of which only the id is known, because the Hub's client does not report its timeout
    timeout_seconds: Whole | None
    asked_at: str
    usd_per_hour: Number | None = None  # price of the flavor when the job was requested; None if unknown
    # job_id, url, created_at: None while the job is starting
    job_id: Name | None = None
    url: str | None = None
    created_at: str | None = None
    max_cost: Number | None = None  # dollars that the job may cost; None without a limit
    # stage, ended_at, seconds, cost_usd: None until the job was seen to have ended. `seconds` is its running time.
    stage: str | None = None
    ended_at: str | None = None
    seconds: Number | None = None
    cost_usd: Number | None = None


class CloudData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Local data that was uploaded. A job finds it below `mount_path`, under the name that it has here."""

    mount_path: str
    # bytes, files: how much was uploaded; None for a run of which only a job's id is known
    bytes: Whole | None
    files: Whole | None
    # bucket, folder: of a synced volume; None if a dataset repository holds the data
    bucket: str | None = None
    folder: str | None = None
    # repository, revision: the dataset repository and its commit
    repository: str | None = None
    revision: str | None = None

    @classmethod
    def of_mount(cls, mount: Mount, size: int | None = None, files: int | None = None) -> CloudData:
        """The data at this mount of a job; `size` in bytes."""
        if mount.kind == "dataset":
            return cls(mount.mount_path, size, files, repository=mount.bucket, revision=mount.revision)
        return cls(mount.mount_path, size, files, bucket=mount.bucket, folder=mount.folder)

    @property
    def mount(self) -> Mount:
        if self.repository is not None:
            return Mount(self.repository, "", self.mount_path, True, kind="dataset", revision=self.revision)
        return Mount(self.bucket or "", self.folder or "", self.mount_path, read_only=True)


class CloudRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="schema", tag=SCHEMA):
    """Everything that this machine knows about a run in the cloud. Nothing in it is secret."""

    run_id: RunId  # also in the labels of each job of the run
    plan_hash: PlanHash  # the result of the function `plan_hash`
    namespace: Name
    hub_model_id: str
    # bucket, folder: where the program, the plan and the stored files of the run are; None before the first job
    bucket: str | None = None
    folder: str | None = None
    data: CloudData | None = None  # None for a dataset of the Hub
    jobs: tuple[CloudJob, ...] = ()
    backend: Literal["hf_jobs"] = BACKEND

    @property
    def last(self) -> CloudJob | None:
        """The newest job, which may still be starting."""
        return self.jobs[-1] if self.jobs else None

    @property
    def last_begun(self) -> CloudJob | None:
        """The newest job that is known to exist."""
        return next((job for job in reversed(self.jobs) if job.job_id is not None), None)

    def with_job(self, job: CloudJob) -> CloudRecord:
        """The record with this job added. It replaces a job of the same number."""
        others = (earlier for earlier in self.jobs if earlier.number != job.number)
        return msgspec.structs.replace(self, jobs=tuple(sorted((*others, job), key=lambda each: each.number)))


def plan_hash(plan: Plan) -> str:
    """16 hex digits that change with the recipe, the placement, the flavor and the launch of a plan."""
    values = {
        "recipe_hash": plan.recipe_hash,
        "placement": msgspec.structs.asdict(plan.placement),
        "flavor": plan.flavor,
        "launch": {"arguments": plan.launch.arguments, "environment": plan.launch.environment},
    }
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def labels(record: CloudRecord, number: int) -> dict[str, str]:
    return {"skill-train": "1", "run": record.run_id, "plan": record.plan_hash, "attempt": str(number)}


def limits(timeout_seconds: int, max_cost: float | None) -> dict[str, str]:
    """Labels that tell other folders and machines what a job may cost. The Hub accepts no dot in a label."""
    most = {} if max_cost is None else {"max-cost-millionths": str(round(max_cost * 1e6))}
    return {"timeout": str(timeout_seconds)} | most


def record_path(run: RunDir) -> Path:
    return run.record("cloud")


def write(run: RunDir, record: CloudRecord) -> None:
    records.write(record_path(run), record)


def read(run: RunDir) -> CloudRecord | None:
    """The record of a run; None for a run that was never submitted.

    Raises:
        UsageError: skill-train did not write `cloud.json`.
    """
    path = record_path(run)
    if not path.is_file():
        return None
    try:
        document = read_json(path)
        record = convert(document, CloudRecord, path)
    except UsageError as error:
        raise _broken(path, error.message) from None
    if missing := _NEEDED - document.keys():
        raise _broken(path, f"no {', '.join(sorted(missing))}")
    for job in record.jobs:
        if (job.state == "started") != (job.job_id is not None):
            raise _broken(path, f"job {job.number} is {job.state!r}, with the id {job.job_id}")
        for moment in filter(None, (job.asked_at, job.created_at)):  # `asked_at` may be empty if only the id was known
            try:
                moment_of(moment)
            except ValueError:
                raise _broken(path, f"job {job.number} has {moment!r} in place of a time") from None
    return record


def _broken(path: Path, got: str) -> UsageError:
    return UsageError(
        f"{path} is not a valid record of a submitted run",
        code="broken_record",
        expected=f"schema {SCHEMA}, as `skill-train submit` writes it",
        got=got,
        hint="restore the file, or fetch the run anew: hf jobs ps -a names its job, skill-train pull JOB --run-dir NEW",
    )


def submitted(run: RunDir) -> CloudRecord:
    """The record of a submitted run.

    Raises:
        UsageError: the run was not submitted, or its record cannot be read.
    """
    record = read(run)
    if record is None:
        is_run = RunDir.is_one(run.path)
        raise UsageError(
            f"{run.path} {'has not been submitted to the cloud' if is_run else 'is neither a run nor the id of a job'}",
            code="missing_step",
            expected="a run directory of `skill-train submit` (it holds cloud.json)",
            got="a folder without cloud.json" if run.path.is_dir() else "no such folder",
            hint=_otherwise(run),
        )
    return record


def _otherwise(run: RunDir) -> str:
    """The command for a folder that was not submitted. A run that began on this machine, or that is planned for another
    provider, continues there."""
    if not RunDir.is_one(run.path):
        other = "name a folder that `skill-train submit` made, or the id of a job; hf jobs ps -a lists your jobs"
        return lost_plan(run.path) or other
    if _backend(run) in ELSEWHERE:
        return continue_command(run)
    if any((run.path / name).exists() for name in ("train.log", "checkpoints")):
        return f"it is a run of this machine, which goes on with {continue_command(run)}"
    return f"skill-train submit {quoted(run.path)}"


def continue_command(run: RunDir) -> str:
    """The command that continues an unfinished run. For a submitted run it depends on the run's jobs."""
    return f"skill-train {continue_words(read(run), _backend(run))} {quoted(run.path)}"


def _backend(run: RunDir) -> str | None:
    """The backend of the plan; None if the plan cannot be read. Other steps report that error."""
    with contextlib.suppress(UsageError):
        return plan_record.read(run.plan).placement.backend if run.plan.is_file() else None
    return None


def continue_words(record: CloudRecord | None, backend: str | None) -> str:
    """The words before the folder in `continue_command`.

    Args:
        backend: the backend of the plan. Runs on Google Colab and SkyPilot leave no record on this machine.
    """
    if record is None and backend in ELSEWHERE:
        return f"submit --backend {backend}"
    if record is None:
        return "submit" if backend == BACKEND else "local --resume --run-dir"
    if record.last is None:
        return "submit"
    return "pull" if record.last.stage in (None, "COMPLETED") else "resume"


def require_not_submitted(run: RunDir) -> None:
    """Refuses to train a submitted run here, because its files could not be distinguished from the job's files.

    Raises:
        UsageError: the run was submitted.
    """
    if record_path(run).is_file():
        raise UsageError(
            f"{run.path} is a run in the cloud, and is not trained on this machine",
            code="cloud_run",
            expected="a separate run directory for training on this machine",
            got="a folder with cloud.json",
            hint=continue_command(run),
        )
