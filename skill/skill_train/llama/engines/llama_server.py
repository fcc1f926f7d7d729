"""Asks llama-server with one GGUF file: `/apply-template`, `/tokenize`, `/v1/chat/completions`.

Its README (tools/server, read 2026-11-26): `/apply-template` renders the prompt of a chat and writes no answer,
`/tokenize` takes `add_special` and `parse_special`, `/props` names the build. The rendered prompt lacks the BOS that
the tokenizer adds, so the token ids are compared and not the texts. The prompt has a marker for each picture
(`media_marker` of `/props`), and `usage` counts the tokens of the pictures.
"""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from skill_train.core.files import scratch_folder
from skill_train.llama.engines.answers import (
    LLAMA_SERVER,
    Completion,
    EngineAnswer,
    EngineQuestion,
    EngineRun,
    WrittenChoice,
    messages_of,
)
from skill_train.llama.engines.http import HttpRefusal, asking, get, post, wait_for
from skill_train.llama.engines.programs import free_port, started
from skill_train.llama.gguf_header import bad_gguf
from skill_train.llama.pictures.compare import MARKER


class _Properties(msgspec.Struct):
    build_info: str = "unknown"
    media_marker: str | None = None


class _Template(msgspec.Struct):
    prompt: str


class _Tokens(msgspec.Struct):
    tokens: list[int]


def ask(
    gguf: Path, questions: list[EngineQuestion], *, context_tokens: int, threads: int, projector: Path | None = None
) -> EngineRun:
    """Starts llama-server, and returns its prompts and answers for the questions.

    Args:
        projector: the GGUF file that reads pictures for the model.

    Raises:
        VerificationFailed: the server does not describe the file that it serves.
        NativeCrash: the server ended, or did not answer.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    words = [LLAMA_SERVER, "-m", str(gguf), "--host", "127.0.0.1", "--port", str(port), "-c", str(context_tokens)]
    words += ["-t", str(threads)] if projector is None else ["-t", str(threads), "--mmproj", str(projector)]
    with scratch_folder() as folder:
        log = folder / "log.txt"
        with started(words, {}, log) as process:
            wait_for(f"{url}/health", lambda: process.poll() is None, program=LLAMA_SERVER)
            with asking(LLAMA_SERVER):
                properties = _properties(url)
                answers = [_ask_server(url, question, properties.media_marker or MARKER) for question in questions]
            return EngineRun(LLAMA_SERVER, properties.build_info, answers)


def _properties(url: str) -> _Properties:
    try:
        return get(f"{url}/props", _Properties)
    except HttpRefusal as refusal:
        hint = "install a current llama.cpp, or verify without --engine llama-server"
        raise bad_gguf(f"llama-server does not say what it serves: {refusal}", hint=hint) from None


def _ask_server(url: str, question: EngineQuestion, marker: str) -> EngineAnswer:
    conversation = question.conversation
    request: dict[str, Any] = {"messages": messages_of(question, _message)}
    if conversation.tools:
        request["tools"] = conversation.tools
    try:
        prompt = post(f"{url}/apply-template", request, _Template).prompt.replace(marker, MARKER)
        whole = {"content": prompt, "add_special": True, "parse_special": True}
        ids = None if question.pictures else post(f"{url}/tokenize", whole, _Tokens).tokens
    except HttpRefusal as refusal:
        return EngineAnswer(refused=str(refusal))
    greedy = {"temperature": 0, "max_tokens": question.most, "reasoning_format": "none", "cache_prompt": False}
    try:
        answer = post(f"{url}/v1/chat/completions", request | greedy | {"logprobs": True}, Completion)
    except HttpRefusal as refusal:
        return EngineAnswer(prompt=prompt, ids=ids, no_answer=str(refusal))
    choice = answer.choices[0]
    return EngineAnswer(
        prompt=prompt,
        ids=ids,
        prompt_tokens=answer.usage.prompt_tokens,
        text=choice.message.content or "",
        tokens=_tokens(choice),
        whole_characters=True,  # `process_token` in tools/server/server-context.cpp sends no incomplete character
        stopped=choice.finish_reason != "length",
    )


def _message(message: Any, pictures: Iterator[bytes]) -> Any:
    """The message as OpenAI's clients send it: each picture is a part of the content, at its place in the text."""
    return {**message, "content": [_openai_part(part, pictures) for part in message["content"]]}


def _openai_part(part: Any, pictures: Iterator[bytes]) -> Any:
    if part["type"] != "image":
        return part
    content = base64.b64encode(next(pictures)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}}


def _tokens(choice: WrittenChoice) -> list[int] | None:
    """The token ids of an answer, without the token that ends it. None if a token has no id."""
    tokens = (choice.logprobs and choice.logprobs.content) or []
    ids = [each.id for each in tokens if each.id is not None]
    if not tokens or len(ids) < len(tokens):
        return None
    return ids[:-1] if choice.finish_reason != "length" and not tokens[-1].bytes else ids
