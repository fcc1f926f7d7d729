"""`train.py --job` on a tiny Gemma: in a plain folder, and as a real job of the Hub for tests.

However a job is stopped, its run ends with the bytes of one that nobody disturbed (CPU, float32, dropout on).
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

import tiny
import training
from hub_emulator import ALWAYS, Fault, Hub, JobFault, Lie
from hub_emulator.faults import DONE_AND_ERROR, NO_ANSWER, SERVER_ERROR, UNAUTHORIZED
from skill_train.cloud.failure_reason import Ending, explain
from skill_train.machine.training_program import train_program
from skill_train.program.cloud.job import keep_results
from skill_train.program.main import main
from waiting import wait_until

pytestmark = pytest.mark.slow

STEPS = 24
PYTHON = sys.executable

# The program, looking more often, because these runs take two seconds; and not waiting for a Hub that fails.
QUICK = """
import os, sys
from pathlib import Path
from skill_train.machine.training_program import train_program
from skill_train.program import main
from skill_train.program.cloud import job, push
job.KEEP_SECONDS, push.PAUSES, job.PAUSES = 0.02, (0, 0), (0,) * 5
job.PROGRAM = Path(os.environ.get("TEST_PROGRAM", train_program()))
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def straight(own_threads: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Never stopped, and no job."""
    run = _write(tmp_path_factory.mktemp("straight") / "run")
    assert main([str(run / "plan.json")]) == 0
    return run


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """The job's own, which is lost with it."""
    made = tmp_path / "disk"
    made.mkdir()
    return made


@pytest.fixture
def _real_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is killed here is the training itself, and nothing that stands for it."""
    monkeypatch.setattr(sys, "executable", PYTHON)


# --- In a plain folder ---


@pytest.mark.torture
@pytest.mark.usefixtures("_real_python")
def test_stopped_again_and_again_it_ends_with_the_same_bytes(straight: Path, tmp_path: Path, disk: Path) -> None:
    """Killed at a random step, with a torn checkpoint afterwards; then its folder takes no results; then once more."""
    run, step = _write(tmp_path / "run"), random.randrange(6, STEPS)
    print(f"killed at step {step}")
    killed, _ = _job(run, disk, stop_at=step)
    assert killed == -signal.SIGKILL and not (run / "kept.json").exists() and not (run / "adapter").exists()

    newest, older, *_ = _kept(run)  # a third, when it was killed before it had removed that
    _flip(run / "checkpoints" / newest / "optimizer.pt")
    (run / "train.json").mkdir()  # where the file is to lie
    code, events = _job(run, disk)
    assert (code, events[-1]["error"]["code"]) == (5, "not_kept") and not (run / "kept.json").exists()
    notes = [e["text"] for e in events if e["event"] == "note"]
    assert [note for note in notes if newest in note or older in note][:2] == [
        f"{newest} was not kept whole and is left out",
        f"{older} was kept and is whole",
    ]
    assert "the results could not be kept" in notes[-1]
    assert next(e["step"] for e in events if e["event"] == "step") == int(older.split("-")[1]) + 1

    (run / "train.json").rmdir()
    code, events = _job(run, disk)
    assert code == 0 and not [e for e in events if e["event"] == "step"]
    _assert_same(run, straight)
    assert _kept(run) == [f"checkpoint-{STEPS}", f"checkpoint-{STEPS - 2}"]
    assert (
        json.loads((run / "train.json").read_text())["answer"]
        == json.loads((straight / "train.json").read_text())["answer"]
    )  # of which one half was measured before the first step, two starts ago
    _assert_digests(run)
    assert not list(run.rglob("*.part"))


@pytest.mark.usefixtures("_real_python")
def test_a_polite_end_keeps_a_checkpoint_even_in_the_middle_of_a_copy(tmp_path: Path, disk: Path) -> None:
    """The copy of the first checkpoint is held up in a pipe while SIGTERM arrives."""
    run = _write(tmp_path / "run", max_steps=400, save_steps=3)
    pipe = run / "checkpoints" / "checkpoint-3" / "optimizer.pt"
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    process = _start(run, disk, hub=dict(os.environ) | {"SKILL_TRAIN_RUN": "0123456789ab"})  # as a job has it
    events: list[dict[str, Any]] = []
    for line in process.stdout or ():
        events += training.events(line)
        if _after(events, 5):
            break
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    assert process.poll() is None
    copied = pipe.read_bytes()
    assert len(copied) > 1000
    events += training.events(process.communicate(timeout=200)[0])
    assert process.returncode == 5
    saved = max(e["step"] for e in events if e["event"] == "step")
    assert _kept(run)[0] == f"checkpoint-{saved}" and saved < 400
    marker = json.loads((run / "kept.json").read_text())
    assert (marker["state"], marker["exit_code"]) == ("failed", 5)
    error = json.loads((run / "train.failed.json").read_text())["error"]
    assert (error["code"], error["hint"].split(":")[0]) == ("interrupted", "start the run again")
    if pipe.parent.is_dir():  # unless two newer ones came after it
        pipe.unlink()
        pipe.write_bytes(copied)
    _assert_digests(run)
    assert list(disk.glob("skill-train-*")) == []


# --- As a job ---


def test_a_token_that_cannot_write_ends_the_job_before_it_costs(hub: Hub, tmp_path: Path, disk: Path) -> None:
    run = _write(tmp_path / "run", hub_model_id="me/tuned")
    token = hub.new_token("read", ())
    code, events = _job(run, disk, "--job", hub=hub.environment(tmp_path / "home", token=token))
    assert code == 4
    assert [e["event"] for e in events] == ["stage", "failed"]  # not even the data was read
    failure = json.loads((run / "train.failed.json").read_text())
    assert (failure["exit_code"], failure["error"]["code"]) == (4, "no_permission")
    assert token not in json.dumps(events) + (run / "train.failed.json").read_text()
    code, events = _job(run, disk, "--job", hub=hub.environment(tmp_path / "home", token=None))
    assert (code, events[-1]["error"]["code"]) == (4, "not_signed_in")
    hub.faults.add("POST /api/repos/create", SERVER_ERROR, times=ALWAYS)
    code, events = _job(run, disk, "--job", hub=hub.environment(tmp_path / "home"))
    assert (code, events[-1]["error"]["code"]) == (8, "hub_unreachable")
    assert [e["event"] for e in events] == ["stage", "note", "note", "failed"]


@pytest.mark.parametrize(
    ("fault", "files", "code", "exit_code", "first"),
    [
        (None, "", "gated", 4, "hf auth login"),
        pytest.param(UNAUTHORIZED, "", "bad_token", 4, "hf auth login", marks=pytest.mark.torture),
        pytest.param(NO_ANSWER, "", "hub_unreachable", 8, "skill-train resume runs/x", marks=pytest.mark.torture),
        (NO_ANSWER, ".*safetensors", "hub_unreachable", 8, "skill-train resume runs/x"),
        (Fault(520), ".*tokenizer_config.json", "hub_unreachable", 8, "skill-train resume runs/x"),
    ],
)
def test_a_model_that_cannot_be_read_is_explained(
    hub: Hub, tmp_path: Path, fault: Fault | None, files: str, code: str, exit_code: int, first: str
) -> None:
    """Without a fault the model is gated. Without its tokenizer_config.json it would be another model."""
    run = _write_on_hub(hub, tmp_path / "run", gated=fault is None)
    if fault is not None:
        hub.faults.add(f"(GET|HEAD) /(api/models/)?me/tiny/{files}", fault, times=ALWAYS)
    environment = hub.environment(tmp_path / "home") | {"SKILL_TRAIN_RUN": "0123456789ab"}  # as a job has it
    process = _start(run, None, "--job", hub=environment, errors=subprocess.STDOUT)
    lines = process.communicate(timeout=200)[0].splitlines()
    assert process.returncode == exit_code, lines
    ending = Ending("ERROR", f"Job failed with exit code: {exit_code}. Reason: Error", lines=tuple(lines[-60:]))
    story = explain(ending, run="runs/x")
    assert (story.code, story.exit_code, story.next[0]) == (code, exit_code, first), lines


def test_a_dropped_connection_costs_no_job(hub: Hub, tmp_path: Path) -> None:
    """One in each try: transformers reports some as a tokenizer or weights that are missing, datasets as missing data.
    One request is never answered."""
    run = _write_on_hub(hub, tmp_path / "run", max_steps=2)
    faults = [("me/tiny/.*/config.json", NO_ANSWER), ("me/tiny/.*chat_template.jinja", NO_ANSWER)]
    faults += [("datasets/me/rows/.*README.md", Fault(520)), ("me/tiny/.*l.safetensors", Fault(520))]
    faults += [("me/tiny/.*l.safetensors", Fault(502))]
    for path, fault in faults:
        hub.faults.add(f"{'GET' if fault.status == 502 else 'HEAD'} /{path}$", fault)
    hub.faults.add("GET /api/models/me/tiny/tree/[0-9a-f]+$", Fault(seconds=600))
    program = tmp_path / "train.py"
    program.write_text(train_program().read_text().replace("REQUEST_SECONDS = 60.0", "REQUEST_SECONDS = 1.0"))
    environment = hub.environment(tmp_path / "home") | {"SKILL_TRAIN_RUN": "0123456789ab"}  # as a job has it
    environment["TEST_PROGRAM"] = str(program)
    process = _start(run, None, "--job", hub=environment, errors=subprocess.STDOUT)
    output = process.communicate(timeout=200)[0]
    assert process.returncode == 0, output
    events = training.events(output)
    assert [e["error"]["code"] for e in events if e["event"] == "failed"] == ["hub_unreachable"] * 5
    assert (len(hub.faults.struck), events[-1]["event"]) == (6, "pushed")
    assert not (run / "train.failed.json").exists()


def test_a_rehearsal_waits_for_no_hub(hub: Hub, tmp_path: Path) -> None:
    """It is on the user's machine, and costs nothing."""
    run = _write_on_hub(hub, tmp_path / "run")
    hub.faults.add("(GET|HEAD) /(api/models/)?me/tiny/", NO_ANSWER, times=ALWAYS)
    process = _start(run, None, hub=hub.environment(tmp_path / "home"), errors=subprocess.STDOUT)
    output = process.communicate(timeout=200)[0]
    assert process.returncode == 8, output
    assert [e["event"] for e in training.events(output)].count("failed") == 1


def test_a_tokenizer_with_other_bytes_than_the_hub_announced_trains_nothing(hub: Hub, tmp_path: Path) -> None:
    """As many bytes: the client checks no more. Of a file in LFS the Hub announces the SHA-256."""
    run = _write_on_hub(hub, tmp_path / "run")
    model = hub.repositories["model", "me/tiny"]
    model.lfs = {"tokenizer.json"}
    content = model.files["tokenizer.json"]
    hub.faults.add("GET /me/tiny/.*/tokenizer.json$", Lie(200, {}, content.replace(b'"version"', b'"vexsion"', 1)))
    environment = hub.environment(tmp_path / "home") | {"SKILL_TRAIN_RUN": "0123456789ab"}
    process = _start(run, None, "--job", hub=environment, errors=subprocess.STDOUT)
    output = process.communicate(timeout=200)[0]
    [failed] = [e for e in training.events(output) if e["event"] == "failed"]
    assert (process.returncode, failed["error"]["code"], len(hub.faults.struck)) == (2, "broken_model", 1), output
    assert failed["error"]["message"].endswith("has other bytes than the Hub announced")


_COMMIT = """
import json, train
train.PAUSES, train.REQUEST_SECONDS = (0,) * 20, 1.0
plan = {"policy": {"hub_model_id": "me/new"}, "recipe": {"finetuning_type": "lora"}}
print(json.dumps({"commit": train.commit(plan, {"a.txt": b"a row"}, "x")}))
"""


def test_answers_that_cannot_be_read_are_asked_for_again(hub: Hub, tmp_path: Path) -> None:
    """Other JSON than the client expects, a page in place of JSON, and no answer at all."""
    for request in ("POST /api/repos/create", "GET /api/models/me/new", "POST /api/models/me/new/preupload/.*"):
        for call, body in enumerate((b"[]", b"null", b"7", b"<html>"), start=1):
            hub.faults.add(f"{request}$", Lie(200, {"Content-Type": "application/json"}, body), call=call)
        hub.faults.add(f"{request}$", Fault(seconds=600), call=5)
    environment = hub.environment(tmp_path / "home") | {"PYTHONPATH": str(train_program().parent)}
    words = [sys.executable, "-c", _COMMIT]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=100)
    assert json.loads(done.stdout.splitlines()[-1]) == {"commit": hub.repositories["model", "me/new"].commit("main")}
    assert len(hub.faults.struck) == 15 and "Traceback" not in done.stderr


