"""Inspects a dataset as training would read it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from skill_train.core.errors import UsageError
from skill_train.data import read_rows
from skill_train.data.inspect import Inspection, inspect_dataset
from skill_train.recipe.fields import Recipe


def inspected(asked: Recipe, method: str, file: Path | None, pictures: bool | None) -> Inspection:
    """The dataset, inspected as training would read it: on the Hub, rows that have their pictures in files beside them
    are read from their file.

    Args:
        pictures: the model reads them; None where no model is named.
    """
    if asked.data_file is not None or (method == "sft" and pictures is not False):
        subject = inspect_dataset(_of_row_file(asked), method, file, pictures=pictures)
        if subject.recipe.data_file == asked.data_file or subject.has_pictures:
            return subject
    return inspect_dataset(asked, method, file, pictures=pictures)


def _of_row_file(asked: Recipe) -> Recipe:
    """The recipe with the file of rows on the Hub that has pictures beside it, at its commit; as it is for another
    dataset."""
    if Path(asked.data).exists() or not read_rows.is_id(asked.data):
        return asked
    from skill_train.hub import datasets

    try:
        found = datasets.find_row_file(asked)
    except UsageError:
        if asked.data_file is not None:
            raise
        return asked  # reading it says what is wrong
    return asked if found is None else dataclasses.replace(asked, data_revision=found[0], data_file=found[1])
