"""The Xet store over HTTP: what hf_xet 1.8 needs of a content-addressed store, and our own use of it.

Xorbs (many compressed chunks in one file) are kept as they come and never decompressed: to read a file back, the server
asks hf_xet in a child process, as any client would. Formats: xet-core, `docs/xet` of hub-docs, and probes (2026-11).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from hub_emulator.wire import Answer, Call, Refused, file_answer, json_answer

_ENTRY = 48  # bytes of each record of a shard, and of its header
_VERIFIED, _EXTENDED = 1 << 31, 1 << 30  # flags of a file's record: what follows its terms
_TOKEN_SECONDS = 3600
_PATIENCE_SECONDS = 120  # for one answer of hf_xet
_CHUNK_HEADER = 8  # version, 3 bytes of compressed length, the scheme, 3 bytes of length


@dataclass(frozen=True)
class Term:
    """A part of a file: the chunks from `first` up to `end` of a xorb."""

    xorb: str
    first: int
    end: int


class Store:
    """Xorbs on disk, and of which of their chunks each file is made. `own` is the address that its `client` uses."""

    def __init__(self, folder: Path, own: str) -> None:
        self._own = own
        self._xorbs = folder / "xorbs"
        self._xorbs.mkdir(parents=True)
        self._scratch = folder / "scratch"
        self._files: dict[str, list[Term]] = {}
        self._chunks: dict[str, list[tuple[int, int]]] = {}
        self._of_sha256: dict[str, str] = {}
        self._tokens: dict[str, str] = {}
        self._one_at_a_time = threading.Lock()
        self.client: _Client | None = None

    def token(self, right: str) -> str:
        """A new token for `read` or `write`; it is not one of the Hub's."""
        made = f"cas_{right}_{secrets.token_hex(8)}"
        self._tokens[made] = right
        return made

    def check(self, authorization: str | None, right: str) -> None:
        given = self._tokens.get((authorization or "").removeprefix("Bearer "))
        if given is None or (right == "write" and given != "write"):
            raise Refused(401 if given is None else 403, f"no {right} token of the Xet store")

    def add_xorb(self, name: str, data: bytes) -> bool:
        if name in self._chunks:
            return False
        self._chunks[name] = _chunks(data)
        self.xorb_file(name).write_bytes(data)
        return True

    def xorb_file(self, name: str) -> Path:
        return self._xorbs / name

    def add_shard(self, data: bytes) -> None:
        for name, terms, sha256 in _shard_files(data):
            if any(term.xorb not in self._chunks for term in terms):
                raise Refused(400, f"file {name} needs a xorb that was not sent")
            self._files[name] = terms
            if sha256:
                self._of_sha256[sha256] = name

    def file_of_sha256(self, sha256: str) -> str | None:
        """The name in this store of an LFS file, which the Hub knows by its SHA-256."""
        return self._of_sha256.get(sha256)

    def size(self, name: str) -> int | None:
        """Bytes of a file; None when it is not here."""
        terms = self._files.get(name)
        return None if terms is None else sum(self._length(term) for term in terms)

    def _length(self, term: Term) -> int:
        return sum(length for _, length in self._chunks[term.xorb][term.first : term.end])

    def plan(self, name: str, start: int, end: int, address: str) -> dict[str, Any]:
        """How a client puts the bytes from `start` up to `end` of a file together (`QueryReconstructionResponse`)."""
        offset, terms, position = 0, list[Term](), 0
        for term in self._files[name]:
            for index in range(term.first, term.end):
                length = self._chunks[term.xorb][index][1]
                if position + length > start and position < end:
                    if not terms:
                        offset = start - position
                    _extend(terms, Term(term.xorb, index, index + 1))
                position += length
        return {
            "offset_into_first_range": offset,
            "terms": [
                {"hash": t.xorb, "unpacked_length": self._length(t), "range": {"start": t.first, "end": t.end}}
                for t in terms
            ],
            "fetch_info": {xorb: self._fetches(xorb, terms, address) for xorb in {t.xorb for t in terms}},
        }

    def _fetches(self, xorb: str, terms: list[Term], address: str) -> list[dict[str, Any]]:
        """The ranges of a xorb to ask for. hf_xet panics where they repeat or overlap, so they are merged."""
        merged: list[Term] = []
        for term in sorted((t for t in terms if t.xorb == xorb), key=lambda t: t.first):
            if merged and term.first <= merged[-1].end:
                last = merged.pop()
                term = Term(xorb, last.first, max(last.end, term.end))
            merged.append(term)
        starts = [0, *accumulate(stored for stored, _ in self._chunks[xorb])]
        return [
            {
                "range": {"start": t.first, "end": t.end},
                "url": f"{address}/{xorb}",
                "url_range": {"start": starts[t.first], "end": starts[t.end] - 1},
            }
            for t in merged
        ]

    # --- Our own reading and writing, by hf_xet in a child process ---

    def read(self, name: str, size: int) -> bytes:
        """The bytes of one file."""
        self._scratch.mkdir(exist_ok=True)
        path = self._scratch / secrets.token_hex(8)
        self.download([(name, size, path)])
        data = path.read_bytes()
        path.unlink()
        return data

    def download(self, files: list[tuple[str, int, Path]]) -> None:
        for _, size, path in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            if size == 0:
                path.write_bytes(b"")
        wanted = [[name, size, str(path)] for name, size, path in files if size]
        if wanted:
            self._child({"download": wanted})

    def upload(self, paths: list[Path]) -> list[tuple[str, int]]:
        """`(name, size)` of each file, in their order."""
        done = self._child({"upload": [str(path) for path in paths]}) if paths else []
        return [(name, size) for name, size in done]

    def _child(self, order: dict[str, Any]) -> Any:
        token = self.token("write")
        order |= {"endpoint": self._own, "token": token, "until": int(time.time()) + _TOKEN_SECONDS}
        try:
            with self._one_at_a_time:
                if self.client is None or self.client.has_ended():
                    self.client = _Client(self._scratch)
                return self.client.ask(order)
        finally:
            self._tokens.pop(token)

    def close(self) -> None:
        """Ends the child process."""
        with self._one_at_a_time:
            if self.client is not None:
                self.client.end()


