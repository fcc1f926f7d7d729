"""The folder of a base model, and of a run's base as it was trained on."""

from __future__ import annotations

from pathlib import Path

from skill_train.core.errors import UsageError
from skill_train.model.folder import fingerprint
from skill_train.run import plan_record
from skill_train.run.folder import RunDir


def base_folder(model: str) -> Path:
    from skill_train.hub.models import model_folder

    return model_folder(model, None)[0]


def base_of(run: RunDir) -> Path:
    """The folder of a run's base model, at the revision that was trained.

    Raises:
        UsageError: the folder holds another model now.
    """
    from skill_train.hub.models import model_folder

    plan = plan_record.read(run.plan)
    folder = model_folder(plan.recipe.model, plan.recipe.revision)[0]
    trained = plan.fingerprints.get("model")  # none of a model on the Hub: its revision says which it is
    if trained is not None and (now := fingerprint(folder)) != trained:
        raise UsageError(
            f"the model in {folder} has changed since {run.path} was trained on it",
            code="input_changed",
            expected=f"fingerprint {trained!s:.12}…",
            got=f"fingerprint {now:.12}…",
            hint="restore the files of the model, or train again on the current ones",
        )
    return folder
