"""Keys of a message with which its author chooses what is trained, as other tools read them."""

import re
from typing import Any

from skill_train.program.events import Refused

# The tools that read these keys, in the order of the keys. Of answers: OpenAI and mistral-finetune; ms-swift; slime;
# others. Of all roles: axolotl (the second was its default); torchtune; verl; others. Of parts of a text: axolotl.
ANSWER_KEYS = ("weight", "loss", "loss_scale", "step_loss_mask", "loss_weight")
MESSAGE_KEYS = ("train", "training", "masked", "loss_mask", "trainable")
SPAN_KEYS = ("train_detail", "training_detail")
# Columns that rate a row as good or bad; the last one is LLaMA-Factory's.
VERDICTS = ("label", "desirable", "preferred", "liked", "thumbs_up", "is_good", "kto_tag")
ROW_MARKS = {*ANSWER_KEYS, *MESSAGE_KEYS, *VERDICTS}
NOTHING_LEFT = "nothing is left to learn from"
YES_OR_NO = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}


def is_left_out(message: Any) -> bool:
    """Whether the author of an answer leaves it out of the training. Keys that cannot be followed, or that contradict
    each other, are refused."""
    is_answer = message["role"] == "assistant"
    if is_answer and message.get("mask") is not None:
        raise cannot(message, ["mask"], "may mean that it trains, or that it does not")
    if is_answer and message.get("channel") == "analysis":
        raise cannot(message, ["channel"], "marks thoughts, which would be trained as an answer")
    names = [*ANSWER_KEYS, *MESSAGE_KEYS] if is_answer else MESSAGE_KEYS
    choices = {name: str(message[name]).strip().lower() for name in names if message.get(name) is not None}
    if odd := [name for name, value in choices.items() if value not in YES_OR_NO]:
        raise cannot(message, odd, "is neither 0 nor 1")
    trained = [name for name, value in choices.items() if YES_OR_NO[value] != (name == "masked")]
    if trained and not is_answer:
        raise cannot(message, trained, "of another role than assistant trains")
    if trained and len(trained) < len(choices):
        raise cannot(message, list(choices), "contradict each other")
    left_out = bool(choices) and not trained
    if is_answer and not left_out and (spans := [name for name in SPAN_KEYS if message.get(name)]):
        raise cannot(message, spans, "chooses parts of an answer")
    return left_out and is_answer


def marks(name: str, row: Any) -> list[bool]:
    """Whether a column says that its row, or each of the row's messages, trains. Empty for a column that says nothing
    about it. A `label` of 0 is a verdict only beside the other columns of KTO; elsewhere it may be a class."""
    words = re.findall(r"[\w.]+", str(row.get(name)).lower()) if name in ROW_MARKS else []
    if name in VERDICTS:
        kto = {"prompt", "completion", "label"} <= row.keys()
        return [False] if words in [["false"], *([["0"], ["0.0"]] if kto else [])] else []
    values = [YES_OR_NO.get(word) for word in words]
    return [] if None in values else [each != (name == "masked") for each in values]


def all_left_out(messages: list[Any]) -> Refused | None:
    """The refusal of a conversation whose answers are all left out; None if it has no answers."""
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        return None
    choice = next(f"{name}: {answers[-1][name]}" for name in (*ANSWER_KEYS, *MESSAGE_KEYS) if name in answers[-1])
    return Refused(
        f"every answer of a row is left out by its author ({choice[:60]}), so {NOTHING_LEFT}",
        code="bad_row",
        expected="an answer that trains",
        got=repr(answers[-1])[:80],
    )


def cannot(message: Any, keys: list[str], why: str) -> Refused:
    choices = ", ".join(f"{name}: {message[name]!r}"[:60] for name in keys)
    return Refused(
        f"{choices} of a message {why}",
        code="bad_row",
        expected="0 or 1, true or false, for a whole answer",
        got=repr(message)[:80],
        hint="correct or remove the key in the rows; without it every answer is trained, and nothing else",
    )
