"""Fetches the files that a job stored to the run directory. Each gets a temporary name, is checked, and is renamed.

After a killed pull, the next pull fetches the missing files. A pull never replaces a file that no pull wrote.
`pull.json` names the files that a pull wrote, and is written last.
"""

import json
import os
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path, PurePosixPath

import msgspec

from skill_train.cloud.bucket import BEFORE, FILES, StoredFile, StoredRun, belongs_to_run
from skill_train.cloud.poll import patiently
from skill_train.core import waiting
from skill_train.core.console import Bar
from skill_train.core.digests import FileDigest, file_digest, is_file_of
from skill_train.core.errors import UsageError, VerificationFailed, quoted
from skill_train.hub import jobs
from skill_train.program.cloud.file_names import without_rows
from skill_train.run import records, train_record
from skill_train.run.folder import RunDir, in_words, require_space
from skill_train.run.lock import locked
from skill_train.run.records import FileName, StepSchema, Whole
from skill_train.run.train_record import TrainRecord

_PART = ".pull.part"  # the folder for incomplete files; the next pull continues with them
_TRIES = 2
_GROUP_FILES, _GROUP_BYTES = 8, 256_000_000
_REWRITTEN = {BEFORE, *FILES} - {"train.json"}  # the job rewrites these while the run continues


