"""Parquet and Arrow: checks tables before they are unpacked."""

from __future__ import annotations

import copy
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from skill_train.program.events import Refused, first_line
from skill_train.program.examples import RepeatedKey, Row, repeated_key, unreadable
from skill_train.program.model_files import KINDS_OF_JSON, JsonObject, check_regular, foreign_json
from skill_train.program.tables.columns import as_written
from skill_train.program.tables.shape import require_distinct

# A table of one kilobyte can unpack to gigabytes: by its codec, by numbers that stand for a long text in a dictionary,
# by texts that repeat the beginning of the one before, by runs of rows or of parts of a row. `most_in_all` and
# `most_at_once` say what a file of a size may hold: as rows of Python, and in one page of each column or in one row.
ROWS_AT_ONCE = 1024
BATCH_BYTES = 32_000_000  # of one batch, if its rows are large, as with pictures
PIECE_BYTES = 1 << 20
VALUE_BYTES = 100  # of a value in Python, beside its text
# Numbers in Parquet: BYTE_ARRAY, FIXED_LEN_BYTE_ARRAY, DICTIONARY_PAGE, DELTA_BYTE_ARRAY; codecs by pyarrow's names.
TEXTS, FIXED, DICTIONARY_PAGE, PREFIXES = 6, 7, 2, 7
CODECS = {0: None, 1: "snappy", 2: "gzip", 4: "brotli", 5: "lz4_raw", 6: "zstd", 7: "lz4_raw"}
DICTIONARY_BYTES = 1 << 20  # writers add nothing to a dictionary of this size


def most_in_all(size: int) -> int:
    return max(1_000_000_000, 1000 * size)


def most_at_once(size: int) -> int:
    return max(32_000_000, 100 * size)


def too_much(path: Any, size: int, contents: str) -> Refused:
    return Refused(
        f"{path} has {size:,} bytes and unpacks to {contents}",
        code="unsafe_file",
        expected=f"at most {most_in_all(size):,} bytes in all, and {most_at_once(size):,} in one row or page",
        got=contents,
        hint="do not use this file; if you wrote it yourself, write its rows to a .jsonl file and use that",
    )


