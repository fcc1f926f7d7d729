"""Translates errors of the Hub's client to our errors, with the request, the answer and the next command."""

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from skill_train.core.errors import AccessError, DecisionNeeded, SkillTrainError, Temporary, UsageError
from skill_train.program.events import UNREAD as UNREAD
from skill_train.program.events import raised_in

_STORE = re.compile(r"CAS Client Error|HTTP status (?:client|server) error|Request error:")  # hf_xet, 1.6 [ran]
_BROKEN = re.compile(r"Data integrity error:")
_OWN = re.compile(r"(?:Internal|Data integrity|Task) error:")  # hf_xet's runtime gives no more details
_SYSTEM = re.compile(r"I/?O [Ee]rror:.*\(os error (\d+)\)")  # also from hf_xet, for a full disk [ran]
GARBLED = "the token contains a character outside of ASCII"


class StillAsking(Temporary):
    """There was no answer in time. The request may still be running, so it may still have an effect."""


class OfflineMode(Temporary):
    """The client sends no requests because `HF_HUB_OFFLINE` is set, so waiting does not help."""


@dataclass(frozen=True)
class HubResource:
    """The subject of a request, for error messages."""

    kind: str  # `model`, `dataset` or another noun
    name: str = ""  # the id on the Hub; empty if the request is not about a repository

    def __str__(self) -> str:
        return f"the {self.kind} {self.name}".strip()

    @property
    def page(self) -> str:
        """Its web address; empty if it is neither a model nor a dataset."""
        place = {"model": "", "dataset": "datasets/"}.get(self.kind)
        return "" if place is None else f"https://huggingface.co/{place}{self.name}"


@contextlib.contextmanager
def understood(resource: HubResource) -> Iterator[None]:
    """Put this around lines that read an answer, because a missing part is the Hub's fault and not ours.

    Raises:
        Temporary: a key is missing, or a value has an unexpected type.
    """
    try:
        yield
    except UNREAD as error:
        raise not_understood(resource, error) from None


def not_understood(resource: HubResource, error: BaseException) -> Temporary:
    return Temporary(
        f"the Hub's answer for {resource} cannot be understood",
        code="hub_error",
        expected="an answer as huggingface_hub documents it",
        got=_reason(error),
        hint="try again in a few minutes; if it fails again: pip install -U huggingface_hub",
    )


def in_client(error: BaseException) -> bool:
    """Whether the error occurred while the client read an answer, so that it is not a bug of ours."""
    return raised_in(error, ("huggingface_hub.", "datasets.", "fsspec."))


def translated(error: Exception, resource: HubResource) -> Exception:
    """Our error for an error of huggingface_hub or its HTTP client; any other error unchanged."""
    import httpx2
    from huggingface_hub import errors, get_token

    cause = error.__cause__
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(cause, errors.HfHubHTTPError):
        error = cause  # the download failed, and the cache has no copy
    error = _system_error(error)
    if (ours := _address_error(error, cause) or _repository_error(error, resource)) is not None:
        return ours
    if isinstance(error, errors.HfHubHTTPError):
        return _status_error(error.response, resource)
    if isinstance(error, httpx2.ReadTimeout):
        return unreachable(resource, _reason(error), StillAsking)
    if isinstance(error, (RuntimeError, ConnectionError)) and (_STORE.search(str(error)) or _OWN.match(str(error))):
        return _store_error(error, resource)
    if isinstance(error, (httpx2.HTTPError, ConnectionError, TimeoutError, errors.LocalEntryNotFoundError)):
        return unreachable(resource, _reason(cause or error))
    if isinstance(error, (json.JSONDecodeError, httpx2.InvalidURL, errors.FileMetadataError)):
        return Temporary(  # the answer is not JSON, lacks the file's metadata, or has a name that makes no address
            f"the answer for {resource} did not come from the Hub",
            code="hub_error",
            got=_reason(error),
            hint="check HF_ENDPOINT and the proxy, then run the same command again",
        )
    if isinstance(error, OSError):
        return _disk_error(error, resource)
    if isinstance(error, UnicodeEncodeError) and not (get_token() or "").isascii():
        return _refused(resource)
    return error


