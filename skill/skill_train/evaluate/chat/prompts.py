"""Writes the prompt of a chat, with the model's template or from the raw text.

A GGUF file is asked with its own template. For each conversation, the prompt of llama-cpp-python is compared with the
prompt of transformers, because a model answers differently to another prompt than it was trained on.
"""

import unicodedata
from functools import partial
from typing import Any

from skill_train.core.errors import UsageError, VerificationFailed
from skill_train.facts import JsonObject
from skill_train.llama.gguf_header import GgufFile
from skill_train.llama.template import Conversation, Rendered, by_tokenizer, render_with, rendered_by, special_texts
from skill_train.model.template_guard_worker import require_ending
from skill_train.program.tokenizer import begins_itself

_AROUND = 30  # characters shown before and after a difference


class FolderPrompts:
    def __init__(self, tokenizer: Any, *, raw: bool) -> None:
        if not raw and not tokenizer.chat_template:
            raise _no_template(tokenizer.name_or_path)
        self.tokenizer, self.raw = tokenizer, raw

    def text(self, messages: list[JsonObject]) -> str:
        if self.raw:
            return _as_it_stands(messages[-1]["content"])
        return _text(rendered_by(partial(by_tokenizer, self.tokenizer), Conversation(messages, None, True)))

    def ids(self, text: str) -> list[int]:
        return ids_of(self.tokenizer, text, raw=self.raw)


class GgufPrompts:
    """Prompts for a GGUF file, by its own template.

    Args:
        tokenizer: the tokenizer of the model that the file was made from; None if it is unknown.
    """

    def __init__(self, gguf: GgufFile, tokenizer: Any, *, raw: bool) -> None:
        template = gguf.metadata.get("tokenizer.chat_template")
        if not raw:
            if not isinstance(template, str) or not template.strip():
                raise _no_template(gguf.path, template)
            require_ending(template)
        self.gguf, self.template, self.tokenizer, self.raw = gguf, str(template), tokenizer, raw

    def text(self, messages: list[JsonObject]) -> str:
        """The prompt before an answer.

        Raises:
            UsageError: the template refuses the conversation.
            VerificationFailed: llama-cpp-python and transformers render different prompts.
        """
        if self.raw:
            return _as_it_stands(messages[-1]["content"])
        text = _text(self.alike([Conversation(messages, None, True)])[0])
        return unicodedata.normalize("NFC", text) if self.composes else text

    @property
    def composes(self) -> bool:
        """Whether the model's tokenizer normalizes text to NFC. llama.cpp does not, so the caller must."""
        return self.tokenizer is not None and composes(self.tokenizer)

    def alike(self, conversations: list[Conversation]) -> list[Rendered]:
        """Renders each conversation, and checks that llama-cpp-python and transformers agree.

        Raises:
            VerificationFailed: llama-cpp-python and transformers render different prompts.
        """
        own = render_with(self.template, self.gguf, conversations)
        if isinstance(own, str):
            raise _refused(own)
        for conversation, rendered in zip(conversations, own, strict=True):
            expected = rendered_by(self._render, conversation)
            if rendered.text != expected.text:
                raise _differs(self.gguf, rendered, expected)
        return own

    def ids(self, text: str) -> list[int] | None:
        """The ids of a prompt by the model's tokenizer; None if the tokenizer is unknown."""
        return None if self.tokenizer is None else ids_of(self.tokenizer, text, raw=self.raw)

    def adds_special(self, text: str) -> bool:
        """Whether llama.cpp must add special tokens: only to a raw text that does not begin with BOS."""
        return self.raw and not begins_itself(text, special_texts(self.gguf)[0])

    def _render(self, conversation: Conversation) -> str:
        if self.tokenizer is not None:
            return by_tokenizer(self.tokenizer, conversation)
        from transformers.utils.chat_template_utils import render_jinja_template

        bos, eos = special_texts(self.gguf)
        texts, _ = render_jinja_template(
            [conversation.messages],
            tools=conversation.tools,
            chat_template=self.template,
            add_generation_prompt=conversation.add_generation_prompt,
            bos_token=bos,
            eos_token=eos,
        )
        return str(texts[0])


def composes(tokenizer: Any) -> bool:
    """Whether the tokenizer normalizes text to NFC."""
    parts, whole = (tokenizer(text, add_special_tokens=False).input_ids for text in ("e\u0301", "\u00e9"))
    return bool(parts == whole)


def ids_of(tokenizer: Any, text: str, *, raw: bool) -> list[int]:
    """The ids of a prompt. A template writes its own special tokens. A raw text gets the tokenizer's special tokens,
    but no EOS, unless it already begins with BOS."""
    raw = raw and not begins_itself(text, tokenizer.bos_token)
    ids = list(tokenizer(text, add_special_tokens=raw)["input_ids"])
    bare = list(tokenizer(text, add_special_tokens=False)["input_ids"]) if raw else ids
    added_end = raw and len(ids) > len(bare) and ids[-1] == tokenizer.eos_token_id and ids[-1:] != bare[-1:]
    return ids[:-1] if added_end else ids


def _differs(gguf: GgufFile, own: Rendered, expected: Rendered) -> VerificationFailed:
    both = (own.text or "", expected.text or "")
    return VerificationFailed(
        f"the chat template in {gguf.path.name} does not write the prompt that transformers writes",
        code="template_mismatch",
        expected=f"refused: {expected.refused}" if expected.text is None else _end(both[1], both[0]),
        got=f"refused: {own.refused}" if own.text is None else _end(*both),
        hint="export the file again: skill-train export-gguf RUN",
    )


def _text(rendered: Rendered) -> str:
    if rendered.text is None:
        raise _refused(rendered.refused)
    return rendered.text


def _refused(why: str) -> UsageError:
    return UsageError(
        "the chat template refuses the conversation",
        code="template_mismatch",
        expected="roles and contents that the template takes",
        got=why[:300],
        hint="ask without --system, or in one turn",
    )


def _no_template(where: object, template: object = None) -> UsageError:
    kind = "missing" if template is None else "empty" if isinstance(template, str) else f"no text but {template!r}"[:80]
    return UsageError(
        f"{where} has no chat template",
        code="no_chat_template",
        expected="a file with the template that the model was trained with",
        got=f"tokenizer.chat_template is {kind}: other programs put a template of their own in its place",
        hint="add --raw to let the model continue your text as it stands",
    )


def _as_it_stands(content: str | list[JsonObject]) -> str:
    """The text of a message. A message with pictures is a list of text parts, with the pictures' marks in the texts."""
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)


def _end(text: str, other: str) -> str:
    """The part of a text around its first difference from another one."""
    at = next((place for place, pair in enumerate(zip(text, other, strict=False)) if pair[0] != pair[1]), None)
    at = min(len(text), len(other)) if at is None else at
    return f"at character {at}: {text[max(0, at - _AROUND) : at + _AROUND]!r}"
