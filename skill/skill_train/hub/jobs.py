"""Hugging Face Jobs and their bucket, through huggingface_hub: one request for each function, with a time limit.

Nothing here decides or repeats a request, because only the caller knows whether a second request is safe.
"""

import contextlib
import io
import secrets
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from skill_train.core import waiting
from skill_train.hub import account
from skill_train.hub.client import api, ask, ask_here
from skill_train.hub.errors import HubResource, StillAsking, not_signed_in, understood
from skill_train.run.job_spec import IMAGE, MOUNT_PATH, SECRETS, JobSpec, Mount, command

LIVE = ("SCHEDULING", "RUNNING", "UPDATING")  # stages in huggingface_hub 2.4; a job in any other stage has ended


class Job(msgspec.Struct, frozen=True):
    """The Hub's description of a job."""

    id: str  # 24 hex digits
    namespace: str
    url: str
    stage: str  # one of `LIVE`, or COMPLETED, CANCELED, ERROR, DELETED
    message: str | None  # the Hub's sentence about the end of the job; only it contains the exit code
    flavor: str | None
    labels: dict[str, str]
    bucket: tuple[str, str] | None = None  # `(bucket id, folder of the run)`; None if skill-train did not start the job
    created_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    mounts: tuple[Mount, ...] = ()  # the other volumes
    running_seconds: int | None = None  # the running time so far, by the Hub's clock; None if the Hub does not say

    @property
    def live(self) -> bool:
        return self.stage in LIVE

    @property
    def number(self) -> int:
        """The number of the job in its run, from 1. Labels can be edited on the Hub; an invalid one counts as 1."""
        attempt = self.labels.get("attempt", "")
        return int(attempt) if attempt.isdecimal() else 1

    @property
    def timeout_seconds(self) -> int | None:
        """The timeout, from a label, because huggingface_hub 2.4 does not return it; None without the label."""
        seconds = self.labels.get("timeout", "")
        return int(seconds) if seconds.isdecimal() else None

    @property
    def max_cost(self) -> float | None:
        """The most dollars that all jobs of its plan may cost, by its label; None without a limit."""
        millionths = self.labels.get("max-cost-millionths", "")
        return int(millionths) / 1e6 if millionths.isdecimal() else None

    @property
    def age_key(self) -> tuple[float, str]:
        """A sort key that is smaller for an older job, and the same on every machine."""
        return self.created_at.timestamp() if self.created_at else 0.0, self.id


class BucketFile(msgspec.Struct, frozen=True):
    """A file in a bucket. `path` is relative to the listed folder; `remote` is the full path in the bucket."""

    path: str
    remote: str
    size: int
    uploaded_at: datetime | None = None


def upload(spec: JobSpec) -> tuple[str, str]:
    """Uploads the program and the plan to a new folder in the bucket of the jobs. Returns `(bucket, folder)`. Raises
    what `start` raises, but no job exists then."""
    _token()
    bucket = bucket_of(spec.namespace)
    folder = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"  # the client names its folders in the same way
    files = [(path, f"{folder}/{path.name}") for path in (spec.program, spec.plan)]

    def question() -> None:
        api().create_bucket(bucket, exist_ok=True, private=True)
        api().batch_bucket_files(bucket, add=files)

    ask(HubResource("bucket", bucket), question, seconds=None)
    return bucket, folder


def start(spec: JobSpec, place: tuple[str, str]) -> Job:
    """Creates a job that uses a folder with its program, its plan and the checkpoints of earlier jobs.

    After an error the job may or may not exist. Look it up with `find` before starting it again.

    Raises:
        AccessError: the user is not signed in, or lacks a permission or credit.
        Temporary: the Hub does not answer, or the server failed.
    """
    token = _token()

    def question() -> Any:
        return api().run_job(
            image=IMAGE,
            command=command(spec),
            env=dict(spec.environment),
            secrets=dict.fromkeys(SECRETS, token),
            flavor=spec.flavor,
            timeout=spec.timeout_seconds,
            name=spec.name,
            labels=dict(spec.labels),
            volumes=_volumes(spec, place),
            namespace=spec.namespace,
        )

    return _job(ask(_job_of(spec.namespace), question), spec.namespace)


