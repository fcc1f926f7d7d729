"""Pictures beside answers, and the two files of a vision model: on a run with made-up records and real pictures."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image, PngImagePlugin

import picture_pairs
import planning
import whole_records
from pages import Page
from picture_bytes import encoded
from skill_train.report.sections import run_view, verdict
from skill_train.report.step import report, reported_run
from skill_train.report.thumbnails import EDGE, MOST_CHARACTERS, MOST_OF_ROW, shown_pictures
from skill_train.run.evaluate_record import Evaluation, rows_digest
from skill_train.run.folder import RunDir
from skill_train.run.train_record import read_rows

pytestmark = pytest.mark.slow

RECORDED = Path(__file__).resolve().parent.parent / "support" / "data" / "runs" / "tiny"
TEXT = {"bytes": 9, "sha256": "aa", "quant": "q8_0"}
PROJECTOR = {"bytes": 5, "sha256": "bb", "quant": "f16"}
OF_PAIR = [("logits", "run-q8_0.gguf"), ("pictures", "run-q8_0.gguf"), ("projector_weights", "mmproj-run-f16.gguf")]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of pictures, exported as a pair, verified and evaluated: three rows with a picture, and one of text."""
    folder = tmp_path / "run"
    shutil.copytree(RECORDED, folder, ignore=shutil.ignore_patterns("metrics.jsonl"))  # curves take time to draw
    plan = _json(folder / "plan.json")
    _write(folder / "plan.json", plan | {"recipe": plan["recipe"] | {"images": True, "loss_on": "assistant"}})
    planning.write_recipe_hash(folder)
    rows = [held_out(folder, line, [picture_pairs.picture(300, 200, seed=line)]) for line in (1, 2, 3)]
    write_rows(folder, [*rows, held_out(folder, 4, [])])
    _write(folder / "convert.json", {"outputs": {"gguf/run-q8_0.gguf": TEXT}})
    _write(folder / "mmproj.json", {"outputs": {"gguf/mmproj-run-f16.gguf": PROJECTOR}})
    write_proof(folder)
    return folder


def held_out(folder: Path, line: int, pictures: list[Image.Image]) -> dict[str, Any]:
    """A row as training keeps it, and its pictures as PNG files under their digests."""
    row: dict[str, Any] = {"row": line - 1, "line": line, "kind": "chat", "input_ids": [1, 2], "labels": [-100, 2]}
    row |= {"messages": [{"role": "user", "content": "Which?"}], "rendered": "", "truncated": False, "full_length": 2}
    (folder / "images").mkdir(exist_ok=True)
    for picture in pictures:
        content = encoded(picture)
        digest = hashlib.sha256(content).hexdigest()
        (folder / "images" / f"{digest}.png").write_bytes(content)
        row["images"] = [*row.get("images", []), f"images/{digest}.png"]
        row["image_sha256"] = [*row.get("image_sha256", []), digest]
    return row


def write_rows(folder: Path, rows: list[dict[str, Any]], **evaluated: Any) -> None:
    """`held_out.jsonl`, and an evaluation of these rows."""
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = [
        {"line": row["line"], "prompt": f"<image> of line {row['line']}?", "expected": "red", "answers": {"base": "?"}}
        for row in rows
    ]
    inputs = {"rows": rows_digest(read_rows(folder / "held_out.jsonl"))}
    document = whole_records.evaluation(rows=len(rows), inputs=inputs, answers=answers, **evaluated)
    _write(folder / "evaluate.json", document)


def write_proof(folder: Path, **verdicts: str) -> None:
    checks = [{"name": n, "file": f, "verdict": verdicts.get(n, "pass"), "detail": ""} for n, f in OF_PAIR]
    files = {"run-q8_0.gguf": {"bytes": 9, "sha256": "aa"}, "mmproj-run-f16.gguf": {"bytes": 5, "sha256": "bb"}}
    worst = next(word for word in ("fail", "warn", "pass") if word in {"pass", *verdicts.values()})
    proof = whole_records.whole_proof(checks=checks, inputs={"ggufs": files}, verdict=worst)
    _write(folder / "verify.json", proof)


