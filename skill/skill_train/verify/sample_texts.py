"""What is compared: the user's held-out rows, or built-in texts when there are none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from skill_train.core.foreign import JsonObject
from skill_train.llama.template import Conversation
from skill_train.reference.load import NEUTRAL_TEXTS, context_length
from skill_train.run.train_record import Row
from skill_train.verify.check_template import CONVERSATIONS, render_reference

PROMPTS = 4
_LARGE = 250_000_000  # weights: from here on a token costs the reference and three files 50 ms of a core, or more
_LONGEST = 512  # tokens of one text: longer ones would measure few texts
_FEWEST = 128  # below this built-in texts are added


@dataclass(frozen=True)
class Sample:
    """How much is asked: tokens whose logits are compared with the tuned model, of those in quantized files, and with
    the base; prompts, and tokens of each answer."""

    tokens: int = 2048
    quantized_tokens: int = 2048
    base_tokens: int = 256
    prompts: int = PROMPTS
    answer_tokens: int = 32


def sample_of(weights: int, tokens: int | None) -> Sample:
    """The sample for a model of so many weights; `tokens` are the user's. What a sample cannot tell is in the width of
    its intervals, which the proof states; a wrong file is off by ten widths of the small one. Quantized files of large
    models get half: what is right for them is a hundred times coarser than what is for an unquantized one."""
    large = Sample(tokens=256, quantized_tokens=128, base_tokens=64, prompts=2, answer_tokens=16)
    chosen = Sample() if weights <= _LARGE else large
    return chosen if tokens is None else replace(chosen, tokens=tokens, quantized_tokens=tokens)


def texts(rows: list[Row], *, tokenizer: Any, config: JsonObject, most: int) -> list[list[int]]:
    """Token ids to compare logits on, at most `most` in all: of rows in their order, then of built-in texts if few."""
    longest = min(_LONGEST, (context_length(config) or _LONGEST))
    chosen = _fill([row["input_ids"] for row in rows], longest, most)
    if sum(map(len, chosen)) >= min(_FEWEST, most):
        return chosen
    built_in = _chats(tokenizer, generation_prompt=False)
    built_in += [tokenizer(text).input_ids for text in NEUTRAL_TEXTS]
    return _fill([*chosen, *built_in], longest, most)


def prompts(rows: list[Row], *, tokenizer: Any, config: JsonObject, sample: Sample) -> list[list[int]]:
    """Token ids of a few prompts to answer: the short ones of some rows, or built in."""
    made = [ids for row in rows[: 4 * sample.prompts] if (ids := _prompt(row, tokenizer))]
    if not made:
        made = _chats(tokenizer, generation_prompt=True) or [_half(tokenizer(text).input_ids) for text in NEUTRAL_TEXTS]
    room = min(2 * _LONGEST, (context_length(config) or _LONGEST) - sample.answer_tokens)
    return sorted((ids for ids in made if 0 < len(ids) <= room), key=len)[: sample.prompts]


def _fill(sequences: list[list[int]], longest: int, most: int) -> list[list[int]]:
    chosen: list[list[int]] = []
    for ids in sequences:
        room = most - sum(map(len, chosen))
        cut = ids[: min(longest, room)]
        if len(cut) > 1:  # a single token has nothing that follows it
            chosen.append(cut)
    return chosen


def _chats(tokenizer: Any, *, generation_prompt: bool) -> list[list[int]]:
    if not tokenizer.chat_template:
        return []
    wanted = [one for one in CONVERSATIONS if one.add_generation_prompt is generation_prompt]
    rendered = [one.text for one in render_reference(tokenizer, wanted) if one.text is not None]
    return [tokenizer(text, add_special_tokens=False).input_ids for text in rendered]


def _prompt(row: Row, tokenizer: Any) -> list[int]:
    """What comes before the last answer of a row; empty when there is no answer to give."""
    if row["kind"] == "completion":
        return list(tokenizer(row["prompt"]).input_ids)
    if row["kind"] != "chat":
        return _half(row["input_ids"])
    roles = [message["role"] for message in row["messages"]]
    if "assistant" not in roles:
        return []
    last = len(roles) - 1 - roles[::-1].index("assistant")
    if not last:
        return []
    [rendered] = render_reference(tokenizer, [Conversation(row["messages"][:last], row.get("tools"), True)])
    return [] if rendered.text is None else tokenizer(rendered.text, add_special_tokens=False).input_ids


def _half(ids: list[int]) -> list[int]:
    return ids[: max(1, len(ids) // 2)]
