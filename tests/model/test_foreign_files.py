"""A model folder that somebody else made: what leads out of it is refused before any library reads the folder."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

import hostile
from skill_train.core import memory
from skill_train.core.errors import SkillTrainError, UsageError
from skill_train.core.resources import demo
from skill_train.gguf import convert
from skill_train.llama import run_converter
from skill_train.machine.training_program import train_program
from skill_train.merge import step as merge
from skill_train.model import adapter, foreign_files, weight_files
from skill_train.model import folder as model
from skill_train.model.sidecar_files import companion_files
from skill_train.model.weight_files import read_shard
from skill_train.program.events import Refused
from skill_train.program.model import base_weights
from skill_train.program.model_files import FOREIGN_JSON
from skill_train.reference import load as reference

INDEX = "model.safetensors.index.json"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The demo's model."""
    return Path(shutil.copytree(demo() / "model", tmp_path / "base"))


def sharded(base: Path, name: str) -> Path:
    """The same model with an index that has every tensor in a file of that name; the weights are a decoy's."""
    names = list(read_shard(base / "model.safetensors").tensors)
    (base / "model.safetensors").rename(base / "model-00001-of-00001.safetensors")
    weight_map = dict.fromkeys(names, name)
    (base / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return base


def refusal(call, *arguments) -> SkillTrainError:
    with hostile.limits(5), pytest.raises(UsageError) as caught:
        call(*arguments)
    assert caught.value.expected and caught.value.hint
    return caught.value


# --- The index ---


@pytest.mark.parametrize(
    "name",
    [
        "{elsewhere}/model.safetensors",
        "../elsewhere/model.safetensors",
        "sub/model.safetensors",
        "./model-00001-of-00001.safetensors",
        "pytorch_model.bin",
        "x.pt",
        "..",
        "",
        ".safetensors",
        "a\\b.safetensors",
        7,
        None,
    ],
)
@pytest.mark.parametrize(
    "read", [model.read_model, weight_files.read_folder], ids=["plan and local", "merge and export"]
)
def test_an_index_that_names_another_file(read, name: object, base: Path, tmp_path: Path) -> None:
    elsewhere = shutil.copytree(base, tmp_path / "elsewhere")
    shutil.copy(base / "model.safetensors", base / "pytorch_model.bin")
    sharded(base, name.format(elsewhere=elsewhere) if isinstance(name, str) else name)  # type: ignore[arg-type]
    error = refusal(read, base)
    assert error.code == "broken_model" and INDEX in error.message


def test_the_training_program_refuses_such_an_index_before_it_loads_anything(base: Path, tmp_path: Path) -> None:
    """A plan that was made before the index was changed. Standard library only: transformers would open the file."""
    shutil.copytree(base, tmp_path / "elsewhere")
    sharded(base, "../elsewhere/model.safetensors")
    code = (
        "import runpy, sys\n"
        "sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "program = runpy.run_path(sys.argv[1])\n"
        "try:\n"
        "    program['check_base'](sys.argv[2], None)\n"
        "except program['Refused'] as refusal:\n"
        "    sys.exit(refusal.error['code'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, train_program(), base], capture_output=True, text=True)
    assert done.stderr.strip() == "broken_model"


def test_a_single_file_that_the_index_does_not_name(base: Path) -> None:
    """transformers takes the single file and other readers the index: one of the two would be judged by the other."""
    single = shutil.copy(base / "model.safetensors", base / "kept")
    sharded(base, "model-00001-of-00001.safetensors")
    assert model.read_model(base).parameters
    Path(single).rename(base / "model.safetensors")
    for read in (model.read_model, weight_files.read_folder):
        assert refusal(read, base).code == "broken_model"


def test_the_weights_that_are_counted_are_those_of_the_index(base: Path) -> None:
    before = model.read_model(base)
    shutil.copy(base / "model.safetensors", base / "extra.safetensors")
    sharded(base, "model-00001-of-00001.safetensors")
    (base / "model-00001-of-00001.safetensors").rename(base / "renamed.safetensors")
    (base / INDEX).write_text((base / INDEX).read_text().replace("model-00001-of-00001", "renamed"))
    assert model.read_model(base).parameters == before.parameters
    assert model.weight_files(base) == [base / "renamed.safetensors"]


@pytest.mark.parametrize("name", ["merges.txt", "vocab.txt", "qwen.tiktoken"])
def test_every_file_that_a_tokenizer_is_read_from_is_in_the_fingerprint(name: str, base: Path) -> None:
    before = model.fingerprint(base)
    (base / name).write_text("a b\n")
    one = model.fingerprint(base)
    (base / name).write_text("b a\n")
    assert len({before, one, model.fingerprint(base)}) == 3


def test_the_converter_sees_the_weights_that_are_loaded_and_no_others(base: Path) -> None:
    """llama.cpp's converter takes every model*.safetensors that lies there."""
    shutil.copy(base / "model.safetensors", base / "model-extra.safetensors")
    with run_converter.without_code(base) as view:
        assert [path.name for path in view.glob("*.safetensors")] == ["model.safetensors"]


# --- Files that are no files ---


def pipe(path: Path) -> str:
    os.mkfifo(path)
    return "missing_file"


def device(path: Path) -> str:
    path.symlink_to("/dev/zero")
    return "missing_file"


def terminal(path: Path) -> str:
    path.symlink_to("/dev/stdin")
    return "missing_file"


def listener(path: Path) -> str:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's path has at most 108 characters
        try:
            made.bind(path.name)
        finally:
            os.chdir(here)
    return "missing_file"


def elsewhere(path: Path) -> str:
    secret = Path(tempfile.mkdtemp(dir=path.parent.parent)) / "secret"
    secret.write_text("{}")
    path.symlink_to(secret)
    return "unsafe_link"


def sparse(path: Path) -> str:
    with open(path, "wb") as file:
        file.truncate(1 << 30)
    return "broken_model"


def circle(path: Path) -> str:
    path.symlink_to(path.name)
    return "missing_file"


NAMES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "chat_template.json", INDEX, "model.safetensors", "tokenizer.model", "special_tokens_map.json", "merges.txt",
    "vocab.json", "notes.json", "README.md",
)  # fmt: skip
READERS = {
    "plan": lambda folder: model.read_model(folder, weights_needed=False),
    "local": model.read_model,
    "merge": lambda folder: merge._read_base(folder, None, folder),
    "export-gguf": lambda folder: convert._check_files(folder, "f16"),
    "verify and evaluate": reference.load_tokenizer,
    "the gate": reference.require_config,
    "the training program": lambda folder: foreign_files.require_sound(folder),
}


@pytest.mark.parametrize("make", [pipe, device, terminal, elsewhere, circle, listener])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_file_of_the_folder_is_refused_at_once(make, name: str, base: Path) -> None:
    (base / name).unlink(missing_ok=True)
    code = make(base / name)
    for reader, read in READERS.items():
        if name == "config.json" and reader in ("plan", "local", "merge", "export-gguf") and make is not elsewhere:
            assert refusal(read, base).code in (code, "not_a_model")
        else:
            error = refusal(read, base)
            assert error.code == code and str(base / name) in error.message, reader


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith((".safetensors", ".md", "notes.json"))])
def test_a_file_of_a_gigabyte_is_not_read(name: str, base: Path) -> None:
    code = sparse(base / name)
    before = memory.peak_memory_bytes()
    for reader, read in READERS.items():
        assert refusal(read, base).code == code, reader
    assert memory.peak_memory_bytes() - before < 100_000_000


