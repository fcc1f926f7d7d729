"""Where an engine's answer leaves the file's own, and with which token."""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from skill_train.llama.engines.answers import EngineAnswer
from skill_train.llama.gguf_header import GgufFile
from skill_train.verify.check import parting_place
from skill_train.verify.engines.questions import Expected

_AROUND = 40
_SPACE = "\u2581"  # as SentencePiece writes it
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_ANY_END = -1  # stands for the token with which an engine ended its answer, because engines do not report it
Judged = tuple[EngineAnswer, list[int], Expected]  # an engine's answer, the file's own, and what was asked


@dataclass(frozen=True)
class Parting:
    """A place where an engine's answer leaves the file's own: the tokens before it, and the next token of each."""

    before: list[int]
    own: int
    other: int


@dataclass(frozen=True)
class End:
    """A difference between the end of an engine's answer and the end of the file's own."""

    why: str
    choices: list[tuple[Expected, Parting]]  # partings that may have led there; empty if there are none


@dataclass(frozen=True)
class Vocabulary:
    """The text of tokens, by the reference's tokenizer, and the token of a text, by the file."""

    tokenizer: Any
    gguf: GgufFile
    ends: frozenset[int] = frozenset()  # the tokens that end an answer

    def text(self, ids: list[int]) -> str:
        """The text without a space in front, which only some engines show, or half a character at the end."""
        text = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text).lstrip().rstrip("\ufffd")

    def token(self, piece: bytes) -> int | None:
        """The token that writes these bytes; None if the file has none."""
        if self.gguf.metadata.get("tokenizer.ggml.model") == "gpt2":
            return self._ids.get("".join(self._letters[byte] for byte in piece))
        return self._ids.get(piece.decode("utf-8", "replace").replace(" ", _SPACE))

    def first_token(self, before: str, rest: str) -> int:
        """The token that `rest` begins with behind `before`. A tokenizer of SentencePiece reads a space in front of a
        text that stands alone."""
        encoded = self.tokenizer(before + rest, add_special_tokens=False, return_offsets_mapping=True)
        starts = [start for start, _ in encoded["offset_mapping"]]
        if before and len(before) in starts:
            return int(encoded["input_ids"][starts.index(len(before))])
        return int(self.tokenizer(rest, add_special_tokens=False).input_ids[0])

    def whole_characters(self, ids: list[int]) -> list[int]:
        """The places of the tokens behind which the text of an answer ends with a whole character."""
        places, text = list[int](), b""
        for place, token in enumerate(ids):
            text += self._bytes(token)
            places += [] if _ends_inside(text) else [place]
        return places

    def _bytes(self, token: int) -> bytes:
        piece = self.gguf.tokens[token]
        if self.gguf.metadata.get("tokenizer.ggml.model") == "gpt2":
            return bytes(self._of_letters[letter] for letter in piece if letter in self._of_letters)
        if found := _BYTE.fullmatch(piece):
            return bytes([int(found[1], 16)])
        return piece.replace(_SPACE, " ").encode()

    @cached_property
    def _of_letters(self) -> dict[str, int]:
        return {letter: byte for byte, letter in self._letters.items()}

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {text: number for number, text in enumerate(self.gguf.tokens)}

    @cached_property
    def _letters(self) -> dict[int, str]:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        letters: dict[int, str] = bytes_to_unicode()
        return letters


def parted(judged: Iterable[Judged], words: Vocabulary) -> tuple[list[tuple[Expected, Parting]], list[End]]:
    """The answers that leave the file's own, each with its question; and how the ends of the others differ."""
    partings, ends = list[tuple[Expected, Parting]](), list[End]()
    for answer, own, expected in judged:
        parting, why = compare(answer, own, expected, words)
        choices = [] if parting is None else [(expected, parting)]
        if parting is not None and parting.other == _ANY_END:
            choices = [(expected, replace(parting, other=end)) for end in sorted(words.ends)]
        if why:
            ends.append(End(why, choices))
        else:
            partings += choices
    return partings, ends


def unlike(ends: list[End], most: float, gaps_of: Callable[[list[tuple[Expected, Parting]]], list[float]]) -> list[str]:
    """The reasons of the ends that no choice between two almost equally likely tokens explains.

    Args:
        most: nats by which the file may prefer its own token.
    """
    found = iter(gaps_of([choice for end in ends for choice in end.choices]))
    return [end.why for end in ends if min([next(found) for _ in end.choices], default=math.inf) > most]


def compare(answer: EngineAnswer, own: list[int], expected: Expected, words: Vocabulary) -> tuple[Parting | None, str]:
    """Where the answer leaves the file's own, and how its end differs; None and an empty text if they are equal. If the
    end differs, the parting is the choice of a token that led there, or None.

    Args:
        own: the file's own answer, with the token that ends it.
    """
    end, own = (own[-1], own[:-1]) if own and own[-1] in words.ends else (None, own)
    if answer.tokens is not None:
        parting, why = _by_tokens(answer, answer.tokens, own, expected, words)
    else:
        parting, why = _by_text(answer, own, expected, words)
    if parting is None or parting.own != _ANY_END:
        return parting, why
    return None if end is None or parting.other in words.ends else replace(parting, own=end), why


