"""Repositories and buckets on the Hub: who may read and write them, and the upload of a dataset."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from skill_train.core.errors import UsageError
from skill_train.hub.client import QUESTION_SECONDS, RequestSubject, ask

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Repository:
    """An existing repository. `files` are paths in its main branch."""

    name: str
    private: bool
    files: tuple[str, ...]


def check_readable(kind: str, name: str, *, seconds: float = QUESTION_SECONDS) -> None:
    """Checks that the token can read the files of a model or dataset.

    Raises:
        UsageError: it does not exist or is private. AccessError: it is gated. Temporary: the Hub does not answer.
    """
    ask(RequestSubject(kind, name), lambda: _api().auth_check(name, repo_type=kind), seconds=seconds)


def check_writable(kind: str, name: str) -> None:
    """Checks that the token may write to an existing model or dataset.

    Raises:
        AccessError: the token may not write. Other errors: as `check_readable`.
    """
    ask(RequestSubject(kind, name), lambda: _api().auth_check(name, repo_type=kind, write=True))


def find(kind: str, name: str) -> Repository | None:
    """A model or dataset that the token can see; None if there is none."""

    def question() -> Repository:
        info = _api().repo_info(name, repo_type=kind)
        return Repository(name, bool(info.private), tuple(file.rfilename for file in info.siblings or ()))

    return _or_none(f"unknown_{kind}", lambda: ask(RequestSubject(kind, name), question))


def bucket_is_private(name: str) -> bool | None:
    """Whether a bucket is private; None if it does not exist."""

    def question() -> bool:
        from huggingface_hub.errors import BucketNotFoundError

        try:
            return bool(_api().bucket_info(name).private)
        except BucketNotFoundError:
            raise UsageError(
                f"no bucket {name}", code="unknown_bucket", hint="check the name, and that the token may see it"
            ) from None

    return _or_none("unknown_bucket", lambda: ask(RequestSubject("bucket", name), question))


def check_name(name: str) -> None:
    """Refuses a text that cannot be a repository id.

    Raises:
        UsageError: the text is not `NAMESPACE/NAME`, or has characters that the Hub does not allow.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
        good = name.count("/") == 1
    except HFValidationError:
        good = False
    if not good:
        raise UsageError(
            f"{name!r} is not a valid repository id",
            code="bad_usage",
            expected="NAMESPACE/NAME of letters, digits, '-', '_' and '.', at most 96 of them",
            got=name,
            hint="--hub-model-id NAMESPACE/NAME",
        )


def upload_dataset(folder: Path, name: str) -> str:
    """Uploads the files of a folder to a private dataset; returns the commit. Files that are already there are not sent
    again.

    Raises: as `check_writable`.
    """

    def question() -> str:
        _api().create_repo(name, repo_type="dataset", private=True, exist_ok=True)
        commit = _api().upload_folder(
            repo_id=name, repo_type="dataset", folder_path=folder, commit_message="Data of a training run"
        )
        return str(commit.oid)

    with contextlib.redirect_stdout(io.StringIO()):  # here: the thread of a question may be left behind
        return ask(RequestSubject("dataset", name), question, seconds=None)


def _or_none(code: str, question: Callable[[], Answer]) -> Answer | None:
    try:
        return question()
    except UsageError as error:
        if error.code != code:
            raise
        return None


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi()
