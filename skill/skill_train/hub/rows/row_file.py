"""Reads a file of rows on the Hub, such as one with pictures beside it, as training reads it: as a local file."""

from skill_train.core.errors import refusals
from skill_train.hub import dataset_card
from skill_train.hub.dataset_card import Configuration
from skill_train.hub.rows import first_rows
from skill_train.hub.rows.read import FIRST_ROWS, PICTURE_ROWS, PICTURE_ROWS_BYTES, SMALL_BYTES, ReadRows, first_of
from skill_train.hub.rows.remote import SplitFiles
from skill_train.program.events import Refused
from skill_train.program.examples import Row
from skill_train.program.pictures.decode import PictureSource, picture_path
from skill_train.program.pictures.in_rows import lift_pictures
from skill_train.program.pictures.locations import FILE_NAME, HubFile, bring_files, brought_file, named_as
from skill_train.program.rows import TABLE_FILES, iter_file, iter_slice
from skill_train.recipe.fields import Recipe


def chosen(recipe: Recipe, files: SplitFiles, *, pictures: bool) -> HubFile | None:
    """The file that is read as a local file; None if `datasets` reads the dataset.

    It is the file that the recipe names. Or it is the only file of the split, if it is a table or has pictures beside
    it. `datasets` would change the values of a table: texts become numbers, and `NA` becomes nothing.

    Args:
        pictures: the model reads pictures.
    """
    [name, *others] = files.names
    own = not others and files.revision == files.commit and name.endswith(dataset_card.ROW_FILES)
    from_the_end = "[-" in recipe.split or ":-" in recipe.split  # a file has no such slice
    table = name.endswith(TABLE_FILES) and not from_the_end
    beside = pictures and dataset_card.has_pictures_beside(name, files.sizes)
    if recipe.data_file is None and not (own and (table or beside)):
        return None
    return HubFile(files.dataset, files.commit, name)


def is_image_folder(files: SplitFiles, read: ReadRows) -> bool:
    """Whether `datasets` reads the files as an imagefolder: they are tables of pictures with a `file_name` column."""
    tables = first_rows.is_picture_table(files.names)
    return tables and bool(read.numbered) and any(map(FILE_NAME.fullmatch, read.numbered[0][1]))


def read_file(recipe: Recipe, file: HubFile, files: SplitFiles, configuration: Configuration) -> ReadRows:
    """Reads the rows at the start of a file, and selects the recipe's slice if possible. A small file is read whole.

    Raises:
        UsageError: a row cannot be read, or the slice is not supported for files.
    """
    with refusals():
        read = first_of(recipe, files, configuration) if files.parquet or files.bytes > SMALL_BYTES else _all_of(file)
        sliced = list(iter_slice(iter(read.numbered), recipe.split))  # refuses a slice that files do not support
    if read.whole:
        return read._replace(total=len(sliced), numbered=sliced)
    total = dataset_card.between(recipe.split, read.total)
    if "%" in recipe.split or not sliced:
        return read._replace(total=total)
    return read._replace(total=total, numbered=sliced, whole=len(sliced) >= total)


def _all_of(file: HubFile) -> ReadRows:
    path = brought_file(file)
    with named_as(path, str(file)):
        numbered = list(iter_file(path))
    return ReadRows(len(numbered), "counted", numbered, True)


def rows_to_show(
    read: ReadRows, columns: dict[str, str], files: SplitFiles, file: HubFile | None
) -> list[tuple[int, Row]]:
    """The rows in which text and pictures are measured: the first rows, and the first rows with pictures. A picture
    beside a file of rows needs a request, so only a few rows with such pictures are taken.

    Args:
        columns: the columns of the format, with the column of the pictures.
    """
    rows, pictures, size = list[tuple[int, Row]](), 0, 0
    for number, (line, row) in enumerate(read.numbered):
        names = [] if file is None else names_of(row, columns, file)
        size_of_row = sum(files.sizes.get(name, 0) for name in names)
        within = pictures < PICTURE_ROWS and (not pictures or size + size_of_row <= PICTURE_ROWS_BYTES)
        has_some = bool(pictures_of(row, columns))
        if within if names else number < FIRST_ROWS or (has_some and within):
            rows.append((line, row))
            pictures, size = pictures + has_some, size + size_of_row
    return rows


def bring_pictures(numbered: list[tuple[int, Row]], columns: dict[str, str], file: HubFile) -> None:
    """Downloads the pictures of these rows to the cache.

    Raises:
        UsageError, AccessError, Temporary: a picture cannot be downloaded.
    """
    with refusals():
        bring_files(file, [name for _, row in numbered for name in names_of(row, columns, file)])


def pictures_of(row: Row, columns: dict[str, str]) -> list[PictureSource]:
    """The pictures of a row; empty if the format refuses the row."""
    try:
        return lift_pictures(row, columns)[1]
    except Refused:
        return []


def names_of(row: Row, columns: dict[str, str], file: HubFile) -> list[str]:
    """The paths in the repository of a row's pictures."""
    paths = map(picture_path, pictures_of(row, columns))
    return [file.beside(path) for path in paths if path is not None]
