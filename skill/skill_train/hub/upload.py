"""Pushes files to a repository on the Hub: checks first, then uploads large files one by one, then makes one commit."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from skill_train.core.console import Warn
from skill_train.core.errors import AccessError, DecisionNeeded, SkillTrainError, Temporary
from skill_train.core.units import megabytes
from skill_train.hub import account, repositories
from skill_train.hub.account import Account
from skill_train.hub.client import QUESTION_SECONDS, api, ask, or_none, patiently
from skill_train.hub.errors import HubResource, sign_in

Answer = TypeVar("Answer")

_CARD_BYTES = 300_000  # limit of a README.md: YAML is parsed at 100 kB a second, and the longest cards have 200 kB
_WEIGHTS = (".gguf", ".safetensors")
RECORDS = "skill-train"  # the folder of a push's records in the repository
_ANNOUNCED_BYTES = 1_000_000  # the smallest file whose upload is reported


@dataclass(frozen=True)
class PushFile:
    """One file to push. `content` replaces the bytes of the local file, and `changed` says why. `stamp` is the local
    file's size and modification time before it was compared with the records."""

    path: str
    source: Path | None
    content: bytes | None = None
    changed: str | None = None
    stamp: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stamp", self.stamp_now())

    def stamp_now(self) -> tuple[int, int]:
        if self.content is not None:
            return len(self.content), 0
        assert self.source is not None
        stat = self.source.stat()
        return stat.st_size, stat.st_mtime_ns

    @property
    def size(self) -> int:
        return self.stamp[0]


@dataclass(frozen=True)
class Uploaded:
    url: str
    commit: str  # the id of the commit
    created: bool  # the repository is new
    reused: bool  # the repository already had all files
    private: bool  # the repository is private. The visibility of an existing repository does not change.
    other_weights: tuple[str, ...] = ()  # weight files in the repository that are not from this upload


def licence_of(model: str) -> str | None:
    """The licence in the card of a Hub model; None if the card names none or cannot be read."""
    try:
        card = ask(HubResource("model", model), lambda: api().model_info(model, timeout=8.0).card_data)
    except SkillTrainError:
        return None
    named = card.get("license") if card else None
    return str(named) if isinstance(named, str) else None


def licence_in(folder: Path) -> str | None:
    """The licence in the card of a model folder; None if the card is missing, unreadable or names none."""
    from huggingface_hub import ModelCard
    from yaml import YAMLError

    card = folder / "README.md"
    if not card.is_file():
        return None
    try:
        with open(card, "rb") as file:
            content = file.read(_CARD_BYTES + 1)
        if len(content) > _CARD_BYTES:
            return None
        named = ModelCard(content.decode("utf-8-sig")).data.get("license")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, YAMLError):
        return None
    return named if isinstance(named, str) else None


