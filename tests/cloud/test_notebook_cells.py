"""The cells of the notebook that `submit --backend colab` writes, really run on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from planned_elsewhere import compared, planned, trained_here
from skill_train.cloud.elsewhere import colab

pytestmark = pytest.mark.slow


def test_the_cells_of_the_notebook_train_and_go_on(tmp_path: Path) -> None:
    """All but those of Colab itself, twice: the second time finds its work done."""
    straight, run = trained_here(tmp_path / "straight"), planned(tmp_path)
    data = {"rows.jsonl": tmp_path / "rows.jsonl"}
    colab.write_notebook(
        tmp_path / "colab.ipynb", run / "plan.json", gpu="T4", run_id="0123456789ab", data=data, packages=()
    )
    (tmp_path / "rows.jsonl").rename(tmp_path / "elsewhere.jsonl")  # the notebook brings its own
    cells = json.loads((tmp_path / "colab.ipynb").read_text())["cells"]
    sources = ["".join(c["source"]) for c in cells if c["cell_type"] == "code" and "colab" not in tags(c)]
    drive = tmp_path / "drive"
    program = tmp_path / "cells.py"
    program.write_text("\n".join([f"FOLDER, PYTHON = {str(drive)!r}, {[sys.executable]!r}", *sources]))
    for words in ("step 4 of 4", "this run was trained before"):
        done = subprocess.run([sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert words in done.stdout and "verdict: pass" in done.stdout
    found = compared(straight, drive)
    assert (found.verdict, found.recipe, found.same_weights) == ("same", [], True)
    assert (found.losses or {})["equal"] is True


def tags(cell: dict[str, Any]) -> list[str]:
    return list(cell["metadata"].get("tags", []))
