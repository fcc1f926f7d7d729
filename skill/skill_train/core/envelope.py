"""The JSON answer of a command, within 8 KB and without anything that steers a terminal or looks like a token."""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypedDict

from skill_train.core.secrets import masked
from skill_train.program.events import ErrorWords

SCHEMA = "skill-train/1"
MAX_JSON_BYTES = 8192  # with the newline at its end

# Control characters in a name or a prompt must not control the terminal or reverse the direction of its text. Half a
# surrogate pair (from a file name that is not UTF-8) cannot be printed at all.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Envelope(TypedDict, total=False):
    """The JSON answer of a command. `shortened` says what was cut to keep it within 8 KB."""

    schema: str
    command: str
    ok: bool
    data: Mapping[str, object]
    error: ErrorWords
    warnings: list[dict[str, str]]
    next: list[str]
    shortened: str


def clean(text: str) -> str:
    """The text without control characters (newline and tab are kept), and without anything that looks like a token."""
    return masked(_CONTROL.sub("�", text))


def bounded(document: Envelope) -> str:
    """Limits the document to 8 KB. First the spaces are removed, then long values are shortened, data first, and the
    answer says so. Commands, the hint and codes are kept whole or left out. The files of a run have everything."""
    text = _dumps(document)
    if len(text.encode()) >= MAX_JSON_BYTES:
        text = _dumps(document, separators=(",", ":"))
    for smaller in _smaller(document):
        if len(text.encode()) < MAX_JSON_BYTES:
            break
        text = _dumps(smaller, separators=(",", ":"))
    return text


def _smaller(document: Envelope) -> Iterator[Envelope]:
    """Ever smaller copies of the document."""
    document = document.copy()
    for part in _SHORTENED:
        for items, characters in _LIMITS if part in document else ():
            document[part] = _shorten(document[part], items, characters, whole=() if part == "data" else _WHOLE)
            document["shortened"] = f"lists to {items} items, strings to {characters} characters"
            yield document
    document["data"], document["shortened"] = {}, "data left out: too large"
    yield document
    while document["next"]:
        document["next"] = document["next"][:-1]
        document["shortened"] = "data and commands of next left out: too large"
        yield document
    if "error" in document:
        document["error"] = {**document["error"], "hint": ""}
        document["shortened"] = "data, next and hint left out"
        yield document


_SHORTENED: tuple[Literal["data", "warnings", "error"], ...] = ("data", "warnings", "error")  # in this order
_WHOLE = ("code", "hint")  # of an error or a warning
# Items of a list and characters of a string. Long paths make many answers long, so strings give way before items.
_LIMITS = ((50, 1000), (20, 400), (8, 160), (8, 60), (3, 60))


def _dumps(document: Envelope, separators: tuple[str, str] | None = None) -> str:
    plain = (sys.stdout.encoding or "utf-8").lower().replace("-", "") == "utf8"
    # Tokens are also masked before the text is escaped, because after an escape a token looks like the rest of a word.
    return clean(json.dumps(cleaned(document, masked), ensure_ascii=not plain, separators=separators))


def _shorten(value: Any, most: int, characters: int, whole: tuple[str, ...] = ()) -> Any:
    if isinstance(value, dict):
        items = list(value.items())[: max(most, 30)]
        return {key: item if key in whole else _shorten(item, most, characters, whole) for key, item in items}
    if isinstance(value, list):
        return [_shorten(item, most, characters, whole) for item in value[:most]]
    if isinstance(value, str) and len(value) > characters:
        return value[:characters] + "…"
    return value


def cleaned(value: Any, how: Callable[[str], str] = clean) -> Any:
    """The value with each text in it cleaned, also keys."""
    if isinstance(value, dict):
        return {how(str(key)): cleaned(item, how) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [cleaned(item, how) for item in value]
    return how(value) if isinstance(value, str) else value