@pytest.mark.parametrize("make", [pipe, device, elsewhere])
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "tokenizer_config.json"])
def test_an_adapter_is_looked_at_in_the_same_way(make, name: str, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (folder / name).unlink(missing_ok=True)
    code = make(folder / name)
    assert refusal(adapter.read_adapter, folder).code in (code, "bad_adapter")


def test_a_snapshot_of_the_hubs_cache_is_links_and_is_read(base: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--me--x"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(base.iterdir())):
        file.rename(cache / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert model.read_model(snapshot).parameters
    assert "config.json" in [path.name for path in companion_files(snapshot)]
    (tmp_path / "named").symlink_to(snapshot, target_is_directory=True)  # a folder may have another name
    assert model.read_model(tmp_path / "named").parameters
    (tmp_path / "secret").write_text("{}")
    (snapshot / "added_tokens.json").symlink_to("../../../secret")
    assert refusal(model.read_model, snapshot).code == "unsafe_link"


@pytest.mark.parametrize("change", ["", "other bytes", "no digest"])
def test_weights_of_the_hub_have_the_bytes_that_it_announced(base: Path, tmp_path: Path, change: str) -> None:
    """The client checks their number only. Its cache names a file by its SHA-256, if the Hub announced one."""
    weights = (base / "model.safetensors").read_bytes()
    name = hashlib.sha256(weights).hexdigest() if change != "no digest" else hashlib.sha1(weights).hexdigest()
    blob, snapshot = tmp_path / "models--me--x" / "blobs" / name, tmp_path / "models--me--x" / "snapshots" / ("a" * 40)
    blob.parent.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    blob.write_bytes(weights if change != "other bytes" else weights[:-1] + bytes([weights[-1] ^ 1]))
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{name}")
    recipe: Any = {"model": str(snapshot), "revision": None}
    if change != "other bytes":
        assert base_weights(recipe)["model.safetensors"]["sha256"] == hashlib.sha256(weights).hexdigest()
        return
    with pytest.raises(Refused, match="other bytes than the Hub announced") as refused:
        base_weights(recipe)
    error = refused.value.error
    assert (error["code"], error["hint"].split()[-2:]) == ("broken_model", ["rm", str(blob)])
    assert name in error["expected"] and hashlib.sha256(blob.read_bytes()).hexdigest() in error["got"]


# --- Values that no library can hold ---


def half(depth: int) -> object:
    value: object = 0
    for _ in range(depth):
        value = [value]
    return value


DIGITS = int("9" * 4000)
VALUES = {
    "a number of 4,000 digits in config.json": ("config.json", "hidden_size", DIGITS),
    "in a list of config.json": ("config.json", "layer_types", [DIGITS]),
    "beyond a C long": ("config.json", "eos_token_id", 2**70),
    "an id beyond a C int": ("generation_config.json", "eos_token_id", 2**40),
    "an id that is a text": ("config.json", "bos_token_id", "x"),
    "ids in lists of lists": ("generation_config.json", "eos_token_id", [[1], [2]]),
    "ids in an object": ("generation_config.json", "suppress_tokens", {"a": 1}),
    "an id that is a fraction": ("generation_config.json", "pad_token_id", 1.5),
    "nested 900 deep": ("generation_config.json", "x", half(900)),
    "half a character": ("tokenizer_config.json", "chat_template", "\ud800"),
    "layers": ("config.json", "num_hidden_layers", 5000),
    "layers, more": ("config.json", "num_hidden_layers", 2**31),
    "experts": ("config.json", "num_local_experts", 100_000),
    "experts inside": ("config.json", "text_config", {"num_experts": 100_000}),
    "labels": ("config.json", "num_labels", 2**40),
    "columns": ("config.json", "hidden_size", 2**40),
    "a part that is a number": ("config.json", "text_config", 5),
    "a type that is a list": ("config.json", "model_type", []),
    "no end of heads": ("config.json", "num_attention_heads", float("inf")),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_that_libraries_break_on_is_refused_by_every_reader(name: str, base: Path) -> None:
    file, key, value = VALUES[name]
    document = json.loads((base / file).read_text())
    (base / file).write_text(json.dumps(document | {key: value}))
    for reader, read in READERS.items():
        error = refusal(read, base)
        assert error.code == "broken_model" and str(base / file) in error.message, reader


@pytest.mark.parametrize(
    "content", [b"[]", b"null", b"", b'{"a": "\xe9"}', b"[" * 3000, b'{"a": ' + b"9" * 5000 + b"}"]
)
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "added_tokens.json"]
)
def test_settings_that_are_no_object_of_json(name: str, content: bytes, base: Path) -> None:
    (base / name).write_bytes(content)
    for reader, read in READERS.items():
        error = refusal(read, base)
        assert error.code == "broken_model" and str(base / name) in error.message, reader


@pytest.mark.parametrize("name", ["r", "lora_alpha", "trainable_token_indices"])
def test_an_adapter_with_a_number_of_4000_digits(name: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", name: DIGITS}))
    assert refusal(adapter.read_adapter, tmp_path).code == "broken_model"


def test_what_published_models_say_is_no_claim_too_much(base: Path) -> None:
    """`model_max_length` is 10**30 in many; Qwen 2 counts window layers that a small model of it lacks."""
    config = json.loads((base / "config.json").read_text())
    said = {"max_window_layers": 10_000, "max_position_embeddings": 10_485_760, "time_step_limit": [0.0, float("inf")]}
    (base / "config.json").write_text(json.dumps(config | said | {"suppress_tokens": [1, 2], "pad_token_id": -1}))
    tokenizer = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"model_max_length": 10**30}))
    for read in READERS.values():
        read(base)