def page_of(folder: Path) -> Page:
    report([RunDir(folder)], out=folder / "report.html", progress=lambda done, total, text: None, warn=print)
    return Page((folder / "report.html").read_text())


def view_of(folder: Path) -> Any:
    return run_view(reported_run(RunDir(folder), "run"))


def pictures_of(folder: Path, room: int = MOST_CHARACTERS) -> Any:
    evaluation = msgspec.convert(_json(folder / "evaluate.json"), Evaluation)
    return shown_pictures(RunDir(folder), evaluation, room)


def why_not(folder: Path, line: int = 1) -> str:
    [picture] = pictures_of(folder).by_line[line]
    assert picture["thumbnail"] is None
    return str(picture["why_not"])


def _json(path: Path) -> Any:
    return json.loads(path.read_text())


def _write(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document))


def decoded(thumbnail: str) -> bytes:
    kind, _, content = thumbnail.partition(",")
    assert kind == "data:image/jpeg;base64"
    return base64.b64decode(content, validate=True)


# --- Pictures beside answers ---


def test_each_row_has_its_own_picture_and_a_row_of_text_has_none(run: Path) -> None:
    """Of one colour each, so that a picture in the wrong row is seen."""
    colours = {1: (220, 30, 30), 2: (30, 200, 60), 3: (40, 60, 230)}
    rows = [held_out(run, line, [Image.new("RGB", (320, 160), colour)]) for line, colour in colours.items()]
    write_rows(run, [*rows, held_out(run, 4, [])])
    page = page_of(run)
    questions = page.html.split('<div class="asked">')[1:]
    assert len(questions) == 4 and [part.count("<img") for part in questions] == [1, 1, 1, 0]
    for part in questions[:3]:
        [source] = re.findall(r'<img src="([^"]*)"', part)
        [line] = re.findall(r"&lt;image&gt; of line (\d)", part)
        with Image.open(io.BytesIO(decoded(source))) as small:
            assert small.size == (160, 80)
            seen = small.getpixel((80, 40))
            assert isinstance(seen, tuple)
            assert all(abs(a - b) < 8 for a, b in zip(seen, colours[int(line)], strict=True))
    assert [a["width"] for tag, a in page.tags if tag == "img"] == ["160"] * 3


def test_nothing_of_the_file_but_its_pixels_is_in_the_page(run: Path) -> None:
    """EXIF, comments, XMP and text that Pillow would write into the copy too."""
    picture = picture_pairs.picture(300, 200, seed=1)
    exif = Image.Exif()
    exif[0x013B] = "ada lovelace"
    jpeg = encoded(picture, "JPEG", exif=exif, comment=b"ada lovelace", xmp=b"<x>ada lovelace</x>", quality=99)
    text = PngImagePlugin.PngInfo()
    text.add_text("Author", "ada lovelace")
    row = held_out(run, 1, [picture])
    row["images"], row["image_sha256"] = [], []
    for content in (jpeg, encoded(picture, pnginfo=text)):
        assert b"lovelace" in content
        digest = hashlib.sha256(content).hexdigest()
        (run / "images" / digest).write_bytes(content)
        row["images"].append(f"images/{digest}")
        row["image_sha256"].append(digest)
    write_rows(run, [row])
    copies = [decoded(one["thumbnail"]) for one in pictures_of(run).by_line[1]]
    assert len(copies) == 2 and all(b"lovelace" not in copy and len(copy) < 20_000 for copy in copies)


