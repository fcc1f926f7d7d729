"""A second export into one folder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tiny
from skill_train.commands import export_gguf
from skill_train.core.console import Console

pytestmark = pytest.mark.slow


def exported(model: Path, out: Path, quant: str) -> Any:
    console = Console("quiet", "export-gguf")
    result = export_gguf.run(export_gguf.ExportOptions(model, quant=quant, out=out), console)
    said = {warning["code"]: warning["message"] for warning in console.warnings}
    return SimpleNamespace(rules=[each["rule"] for each in result.data["modelfile_reasons"]], said=said)


def test_an_export_that_changes_the_model_of_the_modelfile_says_so(tmp_path: Path) -> None:
    """Whoever built an Ollama model of the first one would serve another file without knowing."""
    model, out = tiny.cached("gemma"), tmp_path / "out"
    first = exported(model, out, "q8_0")
    old = next(rule for rule in first.rules if rule.startswith("FROM"))
    assert "modelfile_changed" not in first.said
    assert "modelfile_changed" not in exported(model, out, "q8_0").said  # the same again
    new = next(rule for rule in exported(model, out, "f16").rules if rule.startswith("FROM"))
    assert old.endswith("-q8_0.gguf") and new.endswith("-f16.gguf")
    said = exported(model, out, "q8_0").said["modelfile_changed"]
    assert f"from {new.removeprefix('FROM ')} to {old.removeprefix('FROM ')}" in said