MANY = {
    "config.json": "model_files.require_sound(path.parent)",
    "tokenizer_config.json": "model_files.require_sound(path.parent)",
    INDEX: "model_files.weight_files(path.parent)",
    "model.safetensors": "weight_files.read_shard(path)",
}
READ = """
import sys, time
from pathlib import Path
from skill_train.model import weight_files
from skill_train.model import foreign_files as model_files
from skill_train.core import memory
from skill_train.core.errors import UsageError
path, started, before = Path(sys.argv[1]), time.monotonic(), memory.peak_memory_bytes()
try:
    CALL
except UsageError as error:
    took, peak = time.monotonic() - started, memory.peak_memory_bytes() - before
    print("values" in error.message, took < 3, peak < 3 * path.stat().st_size, f"{took:.2f} s, {peak / 1e6:.0f} MB")
"""


REPEATED = {"objects": b"{},", "lists": b"[],", "numbers": b"0,"}
OFTEN = [
    (name, kind) for name in MANY for kind in REPEATED if kind == "objects" or name == INDEX
]  # walks have the others
RARE = [
    pytest.param(name, kind, marks=pytest.mark.torture)
    for name in MANY
    for kind in REPEATED
    if (name, kind) not in OFTEN
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [*OFTEN, *RARE])
def test_a_file_of_very_many_values_is_refused_before_they_are_made(name: str, kind: str, base: Path) -> None:
    """As many as the largest file that is read can have: 85 million empty objects took 27 s and 7.5 GB."""
    most = FOREIGN_JSON.get(name, 90_000_000)
    value = REPEATED[kind]
    content = b'{"a": [' + value * ((most - 20) // len(value)) + b"0]}"
    if name == "model.safetensors":
        content = len(content).to_bytes(8, "little") + content
    (base / name).write_bytes(content)
    words = [sys.executable, "-c", READ.replace("CALL", MANY[name]), str(base / name)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    print(name, done.stdout, done.stderr)
    assert done.stdout.split()[:3] == ["True"] * 3, done.stdout + done.stderr
