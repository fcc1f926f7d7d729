"""A small Hugging Face Hub on this machine, over real HTTP: what huggingface_hub 2.4 asks for reading.

    with HubServer() as hub:
        hub.add("model", "me/tiny", {"config.json": b"{}"})
        run a child process with `environment(hub)`

It keeps a log of all requests. A route is a method of `_Handler` in the table `_ROUTES`; add writing ones there.
Which routes and headers the client needs: its source, and probes with the real client (2026-11).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_madeUpForTheseTests"


@dataclass
class Repository:
    """`kind` is `model` or `dataset`. A file is its bytes. `info` adds to what the API says of the repository."""

    kind: str
    name: str
    files: dict[str, bytes]
    info: dict[str, Any] = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    branches: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def at(self, revision: str) -> dict[str, bytes] | None:
        """The files of a branch or commit."""
        if revision in ("main", self.commit("main")):
            return self.files
        return next((files for name, files in self.branches.items() if revision in (name, self.commit(name))), None)

    def commit(self, revision: str) -> str:
        return hashlib.sha1(f"{self.kind} {self.name} {revision}".encode()).hexdigest()

    def commit_of(self, revision: str) -> str:
        """The commit of a branch, or the commit itself."""
        return revision if re.fullmatch("[0-9a-f]{40}", revision) else self.commit(revision)


@dataclass
class Request:
    method: str
    path: str
    range: str | None
    authorization: str | None
    sent: int = 0


@dataclass
class Trouble:
    """How the server answers a path instead: a status with headers, or late, or in drops."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b'{"error": "made up"}'
    seconds: float = 0.0
    drop_seconds: float = 0.0


