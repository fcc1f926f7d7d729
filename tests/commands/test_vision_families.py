"""Vision families from pictures to a verified pair of files, by the commands that a user types. Gemma 3 is in
test_vision_chain."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import tiny_vision
from command_child import Commands, Done
from picture_runs import write_rows

pytestmark = pytest.mark.slow

pytest.importorskip("trl")

LINED = ("mistral3", "pixtral")  # llama.cpp computes the ends of their lines from memory that it does not set


def _call(commands: Commands, here: Path, *words: object) -> Done:
    return commands.run(here, dict(os.environ), *words, "--format", "json")


def _write_recipe(here: Path, model: Path, **more: Any) -> None:
    if not (here / "data").is_dir():
        write_rows(here / "data")
    recipe = {"model": str(model), "data": "data/rows.jsonl", "max_steps": 6, "learning_rate": 5e-3}
    recipe |= {"effective_batch_size": 4, "held_out_fraction": 0.2, "max_length": 1024} | more
    (here / "recipe.yaml").write_text(json.dumps(recipe))


def _checks(run: Path) -> dict[str, Any]:
    """Of the unquantized file and of its projector, by name."""
    checks = json.loads((run / "verify.json").read_text())["checks"]
    return {check["name"]: check for check in checks if not check["file"].endswith("-q8_0.gguf")}


@pytest.mark.parametrize(
    "kind", ["mistral3", *(pytest.param(kind, marks=pytest.mark.torture) for kind in ("idefics3", "pixtral"))]
)
def test_a_pair_is_proved_that_was_trained_in_all_parts(kind: str, tmp_path: Path, commands: Commands) -> None:
    _write_recipe(tmp_path, tiny_vision.cached(kind), lora_parts=["language", "projector", "tower"])
    plan = _call(commands, tmp_path, "plan", "recipe.yaml")
    codes = {warning["code"] for warning in plan.answer["warnings"]}
    assert "not_convertible" not in codes and ("line_ends" in codes) == (kind in LINED)
    trained = _call(commands, tmp_path, "local", "recipe.yaml", "--dtype", "float32", "--run-dir", "run")
    assert (trained.code, trained.data["verdict"]) == (0, "pass"), trained.stderr
    recipe = json.loads((tmp_path / "run" / "plan.json").read_text())["recipe"]
    assert recipe["preprocess"] == "engine"
    assert _call(commands, tmp_path, "export-gguf", "run", "--quant", "q8_0").code == 0
    merged = json.loads((tmp_path / "run" / "merge.json").read_text())["gate"]
    assert (merged["verdict"], merged["pictures"]) == ("pass", "one picture")
    verified = _call(commands, tmp_path, "verify", "run")
    assert verified.code == 0, verified.stderr
    checks = _checks(tmp_path / "run")
    warned = {name: check["detail"] for name, check in checks.items() if check["verdict"] != "pass"}
    assert warned.keys() == ({"loads_projector"} if kind in LINED else set()), warned
    same, used = checks["pictures"]["figures"], checks["pictures_as_used"]["figures"]
    assert same["differing_pixels"] == 0 and same["embedding_error"] < 0.005
    assert same["mean_kl"] < min(1e-5, 0.01 * same["mean_kl_blank"])
    assert [used[name] for name in ("differing_pixels", "other_sizes", "texts_differ")] == [0, 0, 0]


@pytest.mark.torture
def test_what_becomes_no_pair_is_trained_and_merged(tmp_path: Path, commands: Commands) -> None:
    _write_recipe(tmp_path, tiny_vision.without_tile_tokens(tmp_path / "model"), max_length=2048)
    trained = _call(commands, tmp_path, "local", "recipe.yaml", "--dtype", "float32", "--run-dir", "run")
    assert (trained.code, trained.data["verdict"]) == (0, "pass"), trained.stderr
    assert _call(commands, tmp_path, "merge", "run").code == 0
    assert _call(commands, tmp_path, "export-gguf", "run", "--quant", "f16").error == (2, "not_convertible")


def test_a_llava_with_another_tower_than_pixtrals_is_refused(tmp_path: Path, commands: Commands) -> None:
    """LLaVA 1.5 has CLIP's, of which the training knows no tokens and the converter makes no projector."""
    model = Path(shutil.copytree(tiny_vision.cached("pixtral"), tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    config["vision_config"]["model_type"] = "clip_vision_model"
    (model / "config.json").write_text(json.dumps(config))
    _write_recipe(tmp_path, model)
    plan = _call(commands, tmp_path, "plan", "recipe.yaml")
    assert plan.error == (2, "vision")
    assert plan.answer["error"]["message"].endswith("and this model is of the type llava with another tower")
    refused = _call(commands, tmp_path, "export-gguf", "model", "--out", "out")
    assert refused.error == (2, "not_convertible")
    assert "with Pixtral's tower alone, and this one has clip_vision_model" in refused.answer["error"]["message"]


def test_an_idefics3_without_tokens_for_tiles_is_told_before_the_training(tmp_path: Path, commands: Commands) -> None:
    """llama.cpp loads its pair, and can run none of its prompts with a picture."""
    model = tiny_vision.without_tile_tokens(tmp_path / "model")
    _write_recipe(tmp_path, model, max_length=2048)
    why = "llama.cpp puts the token <global-img> around a picture, and this tokenizer has none"
    plan = _call(commands, tmp_path, "plan", "recipe.yaml")
    (told,) = (warning["message"] for warning in plan.answer["warnings"] if warning["code"] == "not_convertible")
    assert plan.code == 0 and why in told and "training and merging work" in told
    refused = _call(commands, tmp_path, "export-gguf", "model", "--out", "out")
    assert refused.error == (2, "not_convertible") and why in refused.answer["error"]["message"]
    assert list((tmp_path / "out").iterdir()) == []
    words = ("export-gguf", "model", "--quant", "f16", "--mmproj", "none", "--out", "out")
    assert _call(commands, tmp_path, *words).code == 0
