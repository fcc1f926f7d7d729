"""Where an answer begins and ends with templates as models publish them. What is trained is worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiny
import tiny_templates
import training
from skill_train.core.worker import run_worker
from skill_train.llama.template import WORKER, Conversation, Rendered, TemplateJob
from skill_train.program.chat.answers import THOUGHTS_LEFT_OUT
from skill_train.program.chat.labels import marked_text
from skill_train.program.encode import ANOTHER_PROMPT, Encoder
from skill_train.program.events import Refused

pytestmark = pytest.mark.slow

ASKED = {"role": "user", "content": "Two and two?"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
SUM = {"role": "tool", "content": "4"}
FOUR = {"role": "assistant", "content": "Four."}
THOUGHT = FOUR | {"content": "<think>\nadd\n</think>\n\nFour."}
SAID = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
# Thoughts stand in a block before the text, and the prompt of an answer closes an empty one: as where Laguna is asked
# for none.
ASKS_FOR_NONE = tiny_templates.QWEN2_CALLS.replace(
    "'\\n' + message.content",
    "'\\n' + ('<think>\\n' + message.THOUGHTS + '\\n</think>\\n\\n' if message.THOUGHTS else '') + message.content",
).replace("assistant\\n'", "assistant\\n<think>\\n\\n</think>\\n\\n'")
# As GLM writes them: what ends an answer is the mark of the next turn.
OF_GLM = (
    "{%- for m in messages -%}{{- '<|im_start|>' if m.role == 'user' else '<|im_end|>' if m.role == 'tool' -}}"
    "{{- m.role + '\\n' + m.content -}}{%- for call in m.tool_calls or [] -%}"
    "{{- '<tool_call>' + call.function.name + '</tool_call>\\n' -}}{%- endfor -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'assistant\\n' -}}{%- endif -%}"
)
# As that of Command R7B: another answer is opened behind each, whether it is asked for or not, and a call begins with
# the same token as what is opened.
OPENS_ANOTHER = (
    tiny_templates.QWEN2_CALLS.replace("if add_generation_prompt", "if messages")
    .replace("assistant\\n'", "assistant\\n<|im_start|>'")
    .replace("'\\n' + message.content", "'\\n' + ('<|im_start|>' if message.tool_calls else '') + message.content")
)


def encoded(folder: Path, kind: str, turns: list[Any], template: str | None = None) -> tuple[str, Encoder]:
    """What is fed of a row, with the trained parts between ⟦ and ⟧."""
    row, tokenizer = {"messages": turns}, training.tokenizer(kind)
    tokenizer.chat_template = template or tokenizer.chat_template
    tokenizer.unlisted_ends = frozenset()
    encoder = Encoder(training.resolved(tiny.cached(kind), training.write_data(folder, [row])), tokenizer)
    return marked_text(tokenizer, encoder(0, 1, row)), encoder


def trained(text: str) -> list[str]:
    return [part.partition("⟧")[0] for part in text.split("⟦")[1:]]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_behind_another_prompt_are_trained(tmp_path: Path, name: str) -> None:
    template = ASKS_FOR_NONE.replace("THOUGHTS", name)
    text, encoder = encoded(tmp_path, "qwen2", [ASKED, FOUR | {name: "add them"}], template)
    assert text.endswith("assistant\n<think>\n⟦add them\n</think>\n\nFour.<|im_end|>⟧\n")
    assert encoder.notes == [ANOTHER_PROMPT]
    text, _ = encoded(tmp_path, "qwen2", [ASKED, CALLING | {name: "add them"}, SUM, FOUR], template)
    assert trained(text) == [f"add them\n</think>\n\n{SAID}<|im_end|>", "Four.<|im_end|>"]


def test_a_call_without_an_end_token_is_told_or_ends_with_the_mark_of_the_next_turn(tmp_path: Path) -> None:
    """Like answers in text, which GLM's models end with `<|user|>` and calls with `<|observation|>`."""
    said = "<tool_call>add</tool_call>"
    text, encoder = encoded(tmp_path, "qwen2", [ASKED, CALLING], OF_GLM)
    assert text.endswith(f"assistant\n⟦{said}⟧\n")
    assert any("where to stop" in note for note in encoder.notes)
    text, _ = encoded(tmp_path, "qwen2", [ASKED, CALLING, SUM, FOUR, ASKED, FOUR], OF_GLM)
    assert trained(text) == [f"{said}\n<|im_end|>", "Four.<|im_start|>", "Four."]


