"""Checks that llama.cpp turns text into the tokens that the model was trained on."""

import unicodedata
from typing import Any

from msgspec.structs import replace

from skill_train.llama.inference import VocabularyFacts
from skill_train.llama.template import Conversation, before_last_answer, render_reference
from skill_train.run.train_record import Row
from skill_train.run.verify_record import Check, Finding, NotChecked
from skill_train.verify.check import first_few, parting_place, problems

# Each line is here because some tokenizer or converter got it wrong.
HARD_STRINGS = (
    "",
    " ",
    "   leading and   inner    spaces  ",
    " one leading space",
    "\n",
    "\n\n\n  \n\t\ttabs and\r\nnewlines\n",
    "1 12 123 1234 12345678901234567890 3.14159 1,000,000 0x1F １０ ２０２４年",
    "def f(x):\n    return {k: v**2 for k, v in x.items()}  # comment\n\treturn\n",
    "It's we'll I'M \"quoted\" (a) [b] <c> … — –",
    "🙂 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪",
    "你好，世界。日本語のテキスト。한국어 문장",
    "שלום עולם مرحبا بالعالم",
    "e\u0301 n\u0303 A\u030a Ω≈ç√ ﬁ ½ ㎏ \u200b\ufeff",
    "Тест ΑΒΓ हिन्दी ไทย Tiếng Việt",
    "https://example.org/a?b=c&d=e#f user@example.org C:\\path\\file.txt",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa !!!!!!!! ======== ........",
    "camelCaseWords snake_case_words SHOUTING WORDS",
    "toString() iPhone // x\n\n//\n\n\t\t3.14\n  123 日本語",
    "क्[k] ก็(ก)",
)
_AROUND = 4


def special_strings(tokenizer: Any) -> list[str]:
    """The model's special tokens written in text, alone and between words."""
    tokens = [str(token) for token in tokenizer.all_special_tokens][:8]
    return [*tokens, "".join(tokens), *(f"word{token}word {token} \n{token}" for token in tokens)]


def strings_of_spaced_tokens(tokenizer: Any) -> list[str]:
    """Texts that put spaces or letters beside added tokens which take such spaces, or count only as a whole word."""
    added = tokenizer.added_tokens_decoder.values()
    spaced = [str(token) for token in added if token.lstrip or token.rstrip or token.single_word][:8]
    return [f"word {token} word {token}s" for token in spaced]


def same_piece(piece: str, expected: str | None, tokenizer: Any, token: int) -> bool:
    """Whether the two are equal. The converter may store an added token in plain text, not in the tokenizer's
    spelling."""
    if piece == expected or expected is None:
        return piece == expected
    added = tokenizer.added_tokens_decoder.get(token)
    return added is not None and piece in (added.content.replace("\u2581", " "), tokenizer.decode([token]))


def check_tokens(file: str, texts: list[str], ids: list[list[int]], tokenizer: Any) -> Check:
    """Checks that llama.cpp gives each text the reference's ids. Special tokens in a text count as such. A warning if
    only spaces beside an added token differ: the rows say whether the model was trained on such a place.

    Args:
        texts: the result of `with_composed_forms`.
    """
    decomposed, ids_of_text = 0, dict(zip(texts, ids, strict=True))
    spaced, faults, beside = set(strings_of_spaced_tokens(tokenizer)), list[str](), list[str]()
    for text, file_ids in ids_of_text.items():
        expected = tokenizer(text, add_special_tokens=False).input_ids
        if file_ids == expected:
            continue
        if ids_of_text.get(unicodedata.normalize("NFC", text)) == expected:
            decomposed += 1
        else:
            (beside if text in spaced else faults).append(f"{_excerpt(text)}: {difference(file_ids, expected)}")
    good = f"{len(texts) - decomposed} texts, {sum(map(len, ids))} tokens equal"
    if decomposed:
        good += "; letters with separate accents (not NFC) differ, because llama.cpp does not compose them"
    check = problems("tokens", file, faults, looked_at=len(texts), good=good)
    if faults or not beside:
        return check
    detail = f"spaces beside an added token, or a word around it, make other tokens: {first_few(beside)}"
    return replace(check, verdict="warn", figure=len(beside), detail=detail)


