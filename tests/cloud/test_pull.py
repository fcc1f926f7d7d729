"""`pull` and `resume`, against the Hub for tests: nothing is lost, doubled, half-written or taken on trust."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import cloud_runs
import killing
import tiny
import training
from cloud_runs import BUCKET, FOLDER, RUN_ID, Cloud
from hub_emulator import ALWAYS, Fault, Hub, JobFault, faults
from hub_emulator.jobs import Job
from skill_train.cloud import stage_data
from skill_train.hub import jobs
from skill_train.program.cloud.file_names import PROOF
from skill_train.recipe.fields import to_yaml
from skill_train.run import plan_record
from skill_train.run.cloud_record import CloudData
from skill_train.run.folder import RunDir
from skill_train.run.lock import locked
from waiting import wait_until

pytestmark = pytest.mark.slow

pytest.importorskip("huggingface_hub")

CREATE = "POST /api/jobs/me$"
PROGRAM = "import sys; from skill_train.program.main import main; sys.exit(main(sys.argv[1:]))"
SLEEP = "import time; print('begun', flush=True); time.sleep(60)"


@pytest.fixture
def cloud(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    return cloud_runs.cloud(hub, tmp_path, monkeypatch)


# --- before pull ---


@pytest.mark.parametrize("stage", [None, "COMPLETED", "CANCELED", "ERROR"])
def test_a_run_that_is_not_fetched_yet_is_not_trained_here(cloud: Cloud, stage: str | None) -> None:
    """A first user was told to train on this machine, over the run that she had paid for."""
    cloud.start("pass")
    cloud.write(cloud.record.with_job(msgspec.structs.replace(cloud.record.jobs[0], stage=stage)))
    before = _tree(cloud)
    next_command = f"skill-train {'pull' if stage in (None, 'COMPLETED') else 'resume'} {cloud.run.path}"
    for command in ("export-gguf", "verify", "evaluate", "merge", "push"):
        done = cloud.on(command)
        assert (*done.error, done.answer["next"]) == (
            2,
            "missing_step",
            [next_command],
        )
    for more in ((), ("--resume",)):
        done = cloud.call("local", *more, "--run-dir", str(cloud.run.path))
        assert (*done.error, done.answer["next"]) == (2, "cloud_run", [next_command])
    assert _tree(cloud) == before
    [told] = cloud.on("report").data["runs"]
    assert told["missing"][0]["command"] == next_command


# --- pull ---


def test_a_finished_run_comes_here_and_only_once(cloud: Cloud) -> None:
    """Afterwards a merge finds it trained: every digest of train.json holds."""
    from skill_train.run.earlier_start import trained

    result = cloud_runs.result(**{"images/0a1b.png": b"a held-out picture"})
    files = result | cloud_runs.checkpoint(10) | cloud_runs.checkpoint(5)
    cloud.keep(files)
    cloud_runs.wait_for(cloud.start("pass"))
    done = cloud.on("pull")
    assert (done.code, done.data["state"], done.data["trained"]) == (0, "done", True)
    newest = {name for name in files if not name.endswith("kept.json") and "checkpoint-5" not in name}
    assert _tree(cloud) == newest | {"checkpoints/before.json"}
    assert all((cloud.run.path / name).read_bytes() == files[name] for name in newest)
    assert trained(cloud.run)
    assert done.answer["next"] == [f"skill-train export-gguf {cloud.run.path}"]
    assert cloud.on("pull").data["fetched"] == 0


def test_a_run_whose_checks_failed_is_no_success(cloud: Cloud) -> None:
    """As `local` ends with the same record. What it kept is here all the same."""
    check = {"name": "loss_falls", "verdict": "fail", "figure": -1.0, "detail": "2.0 before, 3.0 after"}
    record = json.loads(cloud_runs.result()["train.json"]) | {"verdict": "fail", "checks": [check]}
    cloud.keep(cloud_runs.result(**{"train.json": json.dumps(record).encode()}))
    cloud_runs.wait_for(cloud.start("pass"))
    done = cloud.on("pull")
    assert (*done.error, done.answer["error"]["got"]) == (5, "smoke_failed", check["detail"])
    assert (done.answer["data"]["verdict"], done.answer["next"]) == ("fail", [])
    assert (cloud.run.path / "adapter" / "adapter_model.safetensors").is_file()


def test_a_ceiling_holds_for_the_price_of_now(cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.40 dollars an hour when it was asked first, and ten times that a moment later."""
    monkeypatch.setenv("SKILL_TRAIN_CACHE", str(tmp_path / "cache"))
    cloud.keep(cloud_runs.checkpoint(5))
    job = cloud.start("raise SystemExit(1)")
    cloud_runs.wait_for(job)
    words = ("resume", "--timeout", "60m", "--max-cost", "0.5")
    assert cloud.on(*words).error[1] == "confirm_cost"
    for row in cloud.hub.hardware:
        row.update({key: 10 * value for key, value in row.items() if key.startswith("unitCost")})
    refused = cloud.on(*words, "--yes")
    assert (refused.code, len(cloud.hub.jobs.all)) == (3, 1), refused.answer


