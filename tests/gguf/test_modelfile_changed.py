"""A second export into one folder."""

from __future__ import annotations

import inspect
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tiny
from skill_train.commands import export_gguf
from skill_train.core.console import Console
from skill_train.core.errors import UsageError

pytestmark = pytest.mark.slow


def exported(model: Path, out: Path, quant: str, modelfile: str | None = None) -> Any:
    console = Console("quiet", "export-gguf")
    options = export_gguf.ExportOptions(run=model, quant=quant, out=out, modelfile=modelfile)
    result = inspect.unwrap(export_gguf.export_gguf.callback)(options, console)
    said = {warning["code"]: warning["message"] for warning in console.warnings}
    rules = [each["rule"] for each in result.data["modelfile_reasons"]]
    written = [line for line in (out / "Modelfile").read_text().splitlines() if line.startswith("FROM ")]
    assert written == [rule for rule in rules if rule.startswith("FROM ")]
    return SimpleNamespace(file=written[0].removeprefix("FROM "), said=said, next=result.next, data=result.data)


def test_a_later_export_leaves_the_file_of_the_modelfile(tmp_path: Path) -> None:
    """Whoever built an Ollama model of the first one would serve another file without knowing."""
    model, out = tiny.cached("gemma"), tmp_path / "out"
    first = exported(model, out, "q8_0")
    assert first.file.endswith("-q8_0.gguf") and "modelfile_changed" not in first.said
    for quant in ("q8_0", "f16", "q4_k_m"):
        later = exported(model, out, quant)
        assert later.file == first.file and "modelfile_changed" not in later.said
    asked = exported(model, out, "q8_0", modelfile="f16")
    assert asked.file.endswith("-f16.gguf")
    assert f"from {first.file} to {asked.file}" in asked.said["modelfile_changed"]
    assert exported(model, out, "q8_0").file == asked.file
    (out / asked.file).unlink()
    (out / "convert.json").unlink()
    with pytest.raises(UsageError, match="no file of type q6_k") as caught:
        exported(model, out, "q8_0", modelfile="q6_k")
    assert "--quant q6_k" in caught.value.hint


def test_a_file_that_is_gone_is_not_named(tmp_path: Path) -> None:
    model, out = tiny.cached("gemma"), tmp_path / "out"
    first = exported(model, out, "q8_0,q4_k_m")
    assert first.file.endswith("-q4_k_m.gguf")
    (out / "Modelfile").write_text("FROM ./gone-q4_k_m.gguf\n")
    later = exported(model, out, "q8_0")
    assert later.file.endswith("-q8_0.gguf") and "gone-q4_k_m" in later.said["modelfile_changed"]


def test_what_comes_next_can_be_run(tmp_path: Path) -> None:
    model, out = tiny.cached("gemma"), tmp_path / "an out"
    done = exported(model, out, "q8_0")
    verify, chat = done.next
    assert shlex.split(verify)[:2] == ["skill-train", "verify"]
    assert Path(shlex.split(chat)[2]).is_file() and shlex.split(chat)[1] == "chat"
    words = shlex.split(done.data["ollama"])
    assert words[:2] == ["ollama", "create"] and words[3] == "-f" and Path(words[4]).read_text().count("FROM ") == 1


def test_a_type_for_the_modelfile_is_known_before_anything_is_converted(tmp_path: Path) -> None:
    model, out = tiny.cached("gemma"), tmp_path / "out"
    with pytest.raises(UsageError, match="no file of type q6_k"):
        exported(model, out, "q8_0", modelfile="q6_k")
    assert list(tmp_path.rglob("*.gguf")) == []
    assert exported(model, out, "q8_0,q4_k_m", modelfile="Q8-0").file.endswith("-q8_0.gguf")


@pytest.mark.parametrize("quant", ["q8_0", "q4_k_m"])
def test_a_modelfile_that_was_edited_is_kept(tmp_path: Path, quant: str) -> None:
    """The lines of a user are nowhere else. A remark of his is work too."""
    model, out = tiny.cached("gemma"), tmp_path / "out"
    exported(model, out, "q8_0")
    written = (out / "Modelfile").read_text()
    for number, line in enumerate(("SYSTEM Be brief.", "# a remark"), 1):
        edited = f"{written}{line}\n"
        (out / "Modelfile").write_text(edited)
        said = exported(model, out, quant).said["set_aside"]
        kept = out / f"Modelfile.unrecorded-{number}"
        assert kept.read_text() == edited and kept.name in said
        assert (out / "Modelfile").read_text() == written
    assert "set_aside" not in exported(model, out, quant).said
    assert exported(model, out, quant, modelfile=quant).said.keys() <= {"modelfile_changed"}
    assert len(list(out.glob("Modelfile*"))) == 3