def with_composed_forms(texts: list[str]) -> list[str]:
    """The texts, each once, with the NFC form of those that are in another form.

    Tokenizers such as Qwen's compose letters and accents first. llama.cpp composes them for no file.
    """
    return list(dict.fromkeys([*texts, *(unicodedata.normalize("NFC", text) for text in texts)]))


def difference(file_ids: list[int], expected: list[int]) -> str:
    """Both lists around the first difference."""
    at = parting_place(file_ids, expected)
    start = max(0, at - _AROUND)
    rows = ["[" + " ".join(map(str, ids[start : at + _AROUND])) + "]" for ids in (file_ids, expected)]
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
    """Checks that BOS, EOS and PAD are the reference's, that plain text gets them alike, and that llama.cpp stops at
    every token that ends an answer.

    Args:
        stops: ids that the reference's generation settings stop at.
        turn_end: the token that the chat template writes after an answer; None when it writes none.
        plain: texts, and llama.cpp's ids of them with the special tokens that it adds.
    """
    own = (("bos", facts.bos, tokenizer.bos_token_id), ("eos", facts.eos, tokenizer.eos_token_id))
    faults = [
        f"{name} is {file_token} for llama.cpp, {token} in the reference"
        for name, file_token, token in (*own, ("pad", facts.pad, tokenizer.pad_token_id))
        if token is not None and file_token != token and not (name == "pad" and file_token is None)
    ]
    ending = set(facts.end_of_generation)
    if turn_end is not None and turn_end not in ending:
        faults.append(f"llama.cpp does not stop at token {turn_end}, which ends an answer in the chat template")
    source = "the reference does: eos_token_id in its generation_config.json, or the tokenizer's own"
    named = [(token, tokenizer.convert_ids_to_tokens(token)) for token in sorted(stops - ending)]
    faults += [f"llama.cpp does not stop at token {token} ({text!r}), {source}" for token, text in named]
    for text, ids in plain:
        expected = tokenizer(text).input_ids
        if _ends(ids, expected) != _ends(expected, ids):
            faults.append(f"special tokens are added in another way: {difference(ids, expected)}")
    added = "added" if facts.add_bos else "not added"
    good = f"bos {facts.bos} {added}, eos {facts.eos}, stops at {sorted(ending)[:8]}"
    check = problems("special_tokens", file, faults, looked_at=3 + len(stops) + len(plain), good=good)
    if faults or turn_end is None:
        return check
    if any(ids[-1:] == [facts.eos] for _, ids in plain):
        why = f"llama-server and Ollama put token {facts.eos} behind each prompt, as the tokenizer does: add_eos_token"
        return Check(check.name, file, "warn", 1, 0, f"{why} in tokenizer_config.json", check.figures)
    if turn_end in stops:
        return check
    text = tokenizer.convert_ids_to_tokens(turn_end)
    why = f"transformers and vLLM do not stop at token {turn_end} ({text!r}), which ends an answer in the chat template"
    return Check(
        check.name, file, "warn", 1, 0, f"{why}: add it to eos_token_id in generation_config.json", check.figures
    )


def _ends(ids: list[int], other: list[int]) -> list[int]:
    """The first and last token and the length, if the two lists differ. The check `tokens` reports differences
    inside."""
    return [] if ids == other else [*ids[:1], *ids[-1:], len(ids)]


