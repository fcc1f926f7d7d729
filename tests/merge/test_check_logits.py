"""The gate must go red for a merge that is not base + adapter, stay green for a correct one, and cost little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import merging
from skill_train.core.errors import VerificationFailed
from skill_train.merge import check_logits

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Base, adapter and a correct merge, by stored dtype."""
    folder = tmp_path_factory.mktemp("made")
    bases = {dtype: merging.llama(folder / dtype, dtype=dtype, tied=True) for dtype in ("float32", "bfloat16")}
    for dtype, base in bases.items():
        adapter = merging.adapter(base, folder / f"{dtype}-adapter", size=0.1)
        (folder / f"{dtype}-out").mkdir()
        merging.run(base, adapter, folder / f"{dtype}-out")
    return {"folder": folder}


def judge(folder: Path, dtype: str, break_it: Callable[[dict[str, Any]], None] | None, work: Path) -> dict[str, Any]:
    """The gate's outcome for the correct merge with something broken in it."""
    merged = work / "broken"
    merged.mkdir()
    for file in (folder / f"{dtype}-out" / "merged").iterdir():
        (merged / file.name).write_bytes(file.read_bytes())
    if break_it:
        tensors = load_file(merged / "model.safetensors")
        break_it(tensors)
        save_file(tensors, merged / "model.safetensors", metadata={"format": "pt"})
    return check_logits.gate(
        check_logits.GateRequest(
            base=folder / dtype, adapter=folder / f"{dtype}-adapter", merged=merged, rows=merging.ROWS
        ),
        stored={"float32": "F32", "bfloat16": "BF16"}[dtype],
        kept_share=1.0,
        bar=lambda done, total, text: None,
    )


def _zeroed(tensors: dict[str, Any]) -> None:
    tensors["model.layers.1.mlp.down_proj.weight"].zero_()


def _one_row_lost(tensors: dict[str, Any]) -> None:
    tensors["model.layers.0.self_attn.v_proj.weight"][5].zero_()


def _rows_permuted(tensors: dict[str, Any]) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].flip(0).contiguous()


def _infinite(tensors: dict[str, Any]) -> None:
    tensors["model.norm.weight"][0] = float("inf")


