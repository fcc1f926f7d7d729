"""The command that a hint names mends the file: it is run."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from skill_train.commands import data as data_command
from skill_train.core.errors import SkillTrainError
from skill_train.data import inspect as data_subject
from skill_train.data import scan as dataset
from skill_train.data.errors import rewriting_command
from skill_train.data.inspect_report import Counted
from skill_train.program.rows import not_utf8
from skill_train.program.tables.shape import old_encoding
from skill_train.recipe.fields import Recipe

TEXTS = [f"Grün für {n}?" if n % 2 else f"Green for {n}?" for n in range(12)]
JSONL = "".join(json.dumps({"prompt": text, "completion": "Käse"}, ensure_ascii=False) + "\n" for text in TEXTS)
PART = "".join(json.dumps({"prompt": text, "completion": "Cheese"}, ensure_ascii=False) + "\n" for text in TEXTS)
CSV = "prompt,completion\n" + "".join(f"{text},Käse\n" for text in TEXTS)


@pytest.mark.parametrize("encoding", ["windows-1252", "latin-1", "utf-16", "cp850"])
@pytest.mark.parametrize(("name", "text"), [("my rows.jsonl", JSONL), ("part.jsonl", PART), ("rows.csv", CSV)])
def test_the_hint_mends_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, name: str, text: str
) -> None:
    if shutil.which("iconv") is None:
        pytest.skip("no iconv here")
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(text.encode(encoding))
    with pytest.raises(SkillTrainError) as caught:
        dataset.scan(Recipe(model="m", data=name))
    error = data_command._refusal(
        data_subject.inspect_dataset(Recipe(data=name), "sft", None), Counted({"fully_masked": None}, "")
    )
    assert error is not None and error.hint == caught.value.hint
    subprocess.run(["sh", "-c", caught.value.hint], check=True)
    mended = f"{Path(name).stem}.utf8{Path(name).suffix}"
    assert dataset.scan(Recipe(model="m", data=mended)).rows == len(TEXTS)
    assert "Grün" in Path(mended).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("encoding", "named"), [("windows-1252", "WINDOWS-1252"), ("cp850", "CP850"), ("mac_roman", "MACINTOSH")]
)
@pytest.mark.parametrize("text", ["Die schönen Töpfe für Käthe", "L’été où ça brûle", "DIE SCHÖNEN TÖPFE FÜR KÄTHE"])
def test_an_old_encoding_is_the_one_in_which_words_are_words(encoding: str, named: str, text: str) -> None:
    raw = text.replace("’", "'").encode(encoding)
    assert old_encoding(raw) == named
    refusal = not_utf8("line 1", raw)
    assert named in refusal.error["message"] and text.replace("’", "'") in refusal.error["got"]


def test_a_file_of_two_encodings_is_mended_by_no_single_command(tmp_path: Path) -> None:
    lines = PART.splitlines(keepends=True)
    mixed = b"".join(line.encode("utf-8" if n < 6 else "windows-1252") for n, line in enumerate(lines))
    (tmp_path / "rows.jsonl").write_bytes(mixed)
    assert rewriting_command(tmp_path / "rows.jsonl") is None


def test_a_line_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    with open(tmp_path / "rows.jsonl", "wb") as file:
        file.write(b'{"text": "gr\xfcn"}\n')
        file.truncate(10**12)
    assert rewriting_command(tmp_path / "rows.jsonl") is None
    with pytest.raises(SkillTrainError, match=r"line 1 of .* is not UTF-8"):
        dataset.scan(Recipe(model="m", data=str(tmp_path / "rows.jsonl")))


@pytest.mark.parametrize("data", [b'{"text": "plain"}\n', '{"text": "grün"}\n'.encode(), b'{"text": "\x81"}\n', b""])
def test_what_needs_no_command_or_has_none(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "rows.jsonl").write_bytes(data)
    assert rewriting_command(tmp_path / "rows.jsonl") is None
