"""What a hostile file may do: recipes, plans, datasets, adapters, model folders, GGUF files, archives.

Each target takes a string of bytes and a folder of its own, and ends well or in a SkillTrainError.
"""

from __future__ import annotations

import gzip
import io
import json
import shutil
import struct
import tarfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import yaml

from hostile import RAW, command, cut, edited, file_bytes, judged, text
from hostile_rows import rows, start_of_rows
from one_command import called
from skill_train.core.errors import from_exit_code
from skill_train.core.resources import demo
from skill_train.llama import get_converter, gguf_header
from skill_train.model import adapter, sidecar_files, weight_files
from skill_train.model import folder as model
from skill_train.plan import file as plan_file
from skill_train.program.events import Refused
from skill_train.program.start.inputs import load_plan
from skill_train.recipe import fields as recipe

Target = Callable[[bytes, Path], object]
MODEL = demo() / "model"
ROOT = "llama_cpp_python-1/vendor/llama.cpp"

RECIPE = {
    "model": "Qwen/Qwen2.5-0.5B-Instruct", "data": "rows.jsonl", "format": "prompt_completion", "method": "sft",
    "columns": {"prompt": "q", "completion": "a"}, "max_length": 512, "max_steps": 5, "learning_rate": "2e-4",
    "lora_alpha": 32, "target_modules": ["q_proj"], "sensitive": False, "score": "regex", "score_pattern": "(a|b)+",
    "split": "train[:10]", "hub_model_id": "me/x", "seed": 7, "held_out_fraction": 0.1,
}  # fmt: skip
# Each list ten times in the next: a few hundred bytes that stand for gigabytes.
LAUGHS = "model: m\ndata: d\ntarget_modules:\n  - &b0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"  - &b{n} [{','.join([f'*b{n - 1}'] * 10)}]\n" for n in range(1, 12)
)
YAML = (
    b"model: !!python/object/apply:os.system ['touch canary']\ndata: x\n", LAUGHS.encode(), b"[" * 1500, b"- " * 1500,
    b"model: &x [*x]\n", b"? {a: b}\n: c\n", b"model: 1:2:3:4\ndata: 2026-13-45\n", b"seed: " + b"9" * 5000,
    b"model: x\ndata: y\nseed: 1_000\nmax_length: 0o17\nlora_r: 0x1F\n", b"%YAML 9.9\n---\n", b"model: x\x00\n",
    b"<<: *a\n", b"model: !!timestamp 9999-99-99\ndata: x", b"model: x\ndata: y\nmodel: z\n", b"seed: !!int 0b\n",
    b"model: a\ndata: &a [x]\ntarget_modules: [&b [*a,*a,*a,*a,*a,*a,*a,*a,*a]]\n", b"seed: !!float ''",
    b"max_length: 1:99999999999999999999:1\nmodel: a\ndata: b",
)  # fmt: skip


def recipe_file(data: bytes, folder: Path) -> object:
    """A recipe: edited values, or the bytes as they are."""
    kind, rest = data[:1], data[1:]
    if kind < b"\x40":
        content = (YAML + RAW)[int.from_bytes(rest[:1]) % len(YAML + RAW)]
    elif kind < b"\x80":
        content = rest
    elif kind < b"\xb0":
        content = cut(yaml.safe_dump(RECIPE).encode(), rest)
    else:
        content = text(edited(RECIPE, rest))
    path = folder / "recipe.yaml"
    path.write_bytes(content)

    def call() -> None:
        loaded = recipe.load(path)
        again = {key: value for key, value in vars(loaded).items() if value is not None}
        assert recipe.from_dict(yaml.safe_load(recipe.to_yaml(again))) == loaded
        recipe.recipe_hash(again, {})

    return judged(call, folder)


def plan_command(data: bytes, folder: Path) -> object:
    """`plan` of a recipe with the demo's model and rows, in both forms."""
    values = {k: v for k, v in RECIPE.items() if k not in ("score", "score_pattern", "columns", "format")}
    values |= {"model": str(MODEL), "data": str(demo() / "data.parquet"), "max_length": 64}
    (folder / "recipe.yaml").write_bytes(text(edited(values, data[1:])))
    form = "human" if data[:1] > b"\x7f" else "json"
    return command(["plan", str(folder / "recipe.yaml"), "--where", "local", "--format", form], folder, MODEL.parent)


def plan(data: bytes, folder: Path) -> object:
    """A plan that `--out` wrote, for `local`, for `submit`, and for the training program."""
    path = folder / "plan.json"
    path.write_bytes(file_bytes(_plan(str(folder)), data[1:]))
    where = "local" if data[:1] > b"\x7f" else "cloud"

    def call() -> None:
        try:
            load_plan(path)
        except Refused as refusal:
            from_exit_code(refusal.exit_code, refusal.error)
        if plan_file.is_plan(path):
            plan_file.read_unchanged_plan(path, {}, where)
        plan_file.require_free(path)

    return judged(call, folder, MODEL.parent)


@cache
def _whole_plan() -> str:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        words = ("--model", MODEL, "--data", demo() / "data.parquet", "--max-steps", 2, "--where", "local")
        called("plan", *words, "--out", f"{folder}/p.json", "--format", "quiet")
        return Path(folder, "p.json").read_text()


