"""The number of tokens in the rows of a dataset: estimated from bytes, or counted once and cached."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path

import msgspec
from msgspec.structs import asdict, replace

from skill_train.core.errors import UsageError
from skill_train.core.files import write_json
from skill_train.facts import DatasetFacts, ModelFacts, PictureTokenFacts, TokenFacts
from skill_train.machine import read
from skill_train.program.pictures.decode import PictureSize
from skill_train.program.pictures.engine import Engine
from skill_train.program.pictures.processor import ImageProcessor, PictureTokens, limited_processor, picture_tokens
from skill_train.program.tokenizer import has_tokenizer
from skill_train.recipe.fields import Recipe
from skill_train.recipe.preprocess import preprocess_of
from skill_train.run.records import convert, read_json

SCHEMA = "skill-train/tokens/1"
# Measured 2026-11 on sentences in five languages, JSON and Python: Qwen2 2.3 to 4.8, Llama 3 2.6 to 5.1, Phi-3 and
# Mistral 2.1 to 4.6. Columns of numbers make 1 to 2, and GPT-2 below 2 outside Latin script: then count with --model.
BYTES_A_TOKEN = (2.0, 5.0)
# Tokens around each message: ChatML writes <|im_start|> role newline … <|im_end|> newline (5), Llama 3 two header
# marks, the role, a blank line and <|eot_id|> (5), Mistral [INST] or </s> (1 to 2). Source: the models' own templates.
TOKENS_A_TURN = (1, 6)
# Tokens of each conversation: a first token, and the template's own system message (Llama 3.1: about 25, Qwen2.5: 21).
TOKENS_A_CONVERSATION = (0, 40)
TOKENS_A_TEXT = (1, 2)  # plain text: an end token, and a first token if the tokenizer adds one
_WHOLE_FILE_BYTES = 4 << 20
_RECENT = 4096  # sizes of pictures whose tokens stay
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


class Lengths(msgspec.Struct, frozen=True):
    """Counted rows before any cut."""

    rows: int  # the rows of the dataset
    # `(tokens, trained tokens, position of the first trained token)` of each counted row, shortest first
    counted: list[tuple[int, int, int]]
    longest: int  # the tokens of the row with most text, which need not be among the counted rows


def counter_of(recipe: Recipe, model: ModelFacts) -> PictureCounter | None:
    """The counter for the pictures that this model is trained on; None where its image processor is unknown.

    Raises:
        Refused, UsageError: the recipe asks for what the family does not have.
    """
    if model.image_processor is None:
        return None
    processor = limited_processor(model.image_processor, recipe.min_pixels, recipe.max_pixels)
    return PictureCounter(processor, engine=preprocess_of(recipe, model.model_type).value == "engine")


class PictureCounter:
    """Counts the tokens of pictures, row by row. `of` gives the tokens of a picture of some size. It raises `Refused`
    if nothing is left of the picture after resizing."""

    def __init__(self, processor: ImageProcessor, *, engine: bool) -> None:
        counted = partial(picture_tokens, processor, engine=Engine(processor) if engine else None)
        self.of: Callable[[PictureSize], PictureTokens] = lru_cache(_RECENT)(counted)
        self._rows = self._parts = self._fed = self._longest = self._longest_fed = self._most = 0
        self._least: int | None = None
        self._squares = 0.0

    def add(self, sizes: list[PictureSize]) -> None:
        pictures = [self.of(size) for size in sizes]
        parts = sum(picture.parts for picture in pictures)
        fed = parts + sum(picture.around for picture in pictures)
        self._rows, self._parts, self._fed = self._rows + 1, self._parts + parts, self._fed + fed
        self._longest, self._longest_fed = max(self._longest, parts), max(self._longest_fed, fed)
        self._squares += sum(picture.parts**2 / picture.read for picture in pictures)
        for picture in pictures:
            self._most = max(self._most, picture.parts)
            self._least = picture.parts if self._least is None else min(self._least, picture.parts)

    def facts(self) -> PictureTokenFacts | None:
        """None where no row has a picture."""
        if self._least is None:
            return None
        return PictureTokenFacts(
            least=self._least,
            most=self._most,
            mean=self._parts / self._rows,
            longest=self._longest,
            mean_fed=self._fed / self._rows,
            longest_fed=self._longest_fed,
            mean_squares=self._squares / self._rows,
        )


def token_range(
    rows: int, text_bytes: int, longest_text_bytes: int, max_length: int, turns: int = 0, longest_turns: int = 0
) -> TokenFacts:
    """Tokens for each row without a tokenizer: 2 to 5 UTF-8 bytes a token, plus the tokens of a template.

    Args:
        turns: the messages of all rows, 0 for plain text.
        longest_turns: the messages of the row with most of them.

    `mean_cut` assumes rows of equal length. If a few rows are much longer than the others, the true value is lower.
    """
    mean = _tokens(text_bytes / max(rows, 1), turns / max(rows, 1))
    longest = _tokens(longest_text_bytes, longest_turns)
    return TokenFacts(
        basis="2 to 5 bytes a token",
        counted=False,
        mean=mean,
        longest=(round(max(longest[0], mean[0])), round(longest[1])),
        mean_cut=(min(mean[0], max_length), min(mean[1], max_length)),
        max_length=max_length,
    )


def with_pictures(text: TokenFacts, pictures: PictureTokenFacts) -> TokenFacts:
    """The range of rows of text with the tokens of their pictures, which are known. The longest text may stand in the
    row with most pictures, or in another one."""
    mean = (text.mean[0] + pictures.mean_fed, text.mean[1] + pictures.mean_fed)
    return replace(
        text,
        basis=f"{text.basis} of text, and what stands for the pictures",
        mean=mean,
        longest=(max(text.longest[0], pictures.longest_fed, round(mean[0])), text.longest[1] + pictures.longest_fed),
        mean_cut=(min(mean[0], text.max_length), min(mean[1], text.max_length)),
    )


def token_facts(lengths: Lengths, max_length: int) -> TokenFacts:
    """The facts of counted rows for one `max_length`."""
    sizes = [size for size, _, _ in lengths.counted]
    count, total = len(sizes), sum(sizes)
    mean, cut = total / count, sum(min(size, max_length) for size in sizes) / count
    everything = count >= lengths.rows
    return TokenFacts(
        basis="counted in all rows" if everything else f"counted in {count} of {lengths.rows} rows",
        counted=True,
        mean=(mean, mean),
        longest=(lengths.longest, lengths.longest),
        mean_cut=(cut, cut),
        max_length=max_length,
        trained_share=sum(trained for _, trained, _ in lengths.counted) / total if total else 0.0,
        truncated_share=sum(size > max_length for size in sizes) / count,
    )


def way_to_answers(lengths: Lengths, max_length: int, context: int | None) -> str:
    """What to do where max_length cuts away the answer of every row."""
    if context is None or lengths.longest <= context:
        return f"raise --max-length: the longest row has {lengths.longest} tokens"
    first = min(start for _, _, start in lengths.counted)
    if max_length < context and first < context:
        return f"raise --max-length to {context}, the positions of the model, and part longer rows before their answers"
    return f"shorten what stands before the answers: they begin at token {first}, and the model has {context} positions"


def cut_away(tokens: TokenFacts, context: int | None = None) -> str | None:
    """The warning if max_length surely cuts away a hundredth of the tokens or more; otherwise None."""
    share = 1 - tokens.mean_cut[0] / tokens.mean[0] if tokens.mean[0] else 0.0
    if share < 0.01:
        return None
    advice = "Raise it, or part such rows"
    if context is not None and context < tokens.longest[1]:
        advice = f"The model has {context} positions: raise it no further, and part longer rows"
    least = "" if tokens.counted else "at least "
    return (
        f"max_length {tokens.max_length} cuts away {least}{share:.0%} of the tokens, from the ends of rows, where "
        f"answers stand: a row has up to {tokens.longest[1]}. {advice}"
    )


class Bucket(msgspec.Struct, frozen=True):
    """Rows of at most `up_to` tokens, and more than the bucket before."""

    up_to: int
    rows: int


def distribution(lengths: Lengths) -> tuple[tuple[int, int, int], list[Bucket]]:
    """The percentiles 50, 90 and 99 (nearest rank), and a histogram."""
    sizes = sorted(size for size, _, _ in lengths.counted)
    p50, p90, p99 = (sizes[max(0, -(-p * len(sizes) // 100) - 1)] for p in (50, 90, 99))
    histogram, edge, done = list[Bucket](), 16, 0
    while done < len(sizes):
        below = sum(size <= edge for size in sizes)
        if below:
            histogram.append(Bucket(edge, below - done))
        done, edge = below, edge * 2
    return (p50, p90, p99), histogram


def known_tokens(
    dataset: DatasetFacts, tokenizer: str | None, *, split: str, loss_on: str | None, max_length: int
) -> TokenFacts | None:
    """What `skill-train data --model` counted for this dataset and tokenizer, or None. Takes milliseconds.

    Args:
        tokenizer: `tokenizer_key` of the model.
        loss_on: the field of the recipe; None if the format decides.
    """
    path = _cache_path(dataset, tokenizer, split, loss_on)
    if path is None:
        return None
    try:
        document = read_json(path)
        lengths = convert(document, Lengths, path)
        return token_facts(lengths, max_length) if document.get("schema") == SCHEMA else None
    except (OSError, UsageError, ZeroDivisionError):  # a cache may be lost or torn: count again
        return None


def keep(dataset: DatasetFacts, tokenizer: str | None, lengths: Lengths, *, split: str, loss_on: str | None) -> None:
    """Writes the counts to the cache that `known_tokens` reads."""
    path = _cache_path(dataset, tokenizer, split, loss_on)
    if path is not None:
        with suppress(OSError):  # it costs another count
            write_json(path, {"schema": SCHEMA, **asdict(lengths)})


def tokenizer_key(model: str, revision: str | None) -> str | None:
    """A key that changes with the tokenizer or its template; None if a change cannot be detected. For a large file it
    uses the size, the time of the last change and both ends.

    Args:
        model: a folder or a Hub id.
        revision: the commit, for a Hub id.
    """
    folder = Path(model)
    if not folder.is_dir():
        return f"{model}@{revision}" if revision else None
    if not has_tokenizer(folder):
        return None
    sha256 = hashlib.sha256()
    for path in (folder / name for name in _TOKENIZER_FILES):
        if path.is_file():
            size = path.stat().st_size
            sha256.update(f"{path.name}\0{size}\0".encode())
            with open(path, "rb") as file:
                sha256.update(file.read(_WHOLE_FILE_BYTES))
                if size > _WHOLE_FILE_BYTES:
                    sha256.update(f"{path.stat().st_mtime_ns}\0".encode())
                    file.seek(-(1 << 20), 2)
                    sha256.update(file.read())
    return sha256.hexdigest()


def _tokens(size: float, turns: float) -> tuple[float, float]:
    once = TOKENS_A_CONVERSATION if turns else TOKENS_A_TEXT
    least = size / BYTES_A_TOKEN[1] + turns * TOKENS_A_TURN[0] + once[0]
    return least, size / BYTES_A_TOKEN[0] + turns * TOKENS_A_TURN[1] + once[1]


def _cache_path(dataset: DatasetFacts, tokenizer: str | None, split: str, loss_on: str | None) -> Path | None:
    on_hub = [dataset.source, dataset.revision, dataset.data_file, dataset.data_config] if dataset.revision else None
    rows = dataset.fingerprint or on_hub
    if rows is None or tokenizer is None:
        return None
    whole = loss_on == "all" or (loss_on is None and dataset.format == "text")
    key = json.dumps([rows, tokenizer, dataset.format, dataset.columns, split, whole], sort_keys=True)
    return read.cache_dir() / "tokens" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
