"""Commands of the cloud, and of two runs side by side: words and options only; the composers do the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from skill_train.commands._frame import (
    DOLLARS,
    HOURS,
    MOST_COUNTED,
    MOST_HOURS,
    PATH,
    RUN,
    Number,
    command,
    recipe_options,
)
from skill_train.core.console import Console, Result


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
    type=DOLLARS,
    help="Dollars that all jobs of the plan together may never exceed.  [default: none; --yes takes what is shown]",
)
@click.option(
    "--max-hours",
    type=HOURS,
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
@click.option("--nodes", type=click.IntRange(1, 1000), default=1, show_default=True, help="Machines; only skypilot.")
@click.option("--infra", help="Places to look for machines, with commas; only skypilot.  [default: all that can]")
@click.option("--yes", is_flag=True, help="Take the cost that was shown, and start.")
def submit(console: Console, **options: Any) -> Result:
    """Run a recipe, a plan or a local run as a job of Hugging Face; without --yes show cost and uploads only."""
    from skill_train.commands import chain_submit

    return chain_submit.submit(console, **options)


@command("status", examples=("skill-train status runs/tickets-cloud", "skill-train status me/0123456789abcdef01234567"))
@click.argument("run", type=RUN)
def status(console: Console, **options: Any) -> Result:
    """Say how far a run is, what it has cost, how long it will take, and why it failed.

    On a terminal it looks again and again until the run has ended; Ctrl-C stops looking. Else it asks once.
    RUN is a run directory, or the id of a job: NAMESPACE/ID or ID.
    """
    from skill_train.commands import chain_status

    return chain_status.status(console, **options)


@command(
    "logs", examples=("skill-train logs runs/tickets-cloud --tail 50", "skill-train logs runs/tickets-cloud --follow")
)
@click.argument("run", type=RUN)
@click.option("--follow", "follow_", is_flag=True, help="Stay until the job has ended.")
@click.option(
    "--tail", type=click.IntRange(1, MOST_COUNTED), help="Only the last lines of those that are there.  [default: all]"
)
def logs(console: Console, **options: Any) -> Result:
    """Show the log of a job, each line once, across connections that break. JSON holds the last lines that fit."""
    from skill_train.commands import chain_follow

    return chain_follow.logs(console, **options)


@command("wait", examples=("skill-train wait runs/tickets-cloud", "skill-train wait runs/tickets-cloud --timeout 3600"))
@click.argument("run", type=RUN)
@click.option(
    "--timeout", type=Number(0, MOST_HOURS * 3600), help="Seconds to wait; the job goes on.  [default: no limit]"
)
def wait(console: Console, **options: Any) -> Result:
    """Wait until a job has ended; exit 0 when it COMPLETED, else the reason. An outage of the Hub is waited out."""
    from skill_train.commands import chain_follow

    return chain_follow.wait(console, **options)


@command(
    "cancel", examples=("skill-train cancel runs/tickets-cloud", "skill-train cancel runs/tickets-cloud --format json")
)
@click.argument("run", type=RUN)
def cancel(console: Console, **options: Any) -> Result:
    """End a job. Its checkpoints stay; one that has ended is left as it is."""
    from skill_train.commands import chain_follow

    return chain_follow.cancel(console, **options)


@command(
    "pull",
    examples=(
        "skill-train pull runs/tickets-cloud",
        "skill-train pull me/0123456789abcdef01234567 --run-dir runs/tickets-cloud",
    ),
)
@click.argument("run", type=RUN)
@click.option("--run-dir", type=PATH, help="Folder of the run.  [default: RUN; runs/<run id> for a job's id]")
def pull(console: Console, **options: Any) -> Result:
    """Fetch what a job kept, the adapter and its records, digests checked, so that merge and export work as here.

    A result that the bucket lacks comes from the repository that it was pushed to. A run that has not finished brings
    its records and its newest checkpoint. Run it again after an interruption.
    """
    from skill_train.commands import chain_fetch

    return chain_fetch.pull(console, **options)


@command(
    "resume",
    examples=(
        "skill-train resume runs/tickets-cloud",
        "skill-train resume runs/tickets-cloud --flavor a100-large --max-cost 5 --yes",
    ),
)
@click.argument("run", type=RUN)
@click.option("--run-dir", type=PATH, help="Folder of the run.  [default: RUN; runs/<run id> for a job's id]")
@click.option("--flavor", help="Another machine with as many GPUs.  [default: that of the last job]")
@click.option("--timeout", help="Such as 30m, 2h or 5400.  [default: as before; longer when that was the cause]")
@click.option("--max-cost", type=DOLLARS, help="Dollars that all jobs of the plan together may cost at most.")
@click.option("--yes", is_flag=True, help="Start it. Without this the cost is shown and nothing is started.")
def resume(console: Console, **options: Any) -> Result:
    """Go on from the newest checkpoint in a new job, after a timeout, a cancel, a crash or no credit. Same recipe.

    A run on this machine goes on with `skill-train local --resume --run-dir RUN`.
    """
    from skill_train.commands import chain_fetch

    return chain_fetch.resume(console, **options)


@command(
    "diff",
    examples=("skill-train diff runs/first runs/first-cloud", "skill-train diff runs/a runs/b --format json"),
)
@click.argument("run_a", type=PATH)
@click.argument("run_b", type=PATH)
def diff(console: Console, run_a: Path, run_b: Path) -> Result:
    """Say exactly what differs between two runs: in the recipe, where nothing may, and in the placement."""
    from skill_train.commands import chain_diff

    return chain_diff.diff(console, run_a=run_a, run_b=run_b)
