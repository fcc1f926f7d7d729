"""The ids that are trained are those that llama.cpp makes of the converted vocabulary, whatever the folder says."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from llama_cpp import Llama
from tokenizers import Tokenizer, models, normalizers
from transformers import AddedToken, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import tiny
import tiny_templates
import training
from converting import converted
from skill_train.llama import inference
from skill_train.program.encode import BEGINS_OTHERWISE, ENDS_PROMPTS, Encoder
from skill_train.program.events import Refused
from skill_train.program.tokenizer import load_tokenizer
from skill_train.reference import load as reference
from skill_train.run.verify_record import Check
from skill_train.verify import check_template
from skill_train.verify.check_tokens import (
    HARD_STRINGS,
    check_tokens,
    check_trained,
    strings_of_spaced_tokens,
    with_other_prompts,
)

pytestmark = pytest.mark.slow

TEXTS = [
    "<s>[INST] Hi  there [/INST]  fine</s>",
    "[INST]Hi",
    "    return  x",
    "<|user|>\n Hi<|end|>\n<|assistant|>\n  Yes.<|end|> x",
    "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nWhat is 12345? [/INST]",
    *(text for text in HARD_STRINGS if "\u0301" not in text),  # no llama.cpp vocabulary composes accents
]
METASPACE = {"type": "Metaspace", "replacement": "▁", "split": False}


def model(kind: str, folder: Path, *, tokenizer: dict[str, Any] | None = None, **config: Any) -> Path:
    """A copy of a tiny model whose tokenizer_config.json, and tokenizer.json, say something else."""
    made = folder / "model"
    shutil.copytree(tiny.cached(kind), made)
    for name, changes in (("tokenizer_config.json", config), ("tokenizer.json", tokenizer or {})):
        file = made / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return made


def shipped(folder: Path, work: Path, texts: list[str]) -> list[list[int]]:
    """The ids of llama.cpp from the converted file."""
    job = inference.InferenceJob(gguf=str(converted(folder, work, "f16")), context_tokens=64, threads=1, plain=texts)
    return inference.ask(job).plain


# One of each kind: the class that a folder names, the spaces before a text, tokenizer.model alone, bytes for pieces.
ALWAYS = [
    ("llama-spm", {}, {"tokenizer_class": "LlamaTokenizer"}, None),
    ("llama-spm", {"normalizer": None, "pre_tokenizer": METASPACE | {"prepend_scheme": "first"}}, {}, None),
    ("llama-spm", {}, {}, "tokenizer.json"),
    ("gpt2", {}, {"add_prefix_space": True}, None),
]
OTHERS: list[tuple[str, dict[str, Any], dict[str, Any], str | None]] = [
    ("llama-spm", {}, {"tokenizer_class": "LlamaTokenizerFast", "legacy": False}, None),
    ("llama-spm", {}, {"tokenizer_class": "LlamaTokenizer", "legacy": True}, None),
    ("llama-spm", {}, {"tokenizer_class": "CodeLlamaTokenizer"}, None),
    ("llama-spm", {}, {"tokenizer_class": "GemmaTokenizer"}, None),
    ("llama-spm", {}, {"add_prefix_space": False}, None),
    ("llama-spm", {"normalizer": None, "pre_tokenizer": METASPACE | {"prepend_scheme": "always"}}, {}, None),
    ("llama-spm", {"normalizer": None, "pre_tokenizer": METASPACE | {"prepend_scheme": "never"}}, {}, None),
    ("llama-spm", {}, {"tokenizer_class": "LlamaTokenizer"}, "tokenizer.model"),
    ("llama-spm", {}, {"tokenizer_class": "LlamaTokenizer"}, "tokenizer.json"),
    ("llama-spm", {}, {"tokenizer_class": "LlamaTokenizer", "legacy": False}, "tokenizer.json"),
    ("llama-spm", {}, {"add_prefix_space": False}, "tokenizer.json"),
    ("mistral", {}, {"tokenizer_class": "LlamaTokenizer"}, "tokenizer.json"),
    ("gemma", {}, {}, "tokenizer.json"),
    ("gemma", {}, {"tokenizer_class": "LlamaTokenizer"}, "tokenizer.json"),
    ("phi3", {}, {}, None),
    ("phi3", {}, {"tokenizer_class": "LlamaTokenizer", "legacy": False}, None),
    ("mistral", {}, {"tokenizer_class": "LlamaTokenizer"}, None),
    ("llama-bpe", {}, {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}, None),
    ("gemma", {}, {"tokenizer_class": "LlamaTokenizer"}, None),
]


@pytest.mark.parametrize(
    ("kind", "tokenizer", "config", "without"),
    [*ALWAYS, *(pytest.param(*other, marks=pytest.mark.torture) for other in OTHERS)],
)
def test_what_is_trained_is_what_ships(kind: str, tokenizer: Any, config: Any, without: Any, tmp_path: Path) -> None:
    folder = model(kind, tmp_path, tokenizer=tokenizer, **config)
    if without:
        (folder / without).unlink()
    trained = load_tokenizer(str(folder), None)
    checked = reference.load_tokenizer(folder)
    ids = [trained(text, add_special_tokens=False).input_ids for text in TEXTS]
    assert ids == [checked(text, add_special_tokens=False).input_ids for text in TEXTS]
    assert ids == shipped(folder, tmp_path, TEXTS)


@pytest.mark.parametrize(("flag", "verdict"), [("lstrip", "warn"), ("rstrip", "warn"), ("normalized", "pass")])
def test_a_token_that_takes_the_spaces_beside_it_is_told(flag: str, verdict: str, tmp_path: Path) -> None:
    """llama.cpp has no such tokens. One without the flag is tokenized alike."""
    folder = model("gpt2", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken("<|mark|>", special=True, **{flag: True})], special_tokens=True)
    tokenizer.save_pretrained(folder)
    grown = AutoModelForCausalLM.from_pretrained(folder)
    grown.resize_token_embeddings(len(tokenizer))
    grown.save_pretrained(folder)
    read = reference.load_tokenizer(folder)
    texts = [*HARD_STRINGS[:4], *strings_of_spaced_tokens(read)]
    check = check_tokens("m.gguf", texts, shipped(folder, tmp_path, texts), read)
    assert check.verdict == verdict
    assert ("'word <|mark|> word <|mark|>s': at token 1" in check.detail) == (flag == "lstrip")


# Of them Qwen 2 differs in vowel signs, in capitals inside a word, in Han beside numbers, in digits behind tabs, in
# lines behind signs, and in wide digits. Without `ignore_merges` Llama 3 does not find its token for " Vi\u1ec7t".
OTHER_WAYS: dict[bytes, tuple[bytes, ...]] = {
    b"qwen2": (b"qwen35", b"gpt-4o", b"kimi-k2", b"minicpm5", b"exaone-moe", b"llama-bpe", b"smaug-bpe"),
    b"llama-bpe": (b"smaug-bpe", b"dbrx", b"qwen2"),
}


@pytest.mark.parametrize("own", OTHER_WAYS)
def test_another_way_to_cut_words_makes_other_tokens_of_the_texts(own: bytes, tmp_path: Path) -> None:
    source = (tiny.vocab_folder() / f"ggml-vocab-{own.decode()}.gguf").read_bytes()
    file, key, others = tmp_path / "m.gguf", b"tokenizer.ggml.pre" + struct.pack("<I", 8), OTHER_WAYS[own]
    right, *wrong = (list[list[int]]() for _ in (own, *others))
    for pre, ids in zip((own, *others), (right, *wrong), strict=True):
        old, new = (key + struct.pack("<Q", len(name)) + name for name in (own, pre))
        assert source.count(old) == 1
        file.write_bytes(source.replace(old, new))
        llama = Llama(str(file), vocab_only=True, verbose=False)
        ids += [llama.tokenize(text.encode(), add_bos=False, special=True) for text in HARD_STRINGS]
    assert [pre for pre, ids in zip(others, wrong, strict=True) if ids == right] == []


def test_llama_2_reads_inst_as_its_tokenizer_json_does(tmp_path: Path) -> None:
    """518 and 29961: the ids of `[` with and without a space before it in Llama 2's published vocabulary."""
    folder = model("llama-spm", tmp_path, tokenizer_class="LlamaTokenizer")
    tokenizer = load_tokenizer(str(folder), None)
    assert tokenizer("<s>[INST]", add_special_tokens=False).input_ids[1] == 518