def _plan(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_whole_plan())
    return found


ADAPTER = {
    "peft_type": "LORA", "r": 4, "lora_alpha": 8, "rank_pattern": {"q_proj": 4}, "alpha_pattern": {}, "bias": "none",
    "modules_to_save": None, "task_type": "CAUSAL_LM", "base_model_name_or_path": "x", "use_dora": False,
    "trainable_token_indices": None, "init_lora_weights": True, "fan_in_fan_out": False, "use_rslora": False,
    "target_modules": ["q_proj"], "layer_replication": None,
}  # fmt: skip
_LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


def adapter_folder(data: bytes, folder: Path) -> object:
    """An adapter: its config, or the header of its weights."""
    header = {f"{_LAYER}.lora_A.weight": _entry((4, 8), 0), f"{_LAYER}.lora_B.weight": _entry((8, 4), 128)}
    config = data[:1] > b"\x7f"
    (folder / adapter.CONFIG).write_bytes(file_bytes(ADAPTER, data[1:] if config else b""))
    (folder / adapter.WEIGHTS).write_bytes(_safetensors(header, b"" if config else data[1:], 256))

    def call() -> None:
        found = adapter.read_adapter(folder)
        adapter.why_not_streamed(found)
        for module in found.modules:
            adapter.pattern_value(found.config["rank_pattern"], module, 1)
        sidecar_files.chat_template(folder)

    return judged(call, folder)


def _entry(shape: tuple[int, ...], start: int) -> dict[str, Any]:
    size = 4 * shape[0] * shape[1]
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [start, start + size]}


LENGTHS = (
    struct.pack("<Q", 2**60) + b"{}",
    struct.pack("<Q", 2) + b"{}" + b"\0" * 8,
    struct.pack("<Q", 100_000) + b"[" * 100_000,
    struct.pack("<Q", 2**64 - 1),
)


def _safetensors(header: dict[str, Any], program: bytes, size: int) -> bytes:
    """A file whose header lies, about itself too."""
    if program[:1] > b"\xf0":
        wrong = (*RAW, *LENGTHS)
        return wrong[int.from_bytes(program[1:2]) % len(wrong)]
    said = text(edited({**header, "__metadata__": {"format": "pt"}} if program else header, program))
    length = len(said) if program[:1] < b"\xe0" else int.from_bytes(program[1:9].ljust(8, b"\0"), "little")
    return struct.pack("<Q", length) + said + b"\0" * size


def model_folder(data: bytes, folder: Path) -> object:
    """A model: config.json, safetensors header, index, tokenizer files."""
    header = {"model.embed_tokens.weight": _entry((8, 4), 0), "lm_head.weight": _entry((8, 4), 128)}
    which, rest = data[0] % 5 if data else 0, data[1:]
    config = json.loads((MODEL / "config.json").read_text()) | {"text_config": None, "quantization_config": None}
    (folder / "config.json").write_bytes(file_bytes(config, rest if which == 0 else b""))
    (folder / weight_files.SINGLE).write_bytes(_safetensors(header, rest if which == 1 else b"", 256))
    if which == 2:
        index = {"metadata": {"total_size": 256}, "weight_map": dict.fromkeys(header, weight_files.SINGLE)}
        (folder / weight_files.INDEX).write_bytes(file_bytes(index, rest))
    tokenizer = {
        "chat_template": "{{ messages }}",
        "eos_token": {"content": "</s>"},
        "added_tokens_decoder": {"5": {"content": "x"}},
    }
    (folder / "tokenizer_config.json").write_bytes(file_bytes(tokenizer, rest if which == 3 else b""))
    words = {"added_tokens": [{"id": 1, "content": "</s>", "special": True}], "model": {"vocab": {"a": 0}}}
    (folder / "tokenizer.json").write_bytes(file_bytes(words, rest if which == 4 else b""))
    other, part = folder / "other", folder / "part"
    for made in (other, part):
        made.mkdir()

    def call() -> None:
        facts = model.read_model(folder)
        text(msgspec.to_builtins(facts))
        sidecar_files.copy_companions(folder, other, part, lambda code, message: None)
        sidecar_files.copy_companions(other, folder, part, lambda code, message: None)
        sidecar_files.write_config(folder, part, {"vocab_size": 9}, "bfloat16")
        weight_files.read_folder(folder)

    return judged(call, folder)


def gguf(data: bytes, folder: Path) -> object:
    """A GGUF file: numbers of its header changed, or its bytes."""
    path = folder / "x.gguf"
    content = bytearray(_gguf())
    kind, rest = data[:1], data[1:]
    if kind < b"\x10":
        content[4:] = rest
    else:
        for at in range(0, len(rest) - 2, 3):
            where = int.from_bytes(rest[at : at + 2]) % len(content)
            how = rest[at + 2]
            wide = _NUMBERS[how % len(_NUMBERS)]
            content[where : where + len(wide)] = wide
        if kind > b"\xd0":
            del content[int.from_bytes(rest[:2]) % len(content) :]
    path.write_bytes(content)

    def call() -> None:
        from skill_train.verify import check_header, check_template
        from skill_train.verify.metadata import check as verify_metadata

        found = gguf_header.read_gguf(path)
        _ = found.architecture, found.of_architecture("block_count")
        check_header.file_type(found), check_header.check_file(found), check_header.check_types(found)
        verify_metadata.check_metadata(found, json.loads((MODEL / "config.json").read_text()))
        check_template.identity(found)

    return judged(call, folder)


