"""What an answer holds beside its text: its calls of tools and its thoughts."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from skill_train.program.events import Refused
from skill_train.program.examples import CALLS, THOUGHTS, Example, Message

IN_ORDER = "put the roles in the order that it expects: often system once, then user and assistant in turn"
TEMPLATE_FAILS = (
    "the template itself fails on them: correct chat_template.jinja in the model's folder, or use a model whose "
    "template takes messages of text as they are"
)
MARK = "skill train mark 7f3a"  # stands in for an answer to find where a template puts it
THOUGHTS_LEFT_OUT = (
    "the chat template leaves out the thoughts of answers (reasoning_content, thinking, or <think> in the content), so "
    "they are not trained"
)
EARLIER_THOUGHTS = (
    "the chat template leaves out the thoughts of earlier answers of a row, so these answers are trained without them: "
    "make a row of each answer to train its thoughts"
)
BESIDE_THOUGHTS = (
    "the chat template leaves out text of answers before or between their thoughts, so it is not trained: write one "
    "<think>, at the start of an answer"
)
ARGUMENTS_READ = (
    "the arguments of calls are JSON text in the rows, and the model's chat template takes objects: it gets them as "
    "objects, as it does from llama.cpp and vLLM"
)
AS_JSON_TEXT = "the chat template would write arguments of calls as Python does ({'a': True}): it gets their JSON text"
AS_PYTHON = (
    "the chat template writes values of calls or tools as Python does ({'a': True}), and not as JSON: correct it"
)
# Test arguments of a call. They show how a template writes arguments as JSON text, as an object, and each value.
PROBE = {f"skill train mark {number}": value for number, value in enumerate((True, None, {"a": None}))}
PYTHON_WORD = re.compile(r"(skill train mark \d.{1,40}?)(True|None)", re.DOTALL)


def with_arguments(messages: list[Message], changed: Callable[[Any], Any]) -> list[Message]:
    def of_call(call: Any) -> Any:
        if isinstance(call, list):
            return list(map(of_call, call))
        name = "function" if isinstance(call, dict) and isinstance(call.get("function"), dict) else "arguments"
        if not isinstance(call, dict) or name not in call:
            return call
        return call | {name: of_call(call[name]) if name == "function" else changed(call[name])}

    copies: Any = [dict(message) for message in messages]
    return [each | {name: of_call(each[name]) for name in CALLS if name in each} for each in copies]


def text_of_json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def with_json_values(value: Any) -> Any:
    """Arguments with JSON text for each value that Python writes in another way."""
    if isinstance(value, str):
        return value
    return {name: each if str(each) == text_of_json(each) else text_of_json(each) for name, each in value.items()}


def as_taken(messages: list[Message], render: Callable[[list[Message]], str | None]) -> tuple[list[Message], list[str]]:
    """The messages with the arguments of calls in the form that the template needs, and notes for the user.

    In rows, arguments are objects, or JSON text as in OpenAI's format. A template that joins them to a text gets JSON
    text, any other template gets objects. A template that writes objects or values as Python does gets JSON text for
    them. The example keeps this form, so that the row renders to the same text again.
    """

    def probed(change: Callable[[Any], Any]) -> str | None:
        return render(with_arguments(messages, lambda _: change(PROBE)))

    notes = list[str]()
    if with_arguments(messages, lambda _: PROBE) == messages:
        return messages, notes
    joins = text_of_json(PROBE) in (probed(text_of_json) or "")
    if not joins:
        objects = with_arguments(messages, lambda value: json.loads(value) if isinstance(value, str) else value)
        messages, notes = objects, [ARGUMENTS_READ] if objects != messages else []
    if (written := probed(dict)) == (wanted := written and in_json(written)) and (written or not joins):
        return messages, notes
    for change in (text_of_json, with_json_values):
        if joins if written is None else probed(change) == wanted:
            changed = with_arguments(messages, change)
            return changed, notes + [AS_JSON_TEXT] * (changed != messages)
    return messages, notes + [AS_PYTHON] * (with_arguments(messages, with_json_values) != messages)


def in_json(text: str) -> str:
    """The text, with the values of `PROBE` in JSON instead of Python's notation."""
    for value in (PROBE, {"a": None}):
        text = text.replace(str(value), text_of_json(value))
    return PYTHON_WORD.sub(lambda found: found[1] + ("true" if found[2] == "True" else "null"), text)


