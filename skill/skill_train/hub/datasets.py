"""Facts of a Hub dataset without downloading it: rows, columns, the first rows, and the revision."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skill_train.core.errors import NotInstalled, SkillTrainError, UsageError
from skill_train.facts import DatasetFacts
from skill_train.hub import dataset_card, first_rows
from skill_train.hub.client import REQUEST_SECONDS, RequestSubject, ask, understood
from skill_train.hub.dataset_card import Configuration
from skill_train.program.examples import Row
from skill_train.program.parquet import as_written
from skill_train.recipe.fields import Recipe
from skill_train.recipe.formats import DetectedFormat

# Finds the format of the first rows for a recipe. Refuses rows that cannot be trained.
FindFormat = Callable[[Recipe, Sequence[Row]], DetectedFormat]

_SMALL_BYTES = 8_000_000  # text files up to this size together are read whole, so their rows are counted
_START_BYTES = 512_000  # of a larger one
_MOST_BYTES = 32_000_000  # for all that is read to look at one dataset
_MOST_PICTURE_BYTES = 320_000_000  # the same, where rows hold pictures: datasets writes them in pieces of 100 rows
_PICTURE_ROWS_BYTES = 16_000_000  # of such rows
_PICTURE_ROWS = 16  # of a folder of pictures: each is a request
_MOST_FOOTERS = 16
_PAGE_BYTES = 262_144
_FIRST_ROWS = 200
_CONVERTED = "refs/convert/parquet"  # the revision with the Hub's own Parquet copy of a dataset


@dataclass(frozen=True)
class HubDataset:
    """A dataset on the Hub, as far as it was read.

    Attributes:
        first: rows from the start of the split, in which tokens are counted.
        rows_basis: how the number of rows was determined.
    """

    facts: DatasetFacts
    first: tuple[Row, ...]
    rows_basis: str


@dataclass(frozen=True)
class _Files:
    """The files of one split, with their sizes in bytes.

    Attributes:
        commit: the commit of the dataset.
        revision: the revision with the files: that commit, or the Hub's Parquet copy.
    """

    dataset: str
    commit: str
    revision: str
    names: list[str]
    sizes: dict[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.sizes[name] for name in self.names)

    @property
    def parquet(self) -> bool:
        return self.names[0].endswith(".parquet")


def inspect_dataset(recipe: Recipe, find_format: FindFormat) -> HubDataset:
    """The facts of `recipe.data` on the Hub, and its first rows.

    Args:
        find_format: finds the format of the rows, as in `data/scan.py`.

    Raises:
        UsageError: the dataset, configuration or split does not exist; no file can be read; the columns are wrong;
            there are no rows.
        AccessError: the dataset is gated, or the token is refused.
        Temporary: the Hub cannot be reached.
        NotInstalled: the dataset is in Parquet and pyarrow is missing.
    """
    subject = RequestSubject("dataset", recipe.data)
    try:
        files, configuration = ask(subject, lambda: _files(recipe))
        total, basis, first = ask(subject, lambda: _rows(recipe, files, configuration))
        if first and first_rows.is_picture_table(files.names) and first_rows.names_pictures(first[0]):
            first = ask(subject, lambda: _of_pictures(recipe, files, configuration))
    except UsageError as error:
        raise _or_model(error, recipe.data) from None
    rows = dataset_card.sliced(recipe.split, total)
    if not first or not rows:
        raise UsageError(
            f"{recipe.data} has no rows in {recipe.split}",
            code="empty_dataset",
            got="no rows",
            hint="use another split or another dataset",
        )
    detected = find_format(recipe, first)
    facts = DatasetFacts(
        source=recipe.data,
        fingerprint=None,
        rows=rows,
        column_names=tuple(first[0]),
        format=detected.format,
        columns=detected.columns,
        bytes=files.bytes,
        reason=f"{detected.reason}; rows {basis}",
        revision=files.commit,
    )
    return HubDataset(facts, tuple(first[:_FIRST_ROWS]), basis)


def _files(recipe: Recipe) -> tuple[_Files, Configuration]:
    """The files of the split: the repository's own, or else the Hub's Parquet copy."""
    from huggingface_hub import HfApi

    info = HfApi().dataset_info(
        recipe.data, revision=recipe.data_revision, files_metadata=True, timeout=REQUEST_SECONDS
    )
    with understood(RequestSubject("dataset", recipe.data)):
        card = info.card_data.to_dict() if info.card_data else {}
        sizes = {str(file.rfilename): int(file.size or 0) for file in info.siblings or []}
        configuration = dataset_card.configuration(card, sizes, wanted=recipe.data_config, dataset=recipe.data)
        split = dataset_card.parts(recipe.split)[0]
        if not configuration.files and recipe.data_revision is None:  # the copy is made from the newest commit
            copy = _converted(recipe.data, configuration.name, split)
            if copy:
                return _Files(recipe.data, info.sha, _CONVERTED, list(copy), copy), configuration
        names = dataset_card.split_files(configuration, split, dataset=recipe.data)
        return _Files(recipe.data, info.sha, info.sha, names, sizes), configuration


def _converted(dataset: str, config: str, split: str) -> dict[str, int]:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import EntryNotFoundError, RevisionNotFoundError

    try:
        listed = list(HfApi().list_repo_tree(dataset, f"{config}/{split}", repo_type="dataset", revision=_CONVERTED))
    except (EntryNotFoundError, RevisionNotFoundError):
        return {}
    return {file.path: int(file.size) for file in listed if file.path.endswith(".parquet")}


def _rows(recipe: Recipe, files: _Files, configuration: Configuration) -> tuple[int, str, list[Row]]:
    """`(rows of the split, how their number was determined, rows that were read)`."""
    budget = _Budget(_MOST_BYTES)
    if files.parquet:
        return _parquet_rows(recipe, files, configuration, budget)
    if files.bytes <= _SMALL_BYTES:
        rows = [row for name in files.names for row in first_rows.parse(budget.read(files, name), name, whole=True)]
        return len(rows), "counted", rows
    name = files.names[0]
    start = budget.read(files, name, 0, min(_START_BYTES, files.sizes[name]))
    rows = first_rows.parse(start, name, whole=len(start) == files.sizes[name])
    stated = configuration.rows.get(dataset_card.parts(recipe.split)[0])
    if stated is not None:
        return stated, "as the dataset's card says", rows
    estimate = round(len(rows) * files.bytes / len(start))
    megabytes = files.bytes / 1e6
    return estimate, f"estimated from the first {len(start) / 1e6:.1f} of {megabytes:.0f} MB", rows


def _of_pictures(recipe: Recipe, files: _Files, configuration: Configuration) -> list[Row]:
    """The first rows of a folder of pictures, with their pictures.

    Raises:
        UsageError: a picture that a row of the first table names is not in the repository.
    """
    table, budget, shown = files.names[0], _Budget(_MOST_PICTURE_BYTES), list[Row]()
    for number, row in enumerate(_rows(recipe, replace(files, names=[table]), configuration)[2], start=1):
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
        if len(shown) < _PICTURE_ROWS and budget.read_bytes < _PICTURE_ROWS_BYTES:
            shown.append(first_rows.with_bytes(row, table, where, lambda name: budget.read(files, name)))
    return shown


def _parquet_rows(
    recipe: Recipe, files: _Files, configuration: Configuration, budget: _Budget
) -> tuple[int, str, list[Row]]:
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
        remote = pyarrow.PythonFile(_Remote(files, name, budget), mode="r")
        # Pages as they are needed: with pyarrow's own choice, 200 rows cost all columns of 100,000.
        file = parquet.ParquetFile(remote, pre_buffer=False, buffer_size=_PAGE_BYTES)
        if any(_holds_bytes(field.type) for field in file.schema_arrow):
            budget.most = _MOST_PICTURE_BYTES
        return file

    try:
        return _of_footers(files, configuration.rows.get(dataset_card.parts(recipe.split)[0]), opened)
    except (pyarrow.ArrowException, ValueError, RecursionError) as error:  # invalid JSON inside the file
        raise UsageError(
            f"{recipe.data} has a Parquet file that cannot be read",
            code="unreadable_dataset",
            got=str(error).split("\n")[0][:200],
            hint="try another data_revision",
        ) from None


def _of_footers(files: _Files, stated: int | None, opened: Callable[[str], Any]) -> tuple[int, str, list[Row]]:
    """`(rows, how their number was determined, first rows)`; `stated` is the number of rows in the card."""
    first_file = opened(files.names[0])
    batch = next(first_file.iter_batches(batch_size=_first_rows(first_file.metadata), use_threads=False), None)
    first = list(as_written(batch.to_pylist(), batch.schema)) if batch is not None else []
    if len(files.names) > _MOST_FOOTERS and stated is not None:
        return stated, "as the dataset's card says", first
    counted = [first_file, *(opened(name) for name in files.names[1:_MOST_FOOTERS])]
    rows = sum(file.metadata.num_rows for file in counted)
    if len(files.names) <= _MOST_FOOTERS:
        return rows, "counted in the files' footers", first
    estimate = round(rows * files.bytes / sum(files.sizes[name] for name in files.names[:_MOST_FOOTERS]))
    return estimate, f"estimated from {_MOST_FOOTERS} of {len(files.names)} files", first


def _first_rows(footer: Any) -> int:
    """How many rows to look at: fewer where they are large."""
    bytes_of_all = sum(footer.row_group(number).total_byte_size for number in range(footer.num_row_groups))
    mean = int(bytes_of_all // max(1, footer.num_rows))
    return max(1, min(_FIRST_ROWS, _PICTURE_ROWS_BYTES // max(1, mean)))


def _holds_bytes(kind: Any) -> bool:
    """Whether a column of Arrow holds files, as the Image feature of `datasets` does, or lists of them."""
    import pyarrow

    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        return _holds_bytes(kind.value_type)
    if pyarrow.types.is_struct(kind):
        return any(_holds_bytes(field.type) for field in kind)
    return bool(pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind))


class _Budget:
    """Reads parts of files until a limit of bytes is reached."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.read_bytes = 0

    def read(self, files: _Files, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file.

        Raises:
            UsageError: the rows are so large that reading the first ones takes too many bytes.
        """
        wanted = files.sizes[name] - start if length is None else length
        self.read_bytes += wanted
        if self.read_bytes > self.most:
            raise UsageError(
                f"the first rows of {files.dataset} are too large to inspect",
                code="unreadable_dataset",
                expected=f"complete rows within the first {self.most // 10**6} MB",
                hint="download the dataset and use the local file",
            )
        return _part(files, name, start, wanted) if wanted > 0 else b""


def _part(files: _Files, name: str, start: int, length: int) -> bytes:
    """One range of a file. If a server sends the whole file instead, only the range is read."""
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    url = hf_hub_url(files.dataset, name, repo_type="dataset", revision=files.revision)
    headers = {**build_hf_headers(), "Range": f"bytes={start}-{start + length - 1}", "Accept-Encoding": "identity"}
    with get_session().stream("GET", url, headers=headers, timeout=REQUEST_SECONDS) as response:
        if response.is_error:
            response.read()
        hf_raise_for_status(response)
        skip = start if response.status_code == 200 else 0
        data = bytearray()
        for piece in response.iter_bytes():
            data += piece
            if len(data) >= skip + length:
                break
    return bytes(data[skip : skip + length])


class _Remote(io.RawIOBase):
    """A Hub file in which pyarrow can seek; each read is one request."""

    def __init__(self, files: _Files, name: str, budget: _Budget) -> None:
        super().__init__()
        self._files, self._name, self._budget = files, name, budget
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._files.sizes[self._name]}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        rest = max(0, self._files.sizes[self._name] - self._at)
        length = rest if size is None or size < 0 else min(size, rest)
        data = self._budget.read(self._files, self._name, self._at, length)
        self._at += len(data)
        return data


def _or_model(error: UsageError, name: str) -> UsageError:
    """The error for an unknown dataset, or a better one if the id is that of a model."""
    if error.code != "unknown_dataset":
        return error
    from huggingface_hub import HfApi

    try:
        ask(RequestSubject("model", name), lambda: HfApi().model_info(name, timeout=5), seconds=5)
    except SkillTrainError:  # the request would only improve the message
        return error
    return UsageError(
        f"{name} is a model on the Hub, not a dataset",
        code="unknown_dataset",
        expected="the id of a dataset, or a file",
        got=name,
        hint=f"use it as the model: --model {name}",
    )
