"""Checks one row: whether training accepts it, how much text it has, and whether its speakers take turns."""

import difflib
import json
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from skill_train.data.row_pictures import RowPictures, problem_of
from skill_train.program.chat.choices import NOTHING_LEFT
from skill_train.program.events import ErrorWords, Refused
from skill_train.program.examples import CALLS, ROLES, SYSTEMS, TOOLS, Example, Row, to_example
from skill_train.program.pictures.in_rows import PICTURE, lift_pictures, media_beside, require_places
from skill_train.recipe.formats import DetectedFormat, as_turns, kind

HALF_A_PAIR = "the text contains half a surrogate pair, which no tokenizer can read"


class Trouble(NamedTuple):
    """What is wrong with a row. `refused`: whether the training would end with this message."""

    kind: str
    refused: bool
    why: str


# UTF-8 bytes of the texts that training reads, messages (0 for plain text), and what is wrong. Both figures are 0 for a
# row that training refuses. A plain tuple, because a million are made.
Checked = tuple[int, int, Trouble | None]
Check = Callable[[Row], Checked]


def checker(detected: DetectedFormat, pictures: RowPictures | None = None) -> Check:
    """A function that checks rows of one format. Training's own `to_example` decides.

    Args:
        pictures: checks the pictures of a row; None where the model reads only text.
    """
    required, read = detected.required, set(detected.columns.values())
    talk = detected.columns["messages"] if set(detected.columns) == {"messages"} else None

    def check(row: Row) -> Checked:
        try:
            if not row.keys() <= read and (other := unread_media_in(row, detected, pictures is not None)) is not None:
                return _refusal("not_text", f"{other!r} contains an image, audio or video")
            if talk is not None and (usual := _usual(row.get(talk), pictures is not None)) is not None:
                return usual
            if not row.keys() >= required:
                if not row:
                    return _refusal("empty", "a row without columns")
                missing = min(required - row.keys())
                return _refusal(
                    "missing_column", f"no column {missing!r}{_near_name(missing, frozenset(row.keys() - required))}"
                )
            example = example_of(row, detected, pictures)
            size, turns = measure(example)
            size += _unread_system_bytes(row, detected, example)
            size -= _marks_bytes(example) if pictures is not None else 0
        except BadPictures as refusal:
            return _refusal(problem_of(refusal), refusal.error["message"])
        except Refused as refusal:
            return _refusal(_kind(row, required, refusal.error), refusal.error["message"])
        except UnicodeEncodeError:
            return _refusal("not_utf8", HALF_A_PAIR)
        if not turns:
            return size, 0, None
        return size, turns, _order(tuple(message["role"] for message in example["messages"]))

    return check


class BadPictures(Refused):
    """The refusal of a row for its pictures, or for their places in it."""


def example_of(row: Row, detected: DetectedFormat, pictures: RowPictures | None = None) -> Example:
    """The row as training learns it, with its pictures checked.

    Raises:
        BadPictures: training refuses its pictures.
        Refused: training refuses its text.
    """
    if pictures is None:
        return to_example(row, detected.format, detected.columns)
    turns = as_turns(detected) if "images" in detected.columns else detected
    try:
        row, sources = lift_pictures(row, turns.columns)
    except Refused as refusal:
        raise BadPictures(**refusal.error) from None
    try:
        example = to_example(row, turns.format, turns.columns)
    except Refused as refusal:
        if not sources or refusal.error["code"] != "not_text":
            raise
        message = f"a text holds a mark of a picture, sound or film: {refusal.error['got']}"
        raise BadPictures(message, code="bad_row", expected="<image> where a picture of the row stands") from None
    try:
        if sources:
            require_places(example, len(sources))
            pictures.check(sources)
    except Refused as refusal:
        raise BadPictures(**refusal.error) from None
    return example


def unread_media_in(row: Row, detected: DetectedFormat, pictures: bool = False) -> str | None:
    """A column that training would not read, and that contains images, audio or video. A recipe that names the columns
    leaves it out on purpose."""
    return None if detected.explicit else media_beside(row, detected.columns, pictures=pictures)


def column_checker(columns: dict[str, str]) -> Check:
    """A function that checks rows for a method that skill-train does not train: every column exists, none is empty, the
    answers have one type, and the label is true or false."""

    def check(row: Row) -> Checked:
        missing = [column for column in columns.values() if column not in row]
        if missing:
            near = _near_name(missing[0], frozenset(row.keys() - set(columns.values())))
            return _refusal("missing_column" if row else "empty", f"no column {missing[0]!r}{near}")
        values = {key: row[column] for key, column in columns.items()}
        empty = next((name for name, value in values.items() if _is_empty(value)), None)
        if empty is not None:
            return _refusal("empty", f"{empty} is empty")
        kinds = {name: kind(value) for name, value in values.items() if name != "label"}
        if not set(kinds.values()) <= {"text", "messages"} or len(set(kinds.values())) > 1:
            return _refusal("malformed", "the texts are not all text, or all messages")
        if not isinstance(values.get("label", True), bool):
            return _refusal("malformed", "label is neither true nor false")
        try:
            return sum(_deep_bytes(value) for value in values.values()), 0, None
        except UnicodeEncodeError:
            return _refusal("not_utf8", HALF_A_PAIR)

    return check


