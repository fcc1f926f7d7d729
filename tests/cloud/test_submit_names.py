"""Names that `submit` makes, and the command that it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import planning
from skill_train.commands._submit_plan import SubmitOptions, _repository, command_of, with_repository
from skill_train.run.plan_record import Plan


def _plan(model: str, data: str, *, local: bool = True, hub_model_id: str | None = None) -> Plan:
    return planning.plan_with(
        recipe={"model": model, "data": data},
        recipe_hash="0123456789abcdef",
        fingerprints={"data": "f" if local else None},
        policy={"hub_model_id": hub_model_id},
    )


@pytest.mark.parametrize(
    ("model", "data", "local", "expected"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", "/here/tickets.jsonl", True, "me/qwen2.5-0.5b-instruct-tickets-01234567"),
        ("gpt2", "acme/My_Tickets", False, "me/gpt2-my-tickets-01234567"),
        ("a/b..c--d", "/here/Zeilen mit Ä!.csv", True, "me/b-c-d-zeilen-mit-01234567"),
        ("a/b", "/here/数据.jsonl", True, "me/b-data-01234567"),
    ],
)
def test_the_repository_of_a_result(model: str, data: str, local: bool, expected: str) -> None:
    assert _repository(_plan(model, data, local=local), "me") == expected


def test_a_long_name_is_one_that_the_hub_takes() -> None:
    """At most 96 characters (huggingface_hub 2.4, validate_repo_id)."""
    made = _repository(_plan("a/" + "m" * 90, "/x/" + "d" * 200 + ".jsonl"), "me")
    assert len(made) <= 96 and made.endswith("-01234567") and re.fullmatch(r"me/[a-z0-9][a-z0-9.-]*", made)


def test_a_repository_that_was_said_is_taken() -> None:
    kept = _plan("a/b", "/here/rows.jsonl", hub_model_id="me/kept")
    assert with_repository(kept, SubmitOptions(), "me").policy.hub_model_id == "me/kept"
    said = with_repository(kept, SubmitOptions(hub_model_id="me/said"), "me")
    assert (said.policy.hub_model_id, said.policy.sensitive) == ("me/said", False)


def test_the_command_says_everything_again() -> None:
    asked = SubmitOptions(
        source=Path("my run"), max_steps=5, max_cost=2.5, timeout="2h", run_dir=Path("x"), force_new=True
    )
    assert command_of(asked, yes=True) == (
        "skill-train submit 'my run' --max-steps 5 --timeout 2h --max-cost 2.5 --run-dir x --force-new --yes"
    )
    assert command_of(SubmitOptions(max_hours=4.0, rehearse=True), rehearse=False) == "skill-train submit --max-hours 4"
