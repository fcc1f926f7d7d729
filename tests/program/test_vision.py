"""Vision models train: with the loss on the answers alone, with the pictures of the rows, and only in the parts that
were asked for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import tiny_vision
import training
from picture_runs import rows_of_colours, write_rows, write_run
from skill_train.machine.training_program import train_program
from skill_train.program.chat.labels import IGNORED, fed_digest
from skill_train.program.encode import Encoder
from skill_train.program.events import Refused
from skill_train.program.main import keep_pictures, keep_rows
from skill_train.program.model import lora_config
from skill_train.program.pictures.tokens import Pictures
from skill_train.program.tokenizer import load_tokenizer
from skill_train.program.trainer import trainer_arguments
from skill_train.recipe.fields import from_dict

pytestmark = pytest.mark.slow

pytest.importorskip("trl")


def _train(run: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(train_program()), str(run / "plan.json"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def _checks(run: Path) -> dict[str, Any]:
    record = json.loads((run / "train.json").read_text())
    assert record["verdict"] == "pass"
    return {check["name"]: check for check in record["checks"]}


@pytest.mark.parametrize("images", [False, True])
def test_the_tower_of_a_run_of_text_gets_no_adapter(images: bool) -> None:
    """Gemma 3 has it also where rows are text, with a q_proj and a v_proj of its own."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    asked = {"model": "m", "data": "d", "target_modules": ["q_proj", "v_proj"], "lora_r": 4}
    model = AutoModelForCausalLM.from_pretrained(tiny_vision.cached("gemma3"))
    adapted = get_peft_model(model, lora_config({**asdict(from_dict(asked)), "images": images}, model))
    made = [name for name, weight in adapted.named_parameters() if weight.requires_grad]
    text = model.config.text_config
    assert len(made) == text.num_hidden_layers * 2 * 2 and not [name for name in made if "vision" in name]


@pytest.mark.parametrize(
    ("target", "layers"),
    [("q_proj", 2), ("layers.1.self_attn.q_proj", 1), ("model.language_model.layers.0.self_attn.q_proj", 1)],
)
def test_a_target_is_found_by_any_end_of_its_name(target: str, layers: int) -> None:
    """Down to its whole name, and with no module of the tower."""
    from peft import get_peft_model
    from transformers import AutoModelForImageTextToText

    asked = {"model": "m", "data": "d", "target_modules": [target]}
    model = AutoModelForImageTextToText.from_pretrained(tiny_vision.cached("qwen2-vl"))
    adapted = get_peft_model(model, lora_config(asdict(from_dict(asked)), model))
    made = [name for name, module in adapted.named_modules() if hasattr(module, "lora_A")]
    assert len(made) == layers and all(name.endswith(target) for name in made)


