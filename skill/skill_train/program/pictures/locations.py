"""Where the pictures of rows lie: beside a table of an imagefolder, or beside a file of rows, here or on the Hub.

A file of rows on the Hub is read as the same file in a folder here: it and the pictures that its rows name are
brought to the cache of huggingface_hub, at one commit. The paths in its rows begin in its folder.
"""

import posixpath
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from skill_train.program.events import Refused, hub_refusal
from skill_train.program.examples import MEDIA_MAGIC, Row, media_in, unreadable
from skill_train.program.model_files import nodes_in, require_announced
from skill_train.program.parquet import SPLITS, STATE

HUB_FOLDER = "datasets--"  # how huggingface_hub begins the name of a dataset's folder in its cache
ROWS_AHEAD, FILES_AT_ONCE = 64, 8  # rows whose pictures are brought together, and requests at the same time
NAME_CHARACTERS = 1024  # a longer text in a row names no file
# The table beside the pictures of a folder, as the `imagefolder` of `datasets` has it: its column `file_name`, or
# another that ends so, names a file beside the table.
TABLES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
FILE_NAME = re.compile(r"(?:\w+_)?file_names?")
COMMIT = re.compile(r"[0-9a-f]{40}")


class HubFile(NamedTuple):
    """A file of rows in a dataset on the Hub."""

    dataset: str
    commit: str
    name: str  # its path in the repository

    def __str__(self) -> str:
        return rows_named(self.dataset, self.name)

    @property
    def root(self) -> Path:
        """The files of this commit in the cache of huggingface_hub."""
        return cache_of(self.dataset) / "snapshots" / self.commit

    @property
    def folder(self) -> Path:
        """Where the paths of its pictures begin."""
        return (self.root / self.name).parent

    def beside(self, text: str) -> str:
        """The path in the repository of the file that a text in a row names, if it names one."""
        return posixpath.normpath(posixpath.join(posixpath.dirname(self.name), text))


def hub_file(dataset: str, commit: str | None, name: str) -> HubFile:
    """The file of rows that a recipe names. It needs a commit, and lies in the repository."""
    if commit is None or not COMMIT.fullmatch(commit) or not is_inside(name):
        raise Refused(
            f"{name[:200]} is not a file of a commit of {dataset}",
            code="bad_plan",
            expected="a path in the repository, and the commit as data_revision",
            got=f"data_file {name[:200]}, data_revision {commit}",
            hint="make the plan again: skill-train plan finds the commit",
        )
    return HubFile(dataset, commit, name)


def is_inside(name: str) -> bool:
    """Whether a name is that of a file in a repository, written in the usual way."""
    return name == posixpath.normpath(name) and not name.startswith(("/", "..")) and "\\" not in name and name != "."


def rows_named(data: str, file: str | None) -> str:
    """The rows in words: `rows.jsonl`, or `train.jsonl in owner/name`."""
    return data if file is None else f"{file} in {data}"


def picture_folder(data: str, file: str | None = None, commit: str | None = None) -> Path:
    """The folder where the paths of pictures begin, and which they may not leave: the data itself, if it is a
    folder, or the folder of the data file, with links followed. For data on the Hub it lies in the cache: the folder of
    the file of rows, or of the dataset. `file` and `commit` are `data_file` and `data_revision` of the recipe."""
    path = Path(data)
    if path.exists():
        return path if path.is_dir() else path.resolve().parent
    if file is not None:
        return hub_file(data, commit, file).folder
    return cache_of(data)