class HubServer:
    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.hardware: list[dict[str, Any]] = []
        self.log: list[Request] = []
        self.unknown: list[str] = []
        self.troubles: dict[str, Trouble] = {}
        self.ranges = True
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.hub = self  # type: ignore[attr-defined]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def add(self, kind: str, name: str, files: dict[str, bytes], **more: Any) -> Repository:
        repository = Repository(kind, name, files, **more)
        self.repositories[kind, name] = repository
        return repository

    def sent(self, pattern: str) -> int:
        """Bytes sent of the files whose request path matches."""
        return sum(r.sent for r in self.log if r.method == "GET" and re.search(pattern, r.path))

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def environment(url: str, home: Path, *, token: str | None = TOKEN) -> dict[str, str]:
    """The environment of a child process that takes this server for the Hub."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")}
    own = {"HF_ENDPOINT": url, "HF_HOME": str(home), "SKILL_TRAIN_CACHE": str(home / "skill-train")}
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1", "HF_HUB_DISABLE_XET": "1"}
    return kept | own | quiet | ({"HF_TOKEN": token} if token else {})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> HubServer:
        return self.server.hub  # type: ignore[attr-defined,no-any-return]

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        url = urlsplit(self.path)
        self.request_ = Request(self.command, url.path, self.headers.get("Range"), self.headers.get("Authorization"))
        self.hub.log.append(self.request_)
        trouble = next((t for pattern, t in self.hub.troubles.items() if re.search(pattern, url.path)), None)
        if trouble is not None:
            time.sleep(trouble.seconds)
            if trouble.drop_seconds or trouble.status != 200:
                self._send(trouble.status, trouble.body, trouble.headers, drop_seconds=trouble.drop_seconds)
                return
        for method, pattern, route in _ROUTES:
            found = re.fullmatch(pattern, url.path)
            if found and method == ("GET" if self.command == "HEAD" else self.command):
                route(self, parse_qs(url.query), **{k: unquote(v) for k, v in found.groupdict(default="").items()})
                return
        self.hub.unknown.append(f"{self.command} {self.path}")
        self._send(404, b'{"error": "no such route"}')

    def _json(self, document: Any) -> None:
        self._send(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, json.dumps({"error": code}).encode(), {"X-Error-Code": code, "X-Error-Message": code})

    def _send(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, *, drop_seconds: float = 0.0
    ) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body)), "X-Request-Id": "made-up"} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        try:
            size = 1 if drop_seconds else 1 << 20
            for drop in (body[i : i + size] for i in range(0, len(body), size)):
                self.wfile.write(drop)
                self.request_.sent += len(drop)
                time.sleep(drop_seconds)
        except OSError:  # the client has gone
            self.close_connection = True

    def _repository(self, kind: str, name: str, *, content: bool) -> Repository | None:
        """The repository, or None after the refusal that the Hub would send."""
        repository = self.hub.repositories.get((kind, name))
        authorization = self.headers.get("Authorization")
        if authorization not in (None, f"Bearer {TOKEN}"):
            self._send(401, b"{}", {"X-Error-Message": "Invalid credentials in Authorization header"})
        elif repository is None or (repository.private and authorization is None):
            self._refuse(404 if authorization else 401, "RepoNotFound")
        elif content and repository.gated:
            self._refuse(403 if authorization else 401, "GatedRepo")
        else:
            return repository
        return None

    def _info(self, query: dict[str, list[str]], kind: str, name: str, revision: str = "") -> None:
        repository = self._repository(kind.removesuffix("s"), name, content=False)
        if repository is None:
            return
        files = repository.at(revision or "main")
        if files is None:
            self._refuse(404, "RevisionNotFound")
            return
        blobs = "blobs" in query
        siblings = [{"rfilename": path} | ({"size": len(data)} if blobs else {}) for path, data in files.items()]
        sha = repository.commit_of(revision or "main")
        about = {
            "id": name,
            "sha": sha,
            "private": repository.private,
            "gated": "manual" if repository.gated else False,
        }
        self._json(about | {"siblings": siblings, "tags": [], "downloads": 0, "likes": 0} | repository.info)

    def _tree(self, query: dict[str, list[str]], kind: str, name: str, revision: str, path: str) -> None:
        repository = self._repository(kind.removesuffix("s"), name, content=True)
        if repository is None:
            return
        files = repository.at(revision)
        if files is None:
            self._refuse(404, "RevisionNotFound")
            return
        inside = {p: data for p, data in files.items() if p.startswith(path.lstrip("/"))}
        if not inside:
            self._refuse(404, "EntryNotFound")
            return
        self._json([{"type": "file", "path": p, "size": len(d), "oid": _blob(d)} for p, d in inside.items()])

    def _resolve(self, query: dict[str, list[str]], kind: str, name: str, revision: str, path: str) -> None:
        repository = self._repository("dataset" if kind else "model", name, content=True)
        if repository is None:
            return
        files = repository.at(revision)
        if files is None:
            self._refuse(404, "RevisionNotFound")
            return
        commit = {"X-Repo-Commit": repository.commit_of(revision)}
        if path not in files:
            self._send(404, b"", commit | {"X-Error-Code": "EntryNotFound"})
            return
        self._file(files[path], commit | {"ETag": f'"{_blob(files[path])}"', "Accept-Ranges": "bytes"})

    def _file(self, data: bytes, headers: dict[str, str]) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if not asked or not self.hub.ranges:
            self._send(200, data, headers)
            return
        start, end = int(asked[1]), min(int(asked[2] or len(data) - 1), len(data) - 1)
        if start > end:
            self._send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            return
        self._send(206, data[start : end + 1], headers | {"Content-Range": f"bytes {start}-{end}/{len(data)}"})

    def _hardware(self, query: dict[str, list[str]]) -> None:
        self._json(self.hub.hardware)

    def _harnesses(self, query: dict[str, list[str]]) -> None:
        self._json({})


def _blob(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


_ID = r"(?P<name>[^/]+/[^/]+)"
_KIND = r"(?P<kind>models|datasets)"
_ROUTES: list[tuple[str, str, Callable[..., None]]] = [
    ("GET", "/api/agent-harnesses", _Handler._harnesses),
    ("GET", "/api/jobs/hardware", _Handler._hardware),
    ("GET", rf"/api/{_KIND}/{_ID}", _Handler._info),
    ("GET", rf"/api/{_KIND}/{_ID}/revision/(?P<revision>[^/]+)", _Handler._info),
    ("GET", rf"/api/{_KIND}/{_ID}/tree/(?P<revision>[^/]+)(?P<path>.*)", _Handler._tree),
    ("GET", rf"/(?P<kind>datasets/)?{_ID}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", _Handler._resolve),
]
