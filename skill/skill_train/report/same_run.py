"""Whether the runs on one page are the same run: the verdict of `diff`, in words. Pure."""

import json
from collections.abc import Sequence
from typing import Any

from skill_train.report.views import SameView
from skill_train.report.words import number
from skill_train.run.compare_runs import Comparison, RunDifference

_NAMED = 6  # differences that are named; `diff` lists all
_HEADLINES = {
    "same": "the same run: nothing of the recipe differs",
    "incomplete": "the same as far as both runs have records",
    "different": "not the same run: the recipe differs",
}
_OTHER_ROWS = "evaluated on other held-out rows, so the figures of one do not compare with those of the other"


def same(names: tuple[str, str], comparison: Comparison, measured: tuple[str | None, str | None]) -> SameView:
    """The part of the page about two runs.

    Args:
        measured: the digest of the held-out rows that each run was evaluated on; None without an evaluation.
    """
    has_other_rows = None not in measured and measured[0] != measured[1]
    return {
        "a": names[0],
        "b": names[1],
        "verdict": comparison.verdict,
        "headline": _HEADLINES[comparison.verdict] + ("; " + _OTHER_ROWS if has_other_rows else ""),
        "recipe_facts": len(comparison.recipe),
        "placement_facts": len(comparison.placement),
        "losses": comparison.losses,
        "same_weights": comparison.same_weights,
        "lines": [_count_of_facts(comparison), *_listed(comparison.recipe), *_results(comparison)],
    }


def _count_of_facts(comparison: Comparison) -> str:
    recipe, placement = len(comparison.recipe) or "none", len(comparison.placement) or "none"
    return f"{comparison.compared} facts compared: {recipe} of the recipe differ, {placement} of the placement"


def _listed(differences: Sequence[RunDifference]) -> list[str]:
    named = [f"{each.fact}: {_text(each.a)} → {_text(each.b)}" for each in differences[:_NAMED]]
    rest = len(differences) - len(named)
    return named + ([f"and {rest} more, which skill-train diff lists"] if rest else [])


def _results(comparison: Comparison) -> list[str]:
    lines = []
    if (losses := comparison.losses) is not None:
        far = f"differ by up to {losses['largest_difference']:.3g}, at step {losses['at_step']}"
        equal = "are equal, so the curves coincide"
        lines.append(f"the losses of {losses['steps']} steps {equal if losses['equal'] else far}")
    if comparison.same_weights is not None:
        lines.append(f"the trained weights are {'the same bytes' if comparison.same_weights else 'other bytes'}")
    return lines + [f"not compared: {reason}" for reason in comparison.not_compared]


def _text(value: Any) -> str:
    return number(json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else value)
