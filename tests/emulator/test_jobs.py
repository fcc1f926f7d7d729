"""Jobs of the Hub for tests: the unmodified client submits them, they really run, and the client follows them."""

from __future__ import annotations

import json
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest

from hub_emulator import Fault, Hub
from waiting import wait_until

pytestmark = pytest.mark.slow

hf = pytest.importorskip("huggingface_hub")
errors = pytest.importorskip("huggingface_hub.errors")

SLEEP = "import time; print('begun', flush=True); time.sleep(60)"


@pytest.fixture
def hub(hub: Hub) -> Hub:
    hub.jobs.grace_seconds = 0.5
    return hub


def _run(api: Any, program: str, **more: Any) -> Any:
    """A job that runs a Python program."""
    command = ["python", "-c", textwrap.dedent(program)]
    return api.run_job(image="python:3.12", command=command, namespace="me", **more)


def _wait(api: Any, job: Any, seconds: float = 20) -> Any:
    return api.wait_for_job(job_id=job.id, namespace="me", timeout=seconds, poll_interval=0.05)


def _logs(api: Any, job: Any, **more: Any) -> list[str]:
    return list(api.fetch_job_logs(job_id=job.id, namespace="me", **more))


# --- One job ---


def test_a_job_runs_and_says_what_it_is(hub: Hub, api: Any) -> None:
    job = _run(api, "print('hello')", flavor="t4-small", timeout="1.5h", labels={"run": "a"}, env={"FOO": "bar"})
    assert (job.status.stage, job.url) == ("SCHEDULING", f"{hub.endpoint}/jobs/me/{job.id}")
    done = _wait(api, job)
    assert (done.status.stage, done.status.message) == ("COMPLETED", None)
    assert (done.flavor, done.docker_image, done.environment) == ("t4-small", "python:3.12", {"FOO": "bar"})
    assert (done.labels["run"], done.retry, done.owner.name) == ("a", 0, "me")
    assert done.created_at <= done.started_at <= done.finished_at
    assert _logs(api, job) == ["hello"]
    assert (hub.jobs_created, hub.jobs.all[0].spec["timeoutSeconds"]) == (1, 5400)


def test_a_job_has_its_own_environment_only(hub: Hub, api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "x")
    program = "import os, json; print(json.dumps(dict(os.environ)))"
    job = _run(api, program, env={"FOO": "bar"}, secrets={"KEY": "value"}, flavor="t4-small")
    _wait(api, job)
    environment = json.loads(_logs(api, job)[0])
    added = {"LC_CTYPE", "PWD", "SHLVL", "_", "__CF_USER_TEXT_ENCODING"}  # by Python or the system
    own = {"PATH", "HOME", "HF_ENDPOINT", "JOB_ID", "ACCELERATOR", "CPU_CORES", "MEMORY"}
    assert set(environment) - added == own | {"FOO", "KEY"}
    assert (environment["HF_ENDPOINT"], environment["JOB_ID"], environment["CPU_CORES"]) == (hub.endpoint, job.id, "4")
    assert environment["HOME"].startswith(str(hub.folder))


def test_a_job_uses_the_hub_with_its_secret(hub: Hub, api: Any) -> None:
    program = """
        from huggingface_hub import HfApi
        HfApi().create_repo("me/from-job")
        HfApi().upload_file(path_or_fileobj=b"x", path_in_repo="x.txt", repo_id="me/from-job")
    """
    job = _run(api, program, secrets={"HF_TOKEN": hub.token})
    assert _wait(api, job).status.stage == "COMPLETED", _logs(api, job)
    assert "x.txt" in api.list_repo_files("me/from-job")


def test_secrets_are_nowhere_but_in_the_job(hub: Hub, api: Any, folder: Path) -> None:
    secret = "s3cret-value-of-a-key"
    job = _run(api, "print('done')", secrets={"HF_TOKEN": hub.token, "KEY": secret}, env={"SHOWN": "yes"})
    _wait(api, job)
    listed = [vars(j) for j in api.list_jobs(namespace="me")]
    again = api.rerun_job(job_id=job.id, namespace="me")
    _wait(api, again)
    texts = [p.read_bytes().decode(errors="replace") for p in hub.folder.rglob("*") if p.is_file()]
    records = [repr(hub.log), repr(hub.jobs.all), repr(listed), repr(api.inspect_job(job_id=job.id, namespace="me"))]
    for text in (*texts, *records, repr(hub.faults.struck)):
        assert secret not in text
        assert hub.token not in text
    assert api.inspect_job(job_id=job.id, namespace="me").secrets == ["HF_TOKEN", "KEY"]
    assert [j.secrets["KEY"] for j in hub.jobs.all] == [secret, secret]


