"""Tokens and labels: what is fed, and which part of it is trained."""

from __future__ import annotations

import itertools
import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypedDict

from skill_train.program.events import Refused, readable
from skill_train.program.examples import EncodedRow, Example, Message, Row, to_example
from skill_train.program.model_files import JsonObject, check_files, model_file
from skill_train.program.split import IGNORED

# Time limits of a chat template; a published one takes less than a millisecond a conversation. The first is for one
# conversation, and also for all together. To the latter each conversation and each of its characters adds the others.
TEMPLATE_SECONDS, SECONDS_A_RENDERING, SECONDS_A_CHARACTER = 10.0, 0.003, 2e-6
WITHOUT_TEMPLATE = (
    "the rows are trained as they stand, without the model's chat template: asked through a chat, the model sees "
    "another prompt than it was trained on"
)
MARK = "skill train mark 7f3a"  # stands in for an answer to find where a template puts it
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tiktoken.model")
# The fields of a tokenizer.json that decide which ids a text gets: of its model, and of each added token.
FLAGS = ("byte_fallback", "continuing_subword_prefix", "dropout", "end_of_word_suffix", "fuse_unk", "ignore_merges")
MARKS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
PROBES = ("    two  words", " word", "1234 don't\n\n x", "<s>[INST] hi [/INST]", "<s>hi", "é🙂 你好")


def has_tokenizer(folder: Path) -> bool:
    """Whether a model folder holds a tokenizer. Without one, transformers makes an empty tokenizer of the model's
    type."""
    return any((folder / name).is_file() for name in TOKENIZERS)


def load_tokenizer(model: str, revision: str | None) -> Any:
    """The model's own tokenizer. Without its files transformers would silently make an empty one of the model's
    type."""
    check_files(Path(model))
    if Path(model).is_dir() and not has_tokenizer(Path(model)):
        raise no_tokenizer(model, f"one of {', '.join(TOKENIZERS)} in the model folder", "none of them")
    with readable(model):
        tokenizer = read_tokenizer(model, revision)
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise no_tokenizer(model, "a vocabulary", f"{len(tokenizer)} special tokens and nothing else")
    require_one_vocabulary(model, revision, tokenizer)
    return tokenizer


def require_one_vocabulary(model: str, revision: str | None, tokenizer: Any) -> None:
    """Refuses a tokenizer.model with another vocabulary than the tokenizer.json beside it.

    Training uses tokenizer.json. For most families that have both, llama.cpp's converter reads tokenizer.model.
    """
    pieces = model_file(model, revision, "tokenizer.model")
    if pieces is None or model_file(model, revision, "tokenizer.json") is None:
        return
    try:
        from sentencepiece import SentencePieceProcessor

        processor = SentencePieceProcessor(model_file=pieces)
    except (ImportError, RuntimeError):
        return  # the file is not of sentencepiece, with which the converter reads it; or sentencepiece is not here
    vocabulary, added = tokenizer.get_vocab(), tokenizer.added_tokens_decoder
    marks = (processor.is_control, processor.is_unknown, processor.is_unused, processor.is_byte)
    for number in range(processor.get_piece_size()):
        piece = processor.id_to_piece(number)
        if vocabulary.get(piece) != number and number not in added and not any(is_mark(number) for is_mark in marks):
            raise Refused(
                f"tokenizer.model and tokenizer.json of {model} have different vocabularies",
                code="bad_tokenizer",
                expected="one vocabulary: training uses tokenizer.json, llama.cpp's converter tokenizer.model",
                got=f"{piece!r} is {number} in tokenizer.model and {vocabulary.get(piece)} in tokenizer.json",
                hint="restore the published files of the model, or remove the file that does not belong to it",
            )


def read_tokenizer(model: str, revision: str | None) -> Any:
    """The tokenizer with the ids of llama.cpp.

    llama.cpp makes the ids of tokenizer.json, whatever class tokenizer_config.json names (measured for each class of
    transformers 5.23 that a decoder uses). Classes such as LlamaTokenizer take the vocabulary of that file, and split
    text in a way of their own. If the two disagree, `tokenizer.read_as` says so.
    """
    from transformers.models.auto import (
        AutoTokenizer,
    )  # not transformers.AutoTokenizer: the converter has another there

    tokenizer = AutoTokenizer.from_pretrained(model, revision=revision, trust_remote_code=False)
    published = model_file(model, revision, "tokenizer.json")
    pieces = model_file(model, revision, "tokenizer.model") if published is None else None
    if pieces is not None:
        return by_scores(tokenizer, pieces)
    if published is not None and not follows_its_file(tokenizer):
        tokenizer = as_published(tokenizer, published, model, revision)
    return with_prefix_of_llama_cpp(tokenizer)


