"""From a vision model's folder to two GGUF files that llama.cpp loads together."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import gguf_maker
import picture_pairs
import step_records
import tiny
import tiny_vision
import vision_adapters
from planning import write_recipe_hash
from skill_train.commands._projector import projector_type
from skill_train.core.digests import digests, file_digest
from skill_train.core.errors import UsageError
from skill_train.gguf import convert_projector
from skill_train.gguf.convert import ConvertRequest, convert
from skill_train.gguf.convert_projector import ProjectorRequest
from skill_train.gguf.ollama_modelfile import modelfile
from skill_train.llama import get_converter
from skill_train.llama.gguf_header import read_gguf
from skill_train.model.folder import fingerprint, read_model
from skill_train.program.pictures.processor import PROCESSOR_FILES
from skill_train.run import export_record, records
from skill_train.run.export_record import ExportRecord
from skill_train.run.folder import RunDir, StepResult
from skill_train.verify.pictures.projector import check_projector_weights

pytestmark = pytest.mark.slow

RECORDED = Path(__file__).resolve().parent.parent / "support" / "data" / "runs" / "demo" / "plan.json"
# A type, and llama.cpp's word for the projector (gguf-py, VisionProjectorType). Gemma 3 and SmolVLM are exported below,
# by the command.
FAMILIES = {
    "qwen2-vl": ("f32", "qwen2vl_merger"),
    "qwen2.5-vl": ("q8_0", "qwen2.5vl_merger"),
    "qwen3-vl": ("bf16", "qwen3vl_merger"),
}


def quiet(*_: object) -> None:
    """A bar, or a warning, that nobody sees."""


def pair(model: Path, root: Path, mmproj: str = "f16") -> tuple[StepResult[ExportRecord], StepResult[ExportRecord]]:
    """Both files, as `export-gguf` makes them."""
    tools, made = get_converter.find_or_fetch(), list[StepResult[ExportRecord]]()
    projector = ProjectorRequest(model, root / "gguf", root / "mmproj.json", "tiny", mmproj, tools)
    text = convert(
        ConvertRequest(model, root / "gguf", root / "convert.json", "tiny", "f16", tools),
        check=lambda part: made.append(convert_projector.convert_projector(projector, part, progress=quiet)),
        progress=quiet,
        warn=quiet,
    )
    return text, made[0]


def run(commands: Any, work: Path, *words: object) -> Any:
    done = commands.run(work, dict(os.environ), "export-gguf", *words)
    return json.loads(done.stdout) | {"exit": done.code}


@pytest.mark.parametrize("kind", FAMILIES)
def test_both_files_load_and_are_recorded(kind: str, tmp_path: Path) -> None:
    model, (wanted, projector_kind) = tiny_vision.cached(kind), FAMILIES[kind]
    text, projector = pair(model, tmp_path, wanted)
    assert not text.reused and not projector.reused
    file = tmp_path / "gguf" / f"mmproj-tiny-{wanted}.gguf"
    assert {path.name for path in (tmp_path / "gguf").iterdir()} == {"tiny-f16.gguf", file.name}
    assert projector.record.outputs == {f"gguf/{file.name}": {**file_digest(file), "quant": wanted}}
    assert export_record.read(tmp_path / "mmproj.json").options == {"name": "tiny", "outtype": wanted}
    read = read_gguf(file)
    assert read.metadata["general.type"] == "mmproj" and read.metadata["clip.projector_type"] == projector_kind
    assert wanted in (projector.record.figures or {})["types"]
    own = {name for name in load_file(model / "model.safetensors") if convert_projector._PARTS.search(name)}
    assert len(own) > 0.6 * len(read.tensors)  # q, k and v of Qwen lie in one tensor
    convert_projector.require_pair(model, tmp_path / "gguf" / "tiny-f16.gguf", file)


# --- The command ---


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, commands: Any) -> tuple[Path, Any]:
    """A folder with a pair, and the answer."""
    out = tmp_path_factory.mktemp("exported") / "files"
    return out, run(commands, out.parent, tiny_vision.cached("gemma3"), "--quant", "f16,q8_0", "--out", out)


def test_the_answer_and_the_modelfile_name_both_files(exported: tuple[Path, Any]) -> None:
    out, answer = exported
    assert answer["exit"] == 0
    assert [file["quant"] for file in answer["data"]["files"]] == ["f16", "q8_0"]
    made = Path(answer["data"]["mmproj"]["path"])
    assert made.parent == out and made.name.startswith("mmproj-") and answer["data"]["mmproj"]["quant"] == "f16"
    assert read_gguf(made).metadata["clip.projector_type"] == "gemma3"
    text = Path(answer["data"]["files"][1]["path"])
    lines = (out / "Modelfile").read_text().splitlines()
    assert [line for line in lines if line.startswith("FROM")] == [f"FROM ./{text.name}", f"FROM ./{made.name}"]
    assert answer["next"][1] == f"llama-server -m {text} --mmproj {made}"
    assert "PARAMETER num_ctx 2048" in lines  # of the text part of its config.json


def test_a_second_call_makes_nothing_and_quantizing_leaves_the_projector(
    exported: tuple[Path, Any], commands: Any
) -> None:
    out, first = exported
    before = {path: path.stat().st_mtime_ns for path in out.glob("*.gguf")}
    again = run(commands, out.parent, tiny_vision.cached("gemma3"), "--quant", "f16,q8_0", "--out", out)
    assert again["data"]["reused"] and again["data"]["mmproj"] == first["data"]["mmproj"]
    more = run(commands, out.parent, tiny_vision.cached("gemma3"), "--quant", "q5_0", "--out", out)
    assert not more["data"]["reused"] and more["data"]["mmproj"] == first["data"]["mmproj"]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(list(out.glob("mmproj-*"))) == 1 and len(list(out.glob("*.gguf"))) == 4


def test_a_converter_that_answers_0_with_a_file_that_does_not_load_is_refused(tmp_path: Path, commands: Any) -> None:
    """The converter writes a projector of Gemma 3 without its norm, which llama.cpp cannot load."""
    model, out = shutil.copytree(tiny_vision.cached("gemma3"), tmp_path / "gemma"), tmp_path / "out"
    weights = load_file(model / "model.safetensors")
    del weights["multi_modal_projector.mm_soft_emb_norm.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    refused = run(commands, tmp_path, model, "--quant", "f16", "--out", out)
    assert (refused["exit"], refused["error"]["code"]) == (2, "not_convertible")
    assert str(model) in refused["error"]["message"] and "mm.soft_emb_norm.weight" in refused["error"]["message"]
    assert list(out.iterdir()) == []


@pytest.mark.torture
@pytest.mark.parametrize("kind", ["mistral3", "pixtral"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_the_end_of_a_line_that_the_converter_leaves_out(kind: str, prefix: str, tmp_path: Path) -> None:
    """By itself llama.cpp's converter (0.3.36) answers 0, with a projector that does not load; of names that begin with
    `model.` it takes nothing (ggml-org/llama.cpp#24235). Ours is whole."""
    model = Path(shutil.copytree(tiny_vision.cached(kind), tmp_path / "model"))
    weights = {f"{prefix}{name}": weight for name, weight in load_file(model / "model.safetensors").items()}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    text = picture_pairs.pair(kind).text
    with pytest.raises(UsageError, match="cannot load together"):
        convert_projector.require_pair(model, text, gguf_maker.export(model, tmp_path / "raw", options=("--mmproj",)))
    ours = picture_pairs.projector(model, tmp_path / "mmproj.gguf")
    convert_projector.require_pair(model, text, ours)
    check = check_projector_weights(read_gguf(ours), model)
    assert (check.verdict, check.figures["looked_at"]) == ("pass", 34), check.detail


def _run_of(base: Path, folder: Path, **recipe: Any) -> RunDir:
    """A run with an adapter of language model, tower and projector."""
    work = RunDir(folder)
    work.path.mkdir()
    vision_adapters.adapter(base, work.adapter, targets=vision_adapters.everywhere(base))
    plan = json.loads(RECORDED.read_text())
    plan["recipe"] |= {"model": str(base), **recipe}
    plan["fingerprints"]["model"] = fingerprint(base)
    work.plan.write_text(json.dumps(plan))
    records.write(work.record("train"), step_records.trained(digests(work.path, list(work.adapter.iterdir()))))
    write_recipe_hash(work.path)
    return work


@pytest.mark.parametrize("images", [True, False])
def test_a_run_with_pictures_is_not_exported_without_its_projector(images: bool, tmp_path: Path, commands: Any) -> None:
    """Of a Gemma 3 whose tower llama.cpp computes otherwise: only a run of text, or --mmproj none, gets the text."""
    base = Path(shutil.copytree(tiny_vision.cached("gemma3"), tmp_path / "gemma"))
    config = json.loads((base / "config.json").read_text())
    config["vision_config"]["hidden_act"] = "quick_gelu"
    (base / "config.json").write_text(json.dumps(config))
    work = _run_of(base, tmp_path / "run", images=images)
    answer = run(commands, tmp_path, work.path, "--quant", "f16")
    if not images:
        assert answer["exit"] == 0, answer
        return
    assert (answer["exit"], answer["error"]["code"]) == (2, "not_convertible")
    assert "quick_gelu" in answer["error"]["message"] and "--mmproj none" in answer["error"]["hint"]
    assert not work.merged.exists()


def test_a_pair_of_a_run(tmp_path: Path, commands: Any) -> None:
    """Merged and exported by one command, from an adapter of language model, tower and projector."""
    base = tiny_vision.cached("smolvlm")
    work = _run_of(base, tmp_path / "run")
    answer = run(commands, tmp_path, work.path, "--quant", "f16")
    assert answer["exit"] == 0, answer
    assert answer["data"]["mmproj"]["path"] == str(work.gguf / "mmproj-run-f16.gguf")
    assert work.ggufs == [work.gguf / "run-f16.gguf"] and len(work.exported) == 2
    assert read_gguf(work.gguf / "mmproj-run-f16.gguf").metadata["clip.projector_type"] == "idefics3"
    assert set(export_record.outputs(work.path)) == {"gguf/run-f16.gguf", "gguf/mmproj-run-f16.gguf"}
    name = "model.connector.modality_projection.proj.weight"
    shipped, before = (load_file(folder / "model.safetensors")[name] for folder in (work.merged, base))
    assert (shipped - before).abs().max() > 0.01
    alone = run(commands, tmp_path, work.path, "--lora")
    assert (alone["exit"], alone["error"]["code"]) == (2, "not_convertible")


@pytest.mark.parametrize("form", ["in one file", "of the class"])
def test_the_forms_of_a_processors_files(form: str, tmp_path: Path) -> None:
    """transformers 5 saves the image processor in processor_config.json alone, and a file may leave out colours, for
    which its class has values. The training reads both."""
    model = Path(shutil.copytree(tiny_vision.cached("gemma3"), tmp_path / "model"))
    own, whole = (json.loads((model / name).read_text()) for name in PROCESSOR_FILES)
    if form == "in one file":
        (model / PROCESSOR_FILES[0]).unlink()
        (model / PROCESSOR_FILES[1]).write_text(json.dumps(whole | {"image_processor": own}))
    else:
        del own["image_mean"], own["image_std"]
        (model / PROCESSOR_FILES[0]).write_text(json.dumps(own))
    convert_projector.require_projector(model, get_converter.find_or_fetch())
    assert projector_type(model, None, tmp_path / "mmproj.json", text_run=False) == "f16"
    made = read_gguf(picture_pairs.projector(model, tmp_path / "mmproj.gguf")).metadata
    assert made["clip.vision.image_mean"] == made["clip.vision.image_std"] == [0.5, 0.5, 0.5]


# --- What is refused, and what stays a single file ---


@pytest.mark.parametrize("fault", ["truncated", "a language model", "of another width"])
def test_files_that_do_not_belong_together(fault: str, exported: tuple[Path, Any], tmp_path: Path) -> None:
    answer = exported[1]["data"]
    text, projector = Path(answer["files"][0]["path"]), tmp_path / "mmproj.gguf"
    shutil.copy(answer["mmproj"]["path"], projector)
    if fault == "truncated":
        os.truncate(projector, projector.stat().st_size // 2)
    elif fault == "a language model":
        shutil.copy(text, projector)
    else:
        wide = tiny.cached("gemma", hidden=256)
        tools = get_converter.find_or_fetch()
        convert(
            ConvertRequest(wide, tmp_path, tmp_path / "convert.json", "wide", "f16", tools), progress=quiet, warn=quiet
        )
        text = tmp_path / "wide-f16.gguf"
    with pytest.raises(UsageError) as refused:
        convert_projector.require_pair(tiny_vision.cached("gemma3"), text, projector)
    assert refused.value.code == "not_convertible" and "together" in refused.value.message


@pytest.mark.parametrize("fault", ["architecture", "processor", "range"])
def test_what_can_be_refused_is_refused_before_anything_is_written(fault: str, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_vision.cached("gemma3"), tmp_path / "model")
    code = {"architecture": "not_convertible", "processor": "missing_file", "range": "bad_weights"}[fault]
    if fault == "architecture":
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"architectures": ["AriaForConditionalGeneration"]}))
    elif fault == "processor":
        (model / "preprocessor_config.json").unlink()
    else:
        weights = load_file(model / "model.safetensors")
        weights["vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight"][0, 0] = 1e6
        save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    asked = ProjectorRequest(
        model, tmp_path / "gguf", tmp_path / "mmproj.json", "tiny", "f16", get_converter.find_or_fetch()
    )
    with pytest.raises(UsageError) as refused:
        convert_projector.convert_projector(asked, tmp_path / "no-text.gguf", progress=quiet)
    assert refused.value.code == code
    assert not (tmp_path / "gguf").exists() and not (tmp_path / "mmproj.json").exists()


