"""Reads the files that a job has stored in the bucket, and the digests that its markers list.

    kept.json                             the last file of a run: {"run", "state", "exit_code", "files": {name: digest}}
    checkpoints/checkpoint-N/kept.json    the last file of a checkpoint: {name: digest}
    metrics.jsonl …                       rewritten during the training, without a digest until the end

A digest is `{"bytes", "sha256"}`. The bucket is written by a program in the job, so every name in it is checked before
it becomes a path here.
"""

import re
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
from msgspec.structs import replace

from skill_train.cloud.poll import patiently
from skill_train.core.digests import FileDigest
from skill_train.core.errors import UsageError, VerificationFailed
from skill_train.core.files import scratch_folder
from skill_train.facts import JsonObject
from skill_train.hub import jobs, repositories
from skill_train.hub.client import or_none
from skill_train.hub.jobs import BucketFile
from skill_train.program.cloud.file_names import MARKER as MARKER
from skill_train.program.events import json_object
from skill_train.run.cloud_record import CloudData, CloudRecord
from skill_train.run.records import convert

FOLDERS = ("adapter", "merged", "checkpoints", "images")
FILES = (
    "environment.json", "held_out.jsonl", "metrics.jsonl", "samples.jsonl", "train.failed.json", "train.json",
    "train.log",
)  # fmt: skip
BEFORE = "checkpoints/before.json"  # measured before the first step, for a resumed run; each checkpoint has a copy
_CHECKPOINT = re.compile(r"checkpoints/checkpoint-(\d+)/kept\.json")


class StoredFile(msgspec.Struct, frozen=True):
    """A file in the bucket. `name` is relative to the run directory, and `remote` is the path in the bucket. `digest`
    is None for a file that the job still rewrites."""

    name: str
    remote: str
    size: int
    digest: FileDigest | None


class StoredRun(msgspec.Struct, frozen=True):
    """The files of a run that can be fetched."""

    bucket: str
    state: str  # `done`, `failed`, or `unfinished` when no end was recorded
    checkpoint: int | None  # the step of the newest complete checkpoint; None if there is none
    files: tuple[StoredFile, ...]


class StoredRecords(msgspec.Struct, frozen=True):
    """The small files of a run, as text."""

    # the content of each file by its name, with the time at which it was written
    texts: dict[str, tuple[str, datetime | None]]
    checkpoint: int  # the step of the newest stored checkpoint; 0 if there is none

    def document(self, name: str) -> JsonObject | None:
        """The JSON object in a file; None if the file is missing or incomplete."""
        return json_object(self.texts[name][0]) if name in self.texts else None


NOTHING = StoredRecords({}, 0)


def stored_run(record: CloudRecord) -> StoredRun | None:
    """The files in the folder of a run; None if there are none, or if the bucket does not exist any more.

    The digests of a failed run are not used, because the next job may rewrite its files.

    Raises:
        VerificationFailed: a marker names a path that leads out of the run directory.
    """
    listed, bucket = {file.path: file for file in _listed(record)}, record.bucket or ""
    markers_by_step = {int(m[1]): name for name in listed if (m := _CHECKPOINT.fullmatch(name))}
    newest_first = [markers_by_step[step] for step in sorted(markers_by_step, reverse=True)]
    texts = _fetch(bucket, [listed[name] for name in (MARKER, *newest_first) if name in listed])
    markers = {name: document for name, text in texts.items() if (document := json_object(text)) is not None}
    end = markers.get(MARKER) or {}
    state = str(end.get("state")) if end.get("state") in ("done", "failed") else "unfinished"
    promised = _digests(end.get("files")) or {} if state == "done" else {}
    step, checkpoint = _newest_whole(listed, markers, newest_first)
    loose: dict[str, FileDigest | None] = {name: None for name in listed if name in FILES}
    digests = loose | promised | checkpoint
    files = [_stored_file(listed, name, digest) for name, digest in digests.items() if belongs_to_run(name)]
    files += [replace(file, name=BEFORE) for file in files if file.name == f"checkpoints/checkpoint-{step}/before.json"]
    return StoredRun(bucket, state, step, tuple(files)) if files else None


