"""A job that trains on pictures, on the Hub for tests: whatever happens to it, its bytes are those of a local run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import tiny_vision
import training
from hub_emulator import Hub, JobFault
from picture_runs import rows_of_colours, write_run
from skill_train.machine.training_program import train_program
from waiting import wait_until

pytestmark = pytest.mark.slow

pytest.importorskip("trl")

STEPS = 12
LONGER = 48  # steps, which take longer than the 2 s between two looks of a job for checkpoints to keep

# Submits the plan of a run directory, or goes on with it, and says the id of the job.
ASK = """
import sys
from pathlib import Path
from msgspec.structs import replace
from skill_train.cloud import resume, submit
from skill_train.cloud.submit import Order
from skill_train.cloud.stage_data import stage_plan
from skill_train.run import plan_record
from skill_train.run.folder import RunDir
command, local, run = sys.argv[1], Path(sys.argv[2]), RunDir(Path(sys.argv[3]))
if command == "submit":
    plan = plan_record.read(local / "plan.json")
    plan = replace(plan, flavor="cpu-basic", timeout_seconds=600, policy=replace(plan.policy, hub_model_id="me/seen"))
    submit.submit(run, Order(plan, "me", None, stage_plan(plan), None), force_new=False)
else:
    resume.resume(run, flavor="cpu-basic", timeout_seconds=600, usd_per_hour=None, max_cost=None)
