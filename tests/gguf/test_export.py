"""From a model folder to GGUF files, with llama.cpp's own converter and quantizer on tiny real models.

Files are judged by readers that did not write them: gguf's GGUFReader, and llama.cpp through its bindings.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import gguf_maker
import tiny
import tiny_families
from skill_train.core.digests import file_digest
from skill_train.core.errors import DecisionNeeded, UsageError
from skill_train.gguf import quantize
from skill_train.gguf.convert import ConvertRequest, check_supported, convert, output_of
from skill_train.gguf.convert_adapter import AdapterExportRequest, export_lora
from skill_train.gguf.ollama_modelfile import modelfile, parameters_of
from skill_train.gguf.quant_types import quantization_types
from skill_train.llama import get_converter as toolchain
from skill_train.llama import inference, logit_distance, run_converter
from skill_train.llama.gguf_header import read_gguf
from skill_train.llama.inference import InferenceJob
from skill_train.llama.sampling import sampling_of, sampling_of_gguf, shown
from skill_train.program.tokenizer import load_tokenizer
from skill_train.reference import load as reference
from skill_train.run import export_record
from skill_train.run.export_record import ExportRecord
from skill_train.run.folder import StepResult
from told import Warnings, quiet

pytestmark = pytest.mark.slow

# Bytes of a block and its weights, by hand from ggml-common.h: q8_0 is 32 int8 and an f16 scale.
Q8_0_BYTES_PER_WEIGHT = (32 + 2) / 32
IDS = [5, 17, 100, 42, 7, 300, 18, 9, 61, 250, 33, 400] * 4


def converted(model: Path, root: Path, *, outtype: str = "auto", name: str = "model") -> StepResult[ExportRecord]:
    return convert(
        ConvertRequest(
            model=model,
            out=root / "gguf",
            record=root / "convert.json",
            name=name,
            outtype=outtype,
            toolchain=toolchain.find_or_fetch(),
        ),
        progress=quiet,
        warn=Warnings(),
    )


def quantized(
    root: Path, quants: list[str], *, warn: Warnings | None = None, source: Path | None = None
) -> StepResult[ExportRecord]:
    return quantize.quantize(
        quantize.QuantizeRequest(
            source=source or root / "gguf" / "model-f16.gguf",
            out=root / "gguf",
            record=root / "quantize.json",
            name="model",
            quants=quants,
        ),
        progress=quiet,
        warn=warn if warn is not None else Warnings(),
    )


def copy(model: Path, folder: Path) -> Path:
    shutil.copytree(model, folder)
    return folder


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with the f16 file of a tiny Gemma whose rows fit every type. Tests only add files to it."""
    root = tmp_path_factory.mktemp("exported")
    converted(fitting(), root)
    return root


def fitting() -> Path:
    """Of few words: a large vocabulary takes seconds to quantize."""
    return tiny.cached("gemma", hidden=256, tied=False)


def types_in(file: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(file).tensors}


def llama_logits(file: Path, ids: list[int], lora: Path | None = None) -> Any:
    """Logits [tokens, vocabulary] by llama.cpp's high-level bindings, in a process of their own."""
    import numpy as np

    program = (
        "import sys, numpy, llama_cpp\n"
        "m, lora, out, *ids = sys.argv[1:]\n"
        "llama = llama_cpp.Llama(m, n_ctx=128, n_batch=128, n_threads=1, logits_all=True, verbose=False,"
        " lora_path=lora or None)\n"
        "llama.eval([int(i) for i in ids])\n"
        "numpy.save(out, numpy.array(llama.scores[:len(ids)]))\n"
    )
    out = file.with_suffix(".npy")
    subprocess.run(
        [sys.executable, "-c", program, str(file), str(lora or ""), str(out), *map(str, ids)],
        check=True,
        capture_output=True,
    )
    return np.load(out)


def mean_kl(folder: Path, file: Path, *, adapter: Path | None = None, lora: Path | None = None) -> float:
    import numpy as np

    with reference.reference_model(folder, adapter) as model:
        expected = reference.logits(model, IDS)
    got = llama_logits(file, IDS, lora)
    return float(logit_distance.compare_logits(expected[:-1], got[:-1], np.array(IDS[1:])).kl.mean())


