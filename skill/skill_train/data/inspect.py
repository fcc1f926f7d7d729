"""Inspects a dataset: its format or a suggested mapping, the verdict for each method, and its problems."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from skill_train.data import methods, problems
from skill_train.data.check_row import checker, column_checker
from skill_train.data.problems import Survey
from skill_train.data.scan import complete, empty, find_format, require_columns, unread_text
from skill_train.program.examples import Row
from skill_train.recipe.fields import Recipe
from skill_train.recipe.formats import DetectedFormat, detect


@dataclass
class Inspection:
    """The dataset that is inspected, and the findings.

    Attributes:
        recipe: names the dataset, and its mapping if there is one; `file` is the file of the recipe.
        row: a typical row; empty if no row could be read.
        found: the format for sft, also if its mapping is only suggested.
        unread: columns of text that the format leaves out although the recipe does not say so.
    """

    recipe: Recipe
    method: str
    row: Row
    verdicts: dict[str, methods.Verdict]
    found: DetectedFormat | None
    seen: Survey
    file: Path | None = None
    unread: tuple[str, ...] = ()

    @property
    def verdict(self) -> methods.Verdict:
        return self.verdicts[self.method]

    @property
    def check(self) -> problems.Check | None:
        return check_for(self.method, self.verdict, self.found)


def inspect_dataset(recipe: Recipe, method: str, file: Path | None) -> Inspection:
    """Reads the dataset and judges it. Reads it twice if the first rows did not show every column that a format can
    use."""
    peeked = problems.peek(recipe)
    if not peeked:
        seen = problems.survey(recipe, None)
        if not seen.rows:
            raise empty(recipe)
        return Inspection(recipe, method, {}, methods.judge({}, None), None, seen, file)
    row = problems.typical(peeked)
    detected = find_format(recipe, row) if recipe.format or recipe.columns else _usual_format(peeked[0], row)
    verdicts = methods.judge(row, detected, peeked)
    while True:
        verdict = verdicts["sft"]
        if verdict.format is not None:
            detected = DetectedFormat(verdict.format, verdict.columns, verdict.because, explicit=bool(recipe.columns))
        seen = problems.survey(recipe, check_for(method, verdicts[method], detected))
        whole = complete(recipe, detected, seen.columns) if detected is not None else None
        if whole is None or whole == detected:
            if detected is not None and recipe.columns:
                require_columns(recipe, detected, seen.columns)
            leaves = unread_text(peeked, detected.columns) if detected is not None and not recipe.columns else []
            return Inspection(recipe, method, row, verdicts, detected, seen, file, tuple(leaves))
        verdicts["sft"] = dataclasses.replace(verdict, columns=whole.columns, because=whole.reason)


def _usual_format(first: Row, row: Row) -> DetectedFormat | None:
    """The format that training would detect from the first row, unless that row differs from the others."""
    detected = detect(row)
    same = detect(first)
    if detected is None or same is None or (same.format, same.required) != (detected.format, detected.required):
        return None
    return detected


def check_for(method: str, verdict: methods.Verdict, detected: DetectedFormat | None) -> problems.Check | None:
    if verdict.verdict == "impossible":
        return None
    if method == "sft":
        return checker(detected) if detected is not None else None
    return column_checker(verdict.columns)
