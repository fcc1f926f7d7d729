"""The number of tokens in the rows of a dataset: estimated from bytes, or counted once and cached."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from skill_train.core.files import write_json
from skill_train.facts import DatasetFacts, TokenFacts
from skill_train.machine import read
from skill_train.program.tokenizer import has_tokenizer

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
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


@dataclass(frozen=True)
class Lengths:
    """Counted rows before any cut.

    Attributes:
        rows: the rows of the dataset.
        counted: `(tokens, trained tokens, position of the first trained token)` of each counted row, shortest first.
        longest: the tokens of the row with most text, which need not be among the counted rows.
    """

    rows: int
    counted: list[tuple[int, int, int]]
    longest: int


def token_range(
    rows: int,
    text_bytes: int,
    longest_text_bytes: int,
    max_length: int,
    turns: int = 0,
    longest_turns: int = 0,
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


@dataclass(frozen=True)
class Bucket:
    """Rows of at most `up_to` tokens, and more than the bucket before."""

    up_to: int
    rows: int


@dataclass(frozen=True)
class Distribution:
    """Percentiles (nearest rank) and a histogram."""

    p50: int
    p90: int
    p99: int
    histogram: list[Bucket]


def distribution(lengths: Lengths) -> Distribution:
    sizes = sorted(size for size, _, _ in lengths.counted)
    p50, p90, p99 = (sizes[max(0, -(-p * len(sizes) // 100) - 1)] for p in (50, 90, 99))
    histogram, edge, done = list[Bucket](), 16, 0
    while done < len(sizes):
        below = sum(size <= edge for size in sizes)
        if below:
            histogram.append(Bucket(edge, below - done))
        done, edge = below, edge * 2
    return Distribution(p50, p90, p99, histogram)


def known_tokens(
    dataset: DatasetFacts, tokenizer: str | None, *, split: str, loss_on: str | None, max_length: int
) -> TokenFacts | None:
    """What `skill-train data --model` counted for this dataset and tokenizer, or None. Takes milliseconds.

    Args:
        tokenizer: `tokenizer_key` of the model.
        loss_on: the field of the recipe; None if the format decides.
    """
    path = _cache_path(dataset, tokenizer, split, loss_on)
    try:
        document = json.loads(path.read_text(encoding="utf-8")) if path is not None else None
        if document is None or document["schema"] != SCHEMA:
            return None
        counted = [(int(size), int(trained), int(first)) for size, trained, first in document["counted"]]
        return token_facts(Lengths(int(document["rows"]), counted, int(document["longest"])), max_length)
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):  # a cache may be lost or torn: count again
        return None


def keep(dataset: DatasetFacts, tokenizer: str | None, lengths: Lengths, *, split: str, loss_on: str | None) -> None:
    """Writes the counts to the cache that `known_tokens` reads."""
    path = _cache_path(dataset, tokenizer, split, loss_on)
    if path is not None:
        write_json(path, {"schema": SCHEMA, **asdict(lengths)})


def tokenizer_key(model: str, revision: str | None) -> str | None:
    """A key that changes with the tokenizer or its template; None if a change cannot be detected. For a large file it
    uses the size and both ends.

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
                    file.seek(-(1 << 20), 2)
                    sha256.update(file.read())
    return sha256.hexdigest()


def _tokens(size: float, turns: float) -> tuple[float, float]:
    once = TOKENS_A_CONVERSATION if turns else TOKENS_A_TEXT
    least = size / BYTES_A_TOKEN[1] + turns * TOKENS_A_TURN[0] + once[0]
    return least, size / BYTES_A_TOKEN[0] + turns * TOKENS_A_TURN[1] + once[1]


def _cache_path(dataset: DatasetFacts, tokenizer: str | None, split: str, loss_on: str | None) -> Path | None:
    rows = dataset.fingerprint or (f"{dataset.source}@{dataset.revision}" if dataset.revision else None)
    if rows is None or tokenizer is None:
        return None
    whole = loss_on == "all" or (loss_on is None and dataset.format == "text")
    key = json.dumps([rows, tokenizer, dataset.format, dataset.columns, split, whole], sort_keys=True)
    return read.cache_dir() / "tokens" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
