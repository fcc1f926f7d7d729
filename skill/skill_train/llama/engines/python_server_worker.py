"""Child process: llama_cpp.server on one GGUF file, with the file's own template and the model's own defaults.

What the unchanged server of llama-cpp-python 0.3.36 does otherwise is listed in references/engines.md (read in
llama_cpp/server/, llama.py and llama_chat_format.py, 2026-11-26).
"""

import dataclasses
import json
import socket
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec

from skill_train.core.errors import UsageError
from skill_train.core.live_worker import Send, live_worker_main
from skill_train.llama.engines.python_requests import (
    Clients,
    RefusedRequest,
    has_left,
    own_requests,
    request_error,
    require_finite,
    require_no_grammar,
)
from skill_train.llama.engines.python_server import LOOPBACK, Exchange, ServerJob, is_loopback
from skill_train.llama.gguf_header import bad_gguf
from skill_train.llama.llama_cpp import bindings, captured_log, refused, uses_gpu
from skill_train.llama.sampling import require_numbers
from skill_train.program.chat.answers import as_taken
from skill_train.program.tokenizer import begins_itself

_OWN_FORMAT = "chat_template.default"
_CHATS, _EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"  # the model is loaded for texts alone
_WAITING = 128  # connections that may wait to be accepted


def work(document: object, receive: Callable[[], Any], send: Send) -> None:
    job = msgspec.convert(document, ServerJob)
    bound = _bound(job)  # before the file is loaded, which takes long
    api, gpu = bindings(), uses_gpu(job.device)
    with captured_log(api) as lines:
        # On processors with AMX, llama-cpp-python 0.3.36 segfaults when it repacks quantized weights.
        if has_amx := b"AMX_INT8 = 1" in api.llama_print_system_info():
            _switch_off("llama_model_default_params", "use_extra_bufts")
        import jinja2

        try:
            app, llama = _app(job, gpu)
        except ValueError:  # llama_cpp.Llama has no other class for what llama.cpp refuses
            raise refused(Path(job.gguf), lines, gpu=gpu) from None
        except jinja2.TemplateError as error:
            message = f"llama_cpp.server cannot read the chat template of {Path(job.gguf).name}: {error}"
            raise bad_gguf(message) from None
        _require_answer(Path(job.gguf), llama)
    _watch(llama, send if job.reports else None)
    if not job.stock:
        _sample_as_transformers(llama)
    import llama_cpp
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    bound.listen(_WAITING)  # clients that connect before the loop runs wait
    send(
        {
            "port": bound.getsockname()[1],
            "version": llama_cpp.__version__,
            "chat_format": str(llama.chat_format),
            "device": "gpu" if gpu else "cpu",
            "repacks": not has_amx,
        }
    )
    server.run(sockets=[bound])


def _require_answer(file: Path, llama: Any) -> None:
    """Runs the model once, because with damaged weights the server would answer with arbitrary tokens.

    Raises:
        VerificationFailed: llama.cpp cannot run the model, or its scores are not numbers.
    """
    import numpy as np

    try:
        llama.eval([0])
    except RuntimeError as error:
        raise bad_gguf(f"llama.cpp cannot run {file.name}: {error}") from None
    require_numbers(np.ctypeslib.as_array(llama._ctx.get_logits(), shape=(llama.n_vocab(),)), file.name)
    llama.reset()