def cache_of(dataset: str) -> Path:
    """The folder of a dataset in the cache of huggingface_hub."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE) / f"{HUB_FOLDER}{dataset.replace('/', '--')}"


def hub_cache_of(folder: Path) -> Path | None:
    """The dataset's folder in the cache of huggingface_hub, for a folder in one of its snapshots, whose files are links
    to others in `blobs`. None for a folder of the user."""
    snapshots = (each for each in folder.parents if each.name == "snapshots")
    return next((each.parent for each in snapshots if each.parent.name.startswith(HUB_FOLDER)), None)


# --- A file of rows on the Hub ---

Numbered = TypeVar("Numbered", bound="tuple[Any, ...]")  # a line number, and its row


def with_files(rows: Iterator[Numbered], file: HubFile) -> Iterator[Numbered]:
    """The rows, once the files of the repository that they name lie in the cache. Only a few rows are held at once."""
    while ahead := list(islice(rows, ROWS_AHEAD)):
        texts = {text for each in ahead for _, text in nodes_in(each[1]) if isinstance(text, str)}
        named = {file.beside(text) for text in texts if 0 < len(text) < NAME_CHARACTERS}
        bring_files(file, named & files_at(file) if named else ())
        yield from ahead


@lru_cache(maxsize=1)
def files_at(file: HubFile) -> frozenset[str]:
    """The names of all files in the repository."""
    from huggingface_hub import HfApi

    with explained_hub(file):
        listed = HfApi().list_repo_files(file.dataset, repo_type="dataset", revision=file.commit)
        return frozenset(map(str, listed))


def bring_files(file: HubFile, names: Iterable[str]) -> None:
    """Brings files of the repository to the cache. Those that lie there cost no request."""
    from concurrent.futures import ThreadPoolExecutor  # it loads logging, which a plan does not need

    from huggingface_hub import hf_hub_download

    def bring(name: str) -> None:
        hf_hub_download(file.dataset, name, repo_type="dataset", revision=file.commit)

    missing = [name for name in names if not (file.root / name).is_file()]
    with explained_hub(file), ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        for _ in pool.map(bring, missing):
            pass


def brought_file(file: HubFile) -> Path:
    """The file of rows in the cache, with the bytes that the Hub announced."""
    bring_files(file, [file.name])
    require_announced(file.root / file.name)
    return file.root / file.name


@contextmanager
def explained_hub(file: HubFile) -> Iterator[None]:
    """Turns what huggingface_hub raises into a `Refused`."""
    try:
        yield
    except Exception as error:
        refusal = hub_refusal(f"{file} at commit {file.commit[:12]}", error)
        if refusal is None:
            raise
        raise refusal from None


@contextmanager
def named_as(path: Path, name: str) -> Iterator[None]:
    """Makes refusals in the block call a file in the cache by the name that the user knows."""
    try:
        yield
    except Refused as refusal:
        rename(refusal, path, name)
        raise


def rename(refusal: Refused, path: Path, name: str) -> None:
    words = refusal.error
    for key in ("message", "expected", "got", "hint"):
        words[key] = words[key].replace(str(path), name)
    refusal.args = (words["message"],)


# --- A folder of pictures with a table ---


def picture_table(folder: Path, split: str) -> Path | None:
    """The table of a folder of pictures: in the folder itself for the split train, or in the subfolder of the split.
    None for another folder. Refuses several tables, because only one of them would be read, silently."""
    name = split.split("[")[0]
    if (folder / STATE).is_file() or (folder / SPLITS).is_file():
        return None
    places = ([folder] if name == "train" else []) + ([folder / name] if is_name_of_folder(name) else [])
    tables = [place / table for place in places for table in TABLES if (place / table).is_file()]
    if len(tables) > 1:
        names = [table.relative_to(folder).as_posix() for table in tables]
        raise unreadable(
            f"{folder} has several tables of pictures for the split {name}",
            f"one of {', '.join(names)}",
            f"{len(names)} tables",
            "remove those that are not meant; the rows of only one would be read",
        )
    return tables[0] if tables else None


def is_name_of_folder(name: Any) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and not re.search(r"[/\\:\0]", name)


def in_folder(row: Row, folder: Path, table: Path) -> Row:
    """A row of the table, with its file names relative to the folder. It may not name a picture for `file_name` and
    another for `image`: `datasets` calls both `image`."""
    for name, column in (("file_name", "image"), ("file_names", "images")):
        if row.get(name) and row.get(column) and row[name] != row[column]:
            raise unreadable(
                f"{table} has the columns {name} and {column}, of which one would be read",
                f"one of both: `datasets` calls {name} {column} too",
                f"{name}, {column}",
                "rename or remove one of them in the table",
            )
    below = table.parent.relative_to(folder).as_posix()
    return {name: seen_from(name, value, below, folder) for name, value in row.items()}


def seen_from(column: str, value: Any, below: str, folder: Path) -> Any:
    """A value of the table in the folder `below`, with file names relative to `folder`. A name without a picture's
    ending may be a text: if its file is a picture, it becomes the dictionary that `datasets` makes of every name."""
    if not FILE_NAME.fullmatch(column):
        return value
    if isinstance(value, list):
        return [seen_from(column, each, below, folder) for each in value]
    if not isinstance(value, str) or not value:
        return value
    path = value if below == "." else f"{below}/{value}"
    plain = column in ("file_name", "file_names") and media_in(value) is None and is_picture_file(folder / path)
    return {"bytes": None, "path": path} if plain else path


def is_picture_file(path: Path) -> bool:
    """Whether it is a file that begins as pictures do."""
    try:
        if not path.is_file():  # to open a pipe would wait
            return False
        with open(path, "rb") as file:
            return MEDIA_MAGIC.match(file.read(24)) is not None
    except (OSError, ValueError):  # a name that no file can have
        return False
