"""The request classes of `serve`, in place of llama_cpp.server's own. They have the model's sampling defaults, and read
messages as the training does. They refuse, by name, each field that llama.cpp or the server does not support."""

import asyncio
import json
from contextvars import ContextVar
from typing import Annotated, Any, Literal

from skill_train.llama.sampling import Sampling, changes
from skill_train.program.chat.answers import with_names
from skill_train.program.events import Refused
from skill_train.program.examples import checked_call, is_text_part, list_of

# Fields of OpenAI, vLLM and others that would change an answer, and that the server would ignore.
_NOT_DONE = (
    "reasoning_effort", "verbosity", "web_search_options", "audio", "functions", "repetition_penalty", "typical_p",
    "ignore_eos", "stop_token_ids", "chat_template", "chat_template_kwargs", "continue_final_message",
    "json_schema", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
)  # fmt: skip
_MOST_FLOAT = 3.4e38  # llama.cpp computes with 32 bits
_LEFT: ContextVar[asyncio.Event | None] = ContextVar("_LEFT", default=None)  # of the request that is answered


def own_requests(sampling: Sampling) -> None:
    """Replaces the server's request classes. Call it before llama_cpp.server.app is imported, whose routes use them."""
    from llama_cpp.server import types
    from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, create_model

    def unless_null(kind: type, default: Any, **bounds: float) -> tuple[Any, Any]:
        """A field that takes its default if the request sends `null`, as in OpenAI's API."""
        default_for_null = BeforeValidator(lambda value: default if value is None else value)
        return Annotated[kind, Field(**bounds), default_for_null], default

    def stops(texts: str | list[str] | None) -> list[str]:
        """The stop texts of the request and of the model, without empty ones. Some clients send an empty text for none;
        it would end each answer at once."""
        return [text for text in [*([texts] if isinstance(texts, str) else texts or []), *sampling.stops] if text]

    names = AliasChoices("max_tokens", "max_completion_tokens")
    whole, no_use = AfterValidator(_whole_text), Annotated[Any, AfterValidator(_not_done)]
    defaults: dict[str, Any] = {
        "temperature": unless_null(float, sampling.temperature, ge=0),
        "top_k": unless_null(int, sampling.top_k, ge=-1, lt=1 << 31),  # -1 is all words, as vLLM has it
        "top_p": unless_null(float, sampling.top_p, ge=0, le=1),
        "min_p": unless_null(float, sampling.min_p, ge=0, le=1),
        "repeat_penalty": unless_null(float, sampling.repetition_penalty, gt=0),
        "presence_penalty": unless_null(float, 0.0, ge=-2, le=2),
        "frequency_penalty": unless_null(float, 0.0, ge=-2, le=2),
        "seed": (int | None, Field(None, ge=-(1 << 63), lt=1 << 63)),
        "stream": unless_null(bool, False),
        "stop": (Annotated[str | list[str] | None, AfterValidator(stops), whole], Field(None, validate_default=True)),
        "n": (int | None, Field(1, ge=1, le=1)),  # the server gives one answer, however many are requested
        "min_tokens": (int, Field(0, ge=0, le=0)),  # the server blocks at most one of several end tokens
        "stream_options": (dict[Literal["include_usage"], bool] | None, Field(None, exclude=True)),
        **{name: (no_use, Field(None, exclude=True)) for name in _NOT_DONE},
    }
    of_chats: dict[str, Any] = {
        "messages": (Annotated[list[dict[str, Any]], AfterValidator(_as_of_rows), whole], Field(min_length=1)),
        "tools": (Annotated[list[dict[str, Any]] | None, AfterValidator(lambda sent: sent or None), whole], None),
        "add_generation_prompt": (Literal[True] | None, Field(None, exclude=True)),
        "modalities": (list[Literal["text"]] | None, Field(None, exclude=True)),
        "response_format": (Annotated[dict[str, Any] | None, AfterValidator(lambda asked: asked or None)], None),
        "max_tokens": (int | None, Field(None, ge=1, validation_alias=names)),
    }
    of_text: dict[str, Any] = {
        "prompt": (Annotated[str | list[str], AfterValidator(_one_prompt), whole], ...),
        "max_tokens": (int | None, Field(16, ge=1)),
        "best_of": defaults["n"],
        "echo": unless_null(bool, False),
        "suffix": (None, None),  # llama-cpp-python 0.3.36 puts token 0 before one
    }
    for name, fields in (
        ("CreateChatCompletionRequest", defaults | of_chats),
        ("CreateCompletionRequest", defaults | of_text),
    ):
        base = getattr(types, name)
        setattr(types, name, create_model(name, __base__=base, **fields))