def test_a_picture_that_is_another_one_now_is_said_and_not_shown(run: Path) -> None:
    row = _json_lines(run)[0]
    picture = run / row["images"][0]
    Image.new("RGB", (300, 200), "red").save(picture)
    assert why_not(run) == "not shown: the picture was changed since the training"
    picture.unlink()
    assert why_not(run) == "not shown: the picture is missing"
    page = page_of(run)
    assert "picture 1: not shown: the picture is missing" in page.text
    assert len([tag for tag, _ in page.tags if tag == "img"]) == 2


def test_a_file_outside_of_the_run_is_not_shown(run: Path) -> None:
    """A run from somewhere else may name any file of this machine, with its digest."""
    file = run.parent / "own.png"
    Image.new("RGB", (60, 40)).save(file)
    row = _json_lines(run)[0] | {"images": ["../own.png"]}
    write_rows(run, [row | {"image_sha256": [hashlib.sha256(file.read_bytes()).hexdigest()]}])
    assert why_not(run) == "not shown: the picture is missing"


def test_a_picture_without_a_digest_is_not_shown(run: Path) -> None:
    write_rows(run, [_json_lines(run)[0] | {"image_sha256": []}])
    assert why_not(run) == "not shown: the picture was changed since the training"


def test_the_rows_of_another_training_have_no_pictures_here(run: Path) -> None:
    """Their lines are the same, and their pictures are there."""
    rows = _json_lines(run)
    rows[0], rows[1] = rows[0] | {"line": 2}, rows[1] | {"line": 1}
    (run / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert pictures_of(run).by_line == {}
    page = page_of(run)
    assert "Pictures are not shown: held_out.jsonl has other rows than those that were asked." in page.text
    assert not [tag for tag, _ in page.tags if tag == "img"]


def test_an_evaluation_of_some_rows_has_the_pictures_of_these(run: Path) -> None:
    """`evaluate --rows 2` takes the first and the third of four rows."""
    rows = [held_out(run, line, [picture_pairs.picture(60, 40, seed=line)]) for line in (1, 2, 3, 4)]
    write_rows(run, [rows[0], rows[2]])
    (run / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert sorted(pictures_of(run).by_line) == [1, 3]


def test_two_rows_of_one_line_are_not_told_apart(run: Path) -> None:
    rows = _json_lines(run)
    write_rows(run, [rows[0], rows[1] | {"line": 1}])
    assert why_not(run) == "not shown: several rows have this line"


def test_a_hundred_rows_of_noise_stay_small(run: Path) -> None:
    noise = Image.effect_noise((160, 160), 100).convert("RGB")
    one = held_out(run, 1, [noise])
    many = one | {name: one[name] * 9 for name in ("images", "image_sha256")}
    write_rows(run, [many | {"line": line} for line in range(1, 101)])
    rows = pictures_of(run).by_line
    assert len(rows) == 12 and all(len(views) == MOST_OF_ROW + 1 for views in rows.values())
    assert [view["why_not"] for views in rows.values() for view in views[-1:]] == ["and 5 more"] * 12
    copies = [view["thumbnail"] for views in rows.values() for view in views if view["thumbnail"]]
    assert 4 < len(copies) < 12 * MOST_OF_ROW and sum(map(len, copies)) <= MOST_CHARACTERS
    assert rows[12][0]["why_not"] == "not shown: the page would be too large"
    page = page_of(run)
    assert len(page.html) < MOST_CHARACTERS + 300_000
    assert all(max(int(a["width"]), int(a["height"])) <= EDGE for tag, a in page.tags if tag == "img")


def test_without_pillow_the_page_says_so(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    pictures = pictures_of(run)
    assert pictures.by_line == {} and pictures.note.startswith("Pictures are not shown: Pillow is not installed")


def test_a_picture_of_sensitive_data_is_shown_as_its_text_is(run: Path) -> None:
    """The page is made here and stays here: `sensitive` is about what leaves this machine by a command."""
    plan = _json(run / "plan.json")
    _write(run / "plan.json", plan | {"policy": plan["policy"] | {"sensitive": True}})
    page = page_of(run)
    assert "<image> of line 1?" in page.text and len([tag for tag, _ in page.tags if tag == "img"]) == 3


def _json_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "held_out.jsonl").read_text().splitlines()]


# --- Two files ---


@pytest.mark.parametrize(
    ("verdicts", "words"),
    [
        ({}, ("pass", "pass", "pass")),
        ({"pictures": "warn"}, ("warn", "pass", "warn")),
        ({"projector_weights": "fail"}, ("pass", "fail", "fail")),
        ({"logits": "fail"}, ("fail", "pass", "fail")),
    ],
)
def test_both_files_are_named_with_their_verdicts(run: Path, verdicts: Any, words: tuple[str, str, str]) -> None:
    write_proof(run, **verdicts)
    view = view_of(run)
    [pair] = view["pairs"]
    assert (pair["model"], pair["projector"]) == ("run-q8_0.gguf", "mmproj-run-f16.gguf")
    assert (pair["model_verdict"], pair["projector_verdict"], pair["verdict"]) == words
    assert (view["run_it"]["verdict"], view["run_it"]["projector"]) == (words[2], "mmproj-run-f16.gguf")
    assert dict(view["overview"])["smallest file that passes"][0].text == ("q8_0" if words[2] == "pass" else "none yet")


def test_the_page_says_which_files_belong_together_and_how_both_run(run: Path) -> None:
    page = page_of(run)
    assert ["run-q8_0.gguf", "pass", "mmproj-run-f16.gguf", "f16", "5 bytes", "pass", "pass"] in page.cells
    both = "-m gguf/run-q8_0.gguf --mmproj gguf/mmproj-run-f16.gguf"
    assert f"llama-server {both}\nllama-mtmd-cli {both} --image FILE -p QUESTION" in page.text
    assert "llama-cli" not in page.text


def test_a_pair_that_was_not_asked_together_is_not_proved(run: Path) -> None:
    proof = _json(run / "verify.json")
    proof["checks"] = [check for check in proof["checks"] if check["name"] != "pictures"]
    _write(run / "verify.json", proof)
    [pair] = view_of(run)["pairs"]
    assert (pair["model_verdict"], pair["projector_verdict"], pair["verdict"]) == ("pass", "pass", "unknown")


def test_a_projector_that_was_exported_again_is_not_the_one_that_was_verified(run: Path) -> None:
    _write(run / "mmproj.json", {"outputs": {"gguf/mmproj-run-f16.gguf": PROJECTOR | {"sha256": "cc"}}})
    proof = verdict(reported_run(RunDir(run), "run"))
    assert proof["headline"] == "The proof is of other files"
    assert proof["because"] == ["mmproj-run-f16.gguf is not the one that was verified"]
    [pair] = view_of(run)["pairs"]
    assert (pair["projector_verdict"], pair["verdict"]) == ("unknown", "unknown")


@pytest.mark.parametrize(("sha256", "kept"), [("bb", True), ("cc", False)])
def test_an_evaluation_with_another_projector_is_left_out(run: Path, sha256: str, kept: bool) -> None:
    evaluation = _json(run / "evaluate.json")
    read = {"bytes": 9, "sha256": "aa", "projector": {"bytes": 5, "sha256": sha256}}
    evaluation["inputs"]["models"] = {"run-q8_0.gguf": {"model": read}}
    _write(run / "evaluate.json", evaluation)
    assert bool(reported_run(RunDir(run), "run").without_outdated().evaluation) is kept


def test_files_of_a_run_of_pictures_that_read_none_are_said_to(run: Path) -> None:
    (run / "mmproj.json").unlink()
    page = page_of(run)
    assert "trained on pictures, and these files read text only: skill-train export-gguf" in page.text
    assert "Two files that belong together" not in page.text


def test_a_run_of_pictures_that_was_not_evaluated_says_how(run: Path) -> None:
    (run / "evaluate.json").unlink()
    assert "evaluate" in [one["part"] for one in view_of(run)["missing"]]
