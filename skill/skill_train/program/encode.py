"""Tokens and labels: what is fed, and which part of it is trained."""

import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from functools import cached_property
from typing import Any, NotRequired, TypedDict

from skill_train.program.chat.answers import (
    IN_ORDER,
    MARK,
    TEMPLATE_FAILS,
    as_taken,
    left_out_answer,
    left_out_call,
    left_out_thoughts,
    marked_texts,
    python_notes,
    with_fewer_calls,
    with_marks,
    with_names,
)
from skill_train.program.chat.choices import is_left_out
from skill_train.program.chat.labels import IGNORED, end_of_turn, labels_of, text_across
from skill_train.program.chat.row_notes import ACROSS, ACROSS_IN_CHAT, RowNotes, findings
from skill_train.program.chat.typed import TYPED_AT_END, TYPED_INSIDE, control_tokens, typed_tokens
from skill_train.program.events import Refused
from skill_train.program.examples import (
    CALLS,
    EncodedRow,
    Example,
    Message,
    Pictured,
    Row,
    is_filled,
    media_in,
    to_example,
)
from skill_train.program.pictures.decode import PictureSource
from skill_train.program.pictures.in_rows import lift_pictures, media_beside, require_places
from skill_train.program.pictures.locations import rows_named
from skill_train.program.pictures.tokens import Pictures
from skill_train.program.tokenizer import begins_itself, set_date

# Time limits of a chat template; a published one takes less than a millisecond a conversation. The first limits each
# rendering, and all of them together. To the limit of all, a rendering and each of its characters add the other two.
TEMPLATE_SECONDS, SECONDS_A_RENDERING, SECONDS_A_CHARACTER = 10.0, 0.003, 2e-6
WITHOUT_TEMPLATE = (
    "the rows are trained without the model's chat template, so in a chat the model sees a different prompt "
    "from the one it was trained on"
)
ALREADY_RENDERED = "the rows hold the marks of the model's chat template, so a chat is asked with it"
ANOTHER_PROMPT = (
    "the chat template asks for an answer with another prompt than it writes before the answers of rows (a <think> or "
    "a system message more): in use the model sees a prompt that it was not trained on"
)
NOT_RENDERED = "the chat template leaves out {}, so the model is trained without them"
NO_TOOLS = NOT_RENDERED.format("the descriptions of tools")
BEGINS_OTHERWISE = (
    "the rows are trained without the token that begins each text, which llama-server and Ollama put before each "
    "prompt: begin the chat template with {{ bos_token }}"
)
ENDS_PROMPTS = (
    "the tokenizer puts an end token behind each text, and so do llama-server and Ollama behind each prompt: take it "
    "out of tokenizer.json (post_processor), and set add_eos_token to false"
)
SYSTEM_UNREAD = (
    "the system messages that stand beside the prompts are not read, because this model has no chat template: write "
    "them into the prompts if the answers need them"
)
WRITES_DATE = (
    "the chat template writes the date: all rows are trained with that of the day on which the training begins, and in "
    "use the model sees another one"
)
LEFT_OUT_TRAINED = "loss_on: all trains whole rows, and with them the answers that the rows leave out (weight: 0)"


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises TimeoutError if the block takes longer: chat templates are programs of somebody else. Only the main thread
    can be interrupted, so there is no limit in another one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: Any) -> None:
        raise TimeoutError(f"it did not end within {seconds:g} s")

    before, timer_before = signal.signal(signal.SIGALRM, end), signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer_before)
        signal.signal(signal.SIGALRM, before)


def endless_template(model: str) -> Refused:
    """The refusal of a chat template that is too slow. It names the model, because the next row would be as slow."""
    return Refused(
        f"the chat template of {model} is too slow for the conversations",
        code="unsafe_file",
        expected=f"at most {TEMPLATE_SECONDS:g} seconds more than a plain template needs for the same rows",
        got="it did not finish in that time",
        hint="correct chat_template.jinja or tokenizer_config.json in the model's folder, or use another model",
    )


class Feeding(TypedDict):
    """The fields of a recipe that say how a row is fed."""

    data: str
    format: str
    columns: dict[str, str]
    loss_on: str
    max_length: int
    data_file: NotRequired[str | None]