@pytest.mark.parametrize(
    "spec",
    [
        {"secrets": {"HF_TOKEN": "hf_" + "a1B2c3D4e5" * 3 + "f6G7"}},  # it looks like a real one
        {"flavor": "moon"},
        {"labels": {"run": "a b"}},
        {"volumes": [{"type": "bucket", "source": "me/b", "mountPath": "relative"}]},
    ],
)
def test_a_job_that_cannot_be(hub: Hub, api: Any, spec: dict[str, Any]) -> None:
    volumes = [hf.Volume(**volume) for volume in spec.pop("volumes", [])]
    with pytest.raises(errors.BadRequestError):
        _run(api, "", volumes=volumes, **spec)
    assert hub.jobs_created == 0


def test_a_token_without_the_right_to_run_jobs(hub: Hub) -> None:
    api = hf.HfApi(endpoint=hub.endpoint, token=hub.new_token("fineGrained", ("repo.write",)))
    with pytest.raises(errors.HfHubHTTPError, match=r"missing permissions: job\.write"):
        _run(api, "")
    with pytest.raises(errors.JobNotFoundError):
        api.inspect_job(job_id="0" * 24, namespace="me")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "folder"
    made.mkdir()
    return made


def test_a_script_of_this_machine_with_its_file(hub: Hub, api: Any, folder: Path, tmp_path: Path) -> None:
    """`run_uv_job` uploads both; the script finds its file beside itself, and what it writes there comes back."""
    (folder / "train.py").write_text(
        "import pathlib, sys\nspec = pathlib.Path(sys.argv[2])\nprint(spec.read_text())\n"
        "(spec.parent / 'out.txt').write_text('written by the job')\n"
    )
    (folder / "run.json").write_text('{"steps": 2}')
    job = api.run_uv_job(
        str(folder / "train.py"),
        script_args=["--spec", str(folder / "run.json")],
        dependencies=["torch==2.8"],
        python="3.12",
        namespace="me",
    )
    assert job.command[:2] == ["uv", "run"]
    assert job.command[-3:] == ["/data/train.py", "--spec", "/data/run.json"]
    assert _wait(api, job).status.stage == "COMPLETED"
    assert _logs(api, job) == ['{"steps": 2}']
    [volume] = job.volumes
    api.sync_bucket(f"hf://buckets/{volume.source}/{volume.path}", str(tmp_path / "back"), quiet=True)
    assert (tmp_path / "back" / "out.txt").read_text() == "written by the job"


# --- Volumes ---


def test_volumes_are_mounted_where_the_command_says(hub: Hub, api: Any, folder: Path) -> None:
    """A bucket, a folder of it that may not be written, and a model; nothing comes back into the last two."""
    (folder / "in.txt").write_text("input")
    hub.add("model", "me/model", {"config.json": b"{}", "sub/x.txt": b"x"})
    api.create_bucket("me/out")
    volumes = [
        api.sync_job_volume(folder, "/inputs", namespace="me"),
        hf.Volume(type="bucket", source="me/out", mount_path="/outputs"),
        hf.Volume(type="model", source="me/model", mount_path="/model"),
    ]
    program = """
        import contextlib, os, pathlib, sys
        assert pathlib.Path(sys.argv[1]).read_text() == "input"
        with contextlib.suppress(PermissionError):  # root may, and it is of no use
            pathlib.Path("/inputs/new.txt").write_text("x")
        assert pathlib.Path("/model/config.json").read_text() == "{}"
        assert sorted(os.listdir("/model")) == ["config.json", "sub"]
        assert oct(pathlib.Path("/model/config.json").stat().st_mode)[-3:] == "444"
        out = pathlib.Path(os.environ["OUT"])
        out.mkdir()
        (out / "result.txt").write_text("result")
    """
    command = ["python", "-c", textwrap.dedent(program), "/inputs/in.txt"]
    job = api.run_job(
        image="python:3.12", command=command, namespace="me", volumes=volumes, env={"OUT": "/outputs/deep"}
    )
    assert _wait(api, job).status.stage == "COMPLETED", _logs(api, job)
    assert [f.path for f in api.list_bucket_tree("me/out", recursive=True)] == ["deep/result.txt"]
    assert len(list(api.list_bucket_tree("me/jobs-artifacts", recursive=True))) == 1
    assert not (hub.folder / "jobs" / job.id / "1").exists()  # a container leaves nothing