def as_request(spec: JobSpec, place: tuple[str, str]) -> dict[str, object]:
    """The request that `start` sends (huggingface_hub 2.4, `_create_job_spec`), with only the names of the secrets."""
    return {
        "namespace": spec.namespace,
        "dockerImage": IMAGE,
        "command": command(spec),
        "arguments": [],
        "environment": dict(spec.environment),
        "secrets": list(SECRETS),
        "flavor": spec.flavor,
        "timeoutSeconds": spec.timeout_seconds,
        "labels": spec.labels | {"name": spec.name},
        "volumes": [volume.to_dict() for volume in _volumes(spec, place)],
    }


def inspect(namespace: str, job_id: str) -> Job:
    """The current state of the job.

    Raises:
        UsageError: there is no such job.
    """
    resource = HubResource("job", f"{namespace}/{job_id}")
    return _job(ask(resource, lambda: api().inspect_job(job_id=job_id, namespace=namespace)), namespace)


def find(namespace: str, labels: dict[str, str]) -> list[Job]:
    """The jobs with all these labels, the newest first."""
    listed = ask(_job_of(namespace), lambda: list(api().list_jobs(namespace=namespace, labels=labels)))
    jobs = [_job(each, namespace) for each in listed]
    jobs = [job for job in jobs if labels.items() <= job.labels.items()]  # in case the server ignores the filter
    return sorted(jobs, key=lambda job: job.age_key, reverse=True)


def cancel(namespace: str, job_id: str) -> None:
    resource = HubResource("job", f"{namespace}/{job_id}")
    ask(resource, lambda: api().cancel_job(job_id=job_id, namespace=namespace))


def followed_log(namespace: str, job_id: str) -> Iterator[str]:
    """The lines of a log, as the job writes them. A broken stream ends early or raises, so the caller counts lines."""
    iterator = iter(api().fetch_job_logs(job_id=job_id, namespace=namespace, follow=True))
    while True:
        try:
            yield ask_here(HubResource("job", f"{namespace}/{job_id}"), lambda: next(iterator))
        except StopIteration:
            return


def log_so_far(namespace: str, job_id: str, *, live: bool, tail: int | None = None) -> list[str]:
    """The lines that exist now, or the last `tail` lines.

    Args:
        live: the job has not ended. Its log may then be silent, which is not a failure and not waited in vain.
    """
    lines: list[str] = []

    def question() -> None:
        for line in api().fetch_job_logs(job_id=job_id, namespace=namespace, follow=False, tail=tail):
            lines.append(line)

    try:
        ask(HubResource("job", f"{namespace}/{job_id}"), question, seconds=None)
    except StillAsking:
        if not live:
            raise
        waiting.well()
    return list(lines)


def sync_data(folder: Path, mount_path: str, namespace: str, name: str) -> Mount:
    """Uploads the files of a folder to the folder `name` in the bucket of the jobs, except files that it already has.
    Raises what `start` raises."""
    _token()
    bucket = bucket_of(namespace)

    def question() -> Any:
        if others := _with_other_bytes(bucket, folder, name):
            api().batch_bucket_files(bucket, delete=others)
        return api().sync_job_volume(folder, mount_path, remote_name=name, namespace=namespace)

    with contextlib.redirect_stdout(io.StringIO()):  # here: the thread of a question may be left behind
        volume = ask(HubResource("bucket", bucket), question, seconds=None)
    return Mount(volume.source, volume.path or "", mount_path, read_only=True)


def _with_other_bytes(bucket: str, folder: Path, name: str) -> list[str]:
    """The files in the bucket that differ from the local files. huggingface_hub 2.4 compares only sizes and times."""
    from hf_xet import hash_files
    from huggingface_hub.errors import BucketNotFoundError

    here = {f"{name}/{path.relative_to(folder).as_posix()}": str(path) for path in folder.rglob("*") if path.is_file()}
    with contextlib.suppress(BucketNotFoundError):
        there = [f for f in api().list_bucket_tree(bucket, prefix=name, recursive=True) if f.path in here]
        digests = hash_files([here[file.path] for file in there])
        return [file.path for file, digest in zip(there, digests, strict=True) if digest.hash != file.xet_hash]
    return []


