"""Sends JSON over HTTP to a program on this machine, without a proxy."""

import contextlib
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from skill_train.core.errors import NativeCrash

Answer = TypeVar("Answer")

_SECONDS = 600.0  # a long answer on a slow machine
_PAUSE_SECONDS = 0.1


class HttpRefusal(Exception):
    """The program answered with an HTTP error, or with a document of another form. The text quotes the program."""


def post(url: str, document: object, kind: type[Answer]) -> Answer:
    """Posts a JSON document and returns the answer as `kind`.

    Raises:
        HttpRefusal: the program refuses the document, or its answer is not a `kind`.
        OSError, HTTPException: there is no answer.
    """
    data = json.dumps(document).encode()
    return _sent(urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"}), kind)  # noqa: S310


def get(url: str, kind: type[Answer]) -> Answer:
    """Gets a JSON document as `kind`. Raises what `post` raises."""
    return _sent(urllib.request.Request(url), kind)  # noqa: S310


@contextlib.contextmanager
def asking(program: str) -> Iterator[None]:
    """Turns connection errors in the block into an error that names the program.

    Raises:
        NativeCrash: the program did not answer.
    """
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        raise NativeCrash(
            f"{program} ended while it was asked, or did not answer in {_SECONDS:g} s",
            code="program_failed",
            expected="an answer to each question",
            got=f"{type(error).__name__}: {error}",
            hint="run the program by hand on the same file, and read what it says",
        ) from None


def wait_for(url: str, is_alive: Callable[[], bool], *, program: str, seconds: float = _SECONDS) -> None:
    """Waits until a program that was just started answers.

    Raises:
        NativeCrash: the program ended, or did not answer in time.
    """
    end = time.monotonic() + seconds
    while is_alive() and time.monotonic() < end:
        try:
            get(url, object)
            return
        except (HttpRefusal, OSError, http.client.HTTPException):
            time.sleep(_PAUSE_SECONDS)
    raise NativeCrash(
        f"{program} does not answer",
        code="program_failed",
        expected=f"an answer within {seconds:g} s",
        got="it is still loading" if is_alive() else "it ended",
        hint="run the program by hand on the same file, and read what it says",
    )


def _sent(request: urllib.request.Request, kind: type[Answer]) -> Answer:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_SECONDS) as response:
            return msgspec.convert(json.loads(response.read()), kind)
    except urllib.error.HTTPError as error:
        raise HttpRefusal(f"HTTP {error.code}: {error.read().decode(errors='replace')[:400]}") from None
    except msgspec.ValidationError as error:
        raise HttpRefusal(f"an answer of another form than is known here: {error}") from None
    except (ValueError, RecursionError) as error:
        raise HttpRefusal(f"an answer that is not JSON: {error}") from None
