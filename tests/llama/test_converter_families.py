"""What transformers 5 drops from a config.json, or writes under another name, reaches llama.cpp's converter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

import merging
import tiny
import tiny_families
import tiny_vocab
from converting import converted
from skill_train.llama import inference
from skill_train.llama.gguf_header import read_gguf
from skill_train.reference import load as reference
from skill_train.verify.metadata.check import check_metadata

pytestmark = pytest.mark.slow

IDS = [464, 3290, 318, 922, 287, 262, 1110, 290, 2740, 546, 340]
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
ROTATED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
DELTA = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_key_value_heads": 2}
DELTA |= {"shared_expert_intermediate_size": 64, "head_dim": 32, "linear_num_key_heads": 2, "linear_key_head_dim": 16}
DELTA |= {"linear_num_value_heads": 4, "linear_value_head_dim": 16, "full_attention_interval": 2}
REFUSED = {"bamba", "minimaxm2"}  # by `plan`, and so by the converter
FALCON = {"alibi": False, "bias": False, "num_kv_heads": None}


def family(folder: Path, name: str, config: dict[str, Any], drop: tuple[str, ...], add: dict[str, Any]) -> Path:
    """A tiny model with GPT-2's vocabulary, whose config.json lacks `drop` and has `add`, as a published one does."""
    import transformers

    made = getattr(transformers, f"{name}Config")(vocab_size=50257, bos_token_id=50256, **SHAPE | config)
    merging.save(made, folder)
    tiny_vocab.write_gpt2(folder, tiny.vocab_folder())
    file = folder / "config.json"
    said = {key: value for key, value in json.loads(file.read_text()).items() if key not in drop}
    file.write_text(json.dumps(said | add))
    return folder


@pytest.mark.parametrize("name", tiny_families.by_default(tiny_families.PUBLISHED.keys() - REFUSED, ("glm",)))
def test_a_model_as_transformers_saves_it_has_the_numbers_of_its_config(name: str, tmp_path: Path) -> None:
    """Where a published config.json has keys that transformers 5 does not write."""
    folder = tiny_families.folder(name)
    check = check_metadata(read_gguf(converted(folder, tmp_path)), json.loads((folder / "config.json").read_text()))
    assert check.verdict == "pass", check.detail


@pytest.mark.parametrize(
    ("name", "config", "drop", "add"),
    [
        ("GPTNeoX", {"rope_parameters": ROTATED}, ("rope_parameters",), {"rotary_pct": 0.25, "rotary_emb_base": 10000}),
        pytest.param(
            "GPTNeoX",
            {"rope_parameters": ROTATED | {"partial_rotary_factor": 0.5}},
            (),
            {},
            marks=pytest.mark.torture,
        ),  # as transformers 5 saves it
        ("Falcon", FALCON | {"multi_query": True, "new_decoder_architecture": False}, ("num_kv_heads",), {}),
        pytest.param(
            "Falcon",
            FALCON | {"multi_query": True, "new_decoder_architecture": False},
            (),
            {},
            marks=pytest.mark.torture,
        ),
        pytest.param(
            "Falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}, (), {}, marks=pytest.mark.torture
        ),
        pytest.param(
            "Falcon",
            FALCON | {"multi_query": False, "new_decoder_architecture": False},
            (),
            {},
            marks=pytest.mark.torture,
        ),
        pytest.param(
            "GPT2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}, (), {}, marks=pytest.mark.torture
        ),
        pytest.param("Cohere2", {"num_key_value_heads": 2}, (), {}, marks=pytest.mark.torture),
        ("Qwen3Next", DELTA | {"layer_types": ["linear_attention", "full_attention"]}, (), {}),
    ],
)
def test_a_model_converts_and_llama_cpp_computes_the_same(
    name: str, config: Any, drop: Any, add: Any, tmp_path: Path
) -> None:
    folder = family(tmp_path / "model", name, config, drop, add)
    file = converted(folder, tmp_path)
    with reference.reference_model(folder) as model:
        logits = reference.logits(model, IDS)
    logits.tofile(tmp_path / "tuned.bin")
    tuned = str(tmp_path / "tuned.bin")
    job = inference.InferenceJob(gguf=str(file), context_tokens=64, threads=1, vocabulary=logits.shape[1], tuned=tuned)
    found = inference.ask(msgspec.structs.replace(job, sequences=[inference.Sequence(IDS, 0)])).figures
    assert found["mean_kl"] < 1e-5, found
