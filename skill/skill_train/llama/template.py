"""Renders conversations with chat templates. A GGUF file's template runs in a child process, as llama-cpp-python runs
it. The template of the reference's tokenizer was tried when it was loaded, and runs in this process."""

from collections.abc import Callable
from datetime import date
from functools import partial
from typing import Any

import msgspec

from skill_train.core.errors import NativeCrash, from_exit_code
from skill_train.core.worker import run_worker
from skill_train.facts import JsonObject
from skill_train.llama.gguf_header import GgufFile
from skill_train.program.encode import endless_template, limited
from skill_train.program.tokenizer import set_date

WORKER = "skill_train.llama.template_worker"
SECONDS = 20  # for all conversations together


Message = JsonObject  # with `role` and `content`


def before_last_answer(messages: list[Message]) -> list[Message]:
    """The messages before the last assistant message; none if there is no assistant message."""
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    return messages[: answers[-1]] if answers else []


class Conversation(msgspec.Struct, frozen=True):
    """The input of a template."""

    messages: list[Message]
    tools: list[Any] | None
    add_generation_prompt: bool


class Rendered(msgspec.Struct, frozen=True):
    """The rendered text of a conversation. If the template fails, `text` is None and `refused` says why."""

    text: str | None = None
    refused: str = ""


class TemplateJob(msgspec.Struct, frozen=True, kw_only=True):
    """Conversations for one template. `seconds` is the time limit for all of them."""

    template: str
    bos: str
    eos: str
    seconds: float
    conversations: list[Conversation]


def render_with(template: str, gguf: GgufFile, conversations: list[Conversation]) -> list[Rendered] | str:
    """Renders each conversation in a child process, with the file's special tokens. Returns a sentence instead if the
    template does not end or needs too much memory."""
    bos, eos = special_texts(gguf)
    try:
        job = TemplateJob(template=template, bos=bos, eos=eos, seconds=SECONDS, conversations=conversations)
        return run_worker(WORKER, job, list[Rendered])
    except NativeCrash:
        return f"the template did not end within {SECONDS} seconds"


def render_reference(tokenizer: Any, conversations: list[Conversation], *, seconds: float = SECONDS) -> list[Rendered]:
    """Renders each conversation with the template of the reference's tokenizer.

    Args:
        seconds: the time limit for all conversations.

    Raises:
        UsageError: the template does not end in time.
    """
    try:
        with limited(seconds):
            return [rendered_by(partial(by_tokenizer, tokenizer), conversation) for conversation in conversations]
    except TimeoutError:
        refusal = endless_template(tokenizer.name_or_path)
        raise from_exit_code(refusal.exit_code, refusal.error) from None


def rendered_by(render: Callable[[Conversation], str], conversation: Conversation) -> Rendered:
    """Renders a conversation. An error of the template, or of Python in one of its expressions, becomes `refused`."""
    import jinja2

    errors = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError)
    try:
        return Rendered(render(conversation))
    except (*errors, TypeError, ValueError) as error:
        return Rendered(refused=f"{type(error).__name__}: {error}"[:300])


def by_tokenizer(tokenizer: Any, conversation: Conversation) -> str:
    """Renders with a transformers tokenizer. The template sees only the date of the time, as in `template_worker`."""
    set_date(tokenizer, date.today().strftime)
    prompt = conversation.add_generation_prompt
    return str(
        tokenizer.apply_chat_template(
            conversation.messages, tools=conversation.tools, tokenize=False, add_generation_prompt=prompt
        )
    )


def special_texts(gguf: GgufFile) -> tuple[str, str]:
    """The texts of BOS and EOS, as llama-cpp-python gives them to the template. Empty if the file does not name it."""
    tokens = gguf.tokens
    ids = (gguf.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    bos, eos = (str(tokens[i]) if isinstance(i, int) and 0 <= i < len(tokens) else "" for i in ids)
    return bos, eos
