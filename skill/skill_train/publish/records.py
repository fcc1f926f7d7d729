"""The published part of a run's records: figures, names and digests. It contains no row of the data and no quote from a
row, such as the text or the ids in a failed check. Only the keys that are listed here are published. Pure.
"""

from pathlib import Path
from typing import Any

import msgspec

from skill_train.run.evaluate_record import Evaluation
from skill_train.run.train_record import SmokeCheck, TrainRecord
from skill_train.run.verify_record import Check, Proof

_OF_ALL = ("schema", "step", "verdict", "seconds", "finished_at", "versions")
_PUBLISHED = {
    "train": (*_OF_ALL, "recipe_hash", "steps", "outputs", "data", "figures"),
    "verify": (*_OF_ALL, "inputs", "options", "samples"),
    "evaluate": (
        *_OF_ALL, "inputs", "options", "rows", "asked", "answer_tokens", "score", "models", "differences",
    ),
}  # fmt: skip
# Checks whose sentence has only figures and names of tensors. The sentences of the other checks quote texts.
CHECKS_WITH_DETAIL = ("digest", "file", "logits", "projector_weights", "tensors", "tuned", "types", "weights")


def published(step: str, record: TrainRecord | Proof | Evaluation) -> Any:
    """The public part of the record of a `step`: `train`, `verify` or `evaluate`."""
    whole = msgspec.to_builtins(record)
    public = {key: whole[key] for key in _PUBLISHED[step] if key in whole}
    if not isinstance(record, Evaluation):
        public["checks"] = [_check(check) for check in record.checks]
    if isinstance(record, Proof):
        public["not_checked"] = [{"name": row.name, "file": row.file} for row in record.not_checked]
    return without_paths(public)


def _check(check: SmokeCheck | Check) -> dict[str, object]:
    if isinstance(check, SmokeCheck):
        return {"name": check.name, "verdict": check.verdict, "figure": check.figure, "figures": {}}
    detailed = check.name in CHECKS_WITH_DETAIL
    public: dict[str, object] = {"name": check.name, "file": check.file, "verdict": check.verdict}
    measured = {"figure": check.figure, "threshold": check.threshold}
    public |= {key: value for key, value in measured.items() if detailed or _is_figure(value)}
    public |= {"detail": check.detail} if detailed else {}
    return public | {"figures": _figures(check.figures)}


def _figures(value: Any) -> Any:
    """The numbers in an object and in the objects inside it."""
    figures = {key: _figures(item) if isinstance(item, dict) else item for key, item in value.items()}
    return {key: item for key, item in figures.items() if isinstance(item, dict) or _is_figure(item)}


def _is_figure(value: Any) -> bool:
    return value is None or isinstance(value, (int, float))


def without_paths(value: Any) -> Any:
    """The recipe or record with file names instead of paths of this machine."""
    if isinstance(value, dict):
        return {without_paths(key): without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    if isinstance(value, str) and "\n" not in value and Path(value).is_absolute():
        return Path(value).name
    return value
