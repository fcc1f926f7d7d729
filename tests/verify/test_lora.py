"""An adapter's own GGUF file is judged like a whole model: tensors, scale, and the answers of the base with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from safetensors.torch import load_file, save_file

import gguf_edit
import tiny
import tiny_families
import tiny_vocab
import training
from converting import converted
from gguf_edit import finish
from skill_train.commands import verify as verify_command
from skill_train.core.console import Console
from skill_train.core.digests import file_digest
from skill_train.core.errors import UsageError
from skill_train.gguf.convert_adapter import AdapterExportRequest, export_lora
from skill_train.llama import float_type
from skill_train.llama import get_converter as toolchain
from skill_train.llama.gguf_header import GgufFile, read_gguf
from skill_train.run import train_record
from skill_train.run.folder import RunDir
from skill_train.run.verify_record import Proof
from skill_train.verify.step import VerifyRequest, verify
from skill_train.verify.weights.adapter import check_lora_weights

pytestmark = pytest.mark.slow

CHECKS = {"file", "types", "metadata", "weights", "loads", "logits", "tuned", "answers"}
KINDS = (
    "llama-spm",
    "gemma",
    *(pytest.param(kind, marks=pytest.mark.torture) for kind in ("mistral", "qwen3", "phi3")),
)


def export(kind: str | Path, work: Path, **options: Any) -> tuple[Path, Path, Path]:
    """Base, adapter and the adapter's GGUF file."""
    base = kind if isinstance(kind, Path) else tiny.cached(kind)
    adapter = tiny.adapter(base, work / "adapter", **{"size": 0.1} | options)
    exported = export_lora(
        AdapterExportRequest(
            base=base,
            adapter=adapter,
            out=work / "gguf",
            record=work / "lora_gguf.json",
            name="m",
            outtype="f16",
            toolchain=toolchain.find_or_fetch(),
        ),
        progress=lambda *_: None,
        warn=lambda *_: None,
    )
    return base, adapter, work / next(iter(exported.record.outputs))


def proof(file: Path, base: Path, adapter: Path | None, **changes: Any) -> Proof:
    arguments: dict[str, Any] = {
        "reference": base,
        "adapter": adapter,
        "base": base if adapter else None,
        "ggufs": [file],
        "rows": [],
        "held_out": [],
        "record": file.parent.parent / "verify.json",
        "tokens": 128,
    }
    return verify(VerifyRequest(**arguments | changes), progress=lambda *_: None, warn=lambda *_: None).record


def verdicts(record: Proof) -> dict[str, str]:
    return {check.name: check.verdict for check in record.checks}


