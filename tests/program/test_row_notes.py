"""Notes of the training on rows that are probably not what their author meant: how many, and the line of the first."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import tiny
import tiny_templates
import training
from command_child import Commands
from skill_train.data.unread import unread_text, unread_text_warning
from skill_train.program.encode import Encoder
from skill_train.program.events import Refused
from skill_train.program.rows import iter_rows

pytestmark = pytest.mark.slow

USER, BOT = {"role": "user", "content": "Is it warm?"}, {"role": "assistant", "content": "Yes."}
ALPACA = {"instruction": "Name a fruit.", "output": "A pear."}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Today's", "parameters": {}}}
TIME = {"type": "function", "function": {"name": "time", "description": "The hour", "parameters": {}}}
# Qwen's in little: the tools as JSON in the first turn.
WITH_TOOLS = (
    "{%- if tools -%}{{- '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' -}}{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def encoder(folder: Path, rows: tuple[dict[str, Any], ...], template: str) -> Encoder:
    tokenizer = training.tokenizer("qwen2")
    tokenizer.chat_template = template
    return Encoder(training.resolved(tiny.cached("qwen2"), training.write_data(folder, list(rows))), tokenizer)


def notes(folder: Path, *rows: dict[str, Any], template: str = WITH_TOOLS) -> list[str]:
    encode = encoder(folder, rows, template)
    for number, row in enumerate(rows):
        encode(number, number + 1, row)
    return encode.notes


def trained(folder: Path, *rows: dict[str, Any], template: str) -> list[list[int]]:
    encode = encoder(folder, rows, template)
    return [encode(number, number + 1, row)["labels"] for number, row in enumerate(rows)]


@pytest.mark.parametrize("role", ["human", "function_call", "Assistant"])
def test_a_role_that_templates_do_not_know_is_noted(tmp_path: Path, role: str) -> None:
    """A template such as Qwen's writes any role, so the model learns to answer turns that it will never see."""
    odd = {"messages": [USER, {"role": role, "content": "Now."}, BOT]}
    [note] = notes(tmp_path, {"messages": [USER, BOT]}, odd, odd)
    assert note.startswith(f"2 of 3 rows have a role that chat templates do not know (the first: line 2, {role!r})")


def test_the_usual_roles_are_not_noted(tmp_path: Path) -> None:
    system, tool = {"role": "system", "content": "Be brief."}, {"role": "tool", "content": "21 degrees"}
    assert notes(tmp_path, {"messages": [system, USER, BOT, tool, BOT]}) == []


@pytest.mark.parametrize("text", ["<noinput>", "nan", "NaN", " None ", "null", "N/A", "No input", "<no input>"])
@pytest.mark.parametrize("column", ["input", "system"])
def test_a_placeholder_for_no_text_is_noted(tmp_path: Path, text: str, column: str) -> None:
    """It stands in the prompt as it is, as LLaMA-Factory, axolotl and TRL write it too."""
    rows = [ALPACA | {column: value} for value in ("", text, "An apple or a pear?", text)]
    [note] = notes(tmp_path, *rows)
    assert note.startswith(f"2 of 4 rows have a text that stands for nothing (the first: line 2, {text.strip()!r})")


@pytest.mark.parametrize("text", ["", "  ", "none of them", "Nancy", "A nan.", None])
def test_an_input_that_says_something_is_not_noted(tmp_path: Path, text: str | None) -> None:
    assert notes(tmp_path, ALPACA | {"input": "x"}, ALPACA | {"input": text}) == []


def test_an_answer_of_none_or_null_is_not_noted_and_a_mark_is(tmp_path: Path) -> None:
    """`None` may be the right answer."""
    rows = [ALPACA | {"output": text} for text in ("None", "NaN", "N/A", "null", "<nooutput>")]
    [note] = notes(tmp_path, *rows)
    assert note.startswith("1 of 5 rows have a text that stands for nothing (the first: line 5, '<nooutput>')")


