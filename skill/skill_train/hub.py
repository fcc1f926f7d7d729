"""Everything asked of the Hugging Face Hub. The token stays inside huggingface_hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

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