def test_a_push_that_fails_loses_nothing(hub: Hub, straight: Path, tmp_path: Path, disk: Path) -> None:
    """The run was trained; what was kept is pushed at the next start, and once."""
    run = _write(tmp_path / "run", hub_model_id="me/tuned")
    keep_results(straight, run, None)
    hub.faults.add("POST /api/models/me/tuned/commit", SERVER_ERROR, times=3)
    hub.faults.add("POST /api/models/me/tuned/commit", Fault(403), call=4)
    for end in ("hub", "token"):
        code, events = _job(run, disk, "--job", hub=hub.environment(tmp_path / "home"))
        assert (code, events[-1]["error"]["code"]) == (5, "push_failed"), end
        assert json.loads((run / "kept.json").read_text())["state"] == "done"
        assert not (run / "train.failed.json").exists()
    commits = []
    for _ in range(2):
        code, events = _job(run, disk, "--job", hub=hub.environment(tmp_path / "home"))
        assert code == 0
        assert {e["event"] for e in events} == {"note", "stage", "pushed"}
        commits.append(events[-1]["commit"])
    assert commits[0] == commits[1] == hub.repositories["model", "me/tuned"].commit("main")
    assert len(hub.repositories["model", "me/tuned"].history["main"]) == 1


@pytest.mark.parametrize(
    ("kind", "left_out", "named"),
    [
        ("lora", "*.safetensors", "adapter_model.safetensors"),
        ("full", "model-*.safetensors", "model-00001-of-00002.safetensors"),
        ("lora", "environment.json", "environment.json"),
        ("full", "tokenizer_*", "tokenizer_config.json"),
        (
            "lora",
            "*.json",
            "adapter_config.json, environment.json, recipe.json, tokenizer.json, train.json, training.json",
        ),
    ],
)
def test_a_repository_that_leaves_the_result_out_ends_the_job_before_it_costs(
    hub: Hub, tmp_path: Path, disk: Path, kind: str, left_out: str, named: str
) -> None:
    repository = hub.add("model", "me/tuned", {".gitignore": f"*.pyc\n{left_out}\n".encode()}, private=True)
    run = _write(tmp_path / "run", hub_model_id="me/tuned")
    plan = json.loads((run / "plan.json").read_text())
    plan["recipe"]["finetuning_type"] = kind
    (run / "plan.json").write_text(json.dumps(plan))
    code, events = _job(run, disk, "--job", hub=hub.environment(tmp_path / "home"))
    assert (code, [e["event"] for e in events]) == (2, ["stage", "failed"])  # not even the data was read
    error = json.loads((run / "train.failed.json").read_text())["error"]
    assert (error["code"], error["message"]) == ("output_changed", f"the .gitignore of me/tuned leaves out {named}")
    assert not repository.history
    lines = tuple(json.dumps(event) for event in events)
    assert (
        explain(Ending("ERROR", "Job failed with exit code: 2", lines=lines), run="runs/x")
        .next[0]
        .startswith("skill-train resume")
    )


