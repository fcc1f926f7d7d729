"""A Hub, or a store behind it, that takes a connection and then says nothing: every command ends, and says why."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import cloud_runs
import planning
import step_records
import tiny
from cloud_runs import Cloud
from command_child import Commands, Done, program
from hub_emulator import ALWAYS, Fault, Hub, Lie
from hub_models import add_model
from skill_train.core.files import write_json
from skill_train.run import records
from skill_train.run.folder import RunDir
from waiting import wait_until

pytestmark = pytest.mark.slow

pytest.importorskip("huggingface_hub")

VAIN = 2.0  # in place of 60 s
HANGS = Fault(seconds=300)
DRIPS = Fault(body=b": keep-alive\n\n" * 100, drop_seconds=0.3)
SLEEP = "import time; print('begun', flush=True); time.sleep(60)"
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"


def _torture(*members: str) -> list[Any]:
    """Those that `make test` leaves to `make walks`."""
    return [pytest.param(member, marks=pytest.mark.torture) for member in members]


@pytest.fixture
def cloud(hub: Hub, tmp_path: Path) -> Cloud:
    hub.jobs.grace_seconds = 0.5
    run = RunDir(tmp_path / "run")
    write_json(run.plan, cloud_runs.plan())
    return Cloud(hub, run)


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a host that takes every connection and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(64)
        yield f"http://127.0.0.1:{server.getsockname()[1]}/"


class Call:
    """A command in a process of its own, and the seconds that it took."""

    def __init__(self, cloud: Cloud, folder: Path) -> None:
        self._cloud, self._folder, self.seconds = cloud, folder, 0.0

    def __call__(self, *words: object, most: float = 25.0, **more: str) -> Done:
        env = self._cloud.hub.environment(self._folder / "home") | {"TEST_IN_VAIN_SECONDS": str(VAIN)} | more
        started = time.monotonic()
        done = subprocess.run(program(*words), cwd=self._folder, env=env, capture_output=True, text=True, timeout=most)
        self.seconds = time.monotonic() - started
        assert "Traceback" not in done.stderr, done.stderr
        return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def call(cloud: Cloud, tmp_path: Path) -> Call:
    return Call(cloud, tmp_path)


def _running(cloud: Cloud) -> None:
    cloud.keep({"metrics.jsonl": cloud_runs.metrics(4)})
    job = cloud.start(SLEEP)
    wait_until(lambda: job.stage == "RUNNING", 10)


def _assert_gave_up(done: Done, call: Call, *, about: str, then: str) -> None:
    """In time, with what was waited for, said meanwhile too, and the command that asks again."""
    assert done.code == 8, done.stdout + done.stderr
    error = done.answer["error"]
    assert error["code"] == "hub_unreachable" and about in error["message"], error
    assert re.search(r"nothing has moved for \d|no answer within \d", error["got"]), error
    assert error["hint"] == then, error
    assert re.search(rf"(waiting for the Hub, for|the files of) .*{about}.* \d+ s", done.stderr), done.stderr
    assert call.seconds < VAIN + 9, call.seconds


# --- The store, which hf_xet asks by itself ---


@pytest.mark.parametrize(
    "where", ["GET /cas/", "redirected", *_torture("xet-read-token", "HEAD /buckets/", "paths-info")]
)
def test_status_ends_when_the_bucket_does_not_answer(cloud: Cloud, call: Call, silent: str, where: str) -> None:
    _running(cloud)
    if where == "redirected":
        cloud.hub.faults.add("xet-read-token", Fault(307, {"Location": silent}), times=ALWAYS)
    else:
        cloud.hub.faults.add(where, HANGS, times=ALWAYS)
    done = call("status", cloud.run.path)
    _assert_gave_up(done, call, about="the bucket me/jobs-artifacts", then=f"skill-train status {cloud.run.path}")


@pytest.mark.parametrize("where", ["GET /cas/", "/api/", *_torture("/api/jobs/")])
def test_wait_ends_in_its_time_whatever_happens(cloud: Cloud, call: Call, where: str) -> None:
    """Five seconds are for the last look. What the Hub has said of the job is told, without what lies in the bucket."""
    _running(cloud)
    cloud.hub.faults.add(where, HANGS, times=ALWAYS)
    done = call("wait", cloud.run.path, "--timeout", "1", TEST_IN_VAIN_SECONDS="60")
    assert call.seconds < 9
    error, job_known = done.answer["error"], where == "GET /cas/"
    assert (done.code, error["code"]) == (8, "still_running" if job_known else "hub_unreachable"), done.stdout
    assert error["hint"].startswith(f"skill-train wait {cloud.run.path}")
    assert [warning["code"] for warning in done.answer["warnings"]] == ["no_bucket"] * job_known


@pytest.mark.parametrize("command", ["pull", *_torture("logs", "cancel")])
def test_other_questions_end_too(cloud: Cloud, call: Call, command: str) -> None:
    _running(cloud)
    cloud.hub.faults.add("GET /api/jobs/", HANGS, times=ALWAYS)
    done = call(command, cloud.run.path)
    _assert_gave_up(done, call, about="the job me/", then=f"skill-train {command} {cloud.run.path}")


def test_a_log_that_drips_ends(cloud: Cloud, call: Call) -> None:
    """A byte now and then is within the time of each read. The log of a job that has ended should have an end."""
    job = cloud.start("pass")
    wait_until(lambda: job.ended, 10)
    cloud.hub.faults.add("/logs$", DRIPS, times=ALWAYS)
    _assert_gave_up(call("logs", cloud.run.path), call, about="the job me/", then=f"skill-train logs {cloud.run.path}")


@pytest.mark.parametrize("drips", [False, True])
def test_a_running_job_without_a_log_is_no_error(cloud: Cloud, call: Call, drips: bool) -> None:
    """What there is is shown, and nothing was waited for in vain."""
    _running(cloud)
    if drips:
        cloud.hub.faults.add("/logs$", DRIPS, times=ALWAYS)
    data = call("logs", cloud.run.path).data
    assert (data["stage"], data["lines"]) == ("RUNNING", [] if drips else ["begun"])
    assert call.seconds < VAIN + 9


def test_the_log_of_a_silent_job_is_followed_to_its_end(cloud: Cloud, call: Call) -> None:
    """Longer than a silence that is given up."""
    cloud.keep({"metrics.jsonl": cloud_runs.metrics(4)})
    cloud.start(f"import time; print('begun', flush=True); time.sleep({VAIN + 4}); print('done')")
    for more in ((), ("--tail", "5")):
        assert call("logs", cloud.run.path, "--follow", *more, most=60).data["lines"] == ["begun", "done"]


# --- A dataset, which the library `datasets` loads by itself ---

RESOLVE, TREE = "HEAD /datasets/me/rows/resolve/", "GET /api/datasets/me/rows/tree/"


@pytest.mark.parametrize("where", [RESOLVE, TREE])
def test_data_ends_when_the_hub_does_not_answer(cloud: Cloud, call: Call, where: str) -> None:
    _rows(cloud.hub)
    cloud.hub.faults.add(where, HANGS, times=ALWAYS)
    _assert_gave_up(call("data", "me/rows"), call, about="the dataset me/rows", then="skill-train data me/rows")


@pytest.fixture
def asked(desk: tuple[Hub, Commands, Path], tmp_path: Path) -> Iterator[tuple[Hub, Callable[..., Done]]]:
    """The Hub of all tests that wait for nothing, and `data` in the process that they share."""
    hub, commands, home = desk
    _rows(hub)
    yield hub, lambda *words: commands.run(tmp_path, hub.environment(home), "data", *words)
    hub.faults.clear()


@pytest.mark.parametrize("body", [b"", b"null", b"[[1]]", b"5", b'{"x": 1}', b"<html>", b"[" * 100_000, b'[{"x": 1}]'])
def test_data_explains_an_answer_that_is_not_a_listing(asked: tuple[Hub, Callable[..., Done]], body: bytes) -> None:
    hub, data = asked
    hub.faults.add(TREE, Lie(body=body), times=ALWAYS)
    done = data("me/rows")
    assert done.code in (2, 8) and done.answer["error"]["code"] in ("hub_error", "unreadable_dataset"), done


def test_data_explains_an_answer_without_end(asked: tuple[Hub, Callable[..., Done]]) -> None:
    hub, data = asked
    hub.faults.add(TREE, Lie(body=b" " * 101_000_000), times=ALWAYS)
    done = data("me/rows")
    assert done.error == (8, "hub_error") and "100 MB" in done.answer["error"]["expected"], done


def test_data_explains_a_file_that_came_otherwise(asked: tuple[Hub, Callable[..., Done]]) -> None:
    hub, data = asked
    hub.faults.add("GET /datasets/me/rows/resolve/", Lie(body=b"<html>"), times=ALWAYS)
    assert data("me/rows").error == (8, "hub_error")
    hub.faults.clear()
    hub.faults.add(RESOLVE, Lie(), times=ALWAYS)  # without the commit
    assert data("me/rows").error == (8, "hub_error")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("me/broken",), (2, "unreadable_dataset")),
        (("me/none",), (2, "unknown_dataset")),
        (("me/gated",), (4, "gated")),
        (("me/whole", "--split", "best"), (2, "bad_split")),
        (("--recipe", "recipe.yaml"), (2, "unknown_revision")),
    ],
)
def test_data_that_is_not_on_the_hub(
    asked: tuple[Hub, Callable[..., Done]], tmp_path: Path, words: tuple[str, ...], told: tuple[int, str]
) -> None:
    hub, data = asked
    _rows(hub, "me/whole")  # which may be cached from here on
    hub.add("dataset", "me/gated", {"train.jsonl": b"{}"}, gated=True)
    hub.add("dataset", "me/broken", {"train.parquet": b"PAR1, and then no footer"})
    (tmp_path / "recipe.yaml").write_text("model: x/y\ndata: me/whole\ndata_revision: none\n")
    assert data(*words).error == told


def _rows(hub: Hub, name: str = "me/rows") -> None:
    pytest.importorskip("datasets")
    rows = b'{"prompt": "q", "completion": "a"}\n{"prompt": "p", "completion": "b"}\n'
    hub.add("dataset", name, {"train.jsonl": rows, "README.md": b"---\nlicense: mit\n---\n"})


# --- Uploads ---


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A run whose adapter is bytes that nobody reads."""
    folder = tmp_path / "trained"
    files = {
        "adapter_model.safetensors": os.urandom(300_000),
        "adapter_config.json": b'{"peft_type": "LORA", "base_model_name_or_path": "x/y"}',
    }
    (folder / "adapter").mkdir(parents=True)
    for name, content in files.items():
        (folder / "adapter" / name).write_bytes(content)
    recipe = {"model": str(tmp_path / "base"), "revision": None, "data": str(tmp_path / "rows.jsonl")}
    recipe |= {"data_revision": None, "lora_r": 8, "target_modules": ["q_proj"], "seed": 42}
    policy = {"sensitive": False, "hub_model_id": None}
    plan = planning.plan_document(recipe=recipe, policy=policy, fingerprints={})
    outputs = {f"adapter/{name}": cloud_runs.digest(content) for name, content in files.items()}
    training = step_records.trained(outputs, first_loss=2.5, last_loss=0.25)
    (folder / "plan.json").write_text(json.dumps(plan))
    records.write(folder / "train.json", training)
    planning.write_recipe_hash(folder)
    (tmp_path / "base").mkdir()
    return folder


