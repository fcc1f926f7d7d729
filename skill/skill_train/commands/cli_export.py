"""Commands after training, and of the installation: words and options only; the composers do the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from skill_train.commands._frame import MOST_COUNTED, PATH, command
from skill_train.core.console import Console, Result


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
@click.option(
    "--gate",
    type=click.Choice(("auto", "weights", "answers")),
    default="auto",
    show_default=True,
    help="What is compared with base + adapter: each weight, or logits too, for which the model is run. Auto: logits "
    "up to 250M weights, and of adapters that are more than A and B.",
)
def merge(console: Console, **options: Any) -> Result:
    """Merge an adapter into its base, tensor by tensor, and check the result against base + adapter."""
    from skill_train.commands import chain

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
    from skill_train.commands import chain_gguf

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
    "--tokens",
    type=click.IntRange(16, MOST_COUNTED),
    help="Tokens to compare, at most.  [default: 2048; 256 above 250M weights]",
)
@click.option("--out", type=PATH, help="File for the proof.  [default: RUN/verify.json, or beside the first GGUF]")
def verify(console: Console, **options: Any) -> Result:
    """Check each GGUF against the model that was trained: file, tokens, template, logits, answers."""
    from skill_train.commands import chain_gguf

    return chain_gguf.verify(console, **options)


@command(
    "evaluate",
    examples=(
        "skill-train evaluate runs/first",
        "skill-train evaluate runs/first --rows 50 --scorer my_scorer.py",
    ),
)
@click.argument("run", type=PATH)
@click.option("--gguf", type=PATH, multiple=True, help="GGUF file; repeat for more.  [default: all in RUN/gguf]")
@click.option(
    "--rows",
    type=click.IntRange(1, MOST_COUNTED),
    default=100,
    show_default=True,
    help="Held-out rows, at most; evenly over the file.",
)
@click.option(
    "--score",
    type=click.Choice(("exact", "regex", "json")),
    help="Score beside exact match: the same match of --pattern, or valid JSON.  [default: the recipe's]",
)
@click.option("--pattern", help="Regular expression of --score regex; its first group (or the whole) is compared.")
@click.option("--scorer", type=PATH, help="Your own: a Python file with score(prompt, answer, expected) -> float.")
@click.option(
    "--backend",
    type=click.Choice(("auto", "transformers", "vllm")),
    default="auto",
    show_default=True,
    help="For model folders; auto takes vllm on CUDA where it is installed.",
)
def evaluate(console: Console, **options: Any) -> Result:
    """Measure base, tuned model and GGUF files on rows that never trained, with intervals. Judges nothing."""
    from skill_train.commands import chain_evaluate

    return chain_evaluate.evaluate(console, **options)


@command(
    "report",
    examples=("skill-train report runs/first", "skill-train report runs/first runs/second --out compared.html"),
)
@click.argument("runs", type=PATH, nargs=-1, required=True)
@click.option("--out", type=PATH, help="File for the page.  [default: report.html in the first run]")
def report(console: Console, **options: Any) -> Result:
    """Write one HTML page about a run, or about several side by side. It opens from disk and loads nothing."""
    from skill_train.commands import chain_report

    return chain_report.report(console, **options)


@command(
    "push",
    examples=(
        "skill-train push runs/first --repo me/tickets-0.5b --dry-run",
        "skill-train push runs/first --repo me/tickets-0.5b --part gguf --public",
    ),
)
@click.argument("run", type=PATH)
@click.option("--repo", help="Repository on the Hub, NAMESPACE/NAME.  [default: the recipe's hub_model_id]")
@click.option(
    "--part",
    type=click.Choice(("gguf", "adapter", "merged")),
    multiple=True,
    help="What to push; repeat for more.  [default: the GGUF files and the adapter]",
)
@click.option(
    "--include",
    multiple=True,
    help="A further file of what is pushed, of a kind that is left out: a program, say.",
)
@click.option("--public", is_flag=True, help="Make a new repository public; it is private otherwise.")
@click.option("--dry-run", is_flag=True, help="List files and sizes; send nothing.")
def push(console: Console, **options: Any) -> Result:
    """Push a run's adapter, merged model or GGUF files to the Hub, with a model card that carries the proof."""
    from skill_train.commands import push as program

    return program.push(console, **options)


@command("demo", examples=("skill-train demo", "skill-train demo --run-dir runs/demo --format json"))
@click.option("--run-dir", type=PATH, default=Path("runs/demo"), show_default=True, help="Folder of the run.")
def demo(console: Console, **options: Any) -> Result:
    """Run the whole chain on an embedded model and dataset, offline, and show each stage with its proof."""
    from skill_train.commands import demo as program

    return program.demo(console, **options)


@command("doctor", examples=("skill-train doctor", "skill-train doctor --self-test --format json"))
@click.option("--self-test", is_flag=True, help="Run the chain on the embedded model too, offline: about a minute.")
def doctor(console: Console, **options: Any) -> Result:
    """Check this installation: versions, accelerator, memory, disk, token, converter; each problem with its remedy."""
    from skill_train.commands import doctor as program

    return program.doctor(console, **options)