def other_pieces(folder: Path) -> None:
    """The pieces for 518 and 519 change places in tokenizer.model; tokenizer.json stays."""
    from sentencepiece import sentencepiece_model_pb2

    file = folder / "tokenizer.model"
    said = sentencepiece_model_pb2.ModelProto.FromString(file.read_bytes())
    said.pieces[518].piece, said.pieces[519].piece = said.pieces[519].piece, said.pieces[518].piece
    file.write_bytes(said.SerializeToString())


def test_two_vocabularies_in_one_folder_are_refused_before_the_training(tmp_path: Path) -> None:
    folder = model("llama-spm", tmp_path)
    kept = load_tokenizer(str(folder), None)
    other_pieces(folder)
    assert shipped(folder, tmp_path, ["<s>[INST]"]) != [kept("<s>[INST]", add_special_tokens=False).input_ids]
    with pytest.raises(Refused) as caught:
        load_tokenizer(str(folder), None)
    assert caught.value.error["code"] == "bad_tokenizer"
    assert "518" in caught.value.error["got"]
    (folder / "tokenizer.json").unlink()  # the way out that the hint names
    alone = load_tokenizer(str(folder), None)
    assert alone("<s>[INST]", add_special_tokens=False).input_ids[1] == 519


@pytest.mark.parametrize("kind", ["llama-spm", "mistral", "gemma", "phi3"])
def test_the_two_files_of_published_vocabularies_agree(kind: str) -> None:
    assert load_tokenizer(str(tiny.cached(kind)), None)


