"""The two files of a vision model: each language model beside the projector that reads pictures for it. Pure."""

from __future__ import annotations

from skill_train.report.figure import ReportedRun
from skill_train.report.views import FileView, PairView
from skill_train.report.words import size
from skill_train.run.verify_record import Check

_WORST = ("fail", "unknown", "warn", "pass")


def worst(verdicts: list[str]) -> str:
    """The worst of the verdicts; `unknown` if there are none. What was not judged is worse than a warning."""
    return min(verdicts, key=_WORST.index, default="unknown")


def checks_of(run: ReportedRun, file: str) -> list[tuple[int, Check]]:
    """The checks of one file, and their places in the proof; none if that is of another file of this name."""
    checks = run.proof.checks if run.proof is not None and run.is_proof_of(file) else ()
    return [(i, check) for i, check in enumerate(checks) if check.file == file]


def pairs(run: ReportedRun) -> list[PairView]:
    """Each language model with the projector, and what `verify` says of them; empty without a projector."""
    return [pair for file in run.exported() for pair in _pair(run, file)]


def no_projector(run: ReportedRun) -> str:
    """A sentence where files were exported of a model that was trained on pictures, and none of them reads pictures;
    else empty."""
    if not run["plan"].get("recipe", "images") or not run.exported() or run.projectors():
        return ""
    return f"The model was trained on pictures, and these files read text only: {run.command('export-gguf')}"


def verdict_to_run(run: ReportedRun, file: FileView) -> str:
    """The verdict of all that runs: of the file, or of the file and its projector together."""
    return worst([pair["verdict"] for pair in _pair(run, file["file"])]) if run.projectors() else file["verdict"]


def _pair(run: ReportedRun, file: str) -> list[PairView]:
    step, name = run.exported()[file]
    model, views = _judged(run, file), list[PairView]()
    was_asked = any(check.name == "pictures" for _, check in checks_of(run, file))
    for projector, (projector_step, projector_name) in run.projectors().items():
        other = _judged(run, projector)
        together = worst([model, other])
        views.append(
            {
                "model": file,
                "quant": str(run[step].get("outputs", name, "quant", default=file)),
                "model_verdict": model,
                "projector": projector,
                "path": projector_name,
                "projector_quant": str(run[projector_step].get("outputs", projector_name, "quant", default="")),
                "bytes": run[projector_step].figure(size, "outputs", projector_name, "bytes"),
                "projector_verdict": other,
                "verdict": together if was_asked or together == "fail" else "unknown",
            }
        )
    return views


def _judged(run: ReportedRun, file: str) -> str:
    """The verdict of one file; `unknown` if the proof is of another file of this name."""
    if run.proof is None or file not in run.proof.inputs.ggufs:
        return "unknown"
    return worst([check.verdict for _, check in checks_of(run, file)])
