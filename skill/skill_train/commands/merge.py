"""`merge`: merges an adapter into its base, tensor by tensor, and checks the result against base + adapter."""

from dataclasses import dataclass
from pathlib import Path

from skill_train.commands._base_model import base_folder, merge_folders, merge_run
from skill_train.commands._command import PATH, argument, command, option, require_only_run
from skill_train.commands._outputs import merge_record_of
from skill_train.core.console import Console, Result
from skill_train.core.errors import UsageError, quoted
from skill_train.run.folder import StepResult, open_run
from skill_train.run.lock import locked_out
from skill_train.run.merge_record import MergeRecord
from skill_train.run.train_record import stops_of


@dataclass(frozen=True)
class MergeOptions:
    run: Path | None = argument(PATH, required=False)
    base: str | None = option(None, "Base model: folder or Hub id. Without RUN.")
    adapter: Path | None = option(None, "Folder of a PEFT LoRA adapter. Without RUN.", PATH)
    out: Path | None = option(None, "Folder for the merged model. Without RUN.  [default with RUN: RUN/merged]", PATH)
    dtype: str | None = option(None, "Stored type.  [default: the base's]", ("float32", "bfloat16", "float16"))
    gate: str = option(
        "auto",
        "What to compare with base + adapter: weights only, or logits too, which runs the model. Auto: logits "
        "up to 250M weights, and for adapters with more than the matrices A and B.",
        ("auto", "weights", "answers"),
    )


@command(
    MergeOptions,
    "skill-train merge runs/first",
    "skill-train merge --base Qwen2.5-0.5B-Instruct --adapter my-adapter --out merged",
)
def merge(options: MergeOptions, console: Console) -> Result:
    """Merge an adapter into its base, tensor by tensor, and check the result against base + adapter."""
    if options.run is None:
        return _merge_folders(options, console)
    require_only_run("merge", {"--base": options.base, "--adapter": options.adapter, "--out": options.out})
    merged = merge_run(console, open_run(options.run), options.dtype, options.gate)
    return _result(merged, options.run / "merged", exported=options.run)


def _merge_folders(options: MergeOptions, console: Console) -> Result:
    if options.base is None or options.adapter is None or options.out is None:
        raise UsageError(
            "merge needs a run, or the options --base, --adapter and --out",
            code="bad_usage",
            expected="skill-train merge RUN, or --base, --adapter and --out",
            hint="skill-train merge --help",
        )
    out = options.out
    if (adapter := options.adapter.resolve()) in out.resolve().parents:
        aside = adapter.with_name(f"{adapter.name}-merged")
        raise UsageError(
            f"{out} is inside the adapter's folder, all of whose files are proven and pushed as the adapter",
            code="bad_usage",
            expected="--out in another folder",
            got=str(out),
            hint=f"--out {quoted(aside)}",
        )
    with locked_out(out, "merge"):
        base = base_folder(options.base)
        from skill_train.merge.named_base import require_named_base
        from skill_train.merge.step import MergeRequest

        require_named_base(base, options.adapter, console.warn)
        request = MergeRequest(
            base=base,
            adapter=options.adapter,
            out=out,
            record=merge_record_of(out),
            rows=(),
            dtype=options.dtype,
            gate=options.gate,
            stops=stops_of(options.adapter),
        )
        merged = merge_folders(console, request)
    return _result(merged, out, exported=out)


def _result(merged: StepResult[MergeRecord], folder: Path, *, exported: Path) -> Result:
    """Builds the answer. `exported` is the run or the folder that the next command exports."""
    record = merged.record
    weights = {name: digest for name, digest in record.outputs.items() if name.endswith(".safetensors")}
    data = {
        "out": str(folder),
        "how": record.how,
        "reasons": record.reasons,
        "changes": record.changes,
        "gate": record.gate,
        "seconds": record.seconds,
        "files": [{"path": str(folder.parent / name), **digest, "quant": None} for name, digest in weights.items()],
        "reused": merged.reused,
    }
    return Result(
        data,
        quiet=str(folder),
        next=[f"skill-train export-gguf {quoted(exported)}"],
        human=lambda rich: rich.print_json(data=data),
    )
