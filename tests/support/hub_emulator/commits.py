"""Models and datasets: creating them and committing to them, with small files in the commit and large ones in LFS."""

from __future__ import annotations

import base64
import secrets
from fnmatch import fnmatch
from typing import Any

from hub_emulator import cas
from hub_emulator.account import check_write
from hub_emulator.repos import Repository, blob, repository_of, sha256
from hub_emulator.wire import Answer, Call, Refused, json_answer

# Of the .gitattributes that the Hub puts into a new model repository (huggingface.co, 2026); the others are rare here.
LFS_ENDINGS = (".safetensors", ".bin", ".gguf", ".parquet", ".arrow", ".pt", ".pth", ".tar", ".gz", ".zip", ".npz")
LFS_BYTES = 10_000_000  # a larger file goes to LFS whatever its name


def create(call: Call) -> Answer:
    asked = call.json()
    namespace = asked.get("organization") or call.hub.accounts.user
    check_write(call, namespace)
    kind, name = asked.get("type") or "model", f"{namespace}/{asked['name']}"
    if kind not in ("model", "dataset"):
        raise Refused(501, f"the emulator has no {kind}s")
    known = call.hub.repositories.get((kind, name))
    if known is not None:
        return json_answer(
            {"error": "You already created this repo", "url": f"{call.hub.endpoint}/{known.page}"}, status=409
        )
    private = asked.get("visibility") == "private" or bool(asked.get("private"))
    files = {".gitattributes": "".join(f"*{e} filter=lfs diff=lfs merge=lfs -text\n" for e in LFS_ENDINGS).encode()}
    made = call.hub.add(kind, name, files, private=private)
    return json_answer({"url": f"{call.hub.endpoint}/{made.page}", "id": name, "name": name})


def delete(call: Call) -> Answer:
    asked = call.json()
    namespace = asked.get("organization") or call.hub.accounts.user
    check_write(call, namespace)
    if call.hub.repositories.pop((asked.get("type") or "model", f"{namespace}/{asked['name']}"), None) is None:
        raise Refused(404, "Repository not found", "RepoNotFound")
    return json_answer({})


def validate_card(call: Call) -> Answer:
    return json_answer({"errors": [], "warnings": []})


def branch(call: Call) -> Answer:
    repository = _writable(call)
    name, start = call.parts["revision"], call.json().get("startingPoint") or "main"
    if repository.branch(name) is not None:
        raise Refused(409, f"Reference already exists: {name}")
    files = repository.at(start)
    if files is None:
        raise Refused(404, "Invalid rev id", "RevisionNotFound")
    repository.branches[name] = dict(files)
    return json_answer({})


def preupload(call: Call) -> Answer:
    """How each file is to be sent, which content is there already, and what a .gitignore leaves out: that of the
    request, else that of the repository (huggingface_hub 2.4, `_fetch_upload_modes`)."""
    repository = _writable(call)
    files = repository.at(_branch(call, repository)) or {}
    ignored = call.json().get("gitIgnore") or files.get(".gitignore", b"").decode()
    answers = []
    for file in call.json()["files"]:
        path = file["path"]
        mode = "lfs" if path.endswith(LFS_ENDINGS) or file["size"] > LFS_BYTES else "regular"
        name = sha256 if path in repository.lfs else blob
        known = name(files[path]) if path in files else None
        left_out = any(fnmatch(path, line) or fnmatch(path.split("/")[-1], line) for line in ignored.split())
        answers.append({"path": path, "uploadMode": mode, "shouldIgnore": left_out, "oid": known})
    return json_answer({"files": answers})


