"""Commands before training, and for training on this machine: words and options only; the composers do the work."""

from __future__ import annotations

from typing import Any

import click

from skill_train.commands._frame import HOURS, PATH, command, device_option, recipe_options
from skill_train.core.console import Console, Result


@command(
    "data",
    examples=(
        "skill-train data tickets.jsonl",
        "skill-train data tickets.csv --model Qwen/Qwen2.5-0.5B-Instruct --fix tickets.fixed.jsonl",
    ),
)
@click.argument("dataset", required=False)
@click.option("--recipe", type=PATH, help="Recipe with a mapping to try (format, columns); DATASET may be left out.")
@click.option("--model", help="Count tokens with this model's tokenizer and template: folder or Hub id.")
@click.option(
    "--method",
    type=click.Choice(("sft", "dpo", "kto", "grpo", "reward")),
    default="sft",
    show_default=True,
    help="Method that must be able to use it; only sft is trained here.",
)
@click.option("--split", help="Part of the dataset, such as train[:500].  [default: train]")
@click.option("--max-length", type=click.IntRange(min=2), help="Longest row, in tokens.  [default: 1024]")
@click.option("--fix", type=PATH, help="New .jsonl file for the usable rows, mapped. The dataset is only read.")
def data(console: Console, **options: Any) -> Result:
    """Say what format a dataset has, which methods can use it, and which rows training would refuse."""
    from skill_train.commands import chain_data

    return chain_data.data(console, **options)


@command(
    "plan",
    examples=(
        "skill-train plan --model Qwen/Qwen2.5-7B-Instruct --data tickets.jsonl",
        "skill-train plan recipe.yaml --where cloud --max-hours 2 --out plan.json",
    ),
)
@click.argument("recipe", type=PATH, required=False)
@recipe_options
@device_option
@click.option("--where", type=click.Choice(("local", "cloud")), help="Overrides the rules.  [default: they decide]")
@click.option("--flavor", help="Machine of Hugging Face Jobs.  [default: the cheapest that fits and is in time]")
@click.option(
    "--max-hours",
    type=HOURS,
    default=8.0,
    show_default=True,
    help="Longest run, in hours: a longer one here goes to the cloud.",
)
@click.option("--out", type=PATH, help="File for the plan; `skill-train local PLAN` runs it.")
def plan(console: Console, **options: Any) -> Result:
    """Decide whether to train here or in the cloud, with memory, time, cost and reasons; spends nothing.

    RECIPE is a recipe file, or the folder of a run, whose estimates are then shown beside what was measured.
    """
    from skill_train.commands import chain_plan

    return chain_plan.plan(console, **options)


@command(
    "local",
    examples=(
        "skill-train local --model Qwen/Qwen2.5-0.5B-Instruct --data tickets.jsonl --max-steps 50 --run-dir runs/first",
        "skill-train local recipe.yaml",
    ),
)
@click.argument("recipe", type=PATH, required=False)
@recipe_options
@device_option
@click.option(
    "--force", is_flag=True, help="Take what is known to fail: a --dtype that ends in NaN, too little memory."
)
@click.option("--run-dir", type=PATH, help="Folder of the run.  [default: runs/<data>-<recipe hash>]")
@click.option("--resume", is_flag=True, help="Go on with the run in --run-dir from its newest complete checkpoint.")
def local(console: Console, **options: Any) -> Result:
    """Train a LoRA adapter on this machine and end with a smoke verdict. RECIPE is a recipe file or a plan."""
    from skill_train.commands import chain

    return chain.local(console, **options)