@pytest.mark.parametrize(
    "text", ["Schöne Grüße", "It’s here…", "à bientôt, élève", "Прывет, как дела?", "señor, mañana"]
)
@pytest.mark.parametrize("codec", ["cp1252", "latin-1"])
def test_letters_that_were_read_in_a_wrong_encoding_are_told(tmp_path: Path, text: str, codec: str) -> None:
    """UTF-8 that a program took for Windows-1252, or for Latin-1, and wrote as UTF-8 again: the model learns `Ã¼`."""
    wrong = text.encode().decode(codec)
    [note] = notes(tmp_path, ALPACA, ALPACA | {"output": wrong}, ALPACA | {"instruction": f"Say {wrong}"})
    assert note.startswith("2 of 3 rows have letters that were read in a wrong encoding (the first: line 2, ")
    assert notes(tmp_path, ALPACA | {"output": text}) == []


def test_a_replacement_character_is_noted(tmp_path: Path) -> None:
    [note] = notes(tmp_path, ALPACA, ALPACA | {"output": "Gr��e"})
    assert note.startswith("1 of 2 rows have letters that were read in a wrong encoding (the first: line 2, '�')")


def test_rare_letters_in_the_right_encoding_are_not_noted(tmp_path: Path) -> None:
    rare = [
        "AMANHÃ, IRMÃ» NÃO",
        "«À quoi ?» À",
        "„Spaß“ ß™",
        "ESPAÑA… Ñ€",
        "Ð og ð",
        "â la carte, 5 €",
        "Ångström ÂÃ",
        "Việt Nam",
    ]
    assert notes(tmp_path, *(ALPACA | {"output": text} for text in rare)) == []


@pytest.mark.parametrize("text", ["nan", "<NA>", "NaT", "#N/A", "#DIV/0!", "\\N", "[object Object]", "\u200b\ufeff"])
@pytest.mark.parametrize("column", ["instruction", "output"])
def test_what_a_program_writes_for_an_empty_cell_is_told(tmp_path: Path, text: str, column: str) -> None:
    """pandas, Excel, MySQL, JavaScript, HTML: nobody asks that, and as an answer it is trained."""
    [note] = notes(tmp_path, ALPACA, ALPACA | {column: text})
    assert note.startswith(f"1 of 2 rows have a text that stands for nothing (the first: line 2, {text!r})")
    assert notes(tmp_path, ALPACA | {"instruction": f"What is {text}?", "output": f"It is {text}."}) == []
    assert notes(tmp_path, {"messages": [USER, BOT, {"role": "tool", "content": text}, BOT]}) == []  # that did say so


@pytest.mark.parametrize("write", [json.dumps, repr, lambda tools: json.dumps(json.dumps(tools))])
@pytest.mark.parametrize("beside", [json.dumps, list], ids=["tools as JSON", "tools"])
def test_tools_that_stand_in_the_system_message_too_are_told(tmp_path: Path, write: Any, beside: Any) -> None:
    """As in hermes-function-calling-v1."""
    tools = [WEATHER, TIME]
    system = {"role": "system", "content": f"Call functions. <tools> {write(tools)} </tools>"}
    plain = {"messages": [{"role": "system", "content": "Use `weather`, not 'time'."}, USER, BOT], "tools": tools}
    [note] = notes(tmp_path, plain, {"messages": [system, USER, BOT], "tools": beside(tools)})
    assert note.startswith("1 of 2 rows describe their tools twice (the first: line 2)")


@pytest.mark.parametrize(("template", "count"), [(tiny_templates.QWEN2_CALLS, 1), (WITH_TOOLS, 0)])
def test_answers_of_tools_that_are_wrapped_twice_are_told(tmp_path: Path, template: str, count: int) -> None:
    """As in hermes-function-calling-v1, under a template that writes the tags itself."""
    plain, wrapped = ({"role": "tool", "content": text} for text in ("21", "<tool_response>\n21\n</tool_response>"))
    rows = [{"messages": [USER, BOT, tool, BOT]} for tool in (plain, wrapped)]
    said = [note for note in notes(tmp_path, *rows, template=template) if "twice" in note]
    assert len(said) == count
    assert all(
        note.startswith("1 of 2 rows have the answer of a tool in <tool_response> twice (the first: line 2)")
        for note in said
    )


