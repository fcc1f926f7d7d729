"""What training refuses is refused here, by the same program; the order of speakers is only remarked on."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from skill_train.data.check_row import checker, column_checker, role_trouble
from skill_train.program.events import Refused
from skill_train.program.examples import media_in, to_example
from skill_train.recipe.formats import DetectedFormat

USER, BOT = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
ASKED = {"role": "user", "content": "What is two and two?"}
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]}
ANSWER = {"role": "tool", "name": "add", "content": "4"}
PAIR, PROMPTED = {"prompt": "2+2?", "completion": "4"}, "prompt_completion"
CHAT = DetectedFormat("messages", {"messages": "messages"}, "")

# Every way in which a message can be odd: the quick answer for usual rows must be that of training.
ROWS: list[Any] = [
    [USER, BOT],
    [USER, {"role": "assistant", "content": "vier – ä"}],
    [USER],
    [],
    None,
    "text",
    (USER, BOT),
    [USER, {"role": "assistant", "content": ""}],
    [USER, {"role": "assistant", "content": " "}],
    [ASKED, {"role": "assistant", "content": "\u3000"}],
    [ASKED, {"role": "assistant", "content": "\u00a0\u00a0"}],
    [{"role": "user", "content": "\u3000"}, {"role": "assistant", "content": "Four, I think."}],
    [USER, {"role": "assistant", "content": None}],
    [USER, {"role": "assistant", "content": 4}],
    [USER, {"role": "assistant"}],
    [USER, {"role": None, "content": "4"}],
    [USER, {"role": 1, "content": "4"}],
    [USER, {"content": "4", "name": "x"}],
    [USER, {"role": "assistant", "content": [{"type": "text", "text": "4"}]}],
    [USER, {"role": "assistant", "content": [{"type": "image"}]}],
    [USER, CALL, ANSWER, BOT],
    [USER, CALL, {"role": "tool", "content": ""}, BOT],
    [USER, {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}, ANSWER, BOT],
    [USER, {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}],
    [USER, {"role": "assistant", "content": None, "function_call": None}],
    [USER, {"role": "assistant", "content": "4", "thinking": None}],
    [USER, {"role": "assistant", "content": "4", "weight": 0}],
    [USER, 7],
    [{"role": "model", "content": "4"}, USER],
]
# Texts that stand for media, also between white space of other kinds.
MEDIA = [
    "data:image/png;base64,iVBORw0KGgo=",
    "https://example.org/my cat.jpg?size=1",
    "photos/my two cats.jpeg",
    "file:///her pictures/a b.png",
    "iVBORw0KGgoAAAANSUhEUgAAAAUAAAAFCAYAAACNbyblAAAAHElEQVQI12P4",
    "What is in it? <image>",
    "[IMG] What is in it?",
    "What is in it? [image]",
    "[image] What is in it?",
    "What is in it? [image]\r",
    "\u00a0data:image/png;base64,iVBORw0KGgo=",
    "photos/my two cats.jpeg\t\t\t\t",
]


def in_sentences(value: Any) -> Any:
    """The same with whole sentences, for which a row has the quick answer."""
    if isinstance(value, dict):
        return {key: in_sentences(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(in_sentences, value))
    return {"2+2?": "How much is 2 and 2?", "4": "I think that it is 4"}.get(value, value)


@pytest.mark.parametrize(
    "messages",
    [*ROWS, *map(in_sentences, ROWS), *([{"role": "user", "content": text}, in_sentences(BOT)] for text in MEDIA)],
    ids=str,
)
def test_a_row_is_refused_exactly_when_training_refuses_it(messages: Any) -> None:
    try:
        to_example({"messages": messages}, "messages", {"messages": "messages"})
        refused = False
    except Refused:
        refused = True
    trouble = checker(CHAT)({"messages": messages})[2]
    assert (trouble is not None and trouble.refused) == refused


def test_a_call_of_the_older_format_needs_no_text() -> None:
    """OpenAI's own rows have `content: null` there."""
    said = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    assert checker(CHAT)({"messages": [USER, said]})[2] is None
    trouble = checker(CHAT)({"messages": [USER, said, {"role": "user", "content": ""}, BOT]})[2]
    assert trouble is not None and trouble.kind == "empty"  # for the other message


