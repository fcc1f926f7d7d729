"""Which file a Modelfile names."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from skill_train.commands._export import Export, MatrixOrder
from skill_train.commands._export_answer import modelfile_of
from skill_train.gguf.export_files import model_of

OUTPUTS: list[Any] = [{"quant": quant, "path": f"gguf/run-{quant}.gguf"} for quant in ("f16", "q8_0", "q4_k_m")]


def chosen(folder: Path, outputs: list[Any], *types: str, asked: str | None = None) -> str:
    export = Export(folder, folder, folder, "run", list(types), MatrixOrder(None, None), None, None, None)
    return modelfile_of(export, asked, outputs, "run-f16.gguf")[0]


def test_the_last_type_that_was_asked_for_whatever_the_order_of_the_record(tmp_path: Path) -> None:
    """A quantization that was killed and goes on records its files in another order."""
    for outputs in permutations(OUTPUTS):
        assert chosen(tmp_path, list(outputs), "q8_0", "q4_k_m") == "run-q4_k_m.gguf"
        assert chosen(tmp_path, list(outputs), "q4_k_m", "q8_0") == "run-q8_0.gguf"


def test_a_type_that_was_not_made_is_not_named(tmp_path: Path) -> None:
    assert chosen(tmp_path, OUTPUTS[:1], "q8_0") == "run-f16.gguf"


@pytest.mark.parametrize(
    ("earlier", "expected"),
    [
        ("FROM ./run-q8_0.gguf\n", "run-q8_0.gguf"),
        ("FROM run-q8_0.gguf\n", "run-q8_0.gguf"),
        ("FROM ./gone.gguf\n", "run-q4_k_m.gguf"),
        ("FROM llama3.2\n", "run-q4_k_m.gguf"),
        ("FROM ../run-q8_0.gguf\n", "run-q4_k_m.gguf"),
        ("", "run-q4_k_m.gguf"),
    ],
)
def test_the_file_that_was_chosen_stays_while_it_is_there(tmp_path: Path, earlier: str, expected: str) -> None:
    folder = tmp_path / "gguf"
    folder.mkdir()
    for place in (folder, tmp_path):
        (place / "run-q8_0.gguf").write_bytes(b"")
    (folder / "Modelfile").write_text(earlier)
    assert chosen(folder, OUTPUTS, "q4_k_m") == expected
    assert chosen(folder, OUTPUTS, "q4_k_m", asked="q8_0") == "run-q8_0.gguf"


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("# made by hand\nFROM ./a-q8_0.gguf\nPARAMETER stop x\n", "./a-q8_0.gguf"),
        ("from   /models/a b.gguf  \n", "/models/a b.gguf"),
        ("PARAMETER stop FROM\n", None),
        ("", None),
    ],
)
def test_the_model_that_a_modelfile_names(text: str, model: str | None, tmp_path: Path) -> None:
    (tmp_path / "Modelfile").write_text(text)
    assert model_of(tmp_path / "Modelfile") == model
    assert model_of(tmp_path / "none") is None
