"""A worker for tests, whose job has a field that it must have."""

from __future__ import annotations

import msgspec

from skill_train.core.worker import worker_main


class TypedJob(msgspec.Struct):
    device: str


def run(job: TypedJob) -> str:
    return job.device


if __name__ == "__main__":
    worker_main(run, TypedJob)
