"""Models and datasets: reading them."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import Any

from hub_emulator.account import check_write
from hub_emulator.wire import Answer, Call, Refused, file_answer, json_answer, now, paged


@dataclass
class Repository:
    """`kind` is `model` or `dataset`. A file is its bytes. `info` adds to what the API says of the repository.

    Attributes:
        branches: besides main; `refs/pr/1` and such are branches too.
        lfs: paths of the files that are kept in LFS.
        history: the commits of each branch, the newest last; a branch that was never committed to has none.
        old: the files of the commits that are no longer the newest.
    """

    kind: str
    name: str
    files: dict[str, bytes]
    info: dict[str, Any] = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    branches: dict[str, dict[str, bytes]] = field(default_factory=dict)
    lfs: set[str] = field(default_factory=set)
    history: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    old: dict[str, dict[str, bytes]] = field(default_factory=dict)
    created_at: str = field(default_factory=now)

    def at(self, revision: str) -> dict[str, bytes] | None:
        """The files of a branch or commit."""
        branch = self.branch(revision)
        return self._of_branch(branch) if branch else self.old.get(revision)

    def branch(self, revision: str) -> str | None:
        """The branch that has this name, or whose newest commit this is."""
        return next((name for name in ["main", *self.branches] if revision in (name, self.commit(name))), None)

    def commit(self, branch: str) -> str:
        """The newest commit of a branch."""
        return self._commit(branch, len(self.history.get(branch, [])))

    def _commit(self, branch: str, count: int) -> str:
        words = f"{self.kind} {self.name} {branch}" + (f" {count}" if count else "")
        return hashlib.sha1(words.encode()).hexdigest()

    def commits(self, branch: str) -> list[dict[str, Any]]:
        """All of a branch, the newest first."""
        about = {"title": "initial commit", "message": "", "authors": [], "date": self.created_at}
        first = about | {"id": self._commit(branch, 0)}
        return [*reversed(self.history.get(branch, [])), first]

    def commit_of(self, revision: str) -> str:
        """The commit of a branch, or the commit itself."""
        return revision if re.fullmatch("[0-9a-f]{40}", revision) else self.commit(revision)

    def add_commit(self, branch: str, files: dict[str, bytes], title: str, author: str) -> str:
        """Makes `files` the content of a branch; returns the commit."""
        self.old[self.commit(branch)] = self._of_branch(branch)
        if branch == "main":
            self.files = files
        else:
            self.branches[branch] = files
        about = {"title": title, "message": "", "authors": [{"user": author}], "date": now()}
        self.history.setdefault(branch, []).append(about)
        self.history[branch][-1]["id"] = self.commit(branch)
        return self.commit(branch)

    def _of_branch(self, branch: str) -> dict[str, bytes]:
        return self.files if branch == "main" else self.branches[branch]

    @property
    def page(self) -> str:
        return ("datasets/" if self.kind == "dataset" else "") + self.name


def blob(data: bytes) -> str:
    """The name that git gives to a file's content."""
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


def sha256(data: bytes) -> str:
    """The name that LFS gives to it."""
    return hashlib.sha256(data).hexdigest()


def repository_of(call: Call, *, content: bool) -> Repository:
    """The repository that a request is about.

    Raises:
        Refused: as the Hub does it: what one may not see does not exist; what is gated exists, without its content.
    """
    kind = call.parts["kind"].rstrip("/").removesuffix("s") or "model"
    found: Repository | None = call.hub.repositories.get((kind, call.parts["name"]))
    if found is None or (found.private and call.access is None):
        raise Refused(404 if call.access else 401, "Repository not found", "RepoNotFound")
    if content and found.gated:
        raise Refused(403 if call.access else 401, "Access to this repository is restricted", "GatedRepo")
    return found


def files_of(call: Call, repository: Repository) -> dict[str, bytes]:
    files = repository.at(call.parts.get("revision") or "main")
    if files is None:
        raise Refused(404, "Invalid rev id", "RevisionNotFound")
    return files


# --- Routes ---