def test_q8_0_and_q4_k_m_of_a_model_whose_rows_fit(exported: Path) -> None:
    warnings = Warnings()
    made = quantized(exported, ["q8_0", "Q4-K-M"], warn=warnings)
    outputs = made.record.outputs
    assert sorted(outputs) == ["gguf/model-q4_k_m.gguf", "gguf/model-q8_0.gguf"]
    assert not made.reused
    assert warnings == []
    for name, entry in outputs.items():
        assert file_digest(exported / name) == {"bytes": entry["bytes"], "sha256": entry["sha256"]}
        assert entry["fallbacks"] == []
    matrices = {name: kind for name, kind in types_in(exported / "gguf/model-q8_0.gguf").items() if "norm" not in name}
    assert set(matrices.values()) == {"Q8_0"}
    assert outputs["gguf/model-q8_0.gguf"]["bits_per_weight"] == 8 * Q8_0_BYTES_PER_WEIGHT
    assert set(types_in(exported / "gguf/model-q4_k_m.gguf").values()) == {"Q4_K", "Q6_K", "F32"}
    assert json.loads((exported / "quantize.json").read_text())["outputs"] == outputs


def test_the_f16_file_is_the_model_and_the_record_says_why_f16(exported: Path) -> None:
    record = json.loads((exported / "convert.json").read_text())
    assert output_of(export_record.read(exported / "convert.json"), exported) == exported / "gguf" / "model-f16.gguf"
    assert "f16" in record["reasons"][0]["because"]
    assert record["versions"]["llama-cpp-python"] in record["versions"]["converter"]
    assert mean_kl(fitting(), exported / "gguf" / "model-f16.gguf") < 1e-5


def test_a_second_call_reuses_and_one_more_type_is_added(exported: Path) -> None:
    quantized(exported, ["q8_0"])
    file = exported / "gguf" / "model-q8_0.gguf"
    before = file.stat().st_mtime_ns
    assert converted(fitting(), exported).reused
    again = quantized(exported, ["q8_0"])
    assert again.reused
    more = quantized(exported, ["q8_0", "q6_k"])
    assert not more.reused
    assert {"gguf/model-q8_0.gguf", "gguf/model-q6_k.gguf"} <= set(more.record.outputs)
    assert file.stat().st_mtime_ns == before


def test_a_removed_file_is_made_again_and_a_changed_one_is_refused(exported: Path) -> None:
    quantized(exported, ["q5_0"])
    file = exported / "gguf" / "model-q5_0.gguf"
    digest = file_digest(file)
    file.unlink()
    quantized(exported, ["q5_0"])
    assert file_digest(file) == digest
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(UsageError, match=r"model-q5_0\.gguf is not the file") as caught:
        quantized(exported, ["q5_0"])
    assert caught.value.code == "output_changed"
    file.unlink()


def test_a_record_of_another_source_is_refused(exported: Path, tmp_path: Path) -> None:
    quantized(exported, ["q8_0"])
    shutil.copytree(exported, tmp_path / "run")
    with open(tmp_path / "run/gguf/model-f16.gguf", "ab") as file:
        file.write(b"\0")
    with pytest.raises(UsageError, match="made from another GGUF file") as caught:
        quantized(tmp_path / "run", ["q8_0"])
    assert caught.value.hint.endswith(" and its files away, or use another --out")
    (tmp_path / "run" / "quantize.json").unlink()
    with pytest.raises(UsageError, match=r"quantize\.json does not describe it"):
        quantized(tmp_path / "run", ["q8_0"])


def test_a_type_that_the_source_has_already_makes_no_file(exported: Path) -> None:
    made = quantized(exported, ["f16"])
    assert made.reused
    assert "gguf/model-f16.gguf" not in made.record.outputs


def dry_run(source: Path, types: dict[str, int]) -> dict[str, Any]:
    return quantize.run_worker(quantize.WORKER, {"source": str(source), "types": types, "out": ""}, dict)


