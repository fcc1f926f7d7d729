"""The command line: its commands in the order of `--help`, and the one place where an error becomes an exit code.

Importing it imports no command.
"""

from __future__ import annotations

import atexit
import io
import os
import shlex
import signal
import sys
import threading
from contextlib import suppress
from importlib import import_module
from typing import cast

import click

from skill_train.commands._command import FORMATS, Commands
from skill_train.core import waiting
from skill_train.core.console import Console, Format, ReaderGone, silence
from skill_train.core.errors import Interrupted, SkillTrainError, UsageError, out_of_memory, system_error
from skill_train.core.secrets import refuse_in_arguments
from skill_train.program.events import seek_cycles_seldom

# In the order of the help page: the module in commands/, and the first sentence of its help.
COMMANDS = {
    "data": "Show the format of a dataset, the methods that can use it, and the rows that training would reject.",
    "plan": "Decide whether to train here or in the cloud, and estimate memory, time and cost; spends nothing.",
    "local": "Train an adapter or all weights here and end with a smoke verdict.",
    "submit": "Run a recipe, a plan or a local run as a Hugging Face job; without --yes only show cost and uploads.",
    "status": "Show a run's progress, its cost so far, the time it still needs, and why it failed.",
    "logs": "Show the log of a job, and reconnect when the connection breaks.",
    "wait": "Wait until a job has ended; exit 0 if it completed, otherwise explain why it failed.",
    "cancel": "Cancel a job.",
    "pull": "Fetch the adapter and the records of a job, with their digests checked, for merge and export.",
    "resume": "Start a new job that continues from the newest checkpoint, with the same recipe.",
    "diff": "Compare two runs: the recipes must be equal, the machines may differ.",
    "merge": "Merge an adapter into its base, tensor by tensor, and check the result against base + adapter.",
    "export-gguf": "Convert a run, or a model folder, to GGUF and quantize it.",
    "verify": "Check each GGUF file against the trained model: file, tokens, template, logits and answers.",
    "bench": "Measure how many tokens a second GGUF files read and write here; `plan` and `--for here` then use it.",
    "evaluate": "Measure the base model, the tuned model and GGUF files on held-out rows, with confidence intervals.",
    "chat": "Talk to a model of a run or a GGUF file, in a terminal or once with --prompt; compare two side by side.",
    "serve": "Serve a GGUF file on this machine with OpenAI's protocol, its own template and the model's sampling.",
    "report": "Write an HTML page about one run, or about several runs side by side.",
    "push": "Push a run's adapter, merged model or GGUF files to the Hub, with a model card that contains the proof.",
    "demo": "Run the whole chain on an embedded model and dataset, offline, and show each stage with its proof.",
    "doctor": "Check this installation and say how to fix each problem: versions, accelerator, memory, disk, token.",
    "skills": "Install this skill for coding agents, and check whether the installed copies are current.",
}
GROUPS = frozenset({"skills"})
_END = (signal.SIGTERM, signal.SIGHUP)


class _LazyCommands(Commands):
    """Imports the module of a command only when the command is called. The help page imports none."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        return cast(click.Command, getattr(import_module(f"skill_train.commands.{name}"), name))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        limit = formatter.width - 6 - max(map(len, COMMANDS))  # as click.Group has it
        rows = [(name, click.Command(name, help=text).get_short_help_str(limit)) for name, text in COMMANDS.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@click.group(cls=_LazyCommands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="skill-train", prog_name="skill-train")
def cli() -> None:
    """The fine-tune that proves itself: train a LoRA here or in the cloud, merge it, export it to GGUF, verify it."""


def _make_ready() -> None:
    """Makes the standard streams safe to write to. A shell can close any of them (`>&-`). Python then has None for that
    stream, and the next file that is opened gets its file descriptor. `kill`, or closing the terminal, then ends a
    command as Ctrl-C does."""
    seek_cycles_seldom()
    with suppress(ValueError):  # only the main thread of a program may say so
        for number in _END:
            if signal.getsignal(number) is signal.SIG_DFL:  # `nohup` ignores one
                signal.signal(number, signal.default_int_handler)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _not_lost
        sys.meta_path.insert(0, _NumpyFirst())
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does, for an encoding other than UTF-8


class _NumpyFirst:
    """Imports numpy before torch's C code, which imports it and drops a Ctrl-C that comes meanwhile."""

    def find_spec(self, fullname: str, path: object, target: object = None, /) -> None:
        if fullname == "torch._C":
            with suppress(ImportError):
                import_module("numpy")


def _not_lost(ignored: sys.UnraisableHookArgs) -> None:
    """Python ignores what is raised in a finalizer, and there are many. Ctrl-C comes again, after it."""
    if ignored.exc_type is KeyboardInterrupt:
        threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(ignored)


