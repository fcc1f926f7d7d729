"""The whole of a run in the cloud, with the real training program: killed, resumed, waited for, pulled, merged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import cloud_runs
from cloud_runs import RUN_ID, Cloud
from hub_emulator import Hub, JobFault
from training import metrics, write_run

pytest.importorskip("huggingface_hub")
pytest.importorskip("trl")


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Cloud]:
    with Hub(tmp_path / "hub") as hub:
        yield cloud_runs.cloud(hub, tmp_path, monkeypatch, capsys)
    assert hub.unknown == []


def test_a_run_that_is_killed_and_resumed_comes_home(cloud: Cloud) -> None:
    from skill_train import job_once, jobs
    from skill_train.cloud_record import CloudJob, CloudRecord

    run = write_run(cloud.run.path)
    plan = json.loads((run / "plan.json").read_text())
    plan |= {"policy": {"sensitive": False, "hub_model_id": "me/tickets"}, "flavor": "t4-small", "timeout_seconds": 600}
    (run / "plan.json").write_text(json.dumps(plan))
    record = CloudRecord(RUN_ID, "1" * 16, "me", "me/tickets")
    asked = CloudJob(1, "starting", "t4-small", 600, job_once.now(), 0.4)
    spec = job_once.specification(cloud.run, plan, record, asked)
    cloud.hub.faults.add_job(JobFault("exit", code=1, line='"step", "step": 5', job=1))
    job_once.start(cloud.run, record, asked, lambda: jobs.start(spec), lambda _: None)

    lost = cloud.on("wait")
    assert (lost.exit_code, lost.data["stage"], lost.error["code"]) == (5, "ERROR", "job_failed")
    assert cloud.on("resume", "--yes").data["attempt"] == 2
    done = cloud.on("wait")
    assert (done.exit_code, done.data["step"], done.data["steps"]) == (0, 8, 8), cloud.hub.jobs.all[1].lines
    assert any("checkpoint-4" in line for line in cloud.hub.jobs.all[1].lines)
    pulled = cloud.on("pull")
    assert (pulled.exit_code, pulled.data["trained"], pulled.data["checkpoint"]) == (0, True, 8)
    assert [line["step"] for line in metrics(run)] == list(range(1, 9))
    assert cloud.on("merge").exit_code == 0
    assert (run / "merged" / "model.safetensors").is_file()
