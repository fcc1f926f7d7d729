"""Figures that the answers beside them do not give are not shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skill_train.core.errors import UsageError
from skill_train.run import evaluate_record

DEMO = Path(__file__).parents[1] / "support" / "data" / "runs" / "demo" / "evaluate.json"


def _read(document: dict[str, Any], folder: Path) -> evaluate_record.Evaluation:
    path = folder / "evaluate.json"
    path.write_text(json.dumps(document))
    return evaluate_record.read(path)


def test_a_figure_that_was_edited_is_refused(tmp_path: Path) -> None:
    document = json.loads(DEMO.read_text())
    whole = _read(document, tmp_path)
    base = next(model for model in whole.models if model.name == "base")
    answered = [row.exact["base"] for row in whole.answers]
    assert base.exact_match == sum(answered) / len(answered) == 0.0
    for model in document["models"]:
        model |= {"exact_match": 1.0, "asked_rows": len(whole.answers)}
    with pytest.raises(UsageError, match="base has the exact match 1, and its answers 0") as raised:
        _read(document, tmp_path)
    assert raised.value.code == "broken_record"


def test_a_score_that_was_edited_is_refused(tmp_path: Path) -> None:
    """A row that could not be scored does not count."""
    document = json.loads(DEMO.read_text())
    for number, row in enumerate(document["answers"]):
        row["scores"] = {"base": None if number else 0.5}
    base = next(model for model in document["models"] if model["name"] == "base")
    base |= {"score": 0.5, "scored_rows": 1}
    _read(document, tmp_path)
    base["score"] = 0.75
    with pytest.raises(UsageError, match=r"base has the score 0\.75, and its answers 0\.5"):
        _read(document, tmp_path)
