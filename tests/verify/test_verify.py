"""No false alarm: correct exports, made by PEFT and llama.cpp alone, pass every check."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

import gguf_maker
import merging
import tiny
import verify_rows
from skill_train.core.errors import UsageError
from skill_train.llama.gguf_header import read_gguf
from skill_train.run import verify_record
from skill_train.run.folder import StepResult
from skill_train.run.verify_record import Check, Proof
from skill_train.verify.step import VerifyRequest, verify

pytestmark = pytest.mark.slow

# What a run with conversations is checked for; gpt2 has no chat template.
CHECKS = {
    *(
        "file",
        "types",
        "metadata",
        "vocabulary",
        "weights",
        "tensors",
        "loads",
        "tokens",
        "special_tokens",
        "stop_tokens",
        "chat_template",
    ),
    *("trained_is_shipped", "logits", "tuned", "answers"),
}


def proof(made: gguf_maker.Export, record: Path, **changes: Any) -> Proof:
    return proven(made, record, **changes).record


def proven(made: gguf_maker.Export, record: Path, **changes: Any) -> StepResult[Proof]:
    arguments: dict[str, Any] = {
        "reference": made.base,
        "adapter": made.adapter,
        "base": made.base,
        "ggufs": made.ggufs,
        "rows": [],
        "held_out": [],
        "record": record,
        "tokens": 256,
    }
    return verify(VerifyRequest(**arguments | changes), progress=lambda *_: None, warn=lambda *_: None)


def complaints(record: Proof) -> list[Check]:
    return [check for check in record.checks if check.verdict != "pass"]


@pytest.mark.parametrize(
    "kind",
    [
        "llama-spm",
        "gemma",
        pytest.param("qwen2", marks=pytest.mark.torture),
        pytest.param("qwen3", marks=pytest.mark.torture),
    ],
)
def test_a_correct_export_passes_every_check(kind: str, tmp_path: Path) -> None:
    made = gguf_maker.exported(kind)
    rows = verify_rows.chats(made.base, 8)
    large = kind != "gemma"  # a real vocabulary of 32,000 or 152,000 tokens
    record = proof(made, tmp_path / "verify.json", rows=rows, held_out=rows, tokens=100 if large else 256)
    assert complaints(record) == []
    assert record.verdict == "pass"
    for file in made.ggufs:
        assert {check.name for check in record.checks if check.file == file.name} == CHECKS
    assert {one.name for one in record.not_checked} == {"digest"}
    assert json.loads((tmp_path / "verify.json").read_text()) == msgspec.to_builtins(record)
    assert verify_record.read(tmp_path / "verify.json") == record


def test_a_model_without_a_chat_template_and_rows_of_plain_text(tmp_path: Path) -> None:
    made = gguf_maker.exported("gpt2")
    files = [made.file("f16"), made.file("q4_k_m")]
    record = proof(made, tmp_path / "verify.json", ggufs=files, rows=verify_rows.texts(made.base, 3), tokens=100)
    assert complaints(record) == []
    names = {check.name for check in record.checks if check.file == "model-q4_k_m.gguf"}
    assert names == CHECKS - {"chat_template"}
    assert verify_record.read(tmp_path / "verify.json") == record


def test_without_a_run_the_built_in_texts_are_used(tmp_path: Path) -> None:
    made = gguf_maker.exported("gemma")
    alone = [made.file("q4_k_m")]
    record = proof(made, tmp_path / "verify.json", reference=made.merged, adapter=None, base=None, ggufs=alone)
    assert complaints(record) == []
    assert record.samples["tokens"] > 128 and record.samples["answers"] > 0
    assert verify_record.read(tmp_path / "verify.json") == record
    assert {one.name for one in record.not_checked} == {"digest", "tuned", "trained_is_shipped"}


@pytest.mark.parametrize("resized", [False, True])
def test_trained_rows_of_a_tied_embedding_need_no_output_layer(resized: bool, tmp_path: Path) -> None:
    """PEFT keeps the model tied. It saves all of a resized embedding, and the rows of both ends."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = Path(shutil.copytree(tiny.cached("gemma", hidden=256), tmp_path / "base"))
    model = AutoModelForCausalLM.from_pretrained(str(base), dtype=torch.float32)
    rows = model.get_input_embeddings().weight.shape[0]
    if resized:
        model.resize_token_embeddings(rows + 2, mean_resizing=False)
    chosen = {} if resized else {"trainable_token_indices": [3, 9]}
    tuned = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **chosen))
    with torch.no_grad():
        for name, weight in tuned.named_parameters():
            if "lora_B" in name or "trainable_tokens" in name:
                weight.normal_(std=0.1)
    tuned.save_pretrained(str(tmp_path / "adapter"))
    merged = tuned.merge_and_unload()
    merged.save_pretrained(str(tmp_path / "merged"))
    for path in base.iterdir():
        if not (tmp_path / "merged" / path.name).exists():
            shutil.copy(path, tmp_path / "merged")
    made = gguf_maker.Export(base, tmp_path / "adapter", tmp_path / "merged", tmp_path / "gguf", ())
    file = gguf_maker.export(tmp_path / "merged", tmp_path / "gguf")
    assert "output.weight" not in read_gguf(file).tensors
    checks = {check.name: check for check in proof(made, tmp_path / "verify.json", ggufs=[file], tokens=64).checks}
    assert [checks[name].verdict for name in ("weights", "tensors", "logits")] == ["pass"] * 3, checks


