"""Commands of runs in the cloud, and of two runs side by side: words and options only; the composers do the work."""

from __future__ import annotations

from pathlib import Path

import click

from skill_train.cli_frame import PATH, command
from skill_train.console import Console, Result


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
