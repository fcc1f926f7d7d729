"""The formats of rows: which columns become an example, and the names that datasets use for them. Pure."""

import re
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import msgspec

from skill_train.facts import DatasetFacts
from skill_train.program.events import Refused
from skill_train.program.examples import Row, is_media, media_in, turns_of
from skill_train.program.pictures.in_rows import PICTURE_PARTS

# The columns by the format's own names, each with the names that datasets use for it, the usual one first.
COLUMNS: dict[str, dict[str, tuple[str, ...]]] = {
    "messages": {"messages": ("messages", "conversation", "conversations")},
    "sharegpt": {"conversations": ("conversations", "conversation")},
    "prompt_completion": {"prompt": ("prompt",), "completion": ("completion", "response")},
    "instruction": {"instruction": ("instruction",), "output": ("output", "response", "answer")},
    "question_answer": {"question": ("question", "query", "problem"), "answer": ("answer", "response", "solution")},
    "text": {"text": ("text",)},
    "completion": {"prompt": ("prompt",), "completion": ("completion", "response")},
}
_ANSWER = re.compile(r"(?:completion|response|answer|solution|output|chosen)s?[ _-]?\w?", re.IGNORECASE)
_CONVERSATIONS = ("messages", "conversation", "conversations")
ASKED_FOR = ("completion",)  # never detected in a dataset; a recipe must request it
BARE = ("text", "completion", "prompt_completion")  # trained unchanged, without a chat template
_SYSTEM = ("system", "system_prompt")
_TURNS = "turns of the model's chat template; format: completion asks for bare text"
OPTIONAL: dict[str, dict[str, tuple[str, ...]]] = {
    "messages": {"system": _SYSTEM, "tools": ("tools",)},
    "sharegpt": {"system": _SYSTEM, "tools": ("tools",)},
    "prompt_completion": {"system": _SYSTEM, "tools": ("tools",)},
    "instruction": {"input": ("input", "question", "query", "problem", "context"), "system": _SYSTEM},
    "question_answer": {"system": _SYSTEM, "tools": ("tools",)},
    "text": {},
    "completion": {},
}
ONE_MESSAGE = "a row is one message, and must be a whole conversation"
WHOLE_CHAT = 'write each conversation as {"messages": [{"role": "user", "content": "…"}, …]}'
# For a model that reads pictures: the formats of turns, and the names that datasets use for the column of pictures, the
# usual names first. For a column of another name a recipe has `columns: {images: NAME}`.
PICTURED = ("messages", "sharegpt", "prompt_completion", "instruction", "question_answer")
PICTURE_COLUMNS = (
    "images", "image", "pictures", "picture", "imgs", "img", "photos", "photo", "screenshots", "screenshot",
    "image_paths", "image_path", "img_path", "image_files", "image_file", "image_file_name", "image_urls", "image_url",
    "file_names", "file_name", "filename", "files", "file", "paths", "path",
)  # fmt: skip


class DetectedFormat(NamedTuple):
    """How a row becomes an example."""

    format: str
    columns: dict[str, str]  # the dataset's name of each column, by the format's name
    reason: str  # why this format was chosen, in words for the user
    explicit: bool = False  # the recipe names the columns, so the content of other columns does not matter

    @property
    def required(self) -> frozenset[str]:
        """The columns that every row must have, by the dataset's names."""
        return frozenset(self.columns[name] for name in COLUMNS[self.format] if name in self.columns)


def detect(row: Row, *, pictures: bool = False) -> DetectedFormat | None:
    """The first format whose columns this row has; None if none fits. With `pictures` the model reads pictures, and a
    column of pictures is a column of the format."""
    apart = answer_apart(row) is not None
    for name in COLUMNS:
        is_detectable = name not in ASKED_FOR and not (apart and name in ("messages", "sharegpt"))
        columns = match(name, row, pictures=pictures) if is_detectable else None
        if columns is not None:
            return DetectedFormat(name, columns, _reason(columns))
    return None


def answer_apart(row: Row, guessed: Sequence[str] = ()) -> str | None:
    """Why a conversation that ends with a question, with its answer in another column, is not trained on: training
    would learn only the earlier answers in the conversation. None for other rows. In columns that are only `guessed` to
    hold conversations, a conversation without an earlier answer counts too."""
    answer = next((name for name in row if row[name] and _ANSWER.fullmatch(name)), None)
    names = guessed or _CONVERSATIONS
    column = next((name for name in names if _ends_with_question(row.get(name), alone=bool(guessed))), None)
    if answer is None or column is None:
        return None
    return f"{column} ends with a question, and its answer is another column, {answer}: put it at the end of {column}"


def other_turns(row: Row) -> str | None:
    """Why a conversation of plain texts, or of objects with other keys, cannot be read; None for other rows."""
    column = next((name for name in _CONVERSATIONS if kind(row.get(name)) == "list"), None)
    return None if column is None else f"{column} is a list, but not one of messages"


def _ends_with_question(value: Any, *, alone: bool) -> bool:
    turns = value if isinstance(value, list) and all(isinstance(turn, dict) for turn in value) else []
    roles = [turn.get("role") or turn.get("from") for turn in turns]
    return roles[-1:] in (["user"], ["human"]) and (alone or "assistant" in roles or "gpt" in roles)


