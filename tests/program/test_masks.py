"""What is trained of a row: the assistant's words and the token that ends them, on the tokenizers of real families.

The outside reading is transformers' own: the same template with {% generation %} marks, which the test puts in, and
`apply_chat_template(return_assistant_tokens_mask=True)`.
"""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

import tiny
import tiny_templates
import training
from skill_train.program.chat.answers import BESIDE_THOUGHTS, EARLIER_THOUGHTS, MARK, THOUGHTS_LEFT_OUT
from skill_train.program.encode import ANOTHER_PROMPT, LEFT_OUT_TRAINED, NOT_RENDERED, Encoder
from skill_train.program.events import Refused
from skill_train.program.main import load_data
from skill_train.program.model import check_vocabulary
from skill_train.program.tokenizer import load_tokenizer
from skill_train.program.trainer import check_positions

pytestmark = pytest.mark.slow

IGNORED = -100
TURNS = [
    {"role": "system", "content": "Count things."},
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And two more?"},
    {"role": "assistant", "content": "Six, so 4 + 2 = 6."},
]
THOUGHTS = [
    *TURNS[1:2],
    {"role": "assistant", "content": "<think>\nadd them\n</think>\n\nFour."},
    TURNS[3],
    {"role": "assistant", "content": "<think>\nadd two\n</think>\n\nSix."},
]

# By hand, from each family's template: what the model itself says, and what ends it.
TRAINED: list[tuple[str, list[dict[str, Any]], list[str]]] = [
    ("qwen2", TURNS, ["Four.<|im_end|>", "Six, so 4 + 2 = 6.<|im_end|>"]),
    ("qwen3", TURNS, ["Four.<|im_end|>", "<think>\n\n</think>\n\nSix, so 4 + 2 = 6.<|im_end|>"]),
    ("qwen3", THOUGHTS, ["Four.<|im_end|>", "<think>\nadd two\n</think>\n\nSix.<|im_end|>"]),
    ("llama-spm", TURNS, ["Four. </s>", "Six, so 4 + 2 = 6. </s>"]),
    ("mistral", TURNS, ["Four.</s>", "Six, so 4 + 2 = 6.</s>"]),
    ("gemma", TURNS, ["Four.<end_of_turn>", "Six, so 4 + 2 = 6.<end_of_turn>"]),
]
IDS = [f"{kind}{'-thinking' if turns is THOUGHTS else ''}" for kind, turns, _ in TRAINED]

# Where the marks go: the text of the template without them, and with them. ChatML's two differ in one name.
_CHATML = "{{{{- '<|im_start|>' + message['role'] + '\\n' + {0} + '<|im_end|>\\n' -}}}}"
_CHATML_MARKED = (
    "{{{{- '<|im_start|>' + message['role'] + '\\n' -}}}}"
    "{{%- if message['role'] == 'assistant' -%}}"
    "{{%- generation -%}}{{{{- {0} + '<|im_end|>' -}}}}{{%- endgeneration -%}}"
    "{{%- else -%}}{{{{- {0} + '<|im_end|>' -}}}}{{%- endif -%}}{{{{- '\\n' -}}}}"
)
_GEMMA = "(system if loop.first else '') + message['content'] | trim -}}{{- '<end_of_turn>\\n' -}}"
_GEMMA_MARKED = (
    "(system if loop.first else '') -}}{%- if role == 'model' -%}"
    "{%- generation -%}{{- message['content'] | trim + '<end_of_turn>' -}}{%- endgeneration -%}"
    "{%- else -%}{{- message['content'] | trim + '<end_of_turn>' -}}{%- endif -%}{{- '\\n' -}}"
)
_ANSWER = "{{{{- ' ' + message['content'] + '{0}' + eos_token -}}}}"
MARKS = {
    "qwen2": (_CHATML.format("message['content']"), _CHATML_MARKED.format("message['content']")),
    "qwen3": (_CHATML.format("content"), _CHATML_MARKED.format("content")),
    "gemma": (_GEMMA, _GEMMA_MARKED),
    **{
        kind: (_ANSWER.format(close), "{%- generation -%}" + _ANSWER.format(close) + "{%- endgeneration -%}")
        for kind, close in (("llama-spm", " "), ("mistral", ""))
    },
}


