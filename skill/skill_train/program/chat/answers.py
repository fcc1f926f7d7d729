"""What an answer holds beside its text: its calls of tools and its thoughts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from skill_train.program.examples import THOUGHTS, Message

THOUGHTS_LEFT_OUT = (
    "the chat template leaves out the thoughts of answers (reasoning_content, thinking, or <think> in the content), so "
    "they are not trained"
)
EARLIER_THOUGHTS = (
    "the chat template leaves out the thoughts of earlier answers of a row, so these answers are trained without them: "
    "make a row of each answer to train its thoughts"
)


def with_each_arguments(messages: list[Message], changed: Callable[[str], Any]) -> list[Message]:
    """The messages with other arguments in each call that has them as the text of an object, or as an empty text."""

    def of_call(call: Any) -> Any:
        if isinstance(call, dict) and isinstance(call.get("function"), dict):
            return call | {"function": of_call(call["function"])}
        text = call.get("arguments") if isinstance(call, dict) else None
        if not isinstance(text, str) or text.strip()[:1] not in ("{", ""):
            return call
        return call | {"arguments": changed(text.strip())}

    return [
        message | {"tool_calls": list(map(of_call, message["tool_calls"]))}
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def thoughts_of(message: Message) -> list[str]:
    """The thoughts of an answer: beside its text, or in it."""
    beside = [message.get(name) for name in THOUGHTS]
    opened, mark, _ = message["content"].partition("</think>")
    inside = opened.partition("<think>")[2] if mark else ""
    return [thought.strip() for thought in (*beside, inside) if isinstance(thought, str) and thought.strip()]


def left_out_thoughts(messages: list[Message], rendered: str) -> Iterator[str]:
    """What to tell of answers whose thoughts do not stand in the text."""
    for message in messages:
        thoughts = thoughts_of(message) if message["role"] == "assistant" else []
        if thoughts and not any(thought in rendered for thought in thoughts):
            yield THOUGHTS_LEFT_OUT if message is messages[-1] else EARLIER_THOUGHTS


def with_fewer_calls(message: Message) -> Iterator[tuple[Message, Any]]:
    """The message without all of its calls, without its last one, and without the one call of OpenAI's older format;
    each with a call that it lacks."""
    calls: Any = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        for kept in ([], calls[:-1]) if len(calls) > 1 else ([],):
            fewer: Message = message | {"tool_calls": kept}
            yield fewer, calls[len(kept)]
    if (call := message.get("function_call")) is not None:
        without: Any = {name: value for name, value in message.items() if name != "function_call"}
        yield without, call


def name_of_call(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, dict) else None
    return str(function.get("name"))[:80] if isinstance(function, dict) else "a tool"
