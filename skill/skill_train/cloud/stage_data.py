"""Prepares local data for a job: only the dataset's files, in a separate folder with a name made from their content.

In a folder these are the files that `datasets` 5.2 reads (`load_from_disk`), by the names in its own records, or the
table beside the pictures of an imagefolder. Pictures that the rows name by a path are uploaded under the same path.
Other files are not uploaded. A link that leads out of the folder is refused, because it could include any file.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skill_train.core.digests import file_digest
from skill_train.core.errors import UsageError
from skill_train.core.files import scratch_folder
from skill_train.core.secret_scan import secret_in
from skill_train.data.problems import holds_personal
from skill_train.data.row_pictures import name_below, picture_files
from skill_train.hub import account
from skill_train.program.pictures.locations import picture_table
from skill_train.program.rows import RowsRecipe, data_fingerprint
from skill_train.recipe.resolved import ResolvedRecipe
from skill_train.run.plan_record import Plan

_MOUNT = "/dataset"
_IN_LINES = (".jsonl", ".json", ".csv", ".tsv", ".txt")


@dataclass(frozen=True)
class Listed:
    """The files of a dataset, by their path below the mount. The first part of the first path is the dataset's name."""

    files: dict[str, Path]
    picture_names: dict[str, str]  # the key in `files`, by the path of a picture in the rows
    left_out: tuple[str, ...] = ()  # paths of files in the dataset's folder that do not belong to the dataset

    @property
    def pictures(self) -> frozenset[str]:
        return frozenset(self.picture_names.values())

    @property
    def bytes(self) -> int:
        return self.bytes_of(self.files)

    def bytes_of(self, names: Iterable[str]) -> int:
        return sum(self.files[name].stat().st_size for name in names)


@dataclass(frozen=True, kw_only=True)
class Staged(Listed):
    """A local dataset that is ready for the upload."""

    name: str  # made from the content, so that the same files are uploaded only once
    digests: dict[str, str]  # the SHA-256 of each file
    stamps: dict[str, tuple[int, int]]  # the size and modification time of each file, before it was read


def stage_plan(plan: Plan) -> Staged | None:
    """Prepares the data of a plan; None for data on the Hub.

    Raises:
        UsageError: as for `stage`, or the pictures have changed since the plan.
    """
    planned, recipe = plan.fingerprints["data"], plan.recipe
    if planned is None:
        return None
    data = Path(recipe.data)
    staged = stage(data, recipe)
    if recipe.images:
        digests = {path: staged.digests[name] for path, name in staged.picture_names.items()}
        rows: RowsRecipe = {"split": recipe.split, "columns": recipe.columns, "images": True}
        if data_fingerprint(data, rows, digests) != planned:
            raise changed(data.name)
    return staged


def stage(data: Path, recipe: ResolvedRecipe | None = None) -> Staged:
    """Prepares a dataset: a file, or the files of a folder that `datasets` saved, and the pictures that the rows name.

    Raises:
        UsageError: a link leads out of the folder, its records name a file that is not in it, or a picture cannot have
            the same name in a job.
    """
    listed = list_files(data, recipe)
    stamps = {name: _stamp(path) for name, path in listed.files.items()}
    digests = {name: file_digest(path)["sha256"] for name, path in listed.files.items()}
    content = hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
    own = (listed.files, listed.picture_names, listed.left_out)
    return Staged(*own, name=f"data-{content[:16]}", digests=digests, stamps=stamps)


def list_files(data: Path, recipe: ResolvedRecipe | None = None) -> Listed:
    """Lists the files that `stage` takes, without opening pictures. Raises UsageError as `stage` does."""
    files, there = {data.name: data}, list[str]()
    if data.is_dir():
        there = _files_in(data)
        table = picture_table(data, recipe.split) if recipe is not None else None
        own = _saved(data) if table is None else [table.relative_to(data).as_posix()]
        files = {f"{data.name}/{name}": _require_file(data, name).resolve() for name in own}
    pictures = picture_files(data, recipe) if recipe is not None else {}
    below = f"{data.name}/" if data.is_dir() else ""
    names = {path: below + name_below(path) for path in pictures}
    files |= {names[path]: file for path, file in pictures.items()}
    return Listed(files, names, tuple(name for name in there if f"{data.name}/{name}" not in files))


def changed_files(staged: Staged) -> list[str]:
    """The files that have changed since they were prepared, so that the upload may have other content."""
    touched = {name: path for name, path in staged.files.items() if _stamp(path) != staged.stamps[name]}
    digests = {name: file_digest(path)["sha256"] for name, path in touched.items() if path.is_file()}
    return [name for name in touched if digests.get(name) != staged.digests[name]]


def changed(name: str) -> UsageError:
    return UsageError(
        f"{name} changed while the data was prepared, so no job was started",
        code="input_changed",
        expected="the data of the plan",
        got="other bytes",
        hint="run the command again when no program writes to the data; if you used a plan file, make a new one",
    )


def _stamp(path: Path) -> tuple[int, int]:
    """The size and the modification time of a file; (-1, -1) if it is missing."""
    try:
        stat = path.stat()
    except OSError:
        return (-1, -1)
    return stat.st_size, stat.st_mtime_ns


