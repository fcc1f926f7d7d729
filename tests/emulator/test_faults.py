"""Faults of requests and of jobs in the Hub for tests, as the unmodified client sees each of them."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hub_emulator import ALWAYS, Fault, Hub, JobFault, faults

pytestmark = pytest.mark.slow

hf = pytest.importorskip("huggingface_hub")
errors = pytest.importorskip("huggingface_hub.errors")

SLEEP = "import time; print('begun', flush=True); time.sleep(60)"
CREATE, INSPECT = "POST /api/jobs/me$", r"GET /api/jobs/me/[0-9a-f]{24}$"


def _submit(api: Any, program: str = "print('hello')", **more: Any) -> Any:
    return api.run_job(image="x", command=["python", "-c", textwrap.dedent(program)], namespace="me", **more)


def _wait(api: Any, job: Any, seconds: float = 20) -> Any:
    return api.wait_for_job(job_id=job.id, namespace="me", timeout=seconds, poll_interval=0.05)


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        (faults.UNAUTHORIZED, 401, "Invalid credentials"),
        (faults.NO_CREDIT, 402, "Pre-paid credit balance is insufficient"),
        (faults.NO_PERMISSION, 403, "required permissions"),
        (faults.NOT_FOUND, 404, ""),
        (faults.RATE_LIMIT, 429, "Retry after 1 seconds"),
        (faults.SERVER_ERROR, 500, ""),
        (faults.BAD_GATEWAY, 502, ""),
    ],
)
def test_a_job_that_is_refused_is_not_created(hub: Hub, api: Any, fault: Fault, status: int, words: str) -> None:
    """Once; the next is created."""
    hub.faults.add(CREATE, fault)
    with pytest.raises(errors.HfHubHTTPError) as raised:
        _submit(api)
    assert raised.value.response.status_code == status
    assert words in str(raised.value)
    assert (hub.jobs_created, hub.faults.struck) == (0, [f"POST /api/jobs/me: {status}"])
    _submit(api)
    assert hub.jobs_created == 1


def test_a_connection_that_breaks_before_the_job_is_created(hub: Hub, api: Any) -> None:
    hub.faults.add(CREATE, faults.NO_ANSWER)
    with pytest.raises(errors.HTTPError, match="disconnected"):
        _submit(api)
    assert hub.jobs_created == 0


@pytest.mark.parametrize("fault", [faults.DONE_AND_ERROR, faults.DONE_AND_NO_ANSWER])
def test_an_error_after_the_job_was_created(hub: Hub, api: Any, fault: Fault) -> None:
    """The label is how the client finds it."""
    hub.faults.add(CREATE, fault)
    with pytest.raises(errors.HTTPError):
        _submit(api, labels={"run": "abc"})
    assert hub.jobs_created == 1
    [job] = api.list_jobs(namespace="me", labels={"run": "abc"})
    assert _wait(api, job).status.stage == "COMPLETED"


def test_polling_dies_at_the_first_bad_gateway_and_the_job_does_not(hub: Hub, api: Any) -> None:
    job = _submit(api)
    hub.faults.add(INSPECT, faults.BAD_GATEWAY, call=2, times=2)
    assert api.inspect_job(job_id=job.id, namespace="me").id == job.id
    for _ in range(2):
        with pytest.raises(errors.HfHubHTTPError, match="502"):
            api.inspect_job(job_id=job.id, namespace="me")
    assert _wait(api, job).status.stage == "COMPLETED"


def test_what_the_client_asks_again_by_itself(hub: Hub, api: Any, tmp_path: Path) -> None:
    """A folder's commit is one of these things, and a single file's is not (huggingface_hub 2.4.0)."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.txt").write_text("x")
    api.create_repo("me/model")
    hub.faults.add("POST .*/preupload", faults.RATE_LIMIT)
    hub.faults.add("POST .*/commit", Fault(503))
    api.upload_folder(repo_id="me/model", folder_path=tmp_path / "folder")
    assert [struck[-3:] for struck in hub.faults.struck] == ["429", "503"]
    assert "x.txt" in api.list_repo_files("me/model")
    hub.faults.add("POST .*/commit", Fault(503))
    with pytest.raises(errors.HfHubHTTPError, match="503"):
        api.upload_file(path_or_fileobj=b"y", path_in_repo="y.txt", repo_id="me/model")


