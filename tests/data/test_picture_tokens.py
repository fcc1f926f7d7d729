"""Datasets of pictures with a model: its tokens for them, rows that max_length cuts, and what the training program
refuses. The models are tiny, with the processors of published ones."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import tiny
import tiny_vision
import training
from one_command import answered
from skill_train.data import scan as dataset
from skill_train.program.events import Refused
from skill_train.program.main import load_data
from skill_train.program.pictures.tokens import Pictures
from skill_train.program.rows import data_fingerprint, picture_folder
from skill_train.program.tokenizer import load_tokenizer
from skill_train.recipe.fields import Recipe

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = tmp_path / "data"
    data.mkdir()
    for name, size in (("a.png", (140, 140)), ("b.png", (280, 140))):
        Image.new("RGB", size, "red").save(data / name)
    (data / "text.png").write_text("no picture")
    monkeypatch.chdir(data)
    return data


def _asks(image: Any, question: str = "What is it?") -> dict[str, Any]:
    return {"images": image, "question": question, "answer": "A cat."}


ROWS = [_asks(["a.png"]), _asks(["b.png"]), _asks(["a.png", "b.png"]), _asks(None)]


def test_the_tokens_of_pictures_are_counted(folder: Path) -> None:
    """By hand: a token of Qwen2-VL is a square of 28 pixels: 140 x 140 are 5 x 5, and 280 x 140 are 10 x 5."""
    training.write_data(folder, ROWS)
    code, answer = answered("data", "rows.jsonl", "--model", str(tiny_vision.cached("qwen2-vl")))
    pictures, tokens = answer["data"]["pictures"], answer["data"]["tokens"]
    assert code == 0 and tokens["counted"], answer
    assert (pictures["longest_tokens"], pictures["mean_tokens"]) == (75, (25 + 50 + 75 + 0) / 4)
    assert tokens["longest"] > 75 and "needs_vision_model" not in json.dumps(answer["warnings"])
    assert "<|image_pad|>×25" in answer["data"]["example"] and "⟦A cat." in answer["data"]["example"]
    assert answer["next"] == [f"skill-train plan --data rows.jsonl --model {tiny_vision.cached('qwen2-vl')}"]


def test_a_row_that_ends_inside_of_a_picture_is_refused(folder: Path) -> None:
    """By hand: 4 tokens, 25 of the first picture, 2 between them, 50 of the second: the last is the 81st."""
    training.write_data(folder, ROWS)
    words = ("--model", str(tiny_vision.cached("qwen2-vl")), "--max-length", "80")
    code, answer = answered("data", "rows.jsonl", *words)
    assert code == 2 and answer["data"]["problems"]["picture_cut"]["lines"] == [3], answer
    code, answer = answered("data", "rows.jsonl", *words, "--fix", "fixed.jsonl")
    assert (code, answer["data"]["fix"]["left_out"]) == (0, {"picture_cut": 1})
    code, answer = answered("data", "fixed.jsonl", *words)
    assert code == 0 and answer["data"]["problems"]["picture_cut"]["rows"] == 0
    code, answer = answered("data", "rows.jsonl", *words[:3], "81")
    problems = answer["data"]["problems"]
    assert code == 2 and (problems["fully_masked"]["lines"], problems["picture_cut"]["rows"]) == ([3], 0)


@pytest.mark.parametrize("kind", ["gemma3", "smolvlm"])
def test_other_families_count_too(folder: Path, kind: str) -> None:
    training.write_data(folder, ROWS)
    code, answer = answered("data", "rows.jsonl", "--model", str(tiny_vision.cached(kind)))
    assert code == 0 and answer["data"]["pictures"]["longest_tokens"] > 0, answer


def test_a_text_model_refuses_pictures_and_a_family_that_is_not_trained_too(folder: Path, tmp_path: Path) -> None:
    training.write_data(folder, ROWS)
    other = tmp_path / "other"
    other.mkdir()
    for path in tiny_vision.cached("qwen2-vl").iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"model_type": "another_vl"}))
    for model in (tiny.cached("gemma"), other):
        code, answer = answered("data", "rows.jsonl", "--model", str(model))
        assert code == 2 and "only text is trained" in answer["error"]["message"], answer


def test_a_vision_model_trains_on_text_too(folder: Path) -> None:
    training.write_data(folder, [{"question": "What is it?", "answer": "A cat."}])
    code, answer = answered("data", "rows.jsonl", "--model", str(tiny_vision.cached("qwen2-vl")))
    assert code == 0 and answer["data"]["tokens"]["counted"] and "pictures" not in answer["data"], answer


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (_asks("x.png"), "x.png does not exist"),
        (_asks("../data/../out.png"), "out.png lies outside"),
        (_asks("https://e.org/a.png"), "is an address"),
        (_asks("text.png"), "text.png is not a picture"),
        (_asks(["a.png"], "<image><image>?"), "more places for pictures than pictures"),
        (_asks(["a.png", "b.png"], "<image>?"), "more pictures than places"),
        (_asks(["b.png", "b.png"]), "max_length ends inside of a picture"),
    ],
)
def test_the_training_program_refuses_the_row(folder: Path, row: dict[str, Any], words: str) -> None:
    """By its line, before the model is loaded."""
    with pytest.raises(Refused) as caught:
        _loaded(folder, [*ROWS[:1] * 24, row])
    message = caught.value.error["message"]
    assert f"line 25 of {folder / 'rows.jsonl'}: " in message and words in message
    assert {path.name for path in folder.iterdir()} == {"a.png", "b.png", "rows.jsonl", "text.png"}


def test_the_training_program_loads_what_data_takes(folder: Path) -> None:
    """Rows that share a picture are held out together, or trained together."""
    for number in range(40):
        Image.new("RGB", (140, 140), (number, 0, 0)).save(folder / f"{number}.png")
    rows = [_asks([f"{number % 40}.png"], f"Question {number}?") for number in range(80)]
    data = _loaded(folder, rows)
    held_out, trained = ({digest for row in data[part] for digest in row["image_sha256"]} for part in PARTS)
    assert len(data["held_out"]) >= 2 and not held_out & trained and len(held_out | trained) == 40


PARTS = ("held_out", "train")


@cache
def _tokenizer(model: str) -> Any:
    return load_tokenizer(model, None)


def _loaded(folder: Path, rows: list[dict[str, Any]]) -> Any:
    training.write_data(folder, ROWS[:1])
    facts = dataset.scan(Recipe(data="rows.jsonl"), pictures=True)
    path = training.write_data(folder, rows)
    model = str(tiny_vision.cached("qwen2-vl"))
    recipe: Any = {
        "model": model, "revision": None, "data": str(path), "data_revision": None, "data_config": None,
        "split": "train", "format": facts.format, "columns": facts.columns, "loss_on": "assistant", "max_length": 100,
        "max_steps": 2, "effective_batch_size": 2, "held_out_fraction": 0.1, "skip_untrained_rows": False, "seed": 0,
        "images": True, "lora_parts": ["language"], "min_pixels": None, "max_pixels": None,
    }  # fmt: skip
    tokenizer = _tokenizer(model)
    return load_data(recipe, tokenizer, None, Pictures(recipe, tokenizer, picture_folder(str(path))))


def test_the_fingerprint_covers_the_pictures_that_rows_name(tmp_path: Path) -> None:
    """By hand: SHA-256 of the digest of the rows, a space, and the digest over the digests of both files."""
    import hashlib

    rows = []
    for number, colour in enumerate(("red", "blue")):
        Image.new("RGB", (30, 20), colour).save(tmp_path / f"{number}.png")
        messages = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": colour}]
        rows.append({"images": [f"{number}.png"], "messages": messages})
    path = training.write_data(tmp_path, rows)
    recipe = Recipe(model="m", data=str(path))

    def expected() -> str:
        files = b"".join(hashlib.sha256((tmp_path / f"{n}.png").read_bytes()).digest() for n in range(2))
        words = f"{hashlib.sha256(path.read_bytes()).hexdigest()} {hashlib.sha256(files).hexdigest()}"
        return hashlib.sha256(words.encode()).hexdigest()

    resolved: Any = {"images": True, "columns": {"messages": "messages", "images": "images"}, "split": "train"}
    before = dataset.scan(recipe, pictures=True).fingerprint
    assert before == expected() == data_fingerprint(path, resolved)
    Image.new("RGB", (30, 20), "green").save(tmp_path / "1.png")
    assert dataset.scan(recipe, pictures=True).fingerprint == expected() == data_fingerprint(path, resolved) != before


@pytest.mark.parametrize("command", ["data", "plan"])
def test_without_pillow_the_package_is_named(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    Image.new("RGB", (30, 20), "red").save(tmp_path / "0.png")
    messages = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "red"}]
    training.write_data(tmp_path, [{"images": ["0.png"], "messages": messages}])
    monkeypatch.setitem(sys.modules, "PIL", None)
    words = {"data": ["data", "rows.jsonl"], "plan": ["plan", "--data", "rows.jsonl", "--model"]}[command]
    if command == "plan":
        words.append(str(tiny_vision.cached("gemma3")))
    code, answer = answered(*words)
    error = answer["error"]
    assert (code, error["code"]) == (7, "missing_package") and "skill-train[vision]" in error["hint"]
