"""Jobs: each is really run, as a child process of the server with nothing of the server's environment but its PATH."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hub_emulator.faults import JobFault
from hub_emulator.volumes import Mount, MountFailed, mount, release, rewrite, save
from hub_emulator.wire import now

ENDED = ("COMPLETED", "CANCELED", "ERROR", "DELETED")
_PYTHON = sys.executable  # a job starts as in its container, whatever tests start: see warm_start.py
_DEFAULT_SECONDS = 1800  # of a job without a timeout; huggingface.co/docs/hub/jobs, 2026-08
_POLL_SECONDS = 0.02


@dataclass
class Job:
    """One job, and all that happened to it.

    Attributes:
        spec: as it was sent, without `secrets`; this and the rest may be shown.
        secrets: the only place where their values are.
        number: 1 for the first job of the server.
        events: of its log: `data` (a line) and `timestamp`.
        log_ended: its log stream ends although the job has not; see `Jobs.lag_seconds`.
        starts: how often its command was started.
        commands: the command of each start, as it was run.
    """

    spec: dict[str, Any]
    secrets: dict[str, str] = field(repr=False)
    namespace: str
    user: str
    number: int
    initiator: str = "user"
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    labels: dict[str, str] = field(default_factory=dict)
    created: float = field(default_factory=time.time)
    started: float | None = None
    finished: float | None = None
    stage: str = "SCHEDULING"
    message: str | None = None
    events: list[dict[str, str]] = field(default_factory=list)
    log_ended: bool = False
    starts: int = 0
    commands: list[list[str]] = field(default_factory=list)
    pid: int | None = None
    cancelled: threading.Event = field(default_factory=threading.Event, repr=False)
    changed: threading.Condition = field(default_factory=threading.Condition, repr=False)

    @property
    def ended(self) -> bool:
        return self.stage in ENDED

    @property
    def lines(self) -> list[str]:
        """Its log."""
        return [event["data"] for event in self.events]

    def say(self, line: str) -> None:
        with self.changed:
            self.events.append({"data": line, "timestamp": now()})
            self.changed.notify_all()

    def end_log(self) -> None:
        with self.changed:
            self.log_ended = True
            self.changed.notify_all()

    def become(self, stage: str, message: str | None = None) -> None:
        with self.changed:
            if stage == "RUNNING":
                self.started = self.started or time.time()
            if stage in ENDED:
                self.finished = time.time()
            self.stage, self.message = stage, message
            self.changed.notify_all()

    def info(self) -> dict[str, Any]:
        """What the API says of it: of the secrets, the names."""
        until = self.finished or time.time()
        about = {
            "id": self.id,
            "type": "job",
            "owner": {"id": "1" * 24, "name": self.namespace, "type": "user"},
            "createdBy": {"id": "1" * 24, "name": self.user, "type": "user"},
            "initiator": {"type": self.initiator, "id": "1" * 24, "name": self.user},
            "createdAt": _time(self.created),
            "startedAt": _time(self.started),
            "finishedAt": _time(self.finished),
            "status": {"stage": self.stage, "message": self.message},
            "labels": self.labels,
            "secrets": sorted(self.secrets),
            "timeout": self.spec.get("timeoutSeconds") or _DEFAULT_SECONDS,
            "retry": (self.spec.get("attempts") or 1) - 1,
            "durations": {
                "schedulingSecs": int((self.started or until) - self.created) if self.started else None,
                "runningSecs": int(until - self.started) if self.started else None,
                "totalSecs": int(until - self.created),
            },
        }
        kept = ("dockerImage", "spaceId", "command", "arguments", "environment", "flavor", "volumes")
        return {name: self.spec.get(name) for name in kept} | about


@dataclass
class _Watched:
    """What is looked after while an attempt runs. `first` is the index of its first event."""

    mounts: list[Mount]
    fault: JobFault | None
    first: int
    began: float = field(default_factory=time.time)
    synced: float = field(default_factory=time.time)

    def struck(self, job: Job) -> JobFault | None:
        """The fault, when its time has come."""
        if self.fault is None:
            return None
        if self.fault.line is None:
            return self.fault if time.time() - self.began >= self.fault.seconds else None
        new = job.lines[self.first :]
        self.first += len(new)
        return self.fault if any(re.search(self.fault.line, line) for line in new) else None


class Jobs:
    """All jobs of a server.

    Attributes:
        scheduling_seconds: before a job runs.
        grace_seconds: between SIGTERM and SIGKILL for a job that is cancelled or out of time.
        lag_seconds: between the end of a log and the end of its job; on the Hub 1.3 s (huggingface_hub's own comment).
        sync_seconds: how often what a running job has written is brought into its buckets; None for at its end only.
        listed_after_seconds: how far the list of jobs is behind.
        stand_in: a program that is run in place of `uv run …/train.py`, with its arguments.
        warm_python: starts the training in a fraction of a second, where a test is not about its start. It needs the
            server's environment.
    """

    def __init__(self, hub: Any) -> None:
        self.all: list[Job] = []
        self.scheduling_seconds = 0.05
        self.grace_seconds = 2.0
        self.lag_seconds = 0.0
        self.sync_seconds: float | None = None
        self.listed_after_seconds = 0.0
        self.stand_in: Path | None = None
        self.warm_python: Path | None = None
        self._hub = hub
        self._threads: list[tuple[Job, threading.Thread]] = []
        self._lock = threading.Lock()

    def get(self, job_id: str) -> Job | None:
        return next((job for job in self.all if job.id == job_id), None)

    def create(self, spec: dict[str, Any], namespace: str, user: str, initiator: str = "user") -> Job:
        """A new job, which starts by itself."""
        shown = {name: value for name, value in spec.items() if name != "secrets"}
        hidden = {name: str(value) for name, value in (spec.get("secrets") or {}).items()}
        with self._lock:
            job = Job(shown, hidden, namespace, user, len(self.all) + 1, initiator)
            job.labels = dict(spec.get("labels") or {})
            self.all.append(job)
        self._begin(job)
        return job

    def again(self, job: Job) -> None:
        """One that was cancelled runs as if nobody had."""
        next(thread for known, thread in reversed(self._threads) if known is job).join(timeout=30)
        job.cancelled.clear()
        job.events.clear()
        job.finished, job.log_ended = None, False
        job.become("SCHEDULING")
        self._begin(job)

    def _begin(self, job: Job) -> None:
        thread = threading.Thread(target=self._run, args=(job,), daemon=True)
        self._threads.append((job, thread))
        thread.start()

    def stop(self) -> None:
        """Ends them all, those too that a test took out of the list."""
        self.grace_seconds = 0.0
        for job, _ in self._threads:
            job.cancelled.set()
        for _, thread in self._threads:
            thread.join(timeout=30)

    def _run(self, job: Job) -> None:
        folder = self._hub.folder / "jobs" / job.id
        try:
            if job.cancelled.wait(self.scheduling_seconds):
                job.become("CANCELED", "Job canceled")  # these words are made up
            else:
                stage, message = self._attempts(job, folder)
                if self.lag_seconds:
                    job.end_log()
                    time.sleep(self.lag_seconds)
                job.become(stage, message)
        except Exception as error:  # noqa: BLE001 - a thread that dies in silence leaves its job running for ever
            self._hub.unknown.append(f"job {job.id}: {type(error).__name__}: {error}")
            job.become("ERROR", "the emulator broke")

    def _attempts(self, job: Job, folder: Path) -> tuple[str, str | None]:
        """The stage that a job ends in, with its message."""
        left = job.spec.get("attempts") or 1
        while True:
            job.starts += 1
            fault = self._hub.faults.of_job(job.number, job.starts)
            if fault and fault.ending == "stuck":
                job.cancelled.wait()
                return "CANCELED", "Job canceled"
            try:
                ending, code = self._attempt(job, folder / str(job.starts), fault)
            except MountFailed as error:
                return "ERROR", f"Job failed to start: {error}"
            if ending == "restart":
                continue
            left -= 1
            if ending == "canceled":
                return "CANCELED", "Job canceled"
            if ending == "timeout":
                return "ERROR", "Job timeout"
            if code == 0:
                return "COMPLETED", None
            if left == 0:  # the words: users' reports, 2026
                return "ERROR", f"Job failed with exit code: {code}. Reason: {'OOMKilled' if code == 137 else 'Error'}"

    def _attempt(self, job: Job, folder: Path, fault: JobFault | None) -> tuple[str, int]:
        """Runs the command once, in a new folder that is gone afterwards; `(ending, exit code)`."""
        folder.mkdir(parents=True)
        mounts: list[Mount] = []
        try:
            mounts = mount(self._hub, job.spec.get("volumes") or [], folder)
            first = len(job.events)
            process = self._start(job, folder, mounts)
            job.say(f"===== Job started at {now()} =====")
            job.become("RUNNING")
            reader = threading.Thread(target=_read, args=(job, process), daemon=True)
            reader.start()
            ended = self._watch(job, process, _Watched(mounts, fault, first))
            reader.join(timeout=10)
        finally:
            save(self._hub, mounts)
            release(mounts)
            shutil.rmtree(folder)
        return ended

    def _start(self, job: Job, folder: Path, mounts: list[Mount]) -> subprocess.Popen[bytes]:
        command = [rewrite(part, mounts) for part in [*job.spec["command"], *(job.spec.get("arguments") or [])]]
        if self.stand_in and any(part.endswith("/train.py") for part in command):
            command = [_PYTHON, "-S", str(self.stand_in), *command[3:]]
        env = {k: rewrite(str(v), mounts) for k, v in ((job.spec.get("environment") or {}) | job.secrets).items()}
        home = folder / "home"
        home.mkdir(exist_ok=True)
        path = f"{Path(_PYTHON).parent}:{os.environ.get('PATH', '')}"
        own = {"PATH": path, "HOME": str(home), "HF_ENDPOINT": self._hub.endpoint, "JOB_ID": job.id}
        own |= _machine(self._hub.hardware, job.spec["flavor"])
        command = fast(command)
        if self.warm_python and command[0] == _PYTHON:
            command[0] = str(self.warm_python)
            own = {name: text for name, text in os.environ.items() if not name.startswith(("HF_", "XDG_"))} | own
            own["PATH"] = os.environ["PATH"]
        job.commands.append(command)
        options: dict[str, Any] = {"cwd": home, "env": own | env, "start_new_session": True}
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        try:
            process = subprocess.Popen(job.commands[-1], **options, **streams)
        except OSError as error:  # as a container says it
            failed = [_PYTHON, "-c", f"print({str(error)!r}); raise SystemExit(127)"]
            process = subprocess.Popen(failed, **options, **streams)
        job.pid = process.pid
        return process

    def _watch(self, job: Job, process: subprocess.Popen[bytes], watched: _Watched) -> tuple[str, int]:
        """Waits for the end of the process, or ends it."""
        deadline = (job.started or 0) + (job.spec.get("timeoutSeconds") or _DEFAULT_SECONDS)
        while process.poll() is None:
            fault = watched.struck(job)
            if job.cancelled.is_set():
                return self._end(process, self.grace_seconds, "canceled", 143)
            if time.time() > deadline or (fault and fault.ending == "timeout"):
                return self._end(process, self.grace_seconds, "timeout", 143)
            if fault:
                return self._end(process, 0.0, fault.ending, fault.code)
            if self.sync_seconds is not None and time.time() > watched.synced + self.sync_seconds:
                save(self._hub, watched.mounts)
                watched.synced = time.time()
            time.sleep(_POLL_SECONDS)
        code = process.returncode
        return self._end(process, 0.0, "exit", code if code >= 0 else 128 - code)

    def _end(self, process: subprocess.Popen[bytes], grace: float, ending: str, code: int) -> tuple[str, int]:
        """Leaves nothing of a job running."""
        if grace:
            _signal(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace)
        _signal(process.pid, signal.SIGKILL)
        process.wait(10)
        return ending, code


def fast(command: list[str]) -> list[str]:
    """`uv run SCRIPT …` with our own Python, which has the packages; any other command as it is."""
    if command[:2] != ["uv", "run"]:
        return command
    rest = command[2:]
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option == "--":
            break
        if option in _WITH_VALUE:
            rest.pop(0)
    return [_PYTHON, *rest] if rest and rest[0].endswith(".py") else rest


_WITH_VALUE = {"--with", "--python", "-p", "--extra", "--index", "--index-url", "--extra-index-url", "--env-file"}


def _machine(hardware: list[dict[str, Any]], flavor: str) -> dict[str, str]:
    """What a job is told of its machine (huggingface.co/docs/hub/jobs, 2026-08; the form of MEMORY is made up)."""
    row = next((row for row in hardware if row["name"] == flavor), {})
    cores, ram = str(row.get("cpu", "")).split(" ")[0], str(row.get("ram", "")).replace(" GB", "Gi")
    return {"ACCELERATOR": "none", "CPU_CORES": cores, "MEMORY": ram}  # whatever the flavor: it has no GPU here


def _read(job: Job, process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        job.say(line.decode(errors="replace").rstrip("\n"))
    process.stdout.close()


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended; on macOS also a group of zombies
        os.killpg(group, number)


def _time(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
