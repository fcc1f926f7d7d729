"""`demo`: all steps on the embedded model: train, merge, export and verify, with a table of results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec

from skill_train.commands import evaluate, export_gguf, local, verify
from skill_train.commands._base_model import base_of
from skill_train.commands._drawing import rich_table
from skill_train.commands._frame import command
from skill_train.commands._merging import merge_run
from skill_train.commands._options import PATH
from skill_train.commands._shell import quoted
from skill_train.core import resources
from skill_train.core.console import Console, Result
from skill_train.core.digests import FileDigest, digests
from skill_train.core.errors import VerificationFailed
from skill_train.core.units import megabytes
from skill_train.evaluate.backends import Model
from skill_train.evaluate.figures import figures
from skill_train.evaluate.scores import Scoring
from skill_train.evaluate.step import ROOM, measure, questions
from skill_train.reference.load import load_tokenizer
from skill_train.run import demo_record, export_record, records, verify_record
from skill_train.run.demo_record import Demo, DemoFigures, Stage
from skill_train.run.evaluate_record import ModelFigures, spread
from skill_train.run.export_record import ExportedFile
from skill_train.run.folder import RunDir
from skill_train.run.merge_record import MergeRecord
from skill_train.run.records import Verdict
from skill_train.run.train_record import TrainRecord, read_rows
from skill_train.run.verify_record import Proof
from skill_train.verify.check import worst

QUANTS = "f16,q8_0,q4_k_m"
LEARNED = 0.9  # share of held-out rows that every stage after training must answer to the letter
NOT_KNOWN = 0.1  # and the base must not


@dataclass(frozen=True)
class DemoOptions:
    run_dir: Path = Path("runs/demo")


@dataclass(frozen=True)
class _Chain:
    """The records of the steps; `exported` has the GGUF files by their names in the run."""

    trained: TrainRecord
    merged: MergeRecord
    exported: dict[str, ExportedFile]
    proof: Proof


def run(options: DemoOptions, console: Console) -> Result:
    """Runs all steps in `run_dir`; reuses what an earlier call finished."""
    folder = RunDir(options.run_dir)
    chain = _chain(console, folder)
    table = _recorded(folder) or _table(console, folder, chain)
    records.write(
        folder.record("demo"), Demo(inputs=_inputs(folder), figures=DemoFigures(table), finished_at=records.timestamp())
    )
    following = [
        f"skill-train evaluate {quoted(options.run_dir)}",
        "skill-train local --model MODEL --data DATA --max-steps 50",
    ]
    return Result(
        {"run_dir": str(options.run_dir), "stages": msgspec.to_builtins(table), "verdict": chain.proof.verdict},
        human=lambda rich: draw_stages(rich, table),
        quiet=str(options.run_dir),
        next=following,
        error=_missed(table, folder),
    )


def _chain(console: Console, run: RunDir) -> _Chain:
    from skill_train.llama import get_converter

    with console.progress("finding the converter") as progress:
        tools = get_converter.find_or_fetch(progress=progress)
    plan = local.plan_of(console, resources.demo() / "recipe.yaml")
    trained = local.train_run(console, run, plan, resume=True).record
    merged = merge_run(console, run).record
    export_gguf.export_run(console, run, QUANTS, tools)
    exported = {name: file for step in ("convert", "quantize") for name, file in _outputs(run, step).items()}
    verify.verify_run(console, run, 2048)
    return _Chain(trained, merged, exported, verify_record.read(run.record("verify")))


def _outputs(run: RunDir, step: str) -> dict[str, ExportedFile]:
    return export_record.read(run.record(step)).outputs


def _inputs(run: RunDir) -> dict[str, FileDigest]:
    return digests(run.path, [run.record(step) for step in ("train", "merge", "verify")])


def _recorded(run: RunDir) -> list[Stage] | None:
    """The table of an earlier call, if its inputs have not changed."""
    earlier = demo_record.read(run.record("demo")) if run.record("demo").is_file() else None
    return earlier.figures.stages if earlier is not None and earlier.inputs == _inputs(run) else None


def _table(console: Console, run: RunDir, chain: _Chain) -> list[Stage]:
    base = base_of(run)
    evaluation = evaluate.evaluate_run(evaluate.EvaluateOptions(run.path), console, Scoring()).record
    figures_by_model = {model.name: model for model in evaluation.models}
    gate = chain.merged.gate
    stages = [
        _row("base", _bytes(base), figures_by_model["base"], None, None),
        _row("adapter", _bytes(run.adapter), _adapter(console, run, base), None, chain.trained.verdict),
        _row("merged", _bytes(run.merged), figures_by_model["tuned"], gate["figures"].get("mean_kl"), gate["verdict"]),
    ]
    for path, file in chain.exported.items():
        name = Path(path).name
        stages.append(_row(file["quant"], file["bytes"], figures_by_model[name], *_proven(chain.proof, name)))
    return stages


def _adapter(console: Console, run: RunDir, base: Path) -> ModelFigures:
    """The figures of base + adapter, which `evaluate` leaves out after the merge."""
    rows = spread(read_rows(run.held_out), evaluate.ROWS)
    asked = questions(rows, loss_on="assistant", room=ROOM, context=None)
    tuned, tokenizer = Model("adapter", base, run.adapter), load_tokenizer(base)
    with console.progress("asking the adapter") as progress:
        measured = measure(
            tuned, asked, tokenizer=tokenizer, scoring=Scoring(), backend="transformers", progress=progress
        )
    return figures(measured, asked)


def _row(stage: str, size: int, model_figures: ModelFigures, kl: float | None, verdict: Verdict | None) -> Stage:
    assert model_figures.exact_match is not None  # each row of the demo asks
    return Stage(
        stage=stage,
        bytes=size,
        exact_match=round(model_figures.exact_match, 4),
        rows=model_figures.asked_rows,
        mean_kl=kl,
        tokens_per_second=model_figures.tokens_per_second,
        verdict=verdict,
    )


def _proven(proof: Proof, name: str) -> tuple[float | None, Verdict]:
    """The mean KL to the trained model, and the worst verdict, of one file."""
    checks = [check for check in proof.checks if check.file == name]
    distances = (check.figures.get("trained_kl") for check in checks)
    kl = next((figure for figure in distances if isinstance(figure, (int, float))), None)
    return kl, worst(check.verdict for check in checks)


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _missed(table: list[Stage], run: RunDir) -> VerificationFailed | None:
    """The stages without the expected result: unknown before the training, learned after it, and kept in every file."""
    base, after = table[0], table[1:]
    bad = [base] if base.exact_match > NOT_KNOWN else []
    bad += [row for row in after if row.exact_match < LEARNED or row.verdict == "fail"]
    if not bad:
        return None
    return VerificationFailed(
        f"the stage {bad[0].stage} does not hold what the demo promises",
        code="self_test_failed",
        expected=f"exact match at most {NOT_KNOWN:.0%} before, at least {LEARNED:.0%} after, and no failed check",
        got=f"exact match {bad[0].exact_match:.0%}, verdict {bad[0].verdict}",
        hint=f"skill-train verify {quoted(run.path)}",
    )


# --- The drawing ---


def draw_stages(rich: Any, table: list[Stage]) -> None:
    rows = table[0].rows
    drawn = rich_table("stage", "size", f"exact match ({rows} held out)", "KL to trained", "tokens/s", "verdict")
    for row in table:
        kl = "" if row.mean_kl is None else f"{row.mean_kl:.1e}"
        speed = "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}"
        cells = (row.stage, megabytes(row.bytes, 2), f"{row.exact_match:.1%}", kl, speed)
        drawn.add_row(*cells, row.verdict or "")
    rich.print(drawn)


# --- The command ---


@command("demo", DemoOptions, examples=("skill-train demo", "skill-train demo --run-dir runs/demo --format json"))
@click.option("--run-dir", type=PATH, default=DemoOptions.run_dir, show_default=True, help="Folder of the run.")
def demo(options: DemoOptions, console: Console) -> Result:
    """Run the whole chain on an embedded model and dataset, offline, and show each stage with its proof."""
    return run(options, console)
