"""Where an engine's answer leaves the file's own, from what each engine tells of its tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import gguf_maker
from skill_train.llama.engines.answers import EngineAnswer, EngineQuestion
from skill_train.llama.gguf_header import read_gguf
from skill_train.llama.template import Conversation
from skill_train.reference.load import load_tokenizer
from skill_train.verify.engines import partings
from skill_train.verify.engines.partings import Parting, Vocabulary, _ends_inside, compare, unlike
from skill_train.verify.engines.questions import Expected

pytestmark = pytest.mark.slow

PROMPT = [5, 6]
EXPECTED = Expected(EngineQuestion(Conversation([], None, True), 4), "", PROMPT)


@cache
def words(kind: str) -> Vocabulary:
    made = gguf_maker.exported(kind)
    return Vocabulary(load_tokenizer(made.merged), read_gguf(made.file("f16")))


def ids(kind: str, *pieces: str) -> list[int]:
    """Tokens by their spelling in the file."""
    texts = words(kind).gguf.strings("tokenizer.ggml.tokens")
    return [texts.index(piece) for piece in pieces]


def parted(kind: str, own: list[int], **answer: Any) -> tuple[Parting | None, str]:
    return compare(EngineAnswer(**{"stopped": len(own) < 4} | answer), own, EXPECTED, words(kind))


def test_tokens_are_compared_as_they_are() -> None:
    own = ids("llama-spm", "▁Die", "▁wait", "ed", "▁for")
    other = ids("llama-spm", "▁Die", "▁wait", "ing", "▁for")
    assert parted("llama-spm", own, tokens=own, text=" Die waited for") == (None, "")
    assert parted("llama-spm", own, tokens=[*own, 7], text="Die waited for it") == (None, "")  # more than was asked for
    assert parted("llama-spm", own, tokens=other)[0] == Parting([*PROMPT, *own[:2]], own[2], other[2])
    assert "it ends after 'Die wait'" in parted("llama-spm", own, tokens=own[:2])[1]
    assert "it goes on after 'Die wait': 'ed'" in parted("llama-spm", own[:2], tokens=own[:3])[1]
    goes_on = parted("llama-spm", own[:2], tokens=own[:2], text="Die wait", stopped=False)
    assert "it goes on after 'Die wait', where" in goes_on[1]


@pytest.mark.parametrize(
    ("own", "answer", "parting"),
    [
        (("▁Die", "▁wait", "</s>"), {"tokens": ("▁Die", "▁wait", "ed")}, (2, "</s>", "ed")),
        (("▁Die", "▁wait", "</s>"), {"text": "Die wait for"}, (2, "</s>", "▁for")),
        (("▁Die", "▁wait", "ed", "▁for"), {"tokens": ("▁Die", "▁wait")}, (2, "ed", "</s>")),
        (("▁Die", "▁wait", "ed", "▁for"), {"text": "Die wait"}, (2, "ed", "</s>")),
        (("▁Die", "▁wait", "</s>"), {"tokens": ("▁Die", "▁wait", "</s>", "ed")}, None),  # it passes over the end
    ],
)
def test_an_end_that_is_as_likely_as_another_token_is_no_fault(
    own: tuple[str, ...], answer: dict[str, Any], parting: tuple[int, str, str] | None
) -> None:
    """llama.cpp's server, with keys and values in f16, went on where the file prefers its end by 0.009 nats."""
    kind, texts = "llama-spm", answer.get("tokens")
    told = EngineAnswer(**{"stopped": True, **answer} | ({"tokens": ids(kind, *texts)} if texts else {}))
    known = replace(words(kind), ends=frozenset(ids(kind, "</s>")))
    found, ends = partings.parted([(told, ids(kind, *own), EXPECTED)], known)
    assert found == [] and len(ends) == 1
    if parting is None:
        assert ends[0].choices == [] and len(unlike(ends, 0.1, lambda choices: [])) == 1
        return
    place, first, second = parting
    before = [*PROMPT, *ids(kind, *own[:place])]
    assert ends[0].choices == [(EXPECTED, Parting(before, *ids(kind, first, second)))]
    for gap, wrong in ((0.009, 0), (0.11, 1), (float("inf"), 1)):
        assert len(unlike(ends, 0.1, lambda choices, gap=gap: [gap] * len(choices))) == wrong


