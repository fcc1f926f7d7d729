"""What a hostile Hub may answer: its JSON changed, one route at a time, for the unmodified client and for what we read
of it ourselves."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import tempfile
import urllib.request
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

import cloud_runs
from hostile import file_bytes, judged, text
from hostile_files import MODEL, Target, in_folder
from hub_emulator import ALWAYS, Hub, Lie
from skill_train.cloud import bucket as kept
from skill_train.cloud import failure_reason
from skill_train.data import scan as dataset
from skill_train.hub import account as hub_account
from skill_train.hub import datasets as hub_dataset
from skill_train.hub import flavors, jobs
from skill_train.hub import models as hub
from skill_train.hub import repositories as hub_repository
from skill_train.hub import upload as hub_push
from skill_train.hub.address import endpoint
from skill_train.recipe.fields import Recipe
from skill_train.run import progress as job_figures


@cache
def _server() -> tuple[Hub, str]:
    """A Hub with a model, a dataset, a bucket and a job, for as long as this process lives."""
    folder = Path(tempfile.mkdtemp(prefix="skill-train-hub-"))
    made = Hub(folder / "hub")
    made.__enter__()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ |= {"HF_ENDPOINT": made.endpoint, "HF_TOKEN": made.token, "HF_HUB_OFFLINE": "0"}
    from huggingface_hub import constants

    assert made.endpoint == constants.ENDPOINT, "the client was imported before: this needs a process of its own"
    made.add("model", "me/model", {p.name: p.read_bytes() for p in MODEL.iterdir()})
    made.add("dataset", "me/rows", {"train.jsonl": b'{"prompt": "q", "completion": "a"}\n' * 5})
    spec = {
        "command": ["python"], "flavor": "t4-small", "timeoutSeconds": 60, "dockerImage": "x", "labels": {"run": "x"},
        "volumes": [
            {"type": "bucket", "source": cloud_runs.BUCKET, "path": "f", "mountPath": "/data", "readOnly": False}
        ],
    }  # fmt: skip
    job = made.jobs.create(spec, "me", "me")
    from hub_emulator.buckets import Bucket, put_files

    made.buckets[cloud_runs.BUCKET] = bucket = Bucket(cloud_runs.BUCKET, True)
    with tempfile.TemporaryDirectory() as place:
        for name, content in cloud_runs.result().items():
            (Path(place) / name.replace("/", "_")).write_bytes(content)
        put_files(made, bucket, {f"f/{n}": Path(place) / n.replace("/", "_") for n in cloud_runs.result()})
    return made, job.id


def _say(text: str) -> None:
    pass


def _prices() -> object:
    found = hub.live_flavors()
    flavors._keep(found, endpoint())
    return flavors.current(live=False)


def _dataset() -> object:
    return hub_dataset.inspect_dataset(Recipe(model="x", data="me/rows"), dataset.first_format)


def _job(job: str) -> Callable[[], object]:
    def ask() -> object:
        found = jobs.inspect("me", job)
        return failure_reason.exit_code(found.message), jobs.find("me", {"run": "x"})

    return ask


ROUTES: tuple[tuple[str, Callable[[str], Callable[[], object]]], ...] = (
    ("/api/whoami-v2", lambda job: hub_account.account),
    ("/api/jobs/hardware", lambda job: _prices),
    ("/api/jobs/me/JOB", _job),
    ("/api/jobs/me", _job),
    (
        "/api/models/me/model?blobs=true",
        lambda job: lambda: (hub.model_facts("me/model"), hub_push.licence_of("me/model")),
    ),
    ("/api/datasets/me/rows?blobs=true", lambda job: _dataset),
    (
        f"/api/buckets/{cloud_runs.BUCKET}/tree/f?recursive=true",
        lambda job: lambda: jobs.list_files(cloud_runs.BUCKET, "f"),
    ),
    ("/api/models/me/model", lambda job: lambda: hub_repository.find("model", "me/model")),
    (f"/api/buckets/{cloud_runs.BUCKET}", lambda job: lambda: hub_repository.bucket_is_private(cloud_runs.BUCKET)),
)


@cache
def _right(route: str) -> Any:
    """What the Hub for tests answers there."""
    server, job = _server()
    asked = urllib.request.Request(
        server.endpoint + route.replace("JOB", job), headers={"Authorization": f"Bearer {server.token}"}
    )
    with urllib.request.urlopen(asked, timeout=10) as answer:
        return json.loads(answer.read())


def answer(data: bytes, folder: Path) -> object:
    """One route lies."""
    server, job = _server()
    route, question = ROUTES[data[0] % len(ROUTES) if data else 0]
    body = file_bytes(_right(route), data[1:])
    path = route.replace("JOB", job).partition("?")[0]
    server.faults.clear()
    server.faults.add(f"GET {path}(/revision/.*)?$", Lie(200, {"Content-Type": "application/json"}, body), times=ALWAYS)
    try:
        return judged(question(job), folder, server.folder)
    finally:
        server.faults.clear()


def markers(data: bytes, folder: Path) -> object:
    """The markers, metrics and logs that a job left in its bucket."""
    which, rest = data[0] % 4 if data else 0, data[1:]
    marker = {
        "run": "x",
        "state": "done",
        "exit_code": 0,
        "files": {"adapter/x": cloud_runs.digest(b"x"), "train.json": cloud_runs.digest(b"y")},
    }
    metric = {"step": 1, "steps": 9, "loss": 1.0, "seconds": 2.0, "memory_bytes": {"rss": 5}, "tokens_per_second": 3.0}
    failed = {
        "event": "failed",
        "error": {"code": "x", "message": "m", "expected": "", "got": "", "hint": ""},
        "exit_code": 5,
    }

    def call() -> None:
        if which == 0:
            document = _loaded(file_bytes(marker, rest))
            for name in kept._digests(document.get("files")) or {}:
                with contextlib.suppress(TypeError):
                    kept.belongs_to_run(name)
        elif which == 1:
            lines = [
                file_bytes(metric | {"step": n}, rest if n == 2 else b"").decode("utf-8", "replace") for n in (1, 2, 3)
            ]
            measured = job_figures.speed(lines)
            job_figures.longer_timeout(measured, kept_step=1, ran_seconds=5.0, before=60, first=rest[:1] < b"x")
        else:
            log = file_bytes(failed, rest).decode("utf-8", "replace")
            message = "Job failed with exit code: " + log[:200]
            found = failure_reason.failed_event(["x", log])
            failure = found if which == 2 else _loaded(log.encode("utf-8", "replace"))
            ending = failure_reason.Ending("ERROR", message, failure=failure, lines=(log,), flavor="t4-small")
            text(msgspec.to_builtins(failure_reason.explain(ending, run="run", offered=flavors.shipped())))

    return judged(call, folder)


def _loaded(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


TARGETS: dict[str, Target] = {"answer": answer, "markers": markers}
__all__ = ["TARGETS", "in_folder"]