@pytest.mark.parametrize("text", MEDIA)
def test_a_text_that_stands_for_media_is_refused(text: str) -> None:
    with pytest.raises(Refused) as caught:
        to_example({"messages": [{"role": "user", "content": text}, BOT]}, "messages", {"messages": "messages"})
    assert caught.value.error["code"] == "not_text"


@pytest.mark.parametrize(
    ("value", "answer", "found"),
    [
        (b"\x89PNG", False, True),
        ({"bytes": None, "path": "a.png"}, False, True),
        ({"bytes": "iVBORw0KGgo", "path": None}, False, True),
        ({"array": [0.5], "sampling_rate": 16_000}, False, True),
        ({"array": [0.5], "sampling_rate": 16_000, "place": "Rome"}, False, False),  # an object of another kind
        ({"path": None, "bytes": 512}, False, False),  # how many
        (["a text", {"path": "a.png"}], False, True),
        (["a text", "another"], False, False),
        ("a.png", False, True),
        ("a.png", True, False),  # an answer may be the name of a file
        ("pictures/a.png", True, True),
        ("pictures\\a.png", True, True),
        ("What is <|image_pad|></b>?", False, True),
        ("What is <image>?", False, True),
        ("What is <image>a</image>?", False, True),  # InternVL's
        ("What is <b><image></b>?", False, False),  # HTML closes a tag
        ("Write [image] twice", False, False),  # inside a sentence
        ("c0ffee00" * 8, False, False),  # a digest
        ("abcdefgh" * 8, False, False),  # as long as a file in base64
        ("x" * 1021 + ".png", False, False),  # longer than a name
    ],
)
def test_a_value_that_stands_for_media(value: Any, answer: bool, found: bool) -> None:
    assert (media_in(value, answer=answer) is not None) is found


def _calling(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({}, "empty"),
        ({"text": "x"}, "missing_column"),
        ({"messages": []}, "empty"),
        ({"messages": None}, "empty"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "empty"),
        ({"messages": "x"}, "malformed"),
        ({"messages": [USER, {"role": "assistant", "content": 4}]}, "malformed"),
        ({"messages": [USER]}, "wrong_role_order"),
        ({"messages": [USER, {"role": "agent", "content": "4"}]}, "unknown_role"),
        ({"messages": [USER, {"role": "Assistant", "content": "4"}]}, "unknown_role"),
        ({"messages": [{"role": "Mensch", "content": "2+2?"}, {"role": "KI", "content": "4"}]}, "unknown_role"),
        ({"messages": [USER, {"role": "assistant", "content": "\ud83d"}]}, "not_utf8"),
        ({"messages": [USER, {"role": "assistant", "content": "4", "reasoning_content": "\ud83d"}]}, "malformed"),
        (
            {"messages": [{"role": "\ud83d", "content": "4"}, BOT, {"role": "tool", "content": "5", "name": "a"}]},
            "malformed",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}, BOT]}, "malformed"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}, BOT]}, "malformed"),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "2"}]}]}, "malformed"),
        ({"messages": [USER, _calling("[1]")]}, "malformed"),
        ({"messages": [USER, _calling('{"a": ')]}, "malformed"),
        ({"messages": [USER, BOT | {"function_call": {"name": "f", "arguments": "4"}}]}, "malformed"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, BOT]}, "not_text"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}, BOT]}, "not_text"),
        ({"messages": [USER, BOT | {"weight": 0}]}, "untrained"),
        ({"messages": [USER, BOT | {"train": False}, USER, BOT | {"loss": "false"}]}, "untrained"),
    ],
    ids=str,
)
def test_a_refusal_has_its_kind(row: dict[str, Any], kind: str) -> None:
    trouble = checker(CHAT)(row)[2]
    assert trouble is not None
    assert (trouble.kind, trouble.refused) == (kind, True)


