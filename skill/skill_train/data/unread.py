"""Columns of a dataset that the format does not read, though the answers may need them. Pure."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from skill_train.program.chat.choices import ROW_MARKS, marks
from skill_train.program.examples import Row
from skill_train.program.model_files import nodes_in

_LABELS = ("label", "labels", "class", "category", "sentiment", "target", "intent", "topic", "rating", "score", "stars")
# What may be an answer, and its thoughts: in the question they would give it away.
_ANSWERS = re.compile(
    "(?:completion|response|answer|solution|output|reply|summary|translation|emotion|label_?(?:text|name)|gold_label)s?",
    re.IGNORECASE,
)
_THOUGHTS = re.compile("(?:^|_)(?:cot|chain_of_thought|reason(?:ing)?|thinking|thoughts?|rationale)", re.IGNORECASE)
_WORDS = 3  # a text of so many words is a sentence, not a name or a number; scripts without spaces have such characters
_LONG = 80  # characters of a passage, which several questions may be about, as in SQuAD
# What stands before a question, the same in all rows or missing in most: earlier turns, as LLaMA-Factory and ms-swift
# have them, system messages, OpenAI's older tools.
_SYSTEM = re.compile("sys(?:tem|_)")
_BEFORE = re.compile(f"history|{_SYSTEM.pattern}|persona|functions")
# What a question is about: needed by the rows that have it, however few.
_ABOUT = re.compile("input|context|passage|background|evidence|paragraph|document|article|reference|knowledge")
# Choices of a test, and how an answer is to be written.
_CHANGES = re.compile(r"[a-e]|(?:option|choice)s?[ _]?\w?|(?:target|tgt|source|src)_?lang(?:uage)?|tone|style")
_WHO = re.compile("model|author|annotator|worker")  # several answer one question
_WORD = re.compile(r"(?<!\S)[^\W\d_]+(?!\S)")  # of letters alone: no id, date or path
_SPLITS = ("split", "set", "subset", "fold", "partition")
_TESTS = ("test", "testing", "validation", "valid", "val", "dev", "eval", "holdout")
_FIRST, _FIRST_BYTES = 200, 64_000_000  # rows that decide what a typical row is, and their texts and pictures


class SeenRows:
    """The first rows of a dataset, and later ones in which a column has one of its first values."""

    def __init__(self) -> None:
        self.first, self.later = list[Row](), list[Row]()
        self.has_first, self._bytes, self._counts = False, 0, Counter[str]()

    def add(self, row: Row) -> None:
        new = [name for name in row if self._counts[name] < 20 and row[name] not in (None, "", [], {})]
        new = [name for name in new if name.lower() not in _SPLITS or _is_for_tests(name, row)]
        if self.has_first and (not new or len(self.later) == 1000 or self._bytes > 2 * _FIRST_BYTES):
            return
        (self.later if self.has_first else self.first).append(row)
        self._bytes += sum(len(each) for _, each in nodes_in(row) if isinstance(each, (str, bytes)))
        self._counts.update(new)
        self.has_first = len(self.first) == _FIRST or self._bytes > _FIRST_BYTES


def unread_text(rows: Sequence[Row], columns: dict[str, str], *, named: bool = False) -> list[str]:
    """Columns that are not read although their text differs from row to row: the passage that a question is about, or
    the label of a plain text; what stands before a question; and marks of rows that other trainers leave out.

    Args:
        columns: the dataset's name of each column by the format's name.
        named: whether a recipe names them. Others are then left out on purpose, except system prompts and splits.
    """
    read = {*columns.values(), "rejected"}  # sft must not learn the rejected answers
    names = dict.fromkeys(name for row in rows for name in row if name not in read)
    if named:
        system = {name for name in names if _SYSTEM.match(name.lower()) and "system" not in columns}
        names = dict.fromkeys(name for name in names if name in system or name.lower() in _SPLITS)
    asking = [column for name, column in columns.items() if name not in ("output", "answer", "completion")]
    asked = [hash(repr([row.get(column) for column in asking])) for row in rows] if len(asking) < len(columns) else []

    def is_told(name: str) -> bool:
        values = [row.get(name) for row in rows]
        label = set(columns) == {"text"} and _is_label(name) and len(set(map(repr, values))) > 1
        needed = label or _are_needed(name, values) or _are_asked(name, values, asked)
        marked = (False in marks(name, row) or _is_for_tests(name, row) for row in rows)
        return (needed and not _are_read_elsewhere(values, rows, columns)) or any(marked)

    return list(filter(is_told, names))


def _is_label(name: str) -> bool:
    return name.lower() in _LABELS or _ANSWERS.fullmatch(name) is not None


def _is_for_tests(name: str, row: Row) -> bool:
    return name.lower() in _SPLITS and str(row.get(name)).strip().lower() in _TESTS


def _are_asked(name: str, values: list[Any], asked: list[int]) -> bool:
    """Whether short texts are a part of the questions: by their name, or because most rows ask the same without it."""
    pairs = zip(asked, (" ".join(_texts(value)) for value in values), strict=False)
    asked_with = {(question, text) for question, text in pairs if text}
    if _CHANGES.fullmatch(name.lower()):
        return len({text for _, text in asked_with}) > 1
    whole = [text for _, text in asked_with if _WORD.search(text)]
    return 2 * len(whole) > len(asked) >= 2 * len(set(asked)) and not _WHO.match(name.lower())


def _are_needed(name: str, values: list[Any]) -> bool:
    texts = [texts for value in values if (texts := _texts(value))]
    worded = sum(
        any(len(part.split()) >= _WORDS or (len(part) >= _WORDS and not part.isascii()) for part in text)
        for text in texts
    )
    if _BEFORE.match(name.lower()):
        return worded > 0
    different, size = len(set(map(tuple, texts))), sum(len(text) for each in texts for text in each)
    long = size > _LONG * len(texts)
    of = len(texts) if long or _ABOUT.match(name.lower()) else len(values)
    return 2 * worded > of and (2 * different > of or (different > 1 and long))


def _are_read_elsewhere(values: list[Any], rows: Sequence[Row], columns: dict[str, str]) -> bool:
    """Whether all texts of a column stand in the columns that are read, as ultrachat's `prompt` is its first message;
    or all that is read in the column, as Alpaca's `text` is a rendering of its row."""
    own, read = map(_texts, values), (_texts([row.get(column) for column in columns.values()]) for row in rows)
    pairs = list(zip(own, read, strict=True))
    return any(texts for texts, _ in pairs) and (
        all(_stand_in(texts, there) for texts, there in pairs) or all(_stand_in(there, texts) for texts, there in pairs)
    )