class _Client:
    """hf_xet in a child process, for one store: it leaves out of an upload what it sent to another one."""

    def __init__(self, home: Path) -> None:
        home.mkdir(exist_ok=True)
        self._log = home / "client.log"
        ours, theirs = socket.socketpair()
        with theirs, self._log.open("w") as log:
            self._process = _starter().start(home, theirs, log.fileno())
        self._socket, self._asked = ours, ours.makefile("rwb")

    def has_ended(self) -> bool:
        return self._asked.closed or _is_closed(self._socket)

    def ask(self, order: dict[str, Any]) -> Any:
        patience = threading.Timer(_PATIENCE_SECONDS, self._kill)
        patience.start()
        try:
            self._asked.write(json.dumps(order).encode() + b"\n")
            self._asked.flush()
            answer = self._asked.readline()
        except OSError:
            answer = b""
        patience.cancel()
        if not answer:
            self.end()
            raise RuntimeError(f"hf_xet cannot use our store: {self._log.read_text()[-2000:]}")
        return json.loads(answer)

    def end(self) -> None:
        self._kill()
        with contextlib.suppress(OSError):  # what it was not sent any more
            self._asked.close()
        self._socket.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # the starter itself is gone
            os.kill(self._process, signal.SIGKILL)


def _is_closed(asked: socket.socket) -> bool:
    """Whether the other side has ended. Nothing is ever sent unasked."""
    ready, _, _ = select.select([asked], [], [], 0)
    return bool(ready)


class _Starter:
    """A process that has imported hf_xet, and forks for each client: hundreds of stores are made. It waits for none of
    them, so the number of one that ended is not given to another process."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair()
        env = {"PATH": os.environ.get("PATH", ""), "HF_XET_TELEMETRY_ENABLED": "0"}
        subprocess.Popen([sys.executable, "-c", _STARTER], stdin=theirs, env=env)
        theirs.close()
        self._one_at_a_time = threading.Lock()

    def start(self, home: Path, asked: socket.socket, log: int) -> int:
        """The process of a client, which reads its orders from a socket."""
        with self._one_at_a_time:
            socket.send_fds(self._requests, [str(home).encode()], [asked.fileno(), log])
            return int(self._requests.recv(64))


@cache
def _starter() -> _Starter:
    """Ends when this process does: its requests end."""
    return _Starter()


# An error ends a client, with its traceback on stderr; so does the end of the process that asks, which closes the
# socket.
_STARTER = """
import json, os, socket
from hf_xet import SKIP_SHA256, XetFileInfo, XetSession

def answer(order):
    access = {"endpoint": order["endpoint"], "token": order["token"], "token_expiry_unix_secs": order["until"]}
    if "upload" in order:
        with XetSession().new_upload_commit(**access) as commit:
            handles = [commit.start_upload_file(path, sha256=SKIP_SHA256) for path in order["upload"]]
        infos = [handle.result().xet_info for handle in handles]
        return [[info.hash, info.file_size] for info in infos]
    with XetSession().new_file_download_group(**access) as group:
        for name, size, path in order["download"]:
            group.start_download_file(XetFileInfo(name, size), path)
    return []

def client(home, asked):
    os.environ["HF_HOME"] = home
    with asked.makefile("rwb") as orders:
        for line in orders:
            orders.write(json.dumps(answer(json.loads(line))).encode() + b"\\n")
            orders.flush()

