"""How fast training is on a GPU: `skill-train local` beside TRL as it comes, LoRA in bf16 and QLoRA, 1.5B and 7B.

    python bench/gpu/measure.py                                  all of them: 20 GB of disk, one GPU of 80 GB
    python bench/gpu/measure.py --only "7B LoRA" --ways ours,trl
    python bench/gpu/measure.py --device cpu --only "10M LoRA" --out rehearsal.json     the same program without a GPU

Both train the same adapter on the same rows in the same order, 8 conversations a step, every token in the loss. `trl`
is TRL with nothing said but the adapter and, as every recipe of its makers does, the type of the weights; `trl liger`
adds Liger's kernels, where liger-kernel is installed. Tokens are real ones, without padding; the first steps warm up.

Utilisation is model FLOPs by the peak of the GPU: a multiply-add counted twice, forward and the gradients of inputs (of
frozen weights there are none), half of the attention matrix, recomputation not counted: PaLM's (Chowdhery et al. 2022,
appendix B) for a LoRA. Without a GPU nothing is measured, and what was measured before stays.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import random_models as models
import side

RESULTS = Path(__file__).resolve().parent / "results.json"
PACKAGES = ("skill-train", "torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "liger-kernel")
ABOUT = "LoRA training on a GPU; random weights, the same rows in the same order"
MAX_LENGTH, ROWS, STEPS, WARM = 2048, 8, 12, 2
WORDS = (200, 1100)  # of a conversation, about 1.5 tokens each: what is longer than MAX_LENGTH is cut, by both
WAYS = {"ours": "skill-train local", "trl": "TRL as it comes", "liger": "TRL with Liger's kernels"}


@dataclass(frozen=True)
class Job:
    """One training. `small`: a rehearsal on a processor, of three steps of short rows."""

    size: str
    four_bit: bool = False
    small: bool = False


JOBS = {
    "1.5B LoRA": Job("1.5B"),
    "7B LoRA": Job("7B"),
    "7B QLoRA": Job("7B", four_bit=True),
    "10M LoRA": Job("10M", small=True),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(n for n, job in JOBS.items() if not job.small), help="with commas")
    parser.add_argument("--ways", default=",".join(WAYS), help="ways, with commas")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each way, in turn (2)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    unknown = sorted(set(asked.only.split(",")) - set(JOBS) | set(asked.ways.split(",")) - set(WAYS))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; expected some of {', '.join([*JOBS, *WAYS])}")
    rows = []
    if asked.device == "cpu" or _has_gpu():
        for name in asked.only.split(","):
            rows += measure(name, asked.ways.split(","), asked.rounds, asked.device)
    else:
        print("no GPU here: nothing measured", file=sys.stderr)
    write_results(asked.out, rows)
    return 0


def measure(name: str, ways: list[str], rounds: int, device: str) -> list[dict[str, Any]]:
    """A row a way."""
    job, training = JOBS[name], side.module("training")
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in ways if way != "liger" or _has("liger_kernel")}
    with tempfile.TemporaryDirectory(prefix="skill-train-bench-gpu-") as temporary:
        folder = Path(temporary)
        base, _ = side.made(job.size, folder)
        training.write_data(folder, _work(training, job))
        for number in range(rounds):
            for way, found in runs.items():
                out = folder / f"{way}-{number}"
                command = ours(job, folder, out, device) if way == "ours" else peer(way, job, folder, out, device)
                whole = training.run(folder, command)
                found.append(figures(training.read_steps(way, out), whole["seconds"]))
                print(f"{name} {way}: {found[-1]['tokens_per_second']:.0f} tokens/s", file=sys.stderr, flush=True)
        config = json.loads((base / "config.json").read_text())
        about = {"size": name, "parameters": models.parameters(base)}
        return [about | row(way, found, config, _peak_flops()) for way, found in runs.items()]


def _work(training: Any, job: Job) -> Any:
    words = (20, 60) if job.small else WORDS
    return training.Size(shape=(0, 0, 0, 0, 0), steps=_steps(job), rows=ROWS, rounds={}, words=words)


def _steps(job: Job) -> int:
    return WARM + 1 if job.small else STEPS


def ours(job: Job, folder: Path, out: Path, device: str) -> list[Any]:
    recipe = {
        "model": str(folder / "base"), "data": str(folder / "rows.jsonl"), "max_length": MAX_LENGTH, "seed": 42,
        "max_steps": _steps(job), "effective_batch_size": ROWS, "loss_on": "all", "held_out_fraction": 0.0,
        "learning_rate": 2e-5, "warmup_steps": 0, "lr_scheduler_type": "linear",  # as TRL, so that losses are equal
        "target_modules": list(models.TARGETS), "load_in_4bit": job.four_bit,
        "lora_r": models.LORA_R, "lora_alpha": models.LORA_ALPHA, "lora_dropout": 0.0,
    }  # fmt: skip
    (folder / "recipe.json").write_text(json.dumps(recipe))
    return [*side.skill_train("local", folder / "recipe.json", "--run-dir", out, "--device", device)]


def peer(way: str, job: Job, folder: Path, out: Path, device: str) -> list[Any]:
    numbers = ["--steps", _steps(job), "--rows", ROWS, "--max-length", MAX_LENGTH]
    files = ["--model", folder / "base", "--data", folder / "in_order.jsonl", "--out", out]
    adapter = ["--lora-dropout", 0.0, "--target-modules", *models.TARGETS]
    more = [*(["--load-in-4bit"] if job.four_bit else []), *(["--liger"] if way == "liger" else [])]
    dtype = "bfloat16" if device == "cuda" else "float32"  # TRL refuses bf16 on a processor
    program = side.HERE / "training" / "peers.py"
    return [sys.executable, program, "trl", *files, *numbers, "--dtype", dtype, *more, *adapter]


def figures(steps: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    settled = steps[WARM:]
    time, tokens = sum(step["seconds"] for step in settled), sum(step["tokens"] for step in settled)
    return {
        "tokens_per_second": tokens / time,
        "whole_command_seconds": seconds,
        "peak_bytes": max((step.get("memory_bytes") or {}).get("cuda", 0) for step in steps) or None,
        "length": tokens / (ROWS * len(settled)),
        "last_loss": round(steps[-1]["loss"], 4),
    }


def row(way: str, runs: list[dict[str, Any]], config: dict[str, Any], peak: float | None) -> dict[str, Any]:
    """Medians of some runs; the highest memory."""
    speeds = [run["tokens_per_second"] for run in runs]
    speed = statistics.median(speeds)
    flops = flops_per_token(config, runs[0]["length"])
    memories = [run["peak_bytes"] for run in runs if run["peak_bytes"]]
    return {
        "what": WAYS[way],
        "way": way,
        "tokens_per_second": round(speed, 1),
        "slowest": round(min(speeds), 1),
        "fastest": round(max(speeds), 1),
        "whole_command_seconds": round(statistics.median(run["whole_command_seconds"] for run in runs), 1),
        "peak_bytes": max(memories) if memories else None,
        "utilisation_percent": None if peak is None else round(100 * speed * flops / peak, 1),
        "last_loss": runs[0]["last_loss"],
        "rounds": len(runs),
    }


def flops_per_token(config: dict[str, Any], length: float) -> float:
    """Model FLOPs of a token in a row of `length` tokens, for LoRA on frozen weights; those of the adapter, below 1 %,
    are not counted."""
    matrices = sum(
        math.prod(shape)
        for name, shape in models.shapes(config)
        if len(shape) == 2 and not name.startswith("model.embed_tokens")
    )
    if config["tie_word_embeddings"]:
        matrices += config["vocab_size"] * config["hidden_size"]  # the embedding is the head
    attention = 2 * length * config["hidden_size"] * config["num_hidden_layers"]  # forward, the causal half
    return 4 * matrices + 3 * attention


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = {(one["size"], one["way"]): one for one in rows}
    ours_, trl = found.get(("7B LoRA", "ours"), {}), found.get(("7B LoRA", "trl"), {})
    ratio = None
    if ours_ and trl:
        ratio = round(ours_["tokens_per_second"] / trl["tokens_per_second"], 2)
    none = "" if ours_ else "no GPU was at hand"
    share = ours_.get("utilisation_percent")
    return [
        _at_least("training on a GPU, 7B LoRA, tokens/s", "at least 1.5 x TRL's defaults", ratio, 1.5, "x", none),
        _at_least("training on a GPU, 7B LoRA", "at least 45 % of the peak", share, 45, "%", none),
    ]


def _at_least(name: str, words: str, measured: float | None, least: float, unit: str, why: str) -> dict[str, Any]:
    met = None if measured is None else measured >= least
    return {"name": name, "target": words, "measured": measured, "unit": unit, "met": met, "why": why}


def write_results(out: Path, rows: list[dict[str, Any]]) -> None:
    """Rows that were not measured now stay, with the date and the machine of their day."""
    if not rows and out.is_file():
        return
    head = side.circumstances("gpu", 0, PACKAGES)
    del head["rounds"]
    fresh = [{"date": head["date"], "gpu": _gpu_name(), **one} for one in rows]
    done = {(one["size"], one["way"]) for one in rows}
    earlier = json.loads(out.read_text())["rows"] if out.is_file() else []
    every = [*(one for one in earlier if (one["size"], one["way"]) not in done), *fresh]
    document = head | {"about": ABOUT, "rows": every, "targets": targets(every)}
    out.write_text(json.dumps(document, indent=1) + "\n")


def _peak_flops() -> float | None:
    """Dense bf16 with float32 accumulation, from the table of published figures; None for another GPU and without."""
    from skill_train.estimate.devices import device_speed
    from skill_train.machine.read import read_machine

    device = device_speed(read_machine()) if _has_gpu() else None
    return None if device is None else device.half_tflops * 1e12


def _gpu_name() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _has_gpu() -> bool:
    return _gpu_name() is not None


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


if __name__ == "__main__":
    sys.exit(main())
