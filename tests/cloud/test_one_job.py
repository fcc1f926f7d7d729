"""One job, and never two: commands at the same moment in two folders, a slow creation, a list that is behind.

Each command is a process of its own, as on two machines.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import cloud_runs
from cloud_runs import RUN_ID, Cloud
from command_child import program
from hub_emulator import Fault, Hub, JobFault
from hub_models import add_model
from waiting import wait_until

pytestmark = pytest.mark.slow

pytest.importorskip("huggingface_hub")

CREATE = "POST /api/jobs/me$"
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
SAID = ("submit", "--model", MODEL, "--data", "rows.jsonl", "--max-steps", "2", "--yes")
SLEEP = "import time; print('begun', flush=True); time.sleep(60)"


@pytest.fixture
def hub(hub: Hub) -> Hub:
    """Its jobs wait for a machine until they are ended."""
    hub.faults.add_job(JobFault("stuck", attempt=None))
    add_model(hub)
    return hub


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """A run whose first job was cancelled."""
    with Hub(tmp_path / "hub") as server:
        made = cloud_runs.cloud(server, tmp_path, monkeypatch)
        job = made.start(SLEEP)
        job.cancelled.set()
        wait_until(lambda: job.ended, 60)
        server.faults.add_job(JobFault("stuck", attempt=None))
        yield made
    assert server.unknown == []


def test_two_folders_submit_at_the_same_moment(hub: Hub, tmp_path: Path) -> None:
    """Both are asked for before either is there."""
    hub.faults.add(CREATE, Fault(seconds=1.5), times=2)
    children = [_start(hub, tmp_path, _folder(tmp_path, name), *SAID) for name in ("one", "two")]
    answers = [_answer(child) for child in children]
    assert hub.jobs_created == 1
    assert [code for code, _ in answers] == [0, 0]
    assert sorted(answer["data"]["reused"] for _, answer in answers) == [False, True]
    assert {answer["data"]["job_id"] for _, answer in answers} == {hub.jobs.all[0].id}


def test_two_copies_of_a_run_go_on_at_the_same_moment(cloud: Cloud, tmp_path: Path) -> None:
    shutil.copytree(cloud.run.path, tmp_path / "copy")
    cloud.hub.faults.add(CREATE, Fault(seconds=1.5), times=2)
    children = [_start(cloud.hub, tmp_path, tmp_path, "resume", name, "--yes") for name in ("run", "copy")]
    answers = [_answer(child) for child in children]
    assert cloud.hub.jobs_created == 2  # the first, and one more
    assert [(code, answer["data"]["attempt"]) for code, answer in answers] == [(0, 2), (0, 2)]
    assert sorted(answer["data"]["reused"] for _, answer in answers) == [False, True]


def test_a_slow_creation_and_an_immediate_retry(hub: Hub, tmp_path: Path) -> None:
    """The job appears long after the first command has given up, and before the time is over in which it may."""
    folder = _folder(tmp_path, "one")
    hub.faults.add(CREATE, Fault(seconds=6.0))
    first = _start(hub, tmp_path, folder, *SAID, TEST_REQUEST_SECONDS="1")
    wait_until(lambda: bool(hub.log) and hub.log[-1].path.endswith("/api/jobs/me") and hub.log[-1].method == "POST", 60)
    time.sleep(1.5)  # it waits no more for an answer, and looks
    first.send_signal(signal.SIGKILL)
    first.wait(10)
    code, answer = _answer(_start(hub, tmp_path, folder, *SAID, TEST_SETTLED_SECONDS="20"))
    assert (code, answer["data"]["reused"], hub.jobs_created) == (0, True, 1)


@pytest.mark.parametrize("other", [False, True], ids=["the same folder", "another folder"])
def test_killed_after_the_request_with_a_list_that_is_behind(hub: Hub, tmp_path: Path, other: bool) -> None:
    hub.jobs.listed_after_seconds = 5.0
    hub.faults.add(CREATE, Fault(200, after=True, drop_seconds=1.0))
    first = _start(hub, tmp_path, _folder(tmp_path, "one"), *SAID)
    wait_until(lambda: hub.jobs_created == 1, 60)
    first.send_signal(signal.SIGKILL)
    first.wait(10)
    folder = _folder(tmp_path, "two") if other else tmp_path / "one"
    code, answer = _answer(_start(hub, tmp_path, folder, *SAID, TEST_SETTLED_SECONDS="20"))
    assert (code, answer["data"]["reused"], hub.jobs_created) == (0, True, 1)


def test_a_second_job_of_one_request_is_cancelled(hub: Hub, tmp_path: Path) -> None:
    """The first answer was an error, so it was asked again; then both came to be. The younger one ends."""
    hub.faults.add(CREATE, Fault(500, seconds=0.0))
    child = _start(hub, tmp_path, _folder(tmp_path, "one"), *SAID, TEST_SETTLED_SECONDS="6")
    wait_until(lambda: hub.jobs_created == 1, 60)
    [job] = hub.jobs.all
    wait_until(lambda: time.time() - job.created > 0.01, 60)  # the Hub dates jobs to the millisecond
    late = hub.jobs.create(job.spec | {"secrets": job.secrets}, "me", "me")
    code, answer = _answer(child)
    assert (code, answer["data"]["job_id"], late.stage, job.stage) == (0, job.id, "CANCELED", "SCHEDULING")


def test_a_claim_that_was_left_does_not_hold_for_ever(hub: Hub, tmp_path: Path) -> None:
    """Killed before the request: there is no job, and after the time in which one may come another folder starts it."""
    hub.faults.add(CREATE, Fault(0, seconds=1.0), times=1)
    first = _start(hub, tmp_path, _folder(tmp_path, "one"), *SAID)
    wait_until(lambda: any(r.method == "POST" and r.path == "/api/jobs/me" for r in hub.log), 60)
    first.send_signal(signal.SIGKILL)
    first.wait(10)
    two = _folder(tmp_path, "two")
    code, answer = _answer(_start(hub, tmp_path, two, *SAID))
    if code == 8:
        assert answer["error"]["code"] == "started_elsewhere" and hub.jobs_created == 0
        code, answer = _answer(_start(hub, tmp_path, two, *SAID))
    assert (code, answer["data"]["reused"], hub.jobs_created) == (0, False, 1)


def test_a_refusal_holds_nobody_up(hub: Hub, tmp_path: Path) -> None:
    """There is no job, and the next may be asked for at once, from any folder."""
    hub.faults.add(CREATE, Fault(402))
    assert _answer(_start(hub, tmp_path, _folder(tmp_path, "one"), *SAID))[0] == 4
    began = time.monotonic()
    code, answer = _answer(_start(hub, tmp_path, _folder(tmp_path, "two"), *SAID, TEST_SETTLED_SECONDS="120"))
    assert (code, answer["data"]["reused"], hub.jobs_created) == (0, False, 1) and time.monotonic() - began < 60


def test_the_ceiling_holds_for_all_jobs_of_a_run(cloud: Cloud) -> None:
    """Ten minutes of a t4-small at $0.40 an hour are 6.7 cents; the first job ran 15 minutes, which are 10."""
    first = cloud.record.jobs[0]
    ended = msgspec.structs.replace(first, stage="CANCELED", seconds=900.0, cost_usd=0.10, max_cost=0.15)
    cloud.write(cloud.record.with_job(ended))
    done = cloud.on("resume", "--timeout", "10m", "--yes")
    assert (*done.error, cloud.hub.jobs_created) == (3, "over_budget", 1)
    assert "$0.10" in done.answer["error"]["got"]
    assert cloud.on("resume", "--timeout", "10m", "--max-cost", "0.17", "--yes").data["attempt"] == 2
    assert cloud.hub.jobs.all[1].labels["run"] == RUN_ID


# --- Helpers ---


def _folder(tmp_path: Path, name: str) -> Path:
    made = tmp_path / name
    made.mkdir()
    rows = ({"prompt": f"What is late {n}?", "completion": "The ticket."} for n in range(40))
    (made / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


def _start(hub: Hub, root: Path, folder: Path, *words: str, **more: str) -> subprocess.Popen[str]:
    env = hub.environment(root / "home") | more
    pipe = subprocess.PIPE
    return subprocess.Popen(
        program(*words, "--format", "json"), cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True
    )


def _answer(child: subprocess.Popen[str]) -> tuple[int, dict[str, Any]]:
    out, err = child.communicate(timeout=120)
    assert "Traceback" not in err, err
    answer: dict[str, Any] = json.loads(out)
    return child.returncode, answer
