"""Calls whose arguments are text, as OpenAI's format has them: a template that escapes texts gets objects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiny
import tiny_templates
import training
from skill_train.program.chat.answers import ARGUMENTS_READ, AS_JSON_TEXT, AS_PYTHON
from skill_train.program.encode import Encoder
from skill_train.program.events import Refused

pytestmark = pytest.mark.slow

ASKED = {"role": "user", "content": "Two and two?"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
# DeepSeek's way: the text as it stands between two marks.
JOINED = tiny_templates.QWEN2_CALLS.replace("call.function.arguments | tojson", "call.function.arguments")
# As Qwen3-Coder: each argument by its name, which no text has.
BY_NAME = tiny_templates.QWEN2_CALLS.replace(
    "call.function.arguments | tojson", "call.function.arguments.items() | list | tojson"
)
# Whether it is a text, as Qwen3 asks.
EITHER = tiny_templates.QWEN2_CALLS.replace(
    "call.function.arguments | tojson",
    "(call.function.arguments if call.function.arguments is string else call.function.arguments | tojson)",
)

# As a value of its own, which Jinja makes a text of: `{'a': 2}` of an object.
PRINTED = tiny_templates.QWEN2_CALLS.replace(
    "+ call.function.arguments | tojson + '}\\n</tool_call>' -}}",
    "-}}{{ call.function.arguments }}{{ '}\\n</tool_call>' -}}",
)
# Qwen3-Coder's first template: objects and lists in JSON, all else as Jinja makes a text of it.
VALUES = (
    "{% for name, value in call.function.arguments | items %}<{{ name }}>"
    "{{ value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}"
    "</{{ name }}>{% endfor %}"
)
EACH_VALUE = PRINTED.replace("{{ call.function.arguments }}", VALUES)
EACH_BARE = PRINTED.replace(
    "{{ call.function.arguments }}",
    "{% for name in call.function.arguments %}<{{ name }}>{{ call.function.arguments[name] }}</{{ name }}>{% endfor %}",
)
# JSON by hand: a text in quotes, all else as it stands.
QUOTED = EACH_BARE.replace(
    "{{ call.function.arguments[name] }}",
    "{% set value = call.function.arguments[name] %}{{ value if value is not string else '\"' + value + '\"' }}",
)
ODD = {"n": 2, "urgent": True, "note": None, "at": {"x": [True, "it's"]}, "say": 'a "b"'}


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}


def row(*arguments: Any) -> dict[str, Any]:
    said = {"role": "assistant", "content": "", "tool_calls": [call(each) for each in arguments]}
    return {"messages": [ASKED, said]}


def encoded(
    folder: Path, template: str, data: dict[str, Any], kind: str = "qwen2", *, plans_with: dict[str, Any] | None = None
) -> tuple[dict[str, Any], Encoder, str]:
    tokenizer = training.tokenizer(kind)
    tokenizer.chat_template = template
    encode = Encoder(training.resolved(tiny.cached(kind), training.write_data(folder, [plans_with or data])), tokenizer)
    made = encode(0, 1, data)
    ids = [token for token, label in zip(made["input_ids"], made["labels"], strict=True) if label != -100]
    return dict(made), encode, tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("template", "kind", "said"),
    [
        ("QWEN2_CALLS", "qwen2", '{"name": "add", "arguments": {"a": 2}}'),
        ("QWEN3_CALLS", "qwen3", '{"name": "add", "arguments": {"a": 2}}'),
        ("LLAMA_3_CALLS", "llama-bpe", '{"name": "add", "parameters": {"a": 2}}'),
    ],
)
def test_a_text_that_the_template_would_escape_is_read(tmp_path: Path, template: str, kind: str, said: str) -> None:
    made, encode, trained = encoded(tmp_path, getattr(tiny_templates, template), row('{"a": 2}'), kind)
    assert said in trained
    assert made["messages"][1]["tool_calls"] == [call({"a": 2})]  # as verify and evaluate render it again
    assert encode.notes == [ARGUMENTS_READ]
    object_row, _, _ = encoded(tmp_path, getattr(tiny_templates, template), row({"a": 2}), kind)
    assert made["input_ids"] == object_row["input_ids"] and made["labels"] == object_row["labels"]


@pytest.mark.parametrize("template", [JOINED, EITHER])
def test_a_text_that_the_template_writes_as_it_stands_stays(tmp_path: Path, template: str) -> None:
    made, encode, trained = encoded(tmp_path, template, row('{"a":2}'))
    assert '"arguments": {"a":2}}' in trained  # with the dataset's own spaces
    assert made["messages"][1]["tool_calls"] == [call('{"a":2}')]
    assert encode.notes == []


def test_a_template_that_takes_no_text_gets_the_object(tmp_path: Path) -> None:
    made, _, trained = encoded(tmp_path, BY_NAME, row('{"a": 2}'))
    assert '[["a", 2]]' in trained
    assert made["messages"][1]["tool_calls"] == [call({"a": 2})]


@pytest.mark.parametrize(("text", "written"), [("{}", "{}"), ("", "{}"), ('{"t": "ä \\"q\\""}', '{"t": "ä \\"q\\""}')])
def test_no_arguments_and_quotes_within_them(tmp_path: Path, text: str, written: str) -> None:
    """`{}` stands in its own escaped form, so the text of the row alone would not tell what the template does."""
    _, _, trained = encoded(tmp_path, tiny_templates.QWEN2_CALLS, row('{"a": 2}', text))
    assert f'"arguments": {written}}}' in trained


NO_OBJECT = ['{"a": 2', '{"a": 2, "a": 3}', "add 2", "[1, 2]", '"{\\"a\\": 2}"', "null", "2", [1], 4, True]


@pytest.mark.parametrize("template", [tiny_templates.QWEN2_CALLS, EITHER, JOINED, EACH_VALUE])
@pytest.mark.parametrize("value", NO_OBJECT)
def test_what_is_no_object_is_refused(tmp_path: Path, template: str, value: Any) -> None:
    """Whatever the template takes: a text that it writes as it stands was trained as it stood."""
    with pytest.raises(Refused, match="the arguments of a call") as caught:
        encoded(tmp_path, template, row({"a": 2}, value), plans_with=row({"a": 2}))
    assert caught.value.error["code"] == "bad_row" and caught.value.error["expected"]
    assert caught.value.error["message"].startswith("line 1 of ")
    assert str(value) in caught.value.error["got"] or repr(value) in caught.value.error["got"]


@pytest.mark.parametrize("template", [tiny_templates.QWEN2_CALLS, EITHER, JOINED])
@pytest.mark.parametrize("given", [{"arguments": ""}, {"arguments": " "}, {"arguments": None}, {}])
def test_a_call_without_arguments_has_none(tmp_path: Path, template: str, given: dict[str, Any]) -> None:
    data = row({})
    data["messages"][1]["tool_calls"] = [{"type": "function", "function": {"name": "add", **given}}]
    _, _, said = encoded(tmp_path, template, data)
    assert '{"name": "add", "arguments": {}}' in said


@pytest.mark.parametrize("given", [{"parameters": {"a": 2}}, {"input": '{"a": 2}'}])
def test_arguments_by_another_name_are_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    """A call without any would be trained in their place."""
    data = row({})
    data["messages"][1]["tool_calls"] = [{"type": "function", "function": {"name": "add", **given}}]
    with pytest.raises(Refused, match=f"a call has no arguments, but '{min(given)}'"):
        encoded(tmp_path, JOINED, data, plans_with=row({}))


FIRST = tiny_templates.QWEN2_CALLS.replace("in message.tool_calls or []", "in (message.tool_calls or [])[:1]")


@pytest.mark.parametrize(
    ("template", "arguments"),
    [(tiny_templates.QWEN2, [{"a": 2}]), (FIRST, [{"a": 2}, {"a": 3}])],
    ids=["all", "second"],
)
def test_a_call_that_the_template_leaves_out_is_refused(tmp_path: Path, template: str, arguments: list[Any]) -> None:
    """An empty answer would be trained in its place, and every check would pass."""
    with pytest.raises(Refused, match="the chat template leaves out the call of add") as caught:
        encoded(tmp_path, template, row(*arguments))
    assert caught.value.error["code"] == "template_mismatch"


def test_a_call_of_the_older_format_that_the_template_leaves_out_is_refused(tmp_path: Path) -> None:
    """OpenAI's `function_call`, beside a text that would be trained alone."""
    data = row({"a": 2})
    data["messages"][1] |= {"content": "I add.", "function_call": {"name": "add", "arguments": "{}"}}
    del data["messages"][1]["tool_calls"]
    with pytest.raises(Refused, match="the chat template leaves out the call of add"):
        encoded(tmp_path, tiny_templates.QWEN2_CALLS, data)


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}], ids=str)
def test_a_call_of_the_older_format_needs_no_text(tmp_path: Path, content: dict[str, Any]) -> None:
    """OpenAI's own rows have `content: null` there. It was refused as a message without text."""
    said = {"role": "assistant", **content, "function_call": {"name": "add", "arguments": '{"a": 2}'}}
    data = {"messages": [ASKED, said]}
    older = tiny_templates.QWEN2_CALLS.replace(
        "in message.tool_calls or []",
        "in message.tool_calls or ([{'function': message.function_call}] if message.function_call else [])",
    )
    same = {"messages": [ASKED, {"role": "assistant", **content, "tool_calls": [call({"a": 2})]}]}
    assert encoded(tmp_path, older, data)[2] == encoded(tmp_path, older, same)[2] != ""
    with pytest.raises(Refused, match="the chat template leaves out the call of add"):
        encoded(tmp_path, tiny_templates.QWEN2_CALLS, data)


