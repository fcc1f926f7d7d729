"""Option types, and options that several commands share."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from skill_train.core.console import Result
from skill_train.core.errors import UsageError

RECIPE_OPTIONS = ("model", "data", "split", "max_steps", "max_length")  # with --dtype, which the plan decides


@dataclass(frozen=True)
class RecipeFlags:
    """The fields of a command's options that `recipe_options` adds."""

    model: str | None = None
    data: str | None = None
    split: str | None = None
    max_steps: int | None = None
    max_length: int | None = None
    dtype: str | None = None


class PathArgument(click.Path):
    """A path that is not empty, and that no command takes for an option. click takes an empty text (an unset variable)
    for the current folder, and `cancel "$RUN"` must not cancel the job of that folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("an empty path; is a variable of the shell not set?", param, ctx)
        # As a Path, `./-run` is `-run`, and the next command would take that for an option.
        dashed = os.path.normpath(value).startswith("-")
        return super().convert(os.path.abspath(value) if dashed else value, param, ctx)


PATH, RUN = PathArgument(path_type=Path), PathArgument(path_type=str)  # RUN may be a path or an id
MOST_COUNTED, MOST_DOLLARS, MOST_HOURS = 1_000_000, 1_000_000, 24 * 365


class Number(click.FloatRange):
    """A range without NaN, which is in every range of click 8, because no comparison with it is true."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


DOLLARS = Number(min=0, min_open=True, max=MOST_DOLLARS)
HOURS = Number(min=0, min_open=True, max=MOST_HOURS)
DEFAULT_HOURS = 8.0
BITS = Number(min=2, max=9)  # a weight
DIVERGENCE = Number(min=0, min_open=True, max=100)  # nats


def _together(*options: Callable[[Callable[..., Result]], Callable[..., Result]]) -> Callable[..., Any]:
    def add(function: Callable[..., Result]) -> Callable[..., Result]:
        for option in reversed(options):
            function = option(function)
        return function

    return add


# The options that `plan`, `local` and `submit` share.
recipe_options = _together(
    click.option("--model", help="Base model: folder or Hub id."),
    click.option("--data", help="Dataset: file, folder or Hub id."),
    click.option("--split", help="Part of the dataset, such as train[:500].  [default: train]"),
    click.option("--max-steps", type=click.IntRange(min=1), help="Optimizer steps.  [default: from num_train_epochs]"),
    click.option("--max-length", type=click.IntRange(min=2), help="Longest row, in tokens.  [default: 1024]"),
    click.option(
        "--dtype",
        type=click.Choice(("float32", "bfloat16", "float16")),
        help="Precision.  [default: depends on the device]",
    ),
)

device_option = click.option(
    "--device", type=click.Choice(("cuda", "mps", "cpu")), help="Device to train on.  [default: the best available]"
)

engine_device_option = click.option(
    "--device", type=click.Choice(("cpu", "gpu")), help="Where to run.  [default: the GPU if llama.cpp has one]"
)

DEFAULT_CONTEXT = 4096  # tokens

context_option = click.option(
    "--context",
    type=click.IntRange(16, 1_000_000),
    default=DEFAULT_CONTEXT,
    show_default=True,
    help="Longest prompt with its answer, in tokens; at most what the model takes.",
)

flavor_option = click.option(
    "--flavor", help="Machine of Hugging Face Jobs.  [default: the cheapest that fits and is fast enough]"
)


HERE = "here"  # this machine, for --for
_MOST_CONTEXT = 1 << 24


# The options that describe a device, and what its file must keep.
for_device_options = _together(
    click.option("--for", "for_device", help='Device that the file is for, such as "iPhone 15", "M2 16GB" or here.'),
    click.option("--memory", help="Memory of the device, such as 8GB.  [default: from the table of devices]"),
    click.option("--bandwidth", help="Its memory bandwidth, such as 68GB/s.  [default: from the table of devices]"),
    click.option(
        "--context",
        type=click.IntRange(min=1, max=_MOST_CONTEXT),
        help=f"Tokens of a conversation on the device.  [default: {DEFAULT_CONTEXT}, or what the model has]",
    ),
    click.option("--max-size", help="Largest file, such as 1.5GB."),
    click.option("--min-speed", type=Number(min=0, min_open=True, max=1e6), help="Minimum tokens per second."),
)


def set_options(options: object, names: tuple[str, ...]) -> dict[str, object]:
    """The options of these names that the user set, by name."""
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def option_of(name: str) -> str:
    """The option that sets this field."""
    return "--for" if name == "for_device" else f"--{name.replace('_', '-')}"


def words_of(command: str, recipe: Path | None, values: Mapping[str, object]) -> list[str]:
    """A command with the options that the user set."""
    words = ["skill-train", command, *([str(recipe)] if recipe is not None else [])]
    for key, value in values.items():
        words += [option_of(key), str(value)] if value is not None else []
    return words


def require_only_run(command: str, others: Mapping[str, object]) -> None:
    """Refuses other inputs together with RUN."""
    conflicting = [name for name, value in others.items() if value]
    if conflicting:
        raise UsageError(
            f"RUN and {conflicting[0]} cannot be used together", code="bad_usage", hint=f"skill-train {command} --help"
        )