def gaps(losses: list[float | None]) -> list[float]:
    """By how many nats the file prefers its own token at each parting.

    Args:
        losses: at each parting of the file's own token, then of the engine's; None where it is not finite.
    """
    pairs = zip(losses[::2], losses[1::2], strict=True)
    return [math.inf if own is None or other is None else other - own for own, other in pairs]


def _by_tokens(
    answer: EngineAnswer, theirs: list[int], own: list[int], expected: Expected, words: Vocabulary
) -> tuple[Parting | None, str]:
    theirs = theirs[: expected.question.most]  # llama_cpp.server writes more, rather than half a character
    places = words.whole_characters(own) if answer.whole_characters else list(range(len(own)))
    equal = parting_place([own[place] for place in places], theirs)
    if equal == len(places) == len(theirs):
        text = words.text(own)
        return None, _other_text(answer, own, text, expected) or _end(answer, own, text, expected)
    at = places[equal] if equal < len(places) else places[-1] + 1 if places else 0
    before = words.text(own[:at])
    if equal == len(theirs):
        why = f"it ends after {before[-_AROUND:]!r}, where the file goes on"
        return Parting([*expected.ids, *own[:at]], own[at], _ANY_END), why
    if at == len(own):
        why = f"it goes on after {before[-_AROUND:]!r}: {words.text(theirs[equal:])[:_AROUND]!r}"
        return Parting([*expected.ids, *own], _ANY_END, theirs[equal]), why
    return Parting([*expected.ids, *own[:at]], own[at], theirs[equal]), ""


def _ends_inside(text: bytes) -> bool:
    """Whether the last character lacks bytes, as llama.cpp's server finds it (`validate_utf8`)."""
    for number, byte in enumerate(reversed(text[-4:]), start=1):
        for size, first, behind in ((2, 0xC0, 0xE0), (3, 0xE0, 0xF0), (4, 0xF0, 0xF8)):
            if first <= byte < behind:
                return number < size
    return False


def _other_text(answer: EngineAnswer, own: list[int], text: str, expected: Expected) -> str:
    """How the engine's text differs although the tokens are equal; its parser may leave out a part of an answer. Texts
    with half characters are not compared, because each engine shows them in its own way."""
    theirs, text = answer.text.strip(), text.strip()
    longer = len(own) == expected.question.most and theirs.startswith(text)
    if theirs == text or longer or "\ufffd" in theirs + text:
        return ""
    return f"it shows {theirs[:_AROUND]!r} of the answer {text[:_AROUND]!r}"


def _by_text(answer: EngineAnswer, own: list[int], expected: Expected, words: Vocabulary) -> tuple[Parting | None, str]:
    own_text, theirs = words.text(own), answer.text.lstrip()
    if theirs.rstrip() == own_text.rstrip():
        return None, _end(answer, own, own_text, expected)
    if theirs.startswith(own_text):
        other = _token_at(own_text, theirs, answer.pieces or [], words)
        other = words.first_token(own_text, theirs[len(own_text) :]) if other is None else other
        why = f"it goes on after {own_text[-_AROUND:]!r}: {theirs[len(own_text) :][:_AROUND]!r}"
        return Parting([*expected.ids, *own], _ANY_END, other), why
    at = next(at for at in range(1, len(own) + 1) if not theirs.startswith(words.text(own[:at]))) - 1
    before = words.text(own[:at])
    if not theirs[len(before) :]:
        why = f"it ends after {theirs[-_AROUND:]!r}, where the file goes on"
        return Parting([*expected.ids, *own[:at]], own[at], _ANY_END), why
    for place in range(at, -1, -1):  # its token may begin before the text differs: `There` in place of `The`
        other = _token_at(words.text(own[:place]), theirs, answer.pieces or [], words)
        if other is not None:
            return Parting([*expected.ids, *own[:place]], own[place], other), ""
    return Parting([*expected.ids, *own[:at]], own[at], words.first_token(before, theirs[len(before) :])), ""


def _token_at(before: str, theirs: str, pieces: list[bytes], words: Vocabulary) -> int | None:
    """The engine's token behind a text, by the bytes of its tokens. None if the engine does not report them, or if they
    do not make up its answer: Ollama leaves out tokens without text."""
    if _as_text(pieces) != theirs:
        return None
    texts = [_as_text(pieces[:number]) for number in range(len(pieces))]
    return words.token(pieces[texts.index(before)]) if before in texts else None


def _as_text(pieces: list[bytes]) -> str:
    return b"".join(pieces).decode("utf-8", "replace").lstrip()


def _end(answer: EngineAnswer, own: list[int], text: str, expected: Expected) -> str:
    """How the end of an equal answer differs."""
    if len(own) == expected.question.most or answer.stopped:
        return ""
    return f"it goes on after {text[-_AROUND:]!r}, where the file ends its answer"