def test_a_repository_that_somebody_made_public_is_not_written(
    hub: Hub, straight: Path, tmp_path: Path, disk: Path
) -> None:
    """At the start, before it costs, and at the push, where what was trained stays in the bucket."""
    repository = hub.add("model", "me/tuned", {"README.md": b"old"}, private=False)
    run = _write(tmp_path / "run", hub_model_id="me/tuned")
    code, events = _job(run, disk, "--job", hub=hub.environment(tmp_path / "home"))
    assert (code, [e["event"] for e in events]) == (3, ["stage", "failed"])
    error = json.loads((run / "train.failed.json").read_text())["error"]
    assert error["code"] == "public_repository" and "me/tuned/settings makes it private" in error["hint"]
    lines = tuple(json.dumps(event) for event in events)
    story = explain(Ending("ERROR", "Job failed with exit code: 3", lines=lines), run="runs/x")
    assert (story.code, story.exit_code, story.next[0]) == ("public_repository", 3, "skill-train resume runs/x")
    keep_results(straight, run, None)
    code, events = _job(run, disk, "--job", hub=hub.environment(tmp_path / "home"))
    assert (code, events[-1]["error"]["code"]) == (5, "push_failed")
    assert "is public" in events[-1]["error"]["message"]
    assert (set(repository.files), repository.history) == ({"README.md"}, {})


