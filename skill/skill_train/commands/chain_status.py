"""`status`: how far a run is, here or as a job. On a terminal it stays and looks again until the run has ended."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from skill_train.cloud import find_run as cloud_run
from skill_train.cloud.find_run import CloudRun
from skill_train.commands import chain_follow, tables
from skill_train.commands.chain_follow import age, rounded
from skill_train.core import waiting
from skill_train.core.console import Console, Result
from skill_train.run import cloud_record, last_look
from skill_train.run import lock as run_lock
from skill_train.run import progress as job_figures
from skill_train.run.folder import RunDir
from skill_train.run.records import read_json

# Between two looks. One at a job asks the Hub up to five questions, of the 1,000 that it allows in 5 minutes.
_HERE_SECONDS, _JOB_SECONDS = 1.0, 10.0
_LATELY_SECONDS = 300.0


def status(console: Console, *, run: str) -> Result:
    """How far it is, what it has cost, what is next. Asks once, or on a terminal for as long as one watches.

    Of a job that was seen to have done its work it asks nobody.
    """
    here = RunDir(Path(run))
    submitted = cloud_record.record_path(here).is_file()
    known = last_look.read(here) if submitted else None
    if known is not None:
        return _told(*known)
    if RunDir.is_one(here.path) and not submitted:
        return console.watch(_look_here(here), pause_seconds=_HERE_SECONDS)
    return console.watch(_look_at_job(cloud_run.find(run, console.status), console), pause_seconds=_JOB_SECONDS)


def _look_at_job(cloud: CloudRun, console: Console) -> Callable[[], tuple[Result, bool]]:
    found: CloudRun | None = cloud  # it was asked for a moment ago

    def look() -> tuple[Result, bool]:
        nonlocal found
        waiting.well()  # of the look before
        about = chain_follow.look(found or cloud_run.with_now(cloud, console.status), console)
        found = None
        data, following = about.data(), list(about.next())
        known, last = about.cloud, about.cloud.record.last
        doubt = last != known.job  # a start that nobody heard of: its job may still appear
        done = about.now.stage == "COMPLETED" and not (doubt or console.warnings)
        if known.run is not None and done:
            last_look.keep(known.run, known.record, data, following, about.now.finished_at)
        return _told(data, following), about.now.live

    return look


def _told(data: dict[str, Any], following: list[str]) -> Result:
    return Result(data, human=lambda rich: tables.draw_status(rich, data), quiet=str(data["stage"]), next=following)


def _look_here(run: RunDir) -> Callable[[], tuple[Result, bool]]:
    def look() -> tuple[Result, bool]:
        data = _here(run)
        result = Result(data, human=lambda rich: tables.draw_status(rich, data), quiet=str(data["stage"]))
        word = shlex.quote(str(run.path))
        result.next = [
            {
                "COMPLETED": f"skill-train export-gguf {word}",
                "RUNNING": f"skill-train status {word}",
            }.get(data["stage"], f"skill-train local --resume --run-dir {word}")
        ]
        return result, data["stage"] == "RUNNING"

    return look


def _here(run: RunDir) -> dict[str, Any]:
    """Of a run on this machine, from what it wrote."""
    locked = run_lock.is_locked(run)  # before the records are read: what ends in between has written them
    plan, done = read_json(run.plan), run.record("train").is_file()
    text = run.metrics.read_text(encoding="utf-8", errors="replace") if run.metrics.is_file() else ""
    measured = job_figures.speed(text.splitlines())
    busy = locked if locked is not None else _fresh(run.metrics)
    failed = run.record("train.failed")
    error = read_json(failed)["error"] if failed.is_file() and not done and not busy else None
    written = datetime.fromtimestamp(run.metrics.stat().st_mtime, UTC) if measured else None
    stage = "COMPLETED" if done else "RUNNING" if busy else "ERROR" if error else "STOPPED"
    return {
        "run_dir": str(run.path),
        "job_id": None,
        "stage": stage,
        "message": "no process trains it any more" if stage == "STOPPED" else None,
        "step": measured.step if measured else None,
        "steps": measured.steps if measured else plan["recipe"]["max_steps"],
        "loss": measured.loss if measured else None,
        "tokens_per_second": measured.tokens_per_second if measured else None,
        "memory_bytes": measured.memory_bytes if measured else None,
        "progress": {
            "source": "metrics.jsonl" if measured else None,
            "age_seconds": rounded(age(written)),
        },
        "seconds": {"left": rounded(measured.left_seconds) if measured and not done else None},
        "why": error,
    }


def _fresh(metrics: Path) -> bool:
    """Whether a step was written lately: what there is to go by where no lock tells of a process."""
    seconds = age(datetime.fromtimestamp(metrics.stat().st_mtime, UTC)) if metrics.is_file() else None
    return seconds is not None and seconds < _LATELY_SECONDS
