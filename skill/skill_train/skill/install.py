"""Installs the skill into a folder that agents read, updates it there, and reports the result.

A marker file has the version and the digest of every written file. It distinguishes a file that the user edited, which
is kept and reported, from an old file, which is replaced. A folder without the marker is refused.
"""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypedDict

from skill_train.core.digests import file_digest
from skill_train.core.errors import UsageError
from skill_train.core.files import whole_file, whole_folder, write_json
from skill_train.program.events import json_object
from skill_train.run.lock import locked_out
from skill_train.skill.files import sha256

MARKER = ".skill-train-manifest.json"
_SCHEMA = "skill-train/skill/1"
State = Literal["written", "updated", "current", "linked"]
Found = Literal["current", "older", "newer", "different", "edited", "unmanaged"]


class Manifest(TypedDict):
    """The marker in a folder that `install` wrote; `files` has the digest of each file."""

    schema: str
    version: str
    files: dict[str, str]


@dataclass(frozen=True)
class Skill:
    """The skill to install: `files` maps paths to contents."""

    version: str
    files: dict[str, bytes]

    @property
    def marker(self) -> Manifest:
        digests = {name: sha256(content) for name, content in sorted(self.files.items())}
        return {"schema": _SCHEMA, "version": self.version, "files": digests}


@dataclass(frozen=True)
class Done:
    """The result at one place. `kept` are edited files that were not replaced. `removed` files no longer belong to the
    skill."""

    path: Path
    state: State
    kept: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    link_to: str | None = None


@dataclass(frozen=True)
class Copy:
    path: Path
    state: Found
    version: str | None
    edited: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    old: list[str] = field(default_factory=list)


def refuse_foreign(folder: Path) -> None:
    """Refuses a folder that skill-train did not create, before anything is written.

    Raises:
        UsageError: it is a link, a file, or a folder with content that `install` did not write.
    """
    if folder.is_symlink():
        raise _foreign(folder, f"a link to {os.readlink(folder)}")
    if folder.exists() and not folder.is_dir():
        raise _foreign(folder, "a file")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARKER).is_file():
        raise _foreign(folder, f"a folder without {MARKER}")


def refuse_foreign_link(place: Path, to: Path) -> None:
    """As `refuse_foreign`, for the place of a link to the folder `to`. Accepts that link, and a copy by `install`."""
    if not _leads_to(place, to):
        refuse_foreign(place)


def install(skill: Skill, folder: Path, *, force: bool) -> Done:
    """Installs the complete skill: writes a new folder under a temporary name, then swaps the folders.

    Other files in the folder stay. `force` also replaces edited files, and a link in place of the folder.

    Raises:
        UsageError: another process is installing the skill there.
    """
    if not _aside(folder).exists() and not (folder.is_symlink() and force):
        work = _work(skill, folder, force=force)
        if work.is_current:
            return Done(folder, "current", work.preserved)
    with locked_out(folder, "skills install"):
        _recover(folder)
        if folder.is_symlink() and force:
            folder.unlink()
        work = _work(skill, folder, force=force)
        if not work.is_current:
            return _write(skill, folder, work)
    return Done(folder, "current", work.preserved)


@dataclass(frozen=True)
class _Work:
    """The work of an installation: `files` are written, `before` has the digests of the existing files."""

    before: dict[str, str]
    files: dict[str, bytes]
    preserved: list[str]
    removed: list[str]
    is_current: bool


def _work(skill: Skill, folder: Path, *, force: bool) -> _Work:
    before, recorded = _digests(folder), _recorded(folder)
    digests = skill.marker["files"]
    edited = [name for name in digests if before.get(name, digests[name]) not in (digests[name], recorded.get(name))]
    preserved = [] if force else edited
    ours = {name for name, digest in recorded.items() if before.get(name) == digest}
    files = {name: content for name, content in skill.files.items() if name not in preserved}
    same = _marker(folder) == skill.marker and all(before.get(name) == digests[name] for name in files)
    return _Work(before, files, preserved, sorted(ours - set(digests)), same)


def _write(skill: Skill, folder: Path, work: _Work) -> Done:
    foreign = [name for name in work.before if name not in work.files and name not in work.removed]
    with _replaced(folder) as stage:
        for name, content in work.files.items():
            _target(stage, name).write_bytes(content)
        for name in foreign:
            shutil.copy2(folder / name, _target(stage, name), follow_symlinks=False)
        write_json(stage / MARKER, skill.marker)
    return Done(folder, "updated" if work.before else "written", work.preserved, work.removed)


