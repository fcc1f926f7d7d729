"""The folder of one run. Local runs and cloud runs have the same names.

    plan.json  recipe.yaml  environment.json  metrics.jsonl  train.log  checkpoints/  adapter/  train.json
    merged/  merge.json     gguf/*.gguf  convert.json  quantize.json  mmproj.json     verify.json
    imatrix.gguf  imatrix.json  sensitivity.jsonl      measurements for quantizing

Full fine-tuning leaves no adapter/ and no merge.json: the training program writes merged/ itself.

A step writes its own folder first, and renames its own `<step>.json` into place last. So a record that exists is
complete. It has the digests of the step's inputs. A second call compares them: it reuses the result if the inputs are
the same, and refuses to overwrite the result of other inputs.
"""

from __future__ import annotations

import itertools
import os
import shutil
import struct
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from skill_train.core.digests import FileDigest, file_digest, is_file_of
from skill_train.core.errors import DecisionNeeded, UsageError, quoted
from skill_train.core.units import size
from skill_train.run import export_record, plan_record, records
from skill_train.run.records import FileName, Record

RUNS = Path("runs")  # the parent of runs without a --run-dir
# Names that submitting, training and the later steps write.
_RUN_FILES = (
    *("plan.json", "recipe.yaml", "environment.json", "samples.jsonl", "held_out.jsonl", "metrics.jsonl", "train.log"),
    *("checkpoints", "adapter", "train.json", "train.failed.json", "merged", "merge.json", "gguf", "convert.json"),
    *("quantize.json", "imatrix.json", "imatrix.gguf", "sensitivity.jsonl", "mmproj.json", "lora_gguf.json"),
    *("verify.json", "evaluate.json", "report.html", "compared.html", "demo.json", "push.json"),
    *("cloud.json", "pull.json", "colab.ipynb", "skypilot"),
)

# Files of a model folder that transformers or llama.cpp's converter look for by their names.
_READ_BY_LIBRARIES = (".json", ".jinja", ".model", ".safetensors")
# A string in GGUF: the type 8, the length in 8 bytes, the text. llama.cpp's converter writes this key at the start.
_OF_A_PROJECTOR = b"general.architecture" + struct.pack("<IQ", 8, 4) + b"clip"
_HEADER_BYTES = 4096


class StepRecord(Protocol):
    """The fields that the records of all steps have. They show whether a step was done with these inputs and options,
    and whether its outputs are unchanged."""

    @property
    def inputs(self) -> Any: ...
    @property
    def options(self) -> Any: ...
    @property
    def outputs(self) -> Mapping[str, FileDigest]: ...


class _Noted(msgspec.Struct, frozen=True):
    """The field that the notes of all steps have."""

    outputs: dict[FileName, FileDigest]


Step = TypeVar("Step", bound=StepRecord)


@dataclass(frozen=True)
class StepResult(Generic[Record]):
    """The result of a step: its record, and whether an earlier call had done the work."""

    record: Record
    reused: bool = False


