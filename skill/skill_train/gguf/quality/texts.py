"""The texts of a run that quantization looks at: rows that trained, as they were fed. Rows that were held out never."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from skill_train.llama.gguf_header import GgufFile
from skill_train.llama.importance.collect import CONTEXT
from skill_train.run.folder import RunDir
from skill_train.run.train_record import read_fed_rows, read_rows

FEWEST = 128  # tokens, of either kind: fewer say nothing about a matrix, or about a difference
_JUDGE_EVERY = 4  # of these many rows one is for comparing
_MOST, _LEAST = 16_384, 512  # tokens to compute a matrix of
_MOST_COMPARED = 2048  # tokens, as `verify` compares of a small model
_WORK = 4e12  # weights x tokens: 2 to 3 minutes on 2 cores
_LOGITS_BYTES = 400_000_000  # of the unquantized file, on disk


@dataclass(frozen=True)
class RunTexts:
    """Token ids to compute of, and others to compare on.

    Attributes:
        sha256: of the ids to compute of.
        why: how many tokens these are, and why not more.
    """

    computed: list[list[int]]
    compared: list[list[int]]
    sha256: str
    why: str

    @property
    def tokens(self) -> int:
        return sum(map(len, self.computed))


def texts_of(run: RunDir, model: GgufFile) -> RunTexts:
    """The texts of a run.

    The rows are those of `samples.jsonl`, through the chat template as the trainer was fed them. A row that was held
    out too is left out, and so is one with pictures.
    """
    held_out = read_fed_rows(run.held_out)
    numbers, ids_held = {row["row"] for row in held_out}, {tuple(row["input_ids"]) for row in held_out}
    fed = [row for row in read_rows(run.samples) if not row.get("images") and row["row"] not in numbers]
    unique = list(
        dict.fromkeys(tuple(row["input_ids"][:CONTEXT]) for row in fed if tuple(row["input_ids"]) not in ids_held)
    )
    rows = [list(ids) for ids in unique if len(ids) > 1]
    weights = sum(tensor.elements for tensor in model.tensors.values())
    vocabulary = len(model.strings("tokenizer.ggml.tokens")) or 1
    most = int(min(_MOST, max(_LEAST, _WORK / weights)))
    compared = int(min(_MOST_COMPARED, max(FEWEST, most / 4), _LOGITS_BYTES / (4 * vocabulary)))
    chosen = _cut([ids for number, ids in enumerate(rows) if number % _JUDGE_EVERY != _JUDGE_EVERY - 1], most)
    other = _cut([ids for number, ids in enumerate(rows) if number % _JUDGE_EVERY == _JUDGE_EVERY - 1], compared)
    tokens = sum(map(len, chosen))
    why = f"{tokens} tokens of {len(chosen)} training rows, " + (
        f"at most {most} for a model of {weights / 1e6:.0f} million weights"
        if tokens >= most
        else "all that the run keeps"
    )
    return RunTexts(chosen, other, hashlib.sha256(json.dumps(chosen).encode()).hexdigest(), why)


def _cut(rows: list[list[int]], most: int) -> list[list[int]]:
    chosen: list[list[int]] = []
    room = most
    for ids in rows:
        if room > 1:
            chosen.append(ids[:room])
            room -= len(chosen[-1])
    return chosen