def link(skill: Skill, place: Path, to: Path, *, force: bool) -> Done:
    """Creates a relative link at `place` to the folder `to`. Installs a copy if links are not possible, or if `place`
    already has a copy."""
    if _leads_to(place, to):
        return Done(place, "current", link_to=os.readlink(place) if place.is_symlink() else None)
    if place.is_dir() and not place.is_symlink():
        return install(skill, place, force=force)
    place.parent.mkdir(parents=True, exist_ok=True)
    target = os.path.relpath(to.resolve(), place.parent.resolve())
    try:
        with whole_file(place) as part:
            part.symlink_to(target, target_is_directory=True)
    except OSError:  # the file system or Windows does not allow links
        return install(skill, place, force=force)
    return Done(place, "linked", link_to=target)


def read_copy(skill: Skill, folder: Path) -> Copy | None:
    """The installed copy in the folder, compared with the package; None if there is no skill in it."""
    if not (folder / "SKILL.md").is_file() and not (folder / MARKER).is_file():
        return None
    before, recorded, digests = _digests(folder), _recorded(folder), skill.marker["files"]
    version = str(_marker(folder).get("version")) if recorded else None
    missing = sorted(name for name in digests if name not in before)
    old = sorted(n for n in digests if n in before and before[n] != digests[n] and before[n] == recorded.get(n))
    edited = sorted(n for n in digests if n in before and before[n] not in (digests[n], recorded.get(n)))
    state: Found = "current"
    if version is None and (missing or edited):
        return Copy(folder, "unmanaged", None, missing=missing)
    if version is not None and version != skill.version:
        state = _by_version(version, skill.version)
    elif missing or old:
        state = "different"
    elif edited:
        state = "edited"
    return Copy(folder, state, version, edited, missing, old)


def _by_version(installed: str, ours: str) -> Found:
    """Compares the release numbers. Versions with equal numbers, such as two pre-releases, are only `different`."""
    first, second = ([int(n) for n in re.findall(r"\d+", re.split(r"[^\d.]", v)[0])] for v in (installed, ours))
    return "different" if first == second else "older" if first < second else "newer"


def _leads_to(place: Path, to: Path) -> bool:
    """Whether `place` is a link to `to`, or the same folder through a link further up."""
    return place.resolve() == to.resolve()


def _marker(folder: Path) -> Mapping[str, object]:
    """The content of the marker. Empty if it cannot be read: then every differing file counts as edited."""
    marker = folder / MARKER
    return (json_object(marker.read_bytes()) if marker.is_file() else None) or {}


def _recorded(folder: Path) -> dict[str, str]:
    """The digests of the files that `install` wrote, by path."""
    files = _marker(folder).get("files")
    return files if isinstance(files, dict) else {}


def _digests(folder: Path) -> dict[str, str]:
    """The digests of all files in the folder, by path. A link has its target instead of a digest."""
    digests = {}
    for path in sorted(folder.rglob("*")) if folder.is_dir() else []:
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            digests[name] = f"link to {os.readlink(path)}"
        elif path.is_file() and name != MARKER:
            digests[name] = file_digest(path)["sha256"]
    return digests


def _target(stage: Path, name: str) -> Path:
    path = stage / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def _replaced(folder: Path) -> Iterator[Path]:
    """A new folder that replaces `folder` when the block succeeds. After a kill between the two renames the old folder
    still exists under the name `_aside`, and `_recover` restores it."""
    aside = _aside(folder)
    new = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    with whole_folder(new) as stage:
        yield stage
    if folder.exists():
        os.replace(folder, aside)
    os.replace(new, folder)
    shutil.rmtree(aside, ignore_errors=True)


def _recover(folder: Path) -> None:
    aside = _aside(folder)
    if aside.is_dir() and not folder.exists():
        os.replace(aside, folder)
    shutil.rmtree(aside, ignore_errors=True)


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.before")


def _foreign(folder: Path, got: str) -> UsageError:
    return UsageError(
        f"{folder} was not created by skill-train",
        code="output_exists",
        expected=f"no such path, or a folder with {MARKER}",
        got=got,
        hint="move it away, or add --force to replace the files with the same names",
    )
