"""Rows as a training run keeps them, of the tiny conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

import tiny


def chats(base: Path, count: int, *, system: str | None = None) -> list[dict[str, Any]]:
    """Conversations that the model's template accepts, with the ids that it makes of them."""
    tokenizer = AutoTokenizer.from_pretrained(str(base))
    return [_chat(tokenizer, number, row["messages"], system) for number, row in enumerate(tiny.rows(count))]


def _chat(tokenizer: Any, number: int, messages: list[dict[str, str]], system: str | None) -> dict[str, Any]:
    said = [message for message in messages if message["role"] != "system"]
    messages = [{"role": "system", "content": system}, *said] if system else messages
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    ids = tokenizer(rendered, add_special_tokens=False).input_ids
    return {
        "row": number,
        "line": number + 1,
        "kind": "chat",
        "messages": messages,
        "tools": None,
        "rendered": rendered,
        "input_ids": ids,
        "labels": ids,
        "truncated": False,
        "full_length": len(ids),
    }


def texts(base: Path, count: int) -> list[dict[str, Any]]:
    """The same conversations as plain text and as prompt and completion, in turns."""
    tokenizer = AutoTokenizer.from_pretrained(str(base))
    made = []
    for number, row in enumerate(tiny.rows(count)):
        prompt, completion = (message["content"] for message in row["messages"][-2:])
        parts = {"kind": "completion", "prompt": prompt + "\n", "completion": completion}
        whole = {"kind": "text", "text": prompt + "\n" + completion}
        rendered = prompt + "\n" + completion
        ids = [*tokenizer(rendered).input_ids, tokenizer.eos_token_id]
        kept = {"row": number, "line": number + 1, "rendered": rendered, "input_ids": ids, "labels": ids}
        kept |= {"truncated": False, "full_length": len(ids)}
        made.append({**kept, **(parts if number % 2 else whole)})
    return made
