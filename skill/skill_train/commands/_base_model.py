"""The base model of a run, unchanged since the training, and the merge of an adapter into it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from skill_train.commands._outputs import put_aside
from skill_train.core.console import Console
from skill_train.core.digests import file_digest, is_file_of
from skill_train.core.errors import UsageError, VerificationFailed, quoted
from skill_train.model.folder import fingerprint
from skill_train.program.pictures.tokens import PixelLimits
from skill_train.run import merge_record, plan_record
from skill_train.run.earlier_start import trained
from skill_train.run.folder import RunDir, StepResult
from skill_train.run.lock import locked
from skill_train.run.merge_record import MergeRecord, MergeSettings
from skill_train.run.train_record import read_environment, read_fed_rows, stops_of

if TYPE_CHECKING:
    from skill_train.merge.step import MergeRequest


def base_folder(model: str) -> Path:
    from skill_train.hub.models import model_folder

    return model_folder(model, None)[0]


def base_of(run: RunDir) -> Path:
    """The folder of a run's base model. Raises UsageError if it is missing, or has changed since the training."""
    from skill_train.hub.models import model_folder

    plan = plan_record.read(run.plan)
    model, trained = plan.recipe.model, plan.fingerprints.get("model")  # None for a model on the Hub with a revision
    if trained is not None and not Path(model).is_dir():
        raise UsageError(
            f"the base model of {run.path} is not here",
            code="missing_file",
            expected=f"the folder {model}, as {run.path} was trained on it",
            got="no such folder",
            hint=f"put the model there; a link to a copy will do: ln -s COPY {quoted(model)}",
        )
    folder = model_folder(model, plan.recipe.revision)[0]
    if trained is not None and (now := fingerprint(folder)) != trained:
        raise _changed(run, folder, f"fingerprint {trained:.12}…", f"fingerprint {now:.12}…")
    _require_trained_weights(run, folder)
    return folder


def require_adapter(run: RunDir, otherwise: str) -> None:
    """Refuses a run that trained every weight. `otherwise` is the command for its whole model."""
    if run.is_full:
        raise UsageError(
            f"{run.path} has no adapter: every weight was trained, and merged/ is the whole model",
            code="no_adapter",
            expected="a run that trained an adapter",
            got="finetuning_type full",
            hint=otherwise,
        )


def _require_trained_weights(run: RunDir, folder: Path) -> None:
    """Compares the whole weight files with the digests that the training recorded. Earlier versions recorded none.

    The fingerprint of a plan covers the header and both ends of a weight file only, because a plan must be quick.
    """
    environment = read_environment(run.record("environment"))
    for name, digest in ((environment and environment.base_weights) or {}).items():
        if not is_file_of(folder / name, digest):
            now = f"sha256 {file_digest(folder / name)['sha256']:.12}…" if (folder / name).is_file() else "no such file"
            raise _changed(run, folder, f"{name} with sha256 {digest['sha256']:.12}…", now)


def _changed(run: RunDir, folder: Path, expected: str, got: str) -> UsageError:
    return UsageError(
        f"the model in {folder} has changed since {run.path} was trained on it",
        code="input_changed",
        expected=expected,
        got=got,
        hint="restore the files of the model, or train again on the current ones",
    )


def merge_run(console: Console, run: RunDir, dtype: str | None = None, gate: str = "auto") -> StepResult[MergeRecord]:
    """Merges the adapter of a run into `merged/`."""
    with locked(run, "merge"):
        return merge_locked(console, run, dtype, gate)


def merge_locked(console: Console, run: RunDir, dtype: str | None, gate: str) -> StepResult[MergeRecord]:
    """As `merge_run`, for a caller that holds the lock of the run."""
    trained(run)
    require_adapter(run, f"skill-train export-gguf {quoted(run.path)}")
    rows = read_fed_rows(run.held_out) or read_fed_rows(run.samples)
    put_aside(console, run.merged, run.record("merge"))
    try:
        recipe, base = plan_record.read(run.plan).recipe, base_of(run)
        from skill_train.merge.step import MergeRequest  # imports numpy, which the checks above do not need

        request = MergeRequest(
            base=base,
            adapter=run.adapter,
            out=run.merged,
            record=run.record("merge"),
            rows=rows,
            dtype=dtype,
            gate=gate,
            limits=PixelLimits(recipe.min_pixels, recipe.max_pixels),
            stops=stops_of(run.adapter),
        )
        return merge_folders(console, request)
    except VerificationFailed as failure:
        if failure.code == "merge_gate" and dtype != "float32":
            failure.hint = f"skill-train merge {quoted(run.path)} --dtype float32"
        raise


def merge_folders(console: Console, request: MergeRequest) -> StepResult[MergeRecord]:
    from skill_train.merge.step import merge

    with console.progress("merging") as progress:
        return merge(request, progress=progress, warn=console.warn)


def merge_choices(run: RunDir) -> tuple[str | None, str]:
    record = run.record("merge")
    options = merge_record.read(record).options if record.is_file() else MergeSettings()
    return options.dtype, options.gate or "auto"