def test_a_repository_that_leaves_files_out_gets_no_half_of_a_result(
    hub: Hub, straight: Path, tmp_path: Path, disk: Path
) -> None:
    """Somebody adds a .gitignore during the training. The push is told as one once everything is there."""
    files = {".gitignore": b"environment.json", "README.md": b"old"}
    repository = hub.add("model", "me/tuned", files, private=True)
    run = _write(tmp_path / "run", hub_model_id="me/tuned")
    keep_results(straight, run, None)
    code, events = _job(run, disk, "--job", hub=hub.environment(tmp_path / "home"))
    assert (code, events[-1]["error"]["code"]) == (5, "push_failed")
    assert "leaves out environment.json" in events[-1]["error"]["message"]
    assert repository.files == files and not repository.history
    repository.files[".gitignore"] = b"*.pyc"
    code, events = _job(run, disk, "--job", hub=hub.environment(tmp_path / "home"))
    assert (code, events[-1]["event"], "environment.json" in repository.files) == (0, "pushed", True)


def test_a_job_that_is_killed_goes_on_and_is_pushed(hub: Hub, straight: Path, tmp_path: Path, disk: Path) -> None:
    """Data travels as a volume. The first job dies at a random step, the second is answered 503 before it trains, and
    500, nothing, and 500 although it was done, when it pushes."""
    step, data = random.randrange(1, STEPS), tmp_path / "data"
    print(f"killed at step {step}")
    run = _write(tmp_path / "run", hub_model_id="me/tuned")
    shutil.copytree(run.parent, data, ignore=lambda _, names: [n for n in names if n != "rows.jsonl"])
    hub.faults.add_job(JobFault("exit", 137, line=f'"step": {step},', job=1))
    first = _submit(hub, tmp_path / "home", run, data, disk)
    assert first.message == "Job failed with exit code: 137. Reason: OOMKilled"
    assert set(hub.repositories["model", "me/tuned"].files) == {".gitattributes", "training.json"}
    assert json.loads(hub.repositories["model", "me/tuned"].files["training.json"]) == {
        "run": "0123456789ab",
        "recipe_hash": json.loads((run / "plan.json").read_text())["recipe_hash"],
        "state": "training",
    }

    commit = "POST /api/models/me/tuned/commit"
    hub.faults.add("POST /api/repos/create", Fault(503))
    for call, fault in enumerate((SERVER_ERROR, NO_ANSWER, DONE_AND_ERROR), start=1):
        hub.faults.add(commit, fault, call=call)
    second = _submit(hub, tmp_path / "home", run, data, disk, again=first)
    assert (second.stage, second.message) == ("COMPLETED", None), second.lines
    assert [struck.split(" ")[-1] for struck in hub.faults.struck] == ["503", "500", "0", "500"]
    folder = _download(hub, first, tmp_path / "kept")
    _assert_same(folder, straight)
    _assert_digests(folder)

    repository = hub.repositories["model", "me/tuned"]
    records = {".gitattributes", "README.md", "train.json", "environment.json", "recipe.json"}
    assert set(repository.files) == records | {path.name for path in (straight / "adapter").iterdir()}
    assert repository.files["adapter_model.safetensors"] == _weights(straight).read_bytes()
    assert len(repository.history["main"]) == 2 and repository.private
    assert ModelCard(repository.files["README.md"].decode()).data.library_name == "peft"
    for name in ("README.md", "recipe.json"):
        assert str(tiny.cached("gemma").parent) not in repository.files[name].decode()
    assert json.loads(repository.files["train.json"])["run"] == "0123456789ab"
    _assert_no_rows(repository.files, folder, tiny.rows(24))
    pushed = training.events("\n".join(second.lines))[-1]
    assert pushed == {"event": "pushed", "repo": "me/tuned", "commit": repository.commit("main")}
    _assert_nowhere(hub, hub.token, tmp_path)


