"""The specification of a Hub job. It is pure data without secrets, so all of it may be shown and stored."""

from pathlib import Path

import msgspec

from skill_train.run.plan_record import Plan

IMAGE = "ghcr.io/astral-sh/uv:python3.12-bookworm"  # the default of run_uv_job in huggingface_hub 2.4
SECRETS = ("HF_TOKEN",)  # the names of the secrets
MOUNT_PATH = "/data"  # where the client mounts the folder with the program and the plan
# For QLoRA. The newest version on PyPI on 2026-11-21; transformers 5.23 needs 0.46.1 or newer. It is not in the header
# of the training program, because then it would be installed for every run.
FOUR_BIT = "bitsandbytes==0.50.2"
PILLOW = "pillow==13.0.0"  # for pictures, in the version of requirements.lock
ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}


class Mount(msgspec.Struct, frozen=True):
    """A folder of a bucket, or a dataset of the Hub, at a path in the job."""

    bucket: str  # id of the bucket or of the dataset; `kind` says which
    folder: str
    mount_path: str
    read_only: bool
    kind: str = "bucket"
    revision: str | None = None  # the commit of a dataset


class JobSpec(msgspec.Struct, frozen=True):
    namespace: str
    # program, plan: the two files that are uploaded. In the job they are in one folder.
    program: Path
    plan: Path
    # arguments of the program. The plan's path on this machine stands for its path in the job. No other argument may be
    # the name of a file here, because the client would upload that file.
    arguments: tuple[str, ...]
    flavor: str
    timeout_seconds: int
    environment: dict[str, str]  # variables without secrets
    # name, labels: up to 100 characters of `A-Za-z0-9_-` (the name may have a dot). The Hub stores and shows them.
    labels: dict[str, str]
    name: str
    dependencies: tuple[str, ...] = ()  # `name==version` of packages that the program's own header does not have
    mounts: tuple[Mount, ...] = ()  # in addition to the folder of the two files, which the client mounts at `/data`


def dependencies(plan: Plan) -> tuple[str, ...]:
    """Packages that only some runs need. Trackio is not pinned: no version was tried, and a run works without it."""
    trackio = plan.placement.report_to == "trackio"  # no other value of `report_to` is the name of a package
    return packages(plan) + (("trackio",) if trackio else ())


def packages(plan: Plan) -> tuple[str, ...]:
    """Packages that only some recipes need, in addition to those in the header of the training program."""
    return ((FOUR_BIT,) if plan.recipe.load_in_4bit else ()) + ((PILLOW,) if plan.recipe.images else ())


def command(spec: JobSpec) -> list[str]:
    files = {str(spec.program): f"{MOUNT_PATH}/{spec.program.name}", str(spec.plan): f"{MOUNT_PATH}/{spec.plan.name}"}
    packages = [word for name in spec.dependencies for word in ("--with", name)]
    return ["uv", "run", *packages, *(files.get(word, word) for word in (str(spec.program), *spec.arguments))]