def info(call: Call) -> Answer:
    repository = repository_of(call, content=False)
    files = files_of(call, repository)
    blobs = "blobs" in call.query
    siblings = [{"rfilename": path} | (_blob(repository, path, data) if blobs else {}) for path, data in files.items()]
    dates = [commit["date"] for commit in repository.history.get("main", [])]
    about = {
        "id": repository.name,
        "sha": repository.commit_of(call.parts.get("revision") or "main"),
        "private": repository.private,
        "gated": "manual" if repository.gated else False,
        "disabled": False,
        "createdAt": repository.created_at,
        "lastModified": dates[-1] if dates else repository.created_at,
    }
    return json_answer(about | {"siblings": siblings, "tags": [], "downloads": 0, "likes": 0} | repository.info)


def auth_check(call: Call) -> Answer:
    """Whether the one who asks may read a repository; with `/write`, whether they may write to it."""
    repository = repository_of(call, content=True)
    if call.parts["write"]:
        check_write(call, repository.name.split("/")[0])
    return json_answer({})


def tree(call: Call) -> Answer:
    repository = repository_of(call, content=True)
    files = files_of(call, repository)
    folder = call.parts["path"].strip("/")
    inside = {path: data for path, data in files.items() if not folder or path.startswith(f"{folder}/")}
    if not inside and (folder or not files):
        raise Refused(404, f"{folder} does not exist on this revision", "EntryNotFound")
    depth = folder.count("/") + 1 if folder else 0
    everything = call.query.get("recursive", ["false"])[0] == "true"
    folders = {"/".join(path.split("/")[: depth + 1]) for path in inside if path.count("/") > depth}
    listed = [{"type": "directory", "oid": blob(name.encode()), "size": 0, "path": name} for name in sorted(folders)]
    shown = {path: data for path, data in inside.items() if everything or path.count("/") == depth}
    entries = [_entry(repository, path, data) for path, data in shown.items()]
    return paged(call, entries if everything else listed + entries)


def paths_info(call: Call) -> Answer:
    repository = repository_of(call, content=True)
    files = files_of(call, repository)
    asked = _paths(call)
    return json_answer([_entry(repository, path, files[path]) for path in asked if path in files])


def _paths(call: Call) -> list[str]:
    from urllib.parse import parse_qs

    if "json" in (call.headers.get("Content-Type") or ""):
        paths: list[str] = call.json().get("paths", [])
        return paths
    return parse_qs(call.body.decode()).get("paths", [])


def _entry(repository: Repository, path: str, data: bytes) -> dict[str, Any]:
    """A file as the tree shows it."""
    about: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": blob(data)}
    lfs = {"oid": sha256(data), "size": len(data), "pointerSize": 134}
    return about | ({"lfs": lfs} if path in repository.lfs else {})


def _blob(repository: Repository, path: str, data: bytes) -> dict[str, Any]:
    """A file as the page of the repository shows it, with `blobs` (huggingface_hub 2.4, `ModelInfo`)."""
    about: dict[str, Any] = {"size": len(data), "blobId": blob(data)}
    lfs = {"sha256": sha256(data), "size": len(data), "pointerSize": 134}
    return about | ({"lfs": lfs} if path in repository.lfs else {})


def resolve(call: Call) -> Answer:
    repository = repository_of(call, content=True)
    files = files_of(call, repository)
    path, revision = call.parts["path"], call.parts["revision"]
    headers = {"X-Repo-Commit": repository.commit_of(revision)}
    if path not in files:
        raise Refused(404, "Entry not found", "EntryNotFound", headers)
    data, lfs = files[path], path in repository.lfs
    headers |= {"ETag": f'"{sha256(data) if lfs else blob(data)}"', "Accept-Ranges": "bytes"}
    if lfs:
        headers |= {"X-Linked-Etag": f'"{sha256(data)}"', "X-Linked-Size": str(len(data))}
    return file_answer(data, headers, call.headers.get("Range") if call.hub.ranges else None)


def commits(call: Call) -> Answer:
    repository = repository_of(call, content=True)
    files_of(call, repository)
    return paged(call, repository.commits(repository.branch(call.parts["revision"]) or "main"))


def refs(call: Call) -> Answer:
    repository = repository_of(call, content=True)
    names = ["main", *repository.branches]
    branches = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": repository.commit(n)} for n in names]
    return json_answer({"branches": branches, "tags": [], "converts": []})
