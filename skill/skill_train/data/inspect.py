"""What a dataset is taken for: its format or a suggested mapping, the verdicts on each method, and its problems."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skill_train.data import methods
from skill_train.data import problems as survey
from skill_train.data.check_row import checker, column_checker
from skill_train.data.problems import Survey
from skill_train.data.scan import complete, empty, find_format, require_columns, unread_text
from skill_train.recipe.fields import Recipe
from skill_train.recipe.formats import Found, detect


@dataclass
class Subject:
    """What is looked at, and what was found out.

    Attributes:
        recipe: its dataset, and its mapping where it says one; `file` is where it was read.
        row: a typical one; empty when no row could be read.
        found: the format for sft, also when its mapping is only suggested.
        unread: columns of text that it leaves out, without the recipe saying so.
    """

    recipe: Recipe
    method: str
    row: dict[str, Any]
    verdicts: dict[str, methods.Verdict]
    found: Found | None
    seen: Survey
    file: Path | None = None
    unread: tuple[str, ...] = ()

    @property
    def verdict(self) -> methods.Verdict:
        return self.verdicts[self.method]

    @property
    def check(self) -> survey.Check | None:
        return check_for(self.method, self.verdict, self.found)


def look(asked: Recipe, method: str, file: Path | None) -> Subject:
    """Reads the dataset and judges it. Twice, when the first rows did not show every column that a format can use."""
    peeked = survey.peek(asked)
    if not peeked:
        seen = survey.survey(asked, None)
        if not seen.rows:
            raise empty(asked)
        return Subject(asked, method, {}, methods.judge({}, None), None, seen, file)
    row = survey.typical(peeked)
    found = find_format(asked, row) if asked.format or asked.columns else _usual_format(peeked[0], row)
    verdicts = methods.judge(row, found, peeked)
    while True:
        verdict = verdicts["sft"]
        if verdict.format is not None:
            found = Found(verdict.format, verdict.columns, verdict.because, explicit=bool(asked.columns))
        seen = survey.survey(asked, check_for(method, verdicts[method], found))
        whole = complete(asked, found, seen.columns) if found is not None else None
        if whole is None or whole == found:
            if found is not None and asked.columns:
                require_columns(asked, found, seen.columns)
            leaves = unread_text(peeked, found.columns) if found is not None and not asked.columns else []
            return Subject(asked, method, row, verdicts, found, seen, file, tuple(leaves))
        verdicts["sft"] = dataclasses.replace(verdict, columns=whole.columns, because=whole.reason)


def _usual_format(first: dict[str, Any], row: dict[str, Any]) -> Found | None:
    """What training would find, from the first row, unless that row is not like the others."""
    found = detect(row)
    same = detect(first)
    alike = found is not None and same is not None and (same.format, same.required) == (found.format, found.required)
    return found if alike else None


def check_for(method: str, verdict: methods.Verdict, found: Found | None) -> survey.Check | None:
    if verdict.verdict == "impossible":
        return None
    if method == "sft":
        return checker(found) if found is not None else None
    return column_checker(verdict.columns)
