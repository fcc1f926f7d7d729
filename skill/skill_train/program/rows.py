"""Rows: from a file, a saved folder or the Hub."""

import csv
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from skill_train.program.events import EXIT_TEMPORARY, Refused, file_digest, lacks_memory, run_id
from skill_train.program.examples import (
    MEND,
    RepeatedKey,
    Row,
    repeated_in,
    repeated_key,
    unreadable,
    with_distinct_keys,
)
from skill_train.program.model_files import nodes_in, not_a_file, regular_file, require_announced
from skill_train.program.parquet import (
    INFO,
    SPLITS,
    STATE,
    broken_arrow,
    check_arrow,
    iter_parquet,
    saved_json,
    undecoded,
)
from skill_train.program.pictures.decode import PicturesDigest
from skill_train.program.pictures.in_rows import lift_pictures
from skill_train.program.pictures.locations import (
    COMMIT,
    HubFile,
    brought_file,
    hub_file,
    in_folder,
    is_name_of_folder,
    named_as,
    picture_folder,
    picture_table,
    with_files,
)
from skill_train.program.tables.columns import as_written
from skill_train.program.tables.shape import (
    OLD_ENCODINGS,
    SIGN_SAID,
    Record,
    items_of,
    not_an_object,
    old_encoding,
    records_of,
    require_distinct,
    require_no_space,
    require_quotes,
    sign_of,
    utf16,
    vote,
)

TABLE_FILES = (".csv", ".tsv")
CELL_CHARACTERS = 10_000_000  # of a table; Python's own limit is 131,072. A quote that nobody closes ends here
LINE_BYTES = 50_000_000  # of a line of a dataset: a row of a million tokens takes 15 MB
DOCUMENT_BYTES = 2_000_000_000  # of a dataset in .json, which is read whole and takes several times as much memory
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\n"  # how it begins
# Texts of hints.
ROWS_IN_LINES = "write the rows to a .jsonl file, one object per line, and use that file"
DOCUMENT = "one JSON document is a .json file: rename it; or else remove the commas behind the lines"
PART_OF_FILE = "use train, or a part of it, such as train[:500]"


def iter_rows(
    data: str, *, split: str, config: str | None = None, revision: str | None = None, file: str | None = None
) -> Iterator[tuple[int, Row]]:
    """`(line, row)` for each row of the chosen split. `line` is the line in the file if there are lines, or else its
    number. A line that is not a JSON object is refused, because a training without it would be on other data. `config`,
    `revision` and `file` are of a dataset on the Hub, as in the recipe."""
    path = Path(data)
    if path.is_dir() and (table := picture_table(path, split)) is not None:
        rows = iter_slice(((line, in_folder(row, path, table)) for line, row in iter_file(table)), split)
    elif path.is_dir():
        rows = iter_saved(path, split)
    elif path.is_file():
        if not split.startswith("train"):
            raise bad_split(f"{path} is one file and has no split {split!r}", "train, train[:500]", split)
        rows = iter_slice(iter_file(path), split)
    elif path.exists():
        raise not_a_file(path, "a pipe or a device", hint=ROWS_IN_LINES)
    elif file is not None:
        rows = iter_hub_file(hub_file(data, revision, file), split)
    else:
        rows = iter_hub(data, split, config, revision)
    yield from rows


class RowsRecipe(TypedDict):
    """The fields of a recipe that say which rows and pictures are read."""

    split: str
    columns: dict[str, str]
    images: NotRequired[bool]


def data_fingerprint(data: Path, recipe: RowsRecipe, digests: Mapping[str, str] | None = None) -> str:
    """SHA-256 of a file's bytes, or of the rows of a folder, with that of the pictures, as in the plan. `digests` are
    of pictures that need not be read again, by the paths in the rows."""
    rows, pictures = hashlib.sha256(), PicturesDigest(picture_folder(str(data)), digests)
    whole = data.is_file()
    for _, row in iter_rows(str(data), split=recipe["split"]) if recipe.get("images") or not whole else ():
        if recipe.get("images"):
            pictures.add(lift_pictures(row, recipe["columns"])[1])
        if not whole:
            rows.update(canonical(row))
    return pictures.with_rows(file_digest(data)["sha256"] if whole else rows.hexdigest())


