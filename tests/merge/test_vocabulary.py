"""Adapters that hold embeddings: what PEFT writes of them is merged as it was trained, or refused by name.

The truth is the model in memory that the adapter was saved from. PEFT's own merge is held against it too.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import merging
from skill_train.core.errors import UsageError

pytestmark = pytest.mark.slow

IDS = torch.tensor([row["input_ids"] for row in merging.ROWS])
ROWS = {"resized": 130, "padded": 192}  # two new tokens on 128, and the next multiple of 64


def _options(embedding: str, rows: int) -> dict[str, dict[str, Any]]:
    ids = [3, 100, *range(128, min(rows, 130))]
    both = {"trainable_token_indices": {embedding: ids, "lm_head": [5, 7]}}
    return {
        "nothing of both": {},
        "embedding whole": {"modules_to_save": [embedding]},
        "head whole": {"modules_to_save": ["lm_head"]},
        "both whole": {"modules_to_save": [embedding, "lm_head"]},
        "embedding whole, tied": {"modules_to_save": [embedding], "ensure_weight_tying": True},
        "head whole, tied": {"modules_to_save": ["lm_head"], "ensure_weight_tying": True},
        "embedding adapted": {"targets": [embedding]},
        "head adapted": {"targets": ["lm_head"]},
        "both adapted": {"targets": [embedding, "lm_head"]},
        "embedding adapted, tied": {"targets": [embedding], "ensure_weight_tying": True},
        "rows": {"trainable_token_indices": ids},
        "rows, tied": {"trainable_token_indices": ids, "ensure_weight_tying": True},
        "rows of the embedding": {"trainable_token_indices": {embedding: ids}},
        "rows of the head": {"trainable_token_indices": {"lm_head": ids}},
        "other rows of both": both,
        "embedding adapted, head whole": {"targets": [embedding], "modules_to_save": ["lm_head"]},
        "head adapted, embedding whole": {"targets": ["lm_head"], "modules_to_save": [embedding]},
    }


# PEFT's merge adds what was learned on one side of a tie to both sides; the adapter itself does not.
PEFT_MERGES_WRONGLY = {
    "embedding adapted",
    "head adapted",
    "both adapted",
    "embedding adapted, tied",
    "rows of the head",
    "other rows of both",
}


@dataclass
class Trained:
    """An adapter, and what the model in memory said."""

    base: Path
    adapter: Path
    logits: Any


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from transformers import Gemma3TextConfig, Qwen2Config

    root = tmp_path_factory.mktemp("bases")
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    gemma = Gemma3TextConfig(**sizes, head_dim=32, query_pre_attn_scalar=32, tie_word_embeddings=True)
    return {
        "llama": merging.llama(root / "llama"),
        "tied llama": merging.llama(root / "tied", tied=True),
        "qwen2": merging.save(Qwen2Config(**sizes, tie_word_embeddings=True), root / "qwen2"),
        "gemma": merging.save(gemma, root / "gemma"),
        "gpt2": merging.gpt2(root / "gpt2"),
    }


def trained(
    base: Path,
    folder: Path,
    options: dict[str, Any],
    *,
    rows: int = 128,
    save: bool | str = "auto",
    change: Callable[[Any], None] = lambda model: None,
) -> Trained:
    """Trains nothing: every trainable weight is moved at random. `change` gets the model before PEFT wraps it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_pretrained(str(base), dtype=torch.float32)
    model.resize_token_embeddings(rows, mean_resizing=False)
    change(model)
    own = dict(options)
    targets = [*(["c_attn"] if "gpt2" in base.name else ["q_proj", "v_proj"]), *own.pop("targets", [])]
    settings = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"} | own
    tuned = get_peft_model(model, LoraConfig(target_modules=targets, **settings))
    with torch.no_grad():
        for weight in (weight for weight in tuned.parameters() if weight.requires_grad):
            weight.add_(0.2 * torch.randn(weight.shape))
        said = tuned.eval()(input_ids=IDS).logits
    tuned.save_pretrained(str(folder), save_embedding_layers=save)
    return Trained(base, folder, said)


def merged_by_peft(told: Trained, rows: int) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(told.base), dtype=torch.float32)
    model.resize_token_embeddings(rows, mean_resizing=False)
    return PeftModel.from_pretrained(model, str(told.adapter)).merge_and_unload().eval()


