"""The routes of the Hub that `submit` uses, written once more from the client's side alone, and as unlike the emulator
as the client of huggingface_hub 2.4 lets an answer be. It runs nothing."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_another_0123456789"
_ID = "a1b2c3d4e5f6a1b2c3d4e5f6"
_NEW = {"new": {"nested": [1, {"unknown": None}]}, "unknown": True}


class AnotherHub:
    """`posted` are the specifications of jobs; `paths` every request; `files` the names in the bucket."""

    def __init__(self) -> None:
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.posted: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.files: list[str] = []
        self.bucket = False

    def __enter__(self) -> AnotherHub:
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, method: str, path: str, query: str, body: bytes) -> tuple[int, Any, dict[str, str]]:
        """Status, document (None for no body at all), headers."""
        if path == "/api/whoami-v2":
            role = {"accessToken": {"role": "write", "displayName": "x", "createdAt": "2026-01-01", **_NEW}}
            return 200, {"type": "user", "name": "me", "orgs": None, "auth": role, **_NEW}, {}
        if path == "/api/jobs/hardware":
            return 200, _HARDWARE, {}
        if path.startswith("/api/models/") and not path.endswith("/auth-check"):
            return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
        if path.endswith("/auth-check"):
            return 204, None, {}
        if path.startswith("/api/buckets/"):
            return self.of_bucket(method, path, body)
        if path.startswith("/store/"):
            return (
                (200, {"result": 1, "was_inserted": True, **_NEW}, {})
                if "/v1/" in path and method == "POST"
                else (404, None, {})
            )
        if path.startswith("/api/jobs/"):
            return self.of_jobs(method, path, query, body)
        return 404, {"error": path}, {}

    def of_bucket(self, method: str, path: str, body: bytes) -> tuple[int, Any, dict[str, str]]:
        name = "/api/buckets/me/jobs-artifacts"
        if path == name and method == "POST":
            status, self.bucket = 409 if self.bucket else 201, True
            return status, {"url": f"{self.endpoint}/buckets/me/jobs-artifacts", **_NEW}, {"Location": name}
        if not self.bucket:
            return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
        if path == name:
            about = {"id": "me/jobs-artifacts", "private": True, "createdAt": "2026-01-01T00:00:00.000Z"}
            return 200, about | {"size": 0, "totalFiles": 0, **_NEW}, {}
        if path.endswith("-token"):
            store = {"casUrl": f"{self.endpoint}/store", "exp": 4102444800, "accessToken": "x", **_NEW}
            headers = {"X-Xet-Cas-Url": store["casUrl"], "X-Xet-Token-Expiration": "4102444800"}
            return 200, store, headers | {"X-Xet-Access-Token": "x"}
        if path.endswith("/batch"):
            orders = [json.loads(line) for line in body.splitlines() if line.strip()]
            self.files += [order["path"] for order in orders if order["type"] == "addFile"]
            return 201, {"success": True, "failed": [], "processed": len(self.files), **_NEW}, {}
        if "/tree" in path:  # without the times, which the client does without
            return 200, [{"type": "file", "path": p, "size": 1, "xetHash": "0" * 64, **_NEW} for p in self.files], {}
        return 200, [], {}

    def of_jobs(self, method: str, path: str, query: str, body: bytes) -> tuple[int, Any, dict[str, str]]:
        if method == "POST":
            self.posted.append(json.loads(body))
            # What is not decided yet is left out, or null.
            known = {"id": _ID, "status": {"stage": "SCHEDULING"}, "owner": {"id": "1", "name": "me", "type": "user"}}
            made = known | {"createdAt": "2026-11-21T10:00:00.000Z", "volumes": None, "labels": None, "secrets": None}
            return 201, made | _NEW, {"Location": f"{path}/{_ID}"}
        if path.endswith(_ID):
            return (200, self.job(), {}) if self.posted else (404, {"error": "no job"}, {})
        others = [_other(number, stage) for number, stage in enumerate(("RUNNING", "PAUSED_BY_ADMIN", "ERROR"))]
        if "page=2" not in query:  # the filter is ignored, and ours is on the second page
            return 200, others, {"Link": f'<{self.endpoint}{path}?page=2>; rel="next"'}
        return 200, [self.job()] if self.posted else [], {}

    def job(self) -> dict[str, Any]:
        """As it is when it runs, in a stage that the client knows and the emulator never says."""
        spec = self.posted[0]
        about = {
            "id": _ID,
            "status": {"stage": "UPDATING", "message": None, **_NEW},
            "createdAt": "2026-11-21T10:00:00Z",
        }
        owner = {"id": "1", "name": "me", "type": "user"}
        kept = ("flavor", "labels", "environment", "command", "volumes")
        return about | {"owner": owner, "secrets": None} | {key: spec[key] for key in kept} | _NEW


def _other(number: int, stage: str) -> dict[str, Any]:
    """A job of somebody else: without labels, volumes and times."""
    owner = {"id": "1", "name": "me", "type": "user"}
    return {"id": f"{number:024x}", "status": {"stage": stage}, "owner": owner, "labels": None, **_NEW}


def _row(name: str, micro: int, **more: Any) -> dict[str, Any]:
    about = {"name": name, "prettyName": name, "cpu": "4 vCPU", "ram": "15 GB", "unitCostMicroUSD": micro, **_NEW}
    return about | {"unitCostUSD": micro / 1e6, "unitLabel": "minute"} | more


_GPU = {"type": "gpu", "model": "T4", "quantity": "1", "vram": "16 GB", "manufacturer": "Nvidia"}
_HARDWARE = [
    _row("cpu-new", 10),  # no accelerator, no disk
    _row("odd-x1", 99, cpu="many", ram="N/A", accelerator={**_GPU, "type": "neuron", "vram": "?"}),
    _row("t4-small", 6667, accelerator=_GPU),
]


def _handler(hub: AnotherHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            path = re.sub("/+$", "", path)
            hub.paths.append(f"{self.command} {path}")
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            mine = path.startswith("/store/") or self.headers.get("authorization") == f"Bearer {TOKEN}"
            status, document, headers = hub.answer(self.command, path, query, body) if mine else (401, {}, {})
            data = b"" if document is None else json.dumps(document).encode()
            self.send_response(status)
            for name, value in ({"content-length": str(len(data)), "x-new-header": "1"} | headers).items():
                self.send_header(name.lower(), value)
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_HEAD = do_PUT = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler
