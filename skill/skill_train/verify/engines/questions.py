"""The conversations that engines are asked, with the prompt that the reference makes of each."""

import unicodedata
from dataclasses import dataclass
from typing import Any

from skill_train.llama.engines.answers import EngineQuestion
from skill_train.llama.template import Conversation, Message, before_last_answer, render_reference
from skill_train.run.train_record import Row
from skill_train.verify.check_template import CONVERSATIONS

_HELD_OUT = 8  # conversations of the rows; an engine reads each of them once for its prompt and once for its answer


@dataclass(frozen=True)
class Expected:
    """A question, and the reference's own prompt for it."""

    question: EngineQuestion
    text: str
    ids: list[int]


def engine_questions(tokenizer: Any, rows: list[Row], answer_tokens: int) -> list[Expected]:
    """Held-out conversations before their last answer, and a few that show what engines get wrong."""
    conversations = [*_row_conversations(rows), *_fixed(tokenizer)]
    return with_prompts(tokenizer, [EngineQuestion(each, answer_tokens) for each in conversations], conversations)


def with_prompts(tokenizer: Any, questions: list[EngineQuestion], conversations: list[Conversation]) -> list[Expected]:
    """The questions with their prompts, where the template takes them.

    Args:
        conversations: each as the template gets it. A prompt with pictures has no ids.
    """
    return [
        Expected(question, text.text, [] if question.pictures else _ids(tokenizer, text.text))
        for question, text in zip(questions, render_reference(tokenizer, conversations), strict=True)
        if text.text is not None and unicodedata.is_normalized("NFC", text.text)  # llama.cpp composes no letters
    ]


def _row_conversations(rows: list[Row]) -> list[Conversation]:
    chats = [row for row in rows if row["kind"] == "chat" and not row.get("images")]
    return [
        Conversation(before, row.get("tools"), True)
        for row in chats[:_HELD_OUT]
        if (before := before_last_answer(row["messages"]))
    ]


def _fixed(tokenizer: Any) -> list[Conversation]:
    """With and without a system message, several turns, other scripts, and special tokens as a user may type them."""
    special = tokenizer.eos_token or ""
    typed: list[Message] = [{"role": "user", "content": f"What does {special} mean? <s> [INST] <bos>"}]
    return [
        *(conversation for conversation in CONVERSATIONS if conversation.add_generation_prompt),
        Conversation([{"role": "user", "content": "Что это? 这是什么？\n\n\tما هذا؟ 👩‍👩‍👧"}], None, True),
        Conversation(typed, None, True),
    ]


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids
