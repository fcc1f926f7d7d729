"""Reads facts of a Hub dataset without downloading all of it: rows, columns, the first rows, and the revision."""

from collections.abc import Callable, Collection, Container
from dataclasses import dataclass, replace

from skill_train.core.errors import UsageError, quoted
from skill_train.facts import DatasetFacts, FirstPictures
from skill_train.hub import dataset_card
from skill_train.hub.client import REQUEST_SECONDS, api, ask
from skill_train.hub.dataset_card import Configuration
from skill_train.hub.errors import HubResource, understood
from skill_train.hub.repositories import or_other_kind
from skill_train.hub.rows import first_rows, row_file
from skill_train.hub.rows.read import ReadRows, first_of, image_folder_rows
from skill_train.hub.rows.remote import SplitFiles
from skill_train.program.examples import Row
from skill_train.program.pictures.locations import HubFile
from skill_train.recipe.fields import Recipe
from skill_train.recipe.formats import DetectedFormat

FindFormat = Callable[..., DetectedFormat]  # `first_format` of data/scan.py, which refuses rows that cannot be trained
_CONVERTED = "refs/convert/parquet"  # the revision with the Hub's own Parquet copy of a dataset


@dataclass(frozen=True)
class HubDataset:
    """The facts and the first rows of a dataset on the Hub."""

    facts: DatasetFacts
    first: tuple[Row, ...]  # rows from the start of the split, in which tokens are counted
    pictures: FirstPictures | None = None  # counts of the rows' pictures; None if the model reads only text


def inspect_dataset(recipe: Recipe, find_format: FindFormat, *, pictures: bool = False) -> HubDataset:
    """The facts of `recipe.data` on the Hub, and its first rows.

    Args:
        find_format: finds the format of the rows.
        pictures: the model reads pictures. A file of rows with pictures beside it is then read as a file.

    Raises:
        UsageError: the dataset, configuration or split does not exist; no file can be read; the columns are wrong;
            there are no rows; the repository lacks a picture.
        AccessError: the dataset is gated, or the token is refused.
        Temporary: the Hub cannot be reached.
        NotInstalled: the dataset is in Parquet and pyarrow is missing.
    """
    resource = HubResource("dataset", recipe.data)
    try:
        files, configuration = ask(resource, lambda: _files(recipe))
        file = _row_file_of(recipe, files, configuration, pictures=pictures)
        read = _read(recipe, files, configuration, file)
    except UsageError as error:
        raise or_other_kind(error, resource) from None
    rows = read.total if file is not None else dataset_card.sliced(recipe.split, read.total)
    if not read.rows or not rows:
        raise UsageError(
            f"{recipe.data} has no rows in {recipe.split}",
            code="empty_dataset",
            got="no rows",
            hint="use another split or another dataset",
        )
    if file is not None:
        recipe = replace(recipe, data_file=file.name, data_revision=file.commit)
    lines, listed = (None, None) if file is None else (read.lines, files.sizes)
    try:
        detected = find_format(recipe, read.rows, lines=lines, listed=listed, whole=read.whole)
    except UsageError as error:
        if file is None:
            _name_row_files(error, files)
        raise
    shown = row_file.rows_to_show(read, detected.columns, files, file)
    if file is not None:
        ask(resource, lambda: row_file.bring_pictures(shown, detected.columns, file), seconds=None)
    facts = DatasetFacts(
        source=recipe.data,
        fingerprint=None,
        rows=rows,
        column_names=tuple(read.rows[0]),
        format=detected.format,
        columns=detected.columns,
        bytes=files.bytes,
        reason=f"{detected.reason}; rows {read.basis}",
        revision=files.commit,
        data_file=None if file is None else file.name,
        rows_read=None if read.whole else len(read.rows),
        rows_estimated=read.basis if read.estimated and _follows(recipe.split, read.total, file) else None,
        data_config=recipe.data_config,
    )
    shown_lines = None if file is None else tuple(line for line, _ in shown)
    found = _pictures_of_all(read, detected.columns, rows, shown_lines) if pictures else None
    return HubDataset(facts, tuple(row for _, row in shown), found)


def find_row_file(recipe: Recipe, *, pictures: bool) -> tuple[str, str] | None:
    """The commit of a dataset and its file of rows, if training reads that file itself: a table, or a file with
    pictures beside it. None if `datasets` reads the dataset. Raises what `inspect_dataset` raises.

    Args:
        pictures: the model reads pictures.
    """
    files, configuration = ask(HubResource("dataset", recipe.data), lambda: _files(recipe))
    file = _row_file_of(recipe, files, configuration, pictures=pictures)
    return None if file is None else (file.commit, file.name)


def _row_file_of(recipe: Recipe, files: SplitFiles, configuration: Configuration, *, pictures: bool) -> HubFile | None:
    file = row_file.chosen(recipe, files, pictures=pictures)
    if file is None or recipe.data_file is not None or not first_rows.is_picture_table(files.names):
        return file
    read = ask(HubResource("dataset", recipe.data), lambda: first_of(recipe, files, configuration))
    return None if row_file.is_image_folder(files, read) else file


