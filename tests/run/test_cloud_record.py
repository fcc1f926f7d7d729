"""`cloud.json`: written, read back, and refused when somebody has changed it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

import planning
from skill_train.core.errors import UsageError
from skill_train.run import plan_record
from skill_train.run.cloud_record import (
    CloudData,
    CloudJob,
    CloudRecord,
    continue_command,
    labels,
    plan_hash,
    read,
    submitted,
    write,
)
from skill_train.run.folder import RunDir

JOB = CloudJob(1, "starting", "t4-small", 3600, "2026-11-21T10:00:00Z", 0.4)
RECORD = CloudRecord("0123456789ab", "0123456789abcdef", "me", "me/tickets", jobs=(JOB,))
LAUNCH: dict[str, Any] = {"arguments": ["--multi_gpu"], "environment": {}, "reasons": []}
PLAN: dict[str, Any] = {"recipe_hash": "ab", "launch": LAUNCH, "flavor": "l4x1"}
PLACEMENT = (
    '{"attn_implementation":"sdpa","backend":"local","device":"cuda","dtype":"bfloat16","gradient_accumulation_steps":1,'
    '"gradient_checkpointing":false,"num_processes":1,"offload":false,"per_device_train_batch_size":16,'
    '"report_to":"none","save_steps":13,"save_total_limit":2,"strategy":"single","threads":null}'
)


def test_it_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    assert read(run) is None
    data = CloudData("/dataset", 10, 1, bucket="me/jobs-artifacts", folder="rows-1")
    record = msgspec.structs.replace(RECORD, data=data)
    write(run, record)
    assert read(run) == submitted(run) == record


def test_the_file_has_the_keys_that_others_read(tmp_path: Path) -> None:
    write(RunDir(tmp_path), RECORD)
    document = json.loads((tmp_path / "cloud.json").read_text())
    assert document["schema"] == "skill-train/cloud/1"
    wanted = ["backend", "run_id", "plan_hash", "namespace", "hub_model_id", "bucket", "folder", "data", "jobs"]
    assert set(document) == {"schema", *wanted}
    assert document["jobs"][0] == {
        "number": 1, "state": "starting", "job_id": None, "url": None, "flavor": "t4-small", "timeout_seconds": 3600,
        "usd_per_hour": 0.4, "asked_at": "2026-11-21T10:00:00Z", "created_at": None,
        "max_cost": None, "stage": None, "ended_at": None, "seconds": None, "cost_usd": None,
    }  # fmt: skip


def test_a_job_that_started_takes_the_place_of_the_one_that_was_asked_for() -> None:
    started = msgspec.structs.replace(JOB, state="started", job_id="a" * 24, url="u", created_at="2026-11-21T10:00:01Z")
    second = msgspec.structs.replace(JOB, number=2)
    record = RECORD.with_job(second).with_job(started)
    assert record.jobs == (started, second) and record.last == second
    assert msgspec.structs.replace(record, jobs=()).last is None


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "skill-train/cloud/2"},
        {"backend": "moon"},
        {"run_id": "no"},
        {"run_id": 5},
        {"jobs": [{"number": 1}]},
        {"jobs": [msgspec.to_builtins(JOB) | {"state": "started"}]},
        {"jobs": [msgspec.to_builtins(JOB) | {"asked_at": "yesterday"}]},
        {"jobs": [msgspec.to_builtins(JOB) | {"created_at": "2026-99-21T10:00:00Z"}]},
        {"jobs": [msgspec.to_builtins(JOB) | {"state": "started", "job_id": "../../models/me/x"}]},
        {"namespace": "me/../you"},
        {"namespace": ".."},
        {"more": 1},
        {"jobs": {}},
        {"hub_model_id": None},
    ],
)
def test_another_file_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    write(RunDir(tmp_path), RECORD)
    file = tmp_path / "cloud.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UsageError) as caught:
        read(RunDir(tmp_path))
    assert caught.value.code == "broken_record"


def test_a_torn_file_is_no_loss_of_its_jobs(tmp_path: Path) -> None:
    """`pull` of the folder, which other records are fetched with, reads this very file."""
    file = tmp_path / "cloud.json"
    write(RunDir(tmp_path), RECORD)
    file.write_text(file.read_text()[:200])
    with pytest.raises(UsageError) as caught:
        read(RunDir(tmp_path))
    assert caught.value.code == "broken_record" and "is not JSON" in caught.value.got
    assert "skill-train pull JOB --run-dir" in caught.value.hint


def test_a_run_that_was_never_submitted(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        submitted(RunDir(tmp_path))
    assert caught.value.code == "missing_step" and "hf jobs ps -a" in caught.value.hint
    assert "is neither a run nor the id of a job" in caught.value.message  # `status` asks it of any folder
    for name in ("recipe.yaml", "train.log"):  # a run that lost its plan: the hint of the other commands
        (tmp_path / name).touch()
    with pytest.raises(UsageError) as caught:
        submitted(RunDir(tmp_path))
    assert caught.value.hint == f"skill-train plan {tmp_path / 'recipe.yaml'} --out {tmp_path / 'plan.json'}"
    (tmp_path / "train.log").unlink()
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(UsageError) as caught:
        submitted(RunDir(tmp_path))
    assert caught.value.hint == f"skill-train submit {tmp_path}"


def test_the_hash_of_a_plan_by_hand() -> None:
    """Canonical JSON, written down by hand."""
    launch = '"launch":{"arguments":["--multi_gpu"],"environment":{}}'
    text = f'{{"flavor":"l4x1",{launch},"placement":{PLACEMENT},"recipe_hash":"ab"}}'
    plan = planning.plan_with(**PLAN, placement=json.loads(PLACEMENT))
    assert plan_hash(plan) == hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"estimates": {"usable_bytes": 1}}, True),
        ({"launch": LAUNCH | {"reasons": [{"rule": "r", "value": "v", "because": "b", "source": "s"}]}}, True),
        ({"flavor": "l4x4"}, False),
        ({"recipe_hash": "cd"}, False),
        ({"placement": {"dtype": "float32"}}, False),
        ({"launch": LAUNCH | {"environment": {"NCCL_DEBUG": "WARN"}}}, False),
    ],
)
def test_what_changes_the_hash(change: dict[str, Any], same: bool) -> None:
    assert (plan_hash(planning.plan_with(**PLAN | change)) == plan_hash(planning.plan_with(**PLAN))) is same


def test_labels_are_what_the_hub_takes() -> None:
    """Letters, digits, - and _, up to 100 of them (the Hub's documentation of jobs, 2026-08)."""
    made = labels(RECORD, 2)
    assert made == {"skill-train": "1", "run": "0123456789ab", "plan": "0123456789abcdef", "attempt": "2"}


@pytest.mark.parametrize(
    ("begun", "hint"),
    [
        # Not the command alone, which would be the next one after `cancel`.
        ("train.log", "it is a run of this machine, which goes on with skill-train local --resume --run-dir {}"),
        ("checkpoints", "it is a run of this machine, which goes on with skill-train local --resume --run-dir {}"),
        ("recipe.yaml", "skill-train submit {}"),
    ],
)
def test_a_run_that_began_here_goes_on_here(tmp_path: Path, begun: str, hint: str) -> None:
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / begun).touch()
    with pytest.raises(UsageError) as caught:
        submitted(RunDir(tmp_path))
    assert (caught.value.code, caught.value.hint) == ("missing_step", hint.format(tmp_path))


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("local", "local --resume --run-dir"),
        ("hf_jobs", "submit"),
        ("colab", "submit --backend colab"),
        ("skypilot", "submit --backend skypilot"),
    ],
)
def test_a_run_without_a_job_goes_on_where_it_was_planned_for(tmp_path: Path, backend: str, words: str) -> None:
    plan = planning.decided_plan("qwen2.5-7b", "m2_pro_16gb", where="cloud", flavor="l40sx1")
    placed = msgspec.structs.replace(plan.placement, backend=backend)
    plan_record.write(tmp_path / "plan.json", msgspec.structs.replace(plan, placement=placed))
    assert continue_command(RunDir(tmp_path)) == f"skill-train {words} {tmp_path}"
