"""Starts llama_cpp.server in a child process, and asks it."""

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
    """The file to serve, and the settings of the server."""

    gguf: str
    name: str  # the model name that clients see
    host: str = LOOPBACK
    port: int = 0  # 0 for a free one
    api_key: str | None = None  # the key that clients must send; None for no key
    template: str | None = None  # the chat template of the file; None serves text completions only
    bos: str = ""
    eos: str = ""
    composes: bool = False  # prompts are normalized to NFC, as the model's tokenizer does and llama.cpp does not
    sampling: Sampling = Sampling()  # the defaults for fields that a request leaves out
    context_tokens: int
    threads: int
    device: str | None = "cpu"  # `cpu` or `gpu`; None for the GPU where llama.cpp has one
    stock: bool = False  # an unchanged server, which guesses the chat format and has its own defaults
    reports: bool = False  # the child sends an `Exchange` to the command after each answer


class Exchange(msgspec.Struct, frozen=True):
    """The token ids of a prompt and of its answer. The token that ends the answer is left out."""

    prompt_ids: list[int]
    answer_ids: list[int]


@dataclass
class Served:
    worker: LiveWorker
    url: str  # with `/v1`, as clients of OpenAI's API need it
    version: str  # the version of llama-cpp-python
    chat_format: str  # llama-cpp-python's name of the format in which the server writes prompts
    device: str  # `cpu` or `gpu`
    repacks: bool  # llama.cpp may repack weights for the processor, as it does by default

    def wait(self) -> None:
        """Waits until the server ends, and raises the reason.

        Raises:
            NativeCrash: the server crashed.
            DecisionNeeded: there was not enough memory.
        """
        while True:
            self.worker.receive()

    def report(self) -> Exchange:
        """Waits for the next exchange. The job must have `reports`."""
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
    """Starts a server that ends with the block.

    Raises:
        UsageError: the address cannot be used.
        VerificationFailed: llama.cpp refuses the file.
        NativeCrash: llama.cpp crashed.
        NotInstalled: a package is missing, or the job asks for a GPU and llama.cpp has none.
    """
    require_server()
    with live_worker(WORKER, msgspec.to_builtins(job)) as worker:
        ready = worker.receive_within(_BEGIN_SECONDS)
        host = f"[{job.host}]" if ":" in job.host else job.host
        url = f"http://{host}:{ready['port']}/v1"
        yield Served(worker, url, ready["version"], ready["chat_format"], ready["device"], ready["repacks"])


def ask(gguf: Path, questions: list[EngineQuestion], *, context_tokens: int, threads: int) -> EngineRun:
    """Starts a stock server, and returns its prompts and answers for the questions."""
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
