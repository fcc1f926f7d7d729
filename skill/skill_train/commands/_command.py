"""The parts of a command: a function, a dataclass of options whose fields are declared for click, and a result that is
printed. Also the options and the types of values that several commands share."""

import dataclasses
import functools
import inspect
import math
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, field
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from skill_train.core.console import Console, Format, Result
from skill_train.core.errors import EXIT_CODES, UsageError, in_hints, nearest, quoted

DEFAULT_CONTEXT = 4096  # tokens
FORMATS = ("auto", "human", "json", "quiet")
_EXIT_CODES_HELP = "\b\nExit codes:\n" + "\n".join(f"  {code}  {meaning}" for code, meaning in EXIT_CODES.items())

_UNCLEAR = (
    "{} is an unfinished result of another machine or container, or from before a restart. It was kept, "
    "because a process there may still write it; remove it if none does"
)

Options = TypeVar("Options")
Value = TypeVar("Value")


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
    options_class: type[Options], *examples: str, name: str | None = None
) -> Callable[[Callable[[Options, Console], Result]], click.Command]:
    """Declares a command. Its function takes its options and a Console, and returns a Result. The fields of the
    dataclass are made with `option` and `argument`, in the order of the help page. `name` is the name with its group;
    the default is the name of the function."""

    def wrap(function: Callable[[Options, Console], Result]) -> click.Command:
        full_name = name or function.__name__.replace("_", "-")

        @functools.wraps(function)
        def run(format_: str, **parameters: Any) -> int:
            from skill_train.core.files import left_alone  # the help page need not load it

            console = Console(cast(Format, format_), full_name)
            options = options_class(**parameters)
            try:
                with _run_in_hints(options):
                    result = function(options, console)
            finally:
                for part in left_alone():
                    console.warn("part_left_alone", _UNCLEAR.format(part))
            return console.result(result)

        run.__doc__ = f"{inspect.getdoc(function)}\n\n\b\nExamples:\n" + "\n".join(f"  {line}" for line in examples)
        return click.command(full_name.split()[-1], params=_parameters(options_class), epilog=_EXIT_CODES_HELP)(run)

    return wrap


def _parameters(options_class: type[Any]) -> list[click.Parameter]:
    help_text = "auto is human on a terminal and json otherwise; quiet prints one value."
    kind = click.Choice(FORMATS)
    format_ = click.Option(["--format", "format_"], type=kind, default="auto", show_default=True, help=help_text)
    return [format_, *(field.metadata["click"](field.name) for field in dataclasses.fields(options_class))]


def _run_in_hints(options: object) -> AbstractContextManager[None]:
    """Replaces RUN in hints by the run that the user gave. The packages below do not know it, and write RUN."""
    run = getattr(options, "run", getattr(options, "model", None))
    is_run = isinstance(run, Path) and (run / "plan.json").is_file()
    return in_hints(" RUN", f" {quoted(run)}") if is_run else nullcontext()


# --- Types of values ---


class PathArgument(click.Path):
    """A path that is not empty, and that no command mistakes for an option. click reads an empty text (an unset
    variable) as the current folder, and `cancel "$RUN"` must not cancel the job of that folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("an empty path; is a variable of the shell not set?", param, ctx)
        # Path turns `./-run` into `-run`, which the next command would read as an option.
        dashed = os.path.normpath(value).startswith("-")
        return super().convert(os.path.abspath(value) if dashed else value, param, ctx)


PATH, RUN = PathArgument(path_type=Path), PathArgument(path_type=str)  # RUN may be a path or an id
MOST_COUNTED, MOST_DOLLARS, MOST_HOURS = 1_000_000, 1_000_000, 24 * 365

Whole = click.IntRange


class Number(click.FloatRange):
    """A range without NaN. click 8 accepts NaN in every range, because no comparison with NaN is true."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


DOLLARS = Number(min=0, min_open=True, max=MOST_DOLLARS)
AGREED = "Dollars that the user agreed to: with --yes, a job that may cost more is only shown."
HOURS = Number(min=0, min_open=True, max=MOST_HOURS)
BITS = Number(min=2, max=9)  # per weight
DIVERGENCE = Number(min=0, min_open=True, max=100)  # nats


# --- Options ---


def option(
    default: Value, help_text: str, kind: click.ParamType[Any] | tuple[str, ...] | None = None, **settings: Any
) -> Value:
    """A field of a command's options, with the option of click that sets it.

    The default False makes the option a flag, and an empty tuple makes it repeatable. The help shows any other default.
    For the default None, `help_text` states the value. A tuple as `kind` is the list of allowed words.
    """
    if default is False:
        settings["is_flag"] = True
    elif default == ():
        settings["multiple"] = True
    elif default is not None:
        settings |= {"default": default, "show_default": True}
    type_ = click.Choice(kind) if isinstance(kind, tuple) else kind

    def declared(name: str) -> click.Parameter:
        return click.Option([option_of(name), name], type=type_, help=help_text, **settings)

    return field(default=default, metadata={"click": declared})


def argument(kind: click.ParamType[Any] | None = None, *, required: bool = True, **settings: Any) -> Any:
    """A field of a command's options, with the argument of click that sets it."""

    def declared(name: str) -> click.Parameter:
        return click.Argument([name], type=kind, required=required, **settings)

    return field(default=MISSING if required else None, metadata={"click": declared})


def engine_device_option() -> str | None:
    return option(None, "Where to run.  [default: the GPU if llama.cpp has one]", ("cpu", "gpu"))


def context_option() -> int:
    help_text = "Longest prompt with its answer, in tokens; at most what the model takes."
    return option(DEFAULT_CONTEXT, help_text, Whole(16, 1_000_000))


def run_dir_option() -> Path | None:
    return option(None, "Folder of the run.  [default: RUN; runs/<run id> for a job's id]", PATH)


def set_options(options: object, names: tuple[str, ...]) -> dict[str, object]:
    """The options among `names` that the user set, by name."""
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def option_of(name: str) -> str:
    """The name of the option that sets a field."""
    return "--for" if name == "for_device" else f"--{name.replace('_', '-')}"


def words_of(command: str, recipe: Path | None, values: Mapping[str, object]) -> list[str]:
    """The words of a command line; options whose value is None are left out."""
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
