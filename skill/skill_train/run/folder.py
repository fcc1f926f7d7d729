"""What one run leaves on disk: one folder, the same names for local and cloud runs.

    plan.json  recipe.yaml  environment.json  metrics.jsonl  train.log  checkpoints/  adapter/  train.json
    merged/  merge.json     gguf/*.gguf  convert.json  quantize.json     verify.json

Full fine-tuning leaves no adapter/ and no merge.json: the training program writes merged/ itself.

A step writes its own folder and, last, its own `<step>.json` by rename: a record that exists is complete. It holds the
digests of what the step read, so a second call knows whether the work is done, and refuses to overwrite other work.
"""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from skill_train.core.digests import FileDigest
from skill_train.core.digests import digests as digests
from skill_train.core.digests import file_digest as file_digest
from skill_train.core.digests import is_file_of as is_file_of
from skill_train.core.errors import DecisionNeeded, UsageError
from skill_train.core.files import whole_file as whole_file
from skill_train.core.files import whole_folder as whole_folder
from skill_train.core.files import write_json as write_json
from skill_train.core.files import write_text as write_text
from skill_train.core.memory import peak_memory_bytes as peak_memory_bytes
from skill_train.core.memory import watch_memory as watch_memory
from skill_train.core.units import gigabytes
from skill_train.run import export_record, plan_record, records
from skill_train.run.records import Record
from skill_train.run.records import read_json as read_json  # the floor of all that reads a run
from skill_train.run.records import regular_bytes as regular_bytes

# What training and the steps after it write.
_MADE = (
    *("plan.json", "recipe.yaml", "environment.json", "samples.jsonl", "held_out.jsonl", "metrics.jsonl", "train.log"),
    *("checkpoints", "adapter", "train.json", "train.failed.json", "merged", "merge.json", "gguf", "convert.json"),
    *("quantize.json", "lora_gguf.json", "verify.json", "evaluate.json", "report.html"),
)


class StepRecord(Protocol):
    """What the records of all steps have: enough to tell whether the work is done, and is still there."""

    @property
    def inputs(self) -> Any: ...
    @property
    def options(self) -> Any: ...
    @property
    def outputs(self) -> Mapping[str, FileDigest]: ...


Step = TypeVar("Step", bound=StepRecord)


@dataclass(frozen=True)
class StepResult(Generic[Record]):
    """What a step returns: its record, and whether an earlier call had done the work."""

    record: Record
    reused: bool = False


@dataclass(frozen=True)
class RunDir:
    """The names inside a run directory. `path` is the folder itself."""

    path: Path

    def free_name(self) -> str:
        """Of a folder beside this one that is not there."""
        return next(name for n in itertools.count(2) if not Path(name := f"{self.path}-{n}").exists())

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "train.log"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def samples(self) -> Path:
        """Rows as the trainer was fed them: `{"row", "input_ids", "labels", …}` a line."""
        return self.path / "samples.jsonl"

    @property
    def held_out(self) -> Path:
        """Rows that were kept from training, in the same form as `samples`."""
        return self.path / "held_out.jsonl"

    @property
    def merged(self) -> Path:
        return self.path / "merged"

    @property
    def is_full(self) -> bool:
        """Every weight was trained, by its plan."""
        return plan_record.read(self.plan).recipe.is_full

    @property
    def tuned(self) -> Path:
        """What the training program leaves."""
        return self.merged if self.is_full else self.adapter

    @property
    def gguf(self) -> Path:
        return self.path / "gguf"

    @property
    def ggufs(self) -> list[Path]:
        """The GGUF files that hold a whole model: not the adapter's own, which its record names."""
        record = self.record("lora_gguf")
        adapters = {self.path / name for name in export_record.read(record).outputs} if record.is_file() else set()
        return sorted(path for path in self.gguf.glob("*.gguf") if path not in adapters)

    @property
    def exported(self) -> list[Path]:
        """Every GGUF file: whole models and adapters."""
        return sorted(path for path in self.gguf.glob("*") if path.suffix.lower() == ".gguf" and path.is_file())

    def record(self, step: str) -> Path:
        """`<step>.json`."""
        return self.path / f"{step}.json"

    @staticmethod
    def is_one(path: Path) -> bool:
        return (path / "plan.json").is_file()


def open_run(path: Path) -> RunDir:
    """The run directory at `path`.

    Raises:
        UsageError: there is no `plan.json`.
    """
    if not RunDir.is_one(path):
        raise UsageError(
            f"{path} is not a run directory",
            code="not_a_run",
            expected="a folder that `skill-train local` made (it holds plan.json)",
            got="no such folder" if not path.is_dir() else "a folder without plan.json",
            hint="skill-train local --model MODEL --data DATA --run-dir runs/first",
        )
    return RunDir(path)


def require_unused(run: RunDir, *own: str) -> None:
    """Refuses to begin a run in a folder that holds something under a name which the run would write.

    Args:
        own: names that are known to be of this run.

    Raises:
        UsageError: it does.
    """
    taken = [name for name in _MADE if name not in own and (run.path / name).exists()]
    if taken:
        raise UsageError(
            f"{run.path} is not a run directory, and a run in it would overwrite {', '.join(taken)}",
            code="output_exists",
            expected="a new folder, or the run directory of this recipe",
            got=", ".join(taken),
            hint="use another --run-dir, or omit it for a new folder below runs/",
        )


