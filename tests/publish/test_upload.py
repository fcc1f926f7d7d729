"""An upload to a repository that others change: whether what is there at its end is what was sent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from hub_emulator import ALWAYS, Fault, Hub
from hub_emulator.faults import DONE_AND_ERROR
from skill_train.core.errors import DecisionNeeded, UsageError
from skill_train.hub.repositories import upload_dataset
from skill_train.hub.upload import PushFile, Uploaded, check_push_access, licence_of, upload

pytestmark = pytest.mark.slow

constants = pytest.importorskip("huggingface_hub.constants")

COMMIT = "POST /api/models/me/tickets/commit"
BEGIN, LARGE = "files on the Hub are not sent again", "large.gguf, 1.5 MB: sent"  # what is told, in this order


@pytest.fixture
def files(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> list[PushFile]:
    """A card, a record, a small file and one that takes a while."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # set for all other tests
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    small, large = tmp_path / "small.gguf", tmp_path / "large.gguf"
    small.write_bytes(b"GGUF")
    large.write_bytes(bytes(range(250)) * 6000)
    card = PushFile("README.md", None, b"# card\n", "made from the run")
    record = PushFile("skill-train/train.json", None, b"{}")
    return [card, record, PushFile(small.name, small), PushFile(large.name, large)]


def _push(
    files: list[PushFile], *, private: bool = True, at: str = "", then: Callable[[], Any] = lambda: None
) -> Uploaded:
    """`then` is done at the moment at which a line is told."""

    def say(line: str) -> None:
        if at and at in line:
            then()

    return upload("me/tickets", files, private=private, message="m", say=say)


def test_every_file_is_there_as_it_was_sent(hub: Hub, files: list[PushFile]) -> None:
    sent = _push(files)
    there = hub.repositories["model", "me/tickets"].at(sent.commit)
    assert there is not None
    assert {file.path: len(there[file.path]) for file in files} == {
        "README.md": 7, "skill-train/train.json": 2, "small.gguf": 4, "large.gguf": 1_500_000,
    }  # fmt: skip
    assert (sent.created, sent.reused, sent.private, sent.other_weights) == (True, False, True, ())


@pytest.mark.parametrize("left_out", ["*.gguf", "README.md"])
def test_a_repository_that_leaves_files_out_takes_none(hub: Hub, files: list[PushFile], left_out: str) -> None:
    """The Hub applies the .gitignore of the repository without a word, and the client commits the rest."""
    repository = hub.add("model", "me/tickets", {".gitignore": left_out.encode()}, private=True)
    with pytest.raises(UsageError) as refused:
        _push(files)
    assert refused.value.code == "output_changed" and ".gitignore" in refused.value.message
    assert ("small.gguf" in refused.value.message) == (left_out == "*.gguf")
    assert set(repository.files) == {".gitignore"} and not repository.history


def test_a_file_that_changes_while_it_is_sent_is_not_committed(hub: Hub, files: list[PushFile], tmp_path: Path) -> None:
    """Its proof is of the bytes that were there before."""
    with pytest.raises(UsageError) as refused:
        _push(files, at=LARGE, then=lambda: (tmp_path / "large.gguf").write_bytes(b"GGUF, exported again"))
    assert refused.value.code == "output_changed" and "large.gguf changed" in refused.value.message
    assert not hub.repositories["model", "me/tickets"].history


def test_a_commit_of_somebody_else_is_not_mixed_into_ours(hub: Hub, files: list[PushFile]) -> None:
    """The client skips a file that was there as it is here when it asked, which was before the large one was sent."""
    _push(files[:3])
    repository = hub.repositories["model", "me/tickets"]

    def others() -> None:
        repository.add_commit("main", repository.files | {"small.gguf": b"GGUF of others"}, "theirs", "others")

    with pytest.raises(UsageError) as refused:
        _push(files, at=LARGE, then=others)
    assert "small.gguf is another file there" in refused.value.message
    assert _push(files).reused is False
    assert repository.files["small.gguf"] == b"GGUF"


def test_the_records_of_an_earlier_push_do_not_stay_beside_other_files(hub: Hub, files: list[PushFile]) -> None:
    """Its verify.json says `pass`, of files of the same names."""
    kept = {"skill-train-notes.txt": b"", "notes.txt": b""}
    old = {"skill-train/verify.json": b"{}", "skill-train/train.json": b"{}"}
    repository = hub.add("model", "me/tickets", kept | old, private=True)
    hub.faults.add(COMMIT, DONE_AND_ERROR)
    sent = _push(files)
    assert set(repository.files) == kept.keys() | {file.path for file in files}
    assert (sent.created, sent.other_weights) == (False, ())
    again = _push(files)
    assert again.reused and again.commit == sent.commit


def test_weights_beside_the_pushed_ones_are_named(hub: Hub, files: list[PushFile]) -> None:
    old = {"z.safetensors": b"", "a/old.gguf": b"", "small.gguf": b"", "notes.txt": b""}
    hub.add("model", "me/tickets", old, private=True)
    assert _push(files).other_weights == ("a/old.gguf", "z.safetensors")


def test_a_repository_that_becomes_public_gets_no_private_files(hub: Hub, files: list[PushFile]) -> None:
    """Somebody makes it between the question whether it is there and its creation, or opens it while files are sent."""
    repository = hub.add("model", "me/tickets", {}, private=True)
    with pytest.raises(DecisionNeeded) as refused:
        _push(files, at=BEGIN, then=lambda: setattr(repository, "private", False))
    assert refused.value.code == "public_repository" and not repository.history