requests = socket.socket(fileno=0)
while True:
    home, files, _, _ = socket.recv_fds(requests, 1 << 16, 2)
    if not home:
        break
    process = os.fork()
    if process == 0:
        os.dup2(files[1], 2)
        os.close(files[1])
        client(home.decode(), socket.socket(fileno=files[0]))
        os._exit(0)
    for file in files:
        os.close(file)
    requests.send(str(process).encode())
"""


def _extend(terms: list[Term], chunk: Term) -> None:
    """Adds a chunk; one that follows the last of the same xorb makes that term longer."""
    if terms and (terms[-1].xorb, terms[-1].end) == (chunk.xorb, chunk.first):
        chunk = Term(chunk.xorb, terms.pop().first, chunk.end)
    terms.append(chunk)


def _chunks(xorb: bytes) -> list[tuple[int, int]]:
    """`(bytes in the xorb with its header, bytes when decompressed)` of each chunk."""
    found, at = [], 0
    while at < len(xorb):
        header = xorb[at : at + _CHUNK_HEADER]
        if len(header) < _CHUNK_HEADER or header[:7] == b"XETBLOB":  # a footer; hf_xet 1.8 sends none
            break
        stored = int.from_bytes(header[1:4], "little") + _CHUNK_HEADER
        found.append((stored, int.from_bytes(header[5:8], "little")))
        at += stored
    if at != len(xorb) and not xorb[at:].startswith(b"XETBLOB"):
        raise Refused(400, "a xorb whose chunks do not add up")
    return found


def _shard_files(shard: bytes) -> list[tuple[str, list[Term], str | None]]:
    """`(name, terms, SHA-256 where it is said)` of each file."""
    found, at = [], _ENTRY
    while shard[at : at + 32] != b"\xff" * 32:
        if at + _ENTRY > len(shard):
            raise Refused(400, "a shard without its end mark")
        name, flags, count = _hash(shard[at : at + 32]), *struct.unpack_from("<II", shard, at + 32)
        at += _ENTRY
        terms = [_term(shard[i : i + _ENTRY]) for i in range(at, at + count * _ENTRY, _ENTRY)]
        at += count * _ENTRY * (2 if flags & _VERIFIED else 1)
        sha256 = None
        if flags & _EXTENDED:
            sha256, at = _hash(shard[at : at + 32]), at + _ENTRY
        found.append((name, terms, sha256))
    return found


def _term(entry: bytes) -> Term:
    first, end = struct.unpack_from("<II", entry, 40)
    return Term(_hash(entry[:32]), first, end)


def _hash(data: bytes) -> str:
    """Four little-endian numbers, printed one after the other."""
    return "".join(f"{number:016x}" for number in struct.unpack("<4Q", data))


# --- Routes ---


def store_token(call: Call, right: str) -> Answer:
    """Access to the store: the body of the answer is for hf_xet, the headers are for huggingface_hub."""
    until, token = int(time.time()) + _TOKEN_SECONDS, call.hub.store.token(right)
    headers = {
        "X-Xet-Cas-Url": call.hub.cas,
        "X-Xet-Access-Token": token,
        "X-Xet-Token-Expiration": str(until),
    }
    return json_answer({"casUrl": call.hub.cas, "accessToken": token, "exp": until}, headers)


def nothing_newer(call: Call) -> Answer:
    """Known, and not offered: hf_xet takes a 404 here for "no duplicates" or "use the older route"."""
    raise Refused(404, "not offered")


def telemetry(call: Call) -> Answer:
    return json_answer({})


def put_xorb(call: Call) -> Answer:
    call.hub.store.check(call.headers.get("Authorization"), "write")
    return json_answer({"was_inserted": call.hub.store.add_xorb(call.parts["hash"], call.body)})


def put_shard(call: Call) -> Answer:
    call.hub.store.check(call.headers.get("Authorization"), "write")
    call.hub.store.add_shard(call.body)
    return json_answer({"result": 1})


def reconstruction(call: Call) -> Answer:
    store, name = call.hub.store, call.parts["hash"]
    store.check(call.headers.get("Authorization"), "read")
    size = store.size(name)
    if size is None:
        raise Refused(404, "no such file in the store")
    asked = (call.headers.get("Range") or f"bytes=0-{size - 1}").removeprefix("bytes=").split("-")
    start, end = int(asked[0]), min(int(asked[1] or size - 1) + 1, size)
    if start >= size:
        raise Refused(416, "past the end of the file")
    base = call.path.split("/v1/")[0]
    return json_answer(store.plan(name, start, end, f"{call.hub.endpoint}{base}/xorbs"))


def xorb(call: Call) -> Answer:
    """A part of a xorb. On the Hub its address is signed and needs no token; here its name is the secret."""
    path = call.hub.store.xorb_file(call.parts["hash"])
    if not path.is_file():
        raise Refused(404, "no such xorb")
    return file_answer(path.read_bytes(), {}, call.headers.get("Range"))