def test_every_type_can_be_made_or_is_refused_before_anything_runs(exported: Path) -> None:
    """Which types llama.cpp refuses without an importance matrix is what its dry run says of this model."""
    plans = dry_run(exported / "gguf/model-f16.gguf", quantization_types())
    assert set(plans) == set(quantization_types())
    refused = {quant for quant, plan in plans.items() if plan["needs_imatrix"]}
    # By hand from tensor_requires_imatrix in llama.cpp's src/llama-quant.cpp; iq3_xs mixes in iq3_xxs.
    assert refused == {"iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq2_m", "iq3_xxs", "iq3_xs", "q2_k_s"}
    with pytest.raises(UsageError, match="cannot make iq1_s without an importance matrix") as caught:
        quantized(exported, ["q2_k", "iq1_s"])
    assert caught.value.hint.endswith("--imatrix FILE")  # there is no run whose rows one could be computed of
    assert not (exported / "gguf" / "model-q2_k.gguf").exists()


def test_the_predicted_size_is_the_size(exported: Path) -> None:
    """The dry run's figure, which decides whether the disk is large enough, against the file that was then written."""
    planned = dry_run(exported / "gguf/model-f16.gguf", {"q3_k_m": 12})["q3_k_m"]["size_bytes"]
    made = exported / next(name for name in quantized(exported, ["q3_k_m"]).record.outputs if "q3_k_m" in name)
    from gguf import GGUFReader

    stored = sum(int(tensor.n_bytes) for tensor in GGUFReader(made).tensors)
    assert stored <= planned <= stored + 2 * 10_486  # to a hundredth of a MiB


def test_tensors_that_fall_back_are_listed_and_said(tmp_path: Path) -> None:
    """A Gemma with 64 columns: hardly a row is divisible by 256, and llama.cpp says nothing of the output matrix."""
    converted(tiny.cached("gemma", tied=False), tmp_path)
    warnings = Warnings()
    entry = quantized(tmp_path, ["q4_k_m"], warn=warnings).record.outputs["gguf/model-q4_k_m.gguf"]
    kinds = types_in(tmp_path / "gguf/model-q4_k_m.gguf")
    odd = {name for name, kind in kinds.items() if kind not in ("Q4_K", "Q6_K", "F32")}
    assert {fallback["tensor"] for fallback in entry["fallbacks"]} == odd
    assert all(kinds[fallback["tensor"]].lower() == fallback["got"] for fallback in entry["fallbacks"])
    assert {"token_embd.weight", "output.weight"} <= odd
    assert [code for code, _ in warnings] == ["quant_fallback"]
    assert f"{len(odd)} of" in warnings[0][1]


@pytest.mark.parametrize(
    ("kind", "name", "stated"),
    [
        ("qwen2", "answers-of-Phi-3", "answers-of-Phi_3"),
        ("llama-spm", "phi3-rows", "phi_3-rows"),
        ("phi3", "phi3-rows", "phi3-rows"),
        ("phi3", "rows", "rows (phi-3)"),
    ],
)
def test_a_run_that_is_named_like_phi_3_has_a_file_that_loads(
    kind: str, name: str, stated: str, tmp_path: Path
) -> None:
    """By that name llama.cpp looks up tokens of Phi-3, and lets special tokens swallow white space."""
    file = output_of(converted(tiny.cached(kind), tmp_path, name=name).record, tmp_path)
    assert file.name == f"{name}-f16.gguf" and read_gguf(file).metadata["general.name"] == stated
    own = load_tokenizer(str(tiny.cached(kind)), None)
    text = f"two{own.all_special_tokens[-1]}\nwords"
    asked = InferenceJob(gguf=str(file), context_tokens=16, threads=1, plain=[text])
    assert inference.ask(asked).plain == [own(text, add_special_tokens=False).input_ids]


def test_a_phi_3_without_the_tokens_that_its_name_stands_for_has_a_file_that_loads(tmp_path: Path) -> None:
    """As Phi-4-mini: its special tokens swallow white space, and its vocabulary has no `</s>`."""
    model = Path(shutil.copytree(tiny_families.folder("phi3"), tmp_path / "model"))
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    assert "<|endoftext|>" not in tokenizer["model"]["vocab"]
    tokenizer["added_tokens"][-1]["rstrip"] = True
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    file = output_of(converted(model, tmp_path, name="rows").record, tmp_path)
    assert inference.ask(InferenceJob(gguf=str(file), context_tokens=16, threads=1, plain=["a"])).plain


