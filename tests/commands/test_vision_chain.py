"""A vision model from pictures to a verified pair of files, by the commands that a user types."""

from __future__ import annotations

import json
import random
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import tiny
import tiny_vision
import training
from command_child import Commands, Done
from pages import Page

pytestmark = pytest.mark.slow

pytest.importorskip("trl")

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 60), "blue": (40, 60, 230), "white": (240, 240, 240)}


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory, commands: Commands) -> tuple[Path, dict[str, Done]]:
    """A run, and what each command answered."""
    here = tmp_path_factory.mktemp("vision")
    _write_rows(here / "data")
    recipe = {"model": str(tiny_vision.cached("gemma3")), "data": "data/rows.jsonl", "max_steps": 10}
    recipe |= {"learning_rate": 5e-3, "effective_batch_size": 4, "held_out_fraction": 0.2, "max_length": 256}
    (here / "recipe.yaml").write_text(json.dumps(recipe))
    lines: dict[str, tuple[object, ...]] = {
        "data": ("data", "--recipe", "recipe.yaml"),
        "plan": ("plan", "recipe.yaml"),
        "local": ("local", "recipe.yaml", "--dtype", "float32", "--run-dir", "run"),
        "export-gguf": ("export-gguf", "run", "--quant", "q8_0"),
        "verify": ("verify", "run"),
        "evaluate": ("evaluate", "run"),
        "report": ("report", "run"),
        "push": ("push", "run", "--repo", "me/seen", "--dry-run"),
    }
    return here, {name: _call(commands, here, *words) for name, words in lines.items()}


def _call(commands: Commands, here: Path, *words: object) -> Done:
    import os

    return commands.run(here, dict(os.environ), *words, "--format", "json")


def _write_rows(folder: Path) -> None:
    folder.mkdir()
    draw, rows = random.Random(0), []
    for number in range(24):
        colour, size = draw.choice(list(COLOURS)), draw.choice([(60, 40), (112, 112), (40, 90)])
        image = Image.new("RGB", size, COLOURS[colour])
        image.putpixel((1, 1), (number, number, number))
        image.save(folder / f"{number}.png")
        messages = [{"role": "user", "content": "Which colour?"}, {"role": "assistant", "content": colour}]
        rows.append({"images": [f"{number}.png"], "messages": messages})
    training.write_data(folder, rows)


def test_the_plan_reads_pictures_here(chain: tuple[Path, dict[str, Done]]) -> None:
    """On the pixels that llama.cpp will show, and the plan says why."""
    plan = chain[1]["plan"].data
    assert plan["where"] == "local" and plan["blockers"] == []
    chosen = next(reason for reason in plan["reasons"] if reason["rule"] == "preprocess")
    assert chosen["value"] == "engine" and "llama.cpp" in chosen["because"]


def test_the_training_sees_and_learns_the_pictures(chain: tuple[Path, dict[str, Done]]) -> None:
    here, answers = chain
    assert answers["local"].data["verdict"] == "pass"
    checks = {check["name"]: check for check in json.loads((here / "run" / "train.json").read_text())["checks"]}
    assert checks["pictures_are_read"]["verdict"] == checks["pictures_help"]["verdict"] == "pass"


def test_the_pair_is_proved_and_llama_cpp_shows_what_was_trained(chain: tuple[Path, dict[str, Done]]) -> None:
    """Nothing differs given the same pixels, nor as llama.cpp prepares pictures of Gemma 3: it trained on these."""
    here, answers = chain
    assert answers["verify"].code == 0
    proof = json.loads((here / "run" / "verify.json").read_text())
    verdicts = {(check["file"], check["name"]): check["verdict"] for check in proof["checks"]}
    assert "fail" not in verdicts.values()
    warned = {name for (_, name), verdict in verdicts.items() if verdict == "warn"}
    assert warned == set()
    of_the_projector = {name for file, name in verdicts if file.startswith("mmproj-")}
    assert of_the_projector == {"file", "digest", "projector", "projector_weights"}
    of_the_pair = {name for file, name in verdicts if file == "run-q8_0.gguf"}
    assert {"picture_tokens", "loads_projector", "pictures", "pictures_as_used"} <= of_the_pair
    pictures = [check for check in proof["checks"] if check["name"] == "pictures"]
    assert len(pictures) == 2  # f16 and q8_0, each with the projector
    assert pictures[0]["figures"]["differing_pixels"] == 0 and pictures[0]["figure"] < 1e-5
    used = [check["figures"] for check in proof["checks"] if check["name"] == "pictures_as_used"]
    assert [(one["differing_pixels"], one["other_sizes"], one["texts_differ"]) for one in used] == [(0, 0, 0)] * 2


