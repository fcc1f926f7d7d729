"""transformers and vLLM stop where generation_config.json says. The tuned model's says where its answers end."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import tiny
from command_child import Commands
from skill_train.program.folders.base import add_stops

pytestmark = pytest.mark.slow

EOS, TURN_ENDS = 1, 6  # <eos> and <end_of_turn> of Gemma


def run_of(commands: Commands, folder: Path, recipe: str = "", stops: object = EOS) -> dict[str, Any]:
    """The document of a training on a base whose generation_config.json has these stops; without any, it has no file.
    `config.json` has the first one."""
    base = shutil.copytree(tiny.cached("gemma"), folder / "base")
    generation, config = (json.loads((base / name).read_text()) for name in ("generation_config.json", "config.json"))
    (base / "config.json").write_text(json.dumps(config | {"eos_token_id": EOS}))
    (base / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": stops}))
    if stops is None:
        (base / "generation_config.json").unlink()
    tiny.write_rows(folder / "rows.jsonl", 24)
    (folder / "recipe.yaml").write_text(f"model: base\ndata: rows.jsonl\nmax_steps: 3\nmax_length: 96\n{recipe}")
    return said(commands, folder, "local", "recipe.yaml", "--run-dir", "run")


def said(commands: Commands, folder: Path, *words: object) -> dict[str, Any]:
    done = commands.run(folder, dict(os.environ), *words, "--format", "json")
    assert done.code == 0, done.stdout + done.stderr
    return done.answer


def generation_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "generation_config.json").read_text()))


def test_a_merged_model_gets_the_end_of_its_answers(commands: Commands, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    answer = run_of(commands, tmp_path)
    assert any("<end_of_turn>" in warning["message"] for warning in answer["warnings"])
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["stops"] == [TURN_ENDS]
    said(commands, tmp_path, "merge", "run")
    merged, base = tmp_path / "run" / "merged", tmp_path / "base"
    assert generation_of(merged) == generation_of(base) | {"eos_token_id": [TURN_ENDS, EOS]}
    assert AutoModelForCausalLM.from_pretrained(str(merged)).generation_config.eos_token_id == [TURN_ENDS, EOS]
    record = json.loads((tmp_path / "run" / "merge.json").read_text())
    assert (record["options"]["stops"], record["changes"]["stops"]) == ([TURN_ENDS], [TURN_ENDS])
    assert said(commands, tmp_path, "merge", "run")["data"]["reused"] is True
    said(commands, tmp_path, "export-gguf", "run", "--quant", "q8_0")
    said(commands, tmp_path, "verify", "run")
    proof = json.loads((tmp_path / "run" / "verify.json").read_text())
    assert {check["verdict"] for check in proof["checks"] if check["name"] == "special_tokens"} == {"pass"}


def test_a_model_of_which_every_weight_was_trained_gets_it_too(commands: Commands, tmp_path: Path) -> None:
    """transformers takes the stops of config.json where there is no generation_config.json."""
    run_of(commands, tmp_path, "finetuning_type: full\n", stops=None)
    generation = generation_of(tmp_path / "run" / "merged")
    assert generation == {"bos_token_id": 2, "eos_token_id": [TURN_ENDS, EOS], "pad_token_id": 0}


def test_a_base_that_stops_there_is_left_as_it_is(commands: Commands, tmp_path: Path) -> None:
    run_of(commands, tmp_path, stops=[EOS, TURN_ENDS])
    said(commands, tmp_path, "merge", "run")
    file = Path("generation_config.json")
    assert (tmp_path / "run" / "merged" / file).read_bytes() == (tmp_path / "base" / file).read_bytes()
    assert "stops" not in json.loads((tmp_path / "run" / "merge.json").read_text())["options"]


def test_a_vision_model_may_have_its_tokens_a_level_below(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"pad_token_id": 0, "text_config": {"eos_token_id": 1, "n": 2}}))
    assert add_stops(tmp_path, [6]) == [6]
    assert generation_of(tmp_path) == {"pad_token_id": 0, "eos_token_id": [6, 1]}


@pytest.mark.parametrize(
    ("stated", "expected"), [({}, 6), ({"eos_token_id": 6}, 6), ({"eos_token_id": [6]}, [6]), ({"top_k": 2}, 6)]
)
def test_what_is_stated_stays(stated: dict[str, Any], expected: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    assert add_stops(tmp_path, [6]) == ([] if "eos_token_id" in stated else [6])
    assert generation_of(tmp_path) == stated | {"eos_token_id": expected}