def follows_its_file(tokenizer: Any) -> bool:
    """Whether this class uses tokenizer.json unchanged. Other classes build it anew."""
    return type(tokenizer).__name__ == "TokenizersBackend" or not tokenizer.is_fast


def by_scores(tokenizer: Any, file: str) -> Any:
    """The tokenizer of a model that has only a tokenizer.model, as llama.cpp reads that file.

    llama.cpp joins pieces by their scores, and puts a space before the text if the file says so. transformers 5.23
    joins them by their ids, and decides about the space by the class.
    """
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import decoders, models, normalizers

    model_proto = sentencepiece_model_pb2.ModelProto.FromString(Path(file).read_bytes())
    if not tokenizer.is_fast or model_proto.trainer_spec.model_type != model_proto.trainer_spec.BPE:
        return tokenizer
    before = {text: ids_of(tokenizer, text) for text in PROBES}
    vocab = {piece.piece: number for number, piece in enumerate(model_proto.pieces)}
    unknown = next((piece.piece for piece in model_proto.pieces if piece.type == piece.UNKNOWN), None)
    bytes_too = any(piece.type == piece.BYTE for piece in model_proto.pieces)
    backend = tokenizer.backend_tokenizer
    backend.model = models.BPE(
        vocab=vocab, merges=merges_of(model_proto, vocab), unk_token=unknown, fuse_unk=True, byte_fallback=bytes_too
    )
    space = model_proto.normalizer_spec.add_dummy_prefix
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer, backend.pre_tokenizer = normalizers.Sequence(steps if space else steps[1:]), None
    joined = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(joined if space else joined[:-1])
    differing = next((text for text, ids in before.items() if ids_of(tokenizer, text) != ids), None)
    if differing is not None:
        tokenizer.read_as = (
            f"the tokenizer is read from tokenizer.model by the scores of its pieces, which is how llama.cpp reads it: "
            f"transformers' {type(tokenizer).__name__} gives {differing!r} other ids"
        )
    return tokenizer


