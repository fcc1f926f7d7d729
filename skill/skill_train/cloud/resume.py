"""Starts another job for a run whose last job ended without a result: same folder, same program, same plan."""

import msgspec

from skill_train.cloud import claim, find_run, start_once
from skill_train.core import waiting
from skill_train.hub import jobs
from skill_train.run import cloud_record, plan_record, records
from skill_train.run.cloud_record import CloudJob, CloudRecord
from skill_train.run.folder import RunDir
from skill_train.run.lock import locked


def resume(
    run: RunDir, *, flavor: str, timeout_seconds: int, usd_per_hour: float | None, max_cost: float | None
) -> tuple[CloudRecord, bool]:
    """Starts a job that continues the run. Returns the record with the job, and whether the job already existed.

    The job is recorded before it is requested. Before that it looks for a job that an earlier request may have created,
    and for a job that another folder started.

    Raises:
        UsageError: no job of this run ever began, so there is no folder to continue in.
        AccessError, Temporary: as for `start_once.start`.
    """
    with locked(run, "resume"), start_once.told_if_interrupted(run):
        record = _settled(run, cloud_record.submitted(run))
        now = find_run.newest_job(record)
        if now is not None and record.last_begun is not None and record.folder is None:  # left out earlier
            record = start_once.record_started(run, record, record.last_begun, now)
        if now is not None and now.live:
            return record, True
        if record.bucket is None or record.folder is None:
            raise find_run.never_started(str(run.path))
        last = record.last  # its number counts: a record that was made from a later job lacks the earlier ones
        number = 1 if last is None else last.number + (last.job_id is not None)
        new_job = CloudJob(
            number, "starting", flavor, timeout_seconds, records.timestamp(), usd_per_hour, max_cost=max_cost
        )
        spec = start_once.specification(run, plan_record.read(run.plan), record, new_job)
        folder = (record.bucket, record.folder)
        with claim.claimed(record, number, of_plan=False) as theirs:
            if theirs is not None:
                return start_once.record_started(run, record, _of_another_folder(new_job), theirs), True
            record = start_once.start(run, record, new_job, lambda: jobs.start(spec, folder))
        return _with_remaining_job(run, record, new_job)


def _with_remaining_job(run: RunDir, record: CloudRecord, new_job: CloudJob) -> tuple[CloudRecord, bool]:
    """Keeps the older job if another machine started one too. Returns the record with the remaining job, and whether it
    is the other machine's."""
    ours = start_once.inspect_new_job(record)
    if ours is None:
        return record, False
    stays = start_once.keep_the_oldest(record, new_job.number, ours, of_plan=False)
    if stays.id == ours.id:
        return record, False
    return start_once.record_started(run, record, _of_another_folder(new_job), stays), True


def _of_another_folder(requested: CloudJob) -> CloudJob:
    """The request without a timeout, because only the folder that started the other job knows that job's timeout."""
    return msgspec.structs.replace(requested, timeout_seconds=None)


def with_missing_jobs(run: RunDir) -> CloudRecord:
    """Adds the jobs that the run's record lacks, and writes it to `cloud.json`."""
    with locked(run, "resume"):
        return _settled(run, cloud_record.submitted(run))


def _settled(run: RunDir, record: CloudRecord) -> CloudRecord:
    """Adds the job whose request had no answer, if it exists, and the jobs that other folders started."""
    last = record.last
    if last is not None and last.job_id is None:
        waiting.tell("the last request had no answer; checking whether its job exists")
        job = start_once.find_job_until_settled(record, last)
        record = record if job is None else start_once.record_started(run, record, last, job)
    whole = find_run.with_unrecorded_jobs(record)
    if whole != record:
        cloud_record.write(run, whole)
    return whole
