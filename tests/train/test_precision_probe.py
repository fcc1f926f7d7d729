"""What the probe of the precision leaves in the cache, and what is taken from there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from models import recorded_model
from skill_train.core.program_events import Probed
from skill_train.facts import MachineFacts
from skill_train.train import precision_probe
from skill_train.train.local import probed

pytest.importorskip("torch")
MACHINE = MachineFacts("Linux", "a processor", "cpu", 16 << 30, 12 << 30, None, 2, False)
MODEL = recorded_model("qwen2.5-0.5b")
FIGURES: Probed = {"float32": {"seconds": 2.0, "loss": 1.5}, "bfloat16": {"seconds": 1, "loss": None}}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SKILL_TRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_probe_is_found_again() -> None:
    assert precision_probe.known_probe("cpu", MACHINE, MODEL) is None
    precision_probe.remember("cpu", MACHINE, MODEL, FIGURES)
    assert precision_probe.known_probe("cpu", MACHINE, MODEL) == FIGURES
    assert precision_probe.known_probe("mps", MACHINE, MODEL) is None


@pytest.mark.parametrize(
    "bfloat16",
    [{"seconds": 0, "loss": 1.5}, {"seconds": -1, "loss": 1.5}, {"seconds": "1", "loss": 1.5}, {"seconds": 1.0}, None],
)
def test_a_probe_that_cannot_be_is_none(bfloat16: Any, cache: Path) -> None:
    """`plan` divides by its seconds."""
    precision_probe.remember("cpu", MACHINE, MODEL, FIGURES)
    [file] = cache.rglob("*.json")
    file.write_text(json.dumps(FIGURES | {"bfloat16": bfloat16}))
    assert precision_probe.known_probe("cpu", MACHINE, MODEL) is None


def test_what_the_training_program_told_is_taken_if_it_can_be() -> None:
    told = {"event": "probe", **FIGURES}
    assert probed(json.dumps({"event": "stage", "name": "probe"}) + "\n" + json.dumps(told)) == FIGURES
    assert probed("") is None
    assert probed(json.dumps(told | {"float32": {"seconds": 0, "loss": 1.5}})) is None