@pytest.mark.parametrize("text", ["", " [] "])
def test_calls_that_are_json_text_are_those_that_are_not(tmp_path: Path, text: str) -> None:
    made, _, said = encoded(tmp_path, tiny_templates.QWEN2_CALLS, _with_calls(json.dumps([call({"a": 2})])))
    assert made["messages"][1]["tool_calls"] == [call({"a": 2})]
    assert '{"name": "add", "arguments": {"a": 2}}' in said
    made, _, said = encoded(tmp_path, tiny_templates.QWEN2_CALLS, _with_calls(text))
    assert (made["messages"][1]["tool_calls"], said) == ([], "I add.<|im_end|>")


def _with_calls(calls: Any) -> dict[str, Any]:
    return {"messages": [ASKED, {"role": "assistant", "content": "I add.", "tool_calls": calls}]}


def test_tools_that_are_json_text_are_those_that_are_not(tmp_path: Path) -> None:
    template = "{{- (tools or []) | map(attribute='function.name') | join(' ') -}}" + tiny_templates.QWEN2_CALLS
    data = row({"a": 2}) | {"tools": json.dumps([TOOL])}
    made, _, _ = encoded(tmp_path, template, data)
    assert made["tools"] == [TOOL]
    assert made["rendered"].startswith("add<|im_start|>")


