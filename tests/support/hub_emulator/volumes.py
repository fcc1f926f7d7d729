"""What is mounted into a job: folders that are filled before it starts, and for buckets read back after it ends.

A container has its volumes at `/data` and the like. Here they lie in a folder, and every path in the command and the
environment that begins with a mount path is written anew. Files that hold such a path are not: a program in a job must
work from the paths that it is given.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hub_emulator.buckets import BucketFile, put_files


class MountFailed(Exception):
    """A volume that is not there. Its words are made up."""


@dataclass
class Mount:
    """`before` has `(size, time of change)` of each file that was mounted, by its path in the volume."""

    volume: dict[str, Any]
    folder: Path
    before: dict[str, tuple[int, int]]

    @property
    def writable(self) -> bool:
        return self.volume["type"] == "bucket" and not self.volume.get("readOnly")

    @property
    def prefix(self) -> str:
        """The folder in the bucket, with its slash."""
        path = (self.volume.get("path") or "").strip("/")
        return f"{path}/" if path else ""


def mount(hub: Any, volumes: list[dict[str, Any]], root: Path) -> list[Mount]:
    """Fills the folders.

    Raises:
        MountFailed: no such bucket, repository or folder in it.
    """
    mounts = []
    for volume in volumes:
        folder = root / volume["mountPath"].strip("/")
        folder.mkdir(parents=True, exist_ok=True)
        (_fill_from_bucket if volume["type"] == "bucket" else _fill_from_repository)(hub, volume, folder)
        mounts.append(Mount(volume, folder, {}))
    for made in mounts:
        made.before = _seen(made, mounts)
        if not made.writable:
            _protect(made.folder, [m.folder for m in mounts if m is not made])
    return mounts


def save(hub: Any, mounts: list[Mount]) -> None:
    """Brings what changed in the writable volumes into their buckets."""
    for made in (m for m in mounts if m.writable):
        bucket = hub.buckets[made.volume["source"]]
        after = _seen(made, mounts)
        changed = [path for path, seen in after.items() if made.before.get(path) != seen]
        put_files(hub, bucket, {made.prefix + path: made.folder / path for path in changed})
        for path in made.before.keys() - after.keys():
            bucket.files.pop(made.prefix + path, None)
        made.before = after


def release(mounts: list[Mount]) -> None:
    """So that the folders can be removed."""
    for made in mounts:
        for path in [made.folder, *(p for p in made.folder.rglob("*") if p.is_dir())]:
            path.chmod(0o755)


def rewrite(text: str, mounts: list[Mount]) -> str:
    """The text with each mount path in it as a path of this machine."""
    for made in sorted(mounts, key=lambda m: -len(m.volume["mountPath"])):
        path = "/" + made.volume["mountPath"].strip("/")
        text = re.sub(rf"(?<![\w./-]){re.escape(path)}(?![\w.-])", str(made.folder).replace("\\", r"\\"), text)
    return text


def _fill_from_bucket(hub: Any, volume: dict[str, Any], folder: Path) -> None:
    bucket = hub.buckets.get(volume["source"])
    if bucket is None:
        raise MountFailed(f"volume {volume['source']} not found")
    path = (volume.get("path") or "").strip("/")
    files: dict[str, BucketFile] = bucket.inside(path)
    if path and not files:  # as `sync_job_volume` of huggingface_hub 2.4 says
        raise MountFailed(f"folder {path} not found in volume {volume['source']}")
    start = len(path) + 1 if path else 0
    hub.store.download([(file.name, file.size, folder / name[start:]) for name, file in files.items()])


def _fill_from_repository(hub: Any, volume: dict[str, Any], folder: Path) -> None:
    repository = hub.repositories.get((volume["type"], volume["source"]))
    files = repository.at(volume.get("revision") or "main") if repository else None
    if files is None:
        raise MountFailed(f"volume {volume['source']} not found")
    path = (volume.get("path") or "").strip("/")
    for name, data in files.items():
        if not path or name.startswith(f"{path}/"):
            target = folder / (name[len(path) + 1 :] if path else name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)


def _seen(made: Mount, mounts: list[Mount]) -> dict[str, tuple[int, int]]:
    """The files of a volume, without those of a volume inside it."""
    others = [m.folder for m in mounts if m is not made and m.folder.is_relative_to(made.folder)]
    seen = {}
    for path in made.folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and not any(path.is_relative_to(other) for other in others):
            stat = path.stat()
            seen[path.relative_to(made.folder).as_posix()] = (stat.st_size, stat.st_mtime_ns)
    return seen


def _protect(folder: Path, others: list[Path]) -> None:
    for path in [folder, *folder.rglob("*")]:
        if not any(path.is_relative_to(other) for other in others if other.is_relative_to(folder)):
            path.chmod(0o555 if path.is_dir() else 0o444)
