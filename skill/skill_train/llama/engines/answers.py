"""The questions for every engine, and the form of its answers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from skill_train.llama.template import Conversation

PYTHON_SERVER, LLAMA_SERVER, OLLAMA = "llama_cpp.server", "llama-server", "ollama"
ENGINES, ALL = (PYTHON_SERVER, LLAMA_SERVER, OLLAMA), "all"


@dataclass(frozen=True)
class EngineQuestion:
    """A conversation that ends before an answer. `most` is the limit of the answer in tokens."""

    conversation: Conversation
    most: int
    # PNG files, one for each part `{"type": "image"}`. With pictures, the content of every message is a list of parts.
    pictures: tuple[bytes, ...] = ()


def messages_of(question: EngineQuestion, written: Callable[[Any, Iterator[bytes]], Any]) -> list[Any]:
    """The messages of a question. With pictures, `written` makes each message, and takes its pictures in order."""
    messages, pictures = question.conversation.messages, iter(question.pictures)
    return [written(message, pictures) for message in messages] if question.pictures else messages


@dataclass(frozen=True)
class EngineAnswer:
    """The prompt that an engine made of a conversation, and its greedy answer."""

    # A field is None if the engine does not report it.
    prompt: str | None = None  # the rendered text, with llama.cpp's marker for each picture
    ids: list[int] | None = None  # the token ids of the prompt, as the model read them
    prompt_tokens: int | None = None  # the length of the prompt, as the engine counted it
    text: str = ""
    stopped: bool = False  # the model ended the answer before its limit
    tokens: list[int] | None = None  # the token ids of the answer, without the token that ends it
    whole_characters: bool = False  # `tokens` lacks the tokens after which the text ended inside a UTF-8 character
    pieces: list[bytes] | None = None  # the bytes of each token of the answer that has text
    refused: str = ""  # why there is no prompt
    no_answer: str = ""  # why there is a prompt, but no answer


@dataclass(frozen=True)
class EngineRun:
    """The answers of one engine, in the order of the questions."""

    engine: str
    version: str
    answers: list[EngineAnswer]
    figures: dict[str, str] = field(default_factory=dict)  # more facts about the engine, such as its chat format
    without: str = ""  # a feature that was switched off because the engine crashes with it on this machine

    @property
    def description(self) -> str:
        """The engine's name and version, and the feature that was switched off."""
        return f"{self.engine} {self.version}" + (f" (without {self.without})" if self.without else "")


class AnswerToken(msgspec.Struct, frozen=True):
    """A token of an answer. Ollama sends no `id`."""

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
    """The answer of a server with OpenAI's API: only the fields that are read here."""

    choices: Annotated[list[WrittenChoice], msgspec.Meta(min_length=1)]
    usage: Usage
