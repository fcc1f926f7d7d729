"""Control tokens in the text of a message. A tokenizer reads a typed `<|im_end|>` as the token that ends a turn."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from skill_train.program.examples import Message

# Tokens that answers rightly have in their texts: around thoughts, calls of tools and their answers.
WITHIN_ANSWERS = re.compile("think|thought|reason|tool|call|func", re.IGNORECASE)


def control_tokens(added: Iterable[Any], around_turns: str) -> re.Pattern[str] | None:
    """The added tokens of a tokenizer that stand in this text. DeepSeek's `<｜User｜>` is not special."""
    marks = {token.content for token in added if token.special or token.content[:1] in ("<", "[")}
    found = {mark for mark in marks if mark.strip() and mark in around_turns and not WITHIN_ANSWERS.search(mark)}
    return re.compile("|".join(map(re.escape, sorted(found, key=len, reverse=True)))) if found else None


class TypedTokens:
    """The rows that have control tokens in texts, and those whose answers only end with one. Of each the place."""

    def __init__(self) -> None:
        self.inside, self.ended = list[str](), list[str]()

    def look(self, line: int, messages: list[Message], tokens: re.Pattern[str]) -> None:
        inside, ended = list[str](), list[str]()
        for message in messages:
            found = list(tokens.finditer(message["content"]))
            if found and message["role"] == "assistant" and found[-1].end() == len(message["content"].rstrip()):
                ended.append(f"line {line}, {found.pop().group()!r}")
            if len(message) > 2:  # its thoughts and calls
                found += tokens.finditer(json.dumps({**message, "content": ""}, ensure_ascii=False, default=str))
            inside += [f"line {line}, {match.group()!r} in a text of {message['role']}" for match in found]
        if inside:
            self.inside.append(inside[0])
        elif ended:
            self.ended.append(ended[0])

    def notes(self, count: int) -> list[str]:
        """What to tell of them, where `count` rows were looked at."""
        told = (
            (self.inside, "control tokens of the model in the text of a message", "an answer is trained to stop there, "
             "and a text can open a turn: take them out, unless that is meant"),
            (self.ended, "answers that end with a control token in their text", "both it and the end that the chat "
             "template writes are trained: take it out"),
        )  # fmt: skip
        return [
            f"{len(places)} of {count} rows have {what} (the first: {places[0]}), which the tokenizer reads as the "
            f"token itself: {so}"
            for places, what, so in told
            if places
        ]
