"""The gate on families whose answers jump when a weight is rounded, such as a mixture of experts: a router's near-tie
falls the other way. A correct merge passes whatever that costs; a wrong one fails however small it is beside that."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import families
import merging
import tiny_families
from skill_train.core.errors import VerificationFailed
from skill_train.merge import check_logits, with_peft

pytestmark = pytest.mark.slow

# Of correct merges, mean KL from the unrounded model (nats), by seed of the adapter: above the 1e-3 that was the bound.
OVER_A_THOUSANDTH = [("qwen3_moe", 0.01, 1, 2.18e-3), ("deepseek_v3", 0.1, 0, 3.33e-3), ("mixtral", 0.01, 2, 1.47e-3),
                     ("gpt_oss", 0.1, 0, 1.13e-3)]  # fmt: skip
# Of families.FAMILIES, a mixture with a tensor an expert, and a dense one.
ALWAYS = ("mixtral", "glm4")


def made(family: str, work: Path, *, size: float = 0.02, seed: int = 1, dtype: str = "bfloat16") -> tuple[Path, Path]:
    base = families.base(family, work / "base", dtype=dtype)
    return base, merging.adapter(base, work / "adapter", size=size, seed=seed)


@pytest.mark.parametrize(("family", "size", "seed", "was"), OVER_A_THOUSANDTH)
def test_a_correct_merge_passes_where_rounding_moves_a_router(
    family: str, size: float, seed: int, was: float, tmp_path: Path
) -> None:
    base, adapter = made(family, tmp_path, size=size, seed=seed)
    gate = merging.run(base, adapter, tmp_path)["gate"]
    assert gate["verdict"] == "pass"
    assert gate["figures"]["mean_kl"] == pytest.approx(was, rel=0.2)
    assert gate["rounded"]["mean_kl"] < 1e-8


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", tiny_families.by_default(families.FAMILIES, ALWAYS))
def test_every_family_passes(family: str, dtype: str, tmp_path: Path) -> None:
    base, adapter = made(family, tmp_path, dtype=dtype)
    assert merging.run(base, adapter, tmp_path)["gate"]["verdict"] == "pass"


def _names(tensors: dict[str, Any], base: dict[str, Any]) -> list[str]:
    return [name for name, tensor in tensors.items() if not torch.equal(tensor, base[name])]


def _one_left_out(tensors: dict[str, Any], base: dict[str, Any]) -> None:
    name = next(name for name in _names(tensors, base) if "o_proj" in name)
    tensors[name] = base[name]


def _scaled(tensors: dict[str, Any], base: dict[str, Any]) -> None:
    for name in _names(tensors, base):
        before = base[name].float()
        tensors[name] = (before + 1.1 * (tensors[name].float() - before)).to(base[name].dtype)


def _of_another_layer(tensors: dict[str, Any], base: dict[str, Any]) -> None:
    name = next(name for name in _names(tensors, base) if "layers.0." in name and "o_proj" in name)
    other = name.replace("layers.0.", "layers.1.")
    tensors[name] = (base[name].float() + tensors[other].float() - base[other].float()).to(base[name].dtype)


def _one_expert_left_out(tensors: dict[str, Any], base: dict[str, Any]) -> None:
    """Of `experts.3.down_proj`, or of the fourth in a tensor of all of them."""
    changed = [name for name in _names(tensors, base) if "experts" in name]
    name = next((name for name in changed if "experts.3." in name), changed[0])
    if ".3." in name:
        tensors[name] = base[name]
    else:
        tensors[name][3] = base[name][3]


FAULTS = (_one_left_out, _scaled, _of_another_layer)
MIXTURES = ("qwen3_moe", "mixtral", "deepseek_v3", "olmoe")


WRONG = [
    *((family, fault) for family in families.FAMILIES for fault in FAULTS),
    *((family, _one_expert_left_out) for family in MIXTURES),
]


@pytest.mark.parametrize(
    ("family", "fault"),
    [pytest.param(*one, marks=[] if one[0] in ALWAYS else pytest.mark.torture) for one in WRONG],
)
def test_a_wrong_merge_of_a_small_tuning_fails(family: str, fault: Callable[..., None], tmp_path: Path) -> None:
    """In bf16, where the fault is smaller than what rounding costs some of these families."""
    base, adapter = made(family, tmp_path, size=0.02)
    kept = merging.run(base, adapter, tmp_path)["changes"].get("kept_after_rounding")
    broken = Path(shutil.copytree(tmp_path / "merged", tmp_path / "broken"))
    tensors, before = load_file(broken / "model.safetensors"), merging.weights(base)
    fault(tensors, before)
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    outcome = check_logits.gate(
        check_logits.GateRequest(base=base, adapter=adapter, merged=broken, rows=merging.ROWS),
        stored="BF16",
        kept_share=kept,
        bar=lambda done, total, text: None,
    )
    assert outcome["verdict"] == "fail"


def test_a_merge_by_peft_that_loses_a_module_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, adapter = made("mixtral", tmp_path)
    real = with_peft.merge_with_peft

    def losing(base: Path, adapter: Path, part: Path, *rest: str) -> Any:
        done = real(base, adapter, part, *rest)
        tensors = load_file(part / "model.safetensors")
        tensors["model.layers.0.self_attn.v_proj.weight"] = merging.weights(base)[
            "model.layers.0.self_attn.v_proj.weight"
        ]
        save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
        return done

    monkeypatch.setattr(with_peft, "merge_with_peft", losing)
    with pytest.raises(VerificationFailed) as refused:
        merging.run(base, adapter, tmp_path)
    assert refused.value.code == "merge_gate"


def test_rounding_that_costs_more_than_the_tuning_moved_is_told_with_the_remedy(tmp_path: Path) -> None:
    """Of a change of 0.1 % of the weights, rounding makes an error of three quarters of its size."""
    base, adapter = made("nemotron", tmp_path, size=0.001)
    record = merging.run(base, adapter, tmp_path)
    cost, moved = record["gate"]["figures"]["mean_kl"], record["gate"]["effect"]["kl_between"]
    assert 0 < moved / 2 < cost
    message = dict(record["said"])["rounding_cost"]
    assert f"{cost:.2g} nats" in message and f"{moved:.2g}" in message and "--dtype float32" in message
    (tmp_path / "wide").mkdir()
    assert "rounding_cost" not in merging.run(base, adapter, tmp_path / "wide", dtype="float32")["warned"]


def test_the_cost_of_rounding_is_told_of_a_large_model_too(tmp_path: Path) -> None:
    """The same where only the weights are compared, because its answers would take long."""
    base, adapter = made("nemotron", tmp_path, size=0.001)
    record = merging.run(base, adapter, tmp_path, gate="weights")
    assert record["gate"]["by"] == "weights"
    before, after = merging.weights(base), merging.weights(tmp_path / "merged")
    exact = merging.peft_merged(base, adapter)
    error = sum(float(((after[n].float() - exact[n]) ** 2).sum()) for n in before) ** 0.5
    change = sum(float(((exact[n] - before[n].float()) ** 2).sum()) for n in before) ** 0.5
    assert error**2 > change**2 / 2
    assert record["changes"]["rounding_error_of_change"] == pytest.approx(error / change, rel=0.01)
    assert f"{error / change:.1f} times" in dict(record["said"])["rounding_cost"]


def test_a_usual_tuning_gets_no_warning(tmp_path: Path) -> None:
    base, adapter = made("nemotron", tmp_path, size=0.1)
    assert merging.run(base, adapter, tmp_path)["warned"] == []
