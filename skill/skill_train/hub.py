"""Everything asked of the Hugging Face Hub. The token stays inside huggingface_hub."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skill_train.errors import AccessError, Temporary, UsageError

_MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.tiktoken", "LICENSE*", "README.md"]


def model_folder(model: str, revision: str | None) -> tuple[Path, str | None]:
    """`(folder, commit)` of a model: a local folder as it is, or a snapshot in the Hub cache, fetched when needed.

    Raises:
        UsageError: neither a folder nor a model on the Hub.
        AccessError: gated or private.
        Temporary: the Hub cannot be reached and the model is not in the cache.
    """
    path = Path(model)
    if path.is_dir():
        return path, None
    if path.is_absolute() or model.startswith(".") or path.is_file() or not _MODEL_ID.fullmatch(model):
        raise UsageError(
            f"{model} is neither a model folder nor the id of a model on the Hub",
            code="unknown_model",
            expected="a folder with config.json and safetensors, or an id such as Qwen/Qwen2.5-0.5B-Instruct",
            got=f"{model}, a file" if path.is_file() else f"{model}, no such folder here",
        )
    return _snapshot(model, revision)


def _snapshot(model: str, revision: str | None) -> tuple[Path, str]:
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        folder = Path(snapshot_download(model, revision=revision, allow_patterns=_FILES))
    except GatedRepoError:
        raise AccessError(
            f"{model} is gated",
            code="gated",
            expected="access granted to your account on the model's page",
            hint="ask for access on the model's page, then: hf auth login",
        ) from None
    except RepositoryNotFoundError:
        raise UsageError(
            f"there is no model {model} on the Hub, or it is private",
            code="unknown_model",
            expected="a model id that your token can read, or a folder",
            got=model,
            hint="check the name; for a private model: hf auth login",
        ) from None
    except RevisionNotFoundError:
        raise UsageError(f"{model} has no revision {revision}", code="unknown_revision", got=str(revision)) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise Temporary(
            f"{model} cannot be fetched: the Hub cannot be reached, and the cache does not have it",
            code="hub_unreachable",
            expected="a connection to the Hub, or a local model folder",
            got=type(error).__name__,
            hint="try again when the Hub can be reached, or give a model folder",
        ) from None
    return folder, folder.name


@dataclass(frozen=True)
class Account:
    """Who the token on this machine belongs to, and what it may do.

    Attributes:
        state: `valid`, `invalid`, `none` (no token) or `unchecked` (the Hub was not asked, or did not answer).
        name, role: of a valid token; the role is the Hub's word, such as `write` or `fineGrained`.
        can_write, can_run_jobs: None when that is not known.
        why: of `unchecked`.
    """

    state: str
    name: str = ""
    role: str = ""
    can_write: bool | None = None
    can_run_jobs: bool | None = None
    why: str = ""


def account(seconds: float = 4.0) -> Account:
    """Asks the Hub once who the token belongs to. Never raises, and nothing of the token is in the answer."""
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    from huggingface_hub import constants
    from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled
    from huggingface_hub.utils import build_hf_headers, get_session, get_token

    token = get_token()
    if token is None:
        return Account("none")
    if constants.is_offline_mode():
        return Account("unchecked", why="HF_HUB_OFFLINE is set")
    try:
        url = f"{constants.ENDPOINT}/api/whoami-v2"
        answer = get_session().get(url, headers=build_hf_headers(token=token), timeout=seconds)
        if answer.status_code == 401:
            return Account("invalid")
        if answer.status_code != 200:
            return Account("unchecked", why=f"the Hub answered {answer.status_code}")
        return _account(answer.json())
    except (HTTPError, OfflineModeIsEnabled, OSError, ValueError) as error:
        return Account("unchecked", why=f"the Hub cannot be reached ({type(error).__name__})")


def _account(said: dict[str, Any]) -> Account:
    """A `write` token may do all that its owner may; a `fineGrained` one what its permissions say."""
    token = (said.get("auth") or {}).get("accessToken") or {}
    role, name = str(token.get("role") or ""), str(said.get("name") or "")
    if role == "fineGrained":
        fine = token.get("fineGrained") or {}
        may = set(fine.get("global") or ())
        may |= {permission for scope in fine.get("scoped") or () for permission in scope.get("permissions") or ()}
        return Account("valid", name, role, "repo.write" in may, "job.write" in may)
    known = {"write": True, "admin": True, "read": False}.get(role)  # a sign-in by browser (OAuth) has no role
    return Account("valid", name, role, known, known)