def _system_error(error: Exception) -> Exception:
    """The Python error for a system error that hf_xet reports as text, such as a ConnectionResetError."""
    in_words = isinstance(error, RuntimeError) or (isinstance(error, OSError) and error.errno is None)
    system = _SYSTEM.search(str(error)) if in_words else None
    return OSError(int(system[1]), str(error)) if system else error


def _address_error(error: BaseException, cause: BaseException | None) -> UsageError | None:
    import httpx2

    if httpx2.UnsupportedProtocol not in (type(error), type(cause)):
        return None
    return UsageError(
        "HF_ENDPOINT is not the address of a Hub",
        code="hub_refused",
        expected="an address such as https://huggingface.co",
        got=_reason(cause or error),
        hint="unset HF_ENDPOINT, or correct it",
    )


def _repository_error(error: BaseException, resource: HubResource) -> SkillTrainError | None:
    from huggingface_hub import errors

    if isinstance(error, errors.JobNotFoundError):
        return UsageError(
            f"there is no {resource.kind} {resource.name} on the Hub, or your token may not see it",
            code="unknown_job",
            expected="NAMESPACE/JOB_ID or a run directory that was submitted",
            got=resource.name,
            hint="check the id; hf jobs ps -a lists them",
        )
    if isinstance(error, errors.GatedRepoError):
        return gated(resource)
    if isinstance(error, (errors.RepositoryNotFoundError, errors.BucketNotFoundError, errors.HFValidationError)):
        return unknown(resource)  # HFValidationError: the client refuses the name before a request
    if isinstance(error, errors.RevisionNotFoundError):
        return no_revision(resource)
    if isinstance(error, errors.SafetensorsParsingError):
        return UsageError(
            f"{resource} has a broken safetensors file",
            code="broken_model",
            got=_reason(error),
            hint="another revision, or another model",
        )
    return None


def gated(resource: HubResource) -> AccessError:
    return AccessError(
        f"{resource} is gated",
        code="gated",
        expected=f"access granted to your account on {resource.page}",
        hint=f"request access on {resource.page}, then: hf auth login",
    )


def unknown(resource: HubResource) -> UsageError:
    return UsageError(
        f"there is no {resource.kind} {resource.name} on the Hub, or it is private",
        code=f"unknown_{resource.kind}",
        expected=f"a {resource.kind} that your token can read",
        got=resource.name,
        hint="check the name; for a private one: hf auth login",
    )


def no_revision(resource: HubResource) -> UsageError:
    return UsageError(
        f"{resource} has no such revision", code="unknown_revision", hint=f"see {resource.page}/commits/main"
    )


def _status_error(response: Any, resource: HubResource) -> SkillTrainError:
    status = response.status_code
    got = f"status {status}"
    if status == 401:
        return _refused(resource)
    if status == 402:
        return AccessError(
            f"no credit is left for {resource}",
            code="no_credit",
            expected="a positive balance of pre-paid credits",
            got=_server_message(response) or got,
            hint="add credit on https://huggingface.co/settings/billing, then run the same command again",
        )
    if status == 403:
        return _forbidden(resource, _server_message(response))
    if status == 429:
        wait = str(response.headers.get("Retry-After"))
        pause = f"in {wait} seconds" if wait.isdigit() else "in five minutes"
        return Temporary(
            f"the Hub received too many requests for {resource}", code="rate_limit", got=got, hint=f"try again {pause}"
        )
    if status in (408, 416) or status >= 500:  # 416: the file has fewer bytes than the Hub announced
        again = "try again in a few minutes; https://status.huggingface.co tells whether the Hub is down"
        return Temporary(f"the Hub failed to answer for {resource}", code="hub_error", got=got, hint=again)
    got = ": ".join(filter(None, (got, _server_message(response))))
    if status in (409, 412):
        message = f"something else changed {resource} at the same time"
        return Temporary(message, code="conflict", got=got, hint="run the same command again")
    hint = resource.page or "read the Hub's reason in `got`; if it makes no sense: pip install -U huggingface_hub"
    return UsageError(f"the Hub rejected the request for {resource}", code="hub_refused", got=got, hint=hint)


def _refused(resource: HubResource) -> AccessError:
    """The error for status 401, which the Hub sends both for a wrong token and for none."""
    from huggingface_hub import get_token

    token = get_token()
    if token is None:
        return not_signed_in(f"for {resource}")
    got = "status 401" if token.isascii() else GARBLED
    return AccessError(f"the Hub rejected your token for {resource}", code="bad_token", got=got, hint=sign_in())


