"""A model folder is known from its config and its headers. The files here are written byte by byte, by the format."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from skill_train.core.errors import UsageError
from skill_train.model import folder as model
from skill_train.model.weight_files import read_shard
from skill_train.run import records
from skill_train.run.export_record import ExportRecord

CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
}
TENSORS = {"embed": ("BF16", [10, 4]), "layer": ("BF16", [4, 4]), "norm": ("F32", [4])}
SIZES = {"F32": 4, "BF16": 2}


def test_the_facts_of_a_folder(tmp_path: Path) -> None:
    facts = model.read_model(_folder(tmp_path))
    assert facts.parameters == 10 * 4 + 4 * 4 + 4
    assert facts.stored_dtype == "BF16"
    assert (facts.model_type, facts.architecture) == ("qwen2", "Qwen2ForCausalLM")
    assert (facts.layers, facts.hidden_size, facts.vocab_size, facts.context) == (24, 896, 151936, 32768)
    assert (facts.quantization, facts.has_chat_template, facts.unknown) == (None, False, {})
    assert facts.source == str(tmp_path)
    assert facts.weight_bytes == (tmp_path / "model.safetensors").stat().st_size
    assert (facts.gated, facts.revision, facts.vision, facts.convertible) == (None, None, False, True)


def test_shards_are_added_up(tmp_path: Path) -> None:
    _folder(tmp_path, tensors={})
    (tmp_path / "model.safetensors").unlink()
    _weights(tmp_path / "model-00001-of-00002.safetensors", {"a": ("F32", [3, 5])})
    _weights(tmp_path / "model-00002-of-00002.safetensors", {"b": ("F32", [7])})
    assert model.read_model(tmp_path).parameters == 3 * 5 + 7


def test_a_scalar_counts_one(tmp_path: Path) -> None:
    assert model.read_model(_folder(tmp_path, tensors={"scale": ("F32", [])})).parameters == 1


def test_gpt2_names_its_shape_in_its_own_way(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_positions": 1024, "vocab_size": 50257}
    facts = model.read_model(_folder(tmp_path, config=config))
    assert (facts.layers, facts.hidden_size, facts.context, facts.architecture) == (12, 768, 1024, "unknown")


def test_the_text_part_of_a_larger_model_counts(tmp_path: Path) -> None:
    config = {"model_type": "gemma3", "text_config": {"num_hidden_layers": 34, "hidden_size": 2560}}
    facts = model.read_model(_folder(tmp_path, config=config))
    assert (facts.layers, facts.hidden_size) == (34, 2560)


def test_what_the_config_does_not_say_is_unknown_with_its_reason(tmp_path: Path) -> None:
    facts = model.read_model(_folder(tmp_path, config={"model_type": "new"}))
    assert (facts.layers, facts.hidden_size, facts.vocab_size, facts.context) == (None, None, None, None)
    assert {"layers", "hidden_size", "vocab_size", "context"} <= set(facts.unknown)
    assert "parameters" not in facts.unknown  # the headers say them


def test_a_quantized_checkpoint_is_named_and_its_bytes_are_not_counted(tmp_path: Path) -> None:
    """What is left is the arithmetic: the published count of Qwen2.5-0.5B, whose config this is."""
    facts = model.read_model(_folder(tmp_path, config=CONFIG | {"quantization_config": {"quant_method": "gptq"}}))
    assert (facts.quantization, facts.parameters, facts.parameters_from) == ("gptq", 494_032_768, "config arithmetic")


def test_a_plan_needs_no_weights(tmp_path: Path) -> None:
    (_folder(tmp_path) / "model.safetensors").unlink()
    facts = model.read_model(tmp_path, weights_needed=False)
    assert (facts.parameters, facts.parameters_from, facts.weight_bytes) == (494_032_768, "config arithmetic", None)
    assert facts.unknown == {
        "weight_bytes": "the folder holds no safetensors", "stored_dtype": "config.json does not say",
    }  # fmt: skip


def test_a_model_with_a_part_missing_is_not_counted(tmp_path: Path) -> None:
    (_folder(tmp_path) / "model.safetensors").rename(tmp_path / "model-00002-of-00003.safetensors")
    error = _refused(tmp_path)
    assert (error.code, error.got) == ("broken_model", "only 1 of 3 weight files are there")
    facts = model.read_model(tmp_path, weights_needed=False)
    assert (facts.parameters, facts.parameters_from) == (494_032_768, "config arithmetic")
    assert facts.unknown["weight_bytes"] == "only 1 of 3 weight files are there"


def test_weights_that_lie_there_twice_count_once(tmp_path: Path) -> None:
    """As in Mistral's repositories."""
    _folder(tmp_path)
    _weights(tmp_path / "consolidated.safetensors", TENSORS)
    assert model.read_model(tmp_path).parameters == 60