def test_which_models_get_a_projector(tmp_path: Path) -> None:
    none, gemma, qwen = tmp_path / "mmproj.json", tiny_vision.cached("gemma3"), tiny_vision.cached("qwen2-vl")
    assert projector_type(qwen, None, none, text_run=True) == "f16"
    assert projector_type(qwen, "q8_0", none, text_run=True) == "q8_0"
    assert projector_type(qwen, "none", none, text_run=True) is None
    assert projector_type(gemma, None, none, text_run=True) is None  # it is trained on text, as before
    assert projector_type(gemma, None, none, text_run=False) == "f16"
    with pytest.raises(UsageError) as caught:
        projector_type(tiny.cached("gemma"), "f16", none, text_run=True)
    assert (
        caught.value.hint == "omit --mmproj"
    )  # the model may be the merged one of a run, and then the run is exported
    text = tiny.cached("gemma")
    assert projector_type(text, None, none, text_run=False) is None
    with pytest.raises(UsageError) as refused:
        projector_type(text, "f16", none, text_run=False)
    assert refused.value.code == "bad_usage"


def test_an_earlier_choice_of_the_type_holds(tmp_path: Path) -> None:
    record = ExportRecord(step="mmproj", outputs={}, options={"name": "tiny", "outtype": "q8_0"})
    records.write(tmp_path / "mmproj.json", record)
    assert projector_type(tiny_vision.cached("gemma3"), None, tmp_path / "mmproj.json", text_run=True) == "q8_0"


def test_a_modelfile_of_one_file_is_as_before() -> None:
    assert modelfile("a.gguf", []).count("\nFROM ") == 1
    assert "\nFROM ./a.gguf\nFROM ./mmproj-a.gguf\n" in modelfile("a.gguf", [], "mmproj-a.gguf")
    assert "behind the words" in modelfile("a.gguf", [], "mmproj-a.gguf")
    assert "behind the words" not in modelfile("a.gguf", [])


def test_plan_knows_which_vision_models_become_pairs() -> None:
    for kind in tiny_vision.KINDS:
        assert read_model(tiny_vision.cached(kind)).convertible is True