def _bound(job: ServerJob) -> socket.socket:
    """A socket bound to the job's address, not listening yet. Raises UsageError if the address cannot be used."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(job.host, job.port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise UsageError(
            f"cannot listen at {job.host}, port {job.port}: {error.strerror or error}",
            code="system_error",
            expected="an address of this machine, and a port that no other program uses",
            got=f"{job.host}:{job.port}",
            hint="take another port: --port 0 takes a free one",
        ) from None
    return bound


def _app(job: ServerJob, gpu: bool) -> tuple[Any, Any]:
    """The server's FastAPI app, and the `llama_cpp.Llama` that it has loaded."""
    if not job.stock:
        own_requests(job.sampling)
        _no_templates()
    if not gpu:  # a build with a GPU reads long prompts there, though no layer is on it
        _switch_off("llama_context_default_params", "op_offload")
    from llama_cpp.server import app as server
    from llama_cpp.server.settings import ModelSettings, ServerSettings
    from starlette.middleware.cors import CORSMiddleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    if not job.stock:  # without a template the server has no chats
        absent = {_EMBEDDINGS} if job.template is not None else {_EMBEDDINGS, _CHATS}
        server.router.routes[:] = [route for route in server.router.routes if route.path not in absent]
    model = ModelSettings(
        model=job.gguf,
        model_alias=job.name,
        chat_format=None if job.stock else _OWN_FORMAT,
        n_ctx=job.context_tokens,
        n_threads=job.threads,
        n_threads_batch=job.threads,
        n_gpu_layers=-1 if gpu else 0,
        offload_kqv=gpu,
        logits_all=False,  # with a vocabulary of 152,000, the logits of one token are 0.6 MB
        verbose=False,
    )
    settings = ServerSettings(host=job.host, port=job.port, api_key=job.api_key, interrupt_requests=False)
    app = server.create_app(server_settings=settings, model_settings=[model])
    llama = server._llama_proxy()
    if not job.stock:
        app.user_middleware = [each for each in app.user_middleware if each.cls is not CORSMiddleware]
        if is_loopback(job.host):  # against DNS rebinding: a site may point its own host name at this machine
            hosts = [LOOPBACK, "localhost", job.host, f"[{job.host}]"]
            app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts)
        _own_template(job, llama)
        _refuse_what_crashes(server, llama, job)
        for error in (ValueError, RecursionError):
            app.add_exception_handler(error, _refuse_what_is_no_json)
        app.add_middleware(Clients)
        _tell_errors(server)
    return app, llama


def _no_templates() -> None:
    """Hides the templates in the metadata from llama_cpp.Llama, which reads some of them without their last byte."""
    from llama_cpp._internals import LlamaModel

    everything = LlamaModel.metadata

    def others(self: Any) -> dict[str, str]:
        return {key: text for key, text in everything(self).items() if not key.startswith("tokenizer.chat_template")}

    LlamaModel.metadata = others


def _own_template(job: ServerJob, llama: Any) -> None:
    """Renders chats with the job's template, which was read from the file's bytes."""
    from jinja2 import TemplateError
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter, chat_formatter_to_chat_completion_handler

    if job.template is None:
        return
    formatter = Jinja2ChatFormatter(job.template, job.eos, job.bos, stop_token_ids=[llama.token_eos()])

    def written(**arguments: Any) -> Any:
        try:
            response = _as_in_training(formatter, arguments)
        except (LookupError, TypeError, ValueError, TemplateError) as error:
            raise RefusedRequest(f"messages: the chat template does not take them: {error}") from None
        text = unicodedata.normalize("NFC", response.prompt) if job.composes else response.prompt
        _require_room(text, llama)
        return dataclasses.replace(response, prompt=text, stop=None)  # the end token ends answers, not its text

    llama.chat_handler = chat_formatter_to_chat_completion_handler(written)


def _as_in_training(formatter: Any, arguments: dict[str, Any]) -> Any:
    """Renders messages as rows of the training: an empty text for a null content, and the arguments of calls in the
    form that the template writes. Clients send null with tool calls, for which templates write `None`, or fail. A
    template that writes tool calls only for null gets null."""
    from jinja2 import TemplateError

    def tried(messages: Any) -> str | None:
        with suppress(LookupError, TypeError, ValueError, TemplateError):
            return str(formatter(**arguments | {"messages": messages}).prompt)
        return None

    def rendered(messages: Any) -> Any:
        return formatter(**arguments | {"messages": as_taken(messages, tried)[0]})

    sent = arguments["messages"]
    texts = [each | {"content": each["content"] or ""} for each in sent]
    response = rendered(texts)
    silent = [each | {"tool_calls": None} if each["content"] is None else each for each in sent]
    if silent != sent and tried([each | {"content": each["content"] or ""} for each in silent]) == response.prompt:
        return rendered(sent)
    return response