def test_another_job_costs_no_more_than_was_shown(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour for 0.40 dollars, and a moment later for ten times that."""
    monkeypatch.setenv("SKILL_TRAIN_CACHE", str(tmp_path / "cache"))
    cloud.keep(cloud_runs.checkpoint(5))
    cloud_runs.wait_for(cloud.start("raise SystemExit(1)"))
    again = shlex.split(cloud.on("resume", "--timeout", "60m").answer["error"]["hint"])[1:]
    assert again[-4:] == ["60m", "--yes", "--agreed", "0.40"]
    for row in cloud.hub.hardware:
        row.update({key: 10 * value for key, value in row.items() if key.startswith("unitCost")})
    done = cloud.call(*again)
    assert (*done.error, cloud.hub.jobs_created) == (3, "confirm_cost", 1)
    assert done.answer["error"]["hint"].endswith(" --yes --agreed 4.01")
    assert cloud.call(*shlex.split(done.answer["error"]["hint"])[1:]).data["attempt"] == 2


@pytest.mark.parametrize("path", ["GET /cas/.*/reconstructions", "GET /cas/.*/xorbs"])
def test_a_store_that_does_not_have_its_bytes_now(cloud: Cloud, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """hf_xet says so in words only."""
    from skill_train.cloud import poll as follow

    monkeypatch.setitem(follow.patiently.__kwdefaults__, "seconds", 0.5)
    weights = os.urandom(5000)  # which no cache has
    cloud.keep(cloud_runs.result(**{"samples.jsonl": weights}))
    cloud_runs.wait_for(cloud.start("pass"))
    cloud.hub.faults.add(path, faults.NOT_FOUND, times=ALWAYS)
    done = cloud.on("pull")
    assert done.error == (8, "hub_error")
    cloud.hub.faults.clear()
    assert cloud.on("pull").data["trained"]


def test_an_unfinished_run_brings_its_newest_whole_checkpoint(cloud: Cloud) -> None:
    """The marker of a newer one is torn, and a file of the one before it is missing. What changes later is replaced."""
    torn, cut = cloud_runs.checkpoint(9), cloud_runs.checkpoint(8)
    torn["checkpoints/checkpoint-9/kept.json"] = torn["checkpoints/checkpoint-9/kept.json"][:20]
    del cut["checkpoints/checkpoint-8/adapter_model.safetensors"]
    cloud.keep(torn | cut | cloud_runs.checkpoint(4) | {"metrics.jsonl": cloud_runs.metrics(9)})
    cloud.start(SLEEP)
    done = cloud.on("pull")
    assert (done.code, done.data["state"], done.data["checkpoint"]) == (0, "unfinished", 4)
    assert [w["code"] for w in done.answer["warnings"]] == ["unfinished"]
    assert done.answer["next"] == [f"skill-train wait {cloud.run.path}"]
    weights = cloud.run.checkpoints / "checkpoint-4" / "adapter_model.safetensors"
    assert weights.read_bytes() == b"weights 4"
    assert not (cloud.run.checkpoints / "checkpoint-9").exists()
    cloud.keep(cloud_runs.result())
    assert cloud.on("pull").data["trained"]
    assert cloud.run.metrics.read_bytes() == cloud_runs.metrics(10)


def test_lines_that_a_kill_cut_are_left_in_the_bucket(cloud: Cloud) -> None:
    whole = cloud_runs.metrics(3)
    cloud.keep(cloud_runs.checkpoint(2) | {"metrics.jsonl": whole + b'{"step": 4, "lo'})
    cloud.start(SLEEP)
    assert cloud.on("pull").code == 0
    assert cloud.run.metrics.read_bytes() == whole


def test_a_document_that_a_kill_cut_is_left_in_the_bucket(cloud: Cloud) -> None:
    """Without a marker nobody promises it whole. One that came earlier stays, and the next pull may replace it."""
    cloud.keep(cloud_runs.checkpoint(2) | {"environment.json": b'{"a": 1}', "train.failed.json": b'{"exit'})
    cloud.start(SLEEP)
    done = cloud.on("pull")
    assert done.code == 0 and "train.failed.json is incomplete" in done.stderr
    assert not (cloud.run.path / "train.failed.json").exists()
    cloud.keep({"environment.json": b'{"a": 1, "b'})
    assert cloud.on("pull").code == 0
    assert (cloud.run.path / "environment.json").read_bytes() == b'{"a": 1}'
    cloud.keep({"environment.json": b'{"a": 2}'})
    assert cloud.on("pull").code == 0
    assert (cloud.run.path / "environment.json").read_bytes() == b'{"a": 2}'


@pytest.mark.parametrize("name", ["adapter/adapter_model.safetensors", "train.log"])
def test_a_file_that_was_changed_in_the_bucket(cloud: Cloud, name: str) -> None:
    """The rest comes; it does not get its name, nor does train.json, so that nobody takes the run for whole."""
    files = cloud_runs.result(**{"train.log": b"a log"})
    cloud.keep(files)
    cloud.keep({name: files[name].upper()})
    cloud_runs.wait_for(cloud.start("pass"))
    done = cloud.on("pull")
    assert done.error == (6, "kept_file_changed")
    assert not (cloud.run.path / name).exists()
    assert not cloud.run.record("train").exists()
    cloud.keep(files)
    assert cloud.on("pull").data["trained"]


def test_a_file_that_is_gone_from_the_bucket(cloud: Cloud) -> None:
    cloud.keep(cloud_runs.result())
    cloud.hub.buckets[BUCKET].files.pop(f"{FOLDER}/adapter/adapter_model.safetensors")
    cloud_runs.wait_for(cloud.start("pass"))
    done = cloud.on("pull")
    assert done.error == (6, "kept_file_missing")


@pytest.mark.parametrize("name", ["../outside.txt", "/etc/outside.txt", "adapter/../../outside.txt", "adapter\\..\\x"])
def test_a_name_that_leads_out_is_refused(cloud: Cloud, name: str) -> None:
    marker = {"run": RUN_ID, "state": "done", "exit_code": 0, "files": {name: cloud_runs.digest(b"x")}}
    cloud.keep({"kept.json": json.dumps(marker).encode()})
    cloud_runs.wait_for(cloud.start("pass"))
    before = sorted(cloud.run.path.parent.rglob("*.txt"))
    done = cloud.on("pull")
    assert done.error == (6, "unsafe_file")
    assert sorted(cloud.run.path.parent.rglob("*.txt")) == before


def test_names_of_our_own_files_are_left_alone(cloud: Cloud) -> None:
    """A job may keep what it likes; plan and record of a run directory are ours."""
    cloud.keep(cloud_runs.result(**{"plan.json": b"{}", "cloud.json": b"{}", ".bashrc": b"x"}))
    cloud_runs.wait_for(cloud.start("pass"))
    plan = cloud.run.plan.read_bytes()
    assert cloud.on("pull").data["trained"]
    assert (cloud.run.plan.read_bytes(), (cloud.run.path / ".bashrc").exists()) == (plan, False)


def test_what_a_user_has_is_not_overwritten(cloud: Cloud) -> None:
    cloud.keep(cloud_runs.result())
    cloud_runs.wait_for(cloud.start("pass"))
    mine = cloud.run.adapter / "adapter_model.safetensors"
    mine.parent.mkdir()
    mine.write_bytes(b"mine")
    done = cloud.on("pull")
    assert (*done.error, mine.read_bytes()) == (2, "output_exists", b"mine")


@pytest.mark.parametrize("killed", [False, True])
def test_what_a_killed_pull_may_write_anew(cloud: Cloud, killed: bool) -> None:
    """Only what the job rewrites, and only after a kill: before its record nobody knows whose such a file is."""
    cloud.keep(cloud_runs.result())
    cloud_runs.wait_for(cloud.start("pass"))
    if killed:
        (cloud.run.path / ".pull.part").mkdir()
    cloud.run.metrics.write_bytes(b"of another moment\n")
    done = cloud.on("pull")
    assert done.code == (0 if killed else 2)
    assert (cloud.run.metrics.read_bytes() == cloud_runs.metrics(10)) is killed
    (cloud.run.path / ".pull.part").mkdir(exist_ok=True)
    cloud.run.record("pull").unlink(missing_ok=True)
    mine = cloud.run.adapter / "adapter_model.safetensors"
    mine.parent.mkdir(exist_ok=True)
    mine.write_bytes(b"mine")
    assert (*cloud.on("pull").error, mine.read_bytes()) == (2, "output_exists", b"mine")


def test_the_digests_of_a_run_that_failed_bind_nobody(cloud: Cloud) -> None:
    """The next job of it writes the same names again, its marker last."""
    cloud.keep(cloud_runs.result("failed"))
    cloud.keep({"metrics.jsonl": cloud_runs.metrics(3)})
    cloud_runs.wait_for(cloud.start("raise SystemExit(5)"))
    done = cloud.on("pull")
    assert (done.data["state"], done.data["trained"]) == ("failed", False)
    assert cloud.run.metrics.read_bytes() == cloud_runs.metrics(3) and not cloud.run.adapter.exists()


def test_a_pull_that_is_killed_goes_on(cloud: Cloud, tmp_path: Path) -> None:
    """Killed while the second eight files are on their way: the first have their names, none is half, and the next pull
    leaves them."""
    more = {f"adapter/{n}.json": str(n).encode() for n in range(8)}
    cloud.keep(cloud_runs.result(**more))
    cloud_runs.wait_for(cloud.start("pass"))
    # The client looks at one file of each question: the marker's, that of the first eight, that of the others.
    cloud.hub.faults.add("HEAD /buckets/", Fault(seconds=30), call=3)
    child = subprocess.Popen(
        [sys.executable, "-c", "from skill_train.cli import main; main()", "pull", str(cloud.run.path)],
        env=cloud.hub.environment(tmp_path / "home"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: bool(cloud.hub.faults.struck), 20)
    child.send_signal(signal.SIGKILL)
    child.wait()
    there = _tree(cloud)
    assert there == {f"adapter/{n}.json" for n in range(8)}
    # One had come, and had no name yet. It is not asked for again, or it would be another now.
    (cloud.run.path / ".pull.part" / "environment.json").write_bytes(b"{}")
    cloud.keep({"environment.json": b"changed"})
    done = cloud.on("pull")
    assert done.data["trained"]
    assert done.data["fetched"] == len(cloud_runs.result(**more)) - 1 - len(there)  # but for the marker
    assert not (cloud.run.path / ".pull.part").exists()


def test_a_pull_that_is_killed_before_its_record_goes_on(cloud: Cloud, tmp_path: Path) -> None:
    """It has replaced what an earlier one wrote, and had no time to say so."""
    cloud.keep(cloud_runs.checkpoint(2) | {"metrics.jsonl": cloud_runs.metrics(3)})
    cloud.start(SLEEP)
    assert cloud.on("pull").code == 0
    cloud.keep({"metrics.jsonl": cloud_runs.metrics(5)})
    copy = Path(shutil.copytree(cloud.run.path, tmp_path / "copy" / "run"))
    step = killing.Step("pull", ("pull", "run"), copy.parent, cloud.hub.environment(tmp_path / "home"))
    assert killing.start(step, copy.parent, tmp_path / "log").wait(60) == 0
    done = killing.operations(tmp_path / "log")
    at = next(number for number, one in enumerate(done, 1) if one.startswith("open .pull.json"))
    moment = killing.Moment(operation=at)
    assert not killing.struck(step, cloud.run.path.parent, tmp_path / "log of the killed", moment)
    assert cloud.run.metrics.read_bytes() == cloud_runs.metrics(5)
    cloud.keep({"metrics.jsonl": cloud_runs.metrics(7)})
    assert cloud.on("pull").code == 0
    assert cloud.run.metrics.read_bytes() == cloud_runs.metrics(7)


def test_a_disk_that_takes_no_more(cloud: Cloud, tmp_path: Path) -> None:
    """hf_xet says it in words only, of a limit as of a full disk. With more room the same command goes on."""
    cloud.keep(cloud_runs.result(**{"adapter/large.bin": os.urandom(3_000_000)}))
    cloud_runs.wait_for(cloud.start("pass"))
    done = subprocess.run(
        killing.program("pull", str(cloud.run.path)),
        env=cloud.hub.environment(tmp_path / "home"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (3, "no_disk"), done.stdout + done.stderr
    assert cloud.on("pull").data["trained"]


def test_trouble_while_files_come(cloud: Cloud) -> None:
    cloud.keep(cloud_runs.result())
    cloud_runs.wait_for(cloud.start("pass"))
    cloud.hub.faults.add("HEAD /buckets/", faults.BAD_GATEWAY, call=2, times=2)
    cloud.hub.faults.add("GET /api/buckets/.*/tree", faults.SERVER_ERROR)
    cloud.hub.faults.add("GET /cas/.*/xorbs", faults.SERVER_ERROR, call=3)
    assert cloud.on("pull").data["trained"]
    assert len(cloud.hub.faults.struck) == 4


def test_the_repository_has_it_when_the_bucket_is_gone(cloud: Cloud, tmp_path: Path) -> None:
    files = cloud_runs.result()
    cloud.hub.add("model", "me/tickets", _pushed())
    cloud_runs.wait_for(cloud.start("pass"))
    cloud.hub.buckets.clear()
    answer = _child(cloud, tmp_path, "pull", str(cloud.run.path))
    assert (answer["data"]["trained"], answer["data"]["from"]) == (True, "me/tickets")
    assert (cloud.run.adapter / "adapter_model.safetensors").read_bytes() == files["adapter/adapter_model.safetensors"]


def test_a_repository_that_lacks_a_file_of_the_result(cloud: Cloud, tmp_path: Path) -> None:
    """Somebody removed it, or a .gitignore left it out."""
    files = {name: content for name, content in _pushed().items() if name != "adapter_model.safetensors"}
    cloud.hub.add("model", "me/tickets", files)
    cloud_runs.wait_for(cloud.start("pass"))
    cloud.hub.buckets.clear()
    error = _child(cloud, tmp_path, "pull", str(cloud.run.path), code=6)["error"]
    assert (error["code"], error["got"]) == ("kept_file_changed", "no such file")
    assert not cloud.run.record("pull").exists() and not cloud.run.record("train").exists()


def test_a_result_that_was_changed_in_the_bucket_comes_from_the_repository(cloud: Cloud, tmp_path: Path) -> None:
    """Other bytes of the same size lie under the name of the adapter. The good copy is the repository's."""
    files = cloud_runs.result()
    name = "adapter/adapter_model.safetensors"
    cloud.keep(files | {name: files[name].upper()})
    cloud.hub.add("model", "me/tickets", _pushed(), private=True)
    cloud_runs.wait_for(cloud.start("pass"))
    resumed = _child(cloud, tmp_path, "resume", str(cloud.run.path), "--yes")
    assert (resumed["data"]["finished"], cloud.hub.jobs_created) == (True, 1)
    shutil.rmtree(cloud.run.adapter)
    answer = _child(cloud, tmp_path, "pull", str(cloud.run.path))
    assert (answer["data"]["trained"], answer["data"]["from"]) == (True, "me/tickets")
    assert (cloud.run.path / name).read_bytes() == files[name]


@pytest.mark.parametrize("place", ["bucket", "repository", "both"])
def test_where_no_place_has_the_result_any_more_the_run_goes_on(cloud: Cloud, tmp_path: Path, place: str) -> None:
    """`pull` says `resume`, and that starts a job from the checkpoint in place of saying `pull`."""
    files, pushed = cloud_runs.result(), _pushed()
    name = "adapter/adapter_model.safetensors"
    if place != "repository":
        cloud.keep(files | {name: files[name].upper()})
    if place != "bucket":
        changed = {"adapter_model.safetensors": files[name].upper()}
        cloud.hub.add("model", "me/tickets", pushed | changed, private=True)
    cloud.keep(cloud_runs.checkpoint(10))
    cloud_runs.wait_for(cloud.start("pass"))
    run = str(cloud.run.path)
    pulled = _child(cloud, tmp_path, "pull", run, code=6)
    assert (pulled["error"]["code"], pulled["next"]) == ("kept_file_changed", [f"skill-train resume {run}"])
    assert not cloud.run.record("train").exists()
    shown = _child(cloud, tmp_path, "resume", run, code=3)
    assert (shown["error"]["code"], shown["data"]["why"]["code"]) == ("confirm_cost", "nothing_kept")
    assert _child(cloud, tmp_path, "resume", run, "--yes")["data"]["attempt"] == 2


@pytest.mark.parametrize(
    ("request_of", "ours"), [("HEAD /me/tickets/resolve/main/train.json", False), ("GET /api/models/me/tickets", True)]
)
def test_another_run_that_is_pushed_while_this_one_is_fetched_is_not_taken_for_it(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request_of: str, ours: bool
) -> None:
    """At the second of these requests: after this run was found there, or after its record was read."""
    pushed, seen, fault_of = _pushed(), list[str](), cloud.hub.faults.of_request
    repository = cloud.hub.add("model", "me/tickets", pushed)
    weights = b"of others" * 600
    theirs = json.loads(pushed["train.json"]) | {"run": "f" * 12}
    theirs["outputs"]["adapter/adapter_model.safetensors"] = cloud_runs.digest(weights)
    others = pushed | {"train.json": json.dumps(theirs).encode(), "adapter_model.safetensors": weights}

    def of_request(method: str, path: str) -> Fault | None:
        if f"{method} {path}".startswith(request_of):
            seen.append(path)
            if len(seen) == 2:
                repository.add_commit("main", others, "theirs", "others")
        return fault_of(method, path)

    monkeypatch.setattr(cloud.hub.faults, "of_request", of_request)
    cloud_runs.wait_for(cloud.start("pass"))
    cloud.hub.buckets.clear()
    answer = _child(cloud, tmp_path, "pull", str(cloud.run.path), code=0 if ours else 2)
    there = cloud.run.adapter / "adapter_model.safetensors"
    assert len(seen) >= 2 and (there.read_bytes() == pushed[there.name] if ours else not there.exists())
    assert ours or answer["error"]["code"] == "nothing_kept"


def test_the_whole_record_stays_when_the_bucket_is_lost_later(cloud: Cloud, tmp_path: Path) -> None:
    """A job pushes its record without rows of the data. Killed before pull.json, a pull goes on from there too."""
    record = json.loads(_pushed()["train.json"])
    whole = json.dumps(record | {"example": "a row of the data"}).encode()
    cloud.keep(cloud_runs.result(**{"train.json": whole}))
    cloud.hub.add("model", "me/tickets", _pushed())
    cloud_runs.wait_for(cloud.start("pass"))
    assert cloud.on("pull").data["from"] == BUCKET
    cloud.hub.buckets.clear()
    for _ in ("pulled", "killed"):
        assert _child(cloud, tmp_path, "pull", str(cloud.run.path))["data"]["from"] == "me/tickets"
        assert cloud.run.record("train").read_bytes() == whole
        cloud.run.record("pull").unlink()
        (cloud.run.path / ".pull.part").mkdir()  # what a kill leaves


def test_a_whole_model_comes_from_the_repository(cloud: Cloud, tmp_path: Path) -> None:
    """With what lies beside its weights, in folders too. A job trains it and pushes it, with a card of its own."""
    base = Path(shutil.copytree(tiny.cached("gemma"), tmp_path / "base"))
    for name in ("README.md", "USE_POLICY.md", "1_Pooling/[of words].json"):
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_text(name)
    values = {"finetuning_type": "full", "hub_model_id": "me/tickets", "max_steps": 2}
    trained = training.write_run(tmp_path / "trained", base=base, **values)
    program = [sys.executable, "-c", PROGRAM, str(trained / "plan.json"), "--job"]
    subprocess.run(program, env=cloud.hub.environment(tmp_path / "home"), stdout=subprocess.DEVNULL, check=True)

    cloud.run.plan.write_bytes((trained / "plan.json").read_bytes())
    cloud_runs.wait_for(cloud.start("pass"))
    cloud.hub.buckets.clear()
    assert _child(cloud, tmp_path, "pull", str(cloud.run.path))["data"]["from"] == "me/tickets"
    files = {path.relative_to(base).as_posix() for path in base.rglob("*") if path.is_file()} - {"README.md"}
    for name in files:
        assert (cloud.run.merged / name).read_bytes() == (trained / "merged" / name).read_bytes(), name
    answer = _child(cloud, tmp_path, "merge", str(cloud.run.path), code=2)
    assert answer["error"]["code"] == "no_adapter"  # its digests are those of its record
    # What the job pushed has no row of the data, and no command misses one.
    page = Path(_child(cloud, tmp_path, "report", str(cloud.run.path))["data"]["report"])
    assert "of them trained" in page.read_text() and "One row as it was fed" not in page.read_text()


@pytest.mark.parametrize("end", ["pass", "raise SystemExit(5)"])
@pytest.mark.parametrize("promised", [False, True])
def test_the_repository_has_it_when_the_bucket_took_no_result(
    cloud: Cloud, tmp_path: Path, end: str, promised: bool
) -> None:
    """Pushed, and the bucket was full before its marker came, or has lost a file that the marker promises."""
    files = cloud_runs.result() if promised else {"metrics.jsonl": cloud_runs.metrics(9), "environment.json": b"{}"}
    files.pop("adapter/adapter_model.safetensors", None)
    cloud.keep(cloud_runs.checkpoint(5) | files)
    cloud.hub.add("model", "me/tickets", _pushed())
    job = cloud.start(f"import time; time.sleep(2); {end}")
    if not promised:
        assert cloud.on("pull").data["from"] == BUCKET  # while it runs, the repository may hold an older result
    cloud_runs.wait_for(job)
    if end == "pass":
        told = _child(cloud, tmp_path, "resume", str(cloud.run.path), "--yes")
        assert (told["data"]["finished"], cloud.hub.jobs_created) == (True, 1)
    for _ in range(2):
        answer = _child(cloud, tmp_path, "pull", str(cloud.run.path))
        assert (answer["data"]["trained"], answer["data"]["from"]) == (True, "me/tickets")
    cloud.keep(cloud_runs.result())  # of a further job, say: what the first pulls wrote is still known as theirs
    assert cloud.on("pull").data["from"] == BUCKET
    assert answer["next"] == [f"skill-train export-gguf {cloud.run.path}"]


@pytest.mark.parametrize("others", [{"recipe_hash": "0" * 64}, {"run": "f" * 12}, {}])
def test_a_result_that_is_not_of_this_run_is_left_in_the_repository(
    cloud: Cloud, tmp_path: Path, others: dict[str, str]
) -> None:
    """The recipe differs, or the run: the same recipe was started twice. A job writes a proof there when it begins, and
    takes it away when it pushes."""
    pushed = _pushed()
    pushed["train.json"] = json.dumps(json.loads(pushed["train.json"]) | others).encode()
    if not others:
        pushed[PROOF] = b"{}"
    cloud.hub.add("model", "me/tickets", pushed, private=True)
    cloud.keep(cloud_runs.checkpoint(5))
    cloud_runs.wait_for(cloud.start("pass"))
    data = _child(cloud, tmp_path, "pull", str(cloud.run.path))["data"]
    assert (data["trained"], data["checkpoint"], data["from"]) == (False, 5, BUCKET)
    assert not cloud.run.adapter.exists()
    assert _child(cloud, tmp_path, "resume", str(cloud.run.path), "--yes")["data"]["attempt"] == 2


@pytest.mark.parametrize(
    ("program", "command"), [("raise SystemExit(1)", "status"), ("pass", "resume"), (SLEEP, "wait")]
)
def test_nothing_is_kept_anywhere(cloud: Cloud, program: str, command: str) -> None:
    """`status` of a job that ended well says `pull`, so `pull` may not say `status`."""
    job = cloud.start(program)
    wait_until(lambda: job.ended or job.lines[1:] == ["begun"], 20)
    done = cloud.on("pull")
    assert (*done.error, done.answer["next"]) == (2, "nothing_kept", [f"skill-train {command} {cloud.run.path}"])


def test_by_the_id_of_a_job(cloud: Cloud, tmp_path: Path) -> None:
    """Into a new run directory, with the plan that the job had; one of another run is not touched."""
    cloud.keep(cloud_runs.result())
    job = cloud.start("pass")
    cloud_runs.wait_for(job)
    done = cloud.call("pull", f"me/{job.id}", "--run-dir", str(tmp_path / "new"))
    assert (done.data["trained"], done.data["run_dir"]) == (True, str(tmp_path / "new"))
    assert json.loads((tmp_path / "new" / "plan.json").read_text()) == json.loads(cloud.run.plan.read_text())
    assert cloud.call("status", str(tmp_path / "new")).data["job_id"] == job.id
    cloud.write(msgspec.structs.replace(cloud.record, run_id="f" * 12))
    refused = cloud.call("pull", f"me/{job.id}", "--run-dir", str(cloud.run.path))
    assert refused.error == (2, "another_run")


@pytest.mark.parametrize("name", ["cloud.json", "recipe.yaml", "plan.json"])
def test_by_the_id_of_a_job_and_killed(cloud: Cloud, tmp_path: Path, name: str) -> None:
    """Before each file of its new folder has its name: the same command goes on, and so does one that names the
    folder."""
    cloud.keep(cloud_runs.checkpoint(5))
    _cancelled(cloud)
    place = tmp_path / "place"
    place.mkdir()
    words = ("pull", f"me/{cloud.hub.jobs.all[0].id}", "--run-dir", "run")
    step = killing.Step("pull", words, place, cloud.hub.environment(tmp_path / "home"))
    assert not killing.struck(step, place, tmp_path / "log", killing.Moment(operation=f"os.rename .{name}"))
    copy = Path(shutil.copytree(place, tmp_path / "copy")) / "run"
    assert killing.finish(step, place) == []
    assert (place / "run" / "plan.json").read_bytes() == cloud.run.plan.read_bytes()
    assert (place / "run" / "checkpoints" / "checkpoint-5").is_dir()
    if name != "cloud.json":
        assert cloud.call("status", str(copy)).data["steps"] == cloud_runs.plan()["recipe"]["max_steps"]
        assert cloud.call("pull", str(copy)).data["checkpoint"] == 5
        assert (copy / "recipe.yaml").is_file() and (copy / "plan.json").is_file()


def test_by_the_id_of_a_job_twice_at_once(cloud: Cloud, tmp_path: Path) -> None:
    cloud.keep(cloud_runs.result())
    job = cloud.start("pass")
    cloud_runs.wait_for(job)
    run = RunDir(tmp_path / "new")
    with locked(run, "pull"):
        done = cloud.call("pull", f"me/{job.id}", "--run-dir", str(run.path))
    assert (*done.error, [p.name for p in run.path.iterdir()]) == (
        2,
        "run_in_use",
        [".lock"],
    )


@pytest.mark.parametrize(
    "broken",
    [
        {"recipe": {}, "policy": []},
        {"recipe": {"max_steps": "many"}},
        {"recipe": {}},
        {"policy": {"hub_model_id": None}},
        {"policy": {}},
        {"launch": {"arguments": ["--main_process_ip", "evil; rm -rf"], "environment": {}}},
        {"recipe_hash": float("nan")},
        {"facts": {"rows": float("nan")}},
        "recipe_hash",
        "policy",
    ],
)
def test_a_plan_in_the_bucket_is_not_taken_on_trust(cloud: Cloud, tmp_path: Path, broken: Any) -> None:
    _cancelled(cloud)
    made = cloud_runs.plan()
    wrong = {key: made[key] for key in made if key != broken} if isinstance(broken, str) else made | broken
    cloud.keep({"plan.json": json.dumps(wrong).encode()})
    name = f"me/{cloud.hub.jobs.all[0].id}"
    assert cloud.call("status", name).data["steps"] is None
    for words in (("pull",), ("resume", "--yes")):
        done = cloud.call(words[0], name, "--run-dir", str(tmp_path / "new"), *words[1:])
        assert done.error == (2, "bad_plan")
    assert not (tmp_path / "new").exists() and cloud.hub.jobs_created == 1


def test_by_the_id_of_a_job_into_a_folder_of_the_users(cloud: Cloud, tmp_path: Path) -> None:
    cloud.keep(cloud_runs.result())
    job = cloud.start("pass")
    cloud_runs.wait_for(job)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "recipe.yaml").write_text("model: mine\n")
    refused = cloud.call("pull", f"me/{job.id}", "--run-dir", str(tmp_path / "mine"))
    assert refused.error == (2, "output_exists")
    assert {path.name: path.read_text() for path in (tmp_path / "mine").iterdir()} == {"recipe.yaml": "model: mine\n"}


