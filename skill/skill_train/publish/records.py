"""What of a run's records is published: figures, names and digests. No row of the data is among them, nor what quotes
one: a failed check says which text differed, and a template's which ids. Pure: only what is named here leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from skill_train.run.evaluate_record import Evaluation
from skill_train.run.train_record import SmokeCheck, TrainRecord
from skill_train.run.verify_record import Check, Proof

_OF_ALL = ("schema", "step", "verdict", "seconds", "finished_at", "versions")
_KEPT = {
    "train": (*_OF_ALL, "recipe_hash", "steps", "outputs", "data", "figures"),
    "verify": (*_OF_ALL, "inputs", "options", "samples"),
    "evaluate": (
        *_OF_ALL, "inputs", "options", "rows", "asked", "answer_tokens", "score", "models", "differences",
    ),
}  # fmt: skip
# Checks whose sentence has figures and names of tensors. Those of tokens, templates and answers quote texts.
TOLD = ("digest", "file", "logits", "tensors", "tuned", "types", "weights")


def published(step: str, record: TrainRecord | Proof | Evaluation) -> dict[str, object]:
    """A record as it may be read by everybody: `train`, `verify` or `evaluate`."""
    whole = msgspec.to_builtins(record)
    kept = {key: whole[key] for key in _KEPT[step] if key in whole}
    if not isinstance(record, Evaluation):
        kept["checks"] = [_check(check) for check in record.checks]
    if isinstance(record, Proof):
        kept["not_checked"] = [{"name": one.name, "file": one.file} for one in record.not_checked]
    return without_paths(kept)


def without_paths(document: Mapping[str, object]) -> dict[str, object]:
    """The recipe or record with names in the place of paths of this machine."""
    return {key: _without_paths(value) for key, value in document.items()}


def _check(check: SmokeCheck | Check) -> dict[str, object]:
    if isinstance(check, SmokeCheck):
        return {"name": check.name, "verdict": check.verdict, "figure": check.figure, "figures": {}}
    told = check.name in TOLD
    kept: dict[str, object] = {"name": check.name, "file": check.file, "verdict": check.verdict}
    measured = {"figure": check.figure, "threshold": check.threshold}
    kept |= {key: value for key, value in measured.items() if told or _is_figure(value)}
    kept |= {"detail": check.detail} if told else {}
    return kept | {"figures": _figures(check.figures)}


def _figures(value: Any) -> Any:
    """Of an object the numbers, in objects inside of it too."""
    if not isinstance(value, dict):
        return {}
    found = {key: _figures(item) if isinstance(item, dict) else item for key, item in value.items()}
    return {key: item for key, item in found.items() if isinstance(item, dict) or _is_figure(item)}


def _is_figure(value: Any) -> bool:
    return value is None or isinstance(value, (int, float))


def _without_paths(value: Any) -> Any:
    """Absolute paths become the name of what they lead to."""
    if isinstance(value, dict):
        return {key: _without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_paths(item) for item in value]
    if isinstance(value, str) and "\n" not in value and Path(value).is_absolute():
        return Path(value).name
    return value
