"""Reads a dataset once, row by row: its format, the mapping of its columns, and whether every row is complete."""

import hashlib
from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from skill_train.core.digests import file_digest
from skill_train.core.errors import UsageError, nearest, refusals
from skill_train.data import errors, read_rows
from skill_train.data.check_row import Check, checker, unread_media_in
from skill_train.data.problems import usable
from skill_train.data.row_pictures import PROBLEMS, ListedPictures, RowPictures, folder_of
from skill_train.data.token_stats import PictureCounter
from skill_train.data.unread import SeenRows
from skill_train.facts import DatasetFacts, FirstPictures
from skill_train.program.chat.row_notes import RENDERED_TWICE, TURN_MARK
from skill_train.program.encode import WITHOUT_TEMPLATE
from skill_train.program.events import Refused
from skill_train.program.examples import Row, is_media
from skill_train.program.pictures.decode import PicturesDigest
from skill_train.program.pictures.in_rows import lift_pictures
from skill_train.program.pictures.locations import hub_file
from skill_train.program.rows import SLICE, Broken, canonical
from skill_train.program.tables.shape import is_message
from skill_train.recipe.fields import Recipe
from skill_train.recipe.formats import (
    COLUMNS,
    OPTIONAL,
    PICTURED,
    DetectedFormat,
    detect,
    match,
    optional_names,
    with_optional,
    with_pictures,
)

PERHAPS_RENDERED = (
    "the rows hold marks of a chat template and are trained as they stand: if the model's own template wrote them, a "
    "chat is asked with it; if another one did, the model sees another prompt in a chat"
)


def scan(
    recipe: Recipe, *, pictures: bool = False, tokens: PictureCounter | None = None, seen: SeenRows | None = None
) -> DatasetFacts:
    """The facts of a dataset: every row is read and checked once, in constant memory. Of pictures only the header of
    their files is read.

    Args:
        pictures: the model reads them. Otherwise they are refused.
        tokens: counts the tokens of the pictures.

    Raises:
        UsageError: the dataset does not exist, a line is broken (with its number), columns are wrong, a row is
            malformed, or there are no rows.
    """
    with refusals():
        checked = RowPictures(folder_of(recipe), tokens) if pictures else None
        return _scan(recipe, Path(recipe.data), checked, seen or SeenRows())


@dataclass
class _Reading:
    """How the rows so far are read."""

    recipe: Recipe
    detected: DetectedFormat
    names: dict[str, None]  # the columns that they have, as far as a format can use them
    awaited: set[str]  # the optional columns that none of them has had
    pictures: RowPictures | None
    check: Check = field(init=False)

    def __post_init__(self) -> None:
        self.check = checker(self.detected, self.pictures)

    def meet(self, row: Row) -> None:
        """Completes the mapping with the columns of this row."""
        detected = self.detected
        if not self.awaited.isdisjoint(row):
            self.names |= dict.fromkeys(name for name in row if name in self.awaited)
            self.awaited -= self.names.keys()
            detected = complete(self.recipe, detected, self.names)
        if self.pictures is not None:
            detected = with_pictures(detected, row)
            self.names |= dict.fromkeys([detected.columns["images"]] if detected.columns.get("images") in row else [])
        if detected is not self.detected:
            self.detected, self.check = detected, checker(detected, self.pictures)


