"""What all commands share: the group, the options that each has, and how a function becomes a command."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import click

from skill_train.core.console import Console, Format, Result
from skill_train.core.errors import EXIT_CODES, nearest
from skill_train.core.files import left_alone

FORMATS = ("auto", "human", "json", "quiet")
_EXIT_CODES_HELP = "\b\nExit codes:\n" + "\n".join(f"  {code}  {meaning}" for code, meaning in EXIT_CODES.items())

_UNCLEAR = (
    "{} is a part of a result, left by another machine or container, or before a restart: it stays, "
    "because somebody there may work on it; remove it when nobody does"
)


class Commands(click.Group):
    """Keeps the order of definition and names the nearest command for a wrong one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            ctx.fail(f"no command {args[0]!r}{nearest(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="skill-train", prog_name="skill-train")
def cli() -> None:
    """The fine-tune that proves itself: train a LoRA here or in the cloud, merge it, export it to GGUF, check it."""


def command(
    name: str, *, examples: tuple[str, ...], group: click.Group = cli
) -> Callable[[Callable[..., Result]], click.Command]:
    """A command whose function takes a Console first and returns a Result. `name` has the group's in it."""

    def wrap(function: Callable[..., Result]) -> click.Command:
        @functools.wraps(function)
        def run(format_: str, **options: Any) -> int:
            console = Console(cast(Format, format_), name)
            try:
                result = function(console, **options)
            finally:
                for part in left_alone():
                    console.warn("part_left_alone", _UNCLEAR.format(part))
            return console.result(result)

        run.__doc__ = f"{inspect.getdoc(function)}\n\n\b\nExamples:\n" + "\n".join(f"  {line}" for line in examples)
        with_format = click.option(
            "--format",
            "format_",
            type=click.Choice(FORMATS),
            default="auto",
            show_default=True,
            help="auto is human on a terminal and json otherwise.",
        )(run)
        return group.command(name.split()[-1], epilog=_EXIT_CODES_HELP)(with_format)

    return wrap


class Place(click.Path):
    """Not the empty text of a variable that is not set, of which click makes this folder: `cancel "$RUN"` must not end
    the job that it has."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("an empty path; is a variable of the shell not set?", param, ctx)
        return super().convert(value, param, ctx)


PATH, RUN = Place(path_type=Path), Place(path_type=str)  # RUN may be a path or an id
MOST_COUNTED, MOST_DOLLARS, MOST_HOURS = 1_000_000, 1_000_000, 24 * 365


class Number(click.FloatRange):
    """A range without NaN, which is above and below nothing and so is in every range of click 8."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is no number.", param, ctx)
        return number


DOLLARS = Number(min=0, min_open=True, max=MOST_DOLLARS)
HOURS = Number(min=0, min_open=True, max=MOST_HOURS)


def recipe_options(function: Callable[..., Result]) -> Callable[..., Result]:
    """What `plan`, `local` and `submit` take alike."""
    options = (
        click.option("--model", help="Base model: folder or Hub id."),
        click.option("--data", help="Dataset: file, folder or Hub id."),
        click.option("--split", help="Part of the dataset, such as train[:500].  [default: train]"),
        click.option(
            "--max-steps", type=click.IntRange(min=1), help="Optimizer steps.  [default: from num_train_epochs]"
        ),
        click.option("--max-length", type=click.IntRange(min=2), help="Longest row, in tokens.  [default: 1024]"),
        click.option(
            "--dtype",
            type=click.Choice(("float32", "bfloat16", "float16")),
            help="Precision.  [default: by device, with its reason]",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


device_option = click.option(
    "--device", type=click.Choice(("cuda", "mps", "cpu")), help="Where to train.  [default: the best here]"
)
