"""What a user would otherwise train with, as a program: a LoRA on a file of conversations, with TRL's trainer.

    python peers.py seed --model DIR --data FILE --out DIR --steps 3 --rows 8 --max-length 512

`seed`: the settings of the training script in the first guide of this project ("Local training on macOS"), written
again, with its two broken arguments mended (`max_length` for `max_seq_length`, `dtype` for `torch_dtype`): float32, one
row at a time, accumulation, gradient checkpointing, the template's text as one column, every token trained.
`trl`: what `trl sft --use_peft` does when nothing more is said (trl 1.16: SFTConfig and ModelConfig as they are), with
the rows of a step at a time. Both read the rows in the order of the file, as ours are fed, and tell each step.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=("seed", "trl"))
    for name in ("model", "data", "out"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("steps", "rows", "max-length"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--dtype", help="trl: of the weights; float32 trains without autocast")
    parser.add_argument("--load-in-4bit", action="store_true", help="trl")
    parser.add_argument("--liger", action="store_true", help="trl: use_liger_kernel")
    parser.add_argument("--lora-dropout", type=float, help="trl")
    parser.add_argument("--target-modules", nargs="+", help="trl: modules that get an adapter")
    asked = parser.parse_args()
    from transformers import set_seed

    set_seed(42)
    trainer = (seed_trainer if asked.way == "seed" else trl_trainer)(asked)
    steps = Steps(trainer, asked.rows)
    trainer.add_callback(steps.callback())
    trainer.train()
    trainer.save_model(asked.out)
    Path(asked.out, "steps.json").write_text(json.dumps(steps.lines))


def seed_trainer(asked: argparse.Namespace) -> Any:
    import torch
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32)
    model.config.use_cache = False
    rows = load_dataset("json", data_files=asked.data, split="train", cache_dir=f"{asked.out}/cache")
    rows = rows.map(lambda row: {"text": tokenizer.apply_chat_template(row["messages"], tokenize=False)})
    settings = SFTConfig(
        output_dir=asked.out,
        max_steps=asked.steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=asked.rows,
        learning_rate=2e-4,
        gradient_checkpointing=True,
        fp16=False,
        bf16=False,
        max_length=asked.max_length,
        dataset_text_field="text",
        report_to="none",
        **_to_compare(),
    )
    adapter = LoraConfig(
        r=16, lora_alpha=32, lora_dropout=0.05, bias="none", task_type="CAUSAL_LM",
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
    )  # fmt: skip
    return SFTTrainer(
        model=model,
        args=settings,
        train_dataset=rows.remove_columns("messages"),
        peft_config=adapter,
        processing_class=tokenizer,
    )


def trl_trainer(asked: argparse.Namespace) -> Any:
    from datasets import load_dataset
    from trl import ModelConfig, SFTConfig, SFTTrainer, get_peft_config, get_quantization_config

    said = ModelConfig(model_name_or_path=asked.model, use_peft=True, **_said_of_the_model(asked))
    settings = SFTConfig(
        output_dir=asked.out,
        max_steps=asked.steps,
        per_device_train_batch_size=asked.rows,
        max_length=asked.max_length,
        report_to="none",
        **({"bf16": False} if asked.dtype == "float32" else {}),
        **({"use_liger_kernel": True} if asked.liger else {}),
        **_to_compare(),
    )
    settings.model_init_kwargs = {"dtype": said.dtype}
    rows = load_dataset("json", data_files=asked.data, split="train", cache_dir=f"{asked.out}/cache")
    return SFTTrainer(
        model=asked.model,
        args=settings,
        train_dataset=rows,
        quantization_config=get_quantization_config(said),
        peft_config=get_peft_config(said),
    )


def _said_of_the_model(asked: argparse.Namespace) -> dict[str, Any]:
    """What is not ModelConfig's default."""
    names = {"lora_dropout": asked.lora_dropout, "lora_target_modules": asked.target_modules, "dtype": asked.dtype}
    return {name: value for name, value in names.items() if value is not None} | {"load_in_4bit": asked.load_in_4bit}


def _to_compare() -> dict[str, Any]:
    """No other speed: rows in the order of the file, and a loss for each step."""
    return {"train_sampling_strategy": "sequential", "logging_steps": 1, "disable_tqdm": True}


class Steps:
    """Loss, seconds and tokens of each step; a step begins and ends where train.py begins and ends it."""

    def __init__(self, trainer: Any, rows: int) -> None:
        self.lengths = [len(row["input_ids"]) for row in trainer.train_dataset]
        self.rows = rows
        self.lines: list[dict[str, Any]] = []
        self.started = time.monotonic()

    def callback(self) -> Any:
        from transformers import TrainerCallback

        steps = self

        class Callback(TrainerCallback):  # type: ignore[misc]
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                steps.started = time.monotonic()

            def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
                if "loss" in logs:
                    steps.end(state.global_step, float(logs["loss"]))

        return Callback()

    def end(self, step: int, loss: float) -> None:
        fed = self.lengths[(step - 1) * self.rows : step * self.rows]
        line = {"step": step, "loss": loss, "tokens": sum(fed), "seconds": time.monotonic() - self.started}
        self.lines.append(line | {"memory_bytes": _gpu_memory()})


def _gpu_memory() -> dict[str, int]:
    """As train.py tells it: the most that was allocated so far."""
    import torch

    return {"cuda": torch.cuda.max_memory_allocated()} if torch.cuda.is_available() else {}


if __name__ == "__main__":
    main()
