"""Tokens that were added in training: they ship with their rows in every file, or the merge is refused by name."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import merging
import tiny
from skill_train.core.errors import UsageError
from skill_train.gguf.convert import ConvertRequest, convert
from skill_train.gguf.convert_adapter import AdapterExportRequest, export_lora
from skill_train.llama import get_converter as toolchain

pytestmark = pytest.mark.slow

NEW = ["<|think|>", "<note>"]  # the first is special
TEXT = "Hi <|think|> there <note> and 12"
LAST = {"gemma": 640, "llama-spm": 32000, "phi3": 32011, "qwen2": 151665}  # tokens of the published vocabularies


def quiet(*_: Any) -> None:
    """Nobody sees a bar, or hears a warning."""


def tuned(
    base: Path, folder: Path, *, save: bool | str = "auto", multiple: int | None = None, end: str = "", **options: Any
) -> Any:
    """An adapter whose tokenizer has NEW, and beside it that tokenizer, which is returned."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(3)
    tokenizer = AutoTokenizer.from_pretrained(str(base))
    tokenizer.add_tokens(NEW[:1], special_tokens=True)
    tokenizer.add_tokens(NEW[1:])
    if end:
        tokenizer.eos_token = end
    model = AutoModelForCausalLM.from_pretrained(str(base), dtype=torch.float32)
    if len(tokenizer) > len(model.get_input_embeddings().weight):
        model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=multiple, mean_resizing=False)
    settings = {"r": 4, "target_modules": ["o_proj"], "task_type": "CAUSAL_LM"} | options
    trained = get_peft_model(model, LoraConfig(**settings))
    with torch.no_grad():
        for weight in (weight for weight in trained.parameters() if weight.requires_grad):
            weight.add_(0.05 * torch.randn(weight.shape))
    trained.save_pretrained(str(folder), save_embedding_layers=save)
    tokenizer.save_pretrained(str(folder))
    return tokenizer


def converted(model: Path, work: Path) -> Any:
    """The converted file, read by gguf's own reader."""
    from gguf import GGUFReader

    convert(
        ConvertRequest(
            model=model,
            out=work / "gguf",
            record=work / "convert.json",
            name="m",
            outtype="f16",
            toolchain=toolchain.find(),
        ),
        progress=quiet,
        warn=quiet,
    )
    return GGUFReader(work / "gguf" / "m-f16.gguf")