@pytest.mark.parametrize(("kind", "turns", "trained"), TRAINED, ids=IDS)
def test_the_answers_are_trained_and_nothing_else(
    tmp_path: Path, kind: str, turns: list[dict[str, Any]], trained: list[str]
) -> None:
    row, tokenizer = _encoded(tmp_path, kind, {"messages": turns})
    assert [tokenizer.decode(ids).strip() for ids in _runs(row)] == trained
    assert row["trained_messages"] == [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
    assert row["input_ids"] == tokenizer.apply_chat_template(turns, tokenize=True, return_dict=True)["input_ids"]


@pytest.mark.parametrize(("kind", "turns"), [t[:2] for t in TRAINED], ids=IDS)
def test_the_mask_is_the_one_that_generation_marks_give(tmp_path: Path, kind: str, turns: list[dict[str, Any]]) -> None:
    row, tokenizer = _encoded(tmp_path, kind, {"messages": turns})
    without, marked = MARKS[kind]
    assert tokenizer.chat_template.count(without) == 1
    tokenizer.chat_template = tokenizer.chat_template.replace(without, marked)
    assert tokenizer.apply_chat_template(turns, tokenize=False) == row["rendered"]
    outside = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    assert outside["input_ids"] == row["input_ids"]
    assert outside["assistant_masks"] == [int(label != IGNORED) for label in row["labels"]]
    assert 0 < sum(outside["assistant_masks"]) < len(row["labels"])


@pytest.mark.parametrize("kind", ["qwen2", "gemma", "mistral", "llama-spm"])
def test_the_mark_by_which_answers_are_found_may_stand_in_a_text(tmp_path: Path, kind: str) -> None:
    """The question was trained, and all before the last mark."""
    turns = [TURNS[1] | {"content": f"What is {MARK}?"}, TURNS[2], TURNS[3], TURNS[4] | {"content": f"{MARK} is 6."}]
    row, tokenizer = _encoded(tmp_path, kind, {"messages": turns})
    told = [tokenizer.decode(ids).strip() for ids in _runs(row)]
    assert [text.rpartition(".")[0] + "." for text in told] == ["Four.", f"{MARK} is 6."]


def test_labels_are_the_tokens_themselves(tmp_path: Path) -> None:
    row, _ = _encoded(tmp_path, "gemma", {"messages": TURNS})
    assert all(label in (IGNORED, token) for token, label in zip(row["input_ids"], row["labels"], strict=True))


@pytest.mark.parametrize(
    ("row", "trained"),
    [
        ({"instruction": "Add.", "input": "2 2", "output": "4"}, "4"),
        ({"question": "2+2?", "answer": "4"}, "4"),
        ({"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}, "4"),
        ({"prompt": [{"role": "user", "content": "2+2?"}], "completion": [{"role": "assistant", "content": "4"}]}, "4"),
    ],
    ids=["instruction", "question_answer", "sharegpt", "conversational"],
)
def test_other_formats_become_a_conversation(tmp_path: Path, row: dict[str, Any], trained: str) -> None:
    encoded, tokenizer = _encoded(tmp_path, "gemma", row)
    assert [tokenizer.decode(ids).strip() for ids in _runs(encoded)] == [f"{trained}<end_of_turn>"]


def test_the_input_of_a_later_row_is_fed(tmp_path: Path) -> None:
    rows = [{"instruction": "Add.", "output": "4"}, {"instruction": "Add.", "input": "2 2", "output": "4"}]
    data, _ = _loaded(tmp_path, "gemma", rows)
    assert [row["messages"][0]["content"] for row in data["train"]] == ["Add.", "Add.\n\n2 2"]


def test_answers_in_the_prompt_of_a_conversational_row_are_not_trained(tmp_path: Path) -> None:
    encoded, tokenizer = _encoded(tmp_path, "gemma", {"prompt": TURNS[1:4], "completion": TURNS[4:]})
    assert [tokenizer.decode(ids) for ids in _runs(encoded)] == ["Six, so 4 + 2 = 6.<end_of_turn>"]


def test_a_prompt_without_a_question_is_trained_as_its_messages_are(tmp_path: Path) -> None:
    """It is a pair, and one without text that could be rendered already."""
    system, answer = TURNS[0], TURNS[2]
    pair, tokenizer = _encoded(tmp_path, "gemma", {"prompt": [system, TURNS[2]], "completion": [answer]})
    assert [tokenizer.decode(ids).strip() for ids in _runs(pair)] == ["Four.<end_of_turn>"]
    talk, _ = _encoded(tmp_path, "gemma", {"messages": [system, TURNS[2], answer]})
    assert pair["input_ids"] == talk["input_ids"]


# --- Plain text ---


@pytest.mark.parametrize(
    ("kind", "start", "end"), [("qwen2", [], 151645), ("llama-spm", [1], 2), ("gemma", [2], 1), ("gpt2", [], 50256)]
)
def test_a_completion_is_trained_with_its_end(tmp_path: Path, kind: str, start: list[int], end: int) -> None:
    """Start and end token of each family: their published tokenizer configs."""
    row, tokenizer = _encoded(tmp_path, kind, {"prompt": "Two and two is", "completion": " four."}, format="completion")
    plain = tokenizer("Two and two is four.", add_special_tokens=False)["input_ids"]
    assert row["input_ids"] == [*start, *plain, end]
    (trained,) = _runs(row)
    assert trained[-1] == end
    assert tokenizer.decode(trained[:-1]).strip() == "four."
    assert row["rendered"] == "Two and two is four."


def test_an_end_that_the_tokenizer_appends_itself_is_trained(tmp_path: Path) -> None:
    """It stands in no text, so its place is (0, 0)."""
    base = Path(shutil.copytree(tiny.cached("qwen2"), tmp_path / "base"))
    document = json.loads((base / "tokenizer.json").read_text())
    end = json.loads((base / "tokenizer_config.json").read_text())["eos_token"]
    number = next(token["id"] for token in document["added_tokens"] if token["content"] == end)
    text, mark = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": end, "type_id": 0}}
    document["post_processor"] = {
        "type": "TemplateProcessing", "single": [text, mark], "pair": [text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {end: {"id": end, "ids": [number], "tokens": [end]}},
    }  # fmt: skip
    (base / "tokenizer.json").write_text(json.dumps(document))
    rows = {"completion": {"prompt": "two and two is", "completion": " four"}, "text": {"text": "a plain text"}}
    tokenizer = load_tokenizer(str(base), None)
    for name, row in rows.items():
        recipe = training.resolved(base, training.write_data(tmp_path, [row]), format=name)
        made = Encoder(recipe, tokenizer)(0, 1, row)
        assert made["input_ids"].count(number) == 1
        assert (made["input_ids"][-1], made["labels"][-1]) == (number, number)


def test_a_token_that_begins_with_the_space_of_the_prompt_is_the_answers(tmp_path: Path) -> None:
    """ "is " + "four" is one token, " four": left out, a one-word answer would never be learned."""
    pair = {"prompt": "Two and two is ", "completion": "four"}
    row, tokenizer = _encoded(tmp_path, "qwen2", pair, format="completion")
    (trained,) = _runs(row)
    assert tokenizer.decode(trained) == " four<|im_end|>"


@pytest.mark.parametrize(
    ("kind", "pair", "told"),
    [
        ("qwen2", ("Two and two is ", "four"), "' four'"),
        ("gpt2", ("Two and two is ", "four"), "' four'"),
        ("qwen2", ("Two and two is", " four"), None),
        ("gpt2", ("Two and two is", " four"), None),
        ("llama-spm", ("Two and two is", " four"), None),
        ("gemma", ("Two and two is", " four"), None),
        ("qwen2", ("Two and two is\n", "four"), None),
        ("gemma", ("### Answer:\n", "four"), None),
        ("llama-bpe", ("Two is ", "2, not 1"), None),  # a space and a digit are two tokens
        ("llama-bpe", ("Two", " is 2"), None),
    ],
)
def test_a_token_across_the_end_of_the_prompt_is_told(
    tmp_path: Path, kind: str, pair: tuple[str, str], told: str | None
) -> None:
    """Who asks the prompt alone, with its space, sends another token; TRL warns of a mismatch too."""
    row = {"prompt": pair[0], "completion": pair[1]}
    encoder, tokenizer = _encoder(tmp_path, kind, row, format="completion")
    tokenizer.chat_template = None
    made = [encoder(number, number + 1, row) for number in range(2)]
    said = [note for note in encoder.notes if "one token for the end of the prompt" in note]
    assert [note.partition("):")[0] for note in said] == (
        [f"2 of 2 rows have one token for the end of the prompt and the start of the answer (the first: line 1, {told}"]
        if told
        else []
    )
    alone = tokenizer(pair[0], add_special_tokens=False)["input_ids"]
    whole = tokenizer("".join(pair), add_special_tokens=False)["input_ids"]
    assert (whole[: len(alone)] == alone) == (told is None) and len(made) == 2


def test_a_space_alone_is_trained_though_its_offsets_are_trimmed(tmp_path: Path) -> None:
    """A space and a digit are two tokens in Llama 3's vocabulary; with `trim_offsets` the space has no place."""
    pair, bare = {"prompt": "Two is ", "completion": "2, not 1"}, {"format": "completion"}
    row, tokenizer = _encoded(tmp_path, "llama-bpe", pair, **bare)
    assert [tokenizer.decode(ids) for ids in _runs(row)] == ["2, not 1<|eot_id|>"]
    row, tokenizer = _encoded(tmp_path, "llama-bpe", {"prompt": "Two", "completion": " is 2"}, **bare)
    assert [tokenizer.decode(ids) for ids in _runs(row)] == [" is 2<|eot_id|>"]


def test_a_text_is_trained_whole_with_one_end(tmp_path: Path) -> None:
    row, _ = _encoded(tmp_path, "gpt2", {"text": "Once upon a time"})
    assert row["labels"] == row["input_ids"]
    assert row["input_ids"][-1] == 50256
    said, _ = _encoded(tmp_path, "gpt2", {"text": "Once upon a time<|endoftext|>"})
    assert said["input_ids"] == row["input_ids"]  # an end that the text has already is not doubled


def test_loss_on_all_trains_the_prompt_too(tmp_path: Path) -> None:
    row, _ = _encoded(tmp_path, "qwen2", {"messages": TURNS}, loss_on="all")
    assert row["labels"] == row["input_ids"]


# --- What does not fit ---


def test_long_rows_are_cut_and_counted(tmp_path: Path) -> None:
    short, fits, long = {"text": "one two"}, {"text": "one two three four"}, {"text": "one two three four five six"}
    data, _ = _loaded(tmp_path, "gpt2", [short, fits, long, long], max_length=5)
    assert [len(row["input_ids"]) for row in data["train"]] == [3, 5, 5, 5]
    assert [row["full_length"] for row in data["train"]] == [3, 5, 7, 7]
    assert [row["truncated"] for row in data["train"]] == [False, False, True, True]
    assert data["figures"]["truncated_rows"] == 2
    assert data["figures"]["longest_row_tokens"] == 5


def test_rows_with_nothing_to_learn_are_refused_by_line(tmp_path: Path) -> None:
    """Five tokens of gemma's template stand before the answer's; max_length 5 leaves no answer."""
    good = {"prompt": "1", "completion": "2"}
    cut = {"prompt": "one two three four five six seven eight", "completion": "nine"}
    with pytest.raises(Refused) as caught:
        _loaded(tmp_path, "gpt2", [good, cut, good, cut], max_length=6)
    error = caught.value.error
    assert (error["code"], caught.value.exit_code) == ("nothing_to_train", 2)
    assert "2 of 4 rows" in error["message"] and "lines 2, 4" in error["message"]
    assert "as far as the model has positions" in error["hint"]
    assert "10 tokens" in error["hint"] and "skip_untrained_rows" in error["hint"]
    with pytest.raises(Refused) as caught:
        _loaded(tmp_path, "gpt2", [cut], max_length=6, skip_untrained_rows=True)
    assert caught.value.error["code"] == "nothing_to_train"  # nothing would be left


def test_rows_with_nothing_to_learn_are_left_out_on_request(tmp_path: Path) -> None:
    good = {"prompt": "1", "completion": "2"}
    cut = {"prompt": "one two three four five six seven eight", "completion": "nine"}
    data, _ = _loaded(tmp_path, "gpt2", [cut, good, cut, good], max_length=6, skip_untrained_rows=True)
    assert [row["line"] for row in data["train"]] == [2, 4]
    assert data["figures"]["skipped_rows"] == 2


def test_the_share_of_trained_tokens_by_hand(tmp_path: Path) -> None:
    """GPT-2: "one two" is 2 tokens, " three" one, and the end one: 2 of 4 are trained."""
    data, _ = _loaded(tmp_path, "gpt2", [{"prompt": "one two", "completion": " three"}])
    assert data["figures"]["trained_token_share"] == 0.5
    assert data["figures"]["tokens"] == 4
    # In plain text all count but the first, which nothing predicts: "one", " two" and the end are 2 of 3.
    data, _ = _loaded(tmp_path, "gpt2", [{"text": "one two"}])
    assert data["figures"]["trained_token_share"] == 0.6667


# --- Templates with a will of their own ---


def test_a_template_that_refuses_the_roles_names_the_line(tmp_path: Path) -> None:
    twice = [TURNS[1], TURNS[3], TURNS[4]]
    with pytest.raises(Refused) as caught:
        _loaded(tmp_path, "mistral", [{"messages": TURNS}, {"messages": twice}])
    error = caught.value.error
    assert (error["code"], caught.value.exit_code) == ("template_mismatch", 2)
    assert error["message"].startswith(f"line 2 of {tmp_path / 'rows.jsonl'}: ")
    assert "must alternate" in error["message"]
    assert error["got"] == "user user assistant"


def test_a_call_of_a_tool_is_trained(tmp_path: Path) -> None:
    template = (
        "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' + m.content -}}"
        "{%- for call in m.tool_calls or [] -%}"
        "{{- '<tool_call>' + call.function.name + '</tool_call>' -}}"
        "{%- endfor -%}{{- '<|im_end|>\\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    )
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    turns = [
        TURNS[1],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "Four."},
    ]
    row, tokenizer = _encoded(tmp_path, "qwen2", {"messages": turns}, template=template)
    assert [tokenizer.decode(ids) for ids in _runs(row)] == ["<tool_call>add</tool_call><|im_end|>", "Four.<|im_end|>"]


CALLS = [
    {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}},
    {"type": "function", "function": {"name": "now", "arguments": {}}},
]
SAID = [
    '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>',
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
]
BOTH = "\n".join(SAID)
LLAMA_SAID = '{"name": "add", "parameters": {"a": 2}}<|eot_id|>'
# A template, its tokenizer, the text beside the calls, their number, what is trained of the turn.
CALLED: list[tuple[str, str, str | None, int, str]] = [
    ("QWEN2_CALLS", "qwen2", "Let me look.", 1, f"Let me look.\n{SAID[0]}<|im_end|>"),
    ("QWEN2_CALLS", "qwen2", "Let me look.", 2, f"Let me look.\n{BOTH}<|im_end|>"),
    ("QWEN2_CALLS", "qwen2", None, 2, f"{BOTH}<|im_end|>"),
    ("QWEN2_CALLS", "qwen2", "", 1, f"{SAID[0]}<|im_end|>"),
    ("QWEN3_CALLS", "qwen3", "Let me look.", 1, f"Let me look.\n{SAID[0]}<|im_end|>"),
    ("QWEN3_CALLS", "qwen3", "Let me look.", 2, f"Let me look.\n{BOTH}<|im_end|>"),
    ("QWEN3_CALLS", "qwen3", None, 1, f"{SAID[0]}<|im_end|>"),
    ("LLAMA_3_CALLS", "llama-bpe", "Let me look.", 1, LLAMA_SAID),
    ("LLAMA_3_CALLS", "llama-bpe", None, 1, LLAMA_SAID),
]


@pytest.mark.parametrize(("template", "kind", "text", "count", "trained"), CALLED, ids=lambda value: repr(value)[:16])
def test_text_and_calls_of_one_turn_are_trained_with_their_end(
    tmp_path: Path, template: str, kind: str, text: str | None, count: int, trained: str
) -> None:
    turns = _calling(text, count)
    encoder, tokenizer = _encoder(tmp_path, kind, {"messages": turns}, template=getattr(tiny_templates, template))
    last = "<think>\n\n</think>\n\n" if kind == "qwen3" else ""
    end = "<|eot_id|>" if kind == "llama-bpe" else "<|im_end|>"
    runs = [f"Four.{end}", trained, f"{last}Six.{end}"]
    assert [tokenizer.decode(ids).strip() for ids in _runs(encoder(0, 1, {"messages": turns}))] == runs
    ends_with_a_call = {"messages": turns[:4]}
    assert tokenizer.decode(_runs(encoder(1, 2, ends_with_a_call))[-1]).strip() == last + trained
    left_out = text is not None and text not in trained and template == "LLAMA_3_CALLS"
    assert ["the text of answers that call a tool" in note for note in encoder.notes] == [True] * left_out


def test_the_answer_of_a_tool_is_not_trained(tmp_path: Path) -> None:
    """Where it stands inside the assistant's turn, the turn cannot be trained alone."""
    row = {"messages": _calling("Let me look.", 1)}
    with pytest.raises(Refused) as caught:
        _encoded(tmp_path, "qwen2", row, template=tiny_templates.GEMMA_4_CALLS)
    assert caught.value.error["code"] == "template_mismatch"


def _calling(text: str | None, count: int) -> list[dict[str, Any]]:
    """An answer in text, then one with calls, then one in text."""
    answers = [{"role": "tool", "content": str(n)} for n in range(count)]
    calling = {"role": "assistant", "content": text, "tool_calls": CALLS[:count]}
    return [*TURNS[1:4], calling, *answers, {"role": "assistant", "content": "Six."}]


def test_text_in_parts_is_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Fo"}, {"type": "text", "text": "ur."}]
    row, _ = _encoded(tmp_path, "gemma", {"messages": [TURNS[1], {"role": "assistant", "content": parts}]})
    plain, _ = _encoded(tmp_path, "gemma", {"messages": TURNS[1:3]})
    assert row["input_ids"] == plain["input_ids"] and row["labels"] == plain["labels"]


def test_a_template_that_changes_answers_is_read_by_its_beginning(tmp_path: Path) -> None:
    template = "{%- for m in messages -%}{{- m.role + ': ' + m.content | upper + '<|im_end|>' -}}{%- endfor -%}"
    template += "{%- if add_generation_prompt -%}{{- 'assistant: ' -}}{%- endif -%}"
    row, tokenizer = _encoded(tmp_path, "qwen2", {"messages": TURNS[1:3]}, template=template)
    assert [tokenizer.decode(ids).strip() for ids in _runs(row)] == ["FOUR.<|im_end|>"]


def test_a_template_that_hides_where_answers_stand_is_refused(tmp_path: Path) -> None:
    template = "{%- for m in messages | reverse -%}{{- m.content | upper -}}{%- endfor -%}"
    with pytest.raises(Refused) as caught:
        _encoded(tmp_path, "qwen2", {"messages": TURNS}, template=template)
    error = caught.value.error
    assert (error["code"], caught.value.exit_code) == ("template_mismatch", 2)
    assert "loss_on: all" in error["hint"]
    assert "line 1 of" in error["message"]
    row, _ = _encoded(tmp_path, "qwen2", {"messages": TURNS}, template=template, loss_on="all")
    assert row["labels"] == row["input_ids"]


def test_a_template_without_an_end_token_is_noted(tmp_path: Path) -> None:
    template = "{%- for m in messages -%}{{- m.role + ': ' + m.content + '\\n' -}}{%- endfor -%}"
    template += "{%- if add_generation_prompt -%}{{- 'assistant: ' -}}{%- endif -%}"
    encoder, tokenizer = _encoder(tmp_path, "qwen2", {"messages": TURNS[1:3]}, template=template)
    row = encoder(0, 1, {"messages": TURNS[1:3]})
    assert [tokenizer.decode(ids).strip() for ids in _runs(row)] == ["Four."]
    assert any("where to stop" in note for note in encoder.notes)


def test_an_end_token_behind_another_mark_is_trained_too(tmp_path: Path) -> None:
    """Command R7B writes `<|END_RESPONSE|><|END_OF_TURN_TOKEN|>`, and only the second ends its answers. Here the first
    is `<|endoftext|>`; the marks of the next turn are nobody's end."""
    template = "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' + m.content -}}"
    template += "{{- '<|endoftext|>' if m.role == 'assistant' -}}{{- '<|im_end|>' -}}{%- endfor -%}"
    template += "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    row, tokenizer = _encoded(tmp_path, "qwen2", {"messages": TURNS}, template=template)
    ends = "<|endoftext|><|im_end|>"
    assert [tokenizer.decode(ids) for ids in _runs(row)] == [f"Four.{ends}", f"Six, so 4 + 2 = 6.{ends}"]


@pytest.mark.parametrize(
    ("kind", "answer", "told"),
    [
        ("qwen2", {"content": "Four.", "reasoning_content": "add them"}, True),
        ("qwen2", {"content": "Four.", "thinking": "add them"}, True),
        ("qwen2", {"content": "<think>\nadd them\n</think>\n\nFour."}, False),  # this template leaves it in the text
        ("qwen3", {"content": "<think>\nadd them\n</think>\n\nFour."}, False),
        ("qwen2", {"content": "Four.", "reasoning_content": ""}, False),
    ],
)
def test_thoughts_that_the_template_leaves_out_are_told(
    tmp_path: Path, kind: str, answer: dict[str, Any], told: bool
) -> None:
    row = {"messages": [TURNS[1], {"role": "assistant"} | answer]}
    encoder, _ = _encoder(tmp_path, kind, row)
    assert ("add them" in encoder(0, 1, row)["rendered"]) is not (told or answer.get("reasoning_content") == "")
    assert (THOUGHTS_LEFT_OUT in encoder.notes) is told


@pytest.mark.parametrize(
    ("kind", "content", "told"),
    [
        ("qwen3", "<think>\nadd\n</think>\n\nTwo,\n<think>\nonce more\n</think>\n\nFour.", True),
        ("qwen3", "Let me see.\n<think>\nadd\n</think>\n\nFour.", True),
        ("qwen2", "<think>\nadd\n</think>\n\nTwo,\n<think>\nonce more\n</think>\n\nFour.", False),  # as it stands
        ("qwen3", "add\n</think>\n\nFour.", False),
        ("qwen3", "<think>\n\n</think>\n\nFour, of <think>.", False),
    ],
)
def test_a_text_beside_thoughts_that_the_template_leaves_out_is_told(
    tmp_path: Path, kind: str, content: str, told: bool
) -> None:
    """Qwen3's template writes what follows the last `</think>`, and the thought before the first one."""
    row = {"messages": [TURNS[1], {"role": "assistant", "content": content}]}
    encoder, _ = _encoder(tmp_path, kind, row)
    rendered = encoder(0, 1, row)["rendered"]
    assert all(part in rendered for part in ("Two", "once more", "Let me see") if part in content) is not told
    assert (BESIDE_THOUGHTS in encoder.notes) is told


def test_a_template_that_removes_thoughts_from_the_last_answer_is_told(tmp_path: Path) -> None:
    """As those of DeepSeek-R1's distilled models do."""
    template = "{%- for m in messages -%}{{- m.role + ': ' + m.content.split('</think>')[-1] + '<|im_end|>' -}}"
    template += "{%- endfor -%}{%- if add_generation_prompt -%}{{- 'assistant: ' -}}{%- endif -%}"
    encoder, tokenizer = _encoder(tmp_path, "qwen2", {"messages": THOUGHTS[:2]}, template=template)
    row = encoder(0, 1, {"messages": THOUGHTS[:2]})
    assert [tokenizer.decode(ids).strip() for ids in _runs(row)] == ["Four.<|im_end|>"]
    assert THOUGHTS_LEFT_OUT in encoder.notes


@pytest.mark.parametrize(("kind", "told"), [("qwen3", [EARLIER_THOUGHTS]), ("qwen2", [])])
def test_thoughts_of_earlier_answers_that_are_left_out_are_told(tmp_path: Path, kind: str, told: list[str]) -> None:
    """Qwen3's template writes those behind the last question alone, and the first answer is trained as one without."""
    encoder, tokenizer = _encoder(tmp_path, kind, {"messages": THOUGHTS})
    trained = [tokenizer.decode(ids) for ids in _runs(encoder(0, 1, {"messages": THOUGHTS}))]
    assert ("add them" in trained[0], "add two" in trained[1]) == (not told, True)
    assert encoder.notes == told


_NO_SYSTEM = NOT_RENDERED.format("messages of the role system")


@pytest.mark.parametrize(
    ("kind", "template", "notes"),
    [
        ("qwen2", tiny_templates.OPENS_A_THOUGHT, [ANOTHER_PROMPT]),
        ("qwen2", tiny_templates.SYSTEM_AT_THE_END, [_NO_SYSTEM, ANOTHER_PROMPT]),
        ("qwen2", tiny_templates.WITHOUT_SYSTEM, [_NO_SYSTEM]),
        *((kind, None, []) for kind in ("qwen3", "llama-spm", "mistral", "gemma", "phi3")),
    ],
)
def test_a_prompt_that_differs_from_the_trained_one_is_told(
    tmp_path: Path, kind: str, template: str | None, notes: list[str]
) -> None:
    """The answers are trained as they stand, whatever stands before them."""
    encoder, tokenizer = _encoder(tmp_path, kind, {"messages": TURNS}, template=template)
    row = encoder(0, 1, {"messages": TURNS})
    assert "Six, so 4 + 2 = 6." in tokenizer.decode(_runs(row)[-1])
    assert encoder.notes == notes


_TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds two numbers.", "parameters": {}}}]
_TWO_ROLES = """{%- for m in messages -%}{%- if m.role in ('user', 'assistant') -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (_TWO_ROLES, ["the descriptions of tools", "messages of the role system", "messages of the role tool"]),
        ("{%- for tool in tools -%}{{- tool.function.description -}}{%- endfor -%}" + tiny_templates.QWEN2, []),
    ],
    ids=["as the first one of Phi-3-mini", "one that writes all"],
)
def test_tools_and_messages_that_the_template_leaves_out_are_told(
    tmp_path: Path, template: str, told: list[str]
) -> None:
    roles = [
        ("system", "Use tools."),
        ("user", "2 + 2?"),
        ("assistant", "I add."),
        ("tool", "4"),
        ("assistant", "Four."),
    ]
    row = {"messages": [{"role": role, "content": text} for role, text in roles], "tools": _TOOLS}
    encoder, _ = _encoder(tmp_path, "qwen2", row, template=template)
    rendered = encoder(0, 1, row)["rendered"]
    assert ("Adds two numbers." in rendered, "Use tools." in rendered) == (not told, not told)
    assert [note for note in encoder.notes if note != ANOTHER_PROMPT] == [NOT_RENDERED.format(what) for what in told]


@pytest.mark.parametrize("loss_on", ["all", "assistant"])
def test_loss_on_all_trains_what_the_rows_leave_out_and_says_so(tmp_path: Path, loss_on: str) -> None:
    row = {"messages": [*TURNS[:2], TURNS[2] | {"weight": 0}, *TURNS[3:]]}
    encoder, tokenizer = _encoder(tmp_path, "qwen2", row, loss_on=loss_on)
    trained = [tokenizer.decode(ids) for ids in _runs(encoder(0, 1, row))]
    assert ("Four." in "".join(trained)) is (loss_on == "all")
    assert encoder.notes == ([LEFT_OUT_TRAINED] if loss_on == "all" else [])


def test_a_token_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(tiny.cached("gemma")))  # 640 tokens
    rows = {"train": [{"input_ids": [3, 639]}], "held_out": []}
    check_vocabulary(model, rows)
    with pytest.raises(Refused) as caught:
        check_vocabulary(model, {"train": [{"input_ids": [3]}], "held_out": [{"input_ids": [640]}]})
    assert (caught.value.error["code"], caught.value.error["got"]) == ("bad_tokenizer", "640")


def test_a_row_that_is_longer_than_the_table_of_positions_is_refused() -> None:
    """The model itself ends in an IndexError, after its weights were loaded."""
    config = AutoConfig.from_pretrained(tiny.cached("gpt2"))
    rows = [{"input_ids": [3] * length} for length in (5, config.n_positions, config.n_positions + 1)]
    check_positions(config, {"train": rows[:2], "held_out": []})
    with pytest.raises(Refused) as caught:
        check_positions(config, {"train": rows[:1], "held_out": rows[2:]})
    assert (caught.value.error["code"], caught.value.error["got"]) == ("bad_recipe", f"{config.n_positions + 1} tokens")
    check_positions(AutoConfig.from_pretrained(tiny.cached("qwen2")), {"train": rows, "held_out": []})


def _encoder(
    folder: Path, kind: str, row: dict[str, Any], *, template: str | None = None, **values: Any
) -> tuple[Any, Any]:
    data, tokenizer = training.write_data(folder, [row]), training.tokenizer(kind)
    tokenizer.chat_template = template or tokenizer.chat_template
    return Encoder(training.resolved(tiny.cached(kind), data, **values), tokenizer), tokenizer


def _encoded(folder: Path, kind: str, row: dict[str, Any], **values: Any) -> tuple[dict[str, Any], Any]:
    encoder, tokenizer = _encoder(folder, kind, row, **values)
    return encoder(0, 1, row), tokenizer


def _loaded(folder: Path, kind: str, rows: list[dict[str, Any]], **values: Any) -> tuple[dict[str, Any], Any]:
    recipe = training.resolved(tiny.cached(kind), training.write_data(folder, rows), **values)
    tokenizer = training.tokenizer(kind)
    return load_data(recipe, tokenizer), tokenizer


def _runs(row: dict[str, Any]) -> list[list[int]]:
    """Each stretch of trained tokens."""
    groups = itertools.groupby(row["labels"], key=lambda label: label != IGNORED)
    return [list(labels) for trained, labels in groups if trained]