async def _refuse_what_is_no_json(request: Any, error: Exception) -> Any:
    """Answers HTTP 400. The server's own error handler would read the body again, and fail again."""
    from starlette.responses import JSONResponse

    problem = {"message": f"the request is not JSON: {error}", "type": "invalid_request_error"}
    return JSONResponse({"error": problem}, status_code=400)


def _refuse_what_crashes(server: Any, llama: Any, job: ServerJob) -> None:
    """Refuses requests that would crash llama.cpp or be answered wrongly. Also names the model `job.name` in answers,
    where an unchanged server has the request's name or the file's path."""
    handler, prepare, detokenize = server.RouteErrorHandler, server.prepare_request_resources, llama.detokenize
    wrapper, words, create = handler.error_message_wrapper, llama.n_vocab(), llama._create_completion

    def prepared(body: Any, proxy: Any, model: Any, options: dict[str, Any]) -> Any:
        require_no_grammar(body)
        if body.stream_options and not body.stream:
            raise RefusedRequest("stream_options: they are for stream: true")
        if not (body.logprobs is None or body.logprobs is False) or getattr(body, "top_logprobs", None):
            raise RefusedRequest("logprobs: the logits of a prompt are not kept, and the server could tell none")
        options["model"] = job.name
        options |= {"tools": None} if options.get("tool_choice") == "none" else {}
        llama.detokenize = partial(detokenized, special=bool(options.get("tools")))  # such as [TOOL_CALLS]
        options["seed"] = -1 if body.seed is None else body.seed  # another for each answer
        _drop_start(options, llama, job.bos)
        _require_room(options.get("prompt") or "", llama)
        chosen = prepare(body, proxy, model, options)
        require_finite(options)
        if not all(token.isdecimal() and int(token) < words for token in options.get("logit_bias") or ()):
            raise RefusedRequest(f"logit_bias: this model has the ids from 0 to {words - 1}")
        return chosen

    def detokenized(tokens: list[int], *more: Any, **options: Any) -> Any:
        if not all(0 <= token < words for token in tokens):
            raise RefusedRequest(f"tokens: this model has the ids from 0 to {words - 1}")
        return detokenize(tokens, *more, **options)

    def created(*values: Any, **options: Any) -> Iterator[Any]:
        try:
            yield from create(*values, **options)
        finally:  # for /extras/detokenize
            llama.detokenize = detokenized

    def wrapped(self: Any, error: Any, body: Any = None) -> Any:
        message = request_error(error)
        if message is None:
            return wrapper(self, error, body)
        return 400, {"message": message, "type": "invalid_request_error", "param": None, "code": None}

    server.prepare_request_resources, handler.error_message_wrapper = prepared, wrapped
    llama.detokenize, llama._create_completion = detokenized, created


@cache
def _most_bytes(llama: Any) -> int:
    """The size of a prompt that fills the context with the longest token."""
    text = bindings().llama_vocab_get_text
    return int(llama.n_ctx() * max(len(text(llama._model.vocab, token)) for token in range(llama.n_vocab())))


def _require_room(prompt: str, llama: Any) -> None:
    """Refuses a prompt that no context holds. llama.cpp takes minutes for a word of megabytes."""
    if (size := len(prompt.encode())) > _most_bytes(llama):
        raise RefusedRequest(
            f"the prompt has {size:,} bytes: more than {llama.n_ctx()} tokens, the context of the server"
        )


def _drop_start(options: dict[str, Any], llama: Any, bos: str) -> None:
    """Removes the BOS at the start of a prompt, such as a rendered row has, because the server adds one to each."""
    prompt = options.get("prompt")
    if prompt is None or not llama._model.add_bos_token() or not begins_itself(prompt, bos):
        return
    if prompt == bos:
        raise RefusedRequest("prompt: the start token alone is no prompt")
    options["prompt"] = prompt.removeprefix(bos)


