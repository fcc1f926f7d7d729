"""Tokens that an adapter's tokenizer adds to the base's: checks that they have rows, and copies them to the merged
model.

transformers 5 saves a tokenizer without the list of added tokens in tokenizer_config.json and without `add_bos_token`,
and writes no tokenizer.model. llama.cpp's converter reads a sentencepiece vocabulary from tokenizer.model and the added
tokens from that list, so new tokens became padding in the GGUF file. The list is written again from tokenizer.json.
"""

import filecmp
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skill_train.core.files import write_text
from skill_train.facts import JsonObject
from skill_train.model.adapter import bad_adapter
from skill_train.model.foreign_files import object_in
from skill_train.program.folders.base import add_stops

TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "spiece.model", "vocab.json", "merges.txt", "vocab.txt",
)  # fmt: skip
_CONFIG = "tokenizer_config.json"
_GENERATION = "generation_config.json"
_STATED_AGAIN = ("special_tokens_map.json", "added_tokens.json")  # the two other files contain the same
# Keys of tokenizer_config.json that transformers 5 writes for itself; the base's file has the values that programs
# know.
_OF_TRANSFORMERS_5 = ("backend", "is_local", "local_files_only", "tokenizer_class", "added_tokens_decoder")


def new_tokens(base: Path, adapter: Path) -> dict[int, str]:
    """The text by id of each token that the adapter's tokenizer has and the base's does not: an added one, or one of
    its vocabulary where the base's can be read."""
    pairs = ((adapter / name, base / name) for name in TOKENIZER if (adapter / name).is_file())
    if all(other.is_file() and filecmp.cmp(own, other, shallow=False) for own, other in pairs):
        return {}  # avoids reading a tokenizer: one of 150,000 tokens takes 80 MB
    ours, theirs = set(_added_tokens(base)), set(_added_tokens(adapter))
    if vocabulary := _vocabulary(base):
        ours |= vocabulary
        theirs |= _vocabulary(adapter)
    return dict(sorted((int(number), text) for text, number in theirs - ours if number.isascii() and number.isdigit()))


def takes_tokenizer(base: Path, adapter: Path) -> bool:
    """Whether the merged model gets the adapter's tokenizer: it adds tokens, or the base has none."""
    if not any((base / name).is_file() for name in TOKENIZER):
        return any((adapter / name).is_file() for name in TOKENIZER)
    return bool(new_tokens(base, adapter))


def require_rows(base: Path, adapter: Path, rows: int | None, *, trained_whole: bool, fewer: bool) -> None:
    """Refuses a tokenizer that does not fit the rows of the merged embedding.

    Args:
        rows: the rows of the merged embedding; None if unknown, and then only the base's own tokens are compared.
        trained_whole: the whole embedding was trained, so it may belong to another vocabulary.
        fewer: these are fewer rows than the base has.

    Raises:
        UsageError: a token has no row, or a new one has the id of a token of the base.
    """
    new = new_tokens(base, adapter)
    tokens = {*_vocabulary(base), *_added_tokens(base)} if fewer and not new else set()
    last = max((int(number) for _, number in tokens if number.isdigit()), default=0)
    if rows is not None and last >= rows:
        raise bad_adapter(
            "the adapter's embedding has fewer rows than the base's tokenizer has tokens",
            expected=f"a row for each token of {base}",
            got=f"{rows} rows, and a token with the id {last}",
            hint="train with the rows of the base: do not resize the embedding to fewer",
        )
    without = [number for number in sorted(new) if rows is not None and number >= rows]
    if without:
        raise bad_adapter(
            f"the adapter's tokenizer has a token without a row in the merged model's embedding: {new[without[0]]!r}",
            expected=f"ids below {rows}, the rows of the embedding",
            got=f"id {without[0]}" + (f", and {len(without) - 1} more" if len(without) > 1 else ""),
            hint="save the adapter again from the trained model, with save_pretrained(…, save_embedding_layers=True)",
        )
    other = None if trained_whole or not new else _other_token(base, adapter)
    if other is not None:
        raise bad_adapter(
            f"the adapter's tokenizer does not extend that of the base model: id {other[0]} is another token",
            expected=f"{other[1]!r}, as in {base}",
            got=f"{other[2]!r}, as in {adapter}",
            hint="put the tokenizer that the adapter was trained with into its folder, or remove the tokenizer files",
        )