class _Inside:
    """A file or a folder of a run, by its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: RunDir, _: object) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunDir:
    """The names inside a run directory. `path` is the folder itself."""

    path: Path

    plan = _Inside("plan.json")
    recipe = _Inside("recipe.yaml")
    metrics = _Inside("metrics.jsonl")
    log = _Inside("train.log")
    checkpoints = _Inside("checkpoints")
    samples = _Inside("samples.jsonl")  # a line is a row as the trainer got it: `{"row", "input_ids", "labels", …}`
    held_out = _Inside("held_out.jsonl")  # rows that were not trained on, in the same form
    adapter = _Inside("adapter")
    merged = _Inside("merged")
    gguf = _Inside("gguf")

    def free_name(self) -> str:
        """The name of a folder beside this one that does not exist yet."""
        return next(name for n in itertools.count(2) if not Path(name := f"{self.path}-{n}").exists())

    @property
    def is_full(self) -> bool:
        """Whether every weight is trained, according to the plan."""
        return plan_record.read(self.plan).recipe.is_full

    @property
    def tuned(self) -> Path:
        """The folder of the trained model: `merged` after full fine-tuning, otherwise `adapter`."""
        return self.merged if self.is_full else self.adapter

    @property
    def ggufs(self) -> list[Path]:
        """The GGUF files of whole language models, without adapters and projectors. Those are known by their records;
        a projector without a record is recognized by its header."""
        others = {self.path / name for name in export_record.outputs(self.path, "lora_gguf", "mmproj")}
        return [path for path in self.exported if path not in others and not _is_projector(path)]

    @property
    def exported(self) -> list[Path]:
        """Every GGUF file: whole models, adapters and projectors. `glob` would find none where it may not read."""
        paths = self.gguf.iterdir() if self.gguf.is_dir() else ()
        return sorted(path for path in paths if path.suffix.lower() == ".gguf" and path.is_file())

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
            got="a file" if path.is_file() else "no such folder" if not path.is_dir() else "a folder without plan.json",
            hint=_way_to_run(path),
        )
    return RunDir(path)


def _way_to_run(path: Path) -> str:
    """A hint for something that is no run."""
    around = [part.parent for part in (path, path.parent) if part.name in _RUN_FILES and part.is_dir()]
    if (run := next(filter(RunDir.is_one, [*around, *sorted(path.glob("*"))]), None)) is not None:
        return f"give the folder of the run: {quoted(run)}"
    if path.suffix == ".gguf":
        return f"skill-train verify --reference MODEL --gguf {quoted(path)}"
    if lost := lost_plan(path):
        return lost
    if (path / "config.json").is_file():
        return f"a model goes to --model, --base or --reference; its GGUF files: skill-train export-gguf {quoted(path)}"
    trained = "check the path, or train a run: skill-train local --model MODEL --data DATA --run-dir runs/first"
    return way_to_model(path) or trained


def lost_plan(path: Path) -> str | None:
    """The command that makes the plan of a run again; None if no run was trained in this folder."""
    began = (path / "recipe.yaml").is_file() and (path / "train.log").is_file() and not RunDir.is_one(path)
    return f"skill-train plan {quoted(path / 'recipe.yaml')} --out {quoted(path / 'plan.json')}" if began else None


def way_to_model(folder: Path) -> str | None:
    """A hint for a run or an adapter in place of a model; None for another folder."""
    of_run = folder.name == "adapter" or (folder.name == "merged" and not folder.exists())
    run = folder.parent if of_run and RunDir.is_one(folder.parent) else folder
    if RunDir.is_one(run):
        if (merged := run / "merged").is_dir():
            return f"use the merged model: {quoted(merged)}"
        return f"skill-train merge {quoted(run)}"
    if (folder / "adapter_config.json").is_file():
        return f"skill-train merge --base BASE --adapter {quoted(folder)} --out MERGED"
    return None


def require_unused(run: RunDir, *own: str) -> None:
    """Refuses to begin a run in a folder if the run would overwrite something there.

    Args:
        own: names that are known to belong to this run.

    Raises:
        UsageError: the folder has a file or folder with a name that the run writes.
    """
    existing = [name for name in _RUN_FILES if name not in own and (run.path / name).exists()]
    if existing:
        raise UsageError(
            f"{run.path} is not a run directory, and a run in it would overwrite {', '.join(existing)}",
            code="output_exists",
            expected="a new folder, or the run directory of this recipe",
            got=", ".join(existing),
            hint=lost_plan(run.path) or "use another --run-dir, or omit it for a new folder below runs/",
        )


def set_aside(result: Path, record: Path) -> Path | None:
    """Renames a result that has no record and no note, because its inputs are unknown.

    Returns the new name, or None if there was nothing to rename.
    """
    return None if record.is_file() or not result.exists() or has_note(result, record) else renamed_aside(result)


def renamed_aside(result: Path) -> Path:
    aside = next(n for i in range(1, 1000) if not (n := result.with_name(f"{result.name}.unrecorded-{i}")).exists())
    os.replace(result, aside)
    return aside


def versions(*packages: str) -> dict[str, str | None]:
    """The version of Python, and of packages by distribution name; None for a package that is not installed."""
    return {"python": sys.version.split()[0], **{name: installed(name) for name in ("skill-train", *packages)}}


def installed(package: str) -> str | None:
    """The version of a distribution; None if it is missing."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def require_no_run(folder: Path, otherwise: str) -> None:
    """Refuses a folder for the files of a plain model if it belongs to a run or is a file. `otherwise` is the command
    that writes them elsewhere."""
    if RunDir.is_one(folder) or (folder.name == "gguf" and RunDir.is_one(folder.parent)):
        wrong = f"{folder} belongs to a run"
        raise UsageError(wrong, code="bad_usage", expected="a separate folder for these files", hint=otherwise)
    if folder.exists() and not folder.is_dir():
        wrong = f"{folder} is a file"
        raise UsageError(wrong, code="output_exists", expected="a folder for these files", hint=otherwise)