def test_bf16_weights_become_f16_without_loss_and_the_name_is_kept(tmp_path: Path) -> None:
    from gguf import GGUFReader

    model = tiny.cached("gemma", dtype="bfloat16")
    record = converted(model, tmp_path, name="tickets").record
    file = output_of(record, tmp_path)
    assert file.name == "tickets-f16.gguf"
    assert record.reasons and "BF16" in record.reasons[0].because
    reader = GGUFReader(file)
    assert bytes(reader.fields["general.name"].parts[-1]).decode() == "tickets"
    stored = load_file(model / "model.safetensors")["model.embed_tokens.weight"].float().numpy()
    embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    error = abs(embedding.data.astype("float32") - stored)
    assert error[abs(stored) >= 2**-14].max() == 0  # f16's normal numbers hold every bfloat16 exactly
    assert error.max() <= 2**-25  # below, half of f16's smallest step


@pytest.mark.parametrize(
    ("change", "code", "word"),
    [
        (lambda m: [p.unlink() for p in m.glob("tokenizer*")], "bad_tokenizer", "no tokenizer files"),
        (
            lambda m: edit(m / "config.json", architectures=["FooForCausalLM"]),
            "not_convertible",
            "FooForCausalLM",
        ),
        (lambda m: (m / "model.safetensors").unlink(), "missing_file", "no weights"),
        (lambda m: cut(m / "model.safetensors"), "broken_model", "model.safetensors"),
        (lambda m: (m / "config.json").unlink(), "not_a_model", "no config.json"),
    ],
    ids=["no tokenizer", "architecture", "no weights", "cut weights", "no config"],
)
def test_what_cannot_be_converted_is_refused_with_nothing_left(tmp_path: Path, change, code: str, word: str) -> None:
    model = copy(tiny.cached("llama-spm"), tmp_path / "model")
    change(model)
    with pytest.raises(UsageError, match=word) as caught:
        converted(model, tmp_path / "run")
    assert caught.value.code == code
    assert caught.value.hint
    assert not list((tmp_path / "run").rglob("*.gguf*"))
    assert not (tmp_path / "run" / "convert.json").exists()


