"""How long the client waits for an answer, and how long it may pause because the Hub asks for it: even a day."""

from __future__ import annotations

import httpx2
import pytest

from skill_train.hub import session

pytest.importorskip("huggingface_hub")


@pytest.mark.parametrize(
    ("method", "path", "seconds"),
    [
        ("POST", "models/me/tickets/commit/main", 45),
        ("POST", "buckets/me/jobs-artifacts/batch", 45),
        ("POST", "jobs/me", 8),  # looked for, if there is no answer
        ("GET", "models/me/tickets", 8),
    ],
)
def test_a_change_may_take_longer_than_other_answers(method: str, path: str, seconds: float) -> None:
    """The Hub looks for every file before it answers. Whoever does not wait asks for the change a second time."""
    limits = {"connect": 8.0, "read": 8.0}
    request = httpx2.Request(method, f"https://huggingface.co/api/{path}", extensions={"timeout": limits})
    session._prepare_request(request)
    assert request.extensions["timeout"] == {"connect": 8.0, "read": seconds}


@pytest.mark.parametrize(
    ("headers", "refused"),
    [
        ({"RateLimit": '"api";r=0;t=20'}, False),
        ({"RateLimit": '"api";r=0;t=21'}, True),
        ({"ratelimit": '"api"; r = 0; t = 86400'}, True),
        ({"RateLimit": '"api";r=3;t=86400'}, False),
        ({"RateLimit": '"api";r=0;t=1', "Retry-After": "86400"}, False),
        ({"RateLimit": '"api";r=3;t=1', "Retry-After": "86400"}, True),
        ({"Retry-After": "20"}, False),
        ({"Retry-After": "21"}, True),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, False),
        ({}, False),
    ],
)
def test_a_long_pause_is_an_error_instead(headers: dict[str, str], refused: bool) -> None:
    """Which header counts is the client's choice (huggingface_hub 2.4, `http_backoff`)."""
    from huggingface_hub.errors import HfHubHTTPError

    request = httpx2.Request("GET", "https://huggingface.co/api/models/me/tickets")
    session._refuse_long_pause(httpx2.Response(503, headers=headers, request=request))
    response = httpx2.Response(429, headers=headers, request=request)
    if not refused:
        session._refuse_long_pause(response)
        return
    with pytest.raises(HfHubHTTPError) as caught:
        session._refuse_long_pause(response)
    assert caught.value.response is response
