"""Options of the command line beside a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny
from one_command import answered
from skill_train.run import plan_record

pytestmark = pytest.mark.slow


def test_an_option_stands_for_what_the_recipe_lacks_or_has_wrong(tmp_path: Path) -> None:
    """One recipe for several models: each command gives its own. It was refused as a recipe without a model."""
    rows, recipe = tiny.write_rows(tmp_path / "rows.jsonl", 12), tmp_path / "recipe.yaml"
    recipe.write_text("data: rows.jsonl\nmax_length: many\n")
    words = ("--model", tiny.cached("gemma"), "--max-length", 200)
    code, answer = answered("plan", recipe, *words, "--out", tmp_path / "plan.json")
    assert code == 0, answer
    kept = plan_record.read(tmp_path / "plan.json").recipe
    assert (kept.data, kept.max_length) == (str(rows), 200)
    assert answered("data", "--recipe", recipe, *words)[0] == 0
    code, answer = answered("plan", recipe, *words[2:])
    assert (code, answer["error"]["message"]) == (2, "the recipe has no model")
    assert "--model" in answer["error"]["hint"]
