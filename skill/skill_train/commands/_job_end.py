"""Waits for the end of a job and reports each stage."""

from __future__ import annotations

from datetime import UTC, datetime

from skill_train.cloud import failure_reason, find_run, poll
from skill_train.cloud.find_run import CloudRun
from skill_train.commands._job_snapshot import job_of
from skill_train.core import waiting
from skill_train.core.console import Console
from skill_train.hub.jobs import Job


def until_end(cloud: CloudRun, console: Console, seconds: float | None) -> Job:
    """The job after its end, or after the time limit."""
    namespace, job_id, run_id = cloud.record.namespace, job_of(cloud).id, cloud.record.run_id
    seen = _StageTeller(console, cloud)
    with waiting.for_hours():
        ended = poll.until_end(namespace, job_id, run_id, seconds=seconds, seen=seen, say=console.status)
    return ended or find_run.deleted_job(cloud)


class _StageTeller:
    """Reports each new stage, and a long queue once."""

    def __init__(self, console: Console, cloud: CloudRun) -> None:
        self._console, self._cloud, self._stage, self._queue_reported = console, cloud, "", False

    def __call__(self, job: Job) -> None:
        if job.stage != self._stage:
            self._console.status(f"job {job.id}: {job.stage}")
            self._stage = job.stage
        since = job.created_at or datetime.now(UTC)
        queue = failure_reason.waiting(job.stage, (datetime.now(UTC) - since).total_seconds(), job.flavor)
        if queue and not self._queue_reported:
            self._console.warn("long_queue", queue)
            self._queue_reported = True