def sign_in() -> str:
    """The command for signing in with another token. The variable HF_TOKEN takes precedence over a stored token."""
    return "unset HF_TOKEN && hf auth login" if os.environ.get("HF_TOKEN") else "hf auth login"


def not_signed_in(why: str = "", *, expected: str = "a token of the Hub") -> AccessError:
    return AccessError(
        f"you are not signed in to the Hugging Face Hub{', ' * bool(why)}{why}",
        code="not_signed_in",
        expected=expected,
        got="no token",
        hint="hf auth login, or set HF_TOKEN",
    )


def _forbidden(resource: HubResource, message: str) -> AccessError:
    """The error for status 403, with the missing permission if the Hub names it."""
    missing = re.search(r"missing permissions: ([\w., ]+)", message)
    right = missing[1].strip(" .") if missing else ""
    return AccessError(
        f"your token has no access to {resource}",
        code="no_permission",
        expected=f"a token with the permission {right}" if right else "a token with the permission to use it",
        got=message or "status 403",
        hint=f"{sign_in()}, with a token that has {right or 'this permission'} (huggingface.co/settings/tokens)",
    )


def _server_message(response: Any) -> str:
    """The server's own message in one line of at most 200 characters; empty if there is none."""
    words = response.headers.get("X-Error-Message") or ""
    if not words:
        with contextlib.suppress(ValueError, AttributeError, RuntimeError):  # no JSON, or a stream that was not read
            words = response.json().get("error", "")
    return " ".join(str(words).split())[:200]


def _disk_error(error: OSError, resource: HubResource) -> SkillTrainError:
    """The error for an OSError: an incomplete file, a full disk or an unusable cache. Failed requests raise others."""
    if str(error).startswith("Consistency check failed"):  # the client's own words
        return Temporary(
            f"a file of {resource} arrived incomplete",
            code="hub_error",
            expected="the number of bytes that the Hub announced",
            got=_reason(error),
            hint="run the same command again; if it fails again, check HF_ENDPOINT and the proxy",
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        place = "give a --run-dir" if resource.kind == "bucket" else "set HF_HOME to a folder"
        return DecisionNeeded(
            "the disk is full, or the file size limit is reached",
            code="no_disk",
            expected=f"room for the files of {resource}",
            got=str(error),
            hint=f"free some space, or {place} on another disk; then run the same command again",
        )
    return UsageError(
        "the Hugging Face cache cannot be used",
        code="system_error",
        expected="a writable folder",
        got=str(error),
        hint="set HF_HOME to a writable folder",
    )


def _store_error(error: Exception, resource: HubResource) -> SkillTrainError:
    """The error for a failure of hf_xet, which asks the Hub for an access token and then the file storage for bytes. A
    refusal by the Hub is translated by its status. A storage that rejects a valid token counts as failed."""
    import httpx2

    refused = re.search(r"HTTP status client error \((\d+)[^)]*\), domain: \S+/xet-\w+-token", str(error))
    if refused:
        return _status_error(httpx2.Response(int(refused[1])), resource)
    trouble = "sent the wrong bytes" if _BROKEN.search(str(error)) else "failed to answer"
    return Temporary(
        f"the Hub's file storage {trouble}, for {resource}",
        code="hub_error",
        expected="the bytes of the file",
        got=_reason(error),
        hint="try again in a few minutes",
    )


def unreachable(resource: HubResource, reason: str, kind: type[Temporary] = Temporary) -> Temporary:
    message, again = f"the Hub cannot be reached for {resource}", "try again when the Hub can be reached"
    if "OfflineModeIsEnabled" in reason or "HF_HUB_OFFLINE" in reason:  # the client's own words
        message, again = f"HF_HUB_OFFLINE is set, so {resource} is not requested", "unset HF_HUB_OFFLINE"
        kind = OfflineMode
    return kind(
        message,
        code="hub_unreachable",
        expected="a connection to the Hub, or a local copy",
        got=reason,
        hint=f"{again}, or name a local folder or file where one will do",
    )


def _reason(error: BaseException) -> str:
    words = str(error).strip().splitlines()
    return f"{type(error).__name__}: {words[0][:200]}" if words else type(error).__name__
