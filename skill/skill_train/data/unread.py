"""Columns of a dataset that the format does not read, though the answers may need them. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from skill_train.program.chat.chosen import ROW_MARKS, marks
from skill_train.program.examples import Row

_LABELS = ("label", "labels", "class", "category", "sentiment", "target", "intent", "topic", "rating", "score", "stars")
_WORDS = 3  # a text of so many words is a sentence, not a name or a number; scripts without spaces have such characters
_LONG = 80  # characters of a passage, which several questions may be about, as in SQuAD
# What stands before a question, the same in all rows or missing in most: earlier turns, as LLaMA-Factory and ms-swift
# have them, system messages, OpenAI's older tools.
_SYSTEM = re.compile("sys(?:tem|_)")
_BEFORE = re.compile(f"history|{_SYSTEM.pattern}|persona|functions")


def unread_text(first: Sequence[Row], columns: dict[str, str], *, named: bool = False) -> list[str]:
    """Columns that are not read although their text differs from row to row: the passage that a question is about, or
    the label of a plain text; what stands before a question; and marks of rows that other trainers leave out.

    Args:
        columns: the dataset's name of each column by the format's name.
        named: whether a recipe names them. It leaves the others out on purpose; of a system prompt it may not know.
    """
    read = {*columns.values(), "rejected"}  # sft must not learn the rejected answers
    names = dict.fromkeys(name for row in first for name in row if name not in read)
    if named:
        names = dict.fromkeys(name for name in names if _SYSTEM.match(name.lower()) and "system" not in columns)
    labels = _LABELS if set(columns) == {"text"} else ()
    return [
        name
        for name in names
        if (
            _are_needed(name, values := [row.get(name) for row in first])
            and not _are_read_elsewhere(values, first, columns)
        )
        or any(False in marks(name, row) for row in first)
        or (name.lower() in labels and len({repr(value) for value in values}) > 1)
    ]


def _are_needed(name: str, values: list[Any]) -> bool:
    texts = [texts for value in values if (texts := _texts(value))]
    worded = sum(
        any(len(part.split()) >= _WORDS or (len(part) >= _WORDS and not part.isascii()) for part in text)
        for text in texts
    )
    if 2 * worded <= len(values) or _BEFORE.match(name.lower()):
        return bool(worded and _BEFORE.match(name.lower()))
    different, size = len(set(map(tuple, texts))), sum(len(text) for each in texts for text in each)
    return 2 * different > len(values) or (different > 1 and size > _LONG * len(texts))


def _are_read_elsewhere(values: list[Any], rows: Sequence[Row], columns: dict[str, str]) -> bool:
    """Whether all texts of a column stand in the columns that are read, as ultrachat's `prompt` is its first
    message."""
    read = ("\n".join(_texts([row.get(column) for column in columns.values()])) for row in rows)
    return all(text in there for value, there in zip(values, read, strict=True) for text in _texts(value))


def _texts(value: Any, depth: int = 4) -> list[str]:
    """All texts in a value, including its lists and objects."""
    if isinstance(value, str):
        return [value] if value.strip() else []
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for each in inner for text in _texts(each, depth - 1)] if depth else []


def unread_text_warning(names: list[str], columns: dict[str, str], *, named: bool = False) -> str:
    marking = [name for name in names if name in ROW_MARKS]
    so = "put it into the question, or name the columns in a recipe to say that it is not needed"
    if set(columns) == {"text"} and (label := next((name for name in names if name.lower() in _LABELS), None)):
        answer = f"columns: {{prompt: {columns['text']}, completion: {label}}}"
        marking = []
        so = f"make it the answer by two lines of a recipe, format: prompt_completion and {answer}"
    if named:
        so = f"add system: {names[0]} to the columns of the recipe, or write it into the texts"
    return (
        f"{', '.join(names[:4])} {'is' if len(names) == 1 else 'are'} not read: the model learns "
        f"{', '.join(columns.values())} alone. If the answers need it, {so}"
        + (f". Rows that {marking[0]} marks as bad are trained like the others: leave them out" if marking else "")
    )
