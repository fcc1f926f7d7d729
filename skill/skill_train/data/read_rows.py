"""Reads a dataset row by row. An unreadable line is returned as a `Broken`, and reading continues."""

from collections.abc import Iterator
from pathlib import Path

from skill_train.core.errors import Temporary, UsageError
from skill_train.program.events import first_line
from skill_train.program.examples import Row
from skill_train.program.pictures.locations import HubFile, brought_file, hub_file, named_as, rename, with_files
from skill_train.program.rows import Broken, Line, iter_rows, iter_slice, lines_of
from skill_train.recipe.fields import Recipe

LINES = (".jsonl", ".ndjson")
SUFFIXES = (*LINES, ".json", ".csv", ".tsv", ".parquet")


def read(recipe: Recipe) -> Iterator[Line]:
    """Every row of the chosen split, in constant memory for files with one row a line.

    Raises:
        UsageError: the dataset does not exist.
        Refused: by the training program: the split does not exist, the kind of file is unknown, or a line or a document
            is too long.
        Temporary: the Hub cannot be reached.
    """
    path = Path(recipe.data)
    if path.is_file():
        if not recipe.split.startswith("train"):
            next(iter_rows(recipe.data, split=recipe.split))  # raises the refusal
        lines = lines_of(path)
        yield from lines if recipe.split == "train" else _sliced(lines, recipe.split)
    else:
        if path.exists() and not path.is_dir():
            raise UsageError(
                f"{path} is a pipe or a device, and a dataset must be readable more than once",
                code="missing_file",
                expected="a dataset file or folder, or a Hub id such as owner/name",
                got=recipe.data,
                hint="write the rows to a .jsonl file and use that file",
            )
        if recipe.data_file is not None and not path.exists():
            yield from _hub_file(hub_file(recipe.data, recipe.data_revision, recipe.data_file), recipe.split)
            return
        rows = iter_rows(recipe.data, split=recipe.split, config=recipe.data_config, revision=recipe.data_revision)
        yield from ((number, row, None) for number, row in (rows if path.exists() else _from_hub(recipe, rows)))


def _hub_file(file: HubFile, split: str) -> Iterator[Line]:
    """The rows of one file on the Hub, read like those of a local file, with their pictures in the cache."""
    path = brought_file(file)
    lines = lines_of(path)
    with named_as(path, str(file)):
        for line in with_files(lines if split == "train" else _sliced(lines, split), file):
            if isinstance(line[1], Broken):
                rename(line[1].refusal, path, str(file))
            yield line


def is_id(name: str) -> bool:
    """Whether a text that is not a local path can be a dataset id on the Hub."""
    path = Path(name)
    return name.count("/") == 1 and not path.is_absolute() and name[0] != "." and path.suffix.lower() not in SUFFIXES


def _from_hub(recipe: Recipe, rows: Iterator[tuple[int, Row]]) -> Iterator[tuple[int, Row]]:
    if not is_id(recipe.data):
        raise UsageError(
            f"{recipe.data} does not exist",
            code="missing_file",
            expected="a dataset file or folder, or a Hub id such as owner/name",
            got=recipe.data,
            hint="check the path; Hub ids have the form NAMESPACE/NAME",
        )
    try:
        yield from rows
    except OSError as error:
        raise Temporary(
            f"the dataset {recipe.data} cannot be read from the Hub: {first_line(error)}",
            code="hub_unreachable",
            expected="a dataset on the Hub, or a file on this machine",
            hint="try again when the Hub can be reached, or use a local file",
        ) from None


def _sliced(lines: Iterator[Line], split: str) -> Iterator[Line]:
    """The rows of a slice, and each broken line before its end, because training is refused for those too."""
    broken: list[Line] = []

    def whole() -> Iterator[tuple[int, Line]]:
        for line in lines:
            if isinstance(line[1], Broken):
                broken.append(line)
            else:
                yield line[0], line

    for _, line in iter_slice(whole(), split):
        yield from broken
        broken.clear()
        yield line
    yield from broken


def free_name(path: Path) -> str:
    """An unused name beside the dataset for its usable rows."""
    beside = path.with_name(path.stem if path.exists() else path.name)
    names = (beside.with_name(f"{beside.name}.fixed{n}.jsonl") for n in ["", *(f"-{i}" for i in range(2, 1000))])
    return str(next(name for name in names if not name.exists()))
