"""Inspects a dataset as training would read it."""

import dataclasses
from pathlib import Path

from skill_train.core.errors import Temporary, UsageError
from skill_train.data import read_rows
from skill_train.data.inspect import Inspection, inspect_dataset
from skill_train.program.rows import TABLE_FILES
from skill_train.recipe.fields import Recipe


def inspected(recipe: Recipe, method: str, file: Path | None, pictures: bool | None) -> Inspection:
    """The dataset, inspected as training would read it. On the Hub, rows of a table, and rows with pictures in separate
    files, are read from their own file. `pictures` says whether the model reads pictures; None without a model."""
    if recipe.data_file is not None or method == "sft":
        of_file = _with_row_file(recipe, pictures=pictures is not False)
        inspection = inspect_dataset(of_file, method, file, pictures=pictures)
        same = of_file.data_file in (None, recipe.data_file)
        if same or str(of_file.data_file).endswith(TABLE_FILES) or inspection.has_pictures:
            return inspection
    return inspect_dataset(recipe, method, file, pictures=pictures)


def _with_row_file(recipe: Recipe, *, pictures: bool) -> Recipe:
    """The recipe with the commit and the file of a dataset on the Hub whose rows are in a table, or have pictures in
    separate files. Unchanged for another dataset."""
    if Path(recipe.data).exists() or not read_rows.is_id(recipe.data):
        return recipe
    from skill_train.hub import datasets

    try:
        row_file = datasets.find_row_file(recipe, pictures=pictures)
    except (Temporary, UsageError):
        if recipe.data_file is not None:
            raise
        return recipe  # the later reading raises the error, or finds the rows in the cache
    return recipe if row_file is None else dataclasses.replace(recipe, data_revision=row_file[0], data_file=row_file[1])
