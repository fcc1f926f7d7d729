"""The texts of a proof: the user's held-out rows, or built-in texts when there are none."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from skill_train.facts import JsonObject
from skill_train.llama.template import Conversation, before_last_answer, render_reference
from skill_train.program.tokenizer import begins_itself
from skill_train.reference.load import NEUTRAL_TEXTS, bounded, context_length
from skill_train.run.train_record import Row
from skill_train.verify.check_template import CONVERSATIONS

PROMPTS = 4
_LARGE = 250_000_000  # weights of a model where one token costs the reference and three files 50 ms of a core
_LONGEST = 512  # tokens of one text; with longer ones few texts would be measured
_FEWEST = 128  # below this built-in texts are added


@dataclass(frozen=True)
class Sample:
    """How much is asked."""

    tokens: int = 2048  # whose logits are compared with the tuned model
    quantized_tokens: int = 2048  # of those, the ones for quantized files
    base_tokens: int = 256  # whose logits are compared with the base
    prompts: int = PROMPTS
    answer_tokens: int = 32  # of each answer, at most


def sample_of(weights: int, tokens: int | None) -> Sample:
    """The sample for a model of so many weights. `tokens` is the user's own number.

    A small sample has wide intervals, which the proof states. A wrong file is off by ten widths of the small sample.
    Quantized files of large models get half as many tokens, because their bounds are a hundred times wider than those
    of unquantized files.
    """
    large = Sample(tokens=256, quantized_tokens=128, base_tokens=64, prompts=2, answer_tokens=16)
    chosen = Sample() if weights <= _LARGE else large
    return chosen if tokens is None else replace(chosen, tokens=tokens, quantized_tokens=tokens)


def texts(rows: list[Row], *, tokenizer: Any, config: JsonObject, most: int) -> list[list[int]]:
    """Token ids whose logits are compared, at most `most` in all: from the rows in order, then from built-in texts."""
    longest = min(_LONGEST, (context_length(config) or _LONGEST))
    chosen = bounded([row["input_ids"] for row in rows], longest, most)
    if sum(map(len, chosen)) >= min(_FEWEST, most):
        return chosen
    built_in = _chats(tokenizer, generation_prompt=False)
    built_in += [tokenizer(text).input_ids for text in NEUTRAL_TEXTS]
    return bounded([*chosen, *built_in], longest, most)


def prompts(rows: list[Row], *, tokenizer: Any, config: JsonObject, sample: Sample) -> list[list[int]]:
    """Token ids of a few prompts to answer: the shortest of some rows, or built-in ones where no row's fits."""
    room = min(2 * _LONGEST, (context_length(config) or _LONGEST) - sample.answer_tokens)

    def fitting(candidates: Iterable[list[int]]) -> list[list[int]]:
        return sorted((ids for ids in candidates if 0 < len(ids) <= room), key=len)[: sample.prompts]

    return (
        fitting(_prompt(row, tokenizer) for row in rows[: 4 * sample.prompts])
        or fitting(_chats(tokenizer, generation_prompt=True))
        or fitting(_half(tokenizer(text).input_ids) for text in NEUTRAL_TEXTS)
    )


def _chats(tokenizer: Any, *, generation_prompt: bool) -> list[list[int]]:
    if not tokenizer.chat_template:
        return []
    conversations = [
        conversation for conversation in CONVERSATIONS if conversation.add_generation_prompt is generation_prompt
    ]
    rendered = [
        rendering.text for rendering in render_reference(tokenizer, conversations) if rendering.text is not None
    ]
    return [tokenizer(text, add_special_tokens=False).input_ids for text in rendered]


def _prompt(row: Row, tokenizer: Any) -> list[int]:
    """The tokens before the last answer of a row; empty when the row has no answer."""
    if row["kind"] == "completion":
        adds = not begins_itself(row["prompt"], tokenizer.bos_token)
        return list(tokenizer(row["prompt"], add_special_tokens=adds).input_ids)
    if row["kind"] != "chat":
        return _half(row["input_ids"])
    before = before_last_answer(row["messages"])
    if not before:
        return []
    [rendered] = render_reference(tokenizer, [Conversation(before, row.get("tools"), True)])
    return [] if rendered.text is None else tokenizer(rendered.text, add_special_tokens=False).input_ids


def _half(ids: list[int]) -> list[int]:
    return ids[: max(1, len(ids) // 2)]
