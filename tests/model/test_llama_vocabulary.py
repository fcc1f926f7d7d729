"""A tokenizer that llama.cpp's converter does not know is told from the folder, and no other one."""

from __future__ import annotations

import ast
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import tiny
import tiny_families
import tiny_vocab
from skill_train.core.errors import NotInstalled, UsageError
from skill_train.llama import get_converter
from skill_train.llama.run_converter import require_convertible
from skill_train.model.convertible import architectures as llama_architectures
from skill_train.model.convertible import vocabulary as llama_vocabulary
from skill_train.model.convertible.vocabulary import why_no_picture, why_no_vocabulary

tokenizers = pytest.importorskip("tokenizers")
WORDS = "how far it splits before it merges"


def home_made(folder: Path) -> Path:
    """A byte-level BPE of a few merges, trained here."""
    folder.mkdir(exist_ok=True)
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    made.train_from_iterator([llama_vocabulary.TEXT, WORDS], trainer)
    made.save(str(folder / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return folder


def vocabulary(write: Any, folder: Path, **said: Any) -> Path:
    folder.mkdir()
    try:
        write(folder, tiny.vocab_folder(), **said)
    except NotInstalled:
        pytest.skip("the converter's vocabularies are not in the cache")
    return folder


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made before a test empties the cache, where the vocabularies are: they would be downloaded again."""
    return vocabulary(tiny_vocab.write_gpt2, tmp_path_factory.mktemp("vocabulary") / "gpt2")


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen2ForCausalLM", "GPT2LMHeadModel", "Gemma3ForCausalLM"])
def test_a_home_made_tokenizer_is_told(name: str, tmp_path: Path) -> None:
    assert "splits text" in str(why_no_vocabulary(home_made(tmp_path), name))


@pytest.mark.parametrize(
    ("kind", "missing"), [("idefics3", "<global-img>"), ("smolvlm", "<global-img>"), ("gemma3", None)]
)
def test_a_token_that_llama_cpp_puts_around_tiles_is_missed(kind: str, missing: str | None, tmp_path: Path) -> None:
    """Idefics3-8B-Llama3 has `<fake_token_around_image>` alone. The other one may lie among the words."""
    assert why_no_picture(tmp_path, kind) is None  # without a tokenizer.json, which is told elsewhere
    added = [{"content": "<fake_token_around_image>"}, {"content": "<image>"}]
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"added_tokens": added, "model": {"vocab": {"a": 0}}}))
    told = why_no_picture(tmp_path, kind)
    assert told is None if missing is None else f"the token {missing} around a picture" in str(told)
    file.write_text(json.dumps({"added_tokens": added, "model": {"vocab": {"<global-img>": 0}}}))
    assert why_no_picture(tmp_path, kind) is None


@pytest.mark.slow
@pytest.mark.parametrize("nested", [False, True])
def test_rows_of_gemma4_without_a_token(nested: bool, tmp_path: Path) -> None:
    """llama.cpp cannot load its file. Gemma 3's converter fills the vocabulary up."""
    for file in tiny_families.folder("gemma4").glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    for rows, lacks in ((2116, False), (2176, True), (262_144, False)):
        text = {"vocab_size": rows, "architectures": ["Gemma4ForCausalLM"], "final_logit_softcapping": 30.0}
        text |= {"vocab_size_per_layer_input": rows}
        (tmp_path / "config.json").write_text(json.dumps({"text_config": text} if nested else text))
        assert ("vocab_size" in str(why_no_vocabulary(tmp_path, "Gemma4ForCausalLM"))) is lacks
        if lacks:
            with pytest.raises(UsageError, match="vocab_size"):
                require_convertible(tmp_path, get_converter.find())
        assert "vocab_size" not in str(why_no_vocabulary(tmp_path, "Gemma3ForCausalLM"))
    (tmp_path / "tokenizer.json").unlink()  # as of a model on the Hub
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 2176}))
    assert why_no_vocabulary(tmp_path, "Gemma4ForCausalLM") is None


@pytest.mark.parametrize("name", ["MptForCausalLM", "Gemma4ForCausalLM"])
def test_a_class_that_needs_no_hash_is_left_alone(name: str, tmp_path: Path) -> None:
    assert why_no_vocabulary(home_made(tmp_path), name) is None