# --- resume ---


def test_the_id_of_an_earlier_job_leads_to_the_one_that_runs(cloud: Cloud) -> None:
    first = cloud.start("raise SystemExit(1)")
    cloud_runs.wait_for(first)
    second = cloud.start("import time; time.sleep(60)")
    done = cloud.call("resume", f"me/{first.id}", "--yes")
    assert (done.data["job_id"], done.data["reused"], cloud.hub.jobs_created) == (second.id, True, 2)
    assert done.answer["next"] == [f"skill-train {word} me/{second.id}" for word in ("wait", "logs", "pull")]
    second.cancelled.set()


def test_after_a_timeout_with_the_time_that_it_needs(cloud: Cloud) -> None:
    """1,000 steps of two seconds, the checkpoint at 100, and a job of ten minutes: 900 steps are left, 1,800 seconds;
    a quarter more and ten minutes for the end are 2,850, and what the job took beside its steps comes on top."""
    cloud.keep({"metrics.jsonl": cloud_runs.metrics(120, 1000), **cloud_runs.checkpoint(100)})
    cloud.hub.faults.add_job(JobFault("timeout", line="begun"))
    cloud_runs.wait_for(cloud.start(SLEEP, timeout=600))
    done = cloud.on("resume")
    assert (*done.error, cloud.hub.jobs_created) == (3, "confirm_cost", 1)
    data = done.answer["data"]
    assert (data["from_step"], data["why"]["code"]) == (100, "timeout")
    assert data["timeout_seconds"] == 48 * 60  # 2,850 seconds in whole minutes
    # t4-small, $0.40 an hour: 1,800 seconds of training, and never more than 48 minutes.
    assert (data["cost_usd"]["low"], data["cost_usd"]["most"]) == (0.2, 0.32)
    assert done.answer["error"]["hint"] == f"skill-train resume {cloud.run.path} --yes --agreed 0.32"
    done = cloud.on("resume", "--yes")
    assert (done.code, done.data["attempt"], done.data["reused"]) == (0, 2, False)
    first, second = cloud.hub.jobs.all
    assert second.spec["timeoutSeconds"] == 2880
    assert second.labels == first.labels | {"attempt": "2", "name": "tickets", "timeout": "2880"}
    assert [v["path"] for v in second.spec["volumes"] if v["mountPath"] == "/data"] == [FOLDER]
    assert second.spec["command"][-3:] == ["/data/train.py", "/data/plan.json", "--job"]
    assert sorted(second.secrets) == ["HF_TOKEN"]
    assert [job.state for job in cloud.record.jobs] == ["started", "started"]