@pytest.mark.parametrize(
    "kind", ["gemma", "llama-spm", *(pytest.param(k, marks=pytest.mark.torture) for k in ("phi3", "qwen2"))]
)
def test_they_ship(kind: str, tmp_path: Path) -> None:
    """Of all four the embedding is trained whole; Phi-3 and Qwen 2.5 have spare rows, Gemma and Qwen 2.5 are tied."""
    base, first = tiny.cached(kind), LAST[kind]
    tokenizer = tuned(base, tmp_path / "adapter", modules_to_save=["embed_tokens"])
    assert tokenizer.convert_tokens_to_ids(NEW) == [first, first + 1]
    record = merging.run(base, tmp_path / "adapter", tmp_path, rows=[])
    merged = tmp_path / "merged"
    rows = json.loads((merged / "config.json").read_text())["vocab_size"]
    assert rows == max(first + 2, json.loads((base / "config.json").read_text())["vocab_size"])
    assert record["warned"] == [] and {"tokenizer.json"} <= {*record["changes"]["from_adapter"]}

    from transformers import AutoTokenizer

    read = AutoTokenizer.from_pretrained(str(merged))
    assert read(TEXT).input_ids == tokenizer(TEXT).input_ids
    assert {first, first + 1} <= {*read(TEXT).input_ids}
    if kind == "qwen2":  # its converter reads tokenizer.json, which is the adapter's byte for byte
        return
    fields = converted(merged, tmp_path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert (len(tokens), tokens[first]) == (rows, "<|think|>") and tokens[first + 1].strip("▁ ") == "<note>"
    control, user_defined = 3, 4  # llama.cpp, llama_token_type
    assert fields["tokenizer.ggml.token_type"].contents()[first : first + 2] == [control, user_defined]


def test_from_the_adapter_to_a_proof(commands: Any, tmp_path: Path) -> None:
    """The commands that a user gives, on a tied model whose rows are padded to a multiple of 64."""
    base = tiny.cached("gemma")
    tuned(base, tmp_path / "adapter", modules_to_save=["embed_tokens"], multiple=64)

    def run(*arguments: object) -> dict[str, Any]:
        done = commands.run(tmp_path, dict(os.environ), *arguments, "--format", "json")
        assert done.code == 0, done.stdout
        return dict(json.loads(done.stdout))

    run("merge", "--base", base, "--adapter", "adapter", "--out", "merged")
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["vocab_size"] == 704
    run("export-gguf", "merged", "--quant", "f16", "--out", "gguf")
    file = next((tmp_path / "gguf").glob("*.gguf"))
    proven = run("verify", "--reference", "merged", "--base", base, "--gguf", file)
    assert proven["data"]["verdict"] == "pass"
    (unused,) = proven["warnings"]
    assert unused["code"] == "no_base" and "the base knows" in unused["message"]


def test_a_file_that_lacks_them_fails(tmp_path: Path) -> None:
    """The base's own tokenizer with the new rows: the text of no token leads to them."""
    base = tiny.cached("gemma")
    tuned(base, tmp_path / "adapter", modules_to_save=["embed_tokens"])
    merging.run(base, tmp_path / "adapter", tmp_path, rows=[])
    old = Path(shutil.copytree(tmp_path / "merged", tmp_path / "old"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(base / name, old / name)
    tokens = converted(old, tmp_path).fields["tokenizer.ggml.tokens"].contents()
    assert tokens[640:] == ["[PAD640]", "[PAD641]"]  # so the test of what ships can fail


def test_a_new_end_of_answers_ends_them(tmp_path: Path) -> None:
    base = tiny.cached("gemma")
    tuned(base, tmp_path / "adapter", modules_to_save=["embed_tokens"], end="<|think|>")
    merging.run(base, tmp_path / "adapter", tmp_path, rows=[])
    stated = json.loads((tmp_path / "merged" / "generation_config.json").read_text())["eos_token_id"]
    assert stated == [640, *json.loads((base / "generation_config.json").read_text())["eos_token_id"]]
    assert json.loads((tmp_path / "merged" / "tokenizer_config.json").read_text())["eos_token"] == "<|think|>"
    assert converted(tmp_path / "merged", tmp_path).fields["tokenizer.ggml.eos_token_id"].contents() == 640


def test_tokens_whose_rows_were_not_saved(tmp_path: Path) -> None:
    base = tiny.cached("gemma")
    tuned(base, tmp_path / "adapter", save=False)
    with pytest.raises(UsageError, match=r"without a row in the merged model's embedding: '<\|think\|>'") as refused:
        merging.run(base, tmp_path / "adapter", tmp_path, rows=[])
    assert refused.value.code == "bad_adapter" and "id 640, and 1 more" in str(refused.value.got)
    assert "save_embedding_layers=True" in refused.value.hint and not (tmp_path / "merged").exists()


def test_a_base_whose_own_tokenizer_has_a_token_too_many(tmp_path: Path) -> None:
    """Gemma 3's text models: 262,144 rows, and a token for pictures with that id."""
    base = Path(shutil.copytree(tiny.cached("gemma"), tmp_path / "base"))
    document = json.loads((base / "tokenizer.json").read_text())
    document["added_tokens"].append({**document["added_tokens"][-1], "id": 640, "content": "<image_soft_token>"})
    (base / "tokenizer.json").write_text(json.dumps(document))
    adapter = tiny.adapter(base, tmp_path / "adapter", targets=["q_proj"])
    shutil.copyfile(base / "tokenizer.json", adapter / "tokenizer.json")
    record = merging.run(base, adapter, tmp_path)
    assert record["gate"]["verdict"] == "pass" and record["changes"]["from_adapter"] == []


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    base = tiny.cached("gemma")
    tuned(base, tmp_path / "adapter", trainable_token_indices=[5])
    document = json.loads((tmp_path / "adapter" / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    one, other = sorted(vocabulary, key=lambda text: vocabulary[text])[500:502]
    vocabulary[one], vocabulary[other] = 501, 500
    (tmp_path / "adapter" / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(UsageError, match="id 500 is another token") as refused:
        merging.run(base, tmp_path / "adapter", tmp_path, rows=[])
    assert (refused.value.code, refused.value.expected) == ("bad_adapter", f"{one!r}, as in {base}")


def test_a_vocabulary_that_was_extended_itself(tmp_path: Path) -> None:
    """As in Chinese LLaMA: the new token is one of the vocabulary's own pieces, and no added one."""
    base, first = tiny.cached("llama-spm"), LAST["llama-spm"]
    with_own_pieces(base, tmp_path / "adapter", {"qz": first}, rows=first + 1)
    record = merging.run(base, tmp_path / "adapter", tmp_path, rows=[])
    merged = tmp_path / "merged"
    assert record["warned"] == [] and "tokenizer.json" in record["changes"]["from_adapter"]
    assert not (merged / "tokenizer.model").exists()  # the base's, which lacks the piece

    from transformers import AutoTokenizer

    assert first in AutoTokenizer.from_pretrained(str(merged))("(qz)").input_ids
    assert converted(merged, tmp_path).fields["tokenizer.ggml.tokens"].contents()[first] == "qz"


def test_an_added_token_that_the_vocabulary_lists_too(tmp_path: Path) -> None:
    """The converter finds it in the list of added tokens, beside the base's tokenizer.model."""
    base, file = tiny.cached("gemma"), tmp_path / "adapter" / "tokenizer.json"
    with_own_pieces(base, tmp_path / "adapter", {NEW[0]: 640}, rows=641)
    document = json.loads(file.read_text())
    document["added_tokens"].append({**document["added_tokens"][-1], "id": 640, "content": NEW[0]})
    file.write_text(json.dumps(document))
    merging.run(base, tmp_path / "adapter", tmp_path, rows=[])
    assert converted(tmp_path / "merged", tmp_path).fields["tokenizer.ggml.tokens"].contents()[640] == NEW[0]


def test_a_vocabulary_in_another_order(tmp_path: Path) -> None:
    """Its embedding was trained whole for it. Of the base's tokenizer no text would lead to its rows."""
    base = tiny.cached("gemma")
    own = json.loads((base / "tokenizer.json").read_text())["model"]["vocab"]
    with_own_pieces(base, tmp_path / "adapter", {"q": own["z"], "z": own["q"]}, rows=640)
    merging.run(base, tmp_path / "adapter", tmp_path, rows=[])
    merged = json.loads((tmp_path / "merged" / "tokenizer.json").read_text())["model"]["vocab"]
    assert (merged["q"], merged["z"]) == (own["z"], own["q"])


def test_fewer_rows_than_tokens(tmp_path: Path) -> None:
    base = tiny.cached("gemma")
    with_own_pieces(base, tmp_path / "adapter", {}, rows=600)
    with pytest.raises(UsageError, match="fewer rows than the base's tokenizer has tokens") as refused:
        merging.run(base, tmp_path / "adapter", tmp_path, rows=[])
    assert (refused.value.code, refused.value.got) == ("bad_adapter", "600 rows, and a token with the id 639")
    assert not (tmp_path / "merged").exists()


def test_another_sentencepiece_model(tmp_path: Path) -> None:
    base = tiny.cached("gemma")
    with_own_pieces(base, tmp_path / "adapter", {}, rows=640)
    (tmp_path / "adapter" / "tokenizer.json").unlink()
    (tmp_path / "adapter" / "tokenizer.model").write_bytes(b"of others")
    said = merging.run(base, tmp_path / "adapter", tmp_path, rows=[])["said"]
    assert said == [
        (
            "tokenizer_differs",
            "the adapter's folder has another tokenizer.model than the merged model, which keeps the base's",
        )
    ]


def with_own_pieces(base: Path, folder: Path, pieces: dict[str, int], *, rows: int) -> None:
    """An adapter with a whole embedding of so many rows, and the base's tokenizer with these ids of pieces."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(base), dtype=torch.float32)
    model.resize_token_embeddings(rows, mean_resizing=False)
    whole = ["embed_tokens"] if model.config.tie_word_embeddings else ["embed_tokens", "lm_head"]
    config = LoraConfig(r=4, target_modules=["o_proj"], modules_to_save=whole, task_type="CAUSAL_LM")
    trained = get_peft_model(model, config)
    with torch.no_grad():
        for weight in (weight for weight in trained.parameters() if weight.requires_grad):
            weight.add_(0.05 * torch.randn(weight.shape))
    trained.save_pretrained(str(folder))
    shutil.copyfile(base / "tokenizer_config.json", folder / "tokenizer_config.json")
    document = json.loads((base / "tokenizer.json").read_text())
    document["model"]["merges"] += [list(piece) for piece in pieces if len(piece) == 2]
    document["model"]["vocab"] |= pieces
    (folder / "tokenizer.json").write_text(json.dumps(document))


def test_resized_rows_and_no_tokenizer(tmp_path: Path) -> None:
    """A chat template beside the adapter is no tokenizer."""
    base = Path(shutil.copytree(tiny.cached("gemma"), tmp_path / "base"))
    config = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "chat_template"}))
    tuned(base, tmp_path / "adapter", modules_to_save=["embed_tokens"])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "adapter" / name).unlink()
    (tmp_path / "adapter" / "chat_template.jinja").write_text("{{ messages }}")
    assert merging.run(base, tmp_path / "adapter", tmp_path)["warned"] == ["resized_without_tokenizer"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"modules_to_save": ["embed_tokens"]}, "embed_tokens.weight is stored whole"),
        ({"trainable_token_indices": [640, 641]}, "trained token rows"),
        ({"save": False}, "its tokenizer adds 2 tokens ('<|think|>', '<note>')"),
    ],
)
def test_an_adapter_alone_cannot_bring_them(options: dict[str, Any], named: str, tmp_path: Path) -> None:
    base = tiny.cached("gemma")
    tuned(base, tmp_path / "adapter", **options)
    asked = AdapterExportRequest(
        base, tmp_path / "adapter", tmp_path / "gguf", tmp_path / "lora.json", "m", "f16", toolchain.find()
    )
    with pytest.raises(UsageError) as refused:
        export_lora(asked, progress=quiet, warn=quiet)
    assert refused.value.code == "not_convertible" and named in str(refused.value.got)
    assert not (tmp_path / "gguf").exists()