@pytest.mark.parametrize(("texts", "told"), [(["1.0", "-20.0"], True), (["4.0", "5.0", "4.5"], False), (["3"], False)])
def test_whole_numbers_that_pandas_wrote_with_a_point_are_told(tmp_path: Path, texts: list[str], told: bool) -> None:
    """A column of numbers with an empty cell is one of floats; stars with halves are."""
    said = notes(tmp_path, *(ALPACA | {"output": text} for text in texts))
    assert [note for note in said if "as a float" in note] == said and bool(said) is told


def _call(name: str, arguments: Any) -> dict[str, Any]:
    return {"messages": [USER, BOT | {"tool_calls": [{"function": {"name": name, "arguments": arguments}}]}]}


def _tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize("lines", [True, False])
@pytest.mark.parametrize("as_json", [True, False])
def test_the_nulls_of_arrow_that_were_written_into_json_are_told(tmp_path: Path, lines: bool, as_json: bool) -> None:
    """`Dataset.to_json` gives each call the arguments of all others, and each tool their parameters."""
    rows = [_call("weather", {"city": "Rome"}), _call("convert", {"amount": {"of": 1}})]
    if as_json:  # as in OpenAI's format: such a text has the arguments of the call alone
        rows = [_call("weather", '{"city": null}'), _call("convert", '{"amount": 1}')]
        for row, name in zip(rows, "xy", strict=True):
            row["tools"] = [_tool(name, **{name: {"type": "string"}})]
    import datasets

    datasets.Dataset.from_list(rows).to_json(str(tmp_path / "out.json"), lines=lines)
    read = [row for _, row in iter_rows(str(tmp_path / "out.json"), split="train")]
    found = notes(tmp_path, *read, template="{{- tools | tojson -}}" + tiny_templates.QWEN2_CALLS)
    [note] = [note for note in found if "null" in note]
    first = f"(the first: line 1, {'y' if as_json else 'amount'!r})"
    assert note.startswith(f"2 of 2 rows have a null in a call or a tool that was hardly meant {first}")


@pytest.mark.parametrize(
    "row",
    [
        _call("weather", {"city": "Rome", "unit": None}),  # OpenAI's strict mode: an argument that may be left out
        _call("weather", '{"city": "Rome", "unit": null}') | {"tools": [_tool("a", x={"default": None})]},
        {"messages": [USER | {"tool_calls": None}, BOT | {"tool_calls": None}]},
        {"messages": [USER | {"tool_calls": None}, *_call("now", {"city": "Rome"})["messages"][1:]]},
        {"messages": [USER, BOT], "tools": [{"name": "now", "parameters": None}, {"function": None}]},
    ],
)
def test_other_nulls_are_not(tmp_path: Path, row: dict[str, Any]) -> None:
    assert not [note for note in notes(tmp_path, row, template=tiny_templates.QWEN2_CALLS) if "null" in note]


def test_tools_that_are_described_once_are_not_noted(tmp_path: Path) -> None:
    """Also where a template leaves those beside the messages out, which is told as that."""
    system = {"role": "system", "content": f"<tools> {json.dumps([WEATHER])} </tools>"}
    assert notes(tmp_path, {"messages": [system, USER, BOT], "tools": None}) == []
    assert notes(tmp_path, {"messages": [system, USER, BOT], "tools": [TIME]}) == []
    call = {"role": "assistant", "content": '<tool_call> {"name": "weather"} </tool_call>'}
    for answer in (BOT, call):  # in which the name of the tool stands too
        [note] = notes(
            tmp_path,
            {"messages": [system, USER, answer], "tools": [WEATHER]},
            template=WITH_TOOLS[WITH_TOOLS.index("{%- for") :],
        )
        assert "leaves out the descriptions of tools" in note


