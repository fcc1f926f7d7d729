"""Columns of a dataset that the format does not read, though the answers may need them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skill_train.program.examples import Row

_LABELS = ("label", "labels", "class", "category", "sentiment", "target", "intent", "topic", "rating", "score", "stars")
_WORDS = 3  # a text of so many words is a sentence, not a name or a number; scripts without spaces have such characters
_EARLIER = "history"  # turns before the question, as LLaMA-Factory and ms-swift have them; many rows have none
_WEIGHTS, _VERDICTS = ("weight", "loss_mask"), ("label", "desirable", "preferred", "liked", "thumbs_up", "is_good")


def unread_text(first: Sequence[Row], columns: dict[str, str]) -> list[str]:
    """Columns that are not read although their text differs from row to row: the passage that a question is about,
    earlier turns, or the label of a plain text; and those that mark rows for other trainers to leave out.

    Args:
        columns: the dataset's name of each column by the format's name.
    """
    read = {*columns.values(), "rejected"}  # sft must not learn the rejected answers
    names = dict.fromkeys(name for row in first for name in row if name not in read)
    plain = set(columns) == {"text"}
    return [
        name
        for name in names
        if (
            (
                _are_sentences(values := [row.get(name) for row in first])
                or (name == _EARLIER and any(map(_texts, values)))
            )
            and not _are_read_elsewhere(values, first, columns)
        )
        or (not plain and _marks_rows(name, values))
        or (plain and name.lower() in _LABELS and len({repr(value) for value in values}) > 1)
    ]


def _marks_rows(name: str, values: list[Any]) -> bool:
    """Whether a column says of a row, or of its messages, that it is bad or does not train."""
    if name in _WEIGHTS:
        return any(0 in (value if isinstance(value, list) else [value]) for value in values)
    return name in _VERDICTS and any(value is False for value in values)


def _are_sentences(values: list[Any]) -> bool:
    texts = [texts for value in values if (texts := _texts(value))]
    worded = sum(any(map(_is_sentence, text)) for text in texts)
    return 2 * worded > len(values) and 2 * len(set(map(tuple, texts))) > len(values)


def _are_read_elsewhere(values: list[Any], rows: Sequence[Row], columns: dict[str, str]) -> bool:
    """Whether all texts of a column stand in the columns that are read, as ultrachat's `prompt` is its first
    message."""
    read = ("\n".join(_texts([row.get(column) for column in columns.values()])) for row in rows)
    return all(text in there for value, there in zip(values, read, strict=True) for text in _texts(value))


def _is_sentence(text: str) -> bool:
    return len(text.split()) >= _WORDS or (len(text) >= _WORDS and not text.isascii())


def _texts(value: Any, depth: int = 4) -> list[str]:
    """All texts in a value, including its lists and objects."""
    if isinstance(value, str):
        return [value] if value.strip() else []
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for each in inner for text in _texts(each, depth - 1)] if depth else []


def unread_text_warning(names: list[str], columns: dict[str, str]) -> str:
    marking = [name for name in names if name in (*_WEIGHTS, *_VERDICTS)]
    return (
        f"{', '.join(names[:4])} {'is' if len(names) == 1 else 'are'} not read: the model learns "
        f"{', '.join(columns.values())} alone. If the answers need it, put it into the question, or name the columns "
        "in a recipe to say that it is not needed"
        + (f". Rows that {marking[0]} marks as bad are trained like the others: leave them out" if marking else "")
    )
