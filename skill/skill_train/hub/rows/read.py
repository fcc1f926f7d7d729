"""Reads the first rows of a split on the Hub, from Parquet, text files or a folder of pictures."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from skill_train.core.errors import NotInstalled, UsageError
from skill_train.hub import dataset_card
from skill_train.hub.dataset_card import Configuration
from skill_train.hub.rows import first_rows
from skill_train.hub.rows.remote import ByteBudget, RemoteFile, SplitFiles
from skill_train.program.examples import RepeatedKey, Row
from skill_train.program.tables.columns import as_written
from skill_train.recipe.fields import Recipe

SMALL_BYTES = 8_000_000  # text files up to this size together are read whole, so their rows are counted
_START_BYTES = 512_000  # read from the start of a larger file
_MORE = 7  # if the start has no whole row, this many times as many bytes are read in addition
_MOST_BYTES = 32_000_000  # limit of all bytes that are read to inspect one dataset
_MOST_PICTURE_BYTES = 320_000_000  # this limit if rows hold pictures: datasets writes them in pieces of 100 rows
PICTURE_ROWS_BYTES = 16_000_000  # limit of the rows with pictures
PICTURE_ROWS = 16  # the most rows with pictures in files, because each picture is a request
FIRST_ROWS = 200
_MOST_FOOTERS = 16
_PAGE_BYTES = 262_144


class ReadRows(NamedTuple):
    """The first rows of a split."""

    total: int  # the number of rows in the split
    basis: str  # how `total` was determined
    numbered: list[tuple[int, Row]]  # the rows that were read, each with its line in its file
    whole: bool  # `numbered` has all rows
    estimated: bool = False  # `total` is neither counted nor stated in the card

    @property
    def rows(self) -> list[Row]:
        return [row for _, row in self.numbered]

    @property
    def lines(self) -> list[int]:
        return [line for line, _ in self.numbered]


def first_of(recipe: Recipe, files: SplitFiles, configuration: Configuration) -> ReadRows:
    """Reads the rows at the start of a split.

    Raises:
        UsageError: the rows cannot be read, or are too large.
        NotInstalled: the rows are in Parquet and pyarrow is missing.
    """
    budget = ByteBudget(_MOST_BYTES)
    stated = configuration.rows.get(dataset_card.parts(recipe.split)[0])
    if files.parquet:
        return _parquet_rows(recipe, files, stated, budget)
    if files.bytes <= SMALL_BYTES:
        texts = ((name, budget.read(files, name)) for name in files.names)
        numbered = [each for name, text in texts for each in first_rows.numbered(text, name, whole=True)]
        return ReadRows(len(numbered), "counted", numbered, True)
    name = next(name for name in files.names if files.sizes[name])
    start, numbered = b"", list[tuple[int, Row]]()
    while not numbered and len(start) < files.sizes[name]:
        more = _MORE * len(start) or _START_BYTES  # until the first row is whole
        start += budget.read(files, name, len(start), min(more, files.sizes[name] - len(start)))
        numbered = first_rows.numbered(start, name, whole=len(start) == files.sizes[name])
    if stated is not None:
        return ReadRows(stated, "as the dataset's card says", numbered, False)
    estimate = round(len(numbered) * files.bytes / len(start))
    basis = f"estimated from the first {len(start) / 1e6:.1f} of {files.bytes / 1e6:.0f} MB"
    return ReadRows(estimate, basis, numbered, whole=False, estimated=True)


def image_folder_rows(recipe: Recipe, files: SplitFiles, configuration: Configuration) -> list[Row]:
    """The first rows of a folder of pictures, with their pictures.

    Raises:
        UsageError: a picture that a row of the first table names is not in the repository.
    """
    table, budget, rows = files.names[0], ByteBudget(_MOST_PICTURE_BYTES), list[Row]()
    for number, row in enumerate(first_of(recipe, replace(files, names=[table]), configuration).rows, start=1):
        where = f"row {number} of {table} in {files.dataset}"
        for name in first_rows.picture_names(row, table, where):
            if name not in files.sizes:
                raise UsageError(
                    f"{where}: {name} does not exist",
                    code="bad_picture",
                    expected=f"a file of the repository, beside {table} or below it",
                    got=name[:200],
                    hint="upload the picture, or leave the row out",
                )
        if len(rows) < PICTURE_ROWS and budget.read_bytes < PICTURE_ROWS_BYTES:
            rows.append(first_rows.with_bytes(row, table, where, lambda name: budget.read(files, name)))
    return rows


def _parquet_rows(recipe: Recipe, files: SplitFiles, stated: int | None, budget: ByteBudget) -> ReadRows:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise NotInstalled(
            f"reading {recipe.data} needs pyarrow, because it is in Parquet format",
            code="missing_package",
            hint='pip install "skill-train[train]"',
        ) from None

    def opened(name: str) -> Any:
        remote = pyarrow.PythonFile(RemoteFile(files, name, budget), mode="r")
        # Reads single pages. With pyarrow's defaults, 200 rows would cost the bytes of 100,000 rows.
        file = parquet.ParquetFile(remote, pre_buffer=False, buffer_size=_PAGE_BYTES)
        if any(_holds_bytes(field.type) for field in file.schema_arrow):
            budget.most = _MOST_PICTURE_BYTES
        return file

    try:
        return _footer_rows(files, stated, opened)
    except RepeatedKey as error:
        raise UsageError(
            f"{recipe.data} has the key {str(error)[:80]!r} twice in one object of its first rows",
            code="unreadable_dataset",
            expected="each key once in an object; of two values one would be dropped silently",
            hint="correct the row and upload the file again, or use another data_revision",
        ) from None
    except (pyarrow.ArrowException, ValueError, RecursionError) as error:  # invalid JSON inside the file
        raise UsageError(
            f"{recipe.data} has a Parquet file that cannot be read",
            code="unreadable_dataset",
            got=str(error).split("\n")[0][:200],
            hint="try another data_revision",
        ) from None


def _footer_rows(files: SplitFiles, stated: int | None, opened: Callable[[str], Any]) -> ReadRows:
    """The first rows, and the number of all rows from the files' footers. `stated` is the number in the card."""
    first_file = opened(files.names[0])
    batch = next(first_file.iter_batches(batch_size=_first_rows(first_file.metadata), use_threads=False), None)
    rows = as_written(batch.to_pylist(), batch.schema) if batch is not None else []
    first = list(enumerate(rows, start=1))
    if len(files.names) > _MOST_FOOTERS and stated is not None:
        return ReadRows(stated, "as the dataset's card says", first, len(first) >= stated)
    counted = [first_file, *(opened(name) for name in files.names[1:_MOST_FOOTERS])]
    total = sum(file.metadata.num_rows for file in counted)
    if len(files.names) <= _MOST_FOOTERS:
        return ReadRows(total, "counted in the files' footers", first, len(first) >= total)
    estimate = round(total * files.bytes / sum(files.sizes[name] for name in files.names[:_MOST_FOOTERS]))
    basis = f"estimated from {_MOST_FOOTERS} of {len(files.names)} files"
    return ReadRows(estimate, basis, first, len(first) >= estimate, estimated=True)


def _first_rows(footer: Any) -> int:
    """How many rows to read: fewer if they are large."""
    bytes_of_all = sum(footer.row_group(number).total_byte_size for number in range(footer.num_row_groups))
    mean = int(bytes_of_all // max(1, footer.num_rows))
    return max(1, min(FIRST_ROWS, PICTURE_ROWS_BYTES // max(1, mean)))


def _holds_bytes(kind: Any) -> bool:
    """Whether an Arrow type holds bytes, as in the Image feature of `datasets`, or lists of them."""
    import pyarrow

    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        return _holds_bytes(kind.value_type)
    if pyarrow.types.is_struct(kind):
        return any(_holds_bytes(field.type) for field in kind)
    return bool(pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind))
