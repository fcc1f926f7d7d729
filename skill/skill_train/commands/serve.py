"""`serve`: serves a GGUF file with OpenAI's protocol, its own template, and its model's own sampling."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from skill_train.commands._chosen_model import Chosen, gguf_of, warn_of_proof, warn_of_system
from skill_train.commands._command import PATH, Whole, argument, command, context_option, engine_device_option, option
from skill_train.core.console import Console, Result
from skill_train.core.errors import UsageError, quoted
from skill_train.core.secrets import read_key
from skill_train.evaluate.chat.prompts import GgufPrompts
from skill_train.llama.engines.python_server import LOOPBACK, ServerJob, is_loopback, require_server, served
from skill_train.llama.gguf_header import GgufFile, read_model_file
from skill_train.llama.sampling import Sampling, sampling_of, sampling_of_gguf, shown
from skill_train.llama.template import Conversation, special_texts

PORT = 8000


@dataclass(frozen=True)
class ServeOptions:
    model: Path = argument(PATH, metavar="RUN|FILE.gguf")
    quant: str | None = option(None, "GGUF file by its type (q4_k_m) or name.  [default: the file of the Modelfile]")
    host: str = option(LOOPBACK, "Address to listen on. Any but loopback needs --api-key.")
    port: int = option(PORT, "Port; 0 takes a free one.", Whole(0, 65535))
    api_key: str | None = option(
        None, "Where the key of the clients is: env:NAME for a variable, or a file. Never the key itself."
    )
    context: int = context_option()
    device: str | None = engine_device_option()


@command(
    ServeOptions,
    "skill-train serve runs/first --quant q4_k_m",
    "skill-train serve runs/first --host 0.0.0.0 --api-key env:SERVE_KEY",
)
def serve(options: ServeOptions, console: Console) -> Result:
    """Serve a GGUF file on this machine with OpenAI's protocol, its own template and the model's sampling."""
    _require_key(options)
    key = None if options.api_key is None else read_key(options.api_key)
    require_server()
    chosen = gguf_of(options.model, options.quant)
    if chosen.model.pictures is not None:
        raise _reads_pictures(chosen)
    warn_of_proof(console, chosen)
    warn_of_system(console, chosen, "send it as the first message")
    gguf = read_model_file(chosen.model.path)
    sampling, source = sampling_of(chosen.folder) if chosen.folder else sampling_of_gguf(gguf.metadata, gguf.path)
    job = _job(options, chosen, gguf, key, sampling)
    with console.progress("loading") as progress:
        progress(0, 1, chosen.model.name)
        with served(job) as server:
            progress(1, 1, chosen.model.name)
            answer = {
                "model": job.name,
                "url": server.url,
                "file": str(chosen.model.path),
                "engine": f"llama_cpp.server {server.version}",
                "device": server.device,
                "sampling": shown(job.sampling),
                "sampling_from": source,
            }
            settings = ", ".join(f"{name} {value:g}" for name, value in shown(job.sampling).items())
            console.status(f"{job.name}: {settings} ({source})")
            console.line(f"{job.name} at {server.url} on the {server.device.upper()}; Ctrl-C ends it", now=True)
            with suppress(KeyboardInterrupt):
                server.wait()
    return Result(answer, human=lambda rich: rich.print("ended"), quiet=server.url)


def _job(options: ServeOptions, chosen: Chosen, gguf: GgufFile, key: str | None, sampling: Sampling) -> ServerJob:
    from skill_train.machine.read import physical_cores

    trained = gguf.count("context_length")
    bos, eos = special_texts(gguf)
    prompts = None if chosen.raw else _prompts(chosen, gguf)
    return ServerJob(
        gguf=str(gguf.path),
        name=gguf.path.stem,
        host=options.host,
        port=options.port,
        api_key=key,
        template=None if prompts is None else prompts.template,
        bos=bos,
        eos=eos,
        composes=prompts is not None and prompts.composes,
        sampling=sampling,
        context_tokens=min(options.context, trained or options.context),
        threads=physical_cores(),
        device=options.device,
    )


def _prompts(chosen: Chosen, gguf: GgufFile) -> GgufPrompts:
    """The file's own template. It is tried on many conversations, and must write the same prompts as transformers.

    Raises:
        UsageError: the file has no template, or the template writes no prompt.
        VerificationFailed: the template writes other prompts.
    """
    from skill_train.reference.load import load_tokenizer
    from skill_train.verify.check_template import CONVERSATIONS
    from skill_train.verify.template_branches import BRANCHES

    tokenizer = None if chosen.folder is None else load_tokenizer(chosen.folder)
    prompts = GgufPrompts(gguf, tokenizer, raw=False)
    tried: list[Conversation] = [*CONVERSATIONS, *BRANCHES]
    answers = prompts.alike(tried)
    if all(each.text is None for each in answers):
        raise UsageError(
            f"the chat template of {gguf.path.name} refuses every conversation",
            code="template_mismatch",
            expected="a template that writes a prompt",
            got=answers[0].refused,
            hint="export the file again: skill-train export-gguf RUN",
        )
    return prompts


def _require_key(options: ServeOptions) -> None:
    if is_loopback(options.host) or options.api_key is not None:
        return
    raise UsageError(
        f"other machines can reach the model at {options.host}, and no key was given",
        code="bad_usage",
        expected="--api-key env:NAME or --api-key FILE beside --host",
        got="--host without --api-key",
        hint="leave --host out to serve this machine alone, or name the place of a key",
    )


def _reads_pictures(chosen: Chosen) -> UsageError:
    text, projector = chosen.model.path, chosen.model.projector or Path("MMPROJ.gguf")
    return UsageError(
        f"{chosen.model.name} reads pictures, and llama_cpp.server has no chat format that follows its template",
        code="vision",
        expected="a model of text",
        got="a pair of a language model and a projector",
        hint=f"serve the pair with llama.cpp's own server: llama-server -m {quoted(text)} --mmproj {quoted(projector)}",
    )
