"""What is taken for data of a person, and what is not."""

from __future__ import annotations

import time

import pytest

from skill_train.data.problems import holds_personal


@pytest.mark.parametrize(
    "text",
    [
        "write to jane.doe@example.org please",
        '{"text": "<a+b@mail.example.co.uk>"}',
        "two @ signs, the second is one: @x me@example.de",
        "call +49 170 1234567",
        "(+1) is not, but +1 (555) 010-0199 is",
        "+442079460123",
        r'{"text": "call\n+49 170 1234567"}',
    ],
)
def test_found(text: str) -> None:
    assert holds_personal(text.encode())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "@decorator",
        "pip install a@1.2",
        "user@localhost",
        "me @ example.org",
        "12+30 = 42",
        "1+12345678901",
        "+0 170 1234567",
        "C++ 20170101",
        "+1234567",
        "+12345678901234567890",
        "a + 49 170 1234567",
    ],
)
def test_not_found(text: str) -> None:
    assert not holds_personal(text.encode())


@pytest.mark.parametrize(
    "line",
    [
        b"a" * 2_000_000 + b"@",
        b"@" * 2_000_000,
        b"a@a.a." * 300_000,
        b"a@" + b"a." * 1_000_000,
        b"+1" * 1_000_000,
        b"+1 (" * 500_000,
    ],
    ids=range(6),
)
def test_a_hostile_line_takes_no_time(line: bytes) -> None:
    """Each is 2 MB; looked at letter by letter from each letter, it would take minutes."""
    started = time.process_time()
    holds_personal(line)
    assert time.process_time() - started < 10