def _scaled(factor: float, base: Path) -> Callable[[dict[str, Any]], None]:
    """Every update `factor` times as large."""

    def change(tensors: dict[str, Any]) -> None:
        for name, before in merging.weights(base).items():
            tensors[name] = (before.float() + factor * (tensors[name].float() - before.float())).to(before.dtype)

    return change


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_green_for_the_correct_merge(dtype: str, made: dict[str, Path], tmp_path: Path) -> None:
    outcome = judge(made["folder"], dtype, None, tmp_path)
    assert outcome["verdict"] == "pass" and outcome["failures"] == []
    assert outcome["figures"]["tokens"] == 4 * 59 and outcome["effect"]["kl_between"] > 1e-3
    assert outcome["effect"]["share"] == pytest.approx(1, abs=0.01)
    assert not list((tmp_path / "broken").glob(".gate*"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", [_zeroed, _one_row_lost, _rows_permuted, _infinite])
def test_red_for_a_broken_tensor(fault: Any, dtype: str, made: dict[str, Path], tmp_path: Path) -> None:
    assert judge(made["folder"], dtype, fault, tmp_path)["verdict"] == "fail"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("factor", [0.0, 0.5, 0.9, 1.1, 2.0, -1.0])
def test_red_for_a_wrong_scale(factor: float, dtype: str, made: dict[str, Path], tmp_path: Path) -> None:
    """0 is an adapter left out, 2 one that was applied twice."""
    outcome = judge(made["folder"], dtype, _scaled(factor, made["folder"] / dtype), tmp_path)
    assert outcome["verdict"] == "fail"


def test_a_failed_gate_leaves_figures_and_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter's config changes between the merge and the gate: alpha is read as twice what it was."""
    base = merging.llama(tmp_path / "base")
    adapter = merging.adapter(base, tmp_path / "adapter", targets=["q_proj", "v_proj"], alpha=16)
    real = check_logits.gate

    def later(request: check_logits.GateRequest, **arguments: Any) -> Any:
        merging.edit(adapter / "adapter_config.json", lora_alpha=32)
        return real(request, **arguments)

    monkeypatch.setattr(check_logits, "gate", later)
    with pytest.raises(VerificationFailed) as raised:
        merging.run(base, adapter, tmp_path)
    assert (raised.value.exit_code, raised.value.code) == (6, "merge_gate")
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter", "merge.failed.json"}
    failed = json.loads((tmp_path / "merge.failed.json").read_text())
    assert failed["gate"]["verdict"] == "fail" and failed["gate"]["figures"]["mean_kl"] > 1e-3
    assert str(failed["gate"]["figures"]["mean_kl"]) in raised.value.got


def test_an_adapter_without_effect_is_a_warning(tmp_path: Path) -> None:
    base = merging.llama(tmp_path / "base", dtype="bfloat16")
    adapter = merging.adapter(base, tmp_path / "adapter", targets=["q_proj"])
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({n: t * 0 if "lora_B" in n else t for n, t in tensors.items()}, adapter / "adapter_model.safetensors")
    record = merging.run(base, adapter, tmp_path)
    assert record["warned"] == ["no_effect"] and record["gate"]["effect"]["kl_between"] == 0
    for name, tensor in merging.weights(base).items():
        assert torch.equal(tensor, merging.weights(tmp_path / "merged")[name])


@pytest.mark.parametrize(("size", "kept"), [(2e-3, 0.83), (2e-4, 0.13)])
def test_what_rounding_loses_is_said(size: float, kept: float, tmp_path: Path) -> None:
    """A bf16 step is 0.4 to 0.8 % of a weight; changes of a fraction of it mostly round away."""
    base = merging.llama(tmp_path / "base", dtype="bfloat16")
    adapter = merging.adapter(base, tmp_path / "adapter", size=size)
    if kept > 0.5:
        record = merging.run(base, adapter, tmp_path)
        assert record["warned"] == ["rounding_loss"]
        changes, effect = record["changes"], record["gate"]["effect"]
        assert changes["kept_after_rounding"] == pytest.approx(kept, abs=0.03)
        assert effect["share"] == pytest.approx(kept, abs=0.1)
        return
    with pytest.raises(VerificationFailed, match="rounding leaves only") as raised:
        merging.run(base, adapter, tmp_path)
    assert "--dtype float32" in raised.value.hint
    assert merging.run(base, adapter, tmp_path, dtype="float32")["gate"]["effect"]["share"] == pytest.approx(
        1, abs=1e-3
    )


def test_texts_are_bounded_and_never_missing(tmp_path: Path) -> None:
    base = merging.llama(tmp_path / "base")
    many = [{"input_ids": [1] * 300}, {"input_ids": [5]}, *[{"input_ids": [2] * 100}] * 50]
    texts = check_logits.choose_texts(many, base)
    assert texts.tokens == check_logits.MAX_TOKENS and max(map(len, texts.ids)) == 256  # the model's context
    assert "no tokenizer" in check_logits.choose_texts([], base).source


_CHILD = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from safetensors import safe_open
import torch
from skill_train.core.memory import peak_memory_bytes as peak
from skill_train.model.adapter import read_adapter
from skill_train.merge.plan import Base, plan_merge
from skill_train.merge.write import Target, write_shards
from skill_train.model.weight_files import read_folder
base, adapter, out = map(Path, sys.argv[1:])
torch.ones(64, 64) @ torch.ones(64, 64)
before = peak()
model = Base(base, json.loads((base / "config.json").read_text()), read_folder(base))
with ThreadPoolExecutor(4) as pool:
    tally = write_shards(model, plan_merge(model, read_adapter(adapter)), Target(out, None), lambda *_: None, pool)
print(json.dumps({"grew": peak() - before, "changed": tally.changed}))
"""


def test_memory_stays_far_below_the_model(tmp_path: Path) -> None:
    """A base of 600 MB in 8 shards, the last of them one tensor."""
    base, adapter, out = (tmp_path / name for name in ("base", "adapter", "out"))
    for folder in (base, adapter, out):
        folder.mkdir()
    wide = 3072
    block = torch.randn(wide, wide, dtype=torch.float32).mul_(0.02).to(torch.bfloat16)
    weight_map, changes = {}, {}
    for shard in range(8):
        name = f"model-{shard + 1:05}-of-00008.safetensors"
        stem = f"model.layers.{shard}.mlp"
        tensors = {f"{stem}.{part}_proj.weight": block.clone() for part in ("gate", "up", "down", "x")}
        if shard == 7:
            tensors = {f"{stem}.up_proj.weight": block.repeat(4, 1)}
        save_file(tensors, base / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        for target, weight in tensors.items():
            lora = f"base_model.model.{target.removesuffix('weight')}lora"
            changes |= {f"{lora}_A.weight": torch.randn(4, wide), f"{lora}_B.weight": torch.randn(len(weight), 4)}
    (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (base / "config.json").write_text('{"model_type": "llama"}')
    save_file(changes, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    size = sum(file.stat().st_size for file in base.iterdir())
    command = [sys.executable, "-c", _CHILD, str(base), str(adapter), str(out)]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert size > 600e6 and result["changed"] == 29
    assert result["grew"] < size / 5  # blocks of 16 MB in fp32, a few at a time; the last tensor has 75 MB in bf16
    first = "model.layers.3.mlp.up_proj"
    a, b = (changes[f"base_model.model.{first}.lora_{letter}.weight"] for letter in "AB")
    exact = (block.float() + 2.0 * (b @ a)).to(torch.bfloat16)
    found = load_file(out / "model-00004-of-00008.safetensors")[f"{first}.weight"]
    assert (found == exact).float().mean() > 0.999
