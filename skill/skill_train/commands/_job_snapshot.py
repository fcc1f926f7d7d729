"""The current state of a job: its stage on the Hub, its figures, and why it failed. Waits for its end, and fetches its
result: from its bucket, or from the repository that it was pushed to."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from msgspec.structs import replace

from skill_train.cloud import bucket, failure_reason, find_run, poll
from skill_train.cloud.bucket import StoredRun
from skill_train.cloud.failure_reason import Ending, Story
from skill_train.cloud.find_run import CloudRun
from skill_train.cloud.poll import patiently
from skill_train.commands._status_view import Ends, State
from skill_train.core import waiting
from skill_train.core.console import Console
from skill_train.core.errors import AccessError, SkillTrainError, Temporary, UsageError
from skill_train.hub import flavors, repositories
from skill_train.hub.jobs import Job
from skill_train.program.cloud.file_names import PROOF
from skill_train.run import plan_record, progress, records, train_record
from skill_train.run.folder import RunDir
from skill_train.run.plan_record import Plan
from skill_train.run.progress import Speed

if TYPE_CHECKING:
    from skill_train.cloud.pull import Pull

_PEEKED = ("metrics.jsonl", "train.failed.json", "plan.json", bucket.MARKER)
_TAIL_LINES = 60  # lines at the end of a log that are searched for the reason of a failure


@dataclass(frozen=True)
class Snapshot:
    cloud: CloudRun
    now: Job
    plan: Plan | None
    speed: Speed | None
    source: str | None
    age_seconds: float | None
    kept_step: int
    story: Story | None

    @property
    def ran_seconds(self) -> float | None:
        """The running time; None before the job began. The Hub counts whole seconds. The clock of this machine, which
        may be wrong by hours, only adds the fraction of the last second."""
        if self.now.started_at is None:
            return None
        ran = max(((self.now.finished_at or datetime.now(UTC)) - self.now.started_at).total_seconds(), 0.0)
        counted = self.now.running_seconds if self.now.finished_at is None else None
        return ran if counted is None else min(max(ran, counted), counted + 1.0)

    def data(self) -> State:
        job, record, measured = self.cloud.job, self.cloud.record, self.speed
        planned = self.plan.recipe.max_steps if self.plan else None
        ran = self.ran_seconds
        left = measured.left_seconds if measured and self.now.live else None
        limit = job.timeout_seconds
        price = job.usd_per_hour if job.usd_per_hour is not None else flavors.usd_per_hour(self.now.flavor)
        so_far = progress.dollars(ran, price)
        return {
            "run_dir": str(self.cloud.run.path) if self.cloud.run else None,
            "job_id": self.now.id,
            "url": self.now.url,
            "stage": self.now.stage,
            "message": self.now.message,
            "attempt": job.number,
            "flavor": job.flavor,
            "step": measured.step if measured else None,
            "steps": measured.steps if measured else planned,
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
                "expected": progress.dollars(ran + left, price) if ran is not None and left is not None else None,
                "estimated": self._estimated("cost_usd"),
                "at_most": progress.dollars(limit, price),
                "per_hour": price,
                "all_jobs": self._of_all_jobs(so_far),
            },
            "waiting": _long_wait_text(self.now) or None,
            "why": self.story.as_dict() if self.story else None,
            "hub_model_id": record.hub_model_id or None,
        }

    def _of_all_jobs(self, so_far: float | None) -> float | None:
        """Dollars of all jobs of the run; None if the cost of a job is unknown. A job that never started costs 0."""
        others = [job for job in self.cloud.record.jobs if job.job_id not in (None, self.now.id)]
        costs = [job.cost_usd for job in others if job.cost_usd is not None]
        return None if so_far is None or len(costs) < len(others) else round(so_far + sum(costs), 4)

    def next(self) -> tuple[str, ...]:
        word = self.cloud.word
        if self.now.live and _long_wait_text(self.now):
            return (f"skill-train cancel {word}", f"skill-train wait {word}")
        if self.now.live:
            return (f"skill-train wait {word}", f"skill-train logs {word} --follow")
        return self.story.next if self.story else (f"skill-train pull {word}",)

    def _estimated(self, key: str) -> Ends | None:
        if self.plan is None:
            return None
        estimate = {"seconds": self.plan.estimates.seconds, "cost_usd": self.plan.estimates.cost_usd}[key]
        return {"low": estimate.low, "high": estimate.high}


def snapshot(cloud: CloudRun, console: Console, *, in_time: bool = False) -> Snapshot:
    """The current state of a job, from its bucket and from the Hub.

    Args:
        in_time: answer early rather than completely: no log is read, and a bucket that does not answer is left out.
    """
    now, there = cloud.now, _peeked(cloud, console, in_time=in_time)
    completed = "COMPLETED" in (now.stage, cloud.job.stage)  # recorded, of a job that the Hub does not have any more
    failed = not now.live and not completed
    text, modified = there.texts.get("metrics.jsonl", ("", None))
    lines = _tail(cloud, console) if failed or (now.stage == "RUNNING" and not text and not in_time) else []
    others = {job.job_id for job in cloud.record.jobs} - {now.id}
    measured, source = progress.speed(text.splitlines(), others), "metrics.jsonl in the bucket"
    if measured is None:
        measured, source, modified = progress.speed(lines), "the log of the job", None
    return Snapshot(
        cloud=cloud,
        now=now,
        plan=find_run.plan_of(cloud, there),
        speed=measured,
        source=source if measured else None,
        age_seconds=age(modified),
        kept_step=there.checkpoint,
        story=_explained(cloud, measured, there, lines) if failed else None,
    )


def until_end(cloud: CloudRun, console: Console, seconds: float | None) -> CloudRun:
    """Waits for the end of a job, or for the time limit, and records the end. Reports each new stage, and a long queue
    once."""
    stage, queue_reported = "", False

    def on_job(job: Job) -> None:
        nonlocal stage, queue_reported
        if job.stage != stage:
            console.status(f"job {job.id}: {job.stage}")
            stage = job.stage
        queue = _long_wait_text(job)
        if queue and not queue_reported:
            console.warn("long_queue", queue)
            queue_reported = True

    with waiting.for_hours():
        ended = poll.until_end(cloud.record, cloud.now.id, seconds=seconds, on_job=on_job)
    now = ended or find_run.deleted_job(cloud.record, cloud.job)
    return find_run.with_recorded_end(replace(cloud, now=now))


def _long_wait_text(job: Job) -> str:
    """The sentence about a job that waits long for a machine; empty for any other job."""
    since = job.created_at
    seconds = (datetime.now(UTC) - since).total_seconds() if since else 0.0
    return failure_reason.waiting(job.stage, seconds, job.flavor)


def _peeked(cloud: CloudRun, console: Console, *, in_time: bool) -> bucket.StoredRecords:
    """The records in the bucket. If it cannot be read, warns and returns none, so that the stage is still shown."""
    try:
        return bucket.stored_records(cloud.record, _PEEKED)
    except (AccessError, Temporary) as error:
        if isinstance(error, Temporary) and not in_time:
            raise
        console.warn("no_bucket", f"the files of the job cannot be read: {error.message}")
        return bucket.NOTHING


def _explained(cloud: CloudRun, measured: Speed | None, there: bucket.StoredRecords, lines: list[str]) -> Story:
    now, failure = cloud.now, there.document("train.failed.json")
    ending = Ending(
        stage=now.stage,
        message=now.message,
        failure=failure,
        lines=tuple(lines),
        flavor=now.flavor,
        timeout_seconds=cloud.job.timeout_seconds,
        step=measured.step if measured else None,
        memory_bytes=measured.memory_bytes if measured else {},
        trained=(there.document(bucket.MARKER) or {}).get("state") == "done",
    )
    return failure_reason.explain(ending, run=cloud.name, offered=flavors.current(live=False)[0])


def _tail(cloud: CloudRun, console: Console) -> list[str]:
    """The end of the log, which may have been deleted with the job."""
    try:
        return poll.log_so_far(cloud.now, tail=_TAIL_LINES)
    except SkillTrainError as error:
        console.warn("no_log", f"the log of the job cannot be read: {error.message}")
        return []


def _moment(start: datetime | None, seconds: float | None) -> str | None:
    if start is None or seconds is None:
        return None
    try:
        return records.timestamp(start + timedelta(seconds=seconds))
    except OverflowError:  # a timeout in an edited record
        return None


def age(moment: datetime | None) -> float | None:
    """Seconds since that time; None if unknown, also because the clock was set back."""
    seconds = (datetime.now(UTC) - moment).total_seconds() if moment else -1.0
    return seconds if seconds >= 0 else None


def rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


def why_not_pushed(cloud: CloudRun, run: RunDir) -> str:
    """Why the model repository cannot provide the result of this run; empty if it can.

    Raises:
        AccessError: the token may not read the repository.
    """
    from skill_train.hub import models

    repository = cloud.record.hub_model_id
    if not repository or cloud.now.live:
        return "the job has not kept anything yet" if repository else "its bucket has no result"
    waiting.tell(f"the bucket has no result; asking for {repository}")
    try:
        pushed = patiently(lambda: repositories.find("model", repository))
        files = pushed.files if pushed else ()
        if "train.json" not in files or PROOF in files:
            return f"neither its bucket nor {repository} has its result"
        trained = train_record.read(models.model_file(repository, "train.json"))
    except UsageError as error:
        return f"its bucket has no result, and {error.message}"
    return why_not_of_run(cloud, run, trained)


def why_not_of_run(cloud: CloudRun, run: RunDir, trained: train_record.TrainRecord) -> str:
    """Why a record in the model repository is not that of this run; empty if it is."""
    repository = cloud.record.hub_model_id
    same_recipe = trained.recipe_hash == plan_record.read(run.plan).recipe_hash
    if same_recipe and trained.run in (None, cloud.record.run_id):
        return ""
    return f"its bucket has no result, and {repository} has that of another {'run' if same_recipe else 'recipe'}"


def from_bucket(console: Console, here: RunDir, there: StoredRun) -> "tuple[Pull, list[str]]":
    from skill_train.cloud import pull

    with console.progress("fetching") as progress:
        return pull.from_bucket(here, there, progress=progress)


def from_repository(cloud: CloudRun, here: RunDir) -> "tuple[Pull, list[str]]":
    """Fetches all files at the commit of the record, because another run may be pushed meanwhile."""
    from skill_train.cloud import pull
    from skill_train.hub import models

    repository = cloud.record.hub_model_id
    record = models.model_file(repository, "train.json")
    trained = train_record.read(record)
    if why := why_not_of_run(cloud, here, trained):
        raise pull.nothing_kept(here.path, why)
    files = tuple(pull.in_repository(trained).values())
    folder, commit = models.model_folder(repository, record.parent.name, files=files)
    return pull.from_repository(here, repository, folder, commit)