def failed(record: Proof) -> set[str]:
    return {name for name, verdict in verdicts(record).items() if verdict == "fail"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_correct_file_passes(kind: str, tmp_path: Path) -> None:
    base, adapter, file = export(kind, tmp_path)
    record = proof(file, base, adapter)
    assert [check for check in record.checks if check.verdict != "pass"] == []
    assert set(verdicts(record)) == CHECKS | {"digest"} and record.not_checked == []
    assert record.verdict == "pass" and set(record.inputs.ggufs) == {file.name}


def test_a_rank_stabilised_adapter_and_one_on_few_modules_pass(tmp_path: Path) -> None:
    base, adapter, file = export("gemma", tmp_path, use_rslora=True, targets=["q_proj", "down_proj"])
    assert proof(file, base, adapter).verdict == "pass"


@pytest.mark.torture
def test_an_adapter_of_the_text_of_a_vision_model_is_compared(tmp_path: Path) -> None:
    """As of Qwen3.5, whose text transformers loads alone and by shorter names than the checkpoint has."""
    model = Path(shutil.copytree(tiny_families.folder("qwen35"), tmp_path / "model"))
    text = json.loads((model / "config.json").read_text())
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
    (model / "config.json").write_text(json.dumps({**whole, "tie_word_embeddings": True, "vision_config": {}}))
    weights = load_file(model / "model.safetensors")
    named = {name.replace("model.", "model.language_model.", 1): weight for name, weight in weights.items()}
    save_file(named, model / "model.safetensors", metadata={"format": "pt"})
    base, adapter, file = export(
        model, tmp_path, targets=["in_proj_qkv", "in_proj_z", "in_proj_b", "q_proj", "up_proj"]
    )
    assert verdicts(proof(file, base, adapter))["weights"] == "pass"

    def exchange(data: dict[str, Any]) -> None:
        rows = data["blk.0.attn_qkv.weight.lora_b"]
        rows[[70, 90]] = rows[[90, 70]]

    assert verdicts(proof(rewrite(file, file.with_name("wrong.gguf"), exchange), base, adapter))["weights"] == "fail"


@pytest.fixture(scope="module", params=["gemma", pytest.param("llama-spm", marks=pytest.mark.torture)])
def good(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return export(request.param, tmp_path_factory.mktemp(request.param))


def _another_layer(data: dict[str, Any]) -> None:
    data["blk.0.attn_v.weight.lora_a"] = data["blk.1.attn_v.weight.lora_a"]


def _zeroed(data: dict[str, Any]) -> None:
    data["blk.1.ffn_up.weight.lora_b"] = data["blk.1.ffn_up.weight.lora_b"] * 0


def _one_row_of_b(data: dict[str, Any]) -> None:
    rows = data["blk.0.attn_k.weight.lora_b"]
    rows[[3, 4]] = rows[[4, 3]]


def _a_hundredth_more(data: dict[str, Any]) -> None:
    data["blk.0.ffn_gate.weight.lora_a"] = (data["blk.0.ffn_gate.weight.lora_a"].astype(np.float32) * 1.01).astype(
        np.float16
    )


def _left_out(data: dict[str, Any]) -> None:
    for part in "ab":
        del data[f"blk.1.attn_output.weight.lora_{part}"]


def _of_the_output(data: dict[str, Any]) -> None:
    """More than the adapter has."""
    for part in "ab":
        data[f"blk.0.attn_output.weight.lora_{part}"] = data.pop(f"blk.0.attn_q.weight.lora_{part}")


FAULTS = [
    _another_layer,
    _a_hundredth_more,
    _left_out,
    *(pytest.param(fault, marks=pytest.mark.torture) for fault in (_zeroed, _one_row_of_b, _of_the_output)),
]


def rewrite(source: Path, out: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The file with other tensors."""
    reader = GGUFReader(source)
    data = {tensor.name: tensor.data.copy() for tensor in reader.tensors}
    change(data)
    writer = GGUFWriter(str(out), reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], inner)
    for name, values in data.items():
        writer.add_tensor(name, values)
    finish(writer)
    return out


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_its_tensors_is_found_and_named(
    fault: Callable[[dict[str, Any]], None], good: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    base, adapter, file = good
    (tmp_path / "gguf").mkdir()
    record = proof(rewrite(file, tmp_path / "gguf" / file.name, fault), base, adapter)
    assert "weights" in failed(record) and record.verdict == "fail"
    detail = next(check.detail for check in record.checks if check.name == "weights")
    assert "blk." in detail or "model.layers" in detail


def test_rows_that_the_converter_must_rearrange_and_did_not(tmp_path: Path) -> None:
    """Llama's query rows change places on their way into a GGUF file. Here B is PEFT's own."""
    (tmp_path / "llama").mkdir()
    tiny_vocab.write_gemma(tmp_path / "llama")  # Llama's own words would take seconds
    small = tiny.build_without_words("llama", tmp_path / "llama", tokens=640, dtype="float32")
    base, adapter, file = export(small, tmp_path / "made")
    own = load_file(adapter / "adapter_model.safetensors")
    rows = own["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"].numpy().astype(np.float16)

    def unpermuted(data: dict[str, Any]) -> None:
        assert not np.array_equal(data["blk.0.attn_q.weight.lora_b"], rows)
        data["blk.0.attn_q.weight.lora_b"] = rows

    (tmp_path / "gguf").mkdir()
    record = proof(rewrite(file, tmp_path / "gguf" / file.name, unpermuted), base, adapter)
    assert "weights" in failed(record)
    detail = next(check.detail for check in record.checks if check.name == "weights")
    assert detail.startswith("blk.0.attn_q.weight.lora_b: row ") and "blk.1" not in detail


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"adapter.lora.alpha": 32.0}, {"weights", "tuned"}),
        pytest.param({"adapter.lora.alpha": 16.5}, {"weights"}, marks=pytest.mark.torture),
        ({"adapter.lora.alpha": 0.0}, {"metadata", "weights"}),  # llama.cpp takes the rank for it
        ({"adapter.type": "control_vector"}, {"metadata"}),
        ({"general.architecture": None}, {"metadata"}),
    ],
)
def test_a_fault_in_its_metadata_is_found(
    changes: dict[str, Any], where: set[str], good: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    base, adapter, file = good
    (tmp_path / "gguf").mkdir()
    out = tmp_path / "gguf" / file.name
    if "general.architecture" in changes:
        out.write_bytes(file.read_bytes().replace(b"gemma3", b"gemma2").replace(b"llama", b"qwen2"))
    else:
        gguf_edit.rewrite(file, out, metadata=changes)
    assert where <= failed(proof(out, base, adapter))


@pytest.fixture(scope="module")
def base_file(good: tuple[Path, Path, Path]) -> GgufFile:
    base, _, file = good
    return read_gguf(converted(base, file.parent.parent / "base", "f16"))


def test_more_than_the_adapter_has_is_named(good: tuple[Path, Path, Path], base_file: GgufFile) -> None:
    base, adapter, file = good
    lora = read_gguf(file)
    assert check_lora_weights(lora, base_file, base, adapter).verdict == "pass"
    more = lora.tensors | {"output.weight.lora_a": next(iter(lora.tensors.values()))}
    check = check_lora_weights(replace(lora, tensors=more), base_file, base, adapter)
    assert (check.verdict, check.detail) == ("fail", "output.weight.lora_a is in the file, and not in the adapter")


def test_a_thousandth_more_is_no_rounding(good: tuple[Path, Path, Path], base_file: GgufFile, tmp_path: Path) -> None:
    """f16 rounds each number by at most 2^-11 of it."""
    base, adapter, file = good
    name = "blk.0.ffn_gate.weight.lora_a"

    def more(data: dict[str, Any]) -> None:
        data[name] = (data[name].astype(np.float32) * 1.002).astype(np.float16)

    check = check_lora_weights(read_gguf(rewrite(file, tmp_path / file.name, more)), base_file, base, adapter)
    assert check.verdict == "fail" and check.detail.startswith(f"{name}: row ")


def test_another_adapter_of_the_same_shape_is_found(good: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, _, file = good
    other = tiny.adapter(base, tmp_path / "adapter", size=0.1, seed=7)
    (tmp_path / "gguf").mkdir()
    shutil.copy(file, tmp_path / "gguf")
    assert {"weights", "logits", "tuned"} <= failed(proof(tmp_path / "gguf" / file.name, base, other))


def test_a_cut_file_fails(good: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, adapter, file = good
    (tmp_path / "gguf").mkdir()
    cut = tmp_path / "gguf" / file.name
    cut.write_bytes(file.read_bytes()[:-100])
    assert failed(proof(cut, base, adapter)) == {"file"}


def test_without_an_adapter_to_compare_with_it_is_refused(good: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, _, file = good
    record = tmp_path / "verify.json"
    with pytest.raises(UsageError, match="none of the files can be compared") as caught:
        proof(file, base, None, record=record)
    assert caught.value.code == "missing_file" and file.name in caught.value.got and not record.exists()


def test_a_base_that_no_disk_holds_is_told_and_no_pass(
    good: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors cannot be put in their places then either: the base's own GGUF file says how its rows lie."""
    base, adapter, file = good
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 1_000_000_000))
    monkeypatch.setitem(float_type.BYTES_PER_WEIGHT, "f32", 1e6)
    record = proof(file, base, adapter, record=tmp_path / "verify.json")
    assert record.verdict == "warn"
    left = {one.name: one.reason for one in record.not_checked}
    assert set(left) - {"digest"} == {"weights", "logits", "tuned", "answers"}
    assert "GGUF file of the base" in left["logits"]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that was trained, as far as `verify` looks, with the adapter's file alone."""
    made = RunDir(training.write_run(tmp_path / "run", base=tiny.cached("gemma")))
    _, adapter, file = export("gemma", tmp_path / "made")
    shutil.copytree(adapter, made.adapter)
    made.gguf.mkdir()
    own = Path(shutil.copy(file, made.gguf / "run-lora-f16.gguf"))
    outputs = {f"gguf/{own.name}": file_digest(own) | {"quant": "f16"}}
    (made.path / "lora_gguf.json").write_text(json.dumps({"outputs": outputs}))
    return made


def answered(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    record = train_record.read(Path(tiny.__file__).parent / "data" / "runs" / "demo" / "train.json")
    of_no_rows = msgspec.structs.replace(record, data=train_record.TrainedData(rows=0, train_rows=0, held_out_rows=0))
    monkeypatch.setattr("skill_train.commands.verify.trained", lambda _: of_no_rows)
    return verify_command.verify_run(Console("quiet", "verify"), run, verify_command.VerifyOptions(tokens=128)).data


def test_a_run_with_the_adapters_file_alone_is_verified(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    data = answered(run, monkeypatch)
    assert data["verdict"] == "pass" and data["not_checked"] == []
    assert {check["file"] for check in data["checks"]} == {"run-lora-f16.gguf"}
    assert "digest" in {check["name"] for check in data["checks"]}


def test_what_else_lies_in_the_folder_or_in_a_record_is_no_plain_pass(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.gguf / "Modelfile").write_text("FROM ./run-f16.gguf\n")
    (run.gguf / "run-q4_k_m.gguf.unrecorded-1").write_bytes(b"GGUF")
    (run.gguf / "Modelfile.unrecorded-1").write_text("SYSTEM of the user's\n")  # an edited one, kept by export-gguf
    made = {"bytes": 1, "sha256": "x", "quant": "f16"}
    (run.path / "convert.json").write_text(json.dumps({"outputs": {"gguf/run-f16.gguf": made}}))
    data = answered(run, monkeypatch)
    assert data["verdict"] == "warn"
    assert {one["file"] for one in data["not_checked"]} == {"run-f16.gguf", "run-q4_k_m.gguf.unrecorded-1"}


def test_a_changed_file_of_the_adapter_fails_its_digest(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    file = run.gguf / "run-lora-f16.gguf"
    gguf_edit.rewrite(file, file.with_suffix(".new"), metadata={"general.name": "Other"})
    file.with_suffix(".new").rename(file)
    data = answered(run, monkeypatch)
    assert [check["name"] for check in data["checks"] if check["verdict"] == "fail"] == ["digest"]


def test_a_run_without_any_file_is_still_refused(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    (run.gguf / "run-lora-f16.gguf").unlink()
    with pytest.raises(UsageError, match="no GGUF file"):
        answered(run, monkeypatch)
