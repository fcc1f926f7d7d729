"""Text to tokens: llama.cpp must read what the model was trained on, token by token."""

from __future__ import annotations

import unicodedata
from typing import Any

from skill_train.llama.inference import VocabularyFacts
from skill_train.run.train_record import Row
from skill_train.run.verify_record import Check, NotChecked
from skill_train.verify.check import problems

# Each line is here because some tokenizer or converter got it wrong.
HARD_STRINGS = (
    "",
    " ",
    "   leading and   inner    spaces  ",
    " one leading space",
    "\n",
    "\n\n\n  \n\t\ttabs and\r\nnewlines\n",
    "1 12 123 1234 12345678901234567890 3.14159 1,000,000 0x1F",
    "def f(x):\n    return {k: v**2 for k, v in x.items()}  # comment\n\treturn\n",
    "It's we'll I'M \"quoted\" (a) [b] <c> … — –",
    "🙂 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪",
    "你好，世界。日本語のテキスト。한국어 문장",
    "שלום עולם مرحبا بالعالم",
    "e\u0301 n\u0303 A\u030a Ω≈ç√ ﬁ ½ ㎏ \u200b\ufeff",
    "Тест ΑΒΓ हिन्दी ไทย",
    "https://example.org/a?b=c&d=e#f user@example.org C:\\path\\file.txt",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa !!!!!!!! ======== ........",
    "camelCaseWords snake_case_words SHOUTING WORDS",
)
_AROUND = 4


def special_strings(tokenizer: Any) -> list[str]:
    """The model's special tokens written in text, alone and between words."""
    tokens = [str(token) for token in tokenizer.all_special_tokens][:8]
    return [*tokens, "".join(tokens), *(f"word{token}word {token} \n{token}" for token in tokens)]


def same_piece(got: str, expected: str | None, tokenizer: Any, token: int) -> bool:
    """Equal; or an added token as the converter stores it, in plain text instead of the tokenizer's spelling."""
    if got == expected or expected is None:
        return got == expected
    added = tokenizer.added_tokens_decoder.get(token)
    return added is not None and got in (added.content.replace("\u2581", " "), tokenizer.decode([token]))


def check_tokens(file: str, texts: list[str], ids: list[list[int]], tokenizer: Any) -> Check:
    """llama.cpp's ids of each text are the reference's ids, special tokens in the text counted as such.

    Args:
        texts: of `with_composed_forms`.
    """
    found, decomposed, known = [], 0, dict(zip(texts, ids, strict=True))
    for text, got in known.items():
        expected = tokenizer(text, add_special_tokens=False).input_ids
        if got == expected:
            continue
        if known.get(unicodedata.normalize("NFC", text)) == expected:
            decomposed += 1
        else:
            found.append(f"{_excerpt(text)}: {difference(got, expected)}")
    good = f"{len(texts) - decomposed} texts, {sum(map(len, ids))} tokens equal"
    if decomposed:
        good += "; letters with separate accents (not NFC) differ, because llama.cpp does not compose them"
    return problems("tokens", file, found, looked_at=len(texts), good=good)


def with_composed_forms(texts: list[str]) -> list[str]:
    """The texts, each once, and the NFC form of those that are not in it.

    Tokenizers such as Qwen's compose letters and accents first; llama.cpp does not, for any file.
    """
    return list(dict.fromkeys([*texts, *(unicodedata.normalize("NFC", text) for text in texts)]))


def difference(got: list[int], expected: list[int]) -> str:
    """Both lists around the first difference."""
    pairs = zip(got, expected, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(got), len(expected)))
    start = max(0, at - _AROUND)
    rows = ["[" + " ".join(map(str, ids[start : at + _AROUND])) + "]" for ids in (got, expected)]
    return f"at token {at} llama.cpp has {rows[0]}, the reference {rows[1]}"


