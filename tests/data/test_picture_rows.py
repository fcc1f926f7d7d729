"""Datasets of pictures as `skill-train data` and the planner meet them, without a model: bad ones are refused with the
line and the file, good ones are the same rows from every kind of source."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

import tiny
import tiny_vision
from one_command import answered
from peak_memory import peak_mb
from picture_bytes import encoded, header
from skill_train.core.errors import UsageError
from skill_train.data import scan as dataset
from skill_train.data.errors import ALL_ALIKE
from skill_train.data.row_pictures import RowPictures, problem_of
from skill_train.facts import FirstPictures
from skill_train.program.events import Refused
from skill_train.program.examples import to_example
from skill_train.program.pictures.decode import picture_digest
from skill_train.program.pictures.in_rows import lift_pictures
from skill_train.program.rows import data_fingerprint, iter_rows, picture_folder
from skill_train.recipe.fields import Recipe, from_dict

RED, BLUE = (255, 0, 0), (0, 0, 255)


def _picture(colour: Any = RED, mode: str = "RGB", size: tuple[int, int] = (40, 30)) -> Image.Image:
    return Image.new(mode, size, colour)


def _animated(kind: str) -> bytes:
    return encoded(_picture(), kind, save_all=True, append_images=[_picture(BLUE)])


FILES = {
    "a.png": encoded(_picture()),
    "b.png": encoded(_picture(BLUE)),
    "empty.png": b"",
    "text.png": b"I am a text",
    "postscript.png": encoded(_picture(), "EPS"),
    "cut.png": encoded(Image.effect_noise((64, 64), 50))[:900],
    "cut.jpg": encoded(Image.effect_noise((64, 64), 50), "JPEG")[:900],
    "bomb.png": header(60_000, 60_000),
    "map.png": header(12_000, 12_000),
    "line.png": header(2010, 10),
    "film.gif": _animated("GIF"),
    "film.webp": _animated("WEBP"),
    "pages.tiff": _animated("TIFF"),
    "numbers.tiff": encoded(_picture(70_000, "I"), "TIFF"),
    "real.tiff": encoded(_picture(0.5, "F"), "TIFF"),
    "drawing.svg": b'<svg xmlns="http://www.w3.org/2000/svg" width="10" height="10"></svg>',
    "photo.heic": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100),
    "pointer.png": b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n",
    "page.jpg": b"<!DOCTYPE html><html>404</html>",
    "none.png": header(0, 0),
    "one.gif": encoded(_picture(), "GIF"),
    "one.tiff": encoded(_picture(), "TIFF"),
    "grey16.png": encoded(Image.new("I;16", (40, 30), 30_000)),
    "dot.png": encoded(_picture(BLUE)),
}
URI = "data:image/png;base64," + base64.b64encode(FILES["a.png"]).decode()


def _asks(image: Any, question: str = "What is it?") -> dict[str, Any]:
    return {"image": image, "question": question, "answer": "A cat."}


def _talks(content: Any, images: Any = None, answer: Any = "A cat.") -> dict[str, Any]:
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return {"images": images, "messages": turns}


# A row, the name of its problem, and what the message about it says: with the file, where a file is bad.
BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "no such file": (_asks("x.png"), "missing_picture", "x.png does not exist"),
    "a folder": (_asks("folder.png"), "missing_picture", "folder.png does not exist"),
    "above the folder": (_asks("../out.png"), "picture_elsewhere", "../out.png lies outside the folder"),
    "an absolute path": (_asks("/etc/passwd.png"), "picture_elsewhere", "/etc/passwd.png lies outside the folder"),
    "a link to itself": (_asks("loop.png"), "missing_picture", "loop.png cannot be read"),
    "a pipe": (_asks("pipe.png"), "missing_picture", "pipe.png does not exist"),
    "a path of Windows": (_asks("folder\\a.png"), "missing_picture", "folder\\a.png does not exist"),
    "no name": (_asks(["a.png", ""]), "bad_picture", "the name of a picture is empty"),
    "a blank": (_asks(" "), "bad_picture", "the name of a picture is empty"),
    "base64 without its head": (_asks("AAAA" * 200_000), "missing_picture", "AAAA cannot be read"),
    "another key": (_asks({"url": "a.png"}), "bad_picture", "a picture in the row has neither bytes nor a path"),
    "base64 for bytes": (_asks({"bytes": "iVBORw0"}), "bad_picture", "has neither bytes nor a path"),
    "null bytes and no path": (_asks({"bytes": None, "path": None}), "bad_picture", "has neither bytes nor a path"),
    "a null in a list": (_asks(["a.png", None]), "bad_picture", "something else in place of a picture"),
    "a list in a list": (_asks([["a.png"]]), "bad_picture", "something else in place of a picture"),
    "a drawing": (_asks("drawing.svg"), "bad_picture", "drawing.svg is not a picture"),
    "HEIC": (_asks("photo.heic"), "bad_picture", "photo.heic is not a picture"),
    "a pointer of Git LFS": (_asks("pointer.png"), "bad_picture", "pointer.png is not a picture"),
    "a page for a picture": (_asks("page.jpg"), "bad_picture", "page.jpg is not a picture"),
    "no size": (_asks("none.png"), "bad_picture", "none.png is not a picture"),
    "data of another kind": (_asks("data:text/plain;base64,aGVsbG8="), "bad_picture", "is not a picture"),
    "data without base64": (_asks("data:image/png,abc"), "bad_picture", "a data URI is not base64"),
    "an address in a part": (
        _talks([{"type": "image_url", "image_url": {"url": "https://e.org/a.png"}}, {"type": "text", "text": "?"}]),
        "picture_elsewhere",
        "https://e.org/a.png is an address",
    ),
    "a part in an answer": (
        _talks("?", None, [{"type": "image", "image": "a.png"}]),
        "picture_places",
        "an answer holds a picture",
    ),
    "a part beside its column": (
        _talks([{"type": "image", "image": "b.png"}, {"type": "text", "text": "?"}], ["a.png"]),
        "picture_places",
        "pictures do not stand in its messages",
    ),
    "a link out of it": (_asks("link.png"), "picture_elsewhere", "link.png lies outside the folder"),
    "an address": (_asks("https://e.org/a.png"), "picture_elsewhere", "https://e.org/a.png is an address"),
    "an empty file": (_asks("empty.png"), "bad_picture", "empty.png is empty"),
    "a text": (_asks("text.png"), "bad_picture", "text.png is not a picture"),
    "a program": (_asks("postscript.png"), "bad_picture", "postscript.png is not a picture"),
    "half a PNG": (_asks("cut.png"), "bad_picture", "cut.png is broken"),
    "half a JPEG": (_asks("cut.jpg"), "bad_picture", "cut.jpg is broken"),
    "a bomb": (_asks("bomb.png"), "large_picture", "bomb.png has too many pixels"),
    "a map": (_asks("map.png"), "large_picture", "map.png has too many pixels"),
    "a line": (_asks("line.png"), "narrow_picture", "line.png is too narrow"),
    "a film": (_asks("film.gif"), "animated_picture", "film.gif is animated"),
    "a film in WebP": (_asks("film.webp"), "animated_picture", "film.webp is animated"),
    "pages": (_asks("pages.tiff"), "animated_picture", "pages.tiff is animated or has several pages"),
    "32 bits": (_asks("numbers.tiff"), "colour_mode", "numbers.tiff has the colour mode I"),
    "real numbers": (_asks("real.tiff"), "colour_mode", "real.tiff has the colour mode F"),
    "data that is no base64": (_asks("data:image/png;base64,a$c"), "bad_picture", "a data URI is not base64"),
    "data that is cut": (_asks(URI[:82]), "bad_picture", "a picture in the row is broken"),
    "a number": (_asks(["a.png", 7]), "bad_picture", "something else in place of a picture"),
    "pixels": (_asks([[0, 0], [1, 1]]), "bad_picture", "something else in place of a picture"),
    "one place too few": (_asks(["a.png", "b.png"], "<image> What?"), "picture_places", "more pictures than places"),
    "one place too many": (_asks("a.png", "<image><image> What?"), "picture_places", "more places for pictures than"),
    "a place and no picture": (_asks(None, "<image>\nWhat?"), "picture_places", "more places for pictures than"),
    "a picture in the answer": (_talks("?", "a.png", "<image>"), "picture_places", "an answer holds a picture"),
    "a part without its picture": (_talks([{"type": "image"}]), "picture_places", "no picture for it"),
    "a part of sound": (_talks([{"type": "input_audio"}], "a.png"), "picture_places", "neither text nor a picture"),
    "the mark of a picture": (_asks("a.png", "What \ufffc?"), "picture_places", "U+FFFC"),
    "the mark of a model": (_asks("a.png", "[IMG] What?"), "picture_places", "film: [IMG]"),
    "places with numbers": (_asks(["a.png", "b.png"], "<image1> or <image2>?"), "picture_places", "film: <image1>"),
    "no question": ({"image": "a.png", "messages": [{"role": "assistant", "content": "A cat."}]}, "picture_places", ""),
    "an empty answer": (_asks("a.png") | {"answer": ""}, "empty", "answer is empty"),
    "a second column": (_asks("a.png") | {"mask": "b.png"}, "not_text", "'mask' contains an image"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    data = tmp_path / "data"
    (data / "folder.png").mkdir(parents=True)
    for name, content in FILES.items():
        (data / name).write_bytes(content)
    (tmp_path / "out.png").write_bytes(FILES["a.png"])
    (data / "link.png").symlink_to(tmp_path / "out.png")
    (data / "loop.png").symlink_to("loop.png")
    os.mkfifo(data / "pipe.png")
    monkeypatch.chdir(data)
    return data


@pytest.mark.parametrize("name", BAD)
def test_a_bad_picture_is_refused_with_line_and_file(folder: Path, name: str) -> None:
    row, problem, words = BAD[name]
    good = _talks("What?", ["a.png"]) if "messages" in row else _asks("a.png")
    good = {column.replace("images", "image") if "image" in row else column: each for column, each in good.items()}
    _write(folder, [good, {**good, "more": 1}, row])
    before = sorted(folder.rglob("*"))
    code, answer = answered("data", "rows.jsonl")
    count = answer["data"]["problems"][problem]
    assert (code, count["lines"], count["refused"]) == (2, [3], 1), answer
    assert words in count["first"] and "line 3" in answer["error"]["message"]
    assert answer["data"]["pictures"]["count"] == 2 and sorted(folder.rglob("*")) == before
    code, answer = answered("data", "rows.jsonl", "--fix", "fixed.jsonl")
    assert (code, answer["data"]["fix"]["left_out"]) == (0, {problem: 1, "duplicate": 1}), answer
    assert dataset.scan(Recipe(data="fixed.jsonl"), pictures=True).images == 1


@pytest.mark.parametrize("name", BAD)
def test_the_planner_refuses_it_too(folder: Path, name: str) -> None:
    """It looks at headers alone, so pixels that are cut pass."""
    row, _, words = BAD[name]
    _write(folder, [row])
    if name in ("half a PNG", "half a JPEG", "data that is cut"):
        assert dataset.scan(Recipe(data="rows.jsonl"), pictures=True).images == 1
        return
    with pytest.raises(UsageError) as caught:
        dataset.scan(Recipe(data="rows.jsonl"), pictures=True)
    if name != "a second column":
        assert words in caught.value.message
    assert "line 1" in caught.value.message and "rows.jsonl" in caught.value.message


def test_a_long_name_is_shortened(folder: Path) -> None:
    _write(folder, [_asks("AAAA" * 200_000)])
    with pytest.raises(UsageError) as caught:
        dataset.scan(Recipe(data="rows.jsonl"), pictures=True)
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("source", ["one.gif", "one.tiff", "grey16.png", "./a.png", "folder.png/../a.png", URI])
def test_unusual_pictures_are_taken(folder: Path, source: str) -> None:
    _write(folder, [_asks(source), _asks(source, "")])
    assert dataset.scan(Recipe(data="rows.jsonl"), pictures=True).images == 2


def test_two_columns_of_one_name_are_refused(folder: Path) -> None:
    """A row would keep the last of them."""
    import pyarrow.parquet

    (folder / "rows.csv").write_text("image,image,question,answer\na.png,b.png,q,x\n")
    arrays = [pyarrow.array([value]) for value in ("a.png", "b.png", "q", "x")]
    table = pyarrow.table(arrays, names=["image", "image", "question", "answer"])
    pyarrow.parquet.write_table(table, folder / "rows.parquet")
    for name in ("rows.csv", "rows.parquet"):
        with pytest.raises(UsageError, match=f"{name} has 2 columns with the name 'image'") as caught:
            dataset.scan(Recipe(data=name), pictures=True)
        assert caught.value.code == "unreadable_dataset"
    (folder / "rows.csv").write_text("image,question,answer,,\na.png,q,x,,\n")
    assert dataset.scan(Recipe(data="rows.csv"), pictures=True).rows == 1


def test_a_folder_with_two_tables_is_refused(folder: Path) -> None:
    """`datasets` 5.2 refuses two kinds of tables too."""
    row = {"file_name": "a.png", "question": "q", "answer": "x"}
    for name in ("metadata.jsonl", "metadata.csv", "train/metadata.jsonl"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(row) if name.endswith("l") else "file_name,question,answer\na.png,q,x\n")
    code, answer = answered("data", str(folder))
    assert (code, answer["error"]["code"]) == (2, "unreadable_dataset")
    assert "metadata.jsonl, metadata.csv, train/metadata.jsonl" in answer["error"]["expected"]
    with pytest.raises(UsageError, match="several tables of pictures"):
        dataset.scan(Recipe(data=str(folder)), pictures=True)


@pytest.mark.parametrize("place", ["", "train/"])
def test_a_name_in_a_table_needs_no_ending(folder: Path, place: str) -> None:
    """`datasets` 5.2 reads each file that the table names as a picture. Outside a table it is a text."""
    rows = [{"file_name": name, "question": "q", "answer": "x"} for name in ("scan 1", "scan-2")]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    for name in ("scan 1", "scan-2"):
        (folder / place).mkdir(exist_ok=True)
        (folder / place / name).write_bytes(FILES["a.png"])
    (folder / "rows.jsonl").write_text(lines)
    assert dataset.scan(Recipe(data="rows.jsonl"), pictures=True).images == 0
    (folder / place / "metadata.jsonl").write_text(lines)
    assert dataset.scan(Recipe(data=str(folder)), pictures=True).images == 2
    code, answer = answered("data", str(folder))
    assert (code, answer["data"]["pictures"]["count"]) == (0, 2)
    (folder / place / "scan-2").unlink()
    code, answer = answered("data", str(folder))
    assert (code, answer["data"]["problems"]["missing_picture"]["lines"]) == (2, [2])


@pytest.mark.parametrize(
    "row",
    [
        {"file_name": "report 2020", "text": "What the report says of bees."},
        {"file_name": "notes", "text": "What the notes say of bees."},
        {"file_name": "a.txt", "text": "What the file says of bees."},
        {"file_name": "pipe", "text": "What the pipe says of bees."},
    ],
)
def test_a_table_of_texts_stays_one(folder: Path, row: dict[str, str]) -> None:
    (folder / "notes").write_text("bees\n")
    os.mkfifo(folder / "pipe")
    (folder / "metadata.jsonl").write_text(json.dumps(row) + "\n")
    for pictures in (False, True):
        assert not dataset.scan(Recipe(data=str(folder)), pictures=pictures).images


def test_other_names_beside_the_picture_tell_which_it_is(folder: Path) -> None:
    more = {"original_file_name": "IMG 2031", "source_file_name": "b.png"}
    row = {"file_name": "a.png", "question": "q", "answer": "x"} | more
    (folder / "metadata.jsonl").write_text(json.dumps(row) + "\n")
    facts = dataset.scan(Recipe(data=str(folder)), pictures=True)
    assert (facts.images, facts.columns["images"]) == (1, "file_name")


def test_the_fingerprint_of_a_folder_of_pictures_stays(folder: Path) -> None:
    """That of version 0.1.0 before 2026-11-27: plans of it are taken, and runs go on."""
    row = {"file_name": "a.png", "question": "q", "answer": "x"}
    digests = ("95f96d74e4c7eb1f3373c4e71d89092fcbed7e52717fba085e57cfdbe28bcf03",)
    digests += ("bfa63ce83bfdd1683470fa99f08c2bd2b11f7ca1469e31aba7183b102c8ca9aa",)
    columns = {"images": "file_name", "question": "question", "answer": "answer"}
    for place, digest in zip(("", "train/"), digests, strict=True):
        (folder / place).mkdir(exist_ok=True)
        (folder / place / "a.png").write_bytes(b"\x89PNG\r\n, of which only the digest counts")
        (folder / place / "metadata.jsonl").write_text(json.dumps(row) + "\n")
        assert data_fingerprint(folder, {"split": "train", "columns": columns, "images": True}) == digest
        (folder / place / "metadata.jsonl").unlink()


@pytest.mark.parametrize("images", ["file_name", "image"])
def test_pictures_in_two_columns_of_a_table_are_refused(folder: Path, images: str) -> None:
    """`file_name` becomes `image` in `datasets`, which the table has already: one of both would be read."""
    row = {"file_name": "a.png", "image": "b.png", "question": "q", "answer": "x"}
    (folder / "metadata.jsonl").write_text(json.dumps(row) + "\n")
    named = {"format": "question_answer", "columns": {"images": images, "question": "question", "answer": "answer"}}
    for recipe in (Recipe(data=str(folder)), Recipe(data=str(folder), **named)):
        with pytest.raises(UsageError, match="has the columns file_name and image") as caught:
            dataset.scan(recipe, pictures=True)
        assert caught.value.code == "unreadable_dataset"
    code, answer = answered("data", str(folder))
    assert (code, answer["error"]["code"]) == (2, "unreadable_dataset")
    (folder / "metadata.jsonl").write_text(json.dumps(row | {"image": "a.png"}) + "\n")
    assert dataset.scan(Recipe(data=str(folder)), pictures=True).images == 1


def test_nothing_is_written_where_no_row_is_good(folder: Path) -> None:
    _write(folder, [BAD[name][0] for name in ("no such file", "half a PNG", "a bomb")])
    code, answer = answered("data", "rows.jsonl", "--fix", "fixed.jsonl")
    assert code == 2 and answer["error"]["code"] == "bad_row"
    assert answer["error"]["got"] == "1 bad_picture, 1 large_picture, 1 missing_picture"
    assert not (folder / "fixed.jsonl").exists()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"image": "a.png", "caption": "A cat on a mat."}, "no columns hold a question"),
        ({"file_name": "a.png", "text": "A cat on a mat."}, "only one column of pictures is read beside turns"),
        ({"text": "<image> A cat on a mat."}, "more places for pictures"),
    ],
)
def test_captions_ask_nothing(folder: Path, row: dict[str, Any], words: str) -> None:
    _write(folder, [row] * 3)
    code, answer = answered("data", "rows.jsonl")
    assert code == 2 and words in json.dumps(answer), answer
    with pytest.raises(UsageError):
        dataset.scan(Recipe(data="rows.jsonl"), pictures=True)


def test_a_second_column_of_pictures_has_a_way_on(folder: Path) -> None:
    """The lines of the hint keep the first one."""
    _write(folder, [_asks("a.png") | {"mask": "b.png"}] * 2)
    code, answer = answered("data", "rows.jsonl")
    mapping = answer["error"]["hint"].partition("names the columns trains on them alone: ")[2]
    (folder / "map.yaml").write_text("data: rows.jsonl\n" + mapping.replace(", columns", "\ncolumns"))
    assert (code, answered("data", "--recipe", "map.yaml")[1]["data"]["pictures"]["count"]) == (2, 2)


def test_a_text_model_refuses_pictures_as_before(folder: Path) -> None:
    _write(folder, [_asks("a.png")])
    with pytest.raises(UsageError, match="only text is trained") as caught:
        dataset.scan(Recipe(data="rows.jsonl"))
    assert caught.value.code == "not_text"


# --- The same rows from every kind of source ---

SHOWN = [("a.png", "What is it?"), ("b.png", "And that?"), ("a.png", "Again?")]


def _jsonl(folder: Path) -> str:
    return _write(folder, [_asks(name, question) for name, question in SHOWN])


def _json(folder: Path) -> str:
    (folder / "rows.json").write_text(json.dumps([_asks(name, question) for name, question in SHOWN]))
    return "rows.json"


def _csv(folder: Path) -> str:
    lines = "".join(f"{name},{question},A cat.\n" for name, question in SHOWN)
    (folder / "rows.csv").write_text("image,question,answer\n" + lines)
    return "rows.csv"


def _uris(folder: Path) -> str:
    uris = {name: "data:image/png;base64," + base64.b64encode(FILES[name]).decode() for name, _ in SHOWN}
    return _write(folder, [_asks([uris[name]], question) for name, question in SHOWN])


def _parts(folder: Path) -> str:
    return _write(
        folder,
        [_talks([{"type": "image", "image": name}, {"type": "text", "text": question}]) for name, question in SHOWN],
    )


def _openai(folder: Path) -> str:
    uri = "data:image/png;base64," + base64.b64encode(FILES["b.png"]).decode()
    shown = [(uri if name == "b.png" else name, question) for name, question in SHOWN]
    return _write(
        folder,
        [
            _talks([{"type": "image_url", "image_url": {"url": source}}, {"type": "text", "text": question}])
            for source, question in shown
        ],
    )


def _places(folder: Path) -> str:
    """TRL's: a part marks the place, and a column holds the pictures."""
    return _write(folder, [_talks([{"type": "image"}, {"type": "text", "text": q}], [name]) for name, q in SHOWN])