def _scan(recipe: Recipe, path: Path, pictures: RowPictures | None, seen: SeenRows) -> DatasetFacts:
    digest = None if path.is_file() else hashlib.sha256()
    picture_files = PicturesDigest(folder_of(recipe))
    count = text_bytes = longest = turns = longest_turns = 0
    reading: _Reading | None = None
    for line, row, _ in read_rows.read(recipe):
        if isinstance(row, Broken):
            keeps_rows = errors.rewriting_command(path) if row.kind == "not_utf8" else None
            whole = (row for _, row, _ in read_rows.read(recipe) if isinstance(row, dict))
            no_row = reading is None and _is_empty(whole)
            otherwise = errors.leave_out(recipe) if row.lines == 1 else errors.open_quote(line)
            row.refusal.error["hint"] = keeps_rows or (
                errors.no_row(recipe.data_file or recipe.data) if no_row else otherwise
            )
            raise row.refusal
        if reading is None:
            detected, names = find_format(recipe, row, pictures=pictures is not None), dict.fromkeys(row)
            reading = _Reading(recipe, detected, names, optional_names(detected) - names.keys(), pictures)
        reading.meet(row)
        seen.add(row)
        size, row_turns, trouble = reading.check(row)
        if trouble is not None and trouble.refused:
            error = errors.refused_row(recipe, (line, row), reading.detected, reading.pictures, trouble.kind)
            if not count and error.hint == errors.leave_out(recipe) and _is_empty(usable(recipe, reading.check)):
                error.hint = errors.ALL_ALIKE
            raise error
        if pictures is not None:
            sources = lift_pictures(row, reading.detected.columns)[1]
            pictures.count(sources)
            picture_files.add(sources)
        count += 1
        text_bytes += size
        turns += row_turns
        longest = max(longest, size)
        longest_turns = max(longest_turns, row_turns)
        if digest is not None:
            digest.update(canonical(row))
    if reading is None:
        raise errors.empty(recipe)
    require_columns(recipe, reading.detected, reading.names)
    facts = DatasetFacts(
        source=recipe.data,
        fingerprint=picture_files.with_rows(file_digest(path)["sha256"] if digest is None else digest.hexdigest()),
        rows=count,
        column_names=tuple(reading.names),
        format=reading.detected.format,
        columns=reading.detected.columns,
        bytes=path.stat().st_size if path.is_file() else None,
        reason=reading.detected.reason,
        text_bytes=text_bytes,
        longest_text_bytes=longest,
        turns=turns,
        longest_turns=longest_turns,
    )
    return facts if pictures is None else with_pictures_of(facts, pictures)


def _is_empty(rows: Iterator[Any]) -> bool:
    """Whether no row comes before a line that cannot be read."""
    try:
        return next(rows, None) is None
    except Refused:
        return True


def with_pictures_of(facts: DatasetFacts, pictures: RowPictures, share: float = 1) -> DatasetFacts:
    """Adds the facts of the pictures.

    Args:
        share: the number of rows in the dataset for each row that was counted.
    """
    figures = pictures.figures
    return msgspec.structs.replace(
        facts,
        picture_tokens=None if pictures.tokens is None else pictures.tokens.facts(),
        images=round(share * figures.pictures),
        most_images=figures.most,
        image_bytes=round(share * figures.bytes),
        image_pixels=round(share * figures.pixels),
        largest_image=figures.largest,
    )


def with_text_of(
    facts: DatasetFacts,
    recipe: Recipe,
    first: tuple[Row, ...],
    pictures: FirstPictures | None,
    tokens: PictureCounter | None,
) -> DatasetFacts:
    """The facts of a dataset that was not read completely: its first rows stand for the others.

    Args:
        pictures: the pictures of all rows that were read; None where the model reads only text.

    Raises:
        UsageError: training refuses a picture that is read now.
    """
    detected = DetectedFormat(facts.format, facts.columns, facts.reason)
    counted = None if pictures is None else RowPictures(folder_of(recipe), tokens)
    check = checker(detected, counted)
    checked = [(row, check(row)) for row in first]
    lines = () if pictures is None else pictures.lines or ()
    for line, (row, (_, _, trouble)) in zip(lines, checked, strict=False):
        if trouble is not None and trouble.kind in PROBLEMS:
            raise errors.refused_row(recipe, (line, row), detected, counted, trouble.kind)
    good = [(row, size, turns) for row, (size, turns, trouble) in checked if trouble is None or not trouble.refused]
    if not good:
        return facts
    share = facts.rows / len(good)
    measured = msgspec.structs.replace(
        facts,
        text_bytes=round(share * sum(size for _, size, _ in good)),
        longest_text_bytes=max(size for _, size, _ in good),
        turns=round(share * sum(turns for _, _, turns in good)),
        longest_turns=max(turns for _, _, turns in good),
    )
    if pictures is None or counted is None:
        return measured
    for row, _, _ in good:
        counted.count(lift_pictures(row, detected.columns)[1])
    measured = with_pictures_of(measured, counted, pictures.count / max(1, counted.figures.pictures))
    return msgspec.structs.replace(measured, images=pictures.count, most_images=pictures.most)


