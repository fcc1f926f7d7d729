"""Plans for tiny models, made by the planner from what it reads: one thread, and the batch split that a test says."""

from __future__ import annotations

import copy
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

import tiny
from skill_train import facts
from skill_train.data import scan as dataset
from skill_train.model import folder as model
from skill_train.plan import launch_args
from skill_train.plan import make as plan
from skill_train.program.tokenizer import load_tokenizer
from skill_train.recipe import fields as recipe
from skill_train.run import plan_record
from skill_train.run.plan_record import Facts

MACHINE = facts.MachineFacts("Linux", "a processor", "cpu", 16 << 30, 12 << 30, None, 1, False)
TWO_CORES = msgspec.structs.replace(MACHINE, cores=2)
STEPS = 8
SPLIT = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_processes")


def write_data(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> Path:
    """Rows as a JSONL file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder / name


def write_plan(
    run: Path,
    base: Path,
    data: Path,
    *,
    split: tuple[int, int, int] | None = None,
    placement: dict[str, Any] | None = None,
    pictures: bool = False,
    **values: Any,
) -> Path:
    """`plan.json` in a run directory. `split` is rows at a time x accumulation x processes; `placement` replaces what
    the planner chose; `pictures`: the model reads them; `values` are the recipe's."""
    wanted = recipe.from_dict({"model": str(base), "data": str(data), **values})
    rows = dataset.scan(wanted, pictures=pictures)
    made = plan.make_plan(wanted, Facts(model.read_model(base), rows, MACHINE))
    placed = replace(made.placement, **(dict(zip(SPLIT, split, strict=True)) if split else {}))
    placed = replace(placed, strategy="single" if placed.num_processes == 1 else "ddp", save_steps=100)
    placed = replace(placed, **(placement or {}))
    started = made.launch if placed.strategy == "fsdp" else launch_args.launch(placed, TWO_CORES)
    run.mkdir(parents=True, exist_ok=True)
    plan_record.write(run / "plan.json", replace(made, placement=placed, launch=started))
    return run / "plan.json"


def write_run(run: Path, *, base: Path | None = None, save_steps: int = 2, **values: Any) -> Path:
    """A run directory with its plan: 24 rows, effective batch 4, eight steps unless said otherwise."""
    data = write_data(run.parent, tiny.rows(24))
    values = {"max_steps": STEPS, "effective_batch_size": 4, "split": (4, 1, 1), **values}
    placement = {"save_steps": save_steps, **values.pop("placement", {})}
    write_plan(run, base or tiny.cached("gemma"), data, placement=placement, **values)
    return run


@functools.cache
def _read(kind: str) -> Any:
    return load_tokenizer(str(tiny.cached(kind)), None)


def tokenizer(kind: str) -> Any:
    """As the program loads it, which takes seconds for a large vocabulary, and is done once. A template of its own may
    be set in it; nothing else may be changed."""
    return copy.copy(_read(kind))


def sharded(run: Path) -> int:
    """The exit code of a run that FSDP shards over two processes on this processor, started with the arguments for two
    GPUs. What they say is in `log`."""
    gpus = (facts.Gpu("NVIDIA L40S", 48 << 30, None, 8.9, False),) * 2
    placement = replace(plan_record.read(run / "plan.json").placement, device="cuda")
    made = launch_args.launch(placement, msgspec.structs.replace(TWO_CORES, device="cuda", gpus=gpus))
    program = Path(__file__).resolve().parent / "fsdp_on_cpu.py"
    command = [sys.executable, "-m", "accelerate.commands.launch", *made.arguments, str(program)]
    environment = os.environ | made.environment
    with open(run / "log", "w") as log:
        return subprocess.call([*command, str(run / "plan.json")], env=environment, stdout=log, stderr=log)


def resolved(base: Path, data: Path, **values: Any) -> dict[str, Any]:
    """The recipe of such a plan, as the program reads it."""
    wanted = recipe.from_dict({"model": str(base), "data": str(data), **values})
    made = plan.make_plan(
        wanted, Facts(model.read_model(base), dataset.scan(wanted, pictures=wanted.images is True), MACHINE)
    )
    return made.recipe.as_dict()


def events(text: str) -> list[dict[str, Any]]:
    """The events among the lines of the program's output."""
    return [json.loads(line) for line in text.splitlines() if line.startswith('{"event"')]


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