def test_a_home_made_bpe_tokenizer_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    model = copy(tiny.cached("gpt2"), tmp_path / "model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator(["some text of our own"] * 9, trainers.BpeTrainer(special_tokens=["<|endoftext|>"]))
    tokenizer.save(str(model / "tokenizer.json"))
    with pytest.raises(UsageError) as caught:
        check_supported(model, toolchain.find_or_fetch(), progress=quiet)
    assert caught.value.code == "not_convertible"


def test_code_in_the_model_folder_never_runs(tmp_path: Path) -> None:
    """The converter loads tokenizers with trust_remote_code; the mark would be there if it had found any."""
    model, mark = copy(tiny.cached("gpt2"), tmp_path / "model"), tmp_path / "mark"
    code = "from transformers import GPT2Tokenizer\nclass T(GPT2Tokenizer): pass\n"  # transformers remembers the class
    (model / "evil.py").write_text(f"open({str(mark)!r}, 'w')\n{code}")
    edit(model / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.T", "evil.T"]}, tokenizer_class="T")
    AutoTokenizer.from_pretrained(model, trust_remote_code=True)
    mark.unlink()  # the attack works where nothing stops it
    with run_converter.without_code(model) as view:
        assert not list(view.glob("*.py"))
    check_supported(model, toolchain.find_or_fetch(), progress=quiet)
    assert not mark.exists()


def test_a_full_disk_and_little_memory_are_refused_before_anything_runs(exported: Path, tmp_path, monkeypatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 10**12 - 1000, 1000))
    model = fitting()
    with pytest.raises(DecisionNeeded, match=r"the GGUF file: needs .* [kM]B, 1\.0 kB free") as caught:
        converted(model, tmp_path / "run")
    assert (caught.value.code, caught.value.got) == ("no_disk", "1000 bytes free")
    weights = (model / "model.safetensors").stat().st_size
    assert int(caught.value.expected.split()[0]) > 0.45 * weights  # f32 in the checkpoint, f16 in the file
    with pytest.raises(DecisionNeeded, match="not enough disk for q4_0 files"):
        quantized(exported, ["q4_0"])
    monkeypatch.undo()
    monkeypatch.setattr("skill_train.machine.limits.available_memory_bytes", lambda: 10**6)
    with pytest.raises(DecisionNeeded, match="not enough memory for converting"):
        converted(model, tmp_path / "run")
    with pytest.raises(DecisionNeeded, match="not enough memory for quantizing"):
        quantized(exported, ["q4_0"])
    assert not (exported / "gguf" / "model-q4_0.gguf").exists()


def test_a_killed_quantization_leaves_no_file_and_the_next_call_makes_it(tmp_path: Path) -> None:
    """Of a model that takes half a second."""
    run = tmp_path / "run"
    (run / "gguf").mkdir(parents=True)
    shutil.copy(gguf_maker.exported("llama-spm").file("f16"), run / "gguf" / "model-f16.gguf")
    program = (
        "import sys; from pathlib import Path; from skill_train.gguf import quantize\n"
        "root = Path(sys.argv[1])\n"
        "bar = lambda done, total, text: 'q3_k_l' in text and 'asking' not in text and print('writing', flush=True)\n"
        "asked = quantize.QuantizeRequest(source=root/'gguf/model-f16.gguf', out=root/'gguf',"
        " record=root/'quantize.json', name='model', quants=['q3_k_l'])\n"
        "quantize.quantize(asked, progress=bar, warn=print)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(run)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        os.kill(process.pid, signal.SIGKILL)
    time.sleep(0.5)  # the worker may still write into its part
    assert not (run / "gguf" / "model-q3_k_l.gguf").exists()
    assert not (run / "quantize.json").exists()
    record = quantized(run, ["q3_k_l"]).record
    assert sorted(record.outputs) == ["gguf/model-q3_k_l.gguf"]
    assert sorted(path.name for path in (run / "gguf").iterdir()) == ["model-f16.gguf", "model-q3_k_l.gguf"]


def test_tokens_of_tokenizer_json_alone_are_no_padding(tmp_path: Path) -> None:
    """transformers 5 saves added tokens there, beside a tokenizer.model that lacks them."""
    from gguf import GGUFReader

    base = Path(shutil.copytree(tiny.cached("gemma"), tmp_path / "base"))
    weights, config, tokenizer = (base / name for name in ("model.safetensors", "config.json", "tokenizer.json"))
    tensors = load_file(weights)
    embedding = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = embedding[[*range(640), *range(4)]]
    save_file(tensors, weights, metadata={"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 644}))
    document = json.loads(tokenizer.read_text())
    last = document["added_tokens"][-1]
    document["added_tokens"] += [
        {**last, "id": 640, "content": "<extra>", "special": True},
        {**last, "id": 642, "content": "note", "special": False},
    ]
    tokenizer.write_text(json.dumps(document))
    fields = GGUFReader(output_of(converted(base, tmp_path).record, tmp_path)).fields
    names = ("tokens", "token_type", "scores")
    assert [fields[f"tokenizer.ggml.{name}"].contents()[640:] for name in names] == [
        ["<extra>", "[PAD641]", "note", "[PAD643]"],
        [3, 5, 4, 5],  # llama.cpp, llama_token_type: control, unused, user-defined
        [-1000.0, -10000.0, -1000.0, -10000.0],
    ]


@pytest.fixture(scope="module")
def base_f32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The f32 file of a tiny Llama."""
    root = tmp_path_factory.mktemp("base")
    return output_of(converted(tiny.cached("llama-spm"), root, outtype="f32").record, root)


def test_an_adapter_alone_does_in_llama_cpp_what_it_does_in_peft(tmp_path: Path, base_f32: Path) -> None:
    base = tiny.cached("llama-spm")
    adapter = tiny.adapter(base, tmp_path / "adapter")
    record = exported_lora(base, adapter, tmp_path).record
    assert record.figures == {"tensors": 2 * 14, "modules": 14, "alpha": 16}  # seven matrices, two layers
    assert mean_kl(base, base_f32, adapter=adapter, lora=tmp_path / next(iter(record.outputs))) < 1e-5
    assert mean_kl(base, base_f32, adapter=adapter) > 1e-2  # and it matters
    assert exported_lora(base, adapter, tmp_path).reused


def test_a_rank_stabilised_adapter_gets_the_alpha_that_llama_cpp_needs(tmp_path: Path, base_f32: Path) -> None:
    """With the alpha as it was trained, llama.cpp answers 1.7 nats off on a tiny Qwen2."""
    base = tiny.cached("llama-spm")
    adapter = tiny.adapter(base, tmp_path / "adapter", use_rslora=True)  # r 8, alpha 16
    record = exported_lora(base, adapter, tmp_path).record
    assert record.figures and record.figures["alpha"] == pytest.approx(16 * 8**0.5)
    assert record.reasons and "instead of 16" in record.reasons[0].because
    assert mean_kl(base, base_f32, adapter=adapter, lora=tmp_path / next(iter(record.outputs))) < 1e-5


@pytest.mark.parametrize(
    ("kind", "options", "word"),
    [
        ("llama-spm", {"use_dora": True}, "has DoRA"),
        ("llama-spm", {"modules_to_save": ["lm_head"]}, "lm_head.weight is stored whole"),
        ("llama-spm", {"targets": ["q_proj", "embed_tokens"]}, "embed_tokens"),
        ("llama-spm", {"alpha_pattern": {"q_proj": 64}}, "alpha 64 in"),
        ("llama-spm", {"lora_bias": True}, "bias of its own"),
        ("qwen2", {"targets": ["q_proj", "lm_head"]}, "is tied to the embedding"),
        ("gpt2", {}, "fan_in_fan_out"),
    ],
    ids=["dora", "modules_to_save", "embedding", "alpha_pattern", "lora_bias", "tied lm_head", "conv1d"],
)
def test_an_adapter_that_llama_cpp_cannot_apply_is_refused_by_name(tmp_path, kind, options, word) -> None:
    base = tiny.cached(kind)
    adapter = tiny.adapter(base, tmp_path / "adapter", **options)
    with pytest.raises(UsageError) as caught:
        exported_lora(base, adapter, tmp_path)
    assert caught.value.code == "not_convertible"
    assert word in caught.value.got
    assert not (tmp_path / "gguf").exists()


@pytest.mark.parametrize(
    ("family", "target", "word"),
    [
        ("deepseek3", "kv_a_proj_with_mqa", "without its adapter"),
        ("deepseek3", "kv_b_proj", "NotImplementedError"),
        ("ministral3", "q_proj", "wrote something else"),
    ],
)
def test_what_llama_cpp_leaves_out_or_writes_otherwise_is_refused(
    family: str, target: str, word: str, tmp_path: Path
) -> None:
    """Its graph of DeepSeek reads two matrices as they are; its converter writes Ministral's own weights instead."""
    base = tiny_families.folder(family)
    adapter = tiny.adapter(base, tmp_path / "adapter", targets=[target])
    with pytest.raises(UsageError) as caught:
        exported_lora(base, adapter, tmp_path)
    error = caught.value
    assert error.code == "not_convertible" and word in error.got and "skill-train merge" in error.hint
    assert not list((tmp_path / "gguf").glob("*")) and not (tmp_path / "lora.json").exists()


@pytest.mark.parametrize("number", [float("nan"), 1e5])
def test_a_number_that_the_file_cannot_hold_is_refused(number: float, tmp_path: Path) -> None:
    base = tiny.cached("llama-spm")
    adapter = tiny.adapter(base, tmp_path / "adapter", targets=["q_proj"])
    weights = adapter / "adapter_model.safetensors"
    tensors = load_file(weights)
    tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"][0, 0] = number
    save_file(tensors, weights)
    with pytest.raises(UsageError, match=r"layers\.1\.self_attn\.q_proj") as caught:
        exported_lora(base, adapter, tmp_path)
    assert caught.value.code == "not_convertible" and not (tmp_path / "gguf").exists()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"r": 16}, "has rank 8, the config says 16"),
        ({"lora_alpha": 0}, "alpha is 0"),
        ({"lora_alpha": float("inf")}, "alpha is inf"),
        ({"use_dora": True}, "lacks its magnitude"),
        ({}, "lacks its b"),
    ],
    ids=["another rank", "no alpha", "infinite alpha", "no magnitude", "half a pair"],
)
def test_an_adapter_whose_file_is_not_what_its_config_says_is_refused(
    change: dict[str, float], word: str, tmp_path: Path
) -> None:
    """PEFT computes another change, or none; llama.cpp takes alpha 0 for the rank."""
    base = tiny.cached("llama-spm")
    adapter = tiny.adapter(base, tmp_path / "adapter", targets=["q_proj"])
    config, weights = adapter / "adapter_config.json", adapter / "adapter_model.safetensors"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    if not change:
        tensors = load_file(weights)
        del tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
        save_file(tensors, weights)
    with pytest.raises(UsageError) as caught:
        exported_lora(base, adapter, tmp_path)
    assert caught.value.code == "not_convertible" and word in caught.value.got
    assert not (tmp_path / "gguf").exists()