@pytest.mark.parametrize(
    "volume",
    [("bucket", "me/none", None), ("model", "me/none", None), ("bucket", "me/empty", "nothing")],
)
def test_a_volume_that_is_not_there(hub: Hub, api: Any, volume: tuple[str, str, str | None]) -> None:
    api.create_bucket("me/empty")
    kind, source, path = volume
    job = _run(api, "", volumes=[hf.Volume(type=kind, source=source, mount_path="/x", path=path)])
    done = _wait(api, job)
    assert done.status.stage == "ERROR"
    assert "not found" in done.status.message


def test_attempts_go_on_with_what_is_in_the_volume(hub: Hub, api: Any) -> None:
    """The container's own disk is new each time."""
    api.create_bucket("me/keep")
    program = """
        import pathlib
        count = pathlib.Path("/keep/count")
        assert not pathlib.Path("mine").exists()
        pathlib.Path("mine").write_text("x")
        done = int(count.read_text()) if count.exists() else 0
        count.write_text(str(done + 1))
        print("attempt", done + 1)
        raise SystemExit(0 if done == 2 else 3)
    """
    volume = hf.Volume(type="bucket", source="me/keep", mount_path="/keep")
    job = _run(api, program, volumes=[volume], attempts=3)
    done = _wait(api, job)
    assert (done.status.stage, done.retry) == ("COMPLETED", 2)
    assert _logs(api, job) == ["attempt 1", "attempt 2", "attempt 3"]
    assert sum(line.startswith("===== Job started") for line in hub.jobs.all[0].lines) == 3
    failed = _wait(api, _run(api, "raise SystemExit(3)", attempts=2))
    assert failed.status.message == "Job failed with exit code: 3. Reason: Error"
    assert hub.jobs.all[1].starts == 2


def test_what_a_running_job_has_written_can_be_seen(hub: Hub, api: Any) -> None:
    hub.jobs.sync_seconds = 0.1
    api.create_bucket("me/keep")
    program = "import pathlib, time; pathlib.Path('/keep/first').write_text('x'); time.sleep(60)"
    job = _run(api, program, volumes=[hf.Volume(type="bucket", source="me/keep", mount_path="/keep")])
    wait_until(lambda: [f.path for f in api.list_bucket_tree("me/keep", recursive=True)] == ["first"], 10)
    assert api.inspect_job(job_id=job.id, namespace="me").status.stage == "RUNNING"


# --- The end of a job ---


# It leaves a process behind that does not listen to SIGTERM.
STUBBORN = """
    import signal, subprocess, sys, time
    deaf = "from signal import *; import time; signal(SIGTERM, SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
    child.stdout.readline()
    print(child.pid, flush=True)
    time.sleep(float(sys.argv[1]))
"""


@pytest.mark.parametrize(("seconds", "stage", "message"), [("60", "ERROR", "Job timeout"), ("0", "COMPLETED", None)])
def test_nothing_of_a_job_stays_behind(hub: Hub, api: Any, seconds: str, stage: str, message: str | None) -> None:
    command = ["python", "-c", textwrap.dedent(STUBBORN), seconds]
    job = api.run_job(image="x", command=command, namespace="me", timeout=1, attempts=3)
    done = _wait(api, job)
    assert (done.status.stage, done.status.message, hub.jobs.all[0].starts) == (stage, message, 1)
    wait_until(lambda: not _alive(_logs(api, job)[0]), 5)


def _alive(pid: str) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True).stdout.strip()
    return state != "" and not state.startswith("Z")


def test_cancelling(hub: Hub, api: Any) -> None:
    job = _run(api, SLEEP)
    wait_until(lambda: "begun" in hub.jobs.all[0].lines, 10)
    with pytest.raises(TimeoutError):
        _wait(api, job, seconds=0.1)
    api.cancel_job(job_id=job.id, namespace="me")
    assert _wait(api, job).status.stage == "CANCELED"