def test_by_the_id_of_a_job_with_its_data(cloud: Cloud, tmp_path: Path) -> None:
    """Rows of the user's own, which lie in the bucket: the next job has them too, at the same place."""
    cloud.hub.buckets[BUCKET].files["rows-1/rows.jsonl"] = next(iter(cloud.hub.buckets[BUCKET].files.values()))
    rows = {"type": "bucket", "source": BUCKET, "path": "rows-1", "mountPath": "/dataset", "readOnly": True}
    job = cloud.start("raise SystemExit(1)", mounts=(rows,))
    cloud_runs.wait_for(job)
    done = cloud.call("resume", job.id, "--run-dir", str(tmp_path / "new"), "--yes")
    assert (done.code, done.data["attempt"], done.data["run_dir"]) == (0, 2, str(tmp_path / "new"))
    spec = cloud.hub.jobs.all[1].spec
    assert spec["command"][-2:] == ["--data", "/dataset/rows.jsonl"]
    assert rows in spec["volumes"]


def test_the_ceiling_of_the_first_job_holds_for_the_next(cloud: Cloud) -> None:
    """Ten minutes of a t4-small are 6.7 cents."""
    _cancelled(cloud)
    cloud.write(cloud.record.with_job(msgspec.structs.replace(cloud.record.jobs[0], max_cost=0.07)))
    done = cloud.on("resume")
    hint = f"skill-train resume {cloud.run.path} --max-cost 0.07 --yes"
    assert (done.error[1], done.answer["error"]["hint"], done.answer["next"]) == ("confirm_cost", hint, [])
    cloud.write(cloud.record.with_job(msgspec.structs.replace(cloud.record.jobs[0], max_cost=0.06)))
    done = cloud.on("resume", "--yes")
    assert (*done.error, cloud.hub.jobs_created) == (3, "over_budget", 1)
    assert done.answer["error"]["hint"] == f"skill-train resume {cloud.run.path} --max-cost 0.06 --timeout 9m"
    assert cloud.on("resume", "--max-cost", "1", "--yes").code == 0
    assert [job.max_cost for job in cloud.record.jobs] == [0.06, 1.0]


