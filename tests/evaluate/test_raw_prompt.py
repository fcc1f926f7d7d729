"""A prompt that is continued as it stands, `chat --raw`, begins once, also where its text begins with the token."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

import gguf_maker
import tiny
from skill_train.evaluate.chat.prompts import GgufPrompts, ids_of
from skill_train.llama.gguf_header import read_gguf

pytestmark = pytest.mark.slow


def test_a_text_that_begins_itself_gets_no_second_beginning() -> None:
    prompts = GgufPrompts(read_gguf(gguf_maker.exported("gemma").file("f16")), None, raw=True)
    tokenizer = AutoTokenizer.from_pretrained(tiny.cached("gemma"))
    plain = [tokenizer.bos_token_id, *tokenizer("Two and two", add_special_tokens=False).input_ids]
    for text, adds in (("Two and two", True), ("<bos>Two and two", False)):
        assert prompts.adds_special(text) is adds
        assert ids_of(tokenizer, text, raw=True) == plain
