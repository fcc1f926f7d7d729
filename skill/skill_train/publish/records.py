"""What of a run's records is published: figures, names and digests. No row of the data is among them, nor what quotes
one: a failed check says which text differed, and a template's which ids. Pure: only what is named here leaves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


def published(step: str, record: dict[str, Any]) -> dict[str, Any]:
    """A record as it may be read by everybody: `train`, `verify` or `evaluate`."""
    kept = {key: record[key] for key in _KEPT[step] if key in record}
    if "checks" in record:
        kept["checks"] = [_check(check, sentence=step == "verify") for check in record["checks"]]
    if step == "verify":
        names = ("name", "file")
        kept["not_checked"] = [{key: one.get(key) for key in names} for one in record.get("not_checked") or ()]
    return {key: _without_paths(value) for key, value in kept.items()}


def without_paths(recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe with names in the place of paths of this machine."""
    return {key: _without_paths(value) for key, value in recipe.items()}


def _check(check: dict[str, Any], *, sentence: bool) -> dict[str, Any]:
    told = sentence and check.get("name") in TOLD
    kept: dict[str, Any] = {key: check[key] for key in ("name", "file", "verdict") if key in check}
    kept |= {key: check[key] for key in ("figure", "threshold") if key in check and (told or _is_figure(check[key]))}
    kept |= {"detail": check["detail"]} if told and "detail" in check else {}
    return kept | {"figures": _figures(check.get("figures"))}


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
