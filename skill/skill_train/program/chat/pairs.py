"""A prompt and its completion as messages: which texts hold them, and a prompt that the completion repeats."""

import re
from typing import Any

from skill_train.program.events import Refused

TURNS = re.compile(r"""\s*\[\s*\{\s*["'](?:role|content)["']""")  # a list of messages as text, in JSON or from Python
ROLE_KEY = re.compile(r"""["']role["']\s*:\s*["'](?:system|developer|user|assistant|tool)["']""")


def hold_turns(pair: tuple[Any, Any]) -> list[bool]:
    """Whether each side is a list of messages as text. If only one begins so, it must also end so and have a role."""
    like = [side if isinstance(side, str) and TURNS.match(side) else "" for side in pair]
    return [all(like) or (text.rstrip()[-1:] == "]" and bool(ROLE_KEY.search(text))) for text in like]


def read_once(prompt: list[Any], completion: list[Any]) -> tuple[list[Any], list[Any]]:
    """Removes the prompt from a completion that is the whole conversation. Blanks around texts do not count, nor which
    of the two has the system message. Refuses a completion that begins with another question."""
    (first, asked), (other, answered) = without_system(prompt), without_system(completion)
    whole, begun = [*(other and first), *asked], [*(first and other), *answered[: len(asked)]]
    asks = "user" in map(role_of, asked) or completion[: len(prompt)] == prompt  # an answer alone may come again
    if asks and list(map(compared, whole)) == list(map(compared, begun)):
        return [*(first or other), *asked], answered[len(asked) :]
    if asked and "assistant" in map(role_of, answered) and role_of(asked[-1]) == role_of(answered[0]) == "user":
        raise Refused(
            "the completion begins with another question than its prompt, so one of them would be read twice",
            code="bad_row",
            expected="the answer alone, or behind the same prompt",
            got=repr(answered[0])[:80],
            hint="take the question out of the completion; a text of messages as an answer needs a word before it",
        )
    return prompt, completion


def without_system(messages: list[Any]) -> tuple[list[Any], list[Any]]:
    count = int(role_of(messages[0]) in ("system", "developer")) if messages else 0
    return messages[:count], messages[count:]


def role_of(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def compared(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    present = {key: value for key, value in message.items() if value is not None}
    return present | {"content": str(present.get("content", "")).strip()}