def _llava(folder: Path) -> str:
    rows = [
        {
            "id": f"{number:012}",
            "image": name,
            "conversations": [{"from": "human", "value": f"<image>\n{q}"}, {"from": "gpt", "value": "A cat."}],
        }
        for number, (name, q) in enumerate(SHOWN)
    ]
    (folder / "rows.json").write_text(json.dumps(rows))
    return "rows.json"


def _sharegpt(folder: Path) -> str:
    rows = [
        {"images": [name], "conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": "A cat."}]}
        for name, q in SHOWN
    ]
    return _write(folder, rows)


def _json_in_csv(folder: Path) -> str:
    """A cell holds the turns as JSON."""
    turns = [_talks(question)["messages"] for _, question in SHOWN]
    with open(folder / "rows.csv", "w", newline="") as file:
        rows = [(name, json.dumps(each)) for (name, _), each in zip(SHOWN, turns, strict=True)]
        csv.writer(file).writerows([("image", "messages"), *rows])
    return "rows.csv"


def _prompts(folder: Path) -> str:
    return _write(folder, [{"prompt": q, "completion": "A cat.", "images": [name]} for name, q in SHOWN])


def _prompts_of_messages(folder: Path) -> str:
    rows = [
        {
            "prompt": [{"role": "user", "content": q}],
            "completion": [{"role": "assistant", "content": "A cat."}],
            "images": [name],
        }
        for name, q in SHOWN
    ]
    return _write(folder, rows)