def test_a_live_job_is_the_answer(cloud: Cloud) -> None:
    job = cloud.start(SLEEP)
    data = cloud.on("resume", "--yes").data
    assert (data["reused"], data["job_id"], cloud.hub.jobs_created) == (True, job.id, 1)


@pytest.mark.parametrize("by_id", [False, True], ids=["folder", "job"])
def test_a_live_job_keeps_to_what_is_asked_now(cloud: Cloud, by_id: bool) -> None:
    """Ten minutes of a t4-small are 6.7 cents. Of a job that is known by its id nobody here knows the limit."""
    job = cloud.start(SLEEP)
    name = f"me/{job.id}" if by_id else str(cloud.run.path)
    done = cloud.call("resume", name, "--max-cost", "0.06", "--yes")
    assert done.error == (3, "over_budget")
    assert done.answer["error"]["got"] == ("an unknown cost" if by_id else "$0.067 at its timeout of 600 s")
    assert done.answer["error"]["hint"].startswith(f"skill-train cancel {name}; ")
    other = ("--timeout", "2h", "--flavor", "a100-large")
    done = cloud.call("resume", name, *other, *([] if by_id else ["--max-cost", "0.07"]), "--yes")
    assert (done.data["job_id"], done.data["flavor"], cloud.hub.jobs_created) == (job.id, "t4-small", 1)
    assert [warning["code"] for warning in done.answer["warnings"]] == ["another_timeout", "another_flavor"]


