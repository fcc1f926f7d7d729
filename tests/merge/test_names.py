"""How an adapter's names find the checkpoint's, and how the files beside the weights are carried over. No torch."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from skill_train.core.errors import UsageError
from skill_train.merge.plan import match_names
from skill_train.model.adapter import pattern_value, read_adapter, why_not_streamed
from skill_train.model.lora_math import scaling
from skill_train.model.sidecar_files import companion_files, copy_companions, model_digests, write_config
from skill_train.model.weight_files import copy_bytes, in_order, new_shard, read_folder, read_shard, written_to

LAYER = "layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("wanted", "stored", "found"),
    [
        ([f"model.{LAYER}"], {f"model.{LAYER}", "lm_head.weight"}, [f"model.{LAYER}"]),
        ([f"model.{LAYER}", "lm_head.weight"], {LAYER, "lm_head.weight"}, [LAYER, "lm_head.weight"]),
        ([f"model.{LAYER}", "lm_head.weight"], {LAYER}, [LAYER, "lm_head.weight"]),  # tied: a head that is not stored
        ([LAYER, "embed_tokens.weight"], {f"model.{LAYER}", "model.embed_tokens.weight"}, ["model.*"]),
        (
            [f"model.language_model.{LAYER}"],
            {f"language_model.model.{LAYER}", "vision_tower.layers.0.self_attn.k_proj.weight"},
            [f"language_model.model.{LAYER}"],
        ),
    ],
)
def test_one_rule_for_all_names(wanted: list[str], stored: set[str], found: list[str]) -> None:
    expected = [f"model.{name}" for name in wanted] if found == ["model.*"] else found
    assert match_names(wanted, stored, {"lm_head.weight"}) == [dict(zip(wanted, expected, strict=True))]


@pytest.mark.parametrize(
    ("wanted", "stored"),
    [
        (["model.layers.9.mlp.up_proj.weight"], {"model.layers.0.mlp.up_proj.weight"}),
        ([f"model.{LAYER}", "model.norm.weight"], {LAYER, "other.norm.weight"}),  # two names, two different prefixes
        ([f"a.{LAYER}", f"b.{LAYER}"], {LAYER}),
        ([f"model.{LAYER}", LAYER], {LAYER}),  # two adapter modules for one tensor
        (["model.wq.weight"], {"model.wqq.weight", "xwq.weight"}),
    ],
)
def test_what_does_not_match_is_not_forced(wanted: list[str], stored: set[str]) -> None:
    assert match_names(wanted, stored, set()) == []


def test_two_possible_places_are_both_returned() -> None:
    stored = {f"text.{LAYER}", f"vision.{LAYER}"}
    assert len(match_names([f"model.{LAYER}"], stored, set())) == 2


def test_patterns_match_a_whole_name_or_its_tail() -> None:
    name = "model.layers.1.self_attn.q_proj"
    assert pattern_value({"q_proj": 3}, name, 8) == 3
    assert pattern_value({"proj": 3}, name, 8) == 8  # a tail begins after a dot
    assert pattern_value({r"layers\.[01]\.self_attn\.q_proj": 4, "q_proj": 3}, name, 8) == 4
    assert pattern_value({"^model.layers.0.self_attn.q_proj": 4}, name, 8) == 8
    assert pattern_value({}, name, 8) == 8


def test_scaling() -> None:
    assert scaling(16, 8, False) == 2
    assert scaling(16, 4, True) == 8


def adapter_folder(folder: Path, tensors: dict[str, Any], **config: Any) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4} | config))
    return folder


def test_tensors_are_sorted_by_what_they_are(tmp_path: Path) -> None:
    small = np.ones((2, 2), np.float32)
    stem = "base_model.model.model"
    names = {
        f"{stem}.q.lora_A.weight": small,
        f"{stem}.q.lora_B.weight": small + 1,
        f"{stem}.q.lora_magnitude_vector": small + 2,
        f"{stem}.q.base_layer.bias": small + 3,
        f"{stem}.norm.weight": small + 4,
        f"{stem}.embed_tokens.token_adapter.base_layer.weight": small + 5,
    }
    adapter = read_adapter(adapter_folder(tmp_path / "a", names, modules_to_save=["norm"]))
    assert set(adapter.modules["model.q"]) == {"a", "b", "magnitude"}
    assert set(adapter.replaced) == {"model.q.bias", "model.norm.weight", "model.embed_tokens.weight"}
    assert adapter.shared == {"model.q.bias", "model.embed_tokens.weight"}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, None),
        ({"megatron_core": "megatron.core", "lora_dropout": 0.1, "bias": "all"}, None),
        ({"target_parameters": ["experts.down"]}, "target_parameters"),
        ({"use_qalora": True}, "use_qalora"),
        ({"an_option_of_tomorrow": 1}, "an_option_of_tomorrow"),
        ({"init_lora_weights": "olora"}, "olora"),
        ({"init_lora_weights": "gaussian"}, None),
    ],
)
def test_reasons_not_to_stream(config: dict[str, Any], reason: str | None, tmp_path: Path) -> None:
    tensor = {"base_model.model.q.lora_A.weight": np.ones((2, 2), np.float32)}
    reasons = why_not_streamed(read_adapter(adapter_folder(tmp_path / "a", tensor, **config)))
    assert len(reasons) == (reason is not None)
    assert reason is None or reason in reasons[0]


def test_a_written_file_is_read_by_safetensors(tmp_path: Path) -> None:
    """Odd sizes of several types: each tensor must start at a multiple of its item size."""
    tensors = {
        "mask": np.array([True, False, True]),
        "half": np.arange(3, dtype=np.float16),
        "scalar": np.array(7, np.int64),
        "wide": np.arange(5, dtype=np.float64),
        "empty": np.zeros((0, 4), np.float32),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt", "note": "é"})
    (shard,) = read_folder(tmp_path)
    entries = in_order({name: (stored.dtype, stored.shape) for name, stored in shard.tensors.items()})
    places = new_shard(tmp_path / "out.safetensors", entries, shard.metadata)
    for name in reversed(entries):  # in any order
        with written_to(places[name]) as write:
            copy_bytes(shard.tensors[name], write)
    found = load_file(tmp_path / "out.safetensors")
    assert {name: (t.dtype, t.tolist()) for name, t in found.items()} == {
        name: (t.dtype, t.tolist()) for name, t in tensors.items()
    }
    assert read_shard(tmp_path / "out.safetensors").metadata == {"format": "pt", "note": "é"}
    raw = (tmp_path / "out.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    begins = {n: e["data_offsets"][0] for n, e in json.loads(raw[8 : 8 + length]).items() if n != "__metadata__"}
    assert (8 + length) % 8 == 0
    assert all(begins[name] % tensor.itemsize == 0 for name, tensor in tensors.items())


def test_no_weights_at_all(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as raised:
        read_folder(tmp_path)
    assert raised.value.code == "missing_file"


def test_config_changes_only_what_changed(tmp_path: Path) -> None:
    base, part = tmp_path / "base", tmp_path / "part"
    base.mkdir(), part.mkdir()
    text = '{"b": 1,   "tie_word_embeddings": true, "n_ctx": 9, "text_config": {"vocab_size": 8, "dtype": "bfloat16"}}'
    (base / "config.json").write_text(text)
    (part / "config.json").write_text(text)
    assert write_config(base, part, {}, None) == {}
    assert (part / "config.json").read_text() == text
    changed = write_config(base, part, {"tie_word_embeddings": False, "vocab_size": 9}, "float32")
    assert changed == {"tie_word_embeddings": False, "vocab_size": 9, "dtype": "float32"}
    text_config = {"vocab_size": 9, "dtype": "float32"}
    expected = {"b": 1, "tie_word_embeddings": False, "n_ctx": 9, "text_config": text_config}
    assert list(json.loads((part / "config.json").read_text()).items()) == list(expected.items())


def test_the_template_of_the_base_wins_and_a_missing_one_is_taken(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    for folder in (base, adapter):
        folder.mkdir()
    (base / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (adapter / "chat_template.jinja").write_text("trained with this")
    (adapter / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    warned: list[str] = []
    for number, template in enumerate([None, "the base's own"]):
        if template:
            (base / "chat_template.jinja").write_text(template)
        part = tmp_path / str(number)
        part.mkdir()
        taken = copy_companions(base, adapter, part, lambda code, message: warned.append(message))
        assert taken == ([] if template else ["chat_template.jinja"])
        assert (part / "chat_template.jinja").read_text() == (template or "trained with this")
    assert [message.split("another ")[1].split()[0] for message in warned] == ["eos_token", "chat", "eos_token"]


def test_links_are_followed_and_weights_stay(tmp_path: Path) -> None:
    """A folder in the Hub's cache is links to blobs. A link to elsewhere brings in nothing: what it shows would be
    published with the model."""
    cache = tmp_path / "models--me--x"
    base = cache / "snapshots" / "abc"
    base.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for blob in (cache / "blobs" / "1", tmp_path / "secret"):
        blob.write_text("{}")
    (base / "LICENSE").symlink_to(cache / "blobs" / "1")
    (base / "tokenizer.json").symlink_to(tmp_path / "secret")
    (base / "notes.txt").symlink_to(tmp_path / "secret")
    for name in ("model.safetensors", "pytorch_model.bin", "model.gguf", "code.py", ".hidden"):
        (base / name).write_text("")
    assert [path.name for path in companion_files(base)] == ["LICENSE"]


def test_what_else_lies_in_a_models_folder_is_no_part_of_the_model(tmp_path: Path) -> None:
    """Its runs, adapters, checkpoints and results, rows of data, records; a link that closes a circle is not walked."""
    record = '{\n "schema": "skill-train/step/1"\n}'
    own = {
        "config.json": "{}",
        "LICENSE": "a licence",
        "additional_chat_templates/tools.jinja": "{{ messages }}",
        "modules.json": '[{"path": "1_Pooling"}]',
        "1_Pooling/config.json": "{}",
    }
    others = {
        "runs/events.txt": "",
        "first/plan.json": "{}",
        "first/train.txt": "",
        "first/merged/config.json": "{}",
        "adapter/adapter_config.json": "{}",
        "adapter/README.md": "",
        "out/checkpoint-500/trainer_state.json": "{}",
        "out/checkpoint-500/tokenizer.json": "{}",
        "merged/config.json": "{}",
        "merged/model.safetensors": "",
        "gguf/Modelfile": "FROM ./model.gguf",
        "gguf/convert.json": record,
        ".git/config": "",
        "merge.json": record,
        "merge.failed.json": "{}",
        "rows.jsonl": "{}",
        "rows.json": '[{"prompt": "private"}]',
        "rows.csv": "prompt,completion",
        "train.log": "",
    }
    for name, text in (own | others | {"model.safetensors": "weights"}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "again").symlink_to(tmp_path, target_is_directory=True)
    assert {str(path.relative_to(tmp_path)) for path in companion_files(tmp_path)} == set(own)
    assert set(model_digests(tmp_path)) == {*own, "model.safetensors"}