def canonical(row: Row) -> bytes:
    """Bytes that are equal for equal rows, whatever the kind of file."""
    return json.dumps(row, sort_keys=True, ensure_ascii=False, default=str).encode("utf-8", "replace")


@dataclass(frozen=True)
class Broken:
    """A line that is not a row, or `lines` of a table between two quotes, which may be any number of rows. Training
    ends with the `refusal`."""

    kind: Literal["broken_json", "not_utf8", "not_an_object"]
    refusal: Refused
    lines: int = 1


# The line number, from 1 as an editor counts; the row; its bytes in a file with one row on each line. A plain tuple,
# because a million are created.
Line = tuple[int, Row | Broken, bytes | None]


def iter_file(path: Path) -> Iterator[tuple[int, Row]]:
    """The rows of a file, up to the first line that is not a row: that is refused."""
    for number, row, _ in lines_of(path):
        if isinstance(row, Broken):
            raise row.refusal
        yield number, row


def lines_of(path: Path) -> Iterator[Line]:
    """Every row of a file, and what is not a row as `Broken`. Refuses other kinds of files, lines and documents that
    are too long, and two columns of one name."""
    kind = path.suffix.lower()
    if path.is_file() and read_start(path) == LFS_POINTER:
        words, rows = f"{path} is a pointer of Git LFS, not the file itself", "the rows, to which the pointer leads"
        raise unreadable(words, rows, LFS_POINTER.decode(), "git lfs pull")
    if kind in (".jsonl", ".ndjson"):
        yield from json_lines(path)
    elif kind == ".json":
        yield from json_document(path)
    elif kind in TABLE_FILES:
        yield from table_rows(path)
    elif kind == ".parquet":
        yield from ((number, row, None) for number, row in iter_parquet(path))
    else:
        raise unreadable(
            f"{path} has an extension that is not supported for a dataset",
            ".jsonl, .json, .csv, .tsv, .parquet, a folder saved by datasets, or a Hub id",
            kind or "no extension",
            ROWS_IN_LINES,
        )


def read_start(path: Path) -> bytes:
    with regular_file(path, hint=ROWS_IN_LINES) as file:
        return file.read(len(LFS_POINTER))


def json_lines(path: Path) -> Iterator[Line]:
    """One object for each line."""
    # The function inside json.loads, without its checks: half the time. Unusual lines go through json.loads.
    decoder = json.JSONDecoder(object_pairs_hook=with_distinct_keys)
    scan_once: Callable[[str, int], tuple[Any, int]] = decoder.scan_once  # type: ignore[attr-defined]
    for number, raw in numbered_lines(path):
        try:
            text = str(raw, "utf-8")
            row, end = scan_once(text, 0)
            usual = type(row) is dict and text[end:] in ("\n", "\r\n", "")
        except (ValueError, StopIteration, RecursionError):
            usual = False
        if usual:
            yield number, row, raw
        elif raw.strip():
            row = parsed(raw, f"line {number} of {path}")
            if number == 1 and isinstance(row, Broken) and raw.rstrip()[-1:] in b",[{" and path.suffix != ".json":
                row.refusal.error["hint"] = DOCUMENT  # of its lines one may be an object by chance
                raise row.refusal
            yield number, row, raw


def parsed(raw: bytes, where: str) -> Row | Broken:
    try:
        row = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=with_distinct_keys)
    except RepeatedKey as error:
        return Broken("broken_json", repeated_key(where, str(error)))
    except (ValueError, RecursionError) as error:  # a number of 5000 digits is a ValueError too
        if isinstance(error, UnicodeDecodeError) or utf16(raw):
            return Broken("not_utf8", not_utf8(where, raw))
        expected = "one JSON object a line, in UTF-8"
        return Broken("broken_json", unreadable(f"{where} is not JSON: {error}", expected, beginning(raw), MEND))
    return row if isinstance(row, dict) else Broken("not_an_object", not_an_object(where, row))


def json_document(path: Path) -> Iterator[Line]:
    """A list of objects, an object with one such list, or one object a line in spite of the file's name."""
    items = json_items(path)
    if items is None:
        yield from json_lines(path)
        return
    for number, row in enumerate(items, start=1):
        if not isinstance(row, dict):
            row = Broken("not_an_object", not_an_object(f"item {number} of {path}", row))
        yield number, row, None


