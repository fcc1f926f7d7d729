"""A base or data that changed behind a run: no later step takes the one for the other."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import tiny
from command_child import Commands, Done
from skill_train.model.folder import fingerprint

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, rows, and an exported run of three steps."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(tiny.cached("gemma"), folder / "base")
    tiny.write_rows(folder / "rows.jsonl", 24)
    recipe = "model: base\ndata: rows.jsonl\nmax_steps: 3\nmax_length: 96\n"
    (folder / "recipe.yaml").write_text(recipe)
    for line in ("local recipe.yaml --run-dir run", "export-gguf run --quant q8_0"):
        done = _call(commands, folder, line)
        assert done.code == 0, done.stdout + done.stderr
    return folder


# --- The base of a finished run ---


@pytest.mark.parametrize("line", ["merge run", "export-gguf run --lora", "verify run", "evaluate run"])
def test_a_base_that_was_replaced_is_refused(commands: Commands, trained: Path, line: str) -> None:
    """Else a model that was never trained would be merged, or proven as the one that was."""
    base, weights = trained / "base", trained / "base" / "model.safetensors"
    was, kept = fingerprint(base), weights.read_bytes()
    _other_weights(weights)
    try:
        done = _call(commands, trained, line)
        assert done.error == (2, "input_changed"), done.stdout + done.stderr
        error = done.answer["error"]
        assert str(base) in error["message"]
        assert was[:12] in error["expected"] and fingerprint(base)[:12] in error["got"]
    finally:
        weights.write_bytes(kept)


def test_the_same_base_brought_back_is_taken(commands: Commands, trained: Path) -> None:
    """Files of another time, beside a folder that is none of the model's."""
    base = trained / "base"
    shutil.copytree(base, trained / "copy")
    shutil.rmtree(base)
    shutil.copytree(trained / "copy", base, copy_function=shutil.copyfile)
    (base / "runs").mkdir()
    assert _call(commands, trained, "export-gguf run --quant q8_0").data["reused"] is True
    assert _call(commands, trained, "verify run --tokens 64").answer["ok"] is True


def _call(commands: Commands, folder: Path, line: str) -> Done:
    return commands.run(folder, dict(os.environ), *line.split(), "--format", "json")


def _other_weights(path: Path) -> None:
    """A model of the same shape."""
    from safetensors.numpy import load_file, save_file

    tensors = {name: tensor + 0.01 for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
