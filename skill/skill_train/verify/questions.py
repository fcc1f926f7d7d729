"""The questions of a proof: texts and prompts for the reference and llama.cpp, and what the reference makes of them."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from skill_train.facts import JsonObject
from skill_train.llama.template import Conversation, Rendered, render_reference
from skill_train.model.folder import read_config
from skill_train.reference.load import generation_config, load_tokenizer, stop_ids
from skill_train.run.train_record import Row
from skill_train.verify import check_template, check_tokens
from skill_train.verify.metadata.vocabulary import Files, read_files
from skill_train.verify.reference_answers import MeasureRequest, ReferenceMeasurements
from skill_train.verify.sample_texts import Sample, prompts, texts

_ROWS = 64  # rows whose tokens are compared


@dataclass(frozen=True)
class Questions(MeasureRequest):
    """What is asked about one reference. Nothing here needs its weights."""

    folder: Path  # the model; `adapter` is put on top of it
    adapter: Path | None
    config: JsonObject
    tokenizer: Any
    rows: list[Row]  # the first rows as the trainer was fed them
    texts: list[str]  # strings whose tokens are compared
    rendered: list[Rendered] | None  # `conversations` by the reference's chat template; None without one

    @property
    def conversations(self) -> list[Conversation]:
        return [*check_template.CONVERSATIONS, *check_template.row_conversations(self.rows)]


@dataclass(frozen=True)
class MeasuredReference(Questions):
    """The questions about one reference, with its own measurements."""

    measured: ReferenceMeasurements

    @cached_property
    def vocabulary(self) -> list[str | None]:
        """Tokens by id. They are read once, because a tokenizer takes long to list them."""
        tokens: list[str | None] = self.tokenizer.convert_ids_to_tokens(list(range(len(self.tokenizer))))
        return tokens

    @cached_property
    def generation(self) -> JsonObject:
        return generation_config(self.folder)

    @cached_property
    def files(self) -> Files:
        """The reference's tokenizer files."""
        return read_files(self.folder)

    @property
    def samples(self) -> dict[str, int]:
        return {
            "tokens": sum(map(len, self.sequences)),
            "texts": len(self.texts),
            "rows": len(self.rows),
            "conversations": len(self.conversations),
            "answers": len(self.measured.answers),
        }


def questions_of(
    reference: Path, *, adapter: Path | None, rows: list[Row], held_out: list[Row], sample: Sample
) -> Questions:
    config = read_config(reference)
    tokenizer = load_tokenizer(reference)
    rows = rows[:_ROWS]
    conversations = [*check_template.CONVERSATIONS, *check_template.row_conversations(rows)]
    rendered = render_reference(tokenizer, conversations) if tokenizer.chat_template else None
    strings = check_tokens.with_composed_forms(
        [
            *(row["rendered"] for row in rows),
            *(
                rendering.text
                for rendering in (rendered or [])[: len(check_template.CONVERSATIONS)]
                if rendering.text is not None
            ),
            *check_tokens.HARD_STRINGS,
            *check_tokens.special_strings(tokenizer),
            *check_tokens.strings_of_spaced_tokens(tokenizer),
        ]
    )
    return Questions(
        texts(held_out, tokenizer=tokenizer, config=config, most=sample.tokens),
        prompts(held_out, tokenizer=tokenizer, config=config, sample=sample),
        stop_ids(reference, tokenizer, adapter),
        sample,
        reference,
        adapter,
        config,
        tokenizer,
        rows,
        strings,
        rendered,
    )