def test_a_run_in_two_folders_has_one_job_at_a_time(cloud: Cloud, tmp_path: Path) -> None:
    """Each folder finds what the other started: the job that runs is the answer, one that ended counts."""
    first = _cancelled(cloud)
    cloud.keep(cloud_runs.checkpoint(5))
    cloud.hub.faults.add_job(JobFault("stuck", attempt=None))
    other = str(tmp_path / "other")
    started = cloud.call("resume", f"me/{first.id}", "--run-dir", other, "--yes").data
    assert (started["attempt"], started["reused"]) == (2, False)
    assert cloud.on("status").data["job_id"] == started["job_id"]
    for more in ((), ("--yes",)):
        done = cloud.on("resume", *more)
        assert (done.code, done.data["reused"], done.data["job_id"]) == (0, True, started["job_id"])
    assert [(job.number, job.job_id) for job in cloud.record.jobs] == [(1, first.id), (2, started["job_id"])]
    assert cloud.hub.jobs_created == 2
    assert cloud.call("cancel", other).data["stage"] == "CANCELED"
    third = cloud.on("resume", "--yes").data
    assert (third["attempt"], third["reused"], cloud.hub.jobs_created) == (3, False, 3)
    _end(cloud, third["job_id"])
    assert cloud.call("resume", other, "--yes").data["attempt"] == 4
    assert [(job.number, job.state) for job in cloud.record.jobs] == [(number, "started") for number in (1, 2, 3)]