@pytest.mark.parametrize(
    ("pattern", "fault", "error"),
    [
        ("POST /api/buckets/me/bucket$", faults.UNAUTHORIZED, "HfHubHTTPError"),
        ("GET /api/buckets/.*xet-write-token", faults.NO_PERMISSION, "Exception"),
        ("POST /cas/.*/xorbs", faults.NO_PERMISSION, "Exception"),
        ("POST /api/buckets/me/bucket/batch", faults.NO_CREDIT, "HfHubHTTPError"),
    ],
)
def test_each_step_of_filling_a_bucket_can_fail(hub: Hub, api: Any, pattern: str, fault: Fault, error: str) -> None:
    """Nothing is in the bucket then; afterwards the same call works."""
    hub.faults.add(pattern, fault, times=ALWAYS)
    fill: Callable[[], Any] = lambda: (  # noqa: E731
        api.create_bucket("me/bucket", exist_ok=True),
        api.batch_bucket_files("me/bucket", add=[(b"some words", "x.txt")]),
    )
    with pytest.raises(getattr(errors, error, Exception)):
        fill()
    assert not hub.buckets.get("me/bucket") or not hub.buckets["me/bucket"].files
    hub.faults.clear()
    fill()
    assert [f.path for f in api.list_bucket_tree("me/bucket")] == ["x.txt"]


def test_late_answers_and_answers_in_drops(hub: Hub, api: Any) -> None:
    hub.faults.add("GET /api/whoami-v2", Fault(seconds=0.4))
    begun = time.monotonic()
    assert api.whoami()["name"] == "me"
    assert time.monotonic() - begun > 0.4
    hub.faults.add("GET /api/jobs/hardware", Fault(body=b"[]  ", drop_seconds=0.1))
    begun = time.monotonic()
    assert api.list_jobs_hardware() == []
    assert time.monotonic() - begun > 0.3


def test_the_schedule_counts_calls(hub: Hub, api: Any) -> None:
    """The second and the third of the five."""
    hub.faults.add("GET /api/whoami", Fault(503), call=2, times=2)
    answers = []
    for _ in range(5):
        try:
            answers.append(api.whoami()["name"])
        except errors.HfHubHTTPError as error:
            answers.append(str(error.response.status_code))
    assert answers == ["me", "503", "503", "me", "me"]
    assert hub.faults.struck == ["GET /api/whoami-v2: 503"] * 2


# --- Jobs ---


@pytest.mark.parametrize(
    ("fault", "message", "starts"),
    [
        (JobFault("exit", code=3), "Job failed with exit code: 3. Reason: Error", 1),
        (JobFault("exit", line="begun"), "Job failed with exit code: 137. Reason: OOMKilled", 1),
        (JobFault("exit", seconds=0.4, attempt=None), "Job failed with exit code: 137. Reason: OOMKilled", 1),
        (JobFault("timeout", line="begun"), "Job timeout", 1),
        (JobFault("exit", job=2), "Job timeout", 1),
    ],
)
def test_a_planned_end(hub: Hub, api: Any, fault: JobFault, message: str, starts: int) -> None:
    hub.faults.add_job(fault)
    done = _wait(api, _submit(api, SLEEP, timeout=2))
    assert (done.status.stage, done.status.message, hub.jobs.all[0].starts) == ("ERROR", message, starts)


def test_a_job_that_is_started_a_second_time(hub: Hub, api: Any) -> None:
    """A lost node, say: no attempt is used up, and the log has a second beginning."""
    api.create_bucket("me/keep")
    hub.faults.add_job(JobFault("restart", line="begun"))
    program = """
        import pathlib, time
        mark = pathlib.Path("/keep/mark")
        if mark.exists():
            print("begun again", flush=True)
            time.sleep(0.3)
            raise SystemExit
        mark.write_text("x")
        print("begun", flush=True)
        time.sleep(60)
    """
    job = _submit(api, program, volumes=[hf.Volume(type="bucket", source="me/keep", mount_path="/keep")])
    assert _wait(api, job).status.stage == "COMPLETED"
    assert list(api.fetch_job_logs(job_id=job.id, namespace="me")) == ["begun", "begun again"]
    assert sum(line.startswith("===== Job started") for line in hub.jobs.all[0].lines) == 2


def test_a_job_that_never_starts(hub: Hub, api: Any) -> None:
    hub.faults.add_job(JobFault("stuck"))
    job = _submit(api, "print('never')")
    with pytest.raises(TimeoutError, match="SCHEDULING"):
        _wait(api, job, seconds=0.5)
    assert api.inspect_job(job_id=job.id, namespace="me").durations.scheduling_secs is None
    api.cancel_job(job_id=job.id, namespace="me")
    assert _wait(api, job).status.stage == "CANCELED"
