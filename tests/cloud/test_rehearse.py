"""`skill-train submit --rehearse`: what the job will run, here, with a tiny model; nothing is sent, nothing stays."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import cloud_runs
import tiny
import tiny_vision
from command_child import Done, program
from hub_emulator import Hub
from picture_runs import write_rows
from skill_train.cloud.rehearse import rehearse
from skill_train.core import resources
from skill_train.core.errors import TrainingFailed
from skill_train.run import plan_record
from skill_train.run.job_spec import JobSpec

pytestmark = pytest.mark.slow

pytest.importorskip("trl")

SAID = ("--model", "me/tiny", "--data", "rows.jsonl", "--max-length")


@pytest.fixture
def hub(hub: Hub, tmp_path: Path) -> Hub:
    hub.add("model", "me/tiny", {path.name: path.read_bytes() for path in tiny.cached("gemma").iterdir()})
    tiny.write_rows(tmp_path / "rows.jsonl", 24)
    (tmp_path / "tmp").mkdir()
    return hub


def _rehearse(hub: Hub, folder: Path, *arguments: str) -> Done:
    env = hub.environment(folder / "home") | {"TMPDIR": str(folder / "tmp")}
    command = program("submit", *arguments, "--rehearse")
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200)
    assert "Traceback" not in done.stderr, done.stderr
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.mark.torture
def test_a_job_that_trains_every_weight_is_run_here(hub: Hub, tmp_path: Path) -> None:
    """It keeps a model, and no adapter."""
    (tmp_path / "recipe.yaml").write_text("model: me/tiny\ndata: rows.jsonl\nmax_length: 64\nfinetuning_type: full\n")
    done = _rehearse(hub, tmp_path, "recipe.yaml")
    assert done.data["verdict"] in ("pass", "warn") and done.data["steps"] == 2


@pytest.mark.torture
def test_a_job_with_pictures_is_run_here(hub: Hub, tmp_path: Path) -> None:
    """From a folder with exactly the files that a job gets: the program follows no link out of it."""
    base = tiny_vision.cached("gemma3")
    hub.add("model", "me/seeing", {path.name: path.read_bytes() for path in base.iterdir()})
    write_rows(tmp_path / "seen")
    (tmp_path / "recipe.yaml").write_text(
        "model: me/seeing\ndata: seen/rows.jsonl\nmax_length: 256\nlearning_rate: 0.01\nwarmup_steps: 0\n"
    )
    done = _rehearse(hub, tmp_path, "recipe.yaml")
    assert done.data["verdict"] == "pass" and done.data["steps"] == 2
    assert [*(tmp_path / "tmp").glob("skill-train-*")] == []


def test_the_job_is_run_here(hub: Hub, tmp_path: Path) -> None:
    """The very program with the plan's data, two steps, everything kept."""
    done = _rehearse(hub, tmp_path, *SAID, "64")
    data = done.data
    assert (data["verdict"], data["steps"], data["checkpoints"][-1]) == ("pass", 2, "checkpoint-2")
    assert "step 2 of 2" in done.stderr and "device: cpu here, cuda in the job" in done.stderr
    told = " ".join(data["not_rehearsed"])
    for words in ("t4-small trains on 1 x cuda in float32; this was 1 x cpu", "these were 2", "nothing was written"):
        assert words in told, told
    assert done.answer["next"] == [f"skill-train submit {' '.join(SAID)} 64"]
    assert hub.jobs_created == 0
    assert not [request for request in hub.log if request.method not in ("GET", "HEAD")]
    assert [*(tmp_path / "tmp").glob("skill-train-*")] == [] and not (tmp_path / "runs").exists()


def test_what_would_fail_in_the_job_fails_here(hub: Hub, tmp_path: Path) -> None:
    """Every answer is cut away: the plan cannot know, because it does not tokenize."""
    assert _rehearse(hub, tmp_path, *SAID, "2").error == (2, "nothing_to_train")


def test_a_training_that_fails_its_smoke_test_has_no_rehearsal_that_passed(hub: Hub, tmp_path: Path) -> None:
    """`local` ends with exit 5 then, and the job would be paid for. The model of the demo knows something to forget."""
    demo = tmp_path / "demo"
    shutil.copytree(resources.demo(), demo)
    hub.add("model", "me/demo", {path.name: path.read_bytes() for path in (demo / "model").iterdir()})
    recipe = f"model: me/demo\ndata: {demo / 'data.parquet'}\nmax_length: 64\nlearning_rate: 0.2\nwarmup_steps: 0\n"
    (tmp_path / "recipe.yaml").write_text(f"{recipe}finetuning_type: full\n")
    done = _rehearse(hub, tmp_path, "recipe.yaml")
    assert done.error == (5, "smoke_failed"), done.stdout
    assert "loss_falls" in done.answer["error"]["message"]
    assert (done.answer["data"]["verdict"], done.answer["next"]) == ("fail", [])


def test_bytes_of_a_library_that_are_no_text_do_not_hide_the_reason(tmp_path: Path) -> None:
    failure = {"event": "failed", "exit_code": 5, "error": {"code": "bad_loss", "message": "NaN", "hint": "less"}}
    program, planned = tmp_path / "train.py", plan_record.from_dict(cloud_runs.plan(), tmp_path)
    said = b"\xff\n" + json.dumps(failure).encode()
    program.write_text(f"import sys; sys.stdout.buffer.write({said!r}); sys.stdout.flush(); sys.exit(5)")
    spec = JobSpec("me", program, tmp_path / "plan.json", (), "t4-small", 60, {}, {}, "")
    with pytest.raises(TrainingFailed) as refused:
        rehearse(planned, spec, None, print)
    assert refused.value.code == "bad_loss"


def test_what_does_not_fit_here_is_told(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(json.dumps({"load_in_4bit": True, "model": "m", "data": "d"}))
    done = _rehearse(hub, tmp_path, "recipe.yaml", *SAID, "64")
    assert done.error == (3, "cannot_rehearse")
    assert "needs CUDA" in done.answer["error"]["message"] and "--dry-run" in done.answer["error"]["hint"]
