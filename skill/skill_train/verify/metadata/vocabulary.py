"""Checks the whole vocabulary of a GGUF file: text, type and score of each token, and each merge in its order.

The expected lists come from the base's own files, which are read with json and sentencepiece. Nothing is taken from the
converter.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skill_train.facts import JsonObject
from skill_train.llama.gguf_header import GgufFile
from skill_train.model.config import text_config
from skill_train.model.foreign_files import foreign_json
from skill_train.run.verify_record import Check
from skill_train.verify.check import parting_place, problems
from skill_train.verify.check_tokens import same_piece

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)  # llama.cpp, llama_token_type
_BYTES = 256
_KINDS: dict[str, tuple[type, str]] = {
    "tokens": (str, "texts"),
    "token_type": (int, "whole numbers"),
    "scores": (float, "floating-point numbers"),
    "merges": (str, "texts"),
}
# What orders the pieces, by tokenizer.ggml.model.
_NAMES = {"gpt2": "merges", "gemma4": "merges", "llama": "scores", "t5": "scores"}
# The converter gives these scores to added tokens and to padding, whose scores sentencepiece does not use.
_ADDED_SCORES = (-1000.0, -10000.0)
# Texts of added tokens that are control tokens, whatever the tokenizer's files call them.
_CONTROL_TEXT = re.compile(r"<\|.*\|>|<\uff5c.*\uff5c>|<unused.*>|<pad>|<mask>|<2mass>|\[@BOS@\]", re.DOTALL)
# Special tokens of Gemma 4 that the converter stores as text, so that a chat parser finds them in an answer.
_SHOWN = frozenset((
    "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>',
))  # fmt: skip
# llama.cpp stops at tokens with these texts in every file (src/llama-vocab.cpp, load of special tokens).
_ENDS = frozenset(
    [
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
        *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<eos>"),
        *("<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|fim_pad|>", "<fim-pad>", "<fim_pad>"),
        *("<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
        *("<turn|>", "<|tool_response>"),
    ]
)


@dataclass(frozen=True)
class Files:
    """The tokenizer files of a model folder that can be read; empty or None for a missing one."""

    document: JsonObject
    pieces: Any
    merges: list[str] | None
    added: dict[int, set[bool]]  # ids of added tokens, and whether they are special. Two files may disagree on that.


def read_files(folder: Path) -> Files:
    document = _json(folder / "tokenizer.json")
    config = _json(folder / "tokenizer_config.json")
    listed = [(int(token), entry) for token, entry in config.get("added_tokens_decoder", {}).items()]
    listed += [(entry["id"], entry) for entry in document.get("added_tokens", [])]
    listed += [(token, {}) for token in _json(folder / "added_tokens.json").values()]
    added: dict[int, set[bool]] = {}
    for token, entry in listed:
        added.setdefault(token, set()).add(entry.get("special") is True)
    return Files(document, _sentencepiece(folder), _merges(folder, document), added)


def check_vocabulary(gguf: GgufFile, tokenizer: Any, own: list[str | None], files: Files, config: JsonObject) -> Check:
    """Checks that each entry of the file's lists is the reference's.

    Args:
        own: tokens of `tokenizer`, by id.
        files: of the reference's folder.
    """
    tokens, rows = gguf.tokens, text_config(config).get("vocab_size")
    if isinstance(rows, int) and not isinstance(rows, bool):
        own = own[:rows]  # the model neither reads nor writes a token without a row, such as Gemma 3's for pictures
    # Without a list of types every token is an ordinary one to llama.cpp.
    types = gguf.integers("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    faults = _kind_faults(gguf)
    faults += [] if len(tokens) >= len(own) else [f"the file has {len(tokens)} tokens, the reference {len(own)}"]
    if len(types) != len(tokens):
        faults.append(f"{len(types)} token types for {len(tokens)} tokens")
    for token, (piece, expected) in enumerate(zip(tokens, own, strict=False)):
        padding = expected is None and token < len(types) and types[token] == _UNUSED
        if not padding and not same_piece(piece, expected, tokenizer, token):
            faults.append(f"token {token} is {piece!r}, the reference has {expected!r}")
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    shown = _SHOWN if gguf.metadata.get("tokenizer.ggml.model") == "gemma4" else frozenset()
    faults += _type_faults(types, own, files, special | set(tokenizer.all_special_ids), shown)
    ordered, why = _order_faults(gguf, files)
    wrong, unused = _id_faults(gguf, tokenizer, config)
    faults += ordered + wrong
    good = f"{len(own)} tokens equal, in order" + (f", {why}" if why else "")
    good += f"; {unused}, and llama.cpp spells such text in bytes" if unused else ""
    check = problems("vocabulary", gguf.path.name, faults, looked_at=len(tokens), good=good)
    if check.verdict == "pass" and (unused or why.startswith("not compared")):
        return Check("vocabulary", check.file, "warn", 0, 0, good, check.figures)
    return check


def _kind_faults(gguf: GgufFile) -> list[str]:
    """Lists whose values have another type than llama.cpp expects. llama.cpp reads the bytes without a check
    (`gguf_get_arr_data` in llama-vocab.cpp)."""
    faults = []
    for name, (kind, words) in _KINDS.items():
        values = gguf.metadata.get(f"tokenizer.ggml.{name}")
        if values is not None and not (isinstance(values, list) and all(type(each) is kind for each in values[:1])):
            faults.append(f"tokenizer.ggml.{name} is not a list of {words}")
    return faults


def check_stops(gguf: GgufFile, ending: list[int], allowed: set[int]) -> Check:
    """Checks that llama.cpp stops only at the reference's ends, and at tokens that it knows by their text in any
    file."""
    tokens = gguf.tokens
    texts = {token: tokens[token] if 0 <= token < len(tokens) else "no token" for token in ending}
    extra = [token for token in ending if token not in allowed and texts[token] not in _ENDS]
    faults = [
        f"llama.cpp stops at token {token} ({texts[token]!r}), where the reference does not stop" for token in extra
    ]
    faults += _named_ends(gguf, tokens, allowed)
    good = f"stops at {', '.join(f'{token} ({texts[token]!r})' for token in ending[:8])}"
    return problems("stop_tokens", gguf.path.name, faults, looked_at=len(ending), good=good)


def _id_faults(gguf: GgufFile, tokenizer: Any, config: JsonObject) -> tuple[list[str], str]:
    """Ids of the file that neither the tokenizer nor config.json uses for that purpose.

    If the vocabulary has every byte, no text is unknown. A wrong id for unknown text is then no fault, and is returned
    apart.
    """
    text, faults, unused = {**config, **text_config(config)}, [], ""
    bytes_of_file = gguf.integers("tokenizer.ggml.token_type").count(_BYTE)
    spells = gguf.metadata.get("tokenizer.ggml.model") == "gpt2" or bytes_of_file == _BYTES
    for name, key in {"unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask", "bos": "bos"}.items():
        file_id = gguf.metadata.get(f"tokenizer.ggml.{key}_token_id")
        reference_ids = [getattr(tokenizer, f"{name}_token_id", None), text.get(f"{name}_token_id")]
        reference_ids = [token for token in reference_ids if token is not None]
        if file_id is None or not reference_ids or file_id in reference_ids:
            continue
        wrong = f"{key}_token_id is {file_id}, the reference has {reference_ids[0]}"
        if key == "unknown" and spells:
            unused = wrong
        else:
            faults.append(wrong)
    return faults, unused


def _named_ends(gguf: GgufFile, tokens: list[str], allowed: set[int]) -> list[str]:
    """Faults of `eot_token_id` and `eom_token_id`, and of the list of ends that Ollama reads: such a token must end
    something in the reference too."""
    named = [(name, gguf.metadata.get(f"tokenizer.ggml.{name}")) for name in ("eot_token_id", "eom_token_id")]
    named += [("eos_token_ids", token) for token in gguf.integers("tokenizer.ggml.eos_token_ids")]
    faults = []
    for name, token in named:
        text = tokens[token] if isinstance(token, int) and 0 <= token < len(tokens) else None
        if token is not None and token not in allowed and text not in _ENDS:
            faults.append(f"{name} has {token} ({text!r}), where the reference does not stop")
    return faults


def _order_faults(gguf: GgufFile, files: Files) -> tuple[list[str], str]:
    """What differs in the merges or scores, and in words what was equal or why it was not compared."""
    kind = str(gguf.metadata.get("tokenizer.ggml.model"))
    merges, scores = gguf.strings("tokenizer.ggml.merges"), gguf.numbers("tokenizer.ggml.scores")
    if _NAMES.get(kind) == "merges" or (kind not in _NAMES and merges):
        if files.merges is None:
            return [], "not compared: merges, because the reference has no tokenizer.json and no merges.txt"
        return _merge_faults(merges, files.merges), f"{len(files.merges)} merges equal"
    if _NAMES.get(kind) == "scores":
        expected = _scores(files)
        if expected is None:
            return [], "not compared: scores, because the reference has no sentencepiece file"
        return _score_faults(scores, expected, set(files.added)), f"{len(expected)} scores equal"
    return ([], "") if kind == "bert" else ([], f"not compared: how a {kind} tokenizer orders its pieces")


def _merge_faults(entries: list[str], expected: list[str]) -> list[str]:
    if entries == expected:
        return []
    at = parting_place(entries, expected)
    pair = [repr(rows[at]) if at < len(rows) else "nothing" for rows in (entries, expected)]
    count = "" if len(entries) == len(expected) else f" ({len(entries)} instead of {len(expected)})"
    return [f"merge {at} is {pair[0]}, the reference has {pair[1]}{count}"]


def _score_faults(scores: list[float], expected: list[float], added: set[int]) -> list[str]:
    import numpy as np

    if len(scores) < len(expected):
        return [f"{len(scores)} scores, the reference has {len(expected)}"]
    own, other = np.asarray(scores[: len(expected)], np.float32), np.asarray(expected, np.float32)
    wrong = [int(token) for token in np.flatnonzero(~(own == other))]
    wrong = [token for token in wrong if token not in added or own[token] not in _ADDED_SCORES]
    if not wrong:
        return []
    first = wrong[0]
    return [
        f"score of token {first} is {own[first]:g}, the reference has {other[first]:g} ({len(wrong)} scores differ)"
    ]


def _type_faults(
    types: list[int], own: list[str | None], files: Files, special: set[int], shown: frozenset[str] = frozenset()
) -> list[str]:
    """`special`: tokens that the tokenizer itself takes for special ones. `shown`: those that may be stored as text."""
    faults = []
    for token, allowed in _allowed_types(own, files, special):
        allowed |= {_USER} if own[token] in shown else set()
        if token < len(types) and types[token] not in allowed:
            expected = " or ".join(map(str, sorted(allowed)))
            faults.append(f"token {token} is of type {types[token]}, the reference's files make it {expected}")
    padding = range(len(own), len(types))
    used = [token for token in padding if types[token] != _UNUSED]
    return faults + [f"token {token} is padding and of type {types[token]}, not {_UNUSED}" for token in used]


def _allowed_types(own: list[str | None], files: Files, special: set[int]) -> Iterator[tuple[int, set[int]]]:
    """The types of llama.cpp that each token may have. An added token that is not special is stored as text, or as a
    control token if it looks like one: answers are shown without control tokens. It may be an ordinary token only if it
    is a piece of the model itself, because llama.cpp does not find it in a text otherwise."""
    pieces = _piece_types(files.pieces) if files.pieces is not None else []
    spelled = files.document.get("model", {}).get("vocab", own)  # a list of texts, or of pieces with their scores
    spelled = {each if isinstance(each, str) else each[0] for each in spelled if each}
    for token, text in enumerate(own):
        piece = pieces[token] if token < len(pieces) else _NORMAL
        flags = files.added.get(token)
        if text is None:
            yield token, {_UNUSED}
        elif flags is not None:
            control = True in flags or token in special or text in _ENDS or _CONTROL_TEXT.fullmatch(text)
            allowed = {piece} - {_NORMAL} | ({_CONTROL} if control else set())
            ordinary = {_NORMAL} if text in spelled or token < len(pieces) else set()
            yield token, allowed | ({_USER} | ordinary if False in flags else set())
        else:
            yield token, {piece} if token < len(pieces) else {_NORMAL, _BYTE}


def _piece_types(pieces: Any) -> list[int]:
    types = []
    for token in range(pieces.vocab_size()):
        tests = ((pieces.IsUnknown, _UNKNOWN), (pieces.IsControl, _CONTROL), (pieces.IsByte, _BYTE))
        kind = next((kind for test, kind in tests if test(token)), _NORMAL)
        types.append(_UNUSED if kind == _NORMAL and pieces.IsUnused(token) else kind)
    return types


def _scores(files: Files) -> list[float] | None:
    if files.pieces is not None:
        return list(files.pieces.GetScore(list(range(files.pieces.vocab_size()))))
    model = files.document.get("model", {})
    return [float(score) for _, score in model["vocab"]] if model.get("type") == "Unigram" else None


def _merges(folder: Path, document: JsonObject) -> list[str] | None:
    """The merges as `left right`. A space inside a part is written as the byte-level alphabet writes it."""
    listed = document.get("model", {}).get("merges")
    if listed:
        return [
            merge if isinstance(merge, str) else " ".join(p.replace(" ", "\u0120") for p in merge) for merge in listed
        ]
    file = folder / "merges.txt"
    if not file.is_file():
        return None
    lines = file.read_text(encoding="utf-8").split("\n")
    return [line for line in lines[lines[0].startswith("#") :] if line.strip()]


def _sentencepiece(folder: Path) -> Any:
    file = next((folder / name for name in ("tokenizer.model", "spiece.model") if (folder / name).is_file()), None)
    if file is None:
        return None
    try:
        from sentencepiece import SentencePieceProcessor

        return SentencePieceProcessor(model_file=str(file))
    except (ImportError, RuntimeError, OSError):  # tiktoken's files have the same name
        return None


def _json(file: Path) -> JsonObject:
    """The object in a JSON file; empty if the file is missing."""
    document: JsonObject = foreign_json(file) if file.is_file() else {}
    return document