def merges_of(model_proto: Any, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, the best score first."""
    merges = []
    for piece in model_proto.pieces:
        if piece.type == piece.NORMAL:
            parts = ((piece.piece[:cut], piece.piece[cut:]) for cut in range(1, len(piece.piece)))
            merges += [(-piece.score, left, right) for left, right in parts if left in vocab and right in vocab]
    merges.sort(key=lambda merge: merge[0])
    return [(left, right) for _, left, right in merges]


def as_published(tokenizer: Any, file: str, model: str, revision: str | None) -> Any:
    """The tokenizer itself if it does all that its tokenizer.json says, or else the tokenizer of that file."""
    from transformers import PreTrainedTokenizerFast

    document = json.loads(Path(file).read_text(encoding="utf-8"))
    added = {token["id"]: [token[name] for name in MARKS] for token in document["added_tokens"]}
    done = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    same = added == {number: [getattr(token, name) for name in MARKS] for number, token in done.items()}
    if same and splitting(without_words(document)) == splitting(tokenizer.backend_tokenizer):
        return tokenizer
    plain = PreTrainedTokenizerFast.from_pretrained(model, revision=revision, trust_remote_code=False)
    differing = next((text for text in PROBES if ids_of(plain, text) != ids_of(tokenizer, text)), None)
    if differing is not None:
        plain.read_as = (
            f"the tokenizer is read as tokenizer.json has it, which is how llama.cpp reads it: transformers' "
            f"{type(tokenizer).__name__} gives {differing!r} other ids"
        )
    return plain


def without_words(document: JsonObject) -> Any:
    """The tokenizer of such a document with an empty vocabulary. transformers always takes the vocabulary from the
    file."""
    from tokenizers import Tokenizer

    empty: JsonObject = {"vocab": {}, "merges": []} if document["model"].get("type") == "BPE" else {}
    return Tokenizer.from_str(json.dumps({**document, "model": {**document["model"], **empty}, "added_tokens": []}))


def splitting(backend: Any) -> list[Any]:
    """The settings, beside vocabulary and merges, that decide which ids a text gets."""
    steps = [step and step.__getstate__() for step in (backend.normalizer, backend.pre_tokenizer)]
    return [type(backend.model), *steps, *(getattr(backend.model, name, None) for name in FLAGS)]


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def with_prefix_of_llama_cpp(tokenizer: Any) -> Any:
    """Puts a space before text that follows a special token, if the tokenizer puts one only before the first word.

    llama.cpp has one rule for pieces of sentencepiece: each stretch of text between special tokens gets the space.
    """
    if not tokenizer.is_fast:
        return tokenizer
    from tokenizers import normalizers

    backend = tokenizer.backend_tokenizer
    step = backend.pre_tokenizer
    splitter = json.loads(step.__getstate__()) if step else {}
    is_sentencepiece = type(backend.model).__name__ == "BPE" and backend.model.byte_fallback
    if not is_sentencepiece or backend.normalizer or splitter.get("prepend_scheme", "never") == "never":
        return tokenizer
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = None
    if splitter["prepend_scheme"] == "first":
        tokenizer.read_as = (
            "text after a special token begins with a space, as llama.cpp reads this vocabulary; "
            "tokenizer.json puts one before the first word only"
        )
    return tokenizer


def no_tokenizer(model: str, expected: str, got: str) -> Refused:
    return Refused(
        f"{model} has no tokenizer",
        code="bad_tokenizer",
        expected=expected,
        got=got,
        hint="download the whole model, or copy the tokenizer files from its base model",
    )


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises TimeoutError if the block takes longer. It is for chat templates, which are programs of somebody else.

    Only the main thread can be interrupted, and Windows has no such timer. There is no limit then.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: Any) -> None:
        raise TimeoutError(f"it did not end within {seconds:g} s")

    before, left = signal.signal(signal.SIGALRM, end), signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *left)
        signal.signal(signal.SIGALRM, before)


def endless_template(model: str) -> Refused:
    """The refusal of a chat template that is too slow. It blames the model and not a row: the next row would be as
    slow."""
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


class Encoder:
    """Turns rows into token ids and labels, with the model's own template and tokenizer."""

    def __init__(self, recipe: Feeding, tokenizer: Any) -> None:
        self.recipe = recipe
        self.tokenizer = tokenizer
        self.count = 0
        self.notes: list[str] = [tokenizer.read_as] if hasattr(tokenizer, "read_as") else []
        self.marks: list[str] | None = None
        self.patience = TEMPLATE_SECONDS  # left for the chat template
        special = sorted({*tokenizer.all_special_tokens, *added_special_tokens(tokenizer)}, key=len, reverse=True)
        self.end_of_turn = re.compile(r"\s*(?:" + "|".join(map(re.escape, special)) + ")") if special else None
        if not tokenizer.is_fast:
            raise Refused("this model has no fast tokenizer", code="bad_tokenizer", expected="a tokenizer with offsets")

    def __call__(self, index: int, line: int, row: Row) -> EncodedRow:
        self.count += 1
        try:
            example = to_example(row, self.recipe["format"], self.recipe["columns"])
            rendered, spans = self.chat_spans(example) if example["kind"] == "chat" else self.plain_spans(example)
        except Refused as refusal:
            refusal.error["message"] = f"line {line} of {self.recipe['data']}: {refusal.error['message']}"
            raise
        if self.recipe["loss_on"] == "all":
            spans = [(0, len(rendered))]
        ids, labels = self.tokens(rendered, spans, is_chat=example["kind"] == "chat")
        limit = self.recipe["max_length"]
        return {
            "row": index,
            "line": line,
            **example,
            "rendered": rendered,
            "input_ids": ids[:limit],
            "labels": labels[:limit],
            "truncated": len(ids) > limit,
            "full_length": len(ids),
        }

    def tokens(self, rendered: str, spans: list[tuple[int, int]], *, is_chat: bool) -> tuple[list[int], list[int]]:
        """Ids of the whole text, and labels. A token is trained if a part of it lies inside a trained span.

        A token may begin with the space that ends the prompt: "is " + "four" is read as " four". It belongs to the
        answer. A template writes its own special tokens. Plain text gets the tokenizer's usual ones and an end token,
        which is trained so that the model learns to stop.
        """
        encoded = self.tokenizer(rendered, add_special_tokens=not is_chat, return_offsets_mapping=True)
        ids = list(encoded["input_ids"])
        # Some tokenizers leave spaces out of their offsets, so a token of only a space has none. Such a token begins
        # where the token before it ends.
        offsets = encoded["offset_mapping"]
        ends = itertools.accumulate((end for _, end in offsets), max, initial=0)
        offsets = [(min(start, before), end) for (start, end), before in zip(offsets, ends, strict=False)]
        inside = [any(start < b and end > max(a, start) for a, b in spans) for start, end in offsets]
        labels = [token if trained else IGNORED for token, trained in zip(ids, inside, strict=True)]
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
        messages = example["messages"]
        if self.recipe["format"] in ("question_answer", "instruction"):
            self.require_unrendered(messages)
        rendered = self.render(messages, example["tools"])
        if self.recipe["loss_on"] == "all":
            return rendered, []  # the whole text is trained, wherever the answers stand
        return rendered, [self.answer_span(example, rendered, i) for i in example["trained_messages"]]

    def answer_span(self, example: Example, rendered: str, index: int) -> tuple[int, int]:
        """The span of one answer: its text, its calls of tools, and the token that ends the turn.

        It starts where the generation prompt ends, because from there on the model writes.
        """
        messages, tools = example["messages"], example["tools"]
        calls = bool(messages[index].get("tool_calls"))
        before = self.render(messages[:index], tools, add_generation_prompt=True) if index else ""
        prefix = len(before) if rendered.startswith(before) else 0
        span = None if calls else self.around_answer(example, rendered, index)
        if span is None:
            through = self.render(messages[: index + 1], tools)
            if prefix and rendered.startswith(through):
                return prefix, len(through.rstrip()) if through.strip() else len(through)
            span = self.around_calls(example, rendered, index) if calls else None
        if span is None:
            raise Refused(
                "the answers cannot be trained alone, because the chat template does not show where they are",
                code="template_mismatch",
                expected="a template that renders each answer in one piece",
                hint="set loss_on: all in the recipe to train on the whole conversation",
            )
        start, end = span
        return (prefix if 0 < prefix <= start else start), self.turn_end(rendered, end)

    def around_answer(self, example: Example, rendered: str, index: int) -> tuple[int, int] | None:
        """The span of the answer without the token that ends it.

        The text and calls of the answer are replaced by a mark. What is the same around the mark is not the answer.
        """
        messages = example["messages"]
        marked = messages[index] | {"content": MARK}
        marked.pop("tool_calls", None)
        text = self.render([*messages[:index], marked, *messages[index + 1 :]], example["tools"])
        head, mark, tail = text.partition(MARK)
        if mark and rendered.startswith(head) and rendered.endswith(tail):
            return len(head), len(rendered) - len(tail)
        return None

    def around_calls(self, example: Example, rendered: str, index: int) -> tuple[int, int] | None:
        """The same for an answer with calls, for templates that write the last message in another way (Qwen3 thinks
        there). None if the span changes with the messages that follow: some templates put the tool's answer into it."""
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
                return str(
                    self.tokenizer.apply_chat_template(
                        messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
                    )
                )
        except TimeoutError:
            raise endless_template(self.tokenizer.name_or_path) from None
        except (*errors, TypeError, ValueError) as error:
            raise Refused(
                f"the model's chat template rejects these messages: {error}",
                code="template_mismatch",
                got=" ".join(message["role"] for message in messages),
                hint="put the roles in the order that it expects: often system once, then user and assistant in turn",
            ) from None
        finally:
            size = sum(len(message["content"]) for message in messages if isinstance(message.get("content"), str))
            earned = SECONDS_A_RENDERING + SECONDS_A_CHARACTER * size
            self.patience += earned - (time.thread_time() - started)

    def plain_spans(self, example: Example) -> tuple[str, list[tuple[int, int]]]:
        if self.tokenizer.chat_template:
            self.note(WITHOUT_TEMPLATE)
            example["without_template"] = self.recipe["format"] in ("completion", "text")  # these two ask for it
        if example["kind"] == "text":
            return example["text"], [(0, len(example["text"]))]
        rendered = example["prompt"] + example["completion"]
        return rendered, [(len(example["prompt"]), len(rendered))]

    def require_unrendered(self, messages: list[Message]) -> None:
        """Refuses a question that was already rendered with the template: it would be rendered twice."""
        question = next(message["content"] for message in messages if message["role"] == "user")
        mark = next((mark for mark in self.template_marks() if mark in question), None)
        if mark is not None:
            raise Refused(
                f"a question contains {mark!r}, which the model's chat template adds itself",
                code="template_mismatch",
                expected="a question without the markers of a template",
                got=question[:80],
                hint="set format: completion in the recipe to train rows that are already rendered",
            )

    def template_marks(self) -> list[str]:
        """The text that the template writes right before a question, and every special token before it."""
        if self.marks is None:
            head = ""
            with suppress(Refused):  # a template that needs more than a question
                head = self.render([{"role": "user", "content": MARK}], None).partition(MARK)[0]
            special = {*self.tokenizer.all_special_tokens, *added_special_tokens(self.tokenizer)}
            last = head.removeprefix(self.tokenizer.bos_token or "").strip().rpartition("\n")[2]
            signed = {last} if last[:1] in ("<", "[") else set()
            self.marks = sorted({token for token in special if token and token in head} | signed - {""})
        return self.marks

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def added_special_tokens(tokenizer: Any) -> list[str]:
    return [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
