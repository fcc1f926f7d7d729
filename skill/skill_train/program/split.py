"""The split: rows that can be trained, rows that are held out, and the order in which rows are fed."""

import hashlib
import json
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from skill_train.program.chat.labels import trained_tokens
from skill_train.program.events import Refused
from skill_train.program.examples import SYSTEMS, EncodedRow
from skill_train.program.folders.checkpoints import from_earlier_start, without
from skill_train.program.pictures.tokens import Pictures
from skill_train.program.plan import HELD_OUT_ROWS, Recipe, held_out_count

SPLIT = "held_out.json"  # in a checkpoint: the hash of its recipe, and the numbers of the rows that never train


class Repeated(TypedDict):
    """Rows that repeat an earlier one, the groups that they form, and held-out rows that training has seen: the whole
    row, or its question."""

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
    """The data that is fed."""

    train: list[EncodedRow]
    held_out: list[EncodedRow]
    figures: DataFigures
    order: list[int]  # indices into `train`, one for each row of each step
    pictures: Pictures | None  # the reader of the rows' pictures; None for rows of text


def trainable_rows(rows: list[EncodedRow], recipe: Recipe) -> list[EncodedRow]:
    """The rows with a trained token. Refuses other rows, unless the recipe skips them: a batch of them would train at
    loss 0, which looks like success (trl#6668)."""
    empty = [row for row in rows if not trained_tokens(row)]
    if not empty or (recipe["skip_untrained_rows"] and len(empty) < len(rows)):
        return [row for row in rows if trained_tokens(row)]
    lines = ", ".join(str(row["line"]) for row in empty[:5]) + (", …" if len(empty) > 5 else "")
    cut = [row["full_length"] for row in empty if row["truncated"]]
    longer = f"raise max_length as far as the model has positions (the longest of them has {max(cut or [0])} tokens)"
    hint = longer if cut else "check what the rows hold"
    skip = "" if len(empty) == len(rows) else ", or set skip_untrained_rows: true to leave them out"
    raise Refused(
        f"{len(empty)} of {len(rows)} rows have no token to train on (lines {lines})",
        code="nothing_to_train",
        expected="at least one trained token in each row",
        got=f"answers cut away by max_length {recipe['max_length']}" if cut else "every label masked",
        hint=hint + skip,
    )


def held_out_rows(
    contents: list[int],
    questions: list[bytes],
    fraction: float,
    seed: int,
    images: list[list[str]] | None = None,
    exchanges: list[bytes] | None = None,
) -> set[int]:
    """Indices of rows that never train. Rows with the same content, the same question, a picture in common or the same
    exchange are held out or trained together: for a model that has seen such a row, the question is not new.

    A picture of nearly all rows is a form, and a question that nearly all rows share is an instruction. If too few rows
    are left to hold out, exchanges are ignored first, because the system messages may be what is asked, then pictures,
    then questions. `images` are the digests of the pictures of each row.
    """
    count = held_out_count(len(contents), fraction)
    chosen: set[int] = set()
    keys: list[Sequence[Any]] = [contents, questions, *(key for key in (images, exchanges) if key is not None)]
    while keys:
        chosen = chosen_groups(joined(*keys), count, seed)
        if 2 * len(chosen) >= count:
            break
        keys.pop()
    return chosen