def _instructions(folder: Path) -> str:
    return _write(folder, [{"instruction": q, "output": "A cat.", "picture": name} for name, q in SHOWN])


def _in_parquet(images: Callable[[str], Any]) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        import pyarrow.parquet

        rows = [_asks(images(name), question) for name, question in SHOWN]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
        return "rows.parquet"

    return make


def _saved(many: bool) -> Callable[[Path], str]:
    """With the Image feature of datasets, which would decode the pictures."""

    def make(folder: Path) -> str:
        datasets = pytest.importorskip("datasets")
        kind = datasets.Image()
        features = {"image": [kind] if many else kind, "question": datasets.Value("string")}
        features = datasets.Features(features | {"answer": datasets.Value("string")})
        paths = [(str(folder / name), question) for name, question in SHOWN]
        rows = [_asks([path] if many else path, question) for path, question in paths]
        datasets.Dataset.from_list(rows, features=features).save_to_disk(str(folder / "saved"))
        return "saved"

    return make


def _picture_folder(split: str, table: str) -> Callable[[Path], str]:
    """As the imagefolder of datasets: a table beside the pictures."""

    def make(folder: Path) -> str:
        place = folder / "shown" / split
        place.mkdir(parents=True)
        for name in ("a.png", "b.png"):
            (place / name).write_bytes(FILES[name])
        if table == "metadata.csv":
            lines = "".join(f"{name},{question},A cat.\n" for name, question in SHOWN)
            (place / table).write_text("file_name,question,answer\n" + lines)
        else:
            rows = [{"file_name": name, "question": question, "answer": "A cat."} for name, question in SHOWN]
            (place / table).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return "shown"

    return make


