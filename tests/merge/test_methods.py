"""Adapters of PEFT's other methods and rarer options: merged as PEFT computes them, or refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import merging
from skill_train.core.errors import SkillTrainError

pytestmark = pytest.mark.slow

WEIGHTS = "adapter_model.safetensors"
ATTENTION = {"target_modules": ["q_proj", "o_proj"], "task_type": "CAUSAL_LM"}
HEAD = {"target_modules": ["q_proj", "lm_head"], "task_type": "CAUSAL_LM"}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    tied = {"untied": False, "tied": True}
    return {name: merging.llama(folder / name, tied=is_tied) for name, is_tied in tied.items()}


def made(base: Path, folder: Path, config: Any, *, finish: bool = False) -> Path:
    """An adapter of any method, whose weights were all moved. `finish`: as AdaLoRA's training ends, with masks."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(str(base)), config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in (weight for weight in model.parameters() if weight.requires_grad):
            noise = torch.randn(weight.shape, generator=generator)
            weight.mul_(1 + 0.1 * noise).add_(0.03 * noise)
    ids = torch.tensor([row["input_ids"] for row in merging.ROWS])
    for step in range(1, 21) if finish else ():
        model(input_ids=ids, labels=ids).loss.backward()
        model.base_model.update_and_allocate(step)
        model.zero_grad()
    model.save_pretrained(str(folder))
    return folder


def config(method: str, **options: Any) -> Any:
    import peft
    from peft.tuners.lora import config as lora

    own = {"velora": lora.VeloraConfig, "kasa": lora.KasaConfig, "monteclora": lora.MontecloraConfig}
    if method in own:
        return peft.LoraConfig(**ATTENTION, **{f"{method}_config": own[method]()})
    return getattr(peft, f"{method}Config")(**options)


ADALORA = {**ATTENTION, "init_r": 6, "target_r": 3, "total_step": 20, "tinit": 1, "tfinal": 2, "deltaT": 1}
NORMS = {"target_modules": ["input_layernorm"], "task_type": "CAUSAL_LM", "modules_to_save": ["embed_tokens"]}
ROWS = {"target_modules": ["lm_head"], "task_type": "CAUSAL_LM", "token_indices": [1, 4, 9]}


@pytest.mark.parametrize(
    ("base", "method", "options"),
    [
        ("untied", "OFT", {**ATTENTION, "oft_block_size": 16}),  # its r is 0
        ("untied", "AdaLora", ADALORA),
        ("untied", "LNTuning", NORMS),
        ("tied", "LNTuning", NORMS),
        ("tied", "LoHa", HEAD),
        ("tied", "TrainableTokens", ROWS),
        ("untied", "velora", {}),
        ("untied", "kasa", {}),
        ("untied", "monteclora", {}),
    ],
)
def test_equals_peft(base: str, method: str, options: dict[str, Any], bases: dict[str, Path], tmp_path: Path) -> None:
    folder, finish = bases[base], method == "AdaLora"
    adapter = made(folder, tmp_path / "adapter", config(method, **options), finish=finish)
    record = merging.run(folder, adapter, tmp_path)
    assert (record["how"], record["gate"]["verdict"]) == ("peft", "pass")
    expected = merging.logits(folder, adapter)
    torch.testing.assert_close(merging.logits(tmp_path / "merged"), expected, rtol=0, atol=5e-5)
    assert (expected - merging.logits(folder)).abs().max() > 1e-3


def test_both_ends_of_a_tie_stay_one_where_they_were_trained_alike(bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = made(bases["tied"], tmp_path / "adapter", config("LoHa", **ATTENTION))
    merging.run(bases["tied"], adapter, tmp_path)
    assert "lm_head.weight" not in merging.weights(tmp_path / "merged")
    assert merging.run(bases["tied"], adapter, tmp_path)["changes"]["config"] == {}


def refused(base: Path, work: Path) -> SkillTrainError:
    with pytest.raises(SkillTrainError) as raised:
        merging.run(base, work / "adapter", work)
    assert not (work / "merged").exists()
    return raised.value


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("Lily", {**ATTENTION, "r": 4}, "LILY is not a change of weights"),
        ("Shadow", {"task_type": "CAUSAL_LM"}, "SHADOW is not a change of weights"),
        ("Beft", {**ATTENTION}, "Base layer has no bias"),
        ("Lora", {**ATTENTION, "lora_bias": True}, "lora_bias has no place in this base"),
        ("Lora", {**ATTENTION, "init_lora_weights": "pissa_niter_4"}, "random numbers whenever PEFT loads"),
        ("Pvera", {**ATTENTION, "r": 8, "sample_at_inference": True}, "at random"),
    ],
)
def test_what_cannot_be_merged_is_refused_for_its_reason(
    method: str, options: dict[str, Any], words: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    made(bases["untied"], tmp_path / "adapter", config(method, **options))
    error = refused(bases["untied"], tmp_path)
    assert error.code == "bad_adapter" and words in f"{error.message} {error.got}" and "wrong" not in error.hint


IA3 = {"target_modules": ["q_proj", "down_proj"], "feedforward_modules": ["down_proj"], "task_type": "CAUSAL_LM"}


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("IA3", IA3),
        ("LoHa", ATTENTION),
        ("Vera", {**ATTENTION, "r": 8}),
        ("LNTuning", {"target_modules": ["input_layernorm"], "task_type": "CAUSAL_LM"}),
        ("Lora", {**ATTENTION, "init_lora_weights": "pissa"}),
    ],
)
def test_a_tensor_that_the_file_lacks_is_named(
    method: str, options: dict[str, Any], bases: dict[str, Path], tmp_path: Path
) -> None:
    """PEFT warns, and takes the value from before the training."""
    adapter = made(bases["untied"], tmp_path / "adapter", config(method, **options))
    tensors = load_file(adapter / WEIGHTS)
    lacks = next(iter(tensors))
    del tensors[lacks]
    save_file(tensors, adapter / WEIGHTS, metadata={"format": "pt"})
    error = refused(bases["untied"], tmp_path)
    assert error.code == "bad_adapter" and "lacks 1 " in error.message and lacks in error.expected


def test_a_change_whose_square_no_float_holds_is_no_crash(bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = merging.adapter(bases["untied"], tmp_path / "adapter", targets=["q_proj"])
    merging.edit(adapter / "adapter_config.json", lora_alpha=1e30)
    record = merging.run(bases["untied"], adapter, tmp_path)
    assert record["changes"].get("kept_after_rounding") is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_ends_that_were_trained_whole_and_as_one_are_rounded(
    dtype: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    options = {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}
    adapter = merging.adapter(bases["tied"], tmp_path / "adapter", targets=["q_proj"], **options)
    record = merging.run(bases["tied"], adapter, tmp_path, dtype=dtype)
    assert record["gate"]["verdict"] == "pass" and record["changes"]["config"].get("tie_word_embeddings") is None