def table_rows(path: Path, text: str | None = None, *, whole: bool = True) -> Iterator[Line]:
    """The rows of a table whose first row has the names of the columns. `text` is its text if no file is here; if that
    is not `whole`, a later row may need its quotes."""
    wrong_bytes = list[tuple[int, bytes]]()
    csv.field_size_limit(CELL_CHARACTERS)
    read = partial(text_lines, path, text)
    first = next(read([]), "")
    sign = sign_of(first, path.suffix.lower(), read([]))
    unsure = not first.startswith('"') and (whole or sign != ",")
    names: list[str] | None = None
    for record in records_of(read(wrong_bytes), sign):
        start, cells, lines, _ = record
        end = start + len(lines) - 1
        require_no_space(record, sign, len(names or cells), path)
        if (broken := unread_record(path, record, wrong_bytes, ", its header," if names is None else "")) is not None:
            yield broken
            if names is None:  # no other row may take its place
                return
        elif names is None:
            if end > 1 or not SIGN_SAID.fullmatch(first):
                names = cells
                require_distinct(names, path)
        elif cells and (cells == names or len(cells) != len(names)):  # the first of a second table behind this one
            what = "repeats the header" if cells == names else "does not have as many columns as the header"
            expected = f"rows of {len(names)} columns: {', '.join(names)}"
            wrong = unreadable(f"line {end} of {path} {what}", expected, lines[0][:80].rstrip(), MEND)
            yield end, Broken("broken_json", wrong, len(lines)), None
        elif cells:
            if unsure and vote(record, sign, len(names)) < 0:
                require_quotes(records_of(read([]), sign), record, sign, path)
                unsure = False
            yield end, dict(zip(names, cells, strict=True)), None


def unread_record(path: Path, record: Record, wrong_bytes: list[tuple[int, bytes]], what: str) -> Line | None:
    """What is wrong with a row of a table; None if it can be read."""
    start, _, lines, error = record
    if wrong_bytes:
        start, raw = wrong_bytes[0]
        wrong_bytes.clear()
        wrong = not_utf8(f"line {start} of {path}{what}", raw)
        return start, Broken("not_utf8", wrong, 1 if error is None else len(lines)), None
    if error is not None:
        expected = "a table whose quotes are closed, and doubled inside of a cell"
        end = start + len(lines) - 1
        where = f"line {start}" if end == start else f"line {start}, where a quote opens, to line {end}"
        wrong = unreadable(f"{where} of {path}{what} is broken: {error}", expected, lines[0][:80].rstrip(), MEND)
        return start, Broken("broken_json", wrong, len(lines)), None
    return None


