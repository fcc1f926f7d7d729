"""Evals that train: a run that is really killed and goes on, and the whole way to a file that is proven."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from eval_boxes import prepare

pytest.importorskip("torch")
pytest.importorskip("llama_cpp")


def test_killed_run(tmp_path: Path) -> None:
    box = prepare("killed-run", tmp_path)
    assert box.grade()["passed"] == 0
    run = box.work / "runs" / "tickets"
    shutil.copytree(run, tmp_path / "killed")
    box.sh("skill-train", "local", "--resume", "--run-dir", "runs/tickets")
    assert box.grade()["state"] == "passed"
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([lines[0].replace('"seconds": ', '"seconds": 1'), *lines[1:]]))
    assert len(box.grade()["missed"]) == 1  # the first steps were trained again


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
