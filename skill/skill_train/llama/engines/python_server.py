"""The job of the child process that runs llama_cpp.server, and how it is asked."""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from skill_train.core.errors import NotInstalled
from skill_train.core.live_worker import LiveWorker, live_worker
from skill_train.llama.engines.answers import PYTHON_SERVER, Completion, EngineAnswer, EngineQuestion, EngineRun
from skill_train.llama.engines.http import HttpRefusal, asking, post
from skill_train.llama.sampling import Sampling

WORKER = "skill_train.llama.engines.python_server_worker"
LOOPBACK = "127.0.0.1"
_PACKAGES = ("fastapi", "uvicorn", "sse_starlette", "starlette_context", "pydantic_settings")
_BEGIN_SECONDS = 600.0  # a large file is read from a slow disk


class ServerJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is served, and how."""

    gguf: str
    name: str  # of the model, for its clients
    host: str = LOOPBACK
    port: int = 0  # 0 for a free one
    api_key: str | None = None  # what a client must show; None for nothing
    template: str | None = None  # the chat template of the file; None serves completions of text alone
    bos: str = ""
    eos: str = ""
    # prompts are brought into the form NFC, as the model's tokenizer does and llama.cpp does not
    composes: bool = False
    sampling: Sampling = Sampling()  # what holds where a request says nothing
    context_tokens: int
    threads: int
    device: str | None = "cpu"  # `cpu` or `gpu`; None for the GPU where llama.cpp has one
    stock: bool = False  # the server as it is by itself: its own guess of a chat format, its own defaults
    reports: bool = False  # each prompt goes to the command, as the ids that the model read


class Exchange(msgspec.Struct, frozen=True):
    """The ids of a prompt, and those of its answer without the token that ends it."""

    prompt_ids: list[int]
    answer_ids: list[int]


@dataclass
class Served:
    """A server that answers."""

    worker: LiveWorker
    url: str  # with the `/v1` that clients of OpenAI's protocol ask for
    version: str
    chat_format: str  # by which it writes prompts
    device: str  # `cpu` or `gpu`
    repacks: bool  # weights may be packed anew for the processor, as the server does by itself

    def wait(self) -> None:
        """Waits until the server ends, and raises the reason.

        Raises:
            NativeCrash: it crashed.
            DecisionNeeded: there was not enough memory.
        """
        while True:
            self.worker.receive()

    def report(self) -> Exchange:
        """What the model read and wrote last, where the job asks for reports."""
        return msgspec.convert(self.worker.receive(), Exchange)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def require_server() -> None:
    """Raises NotInstalled if llama_cpp.server lacks a package."""
    if missing := missing_packages():
        raise NotInstalled(
            f"llama_cpp.server needs packages that are not installed: {', '.join(missing)}",
            code="missing_package",
            hint='pip install "skill-train[gguf,serve]"',
        )


def missing_packages() -> list[str]:
    """The packages that llama_cpp.server lacks."""
    return [name for name in ("llama_cpp", *_PACKAGES) if importlib.util.find_spec(name) is None]


@contextlib.contextmanager
def served(job: ServerJob) -> Iterator[Served]:
    """A server, which ends with the block.

    Raises:
        UsageError: the address cannot be used.
        VerificationFailed: llama.cpp refuses the file.
        NativeCrash: it crashed.
        NotInstalled: a package is missing, or a GPU was asked for and llama.cpp has none.
    """
    require_server()
    with live_worker(WORKER, msgspec.to_builtins(job)) as worker:
        ready = worker.receive_within(_BEGIN_SECONDS)
        host = f"[{job.host}]" if ":" in job.host else job.host
        url = f"http://{host}:{ready['port']}/v1"
        yield Served(worker, url, ready["version"], ready["chat_format"], ready["device"], ready["repacks"])


def ask(gguf: Path, questions: list[EngineQuestion], *, context_tokens: int, threads: int) -> EngineRun:
    """The stock server's answers to conversations, and the prompts that it made of them."""
    job = ServerJob(
        gguf=str(gguf), name=gguf.name, context_tokens=context_tokens, threads=threads, stock=True, reports=True
    )
    with served(job) as server:
        with asking(PYTHON_SERVER):
            answers = [_ask_server(server, question) for question in questions]
        without = "" if server.repacks else "AMX repacking by use_extra_bufts, with which it crashes"
        return EngineRun(PYTHON_SERVER, server.version, answers, {"chat_format": server.chat_format}, without)


def _ask_server(server: Served, question: EngineQuestion) -> EngineAnswer:
    request = {
        "messages": question.conversation.messages,
        **({"tools": question.conversation.tools} if question.conversation.tools else {}),
        "max_tokens": question.most,
        "temperature": 0,
        "repeat_penalty": 1.0,  # its own default is 1.1
    }
    try:
        answer = post(f"{server.url}/chat/completions", request, Completion)
    except HttpRefusal as refusal:
        return EngineAnswer(refused=str(refusal))
    report, choice = server.report(), answer.choices[0]
    return EngineAnswer(
        ids=report.prompt_ids,
        tokens=report.answer_ids,
        prompt_tokens=answer.usage.prompt_tokens,
        text=choice.message.content or "",
        stopped=choice.finish_reason != "length",
    )