@pytest.mark.parametrize("key", [{"train": False}, {"loss": False}, {"weight": 0}, {"masked": True}], ids=str)
def test_a_row_whose_only_answer_is_left_out_says_so(key: dict[str, Any]) -> None:
    """It has an answer, so it is no conversation without one."""
    [(name, value)] = key.items()
    trouble = checker(CHAT)({"messages": [USER, BOT | key]})[2]
    assert trouble is not None
    assert f"{name}: {value}" in trouble.why and "nothing is left to learn" in trouble.why
    pair = DetectedFormat("prompt_completion", {"prompt": "p", "completion": "c"}, "")
    trouble = checker(pair)({"p": [USER, BOT | key, USER], "c": [{"role": "user", "content": "Hm"}]})[2]
    assert trouble is not None and trouble.kind == "wrong_role_order"  # the answers of a prompt never train


@pytest.mark.parametrize("key", [{"loss_weight": 0}, {"trainable": False}], ids=str)
def test_other_names_leave_an_answer_out_too(key: dict[str, Any]) -> None:
    row = {"messages": [USER, BOT | key, USER, BOT]}
    assert to_example(row, "messages", {"messages": "messages"})["trained_messages"] == [3]


def test_keys_with_two_meanings_and_thoughts_in_a_channel_are_refused() -> None:
    """Some trainers learn where `mask` is 1, others where it is 0."""
    for key, said in (({"mask": True}, "may mean"), ({"mask": 0}, "may mean"), ({"channel": "analysis"}, "thoughts")):
        trouble = checker(CHAT)({"messages": [USER, BOT | key, BOT]})[2]
        assert trouble is not None and trouble.refused and said in trouble.why
    for key in ({"mask": None}, {"channel": "final"}, {"channel": None}):
        trouble = checker(CHAT)({"messages": [USER | {"mask": 1}, BOT | key]})[2]
        assert trouble is None


def test_a_column_that_is_nearly_right_is_named() -> None:
    """A row that could be saved by hand."""
    near, far = ({key: [USER, {"role": "assistant", "content": "4"}]} for key in ("mesages", "turns"))
    said = [trouble.why for row in (near, far) if (trouble := checker(CHAT)(row)[2])]
    assert said == ["no column 'messages' (here: 'mesages')", "no column 'messages'"]


@pytest.mark.parametrize("row", [{"q": [USER], "a": None}, {"q": None, "a": [BOT]}, {"q": [USER], "a": 4}], ids=str)
def test_a_conversation_without_its_other_half_is_refused(row: dict[str, Any]) -> None:
    trouble = checker(DetectedFormat("prompt_completion", {"prompt": "q", "completion": "a"}, ""))(row)[2]
    assert trouble is not None and trouble.refused