def _read(recipe: Recipe, files: SplitFiles, configuration: Configuration, file: HubFile | None) -> ReadRows:
    resource = HubResource("dataset", recipe.data)
    if file is not None:
        return ask(resource, lambda: row_file.read_file(recipe, file, files, configuration), seconds=None)
    read = ask(resource, lambda: first_of(recipe, files, configuration))
    if not row_file.is_image_folder(files, read):
        return read
    rows = ask(resource, lambda: image_folder_rows(recipe, files, configuration))
    return read._replace(numbered=list(enumerate(rows, start=1)), whole=len(rows) >= read.total)


def _files(recipe: Recipe) -> tuple[SplitFiles, Configuration]:
    """The files of the split: the repository's own, or else the Hub's Parquet copy."""
    info = api().dataset_info(recipe.data, revision=recipe.data_revision, files_metadata=True, timeout=REQUEST_SECONDS)
    with understood(HubResource("dataset", recipe.data)):
        card = info.card_data.to_dict() if info.card_data else {}
        sizes = {str(file.rfilename): int(file.size or 0) for file in info.siblings or []}
        if recipe.data_file is not None:
            _require_file(recipe.data_file, sizes, recipe.data)
            return SplitFiles(recipe.data, info.sha, info.sha, [recipe.data_file], sizes), Configuration(
                "default", {}, {}
            )
        _require_no_program(recipe.data, sizes)
        configuration = dataset_card.configuration(card, sizes, chosen=recipe.data_config, dataset=recipe.data)
        split = dataset_card.parts(recipe.split)[0]
        if not configuration.files and recipe.data_revision is None:  # the copy is made from the newest commit
            copy = _converted(recipe.data, configuration.name, split)
            if copy:
                return SplitFiles(recipe.data, info.sha, _CONVERTED, list(copy), copy), configuration
        names = dataset_card.split_files(configuration, split, dataset=recipe.data)
        return SplitFiles(recipe.data, info.sha, info.sha, names, sizes), configuration


def _pictures_of_all(
    read: ReadRows, columns: dict[str, str], rows: int, lines: tuple[int, ...] | None
) -> FirstPictures:
    counts = [len(row_file.pictures_of(row, columns)) for row in read.rows]
    return FirstPictures(round(sum(counts) * rows / len(counts)), max(counts), lines)


def _follows(split: str, rows: int, file: HubFile | None) -> bool:
    """Whether the number of rows in a slice depends on the number in its split; in `train[:500]` it does not. For a
    file, `rows` already is the number in the slice."""
    return file is not None or dataset_card.sliced(split, rows) != dataset_card.sliced(split, 2 * rows)


def _name_row_files(error: UsageError, files: SplitFiles) -> None:
    """If a picture was not found in a split of several files, adds the names that `data_file` can have to the hint."""
    named = [name for name in files.names if name.endswith(dataset_card.ROW_FILES)]
    if error.code == "bad_picture" and len(named) > 1 and dataset_card.has_pictures_beside(named[0], files.sizes):
        more = f" and {len(named) - 4} more" if len(named) > 4 else ""
        error.hint = (
            f"join the rows of {', '.join(named[:4])}{more} into one file of the repository, or train on one of them: "
            f"data_file: {named[0]} in the recipe"
        )


def _require_no_program(dataset: str, sizes: Collection[str]) -> None:
    """Refuses a dataset with a loading script. `datasets` 5 does not run scripts, and reads no other file of such a
    repository."""
    program = f"{dataset.rpartition('/')[2]}.py"
    if program not in sizes:
        return
    rows = next((name for name in sorted(sizes) if name.endswith(dataset_card.ROW_FILES)), None)
    raise UsageError(
        f"{dataset} is loaded by a program in its repository, which datasets does not run any more",
        code="unreadable_dataset",
        expected="a dataset of files of rows",
        got=program,
        hint="data_revision: refs/convert/parquet in the recipe reads the Hub's own copy in Parquet, if it has one"
        if rows is None
        else f"data_file: {quoted(rows)} in the recipe reads this file alone, and data_revision: "
        "refs/convert/parquet the Hub's own copy in Parquet, if it has one",
    )


def _require_file(name: str, sizes: Container[str], dataset: str) -> None:
    if name not in sizes or not name.endswith(dataset_card.ROW_FILES):
        raise UsageError(
            f"{dataset} has no file of rows {name[:200]}",
            code="bad_recipe",
            expected=f"a file of the repository: {', '.join(dataset_card.ROW_FILES)}",
            got=f"data_file: {name[:200]}",
            hint="correct data_file in the recipe, or leave it out",
        )


def _converted(dataset: str, config: str, split: str) -> dict[str, int]:
    from huggingface_hub.errors import EntryNotFoundError, RevisionNotFoundError

    try:
        listed = list(api().list_repo_tree(dataset, f"{config}/{split}", repo_type="dataset", revision=_CONVERTED))
    except (EntryNotFoundError, RevisionNotFoundError):
        return {}
    return {file.path: int(file.size) for file in listed if file.path.endswith(".parquet")}
