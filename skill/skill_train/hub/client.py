"""Sends all requests to the Hub, with a limit on the total time. Every failure becomes one of our errors."""

import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from skill_train.core import waiting
from skill_train.core.errors import SkillTrainError, Temporary, UsageError
from skill_train.core.units import megabytes
from skill_train.hub import session
from skill_train.hub.errors import (
    UNREAD,
    HubResource,
    OfflineMode,
    StillAsking,
    in_client,
    not_understood,
    translated,
    unreachable,
)  # fmt: skip

Answer = TypeVar("Answer")

REQUEST_SECONDS = 8.0  # to connect, to write, and for each read; huggingface_hub 2.4 sets no limit itself
QUESTION_SECONDS = 20.0  # for all requests of one question, even if a server sends a byte now and then
STALLED_SECONDS = 60.0  # a transfer is given up if it moves fewer than `session.AN_ANSWER` bytes in this time
AT_WORK = 0.25  # the transfer is not stalled if the process computes, such as a digest, for this share of that time
BLIND_SECONDS = 1800.0  # replaces `STALLED_SECONDS` if hf_xet does not report its bytes
TRIES, PAUSE_SECONDS = 4, 2.0  # for `patiently`; the pauses grow
_FILES = ("/api/resolve-cache/",)  # the Hub's path for small files of repositories


def ask(resource: HubResource, question: Callable[[], Answer], *, seconds: float | None = QUESTION_SECONDS) -> Answer:
    """Runs `question` in another thread, and returns its answer. Tells the user every ten seconds what it waits for.

    Args:
        question: sends the requests.
        seconds: the limit for all requests together; None for files, which may take as long as bytes move.

    Raises:
        UsageError: the repository or the revision does not exist.
        AccessError: the repository is gated, or the token is refused.
        Temporary: there is no connection or no answer in time, there were too many requests, or the server failed; or
            the command has used up the time for all its requests.
    """
    prepare()
    try:
        return _understandably(resource, lambda: _in_time(seconds, resource, question))
    except Temporary as error:
        if isinstance(error, StillAsking) or waiting.seconds_left() <= 0:
            error.hint = waiting.again() or error.hint
        raise


def _understandably(resource: HubResource, question: Callable[[], Answer]) -> Answer:
    """Returns the answer of `question`. Every failure becomes one of our errors. The time of a temporary failure counts
    as waited in vain."""
    started = time.monotonic()
    try:
        return question()
    except StillAsking:
        raise  # `_in_time` has already counted its time
    except Temporary:
        waiting.in_vain(time.monotonic() - started)
        raise
    except SkillTrainError:
        raise
    except Exception as error:
        ours = translated(error, resource)
        if ours is error and isinstance(error, UNREAD) and in_client(error):
            ours = not_understood(resource, error)
        if ours is error:
            raise
        if isinstance(ours, Temporary):
            waiting.in_vain(time.monotonic() - started)
        raise ours from None


def ask_here(resource: HubResource, question: Callable[[], Answer]) -> Answer:
    """Runs `question` in this thread, without a limit of the total time, and returns its answer. It is for answers that
    may take hours, such as the next line of a log. Raises what `ask` raises."""
    prepare()
    return _understandably(resource, question)


def patiently(question: Callable[[], Answer]) -> Answer:
    """Returns the answer of `question`, and repeats it after a temporary failure. The request must be safe to repeat.
    huggingface_hub 2.4 itself repeats some requests, but not all."""
    for attempt in range(1, TRIES):
        try:
            return question()
        except Temporary as error:
            if not worth_asking_again(error):
                raise
            waiting.tell(f"{error.message} ({error.got}); asking again")
            waiting.pause(PAUSE_SECONDS * attempt)
    return question()


def or_none(code: str, question: Callable[[], Answer]) -> Answer | None:
    """Returns the answer of `question`, or None if it raises a UsageError with this code, such as `unknown_model`."""
    try:
        return question()
    except UsageError as error:
        if error.code != code:
            raise
        return None


def api() -> Any:
    """huggingface_hub's client, for use in a `question`."""
    from huggingface_hub import HfApi

    return HfApi()