def assert_merged(told: Trained, work: Path, kind: str, rows: int) -> None:
    """Logits as in training, weights as PEFT's merge has them where that is right, a config that fits both."""
    record = merging.run(told.base, told.adapter, work)
    torch.testing.assert_close(merging.logits(work / "merged"), told.logits, rtol=0, atol=1e-4)
    config = json.loads((work / "merged" / "config.json").read_text())
    found = merging.weights(work / "merged")
    assert (record["how"], config["vocab_size"]) == ("streamed", rows)
    assert ("lm_head.weight" in found) is not config["tie_word_embeddings"]
    assert record["gate"]["verdict"] == "pass"
    peft = merged_by_peft(told, rows)
    with torch.no_grad():
        right = (peft(input_ids=IDS).logits - told.logits).abs().max() < 1e-3
    assert bool(right) is not (kind in PEFT_MERGES_WRONGLY and peft.config.tie_word_embeddings)
    for name, tensor in peft.state_dict().items() if right else ():
        if name in found:
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5)
        else:  # tied, so stored once
            assert name == "lm_head.weight" and config["tie_word_embeddings"]


KINDS = list(_options("embed_tokens", 128))
# One of each kind of change, and each that is tied; a resized and tied vocabulary has all. `make walks` has all of all.
FEW = ("nothing of both", "embedding whole", "both whole", "both adapted", "rows, tied", "other rows of both")
SOME = [kind if kind in FEW else pytest.param(kind, marks=pytest.mark.torture) for kind in KINDS]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "family", ["llama", "tied llama", *(pytest.param(f, marks=pytest.mark.torture) for f in ("qwen2", "gemma", "gpt2"))]
)
def test_a_resized_vocabulary(family: str, kind: str, bases: dict[str, Path], tmp_path: Path) -> None:
    options = _options("wte" if family == "gpt2" else "embed_tokens", 130)[kind]
    told = trained(bases[family], tmp_path / "adapter", options, rows=130)
    if family == "llama" and kind in ("embedding adapted", "embedding adapted, tied", "head adapted"):
        with pytest.raises(UsageError, match="only one of the embedding") as refused:  # PEFT saves one of two
            merging.run(told.base, told.adapter, tmp_path)
        assert refused.value.code == "bad_adapter" and not (tmp_path / "merged").exists()
        return
    assert_merged(told, tmp_path, kind, 130)


@pytest.mark.parametrize("kind", SOME)
def test_a_vocabulary_padded_to_a_multiple(kind: str, bases: dict[str, Path], tmp_path: Path) -> None:
    told = trained(bases["tied llama"], tmp_path / "adapter", _options("embed_tokens", 192)[kind], rows=192)
    assert_merged(told, tmp_path, kind, 192)


@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize("family", ["tied llama", pytest.param("llama", marks=pytest.mark.torture)])
def test_the_embeddings_saved_beside_it(family: str, kind: str, bases: dict[str, Path], tmp_path: Path) -> None:
    told = trained(bases[family], tmp_path / "adapter", _options("embed_tokens", 128)[kind], save=True)
    assert_merged(told, tmp_path, kind, 128)


@pytest.mark.parametrize(
    ("more", "how"),
    [({}, "streamed"), ({"target_parameters": ["mlp.up_proj.weight"]}, "peft")],
    ids=["streamed", "peft"],
)
def test_two_ends_that_part_are_no_warning_of_peft(
    more: dict[str, Any], how: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    """It stood on stderr beside the progress. That the model is untied stands in the record and in config.json."""
    told = trained(bases["tied llama"], tmp_path / "adapter", {"modules_to_save": ["lm_head"], **more})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        record = merging.run(told.base, told.adapter, tmp_path, dtype="bfloat16")
    assert (record["how"], record["changes"]["config"]["tie_word_embeddings"]) == (how, False)
    assert [str(each.message) for each in caught if "tied" in str(each.message)] == []


def test_a_head_that_follows_trained_rows_and_has_lora(bases: dict[str, Path], tmp_path: Path) -> None:
    """LoRA adds to the new rows; they do not take its place."""
    options = {"targets": ["lm_head"], "trainable_token_indices": [3, 100]}
    told = trained(bases["tied llama"], tmp_path / "adapter", options)
    merging.run(told.base, told.adapter, tmp_path)
    torch.testing.assert_close(merging.logits(tmp_path / "merged"), told.logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["embedding whole", "embedding adapted", "rows", "head adapted", "head whole"])
@pytest.mark.parametrize("family", ["llama", "tied llama"])
def test_new_rows_that_were_not_saved(family: str, kind: str, bases: dict[str, Path], tmp_path: Path) -> None:
    """`save_embedding_layers=False` drops them; nothing can bring them back."""
    told = trained(bases[family], tmp_path / "adapter", _options("embed_tokens", 130)[kind], rows=130, save=False)
    with pytest.raises(UsageError) as refused:
        merging.run(told.base, told.adapter, tmp_path)
    assert refused.value.code == "bad_adapter" and "save_embedding_layers=True" in refused.value.hint
    assert not (tmp_path / "merged").exists()


def test_a_base_that_was_untied_before_training(bases: dict[str, Path], tmp_path: Path) -> None:
    """Each side learned for itself. On the tied base one of them would be lost, and the gate reads what PEFT loads."""

    def untie(model: Any) -> None:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 1.5)

    told = trained(bases["tied llama"], tmp_path / "adapter", {}, save=True, change=untie)
    with pytest.raises(UsageError, match=r"lm_head.*embed_tokens.*differ, but the base model ties") as refused:
        merging.run(told.base, told.adapter, tmp_path)
    assert refused.value.code == "wrong_base" and "tie_word_embeddings=False" in refused.value.hint
    assert not (tmp_path / "merged").exists()