# --- How ---


def _write(run: Path, **values: Any) -> Path:
    return training.write_run(run, **{"max_steps": STEPS, **values})


def _write_on_hub(hub: Hub, run: Path, *, gated: bool = False, **values: Any) -> Path:
    """A run whose model and rows are on the Hub."""
    _write(run, hub_model_id="me/tuned", **values)
    there = {path.name: path.read_bytes() for path in tiny.cached("gemma").iterdir()}
    model = hub.add("model", "me/tiny", there, gated=gated)
    rows = hub.add("dataset", "me/rows", {"train.jsonl": (run.parent / "rows.jsonl").read_bytes()})
    plan = json.loads((run / "plan.json").read_text())
    plan["recipe"] |= {"model": "me/tiny", "revision": model.commit("main")}
    plan["recipe"] |= {"data": "me/rows", "data_revision": rows.commit("main")}
    plan["fingerprints"] = {"model": None, "data": None}
    (run / "plan.json").write_text(json.dumps(plan))
    return run


def _start(
    run: Path, disk: Path | None, *arguments: str, hub: dict[str, str] | None = None, errors: int = subprocess.DEVNULL
) -> subprocess.Popen[str]:
    """In a group of its own, as in a container. Libraries read the folder of a disk when they are imported: without one
    the training starts warm."""
    command = [sys.executable, "-c", QUICK, str(run / "plan.json"), *(arguments or ("--job", "--rehearse"))]
    environment = (hub or dict(os.environ)) | ({"TMPDIR": str(disk)} if disk else {})
    out = subprocess.PIPE
    return subprocess.Popen(command, stdout=out, stderr=errors, text=True, env=environment, start_new_session=True)


