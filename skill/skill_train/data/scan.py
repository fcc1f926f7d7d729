"""Reads a dataset once, row by row: its format, the mapping of its columns, and whether every row is complete."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
from collections.abc import Collection, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from skill_train.core.digests import file_digest
from skill_train.core.errors import SkillTrainError, UsageError, from_exit_code, nearest
from skill_train.data import read_rows
from skill_train.data.check_row import checker, media_beside
from skill_train.data.text_encoding import rewriting_command
from skill_train.facts import DatasetFacts
from skill_train.program.events import Refused
from skill_train.program.examples import Row, media_in, to_example
from skill_train.recipe.fields import Recipe
from skill_train.recipe.formats import (
    COLUMNS,
    OPTIONAL,
    DetectedFormat,
    detect,
    is_media,
    match,
    optional_names,
    with_optional,
)

_FIRST = 200  # rows
_LABELS = ("label", "labels", "class", "category", "sentiment", "target", "intent", "topic", "rating", "score", "stars")
_WORDS = 3  # a text of so many words is a sentence, not a name or a number; scripts without spaces have such characters


def scan(recipe: Recipe) -> DatasetFacts:
    """The facts of a dataset: every row is read and checked once, in constant memory.

    Raises:
        UsageError: the dataset does not exist, a line is broken (with its number), columns are wrong, a row is
            malformed, or there are no rows.
    """
    try:
        return _scan(recipe, Path(recipe.data))
    except Refused as refusal:
        raise from_exit_code(refusal.exit_code, refusal.error) from None


def _scan(recipe: Recipe, path: Path) -> DatasetFacts:
    digest = None if path.is_file() else hashlib.sha256()
    count = text_bytes = longest = turns = longest_turns = 0
    first: Row | None = None
    for line, row, _ in read_rows.read(recipe):
        if isinstance(row, read_rows.Broken):
            keeps_rows = rewriting_command(path) if row.kind == "not_utf8" else None
            row.refusal.error["hint"] = keeps_rows or _leave_out(recipe)
            raise row.refusal
        if first is None:
            first, detected = row, find_format(recipe, row)
            check, names = checker(detected), dict.fromkeys(row)
            awaited = optional_names(detected) - names.keys()
        if not awaited.isdisjoint(row):
            names |= dict.fromkeys(name for name in row if name in awaited)
            awaited -= names.keys()
            detected = complete(recipe, detected, names)
            check = checker(detected)
        size, row_turns, trouble = check(row)
        if trouble is not None and trouble.refused:
            raise _refused(recipe, line, row, detected, trouble.kind)
        count += 1
        text_bytes += size
        turns += row_turns
        if size > longest:
            longest = size
        longest_turns = max(longest_turns, row_turns)
        if digest is not None:
            digest.update(canonical(row))
    if first is None:
        raise empty(recipe)
    require_columns(recipe, detected, names)
    return DatasetFacts(
        source=recipe.data,
        fingerprint=file_digest(path)["sha256"] if digest is None else digest.hexdigest(),
        rows=count,
        column_names=tuple(names),
        format=detected.format,
        columns=detected.columns,
        bytes=path.stat().st_size if path.is_file() else None,
        reason=detected.reason,
        text_bytes=text_bytes,
        longest_text_bytes=longest,
        turns=turns,
        longest_turns=longest_turns,
    )


def with_text_of(facts: DatasetFacts, recipe: Recipe, first: tuple[Row, ...]) -> DatasetFacts:
    """The facts of a dataset that was not read completely: the text of its first rows stands for the others."""
    check = checker(DetectedFormat(facts.format, facts.columns, facts.reason))
    measured = [(size, turns) for size, turns, trouble in map(check, first) if trouble is None or not trouble.refused]
    if not measured:
        return facts
    share = facts.rows / len(measured)
    return dataclasses.replace(
        facts,
        text_bytes=round(share * sum(size for size, _ in measured)),
        longest_text_bytes=max(size for size, _ in measured),
        turns=round(share * sum(turns for _, turns in measured)),
        longest_turns=max(turns for _, turns in measured),
    )


def canonical(row: Row) -> bytes:
    """Bytes that are equal for equal rows, whatever the kind of file."""
    return json.dumps(row, sort_keys=True, ensure_ascii=False, default=str).encode("utf-8", "replace")


def find_format(recipe: Recipe, row: Row) -> DetectedFormat:
    """The format that the recipe names, or that this row has.

    Raises:
        UsageError: there is no such format, or a column that every row must have is missing.
    """
    if recipe.format is not None:
        _check_mapping(recipe.format, recipe.columns or {})
        columns = dict(recipe.columns or {}) or match(recipe.format, row)
        missing = [c for name, c in (columns or {}).items() if c not in row and name not in OPTIONAL[recipe.format]]
        if columns is None or missing:
            raise wrong_columns(recipe, row, f"no column {missing[0]!r}" if missing else f"not {recipe.format}")
        return DetectedFormat(recipe.format, columns, "said in the recipe", explicit=bool(recipe.columns))
    if recipe.columns is not None:
        raise UsageError(
            "the recipe sets columns without format",
            code="bad_recipe",
            expected="format: messages",
            got="columns only",
            hint=f"one of the formats {', '.join(COLUMNS)} as format: … in the recipe",
        )
    detected = detect(row)
    media = next((column for column, value in row.items() if is_media(column, value)), None)
    if detected is None and media is not None:
        raise media_error(recipe, recipe.data, media, row, None)
    if detected is None:
        raise wrong_columns(recipe, row, "no known set of columns")
    return detected


def _check_mapping(data_format: str, columns: dict[str, str]) -> None:
    names = [*COLUMNS[data_format], *OPTIONAL[data_format]]
    for name in columns:
        if name not in names:
            raise UsageError(
                f"columns: the format {data_format} has no column {name!r}{nearest(name, names)}",
                code="bad_recipe",
                expected=", ".join(names),
                got=name,
                hint="references/datasets.md lists the columns of each format",
            )


def complete(recipe: Recipe, detected: DetectedFormat, names: Collection[str]) -> DetectedFormat:
    """The mapping for rows with these columns. A mapping in the recipe is not changed."""
    return detected if recipe.columns else with_optional(detected, names)


def require_columns(recipe: Recipe, detected: DetectedFormat, names: Collection[str]) -> None:
    """Raises UsageError if the recipe names an optional column that no row has."""
    missing = next((column for column in detected.columns.values() if column not in names), None)
    if missing is not None:
        raise wrong_columns(recipe, names, f"no column {missing!r} in any row")


def first_format(recipe: Recipe, first: Sequence[Row]) -> DetectedFormat:
    """The format and the mapping of a dataset that begins with these rows.

    Raises:
        UsageError: the rows have no known format, or a column is missing.
    """
    names = dict.fromkeys(name for row in first for name in row)
    detected = complete(recipe, find_format(recipe, first[0]), names)
    require_columns(recipe, detected, names)
    check = checker(detected)
    for number, row in enumerate(first, start=1):
        trouble = check(row)[2]
        if trouble is not None and trouble.kind == "not_text":
            raise _refused(recipe, number, row, detected, trouble.kind)
    return detected


def unread_media(recipe: Recipe, columns: dict[str, str]) -> str | None:
    """The warning for a column of images, audio or video that the recipe leaves out by naming the others."""
    if not recipe.columns:
        return None
    detected = DetectedFormat(recipe.format or "", columns, "")
    column = next((name for row in first_rows_of(recipe) if (name := media_beside(row, detected)) is not None), None)
    if column is None:
        return None
    left = f"the column {column!r} contains images, audio or video, which are not read"
    return f"{left}: the recipe names the columns of the text, and the model learns that alone"


def first_rows_of(recipe: Recipe) -> list[Row]:
    """The first complete rows."""
    return list(islice((row for _, row, _ in read_rows.read(recipe) if isinstance(row, dict)), _FIRST))


def unread_text(first: Sequence[Row], columns: dict[str, str]) -> list[str]:
    """Columns that are not read although their text differs from row to row: the passage that a question is about,
    earlier turns, or the label of a plain text.

    Args:
        columns: the dataset's name of each column by the format's name.
    """
    read = {*columns.values(), "rejected"}  # sft must not learn the rejected answers
    names = dict.fromkeys(name for row in first for name in row if name not in read)
    plain = set(columns) == {"text"}
    return [
        name
        for name in names
        if _are_sentences(values := [row.get(name) for row in first])
        or (plain and name.lower() in _LABELS and len({repr(value) for value in values}) > 1)
    ]


def _are_sentences(values: list[Any]) -> bool:
    texts = [texts for value in values if (texts := _texts(value))]
    worded = sum(any(map(_is_sentence, text)) for text in texts)
    return 2 * worded > len(values) and 2 * len(set(map(tuple, texts))) > len(values)


def _is_sentence(text: str) -> bool:
    return len(text.split()) >= _WORDS or (len(text) >= _WORDS and not text.isascii())


def _texts(value: Any, depth: int = 4) -> list[str]:
    """All texts in a value, including its lists and objects."""
    if isinstance(value, str):
        return [value] if value.strip() else []
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for each in inner for text in _texts(each, depth - 1)] if depth else []


def unread_text_told(names: list[str], columns: dict[str, str]) -> str:
    """The warning for such columns."""
    return (
        f"{', '.join(names[:4])} {'is' if len(names) == 1 else 'are'} not read: the model learns "
        f"{', '.join(columns.values())} alone. If the answers need it, put it into the question, or name the columns "
        "in a recipe to say that it is not needed"
    )


def empty(recipe: Recipe) -> UsageError:
    return UsageError(
        f"{recipe.data} has no rows",
        code="empty_dataset",
        expected="at least one row",
        got="an empty file" if Path(recipe.data).is_file() else f"no rows in {recipe.split}",
        hint="use another file, or another split, such as split: train",
    )


def wrong_columns(recipe: Recipe, names: Collection[str], why: str) -> UsageError:
    hint = (
        "name them in the recipe, such as format: prompt_completion and columns: {prompt: QUESTION, completion: REPLY}"
    )
    if {"chosen", "rejected"} <= set(names):
        why = "preference pairs (chosen, rejected) are for DPO, not sft"
        hint = "train on the chosen answers: format: prompt_completion, columns: {prompt: prompt, completion: chosen}"
    return UsageError(
        f"{recipe.data} cannot be used for {recipe.method}: {why}",
        code="wrong_columns",
        expected="messages | prompt, completion | text | instruction, output | question, answer | conversations",
        got=", ".join(map(str, names)) or "no columns",
        hint=hint,
    )


def media_error(recipe: Recipe, where: str, column: str, row: Row, detected: DetectedFormat | None) -> UsageError:
    """The error for a dataset of images, audio or video, because its text alone would teach something else.

    Args:
        detected: the format in which its text could be read; None if the text alone is no example.
    """
    import yaml

    columns = {} if detected is None else {"columns": detected.columns}
    text = yaml.safe_dump(columns, default_flow_style=True, width=10**6, allow_unicode=True).strip()
    return UsageError(
        f"{where} has an image, audio or video in the column {column!r}, and this version trains on text only",
        code="not_text",
        expected="a dataset of text",
        got=media_in(row[column]) or repr(row[column])[:80],
        hint="use a dataset of text"
        if detected is None
        else f"a recipe that names the columns trains on the text alone: format: {detected.format}, {text[1:-1]}",
    )


def _refused(recipe: Recipe, line: int, row: Row, detected: DetectedFormat, kind: str) -> SkillTrainError:
    """The error for a row that training rejects, with its line."""
    where = f"line {line} of {recipe.data}"
    if kind == "missing_column":
        return UsageError(
            f"{where} has no column {min(detected.required - row.keys())!r}",
            code="wrong_columns",
            expected=", ".join(detected.columns.values()),
            got=", ".join(map(str, row)),
            hint=_leave_out(recipe),
        )
    if kind == "not_text" and (other := media_beside(row, detected)) is not None:
        return media_error(recipe, where, other, row, detected)
    try:
        to_example(row, detected.format, detected.columns)
    except Refused as refusal:
        refusal.error["message"] = f"{where}: {refusal.error['message']}"
        refusal.error["hint"] = refusal.error["hint"] or _leave_out(recipe)
        return from_exit_code(refusal.exit_code, refusal.error)
    return UsageError(
        f"{where}: the text contains half a surrogate pair, which no tokenizer can read",
        code="bad_row",
        expected="text in Unicode",
        got=repr(row)[:80],
        hint=_leave_out(recipe),
    )


def _leave_out(recipe: Recipe) -> str:
    """The command that lists all such rows and writes the others. The mapping may be in a recipe file whose name is
    unknown here."""
    split = ["--split", recipe.split] if recipe.split != Recipe.split else []
    split += ["--model", recipe.model] if recipe.model and Path(recipe.model).is_dir() else []
    fixed = read_rows.free_name(Path(recipe.data))
    if recipe.format or recipe.columns:
        words = shlex.join([recipe.data, *split, "--fix", fixed])
        return f"leave such rows out, with the recipe that has the mapping: skill-train data --recipe RECIPE {words}"
    return shlex.join(["skill-train", "data", recipe.data, *split, "--fix", fixed])
