"""Models to measure on: a published shape, random weights, the real tokenizer, an adapter, and a run directory of them.

Nothing is instantiated: weights are drawn once (a block of 16 million numbers) and tiled through the shards, so that a
model of 14 GB is made in a minute and in little memory. Values are scaled as `tests/support/tiny.py` does, in bf16.
"""

from __future__ import annotations

import json
import math
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))

LORA_R, LORA_ALPHA = 16, 32
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SHARD_BYTES = 5_000_000_000  # what save_pretrained of transformers 4 and 5 cuts at, and Qwen2.5-7B is published in
_BLOCK = 1 << 24
_ADAPTER_SIZE = 0.1  # of a matrix, by Frobenius norm: a strong tuning, so that bf16 keeps it

# Qwen2's family in miniature, for the growth rows: the same vocabulary, narrower and shallower.
_SMALL = {
    "10M": {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4},
    "100M": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 8},
}
SIZES = ("10M", "100M", "0.5B", "1.5B", "3B", "7B")


def config_of(size: str) -> dict[str, Any]:
    """config.json of one size; the published ones as bench/estimates/shapes.json has them."""
    known = json.loads((HERE / "estimates" / "shapes.json").read_text(encoding="utf-8"))
    published = known[f"Qwen2.5-{'0.5B' if size in _SMALL else size}"]["config"]
    small = {**_SMALL[size], "num_key_value_heads": 2} if size in _SMALL else {}
    return {**published, **small, "eos_token_id": 151645, "torch_dtype": "bfloat16"}


def write_model(folder: Path, size: str) -> Path:
    """A base model: config, tokenizer files, bf16 shards and their index."""
    import tiny_vocab
    from skill_train.llama import get_converter

    config = config_of(size)
    folder.mkdir(parents=True)
    tiny_vocab.write_qwen(folder, get_converter.fetch().folder / "models", thinking=False)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [151645, 151643]}) + "\n")
    shards = _cut(list(shapes(config)))
    names = _shard_names(len(shards))
    for name, tensors in zip(names, shards, strict=True):
        _write_shard(folder / name, tensors)
    if len(names) > 1:
        weight_map = {tensor: name for name, ts in zip(names, shards, strict=True) for tensor, _ in ts}
        total = sum(2 * math.prod(shape) for tensors in shards for _, shape in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_adapter(folder: Path, base: Path) -> Path:
    """A PEFT LoRA adapter on every linear layer, A and B both random, in float32 as a trainer saves it."""
    import numpy as np
    from safetensors.numpy import save_file

    config = json.loads((base / "config.json").read_text())
    draw = np.random.default_rng(1)
    tensors = {}
    for name, shape in shapes(config):
        if name.split(".")[-2] not in TARGETS or not name.endswith(".weight"):
            continue
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        a = draw.standard_normal((LORA_R, shape[1]), dtype=np.float32) / np.float32(math.sqrt(shape[1]))
        b = draw.standard_normal((shape[0], LORA_R), dtype=np.float32)
        tensors[f"{stem}.lora_A.weight"] = a
        tensors[f"{stem}.lora_B.weight"] = b * np.float32(_ADAPTER_SIZE * math.sqrt(LORA_R) / LORA_ALPHA)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": LORA_R, "lora_alpha": LORA_ALPHA, "bias": "none",
        "target_modules": list(TARGETS), "base_model_name_or_path": str(base), "inference_mode": True,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    return folder


def write_run(run: Path, base: Path, *, rows: int = 64) -> Path:
    """A run directory as `skill-train local` leaves it: plan, adapter, samples, held-out rows, train.json."""
    from msgspec.structs import replace

    import step_records
    import training
    import verify_rows
    from skill_train.core.digests import digests
    from skill_train.run import plan_record, records

    adapter = write_adapter(run / "adapter", base)
    chats = verify_rows.chats(base, 2 * rows)
    data = training.write_data(run.parent, [{"messages": chat["messages"]} for chat in chats])
    planned = plan_record.read(training.write_plan(run, base, data, max_length=512))
    for name, chosen in (("samples.jsonl", chats[:rows]), ("held_out.jsonl", chats[rows:])):
        (run / name).write_text("".join(json.dumps(row) + "\n" for row in chosen), encoding="utf-8")
    trained = step_records.trained(digests(run, sorted(adapter.iterdir())))
    records.write(run / "train.json", replace(trained, recipe_hash=planned.recipe_hash))
    return run


def parameters(base: Path) -> int:
    return sum(math.prod(shape) for _, shape in shapes(json.loads((base / "config.json").read_text())))


def shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of Qwen2's weights, as its config.json says."""
    h, f = config["hidden_size"], config["intermediate_size"]
    kv = h // config["num_attention_heads"] * config["num_key_value_heads"]
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (h, h), "self_attn.q_proj.bias": (h,),
        "self_attn.k_proj.weight": (kv, h), "self_attn.k_proj.bias": (kv,),
        "self_attn.v_proj.weight": (kv, h), "self_attn.v_proj.bias": (kv,),
        "self_attn.o_proj.weight": (h, h),
        "mlp.gate_proj.weight": (f, h), "mlp.up_proj.weight": (f, h), "mlp.down_proj.weight": (h, f),
        "input_layernorm.weight": (h,), "post_attention_layernorm.weight": (h,),
    }  # fmt: skip
    yield "model.embed_tokens.weight", (config["vocab_size"], h)
    for number in range(config["num_hidden_layers"]):
        yield from ((f"model.layers.{number}.{name}", shape) for name, shape in layer.items())
    yield "model.norm.weight", (h,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], h)