_NUMBERS = tuple(
    [bytes([b]) for b in (0, 1, 7, 8, 9, 0x7F, 0x80, 0xFF)]
    + [struct.pack("<I", n) for n in (0, 1, 5, 8, 9, 13, 99, 2**31, 2**32 - 1)]
    + [struct.pack("<Q", n) for n in (0, 1, 2, 255, 2**31, 2**32, 2**60, 2**63, 2**64 - 1)]
    + [struct.pack("<f", float("nan")), b"\x1b[2J", b"\xff\xfe\xfd", b"../../x"]
)


@cache
def _gguf() -> bytes:
    """With the writer of gguf-py; a tokenizer of three words."""
    import tempfile

    import numpy as np
    from gguf import GGUFWriter

    from gguf_edit import finish

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.gguf")
        writer = GGUFWriter(str(path), "llama")
        writer.add_uint32("llama.block_count", 1)
        writer.add_uint32("llama.embedding_length", 4)
        writer.add_float32("llama.rope.freq_base", 1e4)
        writer.add_file_type(0)
        writer.add_array("tokenizer.ggml.tokens", ["a", "b", "</s>"])
        writer.add_array("tokenizer.ggml.scores", [0.5, -1.0, 0.0])
        writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
        writer.add_string("tokenizer.chat_template", "{{ messages }}")
        writer.add_tensor("token_embd.weight", np.arange(12, dtype=np.float32).reshape(3, 4))
        writer.add_tensor("output_norm.weight", np.ones(4, dtype=np.float16))
        finish(writer)
        return path.read_bytes()


def archive(data: bytes, folder: Path) -> object:
    """The archive of the converter."""
    path, out = folder / "a.tar.gz", folder / "cache" / "llama.cpp-1"
    out.parent.mkdir()
    kind, rest = data[:1], data[1:]
    if kind < b"\x40":
        path.write_bytes(cut(_archive(b""), rest))
    elif kind < b"\x60":
        path.write_bytes(gzip.compress(cut(gzip.decompress(_archive(b"")), rest), mtime=0))
    else:
        path.write_bytes(_archive(rest))
    result = judged(lambda: get_converter.unpack(path, out, version="1"), folder)
    outside = [p for p in folder.rglob("*") if p != path and p.is_file() and out not in p.parents]
    assert not outside, outside
    assert result == "done" or not out.exists()
    return result


_FILES = ("convert_hf_to_gguf.py", "convert_lora_to_gguf.py", "conversion/__init__.py", "gguf-py/gguf/__init__.py")
_NAMES = (
    "../x.py", "/x.py", "conversion/../../../x.py", "conversion/a/../../../../x.py", "conversion//x.py", "models/..",
    "conversion/./x.py", "models/x.gguf", "conversion/x\x00.py", "conversion/" + "a" * 300 + ".py", "conversion/..py",
    "conversion/\x1b[2J.py", "convert_hf_to_gguf.py/x.py", "conversion/__init__.py/x.py", "conversion/x.py", "LICENSE",
    "conversion/\udcff.py",
)  # fmt: skip
_TYPES = (
    tarfile.REGTYPE,
    tarfile.SYMTYPE,
    tarfile.LNKTYPE,
    tarfile.FIFOTYPE,
    tarfile.DIRTYPE,
    tarfile.CHRTYPE,
    tarfile.GNUTYPE_SPARSE,
    tarfile.CONTTYPE,
)


def _archive(program: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", format=tarfile.GNU_FORMAT) as made:
        for name in _FILES:
            info = tarfile.TarInfo(f"{ROOT}/{name}")
            info.size = 4
            made.addfile(info, io.BytesIO(b"pass"))
        for at in range(0, len(program) - 2, 3):
            info = tarfile.TarInfo(f"{ROOT}/{_NAMES[program[at] % len(_NAMES)]}")
            info.type, info.linkname = _TYPES[program[at + 1] % len(_TYPES)], "/etc/passwd"
            info.size = (0, 4, 10**12, 4)[program[at + 2] % 4] if info.isreg() else 0
            made.addfile(info, io.BytesIO(b"evil")) if info.size in (0, 4) else made.fileobj.write(
                info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
            )
    return out.getvalue()


def in_folder(target: Target, data: bytes, parent: Path) -> object:
    """The target in a new folder, which is gone afterwards."""
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="input-", dir=parent))
    try:
        return target(data, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


TARGETS: dict[str, Target] = {
    "recipe": recipe_file, "plan_command": plan_command, "plan": plan, "rows": rows, "start_of_rows": start_of_rows,
    "adapter": adapter_folder, "model": model_folder, "gguf": gguf, "archive": archive,
}  # fmt: skip
