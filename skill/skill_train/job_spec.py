"""What a job is started with. Pure data: nothing in it is secret, so all of it may be shown and kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mount:
    """A folder of a bucket, at a path in the job."""

    bucket: str
    folder: str
    mount_path: str
    read_only: bool


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
