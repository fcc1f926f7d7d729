"""The gate over weights must go red for one wrong row, name the tensor, and stay green for a correct merge."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import merging
from skill_train.core.errors import UsageError, VerificationFailed
from skill_train.merge import check_weights
from skill_train.merge import write as merge_write
from skill_train.merge.plan import Base
from skill_train.model.adapter import read_adapter
from skill_train.model.weight_files import read_folder, read_shard

pytestmark = pytest.mark.slow

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By stored dtype: base, adapter, and PEFT's own merge, rounded."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("made")
    for dtype in ("float32", "bfloat16", "float16"):
        base = merging.llama(folder / dtype, dtype=dtype, tied=True)
        adapter = merging.adapter(base, folder / f"{dtype}-adapter", size=0.1)
        model = AutoModelForCausalLM.from_pretrained(str(base), dtype=torch.float32)
        merged = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
        merged.to(getattr(torch, dtype)).save_pretrained(str(folder / f"{dtype}-merged"))
    return folder


def judge(
    made: Path, dtype: str, work: Path, break_it: Callable[[dict[str, Any]], None] | None, kept: float = 1.0
) -> dict[str, Any]:
    """The outcome for PEFT's merge with something broken in it."""
    tensors = load_file(made / f"{dtype}-merged" / "model.safetensors")
    if break_it:
        break_it(tensors)
    save_file(tensors, work / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((made / dtype / "config.json").read_text())
    base, adapter = Base(made / dtype, config, read_folder(made / dtype)), read_adapter(made / f"{dtype}-adapter")
    assert check_weights.why_not(base, adapter, []) == ""
    scales = check_weights.scales_of(adapter, list(base.tensors))
    with ThreadPoolExecutor(2) as pool:
        names = list(base.tensors | tensors)
        found = check_weights.compare_tensors(names, base.shards[0], work / "model.safetensors", adapter, scales, pool)
    stored = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[dtype]
    return check_weights.outcome(found, stored=stored, kept_share=kept)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_red_for_a_lost_row_of_a_small_tuning(dtype: str, tmp_path: Path) -> None:
    """A change that is smaller than what bf16 rounds: the length of a row does not tell that it is missing."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = merging.llama(tmp_path / dtype, dtype=dtype, tied=True)
    before = load_file(base / "model.safetensors")[UP].float()
    adapter = merging.adapter(base, tmp_path / f"{dtype}-adapter", size=0.003)
    model = AutoModelForCausalLM.from_pretrained(str(base), dtype=torch.float32)
    merged = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    share = float((merged.state_dict()[UP] - before).norm() / before.norm())
    assert 0.001 < share < 0.01
    merged.to(getattr(torch, dtype)).save_pretrained(str(tmp_path / f"{dtype}-merged"))
    kept = judge(tmp_path, dtype, tmp_path, None)["effect"]["share"]  # rounding swallows a part of so small a change
    assert judge(tmp_path, dtype, tmp_path, None, kept)["failures"] == []

    def lose(tensors: dict[str, Any]) -> None:
        tensors[UP][5] = before[5].to(tensors[UP].dtype)

    assert any(UP in failure for failure in judge(tmp_path, dtype, tmp_path, lose, kept)["failures"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_green_for_pefts_merge(dtype: str, made: Path, tmp_path: Path) -> None:
    outcome = judge(made, dtype, tmp_path, None)
    assert outcome["failures"] == []
    assert outcome["figures"]["tensors"] == 2 * 9 + 2 and outcome["figures"]["changed"] == 2 * 7
    assert outcome["figures"]["worst_row"] < check_weights.ROW_ERROR[outcome["stored_dtype"]] / 3
    assert outcome["effect"]["share"] == pytest.approx(1, abs=1e-3)


def _zeroed(tensors: dict[str, Any]) -> None:
    tensors[UP][5].zero_()


def _permuted(tensors: dict[str, Any]) -> None:
    tensors[UP] = tensors[UP].flip(0).contiguous()


def _not_a_number(tensors: dict[str, Any]) -> None:
    tensors[UP][5, 5] = float("nan")


def _a_norm_moved(tensors: dict[str, Any]) -> None:
    tensors["model.norm.weight"][0] *= 1.01


def _reshaped(tensors: dict[str, Any]) -> None:
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].bfloat16().reshape(64, -1)


def _one_left_out(made: Path, dtype: str) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.update({UP: merging.weights(made / dtype)[UP]})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("fault", [_zeroed, _permuted, _not_a_number, _a_norm_moved, _reshaped])
def test_red_for_one_row(fault: Any, dtype: str, made: Path, tmp_path: Path) -> None:
    failures = judge(made, dtype, tmp_path, fault)["failures"]
    names = {_a_norm_moved: "model.norm.weight", _reshaped: "model.embed_tokens.weight"}
    assert failures and names.get(fault, UP) in failures[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("factor", [0.0, 0.5, 0.9, 1.1, 2.0, -1.0])
def test_red_for_a_wrong_scale(factor: float, dtype: str, made: Path, tmp_path: Path) -> None:
    """0 is an adapter left out, 2 one that was applied twice."""

    def change(tensors: dict[str, Any]) -> None:
        for name, before in merging.weights(made / dtype).items():
            tensors[name] = (before.float() + factor * (tensors[name].float() - before.float())).to(before.dtype)

    outcome = judge(made, dtype, tmp_path, change)
    assert outcome["verdict"] == "fail"
    assert outcome["effect"]["share"] == pytest.approx(factor, abs=0.01)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_red_for_one_tensor_left_out(dtype: str, made: Path, tmp_path: Path) -> None:
    failures = judge(made, dtype, tmp_path, _one_left_out(made, dtype))["failures"]
    assert any(UP in failure for failure in failures)


def test_a_tensor_lost(made: Path, tmp_path: Path) -> None:
    failures = judge(made, "float32", tmp_path, lambda tensors: tensors.pop(UP))["failures"]
    assert failures == [f"{UP} is missing, or has another shape"]


def test_a_tensor_too_many(made: Path, tmp_path: Path) -> None:
    failures = judge(made, "float32", tmp_path, lambda tensors: tensors.update(more=tensors[UP].clone()))["failures"]
    assert failures == ["more is not in the base"]


def test_the_gate_that_is_asked_for(tmp_path: Path) -> None:
    """Weights alone leave no logits behind; an adapter that they cannot judge is refused."""
    base = merging.llama(tmp_path / "base", dtype="bfloat16")
    adapter = merging.adapter(base, tmp_path / "adapter", size=0.1)
    record = merging.run(base, adapter, tmp_path, gate="weights")
    assert record["gate"]["by"] == "weights" and "mean_kl" not in record["gate"]["figures"]
    assert record["gate"]["effect"]["share"] == pytest.approx(1, abs=0.01)
    other = merging.adapter(base, tmp_path / "dora", use_dora=True)
    with pytest.raises(UsageError) as raised:
        merging.run(base, other, tmp_path / "other", gate="weights")
    assert raised.value.code == "bad_usage"


def test_a_broken_shard_takes_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = merging.llama(tmp_path / "base", dtype="bfloat16")
    adapter = merging.adapter(base, tmp_path / "adapter", size=0.1)
    real = check_weights.compare_tensors

    def damaged(names: list[str], shard: Any, written: Path, *rest: Any) -> check_weights.WeightComparison:
        stored = read_folder(written.parent)[0].tensors[UP]
        with open(written, "r+b") as file:
            file.seek(stored.start)
            file.write(bytes(200))
        return real(names, shard, written, *rest)

    monkeypatch.setattr(check_weights, "compare_tensors", damaged)
    with pytest.raises(VerificationFailed, match=r"a row of model\.layers\.1\.mlp\.up_proj"):
        merging.run(base, adapter, tmp_path, gate="weights")
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter", "merge.failed.json"}


def test_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes and digests whatever the size of a part."""
    base = merging.llama(tmp_path / "base", dtype="bfloat16", shards="60KB")
    adapter = merging.adapter(base, tmp_path / "adapter", size=0.1)
    merging.run(base, adapter, tmp_path / "whole", gate="weights")
    names = sorted(path.name for path in (tmp_path / "whole" / "merged").glob("*.safetensors"))
    assert len(names) > 2
    monkeypatch.setattr(merge_write, "_PART_BYTES", 10_000)
    record = merging.run(base, adapter, tmp_path / "parts", gate="weights")
    for name in names:
        data = (tmp_path / "parts" / "merged" / name).read_bytes()
        assert data == (tmp_path / "whole" / "merged" / name).read_bytes()
        assert record["outputs"][f"merged/{name}"] == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        expected = hashlib.sha256((base / name).read_bytes()).hexdigest()
        assert record["inputs"]["base"][name]["sha256"] == expected
    assert record["gate"]["figures"]["tensors"] == 2 * 9 + 3


def test_an_adapter_for_no_rows_is_no_error(tmp_path: Path) -> None:
    """safetensors holds tensors without rows, and there is nothing wrong with none of them."""
    base = tmp_path / "base.safetensors"
    save_file({"no.weight": torch.zeros(0, 8)}, base)
    (stored,) = read_shard(base).tensors.values()
    found = check_weights.WeightComparison()
    check_weights._compare_changed("no.weight", stored, stored, (torch.zeros(0, 2), torch.zeros(2, 8)), found)
    assert (found.worst, found.failures) == ((0.0, "no.weight"), [])