def match(name: str, row: Row, *, pictures: bool = False) -> dict[str, str] | None:
    """The columns of one format in this row, by the format's names; None if the row does not have this format."""
    columns = {}
    for key, candidates in COLUMNS[name].items():
        column = next((c for c in candidates if c in row), None)
        if column is None:
            return None
        columns[key] = column
    if name in ("messages", "sharegpt") and not _speaks(row[next(iter(columns.values()))], name):
        return None
    columns |= _optional(name, columns, row)
    column = picture_column(name, columns, row) if pictures else None
    return columns if column is None else columns | {"images": column}


def picture_column(name: str, columns: dict[str, str], row: Row) -> str | None:
    """The column of pictures in this row for the format `name`, other than the given columns; None if there is none."""
    if name not in PICTURED:
        return None
    others = set(columns.values())
    names = (column for column in PICTURE_COLUMNS if column in row and column not in others)
    return next((column for column in names if is_media(column, row[column])), None)


def with_pictures(detected: DetectedFormat, row: Row) -> DetectedFormat:
    """The format with this row's column of pictures, unless it has one already or the recipe names the columns."""
    if detected.explicit or "images" in detected.columns:
        return detected
    column = picture_column(detected.format, detected.columns, row)
    if column is None:
        return detected
    return _with_columns(detected, detected.columns | {"images": column})


def has_pictures(row: Row) -> bool:
    """Whether a row seems to hold pictures: in a column, or in its messages."""
    return any(is_media(name, value) or _has_part(value) for name, value in row.items())


def _has_part(value: Any) -> bool:
    messages = value if isinstance(value, list) else []
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    texts = [message.get("value") for message in messages if isinstance(message, dict)]
    return any(part.get("type") in PICTURE_PARTS for part in parts) or any(map(media_in, [*contents, *texts]))


def optional_names(detected: DetectedFormat) -> set[str]:
    """The names that datasets use for the optional columns of this format, and the names of its detected columns."""
    return {name for names in OPTIONAL[detected.format].values() for name in names} | set(detected.columns.values())


def with_optional(detected: DetectedFormat, dataset_columns: Container[str]) -> DetectedFormat:
    """The format with every optional column among these columns of a dataset, even if the first rows lack it."""
    columns = {name: column for name, column in detected.columns.items() if name in COLUMNS[detected.format]}
    columns |= _optional(detected.format, columns, dataset_columns)
    columns |= {name: column for name, column in detected.columns.items() if name == "images"}
    return _with_columns(detected, columns)


def as_turns(detected: DetectedFormat) -> DetectedFormat:
    """The format for a model with a chat template: prompts and completions become questions and answers, whatever their
    columns are called. The exported model puts its template around every prompt, so training must too."""
    if detected.format != "prompt_completion":
        return detected
    names = {"prompt": "question", "completion": "answer"}
    columns = {names.get(name, name): column for name, column in detected.columns.items()}
    return detected._replace(format="question_answer", columns=columns, reason=f"{detected.reason}; {_TURNS}")


def for_model(facts: DatasetFacts, *, has_chat_template: bool) -> DatasetFacts:
    """The facts of the rows as this model reads them: prompts and completions become turns if it has a chat template.

    A pair of texts then counts as two messages, or three with a column of system messages. Pairs of messages keep their
    counted number.
    """
    detected = DetectedFormat(facts.format, facts.columns, facts.reason)
    turned = as_turns(detected) if has_chat_template else detected
    if turned is detected:
        return facts
    messages = 3 if "system" in turned.columns else 2
    return msgspec.structs.replace(
        facts,
        format=turned.format,
        columns=turned.columns,
        reason=turned.reason,
        turns=None if facts.turns is None else max(facts.turns, messages * facts.rows),
        longest_turns=None if facts.longest_turns is None else max(facts.longest_turns, messages),
    )


def kind(value: Any) -> str:
    """The type of a value for the user: text, messages, turns, number, true or false, list, object, media or null."""
    if media_in(value) is not None:
        return "media"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        if "role" in value[0]:
            return "messages"
        return "turns" if "from" in value[0] else "list"
    names = {str: "text", bool: "true or false", int: "number", float: "number", list: "list", dict: "object"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _optional(name: str, columns: dict[str, str], there: Container[str]) -> dict[str, str]:
    optional = {}
    for key, candidates in OPTIONAL[name].items():
        column = next((c for c in candidates if c in there and c not in columns.values()), None)
        if column is not None:
            optional[key] = column
    return optional


def _with_columns(detected: DetectedFormat, columns: dict[str, str]) -> DetectedFormat:
    reason = detected.reason.replace(_reason(detected.columns), _reason(columns))
    return detected._replace(columns=columns, reason=reason)


def _reason(columns: dict[str, str]) -> str:
    return f"found from the columns {', '.join(columns.values())}"


def _speaks(turns: Any, name: str) -> bool:
    keys = ("role", "content") if name == "messages" else ("from", "value")
    try:
        turns = turns_of(turns, name)
    except Refused:
        return name == "messages"
    if not isinstance(turns, list) or not turns:
        return name == "messages"  # an empty conversation is refused later, by its line
    return isinstance(turns[0], dict) and keys[0] in turns[0]
