"""Merges of vision models against PEFT: language model, tower and projector, in the names of the published files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

import merging
import tiny_vision
import vision_adapters
from skill_train.core.errors import UsageError
from skill_train.merge import check_logits
from skill_train.model.adapter import read_adapter
from skill_train.model.folder import read_config
from skill_train.model.weight_files import read_folder
from skill_train.program.pictures.decode import PictureSize
from skill_train.program.pictures.tokens import Pictures, PixelLimits
from skill_train.program.tokenizer import load_tokenizer
from skill_train.reference import checkpoint_names

pytestmark = pytest.mark.slow

SHORT = [{"input_ids": list(range(300, 340))}]
# Tensors of the tiny model, and how many of them are called otherwise in memory (transformers 5.23).
RENAMED = {"qwen2-vl": (69, 69), "qwen2.5-vl": (80, 80), "qwen3-vl": (63, 0), "gemma3": (67, 67)}
RENAMED |= dict.fromkeys(("smolvlm", "idefics3"), (59, 0)) | {"mistral3": (54, 54), "pixtral": (54, 54)}
A_TOWER = {
    "qwen2-vl": ("model.visual.blocks.0.attn.qkv.weight", "visual.blocks.0.attn.qkv.weight"),
    "qwen2.5-vl": ("model.visual.merger.mlp.0.weight", "visual.merger.mlp.0.weight"),
    "qwen3-vl": ("model.visual.deepstack_merger_list.0.linear_fc1.weight",) * 2,
    "gemma3": (
        "model.vision_tower.encoder.layers.0.mlp.fc1.weight",
        "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight",
    ),
    **dict.fromkeys(
        ("mistral3", "pixtral"),
        ("model.multi_modal_projector.linear_1.weight", "multi_modal_projector.linear_1.weight"),
    ),
    **dict.fromkeys(("smolvlm", "idefics3"), ("model.connector.modality_projection.proj.weight",) * 2),
}


def largest_difference(merged: Path, base: Path, adapter: Path, task: str = "ImageTextToText") -> float:
    """Over all tensors of the model, as transformers loads the merged folder."""
    found, expected = vision_adapters.load(merged, task).state_dict(), vision_adapters.peft_merged(base, adapter, task)
    assert set(found) == set(expected)
    return max(float((found[name] - expected[name]).abs().max()) for name in found)


@pytest.fixture(scope="module")
def smolvlm() -> Path:
    return tiny_vision.cached("smolvlm")


@pytest.mark.parametrize(("kind", "most", "tokens"), [("qwen2-vl", 16 * 28 * 28, 12), ("smolvlm", 128 * 128, 80)])
def test_limits_of_the_training_are_in_the_files_of_the_processor(
    kind: str, most: int, tokens: int, tmp_path: Path
) -> None:
    """So transformers makes of 2000 x 1500 pixels what the training made, and of no limit a copy byte for byte."""
    base = tiny_vision.cached(kind)
    adapter = vision_adapters.adapter(
        base, tmp_path / "adapter", targets=r".*language_model.*q_proj|.*text_model.*q_proj"
    )
    limited = merging.run(base, adapter, tmp_path / "limited", rows=SHORT, limits=PixelLimits(None, most))
    plain = merging.run(base, adapter, tmp_path / "plain", rows=SHORT)
    assert "processor" not in plain["changes"] and limited["changes"]["processor"]
    name = "preprocessor_config.json"
    assert (tmp_path / "plain" / "merged" / name).read_bytes() == (base / name).read_bytes()
    merged = tmp_path / "limited" / "merged"
    seen = Pictures({"model": str(merged), "revision": None}, load_tokenizer(str(merged), None))
    assert seen.tokens(PictureSize(2000, 1500)) == tokens


@pytest.mark.parametrize("kind", tiny_vision.one_of_each())
def test_equals_peft_in_all_parts(kind: str, tmp_path: Path) -> None:
    base = tiny_vision.cached(kind)
    adapter = vision_adapters.adapter(base, tmp_path / "adapter", targets=vision_adapters.everywhere(base))
    record = merging.run(base, adapter, tmp_path, rows=SHORT)
    assert record["how"] == "streamed" and record["warned"] == []
    assert largest_difference(tmp_path / "merged", base, adapter) == 0.0
    assert set(merging.weights(tmp_path / "merged")) == set(merging.weights(base))
    adapted = len(read_adapter(adapter).modules)
    gate = record["gate"]
    assert record["changes"]["changed_tensors"] == adapted > 20
    assert gate["verdict"] == "pass" and gate["pictures"] == "one picture"
    assert gate["weights"]["figures"]["changed"] == adapted
    for file in sorted(base.iterdir()):  # tokenizer, template, processor
        if file.suffix != ".safetensors":
            assert (tmp_path / "merged" / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize("kind", tiny_vision.one_of_each())
def test_names_in_the_files(kind: str) -> None:
    base = tiny_vision.cached(kind)
    assert checkpoint_names.task_of(base) == ("CausalLM" if kind == "gemma3" else "ImageTextToText")
    tensors = [name for shard in read_folder(base) for name in shard.tensors]
    names = checkpoint_names.stored_names(checkpoint_names.empty_model(base, checkpoint_names.PICTURES), tensors)
    others = [name for name, tensor in names.items() if name != tensor]
    assert (len(names), len(others)) == RENAMED[kind] and sorted(names.values()) == sorted(tensors)
    in_memory, stored = A_TOWER[kind]
    assert names[in_memory] == stored


# What an adapter can be beside A and B. The last two go through PEFT, which has the whole model in memory.
OTHERS: dict[str, dict[str, Any]] = {
    "projector saved whole": {"modules_to_save": ["multi_modal_projector"]},
    "ranks by pattern": {"rank_pattern": {"vision_tower.*fc1": 2}, "alpha_pattern": {"layers.1.*q_proj": 32}},
    "token rows": {"trainable_token_indices": {"embed_tokens": [5, 9]}},
    "dora": {"use_dora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "patches": {"targets": ["patch_embedding"]},
}
MAY_BE_PEFT = ("pissa", "patches")


@pytest.mark.parametrize("name", OTHERS)
def test_other_adapters_of_gemma_equal_peft(name: str, tmp_path: Path) -> None:
    """Its published files call every tensor otherwise than transformers does."""
    base = tiny_vision.cached("gemma3")
    adapter = vision_adapters.adapter(base, tmp_path / "adapter", **{"targets": ["q_proj", "fc1"], **OTHERS[name]})
    record = merging.run(base, adapter, tmp_path, rows=SHORT)
    assert record["how"] == ("peft" if name in MAY_BE_PEFT else "streamed")
    assert record["gate"]["verdict"] == "pass" and record["gate"]["pictures"] == "one picture"
    bound = 2e-7 if name in ("dora", *MAY_BE_PEFT) else 0.0
    assert largest_difference(tmp_path / "merged", base, adapter) <= bound
    made = set(merging.weights(tmp_path / "merged")) - {"lm_head.weight"}
    assert made == set(merging.weights(base))


def test_a_head_that_was_tied_becomes_a_tensor_of_its_own(tmp_path: Path) -> None:
    """PEFT's own merge would change the embedding too."""
    base = tiny_vision.cached("gemma3")
    adapter = vision_adapters.adapter(base, tmp_path / "adapter", targets=["lm_head", "q_proj"])
    record = merging.run(base, adapter, tmp_path, rows=SHORT)
    assert record["how"] == "streamed" and record["gate"]["figures"]["mean_kl"] < 1e-9
    added = set(merging.weights(tmp_path / "merged")) - set(merging.weights(base))
    assert added == {"lm_head.weight"}
    ids = torch.tensor([SHORT[0]["input_ids"]])
    with torch.no_grad():
        expected = PeftModel.from_pretrained(vision_adapters.load(base), str(adapter)).eval()(input_ids=ids).logits
        found = vision_adapters.load(tmp_path / "merged")(input_ids=ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


def test_mixed_types_are_rounded_as_they_are_stored(tmp_path: Path) -> None:
    """In the published way: most in bf16; here every second tensor of the tower in fp32."""
    base = shutil.copytree(tiny_vision.cached("gemma3"), tmp_path / "base")
    weights = merging.weights(base)
    wide = [name for name in weights if "vision_tower" in name][::2]
    mixed = {name: weight if name in wide else weight.bfloat16() for name, weight in weights.items()}
    save_file(mixed, base / "model.safetensors", metadata={"format": "pt"})
    adapter = vision_adapters.adapter(base, tmp_path / "adapter", targets=vision_adapters.everywhere(base))
    record = merging.run(base, adapter, tmp_path, rows=SHORT)
    gate = record["gate"]
    assert gate["verdict"] == "pass" and gate["stored_dtype"] == "BF16" and gate["rounded"]["mean_kl"] < 1e-9
    assert gate["rounded"]["cost"]["mean_kl"] > 1e-6
    kinds = {name: weight.dtype for name, weight in merging.weights(tmp_path / "merged").items()}
    assert kinds == {name: weight.dtype for name, weight in mixed.items()}


# --- Mixture of experts ---


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-VL with four experts."""
    return vision_adapters.with_experts(tmp_path_factory.mktemp("experts") / "base")


@pytest.mark.parametrize("part", ["all", "experts"])
def test_mixture_of_experts_equals_peft(part: str, experts: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"targets": vision_adapters.everywhere(experts)}
    if part == "experts":
        options = {"targets": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    adapter = vision_adapters.adapter(experts, tmp_path / "adapter", **options)
    record = merging.run(experts, adapter, tmp_path, rows=SHORT)
    assert record["how"] == ("peft" if part == "experts" else "streamed")
    assert record["gate"]["verdict"] == "pass" and record["gate"]["pictures"] == "one picture"
    assert largest_difference(tmp_path / "merged", experts, adapter) == 0.0
    assert set(merging.weights(tmp_path / "merged")) == set(merging.weights(experts))


@pytest.mark.parametrize("task", ["CausalLM", "ImageTextToText"])
def test_the_class_that_was_trained_is_the_one_that_is_compared(task: str, tmp_path: Path) -> None:
    """Of Qwen3.5 there are two. Names of parameters tell which of them an adapter is of."""
    base = vision_adapters.with_two_classes(tmp_path / "base")
    adapter = vision_adapters.adapter(base, tmp_path / "adapter", targets=["q_proj", "linear_fc1"], task=task)
    record = merging.run(base, adapter, tmp_path, rows=SHORT)
    assert record["how"] == "streamed" and record["gate"]["verdict"] == "pass"
    assert (record["gate"]["pictures"] == "one picture") is (task == "ImageTextToText")
    assert largest_difference(tmp_path / "merged", base, adapter, task) == 0.0
    assert set(merging.weights(tmp_path / "merged")) == set(merging.weights(base))


# --- What is refused ---


def _renamed(adapter: Path, before: str, after: str) -> None:
    file = adapter / "adapter_model.safetensors"
    tensors = {name.replace(before, after): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", ["qwen2-vl", "smolvlm"])
def test_a_change_of_the_tower_that_has_no_place_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    base = tiny_vision.cached(kind)
    adapter = vision_adapters.adapter(base, tmp_path / "adapter", targets=["q_proj", "fc1"])
    layer = "visual.blocks.2." if kind == "qwen2-vl" else "vision_model.encoder.layers.1."
    _renamed(adapter, layer, layer.replace("2", "9").replace("1", "9"))
    with pytest.raises(UsageError) as refused:
        merging.run(base, adapter, tmp_path)
    assert refused.value.code == "wrong_base" and "9." in refused.value.message
    assert not (tmp_path / "merged").exists() and not (tmp_path / "merge.json").exists()


def test_a_tower_that_was_not_changed_is_seen_with_a_picture_alone(smolvlm: Path, tmp_path: Path) -> None:
    """The merged model is the base, and the adapter is one of the tower."""
    targets = [name for name in vision_adapters.everywhere(smolvlm) if "vision_model" in name]
    adapter = vision_adapters.adapter(smolvlm, tmp_path / "adapter", targets=targets)
    merged = shutil.copytree(smolvlm, tmp_path / "merged")
    verdicts = {}
    for pictures in (True, False):
        request = check_logits.GateRequest(
            smolvlm, adapter, merged, rows=SHORT, task=checkpoint_names.PICTURES, pictures=pictures
        )
        outcome = check_logits.gate(request, stored="F32", kept_share=None, bar=lambda done, total, text: None)
        verdicts[pictures] = outcome["verdict"]
    assert verdicts == {True: "fail", False: "pass"}


def test_without_its_processor_the_record_says_that_no_picture_was_compared(smolvlm: Path, tmp_path: Path) -> None:
    base = shutil.copytree(smolvlm, tmp_path / "base")
    for name in ("preprocessor_config.json", "processor_config.json"):
        (base / name).unlink()
    adapter = vision_adapters.adapter(base, tmp_path / "adapter", targets=["q_proj"])
    record = merging.run(base, adapter, tmp_path, rows=SHORT)
    assert record["gate"]["verdict"] == "pass" and record["gate"]["weights"]["verdict"] == "pass"
    assert record["gate"]["pictures"].startswith("not compared: ")


def test_rows_with_a_picture_are_no_texts(smolvlm: Path) -> None:
    place = read_config(smolvlm)["image_token_id"]
    rows: Any = [{"input_ids": [5, place, 7]}, {"input_ids": [5, 6, 7]}]
    assert check_logits.choose_texts(rows, smolvlm).ids == [[5, 6, 7]]


def test_a_second_call_does_nothing(smolvlm: Path, tmp_path: Path) -> None:
    adapter = vision_adapters.adapter(smolvlm, tmp_path / "adapter", targets=["q_proj"])
    first = merging.run(smolvlm, adapter, tmp_path, rows=SHORT)
    assert merging.run(smolvlm, adapter, tmp_path, rows=SHORT)["finished_at"] == first["finished_at"]
