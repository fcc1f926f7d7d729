"""The server: one address for all routes, a record of all requests, and the faults that were planned."""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from hub_emulator.account import Access, Accounts, looks_real
from hub_emulator.buckets import Bucket
from hub_emulator.cas import Store
from hub_emulator.faults import Fault, Faults
from hub_emulator.job_routes import shipped_hardware
from hub_emulator.jobs import Jobs
from hub_emulator.repos import Repository
from hub_emulator.routes import ACCOUNT, KEY, ROUTES
from hub_emulator.wire import Answer, Call, Refused

# A certificate of nobody. Each client reads all authorities that it trusts, of which this server needs none: 40 ms.
_ONE_AUTHORITY = Path(__file__).parents[1] / "data" / "one_authority.pem"


@dataclass
class Request:
    """A request that came in; of its credentials, only whose they are.

    Attributes:
        who: the user; `nobody`, or `refused` for a token that is not of this server.
        status: of the answer; 0 while there is none.
        sent: bytes of its body.
    """

    method: str
    path: str
    query: str
    range: str | None
    who: str = "nobody"
    status: int = 0
    sent: int = 0


class Hub:
    """A Hub that lives in a folder of its own, and ends with its jobs.

    Attributes:
        endpoint: its address, on this machine only.
        token: of its user, with all rights; `new_token` makes others.
        log: all requests.
        unknown: requests that no route answers, or whose route broke. A test asserts that there are none.
        faults: what is to go wrong.
        jobs: the jobs that were created.
        page: entries on a page of a listing.
        ranges: whether files can be asked for in parts.
    """

    def __init__(self, folder: Path, *, user: str = "me") -> None:
        folder.mkdir(mode=0o700, parents=True)
        self.folder = folder
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.hub = self  # type: ignore[attr-defined]
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.cas = f"{self.endpoint}/cas/{secrets.token_hex(4)}"  # hf_xet remembers a store by its address
        self.accounts = Accounts(user, f"{user}-org")
        self.token = self.new_token()
        self.log: list[Request] = []
        self.unknown: list[str] = []
        self.faults = Faults()
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.lfs: dict[str, bytes] = {}
        self.lfs_keys: dict[str, str] = {}
        self.buckets: dict[str, Bucket] = {}
        self.store = Store(folder / "store", f"{self.endpoint}/cas-own")
        self.hardware: list[dict[str, Any]] = shipped_hardware()
        self.jobs = Jobs(self)
        self.page = 100
        self.ranges = True

    @property
    def jobs_created(self) -> int:
        return len(self.jobs.all)

    def add(self, kind: str, name: str, files: dict[str, bytes], **more: Any) -> Repository:
        """A model or dataset, made without a request."""
        repository = Repository(kind, name, files, **more)
        self.repositories[kind, name] = repository
        return repository

    def new_token(self, role: str = "write", may: tuple[str, ...] = ("repo.write", "job.write")) -> str:
        return self.accounts.token(role, may)

    def environment(self, home: Path, *, token: str | None = "") -> dict[str, str]:
        """The environment of a child process that takes this server for the Hub, as its user or with another token."""
        return environment(self.endpoint, home, self.token if token == "" else token)

    def sent(self, pattern: str) -> int:
        """Bytes sent of the files whose request path matches."""
        return sum(r.sent for r in self.log if r.method == "GET" and re.search(pattern, r.path))

    def __enter__(self) -> Hub:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.jobs.stop()
        self.store.close()  # its client asks the server
        self._server.shutdown()
        self._server.server_close()


