"""Commands that put the skill where agents look: words and options only."""

from __future__ import annotations

from typing import Any

import click

from skill_train.commands._frame import Commands, cli, command
from skill_train.core.console import Console, Result


@cli.group("skills", cls=Commands)
def skills() -> None:
    """Put this skill where coding agents look for it, and see whether it is still current there."""


_SCOPE = click.option(
    "--scope",
    type=click.Choice(("project", "global")),
    help="project is this folder, global is the user's home.  [default: project; for check both]",
)


@command(
    "skills install",
    group=skills,
    examples=("skill-train skills install", "skill-train skills install --target claude --scope global"),
)
@click.option(
    "--target",
    default="agents",
    show_default=True,
    metavar="agents|claude|PATH",
    help="agents is .agents/skills with a link in .claude/skills; PATH is a folder that holds skills.",
)
@_SCOPE
@click.option(
    "--force", is_flag=True, help="Replace edited files too, and files of the same names that others put there."
)
def install(console: Console, **options: Any) -> Result:
    """Copy the skill (instructions, references, templates, programs) to where agents look; needs no network."""
    from skill_train.commands import chain_skills

    return chain_skills.install(console, **options)


@command(
    "skills check",
    group=skills,
    examples=("skill-train skills check", "skill-train skills check --scope global --format json"),
)
@click.option("--target", metavar="agents|claude|PATH", help="One place.  [default: all that are known]")
@_SCOPE
def check(console: Console, **options: Any) -> Result:
    """Say whether each installed copy is what this package has: current, older, newer, edited or different."""
    from skill_train.commands import chain_skills

    return chain_skills.check(console, **options)