SOURCES: dict[str, Callable[[Path], str]] = {
    "JSON lines": _jsonl,
    "JSON": _json,
    "CSV": _csv,
    "data URIs": _uris,
    "content parts": _parts,
    "content parts of OpenAI": _openai,
    "places in content parts": _places,
    "LLaVA": _llava,
    "ShareGPT": _sharegpt,
    "turns as JSON in CSV": _json_in_csv,
    "prompts": _prompts,
    "prompts of messages": _prompts_of_messages,
    "instructions": _instructions,
    "bytes in Parquet": _in_parquet(lambda name: FILES[name]),
    "Image in Parquet": _in_parquet(lambda name: {"bytes": FILES[name], "path": None}),
    "Images in Parquet": _in_parquet(lambda name: [{"bytes": FILES[name], "path": name}]),
    "paths in Parquet": _in_parquet(lambda name: {"bytes": None, "path": name}),
    "saved": _saved(False),
    "saved lists": _saved(True),
    "imagefolder": _picture_folder("", "metadata.jsonl"),
    "imagefolder with CSV": _picture_folder("", "metadata.csv"),
    "imagefolder with splits": _picture_folder("train", "metadata.jsonl"),
}
TURNS = [
    [{"role": "user", "content": f"\ufffc{question}"}, {"role": "assistant", "content": "A cat."}]
    for _, question in SHOWN
]
DIGESTS = [[hashlib.sha256(FILES[name]).hexdigest()] for name, _ in SHOWN]


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_gives_the_same_rows_and_pictures(folder: Path, name: str) -> None:
    data = SOURCES[name](folder)
    facts = dataset.scan(Recipe(data=data), pictures=True)
    assert _as_trained(data, facts.format, facts.columns) == (TURNS, DIGESTS)
    sizes = [len(FILES[name]) for name, _ in SHOWN]
    assert (facts.rows, facts.images, facts.most_images, facts.image_bytes) == (3, 3, 1, sum(sizes))
    assert (facts.image_pixels, facts.largest_image) == (3 * 40 * 30, (40, 30))
    code, answer = answered("data", data, "--fix", "fixed.jsonl")
    assert code == 0 and answer["data"]["pictures"]["count"] == 3, answer
    assert answer["data"]["problems"]["repeated_picture"] == {
        "rows": 1,
        "refused": 0,
        "lines": [4 if data.endswith(".csv") or "CSV" in name else 3],
        "first": "a picture of an earlier row, by the bytes of its file",
    }
    fixed = dataset.scan(Recipe(data="fixed.jsonl"), pictures=True)
    assert _as_trained("fixed.jsonl", fixed.format, fixed.columns) == (TURNS, DIGESTS)