@pytest.mark.parametrize(
    "where", ["redirected", "/commit/", *_torture("xet-write-token", "POST /cas/.*/xorbs", "POST /cas/.*/shards")]
)
def test_push_ends_when_the_store_does_not_answer(
    cloud: Cloud, call: Call, trained: Path, silent: str, where: str
) -> None:
    if where == "redirected":
        cloud.hub.faults.add("xet-write-token", Fault(307, {"Location": silent}), times=ALWAYS)
    else:
        cloud.hub.faults.add(where, HANGS, times=ALWAYS)
    done = call("push", trained, "--repo", "me/tickets")
    _assert_gave_up(done, call, about="the model me/tickets", then=f"skill-train push {trained} --repo me/tickets")
    cloud.hub.faults.clear()
    assert call("push", trained, "--repo", "me/tickets").data["commit"]


@pytest.fixture
def planned(cloud: Cloud, tmp_path: Path) -> list[str]:
    """The words for a model on the Hub and rows on this machine."""
    add_model(cloud.hub)
    rows = [{"prompt": f"{n}?", "completion": "The ticket."} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--model", MODEL, "--data", "rows.jsonl", "--max-steps", "2"]


@pytest.mark.parametrize(
    ("where", "about"),
    [
        ("POST /cas/", "the bucket me/jobs-artifacts"),
        pytest.param("xet-write-token", "the bucket me/jobs-artifacts", marks=pytest.mark.torture),
        pytest.param("redirected", "the bucket me/jobs-artifacts", marks=pytest.mark.torture),
        ("GET .*/auth-check", "the model"),
    ],
)
def test_submit_ends_when_the_store_does_not_answer(
    cloud: Cloud, call: Call, planned: list[str], silent: str, where: str, about: str
) -> None:
    if where == "redirected":
        cloud.hub.faults.add("xet-write-token", Fault(307, {"Location": silent}), times=ALWAYS)
    else:
        cloud.hub.faults.add(where, HANGS, times=ALWAYS)
    said = ["submit", *planned, "--yes"]
    done = call(*said)
    _assert_gave_up(done, call, about=about, then=" ".join(["skill-train", *said]))
    assert cloud.hub.jobs_created == 0


@contextlib.contextmanager
def _slow(address: str, per_second: int) -> Iterator[str]:
    """What is sent to this address arrives there, slowly."""
    host, _, port = address.removeprefix("http://").partition(":")

    def pump(source: socket.socket, target: socket.socket, piece: int) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(piece):
                target.sendall(data)
                if piece < 1 << 16:
                    time.sleep(len(data) / per_second)
            target.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = server.accept()
                there = socket.create_connection((host, int(port)))
                threading.Thread(target=pump, args=(client, there, 1 << 14), daemon=True).start()
                threading.Thread(target=pump, args=(there, client, 1 << 16), daemon=True).start()

    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
        server.bind(("127.0.0.1", 0))
        server.listen(64)
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_an_upload_that_is_slow_is_not_given_up(cloud: Cloud, call: Call, trained: Path) -> None:
    """It takes longer than the three seconds after which one that stands still is given up."""
    content = os.urandom(20_000_000)
    (trained / "adapter" / "adapter_model.safetensors").write_bytes(content)
    training = json.loads((trained / "train.json").read_text())
    training["outputs"]["adapter/adapter_model.safetensors"] = cloud_runs.digest(content)
    (trained / "train.json").write_text(json.dumps(training))
    with _slow(cloud.hub.endpoint, 3_000_000) as address:
        cloud.hub.cas = cloud.hub.cas.replace(cloud.hub.endpoint, address)
        done = call("push", trained, "--repo", "me/tickets", most=60, TEST_IN_VAIN_SECONDS="3")
    assert done.data["commit"]
    assert call.seconds > 5
    assert re.search(r"the files of the model me/tickets: \d+\.\d MB have moved, the last \d s ago", done.stderr)


# --- What the Hub says ---


ESCAPES = "\x1b]0;taken\x07\x1b[2J"


def test_no_word_of_the_hub_steers_the_terminal(cloud: Cloud, call: Call, trained: Path, tmp_path: Path) -> None:
    """On a terminal, where the client would draw its own bars; it logs what the Hub warns of, too."""
    (trained / "adapter" / "a\x1b[2Jb.json").write_text("{}")
    warned = Fault(503, {"X-HF-Warning": f"x; {ESCAPES}beware"})
    cloud.hub.faults.add("POST /api/repos/create", warned)
    cloud.hub.faults.add("GET .*/xet-write-token", warned)
    env = cloud.hub.environment(tmp_path / "home")
    del env["HF_HUB_DISABLE_PROGRESS_BARS"]
    main, end = pty.openpty()
    words = program("push", trained, "--repo", "me/tickets", "--format", "json")
    child = subprocess.Popen(words, env=env, stderr=end, stdout=subprocess.PIPE)
    os.close(end)
    output = b""
    with contextlib.suppress(OSError):  # of a terminal whose last program has gone
        while piece := os.read(main, 1 << 16):
            output += piece
    assert child.wait(30) == 0 and child.stdout is not None, output
    child.stdout.close()
    os.close(main)
    assert b"beware" in output
    assert not re.search(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", output.replace(b"\r\n", b"\n")), output


# --- Kept away ---


def _assert_kept_away(done: Done, call: Call, cloud: Cloud) -> None:
    error = done.answer["error"]
    assert (done.code, error["code"]) == (8, "hub_unreachable"), done.stdout + done.stderr
    assert error["hint"].startswith("unset HF_HUB_OFFLINE") and "HF_HUB_OFFLINE" in error["message"], error
    assert "again" not in done.stderr and cloud.hub.log == []
    assert call.seconds < 5, call.seconds


@pytest.mark.parametrize(
    "words",
    [
        *("status RUN", "resume RUN", "push TRAINED --repo me/tickets"),
        *_torture("status me/0123456789abcdef01234567", "status 0123456789abcdef01234567", "wait RUN", "logs RUN"),
        *_torture("cancel RUN", "pull RUN"),
    ],
)
def test_offline_is_told_at_once(cloud: Cloud, call: Call, trained: Path, words: str) -> None:
    _running(cloud)
    cloud.hub.log.clear()
    places = {"RUN": str(cloud.run.path), "TRAINED": str(trained)}
    done = call(*(places.get(word, word) for word in words.split()), HF_HUB_OFFLINE="1", TEST_IN_VAIN_SECONDS="60")
    _assert_kept_away(done, call, cloud)


def test_submit_offline(cloud: Cloud, call: Call, planned: list[str]) -> None:
    """Also of a plan that was made before, of which nothing but the job is asked."""
    _assert_kept_away(call("submit", *planned, "--yes", HF_HUB_OFFLINE="1"), call, cloud)
    assert call("plan", *planned, "--flavor", "l4x1", "--out", "plan.json").code == 0
    cloud.hub.log.clear()
    _assert_kept_away(call("submit", "plan.json", "--yes", HF_HUB_OFFLINE="1"), call, cloud)


def test_a_plan_is_trained_with_every_small_file_of_its_model(desk: tuple[Hub, Commands, Path], tmp_path: Path) -> None:
    """transformers takes a file that it cannot fetch for one that the model does not have."""
    hub, commands, _ = desk
    hub.add("model", "me/tiny", {path.name: path.read_bytes() for path in tiny.cached("gemma").iterdir()})
    tiny.write_rows(tmp_path / "rows.jsonl", 24)
    environment = hub.environment(tmp_path / "home")
    words = ("--model", "me/tiny", "--data", "rows.jsonl", "--max-steps", "2", "--where", "local", "--out", "plan.json")
    assert commands.run(tmp_path, environment, "plan", *words).code == 0
    hub.faults.add("/me/tiny/resolve/.*/generation_config.json", Fault(520), times=ALWAYS)
    try:
        assert commands.run(tmp_path, environment, "local", "plan.json", "--run-dir", "run").error == (8, "hub_error")
    finally:
        hub.faults.clear()