def test_the_proof_is_of_these_files(chain: tuple[Path, dict[str, Done]], commands: Commands) -> None:
    here, _ = chain
    assert _call(commands, here, "verify", "run").data["reused"] is True
    [projector] = (here / "run" / "gguf").glob("mmproj-*.gguf")
    whole = projector.read_bytes()
    projector.write_bytes(whole[:-4000])
    damaged = _call(commands, here, "verify", "run")
    projector.write_bytes(whole)
    assert damaged.code == 6 and projector.name in damaged.answer["error"]["message"]


def test_a_run_of_pictures_without_a_projector_is_no_pass(
    chain: tuple[Path, dict[str, Done]], commands: Commands
) -> None:
    here, _ = chain
    [projector] = (here / "run" / "gguf").glob("mmproj-*.gguf")
    aside = projector.rename(here / "aside.gguf")
    missing = _call(commands, here, "verify", "run")
    aside.rename(projector)
    assert (missing.code, missing.data["verdict"]) == (0, "warn")
    assert "no projector was exported" in missing.stderr


def test_every_stage_is_asked_about_held_out_pictures(chain: tuple[Path, dict[str, Done]]) -> None:
    """Files are asked as llama.cpp's users ask them; the prompt is shown with one token for a picture."""
    evaluated = chain[1]["evaluate"].data
    models = {model["name"]: model for model in evaluated["models"]}
    assert list(models) == ["base", "tuned", "run-f16.gguf", "run-q8_0.gguf"]
    assert all(model["reason"] == "" and model["loss"] > 0 for model in models.values())
    assert models["tuned"]["loss"] < models["base"]["loss"] / 2
    assert evaluated["answers"][0]["prompt"].count("<image_soft_token>") == 1


def test_a_projector_that_was_replaced_is_not_measured(
    chain: tuple[Path, dict[str, Done]], commands: Commands, tmp_path: Path
) -> None:
    run = shutil.copytree(chain[0] / "run", tmp_path / "run")
    file = run / "gguf" / "mmproj-run-f16.gguf"
    written = file.read_bytes()
    at = written.index(b"general.name") + 12 + 4 + 8  # its type, its length
    file.write_bytes(written[:at] + bytes([written[at] ^ 1]) + written[at + 1 :])
    done = _call(commands, tmp_path, "evaluate", "run", "--rows", 1)
    assert done.error == (2, "output_changed") and "mmproj.json" in done.answer["error"]["message"]
    again = done.answer["error"]["hint"].split(" away and make it again: skill-train ")[1]
    file.unlink()
    assert _call(commands, tmp_path, *shlex.split(again)).code == 0 and file.read_bytes() == written


def test_the_page_shows_what_was_asked_and_which_files_belong_together(chain: tuple[Path, dict[str, Done]]) -> None:
    here, answers = chain
    assert answers["verify"].answer["next"] == ["skill-train evaluate run", "skill-train report run"]
    page = Page((here / "run" / "report.html").read_text())
    asked = json.loads((here / "run" / "evaluate.json").read_text())["answers"]
    assert sum(tag == "img" for tag, _ in page.tags) == len(asked) > 0
    assert "not shown" not in page.text
    pairs = [cells for cells in page.cells if len(cells) == 7 and cells[2] == "mmproj-run-f16.gguf"]
    assert {(cells[0], cells[5], cells[6]) for cells in pairs} == {
        ("run-f16.gguf", "pass", "pass"),
        ("run-q8_0.gguf", "pass", "pass"),
    }


def test_both_files_would_be_pushed_with_their_proof_and_their_figures(chain: tuple[Path, dict[str, Done]]) -> None:
    pushed = chain[1]["push"]
    names = {file["path"] for file in pushed.answer["data"]["files"]}
    assert names >= {"run-q8_0.gguf", "mmproj-run-f16.gguf", "skill-train/verify.json", "skill-train/evaluate.json"}
    assert pushed.answer["data"]["verdict"] == "pass"
    assert not [name for name in names if name.endswith((".png", ".jpg", ".jsonl"))]
    assert "verdict_warn" not in {warning["code"] for warning in pushed.answer["warnings"]}


def test_the_same_rows_can_be_planned_for_a_job(chain: tuple[Path, dict[str, Done]], commands: Commands) -> None:
    here, answers = chain
    cloud = _call(commands, here, "plan", "recipe.yaml", "--where", "cloud", "--flavor", "a10g-small").data
    sizes = [path.stat().st_size for path in (here / "data").iterdir()]
    assert cloud["upload"] == {"files": 25, "picture_files": 24, "bytes": sum(sizes)} and len(sizes) == 25
    assert (cloud["blockers"], cloud["recipe_hash"]) == ([], answers["plan"].data["recipe_hash"])
    assert "upload" not in answers["plan"].data


def test_a_text_model_refuses_pictures(chain: tuple[Path, dict[str, Done]], commands: Commands) -> None:
    here, _ = chain
    words: list[Any] = ["plan", "--model", tiny.cached("gemma"), "--data", "data/rows.jsonl"]
    assert _call(commands, here, *words).error == (2, "not_text")
