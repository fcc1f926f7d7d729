"""Each list of the vocabulary of a correct file is changed, one at a time; the check must name what changed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

import tiny_families
from skill_train.llama.gguf_header import GgufFile
from skill_train.reference.load import load_tokenizer
from skill_train.run.verify_record import Check
from skill_train.verify.metadata.vocabulary import Files, _type_faults, check_vocabulary, read_files

pytestmark = pytest.mark.slow
KINDS = ["gemma", "llama-bpe", "qwen2", "phi3", "gpt2"]  # a vocabulary of its own each


@lru_cache(2)
def reference_of(folder: Path) -> tuple[Any, list[str], Any]:
    """Its tokenizer, its tokens and its files, which the check only reads."""
    tokenizer = load_tokenizer(folder)
    return tokenizer, tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))), read_files(folder)


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def changed(gguf: GgufFile, key: str, value: Any) -> GgufFile:
    return replace(gguf, metadata={**gguf.metadata, key: value})


def vocabulary(folder: Path, gguf: GgufFile) -> Check:
    return check_vocabulary(gguf, *reference_of(folder), config_of(folder))


@pytest.mark.parametrize("name", KINDS + tiny_families.by_default(chosen=("granitehybrid", "mixtral")))
def test_a_correct_file_passes(name: str) -> None:
    check = vocabulary(*tiny_families.converted(name))
    assert check.verdict == ("warn" if name == "nemotron" else "pass"), check.detail


def test_special_tokens_of_gemma4_that_an_answer_shows() -> None:
    """The converter stores seven of them as text. The marks of a turn are not among them."""
    folder, gguf = tiny_families.converted("gemma4")
    assert vocabulary(folder, gguf).verdict == "pass"
    key, tokens = "tokenizer.ggml.token_type", gguf.tokens
    for text, kind in (("<|turn>", 4), ("<|turn>", 1), ("<|channel>", 1), ("<|channel>", 6)):
        wrong = gguf.metadata[key].copy()
        wrong[tokens.index(text)] = kind
        check = vocabulary(folder, changed(gguf, key, wrong))
        assert check.verdict == "fail" and f"token {tokens.index(text)} is of type {kind}" in check.detail
    assert vocabulary(folder, changed(gguf, "tokenizer.ggml.model", "llama")).verdict == "fail"


@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(n, marks=pytest.mark.torture) for n in ("qwen2", "llama-bpe"))]
)
def test_merges_in_another_order_or_left_out(name: str) -> None:
    (folder, gguf), key = tiny_families.converted(name), "tokenizer.ggml.merges"
    merges = gguf.metadata[key]
    for at in (0, 137, len(merges) - 2):
        exchanged = [*merges[:at], merges[at + 1], merges[at], *merges[at + 2 :]]
        check = vocabulary(folder, changed(gguf, key, exchanged))
        assert check.verdict == "fail" and f"merge {at} is {merges[at + 1]!r}" in check.detail
    fewer = [merge for number, merge in enumerate(merges) if number % 50]
    assert f"({len(fewer)} instead of {len(merges)})" in vocabulary(folder, changed(gguf, key, fewer)).detail


@pytest.mark.parametrize("name", ["gemma", "mixtral", "phi3"])
def test_scores_in_another_order(name: str) -> None:
    (folder, gguf), key = tiny_families.converted(name), "tokenizer.ggml.scores"
    scores = gguf.metadata[key]
    for wrong in ([*scores[:300], *reversed(scores[300:600]), *scores[600:]], [*scores[:400], -1.5, *scores[401:]]):
        check = vocabulary(folder, changed(gguf, key, wrong))
        assert check.verdict == "fail" and "score of token" in check.detail


@pytest.mark.parametrize("name", ["gemma", "mixtral", "gpt2"])
def test_an_ordinary_token_that_became_a_control_token(name: str) -> None:
    (folder, gguf), key = tiny_families.converted(name), "tokenizer.ggml.token_type"
    types = gguf.metadata[key]
    check = vocabulary(folder, changed(gguf, key, [*types[:400], 3, *types[401:]]))
    assert check.verdict == "fail" and "token 400 is of type 3" in check.detail


@pytest.mark.parametrize(("kind", "wrong"), [(1, True), (3, True), (4, False)])
def test_a_call_of_a_tool_that_is_no_text_of_its_own(kind: int, wrong: bool) -> None:
    """llama.cpp does not find an ordinary token in a prompt, unless its pieces spell it, and shows no control token in
    an answer."""
    (folder, gguf), key = tiny_families.converted("qwen2"), "tokenizer.ggml.token_type"
    token, types = gguf.metadata["tokenizer.ggml.tokens"].index("<tool_call>"), gguf.metadata[key]
    check = vocabulary(folder, changed(gguf, key, [*types[:token], kind, *types[token + 1 :]]))
    told = f"token {token} is of type {kind}, the reference's files make it 4"
    assert (check.verdict, check.detail == told) == (("fail", True) if wrong else ("pass", False)), check.detail


def test_a_control_token_that_only_the_tokenizer_knows_as_special() -> None:
    """A token that is named as an end is special to transformers, whatever stands in its entry of tokenizer.json."""
    own: list[str | None] = ["a", "</assistant>"]
    files = Files({"model": {"vocab": {"a": 0}}}, None, None, {1: {False}})
    assert _type_faults([1, 3], own, files, {1}) == _type_faults([1, 4], own, files, set()) == []
    assert _type_faults([1, 3], own, files, set()) == ["token 1 is of type 3, the reference's files make it 4"]


@pytest.mark.parametrize("name", ["gemma", "gpt2"])
@pytest.mark.parametrize("kind", [float, str], ids=["numbers with a point", "texts"])
def test_token_types_of_another_kind(name: str, kind: type) -> None:
    """llama.cpp reads the bytes of the array as 32-bit integers, whatever they are (llama-vocab.cpp)."""
    (folder, gguf), key = tiny_families.converted(name), "tokenizer.ggml.token_type"
    check = vocabulary(folder, changed(gguf, key, [kind(each) for each in gguf.metadata[key]]))
    assert check.verdict == "fail" and "tokenizer.ggml.token_type" in check.detail


@pytest.mark.parametrize("kind", [int, str], ids=["integers", "texts"])
def test_scores_of_another_kind(kind: type) -> None:
    """Read as 32-bit floats; here each has its own value, which a comparison of values lets pass."""
    (folder, gguf), key = tiny_families.converted("gemma"), "tokenizer.ggml.scores"
    check = vocabulary(folder, changed(gguf, key, [kind(each) for each in gguf.metadata[key]]))
    assert check.verdict == "fail" and "tokenizer.ggml.scores" in check.detail


@pytest.mark.parametrize("name", ["gemma", "gpt2"])
def test_token_types_left_out(name: str) -> None:
    """Every token is then an ordinary one, and a turn's end is written as text (llama-vocab.cpp)."""
    (folder, gguf), key = tiny_families.converted(name), "tokenizer.ggml.token_type"
    assert set(gguf.metadata[key]) > {1}  # both have control tokens
    without = replace(gguf, metadata={name: value for name, value in gguf.metadata.items() if name != key})
    check = vocabulary(folder, without)
    assert check.verdict == "fail" and "is of type 1" in check.detail