"""


def _beside(folder: Path) -> Path:
    return training.write_data(folder, rows_of_colours(folder))


def _image_folder(folder: Path) -> Path:
    rows = rows_of_colours(folder / "train")
    rows = [{"file_name": row["images"][0], "messages": row["messages"]} for row in rows]
    training.write_data(folder / "train", rows, "metadata.jsonl")
    return folder


def _parquet(folder: Path) -> Path:
    import datasets

    rows = rows_of_colours(folder / "files")
    for row in rows:
        row["images"] = [{"bytes": (folder / "files" / name).read_bytes(), "path": name} for name in row["images"]]
    datasets.Dataset.from_list(rows).to_parquet(str(folder / "rows.parquet"))
    shutil.rmtree(folder / "files")
    return folder / "rows.parquet"


@pytest.fixture
def hub(hub: Hub, warm_python: Path) -> Hub:
    """`test_job` starts jobs as their containers do."""
    hub.jobs.warm_python = warm_python
    return hub


@pytest.mark.parametrize(
    "write",
    [
        _beside,
        pytest.param(_image_folder, marks=pytest.mark.torture),
        pytest.param(_parquet, marks=pytest.mark.torture),
    ],
)
def test_killed_and_gone_on_it_ends_with_the_bytes_of_a_local_run(hub: Hub, tmp_path: Path, write: Any) -> None:
    """The first job dies when it has kept a checkpoint. Then the pictures of this machine are gone: the second has all
    that it needs."""
    data = write(tmp_path / "rows")
    local = write_run(tmp_path / "local", "gemma3", data=data, max_steps=LONGER, placement={"save_steps": 4})
    trained = subprocess.run([sys.executable, str(train_program()), str(local / "plan.json")], capture_output=True)
    assert trained.returncode == 0, trained.stdout
    hub.faults.add_job(JobFault("exit", 137, line='"event": "kept"', job=1))
    run = tmp_path / "run"
    first = _asked(hub, tmp_path, "submit", local, run)
    assert first.message == "Job failed with exit code: 137. Reason: OOMKilled", first.lines
    shutil.rmtree(tmp_path / "rows")
    second = _asked(hub, tmp_path, "resume", local, run)
    assert (second.stage, second.message) == ("COMPLETED", None), second.lines
    assert any("was kept and is whole" in line for line in second.lines)

    kept = _kept(hub, run, tmp_path / "kept")
    name = "adapter/adapter_model.safetensors"
    assert (kept / name).read_bytes() == (local / name).read_bytes()
    losses = [[line["loss"] for line in training.metrics(each)] for each in (kept, local)]
    assert losses[0] == losses[1] and len(losses[0]) == LONGER
    assert _pictures(kept) == _pictures(local) and len(_pictures(kept)) > 4
    for lines in ("held_out.jsonl", "samples.jsonl"):
        assert (kept / lines).read_bytes() == (local / lines).read_bytes()
    assert json.loads((kept / "environment.json").read_text())["versions"]["pillow"] == metadata.version("pillow")
    pushed = hub.repositories["model", "me/seen"].files
    assert pushed["adapter_model.safetensors"] == (local / name).read_bytes()
    assert not [file for file, content in pushed.items() if file.startswith("images") or b"PNG" in content[:8]]


def _planned(hub: Hub, tmp_path: Path, data: object, run: str) -> Path:
    """A run directory with the plan that `skill-train plan` makes for this data, a path or the id of a dataset."""
    recipe = {"model": str(tiny_vision.cached("gemma3")), "data": str(data), "max_steps": STEPS, "max_length": 256}
    recipe |= {"effective_batch_size": 4, "learning_rate": 5e-3, "held_out_fraction": 0.2}
    (tmp_path / run).mkdir()
    (tmp_path / f"{run}.yaml").write_text(json.dumps(recipe))
    words = ["plan", str(tmp_path / f"{run}.yaml"), "--where", "local", "--dtype", "float32"]
    environment = hub.environment(tmp_path / f"home-{run}")
    command = [sys.executable, "-m", "skill_train", *words, "--out", str(tmp_path / run / "plan.json")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return tmp_path / run


@pytest.mark.parametrize(
    ("write", "prefix"),
    [
        (_beside, "data/"),
        pytest.param(_image_folder, "", marks=pytest.mark.torture),
        pytest.param(_parquet, "data/", marks=pytest.mark.torture),
    ],
)
def test_a_dataset_on_the_hub_gives_the_bytes_of_a_file_here(write: Any, prefix: str, hub: Hub, tmp_path: Path) -> None:
    """The same recipe, with an id in place of a path. Nothing is uploaded; the job reads the commit of the plan."""
    data = write(tmp_path / "rows")
    local = _planned(hub, tmp_path, data, "local")
    trained = subprocess.run([sys.executable, str(train_program()), str(local / "plan.json")], capture_output=True)
    assert trained.returncode == 0, trained.stdout
    root = data.parent if data.is_file() else data
    files = [path for path in root.rglob("*") if path.is_file()]
    sent = {f"{prefix}{path.relative_to(root).as_posix()}": path.read_bytes() for path in files}
    repository = hub.add("dataset", "me/colours", sent)
    there = _planned(hub, tmp_path, "me/colours", "there")
    recipe = json.loads((there / "plan.json").read_text())["recipe"]
    assert (recipe["data"], recipe["data_revision"]) == ("me/colours", repository.commit("main"))
    job = _asked(hub, tmp_path, "submit", there, tmp_path / "run")
    assert job.stage == "COMPLETED", job.lines
    assert [volume["mountPath"] for volume in job.spec["volumes"]] == ["/data"]
    kept = _kept(hub, tmp_path / "run", tmp_path / "kept")
    name = "adapter/adapter_model.safetensors"
    assert (kept / name).read_bytes() == (local / name).read_bytes()
    assert _pictures(kept) == _pictures(local) and len(_pictures(kept)) > 4
    assert (kept / "held_out.jsonl").read_bytes() == (local / "held_out.jsonl").read_bytes()


def test_a_job_whose_bucket_lost_a_picture_trains_nothing(hub: Hub, tmp_path: Path) -> None:
    local = write_run(tmp_path / "local", "gemma3", data=_beside(tmp_path / "rows"), max_steps=STEPS)
    run = tmp_path / "run"
    _ask(hub, tmp_path, "submit", local, run, job=JobFault("stuck", attempt=None))
    record = json.loads((run / "cloud.json").read_text())
    del hub.buckets["me/jobs-artifacts"].files[f"{record['data']['folder']}/7.png"]
    hub.jobs.all[0].cancelled.set()
    hub.faults.clear()
    second = _asked(hub, tmp_path, "resume", local, run)
    assert second.stage == "ERROR" and not [line for line in second.lines if '"event": "step"' in line]
    failed = next(json.loads(line) for line in second.lines if '"event": "failed"' in line)
    assert failed["error"]["code"] == "input_changed" and "7.png does not exist" in failed["error"]["got"]


def _ask(hub: Hub, tmp_path: Path, command: str, local: Path, run: Path, job: JobFault | None = None) -> None:
    if job is not None:
        hub.faults.add_job(job)
    words = [sys.executable, "-c", ASK, command, str(local), str(run)]
    done = subprocess.run(words, capture_output=True, text=True, env=hub.environment(tmp_path / "home"), timeout=100)
    assert done.returncode == 0, done.stderr


def _asked(hub: Hub, tmp_path: Path, command: str, local: Path, run: Path) -> Any:
    """The job, ended."""
    _ask(hub, tmp_path, command, local, run)
    job = hub.jobs.all[-1]
    wait_until(lambda: job.ended, 250, job.lines)
    return job


def _kept(hub: Hub, run: Path, target: Path) -> Path:
    """What lies in the folder of the run in its bucket."""
    record = json.loads((run / "cloud.json").read_text())
    files = hub.buckets[record["bucket"]].inside(record["folder"])
    start = len(record["folder"]) + 1
    hub.store.download([(file.name, file.size, target / name[start:]) for name, file in files.items()])
    return target


def _pictures(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run / "images").iterdir()}