def test_the_count_of_tokens_says_that_another_class_was_named(tmp_path: Path) -> None:
    folder = model("llama-spm", tmp_path, tokenizer_class="LlamaTokenizer")
    recipe = training.resolved(folder, tiny.write_rows(tmp_path / "rows.jsonl", 3))
    (note,) = Encoder(recipe, load_tokenizer(str(folder), None)).notes
    assert "LlamaTokenizer" in note
    assert Encoder(recipe, training.tokenizer("llama-spm")).notes == []


@pytest.mark.parametrize(
    ("suffix", "kept"), [pytest.param(None, True, marks=pytest.mark.torture), ("", True), ("</w>", False)]
)
def test_an_empty_suffix_of_pieces_is_none(tmp_path: Path, suffix: str | None, kept: bool) -> None:
    """Qwen's class sets an empty one. It is read a second time only where the file has another."""
    document = json.loads((tiny.cached("qwen2") / "tokenizer.json").read_text())
    pieces = document["model"]
    few = {piece: number for piece, number in pieces["vocab"].items() if number < 5000}
    merges = [merge for merge in pieces["merges"] if {*merge, "".join(merge)} <= few.keys()]
    added = [token | {"id": number} for number, token in enumerate(document["added_tokens"], 5000)]
    said = pieces | {"vocab": few, "merges": merges, "end_of_word_suffix": suffix}
    folder = model("qwen2", tmp_path, tokenizer={"model": said, "added_tokens": added})
    tokenizer, published = load_tokenizer(str(folder), None), Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert (type(tokenizer).__name__ == "Qwen2Tokenizer") is kept
    for text in TEXTS:
        assert (
            tokenizer(text, add_special_tokens=False).input_ids == published.encode(text, add_special_tokens=False).ids
        )