@pytest.mark.parametrize("said", ["", " \n", None], ids=repr)
def test_an_empty_system_message_is_none(said: str | None) -> None:
    """As Dolphin and many ShareGPT datasets have it; an empty cell of the column `system` is none too."""
    system: dict[str, Any] = {"role": "system", "content": said, "weight": None}
    turns = [{"from": "system", "value": said}, {"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
    for row, data_format, columns in (
        ({"messages": [system, USER, BOT]}, "messages", ("messages",)),
        ({"messages": [system, USER, BOT], "system": "Be kind."}, "messages", ("messages", "system")),
        ({"conversations": turns}, "sharegpt", ("conversations",)),
        ({"prompt": [system, USER], "completion": [BOT]}, "prompt_completion", ("prompt", "completion")),
    ):
        names = {name: name for name in columns}
        assert checker(DetectedFormat(data_format, names, ""))(row)[2] is None
        kind = [{"role": "system", "content": "Be kind."}] if "system" in row else []
        made = to_example(row, data_format, names)
        assert made["messages"] == [*kind, USER, BOT]
        assert made["trained_messages"] == [len(kind) + 1]


def test_an_empty_system_message_with_tools_is_not_left_out() -> None:
    """Nor is an empty question."""
    for message in ({"role": "system", "content": "", "functions": "[]"}, {"role": "user", "content": ""}):
        trouble = checker(CHAT)({"messages": [message, USER, BOT]})[2]
        assert trouble is not None and trouble.refused


@pytest.mark.parametrize("said", [{"content": ""}, {"content": None}, {}], ids=str)
def test_a_tool_may_answer_nothing(said: dict[str, Any]) -> None:
    """As `mkdir` does."""
    row = {"messages": [USER, CALL, {"role": "tool"} | said, BOT]}
    assert checker(CHAT)(row)[2] is None
    assert to_example(row, CHAT.format, CHAT.columns)["messages"][2]["content"] == ""


@pytest.mark.parametrize(("weights", "trained"), [((0, 1), [3]), ((1, 0.0), [1]), ((None, 1), [1, 3]), ((0, 0), None)])
@pytest.mark.parametrize("spoken", [False, True], ids=["messages", "sharegpt"])
def test_an_answer_of_weight_0_does_not_train(
    weights: tuple[Any, Any], trained: list[int] | None, spoken: bool
) -> None:
    """OpenAI's guide to fine-tuning, "Multi-turn chat examples"."""
    turns = [("user", "2+2?"), ("assistant", "5"), ("user", "Sure?"), ("assistant", "4")]
    role, content = ("from", "value") if spoken else ("role", "content")
    name = "conversations" if spoken else "messages"
    row = {name: [{role: who, content: text} for who, text in turns]}
    for turn, weight in zip(row[name][1::2], weights, strict=True):
        turn["weight"] = weight
    found = DetectedFormat("sharegpt" if spoken else "messages", {name: name}, "")
    trouble = checker(found)(row)[2]
    assert (trouble is not None and trouble.refused) is (trained is None)
    if trained is not None:
        assert to_example(row, found.format, found.columns)["trained_messages"] == trained


def _answered(key: str, value: Any, *, spoken: bool, who: str = "assistant") -> tuple[Any, DetectedFormat]:
    """A conversation of two answers, with a key on the first message of `who`."""
    role, content, name = ("from", "value", "conversations") if spoken else ("role", "content", "messages")
    turns = [{role: "user", content: "2+2?"}, {role: "assistant", content: "5"}]
    turns += [{role: "user", content: "Sure?"}, {role: "assistant", content: "4"}]
    next(turn for turn in turns if turn[role] == who)[key] = value
    return {name: turns}, DetectedFormat(name if not spoken else "sharegpt", {name: name}, "")


# OpenAI's guide to fine-tuning, mistral-finetune's README (weight), ms-swift's "Custom dataset" (loss), axolotl's
# "Conversation" (train, and training, once its default), torchtune's Message (masked), verl's multi-turn SFT
# (loss_mask) and slime's mask_utils.py (step_loss_mask).
LEFT_OUT = [
    *(("weight", value) for value in (0, 0.0, False, "0", "0.0", "false")),
    ("loss", False),
    ("loss_scale", 0),
    ("loss_mask", 0),
    ("step_loss_mask", 0),
    ("train", False),
    ("training", "False"),
    ("masked", True),
    ("masked", 1),
]
KEPT = [("weight", "1"), ("loss", True), ("train", True), ("training", 1.0), ("masked", False), ("train", None)]


@pytest.mark.parametrize("spoken", [False, True], ids=["messages", "sharegpt"])
@pytest.mark.parametrize(("key", "value", "trained"), [*((*e, [3]) for e in LEFT_OUT), *((*e, [1, 3]) for e in KEPT)])
def test_an_answer_that_another_tool_would_leave_out_does_not_train(
    key: str, value: Any, trained: list[int], spoken: bool
) -> None:
    row, found = _answered(key, value, spoken=spoken)
    assert checker(found)(row)[2] is None
    assert to_example(row, found.format, found.columns)["trained_messages"] == trained


@pytest.mark.parametrize("spoken", [False, True], ids=["messages", "sharegpt"])
@pytest.mark.parametrize(
    ("key", "value", "who", "words"),
    [
        ("weight", 0.5, "assistant", "weight: 0.5 of a message is neither 0 nor 1"),
        ("weight", 2, "assistant", "weight: 2 of"),
        ("loss", 0.37, "assistant", "loss: 0.37 of"),
        ("loss_mask", [0, 1], "assistant", "loss_mask: [0, 1] of"),
        ("train", "no", "assistant", "train: 'no' of"),
        ("train_detail", [{"begin_offset": 0, "end_offset": 1, "train": True}], "assistant", "train_detail"),
        ("train", True, "user", "train: True of a message of another role than assistant"),
        ("masked", False, "user", "masked: False of"),
        ("loss_mask", 1, "user", "loss_mask: 1 of"),
    ],
)
def test_what_cannot_be_chosen_is_refused(key: str, value: Any, who: str, words: str, spoken: bool) -> None:
    """Each was trained whole, or not at all, without a word."""
    row, found = _answered(key, value, spoken=spoken, who=who)
    trouble = checker(found)(row)[2]
    assert trouble is not None and (trouble.kind, trouble.refused) == ("malformed", True)
    assert words in trouble.why


@pytest.mark.parametrize(("key", "value"), [("train", False), ("masked", True), ("weight", 1), ("loss", 0.37)])
def test_a_question_that_does_not_train_may_say_so(key: str, value: Any) -> None:
    row, found = _answered(key, value, spoken=False, who="user")
    assert checker(found)(row)[2] is None


def test_a_turn_of_sharegpt_keeps_its_other_keys() -> None:
    """As a message does: a template may write them, and what it leaves out is told."""
    row, found = _answered("reasoning_content", "I add.", spoken=True)
    answer = {"role": "assistant", "content": "5", "reasoning_content": "I add."}
    assert to_example(row, found.format, found.columns)["messages"][1] == answer


def test_keys_that_contradict_each_other_are_refused() -> None:
    row, found = _answered("weight", 0, spoken=False)
    row["messages"][1]["train"] = True
    trouble = checker(found)(row)[2]
    assert trouble is not None and "weight: 0, train: True of a message contradict each other" in trouble.why
    row["messages"][1]["train"] = False
    assert checker(found)(row)[2] is None


@pytest.mark.parametrize("calls", ["add(2)", '{"name": "add"}', {"name": "add"}, 4])
def test_calls_that_are_no_list_are_refused(calls: Any) -> None:
    """A template that looks at no calls would train an empty answer."""
    trouble = checker(CHAT)({"messages": [USER, {"role": "assistant", "content": "", "tool_calls": calls}]})[2]
    assert trouble is not None and trouble.refused and "tool_calls is" in trouble.why


def test_what_json_has_no_word_for_is_measured() -> None:
    """A time, as Parquet has them."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "at": datetime(2026, 1, 1)}]}
    assert checker(CHAT)({"messages": [USER, call, ANSWER, BOT]})[2] is None


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [("prompt_completion", "prompt", "completion"), ("question_answer", "question", "answer")],
)
def test_a_system_message_beside_a_prompt_is_measured_once(name: str, first: str, second: str) -> None:
    detected = DetectedFormat(name, {first: first, second: second, "system": "system"}, "")
    assert checker(detected)({first: "Ask!", second: "Say ä.", "system": "Be kind."})[0] == 4 + 7 + 8


@pytest.mark.parametrize("value", ["", "  ", None])
def test_an_empty_text_is_empty(value: Any) -> None:
    found = DetectedFormat("prompt_completion", {"prompt": "q", "completion": "a"}, "")
    trouble = checker(found)({"q": "2+2?", "a": value})[2]
    assert trouble is not None
    assert (trouble.kind, trouble.refused) == ("empty", True)


# Conversations of TRL's and transformers' own documentation are in order.
IN_ORDER = [
    "user assistant",
    "system user assistant",
    "developer user assistant",
    "user assistant user assistant",
    "user assistant tool assistant",
    "user assistant tool tool assistant user assistant",
    "user assistant tool assistant tool assistant",
    "user assistant function assistant",
    "user assistant tool user assistant",
    "user assistant tool",
]
OUT_OF_ORDER = [
    ("assistant user assistant", "assistant speaks first"),
    ("system assistant user", "assistant speaks first"),
    ("user user assistant", "two user messages in a row"),
    ("user assistant assistant", "two assistant messages in a row"),
    ("user system assistant", "a system message that is not the first"),
    ("system system user assistant", "a system message that is not the first"),
    ("user assistant user", "ends with the user"),
    ("user tool assistant", "a tool message after user"),
    ("tool assistant", "tool speaks first"),
    ("system", "a system message alone"),
]


@pytest.mark.parametrize("roles", IN_ORDER)
def test_valid_conversations_are_in_order(roles: str) -> None:
    assert role_trouble(tuple(roles.split())) == ""


@pytest.mark.parametrize(("roles", "why"), OUT_OF_ORDER)
def test_an_odd_order_is_named(roles: str, why: str) -> None:
    assert role_trouble(tuple(roles.split())) == why


def test_an_odd_order_is_remarked_and_not_refused() -> None:
    """Most templates take two messages of one speaker; only the tokenizer can say."""
    size, turns, trouble = checker(CHAT)({"messages": [USER, USER, BOT]})
    assert (size, turns) == (9, 3)
    assert trouble is not None
    assert (trouble.kind, trouble.refused) == ("wrong_role_order", False)


@pytest.mark.parametrize("role", ["agent", "bot", "context", "User"])
def test_a_role_that_templates_do_not_know_is_remarked_beside_an_answer(role: str) -> None:
    trouble = checker(CHAT)({"messages": [USER, {"role": role, "content": "It is late."}, BOT]})[2]
    assert trouble is not None
    assert (trouble.kind, trouble.refused) == ("unknown_role", False)
    assert repr(role) in trouble.why


@pytest.mark.parametrize("role", ["tool", "function", "ipython", "observation", "environment", "developer"])
def test_roles_of_published_templates_are_known(role: str) -> None:
    said = {"role": role, "content": "5"}
    rows = [said, USER, BOT] if role == "developer" else [USER, BOT, said, BOT]
    assert checker(CHAT)({"messages": rows})[2] is None


PAIRS = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, None),
        ({"prompt": [USER], "chosen": [BOT], "rejected": [BOT]}, None),
        ({"prompt": "q", "chosen": "a"}, "missing_column"),
        ({"prompt": "q", "chosen": "a", "rejected": " "}, "empty"),
        ({"prompt": "q", "chosen": [BOT], "rejected": [BOT]}, "malformed"),
        ({"prompt": "q", "chosen": 1, "rejected": 2}, "malformed"),
        ({}, "empty"),
    ],
    ids=str,
)
def test_rows_of_other_methods_are_whole(row: dict[str, Any], kind: str | None) -> None:
    trouble = column_checker(PAIRS)(row)[2]
    assert (trouble.kind if trouble else None) == kind


@pytest.mark.parametrize(("label", "kind"), [(True, None), (False, None), (1, "malformed"), ("true", "malformed")])
def test_a_label_is_true_or_false(label: Any, kind: str | None) -> None:
    columns = {"prompt": "prompt", "completion": "completion", "label": "label"}
    trouble = column_checker(columns)({"prompt": "q", "completion": "a", "label": label})[2]
    assert (trouble.kind if trouble else None) == kind


def test_a_picture_beside_a_missing_optional_column_is_found() -> None:
    """The row has as many columns as the format."""
    found = DetectedFormat("messages", {"messages": "messages", "tools": "tools"}, "")
    trouble = checker(found)({"messages": [USER, BOT], "image": "a.png"})[2]
    assert trouble is not None and trouble.kind == "not_text"


TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        (json.dumps([TOOL]), ""),
        ("[]", ""),
        ("", ""),
        ("the calculator", "tools is text that is not JSON"),
        (json.dumps(TOOL), "tools is not a list"),
        ('[{"name": "a", "name": "b"}]', "tools has the key 'name' twice in one object"),
    ],
)
def test_tools_may_be_json_text(tools: str, said: str) -> None:
    found = DetectedFormat("messages", {"messages": "messages", "tools": "tools"}, "")
    trouble = checker(found)({"messages": [USER, BOT], "tools": tools})[2]
    assert (trouble.why if trouble else "").startswith(said) and (trouble is None) == (not said)


@pytest.mark.parametrize("tools", [True, 5, TOOL, ["add"], [[TOOL]], '["add"]', {"a": 1}])
@pytest.mark.parametrize("pair", [{"messages": [USER, BOT]}, {"question": "2+2?", "answer": "4"}, PAIR])
def test_tools_that_no_template_reads_are_refused(tools: Any, pair: dict[str, Any]) -> None:
    """`true` ended `data` in a traceback, and the training refused the others after a plan that took them."""
    columns = {name: name for name in (*pair, "tools")}
    found = DetectedFormat(
        {"messages": "messages", "question": "question_answer"}.get(next(iter(pair)), PROMPTED), columns, ""
    )
    trouble = checker(found)(pair | {"tools": tools})[2]
    assert trouble is not None and trouble.refused and trouble.kind == "malformed" and "tool" in trouble.why
    for none in (None, [], "", " ", "[]", [TOOL], json.dumps([TOOL])):
        assert checker(found)(pair | {"tools": none})[2] is None


def test_a_call_that_is_text_is_refused_before_a_template_fails_on_it() -> None:
    """As columns of Arrow hold calls of several tools; templates write nothing of it, or call it undefined."""
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    found = DetectedFormat("messages", {"messages": "messages"}, "")
    for calls, refused in (([json.dumps(call)], True), ([call], False), (json.dumps([call]), False)):
        trouble = checker(found)({"messages": [USER, BOT | {"tool_calls": calls}]})[2]
        assert (trouble is not None and trouble.why == "tool_calls is not a list of objects") == refused


def test_what_stands_beside_texts_is_checked_as_a_chat_template_will_read_it() -> None:
    """The plan took them, because without a template nobody reads them, and the training then refused them."""
    found = DetectedFormat(PROMPTED, {name: name for name in (*PAIR, "system")}, "")
    for system in (["Be brief."], {"text": "Be brief."}, 1, True):
        trouble = checker(found)(PAIR | {"system": system})[2]
        assert trouble is not None and trouble.refused and trouble.why.startswith("system is ")
    for system in (None, "", "Be brief."):
        assert checker(found)(PAIR | {"system": system})[2] is None


@pytest.mark.parametrize(("value", "why"), [(0, "input is 0 and not text"), (0.0, "input is 0.0"), (1, "input is 1")])
def test_an_input_of_zero_is_no_absent_one(value: float, why: str) -> None:
    """Like other numbers it is refused: it was left out of the question, and `--fix` kept such rows alone."""
    found = DetectedFormat("instruction", {name: name for name in ("instruction", "input", "output")}, "")
    trouble = checker(found)({"instruction": "Square it.", "input": value, "output": "0"})[2]
    assert trouble is not None and trouble.why.startswith(why)


@pytest.mark.parametrize("instruction", ["", " ", None])
@pytest.mark.parametrize("given", ["2 + 2", "", None, 0])
def test_an_input_without_an_instruction_is_the_question(instruction: str | None, given: Any) -> None:
    """As rows of Alpaca's format have it. Without both there is no question."""
    columns = {name: name for name in ("instruction", "input", "output")}
    row = {"instruction": instruction, "input": given, "output": "4"}
    trouble = checker(DetectedFormat("instruction", columns, ""))(row)[2]
    if given == "2 + 2":
        assert trouble is None
        assert to_example(row, "instruction", columns)["messages"][0]["content"] == "2 + 2"
    else:
        said = "input is 0 and not text" if given == 0 else "instruction is empty"
        assert trouble is not None and trouble.refused and said in trouble.why


SPOKEN = DetectedFormat("sharegpt", {"conversations": "conversations", "tools": "tools"}, "")


@pytest.mark.parametrize("arguments", [{"a": 2}, '{"a": 2}'])
@pytest.mark.parametrize("several", [False, True])
def test_calls_of_llama_factory_are_calls(arguments: Any, several: bool) -> None:
    """A turn `function_call` holds JSON of a call, or of a list, and `observation` what the tool answered."""
    calls = [{"name": "add", "arguments": arguments}] * (1 + several)
    said = [("human", "2+2?"), ("function_call", json.dumps(calls if several else calls[0])), ("observation", "4")]
    turns = [{"from": speaker, "value": value} for speaker, value in (*said, ("gpt", "It is 4."))]
    row = {"conversations": turns, "tools": json.dumps([TOOL])}
    assert checker(SPOKEN)(row)[2] is None
    example = to_example(row, SPOKEN.format, SPOKEN.columns)
    assert example["messages"] == [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call} for call in calls]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]
    assert example["trained_messages"] == [1, 3]


@pytest.mark.parametrize(
    "text", ["add(2)", "[]", "4", '{"arguments": {}}', '["add"]', '{"name": "add", "arguments": "2"}', ""]
)
def test_a_function_call_that_is_none_is_refused(text: str) -> None:
    turns = [
        {"from": "human", "value": "2+2?"},
        {"from": "function_call", "value": text},
        {"from": "gpt", "value": "4"},
    ]
    trouble = checker(SPOKEN)({"conversations": turns})[2]
    assert trouble is not None and trouble.refused