def list_files(bucket: str, folder: str) -> list[BucketFile]:
    resource, prefix = HubResource("bucket", bucket), f"{folder.strip('/')}/"
    tree = ask(resource, lambda: list(api().list_bucket_tree(bucket, prefix=folder.strip("/"), recursive=True)))
    with understood(resource):
        files = [entry for entry in tree if entry.type == "file" and entry.path.startswith(prefix)]
        return [BucketFile(f.path.removeprefix(prefix), f.path, int(f.size), f.uploaded_at) for f in files]


def change_names(bucket: str, *, add: list[str], delete: list[str]) -> None:
    """Creates empty files in a bucket, and removes others. Raises what `start` raises."""
    empty = [(b"", name) for name in add]
    ask(HubResource("bucket", bucket), lambda: api().batch_bucket_files(bucket, add=empty, delete=delete))


def download(bucket: str, files: list[tuple[str, Path]]) -> None:
    """Fetches pairs of `(path in the bucket, local file)`. Missing files are left out."""
    if files:
        resource = HubResource("bucket", bucket)
        ask(resource, lambda: api().download_bucket_files(bucket, list(files)), seconds=None)


def _token() -> str:
    token = account.token()
    if token is None:
        raise not_signed_in(expected="a token that may run jobs (job.write)")
    return token


def bucket_of(namespace: str) -> str:
    return f"{namespace}/jobs-artifacts"


def _volumes(spec: JobSpec, place: tuple[str, str]) -> list[Any]:
    """The volumes of a job. The last one is the run's folder."""
    from huggingface_hub import Volume

    return [
        Volume(
            type=mount.kind,
            source=mount.bucket,
            path=mount.folder or None,
            revision=mount.revision,
            mount_path=mount.mount_path,
            read_only=mount.read_only,
        )
        for mount in (*spec.mounts, Mount(*place, MOUNT_PATH, read_only=False))
    ]


def _job_of(namespace: str) -> HubResource:
    return HubResource("job", f"of {namespace}")


def _job(info: Any, namespace: str) -> Job:
    with understood(_job_of(namespace)):
        volumes = [_mount(volume) for volume in info.volumes or ()]
        bucket = next((mount for mount in volumes if mount.kind == "bucket" and mount.mount_path == MOUNT_PATH), None)
        return Job(
            id=_text(info.id),
            namespace=_text(info.owner.name) if info.owner else namespace,
            url=_text(info.url),
            stage=_text(info.status.stage),
            message=_text_or_none(info.status.message),
            flavor=_text_or_none(info.flavor),
            labels={_text(name): _text(value) for name, value in dict(info.labels or {}).items()},
            bucket=(bucket.bucket, bucket.folder) if bucket else None,
            created_at=info.created_at,
            started_at=info.started_at,
            finished_at=info.finished_at,
            mounts=tuple(mount for mount in volumes if mount != bucket),
            running_seconds=ran if isinstance(ran := getattr(info.durations, "running_secs", None), int) else None,
        )


def _mount(volume: Any) -> Mount:
    kind, folder = _text(volume.type), _text_or_none(volume.path) or ""
    revision = _text_or_none(volume.revision)
    return Mount(_text(volume.source), folder, _text(volume.mount_path), bool(volume.read_only), kind, revision)


def _text(value: Any) -> str:
    """A text field; a number is accepted and converted.

    Raises:
        TypeError: the value is something else; `understood` translates this error.
    """
    value = getattr(value, "value", value)  # the client uses enumerations
    if not isinstance(value, (str, int)):
        raise TypeError(f"a text was expected, not {value!r}"[:200])
    return str(value)


def _text_or_none(value: Any) -> str | None:
    return None if value is None or value == "" else _text(value)