def _as_trained(data: str, data_format: str, columns: dict[str, str]) -> tuple[list[Any], list[list[str]]]:
    """The turns and the digests of pictures of each row, read as the training program reads it."""
    turns, digests = [], []
    if data_format == "prompt_completion":  # as for a model with a chat template
        data_format = "question_answer"
        columns = {
            {"prompt": "question", "completion": "answer"}.get(name, name): each for name, each in columns.items()
        }
    for _, row in iter_rows(data, split="train"):
        lifted, sources = lift_pictures(row, columns)
        turns.append(to_example(lifted, data_format, columns)["messages"])
        digests.append([picture_digest(source, picture_folder(data)) for source in sources])
    return turns, digests


@pytest.mark.parametrize("places", ["before\n<image>\n<image>\n\nafter <image>", "<image>", "a <IMAGE> b"])
def test_a_fixed_file_has_the_pictures_in_their_places(folder: Path, places: str) -> None:
    count = places.lower().count("<image>")
    _write(folder, [_asks(["a.png", "b.png", "a.png"][:count], places)])
    columns = {"question": "question", "answer": "answer", "images": "image"}
    before = _as_trained("rows.jsonl", "question_answer", columns)
    assert answered("data", "rows.jsonl", "--fix", "fixed.jsonl")[0] == 0
    assert _as_trained("fixed.jsonl", "question_answer", columns | {"images": "images"}) == before