def test_merges_that_no_file_of_the_reference_has_are_not_passed(tmp_path: Path) -> None:
    folder, gguf = tiny_families.converted("gpt2")
    tokenizer = load_tokenizer(folder)
    own = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    check = check_vocabulary(gguf, tokenizer, own, read_files(tmp_path), config_of(folder))
    assert check.verdict != "pass"


@pytest.mark.parametrize("name", ["bos", "mask", "padding"])
def test_another_special_token(name: str) -> None:
    (folder, gguf), key = tiny_families.converted("gemma"), f"tokenizer.ggml.{name}_token_id"
    check = vocabulary(folder, changed(gguf, key, 300))
    assert check.verdict == "fail" and f"{name}_token_id is 300, the reference has" in check.detail


def test_padding_behind_the_tokens_is_never_used() -> None:
    """The converter fills a vocabulary up to the rows of the embedding."""
    folder, gguf = tiny_families.converted("gemma")
    lists = {"tokens": "[PAD640]", "scores": -1000.0, "token_type": 5}
    for wrong, verdict in (({}, "pass"), ({"token_type": 1}, "fail"), ({"token_type": 4}, "fail")):
        more = {f"tokenizer.ggml.{key}": [one] for key, one in (lists | wrong).items()}
        longer = {key: [*gguf.metadata[key], *one] for key, one in more.items()}
        assert vocabulary(folder, replace(gguf, metadata=gguf.metadata | longer)).verdict == verdict


def test_a_token_without_a_row(tmp_path: Path) -> None:
    """Gemma 3 1B and 270M: 262,144 rows, and a token for pictures with that id, which the converter leaves out."""
    base, gguf = tiny_families.converted("gemma")
    folder = Path(shutil.copytree(base, tmp_path / "base"))
    document = json.loads((folder / "tokenizer.json").read_text())
    document["added_tokens"].append({**document["added_tokens"][-1], "id": 640, "content": "<image_soft_token>"})
    (folder / "tokenizer.json").write_text(json.dumps(document))
    check = vocabulary(folder, gguf)
    assert check.verdict == "pass" and check.detail.startswith("640 tokens equal, in order"), check.detail
    lists = ("tokens", "scores", "token_type")
    shorter = {f"tokenizer.ggml.{key}": gguf.metadata[f"tokenizer.ggml.{key}"][:639] for key in lists}
    check = vocabulary(folder, replace(gguf, metadata=gguf.metadata | shorter))
    assert check.verdict == "fail" and "the file has 639 tokens, the reference 640" in check.detail


def test_scores_that_end_before_the_tokens() -> None:
    (folder, gguf), key = tiny_families.converted("gemma"), "tokenizer.ggml.scores"
    check = vocabulary(folder, changed(gguf, key, gguf.metadata[key][:600]))
    assert check.verdict == "fail" and "600 scores, the reference has 640" in check.detail


def test_a_token_for_unknown_text_that_is_never_written() -> None:
    """The converter gives Nemotron's files token 1, whatever the tokenizer has. Bytes spell every text."""
    folder, gguf = tiny_families.converted("nemotron")
    assert gguf.metadata["tokenizer.ggml.unknown_token_id"] == 1
    check = vocabulary(folder, gguf)
    assert check.verdict == "warn" and "unknown_token_id is 1, the reference has 0" in check.detail
    types = [1 if kind == 6 else kind for kind in gguf.metadata["tokenizer.ggml.token_type"]]
    assert vocabulary(folder, changed(gguf, "tokenizer.ggml.token_type", types)).figure == 256 + 1  # each type, the id