@pytest.mark.parametrize("kind", tiny_vision.one_of_each("mistral3"))
def test_a_family_trains(kind: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", kind)
    done = _train(run)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = _checks(run)
    assert checks["pictures_are_read"]["figure"] > 1e-4
    assert checks["pictures_help"]["verdict"] == "pass"
    assert checks["accumulation"]["figure"] < 1e-4  # with rows of unlike pictures, one and two at a time
    from safetensors import safe_open

    with safe_open(str(run / "adapter" / "adapter_model.safetensors"), "pt") as file:
        names = list(file.keys())
    assert names and all("language_model" in name or "text_model" in name for name in names)
    rows = [json.loads(line) for line in (run / "held_out.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    assert all((run / row["images"][0]).is_file() for row in rows)


def test_the_tower_and_the_projector_train_by_choice(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "qwen2-vl", lora_parts=["projector"], placement={"gradient_checkpointing": True})
    done = _train(run)
    assert done.returncode == 0, done.stdout + done.stderr
    targets = json.loads((run / "adapter" / "adapter_config.json").read_text())["target_modules"]
    assert sorted(targets) == ["model.visual.merger.mlp.0", "model.visual.merger.mlp.2"]
    assert _checks(run)["loss_falls"]["verdict"] == "pass"


@pytest.mark.parametrize("kind", ["qwen3-vl", pytest.param("qwen2.5-vl", marks=pytest.mark.torture)])
def test_each_trained_token_of_a_step_weighs_the_same(kind: str, tmp_path: Path) -> None:
    """However the step is split. Their classes refuse to be told how many tokens all batches of a step have, and
    transformers (5.23) then counts none: a token of a short answer would weigh more."""
    rows = rows_of_colours(tmp_path / "data", 8)
    for number, row in enumerate(rows):
        row["messages"][1]["content"] *= 1 + number % 4
    data = training.write_data(tmp_path / "data", rows)
    steps = []
    for count in (4, 1):
        split = {"per_device_train_batch_size": count, "gradient_accumulation_steps": 4 // count}
        run = write_run(tmp_path / str(count), kind, data=data, placement=split, lora_dropout=0.0, max_steps=2)
        assert _train(run).returncode == 0
        steps.append([line[name] for line in training.metrics(run) for name in ("loss", "grad_norm")])
    assert steps[0] == pytest.approx(steps[1], rel=1e-5)


def test_a_long_row_of_text_among_rows_with_pictures_trains(tmp_path: Path) -> None:
    """The checks compute the logits of its end as the trainer does."""
    rows = rows_of_colours(tmp_path / "data", 4)
    for row in rows:
        row["images"] = []
        row["messages"][0]["content"] *= 30
    data = training.write_data(tmp_path / "data", [*rows_of_colours(tmp_path / "data", 1), *rows])
    run = write_run(tmp_path / "run", "gemma3", data=data, max_steps=1)
    done = _train(run)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", tiny_vision.one_of_each())
@pytest.mark.parametrize("loss_on", ["assistant", "all"])
def test_a_row_is_asked_with_all_its_pictures(kind: str, loss_on: str, tmp_path: Path) -> None:
    """The answer before and after the training is that to the last picture, also where something before it trains."""
    rows = rows_of_colours(tmp_path / "data", 4)
    for row in rows:
        row["messages"][0]["content"] = "<image> Which colour?"
        row["messages"] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi."}, *row["messages"]]
    data = training.write_data(tmp_path / "data", rows)
    run = write_run(tmp_path / "run", kind, data=data, max_steps=1, loss_on=loss_on)
    done = _train(run)
    assert done.returncode == 0, done.stdout + done.stderr
    prompt = json.loads((run / "train.json").read_text())["answer"]["prompt"]
    assert "Hi." in prompt and ("colour" in prompt) == (loss_on == "assistant")


@pytest.mark.parametrize(
    ("values", "unused"),
    [
        ({}, False),
        ({"lora_parts": ["language"]}, False),
        ({"lora_parts": ["language", "projector"]}, True),
        ({"lora_parts": ["tower"]}, True),
        ({"modules_to_save": ["merger"]}, True),
        ({"finetuning_type": "full"}, True),
    ],
    ids=str,
)
def test_a_batch_without_pictures_may_leave_weights_of_the_tower_unused(
    tmp_path: Path, values: dict[str, Any], unused: bool
) -> None:
    """DistributedDataParallel ends the training at the first one that it was not told of."""
    plan = json.loads((write_run(tmp_path / "run", "qwen2-vl", **values) / "plan.json").read_text())
    assert trainer_arguments(plan["recipe"], plan["placement"], tmp_path).ddp_find_unused_parameters is unused
    plan["recipe"]["images"] = None
    assert trainer_arguments(plan["recipe"], plan["placement"], tmp_path).ddp_find_unused_parameters is False


@pytest.mark.torture
@pytest.mark.real_python
def test_two_processes_train_the_projector_on_batches_with_and_without_pictures(tmp_path: Path) -> None:
    rows = rows_of_colours(tmp_path / "data")
    data = training.write_data(
        tmp_path / "data", [row | {"images": row["images"][: n % 2]} for n, row in enumerate(rows)]
    )
    split = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "num_processes": 2, "strategy": "ddp"}
    run = write_run(
        tmp_path / "run", "qwen2-vl", data=data, placement=split, lora_parts=["language", "projector"], max_steps=3
    )
    done = _launch(run)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert len(training.metrics(run)) == 3
    assert not list(run.rglob("*.part"))


def _launch(run: Path) -> subprocess.CompletedProcess[str]:
    """As `local` starts it."""
    plan = json.loads((run / "plan.json").read_text())
    command = [sys.executable, "-m", "accelerate.commands.launch", *plan["launch"]["arguments"], str(train_program())]
    environment = os.environ | plan["launch"]["environment"]
    return subprocess.run([*command, str(run / "plan.json")], env=environment, capture_output=True, text=True)


def test_a_whole_model_has_the_limits_of_its_training(tmp_path: Path) -> None:
    """In the file of its image processor, whose other settings stay."""
    limit = 16 * 28 * 28
    run = write_run(tmp_path / "run", "qwen2-vl", finetuning_type="full", max_steps=1, max_pixels=limit)
    done = _train(run)
    assert done.returncode == 0, done.stdout + done.stderr
    name = "preprocessor_config.json"
    own, saved = (json.loads((at / name).read_text()) for at in (tiny_vision.cached("qwen2-vl"), run / "merged"))
    assert own["max_pixels"] > limit and saved == own | {"max_pixels": limit}


def test_the_same_run_gives_the_same_adapter_after_a_stop(tmp_path: Path) -> None:
    whole = write_run(tmp_path / "whole", "gemma3", placement={"save_steps": 2})
    assert _train(whole).returncode == 0
    again = Path(shutil.copytree(whole, tmp_path / "again"))
    shutil.rmtree(again / "adapter")
    (again / "train.json").unlink()
    for name in ("checkpoint-6", "checkpoint-4"):
        (again / "checkpoints" / name / "complete.json").unlink(missing_ok=True)
    resumed = _train(again, "--resume")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    name = "adapter/adapter_model.safetensors"
    assert (whole / name).read_bytes() == (again / name).read_bytes()


# --- What is fed ---


def test_another_picture_under_the_same_name_is_other_data(tmp_path: Path) -> None:
    """The text of both rows is the same, so ids and labels are."""
    write_rows(tmp_path, 1)
    encode = _encoder("gemma3", tmp_path)
    before = encode(0, 1, ROW)
    Image.new("RGB", (60, 40), "black").save(tmp_path / "0.png")
    after = encode(0, 1, ROW)
    assert before["input_ids"] == after["input_ids"]
    assert fed_digest([before]) != fed_digest([after])


def test_a_picture_that_changes_during_the_training_ends_it(tmp_path: Path) -> None:
    """It is read again at each step. Its size, and so its tokens, are the same."""
    write_rows(tmp_path, 1)
    encode = _encoder("gemma3", tmp_path)
    row = encode(0, 1, ROW)
    assert encode.pictures is not None
    [before] = encode.pictures.read(row)
    Image.new("RGB", before.size, "black").save(tmp_path / "0.png")
    for feed in (encode.pictures.read, lambda row: keep_pictures([row], encode.pictures, tmp_path / "run")):
        (tmp_path / "run").mkdir(exist_ok=True)
        with pytest.raises(Refused, match=r"0\.png changed") as caught:
            feed(row)
        assert caught.value.error["code"] == "input_changed"
    assert [*(tmp_path / "run").rglob("*.png")] == []
    [after] = encode.pictures.read(encode(0, 1, ROW))
    assert after.getpixel((0, 0)) == (0, 0, 0)


@pytest.mark.parametrize(("rank", "kept"), [("0", ["images", "held_out.jsonl", "samples.jsonl"]), ("1", [])])
def test_one_process_keeps_the_rows_and_their_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str, kept: list[str]
) -> None:
    """Of two that write the same picture, one finds its unfinished file renamed by the other."""
    write_rows(tmp_path, 1)
    encode = _encoder("gemma3", tmp_path)
    data: Any = {"train": [encode(0, 1, ROW)], "held_out": [encode(1, 2, ROW)]}
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("RANK", rank)
    keep_rows(data, encode.pictures, tmp_path / "run")
    assert {path.name for path in (tmp_path / "run").iterdir()} == set(kept)


@cache
def _tokenizer(kind: str) -> Any:
    return load_tokenizer(str(tiny_vision.cached(kind)), None)


def _encoder(kind: str, folder: Path, **values: Any) -> Encoder:
    model: Any = {"model": str(tiny_vision.cached(kind)), "revision": None}
    tokenizer = _tokenizer(kind)
    feeding: Any = {
        "data": "rows.jsonl",
        "format": "messages",
        "columns": {"messages": "messages", "images": "images"},
        "loss_on": "assistant",
        "max_length": 2000,
    }
    return Encoder(feeding | values, tokenizer, Pictures(model, tokenizer, folder))


ROW = {
    "images": ["0.png"],
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Which colour?"},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "yes"},
    ],
}
ENDS = {"qwen2-vl": "<|im_end|>", "qwen3-vl": "<|im_end|>", "gemma3": "<end_of_turn>", "smolvlm": "<end_of_utterance>"}


@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize("loss_on", ["assistant", "all"])
def test_only_words_train_and_never_a_token_of_a_picture(kind: str, loss_on: str, tmp_path: Path) -> None:
    write_rows(tmp_path, 1)
    encode = _encoder(kind, tmp_path, loss_on=loss_on)
    row = encode(0, 1, ROW)
    assert encode.pictures is not None
    trained = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label != IGNORED]
    text = encode.tokenizer.decode(trained)
    if loss_on == "assistant":
        assert text.replace(" ", "") == f"red{ENDS[kind]}yes{ENDS[kind]}"
    else:
        assert "Which colour?" in text and encode.pictures.token_id not in trained
    assert row["input_ids"].count(encode.pictures.token_id) > 3


@pytest.mark.parametrize(("loss_on", "limit"), [("assistant", 20), ("all", 20), ("assistant", 4)])
def test_a_row_that_is_cut_inside_of_its_picture_is_refused(loss_on: str, limit: int, tmp_path: Path) -> None:
    """TRL raises in one case, and trains rows of zero labels in the other."""
    write_rows(tmp_path, 1)
    whole = len(_encoder("qwen2-vl", tmp_path)(0, 1, ROW)["input_ids"])
    with pytest.raises(Refused, match="inside of a picture") as caught:
        _encoder("qwen2-vl", tmp_path, max_length=limit, loss_on=loss_on)(0, 1, ROW)
    assert f"raise max_length to {whole}" in caught.value.error["hint"]


def test_a_template_that_leaves_pictures_out_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path, 1)
    encode = _encoder("qwen2-vl", tmp_path)
    template = encode.tokenizer.chat_template
    without = template.replace("<|vision_start|><|image_pad|><|vision_end|>", "")
    monkeypatch.setattr(encode.tokenizer, "chat_template", without)
    assert encode.tokenizer.chat_template != template
    with pytest.raises(Refused, match="does not write one mark for each picture"):
        encode(0, 1, ROW)