def test_a_fixed_file_lies_where_its_paths_stay_inside(folder: Path) -> None:
    _jsonl(folder)
    (folder / "in").mkdir()
    code, answer = answered("data", "rows.jsonl", "--fix", "in/fixed.jsonl")
    assert (code, answer["error"]["code"]) == (2, "bad_usage") and list((folder / "in").iterdir()) == []
    code, answer = answered("data", "rows.jsonl", "--fix", "../fixed.jsonl")
    assert code == 0 and '"images": ["data/a.png"]' in (folder.parent / "fixed.jsonl").read_text()


def test_the_first_picture_may_come_late(folder: Path) -> None:
    rows = [_asks(None)] * 3 + [{"question": "What?", "answer": "A cat."}] * 250 + [_asks("a.png")]
    _write(folder, rows)
    facts = dataset.scan(Recipe(data="rows.jsonl"), pictures=True)
    assert (facts.rows, facts.images, facts.columns["images"]) == (254, 1, "image")
    code, answer = answered("data", "rows.jsonl")
    assert (code, answer["data"]["pictures"]["count"]) == (0, 1)
    _write(folder, rows[3:])  # no column of the first rows hints at it
    code, answer = answered("data", "rows.jsonl")
    assert (code, answer["data"]["pictures"]["count"]) == (0, 1)
    _write(folder, [*rows[3:], _asks("x.png")])
    with pytest.raises(UsageError, match=r"line 252 of rows.jsonl: x.png does not exist"):
        dataset.scan(Recipe(data="rows.jsonl"), pictures=True)


