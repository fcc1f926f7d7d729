"""The labels of an encoded row, which say which of its tokens are trained."""

import hashlib
import json
import re
import struct
from collections.abc import Container
from itertools import accumulate, groupby
from typing import Any

from skill_train.program.examples import Tokens

IGNORED = -100  # the label of a token that is read and not trained


def end_of_turn(special: list[str], end: str | None) -> re.Pattern[str] | None:
    """What ends an answer: a special token, or several in a row up to the end token, as in Command R7B's template."""
    if not special:
        return None
    one = "(?:" + "|".join(map(re.escape, special)) + ")"
    return re.compile(rf"\s*(?:{one}*?{re.escape(end)}|{one})" if end else rf"\s*{one}")


def labels_of(text: str, ids: list[int], offsets: Any, spans: Any, added: Container[int]) -> list[int]:
    """The ids of the tokens with a part inside a span, and `IGNORED` for others.

    Some tokenizers leave spaces out of their offsets, so that a token begins where the one before it ends. An added
    token may take the spaces behind it, as Phi-3's `<|assistant|>` does: it belongs to the prompt all the same.
    """
    labels, ends = list[int](), accumulate((end for _, end in offsets), max, initial=0)
    for token, (first, end), before in zip(ids, offsets, ends, strict=False):
        start = min(first, before)
        inside = (a for a, b in spans if start < b and end > max(a, start))
        trained = any(token not in added or not text[start:a].strip() for a in inside)
        labels.append(token if trained else IGNORED)
    return labels


def text_across(text: str, labels: list[int], offsets: Any, starts: list[int]) -> str:
    """The text of the first trained token that begins before an answer and ends in it; else empty."""
    ends = accumulate((end for _, end in offsets), max, initial=0)
    for label, (first, end), before in zip(labels, offsets, ends, strict=False):
        begin = min(first, before)
        if label != IGNORED and any(begin < start < end for start in starts):
            return text[begin:end]
    return ""


def trained_tokens(row: Tokens) -> int:
    """The number of labels that count. The first one is never predicted, because nothing comes before it."""
    return sum(label != IGNORED for label in row["labels"][1:])


def marked_text(tokenizer: Any, row: Tokens) -> str:
    """The row decoded, with the trained parts between ⟦ and ⟧."""
    text, pairs = "", zip(row["input_ids"], row["labels"], strict=True)
    for trained, piece in groupby(pairs, key=lambda pair: pair[1] != IGNORED):
        decoded = tokenizer.decode([token for token, _ in piece])
        text += f"⟦{decoded}⟧" if trained else decoded
    return text


def fed_digest(rows: Any) -> str:
    """SHA-256 of token ids and labels, each list with its length before it, as 32-bit little-endian numbers, and of the
    digests of a row's pictures."""
    digest = hashlib.sha256()
    for row in rows:
        for values in (row["input_ids"], row["labels"]):
            digest.update(struct.pack(f"<i{len(values)}i", len(values), *values))
        for picture in row.get("image_sha256") or ():
            digest.update(bytes.fromhex(picture))
    return digest.hexdigest()


def system_digest(rows: Any) -> str:
    """SHA-256 of the system message with which every row begins; empty if there is no such one."""
    firsts = [(row.get("messages") or [{}])[0] for row in rows]
    texts = {json.dumps(first.get("content") if first.get("role") == "system" else None) for first in firsts}
    text = json.loads(texts.pop()) if len(texts) == 1 else None
    return hashlib.sha256(text.encode()).hexdigest() if text and isinstance(text, str) else ""
