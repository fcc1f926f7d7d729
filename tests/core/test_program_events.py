"""The lines of the training program among those of libraries, which write to the same output."""

from __future__ import annotations

import json

import pytest

from skill_train.core.program_events import events
from skill_train.program.plan import last_stage

STEP = {"event": "step", "step": 1, "steps": 3, "loss": None, "tokens_per_second": 9.5, "memory_bytes": {"rss": 1}}
FIGURES = {"train_rows": 4, "held_out_rows": 0, "truncated_rows": 0, "tokens": 9, "trained_token_share": 1.0}
ERROR = {"code": "bad_loss", "message": "m", "expected": "", "got": "", "hint": ""}
OURS = [
    STEP,
    STEP | {"start": 1, "job": None},
    {"event": "data", **FIGURES, "notes": []},
    {"event": "failed", "exit_code": 5, "error": ERROR},
    {"event": "note", "text": "a note"},
    {"event": "done", "verdict": "pass"},
]


@pytest.mark.parametrize("ours", OURS)
def test_what_the_program_says_is_an_event(ours: dict[str, object]) -> None:
    assert list(events(f"a word\n{json.dumps(ours)}\nanother")) == [ours]


@pytest.mark.parametrize(
    "line",
    [
        '{"event": "step", "level": "info"}',  # as structlog writes a message
        '{"event": "data", "timestamp": "2026-11-01"}',
        '{"event": "stage"}',
        '{"event": "failed", "error": "no route to host"}',
        json.dumps(STEP | {"memory_bytes": None}),
        '{"event": ["step"]}',
        '{"event": null}',
        "[" * 100_000,
    ],
)
def test_what_a_library_says_in_a_similar_form_is_none(line: str) -> None:
    """It ended `local` as a bug of skill-train, and the training with it."""
    assert list(events(line)) == []


def test_a_stage_that_a_library_wrote_into_is_left_out() -> None:
    """Two processes share a log. After a lack of memory the last stage decides about a second try."""
    whole = '{"event": "stage", "text": "training"}'
    assert last_stage(f'{whole}\n{whole}warning: a library\n{{"event": "stage"}}\n') == "training"
    assert last_stage("nothing") is None
