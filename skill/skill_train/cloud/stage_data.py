"""Prepares local data for a job: exactly its files, in a separate folder whose name is made from their content.

For a folder these are the files that `datasets` 5.2 reads (`load_from_disk`), by the names in its own records. Other
files in the folder stay here. A link that leads out of the folder is refused, because it could include any file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skill_train.core.digests import file_digest
from skill_train.core.errors import UsageError
from skill_train.core.secret_scan import secret_in

_MOUNT = "/dataset"


@dataclass(frozen=True)
class Staged:
    """A local dataset that is ready for the upload.

    Attributes:
        files: the files by their path below the mount; its first part is the dataset's own name.
        name: made from the content, so that the same files are uploaded only once.
        left_out: paths of files in the dataset's folder that do not belong to the dataset.
    """

    files: dict[str, Path]
    name: str
    left_out: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files.values())


def stage(data: Path) -> Staged:
    """The files of a dataset: a file, or the files of a folder that `datasets` saved.

    Raises:
        UsageError: a link leads out of the folder, or its records name a file that is not in it.
    """
    files, left_out = {data.name: data}, []
    if data.is_dir():
        there = _files_in(data)
        own = _saved(data)
        files = {f"{data.name}/{name}": _require_file(data, name).resolve() for name in own}
        left_out = [name for name in there if name not in own]
    content = json.dumps({name: file_digest(path)["sha256"] for name, path in files.items()}, sort_keys=True)
    return Staged(files, f"data-{hashlib.sha256(content.encode()).hexdigest()[:16]}", tuple(left_out))


def require_no_secrets(staged: Staged) -> None:
    """Raises:
    UsageError: a file contains a token of the Hub. A job would train on it, and every reader of the data would have it.
    """
    for name, path in staged.files.items():
        if secret_in(path) == "a token of the Hub":
            raise UsageError(
                f"{name} seems to contain a Hugging Face token, so nothing was sent",
                code="secret_found",
                expected="data without tokens",
                hint="remove the row, and revoke the token at https://huggingface.co/settings/tokens",
            )


def _files_in(folder: Path) -> list[str]:
    """All files below a folder, sorted.

    Raises:
        UsageError: a link leads out of it.
    """
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
    """The names of the files that `datasets` reads in a folder that it saved, with or without splits."""
    if not (folder / "dataset_dict.json").is_file():
        return _saved_split(folder, "")
    splits = _names(folder / "dataset_dict.json", "splits")
    return ["dataset_dict.json", *(name for split in splits for name in _saved_split(folder, f"{split}/"))]


def _saved_split(folder: Path, prefix: str) -> list[str]:
    files = _names(_require_file(folder, f"{prefix}state.json"), "_data_files")
    return [f"{prefix}{name}" for name in ("dataset_info.json", "state.json", *dict.fromkeys(files))]


def _names(record: Path, key: str) -> list[str]:
    """The names in a list of a record; in `_data_files` each entry is an object.

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
def folder_of(staged: Staged) -> Iterator[Path]:
    """A temporary folder with links to exactly these files."""
    with tempfile.TemporaryDirectory(prefix="skill-train-") as temporary:
        for name, path in staged.files.items():
            link = Path(temporary) / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.resolve())
        yield Path(temporary)


def mount_path(staged: Staged) -> str:
    """The path at which a job finds the data. It must not exist here, because the client would upload a local file of
    that name."""
    paths = (_MOUNT, *(f"{_MOUNT}-{number}" for number in range(2, 100)))
    first = next(iter(staged.files)).split("/")[0]
    return next(path for path in paths if not Path(path, first).exists())