def take_tokenizer(base: Path, adapter: Path, part: Path) -> list[str]:
    """Adds the adapter's tokenizer to a folder with the base's files; returns the names of the adapter's files."""
    copied = [name for name in TOKENIZER if (adapter / name).is_file()]
    for name in copied:
        shutil.copyfile(adapter / name, part / name)
    vocabulary = _vocabulary(base)
    own = vocabulary and _vocabulary(adapter) - vocabulary - {*_added_tokens(adapter)}  # not added tokens alone
    for name in {*(TOKENIZER if own else _STATED_AGAIN)} - {*copied, _CONFIG}:
        (part / name).unlink(missing_ok=True)  # the base's, which lacks the new tokens
    if _CONFIG in copied and (base / _CONFIG).is_file():
        stated = {key: value for key, value in object_in(adapter / _CONFIG).items() if key not in _OF_TRANSFORMERS_5}
        stated = object_in(base / _CONFIG) | stated | {"added_tokens_decoder": _decoder(base, adapter)}
        write_text(part / _CONFIG, json.dumps(stated, indent=2) + "\n")
    # transformers and vLLM stop an answer at the tokens in this file.
    end = end_token(adapter)
    stops = add_stops(part, [number for number, text in new_tokens(base, adapter).items() if text == end])
    return copied + ([_GENERATION] if stops else [])


def end_token(folder: Path) -> Any:
    """The text of a tokenizer's `eos_token`; None if it has none."""
    token = object_in(folder / _CONFIG).get("eos_token")
    return token.get("content") if isinstance(token, dict) else token


def _decoder(base: Path, adapter: Path) -> JsonObject:
    """`added_tokens_decoder` as transformers 4 wrote it: every added token by its id."""
    tokens: JsonObject = {}
    for folder in (base, adapter):
        decoder = object_in(folder / _CONFIG).get("added_tokens_decoder")
        tokens |= decoder if isinstance(decoder, dict) else {}
    listed = object_in(adapter / "tokenizer.json").get("added_tokens")
    for token in listed if isinstance(listed, list) else ():
        if isinstance(token, dict) and isinstance(token.get("id"), int):
            tokens[str(token["id"])] = {key: value for key, value in token.items() if key != "id"}
    return tokens


def _other_token(base: Path, adapter: Path) -> tuple[int, str, str] | None:
    """The first id that differs between the vocabularies of base and adapter; None if there is none."""
    ours, theirs = ({int(number): text for text, number in _vocabulary(folder)} for folder in (base, adapter))
    differing = sorted(number for number, text in ours.items() if theirs.get(number, text) != text)
    return (differing[0], ours[differing[0]], theirs[differing[0]]) if differing else None


def _vocabulary(folder: Path) -> set[tuple[str, str]]:
    """`(text, id)` of a tokenizer.json's own vocabulary, without added tokens; empty when it cannot be read."""
    model = object_in(folder / "tokenizer.json").get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        return {(text, str(number)) for text, number in vocabulary.items() if type(number) is int}
    pieces = vocabulary if isinstance(vocabulary, list) else []
    return {(str(piece[0]), str(number)) for number, piece in enumerate(pieces) if isinstance(piece, list) and piece}


def _added_tokens(folder: Path) -> Iterator[tuple[str, str]]:
    """`(content, id)` of each added token."""
    listed = object_in(folder / "tokenizer.json").get("added_tokens")
    decoder = object_in(folder / _CONFIG).get("added_tokens_decoder")
    for token in listed if isinstance(listed, list) else ():
        yield _text_of(token, "content"), str(_text_of(token, "id"))
    for content, number in object_in(folder / "added_tokens.json").items():
        yield content, str(number)
    for number, token in decoder.items() if isinstance(decoder, dict) else ():
        yield _text_of(token, "content"), number


def _text_of(token: Any, key: str) -> str:
    """The value of a key in an entry as text for comparison, because the value can have any type."""
    return str(token.get(key)) if isinstance(token, dict) else ""
