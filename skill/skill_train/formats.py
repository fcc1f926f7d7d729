"""Formats: which columns make an example, by the names that datasets give them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

# Columns by the name a format gives them, with the names that datasets use for them, the usual one first.
COLUMNS: dict[str, dict[str, tuple[str, ...]]] = {
    "messages": {"messages": ("messages", "conversation", "conversations")},
    "sharegpt": {"conversations": ("conversations", "conversation")},
    "prompt_completion": {"prompt": ("prompt",), "completion": ("completion", "response")},
    "instruction": {"instruction": ("instruction",), "output": ("output", "response", "answer")},
    "question_answer": {"question": ("question", "query", "problem"), "answer": ("answer", "response", "solution")},
    "text": {"text": ("text",)},
}
OPTIONAL: dict[str, tuple[str, ...]] = {
    "messages": ("tools",),
    "sharegpt": ("system", "tools"),
    "prompt_completion": ("tools",),
    "instruction": ("input", "system"),
    "question_answer": ("system",),
    "text": (),
}
_ALSO = {"input": ("input", "context"), "system": ("system", "system_prompt")}


class Found(NamedTuple):
    """How a row becomes an example.

    Attributes:
        columns: what the format calls a column: what the dataset calls it.
        reason: why, for the reader.
    """

    format: str
    columns: dict[str, str]
    reason: str

    @property
    def required(self) -> frozenset[str]:
        """The dataset's names of the columns that every row must have."""
        return frozenset(self.columns[name] for name in COLUMNS[self.format] if name in self.columns)


def detect(row: dict[str, Any]) -> Found | None:
    """The first format whose columns this row has."""
    for name in COLUMNS:
        columns = match(name, row)
        if columns is not None:
            return Found(name, columns, f"found from the columns {', '.join(columns.values())}")
    return None


def match(name: str, row: dict[str, Any]) -> dict[str, str] | None:
    """The mapping of one format onto this row, or None."""
    columns = {}
    for wanted, candidates in COLUMNS[name].items():
        column = next((c for c in candidates if c in row), None)
        if column is None:
            return None
        columns[wanted] = column
    if name in ("messages", "sharegpt") and not _speaks(row[next(iter(columns.values()))], name):
        return None
    return columns | {extra: extra for extra in OPTIONAL[name] if extra in row}


def overlooked(found: Found, names: Iterable[str]) -> dict[str, str]:
    """Optional columns that the dataset has and the mapping, made from one row by the usual names, does not."""
    there = set(names) - set(found.columns.values())
    extra = {}
    for optional in OPTIONAL[found.format]:
        column = next((c for c in _ALSO.get(optional, (optional,)) if c in there), None)
        if optional not in found.columns and column is not None:
            extra[optional] = column
    return extra


def kind(value: Any) -> str:
    """What a value is, in the words of the report: text, messages, turns, number, true or false, list, object, null."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        if "role" in value[0]:
            return "messages"
        return "turns" if "from" in value[0] else "list"
    names = {str: "text", bool: "true or false", int: "number", float: "number", list: "list", dict: "object"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _speaks(turns: Any, name: str) -> bool:
    keys = ("role", "content") if name == "messages" else ("from", "value")
    if not isinstance(turns, list) or not turns:
        return name == "messages"  # an empty conversation is refused later, by its line
    return isinstance(turns[0], dict) and keys[0] in turns[0]
