"""The Hub for tests, asked by the unmodified client over real HTTP: account, repositories, buckets."""

from __future__ import annotations

import hashlib
import json
import random
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from hub_emulator import Hub

pytestmark = pytest.mark.slow

hf = pytest.importorskip("huggingface_hub")

constants = pytest.importorskip("huggingface_hub.constants")
errors = pytest.importorskip("huggingface_hub.errors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small file, an empty one, and 3 MB that do not repeat."""
    made = tmp_path / "folder"
    (made / "deep").mkdir(parents=True)
    (made / "a.txt").write_text("hello\n")
    (made / "deep" / "empty.txt").write_bytes(b"")
    (made / "weights.safetensors").write_bytes(random.Random(0).randbytes(3_000_000))
    return made


def _same(left: Path, right: Path) -> bool:
    return _content(left) == _content(right)


def _content(folder: Path) -> dict[str, bytes]:
    names = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    return {name: (folder / name).read_bytes() for name in names if not name.startswith((".cache", ".gitattributes"))}


# --- The server itself ---


def test_it_listens_on_this_machine_only_and_hides_its_state(hub: Hub) -> None:
    assert hub.endpoint.startswith("http://127.0.0.1:")
    assert stat.S_IMODE(hub.folder.stat().st_mode) == 0o700


def test_a_route_that_is_not_there_is_said_and_kept(hub: Hub) -> None:
    request = urllib.request.Request(f"{hub.endpoint}/api/moon", headers={"Authorization": f"Bearer {hub.token}"})
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(request)
    assert raised.value.code == 501
    assert hub.unknown == ["GET /api/moon"]
    hub.unknown.clear()


@pytest.mark.parametrize("token", [None, "hf_wrong", "hf_" + "abcdefghij" * 3 + "abcd"])
def test_without_its_token_nothing_is_answered(hub: Hub, token: str | None) -> None:
    """The last one looks like a real one; nothing of it is kept."""
    api = hf.HfApi(endpoint=hub.endpoint, token=token or False)
    with pytest.raises(errors.HfHubHTTPError) as raised:
        api.list_jobs_hardware() if token else list(api.list_jobs(namespace="me"))
    assert raised.value.response.status_code == 401
    assert not token or token not in repr(hub.log)


def test_who_am_i_and_what_may_i(hub: Hub, api: Any) -> None:
    assert (api.whoami()["name"], api.whoami()["auth"]["accessToken"]["role"]) == ("me", "write")
    fine = hub.new_token("fineGrained", ("repo.write",))
    token = hf.HfApi(endpoint=hub.endpoint, token=fine).whoami()["auth"]["accessToken"]
    assert token["fineGrained"]["scoped"][0]["permissions"] == ["repo.write"]


def test_a_token_that_may_only_read(hub: Hub, api: Any, folder: Path) -> None:
    api.create_repo("me/model", private=True)
    reader = hf.HfApi(endpoint=hub.endpoint, token=hub.new_token("read", ()))
    assert reader.model_info("me/model").private is True
    api.auth_check("me/model", write=True)
    reader.auth_check("me/model")
    for question in (
        lambda: reader.auth_check("me/model", write=True),
        lambda: reader.create_repo("me/other"),
        lambda: reader.create_bucket("me/bucket"),
        lambda: reader.upload_file(path_or_fileobj=b"x", path_in_repo="x", repo_id="me/model"),
    ):
        with pytest.raises(errors.HfHubHTTPError) as raised:
            question()
        assert raised.value.response.status_code == 403
        assert "missing permissions: repo.write" in str(raised.value)
    with pytest.raises(errors.HfHubHTTPError, match="namespace somebody"):
        api.create_repo("somebody/model")


def test_the_whole_client_in_a_process_of_its_own(hub: Hub, folder: Path, tmp_path: Path) -> None:
    """With nothing set but the environment; its first request is for the list of harnesses, on the Hub it was given."""
    program = f"""
        import huggingface_hub as h
        h.create_repo("me/model")
        h.upload_folder(repo_id="me/model", folder_path={str(folder)!r})
        print(h.snapshot_download("me/model"))
    """
    command = [sys.executable, "-c", "\n".join(line.strip() for line in program.splitlines())]
    env = hub.environment(tmp_path / "home")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    snapshot = Path(done.stdout.splitlines()[-1])
    for name, data in _content(folder).items():
        assert (snapshot / name).read_bytes() == data
    assert snapshot.is_relative_to(tmp_path / "home")


# --- Repositories ---


@pytest.mark.parametrize("xet", [True, False])
@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_a_folder_goes_up_and_comes_back(
    hub: Hub, api: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, xet: bool, kind: str
) -> None:
    """Small files in the commit, weights through the Xet store, or by plain LFS where the client has no Xet."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", not xet)
    api.create_repo("me/thing", repo_type=kind, private=True)
    api.create_repo("me/thing", repo_type=kind, exist_ok=True)
    with pytest.raises(errors.HfHubHTTPError, match="already created"):
        api.create_repo("me/thing", repo_type=kind)
    made = api.upload_folder(repo_id="me/thing", folder_path=folder, repo_type=kind, commit_message="first")
    back = api.snapshot_download("me/thing", repo_type=kind, local_dir=tmp_path / "back")
    assert _same(folder, Path(back))
    assert any(request.path.startswith("/cas/") for request in hub.log) is xet
    info = api.repo_info("me/thing", repo_type=kind, files_metadata=True)
    assert (info.sha, info.private) == (made.oid, True)
    sizes = {file.rfilename: file.size for file in info.siblings}
    assert {"a.txt": 6, "weights.safetensors": 3_000_000}.items() <= sizes.items()
    [weights] = api.get_paths_info("me/thing", ["weights.safetensors"], repo_type=kind)
    assert weights.lfs.sha256 == hashlib.sha256((folder / "weights.safetensors").read_bytes()).hexdigest()


def test_what_is_there_already_is_not_committed_again(hub: Hub, api: Any, folder: Path) -> None:
    api.create_repo("me/model")
    first = api.upload_folder(repo_id="me/model", folder_path=folder)
    again = api.upload_folder(repo_id="me/model", folder_path=folder)
    assert again.oid == first.oid
    titles = [commit.title for commit in api.list_repo_commits("me/model")]
    assert titles == ["Upload folder using huggingface_hub", "initial commit"]


def test_what_a_gitignore_names_is_left_out_without_a_word(hub: Hub, api: Any, folder: Path) -> None:
    hub.add("model", "me/m", {".gitignore": b"*.safetensors\nempty.txt\n"})
    api.upload_folder(repo_id="me/m", folder_path=folder)
    assert set(hub.repositories["model", "me/m"].files) == {".gitignore", "a.txt"}


def test_the_page_of_a_repository_has_the_digest_of_each_file(hub: Hub, api: Any, folder: Path) -> None:
    api.create_repo("me/m")
    api.upload_folder(repo_id="me/m", folder_path=folder)
    files = {file.rfilename: file for file in api.model_info("me/m", files_metadata=True).siblings}
    weights = (folder / "weights.safetensors").read_bytes()
    assert (files["weights.safetensors"].lfs.sha256, files["weights.safetensors"].size) == (
        hashlib.sha256(weights).hexdigest(),
        3_000_000,
    )
    assert files["a.txt"].blob_id == "ce013625030ba8dba906f756967f9e9ca394464a"  # echo hello | git hash-object --stdin
    assert files["a.txt"].lfs is None


def test_revisions_branches_and_a_commit_that_comes_too_late(hub: Hub, api: Any) -> None:
    api.create_repo("me/model")
    old = api.upload_file(path_or_fileobj=b"one", path_in_repo="x.txt", repo_id="me/model").oid
    new = api.upload_file(path_or_fileobj=b"two", path_in_repo="x.txt", repo_id="me/model").oid
    assert old != new
    read = {
        rev: Path(api.hf_hub_download("me/model", "x.txt", revision=rev)).read_bytes() for rev in (old, new, "main")
    }
    assert read == {old: b"one", new: b"two", "main": b"two"}
    api.create_branch("me/model", branch="side")
    api.upload_file(path_or_fileobj=b"three", path_in_repo="x.txt", repo_id="me/model", revision="side")
    assert {b.name for b in api.list_repo_refs("me/model").branches} == {"main", "side"}
    assert Path(api.hf_hub_download("me/model", "x.txt")).read_bytes() == b"two"
    with pytest.raises(errors.HfHubHTTPError) as raised:
        api.upload_file(path_or_fileobj=b"4", path_in_repo="x.txt", repo_id="me/model", parent_commit=old)
    assert raised.value.response.status_code == 412


def test_deleting(hub: Hub, api: Any, folder: Path) -> None:
    api.create_repo("me/model")
    api.upload_folder(repo_id="me/model", folder_path=folder)
    api.delete_file("a.txt", "me/model")
    api.delete_folder("deep", "me/model")
    assert set(api.list_repo_files("me/model")) == {".gitattributes", "weights.safetensors"}
    with pytest.raises(errors.RemoteEntryNotFoundError):
        api.hf_hub_download("me/model", "a.txt")
    with pytest.raises(errors.RevisionNotFoundError):
        api.model_info("me/model", revision="never")
    api.delete_repo("me/model")
    with pytest.raises(errors.RepositoryNotFoundError):
        api.model_info("me/model")


def test_a_part_of_a_file(hub: Hub, api: Any, folder: Path) -> None:
    hub.add("model", "me/model", _content(folder))
    url = hf.hf_hub_url("me/model", "weights.safetensors", endpoint=hub.endpoint)
    request = urllib.request.Request(url, headers={"Range": "bytes=1000-1099"})
    with urllib.request.urlopen(request) as answer:
        assert (answer.status, answer.headers["Content-Range"]) == (206, "bytes 1000-1099/3000000")
        assert answer.read() == (folder / "weights.safetensors").read_bytes()[1000:1100]
    assert hub.sent("weights") == 100


def test_a_listing_comes_in_pages(hub: Hub, api: Any) -> None:
    hub.page = 2
    hub.add("dataset", "me/data", {f"{n}.txt": b"x" for n in range(5)})
    assert len(list(api.list_repo_tree("me/data", repo_type="dataset", recursive=True))) == 5
    assert sum("/tree/" in request.path for request in hub.log) == 3


def test_a_dataset_is_loaded_by_its_library(hub: Hub, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    hub.add("dataset", "me/rows", {"train.jsonl": b'{"text": "a"}\n{"text": "b"}\n', "README.md": b"---\n---\n"})
    program = "import datasets, json; print(json.dumps(datasets.load_dataset('me/rows', split='train')['text'][:]))"
    env = hub.environment(tmp_path / "home")
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["a", "b"]


# --- Buckets ---


def test_a_bucket_is_filled_and_read_both_ways(hub: Hub, api: Any, folder: Path, tmp_path: Path) -> None:
    url = api.create_bucket("me/bucket", private=True)
    assert api.create_bucket("me/bucket", exist_ok=True).bucket_id == url.bucket_id == "me/bucket"
    api.sync_bucket(str(folder), "hf://buckets/me/bucket/run", quiet=True)
    info = api.bucket_info("me/bucket")
    assert (info.private, info.total_files, info.size) == (True, 3, 3_000_006)
    api.sync_bucket("hf://buckets/me/bucket/run", str(tmp_path / "back"), quiet=True)
    assert _same(folder, tmp_path / "back")
    assert [b.id for b in api.list_buckets()] == ["me/bucket"]


def test_a_second_sync_sends_only_what_changed(hub: Hub, api: Any, folder: Path) -> None:
    api.create_bucket("me/bucket")
    api.sync_bucket(str(folder), "hf://buckets/me/bucket", quiet=True)
    hub.log.clear()
    api.sync_bucket(str(folder), "hf://buckets/me/bucket", quiet=True)
    assert not any(request.method == "POST" for request in hub.log)
    (folder / "a.txt").write_text("hello again\n")
    (folder / "deep" / "empty.txt").unlink()
    api.sync_bucket(str(folder), "hf://buckets/me/bucket", delete=True, quiet=True)
    assert {f.path: f.size for f in api.list_bucket_tree("me/bucket", recursive=True)} == {
        "a.txt": 12,
        "weights.safetensors": 3_000_000,
    }
    top = {(f.type, f.path) for f in api.list_bucket_tree("me/bucket")}
    assert top == {("file", "a.txt"), ("file", "weights.safetensors")}


def test_copies_deletes_and_what_cannot_be(hub: Hub, api: Any) -> None:
    api.create_bucket("me/bucket")
    api.batch_bucket_files("me/bucket", add=[(b"some words", "a/x.txt")])
    [file] = api.get_bucket_paths_info("me/bucket", ["a/x.txt", "none"])
    api.batch_bucket_files("me/bucket", copy=[("bucket", "me/bucket", file.xet_hash, "b/y.txt")], delete=["a/x.txt"])
    assert [f.path for f in api.list_bucket_tree("me/bucket", recursive=True)] == ["b/y.txt"]
    with pytest.raises(errors.BucketBatchError):
        api.batch_bucket_files("me/bucket", delete=["none"])
    api.delete_bucket("me/bucket")
    with pytest.raises(errors.BucketNotFoundError):
        api.bucket_info("me/bucket")


def test_the_store_puts_files_of_many_parts_together(hub: Hub, api: Any, tmp_path: Path) -> None:
    """Parts that repeat, parts shared with another file, and one file larger than a xorb (64 MB)."""
    part = random.Random(1).randbytes(400_000)
    source = tmp_path / "source"
    source.mkdir()
    (source / "twice.bin").write_bytes(part + b"between" * 1000 + part)
    (source / "shared.bin").write_bytes(b"other" * 5000 + part)
    (source / "large.bin").write_bytes(random.Random(2).randbytes(70_000_000))
    api.create_bucket("me/bucket")
    api.sync_bucket(str(source), "hf://buckets/me/bucket", quiet=True)
    api.sync_bucket("hf://buckets/me/bucket", str(tmp_path / "back"), quiet=True)
    assert _same(source, tmp_path / "back")


def test_each_store_has_a_client_that_ends_with_it(tmp_path: Path) -> None:
    """One client would leave out of the second upload what it sent to the first store."""
    source = tmp_path / "same.bin"
    source.write_bytes(random.Random(3).randbytes(400_000))
    clients = []
    for name in ("first", "second"):
        with Hub(tmp_path / name) as hub:
            [(file, size)] = hub.store.upload([source])
            clients.append(hub.store.client)
            assert hub.store.read(file, size) == source.read_bytes()
            assert hub.store.client is clients[-1]
    assert clients[0] is not clients[1] and all(client and client.has_ended() for client in clients)


def test_a_client_of_the_store_that_failed_is_replaced(hub: Hub, tmp_path: Path) -> None:
    source = tmp_path / "words.txt"
    source.write_text("some words")
    [(file, size)] = hub.store.upload([source])
    with pytest.raises(RuntimeError, match="hf_xet cannot use our store"):
        hub.store.read("0" * 64, size)
    assert hub.store.read(file, size) == b"some words"


def test_the_store_wants_a_key_of_its_own(hub: Hub, api: Any) -> None:
    api.create_bucket("me/bucket")
    api.batch_bucket_files("me/bucket", add=[(b"some words", "x.txt")])
    [file] = api.get_bucket_paths_info("me/bucket", ["x.txt"])
    for key in (None, hub.token, hub.store.token("read") + "x"):
        request = urllib.request.Request(f"{hub.cas}/v1/reconstructions/{file.xet_hash}")
        if key:
            request.add_header("Authorization", f"Bearer {key}")
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(request)
        assert raised.value.code == 401
