"""Somebody who wants a model out of the cloud and does what each answer says next, whatever goes wrong meanwhile."""

from __future__ import annotations

import json
import random
import shlex
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import stand_in
from command_child import Commands, Done
from fault_schedules import LATE_SECONDS, Schedule
from hub_emulator import Hub

IMPATIENT = {
    "TEST_PATIENCE_SECONDS": "1",
    "TEST_REQUEST_SECONDS": "3",
    "HF_XET_CLIENT_RETRY_MAX_ATTEMPTS": "2",
    "HF_XET_CLIENT_RETRY_BASE_DELAY": "10ms",
}
_TROUBLE = {4: {401, 402, 403}, 8: {0, 200, 429, 500, 502}, 2: {404}}
# Answers that need no fault of a request: what is said is so.
_SO = {
    "still_running", "not_started", "confirm_cost", "out_of_memory", "timeout", "job_failed", "cancelled",
    "nothing_kept", "missing_step", "job_ended",
}  # fmt: skip


@dataclass
class User:
    """One run of one user.

    Attributes:
        said: what was called and how it ended, the trouble that struck with it.
    """

    hub: Hub
    commands: Commands
    home: Path
    folder: Path
    schedule: Schedule
    said: list[str] = field(default_factory=list)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._dice, self._troubles = random.Random(self.schedule.seed), 0

    def get(self, submit: list[str]) -> None:
        """Until the model is here."""
        self.schedule.arm(self.hub)
        words = submit
        for _ in range(30):
            done = self.call(words)
            if words[0] == "pull" and done.code == 0 and done.data["trained"]:
                return self.mended(submit)
            words = self.next(words, done)
        raise AssertionError("it never ends")

    def mended(self, submit: list[str]) -> None:
        """What is here is what was trained; to submit it again starts nothing."""
        run = self.folder / "run"
        for name in (*stand_in.ADAPTER, *stand_in.RECORDS):
            assert (run / name).read_bytes() == stand_in.content(name, run), name
        assert (run / "metrics.jsonl").read_bytes() == stand_in.metrics(stand_in.STEPS)
        self.hub.faults.clear()
        created = self.hub.jobs_created
        assert self.call(submit).data["reused"] is True
        assert self.hub.jobs_created == created, "a second job"

    def call(self, words: list[str]) -> Done:
        """One command, and all that must hold after any."""
        before = len(self.hub.faults.struck)
        done = self.commands.run(self.folder, self.hub.environment(self.home) | IMPATIENT, *words)
        struck = self.hub.faults.struck[before:]
        self.said.append(f"{shlex.join(words)}: {done.code} {done.stdout[:600]}{done.stderr[-300:]}{struck}")
        code = done.answer["error"]["code"] if done.code else "done"
        self.counts[words[0], f"{done.code} {code}"] += 1
        self._assert_explained(done.code, code, struck)
        self._assert_one_job()
        self._assert_whole_files()
        assert self.hub.token not in done.stdout + done.stderr
        return done

    def next(self, words: list[str], done: Done) -> list[str]:
        """What the answer says; after trouble the same again, and after the second the trouble is mended."""
        answer = done.answer
        code = answer["error"]["code"] if done.code else ""
        told = [shlex.split(line)[1:] for line in answer["next"]]
        if done.code == 0:
            return self._with_limit(self._dice.choice([each for each in told if not self._for_ever(each)]))
        if code == "still_running":
            return words
        if code == "not_started":  # the queue is too long for this user
            return ["cancel", "run"]
        if code in _SO:
            wanted = [each for each in told if each[0] in ("resume", "cancel", "submit", "status")]
            hint = answer["error"]["hint"]
            if not wanted and hint.startswith("skill-train "):
                wanted = [self._with_limit(shlex.split(hint)[1:])]
            return wanted[0] if wanted else words
        self._troubles += 1
        if done.code == 4 or self._troubles > 1:
            self.hub.faults._requests.clear()
        if any(name == "late" for _, _, name, _, _ in self.schedule.requests):
            time.sleep(LATE_SECONDS)  # the hint says a minute
        return words

    def _with_limit(self, words: list[str]) -> list[str]:
        return [*words, "--timeout", "2"] if words[0] == "wait" else words

    def _for_ever(self, words: list[str]) -> bool:
        """Whether that would follow a log which never begins."""
        return "--follow" in words and any(job.ending == "stuck" for job in self.schedule.jobs)

    def _assert_explained(self, exit_code: int, code: str, struck: list[str]) -> None:
        """The exit code is that of the trouble there was, and there was one."""
        assert exit_code in (0, 2, 3, 4, 5, 8), exit_code
        if exit_code == 0 or code in _SO:
            return
        statuses = {int(line.rsplit(" ", 1)[1]) for line in struck}
        statuses |= {500 for line in struck if "/cas/" in line}  # whatever the store says, the Hub is asked again
        statuses |= {500 for line in struck if line.endswith("/logs: 404")}  # of a job that the Hub says it has
        assert statuses & _TROUBLE.get(exit_code, set()), f"exit {exit_code} {code} after {struck}"

    def _assert_one_job(self) -> None:
        """At most one lives, none was asked for twice, and none after one that did what it should."""
        jobs = self.hub.jobs.all
        attempts = [(job.labels["run"], job.labels["attempt"]) for job in jobs]
        assert len(set(attempts)) == len(attempts) and len({run for run, _ in attempts}) <= 1, attempts
        assert all(job.ended and job.stage != "COMPLETED" for job in jobs[:-1]), [job.stage for job in jobs]

    def _assert_whole_files(self) -> None:
        """Under a final name there is nothing half-written."""
        run = self.folder / "run"
        for path in (p for p in run.rglob("*") if p.is_file() and ".pull.part" not in p.parts):
            name = path.relative_to(run).as_posix()
            if name.startswith(("adapter/", "checkpoints/checkpoint-")) and path.name != "kept.json":
                assert path.read_bytes() == stand_in.content(name, run), name
            elif path.suffix == ".json":
                json.loads(path.read_text())
            elif path.name == "metrics.jsonl":
                assert path.read_bytes() in [stand_in.metrics(step) for step in range(stand_in.STEPS + 1)]