def test_a_public_repository_is_refused_before_anything_is_sent(hub: Hub, files: list[PushFile]) -> None:
    hub.add("model", "me/tickets", {}, private=False)
    with pytest.raises(DecisionNeeded) as refused:
        _push(files)
    assert refused.value.code == "public_repository"
    assert [request for request in hub.log if request.method != "GET"] == []


def test_a_public_push_says_what_the_repository_is(hub: Hub, files: list[PushFile]) -> None:
    assert _push(files, private=False).private is False
    assert hub.repositories["model", "me/tickets"].private is False
    hub.repositories["model", "me/tickets"].private = True
    assert _push(files, private=False).private is True


@pytest.mark.usefixtures("files")
def test_a_dataset_that_somebody_made_public_gets_no_private_rows(hub: Hub, tmp_path: Path) -> None:
    """It was private, or not there, when the command checked it."""
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "rows.jsonl").write_bytes(b"{}\n")
    repository = hub.add("dataset", "me/rows", {}, private=False)
    with pytest.raises(DecisionNeeded) as refused:
        upload_dataset(tmp_path / "rows", "me/rows")
    assert refused.value.code == "public_repository" and not repository.history
    repository.private = True
    assert upload_dataset(tmp_path / "rows", "me/rows") == repository.commit("main")


@pytest.mark.parametrize("fault", [Fault(0, after=True), DONE_AND_ERROR, Fault(504, after=True)])
def test_a_commit_whose_answer_is_lost_is_made_once(hub: Hub, files: list[PushFile], fault: Fault) -> None:
    """A gateway that gives up each time does not hide what is there."""
    hub.faults.add(COMMIT, fault, times=ALWAYS)
    sent = _push(files)
    [made] = hub.repositories["model", "me/tickets"].history["main"]
    assert (sent.commit, sent.created, sent.reused) == (made["id"], True, False)


def test_the_records_of_somebody_who_pushes_at_the_same_moment_do_not_stay(hub: Hub, files: list[PushFile]) -> None:
    """They arrive after ours was asked for, so that it does not remove them: their verify.json would be beside ours."""
    repository = hub.add("model", "me/tickets", {}, private=True)
    theirs = {"skill-train/verify.json": b"{}"}
    hub.faults.add(COMMIT, Fault(seconds=2.0))
    _push(files, at=LARGE, then=Timer(1.0, lambda: repository.add_commit("main", theirs, "theirs", "others")).start)
    assert len(repository.history["main"]) == 2
    assert set(repository.files) == {file.path for file in files}


@pytest.mark.parametrize(
    ("what", "access", "code"),
    [
        ("new", ("me", "new", True), None),
        ("in the organisation", ("me", "new", True), None),
        ("private", ("me", "private", True), None),
        ("public", ("me", "public", True), "public_repository"),
        ("private for a browser's token", ("me", "private", True), None),
        ("of a stranger", ("me", "new", False), "no_permission"),
        ("readable", ("me", "private", False), "no_permission"),
        ("for a token without the right", ("me", "new", False), "no_permission"),
        ("for a token with the right", ("me", "new", True), None),
        ("for a browser's token", ("me", "new", None), None),
        ("without an answer", ("me", None, None), None),
        ("for nobody", (None, None, False), "not_signed_in"),
        ("for a token that nobody made", (None, None, False), "bad_token"),
    ],
)
def test_what_a_dry_run_says_of_a_repository(
    hub: Hub,
    files: list[PushFile],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    access: tuple[Any, ...],
    code: str | None,
) -> None:
    repo = {"in the organisation": "me-org/tickets", "of a stranger": "somebody/tickets"}.get(what, "me/tickets")
    roles = {"readable": ("read", ()), "for a token without the right": ("fineGrained", ("job.write",))}
    roles |= {
        "for a token with the right": ("fineGrained", ("repo.write",)),
        "for a browser's token": ("", ("repo.write",)),
        "private for a browser's token": ("", ("repo.write",)),
    }
    if what in roles:
        monkeypatch.setenv("HF_TOKEN", hub.new_token(*roles[what]))
    if what in ("private", "public", "readable", "private for a browser's token"):
        hub.add("model", repo, {}, private=what != "public")
    if what == "without an answer":
        hub.faults.add("GET /api/models/me/tickets", Fault(503), times=9)
    if what == "for nobody":
        monkeypatch.delenv("HF_TOKEN")
    if what == "for a token that nobody made":
        monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 34)
    warned: list[str] = []
    found, error = check_push_access(repo, private=True, warn=lambda code, text: warned.append(text))
    assert tuple(found.values()) == access and (error.code if error else None) == code
    unsure = {"without an answer": "did not answer", "for a browser's token": "does not say"}.get(what)
    assert len(warned) == (unsure is not None) and all(str(unsure) in text for text in warned)
    assert [request for request in hub.log if request.method != "GET"] == []
    words = {"of a stranger": "somebody is neither", "for a token without the right": "may not write to me"}
    words |= {"for nobody": "not signed in", "for a token that nobody made": "does not accept your token"}
    assert words.get(what, "") in (error.message if error else "")
    if what == "public":
        assert check_push_access(repo, private=False, warn=print)[1] is None


def test_the_licence_of_a_base_on_the_hub(hub: Hub, files: list[PushFile]) -> None:
    """Whatever its card has in its place."""
    for named, licence in (("apache-2.0", "apache-2.0"), (["mit", "gpl"], None), (None, None)):
        hub.add("model", "me/base", {}, info={"cardData": {"license": named}})
        assert licence_of("me/base") == licence
    hub.add("model", "me/base", {})
    assert licence_of("me/base") is None and licence_of("me/gone") is None