@pytest.mark.parametrize("command", [["no-such-program"], ["bash", "-c", "kill -9 $$"]])
def test_a_command_that_cannot_run_and_one_that_is_killed(hub: Hub, api: Any, command: list[str]) -> None:
    done = _wait(api, api.run_job(image="x", command=command, namespace="me"))
    code = "127. Reason: Error" if len(command) == 1 else "137. Reason: OOMKilled"
    assert done.status.message == f"Job failed with exit code: {code}"


# --- Following ---


def test_a_log_is_followed_while_the_job_runs_and_across_cuts(hub: Hub, api: Any) -> None:
    """Each line once and in order, from a stream that is cut twice and begins anew each time."""
    hub.faults.add("GET /api/jobs/me/.*/logs", Fault(cut=3))
    hub.faults.add("GET /api/jobs/me/.*/logs", Fault(cut=6), call=2)
    program = "import time\nfor n in range(10):\n    print('line', n, flush=True)\n    time.sleep(0.25)"
    job = _run(api, program)
    assert _logs(api, job, follow=True) == [f"line {n}" for n in range(10)]
    assert sum(request.path.endswith("/logs") for request in hub.log) == 3


def test_the_client_gives_up_on_a_stream_that_is_cut_when_the_job_has_ended(hub: Hub, api: Any) -> None:
    """Known of huggingface_hub 2.4.0: it looks at the stage after a cut, and does not ask for the rest."""
    job = _run(api, "for n in range(10): print('line', n)")
    _wait(api, job)
    hub.faults.add("GET /api/jobs/me/.*/logs", Fault(cut=3))
    assert _logs(api, job, follow=True) == ["line 0", "line 1"]
    assert len(_logs(api, job, follow=True)) == 10


def test_a_log_may_end_before_its_job(hub: Hub, api: Any) -> None:
    """The client asks for the stage, and for the log again, and says each line once."""
    hub.jobs.lag_seconds = 1.0
    job = _run(api, "print('hello')")
    assert _logs(api, job, follow=True) == ["hello"]
    assert sum(request.path.endswith(job.id) for request in hub.log) == 2


def test_the_end_of_a_log(hub: Hub, api: Any) -> None:
    job = _run(api, "for n in range(10): print('line', n)")
    _wait(api, job)
    assert _logs(api, job, tail=2) == ["line 8", "line 9"]
    assert len(_logs(api, job)) == 10


def test_metrics_of_a_running_job(hub: Hub, api: Any) -> None:
    job = _run(api, SLEEP, flavor="t4-small")
    wait_until(lambda: "begun" in hub.jobs.all[0].lines, 10)
    [sample] = api.fetch_job_metrics(job_id=job.id, namespace="me")
    assert sample["memory_total_bytes"] == 15_000_000_000
    api.cancel_job(job_id=job.id, namespace="me")
    assert list(api.fetch_job_metrics(job_id=job.id, namespace="me", follow=True)) == []
    assert (hub.log[-2].path.endswith("/metrics"), hub.log[-2].status) == (True, 406)


def test_jobs_are_found_by_label_and_stage_in_pages(hub: Hub, api: Any) -> None:
    hub.page = 2
    ids = [_run(api, f"raise SystemExit({n % 2})", labels={"run": f"r{n % 2}"}).id for n in range(5)]
    for job_id in ids:
        api.wait_for_job(job_id=job_id, namespace="me", timeout=20, poll_interval=0.05)
    assert [job.id for job in api.list_jobs(namespace="me")] == ids[::-1]
    assert [job.id for job in api.list_jobs(namespace="me", labels={"run": "r1"})] == [ids[3], ids[1]]
    assert len(list(api.list_jobs(namespace="me", status=["COMPLETED", "RUNNING"]))) == 3
    assert list(api.list_jobs(namespace="me", labels={"run": "r1"}, status="COMPLETED")) == []
    changed = api.update_job_labels(job_id=ids[0], labels={"kept": "1"}, namespace="me")
    assert changed.labels == {"kept": "1"}


def test_hardware_with_its_prices(hub: Hub, api: Any) -> None:
    """Prices: huggingface.co/docs/hub/jobs-pricing, 2026-08-22."""
    hardware = {row.name: row for row in api.list_jobs_hardware()}
    assert {str(flavor.value) for flavor in hf.JobHardware} == set(hardware)
    assert hardware["t4-small"].unit_cost_usd * 60 == pytest.approx(0.40, abs=0.001)
    eight = hardware["l40sx8"].accelerator
    assert (eight.model, eight.quantity, eight.vram, hardware["cpu-basic"].accelerator) == ("L40S", "8", "384 GB", None)
