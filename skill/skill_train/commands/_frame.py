"""Makes a command from a function: its options as one dataclass, its answer printed, its help with examples."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from skill_train.core.console import Console, Format, Result
from skill_train.core.errors import EXIT_CODES, in_hints, nearest, quoted

FORMATS = ("auto", "human", "json", "quiet")
_EXIT_CODES_HELP = "\b\nExit codes:\n" + "\n".join(f"  {code}  {meaning}" for code, meaning in EXIT_CODES.items())

_UNCLEAR = (
    "{} is an unfinished result of another machine or container, or from before a restart. It was kept, "
    "because a process there may still write it; remove it if none does"
)

Options = TypeVar("Options")


class Commands(click.Group):
    """A group that keeps the order of its commands and suggests the nearest command for a wrong name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        names = self.list_commands(ctx)
        if args and not args[0].startswith("-") and args[0] not in names:
            ctx.fail(f"no command {args[0]!r}{nearest(args[0], names)}")
        return super().resolve_command(ctx, args)


def command(
    name: str, options_class: type[Options], *, examples: tuple[str, ...]
) -> Callable[[Callable[[Options, Console], Result]], click.Command]:
    """Declares a command whose function takes its options and a Console and returns a Result. The name has that of its
    group in it; the fields of the dataclass are made by `option` and `argument`, in the order of the help."""

    def wrap(function: Callable[[Options, Console], Result]) -> click.Command:
        @functools.wraps(function)
        def run(format_: str, **parameters: Any) -> int:
            from skill_train.core.files import left_alone  # which the help page need not load

            console = Console(cast(Format, format_), name)
            options = options_class(**parameters)
            try:
                with _run_in_hints(options):
                    result = function(options, console)
            finally:
                for part in left_alone():
                    console.warn("part_left_alone", _UNCLEAR.format(part))
            return console.result(result)

        run.__doc__ = f"{inspect.getdoc(function)}\n\n\b\nExamples:\n" + "\n".join(f"  {line}" for line in examples)
        return click.command(name.split()[-1], params=_parameters(options_class), epilog=_EXIT_CODES_HELP)(run)

    return wrap


def _parameters(options_class: type[Any]) -> list[click.Parameter]:
    says = "auto is human on a terminal and json otherwise."
    kind = click.Choice(FORMATS)
    format_ = click.Option(["--format", "format_"], type=kind, default="auto", show_default=True, help=says)
    return [format_, *(field.metadata["click"](field.name) for field in dataclasses.fields(options_class))]


def _run_in_hints(options: object) -> AbstractContextManager[None]:
    """Puts the run that the command was given into hints. The packages below do not know how the user named it, and
    write RUN."""
    run = getattr(options, "run", getattr(options, "model", None))
    is_run = isinstance(run, Path) and (run / "plan.json").is_file()
    return in_hints(" RUN", f" {quoted(run)}") if is_run else nullcontext()
