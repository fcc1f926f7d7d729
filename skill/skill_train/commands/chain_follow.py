"""`logs`, `wait` and `cancel`, and the one look at a run that `status` shows too.

Here they change nothing but `cloud.json`, where they note how a job has ended.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections import deque
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from skill_train.cloud import bucket as kept
from skill_train.cloud import failure_reason as job_story
from skill_train.cloud import find_run as cloud_run
from skill_train.cloud import poll as follow
from skill_train.cloud.failure_reason import Ending, Story
from skill_train.cloud.find_run import CloudRun
from skill_train.commands import tables
from skill_train.core import waiting
from skill_train.core.console import Console, Result
from skill_train.core.errors import AccessError, SkillTrainError, Temporary, UsageError, from_exit_code
from skill_train.hub import flavors, jobs
from skill_train.hub.jobs import Job
from skill_train.run import progress as job_figures
from skill_train.run.progress import Speed

_PEEKED = ("metrics.jsonl", "train.failed.json", "plan.json", kept.MARKER)
_TAIL_LINES = 60  # of a log, in which the reason of a failure is looked for
_LAST_LOOK_SECONDS = 5.0  # after the time of `wait`, for what the job is doing then
_CANCEL_SECONDS = 60.0  # for a job to save its checkpoint
_LOG_BYTES = 6000  # of log lines in a JSON answer, which has at most 8 KB


def logs(console: Console, *, run: str, follow_: bool, tail: int | None) -> Result:
    """Its lines: printed as they come, or the last of them in the answer."""
    cloud = cloud_run.find(run, console.status)
    where, run_id, say = (cloud.record.namespace, _now(cloud).id), cloud.record.run_id, console.status
    live = follow_ and _now(cloud).live
    there = [] if live and tail is None else follow.log_so_far(_now(cloud), say, tail=None if live else tail)
    last: deque[str] = deque(maxlen=tail or 1000)
    for line in there[-tail:] if tail else there:
        last.append(line)
        console.line(line, now=follow_)
    if live:
        with waiting.for_hours():
            for line in follow.lines(*where, run_id, say=say, skip=len(there)):
                last.append(line)
                console.line(line, now=True)
        cloud = cloud_run.with_now(cloud, say)
    shown = _that_fit(last)
    data = {"job_id": where[1], "stage": _now(cloud).stage, "lines": shown, "left_out": len(last) - len(shown)}
    return Result(data, next=_next_of_logs(cloud, console))


def wait(console: Console, *, run: str, timeout: float | None) -> Result:
    """Until the job has ended, or the time is over: then whatever the Hub has not told by now is left out."""
    end = math.inf if timeout is None else time.monotonic() + timeout
    with waiting.until(end + _LAST_LOOK_SECONDS):
        cloud = cloud_run.find(run, console.status)
        if cloud.now is not None and cloud.now.live:
            seconds = None if timeout is None else max(end - time.monotonic(), 0.0)
            cloud = cloud_run.noted(dataclasses.replace(cloud, now=_until_end(cloud, console, seconds)))
        about = look(cloud, console, in_time=timeout is not None and _now(cloud).live)
    data = about.data()
    return Result(
        data,
        human=lambda rich: tables.draw_status(rich, data),
        quiet=about.now.stage,
        next=list(about.next()),
        error=_not_well(about, timeout),
    )


def cancel(console: Console, *, run: str) -> Result:
    """Ends the job. One that has ended is left as it is."""
    cloud = cloud_run.find(run, console.status)
    was_live = cloud.now is not None and cloud.now.live
    if was_live:
        cloud = cloud_run.noted(dataclasses.replace(cloud, now=_cancelled(cloud, console)))
    now, record = _now(cloud), cloud.record
    if now.live:
        raise Temporary(
            f"the job is still {now.stage}, {_CANCEL_SECONDS:.0f} seconds after it was told to end",
            code="still_running",
            expected="CANCELED",
            got=now.stage,
            hint=f"skill-train cancel {cloud.word}",
        )
    there = kept.look(record.bucket, record.folder, console.status) if record.bucket and record.folder else None
    data = {
        "job_id": now.id,
        "stage": now.stage,
        "cancelled": was_live,
        "kept": None if there is None else {"state": there.state, "checkpoint": there.checkpoint},
        "run_dir": str(cloud.run.path) if cloud.run else None,
    }
    return Result(
        data,
        human=lambda rich: tables.draw_cancelled(rich, data),
        quiet=now.stage,
        next=[f"skill-train {command} {cloud.word}" for command in (("pull", "resume") if there else ("resume",))],
    )


# --- What is known of a run ---


@dataclasses.dataclass(frozen=True)
class About:
    """One look at a run: the Hub's words, the program's figures, and the reason of a failure."""

    cloud: CloudRun
    now: Job
    plan: dict[str, Any] | None
    speed: Speed | None
    source: str | None
    age_seconds: float | None
    kept_step: int
    story: Story | None

    @property
    def ran_seconds(self) -> float | None:
        """None before it began."""
        if self.now.started_at is None:
            return None
        return max(((self.now.finished_at or datetime.now(UTC)) - self.now.started_at).total_seconds(), 0.0)

    def data(self) -> dict[str, Any]:
        job, record, measured = self.cloud.job, self.cloud.record, self.speed
        ran = self.ran_seconds
        left = measured.left_seconds if measured and self.now.live else None
        limit = job.timeout_seconds
        price = job.usd_per_hour if job.usd_per_hour is not None else flavors.usd_per_hour(self.now.flavor)
        so_far = job_figures.dollars(ran, price)
        return {
            "run_dir": str(self.cloud.run.path) if self.cloud.run else None,
            "job_id": self.now.id,
            "url": self.now.url,
            "stage": self.now.stage,
            "message": self.now.message,
            "attempt": job.number,
            "flavor": job.flavor,
            "step": measured.step if measured else None,
            "steps": measured.steps if measured else self._planned_steps(),
            "loss": measured.loss if measured else None,
            "tokens_per_second": measured.tokens_per_second if measured else None,
            "memory_bytes": measured.memory_bytes if measured else None,
            "progress": {"source": self.source, "age_seconds": rounded(self.age_seconds)},
            "seconds": {
                "ran": rounded(ran),
                "left": rounded(left),
                "expected": rounded(ran + left) if ran is not None and left is not None else None,
                "estimated": self._estimated("seconds"),
                "limit": limit,
            },
            "ends_by": _moment(self.now.started_at, limit) if self.now.live else None,
            "cost_usd": {
                "so_far": so_far,
                "expected": job_figures.dollars(ran + left, price) if ran is not None and left is not None else None,
                "estimated": self._estimated("cost_usd"),
                "at_most": job_figures.dollars(limit, price),
                "per_hour": price,
                "all_jobs": self._of_all_jobs(so_far),
            },
            "waiting": self._waiting() or None,
            "why": self.story.as_dict() if self.story else None,
            "hub_model_id": record.hub_model_id or None,
        }

    def _of_all_jobs(self, so_far: float | None) -> float | None:
        """Dollars of every job of the run; None where that of one is not known. A job that never was costs nothing."""
        others = [job for job in self.cloud.record.jobs if job.job_id not in (None, self.now.id)]
        known = [job.cost_usd for job in others if job.cost_usd is not None]
        return None if so_far is None or len(known) < len(others) else round(so_far + sum(known), 4)

    def next(self) -> tuple[str, ...]:
        word = self.cloud.word
        if self.now.live and self._waiting():
            return (f"skill-train cancel {word}", f"skill-train wait {word}")
        if self.now.live:
            return (f"skill-train wait {word}", f"skill-train logs {word} --follow")
        return self.story.next if self.story else (f"skill-train pull {word}",)

    def _waiting(self) -> str:
        since = self.now.created_at
        seconds = (datetime.now(UTC) - since).total_seconds() if since else 0.0
        return job_story.waiting(self.now.stage, seconds, self.now.flavor)

    def _planned_steps(self) -> int | None:
        return self.plan["recipe"]["max_steps"] if self.plan else None

    def _estimated(self, key: str) -> dict[str, Any] | None:
        estimate = (self.plan or {}).get("estimates", {}).get(key)
        return {end: estimate.get(end) for end in ("low", "high")} if estimate else None


def look(cloud: CloudRun, console: Console, *, in_time: bool = False) -> About:
    """One look, whatever has been kept of the run and whatever the Hub still has of the job.

    Args:
        in_time: rather without figures than late: no log is read, and a bucket that does not answer is left out.
    """
    now, there = _now(cloud), _peeked(cloud, console, in_time=in_time)
    failed = not now.live and now.stage != "COMPLETED"
    text, written = there.texts.get("metrics.jsonl", ("", None))
    lines = _tail(cloud, console) if failed or (now.stage == "RUNNING" and not text and not in_time) else []
    others = {job.job_id for job in cloud.record.jobs} - {now.id}
    measured, source = job_figures.speed(text.splitlines(), others), "metrics.jsonl in the bucket"
    if measured is None:
        measured, source, written = job_figures.speed(lines), "the log of the job", None
    return About(
        cloud=cloud,
        now=now,
        plan=cloud_run.plan_of(cloud, there),
        speed=measured,
        source=source if measured else None,
        age_seconds=age(written),
        kept_step=there.checkpoint,
        story=_explained(cloud, measured, there, lines) if failed else None,
    )


def _peeked(cloud: CloudRun, console: Console, *, in_time: bool) -> kept.Peek:
    """What is kept so far; a bucket that may not be read does not hide what the Hub says of the job."""
    record = cloud.record
    if record.bucket is None or record.folder is None:
        return kept.NOTHING
    try:
        return kept.peek(record.bucket, record.folder, _PEEKED, console.status)
    except (AccessError, Temporary) as error:
        if isinstance(error, Temporary) and not in_time:
            raise
        console.warn("no_bucket", f"what the job keeps cannot be read: {error.message}")
        return kept.NOTHING


def _explained(cloud: CloudRun, measured: Speed | None, there: kept.Peek, lines: list[str]) -> Story:
    now, failure = _now(cloud), there.document("train.failed.json")
    ending = Ending(
        stage=now.stage,
        message=now.message,
        failure=failure if failure and isinstance(failure.get("error"), dict) else None,
        lines=tuple(lines),
        flavor=now.flavor,
        timeout_seconds=cloud.job.timeout_seconds,
        step=measured.step if measured else None,
        steps=measured.steps if measured else None,
        memory_bytes=measured.memory_bytes if measured else {},
        trained=(there.document(kept.MARKER) or {}).get("state") == "done",
    )
    return job_story.explain(ending, run=cloud.name, offered=flavors.current(live=False)[0])


def _tail(cloud: CloudRun, console: Console) -> list[str]:
    """The end of a log, which may be gone with its job."""
    try:
        return follow.log_so_far(_now(cloud), console.status, tail=_TAIL_LINES)
    except SkillTrainError as error:
        console.warn("no_log", f"the log of the job cannot be read: {error.message}")
        return []


def _not_well(about: About, timeout: float | None) -> SkillTrainError | None:
    """The error that `wait` ends with."""
    hint, waited = f"skill-train wait {about.cloud.word}", f"after {timeout or 0:g} seconds of waiting"
    if about.now.stage == "SCHEDULING":
        message = f"the job has no machine yet {waited}"
        return Temporary(message, code="not_started", expected="RUNNING", got=about.now.stage, hint=hint)
    if about.now.live:
        message = f"the job still runs {waited}; it goes on"
        return Temporary(message, code="still_running", expected="COMPLETED", got=about.now.stage, hint=hint)
    if about.story is None:
        return None
    story = about.story
    told = {"code": story.code, "message": story.message, "expected": story.help, "got": story.got}
    return from_exit_code(story.exit_code, told | {"hint": story.next[0] if story.next else ""})


class _Teller:
    """Tells of each new stage, and once of a long queue."""

    def __init__(self, console: Console, cloud: CloudRun) -> None:
        self._console, self._cloud, self._stage, self._told = console, cloud, "", False

    def __call__(self, job: Job) -> None:
        if job.stage != self._stage:
            self._console.status(f"job {job.id}: {job.stage}")
            self._stage = job.stage
        since = job.created_at or datetime.now(UTC)
        queue = job_story.waiting(job.stage, (datetime.now(UTC) - since).total_seconds(), job.flavor)
        if queue and not self._told:
            self._console.warn("long_queue", queue)
            self._told = True


def _cancelled(cloud: CloudRun, console: Console) -> Job:
    """The job after it was told to end. One that ends by itself meanwhile cannot be told any more."""
    where, run_id, say = (cloud.record.namespace, _now(cloud).id), cloud.record.run_id, console.status

    def tell() -> None:
        try:
            jobs.cancel(*where)
        except (UsageError, Temporary) as error:
            if isinstance(error, Temporary) and error.code != "conflict":
                raise
            now = follow.job_now(*where, run_id, say, seconds=0.0)
            if now is not None and now.live:
                if error.code != "unknown_job":
                    raise
                hint = f"skill-train cancel {cloud.word}"
                raise Temporary(error.message, code="hub_error", got="status 404", hint=hint) from None

    follow.patiently(tell, say)
    return _until_end(cloud, console, _CANCEL_SECONDS)


def _until_end(cloud: CloudRun, console: Console, seconds: float | None) -> Job:
    """The job after so long, or when it has ended."""
    namespace, job_id, run_id = cloud.record.namespace, _now(cloud).id, cloud.record.run_id
    seen = _Teller(console, cloud)
    with waiting.for_hours():
        ended = follow.until_end(namespace, job_id, run_id, seconds=seconds, seen=seen, say=console.status)
    return ended or cloud_run.gone(cloud)


def _next_of_logs(cloud: CloudRun, console: Console) -> list[str]:
    """On a terminal the lines are all that is shown."""
    if console.mode != "json":
        return []
    return [f"skill-train {'wait' if cloud.now and cloud.now.live else 'status'} {cloud.word}"]


def _that_fit(lines: Iterable[str]) -> list[str]:
    """The last lines that an answer can hold."""
    kept_lines: list[str] = []
    size = 0
    for line in reversed(list(lines)):
        size += len(json.dumps(line, ensure_ascii=False).encode(errors="replace")) + 2
        if size > _LOG_BYTES:
            break
        kept_lines.append(line)
    return kept_lines[::-1]


def _now(cloud: CloudRun) -> Job:
    assert cloud.now is not None  # `cloud_run.find` asked
    return cloud.now


def _moment(start: datetime | None, seconds: float | None) -> str | None:
    if start is None or seconds is None:
        return None
    return (start + timedelta(seconds=seconds)).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def age(written: datetime | None) -> float | None:
    """Seconds since then; None when unknown, also because this clock was set back since."""
    seconds = (datetime.now(UTC) - written).total_seconds() if written else -1.0
    return seconds if seconds >= 0 else None


def rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)