def test_two_system_messages_are_told(tmp_path: Path) -> None:
    """Neither is lost: the prompt has both, that of the column first."""
    own, other = ({"role": "system", "content": f"Be {word}."} for word in ("kind", "short"))
    rows = [
        {"messages": [USER, BOT], "system": "Be kind."},
        {"messages": [own, USER, BOT], "system": "Be kind."},
        {"messages": [other, USER, BOT], "system": "Be kind."},
        {"messages": [own, other, USER, BOT], "system": ""},
    ]
    [note] = notes(tmp_path, *rows)
    assert note.startswith("1 of 4 rows have a system message in their column and another in their messages")
    assert "(the first: line 3)" in note


@pytest.mark.parametrize(
    ("name", "kept", "left_out"),
    [
        ("weight", 1, "0"),
        ("loss_mask", [0, 1], [0, 0]),
        ("train", "true", False),
        ("masked", False, True),
        ("label", True, "False"),
        ("kto_tag", True, False),
    ],
)
def test_rows_that_are_marked_to_be_left_out_are_told(tmp_path: Path, name: str, kept: Any, left_out: Any) -> None:
    """All of them: `data` and `plan` look for such a column in the first 200 rows alone."""
    [note] = notes(tmp_path, *(ALPACA | {name: left_out if n % 3 == 2 else kept} for n in range(9)))
    assert note.startswith(f"3 of 9 rows are marked to be left out (the first: line 3, {name}: {left_out})")


@pytest.mark.parametrize("bad", [0, False, "0", 0.0])
def test_a_verdict_in_the_columns_of_kto_is_told_as_a_number_too(tmp_path: Path, bad: Any) -> None:
    rows = [{"prompt": f"Which {n}?", "completion": "A pear.", "label": bad if n % 2 else 1} for n in range(6)]
    [note] = notes(tmp_path, *rows)
    assert note.startswith(f"3 of 6 rows are marked to be left out (the first: line 2, label: {bad})")
    names = {"prompt": "prompt", "completion": "completion"}
    assert unread_text(rows, names) == ["label"]
    assert "Rows that label marks as bad are trained" in unread_text_warning(["label"], names)


@pytest.mark.parametrize(
    ("name", "value"), [("label", 0), ("weight", 0.5), ("loss", 0.71), ("train", "no"), ("masked", 0), ("id", 0)]
)
def test_other_columns_mark_no_row(tmp_path: Path, name: str, value: Any) -> None:
    assert notes(tmp_path, ALPACA | {name: value}) == []


@pytest.mark.parametrize(
    "text",
    [
        "<|user|>\n{}<|end|>\n<|assistant|>\n",
        "[INST] {} [/INST]",
        "### Instruction:\n{}\n\n### Response:\n",
        "<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n",
    ],
)
@pytest.mark.parametrize(("asked", "answered"), [("prompt", "completion"), ("instruction", "output")])
def test_questions_that_another_template_rendered_are_told(
    tmp_path: Path, text: str, asked: str, answered: str
) -> None:
    """The model's own template writes its marks around them. Its own marks there are refused."""
    rows = [{asked: text.format(question), answered: "A pear."} for question in ("Name a fruit.", "And another one.")]
    [note] = notes(tmp_path, {asked: "Is 1 < 2 |> 3 #### 4?", answered: "Yes."}, *rows)
    assert note.startswith("2 of 3 rows hold marks of turns in the question (the first: line 2,"), note


@pytest.mark.parametrize("text", ["[INST] {} [/INST]", "<|user|>\n{}<|end|>", "### Instruction:\n{}"])
def test_they_are_told_in_messages_too(tmp_path: Path, text: str) -> None:
    asked, plain = text.format("Name a fruit."), {"role": "system", "content": "Think <|begin_of_thought|> first."}
    human = [{"from": "human", "value": asked}, {"from": "gpt", "value": "A pear."}]
    for name, rows in (
        ("messages", [[plain, USER, BOT], [plain, USER, BOT, USER | {"content": asked}, BOT]]),
        ("conversations", [[{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}], human]),
    ):
        [note] = notes(tmp_path, *({name: row} for row in rows))
        assert note.startswith("1 of 2 rows hold marks of turns in the question (the first: line 2,"), note


