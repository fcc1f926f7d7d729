"""What is told of rows by their number: what is trained as it stands, though its author hardly meant it so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from skill_train.program.examples import EncodedRow, Row, says

# Texts that stand for nothing: those of Alpaca, and an empty cell as programs write it. Of an answer only the first:
# `None` may be one.
NO_ANSWER = re.compile(r"<no ?(?:input|output)>", re.IGNORECASE)
NOTHING = re.compile(rf"{NO_ANSWER.pattern}|no ?input|nan|none|null|n/a", re.IGNORECASE)
SYSTEMS = ("system", "developer")
FOR_NOTHING = "have a text that stands for nothing (the first: {}), which is read: empty the cell, or leave the row out"
TWO_SYSTEMS = "have a system message in their column and another in their messages (the first: {}): both are read"
TOOLS_TWICE = (
    "describe their tools twice (the first: {}), in the system message and in the column of tools, which the chat "
    "template writes too: keep one of them, as it will be in use"
)


class ToldRows:
    """The rows of which something is told: for each note the places."""

    def __init__(self) -> None:
        self.places = dict[str, list[str]]()

    def look(self, line: int, row: Row, columns: dict[str, str], made: EncodedRow) -> None:
        for note, place in findings(row, columns, made):
            self.places.setdefault(note, []).append(f"line {line}{place}")

    def notes(self, count: int) -> list[str]:
        """What to tell of them, where `count` rows were looked at."""
        return [f"{len(places)} of {count} rows {note.format(places[0])}" for note, places in self.places.items()]


def findings(row: Row, columns: dict[str, str], made: EncodedRow) -> Iterator[tuple[str, str]]:
    """Each note at most once, and what stands there."""
    messages: list[Any] = made.get("messages", [])
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    beside = [row.get(columns.get(name, "")) for name in ("input", "system")]
    nothing = [text for text in beside if isinstance(text, str) and NOTHING.fullmatch(text.strip())]
    nothing += [text for text in answers if NO_ANSWER.fullmatch(text.strip())]
    if nothing:
        yield FOR_NOTHING, f", {nothing[0].strip()!r}"
    systems = [message["content"] for message in messages[:2] if message["role"] in SYSTEMS]
    if len(systems) > 1 and systems[0] == row.get(columns.get("system", "")):
        yield TWO_SYSTEMS, ""
    names = names_of_tools(made.get("tools"))
    texts = [message["content"] for message in messages if message["role"] in SYSTEMS]
    if names and any(is_described(names, text) and is_named(names, text, made["rendered"]) for text in texts):
        yield TOOLS_TWICE, ""


def names_of_tools(tools: Any) -> list[str]:
    functions = [tool.get("function", tool) for tool in tools or () if isinstance(tool, dict)]
    return [function["name"] for function in functions if isinstance(function, dict) and says(function.get("name"))]


def is_described(names: list[str], text: str) -> bool:
    """Whether a text has each of these tools as JSON, or as Python writes it."""
    return all(re.search(rf"""["']name\\?["']: ?\\?["']{re.escape(str(name))}\\?["']""", text) for name in names)


def is_named(names: list[str], text: str, rendered: str) -> bool:
    """Whether each tool stands in a rendered conversation beside this text too."""
    others = rendered.replace(text.strip(), "")
    return all(str(name) in others for name in names)