def test_a_recipe_names_the_column(folder: Path) -> None:
    rows = [{"Foto": "a.png", "mask": "b.png", "q": "What?", "a": "A cat."}]
    _write(folder, rows)
    columns = {"question": "q", "answer": "a", "images": "Foto"}
    values = {"model": "m", "data": "rows.jsonl", "format": "question_answer"}
    facts = dataset.scan(from_dict(values | {"columns": columns}), pictures=True)
    assert (facts.images, facts.columns) == (1, columns)
    with pytest.raises(UsageError, match="has no column 'images'"):
        dataset.scan(from_dict(values | {"columns": columns}))
    without = {"question": "q", "answer": "a"}
    assert dataset.scan(from_dict(values | {"columns": without}), pictures=True).images == 0
    with pytest.raises(UsageError, match="no column 'Bild' in any row"):
        dataset.scan(from_dict(values | {"columns": without | {"images": "Bild"}}), pictures=True)


@pytest.mark.parametrize("beside", [{"image_id": 7}, {"file_name": "a.png"}, {"coco_url": "https://e.org/a.png"}])
def test_what_only_tells_which_picture_it_is_may_stand_beside(folder: Path, beside: dict[str, Any]) -> None:
    _write(folder, [_asks("a.png") | beside])
    assert dataset.scan(Recipe(data="rows.jsonl"), pictures=True).columns["images"] == "image"


def test_traits_are_no_problems(folder: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    pictures = {
        "rotated.jpg": encoded(_picture(), "JPEG", exif=exif),
        "grey.png": encoded(_picture(9, "L")),
        "grey16.png": encoded(_picture(9, "I;16")),
        "ink.tiff": encoded(_picture((0, 0, 0, 0), "CMYK"), "TIFF"),
        "clear.png": encoded(_picture((0, 0, 0, 0), "RGBA")),
        "shades.png": encoded(_picture((9, 9), "LA")),
        "small.webp": encoded(_picture(), "WEBP"),
        "dot.png": encoded(_picture(size=(1, 1))),
    }
    for name, content in pictures.items():
        (folder / name).write_bytes(content)
    _write(folder, [_asks(name) for name in pictures])
    code, answer = answered("data", "rows.jsonl")
    traits = {name: answer["data"]["pictures"][name] for name in ("rotated", "grey", "cmyk", "transparent")}
    assert (code, traits) == (0, {"rotated": 1, "grey": 3, "cmyk": 1, "transparent": 2})
    assert [name for name, count in answer["data"]["problems"].items() if count and count["rows"]] == []


def test_the_largest_picture_is_upright(folder: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    (folder / "large.jpg").write_bytes(encoded(_picture(size=(200, 100)), "JPEG", exif=exif))
    _write(folder, [_asks(["a.png", "large.jpg"]), _asks("b.png")])
    facts = dataset.scan(Recipe(data="rows.jsonl"), pictures=True)
    assert (facts.largest_image, facts.most_images, facts.images) == ((100, 200), 2, 3)
    assert facts.image_pixels == 200 * 100 + 2 * 40 * 30
    assert facts.text_bytes == 2 * len("What is it?A cat.")


def test_text_alone_has_no_pictures(folder: Path) -> None:
    _write(folder, [{"question": "What is \ufffc in Unicode?", "answer": "A mark."}])
    code, answer = answered("data", "rows.jsonl")
    assert code == 0 and "pictures" not in answer["data"]
    assert dataset.scan(Recipe(data="rows.jsonl")).images is None
    _write(folder, [{"messages": _talks("What is \ufffc in Unicode?")["messages"]}])
    assert dataset.scan(Recipe(data="rows.jsonl")).rows == 1
    with pytest.raises(UsageError, match=r"U\+FFFC, which stands for a picture"):
        dataset.scan(Recipe(data="rows.jsonl"), pictures=True)


def test_what_the_first_rows_of_the_hub_show(folder: Path) -> None:
    """Their pictures are bytes. A path leads nowhere there."""
    recipe = Recipe(data="me/pictures")
    rows = [_asks({"bytes": FILES[name], "path": name}) for name in ("a.png", "b.png")]
    mapping = dataset.first_format(recipe, rows, pictures=True)
    assert mapping.columns["images"] == "image"
    facts = dataset.scan(Recipe(data=_jsonl(folder)), pictures=True)
    of_ten = msgspec.structs.replace(facts, rows=10, columns=mapping.columns)
    estimate = dataset.with_text_of(of_ten, recipe, tuple(rows), FirstPictures(10, 1), None)
    assert (estimate.images, estimate.image_bytes) == (10, 5 * (len(FILES["a.png"]) + len(FILES["b.png"])))
    with pytest.raises(UsageError, match=r"line 1 of me/pictures: a.png has no folder"):
        dataset.first_format(recipe, [_asks("a.png")], pictures=True)
    with pytest.raises(UsageError, match="only text is trained"):
        dataset.first_format(recipe, rows)


def test_the_name_of_a_file_decides_nothing(tmp_path: Path) -> None:
    for name, problem in (("a is too large.png", "missing_picture"), ("is an address.png", "missing_picture")):
        with pytest.raises(Refused) as caught:
            RowPictures(tmp_path).check([name])
        assert problem_of(caught.value) == problem


def test_a_picture_is_read_and_decoded_once(folder: Path) -> None:
    """After that the file may go."""
    pictures = RowPictures(folder)
    pictures.decode(1, ["a.png", "b.png"])
    (folder / "a.png").unlink()
    for line in range(2, 1000):
        pictures.decode(line, ["b.png", "a.png", "a.png"])
    assert list(pictures.repeated()) == list(range(2, 1000))


@pytest.mark.torture
def test_memory_does_not_grow_with_the_pictures(folder: Path) -> None:
    """Twice the rows take hardly more. Measured 46 to 56 MB at 100, 200 and 800 thousand."""
    peaks = []
    for count in (100_000, 200_000):
        with open(folder / f"{count}.jsonl", "w") as file:
            for number in range(count):
                file.write(json.dumps(_asks("b.png" if number % 3 else "a.png", f"What is {number}?")) + "\n")
        peaks.append(peak_mb("data", f"{count}.jsonl"))
    assert peaks[1] - peaks[0] < 12, peaks


WRITE = """
import os, pyarrow, pyarrow.parquet
images = [{"bytes": os.urandom(2_000_000), "path": None} for _ in range(100)]
pyarrow.parquet.write_table(pyarrow.table({"image": images}), "rows.parquet")
"""
READ = """
from skill_train.core.memory import peak_memory_bytes
from skill_train.program.rows import iter_rows
print(sum(1 for _ in iter_rows("rows.parquet", split="train")))
print(peak_memory_bytes() / (1 << 20))
"""


@pytest.mark.slow
def test_large_pictures_in_parquet_are_read_a_few_at_a_time(folder: Path) -> None:
    """100 of 2 MB in one group. Measured 600 MB, of which pyarrow takes 500; with all rows of the group at once it was
    1,300."""
    for program in (WRITE, READ):
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), cwd=folder)
    rows, peak = done.stdout.split()
    assert (rows, float(peak) < 900) == ("100", True), done.stdout + done.stderr


