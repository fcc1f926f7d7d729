"""Notes that count rows whose text is trained unchanged, though the author of the data hardly meant it so."""

import re
from collections.abc import Container, Iterable, Iterator
from itertools import islice
from typing import Any

from skill_train.program.chat.choices import marks
from skill_train.program.examples import CALLS, ROLES, SYSTEMS, THOUGHTS, TOOLS, Row, is_filled

# Texts that stand for nothing: those of Alpaca, and an empty cell as programs write it. In answers only Alpaca's texts
# count, because `None` may be a real answer.
NO_ANSWER = re.compile(r"<no ?(?:input|output)>", re.IGNORECASE)
NOTHING = re.compile(rf"{NO_ANSWER.pattern}|no ?input|nan|none|null|n/a", re.IGNORECASE)
# An empty or broken cell as pandas, Excel, MySQL, JavaScript and web pages (invisible characters) write it. `NaN` is
# not in it, because it may be an answer about JavaScript.
BROKEN_CELL = re.compile(
    r"nan|<NA>|NaT|#(?:N/A|REF!|VALUE!|NAME\?|NUM!|NULL!|DIV/0!)|\\N|\[object Object\]"
    r"|[\s\xad\u200b-\u200f\u2060\ufeff]+"
)
# UTF-8 that was read as Windows-1252 or Latin-1: letters such as ü, quotes, Cyrillic; U+FFFD for undecodable bytes.
WRONG_LETTERS = re.compile(
    r"Ã[Ÿ\x80-\x9f¡-ª¬-º¼-¿]|â(?:€[™œ“”¦\x9d]|\x80[\x93-\xa6])|(?:Ð[\xa0-¿]|Ñ[€‚ƒ„…†‡ˆ‰Š‹Œ\x80-\x8f]){3}|\ufffd"
)
IN_WRONG_LETTERS = ("Ã", "â€", "\x80", "Ð", "\ufffd")  # searched first: WRONG_LETTERS takes a minute for 200 MB
ALONE = ("prompt", "completion", "text")  # keys of an example without messages
# What chat templates write around turns: <|im_start|>, <|user|>, <｜User｜>, <start_of_turn>, [INST], ### Instruction:
TURN_MARK = re.compile(
    r"<\|[^<>|\s]+\|>|<｜[^<>｜\s]+｜>|<(?:start|end)_of_turn>|\[/?INST\]"
    r"|^### ?(?:Instruction|Response|Human|User|Assistant):",
    re.MULTILINE,
)
# In answers fewer marks count: a document in an answer has such lines, and its thoughts have such marks.
MARK_IN_ANSWER = re.compile(
    r"(?:<\|(?:im_end|eo[mt]_id|eot|end|endoftext|end_of_text)\|>|<｜[^<>｜\s]+｜>|<end_of_turn>|</s>|<eos>)\s*\Z"
    r"|\[INST\](?=[^\[]*\[/INST\])|\A\s*### ?(?:Response|Assistant):|^### ?(?:Instruction|Human):",
    re.MULTILINE,
)
FLOAT = re.compile(r"\s*-?\d+\.0\s*")
TAGS_TWICE = re.compile(r"<tool_response>\s*<tool_response>")
PYTHON_VALUE = re.compile(r"\s*[\[{]\s*(?:'|array\().*[\]}]\s*", re.DOTALL)  # not JSON, which has double quotes
FOR_NOTHING = "have a text that stands for nothing (the first: {}), which is read: empty the cell, or leave the row out"
WRONGLY_READ = (
    "have letters that were read in a wrong encoding (the first: {}), and that the model learns so: take the texts "
    "again from where they came, as UTF-8"
)
UNKNOWN_ROLE = (
    "have a role that chat templates do not know (the first: {}): it is written as it is, and no chat in use has such "
    "a turn. Rename it, as human to user; the call of a tool belongs into tool_calls of the assistant's message"
)
TWO_SYSTEMS = "have a system message in their column and another in their messages (the first: {}): both are read"
RENDERED_TWICE = (
    "hold marks of turns in the question (the first: {}), and the model's own template writes its marks around them: "
    "take them out; format: completion trains rows that are rendered already"
)
MARKED_ANSWERS = "hold marks of turns in an answer (the first: {}), which the model learns to write: take them out"
PYTHON_ANSWERS = (
    "have an answer that is a list or an object as Python writes it (the first: {}), and that is trained: put the text "
    "that is meant in its place"
)
# Keys of a message that answers need, and keys that are handled elsewhere. Of all other keys only sentences are noted.
NEEDED_KEYS = ("attachments", "context", "documents", "functions", "reasoning_details", "tools")
READ_KEYS = ("role", "content", *CALLS, *THOUGHTS)
UNREAD_KEYS = (
    "have a text in a key that the chat template does not write (the first: {}): the content needs it, if answers do"
)
FLOAT_ANSWERS = (
    "have an answer that is a whole number written as a float (the first: {}), as pandas writes a column with an empty "
    "cell: read it with dtype=str"
)
MOSTLY = {PYTHON_ANSWERS: 0.5, FLOAT_ANSWERS: 0.9}  # the least share of rows for a note: a few may be meant so
LEFT_OUT_ROW = "are marked to be left out (the first: {}), in a column that is not read: they train like the others"
TOOLS_TWICE = (
    "describe their tools twice (the first: {}), in the system message and in the column of tools, which the chat "
    "template writes too: keep one of them, as it will be in use"
)
WRITTEN_NULLS = (
    "have a null in a call or a tool that was hardly meant (the first: {}), and that is trained: `datasets` and pandas "
    "write a null for each name that only others have. Use the Parquet file, or take the nulls out"
)
RESPONSE_TWICE = (
    "have the answer of a tool in <tool_response> twice (the first: {}): the chat template writes the tags too"
)
ACROSS = (
    "have one token for the end of the prompt and the start of the answer (the first: {}): a prompt that is asked "
    "alone gets other tokens than it was trained with. End the prompt without a space, and begin the answer with it"
)
ACROSS_IN_CHAT = (
    "have one token for the end of the prompt that the chat template writes and the start of an answer (the first: "
    "{}): in use the prompt has other tokens. Begin answers without a newline, and with a thought where it opens one"
)


