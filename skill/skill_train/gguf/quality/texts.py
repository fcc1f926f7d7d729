"""Chooses the texts for quantization from a run: training rows as the trainer was fed them, and no held-out rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, zip_longest

from skill_train.gguf.quality.training_rows import GOLDEN, MOST_ROWS, RowsNotHere, training_rows
from skill_train.llama.gguf_header import GgufFile
from skill_train.llama.importance.collect_worker import windows
from skill_train.run.folder import RunDir
from skill_train.run.train_record import FedRow, read_fed_rows, read_rows

FEWEST = 128  # the fewest tokens to compute a matrix from, and the fewest to compare files on
TRAINING, SAMPLES = "training rows", "samples.jsonl"
_JUDGE_EVERY = 4  # every fourth row is for comparing, the others for computing
# Tokens to compute a matrix from. Four times as many gave no nearer files (references/gguf_conversion.md).
_MOST, _LEAST = 16_384, 512
_END = 32  # tokens; a shorter window at the end of a long row is not the first that is taken from the row
_MOST_COMPARED = 2048  # tokens, the same number that `verify` compares with a small model
_WORK = 4e12  # weights x tokens: 2 to 3 minutes on 2 cores
_LOGITS_BYTES = 400_000_000  # limit of the unquantized file's logits, on disk


@dataclass(frozen=True)
class RunTexts:
    """Token ids of texts: `computed` to compute a matrix from, and `compared` to compare files on."""

    computed: list[list[int]]
    compared: list[list[int]]
    sha256: str  # the digest of `computed`
    why: str  # the number of tokens in `computed`, and why there are no more
    source: str = SAMPLES  # `TRAINING`: rows of the run's data. `SAMPLES`: the few rows that the run keeps.
    lacking: str = ""  # why the rows of the data could not be used; empty if they were
    further_parts: int = 0  # how many texts in `computed` are the second or a later window of a row

    @property
    def rows(self) -> int:
        return len(self.computed) - self.further_parts

    @property
    def tokens(self) -> int:
        return sum(map(len, self.computed))


def texts_of(run: RunDir, model: GgufFile) -> RunTexts:
    """The texts of a run: rows of its data, on this machine or on the Hub. If the data is missing or has changed, they
    are the rows of `samples.jsonl`.

    Rows have the token ids that the trainer was fed; long rows are divided. Rows that were held out, and rows with
    pictures, are left out.
    """
    weights = sum(tensor.elements for tensor in model.tensors.values())
    vocabulary = len(model.tokens) or 1
    most = int(min(_MOST, max(_LEAST, _WORK / weights)))
    compared = int(min(_MOST_COMPARED, max(FEWEST, most / 4), _LOGITS_BYTES / (4 * vocabulary)))
    held_out = read_fed_rows(run.held_out)

    def draw(rows: Iterable[list[int]]) -> _Draw:
        return _Draw(most, compared, held_out, _first_token(model)).of(rows)

    try:
        drawn, source, lacking = draw(training_rows(run)), TRAINING, ""
    except RowsNotHere as reason:
        numbers = {row["row"] for row in held_out}
        samples = [row for row in read_rows(run.samples) if row["row"] not in numbers]
        pictured = sum(bool(row.get("images")) for row in samples)
        drawn, source = draw(row["input_ids"] for row in samples if not row.get("images")), SAMPLES
        lacking = f"{reason}; {pictured} of {len(samples)} rows of {SAMPLES} have some" if pictured else str(reason)
    computed = drawn.computed
    if computed.full:
        because = f"at most {most} for a model of {weights / 1e6:.0f} million weights"
    elif source == SAMPLES:
        because = "all that the run keeps"
    else:
        because = "all that there are" if drawn.read < MOST_ROWS else f"of {MOST_ROWS} that are spread over the data"
    why = f"{computed.tokens} tokens of {len(computed.rows)} training rows, {because}"
    digest = hashlib.sha256(json.dumps(computed.texts).encode()).hexdigest()
    further = len(computed.texts) - len(computed.rows)
    return RunTexts(computed.texts, drawn.compared.texts, digest, why, source, lacking, further)


def _first_token(model: GgufFile) -> int | None:
    token = model.metadata.get("tokenizer.ggml.bos_token_id")
    return token if isinstance(token, int) else None


@dataclass
class _Part:
    """Collects texts until `room`, in tokens, is used up. The last text is cut. `rows` are the numbers of the rows."""

    room: int
    texts: list[list[int]] = field(default_factory=list)
    rows: set[int] = field(default_factory=set)

    @property
    def full(self) -> bool:
        return self.room < 2  # a text of one token predicts nothing

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))

    def add(self, ids: tuple[int, ...], row: int) -> None:
        if not self.full:
            self.texts.append(list(ids[: self.room]))
            self.room -= len(self.texts[-1])
            self.rows.add(row)


class _Draw:
    """Draws windows of rows until there are enough: first one window of each row, at varying places, and then the
    others, each once. The windows of one row are all for computing or all for comparing. A window that is also in a
    held-out row is left out, because data may repeat a row."""

    def __init__(self, most: int, compared: int, held_out: list[FedRow], first_token: int | None) -> None:
        self.computed, self.compared, self.read = _Part(most), _Part(compared), 0
        self._first_token = first_token
        self._seen = {tuple(ids) for row in held_out for ids in windows(row["input_ids"], first_token)}

    def of(self, rows: Iterable[list[int]]) -> _Draw:
        different, later = 0, list[list[tuple[_Part, tuple[int, ...], int]]]()
        for ids in rows:
            self.read += 1
            if unseen := [window for window in self._turned(ids) if self._is_new(window)]:
                different += 1
                part = self.compared if different % _JUDGE_EVERY == 0 else self.computed
                first, *others = [(part, window, self.read) for window in unseen]
                self._add(*first)
                later.append(others)
            if self._is_full:
                return self
        # The second window of each row, then the third, and so on.
        for part, window, row in filter(None, chain.from_iterable(zip_longest(*later))):
            if self._is_new(window):
                self._add(part, window, row)
        return self

    @property
    def _is_full(self) -> bool:
        return self.computed.full and self.compared.full

    def _turned(self, ids: list[int]) -> list[tuple[int, ...]]:
        """The windows of a row, beginning with another one in each row, but not with a short end of a long row."""
        all_of_it = [tuple(window) for window in windows(ids, self._first_token)]
        choice = len(all_of_it) - (len(all_of_it[-1]) < _END)
        start = int(self.read * GOLDEN % 1 * choice)
        return all_of_it[start:] + all_of_it[:start]

    def _is_new(self, window: tuple[int, ...]) -> bool:
        return len(window) > 1 and window not in self._seen

    def _add(self, part: _Part, window: tuple[int, ...], row: int) -> None:
        self._seen.add(window)
        part.add(window, row)
