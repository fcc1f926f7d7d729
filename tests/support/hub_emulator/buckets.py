"""Buckets: names for files of the Xet store."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hub_emulator import cas
from hub_emulator.account import check_write
from hub_emulator.wire import Answer, Call, Refused, file_answer, json_answer, now, paged


@dataclass(frozen=True)
class BucketFile:
    """`name` is that of the Xet store; `mtime` is in milliseconds, as its sender says."""

    name: str
    size: int
    mtime: int
    uploaded_at: str = field(default_factory=now)


@dataclass
class Bucket:
    id: str
    private: bool
    created_at: str = field(default_factory=now)
    files: dict[str, BucketFile] = field(default_factory=dict)

    def inside(self, folder: str) -> dict[str, BucketFile]:
        """The files below a folder, by their full paths."""
        start = f"{folder.strip('/')}/" if folder.strip("/") else ""
        return {path: file for path, file in self.files.items() if path.startswith(start)}

    def info(self) -> dict[str, Any]:
        size = sum(file.size for file in self.files.values())
        about = {"id": self.id, "private": self.private, "createdAt": self.created_at}
        return about | {"size": size, "totalFiles": len(self.files)}


def read_file(hub: Any, bucket: Bucket, path: str) -> bytes:
    file = bucket.files[path]
    return b"" if file.size == 0 else hub.store.read(file.name, file.size)


def put_files(hub: Any, bucket: Bucket, files: dict[str, Path]) -> None:
    """Uploads files of this machine, as the machine of a job does for its volume."""
    sent = [(path, local) for path, local in files.items() if local.stat().st_size]
    names = hub.store.upload([local for _, local in sent])
    for (path, local), (name, size) in zip(sent, names, strict=True):
        bucket.files[path] = BucketFile(name, size, int(local.stat().st_mtime * 1000))
    for path, local in files.items():
        if path not in dict(sent):
            bucket.files[path] = BucketFile(_EMPTY, 0, int(local.stat().st_mtime * 1000))


_EMPTY = "0" * 64  # the name that hf_xet gives to no bytes at all


# --- Routes ---


def create(call: Call) -> Answer:
    namespace, name = call.parts["id"].split("/")
    namespace = call.hub.accounts.user if namespace == "me" else namespace
    check_write(call, namespace)
    bucket_id = f"{namespace}/{name}"
    url = {"url": f"{call.hub.endpoint}/buckets/{bucket_id}"}
    if bucket_id in call.hub.buckets:
        return json_answer(url | {"error": "this bucket exists already"}, status=409)
    asked = call.json()
    private = asked.get("visibility") == "private" or bool(asked.get("private"))
    call.hub.buckets[bucket_id] = Bucket(bucket_id, private)
    return json_answer(url)


def info(call: Call) -> Answer:
    return json_answer(_bucket(call).info())


def delete(call: Call) -> Answer:
    check_write(call, _bucket(call).id.split("/")[0])
    call.hub.buckets.pop(call.parts["id"])
    return json_answer({})


def mine(call: Call) -> Answer:
    namespace = call.parts["namespace"]
    namespace = call.hub.accounts.user if namespace == "me" else namespace
    wanted = call.query.get("search", [""])[0]
    found = [b.info() for b in call.hub.buckets.values() if b.id.startswith(f"{namespace}/") and wanted in b.id]
    return paged(call, found)


def tree(call: Call) -> Answer:
    bucket = _bucket(call)
    folder = call.parts["path"].strip("/")
    files = bucket.inside(folder)
    if call.query.get("recursive") == ["true"]:
        return paged(call, [_entry(path, file) for path, file in sorted(files.items())])
    depth = folder.count("/") + 1 if folder else 0
    folders = {"/".join(path.split("/")[: depth + 1]) for path in files if path.count("/") > depth}
    listed = [_entry(path, file) for path, file in sorted(files.items()) if path.count("/") == depth]
    return paged(call, [{"type": "directory", "path": name, "uploadedAt": now()} for name in sorted(folders)] + listed)


def paths_info(call: Call) -> Answer:
    files = _bucket(call).files
    return json_answer([_entry(path, files[path]) for path in call.json().get("paths", []) if path in files])


def batch(call: Call) -> Answer:
    """Adds, copies and deletes; each may fail by itself."""
    bucket = _bucket(call)
    check_write(call, bucket.id.split("/")[0])
    orders = call.lines()
    failed = [{"path": order["path"], "error": why} for order in orders if (why := _apply(call, bucket, order))]
    status = 422 if failed and len(failed) == len(orders) else 200
    return json_answer({"success": not failed, "failed": failed}, status=status)


def _apply(call: Call, bucket: Bucket, order: dict[str, Any]) -> str | None:
    """Carries one order out; returns why it cannot."""
    path = order["path"]
    if order["type"] == "deleteFile":
        return None if bucket.files.pop(path, None) else "no such file"
    if order["type"] not in ("addFile", "copyFile"):
        return f"no such operation: {order['type']}"
    size = 0 if order["xetHash"] == _EMPTY else call.hub.store.size(order["xetHash"])
    if size is None:
        return "its content was not uploaded"
    bucket.files[path] = BucketFile(order["xetHash"], size, int(order.get("mtime") or time.time() * 1000))
    return None


def token(call: Call) -> Answer:
    bucket = _bucket(call)
    if call.parts["right"] == "write":
        check_write(call, bucket.id.split("/")[0])
    return cas.store_token(call, call.parts["right"])


def resolve(call: Call) -> Answer:
    """A HEAD says where the store has the file; a GET sends it."""
    bucket, path = _bucket(call), call.parts["path"]
    file = bucket.files.get(path)
    if file is None:
        raise Refused(404, "no such file", "EntryNotFound")
    headers = {
        "ETag": f'"{file.name}"',
        "X-Xet-Hash": file.name,
        "X-Linked-Size": str(file.size),
        "Link": f'<{call.hub.endpoint}/api/buckets/{bucket.id}/xet-read-token>; rel="xet-auth"',
    }
    if call.method == "HEAD":
        return Answer(b"", headers | {"Content-Length": str(file.size)})
    return file_answer(read_file(call.hub, bucket, path), headers, call.headers.get("Range"))


def _bucket(call: Call) -> Bucket:
    found: Bucket | None = call.hub.buckets.get(call.parts["id"])
    if found is None:
        raise Refused(404, "no such bucket", "RepoNotFound")
    return found


def _entry(path: str, file: BucketFile) -> dict[str, Any]:
    changed = datetime.fromtimestamp(file.mtime / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
    about = {"type": "file", "path": path, "size": file.size, "xetHash": file.name}
    return about | {"mtime": changed, "uploadedAt": file.uploaded_at}