def chosen_groups(groups: list[int], count: int, seed: int) -> set[int]:
    """The indices of whole groups, with at most `count` rows. If every group is larger, it is the smallest group, up to
    a fifth of the rows. Rows that are all different are drawn as the first version did."""
    sizes = Counter(groups)
    names = list(sizes)
    drawn = random.Random(seed).sample(range(len(names)), min(count, len(names)))
    order = [names[place] for place in dict.fromkeys([*drawn, *feeding_order(len(names), len(names), seed)])]
    chosen: set[int] = set()
    rows_left = count
    for name in order:
        if sizes[name] <= rows_left:
            chosen.add(name)
            rows_left -= sizes[name]
    smallest = min(order, key=sizes.__getitem__)
    if count and not chosen and sizes[smallest] <= min(HELD_OUT_ROWS, len(groups) // 5):
        chosen.add(smallest)
    return {index for index, name in enumerate(groups) if name in chosen}


def joined(*keys: Sequence[Any]) -> list[int]:
    """The group of each row. Rows with an equal key are in one group, and groups that share a row are one group. A key
    may be a list: one equal value is enough."""
    parents = list(range(len(keys[0])))

    def root(index: int) -> int:
        while parents[index] != index:
            parents[index] = index = parents[parents[index]]
        return index

    for key in keys:
        first: dict[Any, int] = {}
        for index, values in enumerate(key):
            for value in values if isinstance(values, list) else [values]:
                parents[root(index)] = root(first.setdefault(value, index))
    return [root(index) for index in range(len(parents))]


def contents_of(rows: list[EncodedRow]) -> list[int]:
    """Equal numbers for rows that train the same: equal texts after `normalised`, or equal parts within max_length."""
    texts = [digest_of(normalised(row["rendered"]) + seen_in(row)) for row in rows]
    left = [digest_of(str(row["input_ids"])) if row["truncated"] else b"%d" % i for i, row in enumerate(rows)]
    return joined(texts, left)


def seen_in(row: EncodedRow) -> str:
    """The digests of a row's pictures, as a text; empty without pictures."""
    return "".join(f"\n{digest}" for digest in row.get("image_sha256") or ())


def digest_of(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


# What chat templates write before an answer
ANSWER_MARK = re.compile(
    r"<[|｜]\w+[|｜]?>(?:assistant|model)\b|<[|｜](?:(?:im_)?assistant|chatbot_token)[|｜]>|<start_of_turn>model\b|\[/INST\]"
    r"|^### ?(?:Response|Assistant):",
    re.IGNORECASE | re.MULTILINE,
)


def question_of(row: EncodedRow) -> str:
    """What a row asks: a conversation up to its first message of the user, rendered or not; a prompt; or the whole of
    another text."""
    if row["kind"] == "completion":
        return row["prompt"]
    if row["kind"] == "text":
        return ANSWER_MARK.split(row["rendered"], 1)[0].strip() or row["rendered"]
    messages = row["messages"] if row["kind"] == "chat" else []
    first = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        return row["rendered"]
    text = "\n".join(f"{message['role']}: {message['content']}" for message in messages[: first + 1])
    return text + seen_in(row)


def exchanges_of(rows: list[EncodedRow]) -> list[bytes] | None:
    """Equal digests for conversations that are equal but for their system messages; None if no row has one."""
    chats = [row.get("messages") or [] for row in rows]
    if not any(message["role"] in SYSTEMS for messages in chats for message in messages):
        return None
    rest = [[message for message in messages if message["role"] not in SYSTEMS] for messages in chats]
    texts = [json.dumps(turns, ensure_ascii=False, sort_keys=True, default=str) for turns in rest]
    return [
        digest_of(normalised(text if turns else row["rendered"]) + seen_in(row))
        for text, turns, row in zip(texts, rest, rows, strict=True)
    ]


# Characters that look alike or are invisible. NFKC does not make them equal.
ALIKE = str.maketrans(
    dict.fromkeys(map(chr, (0x2018, 0x2019, 0x201A, 0x201B)), "'")
    | dict.fromkeys(map(chr, (0x201C, 0x201D, 0x201E, 0x201F, 0xAB, 0xBB)), '"')
    | dict.fromkeys(map(chr, (*range(0x2010, 0x2016), 0x2212)), "-")
    | dict.fromkeys(map(chr, (0xAD, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2065), 0xFEFF)))
)


def normalised(text: str) -> str:
    """The text without differences that make no other row: case, spaces, Unicode forms, kinds of quotes and dashes."""
    same = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return " ".join(same.translate(ALIKE).split())


def repeated(contents: list[int], questions: list[bytes], held_out: set[int]) -> Repeated:
    sizes = Counter(contents).values()
    train = [index for index in range(len(contents)) if index not in held_out]
    trained, trained_questions = {contents[index] for index in train}, {questions[index] for index in train}
    return {
        "repeated_rows": len(contents) - len(sizes),
        "repeated_groups": sum(size > 1 for size in sizes),
        "held_out_trained": sum(contents[index] in trained for index in held_out),
        "held_out_asked": sum(questions[index] in trained_questions for index in held_out),
    }


def recorded_split(folder: Path, checkpoint: Path | None, recipe_hash: str | None) -> set[int] | None:
    """The rows that the run of a checkpoint held out. The checkpoint names them; with one of an earlier version,
    held_out.jsonl does. None if there is neither. Refuses a checkpoint of another recipe, whose schedule and optimizer
    would go on."""
    if checkpoint is None:
        return None
    if (checkpoint / SPLIT).is_file():
        own, rows = from_earlier_start(checkpoint / SPLIT, recipe_and_rows, without(checkpoint))
        if None not in (own, recipe_hash) and own != recipe_hash:
            raise Refused(
                f"{checkpoint.name} is of a run with another recipe",
                code="another_run",
                expected=f"a checkpoint of the recipe {recipe_hash!s:.12}…",
                got=f"{own!s:.12}…",
                hint=without(checkpoint),
            )
        return rows
    if not (folder / "held_out.jsonl").is_file():
        return None
    with open(folder / "held_out.jsonl", encoding="utf-8") as file:
        return {json.loads(line)["row"] for line in file}


def recipe_and_rows(state: Any) -> tuple[str | None, set[int]]:
    """What `SPLIT` holds; earlier versions wrote the rows alone."""
    return (None, set(state)) if isinstance(state, list) else (state["recipe_hash"], set(state["rows"]))


def feeding_order(rows: int, needed: int, seed: int) -> list[int]:
    """Row indices in the order in which they are fed: one seeded shuffle an epoch. The trainer reads it in sequence, so
    it is the same for every batch split and number of processes, unlike that of the library's own sampler."""
    shuffler = random.Random(seed)
    order: list[int] = []
    while len(order) < needed:
        epoch = list(range(rows))
        shuffler.shuffle(epoch)
        order += epoch
    return order[:needed]


def longest_first(order: list[int], lengths: list[int], step: int) -> list[int]:
    """The order with the rows of each step from long to short. Rows that are padded together then have similar lengths,
    and memory peaks at the beginning. A step learns from the same rows in any order."""
    steps = (order[start : start + step] for start in range(0, len(order), step))
    return [index for rows in steps for index in sorted(rows, key=lambda index: -lengths[index])]
