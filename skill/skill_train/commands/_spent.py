"""`--max-cost`: the cost of all jobs of a plan so far, or at most, whichever folder or machine started them."""

from skill_train.cloud.poll import patiently
from skill_train.core.console import Console
from skill_train.core.errors import DecisionNeeded
from skill_train.core.units import dollars as in_dollars
from skill_train.hub import flavors, jobs
from skill_train.hub.jobs import Job
from skill_train.run.cloud_record import CloudJob, CloudRecord
from skill_train.run.progress import dollars


def spent_by_jobs(
    namespace: str, plan_hash: str, record: CloudRecord | None, *, excluded_job_id: str | None = None
) -> float:
    """Dollars of all jobs of a plan. A running job counts with its highest possible cost.

    Args:
        record: the record of a run of this plan. It may have jobs that the Hub does not list any more.
        excluded_job_id: the id of a job that does not count.

    Raises:
        DecisionNeeded: the cost of a job is unknown.
        Temporary: the Hub does not answer.
    """
    noted = {job.job_id: job for job in (record.jobs if record else ()) if job.job_id is not None}
    listed = {job.id: job for job in patiently(lambda: jobs.find(namespace, {"plan": plan_hash}))}
    total = 0.0
    for job_id in sorted({*noted, *listed} - {excluded_job_id}):
        cost = _cost(listed.get(job_id), noted.get(job_id))
        if cost is None:
            live = job_id in listed and listed[job_id].live
            raise DecisionNeeded(
                f"--max-cost cannot be checked, because the cost of this plan's job {job_id} is unknown",
                code="over_budget",
                expected="the cost of every job of the plan",
                got="a running job with an unknown time limit" if live else "no price, or no running time",
                hint=f"skill-train wait {namespace}/{job_id}"
                if live
                else f"see hf jobs inspect {namespace}/{job_id}, and ask the user whether another job may be paid for",
            )
        total += cost
    return total


def require_as_asked(
    console: Console, word: str, record: CloudRecord, job: CloudJob, *, max_cost: float | None, timeout: int | None
) -> None:
    """Warns if a running job has another timeout than the requested one; the job keeps its own. Refuses a job that,
    with the earlier jobs of its plan, may cost more than `max_cost`, or whose cost is unknown. `word` names the run in
    the hint."""
    spent = 0.0
    if max_cost is not None:
        spent = spent_by_jobs(record.namespace, record.plan_hash, record, excluded_job_id=job.job_id)
    if timeout is not None and timeout != job.timeout_seconds:
        had = "a timeout that is not known" if job.timeout_seconds is None else f"{job.timeout_seconds} s"
        console.warn(
            "another_timeout", f"job {job.job_id} is already running and will be stopped after {had}, not {timeout} s"
        )
    most = dollars(job.timeout_seconds, job.usd_per_hour)
    if max_cost is None or (most is not None and most + spent <= max_cost + 1e-9):
        return
    before = f", and {in_dollars(spent)} of the jobs before it" if spent else ""
    raise DecisionNeeded(
        f"job {job.job_id} of this plan is already running, and may cost more than --max-cost {max_cost:g}",
        code="over_budget",
        expected=f"at most {in_dollars(max_cost)}",
        got="an unknown cost"
        if most is None
        else f"{in_dollars(most)} at its timeout of {job.timeout_seconds} s{before}",
        hint=f"skill-train cancel {word}; or use a larger --max-cost to keep the job",
    )


def _cost(now: Job | None, noted: CloudJob | None) -> float | None:
    """The cost of a job: as recorded at its end, or else by the Hub's times, or else at most, by its timeout."""
    if noted is not None and noted.cost_usd is not None:
        return noted.cost_usd
    flavor = now.flavor if now is not None else noted.flavor if noted is not None else None
    price = noted.usd_per_hour if noted is not None else None
    price = flavors.usd_per_hour(flavor) if price is None else price
    if now is not None and not now.live:
        if now.started_at is None:
            return 0.0  # waiting is free
        if now.finished_at is not None:
            return dollars((now.finished_at - now.started_at).total_seconds(), price)
    limit = noted.timeout_seconds if noted is not None else None
    return dollars(now.timeout_seconds if limit is None and now is not None else limit, price)
