"""Follows a job for hours over a network that may fail for minutes. Only reads, so every request can be repeated.

The pauses between two requests grow to 15 seconds; the Hub allows 1,000 requests in 5 minutes (its documentation of
rate limits, 2026-08).
"""

import math
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from skill_train.core import waiting
from skill_train.core.errors import Temporary, UsageError
from skill_train.hub import jobs
from skill_train.hub.client import or_none, worth_asking_again
from skill_train.hub.jobs import Job
from skill_train.run.cloud_record import CloudRecord

Answer = TypeVar("Answer")

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 15.0
PATIENCE_SECONDS = 60.0  # for a command that answers once
OUTAGE_SECONDS = 900.0  # for a command that follows a job for hours
HEALTHY_SECONDS = 30.0  # a request that fails only after this time had a connection, though perhaps no line of a log


class Patience:
    """Repeats a failing request for at most `seconds` after the first failure. `well` records a success."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.well()

    def well(self) -> None:
        self._since: float | None = None
        self._resumed: float | None = None
        self._pauses = pauses()

    def bear(self, trouble: Temporary) -> None:
        """Waits before the next try.

        Raises:
            Temporary: the same failure, if it has lasted too long or a retry cannot help.
        """
        now = time.monotonic()
        if self._resumed is not None and now - self._resumed > HEALTHY_SECONDS:
            self.well()
        self._since = now if self._since is None else self._since
        seconds_left = self._since + self._seconds - now
        if seconds_left <= 0 or not worth_asking_again(trouble):
            raise trouble
        waiting.tell(f"{trouble.message} ({trouble.got}); asking again")
        waiting.pause(min(next(self._pauses), seconds_left))
        self._resumed = time.monotonic()


def pauses() -> Iterator[float]:
    """Pauses in seconds, each twice as long as the previous one, up to a limit."""
    pause = FIRST_PAUSE_SECONDS
    while True:
        yield pause
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def patiently(question: Callable[[], Answer], *, seconds: float = PATIENCE_SECONDS) -> Answer:
    """The answer to a request, repeated while its failure is temporary.

    Raises:
        Temporary: there was no answer within the allowed seconds.
        SkillTrainError: any other failure, at once.
    """
    patience = Patience(seconds)
    while True:
        try:
            return question()
        except Temporary as trouble:
            patience.bear(trouble)


def job_now(record: CloudRecord, job_id: str, *, seconds: float = PATIENCE_SECONDS) -> Job | None:
    """The current state of a job of a run; None if the Hub does not have it any more.

    A job counts as missing only if the list of jobs lacks it too, because for a missing job a command may start
    another.
    """
    now = or_none("unknown_job", lambda: patiently(lambda: jobs.inspect(record.namespace, job_id), seconds=seconds))
    if now is not None:
        return now
    listed = patiently(lambda: jobs.find(record.namespace, {"run": record.run_id}), seconds=seconds)
    return next((job for job in listed if job.id == job_id), None)


def until_end(record: CloudRecord, job_id: str, *, seconds: float | None, on_job: Callable[[Job], None]) -> Job | None:
    """The job after its end; its current state when `seconds` are over; None if it was deleted.

    Args:
        seconds: the longest time to wait; None waits until the job ends.
        on_job: called with the job after each request.

    Raises:
        Temporary: the Hub did not answer for a quarter of an hour, or until the time was over.
    """
    end = math.inf if seconds is None else time.monotonic() + seconds
    for pause in pauses():
        outage = min(OUTAGE_SECONDS, max(end - time.monotonic(), 0.0))
        job = job_now(record, job_id, seconds=outage)
        if job is None:
            return None
        on_job(job)
        seconds_left = end - time.monotonic()
        if not job.live or seconds_left <= 0:
            return job
        time.sleep(min(pause, seconds_left))
    raise AssertionError("the pauses never end")


def lines(record: CloudRecord, job_id: str, *, skip: int = 0) -> Iterator[str]:
    """The lines of a job's log, each once and in order, until the job has ended or was deleted.

    Every connection begins again with the first line, so the lines are counted. If a stream is cut after the end of
    the job, huggingface_hub 2.4 leaves the rest out without an error. So the whole log is read once more at the end.
    A log that is shorter then began anew, such as on another machine, and all of it is shown.

    Args:
        skip: the number of lines that the caller already has.

    Raises:
        Temporary: the Hub did not answer for a quarter of an hour.
    """
    patience, ended = Patience(OUTAGE_SECONDS), False
    while True:
        try:
            count = 0
            for count, line in enumerate(_log(record, job_id, follow=not ended), start=1):
                if count > skip:
                    skip = count
                    patience.well()
                    yield line
            if ended and count >= skip:
                return
            if ended:
                skip = 0
                continue
            time.sleep(FIRST_PAUSE_SECONDS)  # the stage lags behind the log by about a second
            now = job_now(record, job_id, seconds=0.0)  # this function has its own patience
            if now is None:
                return
            ended = not now.live
        except Temporary as trouble:
            patience.bear(trouble)


def _log(record: CloudRecord, job_id: str, *, follow: bool) -> Iterator[str]:
    """The lines of one connection; none for a deleted job.

    Raises:
        Temporary: the Hub does not answer, or its log says that the job is unknown although the Hub has it.
    """
    where = record.namespace, job_id
    try:
        yield from jobs.followed_log(*where) if follow else jobs.log_so_far(*where, live=False)
    except UsageError as error:
        if error.code != "unknown_job":
            raise
        if job_now(record, job_id, seconds=0.0) is not None:
            hint = "try again in a few minutes"
            raise Temporary(
                f"the Hub has no log for job {job_id}", code="hub_error", got="status 404", hint=hint
            ) from None


def log_so_far(job: Job, *, tail: int | None = None) -> list[str]:
    """The lines that exist now. For a running job this takes 5 seconds, because the client waits for silence."""
    return patiently(lambda: jobs.log_so_far(job.namespace, job.id, live=job.live, tail=tail))
