"""How long a command takes before it answers: `skill-train plan` and `--help`, beside `hf --help` and `trl --help`.

    python bench/startup/measure.py [--rounds 10]

Each round runs every command once, in turn, so that a busy moment hits all of them; the first round warms the caches
and does not count. The plan is of a model as large as Qwen2.5-0.5B-Instruct: its shapes, a weight file of its size
(empty, sparse on disk), a tokenizer.json of 7 MB, and 1,000 rows; all that a fingerprint reads is there to be read.
Writes results.json beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PACKAGES = ("skill-train", "click", "huggingface_hub", "trl", "transformers", "torch")
# Qwen/Qwen2.5-0.5B-Instruct, config.json, read 2026-11.
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
TOKENIZER_BYTES = 7_000_000  # about that of its tokenizer.json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="timed runs of each command (10)")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(Path(folder), rounds)
    print_table(measured)
    (HERE / "results.json").write_text(json.dumps(about(rounds) | {"commands": measured}, indent=1) + "\n")


def measure(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """`command`, and the best and the median of its wall times, and the best processor time, in seconds."""
    model, data = write_model(folder / "model"), write_rows(folder / "rows.jsonl", 1000)
    programs = Path(sys.executable).parent
    commands = {
        "skill-train plan --model DIR --data F --format json": (
            programs / "skill-train", "plan", "--model", model, "--data", data, "--format", "json",
        ),
        "skill-train --help": (programs / "skill-train", "--help"),
        "hf --help": (programs / "hf", "--help"),
        "trl --help": (programs / "trl", "--help"),
    }  # fmt: skip
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands if commands[name][0].exists()}
    for _ in range(rounds + 1):
        for name, seconds in times.items():
            seconds.append(timed(folder, *map(str, commands[name])))
    return [summary(name, seconds[1:]) for name, seconds in times.items()]


def summary(name: str, seconds: list[tuple[float, float]]) -> dict[str, Any]:
    wall, processor = zip(*seconds, strict=True)
    return {
        "command": name,
        "best_seconds": round(min(wall), 3),
        "median_seconds": round(statistics.median(wall), 3),
        "best_processor_seconds": round(min(processor), 3),
    }


def timed(folder: Path, *command: str) -> tuple[float, float]:
    """Wall and processor seconds of one run, away from the user's caches, with bytecode kept as after installation."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"SKILL_TRAIN_CACHE": str(folder / "cache"), "HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, env=environment, cwd=folder, check=True, capture_output=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def write_model(folder: Path) -> Path:
    """A model folder with the files and sizes of the real one, and zeros for weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    letters = random.Random(0).randbytes(TOKENIZER_BYTES // 2).hex()
    (folder / "tokenizer.json").write_text(json.dumps({"model": letters}))
    header, size = {}, 0
    for name, shape in tensors():
        end = size + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name], size = {"dtype": "BF16", "shape": list(shape), "data_offsets": [size, end]}, end
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + size)
    return folder


def tensors() -> list[tuple[str, tuple[int, ...]]]:
    """The names and shapes of Qwen2's weights."""
    h, f, kv = 896, 4864, 128
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (h, h), "self_attn.q_proj.bias": (h,),
        "self_attn.k_proj.weight": (kv, h), "self_attn.k_proj.bias": (kv,),
        "self_attn.v_proj.weight": (kv, h), "self_attn.v_proj.bias": (kv,),
        "self_attn.o_proj.weight": (h, h),
        "mlp.gate_proj.weight": (f, h), "mlp.up_proj.weight": (f, h), "mlp.down_proj.weight": (h, f),
        "input_layernorm.weight": (h,), "post_attention_layernorm.weight": (h,),
    }  # fmt: skip
    layers = [(f"model.layers.{n}.{name}", shape) for n in range(24) for name, shape in layer.items()]
    return [("model.embed_tokens.weight", (151936, h)), *layers, ("model.norm.weight", (h,))]


def write_rows(path: Path, count: int) -> Path:
    """Conversations of about 400 bytes."""
    words = random.Random(1)
    with open(path, "w") as file:
        for number in range(count):
            said = " ".join(words.choice(("ticket", "order", "refund", "printer", "late", "broken")) for _ in range(25))
            turns = [{"role": "user", "content": f"{number}: {said}?"}, {"role": "assistant", "content": said}]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


def about(rounds: int) -> dict[str, Any]:
    from skill_train.machine import read_machine

    machine = read_machine()
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": {"system": machine.system, "processor": machine.cpu, "cores": machine.cores},
        "load": round(os.getloadavg()[0], 1),
        "rounds": rounds,
        "versions": {"python": sys.version.split()[0]} | {name: version(name) for name in PACKAGES},
    }


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def print_table(measured: list[dict[str, Any]]) -> None:
    print(f"{'command':52} {'best':>7} {'median':>7} {'processor':>9}   seconds")
    for row in measured:
        figures = (row["best_seconds"], row["median_seconds"], row["best_processor_seconds"])
        print(f"{row['command']:52} {figures[0]:7.3f} {figures[1]:7.3f} {figures[2]:9.3f}")


if __name__ == "__main__":
    main()