def text_lines(path: Path, text: str | None, wrong_bytes: list[tuple[int, bytes]]) -> Iterator[str]:
    """The lines of a text, or else of a file. Lines that are not UTF-8 go to `wrong_bytes` with their numbers."""
    if text is not None:
        yield from io.StringIO(text, newline="\n")
        return
    for number, raw in numbered_lines(path):
        if b"\0" in raw and utf16(raw):
            wrong_bytes.append((number, raw))
        try:
            yield raw.decode("utf-8-sig")
        except UnicodeDecodeError:
            wrong_bytes.append((number, raw))
            yield raw.decode("utf-8", "replace")


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a dataset, from 1 as an editor counts. Of a line that is too long only the limit is read."""
    with regular_file(path, hint=ROWS_IN_LINES) as file:
        for number, raw in enumerate(iter(partial(file.readline, LINE_BYTES + 1), b""), start=1):
            if len(raw) > LINE_BYTES:
                expected = f"at most {LINE_BYTES:,} bytes a line; a row of a million tokens takes 15 MB"
                raise unreadable(f"line {number} of {path} is too long", expected, beginning(raw), ROWS_IN_LINES)
            yield number, raw


def whole_text(path: Path) -> str:
    """The text of a dataset that is one document. One that is too large is not read."""
    with regular_file(path, hint=ROWS_IN_LINES) as file:
        size = os.fstat(file.fileno()).st_size
        if size > DOCUMENT_BYTES:
            raise unreadable(
                f"{path} is one JSON document, and too large to be read at once",
                f"at most {DOCUMENT_BYTES:,} bytes; a .jsonl file is read by lines and may have any size",
                f"{size:,} bytes",
                ROWS_IN_LINES,
            )
        return file.read(size).decode("utf-8-sig")


def beginning(raw: bytes) -> str:
    return raw[:80].decode("utf-8", "replace").rstrip()


def not_utf8(where: str, raw: bytes) -> Refused:
    """The refusal of text that is not UTF-8: it is UTF-16, or an older encoding."""
    old = None if utf16(raw) else old_encoding(raw)
    encoding = utf16(raw) or old or "WINDOWS-1252"
    message, hint = f"{where} is not UTF-8, most likely {encoding}", f"iconv -f {encoding} -t UTF-8 FILE > NEW_FILE"
    got = beginning(raw) if old is None else f"{raw[:80].decode(OLD_ENCODINGS[old], 'replace').rstrip()!r} in {old}"
    return unreadable(message, "text in UTF-8", got, hint)


def json_items(path: Path) -> list[Any] | None:
    """The items of a JSON document. Refuses an object that has a key twice. None for a file that is not one document,
    such as one with an object a line: the reader of lines then reports a broken line."""
    repeating = list[tuple[Row, str]]()  # each object with a key twice, and that key

    def noted(pairs: list[tuple[str, Any]]) -> Row:
        row = dict(pairs)
        if len(row) < len(pairs):
            repeating.append((row, repeated_in(pairs)))
        return row

    try:
        items = items_of(json.loads(whole_text(path), object_pairs_hook=noted), path)
    except (ValueError, RecursionError):
        return None
    if repeating:
        objects = {id(row) for row, _ in repeating}
        holding = (n for n, item in enumerate(items, start=1) if any(id(node) in objects for _, node in nodes_in(item)))
        number = next(holding, None)
        raise repeated_key(str(path) if number is None else f"item {number} of {path}", repeating[0][1])
    return items


def bad_split(message: str, expected: str, got: str, hint: str = PART_OF_FILE) -> Refused:
    return Refused(message, code="bad_split", expected=expected, got=got, hint=hint)


FILE_ON_HUB = re.compile(r"hf://datasets/(?P<name>[^@]+)@(?P<commit>[0-9a-f]{40})/(?P<file>.+)")
SLICE = re.compile(r"(?P<name>[\w.-]+)(?:\[(?P<from>\d{1,18}%?)?:(?P<to>\d{1,18}%?)?\])?")


def iter_slice(rows: Iterator[tuple[int, Any]], split: str) -> Iterator[tuple[int, Any]]:
    """The rows of `train[10:500]` or `train[:10%]`. A plain file is one split, whatever its name."""
    match = SLICE.fullmatch(split)
    if match is None:
        raise bad_split(f"split {split!r} is not valid", "train, train[:500], train[:10%]", split)
    bounds = [match["from"] or "0", match["to"] or ""]
    if any(bound.endswith("%") for bound in bounds):
        rows = iter(all_rows := list(rows))
        # Rounded as `datasets` does.
        bounds = [str(round(len(all_rows) * int(b[:-1]) / 100)) if b.endswith("%") else b for b in bounds]
    for index, row in enumerate(rows):
        if bounds[1] and index >= int(bounds[1]):
            return
        if index >= int(bounds[0]):
            yield row


def iter_saved(folder: Path, split: str) -> Iterator[tuple[int, Row]]:
    """A folder that `datasets` saved."""
    if not any((folder / name).is_file() for name in (SPLITS, STATE)):
        raise unreadable(
            f"{folder} is not a dataset folder",
            "a folder written by Dataset.save_to_disk, or one file; of pictures a folder with metadata.jsonl",
            f"a folder without {STATE} and without {SPLITS}",
            "use one file of rows, or a folder that Dataset.save_to_disk wrote",
        )
    saved = undecoded(load_saved(folder, split.split("[")[0]))
    rows = as_written(rows_of(saved, folder), saved.features.arrow_schema, json_read=True)
    yield from iter_slice(enumerate(rows, start=1), split)


def load_saved(folder: Path, name: str) -> Any:
    """One split of a saved folder. All files that `datasets` will open are checked first."""
    import datasets

    with broken_saved(folder):
        for part in saved_parts(folder):
            check_arrow(part)
        saved = datasets.load_from_disk(str(folder))
    if not isinstance(saved, datasets.DatasetDict):
        return saved
    if name not in saved:
        hint = "name one of these with --split, or as split in the recipe"
        raise bad_split(f"{folder} has no split {name!r}", ", ".join(saved), name, hint)
    return saved[name]


def rows_of(saved: Any, folder: Path) -> Iterator[Row]:
    with broken_saved(folder):
        yield from saved


@contextmanager
def broken_saved(folder: Path) -> Iterator[None]:
    """Turns the errors of a damaged folder into a `Refused`: `datasets` and pyarrow raise any class."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (Refused, ImportError, PermissionError)) or lacks_memory(error):
            raise
        raise broken_arrow(folder, error) from None