def _stand_in(texts: list[str], others: list[str]) -> bool:
    whole = "\n".join(others)
    return all(text in whole for text in texts)


def _texts(value: Any, depth: int = 4) -> list[str]:
    """All texts in a value, including its lists and objects."""
    if isinstance(value, str):
        return [value] if value.strip() else []
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for each in inner for text in _texts(each, depth - 1)] if depth else []


def unread_text_warning(names: list[str], columns: dict[str, str], *, named: bool = False) -> str:
    are_trained = "are trained like the others: leave them out"
    if splits := [name for name in names if name.lower() in _SPLITS]:
        others = [name for name in names if name not in splits]
        rest = f". {unread_text_warning(others, columns, named=named)}" if others else ""
        return f"rows that {splits[0]} marks for tests {are_trained}{rest}"
    marking = [name for name in names if name in ROW_MARKS]
    so = "put it into the question, or name the columns in a recipe to say that it is not needed"
    if all(_ANSWERS.fullmatch(name) or _THOUGHTS.search(name) for name in names):
        so = "write it into the answers, or name it as the answer in the columns of a recipe"
    if set(columns) == {"text"} and (labels := list(filter(_is_label, names))):
        label = next(filter(_ANSWERS.fullmatch, labels), labels[0])  # words before numbers
        numbers = "; write words for numbers first" if label.lower() in _LABELS else ""
        answer = f"columns: {{prompt: {columns['text']}, completion: {label}}}{numbers}"
        marking = []
        so = f"make it the answer by two lines of a recipe, format: prompt_completion and {answer}"
    if named:
        so = f"add system: {names[0]} to the columns of the recipe, or write it into the texts"
    return (
        f"{', '.join(names[:4])} {'is' if len(names) == 1 else 'are'} not read: the model learns "
        f"{', '.join(columns.values())} alone. If the answers need it, {so}"
        + (f". Rows that {marking[0]} marks as bad {are_trained}" if marking else "")
    )
