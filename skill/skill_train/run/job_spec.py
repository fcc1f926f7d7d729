"""What a job is started with. Pure data: nothing in it is secret, so all of it may be shown and kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

from skill_train.run.plan_record import Plan

IMAGE = "ghcr.io/astral-sh/uv:python3.12-bookworm"  # what run_uv_job of huggingface_hub 2.4 takes
SECRETS = ("HF_TOKEN",)  # their names
KEPT = "/data"  # where the client mounts the folder with the program and the plan
# QLoRA. The newest version on the package index on 2026-11-21; transformers 5.23 wants 0.46.1 or newer. It is not in
# the program's own header, because it would be installed for every run.
FOUR_BIT = "bitsandbytes==0.50.2"
ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True)
class Mount:
    """A folder of a bucket, or a dataset of the Hub, at a path in the job.

    Attributes:
        bucket: its id, or the dataset's; `kind` says which.
        revision: a dataset's commit.
    """

    bucket: str
    folder: str
    mount_path: str
    read_only: bool
    kind: str = "bucket"
    revision: str | None = None


@dataclass(frozen=True)
class JobSpec:
    """One job.

    Attributes:
        program, plan: the two files that travel; they lie beside each other in the job.
        arguments: of the program; the plan's path on this machine stands for its path in the job. Beside it, no
            argument may be the name of a file here: the client would upload that file.
        dependencies: `name==version` that the program's own header does not have.
        environment: no secrets.
        name, labels: up to 100 characters of `A-Za-z0-9_-` (the name also takes a dot); the Hub keeps and shows them.
        mounts: beside the folder of the two files, which the client mounts at `/data`.
    """

    namespace: str
    program: Path
    plan: Path
    arguments: tuple[str, ...]
    flavor: str
    timeout_seconds: int
    environment: dict[str, str]
    labels: dict[str, str]
    name: str
    dependencies: tuple[str, ...] = ()
    mounts: tuple[Mount, ...] = ()


@dataclass(frozen=True)
class JobFiles:
    """What a job is given: the training program, the plan, and where local data was uploaded; None for data of the
    Hub."""

    program: Path
    plan: Path
    data: Mount | None


def of_run(
    plan: Plan,
    *,
    files: JobFiles,
    namespace: str,
    labels: dict[str, str],
    flavor: str,
    timeout_seconds: int,
) -> JobSpec:
    """The job of a run.

    Args:
        labels: of `cloud_record.labels`.
    """
    data = files.data
    where = () if data is None else ("--data", f"{data.mount_path}/{Path(plan.recipe.data).name}")
    return JobSpec(
        namespace=namespace,
        program=files.program,
        plan=files.plan,
        arguments=(str(files.plan), "--job", *where),
        flavor=flavor,
        timeout_seconds=timeout_seconds,
        environment=ENVIRONMENT | {"SKILL_TRAIN_RUN": labels["run"]},
        labels=labels,
        name=(plan.policy.hub_model_id or "").split("/")[-1],
        dependencies=_dependencies(plan),
        mounts=() if data is None else (data,),
    )


def _dependencies(plan: Plan) -> tuple[str, ...]:
    """What only some runs need. Trackio is not pinned: no version of it was tried, and a run goes on without it."""
    trackio = plan.placement.report_to == "trackio"  # no other word of a plan is the name of a package
    return ((FOUR_BIT,) if plan.recipe.load_in_4bit else ()) + (("trackio",) if trackio else ())


def command(spec: JobSpec) -> list[str]:
    """What runs in the job."""
    files = {str(spec.program): f"{KEPT}/{spec.program.name}", str(spec.plan): f"{KEPT}/{spec.plan.name}"}
    packages = [word for name in spec.dependencies for word in ("--with", name)]
    return ["uv", "run", *packages, *(files.get(word, word) for word in (str(spec.program), *spec.arguments))]


class Volume(TypedDict):
    """A mount as the Hub is sent it."""

    type: str
    source: str
    mountPath: str
    readOnly: bool
    revision: NotRequired[str]
    path: NotRequired[str]


class Request(TypedDict):
    """A job as the Hub is sent it; `secrets` are names."""

    namespace: str
    dockerImage: str
    command: list[str]
    arguments: list[str]
    environment: dict[str, str]
    secrets: list[str]
    flavor: str
    timeoutSeconds: int
    labels: dict[str, str]
    volumes: list[Volume]


def as_request(spec: JobSpec, kept: Mount) -> Request:
    """What the Hub is sent (huggingface_hub 2.4, `_create_job_spec`), with the names of the secrets only.

    Args:
        kept: the folder of the program and the plan.
    """
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
        "volumes": [_volume(mount) for mount in (*spec.mounts, kept)],
    }


def _volume(mount: Mount) -> Volume:
    volume = Volume(type=mount.kind, source=mount.bucket, mountPath=mount.mount_path, readOnly=mount.read_only)
    if mount.revision is not None:
        volume["revision"] = mount.revision
    if mount.folder:
        volume["path"] = mount.folder
    return volume
