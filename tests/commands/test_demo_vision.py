"""The demo of pictures as a user runs it, offline; and that its model and pictures are what the script makes."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from by_path import load
from skill_train.core import resources
from skill_train.recipe import fields as recipes

pytest.importorskip("PIL")

from PIL import Image

DEMO = resources.demo("vision")
MAKER = Path(__file__).parents[2] / "scripts" / "make_demo_vision.py"
DEAD = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")


# --- The chain ---


@pytest.fixture(scope="module")
def made(converter: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of the run, and what the command answered."""
    folder = tmp_path_factory.mktemp("demo")
    command = [str(Path(sys.executable).with_name("skill-train")), "demo", "--method", "vision", "--format", "json"]
    done = subprocess.run(command, cwd=folder, env=os.environ | DEAD, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "demo-vision", json.loads(done.stdout)["data"]


@pytest.mark.slow
def test_every_stage_after_training_sees_what_the_base_does_not_say(made: tuple[Path, dict[str, Any]]) -> None:
    stages = {row["stage"]: row for row in made[1]["stages"]}
    assert list(stages) == ["base", "adapter", "merged", "f16", "q4_k_m"]
    assert stages["base"]["exact_match"] <= 0.1
    after = [row for name, row in stages.items() if name != "base"]
    assert all(row["exact_match"] >= 0.9 and row["rows"] == 40 and row["verdict"] != "fail" for row in after)
    assert 0 <= stages["f16"]["mean_kl"] < stages["q4_k_m"]["mean_kl"] < 0.1
    assert stages["f16"]["verdict"] == stages["q4_k_m"]["verdict"] == "pass"


@pytest.mark.slow
def test_llama_cpp_sees_the_pictures_as_they_are(made: tuple[Path, dict[str, Any]]) -> None:
    """No pixel differs, and no text around a picture, when llama.cpp prepares them; and the answers need the pixels."""
    checks = json.loads((made[0] / "verify.json").read_text())["checks"]
    used = [check["figures"] for check in checks if check["name"] == "pictures_as_used"]
    assert [(one["differing_pixels"], one["other_sizes"], one["texts_differ"]) for one in used] == [(0, 0, 0)] * 2
    assert {check["name"] for check in checks if check["verdict"] != "pass"} == set()
    same = [check["figures"] for check in checks if check["name"] == "pictures"]
    assert all(one["mean_kl"] < one["mean_kl_blank"] / 100 for one in same)
    trained = {check["name"]: check["verdict"] for check in json.loads((made[0] / "train.json").read_text())["checks"]}
    assert trained["pictures_are_read"] == trained["pictures_help"] == "pass"


@pytest.mark.slow
def test_no_matrix_of_the_quantized_file_fell_back_to_another_type(made: tuple[Path, dict[str, Any]]) -> None:
    outputs = json.loads((made[0] / "quantize.json").read_text())["outputs"]
    assert [file.get("fallbacks", []) for file in outputs.values()] == [[]]


# --- What is embedded ---


@pytest.fixture(scope="module")
def maker() -> Any:
    load(MAKER.with_name("make_demo.py"), "make_demo")  # it imports from it
    return load(MAKER, "make_demo_vision")


def _rows(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(folder / "data.parquet").to_pylist()
    return rows


def _pixels(row: dict[str, Any]) -> bytes:
    [image] = row["images"]
    with Image.open(io.BytesIO(image["bytes"])) as opened:
        assert (opened.format, opened.mode) == ("PNG", "RGB")
        assert opened.size[0] % 28 == opened.size[1] % 28 == 0  # so nobody resizes it
        return opened.tobytes()


def test_the_dataset_is_what_the_script_writes(maker: Any, tmp_path: Path) -> None:
    """Compared by pixels: another version of Pillow may pack them in another way."""
    maker.write_dataset(tmp_path / "data.parquet", seed=0)
    written, kept = ([(_pixels(row), row["messages"]) for row in _rows(folder)] for folder in (tmp_path, DEMO))
    assert written == kept


def test_no_picture_is_there_twice_and_no_answer_is_likely() -> None:
    rows = _rows(DEMO)
    assert len({hashlib.sha256(_pixels(row)).digest() for row in rows}) == len(rows) == 400
    answers = [row["messages"][-1]["content"] for row in rows]
    assert len(set(answers)) == 36
    assert max(answers.count(answer) for answer in answers) < 0.1 * len(rows)
    assert len({row["messages"][0]["content"] for row in rows}) == 1  # the words tell nothing


@pytest.mark.slow
def test_the_tokenizer_is_what_the_script_writes(maker: Any, tmp_path: Path) -> None:
    maker.write_tokenizer(tmp_path, seed=0)
    maker.write_processor(tmp_path)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert written == {name: (DEMO / "model" / name).read_bytes() for name in written}
    assert len(written) == 4


def test_it_is_small_enough_to_ship() -> None:
    assert sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file()) < 1_300_000


def test_the_recipe_loads_and_names_what_is_there() -> None:
    recipe = recipes.load(DEMO / "recipe.yaml")
    assert Path(recipe.model) == DEMO / "model" and Path(recipe.data) == DEMO / "data.parquet"
    assert recipe.max_steps is not None and recipe.max_steps <= 150