def require_no_secrets(staged: Staged) -> None:
    """Raises UsageError if a file contains a token of the Hub. The model could learn it, and readers would see it."""
    for name, path in staged.files.items():
        if secret_in(path, account.token()) == "a token of the Hub":
            raise UsageError(
                f"{name} seems to contain a Hugging Face token, so nothing was sent",
                code="secret_found",
                expected="data without tokens",
                hint="remove the row, and revoke the token at https://huggingface.co/settings/tokens",
            )


def personal_lines(staged: Staged) -> int:
    """How many lines seem to contain personal data, by the same rules as the command `data`. Reads only text files of
    rows that are not compressed."""
    count = 0
    for name, path in staged.files.items():
        if name not in staged.pictures and path.suffix.lower() in _IN_LINES:
            with open(path, "rb") as file:
                count += sum(map(holds_personal, iter(lambda: file.readline(1 << 20), b"")))
    return count


def _files_in(folder: Path) -> list[str]:
    """All files below a folder, sorted. Raises UsageError if a link leads out of the folder."""
    root, names = folder.resolve(), list[str]()
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *files)):
            if path.is_symlink() and not path.resolve().is_relative_to(root):
                raise UsageError(
                    f"{path} is a link that points outside the dataset's folder, so nothing was sent",
                    code="unsafe_link",
                    expected="files of the dataset itself",
                    got=f"a link to {os.readlink(path)}",
                    hint="remove the link, or replace it with the file itself",
                )
        names += [Path(place, name).relative_to(folder).as_posix() for name in files]
    return sorted(names)


def _saved(folder: Path) -> list[str]:
    """The names of the files that `datasets` reads in a folder that it saved, with or without splits. If a folder has a
    dataset and splits, `datasets` ignores the splits."""
    alone = all((folder / name).is_file() for name in ("dataset_info.json", "state.json"))
    if alone or not (folder / "dataset_dict.json").is_file():
        return _saved_split(folder, "")
    splits = _names(folder / "dataset_dict.json", "splits")
    return ["dataset_dict.json", *(name for split in splits for name in _saved_split(folder, f"{split}/"))]


def _saved_split(folder: Path, prefix: str) -> list[str]:
    files = _names(_require_file(folder, f"{prefix}state.json"), "_data_files")
    return [f"{prefix}{name}" for name in ("dataset_info.json", "state.json", *dict.fromkeys(files))]


def _names(record: Path, key: str) -> list[str]:
    """The names in the list `key` of a record. The entries of `_data_files` are objects with a `filename`.

    Raises:
        UsageError: there is no such list, or a name leads out of the folder or to a hidden file.
    """
    try:
        document: Any = json.loads(record.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise _broken(record, "JSON", str(error)[:80]) from None
    listed = document.get(key) if isinstance(document, dict) else None
    if not isinstance(listed, list):
        raise _broken(record, f"a list {key}", "none")
    names: list[Any] = [entry.get("filename") if isinstance(entry, dict) else entry for entry in listed]
    wrong = [name for name in names if not isinstance(name, str) or not _is_plain(name)]
    if wrong:
        raise _broken(record, "the names of files and folders beside it, none of them hidden", repr(wrong[0])[:80])
    return names


def _is_plain(name: str) -> bool:
    return bool(name) and not name.startswith(".") and not set(name) & set("/\\\0")


def _require_file(folder: Path, name: str) -> Path:
    if not (folder / name).is_file():
        raise _broken(folder / name, "a file of the dataset", "no file")
    return folder / name


def _broken(path: Path, expected: str, got: str) -> UsageError:
    return UsageError(
        f"{path} is not a folder that save_to_disk wrote",
        code="unreadable_dataset",
        expected=expected,
        got=got,
        hint="save the dataset again with save_to_disk, or write its rows to one .jsonl file",
    )


@contextlib.contextmanager
def folder_of(staged: Staged, *, links: bool = True) -> Iterator[Path]:
    """A temporary folder with exactly these files.

    Args:
        links: symbolic links. Otherwise hard links or copies, for a program that follows no link out of the folder.

    Raises:
        UsageError: two names are the same on the disk of the temporary folder, such as names in another case.
    """
    with scratch_folder() as temporary:
        for name, path in staged.files.items():
            place = temporary / name
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.exists():
                raise UsageError(
                    f"the rows spell {name} in two ways: one file on this machine, but two files in a job",
                    code="local_input",
                    expected="one spelling of each name, with the same capital letters",
                    got=name,
                    hint="write the name in the same way in all rows",
                )
            if links:
                place.symlink_to(path.resolve())
                continue
            try:
                os.link(path.resolve(), place)
            except OSError:  # another disk
                shutil.copyfile(path, place)
        yield temporary


def mount_path(staged: Staged) -> str:
    """The path of the data in a job. It must not exist on this machine, because the client would upload a local file of
    that name."""
    paths = (_MOUNT, *(f"{_MOUNT}-{number}" for number in range(2, 100)))
    first = next(iter(staged.files)).split("/")[0]
    return next(path for path in paths if not Path(path, first).exists())
