"""The real Hub, asked as a user asks it: `make live`, with HF_TOKEN. Only questions: nothing is started or written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif("HF_TOKEN" not in os.environ, reason="needs HF_TOKEN, a token of the Hub that may read"),
]
# Small, public, ungated. The figure is worked out by hand from its config.json (30 layers of 576, tied embeddings).
MODEL, PARAMETERS = "HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008
DATASET = "trl-lib/Capybara"


def _command(*words: str) -> dict[str, Any]:
    command = [sys.executable, "-c", "from skill_train.cli import main; main()", *words, "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert os.environ["HF_TOKEN"] not in done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == 0, answer
    return answer["data"]  # type: ignore[no-any-return]


def test_a_model_and_a_dataset_of_the_hub_are_planned() -> None:
    data = _command("plan", "--model", MODEL, "--data", DATASET, "--max-steps", "20")
    assert data["parameters"] == PARAMETERS
    assert data["where"] in ("local", "cloud") and data["blockers"] == []
    assert next(reason for reason in data["reasons"] if reason["rule"] == "format")["value"].startswith("messages")


def test_prices_are_todays() -> None:
    data = _command("plan", "--model", MODEL, "--data", DATASET, "--flavor", "t4-small")
    assert data["prices"]["source"].startswith("https://huggingface.co/api/jobs/hardware")
    assert 0 < data["cost_usd"]["low"] <= data["cost_usd"]["high"]


def test_the_token_is_known() -> None:
    checks = {check["name"]: check for check in _command("doctor")["checks"]}
    assert checks["token"]["verdict"] == "ok"
