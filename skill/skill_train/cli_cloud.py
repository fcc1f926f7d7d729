"""Commands of the cloud, and of two runs side by side: words and options only; the composers do the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from skill_train.cli_frame import PATH, command, recipe_options
from skill_train.console import Console, Result


@command(
    "submit",
    examples=(
        "skill-train submit runs/first --max-cost 5",
        "skill-train submit recipe.yaml --flavor a10g-large --timeout 2h --yes",
    ),
)
@click.argument("source", metavar="[RECIPE|PLAN|RUN]", type=PATH, required=False)
@recipe_options
@click.option("--flavor", help="Machine of Hugging Face Jobs.  [default: the cheapest that fits and is in time]")
@click.option("--timeout", help="The job is stopped after it: 90m, 2h, or seconds.  [default: above the estimate]")
@click.option(
    "--max-cost",
    type=click.FloatRange(min=0, min_open=True),
    help="Dollars that the job may never exceed.  [default: none; --yes takes what is shown]",
)
@click.option(
    "--max-hours",
    type=click.FloatRange(min=0, min_open=True),
    default=8.0,
    show_default=True,
    help="Longest run, in hours, for the choice of the flavor.",
)
@click.option("--namespace", help="User or organisation that runs and pays the job.  [default: you]")
@click.option("--hub-model-id", help="Repository for the result.  [default: NAMESPACE/<model>-<data>-<recipe hash>]")
@click.option("--data-repo", help="Private dataset repository for local data.  [default: the bucket of the jobs]")
@click.option("--run-dir", type=PATH, help="Folder of the run.  [default: runs/<data>-<recipe hash>-cloud]")
@click.option("--dry-run", is_flag=True, help="Check, and print the job as it would be sent; send nothing.")
@click.option("--rehearse", is_flag=True, help="Run two steps of the job here, in a throwaway folder; send nothing.")
@click.option("--force-new", is_flag=True, help="Start another job although one of this plan runs.")
@click.option(
    "--backend",
    type=click.Choice(("hf_jobs", "skypilot", "colab")),
    default="hf_jobs",
    show_default=True,
    help="Whose machines: a job of Hugging Face, a SkyPilot task for other clouds, a notebook for Google Colab.",
)
@click.option("--nodes", type=click.IntRange(min=1), default=1, show_default=True, help="Machines; only skypilot.")
@click.option("--infra", help="Places to look for machines, with commas; only skypilot.  [default: all that can]")
@click.option("--yes", is_flag=True, help="Take the cost that was shown, and start.")
def submit(console: Console, **options: Any) -> Result:
    """Run a recipe, a plan or a local run as a job of Hugging Face; without --yes show cost and uploads only."""
    from skill_train import chain_submit

    return chain_submit.submit(console, **options)


@command(
    "diff",
    examples=("skill-train diff runs/first runs/first-cloud", "skill-train diff runs/a runs/b --format json"),
)
@click.argument("run_a", type=PATH)
@click.argument("run_b", type=PATH)
def diff(console: Console, run_a: Path, run_b: Path) -> Result:
    """Say exactly what differs between two runs: in the recipe, where nothing may, and in the placement."""
    from skill_train import chain_diff

    return chain_diff.diff(console, run_a=run_a, run_b=run_b)
