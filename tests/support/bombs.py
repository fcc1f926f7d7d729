"""Datasets of some kilobytes that say much more when they are read: each a way that compressed tables have for that."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

BIG = 1_000_000  # characters


def one_text_a_million_times(path: Path) -> None:
    """A dictionary with one text, and a run of its number: a gigabyte in each batch of rows."""
    import pyarrow

    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1_024_000, "int32"), pyarrow.array(["a" * BIG]))
    _write(path, {"text": texts}, store_schema=False)


def one_text_many_times_in_one_row(path: Path) -> None:
    import pyarrow

    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 3000, "int32"), pyarrow.array(["a" * BIG]))
    kinds = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 3000, "int32"), pyarrow.array(["user"]))
    turns = pyarrow.StructArray.from_arrays([kinds, texts], ["role", "content"])
    _write(path, {"messages": pyarrow.ListArray.from_arrays([0, 3000], turns)}, store_schema=False)


def a_page_of_one_letter(path: Path) -> None:
    path.write_bytes(_page_of_one_letter())


@cache
def _page_of_one_letter() -> bytes:
    """A kilobyte, which takes seconds to make."""
    options: dict[str, Any] = {"compression": "brotli", "compression_level": 3}
    with TemporaryDirectory() as folder:
        file = Path(folder) / "page"
        _write(file, {"text": ["a" * 400_000_000]}, use_dictionary=False, write_statistics=False, **options)
        return file.read_bytes()


def a_page_that_says_less_in_the_footer(path: Path) -> None:
    """The footer says that the column is small; the header of its page has the true size."""
    from pyarrow import parquet

    a_page_of_one_letter(path)
    true = _varint(parquet.ParquetFile(path).metadata.row_group(0).column(0).total_uncompressed_size)
    lie = bytes([0x90, 0x80, 0x80, 0x80, 0x00])  # 8, in as many bytes
    assert len(true) == len(lie) and path.read_bytes().count(true) >= 1
    path.write_bytes(path.read_bytes().replace(true, lie))


def texts_that_share_their_beginning(path: Path) -> None:
    """Each is written as what it has more than the one before it."""
    texts = ["a" * BIG + str(number) for number in range(1500)]
    _write(path, {"text": texts}, use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY"})


def texts_of_one_row_that_share_their_beginning(path: Path) -> None:
    turns = [{"role": "user", "content": "a" * BIG + str(number)} for number in range(1100)]
    name = "messages.list.element."
    encodings = {name + "content": "DELTA_BYTE_ARRAY", name + "role": "PLAIN"}
    _write(path, {"messages": [turns]}, use_dictionary=False, column_encoding=encodings)


def rows_of_nothing(path: Path) -> None:
    import pyarrow

    _write(path, {"text": pyarrow.nulls(50_000_000, pyarrow.string())})


def a_row_of_very_many_parts(path: Path) -> None:
    import pyarrow

    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 20_000_000, "int32"), pyarrow.array(["a"]))
    _write(path, {"text": ["a"], "parts": pyarrow.ListArray.from_arrays([0, 20_000_000], texts)}, store_schema=False)


def a_folder_of_compressed_arrow(path: Path) -> None:
    import pyarrow

    _folder(path, pyarrow.table({"text": ["a" * 600_000_000]}), compression="zstd")


def a_folder_of_rows_of_nothing(path: Path) -> None:
    import pyarrow

    _folder(path, pyarrow.table({"text": pyarrow.nulls(50_000_000)}))


FILES: tuple[Callable[[Path], None], ...] = (
    one_text_a_million_times,
    one_text_many_times_in_one_row,
    a_page_of_one_letter,
    a_page_that_says_less_in_the_footer,
    texts_that_share_their_beginning,
    texts_of_one_row_that_share_their_beginning,
    rows_of_nothing,
    a_row_of_very_many_parts,
)
FOLDERS: tuple[Callable[[Path], None], ...] = (a_folder_of_compressed_arrow, a_folder_of_rows_of_nothing)


def equal_rows(path: Path) -> None:
    """100,000 times the same short row: it is as small, and a dataset all the same."""
    turns = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Four, as always."}]
    _write(path, {"messages": [turns] * 100_000})


def _write(path: Path, columns: dict[str, Any], **options: Any) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path, **{"compression": "zstd", **options})


def _folder(path: Path, table: Any, **options: Any) -> None:
    """As `datasets` saves one, with the rows of `table` in its place."""
    import datasets
    import pyarrow

    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(str(path))
    [file] = path.glob("*.arrow")
    if table.schema.field("text").type == pyarrow.null():
        info = path / "dataset_info.json"
        info.write_text(info.read_text().replace('"string"', '"null"'))
    written = pyarrow.ipc.IpcWriteOptions(**options)
    with pyarrow.OSFile(str(file), "wb") as out, pyarrow.ipc.new_stream(out, table.schema, options=written) as stream:
        stream.write_table(table)


def _varint(number: int) -> bytes:
    """As Thrift's compact protocol writes it."""
    left, found = number << 1, bytearray()
    while left > 0x7F:
        found.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([*found, left])
