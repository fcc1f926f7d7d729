"""The reference, what it says, and what to ask llama.cpp about a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skill_train import verify_template as template
from skill_train import verify_tokens
from skill_train.reference import load_tokenizer, stop_ids
from skill_train.verify_reference import Measured, measure
from skill_train.verify_texts import Sample, prompts, texts

_ROWS = 64  # rows whose tokens are compared


@dataclass(frozen=True)
class Subject:
    """One reference, measured.

    Attributes:
        stops: ids that end an answer.
        rows: as the trainer was fed them, the first few.
        texts: strings whose tokens are compared.
        rendered: `conversations` by the reference's chat template; None without one.
    """

    reference: Path
    adapter: Path | None
    config: dict[str, Any]
    tokenizer: Any
    stops: set[int]
    rows: list[dict[str, Any]]
    texts: list[str]
    rendered: list[dict[str, str]] | None
    measured: Measured

    @property
    def conversations(self) -> list[dict[str, Any]]:
        return [*template.CONVERSATIONS, *template.row_conversations(self.rows)]

    @property
    def samples(self) -> dict[str, int]:
        return {
            "tokens": sum(len(s.ids) for s in self.measured.sequences),
            "texts": len(self.texts),
            "rows": len(self.rows),
            "conversations": len(self.conversations),
            "answers": len(self.measured.answers),
        }


def subject_of(
    reference: Path,
    *,
    adapter: Path | None,
    base: Path | None,
    rows: list[dict[str, Any]],
    held_out: list[dict[str, Any]],
    sample: Sample,
    folder: Path,
    also: Callable[[Any], None] = lambda model: None,
    ask: Callable[[list[list[int]], int], Callable[[], list[list[int]]]] = lambda prompts, most: list,
) -> Subject:
    """Measures the reference; its logits go into `folder`, which must outlive the subject.

    Args:
        also: sees the model.
        ask: has the prompts, and how many tokens to answer, before the model is read; returns `measure`'s `drafts`.
    """
    config = json.loads((reference / "config.json").read_text(encoding="utf-8"))
    tokenizer = load_tokenizer(reference)
    stops = stop_ids(reference, tokenizer)
    asked = prompts(held_out, tokenizer=tokenizer, config=config, sample=sample)
    drafts = ask(asked, sample.answer_tokens)
    measured = measure(
        reference,
        adapter=adapter,
        base=base,
        texts=texts(held_out, tokenizer=tokenizer, config=config, most=sample.tokens),
        prompts=asked,
        stops=stops,
        sample=sample,
        folder=folder,
        also=also,
        drafts=drafts,
    )
    rows = rows[:_ROWS]
    conversations = [*template.CONVERSATIONS, *template.row_conversations(rows)]
    rendered = template.render_reference(tokenizer, conversations) if tokenizer.chat_template else None
    strings = verify_tokens.with_composed_forms(
        [
            *(row["rendered"] for row in rows),
            *(one["text"] for one in (rendered or [])[: len(template.CONVERSATIONS)] if "text" in one),
            *verify_tokens.HARD_STRINGS,
            *verify_tokens.special_strings(tokenizer),
        ]
    )
    return Subject(reference, adapter, config, tokenizer, stops, rows, strings, rendered, measured)