def python_notes(messages: list[Message], tools: Any, rendered: str) -> list[str]:
    """The note, if the rendered text has objects or lists of calls or tools in Python's notation; else empty."""
    values = [tools, *(message.get(name) for message in messages for name in CALLS)]
    own = "\n".join(message["content"] for message in messages)
    for each in values if "{'" in rendered or "['" in rendered else ():
        if isinstance(each, (dict, list)):
            values += each.values() if isinstance(each, dict) else each
            if (text := str(each)) != text_of_json(each) and rendered.count(text) > own.count(text):
                return [AS_PYTHON]
    return []


def thoughts_of(message: Message) -> list[str]:
    """The thoughts of an answer: from the keys of `THOUGHTS`, and from before `</think>` in its text."""
    beside = [message.get(name) for name in THOUGHTS]
    opened, mark, _ = message["content"].partition("</think>")
    inside = opened.split("<think>")[-1] if mark else ""  # some models' prompts already end with <think>
    return [thought.strip() for thought in (*beside, inside) if isinstance(thought, str) and thought.strip()]


def with_names(message: Message) -> Any:
    """The message with its thoughts under both keys that templates read. transformers 5.23 adds them for a template,
    and llama-cpp-python does not, so the example keeps both keys."""
    thoughts: Any = next((message.get(name) for name in THOUGHTS if message.get(name) is not None), None)
    return message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}


def marked_texts(text: str) -> list[str]:
    """Stand-ins for an answer's text: `MARK` alone, and, if it has thoughts, `MARK` as thought and as rest."""
    return [MARK] + [f"<think>\n{MARK}\n</think>\n\n{MARK}"] * ("</think>" in text)


def with_marks(
    example: Example, index: int, content: str, without: tuple[str, ...] = ()
) -> tuple[list[Message], list[Any] | None]:
    """The messages and tools. Message `index` has this `content`, `MARK` as thoughts, and no key of `without`."""
    messages = example["messages"]
    marked: Any = {name: value for name, value in messages[index].items() if name not in without}
    marked |= {name: MARK for name in THOUGHTS if marked.get(name)} | {"content": content}
    return [*messages[:index], marked, *messages[index + 1 :]], example["tools"]


def left_out_answer() -> Refused:
    return Refused(
        "the chat template leaves out the text of an answer, so it would not be trained",
        code="template_mismatch",
        expected="a template that writes texts; those of some vision models write lists of parts alone",
        hint="use a model whose chat template writes texts, or correct chat_template.jinja in the model's folder",
    )


def left_out_call(call: Any) -> Refused:
    return Refused(
        f"the chat template leaves out the call of {name_of_call(call)}, so it would not be trained",
        code="template_mismatch",
        expected="a template that writes the calls of tools, and calls in tool_calls",
        hint="use a model whose chat template has calls, or write them into the content of the message",
    )


def left_out_thoughts(messages: list[Message], rendered: str) -> Iterator[str]:
    """Notes on answers whose thoughts, or whose text around the thoughts, are missing in the rendered text."""
    for message in messages:
        opened, _, rest = message["content"].partition("</think>")
        beside = [opened.rpartition("<think>")[0], *re.split("</?think>", rest)] if rest else []
        if message["role"] == "assistant" and not all(text.strip() in rendered for text in beside):
            yield BESIDE_THOUGHTS
        thoughts = thoughts_of(message) if message["role"] == "assistant" else []
        if thoughts and not any(thought in rendered for thought in thoughts):
            yield THOUGHTS_LEFT_OUT if message is messages[-1] else EARLIER_THOUGHTS


def with_fewer_calls(message: Message) -> Iterator[tuple[Message, Any]]:
    """The message without all its `tool_calls`, without the last one, and without the calls of OpenAI's older format
    or of OLMo. Each variant comes with one call that it lacks."""
    calls: Any = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        for first in ([], calls[:-1]) if len(calls) > 1 else ([],):
            fewer: Message = message | {"tool_calls": first}
            yield fewer, calls[len(first)]
    for key in CALLS[1:]:
        if (call := message.get(key)) not in (None, "", []):
            without: Any = {name: value for name, value in message.items() if name != key}
            yield without, call


def name_of_call(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, dict) else None
    return str(function.get("name"))[:80] if isinstance(function, dict) else "a tool"