def test_a_tied_embedding_that_alone_has_lora_is_two_matrices(tmp_path: Path) -> None:
    """PEFT computes the output with the base's matrix, and merges into the one that both ends share."""
    base = tiny.cached("gemma", hidden=256)
    adapter = tiny.adapter(base, tmp_path / "adapter", size=0.2, targets=["q_proj", "embed_tokens"])
    merging.run(base, adapter, tmp_path, rows=())
    file = gguf_maker.export(tmp_path / "merged", tmp_path / "gguf")
    made = gguf_maker.Export(base, adapter, tmp_path / "merged", tmp_path / "gguf", ())
    assert complaints(proof(made, tmp_path / "verify.json", ggufs=[file], tokens=64)) == []


@pytest.mark.parametrize("ids", [{"lm_head": [3, 9]}, {"lm_head": [3, 9], "embed_tokens": [5]}], ids=str)
def test_trained_rows_of_a_tied_head_make_two_matrices(ids: dict[str, list[int]], tmp_path: Path) -> None:
    """PEFT computes each end with its own rows, and merges those of the head into the matrix of both."""
    base = tiny.cached("gemma", hidden=256)
    adapter = merging.adapter(base, tmp_path / "adapter", targets=["q_proj"], trainable_token_indices=ids)
    merging.run(base, adapter, tmp_path, rows=())
    file = gguf_maker.export(tmp_path / "merged", tmp_path / "gguf")
    made = gguf_maker.Export(base, adapter, tmp_path / "merged", tmp_path / "gguf", ())
    assert complaints(proof(made, tmp_path / "verify.json", ggufs=[file], tokens=64)) == []


def test_a_file_of_the_base_is_not_the_merged_model(tmp_path: Path) -> None:
    made, untuned = gguf_maker.exported("gemma"), gguf_maker.exported("gemma", times=0)
    files = [untuned.file("f16")]
    record = proof(made, tmp_path / "verify.json", reference=made.merged, adapter=None, base=None, ggufs=files)
    assert record.verdict == "fail"
    assert "logits" in {check.name for check in complaints(record)}


def test_the_same_question_is_answered_from_the_record(tmp_path: Path) -> None:
    made, record = gguf_maker.exported("gemma"), tmp_path / "verify.json"
    file = tmp_path / "model-f16.gguf"
    shutil.copy(made.file("f16"), file)
    first = proof(made, record, ggufs=[file], tokens=64)
    assert proven(made, record, ggufs=[file], tokens=64) == StepResult(first, reused=True)
    file.write_bytes(file.read_bytes()[:-100])
    again = proven(made, record, ggufs=[file], tokens=64)
    assert not again.reused
    assert [check.name for check in complaints(again.record)] == ["file"]


@pytest.mark.parametrize(("figure", "reused"), [("native_crash", False), ("verification_failed", True)])
def test_a_crash_is_not_a_proof_for_ever(tmp_path: Path, figure: str, reused: bool) -> None:
    """It may come from the machine: too small a stack, or a processor that this llama.cpp crashes on."""
    made, record = gguf_maker.exported("gemma"), tmp_path / "verify.json"
    file = made.file("f16")
    proof(made, record, ggufs=[file], tokens=64)
    document = json.loads(record.read_text())
    loads = next(check for check in document["checks"] if check["name"] == "loads")
    loads |= {"verdict": "fail", "figure": figure}
    record.write_text(json.dumps(document | {"verdict": "fail"}))
    again = proven(made, record, ggufs=[file], tokens=64)
    assert (again.reused, again.record.verdict) == (reused, "fail" if reused else "pass")


def test_a_proof_in_the_folder_of_its_reference_is_found_again(tmp_path: Path) -> None:
    """As of a run inside its base, or of a file that lies beside the weights: neither is part of the reference."""
    made = gguf_maker.exported("gemma")
    model = Path(shutil.copytree(made.merged, tmp_path / "model"))
    file = Path(shutil.copy(made.file("q8_0"), model))
    given: dict[str, Any] = {"reference": model, "adapter": None, "base": None, "ggufs": [file], "tokens": 64}
    first = proof(made, model / "verify.json", **given)
    assert set(first.inputs.reference) == {path.name for path in made.merged.iterdir()}
    assert proven(made, model / "verify.json", **given) == StepResult(first, reused=True)


def test_an_adapter_without_effect_is_a_warning(tmp_path: Path) -> None:
    made = gguf_maker.exported("gemma", times=0)
    nothing = tiny.adapter(made.base, tmp_path / "adapter", size=0.0)
    record = proof(made, tmp_path / "verify.json", adapter=nothing, ggufs=[made.file("f16")])
    assert [(check.name, check.verdict) for check in complaints(record)] == [("tuned", "warn")]


def test_a_missing_file_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    made = gguf_maker.exported("gemma")
    with pytest.raises(UsageError, match=r"absent\.gguf does not exist") as raised:
        proof(made, tmp_path / "verify.json", ggufs=[tmp_path / "absent.gguf"])
    assert raised.value.hint.startswith("check the path of --gguf")
    assert not (tmp_path / "verify.json").exists()


def test_a_file_of_another_model_is_judged_not_crashed_on(tmp_path: Path) -> None:
    """Its vocabulary is fifty times as large, so what it answers are no tokens of the reference."""
    made, other = gguf_maker.exported("gemma"), gguf_maker.exported("llama-spm")
    rows = verify_rows.chats(made.base, 4)
    record = proof(made, tmp_path / "verify.json", rows=rows, held_out=rows, ggufs=[other.file("f16")])
    assert record.verdict == "fail"
    assert {"vocabulary", "metadata"} <= {check.name for check in record.checks if check.verdict == "fail"}


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    """A proof names files by their names."""
    made = gguf_maker.exported("gemma")
    twin = Path(shutil.copy(made.file("f16"), tmp_path / made.file("f16").name))
    with pytest.raises(UsageError) as raised:
        proof(made, tmp_path / "verify.json", ggufs=[made.file("f16"), twin])
    assert raised.value.code == "bad_usage" and str(twin) in raised.value.got