def commit(call: Call) -> Answer:
    repository = _writable(call)
    branch = _branch(call, repository)
    header, *orders = call.lines()
    parent = header["value"].get("parentCommit")
    if parent not in (None, repository.commit(branch)):
        raise Refused(412, "A commit has happened since. Please refresh and try again.")
    files = dict(repository.at(branch) or {})
    for order in orders:
        _apply(call, repository, files, order)
    author = call.access.user if call.access else ""
    made = repository.add_commit(branch, files, header["value"].get("summary", ""), author)
    url = f"{call.hub.endpoint}/{repository.page}/commit/{made}"
    return json_answer({"success": True, "commitOid": made, "commitUrl": url, "hookOutput": ""})


def _apply(call: Call, repository: Repository, files: dict[str, bytes], order: dict[str, Any]) -> None:
    key, value = order["key"], order["value"]
    path = value["path"]
    if key == "file":
        files[path] = base64.b64decode(value["content"])
        repository.lfs.discard(path)
    elif key == "lfsFile":
        files[path] = _lfs_content(call, value["oid"])
        repository.lfs.add(path)
    elif key == "deletedFile":
        files.pop(path, None)
    elif key == "deletedFolder":
        for name in [name for name in files if name.startswith(path.rstrip("/") + "/")]:
            files.pop(name)
    else:
        raise Refused(400, f"no such operation: {key}")


def _lfs_content(call: Call, oid: str) -> bytes:
    """What was uploaded under this SHA-256, by LFS or through the Xet store."""
    hub = call.hub
    if oid not in hub.lfs:
        name = hub.store.file_of_sha256(oid)
        size = hub.store.size(name) if name else None
        if name is None or size is None:
            raise Refused(400, f"LFS object {oid} was not uploaded")
        hub.lfs[oid] = hub.store.read(name, size)
    data: bytes = hub.lfs[oid]
    if sha256(data) != oid:
        raise Refused(400, f"LFS object {oid} has another content")
    return data


def xet_token(call: Call) -> Answer:
    if call.parts["right"] == "write":
        _writable(call)
    else:
        repository_of(call, content=True)
    return cas.store_token(call, call.parts["right"])


# --- LFS without Xet ---


def lfs_batch(call: Call) -> Answer:
    repository = _writable(call)
    asked = call.json()
    if asked.get("operation") != "upload":
        raise Refused(501, "the emulator offers LFS for uploads only")
    return json_answer({"transfer": "basic", "objects": [_lfs_object(call, repository, o) for o in asked["objects"]]})


def _lfs_object(call: Call, repository: Repository, wanted: dict[str, Any]) -> dict[str, Any]:
    about = {"oid": wanted["oid"], "size": wanted["size"]}
    if wanted["oid"] in call.hub.lfs:
        return about
    key = secrets.token_hex(16)
    call.hub.lfs_keys[key] = wanted["oid"]
    verify = f"{call.hub.endpoint}/{repository.page}.git/info/lfs/objects/verify"
    upload = {"href": f"{call.hub.endpoint}/lfs-upload/{key}", "header": {}}
    return about | {"actions": {"upload": upload, "verify": {"href": verify, "header": {}}}}


def lfs_put(call: Call) -> Answer:
    """The address is the permission, as with a signed one."""
    oid = call.hub.lfs_keys.get(call.parts["key"])
    if oid is None:
        raise Refused(403, "no such upload")
    if sha256(call.body) != oid:
        raise Refused(400, "the content has another SHA-256")
    call.hub.lfs[oid] = call.body
    return json_answer({})


def lfs_verify(call: Call) -> Answer:
    asked = call.json()
    data = call.hub.lfs.get(asked["oid"])
    if data is None or len(data) != asked["size"]:
        raise Refused(404, "Object not found")
    return json_answer({"message": "ok"})


def _writable(call: Call) -> Repository:
    repository = repository_of(call, content=False)
    check_write(call, repository.name.split("/")[0])
    if call.query.get("create_pr"):
        raise Refused(501, "the emulator has no pull requests")
    return repository


def _branch(call: Call, repository: Repository) -> str:
    name = repository.branch(call.parts["revision"])
    if name is None:
        raise Refused(404, "Invalid rev id", "RevisionNotFound")
    return name