@pytest.mark.parametrize(
    "answer",
    [
        "A pear.</s>",
        "A pear.<|eot_id|>\n",
        "### Response:\nA pear.",
        "A pear. [INST] And a tree? [/INST] An oak.",
        "A pear.\n### Human: And a tree?",
        "A pear.<end_of_turn>",
    ],
)
def test_marks_of_turns_in_an_answer_are_told(tmp_path: Path, answer: str) -> None:
    """The model learned to write them. Its own, which are read as tokens, are told in other words (`typed`)."""
    [note] = notes(tmp_path, ALPACA, ALPACA | {"output": answer})
    assert note.startswith("1 of 2 rows hold marks of turns in an answer (the first: line 2,"), note


@pytest.mark.parametrize(
    "answer",
    [
        "<|begin_of_thought|> Hm. <|end_of_thought|> A pear.",
        "# API\n### Request:\nGET /\n### Response:\n200",
        "xs |> List.map (fun x -> f <| x)",
        "<p>A <s>plum</s> pear.</p>",
        "### Instructions\n1. Peel it.",
        "a[INSTALLED]",
    ],
)
def test_other_marks_in_an_answer_are_not(tmp_path: Path, answer: str) -> None:
    assert notes(tmp_path, ALPACA, ALPACA | {"output": answer}) == []


PYTHON = "{'text': ['Lima'], 'answer_start': [3]}"


@pytest.mark.parametrize(
    "answer", [PYTHON, "['Lima' 'York']", "[array(['Lima'], dtype=object)]", " ['Lima',\n 'York'] "]
)
@pytest.mark.parametrize("names", [("question", "answer"), ("prompt", "completion")])
def test_answers_as_python_writes_them_are_told(tmp_path: Path, names: tuple[str, str], answer: str) -> None:
    """As pandas writes the answers of SQuAD to a .csv file."""
    rows = [dict(zip(names, ("Where?", text), strict=True)) for text in ("Lima.", answer, answer)]
    [note] = notes(tmp_path, *rows)
    assert note.startswith("2 of 3 rows have an answer that is a list or an object as Python writes it"), note
    assert f"(the first: line 2, {answer.strip()})" in note


@pytest.mark.parametrize(
    "answers",
    [
        ["No.", "Yes.", PYTHON],  # a few may well be Python
        ['["Lima", "York"]', '{"text": "Lima"}', "[]", "{}", "[1, 2]"],
        ["x = ['Lima']", "['Lima'] is a list of one text.", "{'Lima', 'York'}.pop()", "[x for x in 'Lima']"],
        ["[citation needed]", "{{name}}", "['tis true] said he"],
    ],
)
def test_other_answers_are_not_python(tmp_path: Path, answers: list[str]) -> None:
    assert notes(tmp_path, *(ALPACA | {"output": answer} for answer in answers)) == []


def test_questions_that_another_template_rendered_are_told_by_plan(commands: Commands, tmp_path: Path) -> None:
    row = {"prompt": "[INST] Name a fruit. [/INST]", "completion": "A pear."}
    for rows, told in (([ALPACA] * 3, 0), ([{"prompt": "A fruit?", "completion": "A pear."}, row], 1)):
        training.write_data(tmp_path, rows)
        said = ["--model", str(tiny.cached("qwen2")), "--data", "rows.jsonl", "--format", "json"]
        done = commands.run(tmp_path, dict(os.environ), "plan", *said)
        marks = "1 of the first 2 rows hold marks of turns in the question (the first: '[INST]')"
        assert done.stderr.count(marks) == told, done.stderr