def saved_parts(folder: Path) -> list[Path]:
    """The folders that `datasets` will open: this one, or the folder of each split."""
    if all((folder / name).is_file() for name in (INFO, STATE)):
        return [folder]
    document = saved_json(folder / SPLITS)
    names = document.get("splits")
    if not isinstance(names, list) or any(not is_name_of_folder(name) for name in names):
        raise broken_arrow(folder / SPLITS, ValueError("its splits are not names of folders beside it"))
    return [folder / name for name in names]


def iter_hub(name: str, split: str, config: str | None, revision: str | None) -> Iterator[tuple[int, Row]]:
    import datasets

    if run_id() is not None:
        bring_settings(name, revision)
    files = files_of_split(datasets.load_dataset_builder(name, config, revision=revision), split.split("[")[0])
    # Of tables, `datasets` would make numbers of texts, and nothing of `NA`.
    if files and all(file.name.endswith(TABLE_FILES) for file in files) and SLICE.fullmatch(split):
        yield from iter_slice((row for file in files for row in iter_hub_file(hub_file(*file), "train")), split)
        return
    # On disk, because the name of the folder is the commit.
    loaded = datasets.load_dataset(name, config, split=split, revision=revision, keep_in_memory=False)
    if revision is not None and COMMIT.fullmatch(revision):
        require_commit(loaded, name, revision)
    for path in (file.root / file.name for file in files):
        if path.is_file():
            require_announced(path)
    loaded = undecoded(loaded)
    yield from enumerate(as_written(loaded, loaded.features.arrow_schema, json_read=True), start=1)


def bring_settings(name: str, revision: str | None) -> None:
    """Brings the settings of a dataset to the cache. `datasets` 5.2 takes one that it cannot fetch for one that the
    dataset does not have, and reads other files. A job has fetched nothing yet."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    for file in (".huggingface.yaml", "dataset_infos.json"):
        try:
            hf_hub_download(name, file, repo_type="dataset", revision=revision)
        except LocalEntryNotFoundError:  # it could not be fetched
            raise
        except EntryNotFoundError:
            continue


def files_of_split(builder: Any, split: str) -> list[HubFile]:
    """The files of a split; empty unless all of them lie in one commit of a dataset on the Hub."""
    matches = [FILE_ON_HUB.fullmatch(str(url)) for url in (builder.config.data_files or {}).get(split, [])]
    return [] if None in matches else [HubFile(*match.group("name", "commit", "file")) for match in matches if match]


def require_commit(loaded: Any, name: str, commit: str) -> None:
    """Refuses the rows of another commit. Where the Hub does not answer, `datasets` 5.2 takes the newest folder of its
    cache, whatever revision was asked for."""
    commits = {Path(file["filename"]).parent.name for file in loaded.cache_files}
    if commits != {commit}:
        raise Refused(
            f"the Hub does not give {name} at commit {commit[:12]}",
            code="hub_unreachable",
            exit_code=EXIT_TEMPORARY,
            expected="an answer of the Hub, or these rows as the newest of this dataset in the cache",
            got=f"the rows of {', '.join(sorted(commits)) or 'no commit'} in the cache",
            hint="try again when the Hub can be reached",
        )


def iter_hub_file(file: HubFile, split: str) -> Iterator[tuple[int, Row]]:
    """The rows of one file on the Hub, read as a file here, with the pictures that they name in the cache."""
    path = brought_file(file)
    with named_as(path, str(file)):
        yield from with_files(iter_slice(iter_file(path), split), file)
