"""The notebook for Colab: valid, with the very bytes of the program and the plan in it as data."""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import random
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from planning import shipped_flavor
from skill_train.cloud.elsewhere import colab
from skill_train.core.errors import UsageError
from skill_train.machine.training_program import train_program

nbformat = pytest.importorskip("nbformat")


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    plan, rows = tmp_path / "plan.json", tmp_path / "rows.jsonl"
    plan.write_text('{"a": "plan\\n"}', encoding="utf-8")
    rows.write_bytes('{"text": "\'\'\' \\" é \\\\"}\n'.encode())
    path = tmp_path / "colab.ipynb"
    data = {rows.name: rows}
    return path, colab.write_notebook(path, plan, gpu="L4", run_id="0123456789ab", data=data, packages=("x==1",))


def cell(path: Path, tag: str) -> str:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    (source,) = ("".join(c["source"]) for c in cells if tag in c["metadata"].get("tags", []))
    return str(source)


def test_it_is_a_valid_notebook_for_a_gpu(made: tuple[Path, dict[str, Any]]) -> None:
    notebook = nbformat.read(made[0], as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.accelerator == "GPU"
    assert notebook.metadata.colab.gpuType == "L4"
    for each in notebook.cells:
        if each.cell_type == "code":
            ast.parse(each.source)  # plain Python: no magic, no shell line
            assert each.outputs == []


def test_its_files_are_the_very_bytes(made: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, digests = made
    files = ast.literal_eval(cell(path, "files").removeprefix("FILES = "))
    contents = {name: zlib.decompress(base64.b64decode(file["content"])) for name, file in files.items()}
    assert contents == {
        "train.py": train_program().read_bytes(),
        "plan.json": (tmp_path / "plan.json").read_bytes(),
        "data/rows.jsonl": (tmp_path / "rows.jsonl").read_bytes(),
    }
    for name, content in contents.items():
        assert digests[name] == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        assert files[name]["sha256"] == digests[name]["sha256"]
    assert "import" not in cell(path, "files") and "def " not in cell(path, "files")


def test_its_settings_are_data(made: tuple[Path, dict[str, Any]]) -> None:
    settings = ast.literal_eval(cell(made[0], "settings").removeprefix("SETTINGS = "))
    assert (settings["run"], settings["data"], settings["packages"]) == ("0123456789ab", "data/rows.jsonl", ["x==1"])
    assert settings["environment"]["SKILL_TRAIN_RUN"] == "0123456789ab"


def test_no_line_of_a_library_ends_the_training(
    made: tuple[Path, dict[str, Any]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A number, JSON of others, and bytes that are no text."""
    said = b'42\nnull\n{"loss": 1}\n\xff\n{"event": "stage", "text": "training"}\n'
    (tmp_path / "train.py").write_text(f"import sys; sys.stdout.buffer.write({said!r})")
    cells = ["".join(each["source"]) for each in json.loads(made[0].read_text(encoding="utf-8"))["cells"]]
    (training,) = (source for source in cells if "subprocess.Popen" in source)
    settings = {"data": None, "environment": {}}
    exec(training, {"folder": tmp_path, "PYTHON": [sys.executable], "SETTINGS": settings})  # noqa: S102 - our own
    assert capfd.readouterr().out == '42\nnull\n{"loss": 1}\n\N{REPLACEMENT CHARACTER}\ntraining\n'


def test_data_too_large_for_a_notebook_is_refused(tmp_path: Path) -> None:
    """Random bytes do not compress: base64 makes 4 of 3."""
    rows, plan = tmp_path / "rows.jsonl", tmp_path / "plan.json"
    rows.write_bytes(random.Random(0).randbytes(7_600_000))
    plan.write_text("{}")
    with pytest.raises(UsageError) as caught:
        colab.write_notebook(tmp_path / "n.ipynb", plan, gpu="T4", run_id="0", data={"rows.jsonl": rows}, packages=())
    assert caught.value.code == "local_input" and "10.3 MB" in caught.value.message  # with the program
    assert not (tmp_path / "n.ipynb").exists()


def test_colab_has_one_gpu_of_three_kinds() -> None:
    assert [colab.gpu_of(shipped_flavor(name)) for name in (colab.FLAVOR, "l4x1", "a100-large")] == ["T4", "L4", "A100"]
    for name in ("l4x4", "h200", "cpu-basic"):
        with pytest.raises(UsageError) as caught:
            colab.gpu_of(shipped_flavor(name))
        assert caught.value.code == "unknown_flavor"