def _cut(tensors: list[tuple[str, tuple[int, ...]]]) -> list[list[tuple[str, tuple[int, ...]]]]:
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    room = SHARD_BYTES
    for name, shape in tensors:
        size = 2 * math.prod(shape)
        if shards[-1] and size > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append((name, shape))
        room -= size
    return shards


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]


def _write_shard(file: Path, tensors: list[tuple[str, tuple[int, ...]]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors:
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name, shape in tensors:
            for piece in _values(name, shape):
                out.write(piece)


def _values(name: str, shape: tuple[int, ...]) -> Iterator[bytes]:
    """bf16 bytes of one tensor: the drawn block, scaled, from another start for each tensor."""
    scale, centre = _scale(name, shape)
    scaled, left, start = _Noise.bf16(scale, centre), math.prod(shape), hash_of(name) % _BLOCK
    while left:
        piece = scaled[start : start + left]
        yield piece.tobytes()
        left, start = left - len(piece), 0


def _scale(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    if "norm" in name:
        return 0.1, 1.0
    if name.endswith("bias"):
        return 0.1, 0.0
    gain = 1.5 if "embed" in name or "lm_head" in name else 1.2 if "q_proj" in name or "k_proj" in name else 1.0
    return gain / math.sqrt(shape[1]), 0.0


def hash_of(name: str) -> int:
    """The same in every process, unlike hash()."""
    import zlib

    return zlib.crc32(name.encode()) & ~31


class _Noise:
    """The block, and its scaled forms: a model has about eight different scales."""

    _drawn: Any = None
    _forms: dict[tuple[float, float], Any] = {}  # noqa: RUF012

    @classmethod
    def bf16(cls, scale: float, centre: float) -> Any:
        import numpy as np

        if cls._drawn is None:
            cls._drawn = np.random.default_rng(0).standard_normal(_BLOCK, dtype=np.float32)
        if (scale, centre) not in cls._forms:
            bits = (cls._drawn * np.float32(scale) + np.float32(centre)).view(np.uint32)
            cls._forms[scale, centre] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return cls._forms[scale, centre]


if __name__ == "__main__":
    size_, target = sys.argv[1], Path(sys.argv[2])
    os.umask(0o022)
    write_run(target / "run", write_model(target / "base", size_))