def upload(repo: str, files: list[PushFile], *, private: bool, message: str, say: Callable[[str], None]) -> Uploaded:
    """Creates the repository if needed, and uploads the files. Files that are already there are not sent again, so an
    interrupted push continues where it stopped.

    Raises:
        DecisionNeeded: the repository is public, and `private` was requested.
        AccessError: there is no token, or it may not write there.
        Temporary: there was no answer after several tries.
        UsageError: a file changed while it was sent, or the repository did not store it.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    resource, names = HubResource("model", repo), {file.path for file in files}

    def again(question: Callable[[], Answer], *, seconds: float | None = QUESTION_SECONDS) -> Answer:
        return patiently(lambda: ask(resource, question, seconds=seconds))

    def commit() -> str:
        now = api().model_info(repo, files_metadata=True, timeout=8.0)
        if private and not now.private:
            raise public_refusal(repo)
        there = {file.rfilename: file for file in now.siblings or ()}
        old = there.keys() - names  # records of an earlier push are removed
        gone = [CommitOperationDelete(name) for name in old if name.startswith(f"{RECORDS}/")]
        if not gone and all(_has(there.get(op.path_in_repo), op) for op in operations):  # perhaps by an earlier try
            return str(now.sha)
        return str(api().create_commit(repo, operations + gone, commit_message=message, parent_commit=now.sha).oid)

    before = or_none("unknown_model", lambda: again(lambda: api().model_info(repo, timeout=8.0)))
    if private and before is not None and not before.private:
        raise public_refusal(repo)
    url = again(lambda: api().create_repo(repo, private=private, exist_ok=True))
    operations = [CommitOperationAdd(f.path, str(f.source) if f.content is None else f.content) for f in files]
    say(f"{len(files)} files, {megabytes(sum(file.size for file in files))}; files on the Hub are not sent again")
    for operation, file in zip(operations, files, strict=True):
        again(partial(api().preupload_lfs_files, repo, [operation], free_memory=False), seconds=None)
        is_there = (oid := getattr(operation, "_remote_oid", None)) and oid == operation.upload_info.sha256.hex()
        if file.size >= _ANNOUNCED_BYTES and not is_there:
            say(f"{file.path}, {megabytes(file.size)}: sent")
    repositories.require_none(
        repo, "changed while it was sent", [file.path for file in files if file.stamp_now() != file.stamp]
    )
    repositories.require_taken(repo, operations)
    oid = again(commit, seconds=None)
    after = again(lambda: api().model_info(repo, revision=oid, files_metadata=True, timeout=8.0))
    there = {file.rfilename: file for file in after.siblings or ()}
    lost = [op.path_in_repo for op in operations if not _has(there.get(op.path_in_repo), op)]
    repositories.require_none(repo, "is another file there: somebody else has pushed too", lost)
    reused = before is not None and before.sha == oid
    say("nothing has changed, so there is no new commit" if reused else f"committed {len(files)} files")
    others = tuple(sorted(name for name in there.keys() - names if name.endswith(_WEIGHTS)))
    return Uploaded(str(url), oid, before is None, reused, bool(after.private), others)


def _has(there: Any, sent: Any) -> bool:
    """Whether the Hub's file equals ours, by its sha256, or by git's digest if git itself stores the file."""
    if there is None or there.lfs:
        return there is not None and bool(there.lfs.sha256 == sent.upload_info.sha256.hex())
    with sent.as_file() as file:
        content = file.read()
    return bool(there.blob_id == hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest())


def public_refusal(repo: str) -> DecisionNeeded:
    message, expected = f"{repo} is public, so everybody could read the pushed files", "a new or a private repository"
    hint = "use another --repo, or add --public"
    return DecisionNeeded(message, code="public_repository", expected=f"{expected}, or --public", hint=hint)


class PushAccess(TypedDict):
    """The state of a push target; a value is None if it could not be checked."""

    account: str | None
    repository: str | None  # `new`, `private` or `public`
    may_write: bool | None


def check_push_access(repo: str, *, private: bool, warn: Warn) -> tuple[PushAccess, SkillTrainError | None]:
    """The state of the push target, and the error that the push would raise; None if it would succeed. Warns if
    something could not be checked."""
    access: PushAccess = {"account": None, "repository": None, "may_write": None}
    who = account.account()
    if who.state == "unchecked":
        warn("not_checked", f"token, repository and write access were not checked: {who.why}")
        return access, None
    try:
        _require_token(who)
        access["account"] = who.name
        there = repositories.find("model", repo)
        access["repository"] = "new" if there is None else "private" if there.private else "public"
        if there is not None:
            repositories.check_access("model", repo, write=True)
            access["may_write"] = True
        else:
            access["may_write"] = _may_create(who, repo)
    except Temporary as error:
        warn("not_checked", f"write access to {repo} was not checked, because the Hub did not answer: {error.message}")
        return access, None
    except SkillTrainError as error:
        access["may_write"] = False
        return access, error
    if access["may_write"] is None:
        warn("not_checked", f"the Hub does not say whether this token may write to {repo}; the push will show it")
    return access, public_refusal(repo) if private and access["repository"] == "public" else None


def _require_token(who: Account) -> None:
    if who.state == "valid":
        return
    none = who.state == "none"
    raise AccessError(
        "you are not signed in to the Hugging Face Hub" if none else "the Hub does not accept your token",
        code="not_signed_in" if none else "bad_token",
        expected="a token with write access",
        hint="hf auth login" if none else sign_in(),
    )


def _may_create(who: Account, repo: str) -> bool | None:
    """Whether the token may create this repository; None if the Hub does not say. Raises AccessError if it may not."""
    namespace = repo.split("/")[0]
    theirs = namespace not in (who.name, *who.orgs) and who.role != "fineGrained"
    may = who.may("repo.write", repo)
    if theirs or may is False:
        raise AccessError(
            f"{namespace} is neither your user name nor one of your organisations"
            if theirs
            else f"your token may not write to {namespace}",
            code="no_permission",
            expected=f"{who.name}/… or one of its organisations, and a token that may write there",
            got=f"{repo}, by {who.name} with a {who.role or 'signed-in'} token",
            hint="https://huggingface.co/settings/tokens",
        )
    return may