def _job(
    run: Path, disk: Path, *arguments: str, hub: dict[str, str] | None = None, stop_at: int | None = None
) -> tuple[int, list[dict[str, Any]]]:
    """Its exit code and events. Everything of it is killed after a step, when it has kept something."""
    process = _start(run, disk, *arguments, hub=hub)
    events: list[dict[str, Any]] = []
    for line in process.stdout or ():
        events += training.events(line)
        if stop_at is not None and len([e for e in events if e["event"] == "kept"]) > 1 and _after(events, stop_at):
            os.killpg(process.pid, signal.SIGKILL)
            stop_at = None
    return process.wait(), events


def _after(seen: list[dict[str, Any]], step: int) -> bool:
    return any(e["event"] == "step" and e["step"] >= step for e in seen)


def _kept(run: Path) -> list[str]:
    """The newest first."""
    names = [path.parent.name for path in run.glob("checkpoints/checkpoint-*/kept.json")]
    return sorted(names, key=lambda name: int(name.split("-")[1]), reverse=True)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _weights(run: Path) -> Path:
    return run / "adapter" / "adapter_model.safetensors"


def _assert_same(run: Path, straight: Path) -> None:
    assert _weights(run).read_bytes() == _weights(straight).read_bytes()
    losses = [[line["loss"] for line in training.metrics(r)] for r in (run, straight)]
    assert losses[0] == losses[1] and len(losses[0]) == STEPS