def _edit_tensors(adapter: Path, change: Callable[[dict[str, Any]], None]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(adapter / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, adapter / "adapter_model.safetensors")


EMBEDDING, HEAD = "base_model.model.model.embed_tokens", "base_model.model.lm_head"


def _half(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.update({name: tensors[name] / 2})


def _without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.update({"unused": tensors.pop(name)}) or tensors.pop("unused")


@pytest.mark.parametrize(
    ("kind", "change", "code", "named"),
    [
        ("embedding whole", _half(f"{EMBEDDING}.modules_to_save.weight"), "bad_adapter", "another value than"),
        ("embedding whole", _half(f"{EMBEDDING}.weight"), "bad_adapter", "another value than"),
        ("embedding whole", _without(f"{EMBEDDING}.weight"), "bad_adapter", "which PEFT loads"),
        ("embedding whole", _half(f"{EMBEDDING}.original_module.weight"), "wrong_base", "two, so"),
        ("embedding whole", _half(f"{HEAD}.weight"), "wrong_base", "two, so"),
        ("head whole", _half(f"{EMBEDDING}.weight"), "wrong_base", "two, so"),
        ("both whole", _half(f"{HEAD}.original_module.weight"), "wrong_base", "two, so"),
        ("both adapted", _half(f"{HEAD}.base_layer.weight"), "wrong_base", "two, so"),
    ],
)
def test_two_values_for_one_parameter(
    kind: str,
    change: Callable[[dict[str, Any]], None],
    code: str,
    named: str,
    bases: dict[str, Path],
    tmp_path: Path,
) -> None:
    told = trained(bases["tied llama"], tmp_path / "adapter", _options("embed_tokens", 130)[kind], rows=130)
    _edit_tensors(told.adapter, change)
    with pytest.raises(UsageError) as refused:
        merging.run(told.base, told.adapter, tmp_path)
    assert refused.value.code == code and named in str(refused.value.got)


def test_trained_as_one_and_saved_as_two(bases: dict[str, Path], tmp_path: Path) -> None:
    options = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    told = trained(bases["tied llama"], tmp_path / "adapter", options)
    _edit_tensors(told.adapter, _half(f"{HEAD}.weight"))
    with pytest.raises(UsageError) as refused:
        merging.run(told.base, told.adapter, tmp_path)
    assert refused.value.code == "wrong_base"


@pytest.mark.parametrize("side", [EMBEDDING, HEAD])
def test_a_matrix_with_a_row_too_few(side: str, bases: dict[str, Path], tmp_path: Path) -> None:
    told = trained(bases["tied llama"], tmp_path / "adapter", {"modules_to_save": ["embed_tokens", "lm_head"]})

    def shorten(tensors: dict[str, Any]) -> None:
        tensors[f"{side}.weight"] = tensors[f"{side}.weight"][:-1].contiguous()

    _edit_tensors(told.adapter, shorten)
    with pytest.raises(UsageError) as refused:
        merging.run(told.base, told.adapter, tmp_path)
    assert refused.value.code == "bad_adapter" and "[127, 128] rows" in str(refused.value.got)


def test_what_is_merged_differs_from_the_base(bases: dict[str, Path], tmp_path: Path) -> None:
    """The test of this file could pass on adapters that do nothing; they do much."""
    told = trained(bases["tied llama"], tmp_path / "adapter", {"modules_to_save": ["embed_tokens"]})
    moved = (merging.logits(told.base) - told.logits).abs().max().item()
    assert math.isfinite(moved) and moved > 1