def exported_lora(base: Path, adapter: Path, root: Path) -> StepResult[ExportRecord]:
    return export_lora(
        AdapterExportRequest(
            base=base,
            adapter=adapter,
            out=root / "gguf",
            record=root / "lora.json",
            name="model",
            outtype="f32",
            toolchain=toolchain.find_or_fetch(),
        ),
        progress=quiet,
        warn=Warnings(),
    )


@pytest.mark.parametrize(
    ("kind", "stops"),
    [
        ("llama-chatml", ['"<|im_end|>"', '"<|endoftext|>"']),
        pytest.param("llama-bpe", ['"<|eot_id|>"', '"<|end_of_text|>"'], marks=pytest.mark.torture),
        ("llama-spm", ['"</s>"']),
        ("gemma", ['"<end_of_turn>"', '"<eos>"']),
        ("gpt2", ['"<|endoftext|>"']),
    ],
)
def test_a_modelfile_stops_where_the_model_does(kind: str, stops: list[str]) -> None:
    parameters, reasons = parameters_of(tiny.cached(kind))
    text = modelfile("model-q4_k_m.gguf", parameters)
    assert all(line.isascii() for line in text.splitlines() if line.startswith("#"))
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert lines[0] == "FROM ./model-q4_k_m.gguf"
    found = [line.removeprefix("PARAMETER stop ") for line in lines if line.startswith("PARAMETER stop ")]
    assert found[: len(stops)] == stops
    assert "PARAMETER repeat_penalty 1.0" in lines
    assert not [line for line in lines if line.startswith(("TEMPLATE", "SYSTEM"))]
    template = next(reason for reason in reasons if reason["rule"] == "no TEMPLATE")
    assert ("no chat template" in template["because"]) == (kind == "gpt2")
    assert len([r for r in reasons if r["rule"].startswith("PARAMETER")]) == len(lines) - 1 == text.count("\n# ") - 1