def check_trained(
    file: str,
    rows: list[Row],
    shipped: list[list[int] | str],
    eos: int | None,
    *,
    opening: str | None = None,
    turn_end: int | None = None,
) -> Finding:
    """Checks that this file turns the same rows into the ids that the trainer was fed.

    Args:
        rows: the rows of `samples.jsonl`.
        shipped: for each row, llama.cpp's ids of it through the file's own template, or the reason why there are none.
        eos: the token that training appends to plain text which does not end with it.
        opening: what the file's template writes right before a question; None without a template. With a template, a
            row that was trained without it is a failure, or a warning if the recipe asked for bare text. A text that
            holds `opening` counts as rendered before training.
        turn_end: the token that ends a turn of that template. A text that goes on behind it counts as rendered too.
    """
    if not rows:
        return NotChecked("trained_is_shipped", file, "no rows of text alone were given, such as a training run keeps")
    faults = []
    for row, ids in zip(rows, shipped, strict=True):
        if isinstance(ids, str):
            faults.append(f"row {row.get('row')}: the file's template refuses it: {ids}")
            continue
        expected = row["input_ids"]
        if opening is not None and row["kind"] == "completion" and not row.get("without_template"):
            faults.append(
                f"row {row.get('row')}: trained without the chat template that the file writes around a prompt"
            )
            continue
        ended = ids if row["kind"] == "chat" or eos is None or ids[-1:] == [eos] else [*ids, eos]
        if (ended[: len(expected)] if row.get("truncated") else ended) != expected:
            faults.append(f"row {row.get('row')}: {difference(ended, expected).replace('reference', 'trainer')}")
    good = f"{len(rows)} rows give the token ids that the trainer was fed"
    texts = [row for row in rows if row["kind"] != "chat" and not (opening and opening in row["rendered"])]
    bare = [row for row in texts if turn_end not in row["input_ids"][:-1]]
    if opening is not None and bare and not faults:
        why = (
            f"{len(bare)} rows were trained without the chat template, as the recipe asks; a chat writes another prompt"
        )
        return Check("trained_is_shipped", file, "warn", len(bare), 0, why, {"looked_at": len(rows)})
    return problems("trained_is_shipped", file, faults, looked_at=len(rows), good=good)


def with_other_prompts(check: Finding, rows: list[Row], tokenizer: Any, begins: int | None) -> Finding:
    """The result of `check_trained`, as a warning if a user's prompt has another text or other tokens than the rows.
    Such differences are one more <think>, the system message that Mistral 7B v0.3 leaves out of whole rows, and
    `begins`, the token that llama.cpp puts before each text."""
    chats = [row for row in rows if row["kind"] == "chat"]
    asked = [Conversation(before_last_answer(row["messages"]), row.get("tools"), True) for row in chats]
    prompts = [rendered.text or "" for rendered in render_reference(tokenizer, asked)] if chats else []
    others = [pair for pair in zip(chats, prompts, strict=True) if not pair[0]["rendered"].startswith(pair[1])]
    if isinstance(check, NotChecked) or check.verdict != "pass":
        return check
    if begins is not None and (bare := [row for row in chats if row["input_ids"][:1] != [begins]]):
        why = f"the chat template does not begin with token {begins}, as llama-server and Ollama begin each prompt"
        return Check(check.name, check.file, "warn", len(bare), 0, why, check.figures)
    if not others:
        return _with_prompts_that_run_on(check, list(zip(chats, prompts, strict=True)), tokenizer)
    (row, prompt), count = others[0], len(others)
    at = parting_place(prompt, row["rendered"])
    asks, has = (text[at : at + 30] for text in (prompt, row["rendered"]))
    why = (
        f"the chat template asks for {count} answers with another prompt than was trained: {asks!r} in place of {has!r}"
    )
    return Check(check.name, check.file, "warn", count, 0, why, check.figures)


def _with_prompts_that_run_on(check: Check, pairs: list[tuple[Row, str]], tokenizer: Any) -> Check:
    """The result as a warning if a prompt alone gets other tokens than with its answer, as where two newlines merge."""
    count, shown = 0, ""
    for row, prompt in pairs:
        alone, fed = (tokenizer(text, add_special_tokens=False).input_ids for text in (prompt, row["rendered"]))
        if alone != fed[: len(alone)]:
            at, count = parting_place(alone, fed), count + 1
            asks, has = (repr(tokenizer.decode(ids[at : at + 1])) for ids in (alone, fed))
            shown = shown or f"token {at} is {asks} in use, and {has} where the answer follows it"
    why = f"{count} answers are asked for with other tokens than were trained, by the same text: {shown}"
    return Check(check.name, check.file, "warn", count, 0, why, check.figures) if count else check


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 48 else text[:45] + "…")