def test_a_known_one_is_known(gpt2: Path) -> None:
    assert why_no_vocabulary(gpt2, "GPT2LMHeadModel") is None
    assert why_no_vocabulary(gpt2, "LlamaForCausalLM") is None


def test_pieces_without_tokenizer_model_do_for_llama_and_not_for_phi_3(tmp_path: Path) -> None:
    folder = vocabulary(tiny_vocab.write_llama_spm, tmp_path / "spm", template="")
    assert why_no_vocabulary(folder, "LlamaForCausalLM") is None
    assert why_no_vocabulary(folder, "Phi3ForCausalLM") is None
    (folder / "tokenizer.model").unlink()
    assert why_no_vocabulary(folder, "LlamaForCausalLM") is None
    assert "tokenizer.model" in str(why_no_vocabulary(folder, "Phi3ForCausalLM"))
    assert "splits text" in str(why_no_vocabulary(folder, "Qwen2ForCausalLM"))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"model": 3}', '{"model": {"type": "BPE"}, "added_tokens": [{}]}'])
def test_a_broken_file_is_told_elsewhere(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    assert why_no_vocabulary(tmp_path, "Qwen2ForCausalLM") is None


def test_list_and_text_are_those_of_the_converter() -> None:
    try:
        found = get_converter.find()
    except NotInstalled:
        pytest.skip("the converter is not in the cache")
    if found.version != llama_architectures.VERSION:
        pytest.skip(f"the cached converter is {found.version}")
    code = (found.folder / "conversion" / "base.py").read_text(encoding="utf-8")
    digits = llama_vocabulary.DIGITS
    assert {each[:digits] for each in re.findall(r'chkhsh == "([0-9a-f]{64})"', code)} == llama_vocabulary.CHECKSUMS
    text = re.search(r"chktxt = ('.*')", code)
    assert text is not None
    assert ast.literal_eval(text[1]) == llama_vocabulary.TEXT


# --- The answer is kept, because reading a vocabulary takes longer than the rest of a plan ---


@pytest.fixture
def reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that the library reads, with an empty cache."""
    monkeypatch.setenv("SKILL_TRAIN_CACHE", str(tmp_path / "cache"))
    files: list[str] = []

    def counted(folder: Path) -> list[str]:
        files.append(folder.name)
        return list(hashes(folder))

    hashes = llama_vocabulary._hashes
    monkeypatch.setattr(llama_vocabulary, "_hashes", counted)
    return files


def test_a_vocabulary_is_read_once(reads: list[str], tmp_path: Path) -> None:
    folder = home_made(tmp_path)
    first, second = (why_no_vocabulary(folder, "Qwen2ForCausalLM") for _ in range(2))
    assert first == second and "splits text" in str(first)
    assert len(reads) == 1
    why_no_vocabulary(folder, "GPT2LMHeadModel")  # of another class the answer may be another
    assert len(reads) == 2


def test_another_vocabulary_under_the_same_name_is_read(gpt2: Path, reads: list[str], tmp_path: Path) -> None:
    folder = home_made(tmp_path)
    assert why_no_vocabulary(folder, "GPT2LMHeadModel") is not None
    shutil.copyfile(gpt2 / "tokenizer.json", folder / "tokenizer.json")
    assert why_no_vocabulary(folder, "GPT2LMHeadModel") is None
    assert len(reads) == 2


@pytest.mark.parametrize("content", ["", "[]", '{"broken', "null"])
def test_a_damaged_cache_is_made_again(content: str, reads: list[str], tmp_path: Path) -> None:
    folder = home_made(tmp_path)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "tokenizers.json").write_text(content)
    for _ in range(2):
        assert why_no_vocabulary(folder, "Qwen2ForCausalLM") is not None
    assert len(reads) == 1


def test_what_could_not_be_read_is_read_again(
    reads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that is installed later gives the answer that it could not give."""
    folder = home_made(tmp_path)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tokenizers", None)
        assert why_no_vocabulary(folder, "Qwen2ForCausalLM") is None
    assert why_no_vocabulary(folder, "Qwen2ForCausalLM") is not None
    assert len(reads) == 2