def test_rows_are_changed_in_the_example_alone(tmp_path: Path) -> None:
    data = row('{"a": 2}')
    encoded(tmp_path, tiny_templates.QWEN2_CALLS, data)
    assert data == row('{"a": 2}')


@pytest.mark.parametrize("template", [JOINED, PRINTED], ids=["added", "printed"])
def test_an_object_that_the_template_would_write_as_python_does_becomes_its_text(tmp_path: Path, template: str) -> None:
    """Training `{'n': 2, 'urgent': True}` taught calls that no parser reads, and every check passed."""
    made, encode, said = encoded(tmp_path, template, row(ODD | {"city": "Köln"}, '{"a":1}', {}))
    text = json.dumps(ODD | {"city": "Köln"}, ensure_ascii=False)
    assert f'"arguments": {text}}}' in said and '"arguments": {"a":1}}' in said and '"arguments": {}}' in said
    assert [each["function"]["arguments"] for each in made["messages"][1]["tool_calls"][:2]] == [text, '{"a":1}']
    assert encode.notes == [AS_JSON_TEXT]


@pytest.mark.parametrize("template", [EITHER, tiny_templates.QWEN2_CALLS])
def test_an_object_that_the_template_writes_in_json_stays(tmp_path: Path, template: str) -> None:
    made, encode, said = encoded(tmp_path, template, row(ODD))
    assert f'"arguments": {json.dumps(ODD)}}}' in said
    assert made["messages"][1]["tool_calls"] == [call(ODD)]
    assert encode.notes == []