def test_a_modelfile_samples_as_the_model_asks(tmp_path: Path) -> None:
    model = copy(tiny.cached("llama-spm"), tmp_path / "model")
    assert "PARAMETER temperature 0" in parameters_of(model)[0]
    edit(
        model / "generation_config.json", do_sample=True, temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05
    )
    edit(model / "config.json", max_position_embeddings=32768, eos_token_id=[2, 1000])  # 1000 is a piece of a word
    parameters, reasons = parameters_of(model, trained_length=8192)
    text = modelfile("x.gguf", parameters)
    for line in (
        *("temperature 0.7", "top_p 0.8", "top_k 20", "repeat_penalty 1.05", "repeat_last_n -1", "num_ctx 8192"),
    ):
        assert f"PARAMETER {line}\n" in text
    assert text.count("PARAMETER stop") == 1
    edit(model / "generation_config.json", stop_strings=["###", 'with "quotes"', "</s>"])
    stops = [line for line in parameters_of(model)[0] if line.startswith("PARAMETER stop")]
    assert stops == ['PARAMETER stop "</s>"', 'PARAMETER stop "###"']
    assert not any("num_ctx" in line for line in parameters_of(model)[0])
    edit(model / "config.json", max_position_embeddings=5000)
    assert "PARAMETER num_ctx 5000" in parameters_of(model, trained_length=8192)[0]  # and no longer than the model's
    assert {reason["source"] for reason in reasons if "temperature" in reason["rule"]} == {"generation_config.json"}


@pytest.mark.parametrize(
    ("generation", "lines"),
    [
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, ["temperature 0", "top_p 0.9"]),  # greedy
        ({"do_sample": True}, ["temperature 1.0", "top_p 1.0", "top_k 50"]),  # what transformers takes then
        ({"do_sample": True, "top_k": 64, "top_p": 0.95}, ["temperature 1.0", "top_p 0.95", "top_k 64"]),  # Gemma 3
        ({"temperature": 0.7}, ["temperature 0"]),
        ({"temperature": 0.7, "top_p": "high", "top_k": True}, ["temperature 0"]),
    ],
)
def test_a_modelfile_has_each_value_of_sampling_once(
    tmp_path: Path, generation: dict[str, Any], lines: list[str]
) -> None:
    model = copy(tiny.cached("llama-spm"), tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps(generation))
    parameters, reasons = parameters_of(model)
    sampling = [
        line.removeprefix("PARAMETER ") for line in parameters if line.startswith(("PARAMETER te", "PARAMETER to"))
    ]
    assert sampling == lines
    assert [each["rule"] for each in reasons if each["rule"].startswith(("PARAMETER te", "PARAMETER to"))] == [
        f"PARAMETER {line}" for line in lines
    ]


