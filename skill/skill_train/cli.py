"""The command line: words and options here, the work in `chain`. Importing it loads none of the heavy libraries."""

from __future__ import annotations

import errno
import functools
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import click

from skill_train.console import Console, Format, Result
from skill_train.errors import EXIT_CODES, DecisionNeeded, SkillTrainError, UsageError, nearest

FORMATS = ("auto", "human", "json", "quiet")
_EXIT_CODES_HELP = "\b\nExit codes:\n" + "\n".join(f"  {code}  {meaning}" for code, meaning in EXIT_CODES.items())


class _Commands(click.Group):
    """Keeps the order of definition and names the nearest command for a wrong one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            ctx.fail(f"no command {args[0]!r}{nearest(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="skill-train", prog_name="skill-train")
def cli() -> None:
    """The fine-tune that proves itself: train a LoRA here or in the cloud, merge it, export it to GGUF, check it."""


def main(argv: list[str] | None = None) -> None:
    """The console script. Every known error becomes one message and its exit code, here and nowhere else."""
    # Read once, when torch or llama.cpp is loaded: threads that spin while they wait slow a busy machine 10 times.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for name in ("HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK"):
        os.environ[name] = "1"
    arguments = sys.argv[1:] if argv is None else argv
    command = next((a for a in arguments if not a.startswith("-")), "skill-train")
    console = Console(_format_in(arguments), command)
    try:
        code = cli.main(arguments, prog_name="skill-train", standalone_mode=False)
    except SkillTrainError as error:
        code = console.error(error)
    except click.ClickException as error:
        hint = f"skill-train {command} --help" if command in cli.commands else "skill-train --help"
        code = console.error(UsageError(error.format_message(), code="bad_usage", hint=hint))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        code = 141
    except (KeyboardInterrupt, click.exceptions.Abort):
        code = console.error(
            _Interrupted("interrupted", code="interrupted", hint=shlex.join(["skill-train", *arguments]))
        )
    except OSError as error:
        code = console.error(_system_error(error))
    except Exception as error:  # the one boundary: a bug keeps its traceback, and a program still gets an envelope
        import traceback

        traceback.print_exc()
        code = console.error(_Bug(f"{type(error).__name__}: {error}", code="bug", hint="report it, with the traceback"))
    sys.exit(code if isinstance(code, int) else 0)


class _Interrupted(SkillTrainError):
    exit_code = 130


class _Bug(SkillTrainError):
    exit_code = 1


def _format_in(arguments: list[str]) -> Format:
    """The format that was asked for, for errors that come before the options are parsed."""
    for position, argument in enumerate(arguments):
        value = argument.removeprefix("--format=") if argument.startswith("--format=") else None
        if argument == "--format" and position + 1 < len(arguments):
            value = arguments[position + 1]
        if value in FORMATS:
            return cast(Format, value)
    return "auto"


def _system_error(error: OSError) -> SkillTrainError:
    """Disk full, read-only, no permission: the user's to mend, with the path that it happened at."""
    where = f": {error.filename}" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DecisionNeeded(
            f"no space left on the disk{where}",
            code="no_disk",
            expected="free space for the result",
            hint="free some space, then run the same command again",
        )
    return UsageError(
        f"{error.strerror or error}{where}",
        code="system_error",
        got=str(error.filename or ""),
        hint="check the path, its permissions and the free space, then run the same command again",
    )


def command(name: str, *, examples: tuple[str, ...]) -> Callable[[Callable[..., Result]], click.Command]:
    """A command whose function takes a Console first and returns a Result."""

    def wrap(function: Callable[..., Result]) -> click.Command:
        @functools.wraps(function)
        def run(format_: str, **options: Any) -> int:
            console = Console(cast(Format, format_), name)
            return console.result(function(console, **options))

        run.__doc__ = f"{function.__doc__}\n\n\b\nExamples:\n" + "\n".join(f"  {line}" for line in examples)
        with_format = click.option(
            "--format",
            "format_",
            type=click.Choice(FORMATS),
            default="auto",
            show_default=True,
            help="auto is human on a terminal and json otherwise.",
        )(run)
        return cli.command(name, epilog=_EXIT_CODES_HELP)(with_format)

    return wrap


