"""The eval with a broken GGUF: one is really broken, found and mended."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from eval_boxes import EVALS, prepare

pytest.importorskip("torch")
pytest.importorskip("llama_cpp")


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
