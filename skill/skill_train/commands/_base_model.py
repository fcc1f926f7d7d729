"""The folder of a base model, and of a run's base as it was trained on."""

from __future__ import annotations

from pathlib import Path

from skill_train.commands._shell import quoted
from skill_train.core.digests import file_digest, is_file_of
from skill_train.core.errors import UsageError
from skill_train.model.folder import fingerprint
from skill_train.run import plan_record
from skill_train.run.folder import RunDir
from skill_train.run.plan_record import Plan
from skill_train.run.train_record import read_environment


def base_folder(model: str) -> Path:
    from skill_train.hub.models import model_folder

    return model_folder(model, None)[0]


def base_of(run: RunDir) -> Path:
    """The folder of a run's base model, at the revision that was trained.

    Raises:
        UsageError: the folder holds another model now.
    """
    plan = plan_record.read(run.plan)
    folder = _trained_on(run, plan)
    trained = plan.fingerprints.get("model")  # none of a model on the Hub: its revision says which it is
    if trained is not None and (now := fingerprint(folder)) != trained:
        raise _changed(run, folder, f"fingerprint {trained:.12}…", f"fingerprint {now:.12}…")
    _require_trained_weights(run, folder)
    return folder


def require_adapter(run: RunDir, otherwise: str) -> None:
    """Refuses a run that trained every weight. `otherwise` is the command for its whole model.

    Raises:
        UsageError: it has no adapter.
    """
    if run.is_full:
        raise UsageError(
            f"{run.path} has no adapter: every weight was trained, and merged/ is the whole model",
            code="no_adapter",
            expected="a run that trained an adapter",
            got="finetuning_type full",
            hint=otherwise,
        )


def _trained_on(run: RunDir, plan: Plan) -> Path:
    """The folder that the plan names.

    Raises:
        UsageError: it is not here. The hint says how a copy is found, wherever it lies.
    """
    from skill_train.hub.models import model_folder

    model = plan.recipe.model
    if plan.fingerprints.get("model") is not None and not Path(model).is_dir():
        raise UsageError(
            f"the base model of {run.path} is not here",
            code="missing_file",
            expected=f"the folder {model}, as {run.path} was trained on it",
            got="no such folder",
            hint=f"put the model there; a link to a copy will do: ln -s COPY {quoted(model)}",
        )
    return model_folder(model, plan.recipe.revision)[0]


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
