"""Every row of every tensor of every family: a fault anywhere is named, and a correct file passes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import gguf_edit
import gguf_maker
import tiny
import tiny_families
from gguf_faults import check_weights, exchanged, of_weights, planted, times
from skill_train.llama.gguf_header import GgufFile, read_gguf
from skill_train.run.verify_record import Check, NotChecked
from skill_train.verify.weights.tensors import check_tensors

pytestmark = pytest.mark.slow


def said(files: list[GgufFile], model: Path, adapter: Path | None = None, base: Path | None = None) -> dict[str, Check]:
    found = check_weights(files, model, adapter, base)
    return {name: next(one for one in each if isinstance(one, Check)) for name, each in found.items()}


# In every run; `make walks` plants them in files of all families.
_SAMPLE = {"gemma3", "llama3", "granitehybrid"}
_CASES = [
    pytest.param(family, kind, marks=[] if family in _SAMPLE else pytest.mark.torture)
    for family in sorted(tiny_families.FAMILIES)
    for kind in ("f16", "q8_0")
]


@pytest.mark.parametrize(("family", "kind"), _CASES)
def test_a_planted_fault_is_named(family: str, kind: str, tmp_path: Path) -> None:
    good = read_gguf(tiny_families.gguf(family, kind))
    wrong = of_weights(good)
    assert len(wrong) >= 6
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


@pytest.mark.parametrize(
    ("kind", "tensor", "block", "factor"),  # bytes of a block, which begins with its scale
    [("q4_0", "blk.0.attn_v.weight", 18, 1.1), ("q4_k_m", "blk.1.ffn_up.weight", 22, 0.9)],
)
def test_a_scale_that_the_rows_of_a_coarse_type_do_not_show(
    kind: str, tensor: str, block: int, factor: float, tmp_path: Path
) -> None:
    """A row of Q4_0 may be off by 0.3 of its length, and one of Q5_0 by 0.15."""

    def edit(rows: np.ndarray) -> None:
        scales = rows.reshape(len(rows), -1, block)[..., :2].view(np.float16)
        scales *= np.float16(factor)

    good = read_gguf(tiny_families.gguf("llama3", kind))
    wrong = planted(good, tensor, edit, tmp_path / "wrong.gguf")
    checks = said([good, wrong], tiny_families.folder("llama3"))
    assert checks[good.path.name].verdict == "pass", checks[good.path.name].detail
    assert checks["wrong.gguf"].verdict == "fail" and f"{tensor} is " in checks["wrong.gguf"].detail
    unquantized = read_gguf(tiny_families.gguf("llama3"))
    found = [
        check_tensors(file, unquantized=unquantized, needs_output="", reference=tiny_families.folder("llama3"))
        for file in (good, wrong)
    ]
    assert [check.verdict for check in found] == ["pass", "fail"] and "times the unquantized" in found[1].detail


@pytest.mark.parametrize("family", tiny_families.by_default())
def test_every_tensor_of_a_correct_file_is_that_of_the_model(family: str) -> None:
    """No tensor is left out, and none is held to a wrong arrangement."""
    files = [read_gguf(tiny_families.gguf(family, kind)) for kind in ("f16", "q8_0")]
    for check in said(files, tiny_families.folder(family)).values():
        assert (check.verdict, check.figures["looked_at"]) == ("pass", len(files[0].tensors)), check.detail


@pytest.mark.parametrize("family", tiny_families.by_default())
def test_a_tensor_of_which_the_model_has_nothing_is_named(family: str) -> None:
    good = read_gguf(tiny_families.gguf(family))
    tensor, wrong = next(iter(good.tensors.values())), "blk.1.ffn_down.scale"
    more = replace(good, tensors=good.tensors | {wrong: replace(tensor, name=wrong)})
    check = said([more], tiny_families.folder(family))
    assert check[good.path.name].verdict == "fail" and wrong in check[good.path.name].detail


def test_the_embedding_once_more_as_the_output_of_a_tied_model() -> None:
    good = read_gguf(tiny_families.gguf("gemma3"))
    embedding = replace(good.tensors["token_embd.weight"], name="output.weight")
    twice = replace(good, tensors=good.tensors | {embedding.name: embedding})
    assert said([twice], tiny_families.folder("gemma3"))[good.path.name].verdict == "pass"


@pytest.mark.parametrize("times", [2, 0.5])
def test_part_of_the_change_of_one_weight_is_named(times: float, tmp_path: Path) -> None:
    """The adapter's change is a tenth of the weight: in a coarse type no row is too far off."""
    good = gguf_maker.exported("gemma")
    file, module = read_gguf(good.file("q4_k_m")), "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    adapter = Path(shutil.copytree(good.adapter, tmp_path / "adapter"))
    parts = load_file(adapter / "adapter_model.safetensors")
    save_file(parts | {module: times * parts[module]}, adapter / "adapter_model.safetensors")
    assert said([file], good.base, good.adapter)[file.path.name].verdict == "pass"
    check = said([file], good.base, adapter)[file.path.name]
    assert check.verdict == "fail"
    assert f"blk.1.ffn_up.weight holds {1 / times:.2f} of the adapter's change" in check.detail


