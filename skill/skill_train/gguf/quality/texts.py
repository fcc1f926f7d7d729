"""The texts of a run that quantization looks at: rows that trained, as they were fed. Rows that were held out never."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from skill_train.gguf.quality.training_rows import MOST_ROWS, RowsNotHere, training_rows
from skill_train.llama.gguf_header import GgufFile
from skill_train.llama.importance.collect import CONTEXT
from skill_train.run.folder import RunDir
from skill_train.run.train_record import FedRow, read_fed_rows, read_rows

FEWEST = 128  # tokens, of either kind: fewer say nothing about a matrix, or about a difference
TRAINING, SAMPLES = "training rows", "samples.jsonl"
_JUDGE_EVERY = 4  # of these many rows one is for comparing
# Tokens to compute a matrix of. Four times as many gave no nearer files (references/gguf_conversion.md).
_MOST, _LEAST = 16_384, 512
_MOST_COMPARED = 2048  # tokens, as `verify` compares of a small model
_WORK = 4e12  # weights x tokens: 2 to 3 minutes on 2 cores
_LOGITS_BYTES = 400_000_000  # of the unquantized file, on disk


@dataclass(frozen=True)
class RunTexts:
    """Token ids to compute of, and others to compare on.

    Attributes:
        sha256: of the ids to compute of.
        why: how many tokens these are, and why not more.
        source: `TRAINING`, rows of the run's data; or `SAMPLES`, the few that the run keeps.
        lacking: why they are not rows of the data.
    """

    computed: list[list[int]]
    compared: list[list[int]]
    sha256: str
    why: str
    source: str = SAMPLES
    lacking: str = ""

    @property
    def tokens(self) -> int:
        return sum(map(len, self.computed))


def texts_of(run: RunDir, model: GgufFile) -> RunTexts:
    """The texts of a run: rows of its data, here or on the Hub, or those of `samples.jsonl` where the data is gone or
    has changed.

    They are as the trainer was fed them. A row that was held out too is left out, and so is one with pictures.
    """
    weights = sum(tensor.elements for tensor in model.tensors.values())
    vocabulary = len(model.strings("tokenizer.ggml.tokens")) or 1
    most = int(min(_MOST, max(_LEAST, _WORK / weights)))
    compared = int(min(_MOST_COMPARED, max(FEWEST, most / 4), _LOGITS_BYTES / (4 * vocabulary)))
    held_out = read_fed_rows(run.held_out)
    try:
        drawn, source, lacking = _draw(training_rows(run), held_out, most, compared), TRAINING, ""
    except RowsNotHere as reason:
        drawn, source, lacking = _draw(_kept(run, held_out), held_out, most, compared), SAMPLES, str(reason)
    computed = drawn.computed.texts
    if drawn.computed.full:
        because = f"at most {most} for a model of {weights / 1e6:.0f} million weights"
    elif source == SAMPLES:
        because = "all that the run keeps"
    else:
        because = "all that there are" if drawn.read < MOST_ROWS else f"of {MOST_ROWS} that are spread over the data"
    why = f"{sum(map(len, computed))} tokens of {len(computed)} training rows, {because}"
    digest = hashlib.sha256(json.dumps(computed).encode()).hexdigest()
    return RunTexts(computed, drawn.compared.texts, digest, why, source, lacking)


def _kept(run: RunDir, held_out: list[FedRow]) -> Iterable[list[int]]:
    numbers = {row["row"] for row in held_out}
    return (row["input_ids"] for row in read_rows(run.samples) if not row.get("images") and row["row"] not in numbers)


@dataclass
class _Part:
    """Texts of so many tokens together. The last one is cut."""

    room: int
    texts: list[list[int]] = field(default_factory=list)

    @property
    def full(self) -> bool:
        return self.room < 2  # a text of one token predicts nothing

    def add(self, ids: tuple[int, ...]) -> None:
        if not self.full:
            self.texts.append(list(ids[: self.room]))
            self.room -= len(self.texts[-1])


@dataclass
class _Drawn:
    computed: _Part
    compared: _Part
    read: int = 0


def _draw(rows: Iterable[list[int]], held_out: list[FedRow], most: int, compared: int) -> _Drawn:
    """The first rows, each once, until both parts are full. What is read of a row is compared with the held-out rows,
    so that nothing of them is read under another number."""
    drawn = _Drawn(_Part(most), _Part(compared))
    seen = {tuple(row["input_ids"][:CONTEXT]) for row in held_out}
    different = 0
    for ids in rows:
        drawn.read += 1
        text = tuple(ids[:CONTEXT])
        if text in seen or len(text) < 2:
            continue
        seen.add(text)
        different += 1
        (drawn.computed if different % _JUDGE_EVERY else drawn.compared).add(text)
        if drawn.computed.full and drawn.compared.full:
            break
    return drawn
