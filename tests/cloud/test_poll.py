"""`status`, `logs`, `wait` and `cancel`, against the Hub for tests, whose answers and jobs fail as they do."""

from __future__ import annotations

import json
import re
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

import cloud_runs
from cloud_runs import RUN_ID, Cloud
from hub_emulator import ALWAYS, Fault, Hub, JobFault, faults
from skill_train.hub import client, session
from waiting import wait_until

pytestmark = pytest.mark.slow

pytest.importorskip("huggingface_hub")

INSPECT, LOGS = r"GET /api/jobs/me/[0-9a-f]{24}$", r"GET /api/jobs/me/[0-9a-f]{24}/logs$"
SLEEP = "import time; print('begun', flush=True); time.sleep(60)"
TWELVE = "import time\nfor n in range(12):\n    print('line', n, flush=True)\n    time.sleep(0.05)"
ALL = [f"line {n}" for n in range(12)]


@pytest.fixture
def cloud(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    return cloud_runs.cloud(hub, tmp_path, monkeypatch)


# --- status ---


def test_a_run_in_one_look(cloud: Cloud) -> None:
    """Six steps of two seconds are left; the first step, which warms up, does not count."""
    cloud.keep({"metrics.jsonl": cloud_runs.metrics(4)})
    job = _running(cloud)
    before = len(cloud.hub.log)
    done = cloud.on("status")
    data = done.data
    assert (done.code, data["stage"], data["job_id"], data["attempt"]) == (0, "RUNNING", job.id, 1)
    assert (data["step"], data["steps"], data["loss"], data["tokens_per_second"]) == (4, 10, 2.6, 100.0)
    assert data["progress"]["source"] == "metrics.jsonl in the bucket"
    assert 0 <= data["progress"]["age_seconds"] < 30
    assert (data["seconds"]["left"], data["seconds"]["limit"]) == (12.0, 600)
    assert data["seconds"]["expected"] == pytest.approx(data["seconds"]["ran"] + 12, abs=0.11)
    # 40 cents an hour, by the minute: one so far, and ten at most.
    assert (data["cost_usd"]["so_far"], data["cost_usd"]["at_most"]) == (0.0067, 0.0667)
    estimates = json.loads(cloud.run.plan.read_text())["estimates"]
    assert data["cost_usd"]["estimated"] == {end: estimates["cost_usd"][end] for end in ("low", "high")}
    assert done.answer["next"][0] == f"skill-train wait {cloud.run.path}"
    polled = [r.path for r in cloud.hub.log[before:] if r.path.startswith("/api/jobs")]
    assert polled == [f"/api/jobs/me/{job.id}"]


def test_the_same_run_by_the_id_of_its_job(cloud: Cloud) -> None:
    cloud.keep({"metrics.jsonl": cloud_runs.metrics(4), "plan.json": cloud.run.plan.read_bytes()})
    job = _running(cloud)
    for name in (job.id, f"me/{job.id}"):
        data = cloud.call("status", name).data
        assert (data["job_id"], data["step"], data["run_dir"]) == (job.id, 4, None)
    assert data["cost_usd"]["per_hour"] == pytest.approx(0.4)  # by the table of prices


def test_a_hub_that_cannot_say_whose_the_token_is(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token is not at fault, and to sign in again would not help."""
    monkeypatch.setattr(client, "PAUSE_SECONDS", 0.0)
    cloud.hub.faults.add("GET /api/whoami-v2", faults.SERVER_ERROR, times=ALWAYS)
    done = cloud.call("status", "0" * 24)
    assert done.error == (8, "hub_error")


@pytest.mark.parametrize("hours", [-2, 2])
def test_a_clock_that_is_wrong_here(cloud: Cloud, monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    """Two minutes and a half of a t4-small are billed as three: 2 cents. Its ten minutes would be 6.7."""
    job = _running(cloud)
    info, ours = job.info, f"{datetime.now(UTC) - timedelta(hours=hours):%Y-%m-%dT%H:%M:%S.%fZ}"
    durations = {"schedulingSecs": 1, "runningSecs": 150, "totalSecs": 151}
    monkeypatch.setattr(job, "info", lambda: info() | {"startedAt": ours, "durations": durations})
    data = cloud.on("status").data
    assert 150 <= data["seconds"]["ran"] <= 151 and data["cost_usd"]["so_far"] == 0.02


def test_a_person_reads_lines(cloud: Cloud) -> None:
    cloud.keep({"metrics.jsonl": cloud_runs.metrics(4)})
    _running(cloud)
    text = cloud.call("status", str(cloud.run.path), form="human").stdout
    assert "step      4 of 10 · loss 2.6000 · 100 tokens/s" in text
    assert cloud.call("status", str(cloud.run.path), form="quiet").stdout == "RUNNING\n"


def test_a_job_whose_start_nobody_heard_of_is_found(cloud: Cloud) -> None:
    cloud.keep({"metrics.jsonl": cloud_runs.metrics(1)})
    job = _running(cloud)
    lost = msgspec.structs.replace(cloud.record.jobs[0], state="starting", job_id=None, url=None)
    cloud.write(msgspec.structs.replace(cloud.record, jobs=(lost,), bucket=None, folder=None))
    assert cloud.on("status").data["job_id"] == job.id
    never = msgspec.structs.replace(cloud.record, run_id="f" * 12)
    cloud.write(never)
    done = cloud.on("status")
    assert done.error == (2, "missing_step")
    assert done.answer["error"]["hint"] == f"skill-train submit {cloud.run.path}"
    assert "skill-train submit`" in cloud.call("status", "runs/nope").answer["error"]["hint"]
    assert cloud.call("status", "runs/nope").answer["next"] == []


def test_what_is_no_run(cloud: Cloud, tmp_path: Path) -> None:
    foreign = cloud.hub.jobs.create({"command": ["true"], "flavor": "cpu-basic", "dockerImage": "x"}, "me", "me")
    for name, code in ((foreign.id, "unknown_job"), ("0" * 24, "unknown_job"), (str(tmp_path / "x"), "missing_step")):
        done = cloud.call("cancel", name)
        assert done.error == (2, code)
    assert not foreign.cancelled.is_set()


@pytest.mark.parametrize("label", ["skill-train", "run", "plan"])
@pytest.mark.parametrize("command", ["status", "resume"])
def test_a_job_that_lost_a_label_is_no_run(cloud: Cloud, tmp_path: Path, command: str, label: str) -> None:
    """Labels can be changed on the Hub. A folder that was made of such a job could not be read afterwards."""
    cloud.keep({"plan.json": cloud.run.plan.read_bytes()})
    job = cloud.start("raise SystemExit(1)")
    cloud_runs.wait_for(job)
    for wrong in ("", "0123456789abcdeF"):
        if label == "skill-train":
            job.labels.pop(label, None)
        else:
            job.labels[label] = wrong
        folder = ("--run-dir", str(tmp_path / "other")) * (command == "resume")
        done = cloud.call(command, job.id, *folder)
        assert done.error == (2, "unknown_job") and label in done.answer["error"]["expected"]
        assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("command", ["status", "wait", "cancel", "resume"])
def test_without_a_token_nobody_is_signed_in(
    cloud: Cloud, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that a token is refused."""
    from huggingface_hub import constants

    cloud.start("pass")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    done = cloud.on(command)
    assert done.error == (4, "not_signed_in")
    assert done.answer["error"]["hint"] == "hf auth login, or set HF_TOKEN"


def test_a_run_on_this_machine(cloud: Cloud) -> None:
    cloud.run.metrics.write_bytes(cloud_runs.metrics(4))
    data = cloud.on("status").data
    assert (data["stage"], data["step"], data["seconds"]["left"]) == ("STOPPED", 4, 12.0)
    assert cloud.hub.log == []


def test_the_end_of_a_job_is_written_down_once(cloud: Cloud) -> None:
    """A t4-small of 40 cents an hour for a few seconds is a minute, 0.67 cents; the Hub may forget the job later."""
    cloud_runs.wait_for(cloud.start("raise SystemExit(1)"))
    cloud_runs.wait_for(cloud.start("pass"))
    assert cloud.on("status").data["cost_usd"]["all_jobs"] is None  # nobody saw the first end
    cloud.write(cloud.record.with_job(msgspec.structs.replace(cloud.record.jobs[0], stage="ERROR", cost_usd=0.5)))
    assert cloud.on("status").data["cost_usd"]["all_jobs"] == pytest.approx(0.5067)
    first, second = cloud.record.jobs
    assert (first.stage, first.ended_at) == ("ERROR", None)
    assert (second.stage, second.cost_usd) == ("COMPLETED", 0.0067)
    assert second.seconds is not None and second.ended_at is not None and 0 <= second.seconds < 60
    text = cloud.call("status", str(cloud.run.path), form="human").stdout
    assert "cost      $0.0067" in text and "$0.51 with the jobs before it" in text
    cloud.hub.jobs.all.clear()
    cloud.on("status")
    assert cloud.record.jobs[1] == second


def test_a_job_that_has_ended_is_asked_for_again(cloud: Cloud) -> None:
    """The same answer as before, and the newer job where one was started since."""
    cloud.keep({"metrics.jsonl": cloud_runs.metrics(10)})
    cloud_runs.wait_for(cloud.start("pass"))
    first = cloud.on("status")
    cloud.hub.log.clear()
    again = cloud.on("status")
    assert cloud.hub.log
    answers = [done.data for done in (first, again)]
    ages = [answer["progress"].pop("age_seconds") for answer in answers]
    assert answers[1]["step"] == 10 and 0 <= ages[1] - ages[0] < 60
    assert (answers[1], again.answer["next"]) == (answers[0], first.answer["next"])
    assert cloud.call("status", str(cloud.run.path), form="quiet").stdout == "COMPLETED\n"
    cloud.start("pass")
    assert cloud.on("status").data["attempt"] == 2


def test_a_job_that_failed_is_asked_for_again(cloud: Cloud, tmp_path: Path) -> None:
    """Somebody went on with its run in another folder."""
    job = cloud.start("raise SystemExit(1)")
    cloud_runs.wait_for(job)
    assert cloud.on("status").data["stage"] == "ERROR"
    assert cloud.call("resume", f"me/{job.id}", "--run-dir", str(tmp_path / "new"), "--yes").code == 0
    now = cloud.on("status").data
    assert (now["attempt"], now["job_id"]) == (2, cloud.hub.jobs.all[1].id)


def test_a_start_that_nobody_heard_of_may_appear(cloud: Cloud) -> None:
    """The job before it is shown meanwhile."""
    first = cloud.start("pass")
    cloud_runs.wait_for(first)
    starting = msgspec.structs.replace(cloud.record.jobs[0], number=2, state="starting", job_id=None, url=None)
    cloud.write(cloud.record.with_job(starting))
    assert cloud.on("status").data["attempt"] == 1
    second = cloud.hub.jobs.create(first.spec | {"labels": first.labels | {"attempt": "2"}}, "me", "me")
    assert cloud.on("status").data["job_id"] == second.id


@pytest.mark.parametrize("command", ["wait", "pull", "cancel"])
def test_each_command_that_sees_the_end_writes_it_down(cloud: Cloud, command: str) -> None:
    cloud.keep(cloud_runs.result())
    if command == "cancel":
        _running(cloud)
    else:
        cloud_runs.wait_for(cloud.start("pass"))
    assert cloud.on(command).code == 0
    [job] = cloud.record.jobs
    assert job.stage == ("CANCELED" if command == "cancel" else "COMPLETED")


# --- logs ---


@pytest.mark.parametrize("form", ["human", "json"])
def test_every_line_once_across_cuts_and_errors(cloud: Cloud, form: str) -> None:
    """The stream breaks while the job runs, and again after its end, where the client itself gives up."""
    for call, fault in enumerate((Fault(cut=4), faults.BAD_GATEWAY, Fault(cut=6), Fault(cut=9), faults.NO_ANSWER), 1):
        cloud.hub.faults.add(LOGS, fault, call=call)
    cloud.start(TWELVE)
    done = cloud.call("logs", str(cloud.run.path), "--follow", form=form)
    shown = done.stdout.splitlines() if form == "human" else done.data["lines"]
    assert (done.code, shown) == (0, ALL)
    assert [line for line in done.stderr.splitlines() if line.startswith("line ")] == ([] if form == "human" else ALL)
    assert len(cloud.hub.faults.struck) == 5


def test_a_stream_that_is_cut_after_the_end(cloud: Cloud) -> None:
    """The client says nothing of it. Nor is the reading that makes up for it believed when it is cut."""
    from skill_train.cloud import poll as follow
    from skill_train.run.cloud_record import CloudRecord

    job = cloud.start(TWELVE)
    cloud_runs.wait_for(job)
    cloud.hub.faults.add(LOGS, Fault(cut=3), times=3)
    assert list(follow.lines(CloudRecord(RUN_ID, "0" * 16, "me", ""), job.id)) == ALL
    assert len(cloud.hub.faults.struck) == 3


def test_a_log_that_begins_anew_is_shown_whole_at_its_end(cloud: Cloud) -> None:
    """The machine of a job was lost and the job started again: its log is shorter than what was shown."""
    job = cloud.start("import time\nfor n in range(8): print('old', n, flush=True)\ntime.sleep(60)")
    wait_until(lambda: "old 7" in job.lines, 20)
    cloud.hub.faults.add(LOGS, Fault(cut=6))
    cloud.hub.faults.add(LOGS, faults.BAD_GATEWAY, call=2)

    def start_again() -> None:
        wait_until(lambda: len(cloud.hub.faults.struck) == 2, 20)
        job.events.clear()
        for line in ("new 0", "new 1"):
            job.say(line)
        job.cancelled.set()

    restart = threading.Thread(target=start_again)
    restart.start()
    done = cloud.on("logs", "--follow")
    restart.join()
    assert done.data["lines"] == [*(f"old {n}" for n in range(5)), "new 0", "new 1"]


def test_the_end_of_a_log(cloud: Cloud) -> None:
    cloud_runs.wait_for(cloud.start(TWELVE))
    assert cloud.on("logs", "--tail", "2").data["lines"] == ALL[-2:]
    assert cloud.on("logs", "--tail", "2", "--follow").data["lines"] == ALL[-2:]
    assert cloud.call("logs", str(cloud.run.path), "--tail", "2", form="human").stdout.splitlines() == ALL[-2:]


def test_a_long_log_keeps_its_end_in_an_answer(cloud: Cloud) -> None:
    cloud_runs.wait_for(cloud.start("for n in range(500): print('x' * 40, n)"))
    done = cloud.on("logs")
    assert len(done.stdout.encode()) <= 8192
    assert done.data["lines"][-1] == "x" * 40 + " 499"
    assert done.data["left_out"] == 500 - len(done.data["lines"])


@pytest.mark.parametrize(("options", "counted"), [((), 1500), (("--tail", "1200"), 1200)])
def test_every_line_that_an_answer_leaves_out_is_counted(cloud: Cloud, options: tuple[str, ...], counted: int) -> None:
    cloud_runs.wait_for(cloud.start("for n in range(1500): print('x' * 40, n)"))
    data = cloud.on("logs", *options).data
    assert (data["lines"][-1], data["left_out"]) == ("x" * 40 + " 1499", counted - len(data["lines"]))


@pytest.mark.parametrize("follow", [False, True])
def test_a_log_may_be_longer_than_any_answer(cloud: Cloud, monkeypatch: pytest.MonkeyPatch, follow: bool) -> None:
    """An answer of the Hub is read into memory, so it has a limit; lines come one by one."""
    monkeypatch.setattr(session, "MOST_BYTES", 8_000)  # more than any answer here
    cloud_runs.wait_for(cloud.start("for n in range(500): print('x' * 40, n)"))
    lines = cloud.call("logs", str(cloud.run.path), *(("--follow",) * follow), form="human").stdout.splitlines()
    assert lines == [f"{'x' * 40} {n}" for n in range(500)]


# --- wait ---


def test_waiting_through_an_outage(cloud: Cloud) -> None:
    job = cloud.start("import time; time.sleep(1)")
    for call, fault in enumerate((faults.BAD_GATEWAY, faults.SERVER_ERROR, faults.NO_ANSWER), 2):
        cloud.hub.faults.add(INSPECT, fault, call=call)
    done = cloud.on("wait")
    assert (done.code, done.data["stage"], done.data["job_id"]) == (0, "COMPLETED", job.id)
    assert len(cloud.hub.faults.struck) == 3
    assert done.answer["next"] == [f"skill-train pull {cloud.run.path}"]
    assert "asking again" in done.stderr


def test_waiting_no_longer(cloud: Cloud) -> None:
    """The job goes on."""
    job = _running(cloud)
    cloud.keep({"metrics.jsonl": cloud_runs.metrics(1)})
    begun = time.monotonic()
    done = cloud.on("wait", "--timeout", "1")
    assert time.monotonic() - begun < 10
    assert done.error == (8, "still_running")
    assert done.answer["error"]["hint"] == f"skill-train wait {cloud.run.path}"
    assert not job.ended


def test_a_job_that_never_begins(cloud: Cloud) -> None:
    """After 12 hours in the queue (huggingface_hub#4376)."""
    cloud.hub.faults.add_job(JobFault("stuck"))
    job = cloud.start(SLEEP)
    assert cloud.on("wait", "--timeout", "0").error[1] == "not_started"
    job.created -= 12 * 3600
    done = cloud.on("wait", "--timeout", "0")
    assert done.error == (8, "not_started")
    assert "720 minutes for a free t4-small" in done.answer["data"]["waiting"]
    assert done.answer["warnings"][0]["code"] == "long_queue"
    assert done.answer["next"][0] == f"skill-train cancel {cloud.run.path}"


OWN = {"code": "bad_row", "message": "row 3 has no text", "expected": "text", "got": "{}", "hint": "mend it"}
FAILED_EVENT = (
    f"import json; print(json.dumps({{'event': 'failed', 'exit_code': 2, 'error': {OWN!r}}})); raise SystemExit(2)"
)
OUT_OF_MEMORY = "raise SystemExit('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB')"


@pytest.mark.parametrize(
    ("program", "fault", "exit_code", "code"),
    [
        (SLEEP, JobFault("exit", line="begun"), 3, "out_of_memory"),
        (SLEEP, JobFault("exit", code=139, line="begun"), 5, "job_failed"),
        (SLEEP, JobFault("timeout", line="begun"), 5, "timeout"),
        (OUT_OF_MEMORY, None, 3, "out_of_memory"),
        (FAILED_EVENT, None, 5, "bad_row"),
        ("raise SystemExit(7)", None, 5, "job_failed"),
    ],
)
def test_a_job_that_fails_is_explained(
    cloud: Cloud, program: str, fault: JobFault | None, exit_code: int, code: str
) -> None:
    if fault:
        cloud.hub.faults.add_job(fault)
    cloud_runs.wait_for(cloud.start(program))
    done = cloud.on("wait")
    assert (*done.error, done.answer["data"]["why"]["code"]) == (exit_code, code, code)
    assert done.answer["next"]
    assert cloud.on("status").code == 0  # it was asked what is the case, and that it told


def test_the_record_of_a_failure_when_the_log_is_gone(cloud: Cloud) -> None:
    cloud.keep({"train.failed.json": json.dumps({"exit_code": 2, "error": OWN}).encode()})
    cloud_runs.wait_for(cloud.start("raise SystemExit(2)"))
    cloud.hub.faults.add(LOGS, faults.NOT_FOUND)
    done = cloud.on("wait")
    assert (done.error[1], done.answer["warnings"][0]["code"]) == ("bad_row", "no_log")


def test_a_run_that_is_moved_while_it_is_waited_for_becomes_no_second_folder(cloud: Cloud) -> None:
    job = _running(cloud)

    def move() -> None:
        wait_until(lambda: any(r.path.endswith(job.id) for r in cloud.hub.log), 20)
        cloud.run.path.rename(cloud.run.path.with_name("moved"))
        job.cancelled.set()

    moving = threading.Thread(target=move)
    moving.start()
    assert cloud.on("wait").error == (5, "cancelled")
    moving.join()
    assert not cloud.run.path.exists()


def test_a_job_that_is_gone_from_the_hub(cloud: Cloud) -> None:
    cloud.start("pass")
    cloud.hub.jobs.all.clear()
    done = cloud.on("wait")
    assert done.error == (5, "cancelled")


def test_a_job_that_one_answer_does_not_know(cloud: Cloud) -> None:
    """The list still has it: it is not lost, and no other is started beside it."""
    cloud.keep({"metrics.jsonl": cloud_runs.metrics(1)})
    job = _running(cloud)
    cloud.hub.faults.add(INSPECT, faults.NOT_FOUND, times=ALWAYS)
    assert cloud.on("status").data["stage"] == "RUNNING"
    resumed = cloud.on("resume", "--yes").data
    assert (resumed["reused"], resumed["job_id"], cloud.hub.jobs_created) == (True, job.id, 1)


@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize("command", [("wait",), ("logs", "--follow")])
def test_one_answer_that_does_not_know_the_job_ends_no_watch(
    cloud: Cloud, command: tuple[str, ...], by_id: bool
) -> None:
    job = cloud.start("import time\nfor n in range(20):\n    print('line', n, flush=True)\n    time.sleep(0.1)")
    name = f"me/{job.id}" if by_id else str(cloud.run.path)
    for pattern in (INSPECT, LOGS):
        cloud.hub.faults.add(pattern, faults.NOT_FOUND, call=2 if pattern == INSPECT else 1)
    done = cloud.call(command[0], name, *command[1:])
    assert (done.code, done.data["stage"], len(cloud.hub.faults.struck)) == (0, "COMPLETED", len(command))
    assert command == ("wait",) or done.data["lines"] == [f"line {n}" for n in range(20)]


@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize("command", ["wait", "logs", "cancel"])
def test_a_job_that_is_deleted_while_it_is_watched(cloud: Cloud, command: str, by_id: bool) -> None:
    """It is not a job that never was."""
    job = _running(cloud)
    path = {"wait": rf"/{job.id}$", "logs": rf"/{job.id}/logs$", "cancel": rf"/{job.id}/cancel$"}[command]
    deleted = threading.Thread(target=_deleted, args=(cloud, path, 2 if command == "wait" else 1))
    deleted.start()
    cloud.hub.faults.add("POST .*/cancel", Fault(seconds=1.0))  # late enough
    more = ("--follow",) if command == "logs" else ()
    done = cloud.call(command, f"me/{job.id}" if by_id else str(cloud.run.path), *more)
    deleted.join()
    assert done.answer["data"]["stage"] == "DELETED"
    if command == "wait":
        assert done.error == (5, "cancelled")
    else:
        assert done.code == 0


def test_a_job_that_an_account_could_not_see_has_its_own_end_later(cloud: Cloud) -> None:
    """To another account the Hub says that there is no such job. A minute of a t4-small is 0.67 cents."""
    job = cloud.start("pass")
    cloud_runs.wait_for(job)
    hidden = cloud.hub.jobs.all
    cloud.hub.jobs.all = []
    assert cloud.on("status").data["stage"] == cloud.record.jobs[0].stage == "DELETED"
    cloud.hub.jobs.all = hidden
    assert cloud.on("status").data["cost_usd"]["all_jobs"] == 0.0067
    assert (cloud.record.jobs[0].stage, cloud.record.jobs[0].cost_usd) == ("COMPLETED", 0.0067)
    cloud.hub.jobs.all = []
    assert cloud.on("status").data["stage"] == "DELETED"
    assert (cloud.record.jobs[0].stage, cloud.record.jobs[0].cost_usd) == ("COMPLETED", 0.0067)


def _deleted(cloud: Cloud, pattern: str, times: int) -> None:
    """The job, after so many questions of a kind."""
    wait_until(lambda: sum(bool(re.search(pattern, request.path)) for request in list(cloud.hub.log)) >= times, 20)
    [job] = cloud.hub.jobs.all
    cloud.hub.jobs.all.clear()
    job.cancelled.set()


# --- cancel ---


def test_cancelling_twice(cloud: Cloud) -> None:
    """What was kept before stays, and is said."""
    cloud.keep(cloud_runs.checkpoint(4))
    _running(cloud)
    cloud.hub.faults.add("POST .*/cancel", faults.DONE_AND_ERROR)
    cloud.hub.faults.add("POST .*/cancel", Fault(409), call=2)
    done = cloud.on("cancel")
    assert (done.code, done.data["stage"], done.data["cancelled"]) == (0, "CANCELED", True)
    assert done.data["kept"] == {"state": "unfinished", "checkpoint": 4}
    again = cloud.on("cancel")
    assert (again.code, again.data["cancelled"]) == (0, False)
    waited = cloud.on("wait")
    assert waited.error == (5, "cancelled")


def test_a_job_that_was_cancelled_is_said_to_be_when_its_bucket_cannot_be_read(cloud: Cloud) -> None:
    """Otherwise one would think that it still runs and costs money."""
    cloud.keep(cloud_runs.checkpoint(4))
    job = _running(cloud)
    cloud.hub.faults.add("GET /api/buckets/.*", faults.NO_PERMISSION, times=ALWAYS)
    done = cloud.on("cancel")
    assert (done.code, done.data["stage"], done.data["kept"], job.stage) == (0, "CANCELED", None, "CANCELED")
    assert [warning["code"] for warning in done.answer["warnings"]] == ["no_bucket"]
    assert done.answer["next"] == [f"skill-train pull {cloud.run.path}", f"skill-train resume {cloud.run.path}"]
    assert "kept: not known" in cloud.call("cancel", str(cloud.run.path), form="human").stdout


def test_one_answer_that_there_is_no_such_job_leaves_it_not_alive(cloud: Cloud) -> None:
    """The Hub has the job and says once that it has not: who believed it would go on paying."""
    _running(cloud)
    cloud.hub.faults.add("POST .*/cancel", faults.NOT_FOUND)
    done = cloud.on("cancel")
    assert (done.code, done.data["stage"], done.data["cancelled"]) == (0, "CANCELED", True)


def test_a_finished_job_is_not_cancelled(cloud: Cloud) -> None:
    cloud_runs.wait_for(cloud.start("pass"))
    before = len(cloud.hub.log)
    data = cloud.on("cancel").data
    assert (data["stage"], data["cancelled"]) == ("COMPLETED", False)
    assert not [r for r in cloud.hub.log[before:] if r.method == "POST" and r.path.endswith("/cancel")]


def test_a_finished_job_has_nothing_to_resume(cloud: Cloud) -> None:
    cloud.keep(cloud_runs.result())
    cloud_runs.wait_for(cloud.start("pass"))
    done = cloud.on("cancel")
    assert done.data["kept"]["state"] == "done"
    assert done.answer["next"] == [f"skill-train pull {cloud.run.path}"]


def _running(cloud: Cloud) -> Any:
    job = cloud.start(SLEEP)
    wait_until(lambda: "begun" in job.lines, 20)
    return job
