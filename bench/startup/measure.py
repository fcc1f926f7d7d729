"""How long a command takes before it answers: `plan`, `status` and `--help`, beside `hf --help` and `trl --help`.

    python bench/startup/measure.py [--rounds 10] [--only status]

Each round runs every command once, in turn, so that a busy moment hits all of them; the first round warms the caches
and does not count. The plan is of a model as large as Qwen2.5-0.5B-Instruct: its shapes, a weight file of its size
(empty, sparse on disk), a tokenizer.json of 7 MB, and 1,000 rows; all that a fingerprint reads is there to be read.
`status` is of a run here that has ended. That of a job asks the Hub and loads huggingface_hub first, which is timed
too: the network comes on top. Writes results.json beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import side

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


TARGET_SECONDS = 0.2
HELP_SECONDS = 0.08  # it imports no command
# Of huggingface_hub, as skill-train imports it for a question.
CLIENT = "from huggingface_hub import HfApi, set_client_factory"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="timed runs of each command (10)")
    parser.add_argument("--only", help="the commands whose name contains this; results.json is left as it is")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), arguments.rounds, arguments.only or "")
    print_table(rows)
    if arguments.only is None:
        written = side.circumstances("startup", arguments.rounds, PACKAGES) | {"rows": rows, "targets": targets(rows)}
        (HERE / "results.json").write_text(json.dumps(written, indent=1) + "\n")


def measure(folder: Path, rounds: int, only: str) -> list[dict[str, Any]]:
    """Of each command: wall times (best, median, worst) and the best processor time, in seconds."""
    commands = {name: words for name, words in all_commands(folder).items() if only in name and words[0].exists()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for _ in range(rounds + 1):
        for name, seconds in times.items():
            seconds.append(timed(folder, *map(str, commands[name])))
    return [summary(name, seconds[1:]) for name, seconds in times.items()]


def all_commands(folder: Path) -> dict[str, tuple[Any, ...]]:
    model, data = write_model(folder / "model"), side.write_rows(folder / "rows.jsonl", 1000, 25)
    here = write_run(folder / "here")
    programs = Path(sys.executable).parent
    ours = programs / "skill-train"
    return {
        "skill-train plan --model DIR --data F": (ours, "plan", "--model", model, "--data", data, "--format", "json"),
        "skill-train --help": (ours, "--help"),
        "skill-train status RUN": (ours, "status", here, "--format", "json"),
        "huggingface_hub, imported": (Path(sys.executable), "-c", CLIENT),
        "hf --help": (programs / "hf", "--help"),
        "trl --help": (programs / "trl", "--help"),
    }


def summary(name: str, seconds: list[tuple[float, float]]) -> dict[str, Any]:
    wall, processor = zip(*seconds, strict=True)
    return {
        "command": name,
        "best_seconds": round(min(wall), 3),
        "median_seconds": round(statistics.median(wall), 3),
        "worst_seconds": round(max(wall), 3),
        "best_processor_seconds": round(min(processor), 3),
    }


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each of our commands against the limit, by the best of its runs: the others are of a busy machine."""
    found: list[dict[str, Any]] = []
    for row in rows:
        if row["command"].startswith("skill-train"):
            most = HELP_SECONDS if row["command"].endswith("--help") else TARGET_SECONDS
            why = f"the best of the runs; median {row['median_seconds']} s"
            found.append(side.target(row["command"], f"under {most} s", row["best_seconds"], most, "s", why))
    why = "asks the Hub, so the network decides; huggingface_hub alone takes what the table says to import"
    found.append(side.target("skill-train status RUN of a job", f"under {TARGET_SECONDS} s", None, 0, "s", why))
    return found


def write_run(folder: Path) -> Path:
    """A run here that was trained, with the records of another."""
    from skill_train.run.folder import RunDir

    run, recorded = RunDir(folder), HERE.parents[1] / "tests" / "support" / "data" / "runs" / "demo"
    run.path.mkdir()
    for name in ("plan.json", "train.json"):
        shutil.copyfile(recorded / name, run.path / name)
    step = {"steps": 1000, "loss": 1.0, "tokens_per_second": 100.0, "seconds": 2.0, "memory_bytes": {"rss": 1}}
    run.metrics.write_text("".join(json.dumps({"step": n, **step}) + "\n" for n in range(1, 1001)))
    return run.path


def timed(folder: Path, *command: str) -> tuple[float, float]:
    """Wall and processor seconds of one run, away from the user's caches, with bytecode kept as after installation."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"SKILL_TRAIN_CACHE": str(folder / "cache"), "HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, env=environment, cwd=folder, check=True, capture_output=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def write_tokenizer(path: Path) -> None:
    """A tokenizer that can be read, of about the usual size: `plan` reads such a file once and remembers it."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    draw = random.Random(0)
    words = sorted(
        {draw.randbytes(TOKENIZER_BYTES // CONFIG["vocab_size"] // 3).hex() for _ in range(CONFIG["vocab_size"])}
    )
    Tokenizer(BPE(vocab={word: number for number, word in enumerate(words)}, merges=[])).save(str(path))


def write_model(folder: Path) -> Path:
    """A model folder with the files and sizes of the real one, and zeros for weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    write_tokenizer(folder / "tokenizer.json")
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


def print_table(rows: list[dict[str, Any]]) -> None:
    print(f"{'command':40} {'best':>7} {'median':>7} {'worst':>7} {'processor':>9}   seconds")
    for row in rows:
        name, *figures = row.values()
        print(f"{name:40} {figures[0]:7.3f} {figures[1]:7.3f} {figures[2]:7.3f} {figures[3]:9.3f}")


if __name__ == "__main__":
    main()