def _write(folder: Path, rows: list[dict[str, Any]]) -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return "rows.jsonl"


def test_pictures_under_another_name_are_told_with_the_mapping_that_reads_them(folder: Path) -> None:
    """The hint alone would train the text without them."""
    row = _asks("a.png")
    row["foto"] = row.pop(next(name for name, value in row.items() if value == "a.png"))
    _write(folder, [row] * 2)
    code, answer = answered("data", "rows.jsonl")
    assert code == 2 and "images: foto in the columns of a recipe" in answer["error"]["message"]
    mapping = answer["error"]["hint"].partition("alone: ")[2].replace(", columns: {", "\ncolumns: {images: foto, ")
    (folder / "map.yaml").write_text("data: rows.jsonl\n" + mapping)
    assert answered("data", "--recipe", "map.yaml")[1]["data"]["pictures"]["count"] == 2


def test_the_hint_does_not_name_the_command_that_gives_it(folder: Path) -> None:
    """`data` itself lists the rows; where the training refuses one, that command is the hint."""
    _write(folder, [_asks("gone.png")] * 2)
    code, answer = answered("data", "rows.jsonl")
    assert (code, answer["error"]["hint"]) == (2, ALL_ALIKE)


def test_pictures_for_a_text_model_have_two_ways_on(folder: Path) -> None:
    """The text alone, which asks what nobody can answer here, is not the first of them."""
    _write(folder, [_asks("a.png") | {"question": "Which colour?"}] * 2)
    code, answer = answered("data", "rows.jsonl", "--model", tiny.cached("llama-spm"))
    hint = answer["error"]["hint"]
    assert code == 2 and hint.index("references/vision.md") < hint.index("trains on the text alone"), answer


@pytest.mark.parametrize("asked", ["<image>Which colour?", "Which colour?"])
def test_the_text_alone_is_offered_only_where_it_trains(folder: Path, asked: str) -> None:
    """A mark of the picture in the text is refused by the recipe of that hint too."""
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": "Red."}]
    _write(folder, [{"images": ["a.png"], "messages": messages}] * 2)
    model = tiny.cached("llama-spm")
    for words in (("data", "rows.jsonl"), ("plan", "--data", "rows.jsonl")):
        code, answer = answered(*words, "--model", model)
        way, _, mapping = answer["error"]["hint"].partition("trains on the text alone: ")
        assert code == 2 and "references/vision.md" in way and bool(mapping) is ("<image>" not in asked), answer
        if mapping:
            (folder / "map.yaml").write_text(f"model: {model}\ndata: rows.jsonl\n" + mapping.replace(", col", "\ncol"))
            assert answered("plan", "map.yaml")[0] == 0


def test_a_sound_beside_pictures_is_not_called_a_picture(folder: Path) -> None:
    """The hint of the plan named the sound as the column of pictures."""
    _write(folder, [_asks("a.png") | {"audio": "a.wav"}] * 2)
    code, answer = answered("plan", "--data", "rows.jsonl", "--model", tiny_vision.cached("gemma3"))
    mapping = answer["error"]["hint"].partition("names the columns trains on them alone: ")[2]
    assert code == 2 and "audio" not in mapping and "images: " in mapping, answer