def belongs_to_run(name: str) -> bool:
    """Whether a file of the bucket belongs in a run directory.

    Raises:
        VerificationFailed: the name would lead out of the run directory.
    """
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or re.search(r"[\\:\x00-\x1f]", name):
        raise VerificationFailed(
            f"the list of kept files names a file outside the run directory: {name!r}",
            code="unsafe_file",
            expected="names relative to the run directory",
            got=repr(name),
            hint="nothing was fetched; check the job and its bucket before you use any of its files",
        )
    return name in FILES or (name not in (".", "./") and path.parts[0] in FOLDERS and len(path.parts) > 1)


def stored_records(record: CloudRecord, names: tuple[str, ...]) -> StoredRecords:
    """Reads small files in the folder of a run. Missing files are left out.

    Raises:
        AccessError: the token may not read the bucket.
    """
    listed = _listed(record)
    files = [file for file in listed if file.path in names]
    texts = _fetch(record.bucket or "", files)
    steps = [int(m[1]) for file in listed if (m := _CHECKPOINT.fullmatch(file.path))]
    dated_texts = {file.path: (texts[file.path], file.uploaded_at) for file in files if file.path in texts}
    return StoredRecords(dated_texts, max(steps, default=0))


def what_is_left_of(data: CloudData) -> str:
    """What is left of uploaded data, as a text; empty if all files are there. A commit that exists is complete."""
    if (name := data.repository) is not None:
        there = patiently(lambda: repositories.find("dataset", name, data.revision))
        return "" if there else "no such commit"
    files = _files_in(data.bucket or "", data.folder or "")
    size = sum(file.size for file in files)
    return "" if len(files) >= (data.files or 1) and size >= (data.bytes or 0) else f"{len(files)} files, {size} bytes"


def _listed(record: CloudRecord) -> list[BucketFile]:
    if not (record.bucket and record.folder):  # no job has begun
        return []
    return _files_in(record.bucket, record.folder)


def _files_in(bucket: str, folder: str) -> list[BucketFile]:
    return or_none("unknown_bucket", lambda: patiently(lambda: jobs.list_files(bucket, folder))) or []


def _newest_whole(
    listed: dict[str, BucketFile], markers: dict[str, JsonObject], newest_first: list[str]
) -> tuple[int | None, dict[str, FileDigest | None]]:
    """The step and the files of the newest complete checkpoint: every file in its marker exists in its full size."""
    for marker in newest_first:
        digests, folder = _digests(markers.get(marker)), marker.removesuffix(MARKER)
        sizes = {name: listed[folder + name].size for name in digests or () if folder + name in listed}
        if digests and sizes == {name: digest["bytes"] for name, digest in digests.items()}:
            step = int(folder.rstrip("/").rsplit("-", 1)[1])
            return step, {folder + name: digest for name, digest in digests.items()}
    return None, {}


def _stored_file(listed: dict[str, BucketFile], name: str, digest: FileDigest | None) -> StoredFile:
    there = listed.get(name)
    if there is None:
        raise VerificationFailed(
            f"{name} is listed in {MARKER}, but is missing from the bucket",
            code="kept_file_missing",
            expected=f"{digest['bytes']} bytes" if digest else name,
            got="no such file",
            hint="if the model was pushed, its repository has the same files; else resume the run",
        )
    return StoredFile(name, there.remote, there.size, digest)


def _digests(value: Any) -> dict[str, FileDigest] | None:
    """The digests in a marker; None if the marker is incomplete or of another kind."""
    try:
        digests = convert(value, dict[str, FileDigest], Path(MARKER))
    except UsageError:
        return None
    return digests if all(re.fullmatch("[0-9a-f]{64}", digest["sha256"]) for digest in digests.values()) else None


def _fetch(bucket: str, files: list[BucketFile]) -> dict[str, str]:
    """The text of small files, by their path in the folder."""
    with scratch_folder() as folder:
        places = [(file, folder / str(number)) for number, file in enumerate(files)]
        patiently(lambda: jobs.download(bucket, [(file.remote, path) for file, path in places]))
        return {
            file.path: path.read_text(encoding="utf-8", errors="replace") for file, path in places if path.is_file()
        }