class PullInputs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The source of the files: a bucket, or a repository and its commit. `state` and `checkpoint` are as in
    `StoredRun`."""

    bucket: str | None = None
    repository: str | None = None
    commit: str | None = None
    state: str
    checkpoint: Whole | None


class Pull(msgspec.Struct, frozen=True, kw_only=True):
    """`pull.json`: every file that this pull or an earlier one wrote."""

    schema: StepSchema = "skill-train/step/1"
    step: str = "pull"
    inputs: PullInputs
    options: dict[str, str] = {}
    outputs: dict[FileName, FileDigest]
    finished_at: str


def from_bucket(run: RunDir, stored: StoredRun, *, progress: Bar) -> tuple[Pull, list[str]]:
    """Fetches the stored files that the run directory lacks. Returns the record and the names of the fetched files.

    Raises:
        UsageError: the run directory has a file with other content, and no pull wrote it.
        VerificationFailed: a file in the bucket does not match the digest in its marker.
        Temporary: the Hub did not answer. Fetched files stay, and the next pull continues.
    """
    with locked(run, "pull"):
        earlier = _earlier(run)
        todo = [file for file in stored.files if not _is_here(run, file, earlier)]
        require_space(run.path, sum(file.size for file in todo), "what the job kept")
        outputs = {file.name: file.digest for file in stored.files if file.digest is not None and file not in todo}
        outputs |= {file.name: earlier[file.name] for file in todo if file.name in earlier}  # if `_fetch` skips it
        done = 0
        for group in _groups(_in_order(todo)):
            progress(done, len(todo), group[0].name)
            outputs |= _fetch(run, stored.bucket, group)
            done += len(group)
        inputs = PullInputs(bucket=stored.bucket, state=stored.state, checkpoint=stored.checkpoint)
        return _write_pull(run, inputs, outputs), [file.name for file in todo]


def in_repository(trained: TrainRecord) -> dict[str, str]:
    """The paths at which a job pushes its result files, by their names in the run directory."""
    names = [name for name in trained.outputs if belongs_to_run(name) and not name.endswith(".jsonl")]
    pushed = {name: PurePosixPath(*PurePosixPath(name).parts[1:]).as_posix() for name in names}
    return pushed | {name: name for name in ("environment.json", "train.json")}


def from_repository(run: RunDir, repository: str, folder: Path, commit: str | None) -> tuple[Pull, list[str]]:
    """Copies the result and its records from a snapshot of the model repository that the job pushed to. Returns the
    same as `from_bucket`.

    Raises:
        UsageError: the repository has no `train.json`, or a file with other content is already here.
        VerificationFailed: a file is not the one that `train.json` describes.
    """
    if not (folder / "train.json").is_file():
        raise nothing_kept(run.path, f"{repository} has no train.json")
    trained = train_record.read(folder / "train.json")
    promised = trained.outputs
    with locked(run, "pull"):
        earlier = _earlier(run)
        sources = {name: folder / place for name, place in in_repository(trained).items()}
        sources = {name: path for name, path in sources.items() if name in promised or path.is_file()}
        here, pushed = run.record("train"), folder / "train.json"
        # A job pushes `train.json` without rows of the data. One from the bucket has the rows, so it is not replaced.
        if here.is_file() and without_rows(records.read_json(here)) == without_rows(records.read_json(pushed)):
            del sources["train.json"]
        sizes = {name: path.stat().st_size if path.is_file() else 0 for name, path in sources.items()}
        files = [StoredFile(name, "", size, promised.get(name)) for name, size in sizes.items()]
        todo = [file for file in files if not _is_here(run, file, earlier)]
        outputs = {name: digest for name, digest in earlier.items() if (run.path / name).is_file()}
        outputs |= {name: file_digest(run.path / name) for name in ("train.json",) if name not in sources}
        outputs |= {file.name: file.digest for file in files if file.digest is not None and file not in todo}
        for file in _in_order(todo):
            part = _partial_path(run, file)
            part.parent.mkdir(parents=True, exist_ok=True)
            if sources[file.name].is_file():
                shutil.copyfile(sources[file.name], part)
            outputs[file.name] = _placed(run, file, f"{repository} at {commit}")
        inputs = PullInputs(repository=repository, commit=commit, state="done", checkpoint=None)
        return _write_pull(run, inputs, outputs), [file.name for file in todo]


def _write_pull(run: RunDir, inputs: PullInputs, outputs: dict[str, FileDigest]) -> Pull:
    pull = Pull(inputs=inputs, outputs=outputs, finished_at=records.timestamp())
    records.write(run.record("pull"), pull)
    shutil.rmtree(run.path / _PART, ignore_errors=True)  # last: while it exists, the record may be outdated
    return pull


def nothing_kept(run: Path, why: str, command: str = "status") -> UsageError:
    """The error for a run without files. `command` is the skill-train command in the hint."""
    return UsageError(
        f"{run} has no files to fetch: {why}",
        code="nothing_kept",
        expected="a finished run, or one with a complete checkpoint",
        got=why,
        hint=f"skill-train {command} {quoted(run)}",
    )


def _earlier(run: RunDir) -> dict[str, FileDigest]:
    path = run.record("pull")
    return records.read(path, Pull).outputs if path.is_file() else {}


def _is_here(run: RunDir, file: StoredFile, earlier: dict[str, FileDigest]) -> bool:
    """Whether the run directory already has this file with the same content.

    Raises:
        UsageError: it has a file of this name with other content, and no pull wrote that file.
    """
    path = run.path / file.name
    if not path.exists():
        return False
    here = file_digest(path) if path.is_file() else None
    if here is not None and here == file.digest:
        return True
    was_killed = (run.path / _PART).is_dir()  # an earlier pull, before it could write its record
    ours = here == earlier.get(file.name) or (file.name in _REWRITTEN and was_killed)
    if here is None or not ours:
        raise UsageError(
            f"{path} already exists with different content",
            code="output_exists",
            expected=f"sha256 {file.digest['sha256'][:12]}…" if file.digest else "a file that a pull wrote",
            got=f"sha256 {here['sha256'][:12]}…" if here else "not a file",
            hint=f"move {quoted(path)} away, or use another --run-dir",
        )
    return False


def _in_order(files: Iterable[StoredFile]) -> list[StoredFile]:
    """The files with `train.json` last: a run directory with that file is complete."""
    return sorted(files, key=lambda file: (file.name == "train.json", file.name))


def _groups(files: list[StoredFile]) -> list[list[StoredFile]]:
    """Groups of files that are fetched in one request. A killed pull loses at most one group."""
    groups: list[list[StoredFile]] = []
    for file in files:
        last = groups[-1] if groups else []
        if last and len(last) < _GROUP_FILES and sum(f.size for f in last) + file.size <= _GROUP_BYTES:
            last.append(file)
        else:
            groups.append([file])
    return groups


def _fetch(run: RunDir, bucket: str, group: list[StoredFile]) -> dict[str, FileDigest]:
    """Fetches the files of a group that are not complete yet; twice if needed. Skips torn files without a digest."""
    for _ in range(_TRIES):
        missing = [file for file in group if not is_file_of(_partial_path(run, file), file.digest)]
        for file in missing:
            _partial_path(run, file).parent.mkdir(parents=True, exist_ok=True)
            _partial_path(run, file).unlink(missing_ok=True)
        pairs = [(file.remote, _partial_path(run, file)) for file in missing]
        patiently(partial(jobs.download, bucket, pairs))
        if all(file.digest is None or is_file_of(_partial_path(run, file), file.digest) for file in missing):
            break
    torn = [file for file in group if file.digest is None and _is_torn(_partial_path(run, file))]
    for file in torn:
        waiting.tell(f"{file.name} is incomplete, because the job ended while writing it, and was skipped")
    return {file.name: _placed(run, file, bucket) for file in group if file not in torn}


def _partial_path(run: RunDir, file: StoredFile) -> Path:
    return run.path / _PART / file.name


def _placed(run: RunDir, file: StoredFile, source: str) -> FileDigest:
    """Checks a fetched file and gives it its final name; returns its digest."""
    part, final = _partial_path(run, file), run.path / file.name
    if file.digest is None and part.suffix == ".jsonl" and part.is_file():
        data = part.read_bytes()
        part.write_bytes(data[: data.rfind(b"\n") + 1])  # a killed job may leave an incomplete last line
    digest = file_digest(part) if part.is_file() else None
    if digest is None or (file.digest is not None and digest != file.digest):
        raise VerificationFailed(
            f"{file.name} in {source} has changed since the job stored it",
            code="kept_file_changed",
            expected=in_words(file.digest) if file.digest else file.name,
            got=in_words(digest) if digest else "no such file",
            hint=f"skill-train resume {quoted(run.path)}",  # it checks the bucket and the repository, and explains
        )
    final.parent.mkdir(parents=True, exist_ok=True)
    os.replace(part, final)
    return digest


def _is_torn(part: Path) -> bool:
    """Whether a JSON document without a digest is incomplete, so that it cannot be used."""
    if part.suffix != ".json" or not part.is_file():
        return False
    try:
        json.loads(part.read_bytes())
    except (ValueError, RecursionError):
        return True
    return False
