"""The split: rows that can be trained, rows that are held out, and the order in which rows are fed."""

from __future__ import annotations

import hashlib
import json
import random
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any, TypedDict

from skill_train.program.events import Refused
from skill_train.program.examples import EncodedRow, Tokens
from skill_train.program.plan import Recipe

IGNORED = -100  # the label of a token that is read and not trained
HELD_OUT_ROWS = 200  # rows held out at most
SPLIT = "held_out.json"  # in a checkpoint: the numbers of the rows that never train


class Repeated(TypedDict):
    """Rows that repeat an earlier one, the groups that they make, and the held-out rows that training has seen:
    whole, or by their question."""

    repeated_rows: int
    repeated_groups: int
    held_out_trained: int
    held_out_asked: int


class DataFigures(Repeated):
    """Rows and tokens of the data. The tokens are those of the rows that train."""

    rows: int
    train_rows: int
    held_out_rows: int
    truncated_rows: int
    skipped_rows: int
    tokens: int
    longest_row_tokens: int
    trained_token_share: float
    notes: list[str]


class Data(TypedDict):
    """What is fed. `order`: places in `train`, one for each row of each step."""

    train: list[EncodedRow]
    held_out: list[EncodedRow]
    figures: DataFigures
    order: list[int]


def trained_tokens(row: Tokens) -> int:
    """Labels that count: the first one is never predicted, because nothing stands before it."""
    return sum(label != IGNORED for label in row["labels"][1:])


def trainable_rows(rows: list[EncodedRow], recipe: Recipe) -> list[EncodedRow]:
    """Refuses rows with nothing to learn: a batch of them would train at loss 0 and look like success (trl#6668)."""
    empty = [row for row in rows if not trained_tokens(row)]
    if not empty or (recipe["skip_untrained_rows"] and len(empty) < len(rows)):
        return [row for row in rows if trained_tokens(row)]
    lines = ", ".join(str(row["line"]) for row in empty[:5]) + (", …" if len(empty) > 5 else "")
    cut = [row["full_length"] for row in empty if row["truncated"]]
    hint = f"raise max_length (the longest of them has {max(cut)} tokens)" if cut else "check what the rows hold"
    skip = "" if len(empty) == len(rows) else ", or set skip_untrained_rows: true to leave them out"
    raise Refused(
        f"{len(empty)} of {len(rows)} rows have no token to train on (lines {lines})",
        code="nothing_to_train",
        expected="at least one trained token in each row",
        got=f"answers cut away by max_length {recipe['max_length']}" if cut else "every label masked",
        hint=hint + skip,
    )


def held_out_count(rows: int, fraction: float) -> int:
    """How many rows shall never train. Fewer than 20 rows are all trained: one row less would matter more than it
    tells."""
    return min(HELD_OUT_ROWS, int(rows * fraction)) if rows >= 20 else 0


def held_out_rows(contents: list[int], questions: list[bytes], fraction: float, seed: int) -> set[int]:
    """Indices that never train. Rows with the same content or the same question are held out together or trained
    together: a model that has seen a row, or another answer to its question, is not asked something new.

    A question that nearly all rows share is an instruction. Where such questions leave too few rows, content alone
    decides.
    """
    count = held_out_count(len(contents), fraction)
    found = chosen_groups(joined(contents, questions), count, seed)
    return found if 2 * len(found) >= count else chosen_groups(contents, count, seed)


