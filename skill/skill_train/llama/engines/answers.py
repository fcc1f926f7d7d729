"""What every engine is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from skill_train.llama.template import Conversation

PYTHON_SERVER, LLAMA_SERVER, OLLAMA = "llama_cpp.server", "llama-server", "ollama"
ENGINES, ALL = (PYTHON_SERVER, LLAMA_SERVER, OLLAMA), "all"


@dataclass(frozen=True)
class EngineQuestion:
    """A conversation before an answer, and the tokens that the answer may have."""

    conversation: Conversation
    most: int
    # PNG files, one for each part `{"type": "image"}` of the messages, whose contents are parts then
    pictures: tuple[bytes, ...] = ()


def messages_of(question: EngineQuestion, written: Callable[[Any, Iterator[bytes]], Any]) -> list[Any]:
    """The messages of a question. Where it has pictures, `written` makes each of them, and takes its pictures."""
    messages, pictures = question.conversation.messages, iter(question.pictures)
    return [written(message, pictures) for message in messages] if question.pictures else messages


@dataclass(frozen=True)
class EngineAnswer:
    """The prompt that an engine made of a conversation, and its greedy answer."""

    prompt: str | None = None  # its text, with llama.cpp's marker for each picture; None where the engine does not say
    ids: list[int] | None = None  # of the prompt as the model read them; None where the engine does not say
    prompt_tokens: int | None = None  # how many it counted; None where it does not say
    text: str = ""
    stopped: bool = False  # it ended the answer itself
    # the ids of the answer, without the one that ends it; None where the engine does not say
    tokens: list[int] | None = None
    # `tokens` are those behind which the answer ended with a whole character, as it was written
    whole_characters: bool = False
    pieces: list[bytes] | None = None  # the bytes of its tokens that have some; None where the engine does not say
    refused: str = ""  # why there is no prompt
    no_answer: str = ""  # why there is a prompt, and no answer


@dataclass(frozen=True)
class EngineRun:
    """The answers of one engine, in the order of the questions."""

    engine: str
    version: str
    answers: list[EngineAnswer]
    # what else it says of itself, such as the chat format that it chose
    figures: dict[str, str] = field(default_factory=dict)
    without: str = ""  # what of it was switched off, because it does not run here with it

    @property
    def description(self) -> str:
        """The engine as it was asked."""
        return f"{self.engine} {self.version}" + (f" (without {self.without})" if self.without else "")


class AnswerToken(msgspec.Struct, frozen=True):
    """A token of an answer. Ollama tells no `id`."""

    id: int | None = None
    bytes: list[int] | None = None


class AnswerTokens(msgspec.Struct, frozen=True):
    content: list[AnswerToken] | None = None


class WrittenMessage(msgspec.Struct, frozen=True):
    content: str | None = None


class WrittenChoice(msgspec.Struct, frozen=True):
    message: WrittenMessage
    finish_reason: str | None = None
    logprobs: AnswerTokens | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int


class Completion(msgspec.Struct, frozen=True):
    """The answer of a server that speaks OpenAI's protocol, as far as it is read here."""

    choices: Annotated[list[WrittenChoice], msgspec.Meta(min_length=1)]
    usage: Usage
