"""What an export says of its files: which one the Modelfile, `chat` and `serve` take, and how another is chosen."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gguf_bytes
from skill_train.commands._export import Export, MatrixOrder
from skill_train.commands._export_answer import ExportedFiles, result_of
from skill_train.commands._shipping import _sizes
from skill_train.run.folder import RunDir

_IQ3_S = 21  # GGML_TYPE_IQ3_S: 110 bytes for 256 weights


def _exported(run: Path, types: list[str], named: str) -> ExportedFiles:
    outputs: list[Any] = [
        {"path": str(run / "gguf" / f"run-{quant}.gguf"), "bytes": 1, "sha256": "a", "quant": quant}
        for quant in ("f16", "q8_0", "q4_k_m", "auto-4bpw")
    ]
    export = Export(
        run / "merged", run / "gguf", run, "run", types, MatrixOrder(None, None), None, None, None, RunDir(run)
    )
    return ExportedFiles(export, outputs, None, f"run-{named}.gguf", "it was chosen")


@pytest.mark.parametrize(
    ("types", "named", "following"),
    [
        (["q8_0", "q4_k_m"], "q4_k_m", ["skill-train chat {run} --prompt Hello"]),
        (["q8_0", "q4_k_m"], "q8_0", ["skill-train chat {run} --prompt Hello"]),
        (
            ["q4_k_m"], "q8_0",
            ["skill-train chat {run} --prompt Hello --file q4_k_m",
             "skill-train export-gguf {run} --quant q4_k_m --modelfile q4_k_m"],
        ),
        (["auto-4bpw"], "q8_0", ["skill-train chat {run} --prompt Hello --file auto-4bpw"]),
    ],
)  # fmt: skip
def test_what_comes_next_is_about_the_files_that_were_asked_for(
    tmp_path: Path, types: list[str], named: str, following: list[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "plan.json").write_text("{}")
    result = result_of(_exported(run, types, named), {"ollama": "ollama create"}, None, None)
    assert result.next[1:] == [line.format(run=run) for line in following]


def test_what_comes_next_for_a_model_folder_is_not_about_the_run_around_it(tmp_path: Path) -> None:
    """Such as the files of the base in RUN/base-gguf, which `export-gguf --lora` names."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "plan.json").write_text("{}")
    done = _exported(run, ["q8_0"], "q8_0")
    export = replace(done.export, model=tmp_path / "base", out=run / "base-gguf", records=run / "base-gguf", run=None)
    last = done.outputs[-1]["path"]
    following = result_of(replace(done, export=export), {"ollama": "ollama create"}, None, None).next
    assert following[0].startswith(f"skill-train verify --reference {tmp_path / 'base'} --gguf ")
    assert following[1:] == [f"skill-train chat {last} --prompt Hello"]


def test_a_person_reads_which_file_is_used(tmp_path: Path) -> None:
    from rich.console import Console

    shown = Console(file=io.StringIO(), width=200)
    done = _exported(tmp_path / "run", ["q4_k_m"], "q8_0")
    result_of(done, {"ollama": "ollama create"}, None, None).human(shown)
    assert "Modelfile, chat and serve use run-q8_0.gguf: it was chosen" in shown.file.getvalue()  # type: ignore[attr-defined]


def test_the_share_of_a_mix_that_is_looked_up_in_tables(tmp_path: Path) -> None:
    """By hand: 258 x 32 weights of an embedding are not read. As many of the head are, 32 of the last norm, and in each
    of 2 layers 64 of norms, 1024 + 512 + 512 + 1024 of the attention and 3 x 2048: 26,848. 2,048 are in iq3_s."""
    file = gguf_bytes.whole()
    row = file.row("blk.0.ffn_gate.weight")
    row.dims, row.kind, row.data = [256, 8], _IQ3_S, bytes(8 * 110)
    path = file.write(tmp_path / "mix.gguf")
    listed = {"quant": "auto-4bpw", "bytes": path.stat().st_size, "path": str(path)}
    sizes = _sizes(listed, 0)  # type: ignore[arg-type]
    assert sizes.unread == 258 * 32 * 4 and sizes.looked_up == pytest.approx(2048 / 26_848)
