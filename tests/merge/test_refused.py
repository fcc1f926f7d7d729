"""What a merge must refuse: each with the tensor or file named, nothing half written."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import merging
from skill_train.core.errors import SkillTrainError, UsageError, VerificationFailed

pytestmark = pytest.mark.slow

WEIGHTS = "adapter_model.safetensors"
Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    base = merging.llama(folder / "base")
    merging.adapter(base, folder / "adapter", targets=["q_proj", "v_proj"])
    return folder


@pytest.fixture
def work(made: Path, tmp_path: Path) -> Path:
    """A fresh copy of a base and its adapter."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


def refused(work: Path, **options: Any) -> SkillTrainError:
    with pytest.raises(SkillTrainError) as raised:
        merging.run(work / "base", work / "adapter", work, **options)
    left = {path.name for path in work.iterdir()} - {"merge.failed.json"}
    assert left == {"base", "adapter"}
    return raised.value


def retensor(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_a_tensor_that_matches_nothing(work: Path) -> None:
    name = Q.replace("layers.0", "layers.9")

    def deeper(tensors: dict[str, Any]) -> None:
        tensors[f"{name}.lora_A.weight"] = tensors[f"{Q}.lora_A.weight"].clone()
        tensors[f"{name}.lora_B.weight"] = tensors[f"{Q}.lora_B.weight"].clone()

    retensor(work / "adapter" / WEIGHTS, deeper)
    error = refused(work)
    assert error.code == "wrong_base" and name in error.message


@pytest.mark.parametrize("name", [f"{Q}.lora_C.weight", "q_proj.lora_A.weight", f"{Q}.lora_A.default.weight"])
def test_a_tensor_of_no_known_kind(name: str, work: Path) -> None:
    retensor(work / "adapter" / WEIGHTS, lambda tensors: tensors.update({name: torch.ones(8, 64)}))
    error = refused(work)
    assert error.code == "bad_adapter" and name in error.message


def test_half_a_pair(work: Path) -> None:
    def lose(tensors: dict[str, Any]) -> None:
        del tensors[f"{Q}.lora_B.weight"]

    retensor(work / "adapter" / WEIGHTS, lose)
    error = refused(work)
    assert error.code == "bad_adapter" and Q.removeprefix("base_model.model.") in error.message


def test_an_adapter_of_a_wider_model(work: Path) -> None:
    retensor(work / "adapter" / WEIGHTS, lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(8, 80)}))
    error = refused(work)
    assert (error.code, error.expected) == ("wrong_base", "an update of shape (64, 64)")
    assert error.got == "(64, 80)" and f"{Q}.lora_" in error.message


def test_a_rank_that_the_config_does_not_say(work: Path) -> None:
    merging.edit(work / "adapter" / "adapter_config.json", r=4)
    error = refused(work)
    assert error.code == "bad_adapter" and error.expected.startswith("rank 4")


@pytest.mark.parametrize(
    "change", [{"r": "8"}, {"r": 0}, {"peft_type": None}, {"alpha_pattern": {"(": 2}}, {"rank_pattern": {"q": "2"}}]
)
def test_a_config_with_nonsense(change: dict[str, Any], work: Path) -> None:
    merging.edit(work / "adapter" / "adapter_config.json", **change)
    assert refused(work).code == "bad_adapter"


@pytest.mark.parametrize(
    "change",
    [
        {"lora_alpha": None},
        {"target_modules": []},
        {"target_modules": 5},
        {"target_modules": "["},
        {"modules_to_save": ["lm_head"]},
        {"bias": 5},
        {"exclude_modules": 5},
        {"target_parameters": 5},
        {"layers_to_transform": "x"},
        {"init_lora_weights": 5},
        {"lora_dropout": 5},
        {"trainable_token_indices": [-1]},
        {"eva_config": 5},
    ],
    ids=str,
)
def test_a_config_that_peft_cannot_load(change: dict[str, Any], work: Path) -> None:
    merging.edit(work / "adapter" / "adapter_config.json", **change)
    error = refused(work)
    assert (error.exit_code, error.code) == (2, "bad_adapter")
    assert str(work / "adapter") in error.message and error.expected and error.hint


