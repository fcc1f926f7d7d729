"""Runs in the cloud for tests: a run directory with its record, a job of the Hub for tests, and what such a job keeps.

The commands run in the test's own process, with the Hub's address in the place that huggingface_hub read it into.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

import step_records
from command_child import Done
from hub_emulator import Hub
from hub_emulator.buckets import Bucket, put_files
from hub_emulator.jobs import Job
from one_command import called
from planning import decided
from skill_train.core.files import write_json
from skill_train.run import cloud_record
from skill_train.run.cloud_record import CloudJob, CloudRecord
from skill_train.run.folder import RunDir
from waiting import wait_until

RUN_ID, BUCKET, FOLDER = "0123456789ab", "me/jobs-artifacts", "20261121T100000-abcdef"
USD_PER_HOUR = 0.4


@dataclass
class Cloud:
    """A Hub, and one run on it."""

    hub: Hub
    run: RunDir

    def call(self, *arguments: str, form: str = "json") -> Done:
        return called(*arguments, "--format", form)

    def on(self, command: str, *arguments: str) -> Done:
        """A command on the run directory."""
        return self.call(command, str(self.run.path), *arguments)

    def start(
        self,
        program: str = "",
        *,
        flavor: str = "t4-small",
        timeout: int = 600,
        mounts: tuple[dict[str, Any], ...] = (),
    ) -> Job:
        """A job of the run that runs a Python program, whose argument is the folder that is kept."""
        number = len(self.hub.jobs.all) + 1
        volume = {"type": "bucket", "source": BUCKET, "path": FOLDER, "mountPath": "/data", "readOnly": False}
        spec = {
            "command": ["python", "-c", program, "/data"],
            "flavor": flavor,
            "timeoutSeconds": timeout,
            "dockerImage": "x",
            "labels": {"skill-train": "1", "run": RUN_ID, "plan": "1" * 16, "attempt": str(number)},
            "volumes": [*mounts, volume],
        }
        job = self.hub.jobs.create(spec, "me", "me")
        known = CloudJob(number, "started", flavor, timeout, "2026-11-21T10:00:00Z", USD_PER_HOUR, job.id, "url")
        self.write(self.record.with_job(known))
        return job

    @property
    def record(self) -> CloudRecord:
        return cloud_record.read(self.run) or CloudRecord(RUN_ID, "1" * 16, "me", "me/tickets", BUCKET, FOLDER)

    def write(self, record: CloudRecord) -> None:
        cloud_record.write(self.run, record)

    def keep(self, files: dict[str, bytes]) -> None:
        """Files in the folder of the run."""
        bucket = self.hub.buckets.setdefault(BUCKET, Bucket(BUCKET, True))
        with tempfile.TemporaryDirectory() as folder:
            places = {f"{FOLDER}/{name}": Path(folder) / str(n) for n, name in enumerate(files)}
            for path, content in zip(places.values(), files.values(), strict=True):
                path.write_bytes(content)
            put_files(self.hub, bucket, places)


def wait_for(job: Job) -> None:
    wait_until(lambda: job.ended, 20)


def digest(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def checkpoint(step: int) -> dict[str, bytes]:
    """A checkpoint as a job keeps it, its marker with it."""
    files = {
        "adapter_model.safetensors": f"weights {step}".encode(),
        "complete.json": b"{}",
        "before.json": b"{}",
    }
    folder = f"checkpoints/checkpoint-{step}/"
    marker = json.dumps({name: digest(content) for name, content in files.items()}).encode()
    return {folder + name: content for name, content in files.items()} | {folder + "kept.json": marker}


def metrics(steps: int, of: int = 10, *, seconds: float = 2.0) -> bytes:
    """Lines of train.py; the first step takes nine seconds."""
    lines = [
        {
            "step": step,
            "steps": of,
            "loss": 3.0 - step / 10,
            "tokens_per_second": 100.0,
            "seconds": 9.0 if step == 1 else seconds,
            "memory_bytes": {"rss": 10**9 * step},
        }
        for step in range(1, steps + 1)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def result(state: str = "done", **more: bytes) -> dict[str, bytes]:
    """The files of a run that has ended, with `kept.json`."""
    adapter = {"adapter/adapter_config.json": b"{}", "adapter/adapter_model.safetensors": b"tuned" * 1000}
    outputs = {name: digest(content) for name, content in adapter.items()}
    trained = replace(step_records.trained(outputs), run=RUN_ID, recipe_hash=plan()["recipe_hash"])
    train = json.dumps(msgspec.to_builtins(trained)).encode()
    files = adapter | {"train.json": train, "metrics.jsonl": metrics(10), "environment.json": b"{}", **more}
    marker = {"run": RUN_ID, "state": state, "exit_code": 0, "files": {n: digest(c) for n, c in files.items()}}
    return files | {"kept.json": json.dumps(marker).encode()}


@cache
def plan() -> dict[str, Any]:
    made = decided("qwen2.5-0.5b", "rtx_4090", where="cloud", flavor="t4-small")
    return made | {"policy": {"sensitive": False, "hub_model_id": "me/tickets"}}


def cloud(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    """A run that was planned and has no job yet, on this Hub."""
    from huggingface_hub import constants

    hub.jobs.grace_seconds = 0.5
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # set for all other tests
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    run = RunDir(folder / "run")
    write_json(run.plan, plan())
    made = Cloud(hub, run)
    made.keep({"plan.json": run.plan.read_bytes()})
    return made
