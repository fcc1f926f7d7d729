"""Every command of the command line by its full name, those of groups too."""

from __future__ import annotations

import click

from skill_train.cli import cli


def commands(group: click.Group = cli, *before: str) -> dict[str, click.Command]:
    found: dict[str, click.Command] = {}
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None, name
        names = (*before, name)
        found |= commands(command, *names) if isinstance(command, click.Group) else {" ".join(names): command}
    return found