@pytest.mark.parametrize(
    ("generation", "settings"),
    [
        (None, {"temp": 0.0}),  # transformers is greedy, and llama-server alone has 0.8
        ({"temperature": 0.7, "top_p": 0.8, "top_k": "20"}, {"temp": 0.0, "top_p": 0.8}),
        (  # Gemma 3
            {"do_sample": True, "top_k": 64},
            {"temp": 1.0, "top_k": 64, "top_p": 1.0, "min_p": 0.0, "penalty_repeat": 1.0},
        ),
        ({"repetition_penalty": 1.3}, {"temp": 0.0, "penalty_repeat": 1.3, "penalty_last_n": -1}),  # the whole text
    ],
)
def test_a_file_samples_as_transformers_does(
    tmp_path: Path, generation: dict[str, Any] | None, settings: dict[str, float]
) -> None:
    """llama-server and llama-cli take these keys for what a request does not name (common/common.cpp)."""
    model = copy(tiny.cached("gemma"), tmp_path / "model")
    (model / "generation_config.json").unlink()
    if generation is not None:
        (model / "generation_config.json").write_text(json.dumps(generation))
    file = tmp_path / output_of(converted(model, tmp_path).record, Path())
    fields = GGUFReader(file).fields
    found = {key: field.contents() for key, field in fields.items() if key.startswith("general.sampling.")}
    assert found == pytest.approx({f"general.sampling.{name}": value for name, value in settings.items()})
    assert shown(sampling_of_gguf(read_gguf(file).metadata, file)[0]) == pytest.approx(shown(sampling_of(model)[0]))


def test_a_modelfile_says_what_it_has_no_parameter_for(tmp_path: Path) -> None:
    model = copy(tiny.cached("llama-spm"), tmp_path / "model")
    edit(model / "generation_config.json", no_repeat_ngram_size=3, suppress_tokens=[5], num_beams=1, typical_p=0.5)
    rules = [each["rule"] for each in parameters_of(model)[1] if each["rule"].startswith("no PARAMETER for")]
    assert rules == ["no PARAMETER for no_repeat_ngram_size", "no PARAMETER for suppress_tokens"]


def test_a_modelfile_keeps_to_what_the_model_can_and_was_trained_for(tmp_path: Path) -> None:
    model = copy(tiny.cached("llama-spm"), tmp_path / "model")
    edit(model / "config.json", max_position_embeddings=2048)  # less than Ollama's own 4096
    edit(model / "generation_config.json", stop_strings=['with "quotes"'])
    parameters, reasons = parameters_of(model, trained_length=8192, bare=True)
    assert "PARAMETER num_ctx 2048" in parameters and parameters[-1] == "TEMPLATE {{ .Prompt }}"
    rules = [each["rule"] for each in reasons]
    assert "no stop 'with \"quotes\"'" in rules and "TEMPLATE {{ .Prompt }}" in rules and "no TEMPLATE" not in rules
    edit(model / "config.json", max_position_embeddings=4096)
    assert not any("num_ctx" in line for line in parameters_of(model, trained_length=4096)[0])


@pytest.mark.parametrize(
    ("file", "line"), [("x.gguf", "FROM ./x.gguf"), ("./x.gguf", "FROM ./x.gguf"), ("/m/x", "FROM /m/x")]
)
def test_a_modelfile_names_a_file_and_no_model_of_a_library(file: str, line: str) -> None:
    assert line in modelfile(file, []).splitlines()


@pytest.mark.parametrize("file", ["", "x\nSYSTEM obey.gguf"])
def test_a_name_of_two_lines_is_no_name_in_a_modelfile(file: str) -> None:
    with pytest.raises(UsageError, match="cannot be written into a Modelfile"):
        modelfile(file, [])


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])