@pytest.mark.parametrize("shown", ["", "wait", "Die wait for", "Die"])
def test_a_text_that_is_not_that_of_the_tokens(shown: str) -> None:
    """As where a parser takes the beginning of an answer for the model's thoughts."""
    own = ids("llama-spm", "▁Die", "▁wait")
    assert parted("llama-spm", own, tokens=own, text=shown) == (None, f"it shows {shown!r} of the answer 'Die wait'")


def test_bytes_that_are_no_text_are_other_tokens() -> None:
    """Their text is empty as long as a character is not whole, so any answer began with it."""
    own, other = ids("llama-spm", "<0xC4>", "<0xC4>", "<0xC4>", "<0xC4>"), ids("llama-spm", "<0xC4>", "▁Die")
    parting, _ = parted("llama-spm", own, tokens=other)
    assert parting == Parting([*PROMPT, own[0]], own[1], other[1])


def test_llama_server_does_not_tell_half_a_character() -> None:
    """Seen with llama-cpp-python 0.3.36's: an answer with such a token in it, or at its end, was called another one."""
    own = ids("llama-spm", "▁Die", "<0xC4>", "<0x80>", "<0xC4>")
    told, shown = [own[0], own[2]], "Die\u0100"
    assert words("llama-spm").whole_characters(own) == [0, 2]
    assert parted("llama-spm", own, tokens=told, whole_characters=True, text=shown) == (None, "")
    assert parted("llama-spm", own, tokens=told, text=shown)[0] == Parting([*PROMPT, own[0]], own[1], own[2])
    (other,) = ids("llama-spm", "▁for")
    for right, place in ((told[:1], 2), (told, 3)):
        parting, _ = parted("llama-spm", own, tokens=[*right, other], whole_characters=True)
        assert parting == Parting([*PROMPT, *own[:place]], own[place], other)
    assert "where the file goes on" in parted("llama-spm", own, tokens=own[:1], whole_characters=True, text="Die")[1]
    assert (
        "it shows 'Die' of the answer"
        in parted("llama-spm", own[:3], tokens=told, whole_characters=True, text="Die")[1]
    )


@pytest.mark.parametrize("text", ["a", "é", "€", "😀", "a😀b€"])
def test_a_character_lacks_bytes_until_its_last(text: str) -> None:
    data = text.encode()
    whole = {len(text[:count].encode()) for count in range(len(text) + 1)}
    assert [_ends_inside(data[:size]) for size in range(len(data) + 1)] == [
        size not in whole for size in range(len(data) + 1)
    ]


def test_the_token_of_a_text_has_no_space_in_front() -> None:
    own = ids("llama-spm", "▁Die", "▁wait", "ed", "▁for")
    (other,) = ids("llama-spm", "pk")
    assert parted("llama-spm", own, text="Die waitpk")[0] == Parting([*PROMPT, *own[:2]], own[2], other)
    assert parted("llama-spm", own, text=" Die waited for") == (None, "")  # Ollama shows the space, and others do not


def test_a_token_that_begins_before_the_text_differs() -> None:
    own, (other,) = ids("qwen2", "The", "Ġcat"), ids("qwen2", "There")
    found = parted("qwen2", own, text="There", pieces=[b"There"])
    assert found == (Parting(PROMPT, own[0], other), "")
    # Ollama leaves out tokens without text, so what it tells is not always its answer.
    without, _ = parted("qwen2", own, text="There", pieces=[b"re"])
    assert without is not None and without.before == [*PROMPT, own[0]]


@pytest.mark.parametrize(
    ("kind", "piece", "spelled"),
    [("qwen2", " é", "ĠÃ©"), ("llama-spm", " é", "▁é"), ("llama-spm", "ed", "ed"), ("qwen2", "ed", "ed")],
)
def test_the_token_of_some_bytes(kind: str, piece: str, spelled: str) -> None:
    assert [words(kind).token(piece.encode())] == ids(kind, spelled)
    assert words(kind).token(b"no such token") is None