def environment(endpoint: str, home: Path, token: str | None) -> dict[str, str]:
    """The environment of a child process that takes `endpoint` for the Hub, and keeps everything of it in `home`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")}
    own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1,localhost"}
    own["SKILL_TRAIN_CACHE"] = str(home / "skill-train")
    own["SSL_CERT_FILE"] = str(_ONE_AUTHORITY)
    quiet = ("HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_UPDATE_CHECK")
    own |= dict.fromkeys((*quiet, "HF_HUB_DISABLE_EXPERIMENTAL_WARNING"), "1") | {"HF_XET_TELEMETRY_ENABLED": "0"}
    return kept | own | ({"HF_TOKEN": token} if token else {})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body in one packet
    disable_nagle_algorithm = True

    @property
    def hub(self) -> Hub:
        return self.server.hub  # type: ignore[attr-defined,no-any-return]

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        self._record = Request(self.command, url.path, url.query, self.headers.get("Range"))
        own = url.path.startswith("/cas-own/")  # ours, which nobody sees and nothing disturbs
        if not own:
            self.hub.log.append(self._record)
        body = self._body()
        fault = None if own else self.hub.faults.of_request(self.command, url.path)
        try:
            self._send(*self._struck(url.path, url.query, body, fault))
        except OSError:  # the client has gone, or is to see no answer
            self.close_connection = True

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _struck(self, path: str, query: str, body: bytes, fault: Fault | None) -> tuple[Answer, Fault]:
        """The answer, with the fault that changes how it is sent."""
        if fault is None:
            return self._answer(path, query, body), Fault()
        time.sleep(fault.seconds)
        if fault.after:
            self._answer(path, query, body)
        if fault.status == 0:
            raise ConnectionAbortedError
        if fault.lets_through:
            return self._answer(path, query, body), fault
        return Answer(fault.body, dict(fault.headers), fault.status), fault

    def _answer(self, path: str, query: str, body: bytes) -> Answer:
        method = "GET" if self.command == "HEAD" else self.command
        for of, pattern, needs, route in ROUTES:
            found = re.fullmatch(pattern, path) if of == method else None
            if found:
                parts = {name: unquote(value) for name, value in found.groupdict(default="").items()}
                access = None
                try:
                    access = self._access(needs)
                    call = Call(self.hub, self.command, path, parse_qs(query), self.headers, body, access, parts)
                    return route(call)
                except Refused as refused:
                    return refused.answer()
                except Exception:  # noqa: BLE001 - the test that asserts on `unknown` shows it
                    self.hub.unknown.append(f"{self.command} {path}: {traceback.format_exc()}")
                    return Answer(b'{"error": "the emulator broke"}', {}, 500)
        self.hub.unknown.append(f"{self.command} {path}")
        return Answer(b'{"error": "the emulator has no such route"}', {}, 501)

    def _access(self, needs: str) -> Access | None:
        """Who asks.

        Raises:
            Refused: 401, without a token where one is needed, or with one of somebody else.
        """
        authorization = self.headers.get("Authorization")
        if needs == KEY:
            if looks_real(authorization or ""):
                raise Refused(401, "this is no place for a real token")
            return None
        self._record.who = "refused" if authorization else "nobody"
        access = self.hub.accounts.access(authorization)
        if access is None and needs == ACCOUNT:
            raise Refused(401, "Invalid username or password.")
        self._record.who = access.user if access else "nobody"
        return access

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():  # trailers
            pass
        return b"".join(chunks)

    def _send(self, answer: Answer, fault: Fault) -> None:
        self._record.status = answer.status
        stream = not isinstance(answer.body, bytes)
        length = {"Transfer-Encoding": "chunked"} if stream else {"Content-Length": str(len(answer.body))}  # type: ignore[arg-type]
        self.send_response(answer.status)
        for name, value in (length | {"X-Request-Id": "made-up"} | answer.headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.flush()
        if self.command == "HEAD":
            return
        if isinstance(answer.body, bytes):
            self._send_bytes(answer.body, fault.drop_seconds)
        else:
            self._send_stream(answer.body, fault.cut)

    def _send_bytes(self, body: bytes, drop_seconds: float) -> None:
        size = 1 if drop_seconds else 1 << 20
        for drop in (body[i : i + size] for i in range(0, len(body), size)):
            self._record.sent += len(drop)  # first, for a client that has it all may look
            self.wfile.write(drop)
            self.wfile.flush()
            time.sleep(drop_seconds)

    def _send_stream(self, events: Iterator[bytes], cut: int | None) -> None:
        """Events in chunks. A stream that is cut has no last chunk, by which the client knows."""
        sent = 0
        for event in events:
            if sent == cut:
                self.close_connection = True
                return
            sent += not event.startswith(b":")  # a comment, to keep the connection alive
            self.wfile.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
            self.wfile.flush()
            self._record.sent += len(event)
        self.wfile.write(b"0\r\n\r\n")
