"""Option types, and options that several commands share."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import click

from skill_train.core.errors import UsageError

RECIPE_OPTIONS = ("model", "data", "split", "max_steps", "max_length")  # with --dtype, which the plan decides
DEFAULT_CONTEXT = 4096  # tokens
DEFAULT_HOURS = 8.0

Value = TypeVar("Value")


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

Whole = click.IntRange


class Number(click.FloatRange):
    """A range without NaN, which is in every range of click 8, because no comparison with it is true."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


DOLLARS = Number(min=0, min_open=True, max=MOST_DOLLARS)
HOURS = Number(min=0, min_open=True, max=MOST_HOURS)
BITS = Number(min=2, max=9)  # a weight
DIVERGENCE = Number(min=0, min_open=True, max=100)  # nats


def option(
    default: Value, says: str, kind: click.ParamType[Any] | tuple[str, ...] | None = None, **settings: Any
) -> Value:
    """A field of a command's options, with the option of click that sets it.

    False makes it a flag, and an empty tuple an option that can be repeated. The help shows any other default, but for
    None, where `says` has it. A tuple as `kind` are the words to choose from.
    """
    if default is False:
        settings["is_flag"] = True
    elif default == ():
        settings["multiple"] = True
    elif default is not None:
        settings |= {"default": default, "show_default": True}
    type_ = click.Choice(kind) if isinstance(kind, tuple) else kind

    def declared(name: str) -> click.Parameter:
        return click.Option([option_of(name), name], type=type_, help=says, **settings)

    return field(default=default, metadata={"click": declared})


def argument(kind: click.ParamType[Any] | None = None, *, required: bool = True, **settings: Any) -> Any:
    """A field of a command's options, with the argument of click that sets it."""

    def declared(name: str) -> click.Parameter:
        return click.Argument([name], type=kind, required=required, **settings)

    return field(default=MISSING if required else None, metadata={"click": declared})


@dataclass(frozen=True)
class RecipeFlags:
    """The options that `plan`, `local` and `submit` share."""

    model: str | None = option(None, "Base model: folder or Hub id.")
    data: str | None = option(None, "Dataset: file, folder or Hub id.")
    split: str | None = option(None, "Part of the dataset, such as train[:500].  [default: train]")
    max_steps: int | None = option(None, "Optimizer steps.  [default: from num_train_epochs]", Whole(min=1))
    max_length: int | None = option(None, "Longest row, in tokens.  [default: 1024]", Whole(min=2))
    dtype: str | None = option(None, "Precision.  [default: depends on the device]", ("float32", "bfloat16", "float16"))


def device_option() -> str | None:
    return option(None, "Device to train on.  [default: the best available]", ("cuda", "mps", "cpu"))


def engine_device_option() -> str | None:
    return option(None, "Where to run.  [default: the GPU if llama.cpp has one]", ("cpu", "gpu"))


def context_option() -> int:
    says = "Longest prompt with its answer, in tokens; at most what the model takes."
    return option(DEFAULT_CONTEXT, says, Whole(16, 1_000_000))


def flavor_option() -> str | None:
    return option(None, "Machine of Hugging Face Jobs.  [default: the cheapest that fits and is fast enough]")


def run_dir_option() -> Path | None:
    return option(None, "Folder of the run.  [default: RUN; runs/<run id> for a job's id]", PATH)


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