def test_a_file_without_the_change_of_dora_is_named(tmp_path: Path) -> None:
    """The change is 5 % of the weight, and makes its rows 2 % longer: in a coarse type no row is too far off."""
    base = tiny.cached("gemma", hidden=256)
    adapter = tiny.adapter(base, tmp_path / "adapter", size=0.05, use_dora=True)
    parts, weights = load_file(adapter / "adapter_model.safetensors"), load_file(base / "model.safetensors")
    for name in (name for name in parts if name.endswith(".lora_magnitude_vector")):
        module = name.removeprefix("base_model.model.").removesuffix(".lora_magnitude_vector")
        parts[name] = 1.02 * weights[f"{module}.weight"].norm(dim=1)
    save_file(parts, adapter / "adapter_model.safetensors", {"format": "pt"})
    for applied, verdict in ((1, "pass"), (0, "fail")):
        merged = gguf_maker.merge(base, adapter, tmp_path / f"merged-{applied}", times=applied)
        gguf_maker.export(merged, tmp_path / f"gguf-{applied}", quants=("q4_k_m", "q2_k"))
        files = [read_gguf(tmp_path / f"gguf-{applied}" / f"model-{kind}.gguf") for kind in ("q4_k_m", "q2_k")]
        for check in said(files, base, adapter).values():
            assert check.verdict == verdict, check.detail
            assert ("of the adapter's change" in check.detail) == (applied == 0)


@pytest.mark.parametrize("size", [0.05, 1e-4])
def test_a_tensor_of_the_base_in_a_file_of_full_fine_tuning_is_named(size: float, tmp_path: Path) -> None:
    """The change is 5 % of each weight: in a coarse type no row is too far off. One of 1e-4 is less than types hold."""
    base, name = tiny.cached("gemma", hidden=256), "model.layers.1.mlp.up_proj.weight"
    before, draw = load_file(base / "model.safetensors"), torch.Generator().manual_seed(0)
    trained = {
        key: weight + size * weight.std() * torch.randn(weight.shape, generator=draw) if weight.ndim > 1 else weight
        for key, weight in before.items()
    }
    twice = {key: 2 * weight - before[key] for key, weight in trained.items()}
    kinds = ("f16", "q8_0", "q4_k_m", "q3_k_m", "q2_k", "tq1_0")
    found = {}
    for label, weights in {"right": trained, "left": trained | {name: before[name]}, "twice": twice}.items():
        model = Path(shutil.copytree(base, tmp_path / label))
        save_file(weights, model / "model.safetensors", {"format": "pt"})
        gguf_maker.export(model, tmp_path / f"{label}-gguf", quants=kinds[1:])
        files = [read_gguf(tmp_path / f"{label}-gguf" / f"model-{kind}.gguf") for kind in kinds]
        checks = said(files, tmp_path / "right", None, base).values()
        found[label] = [check.detail for check in checks if check.verdict == "fail"]
    assert found["right"] == []
    if size == 0.05:
        assert "blk.1.ffn_up.weight holds 0.0" in found["left"][2], found
        assert [len(found[label]) for label in ("left", "twice")] == [5, 6]  # one tensor of Q2_K does not tell


def test_a_weight_that_was_left_out_is_named(tmp_path: Path) -> None:
    """llama.cpp loads such a file, and computes without the bias."""
    good, name = tiny_families.gguf("stablelm"), "blk.0.attn_q.bias"
    lost = read_gguf(gguf_edit.without_tensor(good, tmp_path / "model-f16.gguf", name))
    assert lost.tensors.keys() ^ read_gguf(good).tensors.keys() == {name}
    check = said([lost], tiny_families.folder("stablelm"))[lost.path.name]
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


def test_an_architecture_that_an_older_gguf_does_not_know_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gguf that is older than an architecture, as 0.17 was for LFM2, has no names for it. The output of this model is
    its embedding, so a correct file has no output.weight."""
    good = read_gguf(tiny_families.gguf("lfm2"))
    assert "output.weight" not in good.tensors
    monkeypatch.delitem(gguf.constants.MODEL_ARCH_NAMES, gguf.MODEL_ARCH.LFM2)
    check, not_checked = check_weights([good], tiny_families.folder("lfm2"), None)[good.path.name]
    assert isinstance(check, Check) and check.verdict == "warn", check.detail
    assert isinstance(not_checked, NotChecked) and "gguf has no names for lfm2" in not_checked.reason


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
        pytest.param("qwen3moe", "deepseek2", marks=pytest.mark.torture),
        ("deepseek3", "falcon"),
    ],
)
def test_a_file_of_another_architecture_fails_and_does_not_end_the_command(model: str, file: str) -> None:
    gguf = read_gguf(tiny_families.gguf(file))
    assert said([gguf], tiny_families.folder(model))[gguf.path.name].verdict == "fail"


@pytest.mark.parametrize("size", [1e-24, 1e-6, *(pytest.param(n, marks=pytest.mark.torture) for n in (1e-8, 1e-5))])
def test_rows_of_tokens_that_nobody_trained_are_no_fault(size: float, tmp_path: Path) -> None:
    """Llama 3's reserved tokens have embeddings next to nothing, which the scales of a quantized type, in f16, cannot
    hold: the row is zeros in the file. Other rows are still compared."""
    model = Path(shutil.copytree(tiny.cached("gemma", hidden=256), tmp_path / "model"))
    stored = model / "model.safetensors"
    weights = load_file(stored)
    weights["model.embed_tokens.weight"][300:340] *= size
    save_file(weights, stored, {"format": "pt"})
    kinds = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "q2_k", "iq4_xs", "tq1_0", "tq2_0")
    gguf_maker.export(model, tmp_path / "gguf", quants=kinds)
    files = [read_gguf(file) for file in sorted((tmp_path / "gguf").iterdir())]
    assert len(files) == 1 + len(kinds)
    assert {name: one.detail for name, one in said(files, model).items() if one.verdict != "pass"} == {}
    quantized = next(file for file in files if file.path.name == "model-q8_0.gguf")
    wrong = planted(quantized, "token_embd.weight", exchanged(17, 320), tmp_path / "wrong.gguf")
    assert said([wrong], model)["wrong.gguf"].verdict == "fail"