def test_a_vocabulary_without_a_letter_is_asked_about_its_ends(tmp_path: Path) -> None:
    encoder = Encoder(training.resolved(tiny.cached("gemma"), tiny.write_rows(tmp_path / "rows.jsonl", 1)), _words())
    assert encoder.around == (-100, -100)


def _words() -> Any:
    """A tokenizer of one word."""
    words = Tokenizer(models.WordLevel({"<s>": 0, "Four.": 1}, unk_token="<s>"))
    words.normalizer = normalizers.Replace("a", "")
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<s>")


def test_a_tokenizer_that_ends_prompts_is_told(tmp_path: Path) -> None:
    """With add_eos_token, as bases are published that were tuned before. llama.cpp does the same to each text."""
    post = {"id": "</s>", "type_id": 0}
    processor = json.loads((tiny.cached("mistral") / "tokenizer.json").read_text())["post_processor"]
    ending = {"</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]}}
    processor["single"].append({"SpecialToken": post})
    folder = model(
        "mistral",
        tmp_path,
        tokenizer={"post_processor": processor | {"special_tokens": processor["special_tokens"] | ending}},
        add_eos_token=True,
    )
    turns = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}]
    recipe = training.resolved(folder, training.write_data(tmp_path, [{"messages": turns}]))
    encoder = Encoder(recipe, load_tokenizer(str(folder), None))
    row = encoder(0, 1, {"messages": turns})
    assert encoder.notes == [ENDS_PROMPTS] and row["input_ids"].count(2) == 1
    job = inference.InferenceJob(
        gguf=str(converted(folder, tmp_path / "work", "f16")),
        context_tokens=64,
        threads=1,
        special=["[INST] Hi [/INST]"],
    )
    assert inference.ask(job).special[0][-1] == 2


@pytest.mark.parametrize("stops", [50256, [50256, 50258], None])
def test_answers_that_transformers_does_not_end_are_told(tmp_path: Path, stops: int | list[int] | None) -> None:
    """A base model with the template of a chat: its own end is <|endoftext|>, and answers end with <|im_end|>. Without
    a generation_config.json transformers takes the two of config.json."""
    folder = model("llama-chatml", tmp_path, eos_token="<|endoftext|>")
    generation, config = folder / "generation_config.json", folder / "config.json"
    if stops is None:
        generation.unlink()
        config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": [50256, 50258]}))
    else:
        generation.write_text(json.dumps({"eos_token_id": stops}))
    turns = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}]
    row = {"messages": turns}
    tokenizer = load_tokenizer(str(folder), None)
    encoder = Encoder(training.resolved(folder, training.write_data(tmp_path, [row])), tokenizer)
    encoder(0, 1, row)
    assert [("<|im_end|>" in note, "gets 50258 in eos_token_id" in note) for note in encoder.notes] == [
        (True, True)
    ] * (stops == 50256)
    assert reference.stop_ids(folder, tokenizer) == ({50256} if stops == 50256 else {50256, 50258})


@pytest.mark.parametrize(
    ("template", "figure"), [("OPENS_A_THOUGHT", 2), ("SYSTEM_AT_THE_END", 1), ("WITHOUT_SYSTEM", 0), ("QWEN3", 0)]
)
def test_a_prompt_in_use_that_no_row_was_trained_with_is_a_warning(template: str, figure: int) -> None:
    """transformers writes the rows and the prompts; one row of two has a system message."""
    tokenizer = training.tokenizer("llama-chatml")
    tokenizer.chat_template = getattr(tiny_templates, template)
    said = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}]
    rows: list[Any] = [
        {
            "kind": "chat",
            "messages": messages,
            "rendered": tokenizer.apply_chat_template(messages, tokenize=False),
            "input_ids": [5],
            "truncated": False,
        }
        for messages in (said, [{"role": "system", "content": "Count."}, *said])
    ]
    made = check_trained("m.gguf", rows, [[5], [5]], eos=2)
    check = with_other_prompts(made, rows, tokenizer, None)
    assert isinstance(check, Check)
    assert (check.verdict, check.figure) == (("warn", figure) if figure else ("pass", 0)), check.detail
    if template == "OPENS_A_THOUGHT":
        assert "'<think>\\n' in place of 'Four.<|im_end|>\\n'" in check.detail
    failed = check_trained("m.gguf", rows, [[5], [6]], eos=2)
    assert with_other_prompts(failed, rows, tokenizer, None) == failed