def parquet_batches(path: Path, size: int) -> Iterator[Any]:
    """The rows of a Parquet file, in batches that are small enough in memory. Its footer, and the headers of its pages,
    must not claim more than a file of this size may hold."""
    from pyarrow import parquet

    with open(path, "rb") as raw:
        groups, most = row_groups(raw, size), most_at_once(size)
        check_footer(groups, path, size)
        file = parquet.ParquetFile(path, **in_pieces(groups))
        if any(len(group.chunks) != len(file.schema) for group in groups):
            raise ValueError("its footer lacks a column")
        numbered = {i for group in groups for i, chunk in enumerate(group.chunks) if chunk.numbered}
        names = [file.schema.column(i).path for i in sorted(numbered)]
        by_number = parquet.ParquetFile(path, read_dictionary=names, **in_pieces(groups))
        for number, group in enumerate(groups):
            columns = [Column(raw, chunk, file.schema.column(i), most) for i, chunk in enumerate(group.chunks)]
            page, parts = sum(c.page for c in columns), sum(c.values for c in columns if c.repeated)
            if page > most:
                raise too_much(path, size, f"{page:,} bytes in one page of each column")
            if parts * VALUE_BYTES > most_in_all(size):
                raise too_much(path, size, f"{parts:,} parts of rows")
            # One row may hold the parts of all rows, and each part may be the longest text.
            wide = [c for c in columns if c.repeated and c.width * c.values > most_in_all(size)]
            if any(not c.numbered for c in wide):
                raise too_much(path, size, f"up to {max(c.width * c.values for c in wide):,} bytes of texts")
            rows = min(ROWS_AT_ONCE, most // max(1, sum(c.width for c in columns)), BATCH_BYTES // mean_row(group))
            # Read by number, a repeated text is in memory only once, but the rows take six times as long.
            yield from (by_number if wide else file).iter_batches(batch_size=max(1, rows), row_groups=[number])


def mean_row(group: Group) -> int:
    """Bytes of a row in a file, by its footer. Pictures make it large."""
    return 1 + sum(chunk.unpacked for chunk in group.chunks) // max(1, group.rows)


def in_pieces(groups: list[Group]) -> dict[str, Any]:
    """Options with which pyarrow reads a column of large rows piece by piece; none for small rows. By default it reads
    all rows of a group at once, which may be gigabytes with pictures."""
    large = any(mean_row(group) * ROWS_AT_ONCE > BATCH_BYTES for group in groups)
    return {"pre_buffer": False, "buffer_size": PIECE_BYTES} if large else {}


class Chunk(NamedTuple):
    """One column of one row group, as the footer describes it."""

    kind: int
    codec: int
    values: int
    unpacked: int
    packed: int
    data_at: int
    dictionary_at: int  # 0: none

    @property
    def numbered(self) -> bool:
        """Whether its texts are in a dictionary."""
        return self.kind == TEXTS and self.dictionary_at > 0


class Group(NamedTuple):
    rows: int
    chunks: list[Chunk]


def row_groups(raw: IO[bytes], size: int) -> list[Group]:
    """The row groups of a Parquet file, read without pyarrow (26), which crashes on a footer that it does not know."""
    raw.seek(max(0, size - 8))
    length, mark = int.from_bytes(raw.read(4), "little"), raw.read(4)
    if mark != b"PAR1" or length > size - 8:
        raise ValueError("it does not end as a Parquet file")
    raw.seek(size - 8 - length)
    try:
        footer, _ = thrift_struct(raw.read(length), 0)
        return [Group(group[3], [chunk_of(column[3]) for column in group[1]]) for group in footer[4]]
    except (IndexError, KeyError, TypeError, AttributeError):
        raise ValueError("its footer is broken") from None


def chunk_of(fields: dict[int, Any]) -> Chunk:
    chunk = Chunk(fields[1], fields[4], fields[5], fields[6], fields[7], fields[9], fields.get(11, 0))
    if any(type(number) is not int or number < 0 for number in chunk):
        raise ValueError("its footer has an invalid number")
    return chunk


def check_footer(groups: list[Group], path: Path, size: int) -> None:
    """Refuses a Parquet file whose footer claims more than a file of `size` bytes may hold."""
    rows = sum(group.rows for group in groups)
    if rows * VALUE_BYTES > most_in_all(size):
        raise too_much(path, size, f"{rows:,} rows")
    unpacked = sum(chunk.unpacked for group in groups for chunk in group.chunks)
    if unpacked > most_in_all(size):
        raise too_much(path, size, f"{unpacked:,} bytes")


class Column:
    """The claims of the pages of one column of one row group. pyarrow believes these, and not the footer."""

    def __init__(self, raw: IO[bytes], chunk: Chunk, column: Any, most: int) -> None:
        self.repeated = column.max_repetition_level > 0
        self.numbered = chunk.numbered
        self.page = 0  # bytes of the largest page
        self.values = 0
        self.width = 8  # most bytes of one value, which may be stored outside its page
        for page in pages(raw, chunk):
            self.page = max(self.page, page.unpacked)
            if page.kind == DICTIONARY_PAGE:
                self.width = max(self.width, longest_text(raw, page, chunk) if page.unpacked <= most else page.unpacked)
            else:
                self.values += page.values
            if page.encoding == PREFIXES:
                self.width, self.numbered = max(self.width, page.unpacked), False
        if chunk.kind == FIXED:
            self.width = column.length


class Page(NamedTuple):
    """A page as its header describes it."""

    kind: int
    at: int  # where its bytes begin
    packed: int  # bytes
    unpacked: int
    values: int
    encoding: int


def pages(raw: IO[bytes], chunk: Chunk) -> Iterator[Page]:
    """Each page that pyarrow would read."""
    at = chunk.dictionary_at if 0 < chunk.dictionary_at < chunk.data_at else chunk.data_at
    end, values_read = at + chunk.packed, 0
    while at < end and values_read < chunk.values:
        header, length = page_header(raw, at)
        inner: dict[int, Any] = next((header[n] for n in (5, 7, 8) if isinstance(header.get(n), dict)), {})
        values, encoding = inner.get(1, 0), inner.get(4 if 8 in header else 2, 0)
        page = Page(header.get(1, -1), at + length, header.get(3, -1), header.get(2, -1), values, encoding)
        if any(type(part) is not int or part < 0 for part in page):
            raise ValueError("the header of a page has an invalid number")
        yield page
        values_read += values if page.kind != DICTIONARY_PAGE else 0
        at = page.at + page.packed


def longest_text(raw: IO[bytes], page: Page, chunk: Chunk) -> int:
    """Bytes of the longest text in a dictionary. For a very large dictionary, or an unknown codec, the bytes of all."""
    import pyarrow

    if chunk.kind != TEXTS or page.unpacked > 8 * DICTIONARY_BYTES or chunk.codec not in CODECS:
        return page.unpacked
    raw.seek(page.at)
    data, codec = raw.read(min(page.packed, chunk.packed)), CODECS[chunk.codec]
    if codec is not None:
        try:
            data = pyarrow.decompress(data, page.unpacked, codec=codec, asbytes=True)
        except (pyarrow.ArrowException, OSError, ValueError):
            return page.unpacked
    at = longest = 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "little")
        longest, at = max(longest, length), at + 4 + length
    return longest


