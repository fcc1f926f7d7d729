"""An adapter whose file lacks weights that its config names: the merged model is the base there, and that is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import families
import merging
from skill_train.core.errors import UsageError

pytestmark = pytest.mark.slow

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merging.llama(tmp_path_factory.mktemp("left-out") / "base", bias=True)


def told(base: Path, work: Path, lacks: str, **options: Any) -> str | None:
    """The warning of a merge without the tensors whose names hold these words."""
    adapter = merging.adapter(base, work / "adapter", **options)
    tensors = load_file(adapter / WEIGHTS)
    left = {name: tensor for name, tensor in tensors.items() if lacks not in name}
    assert (len(left) < len(tensors)) is (lacks != "nothing")
    save_file(left, adapter / WEIGHTS, metadata={"format": "pt"})
    # PEFT refuses some of these itself, where it is loaded to compare the answers.
    gate = "weights" if "modules_to_save" in options and lacks != "nothing" else "auto"
    return dict(merging.run(base, adapter, work, gate=gate)["said"]).get("incomplete_adapter")


@pytest.mark.parametrize(
    ("lacks", "options", "count"),
    [
        ("layers.1.", {"targets": ["q_proj", "v_proj"]}, "lacks 2 "),
        ("q_proj", {"targets": ["q_proj", "v_proj"]}, "lacks 2 "),
        ("layers.0.mlp.up_proj", {"targets": r".*\.(up|down)_proj"}, "lacks 1 "),
        ("lm_head", {"targets": ["q_proj"], "modules_to_save": ["lm_head"]}, "lacks 1 "),
        ("k_proj.bias", {"targets": ["q_proj"], "bias": "all"}, "lacks 2 "),
        ("q_proj.base_layer.bias", {"targets": ["q_proj"], "bias": "lora_only"}, "lacks 2 "),
    ],
    ids=["a layer", "a target", "a pattern", "a module", "biases", "adapted biases"],
)
def test_what_the_file_lacks_is_told(
    lacks: str, options: dict[str, Any], count: str, base: Path, tmp_path: Path
) -> None:
    message = told(base, tmp_path, lacks, **options)
    assert message is not None and count in message and lacks.replace(".base_layer", "") in message


@pytest.mark.parametrize(
    "options",
    [
        {"targets": ["q_proj", "v_proj"]},
        {"targets": None},
        {"targets": ["q_proj"], "layers_to_transform": [1]},
        {"targets": ["q_proj"], "layers_to_transform": 0},
        {"targets": ["q_proj"], "modules_to_save": ["mlp", "norm"], "bias": "all"},
        {"targets": ["q_proj"], "bias": "lora_only"},
        {"targets": ["q_proj", "v_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]},
        {"targets": ["embed_tokens", "down_proj"], "modules_to_save": ["lm_head"]},
    ],
    ids=["two", "all", "of one layer", "of the first", "whole", "biases", "but one", "the embedding"],
)
def test_a_whole_adapter_is_not_told(options: dict[str, Any], base: Path, tmp_path: Path) -> None:
    assert told(base, tmp_path, "nothing", **options) is None


@pytest.mark.parametrize("targets", ["(", 5, [["q_proj"]]])
def test_targets_that_mean_nothing(targets: Any, base: Path, tmp_path: Path) -> None:
    """The weights alone are compared: beside logits PEFT refuses such a config."""
    adapter = merging.adapter(base, tmp_path / "adapter", targets=["q_proj"])
    merging.edit(adapter / "adapter_config.json", target_modules=targets)
    assert merging.run(base, adapter, tmp_path, gate="weights")["warned"] == []


def test_a_tied_head_that_the_file_lacks(tmp_path: Path) -> None:
    tied = merging.llama(tmp_path / "base", tied=True)
    options = {"targets": ["q_proj"], "modules_to_save": ["lm_head"]}
    message = told(tied, tmp_path, "lm_head", **options)
    assert message is not None and "lm_head.weight" in message


def test_token_rows_that_the_file_lacks(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as raised:
        told(base, tmp_path, "token_adapter", targets=["q_proj"], trainable_token_indices=[1, 2])
    assert raised.value.code == "bad_adapter" and "trainable_token_indices" in raised.value.message


def test_experts_that_the_file_lacks(tmp_path: Path) -> None:
    """PEFT alone knows what it makes of the experts' names."""
    mixture = families.base("mixtral", tmp_path / "base", dtype="float32")
    options = {"targets": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}
    message = told(mixture, tmp_path / "lacking", "layers.0.mlp.experts", **options)
    assert message is not None and "lacks 2 " in message and "layers.0.mlp.experts" in message
    assert told(mixture, tmp_path / "whole", "nothing", **options) is None