def _assert_digests(run: Path) -> None:
    """Every marker says what lies there."""
    marker = json.loads((run / "kept.json").read_text())
    assert {"train.log", "metrics.jsonl", "environment.json"} <= set(marker["files"])
    folders = [(run, marker["files"])]
    for path in run.glob("checkpoints/checkpoint-*/kept.json"):
        folders.append((path.parent, json.loads(path.read_text())))
    assert len(folders) > 1
    for folder, files in folders:
        for name, digest in files.items():
            content = (folder / name).read_bytes()
            assert digest == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}, name


_SUBMIT = """
import dataclasses, json, sys
from pathlib import Path
from skill_train.hub import jobs
from skill_train.run.job_spec import JobSpec
program, plan, data, disk, again = sys.argv[1:]
mount = jobs.sync_data(Path(data), "/dataset", "me", "rows")
spec = JobSpec("me", Path(program), Path(plan), (plan, "--job", "--data", "/dataset/rows.jsonl"), "cpu-basic", 600,
    {"SKILL_TRAIN_RUN": "0123456789ab", "TMPDIR": disk}, {"run": "0123456789ab"}, "skill-train", (), (mount,))
bucket = json.loads(again)
print(json.dumps(jobs.start(spec, tuple(bucket) if bucket else jobs.upload(spec)).bucket))
"""


def _submit(hub: Hub, home: Path, run: Path, data: Path, disk: Path, *, again: Any = None) -> Any:
    """The emulator's job, ended."""
    folder = json.dumps(again.bucket if again else None)
    command = [sys.executable, "-c", _SUBMIT, str(train_program()), str(run / "plan.json"), str(data), str(disk)]
    done = subprocess.run([*command, folder], capture_output=True, text=True, env=hub.environment(home), timeout=60)
    assert done.returncode == 0, done.stderr
    job = hub.jobs.all[-1]
    wait_until(lambda: job.ended, 250, job.lines)
    job.bucket = json.loads(done.stdout.splitlines()[-1])
    return job


def _download(hub: Hub, job: Any, target: Path) -> Path:
    """What lies in the job's folder of its bucket."""
    bucket, folder = job.bucket
    files = hub.buckets[bucket].inside(folder)
    hub.store.download([(f.name, f.size, target / name[len(folder) + 1 :]) for name, f in files.items()])
    return target


def _assert_no_rows(pushed: dict[str, bytes], kept: Path, rows: list[dict[str, Any]]) -> None:
    """The repository may become public; the bucket keeps the whole record, with a row and the answers to one."""
    whole = (kept / "train.json").read_text()
    record = json.loads(whole)
    texts = [message["content"] for row in rows for message in row["messages"]]
    answers = [record["answer"][key] for key in ("prompt", "before", "after")]
    assert record["example"] and any(text in whole for text in texts)
    everything = "\n".join(content.decode("utf-8", "replace") for content in pushed.values())
    assert [text for text in (*texts, *answers, record["example"]) if text in everything] == []
    assert [text for text in answers if json.dumps(text, ensure_ascii=False)[1:-1] in everything] == []
    sent = json.loads(pushed["train.json"])
    assert sent == {key: value for key, value in record.items() if key not in ("example", "answer")}


def _assert_nowhere(hub: Hub, secret: str, tmp_path: Path) -> None:
    texts = [p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p.stat().st_size < 10_000_000]
    texts += [content for repository in hub.repositories.values() for content in repository.files.values()]
    for number, (name, bucket) in enumerate(hub.buckets.items()):
        assert name == "me/jobs-artifacts"
        target = tmp_path / f"bucket-{number}"
        hub.store.download([(f.name, f.size, target / path) for path, f in bucket.files.items()])
        texts += [p.read_bytes() for p in target.rglob("*") if p.is_file()]
    texts += [repr((job.spec, job.labels, job.lines, job.commands)).encode() for job in hub.jobs.all]
    assert len(texts) > 50
    assert not [text[:200] for text in texts if secret.encode() in text]
