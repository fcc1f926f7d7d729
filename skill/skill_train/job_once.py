"""One job is asked for, and never two: what `submit` and `resume` share.

A request that fails may have made the job all the same (huggingface_hub#3972). So it stands in `cloud.json` before it
is asked for, and after an error it is looked for by its labels before it is asked for again.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

from skill_train import cloud_record, jobs
from skill_train.cloud_record import CloudJob, CloudRecord
from skill_train.errors import SkillTrainError, Temporary
from skill_train.hub_client import StillAsking
from skill_train.job_spec import JobSpec, of_run
from skill_train.jobs import Job
from skill_train.resources import train_program
from skill_train.run_dir import RunDir

Answer = TypeVar("Answer")

TRIES = 3
PAUSE_SECONDS = 2.0  # before each look: a listing may be a moment behind
LATE_LOOKS = 15  # half a minute, for a server that is slower than our patience
READ_TRIES = 4  # of a question that changes nothing


def start(
    run: RunDir, record: CloudRecord, asked: CloudJob, post: Callable[[], Job], say: Callable[[str], None]
) -> CloudRecord:
    """The record with the job started.

    Args:
        record: of the run; `asked` is its new job, in state `starting`.
        post: creates the job. It is called again only when no job with these labels is there.

    Raises:
        AccessError, UsageError: the Hub refuses it; there is no job, and the record has none.
        Temporary: it may be there or not: the record says `starting`, and the next call looks for it.
    """
    before = record
    record = record.with_job(asked)
    cloud_record.write(run, record)
    for attempt in range(1, TRIES + 1):
        try:
            job = post()
        except StillAsking as error:
            say(f"{error.message} ({error.got}); looking whether the job is there")
            found = look(record, asked.number, times=LATE_LOOKS)
            if found is None:  # it may come yet, so another is not asked for
                error.hint = "run the same command again in a minute: it looks for the job before it asks for one"
                raise
            return started(run, record, asked, found)
        except Temporary as error:
            say(f"{error.message} ({error.got}); looking whether the job is there (try {attempt} of {TRIES})")
            refused = error.code == "rate_limit"  # the others may have passed it on
            found = look(record, asked.number, times=2 if refused else LATE_LOOKS)
            if found is not None:
                return started(run, record, asked, found)
            if attempt == TRIES:
                raise
        except SkillTrainError:
            cloud_record.write(run, before)
            raise
        else:
            return started(run, record, asked, job)
    raise AssertionError("the last try returns or raises")


def specification(run: RunDir, made: dict[str, Any], record: CloudRecord, job: CloudJob) -> JobSpec:
    """What this job of a run is started with."""
    return of_run(
        made,
        program=train_program(),
        plan=run.plan,
        namespace=record.namespace,
        labels=cloud_record.labels(record, job.number),
        flavor=job.flavor,
        timeout_seconds=job.timeout_seconds or made["timeout_seconds"],
        data=record.data.mount if record.data else None,
    )


def look(record: CloudRecord, number: int, times: int = 2) -> Job | None:
    """The job with this number, if it exists; asked twice at least, with a pause.

    Raises:
        Temporary: the Hub does not answer, so nobody knows.
    """
    wanted = {key: value for key, value in cloud_record.labels(record, number).items() if key in ("run", "attempt")}
    for _ in range(times):
        time.sleep(PAUSE_SECONDS)
        found = patiently(lambda: jobs.find(record.namespace, wanted))
        if found:
            return found[-1]  # the oldest, should there ever be two
    return None


def started(run: RunDir, record: CloudRecord, asked: CloudJob, job: Job) -> CloudRecord:
    """Notes a job that exists."""
    bucket, folder = job.bucket or (record.bucket, record.folder)
    record = dataclasses.replace(record, bucket=bucket, folder=folder).with_job(begun(asked, job))
    cloud_record.write(run, record)
    return record


def begun(asked: CloudJob, job: Job) -> CloudJob:
    """The job that was asked for, as it exists. One on another flavor was asked for from another folder, which alone
    knows its timeout."""
    created = timestamp(job.created_at) if job.created_at else None
    known = dataclasses.replace(asked, state="started", job_id=job.id, url=job.url, created_at=created)
    if job.flavor in (None, asked.flavor):
        return known
    return dataclasses.replace(known, flavor=job.flavor, timeout_seconds=None, usd_per_hour=None)


def patiently(question: Callable[[], Answer]) -> Answer:
    """The answer of a question that changes nothing, asked again when the trouble may pass."""
    for attempt in range(1, READ_TRIES):
        try:
            return question()
        except Temporary:
            time.sleep(PAUSE_SECONDS * attempt)
    return question()


def timestamp(moment: datetime) -> str:
    """UTC, such as `2026-11-21T10:00:00Z`."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def now() -> str:
    return timestamp(datetime.now(UTC))
