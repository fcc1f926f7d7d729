"""Local data on its way into a job: exactly its files in a folder of their own, under a name made of their content."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from skill_train.run_dir import file_digest

_MOUNT = "/dataset"


@dataclass(frozen=True)
class Staged:
    """A dataset of this machine.

    Attributes:
        files: by the path that each has below the mount; the first part is the dataset's own name.
        name: the same for the same files, so that what was uploaded once is not uploaded again.
    """

    files: dict[str, Path]
    name: str

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files.values())


def stage(data: Path) -> Staged:
    """The files of a dataset: a file, or all files below a folder."""
    if data.is_file():
        files = {data.name: data}
    else:
        inside = sorted(path for path in data.rglob("*") if path.is_file())
        files = {f"{data.name}/{path.relative_to(data).as_posix()}": path for path in inside}
    content = json.dumps({name: file_digest(path)["sha256"] for name, path in files.items()}, sort_keys=True)
    return Staged(files, f"data-{hashlib.sha256(content.encode()).hexdigest()[:16]}")


@contextlib.contextmanager
def folder_of(staged: Staged) -> Iterator[Path]:
    """A folder that holds these files and nothing else, as links; it is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="skill-train-") as made:
        for name, path in staged.files.items():
            link = Path(made) / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.resolve())
        yield Path(made)


def mount_path(staged: Staged) -> str:
    """Where a job finds the data. No path that means a file here too: the client would upload that file beside it."""
    paths = (_MOUNT, *(f"{_MOUNT}-{number}" for number in range(2, 100)))
    first = next(iter(staged.files)).split("/")[0]
    return next(path for path in paths if not Path(path, first).exists())