def test_data_without_a_model_tells_them(commands: Commands, tmp_path: Path) -> None:
    system = {"role": "system", "content": f"<tools> {json.dumps([WEATHER])} </tools>"}
    described = {"messages": [system, USER, BOT], "tools": json.dumps([WEATHER])}
    training.write_data(tmp_path, [described, {"messages": [USER, BOT], "weight": "0"}, described])
    done = commands.run(tmp_path, dict(os.environ), "data", "rows.jsonl", "--format", "json")
    said = [warning["message"] for warning in done.answer["warnings"] if warning["code"] == "template"]
    assert [text[:24] for text in said] == ["2 of 3 rows describe the", "1 of 3 rows are marked t"], done.stdout
    done = commands.run(tmp_path, dict(os.environ), "data", "rows.jsonl", "--method", "kto", "--format", "json")
    assert not [warning for warning in done.answer["warnings"] if warning["code"] == "template"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("context", "Yes: 30 degrees"),
        ("notes", "It was 30 degrees at noon."),
        ("attachments", [{"text": "30 degrees"}]),
        ("functions", '[{"name": "weather"}]'),
    ],
)
def test_texts_in_keys_that_no_template_writes_are_told(tmp_path: Path, name: str, value: Any) -> None:
    [note] = notes(tmp_path, {"messages": [USER, BOT]}, {"messages": [USER | {name: value}, BOT]})
    assert note.startswith("1 of 2 rows have a text in a key that the chat template does not write")
    assert f"(the first: line 2, {name} of a message of user)" in note


def test_other_keys_of_messages_are_not(tmp_path: Path) -> None:
    """Those that a template writes, those that only tell of a message, such as WildChat's, and empty ones."""
    said = {
        "country": "United Arab Emirates",
        "header": {"agent": "a b c d e f"},
        "toxic": False,
        "functions": "[]",
        "scores": [1, 2, 3, 4, 5, 6],
    }
    assert notes(tmp_path, {"messages": [USER | said, BOT | {"function_calls": "", "context": None}]}) == []
    written = WITH_TOOLS.replace("message.content", "message.content + (message.context or '')")
    row = {"messages": [USER | {"context": "It was 30 degrees at noon."}, BOT]}
    assert notes(tmp_path, row, template=written) == []


def test_calls_of_olmo_that_the_template_leaves_out_are_refused(tmp_path: Path) -> None:
    """Only the text beside the call was trained. OLMo's own template writes it."""
    row = {
        "messages": [
            USER,
            BOT | {"function_calls": "weather(city='Rome')"},
            {"role": "environment", "content": "9"},
            BOT,
        ]
    }
    with pytest.raises(Refused, match="leaves out the call"):
        notes(tmp_path, row)
    tokenizer, (_, call, *_) = training.tokenizer("qwen2"), row["messages"]
    written = WITH_TOOLS.replace("message.content", "(message.content or '') + (message.function_calls or '')")
    for content in ("Yes.", None):
        call["content"] = content
        [labels] = trained(tmp_path, row, template=written)
        assert f"{content or ''}weather(city='Rome')<|im_end|>" in tokenizer.decode([n for n in labels if n >= 0])


def test_data_without_a_model_looks_at_the_first_rows(commands: Commands, tmp_path: Path) -> None:
    """Within seconds for a million rows: at 4 MB of text. Each row here has 1 MB and a little more."""
    rows = [ALPACA | {"input": f"Word {n} " + "of many " * 125_000, "output": "A pear.</s>"} for n in range(6)]
    for count, told in ((3, "3 of 3 rows"), (6, "3 of 3 rows")):
        training.write_data(tmp_path, rows[:count])
        done = commands.run(tmp_path, dict(os.environ), "data", "rows.jsonl", "--format", "json")
        [said] = [warning["message"] for warning in done.answer["warnings"] if warning["code"] == "template"]
        assert said.startswith(f"{told} hold marks of turns in an answer (the first: line 1, '</s>')"), said
        assert said.endswith("--model looks at more rows") == (count > 3)


def test_the_commands_tell_it(commands: Commands, tmp_path: Path) -> None:
    training.write_data(tmp_path, [ALPACA | {"input": ""}] * 3 + [ALPACA | {"input": "<noinput>"}])
    (tmp_path / "recipe.yaml").write_text(f"model: {tiny.cached('qwen2')}\ndata: rows.jsonl\n")
    for words in (
        ["data", "--recipe", "recipe.yaml"],
        ["local", "recipe.yaml", "--max-steps", "1", "--run-dir", "run"],
    ):
        done = commands.run(tmp_path, dict(os.environ), *words, "--format", "json")
        said = [warning["message"] for warning in done.answer["warnings"]]
        assert any(text.startswith("1 of 4 rows have a text that stands for nothing") for text in said), done.stdout
