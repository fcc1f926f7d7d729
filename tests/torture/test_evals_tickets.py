"""The evals that go the whole way, from rows to files that are proven. They run with the campaigns: the same chain is
in `test_cli` and `test_story`, the same grading in `test_evals_broken`."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval_boxes import prepare

pytest.importorskip("torch")
pytest.importorskip("llama_cpp")
pytestmark = pytest.mark.torture


def test_tickets(tmp_path: Path) -> None:
    """The whole chain in three commands; without the third, the proof, it does not count."""
    box = prepare("tickets", tmp_path)
    assert box.grade()["passed"] == 0
    options = ("--max-steps", 20, "--max-length", 128, "--run-dir", "runs/first")
    box.sh("skill-train", "local", "--model", "base", "--data", "tickets.jsonl", *options)
    box.sh("skill-train", "export-gguf", "runs/first", "--quant", "q8_0")
    file = next((box.work / "runs" / "first" / "gguf").glob("*q8_0*.gguf")).relative_to(box.work)
    box.write("result.json", {"gguf": str(file)})
    assert len(box.grade()["missed"]) == 3
    box.sh("skill-train", "verify", "runs/first")
    assert box.grade()["state"] == "passed"


def test_pictures(tmp_path: Path) -> None:
    """A language model alone, and a pair that was not verified, do not count."""
    box = prepare("pictures", tmp_path)
    assert box.grade()["passed"] == 0
    options = ("--max-steps", 40, "--max-length", 128, "--run-dir", "runs/first")
    box.sh("skill-train", "local", "--model", "base", "--data", "pictures.parquet", *options)
    box.sh("skill-train", "export-gguf", "runs/first", "--quant", "q8_0")
    folder = box.work / "runs" / "first" / "gguf"
    text, projector = (str(next(folder.glob(name)).relative_to(box.work)) for name in ("f*q8_0.gguf", "mmproj-*.gguf"))
    box.write("result.json", {"gguf": text, "mmproj": projector})
    assert len(box.grade()["missed"]) == 3
    box.sh("skill-train", "verify", "runs/first")
    assert box.grade()["state"] == "passed"
    box.write("result.json", {"gguf": projector, "mmproj": text})
    assert box.grade()["state"] != "passed"