def _tell_errors(server: Any) -> None:
    """Sends an error in a stream as its last event, because HTTP 200 is sent before the model runs."""
    from jinja2 import TemplateError

    publish, handler = server.get_event_publisher, server.RouteErrorHandler

    async def publish_errors(inner_send_chan: Any, body: Any, **more: Any) -> None:
        if (body.stream_options or {}).get("include_usage"):
            more["llama_call"] = partial(_with_usage, more["llama_call"])
        async with inner_send_chan, inner_send_chan.clone() as still_open:
            try:
                await publish(inner_send_chan=inner_send_chan, body=body, **more)
            except (AttributeError, LookupError, RuntimeError, TypeError, ValueError, TemplateError) as error:
                _, answer = handler.error_message_wrapper(handler, error, body)
                await still_open.send({"data": json.dumps({"error": answer})})

    server.get_event_publisher = publish_errors


def _with_usage(call: Callable[..., Any], llama: Any, **options: Any) -> Iterator[dict[str, Any]]:
    """The chunks of a stream, and a last chunk with the numbers of its tokens."""
    last: dict[str, Any] = {}
    for last in call(llama, **options):
        yield last | {"usage": None}
    read, written = len(llama.exchange.prompt_ids), len(llama.exchange.answer_ids)
    usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    yield last | {"choices": [], "usage": usage}


def _watch(llama: Any, send: Send | None) -> None:
    """Keeps the last prompt and answer in `llama.exchange`. `send` gets each exchange; None sends nothing."""
    generate, api = llama.generate, bindings()

    def watched(tokens: Any, *more: Any, **options: Any) -> Any:
        answer: list[int] = []
        llama.exchange = Exchange([int(token) for token in tokens], answer)
        try:
            for token in generate(tokens, *more, **options):
                if has_left():
                    return
                answer += [] if api.llama_vocab_is_eog(llama._model.vocab, token) else [int(token)]
                yield token
        finally:  # the server closes this generator where the answer ends
            if send is not None:
                send(msgspec.to_builtins(llama.exchange))

    llama.generate = watched


def _sample_as_transformers(llama: Any) -> None:
    """Applies the penalty to the prompt and the whole answer, and the temperature before the other samplers."""
    from llama_cpp import _internals
    from llama_cpp import llama_cpp as low

    chain, later = _internals.LlamaSampler, list[Callable[[], None]]()
    penalties, temperature = chain.add_penalties, chain.add_temp

    def penalized(self: Any, *, n_vocab: int, penalty_repeat: float, **more: Any) -> None:
        later.clear()
        penalties(self, n_vocab, penalty_repeat=1.0, **more)
        penalties(self, n_vocab, llama.n_ctx(), penalty_repeat, 0.0, 0.0)
        whole = low.llama_sampler_chain_get(self.sampler, low.llama_sampler_chain_n(self.sampler) - 1)
        for token in llama.exchange.prompt_ids:
            low.llama_sampler_accept(whole, token)

    def first(self: Any, temp: float) -> None:
        temperature(self, temp)
        while later:
            later.pop(0)()

    def behind(add: Callable[..., None]) -> Callable[..., None]:
        return lambda self, *values: later.append(partial(add, self, *values))

    for name in ("add_top_k", "add_typical", "add_top_p", "add_min_p"):
        setattr(chain, name, behind(getattr(chain, name)))
    chain.add_penalties, chain.add_temp = penalized, first


def _switch_off(defaults: str, field: str) -> None:
    """Sets a field of llama.cpp's default parameters to False. llama_cpp.server has no setting for these fields."""
    from llama_cpp import llama_cpp as low

    default = getattr(low, defaults)

    def switched_off() -> Any:
        settings = default()
        setattr(settings, field, False)
        return settings

    setattr(low, defaults, switched_off)


if __name__ == "__main__":
    live_worker_main(work)
