"""Compares the text of a chat template with the reference's, byte for byte.

If the texts differ, both render conversations that ordinary ones do not cover: tools, calls, results, many turns. A
difference that none of these shows is still a warning, because some other conversation may show it.
"""

from itertools import cycle, islice
from typing import Any

from skill_train.llama.gguf_header import GgufFile, Value
from skill_train.llama.template import Conversation, Message, render_with
from skill_train.run.records import Verdict
from skill_train.verify.check import parting_place
from skill_train.verify.check_template import first_difference

_KEY = "tokenizer.chat_template"
_TOOL: dict[str, object] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
_SYSTEM: Message = {"role": "system", "content": "You are exact."}
_USER: Message = {"role": "user", "content": "Is it raining in Oslo?"}
_ASSISTANT: Message = {"role": "assistant", "content": "It is."}
_CALLED: dict[str, object] = {
    "id": "call_0001",
    "type": "function",
    "function": {"name": "weather", "arguments": {"place": "Oslo"}},
}
_CALL: Message = {"role": "assistant", "content": "", "tool_calls": [_CALLED]}
_RESULT: Message = {"role": "tool", "name": "weather", "tool_call_id": "call_0001", "content": '{"rain": true}'}
_THOUGHT: Message = {
    "role": "assistant",
    "content": "<think>\nI look.\n</think>\n\nIt is.",
    "reasoning_content": "I look.",
}


def _conversations() -> list[Conversation]:
    turns = [list(islice(cycle((_USER, _ASSISTANT)), count)) for count in (*range(1, 12), 20, 21)]
    called = [_USER, _CALL, _RESULT]
    twice = [_USER, {**_CALL, "tool_calls": [_CALLED, {**_CALLED, "id": "call_0002"}]}, _RESULT, _RESULT]
    bodies: list[list[Message]] = [
        *turns,
        called[:2],
        called,
        twice[:2],
        [*called, _ASSISTANT],
        [*called, _ASSISTANT, _USER],
        twice,
        [_USER, _THOUGHT],
        [_USER, _THOUGHT, _USER],
        [_USER, {"role": "assistant", "content": ""}],
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": [{"type": "text", "text": "Is it raining?"}]}],
        [_USER, _USER],
        [_ASSISTANT],
    ]
    starts: list[list[Message]] = [[], [_SYSTEM]]
    return [
        Conversation([*first, *body], tools, prompt)
        for first in starts
        for body in bodies
        for tools in (None, [_TOOL])
        for prompt in (True, False)
    ]


BRANCHES = _conversations()


def text_difference(gguf: GgufFile, tokenizer: Any) -> tuple[Verdict, str]:
    """`pass` when the file's templates are the reference's, byte for byte; else what differs."""
    reference = _named_templates(tokenizer.chat_template)
    of_names, default = f"{_KEY}.", gguf.metadata.get(_KEY)
    own: dict[str, Value | None] = {
        key.removeprefix(of_names): text for key, text in gguf.metadata.items() if key.startswith(of_names)
    }
    for name in sorted({*own, *reference} - {""}):
        if own.get(name) != reference.get(name):
            return "fail", f"the template named {name} differs from the reference's"
    if not reference.get("") or default == reference[""] or not isinstance(default, str):
        return "pass", ""
    return _rendered_difference(gguf, default, reference[""])


def _rendered_difference(gguf: GgufFile, own: str, reference: str) -> tuple[Verdict, str]:
    where = f"the text of the template differs at character {parting_place(own, reference)}"
    by_file, by_reference = (render_with(text, gguf, BRANCHES) for text in (own, reference))
    if isinstance(by_file, str) or isinstance(by_reference, str):
        return "fail", f"{where}, and it does not come to an end"
    for pair in zip(by_file, by_reference, strict=True):
        if pair[0].text != pair[1].text:
            return "fail", f"{where}: {first_difference(*pair)}"
    return "warn", f"{where}; {len(BRANCHES)} conversations render alike, others may not"


def _named_templates(template: Any) -> dict[str, str]:
    """The templates by the name that a file gives them; the default template under the empty name."""
    if isinstance(template, dict):
        texts = {
            "".join(c for c in name if c.isascii() and (c.isalnum() or c == "_")): t for name, t in template.items()
        }
        return {("" if name == "default" else name): text for name, text in texts.items()}
    return {"": template} if isinstance(template, str) else {}
