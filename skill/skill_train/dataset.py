"""Reads a dataset once, row by row: which format it is, how its columns map, and whether every row is whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skill_train.errors import Temporary, UsageError, from_exit_code
from skill_train.facts import DatasetFacts
from skill_train.recipe import Recipe
from skill_train.resources import train_module

# Columns by the name a format gives them, with the names that datasets use for them, the usual one first.
_COLUMNS: dict[str, dict[str, tuple[str, ...]]] = {
    "messages": {"messages": ("messages", "conversation", "conversations")},
    "sharegpt": {"conversations": ("conversations", "conversation")},
    "prompt_completion": {"prompt": ("prompt",), "completion": ("completion", "response")},
    "instruction": {"instruction": ("instruction",), "output": ("output", "response", "answer")},
    "question_answer": {"question": ("question", "query", "problem"), "answer": ("answer", "response", "solution")},
    "text": {"text": ("text",)},
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "messages": ("tools",),
    "sharegpt": ("system", "tools"),
    "prompt_completion": ("tools",),
    "instruction": ("input", "system"),
    "question_answer": ("system",),
    "text": (),
}


def scan(recipe: Recipe) -> DatasetFacts:
    """Every row read and checked once, in constant memory.

    Raises:
        UsageError: no such dataset, a broken line (with its number), wrong columns, a malformed row, or no rows.
    """
    program = train_module()
    rows, digest, names = 0, hashlib.sha256(), tuple[str, ...]()
    found: tuple[str, dict[str, str], str] | None = None
    try:
        for line, row in _rows(recipe):
            if found is None:
                names = tuple(row)
                found = _format(recipe, row)
            _check_row(program, row, found, where=f"line {line} of {recipe.data}")
            rows += 1
            digest.update(json.dumps(row, sort_keys=True, ensure_ascii=False, default=str).encode("utf-8", "replace"))
    except program.Refused as refusal:
        raise from_exit_code(refusal.exit_code, refusal.error) from None
    if found is None:
        raise UsageError(
            f"{recipe.data} has no rows",
            code="empty_dataset",
            expected="at least one row",
            got="an empty file" if Path(recipe.data).is_file() else f"no rows in {recipe.split}",
        )
    path = Path(recipe.data)
    return DatasetFacts(
        source=recipe.data,
        fingerprint=digest.hexdigest(),
        rows=rows,
        column_names=names,
        format=found[0],
        columns=found[1],
        bytes=path.stat().st_size if path.is_file() else None,
        reason=found[2],
    )


def _rows(recipe: Recipe) -> Iterator[tuple[int, dict[str, Any]]]:
    path = Path(recipe.data)
    looks_local = path.suffix in (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet") or path.is_absolute()
    if not path.exists() and (looks_local or recipe.data.count("/") != 1):
        raise UsageError(
            f"{recipe.data} does not exist",
            code="missing_file",
            expected="a dataset file or folder, or a Hub id such as owner/name",
            got=recipe.data,
        )
    source = train_module().iter_rows(
        recipe.data, split=recipe.split, config=recipe.data_config, revision=recipe.data_revision
    )
    if path.exists():
        yield from source
        return
    try:
        yield from source
    except (ConnectionError, OSError) as error:
        raise Temporary(
            f"the dataset {recipe.data} cannot be read from the Hub: {str(error).splitlines()[0]}",
            code="hub_unreachable",
            expected="a dataset on the Hub, or a file on this machine",
            hint="try again when the Hub is reachable, or give a file",
        ) from None


def _format(recipe: Recipe, row: dict[str, Any]) -> tuple[str, dict[str, str], str]:
    """`(format, columns, reason)`."""
    if recipe.format is not None:
        columns = dict(recipe.columns or {}) or _match(recipe.format, row)
        missing = [c for c in (columns or {}).values() if c not in row]
        if columns is None or missing:
            raise _wrong_columns(recipe, row, f"no column {missing[0]!r}" if missing else f"not {recipe.format}")
        return recipe.format, columns, "said in the recipe"
    if recipe.columns is not None:
        raise UsageError(
            "columns needs format beside it", code="bad_recipe", expected="format: messages", got="columns only"
        )
    for name in ("messages", "sharegpt", "prompt_completion", "instruction", "question_answer", "text"):
        columns = _match(name, row)
        if columns is not None:
            return name, columns, f"found from the columns {', '.join(columns.values())}"
    raise _wrong_columns(recipe, row, "no known set of columns")


def _match(name: str, row: dict[str, Any]) -> dict[str, str] | None:
    """The mapping of one format onto this row, or None."""
    columns = {}
    for wanted, candidates in _COLUMNS[name].items():
        column = next((c for c in candidates if c in row), None)
        if column is None:
            return None
        columns[wanted] = column
    if name in ("messages", "sharegpt") and not _speaks(row[next(iter(columns.values()))], name):
        return None
    return columns | {extra: extra for extra in _OPTIONAL[name] if extra in row}


def _speaks(turns: Any, name: str) -> bool:
    keys = ("role", "content") if name == "messages" else ("from", "value")
    if not isinstance(turns, list) or not turns:
        return name == "messages"  # an empty conversation is refused later, by its line
    return isinstance(turns[0], dict) and keys[0] in turns[0]


def _check_row(program: Any, row: dict[str, Any], found: tuple[str, dict[str, str], str], *, where: str) -> None:
    missing = [column for column in found[1].values() if column not in row]
    required = set(_COLUMNS[found[0]])
    missing = [c for c in missing if c in {found[1][r] for r in required if r in found[1]}]
    if missing:
        raise UsageError(
            f"{where} has no column {missing[0]!r}",
            code="wrong_columns",
            expected=", ".join(found[1].values()),
            got=", ".join(map(str, row)),
        )
    try:
        program.to_example(row, found[0], found[1])
    except program.Refused as refusal:
        refusal.error["message"] = f"{where}: {refusal.error['message']}"
        raise


def _wrong_columns(recipe: Recipe, row: dict[str, Any], why: str) -> UsageError:
    hint = (
        "name them in the recipe, such as format: prompt_completion and columns: {prompt: QUESTION, completion: REPLY}"
    )
    if {"chosen", "rejected"} <= set(row):
        why = "preference pairs (chosen, rejected) are for DPO, not sft"
        hint = "train on the chosen answers: format: prompt_completion, columns: {prompt: prompt, completion: chosen}"
    return UsageError(
        f"{recipe.data} cannot be used for {recipe.method}: {why}",
        code="wrong_columns",
        expected="messages | prompt, completion | text | instruction, output | question, answer | conversations",
        got=", ".join(map(str, row)) or "no columns",
        hint=hint,
    )
