"""Claims a job in the bucket of the jobs before it is requested, so that all folders and machines can see it.

A claim is an empty file `claims/PLAN_HASH/RUN_ID.NUMBER.WORD`, dated by the Hub. The command with the oldest claim
proceeds, and the others wait for its job. A claim counts as long as its job may still appear in the Hub's list.
"""

import contextlib
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from skill_train.cloud import start_once
from skill_train.core import waiting
from skill_train.core.errors import SkillTrainError, Temporary
from skill_train.hub import jobs
from skill_train.hub.client import patiently
from skill_train.hub.jobs import Job
from skill_train.run import records
from skill_train.run.cloud_record import CloudRecord

LISTINGS = 5  # times that we list the bucket to find our own claim, because a listing may lag behind
_NAME = re.compile(r"(?P<run_id>[0-9a-f]{12})\.(?P<number>\d{1,6})\.[0-9a-f]{8}")


@dataclass(frozen=True)
class Claim:
    """A claim of a job. `moment` is the time of its file by the Hub's clock, `path` its path in the bucket."""

    path: str
    run_id: str
    number: int
    moment: datetime

    @property
    def rank(self) -> tuple[datetime, str]:
        """The claim with the smallest rank proceeds."""
        return self.moment, self.path


@contextlib.contextmanager
def claimed(record: CloudRecord, number: int, *, of_plan: bool) -> Iterator[Job | None]:
    """Claims the right to request a job. Yields the job of an earlier claim, or None if the caller may request one.

    If the Hub refuses the job, the claim is removed. After any other error the job may exist, so the claim stays.

    Args:
        of_plan: any job of the plan that is running or completed is accepted.

    Raises:
        AccessError: the token may not write to the bucket.
        Temporary: the Hub does not answer, or another command has requested the job and it does not exist yet.
    """
    bucket = jobs.bucket_of(record.namespace)
    name = f"{record.run_id}.{number}.{secrets.token_hex(4)}"
    path = f"{_folder(record)}/{name}"
    try:
        patiently(lambda: jobs.change_names(bucket, add=[path], delete=[]))
        theirs = _job_before(path, record, of_plan)
    except BaseException:
        _remove(bucket, [path])
        raise
    if theirs is not None:
        _remove(bucket, [path])
    try:
        yield theirs
    except Temporary:
        raise
    except SkillTrainError:
        _remove(bucket, [path])
        raise


def _job_before(path: str, record: CloudRecord, of_plan: bool) -> Job | None:
    """Waits until no earlier claim is pending. Returns the job of an earlier claim, or None if ours may proceed."""
    began, next_notice = time.monotonic(), 0.0
    ours, listed = _listed(path, record)
    if ours is None:
        waiting.tell("the bucket gives no upload times, so a command that runs elsewhere now cannot be detected")
        return None
    settled_after = start_once.settled_seconds()
    old = [each.path for each in listed if (ours.moment - each.moment).total_seconds() > settled_after]
    if old:
        _remove(jobs.bucket_of(record.namespace), old)
    settled: set[str] = set()  # paths of claims whose jobs have ended without a result
    while True:
        waited = time.monotonic() - began
        ahead = [claim for claim in listed if _is_ahead(claim, ours, of_plan) and claim.path not in settled]
        if not ahead:
            return None
        first = min(ahead, key=lambda claim: claim.rank)
        job = _job_of(first, record)
        if job is not None:
            if job.live or job.stage == "COMPLETED" or not of_plan:
                return job
            settled.add(first.path)
            continue
        if waited + (ours.moment - first.moment).total_seconds() > settled_after:
            raise _started_elsewhere(first)
        if waited >= next_notice:
            waiting.tell(f"another command is requesting this job; waiting for it ({waited:.0f} s)")
            next_notice += waiting.NOTICE_SECONDS
        time.sleep(start_once.PAUSE_SECONDS)
        again, listed = _listed(path, record)
        ours = again or ours


def _is_ahead(claim: Claim, ours: Claim, of_plan: bool) -> bool:
    """Whether another claim is earlier, is for the same job, and may still lead to one."""
    same = of_plan or (claim.run_id, claim.number) == (ours.run_id, ours.number)
    age = (ours.moment - claim.moment).total_seconds()
    return same and claim.rank < ours.rank and age <= start_once.settled_seconds()


def _job_of(claim: Claim, record: CloudRecord) -> Job | None:
    labels = {"run": claim.run_id, "attempt": str(claim.number)}
    matching = patiently(lambda: jobs.find(record.namespace, labels))
    return matching[-1] if matching else None


def _listed(path: str, record: CloudRecord) -> tuple[Claim | None, list[Claim]]:
    """Our own claim at this path (None if the bucket has no date for it), and all claims.

    Raises:
        Temporary: the bucket does not list our own claim.
    """
    for _ in range(LISTINGS):
        files = patiently(lambda: jobs.list_files(jobs.bucket_of(record.namespace), _folder(record)))
        claims = [claim for file in files if (claim := _read(file)) is not None]
        ours = next((claim for claim in claims if claim.path == path), None)
        if ours is not None or any(file.remote == path for file in files):
            return ours, claims
        time.sleep(start_once.PAUSE_SECONDS)
    raise Temporary(
        "the bucket of the jobs does not list a file that was just written to it, so no job was requested",
        code="hub_error",
        expected=f"{path} in {jobs.bucket_of(record.namespace)}",
        got="a listing without this file",
        hint="run the same command again in a few minutes",
    )


def _folder(record: CloudRecord) -> str:
    return f"claims/{record.plan_hash}"


def _read(file: jobs.BucketFile) -> Claim | None:
    """The claim in the name of a file; None for any other file."""
    match = _NAME.fullmatch(file.path)
    if match is None or file.uploaded_at is None:
        return None
    return Claim(file.remote, match["run_id"], int(match["number"]), file.uploaded_at)


def _remove(bucket: str, paths: list[str]) -> None:
    with contextlib.suppress(SkillTrainError):  # an old claim is ignored anyway
        jobs.change_names(bucket, add=[], delete=paths)


def _started_elsewhere(claim: Claim) -> Temporary:
    return Temporary(
        "another command has already requested this job, and it has not appeared yet",
        code="started_elsewhere",
        expected="one job for each plan",
        got=f"run {claim.run_id}, job {claim.number}, requested at {records.timestamp(claim.moment)}",
        hint="run the same command again: it looks for the job before it requests one",
    )