def check_special_tokens(
    file: str,
    facts: VocabularyFacts,
    *,
    tokenizer: Any,
    stops: set[int],
    turn_end: int | None,
    plain: list[tuple[str, list[int]]],
) -> Check:
    """BOS, EOS and PAD are the reference's, plain text gets them alike, and what ends an answer ends it for llama.cpp.

    Args:
        stops: ids that the reference's generation settings stop at.
        turn_end: the token that the chat template writes after an answer; None when it writes none.
        plain: texts, and llama.cpp's ids of them with the special tokens that it adds.
    """
    own = (("bos", facts.bos, tokenizer.bos_token_id), ("eos", facts.eos, tokenizer.eos_token_id))
    found = [
        f"{name} is {known} for llama.cpp, {token} in the reference"
        for name, known, token in (*own, ("pad", facts.pad, tokenizer.pad_token_id))
        if token is not None and known != token and not (name == "pad" and known is None)
    ]
    ending = set(facts.end_of_generation)
    if turn_end is not None and turn_end not in ending:
        found.append(f"llama.cpp does not stop at token {turn_end}, which ends an answer in the chat template")
    found += [f"llama.cpp does not stop at token {token}, the reference does" for token in sorted(stops - ending)]
    for text, ids in plain:
        expected = tokenizer(text).input_ids
        if _ends(ids, expected) != _ends(expected, ids):
            found.append(f"special tokens are added in another way: {difference(ids, expected)}")
    added = "added" if facts.add_bos else "not added"
    good = f"bos {facts.bos} {added}, eos {facts.eos}, stops at {sorted(ending)[:8]}"
    return problems("special_tokens", file, found, looked_at=3 + len(stops) + len(plain), good=good)


def _ends(ids: list[int], other: list[int]) -> list[int]:
    """First and last token, when the two lists differ: differences inside belong to `tokens`."""
    return [] if ids == other else [*ids[:1], *ids[-1:], len(ids)]


def check_trained(
    file: str,
    rows: list[Row],
    shipped: list[list[int] | str],
    eos: int | None,
    *,
    chat_template: bool = False,
    turn_end: int | None = None,
) -> Check | NotChecked:
    """The ids that the trainer was fed are what this file makes of the same rows.

    Args:
        rows: of `samples.jsonl`.
        shipped: for each row, llama.cpp's ids of it through the file's own template; or why there are none.
        eos: the token that training appends to plain text.
        chat_template: the file writes one around what a user asks. Rows that were trained without it then are not what
            the file makes of a question: a failure, or a warning where the recipe asked for bare text.
        turn_end: the token that ends a turn of that template. A text that holds it was rendered before training.
    """
    if not rows:
        return NotChecked("trained_is_shipped", file, "no rows were kept by a training run")
    found = []
    for row, ids in zip(rows, shipped, strict=True):
        if isinstance(ids, str):
            found.append(f"row {row.get('row')}: the file's template refuses it: {ids}")
            continue
        expected = row["input_ids"]
        if chat_template and row["kind"] == "completion" and not row.get("without_template"):
            found.append(
                f"row {row.get('row')}: trained without the chat template that the file writes around a prompt"
            )
            continue
        ended = ids if row["kind"] == "chat" or eos is None else [*ids, eos]
        if (ended[: len(expected)] if row.get("truncated") else ended) != expected:
            found.append(f"row {row.get('row')}: {difference(ended, expected).replace('reference', 'trainer')}")
    good = f"{len(rows)} rows give the token ids that the trainer was fed"
    bare = [row for row in rows if row["kind"] != "chat" and turn_end not in row["input_ids"][:-1]]
    if chat_template and bare and not found:
        why = (
            f"{len(bare)} rows were trained without the chat template, as the recipe asks; a chat writes another prompt"
        )
        return Check("trained_is_shipped", file, "warn", len(bare), 0, why, {"looked_at": len(rows)})
    return problems("trained_is_shipped", file, found, looked_at=len(rows), good=good)


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 48 else text[:45] + "…")