def test_a_job_of_another_folder_is_found_when_it_is_this_ones_turn(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was started after the command looked, and before it has the run directory for itself."""
    from skill_train.commands import resume as resume_command

    first = _cancelled(cloud)
    cloud.hub.faults.add_job(JobFault("stuck", attempt=None))
    priced = resume_command._price

    def meanwhile(flavor: str) -> tuple[float | None, str]:
        monkeypatch.setattr(resume_command, "_price", priced)
        cloud.hub.jobs.create(first.spec | {"labels": first.labels | {"attempt": "2"}}, "me", "me")
        return priced(flavor)

    monkeypatch.setattr(resume_command, "_price", meanwhile)
    data = cloud.on("resume", "--yes").data
    assert (data["reused"], data["job_id"], cloud.hub.jobs_created) == (True, cloud.hub.jobs.all[1].id, 2)
    assert (data["timeout_seconds"], data["cost_usd"]) == (None, None)  # of that job nobody here knows them
    assert cloud.record.jobs[1].job_id == data["job_id"]


def test_nobody_here_knows_the_limit_of_a_job_that_another_folder_asked_for(cloud: Cloud) -> None:
    """Its claim came first, and the list of jobs is behind: its job is seen only while this folder waits its turn."""
    first = _cancelled(cloud)
    cloud.hub.faults.add_job(JobFault("stuck", attempt=None))
    cloud.hub.jobs.listed_after_seconds = 2.0
    jobs.change_names(BUCKET, add=[f"claims/{first.labels['plan']}/{RUN_ID}.2.0a1b2c3d"], delete=[])
    spec = first.spec | {"labels": first.labels | {"attempt": "2"}, "timeoutSeconds": 36_000}
    theirs = cloud.hub.jobs.create(spec, "me", "me")
    done = cloud.on("resume", "--timeout", "10m", "--max-cost", "1", "--yes")
    assert (*done.error, done.answer["error"]["got"]) == (3, "over_budget", "an unknown cost")
    assert (cloud.record.jobs[1].job_id, cloud.record.jobs[1].timeout_seconds) == (theirs.id, None)
    assert cloud.hub.jobs_created == 2


def test_of_two_jobs_of_one_moment_the_record_has_the_one_that_stays(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without our claims started its job just before ours, which is cancelled for it."""
    first, start = _cancelled(cloud), jobs.start
    cloud.hub.faults.add_job(JobFault("stuck", attempt=None))

    def at_the_same_moment(*words: Any) -> Any:
        cloud.hub.jobs.create(first.spec | {"labels": first.labels | {"attempt": "2"}}, "me", "me")
        return start(*words)

    monkeypatch.setattr(jobs, "start", at_the_same_moment)
    data = cloud.on("resume", "--timeout", "10m", "--yes").data
    theirs, ours = cloud.hub.jobs.all[1:]
    assert (data["reused"], data["job_id"], data["timeout_seconds"]) == (True, theirs.id, None)
    assert (ours.cancelled.is_set(), theirs.cancelled.is_set()) == (True, False)
    assert [job.job_id for job in cloud.record.jobs] == [first.id, theirs.id]


def test_the_folder_that_an_answer_left_out_is_asked_for(cloud: Cloud) -> None:
    """The checkpoints are in it. Without it, the run seems to have had no job."""
    first = _cancelled(cloud)
    cloud.write(msgspec.structs.replace(cloud.record, bucket=None, folder=None))
    done = cloud.on("resume", "--yes")
    assert (done.code, done.data["attempt"], cloud.hub.jobs_created) == (0, 2, 2), done.answer
    assert (cloud.record.bucket, cloud.record.folder) == (BUCKET, FOLDER)
    assert cloud.hub.jobs.all[1].spec["volumes"] == first.spec["volumes"]


def test_a_number_whose_job_never_came_is_used(cloud: Cloud) -> None:
    """Else the record would say for ever that a job may be there."""
    _cancelled(cloud)
    never = msgspec.structs.replace(cloud.record.jobs[0], number=2, state="starting", job_id=None, url=None, stage=None)
    cloud.write(cloud.record.with_job(never))  # asked for long ago
    done = cloud.on("resume", "--yes")
    assert (done.code, done.data["attempt"], cloud.hub.jobs_created) == (0, 2, 2), done.answer
    assert [(job.number, job.job_id) for job in cloud.record.jobs][1:] == [(2, done.data["job_id"])]


def test_two_jobs_of_one_number(cloud: Cloud) -> None:
    """Two machines asked for the second job at the same moment: the one that runs is the answer, also after the other's
    end."""
    first = _cancelled(cloud)
    second = _cancelled(cloud)
    cloud.hub.faults.add_job(JobFault("stuck", attempt=None))
    theirs = cloud.hub.jobs.create(first.spec | {"labels": second.labels}, "me", "me")
    data = cloud.on("resume", "--yes").data
    assert (data["reused"], data["job_id"], cloud.hub.jobs_created) == (True, theirs.id, 3)
    assert [job.job_id for job in cloud.record.jobs] == [first.id, theirs.id]
    _end(cloud, theirs.id)
    assert cloud.on("resume", "--yes").data["attempt"] == 3
    assert [job.job_id for job in cloud.record.jobs[:2]] == [first.id, theirs.id]


def test_the_ceiling_holds_for_what_follows_a_job_of_another_folder(cloud: Cloud, tmp_path: Path) -> None:
    """Ten minutes of a t4-small are 6.7 cents; the other folder said no ceiling."""
    first = _cancelled(cloud)
    cloud.write(cloud.record.with_job(msgspec.structs.replace(cloud.record.jobs[0], max_cost=0.06)))
    second = cloud.call("resume", first.id, "--run-dir", str(tmp_path / "other"), "--yes").data
    _end(cloud, second["job_id"])
    done = cloud.on("resume", "--timeout", "10m", "--yes")
    assert (*done.error, cloud.hub.jobs_created) == (3, "over_budget", 2)


def test_the_ceiling_of_a_job_is_known_on_another_machine(cloud: Cloud, tmp_path: Path) -> None:
    """Ten minutes of a t4-small are 6.7 cents. The other folder knows the job by its id alone; labels have no dot."""
    _cancelled(cloud)
    cloud.hub.faults.add_job(JobFault("stuck", attempt=None))
    second = cloud.on("resume", "--timeout", "10m", "--max-cost", "0.0684", "--yes").data["job_id"]
    labels = cloud.hub.jobs.all[1].labels
    assert (labels["timeout"], labels["max-cost-millionths"]) == ("600", "68400")
    _end(cloud, second)
    cloud.hub.jobs.all[1].started = cloud.hub.jobs.all[1].finished - 60  # it is paid for a minute
    other = str(tmp_path / "other")
    for more in ((), ("--yes",)):
        done = cloud.call("resume", f"me/{second}", "--run-dir", other, "--timeout", "10m", *more)
        assert (*done.error, cloud.hub.jobs_created) == (3, "over_budget", 2)
        assert done.answer["error"]["expected"] == "at most $0.068"
    assert cloud.call("resume", other, "--timeout", "10m", "--max-cost", "1", "--yes").data["attempt"] == 3
    assert cloud.hub.jobs.all[2].labels["max-cost-millionths"] == "1000000"


def test_a_finished_run_is_pulled(cloud: Cloud) -> None:
    cloud.keep(cloud_runs.result())
    cloud_runs.wait_for(cloud.start("pass"))
    done = cloud.on("resume", "--yes")
    assert (done.code, done.data["finished"], cloud.hub.jobs_created) == (0, True, 1)
    assert done.answer["next"] == [f"skill-train pull {cloud.run.path}"]


def test_a_finished_run_whose_job_the_hub_forgot_is_not_paid_for_again(cloud: Cloud) -> None:
    """Jobs are deleted, by hand or in time. The record of the run says how this one ended."""
    cloud.keep(cloud_runs.result())
    job = cloud.start("pass")
    cloud_runs.wait_for(job)
    assert cloud.on("pull").code == 0
    cloud.hub.jobs.all.clear()
    for words in (("wait",), ("status",), ("resume",), ("resume", "--yes")):
        done = cloud.on(*words)
        assert (done.code, done.answer["next"]) == (0, [f"skill-train pull {cloud.run.path}"]), words
    assert (cloud.on("pull").code, cloud.hub.jobs.all) == (0, [])


def test_a_run_that_ended_well_and_left_no_result_goes_on(cloud: Cloud) -> None:
    """Also from its last step: what is left is to keep the result."""
    cloud.keep(cloud_runs.checkpoint(10) | {"metrics.jsonl": cloud_runs.metrics(10)})
    cloud_runs.wait_for(cloud.start("pass"))
    pulled = cloud.on("pull")
    assert pulled.answer["next"] == [f"skill-train resume {cloud.run.path}"]
    done = cloud.on("resume")
    assert (*done.error, done.answer["data"]["from_step"]) == (3, "confirm_cost", 10)
    assert done.answer["data"]["why"]["code"] == "nothing_kept"
    done = cloud.on("resume", "--yes")
    assert (done.code, done.data["attempt"], cloud.hub.jobs_created) == (0, 2, 2)


def test_an_edited_recipe_is_not_ignored_by_a_job_that_is_paid_for(cloud: Cloud) -> None:
    """After a loss that became NaN one halves the learning rate in the recipe of the run."""
    _cancelled(cloud)
    text = to_yaml(plan_record.read(cloud.run.plan).recipe_file())
    rate = next(line for line in text.splitlines() if line.startswith("learning_rate:"))
    cloud.run.recipe.write_text(text.replace(rate, "learning_rate: 0.000001"))
    anew = f"skill-train submit {cloud.run.recipe}"
    for words in (("resume", "--yes"), ("resume",), ("submit", "--yes"), ("submit", "--dry-run")):
        done = cloud.on(*words)
        assert (*done.error, done.answer["next"], cloud.hub.jobs_created) == (2, "another_run", [anew], 1)
        assert done.answer["error"]["got"] == "learning_rate: 1e-06"
    cloud.run.recipe.write_text(text)
    assert cloud.on("resume").error == (3, "confirm_cost")


def test_no_job_is_paid_for_whose_program_is_gone(cloud: Cloud) -> None:
    """Somebody emptied the bucket: the job would end in its first minute, and `resume` would be said again."""
    _cancelled(cloud)
    cloud.hub.buckets[BUCKET].files.clear()
    for more in ((), ("--yes",)):
        done = cloud.on("resume", *more)
        again = f"skill-train submit {cloud.run.path} --force-new"
        assert (*done.error, done.answer["next"], cloud.hub.jobs_created) == (2, "nothing_kept", [again], 1)


def test_no_job_is_paid_for_whose_data_is_gone(cloud: Cloud, tmp_path: Path) -> None:
    """A file that is still here is brought back by the command of the hint, and the run goes on."""
    rows = tmp_path / "my rows.jsonl"
    tiny.write_rows(rows, 3)
    staged = stage_data.stage(rows)
    _cancelled(cloud)
    data = CloudData("/dataset", staged.bytes, 1, bucket=BUCKET, folder=staged.name)
    cloud.write(msgspec.structs.replace(cloud.record, data=data))
    anew = f"skill-train submit {cloud.run.path} --force-new"
    for more in ((), ("--yes",)):
        done = cloud.on("resume", *more)  # the plan names other rows
        assert (*done.error, done.answer["next"], cloud.hub.jobs_created) == (2, "nothing_kept", [anew], 1)
    plan = json.loads(cloud.run.plan.read_text())
    cloud.run.plan.write_text(json.dumps(plan | {"recipe": plan["recipe"] | {"data": str(rows)}}))
    *_, command = cloud.on("resume", "--yes").answer["error"]["hint"].partition("hf buckets cp ")
    words = [Path(sys.executable).with_name("hf"), "buckets", "cp", *shlex.split(command)]
    subprocess.run(words, env=cloud.hub.environment(tmp_path / "home"), check=True, timeout=60)
    files, name = cloud.hub.buckets[BUCKET].files, f"{staged.name}/{rows.name}"
    whole = files[name]
    assert whole.size == rows.stat().st_size
    files[name] = dataclasses.replace(whole, size=whole.size - 1)
    assert cloud.on("resume", "--yes").error == (2, "nothing_kept")
    files[name] = whole
    done = cloud.on("resume", "--yes")
    assert (done.code, done.data["attempt"], cloud.hub.jobs_created) == (0, 2, 2)


def test_no_job_is_paid_for_whose_repository_leaves_the_result_out(cloud: Cloud) -> None:
    """Somebody put a .gitignore there since: the job would end in its first minute, or train and not push."""
    _cancelled(cloud)
    plan = json.loads(cloud.run.plan.read_text())
    repository = cloud.hub.add("model", plan["policy"]["hub_model_id"], {".gitignore": b"*.safetensors"}, private=True)
    for more in ((), ("--yes",)):
        done = cloud.on("resume", *more)
        assert (*done.error, cloud.hub.jobs_created) == (2, "output_changed", 1)
        assert "adapter_model.safetensors is in its .gitignore" in done.answer["error"]["message"]
    repository.files[".gitignore"] = b"*.tmp"
    assert cloud.on("resume", "--yes").data["attempt"] == 2


@pytest.mark.parametrize("kind", ["repository", "bucket"])
def test_no_job_writes_to_a_place_that_was_made_public(cloud: Cloud, kind: str) -> None:
    """Private when the run was sent, and public since: checkpoints and the result would be everybody's to read."""
    _cancelled(cloud)
    repository = cloud.hub.add("model", "me/tickets", {"README.md": b"mine"}, private=True)
    place: Any = repository if kind == "repository" else cloud.hub.buckets[BUCKET]
    place.private = False
    for more in ((), ("--yes",)):
        done = cloud.on("resume", *more)
        assert (*done.error, cloud.hub.jobs_created) == (3, "public_repository", 1)
        assert ("me/tickets" if kind == "repository" else BUCKET) in done.answer["error"]["message"]
    place.private = True
    assert cloud.on("resume", "--yes").data["attempt"] == 2


def test_no_job_is_paid_for_whose_dataset_is_gone(cloud: Cloud) -> None:
    """The repository of the data, or the commit in it that the plan was made for."""
    _cancelled(cloud)
    repository = cloud.hub.add("dataset", "me/rows", {"rows.jsonl": b"{}"}, private=True)
    commit = repository.add_commit("main", {"rows.jsonl": b"{} "}, "rows", "me")
    data = CloudData("/dataset", 3, 1, repository="me/rows", revision=commit)
    anew = f"skill-train submit {cloud.run.path} --force-new"
    for gone in (msgspec.structs.replace(data, revision="0" * 40), msgspec.structs.replace(data, repository="me/gone")):
        cloud.write(msgspec.structs.replace(cloud.record, data=gone))
        for more in ((), ("--yes",)):
            done = cloud.on("resume", *more)
            assert (*done.error, done.answer["next"], cloud.hub.jobs_created) == (2, "nothing_kept", [anew], 1)
            assert str(gone.repository) in done.answer["error"]["message"]
    cloud.write(msgspec.structs.replace(cloud.record, data=data))
    done = cloud.on("resume", "--yes")
    assert (done.code, done.data["attempt"], cloud.hub.jobs_created) == (0, 2, 2)


def test_what_was_fetched_is_finished_without_its_bucket(cloud: Cloud) -> None:
    cloud.keep(cloud_runs.result())
    cloud_runs.wait_for(cloud.start("pass"))
    assert cloud.on("pull").data["trained"]
    cloud.hub.buckets.clear()
    assert cloud.on("resume", "--yes").data["finished"]


def test_after_a_lack_of_memory_another_machine_must_be_named(cloud: Cloud) -> None:
    """A t4-medium has 30 GB of RAM where the t4-small has 15; its price is $0.60 (hub-docs, 2026-08-22)."""
    cloud.hub.faults.add_job(JobFault("exit", line="begun"))
    cloud_runs.wait_for(cloud.start(SLEEP))
    done = cloud.on("resume", "--yes")
    assert (*done.error, cloud.hub.jobs_created) == (3, "out_of_memory", 1)
    assert done.answer["error"]["hint"] == f"skill-train resume {cloud.run.path} --flavor t4-medium"
    for wrong in ("a10g-largex2", "moon"):
        assert cloud.on("resume", "--flavor", wrong, "--yes").error[1] == "unknown_flavor"
    over = cloud.on("resume", "--flavor", "t4-medium", "--max-cost", "0.01", "--yes")
    assert over.error == (3, "over_budget")
    data = cloud.on("resume", "--flavor", "t4-medium", "--yes").data
    assert (data["flavor"], data["cost_usd"]["usd_per_hour"]) == ("t4-medium", pytest.approx(0.6, abs=1e-4))
    assert cloud.hub.jobs.all[1].spec["flavor"] == "t4-medium"


@pytest.mark.parametrize(
    ("fault", "exit_code", "created"),
    [
        (faults.SERVER_ERROR, 0, 2),
        (faults.DONE_AND_ERROR, 0, 2),
        (faults.NO_ANSWER, 0, 2),
        (faults.DONE_AND_NO_ANSWER, 0, 2),
        (Fault(408, after=True), 0, 2),
        (Fault(409), 0, 2),
        (faults.NO_CREDIT, 4, 1),
        (faults.NO_PERMISSION, 4, 1),
    ],
)
def test_one_job_whatever_the_answer(
    cloud: Cloud, fault: Fault, exit_code: int, created: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a cancel. The first job and one more, never two; what was refused can be asked for again."""
    from skill_train.cloud import start_once as job_once

    monkeypatch.setattr(job_once, "PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(job_once, "SETTLED_LOOKS", 30)
    _cancelled(cloud)
    cloud.hub.faults.add_job(JobFault("stuck", attempt=None))  # else it may have ended before it is asked for again
    cloud.hub.faults.add(CREATE, fault)
    done = cloud.on("resume", "--yes")
    assert (done.code, cloud.hub.jobs_created, len(cloud.record.jobs)) == (exit_code, created, created)
    again = cloud.on("resume", "--yes")
    assert (again.code, again.data["attempt"], cloud.hub.jobs_created) == (0, 2, 2)
    assert again.data["reused"] is (exit_code == 0)


def test_what_the_hub_refuses_leads_to_no_page_that_is_not_there(cloud: Cloud) -> None:
    """A job has none as a model has one."""
    _cancelled(cloud)
    cloud.hub.faults.add(CREATE, Fault(400))
    done = cloud.on("resume", "--yes")
    assert (*done.error, done.answer["error"]["got"]) == (2, "hub_refused", "status 400: made up")
    assert "https://" not in done.answer["error"]["hint"]


def test_a_start_that_was_cut_off_is_looked_for(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between the request and the record: the job is found by its labels, and none is added."""
    from skill_train.cloud import start_once as job_once

    monkeypatch.setattr(job_once, "PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(job_once, "SETTLED_LOOKS", 15)
    _cancelled(cloud)
    cloud.on("resume", "--yes")
    record = cloud.record
    lost = msgspec.structs.replace(record.jobs[1], state="starting", job_id=None, url=None)
    cloud.write(record.with_job(lost))
    done = cloud.on("resume", "--yes")
    assert (done.data["reused"], done.data["job_id"]) == (True, record.jobs[1].job_id)
    assert (cloud.hub.jobs_created, cloud.record.jobs[1].job_id) == (2, record.jobs[1].job_id)
    cloud.on("cancel")
    cloud.write(record.with_job(lost))
    assert (cloud.on("resume", "--yes").data["attempt"], cloud.hub.jobs_created) == (3, 3)
    assert [job.number for job in cloud.record.jobs if job.job_id] == [1, 2, 3]


def test_the_token_is_nowhere(cloud: Cloud) -> None:
    _cancelled(cloud)
    cloud.keep(cloud_runs.result())
    answers = [cloud.on(*words) for words in (("resume", "--yes"), ("status",), ("cancel",), ("pull",), ("logs",))]
    texts = [done.stdout + done.stderr for done in answers]
    texts += [path.read_text(errors="replace") for path in cloud.run.path.rglob("*") if path.is_file()]
    texts += [repr(cloud.hub.jobs.all), repr(cloud.hub.log)]
    assert not [text for text in texts if cloud.hub.token in text]


def _cancelled(cloud: Cloud) -> Job:
    job = cloud.start(SLEEP)
    _end(cloud, job.id)
    return job


def _end(cloud: Cloud, job_id: str) -> None:
    job = cloud.hub.jobs.get(job_id)
    assert job is not None
    job.cancelled.set()
    cloud_runs.wait_for(job)


def _tree(cloud: Cloud) -> set[str]:
    """Files that a pull brought."""
    ours = {"plan.json", "cloud.json", "pull.json", ".lock", "recipe.yaml"}
    names = {path.relative_to(cloud.run.path).as_posix() for path in cloud.run.path.rglob("*") if path.is_file()}
    return {name for name in names - ours if not name.startswith(".pull.part")}


def _pushed() -> dict[str, bytes]:
    """A result as a job pushes it: beside its records, in no folder."""
    files = cloud_runs.result()
    return {name.removeprefix("adapter/"): files[name] for name in files if name not in ("kept.json", "metrics.jsonl")}


def _child(cloud: Cloud, home: Path, *arguments: str, code: int = 0) -> dict[str, dict[str, object]]:
    """A command in a process of its own: downloads of a repository read the Hub's address when they are imported."""
    program = [sys.executable, "-c", "from skill_train.cli import main; main()", *arguments, "--format", "json"]
    done = subprocess.run(program, env=cloud.hub.environment(home), capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stdout + done.stderr
    answer: dict[str, dict[str, object]] = json.loads(done.stdout)
    return answer
