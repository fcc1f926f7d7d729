"""`status`: shows the progress of a local run or a job. On a terminal it repeats until the run has ended."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec

from skill_train.cloud import find_run
from skill_train.cloud.find_run import CloudRun
from skill_train.commands._command import RUN, argument, command
from skill_train.commands._ended_training import smoke_failure
from skill_train.commands._job_snapshot import age, rounded, snapshot
from skill_train.commands._status_view import State, state_result
from skill_train.core import waiting
from skill_train.core.console import Console, Result
from skill_train.core.errors import UsageError, quoted
from skill_train.run import cloud_record, lock, plan_record, progress, records, train_record
from skill_train.run.earlier_start import require_as_trained
from skill_train.run.folder import RunDir
from skill_train.run.train_record import TrainFailure

# Pauses between two looks. For a job, a look takes up to five requests to the Hub, which allows 1,000 in 5 minutes.
_HERE_SECONDS, _JOB_SECONDS = 1.0, 10.0
_READ_BYTES = 1_000_000  # a file of at most this size is read whole
_LATELY_SECONDS = 300.0
_STEPS = {"verify": "report", "convert": "verify", "train": "export-gguf"}  # the newest record, and what comes next
_MESSAGES = {
    "colab": "it was written for Google Colab, which tells this machine nothing of it",
    "skypilot": "it was written for SkyPilot, which tells this machine nothing of it; sky queue shows it",
    "hf_jobs": "it is planned for the cloud and was not submitted",
    "local": "no process trains it any more",
}


@dataclass(frozen=True)
class StatusOptions:
    run: str = argument(RUN)


@command(StatusOptions, "skill-train status runs/tickets-cloud", "skill-train status me/0123456789abcdef01234567")
def status(options: StatusOptions, console: Console) -> Result:
    """Show a run's progress, its cost so far, the time it still needs, and why it failed.

    On a terminal it repeats until the run has ended or you press Ctrl-C. Otherwise it asks once.
    RUN is a run directory, or the id of a job: NAMESPACE/ID or ID.
    """
    here = RunDir(Path(options.run))
    if RunDir.is_one(here.path) and not cloud_record.record_path(here).is_file():
        return console.watch(partial(_local_state, here), pause_seconds=_HERE_SECONDS)
    return console.watch(_job_state(find_run.find(options.run), console), pause_seconds=_JOB_SECONDS)


def _job_state(cloud: CloudRun, console: Console) -> Callable[[], tuple[Result, bool]]:
    first_seen: CloudRun | None = cloud  # a fresh state, which the first look can use

    def state_now() -> tuple[Result, bool]:
        nonlocal first_seen
        waiting.well()  # the time that the last look waited in vain does not count
        state = snapshot(first_seen or find_run.with_current_job(cloud), console)
        first_seen = None
        return state_result(state.data(), state.next()), state.now.live

    return state_now


def _local_state(run: RunDir) -> tuple[Result, bool]:
    data = _state_of(run)
    after = next((step for record, step in _STEPS.items() if run.record(record).is_file()), "")
    words = {"COMPLETED": after, "RUNNING": "status"}.get(data["stage"])
    following = f"skill-train {words} {quoted(run.path)}" if words else cloud_record.continue_command(run)
    failed = data["stage"] == "COMPLETED" and data["why"]
    commands = [] if failed else [following]
    if data["stage"] == "ELSEWHERE":
        from skill_train.cloud.elsewhere import skypilot  # imported late, because a local run does not need it

        commands = list(skypilot.ways_to(run.path) or commands)
    return state_result(data, commands), data["stage"] == "RUNNING"


def _state_of(run: RunDir) -> State:
    locked = lock.is_locked(run)  # before the records are read: a process that ends in between has written them
    plan, done = plan_record.read(run.plan), run.record("train").is_file() and run.tuned.is_dir()
    text = run.metrics.read_text(encoding="utf-8", errors="replace") if run.metrics.is_file() else ""
    measured = progress.speed(text.splitlines())
    busy = locked if locked is not None else _fresh(run.metrics)
    failed = run.record("train.failed")
    error = records.read(failed, TrainFailure).error if failed.is_file() and not done and not busy else None
    refusal = (smoke_failure(run, train_record.read(run.record("train"))) or _changed(run)) if done else None
    modified = datetime.fromtimestamp(run.metrics.stat().st_mtime, UTC) if measured else None
    backend = plan.placement.backend
    ended = "ELSEWHERE" if backend in cloud_record.ELSEWHERE else "STOPPED"
    stage = "COMPLETED" if done else "RUNNING" if busy else "ERROR" if error else ended
    return {
        "run_dir": str(run.path),
        "job_id": None,
        "stage": stage,
        "message": _MESSAGES.get(backend) if stage == ended else None,
        "step": measured.step if measured else None,
        "steps": measured.steps if measured else plan.recipe.max_steps,
        "loss": measured.loss if measured else None,
        "tokens_per_second": measured.tokens_per_second if measured else None,
        "memory_bytes": measured.memory_bytes if measured else None,
        "progress": {"source": "metrics.jsonl" if measured else None, "age_seconds": rounded(age(modified))},
        "seconds": {"left": rounded(measured.left_seconds) if measured and not done else None},
        "why": msgspec.to_builtins(refusal.as_dict() if refusal else error),
    }


def _changed(run: RunDir) -> UsageError | None:
    """What the next step would say: a file or the recipe is no longer the one that was trained. Of a large file only
    the size is compared, because reading it takes too long."""
    record = train_record.read(run.record("train"))
    sizes = {name: (run.path / name).stat().st_size if (run.path / name).is_file() else None for name in record.outputs}
    names = [name for name, it in record.outputs.items() if it["bytes"] <= _READ_BYTES or sizes[name] != it["bytes"]]
    try:
        require_as_trained(run, record, names)
    except UsageError as error:
        return error
    return None


def _fresh(metrics: Path) -> bool:
    """Whether a step was written in the last 5 minutes, for folders in which no lock shows a running process."""
    seconds = age(datetime.fromtimestamp(metrics.stat().st_mtime, UTC)) if metrics.is_file() else None
    return seconds is not None and seconds < _LATELY_SECONDS