def test_an_option_of_a_later_peft(work: Path) -> None:
    """The installed one leaves it out with a warning, and so would the model that the merge is compared with."""
    merging.edit(work / "adapter" / "adapter_config.json", use_later=True, later_still=None)
    error = refused(work)
    assert (error.code, error.got) == ("bad_adapter", "use_later: True")
    assert "pip install -U peft" in error.hint
    merging.edit(work / "adapter" / "adapter_config.json", use_later=False)
    assert merging.run(work / "base", work / "adapter", work)["how"] == "streamed"


@pytest.mark.parametrize(
    ("change", "blamed"),
    [
        ({"hidden_size": 0}, "base"),
        ({"vocab_size": 0}, "base"),
        ({"num_attention_heads": 0}, "base/config.json"),
        ({"num_key_value_heads": 3}, "base"),
        ({"hidden_act": "nope"}, "base"),
        ({"rope_parameters": 5}, "base/config.json"),
        ({"tie_word_embeddings": "no"}, "base/config.json"),
        ({"quantization_config": 5}, "base/config.json"),
    ],
    ids=str,
)
def test_a_base_that_transformers_cannot_load(change: dict[str, Any], blamed: str, work: Path) -> None:
    merging.edit(work / "base" / "config.json", **change)
    error = refused(work)
    assert (error.exit_code, error.code) == (2, "broken_model")
    assert f"{work / blamed} cannot be " in error.message and error.hint
    assert ": " in error.got or error.got == "quantization_config is 5, not an object"  # our own reader's words


@pytest.mark.parametrize(
    "change",
    [
        {"peft_type": "PREFIX_TUNING"},
        {"layer_replication": [[0, 2], [1, 2]]},
        {"alora_invocation_tokens": [1, 2]},
        {"task_type": "SEQ_CLS"},
        {"init_lora_weights": "corda"},
    ],
)
def test_an_adapter_that_no_merge_can_fold(change: dict[str, Any], work: Path) -> None:
    merging.edit(work / "adapter" / "adapter_config.json", **change)
    error = refused(work)
    assert error.code == "bad_adapter" and error.hint


@pytest.mark.parametrize("folder", ["base", "adapter"])
@pytest.mark.parametrize("kept", [0, 4, 100, 5000])
def test_a_truncated_file(folder: str, kept: int, work: Path) -> None:
    file = work / folder / ("model.safetensors" if folder == "base" else WEIGHTS)
    file.write_bytes(file.read_bytes()[:kept])
    error = refused(work)
    assert error.code == "broken_model" and str(file) in error.message


def _overlap(header: dict[str, Any]) -> None:
    first, second = list(header)[-2:]
    header[first]["data_offsets"] = header[second]["data_offsets"]


def _huge(header: dict[str, Any]) -> None:
    header[list(header)[-1]]["shape"] = [2**40, 2**40]


def _far(header: dict[str, Any]) -> None:
    header[list(header)[-1]]["data_offsets"] = [10**12, 10**12 + 64]


def _no_type(header: dict[str, Any]) -> None:
    del header[list(header)[-1]]["dtype"]


