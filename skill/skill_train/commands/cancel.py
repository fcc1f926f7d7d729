"""`cancel`: cancels a job, and reports what it has stored."""

from dataclasses import dataclass
from pathlib import Path

from skill_train.cloud import bucket, find_run, poll, start_once
from skill_train.cloud.bucket import StoredRun
from skill_train.cloud.find_run import CloudRun
from skill_train.commands._command import RUN, argument, command
from skill_train.commands._job_snapshot import until_end
from skill_train.core.console import Console, Result
from skill_train.core.errors import SkillTrainError, Temporary, UsageError
from skill_train.hub import jobs
from skill_train.run import cloud_record
from skill_train.run.folder import RunDir

CANCEL_SECONDS = 60.0  # the time that a job has to save its checkpoint


@dataclass(frozen=True)
class CancelOptions:
    run: str = argument(RUN)


@command(CancelOptions, "skill-train cancel runs/tickets-cloud", "skill-train cancel runs/tickets-cloud --format json")
def cancel(options: CancelOptions, console: Console) -> Result:
    """Cancel a job. Its checkpoints are kept; a job that has already ended is not changed."""
    record = cloud_record.read(RunDir(Path(options.run)))
    if record is not None and record.last is not None and record.last.job_id is None:
        start_once.find_job_until_settled(record, record.last)  # requested, but maybe not listed yet
    cloud = find_run.find(options.run)
    was_live = cloud.now.live
    if was_live:
        cloud = _cancelled(cloud, console)
    now = cloud.now
    if now.live:
        raise Temporary(
            f"the job is still {now.stage} {CANCEL_SECONDS:.0f} seconds after it was cancelled",
            code="still_running",
            expected="CANCELED",
            got=now.stage,
            hint=f"skill-train cancel {cloud.word}",
        )
    there, unread = _stored_run(cloud, console)
    data = {
        "job_id": now.id,
        "stage": now.stage,
        "cancelled": was_live,  # False if the job had already ended
        "kept": None if there is None else {"state": there.state, "checkpoint": there.checkpoint},
        "run_dir": str(cloud.run.path) if cloud.run else None,
    }
    has_result = there is not None and there.state == "done"
    following = ("pull",) if has_result else ("pull", "resume") if there or unread else ("resume",)
    return Result(
        data,
        human=lambda rich: rich.print(f"{now.id}: {now.stage}; kept: {_in_words(there, unread)}"),
        quiet=now.stage,
        next=[f"skill-train {command} {cloud.word}" for command in following],
    )


def _stored_run(cloud: CloudRun, console: Console) -> tuple[StoredRun | None, bool]:
    """The files that the job has stored, and whether they could not be read. The job is cancelled in either case."""
    try:
        return bucket.stored_run(cloud.record), False
    except SkillTrainError as error:
        console.warn("no_bucket", f"what the job has stored cannot be read: {error.message}")
        return None, True


def _cancelled(cloud: CloudRun, console: Console) -> CloudRun:
    """Cancels the job and waits for its end. It is no error if the job ends by itself in the meantime."""

    def tell() -> None:
        try:
            jobs.cancel(cloud.record.namespace, cloud.now.id)
        except (UsageError, Temporary) as error:
            if isinstance(error, Temporary) and error.code != "conflict":
                raise
            now = poll.job_now(cloud.record, cloud.now.id, seconds=0.0)
            if now is not None and now.live:
                if error.code != "unknown_job":
                    raise
                hint = f"skill-train cancel {cloud.word}"
                raise Temporary(error.message, code="hub_error", got="status 404", hint=hint) from None

    poll.patiently(tell)
    return until_end(cloud, console, CANCEL_SECONDS)


def _in_words(there: StoredRun | None, unread: bool) -> str:
    if there is not None and there.state == "done":
        return "the whole result"
    if there is not None and there.checkpoint is not None:
        return f"a checkpoint of step {there.checkpoint}"
    return "not known" if unread else "nothing"