@pytest.mark.parametrize(("answer", "verdict"), [("Four.", "warn"), ("<think>\nadd\n</think>\n\nFour.", "pass")])
def test_a_prompt_whose_tokens_run_into_the_answer_is_a_warning(tmp_path: Path, answer: str, verdict: str) -> None:
    """A template that opens a thought for use, and closes an empty one in rows: `\\n\\n` is one token there."""
    turns = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": answer}]
    tokenizer = training.tokenizer("qwen3")
    tokenizer.chat_template = tiny_templates.QWEN3.replace("assistant\\n' -}}", "assistant\\n<think>\\n' -}}")
    recipe = training.resolved(tiny.cached("qwen3"), training.write_data(tmp_path, [{"messages": turns}]))
    rows: list[Any] = [Encoder(recipe, tokenizer)(0, 1, {"messages": turns})]
    prompt = tokenizer.apply_chat_template(turns[:1], tokenize=True, return_dict=True, add_generation_prompt=True)
    asked, fed = prompt["input_ids"], rows[0]["input_ids"]
    assert (fed[: len(asked)] == asked) == (verdict == "pass") and rows[0]["rendered"].startswith(
        tokenizer.decode(asked)
    )
    check = with_other_prompts(check_trained("m.gguf", rows, [fed], 2), rows, tokenizer, None)
    assert isinstance(check, Check) and check.verdict == verdict
    assert ("is '\\n' in use, and '\\n\\n' where the answer follows it" in check.detail) == (verdict == "warn")


def test_an_answer_ends_with_the_end_token_of_several_in_a_row() -> None:
    """As those of Command R7B do. llama.cpp stops at the end token alone, and the first of them failed `verify`."""
    tokenizer = training.tokenizer("llama-chatml")
    for end, expected in (("<|endoftext|><|im_end|>", "<|im_end|>"), (" <|endoftext|>", "<|endoftext|>"), (".", None)):
        tokenizer.chat_template = tiny_templates.QWEN2.replace("<|im_end|>", end)
        found = check_template.turn_end(tokenizer)
        assert (found is not None and tokenizer.convert_ids_to_tokens(found)) == (expected or False)
    tokenizer.chat_template = "<|im_start|>user<|im_end|>"  # it writes no answer
    assert check_template.turn_end(tokenizer) is None


def test_a_template_that_leaves_the_beginning_to_llama_cpp_is_a_warning(tmp_path: Path) -> None:
    """llama-server and Ollama put the token before each prompt. TinyLlama's template does not write it."""
    turns = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}]
    recipe = training.resolved(tiny.cached("mistral"), training.write_data(tmp_path, [{"messages": turns}]))
    written = "{%- for m in messages -%}{{- '<|' + m.role + '|>' + m.content + eos_token -}}{%- endfor -%}"
    for template, verdict in ((written, "warn"), ("{{- bos_token -}}" + written, "pass")):
        tokenizer = training.tokenizer("mistral")
        tokenizer.chat_template = template
        encoder = Encoder(recipe, tokenizer)
        rows: list[Any] = [encoder(0, 1, {"messages": turns})]
        check = with_other_prompts(check_trained("m.gguf", rows, [rows[0]["input_ids"]], 2), rows, tokenizer, 1)
        assert isinstance(check, Check) and check.verdict == verdict
        assert encoder.notes == ([BEGINS_OTHERWISE] if verdict == "warn" else [])
