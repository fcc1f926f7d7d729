"""A prompt and its completion as messages: which texts hold them, and a prompt that the completion repeats."""

from __future__ import annotations

import re
from typing import Any

from skill_train.program.events import Refused

TURNS = re.compile(r"""\s*\[\s*\{\s*["'](?:role|content)["']""")  # as a text: of JSON, or of Python
ROLE_KEY = re.compile(r"""["']role["']\s*:\s*["'](?:system|developer|user|assistant|tool)["']""")


def hold_turns(pair: tuple[Any, Any]) -> list[bool]:
    """Which sides are texts of turns. One alone may be another text that begins like them, so it is whole."""
    like = [isinstance(side, str) and TURNS.match(side) is not None for side in pair]
    return [
        alike and (all(like) or (side.rstrip()[-1:] == "]" and ROLE_KEY.search(side) is not None))
        for alike, side in zip(like, pair, strict=True)
    ]


def read_once(prompt: list[Any], completion: list[Any]) -> tuple[list[Any], list[Any]]:
    """The prompt, and what follows it in a completion that is the whole conversation. Blanks around the texts do not
    count, nor which of both has the system message."""
    (first, asked), (other, said) = without_system(prompt), without_system(completion)
    same = list(map(compared, asked)) == list(map(compared, said[: len(asked)]))
    if same and (not first or not other or list(map(compared, first)) == list(map(compared, other))):
        return [*(first or other), *asked], said[len(asked) :]
    answers = any(role_of(message) == "assistant" for message in said)
    if asked and answers and role_of(asked[-1]) == role_of(said[0]) == "user":
        raise Refused(
            "the completion begins with another question than its prompt, so one of them would be read twice",
            code="bad_row",
            expected="the messages of the assistant alone, or the prompt and then them",
            got=repr(completion[0])[:80],
            hint="take the messages of the prompt out of the completion; an answer that is itself a text of messages "
            "needs a word before it",
        )
    return prompt, completion


def without_system(messages: list[Any]) -> tuple[list[Any], list[Any]]:
    count = int(role_of(messages[0]) in ("system", "developer")) if messages else 0
    return messages[:count], messages[count:]


def role_of(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def compared(message: Any) -> Any:
    """A message without what makes no difference: empty keys, and blanks around its text."""
    said = {key: value for key, value in message.items() if value is not None} if isinstance(message, dict) else {}
    return said | {"content": said["content"].strip()} if isinstance(said.get("content"), str) else said or message
