"""`demo`: all steps on an embedded model: train, merge, export and verify, with a table of results."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from skill_train.commands import evaluate, export_gguf, local, verify
from skill_train.commands._base_model import base_of, merge_run
from skill_train.commands._command import PATH, command, option
from skill_train.commands._drawing import rich_table
from skill_train.commands._export import NONE
from skill_train.commands._shipping import ExportOptions
from skill_train.core import resources
from skill_train.core.console import Console, Result
from skill_train.core.digests import FileDigest, digests
from skill_train.core.errors import VerificationFailed, quoted
from skill_train.core.units import megabytes
from skill_train.evaluate.backends import Model
from skill_train.evaluate.figures import figures
from skill_train.evaluate.scores import Scoring
from skill_train.evaluate.step import ROOM, measure, questions
from skill_train.reference.load import load_tokenizer
from skill_train.report.demo_record import Demo, DemoFigures, Stage
from skill_train.run import export_record, records, verify_record
from skill_train.run.evaluate_record import ModelFigures, spread
from skill_train.run.export_record import ExportedFile
from skill_train.run.folder import RunDir
from skill_train.run.merge_record import MergeRecord
from skill_train.run.records import Verdict
from skill_train.run.train_record import TrainRecord, read_rows
from skill_train.run.verify_record import Proof, worst

METHODS = ("text", "vision")
QUANTS = {"text": "f16,q8_0,q4_k_m", "vision": "f16,q4_k_m"}
RUN_DIRS = {"text": Path("runs/demo"), "vision": Path("runs/demo-vision")}
LEARNED = 0.9  # least share of held-out rows that every stage after training must answer exactly
NOT_KNOWN = 0.1  # largest share that the base may answer exactly
_FILES = 3  # rows of the table before the first file: base, adapter, merged


@dataclass(frozen=True)
class DemoOptions:
    method: str = option(
        "text",
        "Demo to run. text: letters to a shop become JSON; vision: drawn squares are described in words.",
        METHODS,
    )
    run_dir: Path | None = option(None, "Folder of the run.  [default: runs/demo; for vision runs/demo-vision]", PATH)

    @property
    def folder(self) -> Path:
        """The folder of the run: the given one, or the default of the method."""
        return self.run_dir or RUN_DIRS[self.method]


@dataclass(frozen=True)
class _Chain:
    trained: TrainRecord
    merged: MergeRecord
    exported: dict[str, ExportedFile]  # the GGUF files of the language model, by their names in the run
    projector: dict[str, ExportedFile]  # the file that they all need for pictures; empty for a model of text
    proof: Proof


@command(
    DemoOptions,
    "skill-train demo",
    "skill-train demo --method vision",
    "skill-train demo --run-dir runs/demo --format json",
)
def demo(options: DemoOptions, console: Console) -> Result:
    """Run the whole chain on an embedded model and dataset, offline, and show each stage with its proof."""
    folder = RunDir(options.folder)
    chain = _chain(console, folder, options.method)
    table = _recorded(folder) or _table(console, folder, chain)
    records.write(
        folder.record("demo"), Demo(inputs=_inputs(folder), figures=DemoFigures(table), finished_at=records.timestamp())
    )
    following = [f"skill-train evaluate {quoted(folder.path)}", f"skill-train report {quoted(folder.path)}"]
    return Result(
        {"run_dir": str(folder.path), "stages": msgspec.to_builtins(table), "verdict": chain.proof.verdict},
        human=lambda rich: _draw(rich, table, chain.projector),
        quiet=str(folder.path),
        next=following,
        error=_missed(table, folder),
    )


def _chain(console: Console, run: RunDir, method: str) -> _Chain:
    from skill_train.llama import get_converter

    with console.progress("finding the converter") as progress:
        tools = get_converter.find_or_fetch(progress=progress)
    plan = local.plan_of(console, resources.demo(method) / "recipe.yaml")
    trained = local.train_run(console, run, plan, resume=True).record
    merged = merge_run(console, run).record
    matrix = NONE if method == "vision" else None  # rows with pictures give no importance matrix
    export_gguf.export_run(console, run, ExportOptions(quant=QUANTS[method], imatrix=matrix), tools)
    exported = export_record.outputs(run.path, "convert", "quantize")
    projector = export_record.outputs(run.path, "mmproj") if method == "vision" else {}
    verify.verify_run(console, run, verify.VerifyOptions(tokens=2048))
    return _Chain(trained, merged, exported, projector, verify_record.read(run.record("verify")))


def _inputs(run: RunDir) -> dict[str, FileDigest]:
    return digests(run.path, [run.record(step) for step in ("train", "merge", "verify")])


def _recorded(run: RunDir) -> list[Stage] | None:
    """The table of an earlier call, if its inputs have not changed."""
    earlier = records.read(run.record("demo"), Demo) if run.record("demo").is_file() else None
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
    beside = sum(file["bytes"] for file in chain.projector.values())
    projector = next((Path(path).name for path in chain.projector), None)
    for path, file in chain.exported.items():
        name = Path(path).name
        proven = _proven(chain.proof, name, projector)
        stages.append(_row(file["quant"], file["bytes"] + beside, figures_by_model[name], *proven))
    return stages


def _adapter(console: Console, run: RunDir, base: Path) -> ModelFigures:
    """The figures of base + adapter, which `evaluate` leaves out after the merge."""
    rows = spread(read_rows(run.held_out), evaluate.ROWS)
    row_questions = questions(rows, loss_on="assistant", room=ROOM, context=None)
    pictures = evaluate.pictures_of(rows, run, base)
    tuned, tokenizer = Model("adapter", base, run.adapter, pictures=pictures), load_tokenizer(base)
    with console.progress("asking the adapter") as progress:
        measured = measure(
            tuned, row_questions, tokenizer=tokenizer, scoring=Scoring(), backend="transformers", progress=progress
        )
    return figures(measured, row_questions)


def _row(stage: str, size: int, model_figures: ModelFigures, kl: float | None, verdict: Verdict | None) -> Stage:
    assert model_figures.exact_match is not None  # every row of the demo has a question
    return Stage(
        stage=stage,
        bytes=size,
        exact_match=round(model_figures.exact_match, 4),
        rows=model_figures.asked_rows,
        mean_kl=kl,
        tokens_per_second=model_figures.tokens_per_second,
        verdict=verdict,
    )


def _proven(proof: Proof, name: str, projector: str | None) -> tuple[float | None, Verdict]:
    """The mean KL of one file to the trained model, and its worst verdict.

    With a projector the two files are judged as a pair: the KL is that of the text after a picture, on equal pixels.
    """
    checks = [check for check in proof.checks if check.file in (name, projector)]
    judged, figure = ("logits", "trained_kl") if projector is None else ("pictures", "mean_kl")
    distances = (check.figures.get(figure) for check in checks if check.name == judged)
    kl = next((distance for distance in distances if isinstance(distance, (int, float))), None)
    return kl, worst(check.verdict for check in checks)


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _missed(table: list[Stage], run: RunDir) -> VerificationFailed | None:
    """The error if a stage has not the expected result: the base does not know the answers, every later stage does, and
    every file has a measured KL."""
    base, after = table[0], table[1:]
    bad = [base] if base.exact_match > NOT_KNOWN else []
    bad += [row for row in after if row.exact_match < LEARNED or row.verdict == "fail"]
    bad += [row for row in table[_FILES:] if row.mean_kl is None]
    if not bad:
        return None
    no_kl = ", and no KL" if bad[0] in table[_FILES:] and bad[0].mean_kl is None else ""
    return VerificationFailed(
        f"the stage {bad[0].stage} does not hold what the demo promises",
        code="self_test_failed",
        expected=f"exact match at most {NOT_KNOWN:.0%} before, at least {LEARNED:.0%} after, and no failed check",
        got=f"exact match {bad[0].exact_match:.0%}, verdict {bad[0].verdict}" + no_kl,
        hint=f"skill-train verify {quoted(run.path)}",
    )


def _draw(rich: Any, table: list[Stage], projector: dict[str, ExportedFile]) -> None:
    draw_stages(rich, table)
    for path, file in projector.items():
        size = megabytes(file["bytes"], 2)
        rich.print(f"Each file needs {path} to read pictures; its {size} are included in the size.")
        rich.print("Its KL is to the merged model, on the words behind a picture of the same pixels.")


def draw_stages(rich: Any, table: list[Stage]) -> None:
    rows = table[0].rows
    drawn = rich_table("stage", "size", f"exact match ({rows} held out)", "KL to trained", "tokens/s", "verdict")
    for row in table:
        kl = "" if row.mean_kl is None else f"{row.mean_kl:.1e}"
        speed = "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}"
        cells = (row.stage, megabytes(row.bytes, 2), f"{row.exact_match:.1%}", kl, speed)
        drawn.add_row(*cells, row.verdict or "")
    rich.print(drawn)
