"""Checks access to repositories and buckets on the Hub, and uploads a dataset."""

import contextlib
import io
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from skill_train.core.errors import DecisionNeeded, SkillTrainError, UsageError
from skill_train.hub.client import QUESTION_SECONDS, api, ask, or_none, patiently
from skill_train.hub.errors import HubResource


@dataclass(frozen=True)
class Repository:
    """An existing repository. `files` are the paths in the requested revision, or else in the main branch."""

    name: str
    private: bool
    files: tuple[str, ...]


def check_access(kind: str, name: str, *, write: bool = False, seconds: float = QUESTION_SECONDS) -> None:
    """Checks that the token can read the files of a model or dataset, or write to it.

    Raises:
        UsageError: the repository does not exist or is private.
        AccessError: it is gated, or the token may not write.
        Temporary: the Hub does not answer.
    """
    ask(HubResource(kind, name), lambda: api().auth_check(name, repo_type=kind, write=write), seconds=seconds)


def find(kind: str, name: str, revision: str | None = None) -> Repository | None:
    """Finds a model or dataset; None if there is none that the token can see, or it has no such revision."""

    def question() -> Repository:
        info = api().repo_info(name, repo_type=kind, revision=revision)
        return Repository(name, bool(info.private), tuple(file.rfilename for file in info.siblings or ()))

    repository = partial(or_none, f"unknown_{kind}", lambda: ask(HubResource(kind, name), question))
    return or_none("unknown_revision", repository)


def is_private(model: str) -> bool | None:
    """Whether there is a private model of this name; None if the Hub does not say."""
    with contextlib.suppress(SkillTrainError):
        there = patiently(lambda: find("model", model))
        return there is not None and there.private
    return None


def bucket_is_private(name: str) -> bool | None:
    """Whether a bucket is private; None if it does not exist."""
    resource = HubResource("bucket", name)
    return or_none("unknown_bucket", lambda: ask(resource, lambda: bool(api().bucket_info(name).private)))


def or_other_kind(error: UsageError, resource: HubResource) -> UsageError:
    """Returns the error, or a better one if the unknown model is a dataset, or the unknown dataset a model."""
    kind, name = resource.kind, resource.name
    if error.code != f"unknown_{kind}":
        return error
    other, option = ("model", "model") if kind == "dataset" else ("dataset", "data")
    try:
        ask(HubResource(other, name), lambda: api().repo_info(name, repo_type=other, timeout=5), seconds=5)
    except SkillTrainError:  # the request would only improve the message
        return error
    return UsageError(
        f"{name} is a {other} on the Hub, not a {kind}",
        code=error.code,
        expected="the id of a dataset, or a file" if kind == "dataset" else "the id of a model",
        got=name,
        hint=f"use it as the {option}: --{option} {name}",
    )


def is_id(name: str) -> bool:
    """Whether a text is `NAMESPACE/NAME` with characters that the Hub allows. The client refuses any other name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") == 1


def check_name(name: str, hint: str) -> None:
    if not is_id(name):
        raise UsageError(
            f"{name!r} is not a valid repository id",
            code="bad_usage",
            expected="NAMESPACE/NAME of letters, digits, '-', '_' and '.', at most 96 of them",
            got=name,
            hint=hint,
        )


def public_place(place: str, hint: str) -> DecisionNeeded:
    message = f"{place} is public, and this run uploads private files"
    return DecisionNeeded(message, code="public_repository", expected="a private one", got="public", hint=hint)


def require_none(repo: str, what: str, files: list[str]) -> None:
    if files:
        raise UsageError(
            f"{repo} does not have all files of the run: {', '.join(files[:4])} {what}",
            code="output_changed",
            expected="every file, as it was checked",
            got=f"{len(files)} that are not",
            hint="mend that, and run the same command again",
        )


def require_taken(repo: str, operations: Iterable[Any]) -> None:
    """Refuses files that the repository's .gitignore names, because the client silently leaves them out of a commit.

    Args:
        operations: the client's operations after `preupload_lfs_files`, which marks the ignored files.
    """
    ignored = [each.path_in_repo for each in operations if getattr(each, "_should_ignore", False)]
    require_none(repo, "is in its .gitignore", ignored)


def ask_taken(kind: str, repo: str, files: Iterable[str]) -> None:
    """Checks that the repository's .gitignore does not name these files. Uploads nothing."""
    from huggingface_hub import CommitOperationAdd

    asked = [CommitOperationAdd(file, b"") for file in sorted(files)]
    api().preupload_lfs_files(repo, asked, repo_type=kind)
    require_taken(repo, asked)


def upload_dataset(folder: Path, name: str) -> str:
    """Uploads the files of a folder to a private dataset. Returns the commit. Files that are already there are not sent
    again. Raises what `check_access` raises, UsageError if a .gitignore names one of the files, and DecisionNeeded if
    the dataset is public."""

    def question() -> str:
        api().create_repo(name, repo_type="dataset", private=True, exist_ok=True)
        there = api().repo_info(name, repo_type="dataset")
        if not there.private:
            raise public_place(f"the dataset {name}", "another --data-repo, or leave it out")
        if any(file.rfilename == ".gitignore" for file in there.siblings or ()):
            files = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
            ask_taken("dataset", name, files)
        commit = api().upload_folder(
            repo_id=name, repo_type="dataset", folder_path=folder, commit_message="Data of a training run"
        )
        return str(commit.oid)

    with contextlib.redirect_stdout(io.StringIO()):  # here: the thread of a question may be left behind
        return ask(HubResource("dataset", name), question, seconds=None)