class Encoder:
    """Turns rows into token ids and labels, with the model's own template and tokenizer."""

    def __init__(self, recipe: Feeding, tokenizer: Any, pictures: Pictures | None = None) -> None:
        self.recipe = recipe
        self.tokenizer = tokenizer
        self.pictures = pictures  # None: the rows are text
        self.asked = list[bool]()  # by answer of the last row: whether its prompt is in the text as a chat asks it
        self.across = ""  # in the last row, a token that begins in the prompt and ends in the answer
        self.decodes = False  # whether to decode each picture once, so that broken ones are found before the training
        self.leaves_out = True  # whether to ignore pictures in columns that are not read; else they are refused
        self.count = 0
        self.noted: list[str] = [tokenizer.read_as] if hasattr(tokenizer, "read_as") else []
        self.typed, self.row_notes = RowNotes(TYPED_INSIDE, TYPED_AT_END), RowNotes()
        self.patience = TEMPLATE_SECONDS  # seconds left for the chat template
        added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        special = sorted(added | {*tokenizer.all_special_tokens}, key=len, reverse=True)
        self.special, self.end_of_turn = tuple(special), end_of_turn(special, tokenizer.eos_token)
        self.added = frozenset(tokenizer.added_tokens_decoder)
        self.own = frozenset(map(str, tokenizer.added_tokens_decoder.values()))
        if not tokenizer.is_fast:
            raise Refused("this model has no fast tokenizer", code="bad_tokenizer", expected="a tokenizer with offsets")

    @property
    def notes(self) -> list[str]:
        return [*self.noted, *self.typed.notes(self.count), *self.row_notes.notes(self.count)]

    def __call__(self, index: int, line: int, row: Row) -> EncodedRow:
        self.count += 1
        try:
            encoded = self.encoded(index, line, row)
            seen = encoded | {"tools": None} if NO_TOOLS in self.noted else encoded
            note = ACROSS_IN_CHAT if encoded["kind"] == "chat" else ACROSS
            across = [(note, f", {self.across!r}")] if self.across else []
            self.row_notes.add(line, [*findings(row, self.recipe["columns"], seen, self.own), *across])
            if encoded["kind"] == "chat" and self.control is not None:
                self.typed.add(line, typed_tokens(encoded["messages"], self.control))
            return encoded
        except Refused as refusal:
            rows = rows_named(self.recipe["data"], self.recipe.get("data_file"))
            refusal.error["message"] = f"line {line} of {rows}: {refusal.error['message']}"
            raise

    def encoded(self, index: int, line: int, row: Row) -> EncodedRow:
        columns = self.recipe["columns"]
        images: list[PictureSource] = []
        if not self.leaves_out:
            self.require_read(row)
        if self.pictures is not None:
            row, images = lift_pictures(row, columns)
        example = to_example(row, self.recipe["format"], columns)
        if images:
            require_places(example, len(images))
        if example["kind"] != "chat" and is_filled(row.get(columns.get("system", ""))):
            self.note(SYSTEM_UNREAD)
        self.asked = [example["kind"] != "chat"]
        rendered, spans = self.chat_spans(example) if example["kind"] == "chat" else self.plain_spans(example)
        if self.recipe["loss_on"] == "all":
            spans = [(0, len(rendered))]
        fed, pictured = rendered, Pictured()
        if self.pictures is not None:
            fed, spans, pictured = self.pictures.fed(rendered, spans, images)
            if self.decodes:
                self.pictures.read(pictured)
        ids, labels = self.tokens(fed, spans, is_chat=example["kind"] == "chat")
        if example["kind"] == "chat" and example["trained_messages"][-1] == len(example["messages"]) - 1:
            self.look_for_stop(next((label for label in reversed(labels) if label != IGNORED), IGNORED))
        limit = self.recipe["max_length"]
        if self.pictures is not None:
            self.pictures.require_whole(ids, fed, limit)
        return {
            "row": index,
            "line": line,
            **example,
            **pictured,
            "rendered": rendered,
            "input_ids": ids[:limit],
            "labels": labels[:limit],
            "truncated": len(ids) > limit,
            "full_length": len(ids),
        }

    def require_read(self, row: Row) -> None:
        """Refuses a row with a picture, sound or film in a column that is not read: the plan was made from the first
        rows, and the text alone would teach something else."""
        column = media_beside(row, self.recipe["columns"], pictures=self.pictures is not None)
        if column is not None:
            raise Refused(
                f"the column {column!r} contains an image, audio or video; no row that the plan was made from had one",
                code="not_text",
                expected=f"nothing beside {', '.join(self.recipe['columns'].values())}",
                got=media_in(row[column]) or repr(row[column])[:80],
                hint="to train on the pictures, set images: true, format, and columns with this column as images; "
                "to train on the text alone, set format and only the columns of the text",
            )

    def tokens(self, rendered: str, spans: list[tuple[int, int]], *, is_chat: bool) -> tuple[list[int], list[int]]:
        """Ids of the whole text, and labels. A token is trained if a part of it lies in a trained span: after the
        prompt "is ", the token " four" is trained, although it begins with a space of the prompt.

        A template writes its own special tokens. Plain text gets the tokenizer's usual ones, unless it begins with the
        first of them, and an end token, which is trained so that the model learns to stop.
        """
        adds = not is_chat and not begins_itself(rendered, self.tokenizer.bos_token)
        encoded = self.tokenizer(rendered, add_special_tokens=adds, return_offsets_mapping=True)
        ids = list(encoded["input_ids"])
        labels = labels_of(rendered, ids, encoded["offset_mapping"], spans, self.added)
        starts = [start for (start, _), asked in zip(spans, self.asked, strict=False) if asked]
        self.across = text_across(rendered, labels, encoded["offset_mapping"], starts)
        if not is_chat:
            if not ids or ids[-1] != self.end_token():
                ids, labels = [*ids, IGNORED], [*labels, IGNORED]
            ids[-1] = labels[-1] = self.end_token()  # an end token that the tokenizer appends itself is in no span
        return ids, labels

    def end_token(self) -> int:
        if self.tokenizer.eos_token_id is None:
            raise Refused(
                "the tokenizer has no end token", code="bad_tokenizer", hint="set eos_token in tokenizer_config.json"
            )
        return int(self.tokenizer.eos_token_id)

    def chat_spans(self, example: Example) -> tuple[str, list[tuple[int, int]]]:
        """The rendered conversation and the character spans of the assistant's answers, end token included."""
        if self.recipe["format"] in ("question_answer", "instruction"):
            self.require_unrendered(example["messages"])
        tools = example["tools"]
        messages, notes = as_taken(
            list(map(with_names, example["messages"])), lambda taken: self.try_render(taken, tools)
        )
        example["messages"] = messages
        rendered = self.render(messages, tools)
        self.require_calls(messages, tools, rendered)
        for note in (*notes, *python_notes(messages, tools, rendered), *left_out_thoughts(messages, rendered)):
            self.note(note)
        self.look_for_the_rest(example, rendered)
        if self.around[0] == self.tokenizer.bos_token_id and not begins_itself(rendered, self.tokenizer.bos_token):
            self.note(BEGINS_OTHERWISE)
        if self.around[1] == self.tokenizer.eos_token_id:
            self.note(ENDS_PROMPTS)
        if self.recipe["loss_on"] == "all":
            if any(message["role"] == "assistant" and is_left_out(message) for message in messages):
                self.note(LEFT_OUT_TRAINED)
            return rendered, []  # the whole text is trained, wherever the answers stand
        self.asked.clear()
        return rendered, [self.answer_span(example, rendered, i) for i in example["trained_messages"]]

    def require_calls(self, messages: list[Message], tools: Any, rendered: str) -> None:
        """Refuses calls of tools that the template does not write: all calls of an answer, or those after the first.
        The text is the same without such calls, and often an empty answer would be trained."""
        for index, message in enumerate(messages):
            for fewer, call in with_fewer_calls(message):
                if self.try_render([*messages[:index], fewer, *messages[index + 1 :]], tools) == rendered:
                    raise left_out_call(call)

    def look_for_the_rest(self, example: Example, rendered: str) -> None:
        """Notes that tools, or messages of a role such as system, do not stand in the text. Templates that do not know
        them leave them out without an error, and some write the calls of an answer without its text."""
        messages, tools = example["messages"], example["tools"]
        if tools and self.try_render(messages, None) == rendered:
            self.note(NO_TOOLS)
        for index, message in enumerate(messages):
            text, role = message["content"], message["role"]
            if not isinstance(text, str) or text.strip() in rendered:
                continue
            marked = message | {"content": MARK}
            if self.try_render([*messages[:index], marked, *messages[index + 1 :]], tools) == rendered:
                calls = role == "assistant" and any(map(message.get, CALLS))
                if index in example["trained_messages"] and not calls:
                    raise left_out_answer()
                what = "the text of answers that call a tool" if calls else f"messages of the role {role}"
                self.note(NOT_RENDERED.format(what))

    def look_for_stop(self, last: int) -> None:
        """Notes that transformers does not stop at the special token that ends a row, as with some base models."""
        ends = getattr(self.tokenizer, "ends", None)
        token = self.tokenizer.added_tokens_decoder.get(last)
        if ends is not None and token is not None and token.special and last not in ends:
            self.tokenizer.unlisted_ends |= {last}
            self.note(
                f"the answers end with {token.content}, at which transformers and vLLM do not stop by the base's "
                f"generation_config.json: that of the merged or fully trained model gets {last} in eos_token_id"
            )

    def answer_span(self, example: Example, rendered: str, index: int) -> tuple[int, int]:
        """The span of one answer: its text, its calls of tools, and the token that ends the turn. It starts where the
        generation prompt ends, because from there on the model writes."""
        messages, tools = example["messages"], example["tools"]
        calls = any(map(messages[index].get, CALLS))
        before = self.render(messages[:index], tools, add_generation_prompt=True) if index else ""
        prefix = len(before) if rendered.startswith(before) else 0
        self.asked.append(prefix > 0)
        if before and not prefix and index == example["trained_messages"][-1]:
            self.note(ANOTHER_PROMPT)  # many templates write earlier turns in another way, without their thoughts
        span = None if calls else self.around_answer(example, rendered, index)
        if span is None:
            through = self.render(messages[: index + 1], tools)
            # Some templates always open another answer behind it (Command R7B), as at the end of `before`.
            answer, eos, opening = through.rpartition(self.tokenizer.eos_token or MARK)
            through = answer + eos if before.endswith(opening) else through.rstrip()
            whole = rendered.startswith(through)
            span = self.around_calls(example, rendered, index) if calls and not (prefix and whole) else None
            begin = prefix or (self.start_of_calls(example, rendered, index) if calls and span is None else 0)
            if span is None and begin and whole:
                return begin, len(through) if through.endswith(self.special) else self.turn_end(rendered, len(through))
        if span is None:
            raise Refused(
                "the answers cannot be trained alone, because the chat template does not show where they are",
                code="template_mismatch",
                expected="a template that renders each answer in one piece",
                hint="set loss_on: all in the recipe to train on the whole conversation",
            )
        start, end = span
        return (prefix if 0 < prefix < end else start), self.turn_end(rendered, end)

    def around_answer(self, example: Example, rendered: str, index: int) -> tuple[int, int] | None:
        """The span of the answer without the token that ends it: what changes in the text when marks take the place of
        its text and thoughts, and its calls are left out. None if the row itself has the mark."""
        for content in marked_texts(example["messages"][index]["content"]) if MARK not in rendered else ():
            text = self.render(*with_marks(example, index, content, CALLS))
            (head, mark, _), tail = text.partition(MARK), text.rpartition(MARK)[2]
            if mark and rendered.startswith(head) and rendered.endswith(tail):
                return len(head), len(rendered) - len(tail)
            if text == rendered:
                raise left_out_answer()
        return None

    def start_of_calls(self, example: Example, rendered: str, index: int) -> int:
        """Where an answer with calls begins; 0 if its text does not stand before them, or no token alone ends it."""
        until: Any = example | {"messages": example["messages"][: index + 1]}
        with_calls, alone = (self.try_render(*with_marks(until, index, MARK, keys)) or "" for keys in ((), CALLS))
        head, mark, tail = alone.partition(MARK)
        ends = mark and self.end_of_turn and self.end_of_turn.fullmatch(tail.rstrip())
        return len(head) if ends and with_calls.startswith(head + MARK) and rendered.startswith(head) else 0

    def around_calls(self, example: Example, rendered: str, index: int) -> tuple[int, int] | None:
        """As `around_answer`, for an answer with calls of a template that writes the last message in another way (Qwen3
        thinks there). None if the span changes with later messages: some templates put the tool's answer into it."""
        messages = example["messages"]
        others = [message | {"content": MARK} for message in messages[index + 1 :]]
        try:
            span = self.around_answer(example, rendered, index)
            other = self.render([*messages[: index + 1], *others], example["tools"])
        except Refused as refusal:  # a tool that answers without a call
            if refusal.error["code"] == "unsafe_file":
                raise
            return None
        return span if span is not None and span[0] < span[1] and other.startswith(rendered[: span[1]]) else None

    def turn_end(self, rendered: str, end: int) -> int:
        match = self.end_of_turn.match(rendered, end) if self.end_of_turn else None
        if match is None:
            self.note("the template has no end token after an answer: the model will not learn where to stop")
            return end
        return match.end()

    def try_render(self, messages: list[Message], tools: Any) -> str | None:
        """The conversation as the template writes it; None where the template refuses it."""
        try:
            return self.render(messages, tools)
        except Refused as refusal:
            if refusal.error["code"] == "unsafe_file":
                raise
            return None

    def render(self, messages: list[Message], tools: Any, *, add_generation_prompt: bool = False) -> str:
        import jinja2

        if not self.tokenizer.chat_template:
            raise Refused(
                "the model has no chat template, so a conversation cannot be rendered",
                code="no_chat_template",
                expected="a model with a chat template (most Instruct models), or rows of plain text",
                hint="use the model's Instruct version, or data with `prompt` and `completion`, or `text`",
            )
        # The template's own refusal, and what its expressions raise.
        errors = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError)
        started = time.thread_time()
        try:
            with limited(max(0.001, min(TEMPLATE_SECONDS, self.patience))):
                set_date(self.tokenizer, self.written_day)
                return str(
                    self.tokenizer.apply_chat_template(
                        self.in_parts(messages),
                        tools=tools,
                        tokenize=False,
                        add_generation_prompt=add_generation_prompt,
                    )
                )
        except TimeoutError:
            raise endless_template(self.tokenizer.name_or_path) from None
        except (*errors, TypeError, ValueError) as error:
            raise Refused(
                f"the model's chat template rejects these messages: {error}",
                code="template_mismatch",
                got=" ".join(message["role"] for message in messages),
                hint=IN_ORDER if type(error) is jinja2.TemplateError else TEMPLATE_FAILS,  # the first: raise_exception
            ) from None
        finally:
            size = sum(len(message["content"]) for message in messages if isinstance(message.get("content"), str))
            earned = SECONDS_A_RENDERING + SECONDS_A_CHARACTER * size
            self.patience += earned - (time.thread_time() - started)

    def written_day(self, form: str) -> str:
        """The answer to a template that asks for the time: the day alone, so that a row is always the same text."""
        self.note(WRITES_DATE)
        return str(getattr(self.tokenizer, "day", date.today()).strftime(form))

    def in_parts(self, messages: list[Message]) -> list[Any]:
        """The messages as the template reads them. Templates of vision models expect parts, also of text alone."""
        if self.pictures is None:
            return list(messages)
        return [message | {"content": self.pictures.parts(message["content"])} for message in messages]

    def plain_spans(self, example: Example) -> tuple[str, list[tuple[int, int]]]:
        if self.tokenizer.chat_template:
            text = example["text"] if example["kind"] == "text" else example["prompt"]
            before = self.before_question()
            self.note(ALREADY_RENDERED if before and before in text else WITHOUT_TEMPLATE)
            example["without_template"] = self.recipe["format"] in ("completion", "text")  # these two ask for it
        if example["kind"] == "text":
            return example["text"], [(0, len(example["text"]))]
        rendered = example["prompt"] + example["completion"]
        return rendered, [(len(example["prompt"]), len(rendered))]

    def require_unrendered(self, messages: list[Message]) -> None:
        """Refuses a question that was rendered with the template before: it would be rendered twice."""
        question = next((message["content"] for message in messages if message["role"] == "user"), "")
        mark = next((mark for mark in self.template_marks if mark in question), None)
        if mark is not None:
            raise Refused(
                f"a question contains {mark!r}, which the model's chat template adds itself",
                code="template_mismatch",
                expected="a question without the markers of a template",
                got=question[:80],
                hint="set format: completion in the recipe to train rows that are already rendered",
            )

    @cached_property
    def template_marks(self) -> list[str]:
        """The text that the template writes right before a question, and every special token before it."""
        last = self.before_question()
        signed = {last} if last[:1] in ("<", "[") else set()
        return sorted({token for token in self.special if token and token in self.head} | signed)

    @cached_property
    def control(self) -> re.Pattern[str] | None:
        """A pattern for the tokens with which this template begins or ends a turn or a text; None if there are none."""
        turns: list[Message] = [{"role": role, "content": MARK} for role in ("user", "assistant", "user")]
        written = [self.try_render(turns, None), self.try_render([{"role": "system", "content": MARK}, *turns], None)]
        added: dict[int, Any] = self.tokenizer.added_tokens_decoder
        ends = [added[end].content for end in getattr(self.tokenizer, "ends", ()) if end in added]
        texts = [self.tokenizer.bos_token, self.tokenizer.eos_token, *ends, *written]
        return control_tokens(added.values(), " ".join(filter(None, texts)))

    @cached_property
    def around(self) -> tuple[int, int]:
        """The first and the last token of a plain text, which may be tokens that the tokenizer adds."""
        ids = self.tokenizer("a").input_ids or [IGNORED]  # a vocabulary may lack the letter
        return ids[0], ids[-1]

    def before_question(self) -> str:
        """The line that the template writes right before a question; empty if it writes none."""
        return self.head.removeprefix(self.tokenizer.bos_token or "").strip().rpartition("\n")[2]

    @cached_property
    def head(self) -> str:
        """What the template writes before a question; empty for a template that needs more than a question."""
        try:
            return self.render([{"role": "user", "content": MARK}], None).partition(MARK)[0]
        except Refused:
            return ""

    def note(self, text: str) -> None:
        if text not in self.noted:
            self.noted.append(text)
