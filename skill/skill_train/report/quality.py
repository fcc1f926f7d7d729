"""What the report shows of how good the models of a run are: `evaluate.json`, or as far as they go the demo's figures
and the two answers of the training. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skill_train.report.figure import Figure, Run
from skill_train.report.words import number, rate, share

Shown = Callable[[Any], str]
MOST_ANSWERS = 12  # prompts that are shown side by side
NOT_MEASURED = "not measured"
_MEASURES: dict[str, Shown] = {
    "loss": number,
    "perplexity": number,
    "exact_match": share,
    "score": number,
    "tokens_per_second": rate,
}


def measured(run: Run, model: str, key: str, *, stage: str = "") -> Figure:
    """One value of one model: `base`, `tuned` or the name of a GGUF file.

    Args:
        stage: how the demo's table names it, which is taken where there is no evaluation.
    """
    evaluate, demo = run["evaluate"], run["demo"]
    for i, one in evaluate.items("models"):
        if one["name"] == model:
            return evaluate.figure(_MEASURES[key], "models", i, key, unknown=NOT_MEASURED)
    for i, row in demo.items("figures", "stages") if not evaluate else ():
        if row["stage"] == (stage or model):
            return demo.figure(_MEASURES[key], "figures", "stages", i, key, unknown=NOT_MEASURED)
    return Figure(NOT_MEASURED)


def quality(run: Run) -> dict[str, Any] | None:
    """Each evaluated model with its figures, and how it differs from what it was made of."""
    evaluate = run["evaluate"]
    if not evaluate:
        return None
    keys = [key for key in _MEASURES if key != "score" or evaluate.get("score") is not None]
    models = [
        {
            "name": one["name"],
            "figures": [evaluate.figure(_MEASURES[key], "models", i, key, unknown=NOT_MEASURED) for key in keys],
            "reason": one.get("reason") or "",
        }
        for i, one in evaluate.items("models")
    ]
    differences = [
        {
            "model": one["model"],
            "against": one["against"],
            "measure": one["measure"].replace("_", " "),
            "says": one["says"],
            **{key: evaluate.figure(_signed, "differences", i, key) for key in ("difference", "low", "high")},
        }
        for i, one in evaluate.items("differences")
    ]
    return {
        "rows": evaluate.figure(number, "rows"),
        "asked": evaluate.figure(number, "asked"),
        "score": evaluate.get("score"),
        "measures": [key.replace("_", " ") for key in keys],
        "models": models,
        "differences": differences,
    }


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else '−' if value < 0 else ''}{abs(value):.3g}"


def answers(run: Run) -> dict[str, Any] | None:
    """The same prompts answered by each model, the most telling first; at least the one that the training asked."""
    asked = run["evaluate"].get("answers", default=[])
    if asked:
        order = sorted(range(len(asked)), key=lambda i: (-len(set(asked[i]["answers"].values())), i))
        rows = [_answered(asked[i]) for i in order[:MOST_ANSWERS]]
        return {"rows": rows, "of": len(asked), "source": "evaluate.json"}
    answer = run["train"].get("answer")
    if answer is None:
        return None
    told = [{"model": when, "text": answer.get(key), "exact": None} for when, key in _WHEN]
    rows = [{"prompt": answer.get("prompt", ""), "expected": None, "answers": told}]
    return {"rows": rows, "of": 1, "source": "train.json"}


_WHEN = (("base", "before"), ("tuned", "after"))


def _answered(row: dict[str, Any]) -> dict[str, Any]:
    exact = row.get("exact", {})
    told = [{"model": name, "text": text, "exact": exact.get(name)} for name, text in row["answers"].items()]
    return {"prompt": row["prompt"], "expected": row.get("expected"), "answers": told}