def worth_asking_again(trouble: Temporary) -> bool:
    """Whether a later request may succeed, and the command has time left for it."""
    return not isinstance(trouble, OfflineMode) and waiting.seconds_left() > 0


def _in_time(seconds: float | None, resource: HubResource, question: Callable[[], Answer]) -> Answer:
    """Runs `question` in another thread, and abandons the thread when the time is up."""
    from concurrent.futures import Future  # late, because it loads logging, which `status` of a local run does without

    answer: Future[Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(question())
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            answer.set_exception(error)

    if waiting.seconds_left() <= 0:
        raise unreachable(resource, "the command ran out of time before this request")
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        if seconds is None:
            _while_it_moves(thread, resource)
        else:
            _until_over(thread, resource, min(seconds, waiting.seconds_left()))
    except BaseException:  # no answer, or Ctrl-C
        session.abort()
        raise
    return answer.result()


def _until_over(thread: threading.Thread, resource: HubResource, seconds: float) -> None:
    started, next_notice = time.monotonic(), waiting.NOTICE_SECONDS
    while thread.is_alive():
        passed = time.monotonic() - started
        if passed >= seconds:
            waiting.in_vain(passed)
            raise unreachable(resource, f"no answer within {seconds:.3g} seconds", StillAsking)
        if passed >= next_notice:
            waiting.tell(f"waiting for the Hub, for {resource}: {passed:.0f} s")
            next_notice += waiting.NOTICE_SECONDS
        thread.join(min(next_notice, seconds) - passed)


def _while_it_moves(thread: threading.Thread, resource: HubResource) -> None:
    """Waits for a transfer. Gives up if it has stopped, but not if it is slow."""
    traffic = session.TRAFFIC
    first = before = traffic.moved
    started = since = time.monotonic()
    worked = time.process_time()
    limit, next_notice = STALLED_SECONDS if traffic.complete else BLIND_SECONDS, waiting.NOTICE_SECONDS
    while thread.is_alive():
        thread.join(min(1.0, limit / 10))
        now, moved = time.monotonic(), traffic.moved
        if moved - before >= session.AN_ANSWER:
            before, since, worked = moved, now, time.process_time()
            waiting.well()
        elif time.process_time() - worked >= AT_WORK * limit:
            since, worked = now, time.process_time()
        still, so_far = now - since, f"{megabytes(moved - first)} have moved"
        if thread.is_alive() and still >= min(limit, waiting.seconds_left()):
            waiting.in_vain(still)
            raise unreachable(resource, f"nothing has moved for {still:.0f} seconds; {so_far}", StillAsking)
        if now - started >= next_notice:
            waiting.tell(f"the files of {resource}: {so_far}, the last {still:.0f} s ago")
            next_notice += waiting.NOTICE_SECONDS


@cache
def prepare() -> None:
    session.set_up(REQUEST_SECONDS, stay_here)


def stay_here(response: Any) -> None:
    """Refuses a redirect to another host. The request's body, such as the token of a job, would go there, or its answer
    would pass for the Hub's. Files may come from any host that the Hub names, because their requests contain no secret
    and their content is checked.

    Raises:
        UsageError: the request changes something.
        Temporary: the request only reads.
    """
    request = response.request
    if not response.has_redirect_location:
        return
    target = request.url.join(response.headers["location"])
    same = all(getattr(target, part) == getattr(request.url, part) for part in ("scheme", "host", "port"))
    asks = request.method in ("GET", "HEAD")
    if asks and (same or not request.url.path.startswith("/api/") or request.url.path.startswith(_FILES)):
        return
    if same and response.status_code in (307, 308):  # a redirect with another status would lose the body
        return
    got = f"status {response.status_code}, to {target.copy_with(query=None)}"
    if asks:
        raise Temporary(
            "another host answered in place of the Hub",
            code="hub_error",
            expected=f"an answer of {request.url.host}",
            got=got,
            hint="sign in to the network, or check HF_ENDPOINT and the proxy, then run the same command again",
        )
    raise UsageError(
        "the Hub redirected a request with a body to another host, so the request was not sent",
        code="redirected",
        expected=f"an answer of {request.url.host}",
        got=got,
        hint="check HF_ENDPOINT and the proxy, then run the same command again",
    )