PATH = click.Path(path_type=Path)
_RUN = click.argument("run", type=PATH)


@command(
    "data",
    examples=(
        "skill-train data tickets.jsonl",
        "skill-train data tickets.csv --model Qwen/Qwen2.5-0.5B-Instruct --fix tickets.fixed.jsonl",
    ),
)
@click.argument("dataset", required=False)
@click.option("--recipe", type=PATH, help="Recipe with a mapping to try (format, columns); DATASET may be left out.")
@click.option("--model", help="Count tokens with this model's tokenizer and template: folder or Hub id.")
@click.option(
    "--method",
    type=click.Choice(("sft", "dpo", "kto", "grpo", "reward")),
    default="sft",
    show_default=True,
    help="Method that must be able to use it; only sft is trained here.",
)
@click.option("--split", help="Part of the dataset, such as train[:500].  [default: train]")
@click.option("--max-length", type=click.IntRange(min=2), help="Longest row, in tokens.  [default: 1024]")
@click.option("--fix", type=PATH, help="New .jsonl file for the usable rows, mapped. The dataset is only read.")
def data(console: Console, **options: Any) -> Result:
    """Say what format a dataset has, which methods can use it, and which rows training would refuse."""
    from skill_train import chain_data

    return chain_data.data(console, **options)