def main(argv: list[str] | None = None) -> None:
    """The console script. Only this function turns errors into a message and an exit code."""
    _make_ready()
    # OpenMP reads this once, when torch or llama.cpp is loaded: threads that spin make a busy machine 10 times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for name in ("HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK"):
        os.environ[name] = "1"
    arguments = sys.argv[1:] if argv is None else argv
    command = _command_in(arguments) or "skill-train"
    console = Console(_format_in(arguments), command)
    try:
        refuse_in_arguments(arguments)
        with waiting.of_command(console.status, ["skill-train", *arguments]):
            code = cli.main(arguments, prog_name="skill-train", standalone_mode=False)
    except SkillTrainError as error:
        code = console.error(error)
    except click.ClickException as error:
        code = console.error(_bad_usage(error, _command_words(arguments)))
    except ReaderGone:
        code = _unread()
    except SystemExit as end:  # click exits with code 1 when the reader of its help page closes the pipe
        code = _unread() if type(sys.stdout).__name__.endswith("PacifyFlushWrapper") else end.code
    except (KeyboardInterrupt, click.exceptions.Abort):
        code = console.error(
            Interrupted("interrupted", code="interrupted", hint=shlex.join(["skill-train", *arguments]))
        )
    except OSError as error:
        code = console.error(out_of_memory(error) or system_error(error))
    except Exception as error:  # a bug keeps its traceback, and a program still gets a JSON envelope
        code = console.error(out_of_memory(error) or _odd_path(error) or _bug(error))
    # The output is complete. Python with torch takes a while to exit; a signal then must not change the exit code.
    for number in (signal.SIGINT, *_END):
        atexit.register(signal.signal, number, signal.SIG_IGN)
    sys.exit(code if isinstance(code, int) else 0)


def _unread() -> int:
    silence()
    return 141  # the exit code that a shell reports: 128 + SIGPIPE


def _bad_usage(error: click.ClickException, command: list[str]) -> UsageError:
    """Converts click's error. If the unknown option is a field of a recipe, the hint says how to set that field."""
    hint = " ".join(["skill-train", *command, "--help"])
    if isinstance(error, click.NoSuchOption) and command in (["plan"], ["local"], ["submit"]):
        from skill_train.recipe.fields import FIELDS

        field = error.option_name.lstrip("-").replace("-", "_")
        if field in FIELDS:
            hint = (
                f"write a recipe file with the lines model: …, data: … and {field}: …, and give it as RECIPE "
                "(all fields: references/recipe.md)"
            )
    return UsageError(error.format_message(), code="bad_usage", hint=hint)


def _command_in(arguments: list[str]) -> str:
    """The command in the arguments, with its group. The command may not exist."""
    words = [argument for argument in arguments if not argument.startswith("-")]
    return " ".join(words[: 1 + (words[0] in GROUPS)]) if words else ""


def _command_words(arguments: list[str]) -> list[str]:
    """The words of the command in the arguments, up to the first one that names no command."""
    group: click.Command | None = cli
    words = []
    for word in _command_in(arguments).split():
        group = group.get_command(click.Context(group), word) if isinstance(group, click.Group) else None
        if group is None:
            break
        words.append(word)
    return words


def _format_in(arguments: list[str]) -> Format:
    """The value of `--format`, for errors that occur before click has parsed the options."""
    for position, argument in enumerate(arguments):
        value = argument.removeprefix("--format=") if argument.startswith("--format=") else None
        if argument == "--format" and position + 1 < len(arguments):
            value = arguments[position + 1]
        if value in FORMATS:
            return cast(Format, value)
    return "auto"


def _odd_path(error: Exception) -> SkillTrainError | None:
    """The error for a path problem that is no `OSError`: a loop of links (3.11), no home, a name not in UTF-8."""
    words = str(error)
    if isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":
        wrong, expected, hint = "a name or a text is not UTF-8", "names in UTF-8", "rename what `got` shows"
        got = ascii(error.object[max(0, error.start - 60) : error.end + 60])
    elif isinstance(error, RuntimeError) and words.startswith("Symlink loop"):
        wrong, expected = "a symbolic link points back to itself", "a path without a loop of links"
        got, hint = words.removeprefix("Symlink loop from "), "remove the link, or give another path"
    elif isinstance(error, RuntimeError) and words == "Could not determine home directory.":
        wrong, expected = "there is no home: HOME is not set, and the system does not know this user", "a home"
        got, hint = "neither", "set it to a folder that you may write to: export HOME=/tmp"
    else:
        return None
    return UsageError(wrong, code="system_error", expected=expected, got=got, hint=hint)


def _bug(error: Exception) -> SkillTrainError:
    import traceback

    with suppress(OSError):  # a full disk under stderr
        traceback.print_exc()
    return SkillTrainError(
        f"{type(error).__name__}: {error}",
        code="bug",
        hint="this is a bug in skill-train: report it with the traceback",
    )