def test_weights_that_are_there_are_read_for_a_plan_too(tmp_path: Path) -> None:
    assert model.read_model(_folder(tmp_path), weights_needed=False).parameters == 60


def test_a_72b_model_is_read_in_milliseconds(tmp_path: Path) -> None:
    """37 shards of 26 tensors, as the real one has, without their data: only the headers are opened."""
    shards = 37
    (_folder(tmp_path) / "model.safetensors").unlink()
    for shard in range(shards):
        tensors = {f"model.layers.{shard}.{n}.weight": ("BF16", [1, 1]) for n in range(26)}
        _weights(tmp_path / f"model-{shard + 1:05d}-of-{shards:05d}.safetensors", tensors)
    model.read_model(tmp_path)
    started = time.process_time()  # which a busy machine does not lengthen
    assert model.read_model(tmp_path).parameters == shards * 26
    assert time.process_time() - started < 0.1  # 10 ms here


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_chat_template_is_found_in_both_places(tmp_path: Path, place: str) -> None:
    text = "{{ messages }}" if place.endswith(".jinja") else json.dumps({"chat_template": "{{ messages }}"})
    _folder(tmp_path)
    (tmp_path / place).write_text(text)
    assert model.read_model(tmp_path).has_chat_template


def test_a_tokenizer_config_without_a_template_is_none(tmp_path: Path) -> None:
    _folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert not model.read_model(tmp_path).has_chat_template


# --- Folders that are no models ---


def test_no_folder_and_a_folder_of_something_else_are_refused(tmp_path: Path) -> None:
    for folder, got in ((tmp_path / "none", "no such folder"), (tmp_path, "a folder without config.json")):
        error = _refused(folder)
        assert (error.code, error.exit_code, error.got) == ("not_a_model", 2, got)


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"vocab_size": ' + b"1" * 5000 + b"}"])
def test_a_broken_config_is_refused(tmp_path: Path, text: bytes) -> None:
    _folder(tmp_path)
    (tmp_path / "config.json").write_bytes(text)
    assert _refused(tmp_path).code == "broken_model"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_and_never_opened(tmp_path: Path, name: str) -> None:
    _folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    # Opening this would run a command: pickle calls what it is told to.
    (tmp_path / name).write_bytes(b"cposix\nsystem\n(S'touch opened'\ntR.")
    error = _refused(tmp_path)
    assert error.code == "no_safetensors"
    assert name in error.got
    assert "safetensors" in error.hint
    assert not (tmp_path / "opened").exists()


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    _folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert _refused(tmp_path).got == "no weights"


# --- Headers that lie ---


def _entry(**changes: Any) -> bytes:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes
    return json.dumps({"a": entry}).encode()


DATA = bytes(8)
LIES: list[tuple[str, bytes]] = [
    ("empty file", b""),
    ("seven bytes", b"1234567"),
    ("a header longer than the file", struct.pack("<Q", 10**6) + _entry() + DATA),
    ("a header of 2^63 bytes", struct.pack("<Q", 2**63) + _entry() + DATA),
    ("not JSON", struct.pack("<Q", 8) + b"nonsense"),
    ("not UTF-8", struct.pack("<Q", 2) + b"\xff\xfe"),
    ("a list", struct.pack("<Q", 2) + b"[]"),
    ("nested without end", struct.pack("<Q", 100_000) + b"[" * 100_000),
    ("cut data", struct.pack("<Q", len(_entry())) + _entry() + DATA[:-1]),
    ("data too many", struct.pack("<Q", len(_entry())) + _entry() + DATA + b"!"),
]
LIES += [
    (name, struct.pack("<Q", len(header)) + header + DATA)
    for name, header in (
        ("offsets backwards", _entry(data_offsets=[8, 0])),
        ("offset below zero", _entry(data_offsets=[-8, 8])),
        ("offsets of one", _entry(data_offsets=[8])),
        ("offsets as text", _entry(data_offsets=["0", "8"])),
        ("no offsets", json.dumps({"a": {"dtype": "F32", "shape": [2]}}).encode()),
        ("a negative shape", _entry(shape=[-2])),
        ("a shape as text", _entry(shape=["2"])),
        ("no shape", json.dumps({"a": {"dtype": "F32", "data_offsets": [0, 8]}}).encode()),
        ("dtype a number", _entry(dtype=32)),
        ("an entry that is text", b'{"a": "tensor"}'),
    )
]