def test_an_answer_that_is_always_opened_is_not_trained(tmp_path: Path) -> None:
    """Behind a call it was, and its last token, which opens an answer, became one at which transformers stops."""
    text, encoder = encoded(tmp_path, "qwen2", [ASKED, CALLING], OPENS_ANOTHER)
    assert text.endswith(f"assistant\n<|im_start|>⟦{SAID}<|im_end|>⟧\n<|im_start|>assistant\n<|im_start|>")
    assert encoder.notes == [] and encoder.tokenizer.unlisted_ends == frozenset()
    text, _ = encoded(tmp_path, "qwen2", [ASKED, CALLING, SUM, FOUR], OPENS_ANOTHER)
    assert trained(text) == [f"{SAID}<|im_end|>", "Four.<|im_end|>"]


@pytest.mark.parametrize("spaces", [" ", "\n\n  "])
def test_a_token_of_the_prompt_that_takes_the_spaces_of_the_answer_is_not_trained(tmp_path: Path, spaces: str) -> None:
    """Phi-3's `<|assistant|>` takes all spaces behind it, so the answer begins with its first word."""
    turns = [ASKED, FOUR | {"content": f"{spaces}Four."}]
    text, encoder = encoded(tmp_path, "phi3", turns)
    assert trained(text) == ["Four.<|end|>"] and text.count("<|assistant|>⟦") == 1
    assert encoder.tokenizer.added_tokens_decoder[encoder.tokenizer.convert_tokens_to_ids("<|assistant|>")].rstrip
    plain, _ = encoded(tmp_path, "phi3", [ASKED, FOUR])
    assert text == plain


OPENS_A_BLOCK = tiny_templates.QWEN3.replace(
    "assistant\\n' -}}{%- if enable", "assistant\\n<think>\\n' -}}{%- if enable"
)


def test_a_token_from_the_prompt_into_the_answer_is_told(tmp_path: Path) -> None:
    """As with Qwen3.5 where it thinks, and rows have no thoughts: in use `<think>` and one newline are two tokens."""
    made, encoder = encoded(tmp_path, "qwen3", [ASKED, FOUR, ASKED, FOUR], OPENS_A_BLOCK)
    assert made.endswith("assistant\n<think>⟦\n\n</think>\n\nFour.<|im_end|>⟧\n")
    [note] = encoder.notes
    assert note.startswith("1 of 1 rows have one token for the end of the prompt that the chat template writes")
    assert "line 1, '\\n\\n'" in note
    thought, encoder = encoded(tmp_path, "qwen3", [ASKED, THOUGHT], OPENS_A_BLOCK)
    assert encoder.notes == [] and "<think>\n⟦add" in thought
    _, encoder = encoded(tmp_path, "qwen2", [ASKED, FOUR | {"content": "\nFour."}, ASKED, FOUR])
    assert len(encoder.notes) == 1 and "line 1, '\\n\\n'" in encoder.notes[0]


@pytest.mark.parametrize(
    "kind", ["qwen2", "qwen3", "llama-bpe", "llama-spm", "llama-chatml", "mistral", "gemma", "phi3"]
)
def test_no_family_has_such_a_token_in_usual_rows(tmp_path: Path, kind: str) -> None:
    turns = [{"role": "system", "content": "Count."}, ASKED, FOUR, ASKED, FOUR | {"content": " Four. "}]
    made, encoder = encoded(tmp_path, kind, turns)
    assert len(trained(made)) == 2 and not any("one token" in note for note in encoder.notes)


# What the template of SmolVLM makes of a text, whose letters are no parts.
PARTS_ALONE = tiny_templates.QWEN2.replace(
    "+ message['content'] +",
    "-}}{%- for part in message.content if part.type == 'text' -%}{{- part.text -}}{%- endfor -%}{{-",
)


@pytest.mark.parametrize(("said", "loss"), [("Four.", "assistant"), ("a", "assistant"), ("Four.", "all")])
def test_answers_that_the_template_does_not_write_are_refused(tmp_path: Path, said: str, loss: str) -> None:
    """Only their ends were trained, and a note spoke of calls. "a" stands in the name of the role."""
    row, tokenizer = {"messages": [ASKED, FOUR | {"content": said}]}, training.tokenizer("qwen2")
    tokenizer.chat_template = PARTS_ALONE
    assert "Two" not in tokenizer.apply_chat_template(row["messages"], tokenize=False)
    recipe = training.resolved(tiny.cached("qwen2"), training.write_data(tmp_path, [row]), loss_on=loss)
    with pytest.raises(Refused, match="the chat template leaves out the text of an answer") as refused:
        Encoder(recipe, tokenizer)(0, 1, row)
    assert refused.value.error["code"] == "template_mismatch"


def test_a_thought_that_the_prompt_opens_is_trained_from_there(tmp_path: Path) -> None:
    text, encoder = encoded(tmp_path, "qwen2", [ASKED, THOUGHT], tiny_templates.OPENS_A_THOUGHT)
    assert text.endswith("assistant\n<think>\n⟦add\n</think>\n\nFour.<|im_end|>⟧\n") and encoder.notes == []