class RowNotes:
    """Notes about rows: for each note, the places that it is about."""

    def __init__(self, *notes: str) -> None:
        """`notes` come first, in this order; other notes follow in the order in which they are found."""
        self.places: dict[str, list[str]] = {note: [] for note in notes}
        self.rows = 0  # rows that were looked at

    def add(self, line: int, found: Iterable[tuple[str, str]]) -> None:
        """Adds the notes about the row at this line. `found` holds each note with a text to show behind the line."""
        self.rows += 1
        for note, place in found:
            self.places.setdefault(note, []).append(f"line {line}{place}")

    def notes(self, count: int) -> list[str]:
        """The notes as sentences, after `count` rows were looked at. Leaves out notes below their share in `MOSTLY`."""
        rare = {note for note, places in self.places.items() if len(places) < count * MOSTLY.get(note, 0)}
        places_of = {note: places for note, places in self.places.items() if places and note not in rare}
        return [f"{len(places)} of {count} rows {note.format(places[0])}" for note, places in places_of.items()]


def findings(row: Row, columns: dict[str, str], encoded: Any, own: Container[str] = ()) -> Iterator[tuple[str, str]]:
    """The notes about a row, each at most once and with the text that it is about. `encoded` is the encoded row, or its
    example if there is no model. `own` holds the model's added tokens, which typed.py reports."""
    unread = row.keys() - columns.values()
    marked = min((name for name in unread if (values := marks(name, row)) and not any(values)), default=None)
    if marked is not None:
        yield LEFT_OUT_ROW, f", {marked}: {str(row[marked])[:40]}"
    messages: list[Any] = encoded.get("messages", [])
    if unknown := [message["role"] for message in messages if message["role"] not in ROLES]:
        yield UNKNOWN_ROLE, f", {unknown[0][:40]!r}"
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    beside = [row.get(columns.get(name, "")) for name in ("input", "system")]
    column = row.get(columns.get("question", columns.get("instruction", "")))
    yield from of_texts(
        [text for text in beside if isinstance(text, str)], [column, *map(encoded.get, ALONE)], messages
    )
    users = [message["content"].lstrip() for message in messages if message["role"] == "user"]
    # A message may be about such marks, so in a message only a mark at its start counts.
    asked = map(TURN_MARK.search, [column]) if isinstance(column, str) else map(TURN_MARK.match, users)
    for note, found in ((RENDERED_TWICE, asked), (MARKED_ANSWERS, map(MARK_IN_ANSWER.search, answers))):
        if foreign := [mark for each in found if each and (mark := each.group().strip()) not in own]:
            yield note, f", {foreign[0]!r}"
    if as_python := [text for text in (*answers, encoded.get("completion", "")) if PYTHON_VALUE.fullmatch(text)]:
        yield PYTHON_ANSWERS, f", {as_python[0].strip()[:60]}"
    if floats := [text for text in answers if FLOAT.fullmatch(text)]:
        yield FLOAT_ANSWERS, f", {floats[0]}"
    if encoded.get("rendered"):
        yield from islice(unread_keys(messages, encoded["rendered"]), 1)
        yield from [(RESPONSE_TWICE, "")] * bool(TAGS_TWICE.search(encoded["rendered"]))
    systems = [message["content"] for message in messages[:2] if message["role"] in SYSTEMS]
    if len(systems) > 1 and systems[0] == row.get(columns.get("system", "")):
        yield TWO_SYSTEMS, ""
    yield from islice(written_nulls(row, encoded.get("tools")), 1)
    tools = functions_of(encoded.get("tools"))
    texts = [message["content"] for message in messages if message["role"] in SYSTEMS]
    if any(is_described(tools, text) for text in texts):
        yield TOOLS_TWICE, ""