@pytest.mark.parametrize("content", [lie[1] for lie in LIES], ids=[lie[0] for lie in LIES])
def test_a_header_that_lies_is_refused(tmp_path: Path, content: bytes) -> None:
    _folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    error = _refused(tmp_path)
    assert (error.code, error.exit_code) == ("broken_model", 2)
    assert "model.safetensors" in error.message


def test_the_honest_header_beside_the_lies_is_taken(tmp_path: Path) -> None:
    header = _entry()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + DATA)
    assert set(read_shard(tmp_path / "a.safetensors").tensors) == {"a"}


def test_a_file_that_safetensors_wrote_is_read_the_same(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    from safetensors.numpy import save_file

    save_file({"x": numpy.zeros((3, 5), dtype="float16")}, str(tmp_path / "x.safetensors"), metadata={"format": "pt"})
    found = read_shard(tmp_path / "x.safetensors").tensors["x"]
    assert (found.shape, found.dtype, found.size) == ((3, 5), "F16", 30)


# --- The fingerprint ---


def test_the_fingerprint_is_of_the_content_and_not_of_the_place(tmp_path: Path) -> None:
    first = model.fingerprint(_folder(tmp_path / "here"))
    assert model.fingerprint(_folder(tmp_path / "there")) == first
    (tmp_path / "here" / "README.md").write_text("words")
    assert model.fingerprint(tmp_path / "here") == first


def test_a_record_of_ours_is_no_part_of_the_model(tmp_path: Path) -> None:
    """`merge --out BASE/x`, `export-gguf BASE --out BASE` and `verify --gguf BASE/x.gguf` leave one."""
    first = model.fingerprint(_folder(tmp_path))
    for name in ("x.merge.json", "merge.failed.json", "convert.json", "verify.json"):
        records.write(tmp_path / name, ExportRecord(outputs={}))
    assert model.fingerprint(tmp_path) == first
    (tmp_path / "tokenizer.json").write_text('{"schema": "another/1"}')
    assert model.fingerprint(tmp_path) != first


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "chat_template.jinja", "tokenizer.model"])
def test_one_changed_byte_changes_the_fingerprint(tmp_path: Path, name: str) -> None:
    folder = _folder(tmp_path)
    for extra in ("chat_template.jinja", "tokenizer.model"):
        (folder / extra).write_bytes(b"abc")
    first = model.fingerprint(folder)
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)
    assert model.fingerprint(folder) != first


def test_a_damaged_file_has_a_fingerprint(tmp_path: Path) -> None:
    """A page of a server in place of the weights: the length of its header is 5.8e18. It ended as "out of memory"."""
    folder = _folder(tmp_path)
    first = model.fingerprint(folder)
    (folder / "model.safetensors").write_bytes(b"<!DOCTYPE html>".ljust(400_000))
    assert model.fingerprint(folder) != first


@pytest.mark.parametrize("where", ["header", "first", "last"])
def test_a_large_file_is_known_by_its_ends(tmp_path: Path, where: str) -> None:
    """8 MB: beyond the size that is read whole."""
    folder = _folder(tmp_path, tensors={"big": ("F32", [2_000_000])})
    path = folder / "model.safetensors"
    first = model.fingerprint(folder)
    content = bytearray(path.read_bytes())
    header = struct.unpack("<Q", content[:8])[0]
    content[{"header": 8 + content[8:].index(b"big"), "first": 8 + header, "last": -1}[where]] ^= 1
    path.write_bytes(content)
    assert model.fingerprint(folder) != first


def _folder(folder: Path, *, config: dict[str, Any] = CONFIG, tensors: Any = TENSORS) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    _weights(folder / "model.safetensors", tensors)
    return folder


def _weights(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    """Source: the format's description in safetensors' README: length, JSON header, data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        size = SIZES[dtype]
        for n in shape:
            size *= n
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


def _refused(folder: Path) -> UsageError:
    with pytest.raises(UsageError) as caught:
        model.read_model(folder)
    return caught.value