def _deep_bytes(value: Any) -> int:
    if isinstance(value, list):
        return sum(_deep_bytes(message.get("content")) for message in value)
    return _bytes(value) if isinstance(value, str) else 0


def _usual(messages: Any, pictures: bool) -> Checked | None:
    """The result for a plain conversation, which `to_example` always accepts; None for any other row."""
    if type(messages) is not list:
        return None
    size, roles = 0, []
    for message in messages:
        if type(message) is not dict or len(message) != 2:
            return None
        role, content = message.get("role"), message.get("content")
        if type(role) is not str or type(content) is not str or not content or _may_be_media(content):
            return None
        if content.isspace() or (pictures and PICTURE in content):
            return None
        size += len(content) if content.isascii() else len(content.encode("utf-8"))
        roles.append(role)
    return (size, len(roles), _order(tuple(roles))) if "assistant" in roles else None


def _may_be_media(content: str) -> bool:
    """Whether a value is worth the full check for media."""
    if "<" in content or "[IMG]" in content or content[:5].lower() == "data:" or "." in content[-6:-2]:
        return True
    if content[0] in "[{" or content[-1] in "]}" or content[0].isspace() or content[-1].isspace():
        return True
    alone = " " not in content[:32] and content[:32].isascii()  # base64, or a URL with parameters
    return alone or ("?" in content[-300:] and "/" in content and "\n" not in content)


def measure(example: Example) -> tuple[int, int]:
    """UTF-8 bytes of the texts that training reads, and the number of messages (0 for plain text).

    Raises:
        UnicodeEncodeError: a text is not valid Unicode.
    """
    if example["kind"] == "text":
        return _bytes(example["text"]), 0
    if example["kind"] == "completion":
        return _bytes(example["prompt"]) + _bytes(example["completion"]), 0
    size = len(json.dumps(example["tools"], default=str)) if example["tools"] else 0
    for message in example["messages"]:
        size += _bytes(message["content"])
        size += sum(len(json.dumps(value, default=str)) for name, value in message.items() if name in CALLS)
    return size, len(example["messages"])


@lru_cache(maxsize=4096)
def _order(roles: tuple[str, ...]) -> Trouble | None:
    unknown = next((role for role in roles if role not in ROLES), None)
    if unknown is not None:
        return Trouble("unknown_role", False, f"{unknown!r} is not a role that chat templates know")
    why = role_trouble(roles)
    return Trouble("wrong_role_order", False, why) if why else None


def role_trouble(roles: tuple[str, ...]) -> str:
    """What is unusual in the order of the speakers; empty if nothing is unusual. Tool calls and their answers are
    not."""
    speakers = [role for role in roles if role not in SYSTEMS]
    if any(role in SYSTEMS and position for position, role in enumerate(roles)):
        return "a system message that is not the first"
    if not speakers:
        return "a system message alone"
    if speakers[0] != "user":
        return f"{speakers[0]} speaks first"
    for before, role in pairwise(speakers):
        if before == role and role not in TOOLS:
            return f"two {role} messages in a row"
        if role in TOOLS and before != "assistant" and before not in TOOLS:
            return f"a {role} message after {before}"
    return "ends with the user" if speakers[-1] == "user" else ""


def _unread_system_bytes(row: Row, detected: DetectedFormat, example: Example) -> int:
    """Bytes of the system message beside a prompt, which a model with a chat template reads before it."""
    system = row.get(detected.columns.get("system", ""))
    return _bytes(system) if example["kind"] == "completion" and isinstance(system, str) else 0


def _marks_bytes(example: Example) -> int:
    return len(PICTURE.encode()) * sum(message["content"].count(PICTURE) for message in example.get("messages", ()))


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8"))


def _refusal(kind: str, why: str) -> Checked:
    return 0, 0, Trouble(kind, True, why)


def _kind(row: Row, required: frozenset[str], error: ErrorWords) -> str:
    """The name of the problem for a refusal of training."""
    if error["code"] in ("not_text", "unknown_role"):
        return error["code"]
    if "no assistant message" in error["message"]:
        return "wrong_role_order"
    if NOTHING_LEFT in error["message"]:
        return "untrained"
    return "empty" if any(_is_empty(row[column]) for column in required) else "malformed"


def _is_empty(value: Any) -> bool:
    """Whether a value is missing, blank, or a conversation with an empty message."""
    if isinstance(value, list):
        return not value or any(_says_nothing(message) for message in value)
    return value is None or (isinstance(value, str) and not value.strip())


def _says_nothing(message: Any) -> bool:
    if not isinstance(message, dict) or not ({"role", "from"} & message.keys()):
        return False
    content = message.get("content", message.get("value"))
    return content in (None, "", []) and not any(map(message.get, CALLS))


@lru_cache(maxsize=256)  # rows of one file mostly lack the same column
def _near_name(column: str, there: frozenset[str]) -> str:
    """` (here: 'mesages')` for a column of the row with almost that name."""
    close = difflib.get_close_matches(column, there, n=1, cutoff=0.8)
    return f" (here: {close[0]!r})" if close else ""
