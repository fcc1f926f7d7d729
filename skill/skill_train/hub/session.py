"""Sets up huggingface_hub for this package: a limit on each request, no output, and a count of all transferred bytes.

The bytes are counted because the transfer of a large file has no fixed time limit. It is given up if no bytes move.
"""

import contextlib
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from skill_train.core import waiting
from skill_train.core.errors import Temporary
from skill_train.core.units import megabytes

STREAM_SECONDS = 45.0  # the longest wait for the next byte; in a followed log the Hub sends one every 30 s
PAUSE_SECONDS = 20.0  # the longest pause that the client may make because the Hub asks for one
AN_ANSWER = 10_000  # each answer counts as this many more bytes, because it may be short
MOST_BYTES = 100_000_000  # limit of an answer, which is read into memory; files and followed logs have no limit
# hf_xet sends its own requests to the store. Its default limits are 120 s for a read and 60 s to connect.
_XET = {"HF_XET_CLIENT_READ_TIMEOUT": "20s", "HF_XET_CLIENT_CONNECT_TIMEOUT": "10s"}
_PROGRESS = ("total_bytes_completed", "total_transfer_bytes_completed")
_SHARDS = ("total_shard_validation_entries_completed", "total_shards_completed")


@dataclass
class Traffic:
    """The traffic with the Hub. `moved` is the bytes so far. `complete` is False if the bytes of hf_xet are missing."""

    moved: int = 0
    complete: bool = True


TRAFFIC = Traffic()


def set_up(request_seconds: float, refuse: Callable[[Any], None]) -> None:
    """Sets huggingface_hub up, before its first request: no telemetry, no bars, and no request without a limit.

    Args:
        request_seconds: the limit to connect, to write, and for each read, unless the client sets another limit.
        refuse: checks each response before the client reads it.
    """
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    for name, limit in _XET.items():
        os.environ.setdefault(name, limit)
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
    from huggingface_hub.utils._http import default_client_factory

    if not are_progress_bars_disabled():  # huggingface_hub was imported before
        disable_progress_bars()

    def client() -> Any:
        http_client = default_client_factory()
        http_client.timeout = request_seconds
        hooks = http_client.event_hooks
        http_client.event_hooks = {
            "request": [*hooks["request"], _prepare_request],
            "response": [*hooks["response"], refuse, _refuse_long_pause, _count_response],
        }
        return http_client

    set_client_factory(client)
    _speak_through_us()
    _count_xet()


def abort() -> None:
    """Stops the transfers of hf_xet, which run in its own threads."""
    with contextlib.suppress(ImportError, AttributeError):
        from huggingface_hub.utils._xet import abort_xet_session

        abort_xet_session()


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """In the block, the client sends no requests and reads only its cache."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _prepare_request(request: Any) -> None:
    limits = request.extensions.get("timeout") or {}
    named = {name: STREAM_SECONDS if limit is None else min(limit, STREAM_SECONDS) for name, limit in limits.items()}
    # For a change the Hub looks for every file before it answers. For a new job, our caller looks.
    if request.method == "POST" and not request.url.path.startswith("/api/jobs/"):
        named["read"] = STREAM_SECONDS
    request.extensions = {**request.extensions, "timeout": named}
    request.stream = _counted(request.stream)


def _count_response(response: Any) -> None:
    if response.status_code < 500 and response.status_code != 429:
        TRAFFIC.moved += AN_ANSWER
    path = response.request.url.path
    unlimited = not path.startswith("/api/") or path.startswith("/api/resolve-cache/") or path.endswith("/logs")
    response.stream = _counted(response.stream, math.inf if unlimited else MOST_BYTES)


def _counted(stream: Any, most: float = math.inf) -> Any:
    from httpx2 import SyncByteStream

    class Counted(SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            size = 0
            for piece in stream:
                TRAFFIC.moved += len(piece)
                size += len(piece)
                if size > most:
                    raise _too_long(most)
                yield piece

        def close(self) -> None:
            if hasattr(stream, "close"):
                stream.close()

    return Counted()


def _too_long(most: float) -> Temporary:
    return Temporary(
        "the Hub's answer is too long",
        code="hub_error",
        expected=f"at most {megabytes(most, 0)}",
        got="more",
        hint="check HF_ENDPOINT and the proxy, then run the same command again",
    )


def _refuse_long_pause(response: Any) -> None:
    """Raises an error instead of a long pause before a retry. The client would pause as long as the server says."""
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import parse_ratelimit_headers

    if response.status_code != 429:
        return
    retry_after = response.headers.get("Retry-After") or ""
    limit = parse_ratelimit_headers(response.headers)
    spent = limit is not None and limit.remaining == 0
    seconds = limit.reset_in_seconds if spent else int(retry_after) if retry_after.isdigit() else 0
    if seconds > PAUSE_SECONDS:
        raise HfHubHTTPError("too many requests", response=response)


class _ConsoleHandler(logging.Handler):
    """Sends the client's log to our console, which cleans the server's words in it."""

    def emit(self, record: logging.LogRecord) -> None:
        waiting.tell(" ".join(record.getMessage().split()))


def _speak_through_us() -> None:
    logger = logging.getLogger("huggingface_hub")
    logger.handlers[:] = [_ConsoleHandler()]
    show_before = warnings.showwarning

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        if f"{os.sep}huggingface_hub{os.sep}" in filename:
            waiting.tell(" ".join(str(message).split()))
        else:
            show_before(message, category, filename, lineno, file, line)

    warnings.showwarning = show


def _count_xet() -> None:
    """Makes hf_xet report its transferred bytes. This is not a public interface; if it disappears, stalled files are
    given up later."""
    try:
        from huggingface_hub.utils import _xet

        holder = _xet._GLOBAL_XET_HOLDER
        session = holder.get
        holder.get = lambda: _Watched(session())
    except (ImportError, AttributeError):
        TRAFFIC.complete = False


class _Watched:
    """An hf_xet session with a progress counter."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def new_upload_commit(self, **how: Any) -> Any:
        return self._session.new_upload_commit(**_counting(how))

    def new_file_download_group(self, **how: Any) -> Any:
        return self._session.new_file_download_group(**_counting(how))


def _counting(how: dict[str, object]) -> dict[str, object]:
    callback, before = how.get("progress_callback"), 0

    def count(group: Any, items: Any = None) -> None:
        nonlocal before
        shard = getattr(group, "shard", None)
        now = sum(getattr(group, name, 0) for name in _PROGRESS)
        now += AN_ANSWER * sum(getattr(shard, name, 0) for name in _SHARDS)
        TRAFFIC.moved += max(now - before, 0)
        before = max(before, now)
        if callable(callback):
            callback(group, items)

    return how | {"progress_callback": count}
