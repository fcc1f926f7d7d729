"""`diff`: compares the records of two runs."""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skill_train.commands._command import PATH, argument, command
from skill_train.commands._drawing import folding_table
from skill_train.core.console import Console, Result
from skill_train.core.errors import UsageError, VerificationFailed, quoted
from skill_train.run.compare_runs import ComparedRun, Comparison, compare, read_run
from skill_train.run.earlier_start import require_as_trained
from skill_train.run.folder import RunDir, open_run

_NAMES = {"model": "recipe.revision", "data": "recipe.data_revision"}
_SHOWN = 60  # characters of a value; the files have the whole value


@dataclass(frozen=True)
class DiffOptions:
    run_a: Path = argument(PATH)
    run_b: Path = argument(PATH)


@command(DiffOptions, "skill-train diff runs/first runs/first-cloud", "skill-train diff runs/a runs/b --format json")
def diff(options: DiffOptions, console: Console) -> Result:
    """Compare two runs: the recipes must be equal, the machines may differ."""
    a, b = (_read(_opened(path)) for path in (options.run_a, options.run_b))
    comparison = compare(a, b)
    for reason in comparison.not_compared:
        console.warn("not_compared", reason)
    if comparison.unexplained:
        console.warn("unexplained", "the trained weights differ, although recipe, machine and batch split are the same")
    groups = {"recipe": comparison.recipe, "placement": comparison.placement, "exports": comparison.exports}
    data = {
        "verdict": comparison.verdict,
        "run_a": str(options.run_a),
        "run_b": str(options.run_b),
        "recipe_hash": [a.plan.recipe_hash, b.plan.recipe_hash],
        **{
            name: [{"fact": each.fact, "a": _text(each.a), "b": _text(each.b)} for each in group]
            for name, group in groups.items()
        },
        "counts": {"compared": comparison.compared, **{name: len(group) for name, group in groups.items()}},
        "losses": comparison.losses,
        "same_weights": comparison.same_weights,
        "not_compared": comparison.not_compared,
    }
    return Result(
        data,
        quiet=comparison.verdict,
        human=lambda rich: _draw(rich, comparison),
        next=[shlex.join(["skill-train", "report", str(options.run_a), str(options.run_b)])],
        error=_refusal(comparison),
    )


def _refusal(comparison: Comparison) -> VerificationFailed | None:
    if not comparison.recipe:
        return None
    named = [f"{each.fact}: {_text(each.a)} → {_text(each.b)}" for each in comparison.recipe[:5]]
    more = [f"and {len(comparison.recipe) - 5} more"] if len(comparison.recipe) > 5 else []
    return VerificationFailed(
        f"the two runs have different recipes: {len(comparison.recipe)} values differ",
        code="different_recipe",
        expected="the same recipe, data, program and versions; only the placement may differ",
        got="; ".join(named + more),
        hint=_hint(comparison),
    )


def _hint(comparison: Comparison) -> str:
    """The hint. A model folder and a Hub id may have the same bytes, but the records do not show it."""
    facts = {each.fact for each in comparison.recipe}
    for key, revision in _NAMES.items():
        if f"recipe.{key}" in facts and facts <= {"recipe.hash", f"recipe.{key}", revision}:
            equal = ", though the trained weights are the same" if comparison.same_weights else ""
            return (
                f"the {key}'s name and revision are part of the recipe{equal}: one run has it from a folder or another "
                f"id; train both from the same Hub id and revision"
            )
    return "make both runs of one recipe file and the same data, with the versions of requirements.lock"


def _text(value: Any) -> str | float | bool | None:
    """A number, true or null unchanged; anything longer as shortened text."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _opened(path: Path) -> RunDir:
    """The run directory. For the id of a job, the error says to fetch its files first."""
    if not path.exists() and re.fullmatch(r"([\w.-]+/)?[0-9a-f]{24}", str(path)):
        raise UsageError(
            f"{path} is a job, and its files have not been fetched",
            code="not_a_run",
            expected="two run directories",
            hint=f"skill-train pull {quoted(path)}",
        )
    return open_run(path)


def _read(run: RunDir) -> ComparedRun:
    """The files to compare. Recipe and weights are compared by their records, which must describe one training."""
    compared = read_run(run)
    if compared.train is not None:
        there = [name for name in compared.train.outputs if (run.path / name).exists()]
        require_as_trained(run, compared.train, there)
    return compared


def _draw(rich: Any, comparison: Comparison) -> None:
    table = folding_table("group", "fact", "run A", "run B", title=f"two runs: {comparison.verdict}")
    recipe, placement, losses = comparison.recipe, comparison.placement, comparison.losses
    for group, listed, style in (
        ("recipe", recipe, "red"),
        ("placement", placement, ""),
        ("export", comparison.exports, ""),
    ):
        for each in listed:
            table.add_row(group, each.fact, str(_text(each.a)), str(_text(each.b)), style=style)
    if table.row_count:
        rich.print(table)
    differ = f"{len(recipe)} of the recipe differ, {len(placement)} of the placement"
    rich.print(f"{comparison.compared} facts compared: {differ}")
    if losses is not None:
        far = f"differ by up to {losses['largest_difference']:.3g} (step {losses['at_step']})"
        rich.print(f"losses of {losses['steps']} steps: {'equal' if losses['equal'] else far}")
    if comparison.same_weights is not None:
        rich.print(f"trained weights: {'the same bytes' if comparison.same_weights else 'other bytes'}")
