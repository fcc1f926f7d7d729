"""Asks Ollama, with a model that is made from one GGUF file. The server and its model store are temporary.

Read in Ollama's repository, main of 2026-08-21 (fb30760), and run 2026-11-27 (0.33.0-rc2, built from it):
`_debug_render_only` of `/api/chat` returns the prompt as `_debug_info.rendered_template` (server/routes.go,
api/types.go). It came with 0.11.5 (8de1da4); earlier versions ignore it and answer. From 0.12.11 on (59241c5)
`logprobs` returns the tokens of an answer. `ollama create` compares the template in the file with its own templates
and takes the nearest one below a distance of 100 (server/model.go `detectChatTemplate`, template/template.go `Named`).
If none is near, Ollama's llama-server renders the template in the file (server/routes.go `chatModeForModel`).
"""

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from skill_train.core.errors import NotInstalled
from skill_train.core.files import scratch_folder
from skill_train.llama.engines.answers import (
    OLLAMA,
    AnswerToken,
    EngineAnswer,
    EngineQuestion,
    EngineRun,
    WrittenMessage,
    messages_of,
)
from skill_train.llama.engines.http import HttpRefusal, asking, get, post, wait_for
from skill_train.llama.engines.programs import free_port, run_once, started
from skill_train.llama.gguf_header import bad_gguf, read_gguf
from skill_train.llama.pictures.compare import MARKER

_MODEL = "skill-train-verify"
# Markers of pictures in a prompt: of Ollama's own templates, and of its llama-server (llm/llama_server.go).
_MARKERS = re.compile(r"\[img-\d+\]|<__ollama_media_\w+__>")
_CRASHED = "runner process has terminated"  # llm/server.go


class _Version(msgspec.Struct):
    version: str


class _Prompt(msgspec.Struct):
    rendered_template: str


class _Shown(msgspec.Struct):
    prompt: _Prompt | None = msgspec.field(default=None, name="_debug_info")


class _Answer(msgspec.Struct):
    message: WrittenMessage
    prompt_eval_count: int | None = None
    logprobs: list[AnswerToken] | None = None
    done_reason: str | None = None


def ask(
    gguf: Path, questions: list[EngineQuestion], *, context_tokens: int, projector: Path | None = None
) -> EngineRun:
    """Starts Ollama, and returns its prompts and answers for the questions.

    Args:
        projector: the GGUF file that reads pictures for the model.

    Raises:
        VerificationFailed: Ollama cannot create a model from the file, or crashes on it.
        NativeCrash: Ollama itself ended.
        NotInstalled: this Ollama does not show its prompts.
    """
    with scratch_folder() as folder:
        port = free_port()
        log, recipe = folder / "log.txt", folder / "Modelfile"
        recipe.write_text(_modelfile(gguf, projector), encoding="utf-8", errors="surrogateescape")
        host = f"127.0.0.1:{port}"
        environment = {"OLLAMA_HOST": host, "OLLAMA_MODELS": str(folder / "models"), "HOME": str(folder)}
        with started([OLLAMA, "serve"], environment, log) as process:
            wait_for(f"http://{host}/api/version", lambda: process.poll() is None, program=OLLAMA)
            if run_once([OLLAMA, "create", _MODEL, "-f", str(recipe)], environment, log) != 0:
                raise bad_gguf(
                    f"Ollama cannot create a model from {gguf.name}",
                    got=log.read_text(encoding="utf-8", errors="replace")[-400:],
                    hint="ollama create NAME -f Modelfile, and read what it says",
                )
            with asking(OLLAMA):
                version = _version(f"http://{host}/api/version")
                answers = [_ask_server(f"http://{host}/api/chat", question, context_tokens) for question in questions]
            return EngineRun(OLLAMA, version, answers)


def _version(url: str) -> str:
    try:
        return get(url, _Version).version
    except HttpRefusal:
        return "unknown"


def _modelfile(gguf: Path, projector: Path | None) -> str:
    """The Modelfile beside a GGUF file, with the absolute paths of the file and its projector in FROM. Ollama takes a
    relative path that it does not find for a model name, and asks the host that the name begins with. Leaves out the
    SYSTEM of an export, which would begin each conversation, and stop words that are not tokens, because the reference
    answers of llama.cpp do not end there."""
    beside = gguf.parent / "Modelfile"
    text = beside.read_text(encoding="utf-8", errors="surrogateescape") if beside.is_file() else ""
    lines = re.sub(r'(?ms)^SYSTEM """.*?"""$', "", text).splitlines()
    stops = {line: found[1] for line in lines if (found := re.fullmatch(r'PARAMETER stop "(.*)"', line))}
    tokens = read_gguf(gguf).tokens if stops else []
    left_out = {line for line, text in stops.items() if text not in tokens}
    own_lines = [line for line in lines if not line.upper().startswith("FROM ") and line not in left_out]
    files = [gguf] if projector is None else [gguf, projector]
    return "\n".join([*(f"FROM {file.resolve()}" for file in files), *own_lines]) + "\n"


def _ask_server(url: str, question: EngineQuestion, context_tokens: int) -> EngineAnswer:
    conversation = question.conversation
    request: dict[str, Any] = {"model": _MODEL, "messages": messages_of(question, _message), "stream": False}
    if conversation.tools:
        request["tools"] = conversation.tools
    greedy = {"temperature": 0, "repeat_penalty": 1.0, "num_predict": question.most, "num_ctx": context_tokens}
    request["options"] = greedy
    try:
        rendered = post(url, request | {"_debug_render_only": True}, _Shown).prompt
    except HttpRefusal as refusal:
        return EngineAnswer(refused=_refusal(refusal))
    if rendered is None:
        raise NotInstalled(
            "this Ollama does not show the prompts that it makes",
            code="missing_package",
            expected="Ollama 0.11.5 or newer",
            hint="install a newer Ollama",
        )
    prompt = rendered.rendered_template
    if question.pictures:
        prompt = _MARKERS.sub(MARKER, prompt)
    try:
        answer = post(url, request | {"logprobs": True}, _Answer)
    except HttpRefusal as refusal:
        return EngineAnswer(prompt=prompt, no_answer=_refusal(refusal))
    return EngineAnswer(
        prompt=prompt,
        prompt_tokens=answer.prompt_eval_count,
        text=answer.message.content or "",
        pieces=[bytes(each.bytes or []) for each in answer.logprobs or []] or None,
        stopped=answer.done_reason != "length",
    )


def _message(message: Any, pictures: Iterator[bytes]) -> Any:
    """The message as Ollama takes it: the pictures are a separate list, without their places in the text."""
    text = "".join(part["text"] for part in message["content"] if part["type"] == "text")
    images = [base64.b64encode(next(pictures)).decode() for part in message["content"] if part["type"] == "image"]
    return {**message, "content": text, **({"images": images} if images else {})}


def _refusal(refusal: HttpRefusal) -> str:
    """The text of a refusal. Raises VerificationFailed if it reports a crash."""
    if _CRASHED in str(refusal):
        hint = "ollama run on the same file, and read the log of ollama serve"
        raise bad_gguf("Ollama crashes on the file", got=str(refusal), hint=hint) from None
    return str(refusal)
