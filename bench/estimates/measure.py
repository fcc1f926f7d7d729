"""Measures peak memory and step time of real training steps, with the training program itself and random weights.

    python bench/estimates/measure.py --device cpu            what is not measured yet on this device
    python bench/estimates/measure.py --device cuda --only 7B
    python bench/estimates/measure.py --device cpu --only 0.5B --again

Each configuration runs in a process of its own. A line a configuration goes to measured.jsonl beside this file, with
the machine, the versions and the date. Measured again, on a machine of the same kind, it keeps the faster time: other
work only makes it slower. `compare.py` holds the estimates against them.

Peak memory is that of the training steps: on a CPU the highest resident size after the model is loaded, above what the
imported libraries took; on CUDA `torch.cuda.max_memory_allocated` (and the reserved bytes beside it).
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "measured.jsonl"
SHAPES = json.loads((HERE / "shapes.json").read_text(encoding="utf-8"))
TRAINED_SHARE = 0.5  # of each row's tokens
STEPS = 3  # the first warms up and is not timed
SHORT, SHORT_STEPS = 128, 12  # rows of so few tokens are over in a second or two, and timed more often
QKVO = ["q_proj", "k_proj", "v_proj", "o_proj"]


@dataclass(frozen=True)
class Configuration:
    """One training to measure. `length` in tokens: every row has exactly as many."""

    device: str
    shape: str
    dtype: str
    length: int
    batch: int
    checkpointing: bool
    four_bit: bool = False
    lora_r: int = 16
    target_modules: tuple[str, ...] = tuple(QKVO)
    finetuning_type: str = "lora"
    pure_bf16: bool = False
    accumulation: int = 1

    @property
    def steps(self) -> int:
        return SHORT_STEPS if self.length <= SHORT else STEPS

    @property
    def name(self) -> str:
        dtype = self.dtype + "-4bit" * self.four_bit + "-pure" * self.pure_bf16
        parts = [self.device, self.shape, dtype, f"{self.batch}x{self.length}" + "x2" * (self.accumulation > 1)]
        parts += ["full"] * (self.finetuning_type == "full")
        parts += ["checkpointing"] * self.checkpointing + [f"r{self.lora_r}"] * (self.lora_r != 16)
        return " ".join(parts + ["all-linear"] * (len(self.target_modules) > 4))


def configurations(device: str) -> list[Configuration]:
    """4 shapes x lengths x batch x checkpointing x dtype; more where the machine is fast."""
    if device == "cpu":
        return _on_cpu()
    every: list[Configuration] = []
    for shape in ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B", "Qwen2.5-7B"):
        for length, batch in ((512, 4), (2048, 1), (2048, 4), (8192, 1)):
            every += [Configuration(device, shape, "bfloat16", length, batch, c) for c in (False, True)]
        every += [Configuration(device, shape, "bfloat16", 2048, 2, True, four_bit=True)]
    return [*every, *_full(device, "Qwen2.5-0.5B"), *_full(device, "Qwen2.5-1.5B")]


def _on_cpu() -> list[Configuration]:
    every: list[Configuration] = []
    for shape in ("SmolLM2-135M", "Gemma-3-270m", "Qwen2.5-0.5B", "Qwen3-0.6B"):
        for length, batch, checkpointing in (
            (128, 1, False), (512, 1, False), (512, 1, True), (512, 4, False), (1024, 1, False), (1024, 2, True),
        ):  # fmt: skip
            every.append(Configuration("cpu", shape, "float32", length, batch, checkpointing))
        every += [Configuration("cpu", shape, "bfloat16", 512, 2, c) for c in (False, True)]
    mlp = (*QKVO, "gate_proj", "up_proj", "down_proj")
    every += [Configuration("cpu", "Qwen2.5-0.5B", "float32", 512, 1, False, lora_r=64, target_modules=mlp)]
    return [*every, *_full("cpu", "SmolLM2-135M"), *_full("cpu", "Gemma-3-270m")[:1]]


def _full(device: str, shape: str) -> list[Configuration]:
    """Every weight: in float32, with autocast, and in bfloat16 alone; two micro-steps a step, as most plans have."""
    full: dict[str, Any] = {"finetuning_type": "full", "accumulation": 2}
    return [
        Configuration(device, shape, "float32", 512, 1, False, **full),
        Configuration(device, shape, "float32", 512, 1, True, **full),
        Configuration(device, shape, "bfloat16", 512, 1, False, **full),
        Configuration(device, shape, "bfloat16", 512, 1, False, **full, pure_bf16=True),
    ]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda", "mps"), default="cpu")
    parser.add_argument("--only", default="", help="configurations whose name matches this expression")
    parser.add_argument("--again", action="store_true", help="also those that are measured already")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--models", type=Path, help="folder that keeps the random models between calls")
    parser.add_argument("--make", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        configuration = Configuration(**json.loads(options.one))
        if options.make:
            _save_model(configuration, _model_folder(configuration, options.models))
        else:
            print(json.dumps(measure(configuration, _model_folder(configuration, options.models))))
        return 0
    lines = options.out.read_text(encoding="utf-8").splitlines() if options.out.is_file() else []
    known = {json.loads(line)["name"] for line in lines}
    with tempfile.TemporaryDirectory(prefix="skill-train-bench-") as temporary:
        for configuration in configurations(options.device):
            if re.search(options.only, configuration.name) and (options.again or configuration.name not in known):
                _run(configuration, options.models or Path(temporary), options.out)
    return 0


def _run(configuration: Configuration, models: Path, out: Path) -> None:
    """In processes of their own: one makes the model, the other trains it, so that neither counts the other's
    memory."""
    one = [sys.executable, __file__, "--models", str(models), "--one", json.dumps(dataclasses.asdict(configuration))]
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    folder = _model_folder(configuration, models)
    for command in ([] if folder.is_dir() else [[*one, "--make"]]) + [one]:
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            print(f"{configuration.name}: exit {done.returncode}: {done.stderr.strip().splitlines()[-1:]}", flush=True)
            return
    line = _keep(json.loads(done.stdout.splitlines()[-1]), out)
    print(f"{line['name']}: {line['peak_bytes'] / 1e6:.0f} MB, {line['seconds_per_micro_step']:.2f} s", flush=True)


def _keep(line: dict[str, Any], out: Path) -> dict[str, Any]:
    """The line in place of an earlier one of the same configuration, with the faster of both times."""
    texts = out.read_text(encoding="utf-8").splitlines() if out.is_file() else []
    known = [json.loads(text) for text in texts]
    earlier = next((one for one in known if one["name"] == line["name"]), None)
    if earlier is None:
        known.append(line)
    else:
        times = [one["seconds_per_micro_step"] for one in (earlier, line) if one["machine"] == line["machine"]]
        line["seconds_per_micro_step"] = min(time for time in times if time is not None)
        known[known.index(earlier)] = line
    out.write_text("".join(json.dumps(one) + "\n" for one in known), encoding="utf-8")
    return line


def _model_folder(configuration: Configuration, models: Path) -> Path:
    return models / f"{configuration.shape}-{configuration.dtype}"


def measure(configuration: Configuration, model: Path) -> dict[str, Any]:
    """Trains a few steps and returns one line of the table."""
    from skill_train.program import trainer as program
    from skill_train.program.start.inputs import prepare_environment
    from skill_train.program.watch import Watch

    with tempfile.TemporaryDirectory(prefix="skill-train-bench-") as name:
        folder = Path(name)
        prepare_environment({"device": configuration.device})
        recipe, placement = _plan(configuration, model)
        data = _data(configuration, recipe)
        (folder / "held_out.jsonl").touch()  # a training writes it; nothing is held out here
        watch = Watch(folder, data, recipe, None, keep=placement["save_total_limit"])
        trainer = program.build_trainer(recipe, placement, folder, _tokenizer(), data, watch)
        loaded = watch.memory()
        _forget_peak(configuration.device)
        program.train(trainer, watch, recipe["seed"], None)
        return _line(configuration, trainer, watch, loaded, program.environment(trainer, data, {}, folder))


def _line(
    configuration: Configuration,
    trainer: Any,
    watch: Any,
    loaded: dict[str, int],
    environment: dict[str, Any],
) -> dict[str, Any]:
    import torch

    from skill_train.program.events import peak_rss_bytes

    cuda = configuration.device == "cuda"
    base = 0 if cuda else watch.baseline_bytes["rss"]
    peak = torch.cuda.max_memory_allocated() if cuda else peak_rss_bytes()
    steps = watch.lines[1:]
    return {
        "name": configuration.name,
        "configuration": dataclasses.asdict(configuration),
        "peak_bytes": peak - base,
        "reserved_bytes": torch.cuda.max_memory_reserved() if cuda else None,
        "load_peak_bytes": (loaded["cuda"] if cuda else loaded["rss"]) - base,
        "baseline_bytes": base,
        "seconds_per_micro_step": round(min(line["seconds"] for line in steps) / configuration.accumulation, 4),
        "trained_share": TRAINED_SHARE,
        "trainable_parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "machine": _machine(environment),
        "versions": environment["versions"],
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _machine(environment: dict[str, Any]) -> dict[str, Any]:
    from skill_train.machine.read import read_machine

    machine = read_machine()
    return {
        "chip": environment["device_name"] if machine.device == "cuda" else machine.chip,
        "cores": machine.cores,
        "threads": environment["threads"],
        "cpu_features": list(machine.cpu_features),
        "cpu_mhz": machine.cpu_mhz,
    }


def _save_model(configuration: Configuration, folder: Path) -> None:
    """A model of the shape with random weights, in the type that it would be published in."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = SHAPES[configuration.shape]["config"]
    config = AutoConfig.for_model(**values)
    dtype = torch.float32 if configuration.dtype == "float32" else torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.to_empty(device="cpu")
    noise = torch.randn(1 << 20, generator=torch.manual_seed(0)).to(dtype) * 0.02
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            flat = parameter.view(-1)
            for start in range(0, flat.numel(), len(noise)):
                flat[start : start + len(noise)] = noise[: min(len(noise), flat.numel() - start)]
            if "norm" in name:
                parameter.fill_(0.0 if "gemma" in values["model_type"] else 1.0)
    model.tie_weights()
    part = folder.with_suffix(".part")
    model.save_pretrained(part)
    part.rename(folder)