def find_format(recipe: Recipe, row: Row, *, pictures: bool = False) -> DetectedFormat:
    """The format that the recipe names, or that this row has.

    Raises:
        UsageError: there is no such format, or a column that every row must have is missing.
    """
    if recipe.format is not None:
        optional = [*OPTIONAL[recipe.format], *(["images"] if pictures and recipe.format in PICTURED else [])]
        _check_mapping(recipe.format, recipe.columns or {}, optional)
        columns = dict(recipe.columns or {}) or match(recipe.format, row, pictures=pictures)
        missing = [c for name, c in (columns or {}).items() if c not in row and name not in optional]
        if columns is None or missing:
            raise errors.wrong_columns(recipe, row, f"no column {missing[0]!r}" if missing else f"not {recipe.format}")
        return DetectedFormat(recipe.format, columns, "said in the recipe", explicit=bool(recipe.columns))
    if recipe.columns is not None:
        raise UsageError(
            "the recipe sets columns without format",
            code="bad_recipe",
            expected="format: messages",
            got="columns only",
            hint=f"one of the formats {', '.join(COLUMNS)} as format: … in the recipe",
        )
    detected = usual_format(row, pictures=pictures)
    media = next((column for column, value in row.items() if is_media(column, value)), None)
    if detected is None and media is not None:
        raise errors.media_error(recipe, recipe.data, media, row, pictures=pictures)
    if detected is None:
        raise errors.wrong_columns(recipe, row, "no known set of columns")
    return detected


def usual_format(row: Row, *, pictures: bool) -> DetectedFormat | None:
    """The format that this row has; None for a message of a conversation, whose text is not trained alone."""
    detected = detect(row, pictures=pictures)
    text = detected is not None and detected.format == "text" and row.keys().isdisjoint({"content", "value"})
    return None if text and is_message(row) else detected


def _check_mapping(data_format: str, columns: dict[str, str], optional: list[str]) -> None:
    names = [*COLUMNS[data_format], *optional]
    for name in columns:
        if name not in names:
            raise UsageError(
                f"columns: the format {data_format} has no column {name!r}{nearest(name, names)}",
                code="bad_recipe",
                expected=", ".join(names),
                got=name,
                hint="references/datasets.md lists the columns of each format",
            )
    twice = next((name for name, column in columns.items() if list(columns.values()).count(column) > 1), None)
    if twice is not None:
        both = " and ".join(name for name, column in columns.items() if column == columns[twice])
        raise UsageError(
            f"columns: {both} are both the column {columns[twice]!r}, so that one would be trained as the other",
            code="bad_recipe",
            expected="another column for each",
            got=", ".join(f"{name}: {column}" for name, column in columns.items()),
            hint="references/datasets.md lists the columns of each format",
        )


def complete(recipe: Recipe, detected: DetectedFormat, names: Collection[str]) -> DetectedFormat:
    """The mapping for rows with these columns. A mapping in the recipe is not changed."""
    return detected if recipe.columns else with_optional(detected, names)


def require_columns(recipe: Recipe, detected: DetectedFormat, names: Collection[str]) -> None:
    """Raises UsageError if the recipe names an optional column that no row has."""
    missing = next((column for column in detected.columns.values() if column not in names), None)
    if missing is not None:
        raise errors.wrong_columns(recipe, names, f"no column {missing!r} in any row")