@pytest.mark.parametrize("lie", [_overlap, _huge, _far, _no_type])
def test_a_header_that_lies(lie: Callable[[dict[str, Any]], None], work: Path) -> None:
    file = work / "base" / "model.safetensors"
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    lie(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    assert refused(work).code == "broken_model"


def test_an_index_that_points_elsewhere(work: Path) -> None:
    index = work / "base" / "model.safetensors.index.json"
    for weight_map in ({"a": "../adapter/adapter_model.safetensors"}, {"a": "model.safetensors"}, {}, []):
        index.write_text(json.dumps({"weight_map": weight_map}))
        assert refused(work).code == "broken_model"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    assert refused(work).code == "broken_model"  # transformers would take the single file that is there
    (work / "base" / "model.safetensors").unlink()
    assert refused(work).code == "missing_file"


def test_a_quantized_base(work: Path) -> None:
    merging.edit(
        work / "base" / "config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}
    )
    merging.edit(work / "adapter" / "adapter_config.json", base_model_name_or_path="org/full-precision")
    error = refused(work)
    assert error.code == "quantized_base" and "bitsandbytes" in error.message
    assert error.hint.startswith("skill-train merge --base org/full-precision --adapter ")


def test_pickles_only(work: Path) -> None:
    (work / "base" / "model.safetensors").rename(work / "base" / "pytorch_model.bin")
    assert (error := refused(work)).code == "no_safetensors" and "pytorch_model.bin" in error.message
    (work / "base" / "pytorch_model.bin").rename(work / "base" / "model.safetensors")
    (work / "adapter" / WEIGHTS).rename(work / "adapter" / "adapter_model.bin")
    assert (error := refused(work)).code == "no_safetensors" and "adapter_model.bin" in error.got


def test_folders_of_the_wrong_kind(work: Path) -> None:
    with pytest.raises(UsageError) as raised:
        merging.run(work / "adapter", work / "base", work)
    assert raised.value.code == "bad_adapter"
    with pytest.raises(UsageError) as raised:
        merging.run(work / "adapter", work / "adapter", work)
    assert raised.value.code == "not_a_model"
    merging.edit(work / "base" / "config.json", model_type="llamma")
    assert (error := refused(work)).code == "unknown_model_type" and "did you mean 'llama'" in error.message


def test_a_folder_of_adapters_with_names(work: Path) -> None:
    """As PEFT saves a model with two adapters: each in a folder of its name."""
    (work / "adapter").rename(work / "one")
    (work / "adapter").mkdir()
    (work / "one").rename(work / "adapter" / "one")
    error = refused(work)
    assert (
        error.code == "bad_adapter" and f"an adapter that lies in it, such as {work / 'adapter' / 'one'}" in error.hint
    )


def test_a_full_output_folder_stays(work: Path) -> None:
    (work / "merged").mkdir()
    (work / "merged" / "mine.txt").write_text("mine")
    with pytest.raises(UsageError) as raised:
        merging.run(work / "base", work / "adapter", work)
    assert raised.value.code == "output_exists"
    assert [path.name for path in (work / "merged").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(value: float, work: Path) -> None:
    def poison(tensors: dict[str, Any]) -> None:
        tensors[f"{Q}.lora_B.weight"][3, 2] = value

    retensor(work / "adapter" / WEIGHTS, poison)
    error = refused(work)
    assert isinstance(error, VerificationFailed) and error.code == "not_finite"
    assert "model.layers.0.self_attn.q_proj.weight" in error.message


def test_values_that_float16_cannot_hold(work: Path) -> None:
    def enlarge(tensors: dict[str, Any]) -> None:
        tensors[f"{Q}.lora_B.weight"] *= 1e6

    retensor(work / "adapter" / WEIGHTS, enlarge)
    error = refused(work, dtype="float16")
    assert isinstance(error, VerificationFailed) and error.code == "not_finite"
    assert "model.layers.0.self_attn.q_proj.weight" in error.message and error.expected == "at most 65504"


def test_experts_of_another_name_go_to_peft_and_unknown_ones_are_named(tmp_path: Path) -> None:
    """Mixtral's router is `block_sparse_moe.gate` in the checkpoint and `mlp.gate` in the model."""
    from transformers import MixtralConfig

    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "tie_word_embeddings": False}
    base = merging.save(MixtralConfig(**sizes, **heads), tmp_path / "base")
    adapter = merging.adapter(base, tmp_path / "adapter", targets=["q_proj"], modules_to_save=["mlp.gate"])
    record = merging.run(base, adapter, tmp_path)
    assert record["how"] == "peft" and "under another name" in record["reasons"][0]
    router = "model.layers.0.block_sparse_moe.gate.weight"
    expected = load_file(adapter / WEIGHTS)["base_model.model.model.layers.0.mlp.gate.weight"]
    assert torch.equal(merging.weights(tmp_path / "merged")[router], expected)


@pytest.mark.skipif(sys.platform != "linux", reason="macOS keeps no limit of the address space")
def test_an_address_space_too_small_for_torch(work: Path) -> None:
    """0.4 GB: libtorch cannot be mapped, which is no bug."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (400 << 20,) * 2); "
    words = ["merge", "--base", "base", "--adapter", "adapter", "--out", "merged", "--format", "json"]
    program = [sys.executable, "-c", limit + "from skill_train.cli import main; main()", *words]
    done = subprocess.run(program, cwd=work, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout)["error"]["code"] == "out_of_memory"
    assert "Traceback" not in done.stderr and {p.name for p in work.iterdir()} == {"base", "adapter"}