def _plan(configuration: Configuration, model: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    from skill_train.recipe.fields import Recipe

    recipe = dataclasses.asdict(Recipe()) | {
        "model": str(model),
        "max_length": configuration.length,
        "max_steps": configuration.steps,
        "warmup_steps": 0,
        "learning_rate": 1e-5,
        "effective_batch_size": configuration.batch * configuration.accumulation,
        "finetuning_type": configuration.finetuning_type,
        "pure_bf16": configuration.pure_bf16,
        "optim": "adamw_torch_fused" if configuration.finetuning_type == "full" else "adamw_torch",
        "lora_r": configuration.lora_r,
        "target_modules": list(configuration.target_modules),
        "load_in_4bit": configuration.four_bit,
    }
    threads = None
    if configuration.device == "cpu":
        from skill_train.machine.read import physical_cores

        threads = physical_cores()
    return recipe, {
        "device": configuration.device,
        "dtype": configuration.dtype,
        "attn_implementation": "sdpa",
        "per_device_train_batch_size": configuration.batch,
        "gradient_accumulation_steps": configuration.accumulation,
        "num_processes": 1,
        "strategy": "single",
        "offload": False,
        "gradient_checkpointing": configuration.checkpointing,
        "threads": threads,
        "save_steps": 1000,
        "save_total_limit": 1,
        "report_to": "none",
    }


def _data(configuration: Configuration, recipe: dict[str, Any]) -> dict[str, Any]:
    """Random tokens; the last part of each row is trained, as an answer after its prompt is."""
    import random

    chance = random.Random(0)
    vocabulary = SHAPES[configuration.shape]["config"]["vocab_size"]
    prompt = math.floor(configuration.length * (1 - TRAINED_SHARE))
    rows = []
    for _ in range(recipe["effective_batch_size"] * configuration.steps):
        ids = [chance.randrange(10, vocabulary) for _ in range(configuration.length)]
        rows.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    order = list(range(len(rows)))
    return {"train": rows, "held_out": [], "figures": {}, "order": order, "pictures": None}


def _tokenizer() -> Any:
    """TRL wants one, and only its padding and end tokens are used."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    model = WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), pad_token="<pad>", eos_token="<eos>")


def _forget_peak(device: str) -> None:
    """The peak of loading is another matter; what training needs is measured from here."""
    gc.collect()
    if device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
    elif Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