def set_aside(made: Path, record: Path) -> Path | None:
    """Renames what a step left when a kill came between its result and its record: nobody can say what it is.

    Returns the new name, or None when there was nothing to rename.
    """
    return None if record.is_file() or not made.exists() else renamed_aside(made)


def renamed_aside(made: Path) -> Path:
    aside = next(n for i in range(1, 1000) if not (n := made.with_name(f"{made.name}.unrecorded-{i}")).exists())
    os.replace(made, aside)
    return aside


def versions(*packages: str) -> dict[str, str | None]:
    """Installed versions by distribution name; None for what is not installed. Python's own is there too."""
    from importlib import metadata

    found: dict[str, str | None] = {"python": sys.version.split()[0]}
    for package in ("skill-train", *packages):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def require_no_run(folder: Path, otherwise: str) -> None:
    """Files of a model are none of a run. `otherwise` is the command that puts them elsewhere."""
    if RunDir.is_one(folder) or (folder.name == "gguf" and RunDir.is_one(folder.parent)):
        wrong = f"{folder} belongs to a run"
        raise UsageError(wrong, code="bad_usage", expected="a separate folder for these files", hint=otherwise)


def note_of(made: Path, record: Path) -> Path:
    """Where the record of a result waits while the result gets its name: a kill may come between the two."""
    return record.with_name(f".{made.name}.made.json")


def noted(made: Path, record: Path, kind: type[Step], *, inputs: Any, options: Any) -> Step | None:
    """What a note says of a result, when that was made from the same and has not been changed since."""
    note = note_of(made, record)
    if not note.is_file():
        return None
    found = records.read(note, kind)
    same = found.inputs == inputs and found.options == options
    as_made = all(_is_still(record.parent / name, digest) for name, digest in found.outputs.items())
    return found if same and as_made else None


def finished_record(
    path: Path, kind: type[Step], *, inputs: Any, options: Any, made: Path | None = None
) -> Step | None:
    """The record of a step that already did exactly this, with its outputs still whole; None when it must be done.

    Args:
        kind: the class of the record.
        made: the result, whose note becomes the record where a kill came before that.

    Raises:
        UsageError: the record is of other inputs or options, or an output has changed since.
    """
    if not path.is_file() and made is not None and noted(made, path, kind, inputs=inputs, options=options):
        os.replace(note_of(made, path), path)
    if not path.is_file():
        return None
    record = records.read(path, kind)
    if record.inputs != inputs or record.options != options:
        different = "inputs" if record.inputs != inputs else "options"
        raise UsageError(
            f"{path.parent} already holds a finished {path.stem} with other {different}",
            code="output_exists",
            expected="the same inputs and options, or a new place for the output",
            got=f"{different} recorded in {path.name} differ",
            hint=f"move {shlex.quote(str(path))} and what it made away, or use another --run-dir or --out",
        )
    if not any((path.parent / name).exists() for name in record.outputs):
        return None  # somebody removed all that was made: it can be made again, and nothing is overwritten
    for name, digest in record.outputs.items():
        _require_unchanged(path, path.parent / name, digest)
    return record


def _require_unchanged(record: Path, file: Path, digest: FileDigest) -> None:
    if not _is_still(file, digest):
        raise UsageError(
            f"{file} is not the file that {record.name} describes",
            code="output_changed",
            expected=f"{digest['bytes']} bytes, sha256 {digest['sha256'][:12]}…",
            got="missing" if not file.is_file() else "another content",
            hint=f"move {shlex.quote(str(record))} away and run the step again",
        )


def _is_still(file: Path, digest: FileDigest) -> bool:
    return is_file_of(file, {"bytes": digest["bytes"], "sha256": digest["sha256"]})


def require_space(folder: Path, need_bytes: int, what: str) -> None:
    """Refuses before a long step starts when the disk cannot hold its result.

    Raises:
        DecisionNeeded: free space below `need_bytes`.
    """
    existing = folder
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < need_bytes:
        raise DecisionNeeded(
            f"not enough disk for {what}: needs {gigabytes(need_bytes, 2)}, {gigabytes(free, 2)} free at {existing}",
            code="no_disk",
            expected=f"{need_bytes} bytes free",
            got=f"{free} bytes free",
            hint="free some space, or choose a folder on another disk",
        )


def require_writable(folder: Path) -> None:
    """Refuses before a long step starts when its record could not be written.

    Raises:
        UsageError: read-only, or somebody else's.
    """
    existing = folder
    while not existing.exists():
        existing = existing.parent
    if not os.access(existing, os.W_OK):
        raise UsageError(
            f"{existing} is not writable",
            code="system_error",
            expected="a folder that you may write to",
            got="a read-only folder, or a folder of another user",
            hint="copy the folder to a writable place, or change its permissions",
        )