def chosen_groups(groups: list[int], count: int, seed: int) -> set[int]:
    """The indices of whole groups, `count` rows at most. Where every group is larger, it is the smallest one, up to a
    fifth of the rows. Rows that are all different are drawn as the first version drew them."""
    sizes = Counter(groups)
    names = list(sizes)
    drawn = random.Random(seed).sample(range(len(names)), min(count, len(names)))
    order = [names[place] for place in dict.fromkeys([*drawn, *feeding_order(len(names), len(names), seed)])]
    chosen: set[int] = set()
    left = count
    for name in order:
        if sizes[name] <= left:
            chosen.add(name)
            left -= sizes[name]
    smallest = min(order, key=sizes.__getitem__)
    if count and not chosen and sizes[smallest] <= min(HELD_OUT_ROWS, len(groups) // 5):
        chosen.add(smallest)
    return {index for index, name in enumerate(groups) if name in chosen}


def joined(*keys: list[Any]) -> list[int]:
    """The group of each row. Two rows with an equal key are in one group, and so is what is in a group with either."""
    parents = list(range(len(keys[0])))

    def root(index: int) -> int:
        while parents[index] != index:
            parents[index] = index = parents[parents[index]]
        return index

    for key in keys:
        first: dict[Any, int] = {}
        for index, value in enumerate(key):
            parents[root(index)] = root(first.setdefault(value, index))
    return [root(index) for index in range(len(parents))]


def contents_of(rows: list[EncodedRow]) -> list[int]:
    """Equal numbers for rows that train the same: their text is equal after `normalised`, or what max_length leaves
    of it is equal."""
    texts = [digest_of(normalised(row["rendered"])) for row in rows]
    left = [digest_of(str(row["input_ids"])) if row["truncated"] else b"%d" % index for index, row in enumerate(rows)]
    return joined(texts, left)


def digest_of(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def question_of(row: EncodedRow) -> str:
    """What a row asks: a conversation up to its first message of the user, a prompt, or the whole of a text."""
    if row["kind"] == "completion":
        return row["prompt"]
    messages = row["messages"] if row["kind"] == "chat" else []
    first = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        return row["rendered"]
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages[: first + 1])


# Marks that look alike or cannot be seen. NFKC keeps them apart.
ALIKE = str.maketrans(
    dict.fromkeys(map(chr, (0x2018, 0x2019, 0x201A, 0x201B)), "'")
    | dict.fromkeys(map(chr, (0x201C, 0x201D, 0x201E, 0x201F, 0xAB, 0xBB)), '"')
    | dict.fromkeys(map(chr, (*range(0x2010, 0x2016), 0x2212)), "-")
    | dict.fromkeys(map(chr, (0xAD, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2065), 0xFEFF)))
)


def normalised(text: str) -> str:
    """The text without what makes no other row of it: case, spaces, Unicode forms, kinds of quotes and dashes."""
    same = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return " ".join(same.translate(ALIKE).split())


def repeated(contents: list[int], questions: list[bytes], held_out: set[int]) -> Repeated:
    sizes = Counter(contents).values()
    train = [index for index in range(len(contents)) if index not in held_out]
    trained, asked = {contents[index] for index in train}, {questions[index] for index in train}
    return {
        "repeated_rows": len(contents) - len(sizes),
        "repeated_groups": sum(size > 1 for size in sizes),
        "held_out_trained": sum(contents[index] in trained for index in held_out),
        "held_out_asked": sum(questions[index] in asked for index in held_out),
    }


def recorded_split(folder: Path, checkpoint: Path | None) -> set[int] | None:
    """The rows that the run of a checkpoint held out: the checkpoint says it, and that of an earlier version has
    held_out.jsonl beside it. None where neither is there."""
    if checkpoint is None:
        return None
    if (checkpoint / SPLIT).is_file():
        return set(json.loads((checkpoint / SPLIT).read_text(encoding="utf-8")))
    if not (folder / "held_out.jsonl").is_file():
        return None
    with open(folder / "held_out.jsonl", encoding="utf-8") as file:
        return {json.loads(line)["row"] for line in file}


def feeding_order(rows: int, needed: int, seed: int) -> list[int]:
    """Row indices in the order in which they are fed: one seeded shuffle an epoch.

    Made here, and read in sequence by the trainer, so that it is the same whatever the batch split and the number of
    processes (with the library's own sampler it is not).
    """
    shuffler = random.Random(seed)
    order: list[int] = []
    while len(order) < needed:
        epoch = list(range(rows))
        shuffler.shuffle(epoch)
        order += epoch
    return order[:needed]


def longest_first(order: list[int], lengths: list[int], step: int) -> list[int]:
    """The order with the rows of each step from long to short: rows that are padded together are of like length, and
    memory peaks at once. A step learns from the same rows, whatever their order in it."""
    steps = (order[start : start + step] for start in range(0, len(order), step))
    return [index for rows in steps for index in sorted(rows, key=lambda index: -lengths[index])]