@pytest.mark.parametrize("template", [EACH_VALUE, EACH_BARE], ids=["value", "bare"])
@pytest.mark.parametrize("given", [ODD, json.dumps(ODD)], ids=["object", "text"])
def test_each_value_of_the_arguments_is_written_in_json(tmp_path: Path, template: str, given: Any) -> None:
    _, encode, said = encoded(tmp_path, template, row(given))
    at = json.dumps(ODD["at"])
    assert f'<n>2</n><urgent>true</urgent><note>null</note><at>{at}</at><say>a "b"</say>' in said
    assert encode.notes[-1] == AS_JSON_TEXT and AS_PYTHON not in encode.notes
    made, encode, _ = encoded(tmp_path, template, row({"n": 2, "say": "None"}))
    assert made["messages"][1]["tool_calls"] == [call({"n": 2, "say": "None"})] and encode.notes == []


def test_values_that_cannot_be_written_in_json_are_told(tmp_path: Path) -> None:
    """In quotes, the text `true` would be a text and not the value."""
    made, encode, said = encoded(tmp_path, QUOTED, row({"urgent": True}))
    assert "<urgent>True</urgent>" in said and encode.notes == [AS_PYTHON]
    assert made["messages"][1]["tool_calls"] == [call({"urgent": True})]


@pytest.mark.parametrize("written", ["tools", "tools[0]", "tools[0].function.parameters.required"])
def test_tools_that_the_template_writes_as_python_does_are_told(tmp_path: Path, written: str) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "required": ["a"]}}}
    data = row({"a": 2}) | {"tools": [tool]}
    _, encode, _ = encoded(tmp_path, f"{{{{- {written} -}}}}" + tiny_templates.QWEN2_CALLS, data)
    assert encode.notes == [AS_PYTHON]
    _, encode, _ = encoded(tmp_path, "{{- tools | tojson -}}" + tiny_templates.QWEN2_CALLS, data)
    assert encode.notes == []


def test_python_text_of_the_row_itself_is_not_the_templates(tmp_path: Path) -> None:
    data = row(ODD) | {"tools": [TOOL]}
    data["messages"] = [ASKED | {"content": f"True or None? {ODD} {[TOOL]} {TOOL}"}, data["messages"][1]]
    _, encode, _ = encoded(tmp_path, "{{- tools | tojson -}}" + tiny_templates.QWEN2_CALLS, data)
    assert encode.notes == []


def test_the_call_of_the_older_format_is_trained_and_read_so_too(tmp_path: Path) -> None:
    """Its text alone was trained, without the end of the turn."""
    template = PRINTED.replace(
        "{%- for call in message.tool_calls or [] -%}",
        "{%- for call in [{'function': message.function_call}] if message.function_call -%}",
    )
    said = {"role": "assistant", "content": "I add.", "function_call": call({"a": True})["function"]}
    _, encode, trained = encoded(
        tmp_path, template, {"messages": [ASKED, said, ASKED, {"role": "assistant", "content": "4"}]}
    )
    assert trained.startswith("I add.\n<tool_call>") and trained.count("<|im_end|>") == 2
    assert '{"name": "add", "arguments": {"a": true}}' in trained and encode.notes == [AS_JSON_TEXT]
