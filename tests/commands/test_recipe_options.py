"""Options of the command line beside a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny
from one_command import answered
from skill_train.commands._of_hub import with_flags
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


@pytest.mark.parametrize(
    ("field", "place"),
    [("revision", "model"), ("data_revision", "data"), ("data_config", "data"), ("data_file", "data")],
)
def test_what_only_the_hub_has_is_refused_beside_what_lies_here(tmp_path: Path, field: str, place: str) -> None:
    """It did nothing: a folder with the name of a model on the Hub was trained in place of the revision."""
    rows, recipe = tiny.write_rows(tmp_path / "rows.jsonl", 12), tmp_path / "recipe.yaml"
    recipe.write_text(f"model: {tiny.cached('gemma')}\ndata: rows.jsonl\n{field}: v2\n")
    code, answer = answered("plan", recipe)
    here = rows if place == "data" else tiny.cached("gemma")
    assert (code, answer["error"]["code"]) == (2, "bad_recipe")
    assert answer["error"]["message"] == f"{field} is for a repository of the Hub, and {here} is here"
    assert field in answer["error"]["hint"]
    assert answered("data", "--recipe", recipe)[1]["error"] == answer["error"]


@pytest.mark.parametrize("name", ["not a repo!!", "tickets", "me/tickets/small", "me/a--b"])
def test_a_repository_that_cannot_be_is_refused_before_the_training(tmp_path: Path, name: str) -> None:
    """`push` refused it, after the training."""
    tiny.write_rows(tmp_path / "rows.jsonl", 12)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: {tiny.cached('gemma')}\ndata: rows.jsonl\nhub_model_id: '{name}'\n")
    for command in ("plan", "local"):
        code, answer = answered(command, recipe)
        assert (code, answer["error"]["got"]) == (2, name) and "hub_model_id" in answer["error"]["hint"], answer
    other = ("submit", recipe, "--hub-model-id", "me/tickets-0.5b_v1", "--dry-run")
    assert "hub_model_id" not in answered(*other)[1]["error"]["hint"]
    recipe.write_text(recipe.read_text().replace(name, "me/tickets-0.5b_v1"))
    assert answered("plan", recipe)[0] == 0


def test_what_a_recipe_says_of_its_model_on_the_hub_is_not_said_of_another(tmp_path: Path) -> None:
    """The recipe of a run has the commits of its model and data; both are named anew here."""
    rows, recipe = tiny.write_rows(tmp_path / "rows.jsonl", 12), tmp_path / "recipe.yaml"
    of_hub = "revision: abc\ndata_revision: abc\ndata_config: en\ndata_file: rows.csv\nmax_steps: 3\n"
    recipe.write_text(f"model: some/model\ndata: some/rows\n{of_hub}")
    words = ("--model", tiny.cached("gemma"), "--data", rows)
    code, answer = answered("plan", recipe, *words, "--out", tmp_path / "plan.json")
    assert code == 0, answer
    kept = plan_record.read(tmp_path / "plan.json").recipe
    assert (kept.revision, kept.data_revision, kept.data_config, kept.data_file) == (None,) * 4
    assert kept.max_steps == 3
    assert answered("data", rows, "--recipe", recipe, *words[:2])[0] == 0


def test_the_same_name_on_the_command_line_keeps_what_the_recipe_says_of_it() -> None:
    values = {"model": "some/model", "revision": "abc", "data": "some/rows", "data_config": "en"}
    assert with_flags(values, {"model": "some/model", "max_steps": 3}) == values | {"max_steps": 3}
    assert with_flags(values, {"data": "rows.jsonl"}) == {
        "model": "some/model",
        "revision": "abc",
        "data": "rows.jsonl",
    }


@pytest.mark.parametrize(
    ("target", "parameters"), [("k_proj", 4096), ("self_attn.k_proj", 4096), ("layers.0.self_attn.q_proj", 3072)]
)
def test_the_adapter_of_a_target_with_its_place_is_counted(tmp_path: Path, target: str, parameters: int) -> None:
    """By hand: r 16 on k (64 -> 64) of two layers, and on q (64 -> 128) of one: 16 x (in + out) each."""
    tiny.write_rows(tmp_path / "rows.jsonl", 12)
    recipe, plan = tmp_path / "recipe.yaml", tmp_path / "plan.json"
    recipe.write_text(f"model: {tiny.cached('gemma')}\ndata: rows.jsonl\ntarget_modules: [{target}]\n")
    assert answered("plan", recipe, "--out", plan)[0] == 0
    assert plan_record.read(plan).estimates.adapter_parameters == parameters
