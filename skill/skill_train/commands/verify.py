"""`verify`: proves that each GGUF file is the trained model."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from skill_train.commands._base_model import base_folder, base_of
from skill_train.commands._command import MOST_COUNTED, PATH, Whole, argument, command, option, require_only_run
from skill_train.commands._drawing import STYLE, figure, folding_table
from skill_train.commands._outputs import merge_record_of, require_as_merged
from skill_train.core.console import Console, Result
from skill_train.core.errors import SkillTrainError, UsageError, VerificationFailed, quoted
from skill_train.gguf.export_files import model_of, recorded, unread, with_model
from skill_train.llama.engines.answers import ALL, ENGINES
from skill_train.program.plan import SAMPLE_ROWS
from skill_train.run import export_record, plan_record, verify_record
from skill_train.run.earlier_start import require_rows, require_whole, trained
from skill_train.run.folder import RunDir, open_run
from skill_train.run.lock import locked
from skill_train.run.train_record import TrainedData, read_rows, way_back
from skill_train.run.verify_record import Check, Proof
from skill_train.verify.check import first_few

if TYPE_CHECKING:
    from skill_train.verify.step import PictureContext, VerifyRequest


@dataclass(frozen=True)
class VerifyOptions:
    run: Path | None = argument(PATH, required=False)
    reference: str | None = option(None, "Model that the files are compared with: folder or Hub id. Without RUN.")
    base: str | None = option(
        None, "Base model, to check that the file is the tuned model and not the base. Without RUN."
    )
    gguf: tuple[Path, ...] = option((), "File to check; repeat for more.  [default: all in RUN/gguf]", PATH)
    tokens: int | None = option(
        None, "Most tokens to compare.  [default: 2048; above 250M weights 256, quantized 128]", Whole(16, MOST_COUNTED)
    )
    engine: tuple[str, ...] = option(
        (),
        "Other program to run the files in, on this machine; repeat for more. all: every installed one.",
        (*ENGINES, ALL),
    )
    out: Path | None = option(None, "File for the proof.  [default: RUN/verify.json, or beside the first GGUF]", PATH)


@command(
    VerifyOptions,
    "skill-train verify runs/first",
    "skill-train verify --reference merged-model-folder --gguf model-q4_k_m.gguf",
)
def verify(options: VerifyOptions, console: Console) -> Result:
    """Check each GGUF file against the trained model: file, tokens, template, logits and answers."""
    if options.run is not None:
        require_only_run("verify", {"--reference": options.reference, "--base": options.base})
        return verify_run(console, open_run(options.run), options)
    if options.reference is None or not options.gguf:
        raise UsageError(
            "verify needs a run, or a reference and at least one GGUF file",
            code="bad_usage",
            expected="skill-train verify RUN, or --reference and --gguf",
            hint="skill-train verify --help",
        )
    from skill_train.verify.step import PictureContext, VerifyRequest

    reference, base = base_folder(options.reference), base_folder(options.base) if options.base else None
    require_as_merged(reference)
    if base is not None:
        from skill_train.merge.named_base import require_base_of

        require_base_of(reference, merge_record_of(reference), base, console.warn)
    request = VerifyRequest(
        reference=reference,
        adapter=None,
        base=base,
        ggufs=list(options.gguf),
        rows=[],
        held_out=[],
        record=_record_beside(options.gguf, options.out),
        tokens=options.tokens,
        pictures=PictureContext({"model": str(reference), "revision": None}, images=Path()),
        engines=options.engine,
    )
    return _verify(console, request, [])


def _record_beside(ggufs: tuple[Path, ...], out: Path | None = None) -> Path:
    """The file for the proof of these files: `out`, or verify.json beside the first file. Refuses to replace a proof of
    other files that still exist beside it, or in the `gguf/` of its run."""
    record, proof = out or ggufs[0].parent / "verify.json", None
    if record.is_file():
        with contextlib.suppress(UsageError):  # not a proof: the step raises the error
            proof = verify_record.read(record)
    judged = set(map(os.path.realpath, ggufs))  # `Path.resolve` raises for a loop of links
    places = (record.parent, record.parent / "gguf")
    proven = [place / name for name in sorted(proof.inputs.ggufs if proof else ()) for place in places]
    if lost := [file.name for file in proven if file.is_file() and os.path.realpath(file) not in judged]:
        own = record.with_name(f"verify-{ggufs[0].stem}.json")
        raise UsageError(
            f"{record} is the proof of {', '.join(lost)}, and would be replaced",
            code="output_exists",
            expected="a new file, or a proof of the same files to replace",
            got=str(record),
            hint=f"--out {quoted(own)}, or verify these files with it",
        )
    return record


def verify_run(console: Console, run: RunDir, options: VerifyOptions) -> Result:
    """Verifies the named files, or every GGUF file of a run, against base + adapter, or the fully trained model."""
    from skill_train.verify.step import VerifyRequest

    with locked(run, "verify"):
        training, pictures = trained(run), _pictures(run)
        record, lost = run.record("verify"), () if options.gguf else _lost_files(console, run)
        named, out = tuple(options.gguf or run.exported), options.out
        if options.gguf or (out is not None and os.path.realpath(out) != os.path.realpath(record)):
            record = _record_beside(named, out)
        if options.gguf and pictures is not None:
            pictures = replace(pictures, expected="")  # a file alone is no export without its projector
        base, held_out = base_of(run), read_rows(run.held_out)
        if run.held_out.is_file() and (held_out or training.data.held_out_rows):
            require_rows(held_out, run.path, training.data.held_out_rows)
        samples = read_rows(run.samples)
        if run.samples.is_file():
            require_whole(run.samples, len(samples), min(SAMPLE_ROWS, training.data.train_rows), "the training kept")
        request = VerifyRequest(
            reference=run.merged if run.is_full else base,
            adapter=None if run.is_full else run.adapter,
            base=base,
            ggufs=list(named),
            unread=lost + _lost_rows(console, run, training.data),
            rows=samples,
            held_out=held_out,
            record=record,
            run=run.path,
            tokens=options.tokens,
            pictures=pictures,
            engines=options.engine,
        )
        if options.gguf:
            return _verify(console, request, [])
        steps = ["evaluate", "report"] if held_out or training.data.held_out_rows else ["report"]
        result = _verify(console, request, [f"skill-train {step} {quoted(run.path)}" for step in steps])
        try:
            _warn_of_modelfile(console, run)
        except (SkillTrainError, OSError) as error:  # only a warning, because the proof is written
            console.warn("not_compared", f"{run.gguf / 'Modelfile'} was not compared with what is exported: {error}")
        return result


def _lost_files(console: Console, run: RunDir) -> tuple[tuple[str, str], ...]:
    """The files of a run that cannot be verified, each with a reason for the proof.

    Raises:
        UsageError: nothing was exported.
    """
    if not run.exported:
        raise UsageError(
            f"{run.path} has no GGUF file yet",
            code="missing_step",
            expected="files in gguf/",
            hint=f"skill-train export-gguf {quoted(run.path)}",
        )
    gone = [str(path) for path in recorded(run) if not path.is_file()]
    if gone:
        console.warn("missing_file", f"exported files are missing and were not verified: {', '.join(gone)}")
    return unread(run)


def _lost_rows(console: Console, run: RunDir, data: TrainedData) -> tuple[tuple[str, str], ...]:
    """The missing files of rows, each with a reason for the proof. Only the warning has their paths, because a proof is
    published."""
    files = (
        (run.held_out, data.held_out_rows, "that were held out"),
        (run.samples, data.train_rows, "that trained"),
    )
    lost = [(file, which) for file, rows, which in files if rows and not file.is_file()]
    for file, _ in lost:
        console.warn("missing_file", f"{file} does not exist: {way_back(file)}")
    return tuple((file.name, f"it is gone, and nothing was compared on the rows {which}") for file, which in lost)


def _warn_of_modelfile(console: Console, run: RunDir) -> None:
    """Warns of a Modelfile that differs from what the export writes. Without the merged model it cannot be compared."""
    from skill_train.gguf.ollama_modelfile import edits, modelfile, parameters_of_run

    file, ggufs = run.gguf / "Modelfile", run.ggufs
    if not (ggufs and file.is_file() and (run.merged / "config.json").is_file()):
        return
    named, projectors = model_of(file), export_record.outputs(run.path, "mmproj")
    path, beside = os.path.realpath(run.gguf / (named or "")), next((Path(name).name for name in projectors), None)
    chosen = next((each.name for each in [*ggufs, *recorded(run)] if os.path.realpath(each) == path), None)
    again = f"skill-train export-gguf {quoted(run.path)} writes it again"
    if chosen is not None and not os.path.isfile(path):
        console.warn("missing_file", f"{file} names {chosen}, which is gone; {again}")
    parameters, _ = parameters_of_run(run.merged, run)
    text = with_model(file.read_text(encoding="utf-8", errors="replace"), f"./{chosen or ggufs[0].name}")
    changed = [] if chosen else [f"FROM names {named}, which is not a file of this run" if named else "it lacks FROM"]
    if changed := changed + edits(text, modelfile(chosen or ggufs[0].name, parameters, beside)):
        console.warn("modelfile_edited", f"{file} is not as it was exported: {first_few(changed)}; {again}")


def _pictures(run: RunDir) -> PictureContext | None:
    """The pictures and the settings with which a projector is judged; None for a run of text."""
    from skill_train.evaluate.pictures import pictures_of_run
    from skill_train.verify.step import PictureContext

    if not plan_record.read(run.plan).recipe.images:
        return None
    there = (run.merged / "config.json").is_file()
    return PictureContext(
        pictures_of_run(run, run.merged).image if there else None,
        images=run.path,
        why_not="" if there else f"the merged model that it was made of is gone: skill-train merge {quoted(run.path)}",
        expected="this model was trained on pictures, and no projector was exported: llama.cpp will read text only",
    )


def _verify(console: Console, request: VerifyRequest, following: list[str]) -> Result:
    from skill_train.verify.step import verify

    file = request.record
    if file.is_dir():
        hint = f"--out {quoted(file / 'verify.json')}"
        raise UsageError(f"{file} is a folder", code="bad_usage", expected="a file for the proof", hint=hint)
    with console.progress("verifying") as progress:
        result = verify(request, progress=progress, warn=console.warn)
    proof = result.record
    order = {"fail": 0, "warn": 1, "pass": 2}
    checks = sorted(proof.checks, key=lambda check: order[check.verdict])
    data = {
        "verdict": proof.verdict,
        "checks": [_short(check) for check in checks],
        "not_checked": msgspec.to_builtins(proof.not_checked),
        "samples": proof.samples,
        "proof": str(file),
        "reused": result.reused,
    }
    failed = [check for check in checks if check.verdict == "fail"]
    for check in checks:
        if check.verdict == "warn":
            console.warn("verdict_warn", f"{check.file}: {check.name}: {check.detail}")
    if request.base is None:
        console.warn("no_base", "without --base, `verify` may not notice that a coarse type has lost a small fine-tune")
    elif unused := next((one.reason for one in proof.not_checked if one.name == "tuned"), ""):
        console.warn("no_base", f"the share of the tuning was not measured: {unused}")
    return Result(
        data,
        human=lambda rich: _draw(rich, proof),
        quiet=proof.verdict,
        next=[] if failed else following,
        error=_not_proven(failed, file) if failed else None,
    )


def _short(check: Check) -> dict[str, object]:
    """The short form of a check. The proof file has further figures, and the details of passed checks."""
    of_engine = check.name.startswith("engine_")  # the detail has the name and the version of the engine
    left_out = {"figures", "detail"} if check.verdict == "pass" and not of_engine else {"figures"}
    return {key: value for key, value in msgspec.structs.asdict(check).items() if key not in left_out}


def _not_proven(failed: list[Check], record: Path) -> VerificationFailed:
    names = list(dict.fromkeys(f"{check.name} ({check.file})" for check in failed))
    return VerificationFailed(
        f"verification failed: {', '.join(names[:12])}",
        code="verification_failed",
        expected="every check to pass",
        got=str(failed[0].detail or failed[0].figure)[:600],
        hint=f"read {quoted(record)}",
    )


def _draw(rich: Any, proof: Proof) -> None:
    table = folding_table("file", "check", "verdict", "figure", "threshold", title=f"proof: {proof.verdict}")
    for check in proof.checks:
        engine = check.figures.get("engine")
        name = f"{check.name} ({engine})" if engine else check.name
        cells = (check.file, name, check.verdict, figure(check.figure), figure(check.threshold))
        table.add_row(*cells, style=STYLE[check.verdict])
    rich.print(table)
    for check in proof.checks:
        if check.verdict != "pass":
            rich.print(f"{check.file} {check.name}: {check.detail}")
    for left_out in proof.not_checked:
        rich.print(f"{left_out.file} {left_out.name}: not checked, {left_out.reason}")