def note_of(result: Path, record: Path) -> Path:
    """The note of a result: its record under another name, in case a kill comes before the record is in place."""
    return record.with_name(f".{result.name}.made.json")


def has_note(result: Path, record: Path) -> bool:
    """Whether a result has a note with its digests, so that its step can finish it."""
    try:
        outputs = records.read(note_of(result, record), _Noted).outputs
    except UsageError:
        return False
    return all(is_file_of(record.parent / name, digest) for name, digest in outputs.items())


def noted(result: Path, record: Path, kind: type[Step], *, inputs: Any, options: Any) -> Step | None:
    """The record in the note of a result, if inputs and options are the same and the result has not changed since."""
    note = note_of(result, record)
    if not note.is_file():
        return None
    noted_record = records.read(note, kind)
    same = noted_record.inputs == inputs and noted_record.options == options
    unchanged = all(is_file_of(record.parent / name, digest) for name, digest in noted_record.outputs.items())
    return noted_record if same and unchanged else None


def finished_record(
    path: Path, kind: type[Step], *, inputs: Any, options: Any, result: Path | None = None
) -> Step | None:
    """The record of a step that is already done with these inputs and options; None if the step must run.

    Args:
        kind: the class of the record.
        result: the file or folder that the step makes. Its note becomes the record if a kill prevented that.

    Raises:
        UsageError: the record has other inputs or options, or an output has changed since.
    """
    if not path.is_file() and result is not None and noted(result, path, kind, inputs=inputs, options=options):
        os.replace(note_of(result, path), path)
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
            hint=f"move {quoted(path)} and what it made away{or_another_out(path)}",
        )
    if not any((path.parent / name).exists() for name in record.outputs):
        return None  # all outputs were removed: they can be made again without overwriting anything
    for name, digest in record.outputs.items():
        hint = f"move {quoted(path)} and what it made away, and run the step again{or_another_out(path)}"
        require_unchanged(path.parent / name, digest, path, hint)
    return record


def or_another_out(record: Path) -> str:
    """The alternative in a hint that says to move a record away. A run has only one place for the result of a step."""
    return "" if RunDir.is_one(record.parent) else ", or use another --out"


def require_unchanged(file: Path, digest: FileDigest, record: Path, hint: str) -> None:
    """Refuses a file that has changed since a record described it.

    Raises:
        UsageError: the file is missing, or has another content.
    """
    if not is_file_of(file, digest):
        raise UsageError(
            f"{file} is not the file that {record.name} describes",
            code="output_changed",
            expected=in_words(digest),
            got=_found_digest(file, digest),
            hint=hint,
        )


def require_only(folder: Path, described: Iterable[Path], record: Path) -> None:
    """Refuses a folder with an additional file that libraries read, such as another adapter or chat template.

    Args:
        described: the files that the record describes.

    Raises:
        UsageError: the folder has such a file; the message names it.
    """
    others = {path for path in folder.iterdir() if path.suffix in _READ_BY_LIBRARIES}.difference(described)
    if others:
        file = min(others)
        raise UsageError(
            f"{file} is a file that {record.name} does not describe, and libraries would read it",
            code="output_changed",
            expected="the files that the step made",
            got=file.name,
            hint=f"move {quoted(file)} out of the folder",
        )


def _found_digest(file: Path, digest: FileDigest) -> str:
    if not file.is_file():
        return "missing"
    found = file.stat().st_size  # a file of another size may be too large to be read
    return f"{found} bytes" if found != digest["bytes"] else in_words(file_digest(file))


def in_words(digest: FileDigest) -> str:
    return f"{digest['bytes']} bytes, sha256 {digest['sha256'][:12]}…"


def require_space(folder: Path, need_bytes: int, result: str) -> None:
    """Refuses a long step before it starts if the disk has no room for its result.

    Raises:
        DecisionNeeded: less than `need_bytes` are free.
    """
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(existing).free
    if free < need_bytes:
        raise DecisionNeeded(
            f"not enough disk for {result}: needs {size(need_bytes)}, {size(free)} free at {existing}",
            code="no_disk",
            expected=f"{need_bytes} bytes free",
            got=f"{free} bytes free",
            hint="free some space, or choose a folder on another disk",
        )


def _is_projector(path: Path) -> bool:
    """Whether a GGUF file is a projector, by its header. False for a file that cannot be read: the step that reads it
    as a model reports the error."""
    try:
        with open(path, "rb") as file:
            return _OF_A_PROJECTOR in file.read(_HEADER_BYTES)
    except OSError:
        return False