def recipe_options(function: Callable[..., Result]) -> Callable[..., Result]:
    """What `plan` and `local` take alike."""
    options = (
        click.option("--model", help="Base model: folder or Hub id."),
        click.option("--data", help="Dataset: file, folder or Hub id."),
        click.option("--split", help="Part of the dataset, such as train[:500].  [default: train]"),
        click.option("--max-steps", type=click.IntRange(min=1), help="Optimizer steps.  [default: one epoch]"),
        click.option("--max-length", type=click.IntRange(min=2), help="Longest row, in tokens.  [default: 1024]"),
        click.option(
            "--device", type=click.Choice(("cuda", "mps", "cpu")), help="Where to train.  [default: the best here]"
        ),
        click.option(
            "--dtype",
            type=click.Choice(("float32", "bfloat16", "float16")),
            help="Precision.  [default: by device, with its reason]",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


@command(
    "plan",
    examples=(
        "skill-train plan --model Qwen/Qwen2.5-7B-Instruct --data tickets.jsonl",
        "skill-train plan recipe.yaml --where cloud --max-hours 2 --out plan.json",
    ),
)
@click.argument("recipe", type=PATH, required=False)
@recipe_options
@click.option("--where", type=click.Choice(("local", "cloud")), help="Overrides the rules.  [default: they decide]")
@click.option("--flavor", help="Machine of Hugging Face Jobs.  [default: the cheapest that fits and is in time]")
@click.option(
    "--max-hours",
    type=click.FloatRange(min=0, min_open=True),
    default=8.0,
    show_default=True,
    help="Longest run, in hours: a longer one here goes to the cloud.",
)
@click.option("--out", type=PATH, help="File for the plan; `skill-train local PLAN` runs it.")
def plan(console: Console, **options: Any) -> Result:
    """Decide whether to train here or in the cloud, with memory, time, cost and reasons; spends nothing.

    RECIPE is a recipe file, or the folder of a run, whose estimates are then shown beside what was measured.
    """
    from skill_train import chain_plan

    return chain_plan.plan(console, **options)


@command(
    "local",
    examples=(
        "skill-train local --model Qwen/Qwen2.5-0.5B-Instruct --data tickets.jsonl --max-steps 50 --run-dir runs/first",
        "skill-train local recipe.yaml",
    ),
)
@click.argument("recipe", type=PATH, required=False)
@recipe_options
@click.option(
    "--force", is_flag=True, help="Take what is known to fail: a --dtype that ends in NaN, too little memory."
)
@click.option("--run-dir", type=PATH, help="Folder of the run.  [default: runs/<data>-<recipe hash>]")
@click.option("--resume", is_flag=True, help="Go on from the newest complete checkpoint in --run-dir.")
def local(console: Console, **options: Any) -> Result:
    """Train a LoRA adapter on this machine and end with a smoke verdict. RECIPE is a recipe file or a plan."""
    from skill_train import chain

    return chain.local(console, **options)


@command(
    "merge",
    examples=(
        "skill-train merge runs/first",
        "skill-train merge --base Qwen2.5-0.5B-Instruct --adapter my-adapter --out merged",
    ),
)
@click.argument("run", type=PATH, required=False)
@click.option("--base", help="Base model: folder or Hub id. Without RUN.")
@click.option("--adapter", type=PATH, help="Folder of a PEFT LoRA adapter. Without RUN.")
@click.option("--out", type=PATH, help="Folder for the merged model. Without RUN.  [default with RUN: RUN/merged]")
@click.option(
    "--dtype", type=click.Choice(("float32", "bfloat16", "float16")), help="Stored type.  [default: the base's]"
)
def merge(console: Console, **options: Any) -> Result:
    """Merge an adapter into its base, tensor by tensor, and check the result against base + adapter."""
    from skill_train import chain

    return chain.merge(console, **options)


@command(
    "export-gguf",
    examples=(
        "skill-train export-gguf runs/first --quant q8_0,q4_k_m",
        "skill-train export-gguf merged-model-folder --out gguf --quant q6_k",
    ),
)
@click.argument("run", type=PATH, required=False)
@click.option(
    "--quant",
    default="q8_0,q4_k_m",
    show_default=True,
    help="Types, with commas; f16, bf16 or f32 chooses the unquantized file.",
)
@click.option(
    "--out", type=PATH, help="Folder for the files of a model folder.  [default: FOLDER-gguf; with a run RUN/gguf]"
)
@click.option("--lora", is_flag=True, help="Export the adapter alone, for use beside a GGUF of its base.")
@click.option("--llama-cpp", type=PATH, help="A llama.cpp checkout to convert with.  [default: fetched once, cached]")
@click.option("--fetch", is_flag=True, help="Fetch the converter into the cache; with no RUN, do only that.")
def export_gguf(console: Console, **options: Any) -> Result:
    """Convert a run, or a model folder, to GGUF and quantize it. Merges first when that is not done."""
    from skill_train import chain_gguf

    return chain_gguf.export_gguf(console, **options)


@command(
    "verify",
    examples=(
        "skill-train verify runs/first",
        "skill-train verify --reference merged-model-folder --gguf model-q4_k_m.gguf",
    ),
)
@click.argument("run", type=PATH, required=False)
@click.option("--reference", help="Model that the files must equal: folder or Hub id. Without RUN.")
@click.option("--base", help="Model before the fine-tune, to show which of both the file is. Without RUN.")
@click.option("--gguf", type=PATH, multiple=True, help="File to check; repeat for more. Without RUN.")
@click.option(
    "--tokens", type=click.IntRange(min=16), default=2048, show_default=True, help="Tokens to compare, at most."
)
@click.option("--out", type=PATH, help="File for the proof.  [default: RUN/verify.json, or beside the first GGUF]")
def verify(console: Console, **options: Any) -> Result:
    """Check each GGUF against the model that was trained: file, tokens, template, logits, answers."""
    from skill_train import chain_gguf

    return chain_gguf.verify(console, **options)


@command("demo", examples=("skill-train demo", "skill-train demo --run-dir runs/demo --format json"))
@click.option("--run-dir", type=PATH, default=Path("runs/demo"), show_default=True, help="Folder of the run.")
def demo(console: Console, **options: Any) -> Result:
    """Run the whole chain on an embedded model and dataset, offline, and show each stage with its proof."""
    from skill_train import demo as program

    return program.demo(console, **options)


@command("doctor", examples=("skill-train doctor", "skill-train doctor --self-test --format json"))
@click.option("--self-test", is_flag=True, help="Run the chain on the embedded model too, offline: about a minute.")
def doctor(console: Console, **options: Any) -> Result:
    """Check this installation: versions, accelerator, memory, disk, token, converter; each problem with its remedy."""
    from skill_train import doctor as program

    return program.doctor(console, **options)