def of_texts(beside: list[str], others: list[Any], messages: list[Any]) -> Iterator[tuple[str, str]]:
    """Notes on empty or wrongly decoded texts. `beside`: the input and the system message; `others`: further texts that
    are in no message. The answers of tools are not checked."""
    spoken = [message for message in messages if message["role"] not in TOOLS]
    texts = [text for text in (*others, *(message["content"] for message in spoken)) if isinstance(text, str)]
    nothing = [text for text in beside if NOTHING.fullmatch(text.strip())]
    answers = [message["content"] for message in spoken if message["role"] == "assistant"]
    nothing += [text for text in answers if NO_ANSWER.fullmatch(text.strip())]
    nothing += [text for text in texts if BROKEN_CELL.fullmatch(text.strip())]
    if nothing:
        yield FOR_NOTHING, f", {nothing[0].strip()!r}"
    odd = [text for text in (*beside, *texts) if any(sign in text for sign in IN_WRONG_LETTERS)]
    if wrong := [found.group() for found in map(WRONG_LETTERS.search, odd) if found]:
        yield WRONGLY_READ, f", {wrong[0]!r}"


def unread_keys(messages: list[Any], rendered: str) -> Iterator[tuple[str, str]]:
    for name, value, role in ((name, each[name], each["role"]) for each in messages for name in each):
        is_needed = len(str(value)) > 2 if name in NEEDED_KEYS else isinstance(value, str) and len(value.split()) > 4
        if is_needed and name not in READ_KEYS and str(value).strip() not in rendered:
            yield UNREAD_KEYS, f", {name} of a message of {role}"


def functions_of(items: Any) -> list[Row]:
    """The functions of these tools or calls, each of which may hold one or be one."""
    functions = [item.get("function", item) for item in items or () if isinstance(item, dict)]
    return [function for function in functions if isinstance(function, dict)]


def written_nulls(row: Row, tools: Any) -> Iterator[tuple[str, str]]:
    """Notes on nulls of Arrow in JSON: parameters of tools, and arguments of calls where another message has a null for
    its calls too."""
    parameters = (function.get("parameters") for function in functions_of(tools))
    objects = [each.get("properties") for each in parameters if isinstance(each, dict)]
    turns = [turn for value in row.values() if isinstance(value, list) for turn in value if isinstance(turn, dict)]
    called: list[Any] = [turn["tool_calls"] for turn in turns if "tool_calls" in turn]
    if None in called:
        objects += [call.get("arguments") for calls in called for call in functions_of(calls)]
    for each in objects:
        yield from (
            ((WRITTEN_NULLS, f", {key!r}") for key in each if each[key] is None) if isinstance(each, dict) else ()
        )


def is_described(tools: list[Row], text: str) -> bool:
    """Whether a text has each of these tools, and one or more, as JSON or as Python writes it."""
    names = [re.escape(str(tool["name"])) for tool in tools if is_filled(tool.get("name"))]
    return names != [] and all(re.search(rf"""["']name\\?["']: ?\\?["']{name}\\?["']""", text) for name in names)
