"""Evals of what went wrong: a run that is really killed and goes on, a file that is really broken and mended."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from eval_boxes import EVALS, prepare

pytestmark = [pytest.mark.slow, pytest.mark.real_python]  # a kill of the group ends no program that starts warm

pytest.importorskip("torch")
pytest.importorskip("llama_cpp")


@pytest.mark.torture
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


@pytest.mark.torture
def test_broken_gguf(tmp_path: Path) -> None:
    box = prepare("broken-gguf", tmp_path)
    assert box.grade()["passed"] == 0
    box.write("diagnosis.json", {"check": "chat_template"})
    (box.work / "fixed").mkdir()
    shutil.copy(box.work / "model-q8_0.gguf", box.work / "fixed")
    (missed,) = box.grade()["missed"]  # the same wrong file
    assert "failed: ['chat_template']" in missed
    old, new = _template_bytes()
    (box.work / "fixed" / "model-q8_0.gguf").write_bytes((box.work / "model-q8_0.gguf").read_bytes().replace(new, old))
    assert box.grade()["state"] == "passed"


def _template_bytes() -> tuple[bytes, bytes]:
    sys.path.insert(0, str(EVALS))
    try:
        from sandboxes import BROKEN_TEMPLATE
    finally:
        sys.path.remove(str(EVALS))
    return BROKEN_TEMPLATE
