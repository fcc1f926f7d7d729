"""JSON over HTTP to a program on this machine, past any proxy."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from skill_train.core.errors import NativeCrash

_SECONDS = 600.0  # a long answer on a slow machine
_PAUSE_SECONDS = 0.1


class HttpRefusal(Exception):
    """The program answered with an error; the text is its own."""


def post(url: str, document: object) -> Any:
    """The answer to a JSON document.

    Raises:
        HttpRefusal: the program refuses it.
        OSError: there is no answer.
    """
    data = json.dumps(document).encode()
    return _sent(urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"}))  # noqa: S310


def get(url: str) -> Any:
    """Raises what `post` raises."""
    return _sent(urllib.request.Request(url))  # noqa: S310


def wait_for(url: str, is_alive: Callable[[], bool], *, program: str, seconds: float = _SECONDS) -> Any:
    """The first good answer of a program that was just started.

    Raises:
        NativeCrash: it ended, or did not answer in time.
    """
    end = time.monotonic() + seconds
    while is_alive() and time.monotonic() < end:
        try:
            return get(url)
        except (HttpRefusal, OSError):
            time.sleep(_PAUSE_SECONDS)
    raise NativeCrash(
        f"{program} does not answer",
        code="program_failed",
        expected=f"an answer within {seconds:g} s",
        got="it is still loading" if is_alive() else "it ended",
        hint="run the program by hand on the same file, and read what it says",
    )


def _sent(request: urllib.request.Request) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_SECONDS) as response:
            return json.loads(response.read())
    except urllib.error.HTTPError as error:
        raise HttpRefusal(f"HTTP {error.code}: {error.read().decode(errors='replace')[:400]}") from None
    except ValueError as error:
        raise HttpRefusal(f"an answer that is not JSON: {error}") from None
