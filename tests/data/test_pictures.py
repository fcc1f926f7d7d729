"""Pictures, sounds and films are named and refused, because this version would train on their file names or on nothing.

Each row is what a published kind of dataset looks like.
"""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import pytest

import tiny
import training
from command_child import Commands, Done
from skill_train.program.events import Refused
from skill_train.program.main import load_data
from skill_train.program.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow

ASK, BOT = {"role": "user", "content": "What is this?"}, {"role": "assistant", "content": "A cat on a mat."}
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + bytes(60)).decode()
JPEG = base64.b64encode(b"\xff\xd8\xff\xe0\x00\x10JFIF\x00" + bytes(60)).decode()
PICTURED = {
    "captions": {"image": "photos/0.png", "caption": "A cat."},
    "another name": {"Foto": "IMG_0001.JPG", "Text": "Eine Katze."},
    "imagefolder": {"file_name": "0001.webp", "text": "A cat on a mat."},
    "address": {"url": "https://example.org/a%20b.jpeg?size=2", "question": "What?", "answer": "A cat."},
    "spaces": {"picture": "photos/holiday 2.heic", "prompt": "What?", "completion": "A cat."},
    "data": {"scan": "data:image/png;base64,iVBORw0KGgo=", "instruction": "Describe.", "output": "A cat."},
    "feature": {"image": {"bytes": None, "path": "a.png"}, "messages": [ASK, BOT]},
    "list": {"images": ["a.png", "b.png"], "messages": [ASK, BOT]},
    "sound": {"audio": "clips/7.flac", "text": "Good morning."},
    "film": {"video": "clips/7.mp4", "messages": [ASK, BOT]},
    "llava": {"conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}]},
    "mark of qwen": {"prompt": "<|vision_start|><|image_pad|><|vision_end|>What?", "completion": "A cat."},
    "mark of gemma": {"text": "<start_of_image> is a cat."},
    "mark at the end": {"messages": [{"role": "user", "content": "What is this? <image>"}, BOT]},
    "part": {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}, BOT]},
    "part of an api": {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, BOT]},
    "question": {"question": "photos/0.png", "answer": "A cat."},
    "address with parameters": {"messages": [{"role": "user", "content": "https://e.org/a.jpg?width=300&v=2"}, BOT]},
    "base64": {"prompt": PNG, "completion": "A cat."},
    "base64 of a jpeg": {"messages": [{"role": "user", "content": JPEG}, BOT]},
    "hexadecimal": {"prompt": base64.b64decode(PNG).hex(), "completion": "A cat."},
    "a column of a database": {"prompt": "\\x" + base64.b64decode(JPEG).hex(), "completion": "A cat."},
    "a kind among the parameters": {"prompt": "https://e.org/img/7?w=300&format=jpg", "completion": "A cat."},
    "rare endings": {"messages": [{"role": "user", "content": "scans/7.jp2"}, BOT]},
    "a sound with a rare ending": {"prompt": "clips/7.sph", "completion": "Good morning."},
    "pages of a document": {"question": "papers/7.pdf", "answer": "It is about cats."},
    "numbered marks": {"messages": [{"role": "user", "content": "Compare <image_1> and <image_2>."}, BOT]},
    "a mark of another case": {"prompt": "Listen: <|AUDIO|> What is said?", "completion": "Good morning."},
    "a mark of internvl": {"prompt": "<img><IMG_CONTEXT><IMG_CONTEXT></img>What?", "completion": "A cat."},
    "a mark of qwen-vl": {"prompt": "Picture 1: <img>cats/7</img>What?", "completion": "A cat."},
    "other brackets": {"prompt": "[image]\nWhat is this?", "completion": "A cat."},
    "a place in a prompt": {"instruction": "What is this? {image}", "output": "A cat."},
    "vqa": {"image_id": 262148, "question": "What is this?", "answer": "A cat."},
    "names without an ending": {"imageId": "COCO_val2014_000000262148", "question": "What?", "answer": "A cat."},
    "pixels": {"image": [[0, 0, 0], [255, 255, 255]], "text": "A cat."},
    "an address in an object": {"图片": {"url": "https://e.org/7"}, "messages": [ASK, BOT]},
    "another language": {"изображение": "кот-7", "question": "Что это?", "answer": "Кот."},
    "within a sentence": {"question": "What is in <image>?", "answer": "A cat."},
    "a path under another name": {"foto_pfad": "bilder/7", "titel": "Eine Katze."},
    "made": {"prompt": "Draw a cat.", "completion": "out/0.png"},
}  # fmt: skip
TEXT = {
    "named in a sentence": {"prompt": "Where is the logo?", "completion": "It is in assets/logo.png."},
    "a name as the answer": {"question": "Which file is the logo?", "answer": "logo.png"},
    "a path in a question": {"prompt": "Open photos/a.png and look.", "completion": "Done."},
    "html": {"prompt": "A film in HTML?", "completion": 'Write <video src="a.mp4"></video> there.'},
    "a tag of another kind": {"prompt": "How does SVG embed one?", "completion": "By the <image> element."},
    "a quoted tag": {"prompt": "Which tag?", "completion": "Take `<image>` for that."},
    "a title of a film": {"film_title": "Face/Off is a film", "messages": [ASK, BOT]},
    "a tag alone": {"prompt": "What closes it?", "completion": "<video>\n</video>"},
    "base64 of a text": {
        "prompt": base64.b64encode(b"A long text of a cat on a mat.").decode(),
        "completion": "?",
    },
    "a hash": {"prompt": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08", "completion": "of test"},
    "a count": {"num_images": 3, "has_video": True, "messages": [ASK, BOT]},
    "a column without values": {"image": None, "images": [], "text": "A cat on a mat."},
    "a sentence on a picture": {"picture": "A cat sits on a mat", "messages": [ASK, BOT]},
    "a film in words": {"film": "Alien", "video_game": "Tetris", "messages": [ASK, BOT]},
    "a list of code": {"prompt": "[1, 2, 3]", "completion": "{'image': 3}"},
    "hexadecimal text": {"prompt": b"A long text of a cat on a mat.".hex(), "completion": "?"},
    "an id": {"id": "a7", "source": "manual", "messages": [ASK, BOT]},
}


def _run(commands: Commands, folder: Path, *words: object) -> Done:
    return commands.run(folder, dict(os.environ), *words, "--format", "json")


ALONE = (
    "captions",
    "another name",
    "a path under another name",
    "made",
)  # without its picture such a row is another one, or none
LATER = [name for name in PICTURED if name not in ALONE]


@pytest.mark.parametrize("name", PICTURED)
def test_it_is_refused_by_name(commands: Commands, tmp_path: Path, name: str) -> None:
    training.write_data(tmp_path, [PICTURED[name]] * 24)
    for command in (_data(), *_others()):
        _require_refusal(_run(commands, tmp_path, *command))
    _run(commands, tmp_path, *_data(), "--fix", "fixed.jsonl")
    assert not (tmp_path / "fixed.jsonl").exists()


@pytest.mark.parametrize("name", LATER)
def test_a_later_row_is_refused_by_its_line(commands: Commands, tmp_path: Path, name: str) -> None:
    training.write_data(tmp_path, [*[_like(PICTURED[name])] * 24, PICTURED[name]])
    for command in (_data(), *_others()):
        done = _run(commands, tmp_path, *command)
        _require_refusal(done)
        assert "line 25" in done.answer["error"]["message"]
    done = _run(commands, tmp_path, *_data(), "--fix", "fixed.jsonl")
    assert done.answer["data"]["fix"]["left_out"] == {"not_text": 1, "duplicate": 23}


def _require_refusal(done: Done) -> None:
    assert done.code == 2, done.stdout
    assert "audio or video" in done.answer["error"]["message"], done.stdout


def _data() -> list[str]:
    """Without a model of text, `data` reads pictures."""
    return ["data", "rows.jsonl", "--model", str(tiny.cached("gemma"))]


def _others() -> list[list[str]]:
    model = str(tiny.cached("gemma"))
    return [[command, "--model", model, "--data", "rows.jsonl"] for command in ("plan", "local")]


def _like(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the same format without a picture."""
    kinds = {
        "messages": {"messages": [ASK, BOT]},
        "conversations": {"conversations": [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "A cat."}]},
        "prompt": {"prompt": "What?", "completion": "A cat."},
        "question": {"question": "What?", "answer": "A cat."},
        "instruction": {"instruction": "Describe.", "output": "A cat."},
        "text": {"text": "A cat."},
    }
    return next(kinds[name] for name in kinds if name in row)


@pytest.mark.parametrize("picture", [{"bytes": b"\x89PNG\r\n\x1a\n", "path": None}, {"bytes": None, "path": "7.png"}])
def test_pictures_in_parquet(commands: Commands, tmp_path: Path, picture: dict[str, Any]) -> None:
    """As datasets' Image feature writes them; a field that is null everywhere is not there when it is read."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"image": [picture] * 24, "text": [f"A cat {number}." for number in range(24)]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    _require_refusal(_run(commands, tmp_path, "data", "rows.parquet", "--model", tiny.cached("gemma")))
    _require_refusal(_run(commands, tmp_path, "plan", "--model", tiny.cached("gemma"), "--data", "rows.parquet"))


@pytest.mark.parametrize("name", TEXT)
def test_text_that_names_a_file_is_text(commands: Commands, tmp_path: Path, name: str) -> None:
    training.write_data(tmp_path, [TEXT[name]] * 24)
    for command in (["data", "rows.jsonl"], _others()[0]):
        done = _run(commands, tmp_path, *command)
        assert done.code == 0, (command, done.stdout)


@pytest.mark.parametrize("name", ["feature", "list", "address", "spaces", "data", "film"])
def test_a_recipe_that_names_the_columns_trains_on_the_text(commands: Commands, tmp_path: Path, name: str) -> None:
    """As the hint says it."""
    training.write_data(tmp_path, [PICTURED[name]] * 24)
    hint = _run(commands, tmp_path, *_others()[0]).answer["error"]["hint"]
    mapping = hint.partition("alone: ")[2].replace(", columns", "\ncolumns")
    (tmp_path / "recipe.yaml").write_text(f"model: {tiny.cached('gemma')}\ndata: rows.jsonl\n{mapping}\n")
    done = _run(commands, tmp_path, "plan", "recipe.yaml")
    assert done.code == 0, done.stdout
    assert "pictures" in [warning["code"] for warning in done.answer["warnings"]]


@pytest.mark.parametrize("model", [[], ["--model", str(tiny.cached("gemma"))]], ids=["no model", "a model of text"])
def test_a_column_beside_right_rows_has_a_way_on(commands: Commands, tmp_path: Path, model: list[str]) -> None:
    """Such as the address that a text is from. The lines of the hint train the text."""
    row = {"url": "https://e.org/a.jpg", "question": "What?", "answer": "A cat."}
    training.write_data(tmp_path, [row] * 24)
    hint = _run(commands, tmp_path, "data", "rows.jsonl", *model).answer["error"]["hint"]
    assert hint.endswith("the text alone: format: question_answer, columns: {answer: answer, question: question}")
    mapping = hint.partition("alone: ")[2].replace(", columns", "\ncolumns")
    (tmp_path / "recipe.yaml").write_text(f"model: {tiny.cached('gemma')}\ndata: rows.jsonl\n{mapping}\n")
    assert _run(commands, tmp_path, "data", "--recipe", "recipe.yaml").code == 0


def test_a_job_refuses_them_too(tmp_path: Path) -> None:
    """The training program runs alone there."""
    data = training.write_data(tmp_path, [TEXT["named in a sentence"]] * 3)
    recipe = training.resolved(tiny.cached("gemma"), data, max_steps=1)
    training.write_data(tmp_path, [TEXT["named in a sentence"], {"prompt": "<image>\nWhat?", "completion": "A cat."}])
    with pytest.raises(Refused) as caught:
        load_data(recipe, load_tokenizer(recipe["model"], recipe["revision"]))
    assert caught.value.error["code"] == "not_text" and "line 2" in caught.value.error["message"]
