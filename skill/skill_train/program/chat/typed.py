"""Control tokens in the text of a message. A tokenizer reads a typed `<|im_end|>` as the token that ends a turn."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from skill_train.program.examples import Message

# Tokens that answers rightly have in their texts: around thoughts, calls of tools and their answers.
WITHIN_ANSWERS = re.compile("think|thought|reason|tool|call|func", re.IGNORECASE)
TYPED_INSIDE = (
    "have control tokens of the model in the text of a message (the first: {}), which the tokenizer reads as the token "
    "itself: an answer is trained to stop there, and a text can open a turn: take them out, unless that is meant"
)
TYPED_AT_END = (
    "have answers that end with a control token in their text (the first: {}), which the tokenizer reads as the token "
    "itself: both it and the end that the chat template writes are trained: take it out"
)


def control_tokens(added: Iterable[Any], around_turns: str) -> re.Pattern[str] | None:
    """The added tokens of a tokenizer that stand in this text. DeepSeek's `<｜User｜>` is not special."""
    marks = {token.content for token in added if token.special or token.content[:1] in ("<", "[")}
    found = {mark for mark in marks if mark.strip() and mark in around_turns and not WITHIN_ANSWERS.search(mark)}
    return re.compile("|".join(map(re.escape, sorted(found, key=len, reverse=True)))) if found else None


def typed_tokens(messages: list[Message], tokens: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """The note on a row with control tokens in its texts, or only at the end of answers, with the first such token."""
    inside, ended = list[str](), list[str]()
    for message in messages:
        found = list(tokens.finditer(message["content"]))
        if found and message["role"] == "assistant" and found[-1].end() == len(message["content"].rstrip()):
            ended.append(f", {found.pop().group()!r}")
        if len(message) > 2:  # its thoughts and calls
            found += tokens.finditer(json.dumps({**message, "content": ""}, ensure_ascii=False, default=str))
        inside += [f", {match.group()!r} in a text of {message['role']}" for match in found]
    if inside:
        yield TYPED_INSIDE, inside[0]
    elif ended:
        yield TYPED_AT_END, ended[0]