def _as_of_rows(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as the training reads those of rows: their text parts are joined, keys that are null are absent, and
    thoughts stand under each key that templates read. A null content stays, because some templates ask for it."""
    taken = []
    for message in messages:
        parts = message.get("content")
        if isinstance(parts, list) and all(is_text_part(part) and "text" in part for part in parts):
            parts = "".join(part["text"] for part in parts)
        if not (parts is None or isinstance(parts, str)):
            raise ValueError(f"content is a text, or parts of type text alone, and not {str(parts)[:60]}")
        filled: Any = {name: value for name, value in message.items() if value is not None} | {"content": parts}
        try:
            if "tool_calls" in filled:
                filled["tool_calls"] = [checked_call(call) for call in list_of(filled["tool_calls"], "tool_calls")]
        except Refused as refusal:
            raise ValueError(str(refusal)) from None
        taken.append(with_names(filled))
    return taken


def _whole_text(value: Any) -> Any:
    """Refuses text with a lone surrogate. JSON can express one, but no tokenizer reads it."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(half_character(error)) from None
    return value


class Clients:
    """ASGI middleware that notices that a client has left. By itself the server looks for that in streams alone."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        left, waiting = asyncio.Event(), list[asyncio.Task[Any]]()
        _LEFT.set(left)

        async def received() -> Any:
            message = await receive()
            if message["type"] == "http.disconnect":
                left.set()
            elif message["type"] == "http.request" and not message.get("more_body"):
                waiting.append(asyncio.create_task(received()))  # ends when the client leaves, or has the answer
            return message

        await self._app(scope, received, send)


def has_left() -> bool:
    """Whether the client has left whose request is answered here."""
    left = _LEFT.get()
    return left is not None and left.is_set()


class RefusedRequest(ValueError):
    """The request is refused: the answer is HTTP 400."""


def require_finite(options: dict[str, Any]) -> None:
    """Refuses NaN and infinity. JSON has neither, but Python's parser reads them, and llama.cpp would use them."""
    for name, value in options.items():
        numbers = value.values() if isinstance(value, dict) else [value]
        if any(isinstance(number, float) and not abs(number) < _MOST_FLOAT for number in numbers):
            raise RefusedRequest(f"{name}: it is not a finite number of 32 bits")


def require_no_grammar(body: Any) -> None:
    """Refuses a grammar of the client. Even one that parses can crash llama.cpp at a later token, or keep it busy
    without end, so no check would help. Only llama_cpp's own grammar of JSON is allowed."""
    wanted = getattr(body, "response_format", None) or {"type": "text"}
    asked_for = {
        "grammar": bool(body.grammar),
        "response_format": wanted.get("type") not in ("text", "json_object") or wanted.get("schema") is not None,
        "tool_choice": getattr(body, "tool_choice", None) not in (None, "auto", "none"),
        "function_call": isinstance(getattr(body, "function_call", None), dict),
    }
    if refused := [name for name, asks in asked_for.items() if asks]:
        raise RefusedRequest(
            f"{refused[0]}: a grammar or a schema can crash llama.cpp, so it is not taken. Leave it out, or ask for"
            " any JSON with response_format {'type': 'json_object'}"
        )


def half_character(error: UnicodeEncodeError) -> str:
    return f"{error.object[error.start]!a} is half of a character (a lone surrogate), which is no text"


def request_error(error: Any) -> str | None:
    """What is wrong with the request; None if the error has another cause."""
    if isinstance(error, UnicodeEncodeError):
        return half_character(error)
    if isinstance(error, UnicodeDecodeError):  # of /extras/detokenize
        return f"tokens: their {len(error.object)} bytes are no text in UTF-8, as at the half of a character"
    if type(error).__name__ == "RequestValidationError":  # FastAPI's: its text has files and lines of the server
        found = [(".".join(map(str, each["loc"][1:])), each["msg"]) for each in error.errors()]
        return "; ".join(f"{name or 'the body, sent as Content-Type application/json'}: {why}" for name, why in found)
    return str(error) if isinstance(error, RefusedRequest) else None


def _not_done(value: Any) -> None:
    """Refuses an unsupported field, unless its value has no effect, such as a penalty of 1."""
    if changes(value):
        raise ValueError("this server does not do it, and would answer as if it were not there: leave it out")


def _one_prompt(prompt: str | list[str]) -> str:
    texts = [prompt] if isinstance(prompt, str) else prompt
    if len(texts) != 1 or not texts[0]:
        raise ValueError("one text is taken, and no empty one")
    return texts[0]