def page_header(raw: IO[bytes], at: int) -> tuple[dict[int, Any], int]:
    """The header of a page, by field number, and its length."""
    for most in (1 << 14, 1 << 24):  # a header may hold a long text, such as the smallest value of the page
        raw.seek(at)
        try:
            return thrift_struct(raw.read(most), 0)
        except IndexError:
            continue
    raise ValueError("the header of a page is cut off")


def thrift_struct(data: bytes, at: int) -> tuple[dict[int, Any], int]:
    """A struct in Thrift's compact protocol, by field number, and the position of its end."""
    fields: dict[int, Any] = {}
    number = 0
    while head := data[at]:
        number, at = (number + (head >> 4), at + 1) if head >> 4 else thrift_number(data, at + 1)
        fields[number], at = thrift_value(data, at, head & 15)
    return fields, at + 1


def thrift_value(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind in (1, 2):  # true, false
        return kind == 1, at
    if kind == 3:
        return data[at], at + 1
    if kind in (4, 5, 6):
        return thrift_number(data, at)
    if kind == 7:  # a float
        return None, at + 8
    if kind == 8:  # bytes; their length has no sign
        length, at = thrift_varint(data, at)
        return data[at : at + length], at + length
    if kind in (9, 10):
        return thrift_list(data, at)
    if kind == 12:
        return thrift_struct(data, at)
    raise ValueError("it has a value of an unknown type")


def thrift_list(data: bytes, at: int) -> tuple[list[Any], int]:
    head, values = data[at], []
    count, at = (head >> 4, at + 1) if head >> 4 < 15 else thrift_varint(data, at + 1)
    for _ in range(count):
        value, at = (data[at], at + 1) if head & 15 in (1, 2) else thrift_value(data, at, head & 15)
        values.append(value)
    return values, at


def thrift_number(data: bytes, at: int) -> tuple[int, int]:
    value, at = thrift_varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def thrift_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        value, at = value | (byte & 0x7F) << shift, at + 1
        if byte < 0x80:
            return value, at
    raise ValueError("a number in it is too long")


def believable(batches: Iterable[Any], path: Any, size: int) -> Iterator[Any]:
    """Batches of Arrow that are small enough as rows of Python too. One row, and all rows so far, must not be larger
    than a file of this size may hold."""
    total = 0
    for batch in batches:
        for part, weight in small_parts(batch, most_at_once(size)):
            total += weight
            if weight > most_at_once(size):
                raise too_much(path, size, f"{weight:,} bytes in one row")
            if total > most_in_all(size):
                raise too_much(path, size, f"more than {most_in_all(size):,} bytes of rows")
            yield part


def small_parts(batch: Any, most: int) -> Iterator[tuple[Any, int]]:
    """The batch in parts of at most so many bytes, or of one row, with the bytes of each."""
    weight = sum(python_bytes(column) for column in batch.columns)
    if weight <= most or batch.num_rows < 2:
        yield batch, weight
        return
    half = batch.num_rows // 2
    yield from small_parts(batch.slice(0, half), most)
    yield from small_parts(batch.slice(half), most)


def python_bytes(array: Any) -> int:
    """About the number of bytes that its values take in Python."""
    import pyarrow
    from pyarrow import compute

    kind, own = array.type, VALUE_BYTES * len(array)
    if isinstance(array, pyarrow.ExtensionArray):
        return python_bytes(array.storage)
    if pyarrow.types.is_struct(kind):
        return own + sum(map(python_bytes, array.flatten()))
    if pyarrow.types.is_map(kind):
        array = array.cast(pyarrow.list_(pyarrow.struct([("key", kind.key_type), ("value", kind.item_type)])))
    if isinstance(array, (pyarrow.ListArray, pyarrow.LargeListArray, pyarrow.FixedSizeListArray)):
        return own + python_bytes(array.flatten())
    if not pyarrow.types.is_dictionary(kind):
        return own + int(array.nbytes)
    lengths = compute.binary_length(array.dictionary)
    return own + (compute.sum(lengths.take(array.indices)).as_py() or 0)


SAVE_AGAIN = "save the dataset again with Dataset.save_to_disk, or write the rows to a .jsonl file"
# Files that `datasets` writes: two beside the rows of each split, and one beside the folders of several splits.
STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"


def undecoded(loaded: Any) -> Any:
    """The dataset with all columns as values of Python, whatever `set_format` chose before it was saved. Pictures,
    sounds and films stay bytes or a path, which `datasets` would decode."""
    loaded.reset_format()
    loaded.info.features = type(loaded.features)(as_stored(loaded.features))
    return loaded


DECODED = ("Image", "Audio", "Video", "Pdf")  # classes of `datasets`


def as_stored(feature: Any) -> Any:
    """The same column, undecoded. `datasets` nests columns in lists of its own, lists and dictionaries."""
    if isinstance(feature, dict):
        return {name: as_stored(part) for name, part in feature.items()}
    if isinstance(feature, list):
        return [as_stored(part) for part in feature]
    stored = copy.copy(feature)
    if type(feature).__name__ in DECODED:
        stored.decode = False
    elif hasattr(feature, "feature"):
        stored.feature = as_stored(feature.feature)
    return stored


def broken_arrow(path: Path, error: Exception) -> Refused:
    got = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    message = f"{path} cannot be read as part of a saved dataset"
    return unreadable(message, "the files that Dataset.save_to_disk wrote, unchanged", got, SAVE_AGAIN)


def saved_json(path: Path) -> JsonObject:
    """Reads a JSON object that lies beside the rows of a saved dataset."""
    try:
        document = foreign_json(path)
    except Refused as refusal:
        raise broken_arrow(path, ValueError(refusal.error["got"])) from None
    if not isinstance(document, dict):
        raise broken_arrow(path, ValueError(f"it holds {KINDS_OF_JSON.get(type(document), 'a value')}, not an object"))
    return document


def check_arrow(folder: Path) -> None:
    """Refuses a folder with too many rows, or with compressed ones, which `datasets` does not write."""
    import pyarrow

    for path in arrow_files(folder):
        size, rows = path.stat().st_size, 0
        try:
            with pyarrow.memory_map(str(path)) as file:
                for message in pyarrow.ipc.MessageReader.open_stream(file):
                    batch = record_batch(message)
                    if batch.get(3):
                        raise too_much(path, size, "an unknown size: its parts are compressed")
                    rows += batch.get(0, 0)
        except (pyarrow.ArrowException, OSError, ValueError, struct.error) as error:
            raise broken_arrow(path, error) from None
        if rows * VALUE_BYTES > most_in_all(size):
            raise too_much(path, size, f"{rows:,} rows")


def arrow_files(folder: Path) -> Iterator[Path]:
    """The data files that `datasets` will open, whatever their names."""
    saved_json(folder / INFO)
    files = saved_json(folder / STATE).get("_data_files")
    for file in files if isinstance(files, list) else []:
        name = file.get("filename") if isinstance(file, dict) else None
        if isinstance(name, str) and (path := folder / name).exists():  # datasets reports a missing file
            check_regular(path, hint=SAVE_AGAIN)
            yield path


def record_batch(message: Any) -> dict[int, int]:
    """The number of rows (0) of a batch in an Arrow stream, and whether it is compressed (3). pyarrow shows neither
    before it has unpacked the batch. In Arrow's table of FlatBuffers field 2 of a message is the batch."""
    data = message.metadata.to_pybytes()

    def fields(table: int) -> dict[int, int]:
        """The position of each field of a table."""
        places = table - struct.unpack_from("<i", data, table)[0]
        (length,) = struct.unpack_from("<H", data, places)
        offsets = struct.unpack_from(f"<{(length - 4) // 2}H", data, places + 4)
        return {number: table + offset for number, offset in enumerate(offsets) if offset}

    (root,) = struct.unpack_from("<I", data, 0)
    header = fields(root).get(2)
    if message.type == "dictionary" or header is None:
        raise ValueError("it has a dictionary, and datasets writes none")
    if message.type != "record batch":
        return {}
    batch = fields(header + struct.unpack_from("<I", data, header)[0])
    rows = struct.unpack_from("<q", data, batch[0])[0] if 0 in batch else 0
    return {0: max(0, rows), 3: int(3 in batch)}


def iter_parquet(path: Path) -> Iterator[tuple[int, Row]]:
    """The rows of a Parquet file, numbered from 1."""
    import pyarrow.parquet

    number = 0
    try:
        size = path.stat().st_size
        batches = believable(parquet_batches(path, size), path, size)
        rows = (row for batch in batches for row in batch.to_pylist())
        schema = pyarrow.parquet.read_schema(path)
        require_distinct(schema.names, path)
        for row in as_written(rows, schema):
            number += 1
            yield number, row
    except RepeatedKey as error:
        raise repeated_key(f"row {number + 1} of {path}", str(error)) from None
    # Text that is not UTF-8, a year 99999, text that is not JSON.
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, RecursionError) as error:
        message = f"{path} cannot be read as Parquet: {first_line(error)}"
        raise unreadable(message, "a whole Parquet file", hint="download or write the file again") from None
