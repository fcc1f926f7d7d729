"""`status.json`: what `status` said last of a job that has done its work, so that asking again asks nobody.

It holds for the `cloud.json` that it was said of: another job of the run, or the cost of one, and the Hub is asked.
None is kept of a job that failed: another folder may go on with its run.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

from skill_train.core.errors import UsageError
from skill_train.core.files import write_json
from skill_train.run import cloud_record
from skill_train.run.cloud_record import CloudRecord
from skill_train.run.folder import RunDir, regular_bytes
from skill_train.run.records import read_json

SCHEMA = "skill-train/status/1"
SETTLED_SECONDS = 60.0  # after its end, in which the last files of a job reach the bucket, and its last lines the log


def keep(
    run: RunDir, record: CloudRecord, said: dict[str, Any], following: list[str], finished_at: datetime | None
) -> None:
    """Writes it down, of a job that ended long enough ago. Without the right to write there is none.

    Args:
        record: that it was said of. When another process has written a newer one meanwhile, nothing is kept.
    """
    if finished_at is None or (datetime.now(UTC) - finished_at).total_seconds() < SETTLED_SECONDS:
        return
    digest = _record_digest(run)
    if cloud_record.read(run) != record:  # read after the digest, so that a newer one is never taken for this
        return
    document = {"schema": SCHEMA, "of": digest, "at": _now(), "data": said, "next": following}
    try:
        write_json(run.record("status"), document)
    except OSError:
        return


def read(run: RunDir) -> tuple[dict[str, Any], list[str]] | None:
    """`data` and `next` of the answer; None when the Hub must be asked."""
    path = run.record("status")
    if not path.is_file():
        return None
    try:
        document = read_json(path)
        done = document["data"]["stage"] == "COMPLETED"
        if document["schema"] != SCHEMA or not done or document["of"] != _record_digest(run):
            return None
        return document["data"] | {"progress": _as_old_as_now(document)}, [str(command) for command in document["next"]]
    except (UsageError, KeyError, TypeError, ValueError):
        return None  # not one of ours, or broken: it is only a copy


def _as_old_as_now(document: dict[str, Any]) -> dict[str, Any]:
    """`progress`, as old as it is now."""
    progress = dict(document["data"]["progress"])
    if progress["age_seconds"] is not None:
        progress["age_seconds"] = round(progress["age_seconds"] + _now() - document["at"], 1)
    return progress


def _now() -> float:
    return datetime.now(UTC).timestamp()


def _record_digest(run: RunDir) -> str:
    return hashlib.sha256(regular_bytes(cloud_record.record_path(run))).hexdigest()
