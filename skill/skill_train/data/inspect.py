"""Inspects a dataset: its format or a suggested mapping, the verdict for each method, and its problems."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from skill_train.data import methods, problems
from skill_train.data.check_row import Check, checker, column_checker
from skill_train.data.errors import empty
from skill_train.data.problems import RefusedRows, Survey
from skill_train.data.row_pictures import PROBLEMS, RowPictures, folder_of
from skill_train.data.scan import complete, find_format, first_rows_of, require_columns, usual_format
from skill_train.data.unread import unread_text
from skill_train.program.chat.row_notes import RowNotes
from skill_train.program.examples import Row
from skill_train.recipe.fields import Recipe
from skill_train.recipe.formats import DetectedFormat, has_pictures

_NONE = RefusedRows()


@dataclass
class Inspection:
    """The dataset that is inspected, and the findings."""

    recipe: Recipe  # names the dataset, and may have a mapping; `file` is the recipe's own file
    method: str
    row: Row  # a typical one; empty when no row could be read
    verdicts: dict[str, methods.Verdict]
    detected: DetectedFormat | None  # the format for sft, even if its mapping is only a suggestion
    survey: Survey
    file: Path | None = None
    unread: tuple[str, ...] = ()  # columns of text that it leaves out, without the recipe saying so
    pictures: RowPictures | None = None  # of the rows; None where they are read as text

    @property
    def verdict(self) -> methods.Verdict:
        return self.verdicts[self.method]

    @property
    def has_pictures(self) -> bool:
        """Whether a row has pictures, also a row that training refuses for them."""
        counted = self.pictures is not None and self.pictures.figures.pictures
        return bool(counted) or any(
            self.survey.problems[name].rows for name in PROBLEMS if name in self.survey.problems
        )

    @property
    def check(self) -> Check | None:
        return check_for(self.method, self.verdict, self.detected, self.pictures)


def inspect_dataset(recipe: Recipe, method: str, file: Path | None, *, pictures: bool | None = False) -> Inspection:
    """Reads the dataset and judges it. Reads it twice if the first rows did not show every column that a format can
    use.

    Args:
        pictures: whether the model reads them. None if no model is named: they are read if a row has some.
    """
    peeked = first_rows_of(recipe)
    if not peeked:
        survey = problems.survey(recipe, None)
        if not survey.rows:
            raise empty(recipe)
        return Inspection(recipe, method, {}, methods.judge({}, None), None, survey, file)
    undecided = method == "sft" and pictures is None
    if method != "sft" or pictures is None:
        pictures = method == "sft" and any(map(has_pictures, peeked))
    row = problems.typical(peeked)
    by_recipe = bool(recipe.format or recipe.columns)
    detected = find_format(recipe, row, pictures=pictures) if by_recipe else _usual_format(peeked[0], row, pictures)
    verdicts = methods.judge(row, detected, peeked, pictures=pictures)
    while True:
        verdict = verdicts["sft"]
        if verdict.format is not None:
            detected = DetectedFormat(verdict.format, verdict.columns, verdict.because, explicit=bool(recipe.columns))
        images = RowPictures(folder_of(recipe)) if pictures else None
        row_notes = None if pictures or method != "sft" else RowNotes()
        check = check_for(method, verdicts[method], detected, images)
        survey = problems.survey(recipe, check, detected, images, row_notes)
        if undecided and not pictures and survey.problems.get("not_text", _NONE).rows:  # the first picture comes late
            return inspect_dataset(recipe, method, file, pictures=True)
        whole = complete(recipe, survey.detected, survey.columns) if survey.detected is not None else None
        if whole is None or whole == detected:
            if detected is not None and recipe.columns:
                require_columns(recipe, detected, survey.columns)
            named = bool(recipe.columns)
            leaves = (
                unread_text(peeked + survey.seen.later, detected.columns, named=named) if detected is not None else []
            )
            return Inspection(recipe, method, row, verdicts, detected, survey, file, tuple(leaves), images)
        verdicts["sft"] = dataclasses.replace(verdict, columns=whole.columns, because=whole.reason)


def _usual_format(first: Row, row: Row, pictures: bool) -> DetectedFormat | None:
    """The format that training would detect from the first row, unless that row differs from the others."""
    detected, same = usual_format(row, pictures=pictures), usual_format(first, pictures=pictures)
    if detected is None or same is None or (same.format, same.required) != (detected.format, detected.required):
        return None
    return detected


def check_for(
    method: str, verdict: methods.Verdict, detected: DetectedFormat | None, pictures: RowPictures | None = None
) -> Check | None:
    if verdict.verdict == "impossible":
        return None
    if method == "sft":
        return checker(detected, pictures) if detected is not None else None
    return column_checker(verdict.columns)
