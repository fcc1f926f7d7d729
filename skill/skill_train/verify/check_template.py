"""Checks that the chat template in a GGUF file writes the same prompts as the reference's template."""

from typing import Any

import msgspec

from skill_train.llama.gguf_header import GgufFile
from skill_train.llama.template import Conversation, Rendered, render_reference, render_with, special_texts
from skill_train.program.chat.labels import end_of_turn
from skill_train.run.records import Verdict
from skill_train.run.train_record import Row
from skill_train.run.verify_record import Check, Finding, NotChecked
from skill_train.verify.check import parting_place

# What the file's own template writes. None: the file has none. A sentence: it never ends, or takes too much memory.
OwnRendering = list[Rendered] | str | None
_USER = {"role": "user", "content": "What is 2 + 2?\nAnswer shortly."}
_ASSISTANT = {"role": "assistant", "content": "It is 4."}
_SYSTEM = {"role": "system", "content": "You are exact."}
_AGAIN = {"role": "user", "content": "  And 3 + 3? 🙂 "}

# What users send: with and without a system message, one turn and several, to be answered or complete.
CONVERSATIONS: tuple[Conversation, ...] = tuple(
    Conversation(messages, None, prompt)
    for messages, prompt in (
        ([_USER], True),
        ([_USER, _ASSISTANT], False),
        ([_SYSTEM, _USER], True),
        ([_USER, _ASSISTANT, _AGAIN], True),
        ([_SYSTEM, _USER, _ASSISTANT, _AGAIN, _ASSISTANT], False),
        ([_AGAIN], True),
    )
)


def row_conversations(rows: list[Row]) -> list[Conversation]:
    """The rows that are conversations, complete as they were trained."""
    return [Conversation(row["messages"], row.get("tools"), False) for row in rows if row["kind"] == "chat"]


def identity(gguf: GgufFile) -> str:
    """Equal for files that render every conversation alike."""
    return repr([gguf.metadata.get("tokenizer.chat_template"), *special_texts(gguf)])


def render_own(gguf: GgufFile, conversations: list[Conversation]) -> OwnRendering:
    """Each conversation by the file's own template."""
    template = gguf.metadata.get("tokenizer.chat_template")
    return render_with(template, gguf, conversations) if isinstance(template, str) else None


def check_chat_template(
    file: str, *, own: OwnRendering, reference: list[Rendered] | None, text: tuple[Verdict, str] = ("pass", "")
) -> Finding:
    """Checks that both templates write equal texts, and refuse the same conversations.

    Args:
        own: the result of `render_own`.
        reference: the result of `render_reference`; None when the reference has no template.
        text: the result of `template_branches.text_difference`.
    """
    if own is None and reference is None:
        return NotChecked("chat_template", file, "the reference has no chat template, and the file has none")
    if own is None:
        return Check("chat_template", file, "fail", "missing", "present", "the reference has a chat template")
    if isinstance(own, str):
        return Check("chat_template", file, "fail", "endless", "equal", own)
    if reference is None:
        why = "the file has a chat template and the reference has none"
        return Check("chat_template", file, "warn", "present", "missing", why)
    different = [pair for pair in zip(own, reference, strict=True) if pair[0].text != pair[1].text]
    if different:
        detail = first_difference(*different[0])
        return Check("chat_template", file, "fail", len(different), 0, detail, {"looked_at": len(own)})
    verdict, why = text
    good = f"{len(own)} conversations render alike" if verdict == "pass" else why
    return Check("chat_template", file, verdict, int(verdict != "pass"), 0, good, {"looked_at": len(own)})


def turn_end(tokenizer: Any) -> int | None:
    """The id of the special token with which the reference's template ends an answer; None when there is none. If
    several special tokens follow each other, it is the last one up to the end token, as in training."""
    if not tokenizer.chat_template:
        return None
    [rendered] = render_reference(tokenizer, [CONVERSATIONS[1]])
    _, content, after = (rendered.text or "").rpartition(_ASSISTANT["content"])
    marks = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    special = sorted(marks | {*tokenizer.all_special_tokens}, key=len, reverse=True)
    pattern = end_of_turn(special, tokenizer.eos_token)
    found = pattern.search(after) if pattern is not None and content else None
    return None if found is None else int(tokenizer(found.group(), add_special_tokens=False).input_ids[-1])


def opening(tokenizer: Any) -> str | None:
    """The line that the reference's template writes right before a question; None when there is no template. Training
    recognizes rows that were already rendered by this line."""
    if not tokenizer.chat_template:
        return None
    [rendered] = render_reference(tokenizer, [CONVERSATIONS[0]])
    head = (rendered.text or "").partition(_USER["content"])[0]
    return head.removeprefix(tokenizer.bos_token or "").strip().rpartition("\n")[2]


def openers(tokenizer: Any) -> set[int]:
    """Tokens that the reference's template writes before an answer.

    Some models list such a token as an end, as Phi-3 does with `<|assistant|>`. An answer has ended before the next one
    begins.
    """
    if not tokenizer.chat_template:
        return set()
    both = [msgspec.structs.replace(CONVERSATIONS[0], add_generation_prompt=prompt) for prompt in (True, False)]
    texts = [rendered.text or "" for rendered in render_reference(tokenizer, both)]
    ids, without = (tokenizer(text, add_special_tokens=False).input_ids for text in texts)
    return set(ids[parting_place(ids, without) :]) - {turn_end(tokenizer)}


def reads_clock(tokenizer: Any) -> bool:
    """Whether the reference's template writes the date, so that the prompt changes from day to day."""
    return "strftime_now" in str(tokenizer.chat_template)


def first_difference(own: Rendered, reference: Rendered) -> str:
    a, b = own.text, reference.text
    if a is None:
        return f"the file's template refuses a conversation: {own.refused}"
    if b is None:
        return f"the reference's template refuses a conversation that the file's accepts: {reference.refused}"
    at = parting_place(a, b)
    start = max(0, at - 20)
    return f"at character {at} the file writes {a[start : at + 30]!r}, the reference {b[start : at + 30]!r}"