def first_format(
    recipe: Recipe,
    first: Sequence[Row],
    *,
    pictures: bool = False,
    lines: Sequence[int] | None = None,
    listed: Container[str] | None = None,
    whole: bool = True,
) -> DetectedFormat:
    """The format and the mapping of a dataset that begins with these rows.

    Args:
        lines: the line numbers of these rows in their file.
        listed: the files of the repository, where `data_file` has pictures beside it. None of them is read.
        whole: these are all rows. Otherwise a later one may have the pictures.

    Raises:
        UsageError: the rows have no known format, a column is missing, or training refuses a row.
    """
    names = dict.fromkeys(name for row in first for name in row)
    detected = complete(recipe, find_format(recipe, first[0], pictures=pictures), names)
    later = {} if whole else dict.fromkeys([detected.columns.get("images", "")])
    require_columns(recipe, detected, names | later)
    if listed is None or recipe.data_file is None:
        checked = RowPictures(folder_of(recipe))
    else:
        checked = ListedPictures(hub_file(recipe.data, recipe.data_revision, recipe.data_file), listed)
    reading = _Reading(recipe, detected, names, set(), checked if pictures else None)
    surely = _read_surely(recipe.split, len(first), sliced=lines is not None)
    for place, (line, row) in enumerate(zip(lines or range(1, len(first) + 1), first, strict=True)):
        reading.meet(row)
        trouble = reading.check(row)[2]
        if trouble is None or not trouble.refused:
            continue
        if place in surely or trouble.kind in ("not_text", *PROBLEMS):
            raise errors.refused_row(recipe, (line, row), reading.detected, reading.pictures, trouble.kind)
    return reading.detected


def _read_surely(split: str, count: int, *, sliced: bool) -> range:
    """The places of the first rows that training reads too; none where a percentage, or the end of the split, decides.

    Args:
        sliced: the rows are those of the slice.
    """
    match = SLICE.fullmatch(split)
    start, end = (match["from"] or "0", match["to"] or str(count)) if match else ("", "")
    if not (start.isdigit() and end.isdigit()):
        return range(0)
    return range(count) if sliced else range(int(start), min(count, int(end)))


def unread_media(recipe: Recipe, columns: dict[str, str]) -> str | None:
    """The warning for a column of images, audio or video that the recipe leaves out by naming the others."""
    if not recipe.columns:
        return None
    detected = DetectedFormat(recipe.format or "", columns, "")
    column = next((name for row in first_rows_of(recipe) if (name := unread_media_in(row, detected)) is not None), None)
    if column is None:
        return None
    what = f"the column {column!r} contains images, audio or video, which are not read"
    return f"{what}: the recipe names the columns of the text, and the model learns that alone"


def first_rows_of(recipe: Recipe) -> list[Row]:
    """The first complete rows; fewer where they hold large pictures."""
    seen = SeenRows()
    for row in (row for _, row, _ in read_rows.read(recipe) if isinstance(row, dict)):
        seen.add(row)
        if seen.has_first:
            break
    return seen.first


def bare_warning(first: Sequence[Row], columns: dict[str, str]) -> str:
    """The warning for rows that a model with a chat template is trained on without its template."""
    texts = [" ".join(str(row.get(column)) for column in columns.values()) for row in first]
    return PERHAPS_RENDERED if all(map(TURN_MARK.search, texts)) else WITHOUT_TEMPLATE


def rendered_warning(first: Sequence[Row], columns: dict[str, str]) -> str | None:
    asked = (str(row.get(columns.get("question", columns.get("instruction", "")))) for row in first)
    marks = [mark.group() for text in asked if (mark := TURN_MARK.search(text)) is not None]
    return f"{len(marks)} of the first {len(first)} rows {RENDERED_TWICE.format(repr(marks[0]))}" if marks else None
