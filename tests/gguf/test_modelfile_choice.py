"""Which file a Modelfile names."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest

from skill_train.commands.export_gguf import _for_ollama
from skill_train.gguf.export_files import model_of

OUTPUTS = [{"quant": quant, "path": f"gguf/run-{quant}.gguf"} for quant in ("f16", "q8_0", "q4_k_m")]


def test_the_last_type_that_was_asked_for_whatever_the_order_of_the_record() -> None:
    """A quantization that was killed and goes on records its files in another order."""
    for outputs in permutations(OUTPUTS):
        assert _for_ollama(list(outputs), ["q8_0", "q4_k_m"]) == "run-q4_k_m.gguf"
        assert _for_ollama(list(outputs), ["q4_k_m", "q8_0"]) == "run-q8_0.gguf"


def test_a_type_that_was_not_made_is_not_named() -> None:
    assert _for_ollama(OUTPUTS[:1], ["q8_0"]) == ""


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