def test_a_thought_in_the_text_behind_an_empty_one_of_the_prompt_is_trained(tmp_path: Path) -> None:
    """As with Qwen3.5 where it does not think: it was refused, and one beside the text was not."""
    template = OPENS_A_BLOCK.replace("assistant\\n<think>\\n' -}}", "assistant\\n<think>\\n\\n</think>\\n\\n' -}}")
    text, encoder = encoded(tmp_path, "qwen3", [ASKED, THOUGHT, ASKED, THOUGHT], template)
    assert trained(text) == ["Four.<|im_end|>", "add\n</think>\n\nFour.<|im_end|>"]
    assert ANOTHER_PROMPT in encoder.notes


# As that of MiniMax-M2: it opens a thought when it is asked, and refuses the answer of a tool without its call.
STRICT = tiny_templates.QWEN2_CALLS.replace("assistant\\n'", "assistant\\n<think>\\n'").replace(
    "in messages -%}{%- if message.role == 'tool' -%}",
    "in messages -%}{%- if message.role == 'tool' -%}"
    "{%- if not messages[loop.index0 - 1].tool_calls -%}{{- raise_exception('') -}}{%- endif -%}",
)


def test_a_call_behind_another_prompt_is_trained_with_the_answer_of_its_tool(tmp_path: Path) -> None:
    text, encoder = encoded(tmp_path, "qwen2", [ASKED, CALLING, SUM, FOUR], STRICT)
    assert trained(text) == [f"{SAID}<|im_end|>", "Four.<|im_end|>"] and encoder.notes == [ANOTHER_PROMPT]


def test_a_call_before_the_text_of_its_answer_is_not_taken_for_the_prompt(tmp_path: Path) -> None:
    """As Gemma 4's calls stand. Behind another prompt nothing shows where they begin."""
    before = STRICT.replace("message.content + calls(message)", "calls(message) + message.content")
    with pytest.raises(Refused, match="cannot be trained alone"):
        encoded(tmp_path, "qwen2", [ASKED, CALLING, SUM, FOUR], before)


@pytest.mark.parametrize("thought", ["<think>\nadd\n</think>\n\nFour.", "add\n</think>\n\nFour."])
def test_a_thought_that_the_template_cuts_off_is_told(tmp_path: Path, thought: str) -> None:
    """Models that are asked with an open `<think>` answer without it, and rows are made of such answers."""
    cuts = tiny_templates.QWEN2.replace("message['content']", "message['content'].split('</think>')[-1]")
    text, encoder = encoded(tmp_path, "qwen2", [ASKED, FOUR | {"content": thought}], cuts)
    assert "add" not in text and THOUGHTS_LEFT_OUT in encoder.notes


@pytest.mark.parametrize("name", ["thinking", "reasoning", "reasoning_content"])
@pytest.mark.parametrize("read", ["thinking", "reasoning_content"])
def test_llama_cpp_python_writes_the_thoughts_that_were_trained(tmp_path: Path, name: str, read: str) -> None:
    """transformers gives a template both names, whichever the row has; the file's template failed `verify`."""
    template = tiny_templates.QWEN2.replace("'\\n' + message", f"'\\n' + (message.{read} or '') + message")
    row, tokenizer = {"messages": [ASKED, FOUR | {name: "add them"}]}, training.tokenizer("qwen2")
    tokenizer.chat_template = template
    encoder = Encoder(training.resolved(tiny.cached("qwen2"), training.write_data(tmp_path, [row])), tokenizer)
    made = encoder(0, 1, row)
    assert made["rendered"].endswith("assistant\nadd themFour.<|im_end|>\n") and encoder.notes == []
    job = TemplateJob(
        template=template, bos="", eos="", seconds=20, conversations=[Conversation(list(made["messages"]), None, False)]
    )
    assert [each.text for each in run_worker(WORKER, job, list[Rendered])] == [made["rendered"]]


@pytest.mark.parametrize(
    ("template", "hint"),
    [
        ("{{ raise_exception('user first') }}", "put the roles in the order"),
        ("{{ messages[0].content[0].text + '' }}", "correct chat_template.jinja"),
        ("{% for tool in tools %}{{ tool }}{% endfor %}", "correct chat_template.jinja"),
    ],
)
def test_the_hint_knows_a_template_that_fails_from_one_that_refuses(tmp_path: Path, template: str, hint: str) -> None:
    """As LLaVA's, which takes parts alone, and Hermes' for tools, which takes no rows without them."""
    with pytest.raises(Refused, match="rejects these messages") as refused:
        encoded(tmp_path, "qwen2", [ASKED, FOUR], template)
    assert hint in refused.value.error["hint"]
