"""The Jobs API."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hub_emulator.account import check_write, looks_real
from hub_emulator.jobs import Job
from hub_emulator.wire import Answer, Call, Refused, json_answer, paged

_TABLE = Path(__file__).resolve().parents[3] / "skill" / "skill_train" / "hub" / "flavors.json"
_KEEP_ALIVE_SECONDS = 30.0
_METRIC_SECONDS = 1.0
_LABEL = re.compile(r"[A-Za-z0-9_-]{1,100}")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
_STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


def shipped_hardware() -> list[dict[str, Any]]:
    """The package's own table of machines, in the form of the API (huggingface_hub 2.4, `JobHardwareInfo`)."""
    return [_hardware_row(row) for row in json.loads(_TABLE.read_text(encoding="utf-8"))["flavors"]]


def _hardware_row(row: dict[str, Any]) -> dict[str, Any]:
    """Memory of all GPUs together, and the price of a minute."""
    accelerator = None
    if row["gpus"]:
        total = f"{row['gpus'] * row['gpu_memory_gb']} GB"
        model = {"type": "gpu", "model": row["gpu"], "quantity": str(row["gpus"]), "vram": total}
        accelerator = model | {"manufacturer": "Nvidia"}
    minute = row["usd_per_hour"] / 60
    return {
        "name": row["name"],
        "prettyName": row["name"],
        "cpu": f"{row['cores']} vCPU",
        "ram": f"{row['ram_gb']} GB",
        "ephemeralStorage": f"{row['disk_gb']} GB",
        "accelerator": accelerator,
        "unitCostMicroUSD": round(minute * 1e6),
        "unitCostUSD": round(minute, 6),
        "unitLabel": "minute",
    }


# --- Routes ---


def hardware(call: Call) -> Answer:
    return json_answer(call.hub.hardware)


def create(call: Call) -> Answer:
    namespace = call.parts["namespace"]
    check_write(call, namespace, "job.write")
    spec = call.json()
    _check(call, spec)
    assert call.access is not None
    return json_answer(call.hub.jobs.create(spec, namespace, call.access.user).info())


def _check(call: Call, spec: dict[str, Any]) -> None:
    """Refuses a job that cannot be. The status and the words are made up; that these things are refused is not."""
    if bool(spec.get("dockerImage")) == bool(spec.get("spaceId")):
        raise Refused(400, "one of dockerImage and spaceId is needed")
    if spec.get("flavor") not in {row["name"] for row in call.hub.hardware}:
        raise Refused(400, f"invalid flavor: {spec.get('flavor')}")
    if not spec.get("command"):
        raise Refused(400, "a command is needed")
    given = [*(spec.get("secrets") or {}).values(), *(spec.get("environment") or {}).values()]
    if any(looks_real(str(value)) for value in given):
        raise Refused(400, "this is no place for a real token")
    paths = [volume.get("mountPath", "") for volume in spec.get("volumes") or []]
    if len(set(paths)) < len(paths) or not all(path.startswith("/") and path.strip("/") for path in paths):
        raise Refused(400, "mount paths must be absolute, and each its own")
    _check_labels(spec.get("labels") or {})


def _check_labels(given: dict[str, str]) -> None:
    for key, value in given.items():
        if not _LABEL.fullmatch(key) or not (_NAME if key == "name" else _LABEL).fullmatch(value):
            raise Refused(400, f"invalid label: {key}={value}")


def listed(call: Call) -> Answer:
    """The newest first."""
    stages = call.query.get("stage", [])
    wanted = [label.split("=", 1) for label in call.query.get("label", [])]
    known = time.time() - call.hub.jobs.listed_after_seconds
    found = [
        job.info()
        for job in reversed(call.hub.jobs.all)
        if job.namespace == call.parts["namespace"]
        and job.created <= known
        and (not stages or job.stage in stages)
        and all(job.labels.get(key) == value for key, value in wanted)
    ]
    return paged(call, found)


def inspect(call: Call) -> Answer:
    return json_answer(_job(call).info())


def cancel(call: Call) -> Answer:
    """Answers when the job has ended."""
    job = _mine(call)
    job.cancelled.set()
    with job.changed:
        job.changed.wait_for(lambda: job.ended, timeout=30)
    return json_answer(job.info())


def duplicate(call: Call) -> Answer:
    old = _mine(call)
    spec = old.spec | {"secrets": old.secrets, "labels": old.labels}
    assert call.access is not None
    return json_answer(call.hub.jobs.create(spec, old.namespace, call.access.user, "duplicated-job").info())


def labels(call: Call) -> Answer:
    """Replaces them all."""
    job, given = _mine(call), call.json()["labels"]
    _check_labels(given)
    job.labels = given
    return json_answer(job.info())


def logs(call: Call) -> Answer:
    tail = call.query.get("tail")
    return Answer(_log(_job(call), int(tail[0]) if tail else None), dict(_STREAM))


def _log(job: Job, tail: int | None) -> Iterator[bytes]:
    """All events from the first, as they come, until the job has ended.

    With `tail`, of those that are there already the first and the last few.
    """
    at = 0
    while True:
        with job.changed:
            if len(job.events) == at and not (job.ended or job.log_ended):
                job.changed.wait(_KEEP_ALIVE_SECONDS)
            ended, events = job.ended or job.log_ended, list(job.events)
        if len(events) == at and not ended:
            yield b": keep-alive\n\n"
        for index in range(at, len(events)):
            if tail is None or index == 0 or index >= len(events) - tail or at > 0:
                yield _event(events[index])
        at = len(events)
        if ended:
            return


def metrics(call: Call) -> Answer:
    job = _job(call)
    if job.ended:
        raise Refused(406, "the job has ended")
    return Answer(_samples(call, job), dict(_STREAM))


def _samples(call: Call, job: Job) -> Iterator[bytes]:
    """One each second while the job runs. The memory is that of its first process, the rest is made up."""
    row = next(row for row in call.hub.hardware if row["name"] == job.spec["flavor"])
    total = int(row["ram"].split(" ")[0]) * 10**9
    while not job.ended:
        if job.stage == "RUNNING":
            used = _resident_bytes(job.pid)
            sample = {"cpu_usage_pct": 0, "cpu_millicores": 0, "memory_used_bytes": used, "memory_total_bytes": total}
            yield b"event: metric\n" + _event(sample | {"rx_bps": 0, "tx_bps": 0, "gpus": {}, "replica": "made-up"})
        with job.changed:
            job.changed.wait_for(lambda: job.ended, timeout=_METRIC_SECONDS)


def _resident_bytes(pid: int | None) -> int:
    """0 where there is no /proc."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


def _job(call: Call) -> Job:
    job: Job | None = call.hub.jobs.get(call.parts["id"])
    if job is None or job.namespace != call.parts["namespace"]:
        raise Refused(404, "Job not found")
    return job


def _mine(call: Call) -> Job:
    job = _job(call)
    check_write(call, job.namespace, "job.write")
    return job
