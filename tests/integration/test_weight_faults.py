"""Every row of every tensor of every family: a fault anywhere is named, and a correct file passes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import gguf_edit
import gguf_maker
import tiny
import tiny_families
from skill_train.gguf_file import GgufFile, read_gguf
from skill_train.verdict import Check, NotChecked
from skill_train.verify_weights import check_weights

Edit = Callable[[np.ndarray], None]
BLOCK = 34  # bytes of Q8_0: a scale in f16, and 32 numbers


def planted(good: GgufFile, tensor: str, edit: Edit, out: Path) -> GgufFile:
    """A copy of a file with another content of one tensor: `edit` gets its rows, numbers or bytes of Q8_0."""
    shutil.copy(good.path, out)
    where = good.tensors[tensor]
    data = np.memmap(out, dtype=np.uint8, mode="r+", offset=where.offset, shape=(where.n_bytes,))
    rows = data.reshape(where.elements // where.shape[0], -1)
    before = rows.copy()
    edit(rows.view({"F32": np.float32, "F16": np.float16}.get(where.kind, np.uint8)))
    assert (rows != before).any()
    return read_gguf(out)


def times(factor: float, row: int | slice = slice(None)) -> Edit:
    def edit(rows: np.ndarray) -> None:
        if rows.dtype == np.uint8:
            rows = rows.reshape(len(rows), -1, BLOCK)[..., :2].view(np.float16)
        rows[row] = rows[row] * np.asarray(factor, rows.dtype)

    return edit


def exchanged(a: Any, b: Any) -> Edit:
    def edit(rows: np.ndarray) -> None:
        rows[a], rows[b] = rows[b].copy(), rows[a].copy()

    return edit


def filled(value: float, row: int | slice = slice(None)) -> Edit:
    def edit(rows: np.ndarray) -> None:
        rows[row] = value

    return edit


def less_one(rows: np.ndarray) -> None:
    rows -= 1


def one_weight(rows: np.ndarray) -> None:
    """Too little for any figure of a row; of Q8_0 the signs of a block."""
    if rows.dtype == np.uint8:
        rows[11, 2:BLOCK].view(np.int8)[:] *= -1
    else:
        rows[11, 5] *= 1.01


def as_in(good: GgufFile, tensor: str) -> Edit:
    """The content of another tensor."""
    where = good.tensors[tensor]
    data = np.fromfile(good.path, np.uint8, where.n_bytes, offset=where.offset)

    def edit(rows: np.ndarray) -> None:
        rows[:] = data.view(rows.dtype).reshape(rows.shape)

    return edit


def faults(good: GgufFile) -> dict[str, tuple[str, Edit]]:
    """What can be wrong with this file, by a name: the tensor and the change."""
    last = good.tensors["token_embd.weight"].shape[1] - 1
    experts, rows = 4, 16 if "gemma" not in good.metadata["general.architecture"] else 32
    per_expert = 128
    found: dict[str, tuple[str, Edit]] = {
        "norm by 2 %": ("blk.1.attn_norm.weight", times(1.02)),
        "norm of the layer before": ("blk.1.attn_norm.weight", as_in(good, "blk.0.attn_norm.weight")),
        "norm + 1 dropped": ("blk.0.attn_norm.weight", less_one),
        "last norm + 1 dropped": ("output_norm.weight", less_one),
        "two embedding rows exchanged": ("token_embd.weight", exchanged(17, last - 5)),
        "neighbours in the embedding exchanged": ("token_embd.weight", exchanged(last // 2, last // 2 + 1)),
        "q bias of zeros": ("blk.0.attn_q.bias", filled(0.0)),
        "row of ffn_down of zeros": ("blk.1.ffn_down.weight", filled(0, 7)),
        "last row of ffn_up by 5 %": ("blk.0.ffn_up.weight", times(1.05, -1)),
        "two heads exchanged": ("blk.1.attn_q.weight", exchanged(slice(0, rows), slice(rows, 2 * rows))),
        "rows of q exchanged": ("blk.0.attn_q.weight", exchanged(2, 3)),
        "ffn_up of the other layer": ("blk.1.ffn_up.weight", as_in(good, "blk.0.ffn_up.weight"))
        if "blk.0.ffn_up.weight" in good.tensors
        else ("", less_one),
        "row of an expert by 5 %": ("blk.1.ffn_up_exps.weight", times(1.05, 2 * per_expert + 9)),
        "row of an expert's way down of zeros": ("blk.0.ffn_down_exps.weight", filled(0, experts * 64 - 1)),
        "two experts exchanged": (
            "blk.0.ffn_gate_exps.weight",
            exchanged(slice(0, per_expert), slice(2 * per_expert, 3 * per_expert)),
        ),
        "rows of the router exchanged": ("blk.1.ffn_gate_inp.weight", exchanged(0, 3)),
        "rope factors of one": ("rope_freqs.weight", filled(1.0)),
        "long rope factors of one": ("rope_factors_long.weight", filled(1.0)),
        "short rope factors exchanged": ("rope_factors_short.weight", lambda rows: exchanged(2, 3)(rows.T)),
        "one weight of the embedding": ("token_embd.weight", one_weight),
        "the embedding as output": ("output.weight", as_in(good, "token_embd.weight")),
    }
    return {name: (tensor, edit) for name, (tensor, edit) in found.items() if tensor in good.tensors}


def said(files: list[GgufFile], model: Path, adapter: Path | None = None) -> dict[str, Check]:
    found = check_weights(files, model, adapter)
    return {name: next(one for one in each if isinstance(one, Check)) for name, each in found.items()}


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize(
    "family",
    ["gemma1", "gemma2", "gemma3", "llama3", "llama-bias", "mixtral", "stablelm", "cohere", "starcoder2", "phi3-long"],
)
def test_a_planted_fault_is_named(family: str, kind: str, tmp_path: Path) -> None:
    good = read_gguf(tiny_families.gguf(family, kind))
    wrong = {name: (tensor, edit) for name, (tensor, edit) in faults(good).items()}
    assert len(wrong) >= 9
    files = {
        name: planted(good, tensor, edit, tmp_path / f"{number}.gguf")
        for number, (name, (tensor, edit)) in enumerate(wrong.items())
    }
    checks = said([good, *files.values()], tiny_families.folder(family))
    assert checks[good.path.name].verdict == "pass", checks[good.path.name].detail
    missed = {
        name: checks[file.path.name].detail
        for name, file in files.items()
        if checks[file.path.name].verdict != "fail" or wrong[name][0] not in checks[file.path.name].detail
    }
    assert missed == {}


@pytest.mark.parametrize("family", sorted(tiny_families.FAMILIES))
def test_every_tensor_of_a_correct_file_is_that_of_the_model(family: str) -> None:
    """No tensor is left out, and none is held to a wrong arrangement."""
    files = [read_gguf(tiny_families.gguf(family, kind)) for kind in ("f16", "q8_0")]
    for check in said(files, tiny_families.folder(family)).values():
        assert (check.verdict, check.figures["looked_at"]) == ("pass", len(files[0].tensors)), check.detail


def test_a_weight_that_was_left_out_is_named(tmp_path: Path) -> None:
    """llama.cpp loads such a file, and computes without the bias."""
    lost = gguf_edit.rewrite(
        tiny_families.gguf("stablelm"), tmp_path / "model-f16.gguf", without=("blk.0.attn_q.bias",)
    )
    check = said([read_gguf(lost)], tiny_families.folder("stablelm"))[lost.name]
    assert check.verdict == "fail" and "blk.0.attn_q.bias is missing" in check.detail


def test_what_differs_in_an_architecture_that_nobody_tried_is_not_judged(tmp_path: Path) -> None:
    """The difference may be an arrangement that is not known. The file does not pass, and does not fail."""
    good = read_gguf(tiny_families.gguf("stablelm"))
    files = [good, planted(good, "blk.1.attn_norm.weight", times(1.02), tmp_path / "norm.gguf")]
    for number, file in enumerate(files):
        (tmp_path / f"other-{number}.gguf").write_bytes(file.path.read_bytes().replace(b"stablelm", b"baichuan"))
    read = [read_gguf(tmp_path / f"other-{number}.gguf") for number in range(2)]
    found = check_weights(read, tiny_families.folder("stablelm"), None)
    same, differs = found["other-0.gguf"], found["other-1.gguf"]
    assert [one.verdict for one in same if isinstance(one, Check)] == ["pass"]
    check, not_checked = differs
    assert isinstance(check, Check) and check.verdict == "warn" and "blk.1.attn_norm.weight" in check.detail
    assert isinstance(not_checked, NotChecked) and "blk.1.attn_norm.weight" in not_checked.reason


@pytest.mark.parametrize("family", ["mixtral", "stablelm"])
def test_a_merge_in_bfloat16_passes_and_the_base_does_not(family: str, tmp_path: Path) -> None:
    base = tiny_families.folder(family)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    adapter = tiny.adapter(base, tmp_path / "adapter", targets=targets, size=0.1)
    merged = gguf_maker.merge(base, adapter, tmp_path / "merged")
    stored = merged / "model.safetensors"
    save_file({name: weight.bfloat16() for name, weight in load_file(stored).items()}, stored, {"format": "pt"})
    files = [read_gguf(gguf_maker.export(merged, tmp_path / "gguf", quants=("q8_0",)))]
    files += [read_gguf(tmp_path / "gguf" / "model-q8_0.gguf"), read_gguf(tiny_families.gguf(family, "q8_0"))]
    untuned = Path(shutil.copy(files.pop().path, tmp_path / "base.gguf"))
    checks = said([*files, read_gguf(untuned)], base, adapter)
    assert [checks[file.path.name].verdict for file in files] == ["pass", "pass"], checks
    assert checks["base.gguf"].verdict == "fail" and "attn_" in checks["base.gguf"].detail


@pytest.mark.parametrize(
    ("model", "file"),
    [
        ("falcon7", "bloom"),
        ("bloom", "falcon"),
        ("mamba", "llama3"),
        ("qwen3moe", "deepseek2"),
        ("deepseek3", "falcon"),
    ],
)
def test_a_file_of_another_architecture_fails_and_does_not_end_the_command(model: str, file: str) -> None:
    gguf = read_gguf(tiny_families.gguf(file))
    assert said([gguf], tiny_families.folder(model))[gguf.path.name].verdict == "fail"


@pytest.mark.parametrize("size", [1e-24, 1e-8, 1e-6, 1e-5])
def test_rows_of_tokens_that_nobody_trained_are_no_fault(size: float, tmp_path: Path) -> None:
    """Llama 3's reserved tokens have embeddings next to nothing, which the scales of a quantized type, in f16, cannot
    hold: the row is zeros in the file. Other rows are still compared."""
    model = Path(shutil.copytree(tiny.cached("gemma", hidden=256), tmp_path / "model"))
    stored = model / "model.safetensors"
    weights = load_file(stored)
    weights["model.embed_tokens.weight"][300:340] *= size
    save_file(weights, stored, {"format": "pt"})
    kinds = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "q2_k", "iq4_xs")
    gguf_maker.export(model, tmp_path / "gguf", quants=kinds)
    files = [read_gguf(file) for file in sorted((tmp_path / "gguf").iterdir())]
    assert len(files) == 1 + len(kinds)
    assert {name: one.detail for name, one in said(files, model).items() if one.verdict != "pass"} == {}
    quantized = next(file for file in files if file.path.name == "model-q8_0.gguf")
    wrong = planted(quantized, "token_embd.weight", exchanged(17, 320), tmp_path / "wrong.gguf")
    assert said([wrong], model)["wrong.gguf"].verdict == "fail"
