"""Tokens of pictures in `plan`: by the base package and Pillow alone, equal to those that `data` counts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import tiny_vision
import training
from machines import recorded_machine
from models import recorded_model
from one_command import answered
from skill_train.core.errors import UsageError
from skill_train.data.token_stats import PictureCounter, counter_of, token_range, with_pictures
from skill_train.facts import DatasetFacts, ModelFacts, PictureTokenFacts
from skill_train.model import config
from skill_train.model.tower import with_image_processor
from skill_train.plan.make import make_plan
from skill_train.plan.pictures import pictures_of
from skill_train.program.events import Refused
from skill_train.program.pictures.decode import PictureSize
from skill_train.program.pictures.processor import read_processor
from skill_train.recipe.fields import Recipe, from_dict
from skill_train.run.plan_record import Facts, Reason

QWEN = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12845056}
SMOLVLM = {"max_image_size": {"longest_edge": 64}, "size": {"longest_edge": 256}}


def _facts(document: dict[str, Any], files: dict[str, Any]) -> ModelFacts:
    return with_image_processor(config.read(document, source="here"), document, files)


def test_rows_are_counted() -> None:
    """By hand: 140 x 140 pixels are 25 tokens of Qwen2-VL and 280 x 140 are 50; two marks stand around each."""
    counter = PictureCounter(
        read_processor({"model_type": "qwen2_vl"}, {"preprocessor_config.json": QWEN}), engine=False
    )
    assert counter.facts() is None
    one, two = PictureSize(140, 140), PictureSize(280, 140)
    for row in ([one], [two], [one, two], []):
        counter.add(row)
    assert counter.facts() == PictureTokenFacts(
        least=25,
        most=50,
        mean=150 / 4,
        longest=75,
        mean_fed=(150 + 8) / 4,
        longest_fed=79,
        mean_squares=(25**2 + 50**2 + 25**2 + 50**2) / 4,
    )


COLUMNS = {"question": "question", "answer": "answer"}
UNSEEN = DatasetFacts("me/d", None, 900, (), "question_answer", COLUMNS, 1, "found", images=0, rows_read=9)


def _said_of(recipe: Recipe) -> tuple[dict[str, object], str]:
    model = _facts(json.loads((tiny_vision.cached("gemma3") / "config.json").read_text()), {})
    reasons: list[Reason] = []
    values = pictures_of(recipe, model, UNSEEN, reasons)
    return values, {reason.rule: reason.because for reason in reasons}["images"]


def test_columns_without_pictures_do_not_agree_with_images() -> None:
    """Later rows on the Hub may have pictures, in a column that is left out: their text alone would be trained."""
    with pytest.raises(UsageError, match="its columns name no pictures") as caught:
        _said_of(Recipe(model="m", data="me/d", format="question_answer", columns=COLUMNS, images=True))
    assert caught.value.code == "bad_recipe" and caught.value.exit_code == 2
    named = COLUMNS | {"images": "image"}
    assert _said_of(Recipe(model="m", data="me/d", format="question_answer", columns=named, images=True))[0]["images"]
    assert _said_of(Recipe(model="m", data="me/d", images=True))[0]["images"]


def test_what_becomes_of_later_pictures_is_told_as_it_is() -> None:
    """Only a recipe without columns makes the training refuse them."""
    values, because = _said_of(Recipe(model="m", data="me/d"))
    assert not values["images"] and because.endswith("the training refuses a later one")
    _, because = _said_of(Recipe(model="m", data="me/d", format="question_answer", columns=COLUMNS))
    assert because.endswith("one in a column that the recipe does not name is not read")


@pytest.mark.parametrize("images", [None, False])
def test_parts_that_see_are_not_trained_on_text(images: bool | None) -> None:
    """The adapter was on the language model, without a word."""
    with pytest.raises(UsageError, match="lora_parts names projector, tower") as caught:
        _said_of(Recipe(model="m", data="me/d", lora_parts=["language", "projector", "tower"], images=images))
    assert caught.value.code == "bad_recipe" and "images: true" in caught.value.hint
    assert not _said_of(Recipe(model="m", data="me/d", lora_parts=["language"]))[0]["images"]
    assert not _said_of(Recipe(model="m", data="me/d", lora_parts=["tower"], finetuning_type="full"))[0]["images"]


def test_each_tile_is_read_by_itself() -> None:
    """By hand: 100 x 50 pixels become 256 x 128, which are 4 x 2 tiles, and one small copy: 9 times 16 tokens."""
    files = {"preprocessor_config.json": SMOLVLM, "processor_config.json": {"image_seq_len": 16}}
    counter = PictureCounter(read_processor({"model_type": "smolvlm"}, files), engine=False)
    counter.add([PictureSize(100, 50)])
    facts = counter.facts()
    assert facts is not None and (facts.longest, facts.mean_squares) == (144, 9 * 16**2)


def test_the_length_of_rows_is_that_of_text_and_pictures() -> None:
    """By hand: 100 bytes a row are 20 to 50 tokens, one message adds 1 to 6, and a conversation up to 40."""
    pictures = PictureTokenFacts(60, 60, 60.0, 120, 62.0, 124, 3600.0)
    text = token_range(2, 200, 150, 100, 2, 1)
    assert (text.mean, text.longest) == ((21.0, 96.0), (31, 121))
    both = with_pictures(text, pictures)
    assert (both.mean, both.longest, both.mean_cut) == ((83.0, 158.0), (124, 245), (83.0, 100))
    assert not both.counted


@pytest.mark.parametrize(
    ("document", "files", "said"),
    [
        ({"model_type": "new_vl", "vision_config": {"depth": 2}}, {}, "family new_vl"),
        ({"model_type": "qwen2_vl", "vision_config": {"depth": 2}}, {}, "preprocessor_config.json is no such file"),
        (
            {"model_type": "gemma3", "vision_config": {"depth": 2}},
            {"preprocessor_config.json": {"do_pan_and_scan": True}},
            "do_pan_and_scan is True",
        ),
    ],
)
def test_an_unknown_processor_has_a_reason(document: dict[str, Any], files: dict[str, Any], said: str) -> None:
    facts = _facts(document, files)
    assert facts.image_processor is None and said in facts.unknown["image_processor"]
    assert counter_of(Recipe(), facts) is None


def test_a_text_model_has_neither() -> None:
    facts = _facts({"model_type": "qwen2"}, {})
    assert facts.image_processor is None and "image_processor" not in facts.unknown


def test_limits_of_the_recipe_count() -> None:
    facts = _facts({"model_type": "qwen2_vl", "vision_config": {"depth": 2}}, {"preprocessor_config.json": QWEN})
    counter = counter_of(Recipe(max_pixels=16 * 28 * 28), facts)
    assert counter is not None and counter.of(PictureSize(2000, 1500)).parts == 12
    with pytest.raises(Refused, match="no meaning"):
        gemma = {"model_type": "gemma3", "vision_config": {"depth": 2}}
        files: dict[str, Any] = {"preprocessor_config.json": {}}
        counter_of(Recipe(max_pixels=9), _facts(gemma, files))


ABSENT = ("torch", "transformers", "tokenizers", "numpy", "trl", "peft", "datasets", "accelerate")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["qwen2-vl", "gemma3", "smolvlm", "mistral3", pytest.param("pixtral", marks=pytest.mark.torture)]
)
def test_a_plan_without_the_libraries_counts_what_data_counts_with_them(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows, question = [], [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "red"}]
    for number, size in enumerate([(140, 140), (280, 140), (41, 77), (3, 200), (900, 700)]):
        Image.new("RGB", size, "red").save(f"{number}.png")
        rows.append({"images": [f"{number}.png", "0.png"][: 1 + number % 2], "messages": question})
    training.write_data(tmp_path, rows)
    words = ["--data", "rows.jsonl", "--model", str(tiny_vision.cached(kind)), "--max-length", "8192"]
    with monkeypatch.context() as absent:
        absent.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
        for name in ABSENT:
            absent.setitem(sys.modules, name, None)
        code, planned = answered("plan", *words, "--where", "local")
    assert code == 0, planned
    code, counted = answered("data", "rows.jsonl", *words[2:])
    assert code == 0, counted
    pictures, shown = planned["data"]["picture_tokens"], counted["data"]["pictures"]
    assert (pictures["longest"], round(pictures["mean"], 1)) == (shown["longest_tokens"], shown["mean_tokens"])
    tokens, exact = planned["data"]["tokens"], counted["data"]["tokens"]
    assert tokens["mean"][0] <= exact["mean"] <= tokens["mean"][1]
    assert tokens["longest"][0] <= exact["longest"] <= tokens["longest"][1]
    reason = next(reason for reason in planned["data"]["reasons"] if reason["rule"] == "picture tokens")
    assert f"at most {pictures['longest']}" in reason["because"]


@pytest.mark.slow
def test_pictures_longer_than_a_row_and_limits_that_a_family_lacks_are_told(tmp_path: Path) -> None:
    Image.new("RGB", (280, 140)).save("a.png")
    question = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "red"}]
    training.write_data(tmp_path, [{"images": ["a.png"], "messages": question}])
    words = ["--data", "rows.jsonl", "--where", "local", "--model"]
    _, answer = answered("plan", *words, str(tiny_vision.cached("qwen2-vl")), "--max-length", "51")
    warnings = {warning["code"]: warning["message"] for warning in answer["warnings"]}
    assert "the pictures of a row take 52 tokens, and max_length is 51" in warnings["picture_cut"]
    Path("recipe.yaml").write_text(f"model: {tiny_vision.cached('gemma3')}\ndata: rows.jsonl\nmax_pixels: 900\n")
    code, answer = answered("plan", "recipe.yaml", "--where", "local")
    assert (code, answer["error"]["code"]) == (2, "bad_recipe") and "no meaning" in answer["error"]["message"]


def test_the_projector_of_a_gemma_3_cannot_have_an_adapter() -> None:
    """It is one matrix and no layer, so the training refuses it, after the model is loaded."""
    with pytest.raises(UsageError) as caught:
        _said_of(Recipe(model="m", data="me/d", lora_parts=["language", "projector"], images=True))
    assert (caught.value.code, caught.value.got) == ("no_such_target", "projector")
    assert "modules_to_save: [multi_modal_projector]" in caught.value.hint
    assert _said_of(Recipe(model="m", data="me/d", lora_parts=["tower"], images=True))[0]["images"]


def test_an_adapter_on_the_tower_is_not_counted_as_one_on_the_language_model() -> None:
    """Its layers have other widths, so the number is unknown."""
    model, columns = recorded_model("qwen2.5-vl-7b"), {"prompt": "prompt", "completion": "completion"}
    rows = DatasetFacts("d", "f", 900, (), "prompt_completion", columns, 1, "found", images=900, most_images=1)
    # 28 layers, 3584 wide, 4 key heads of 128: q, k, v and o of rank 16
    counts = {"language": 28 * 16 * (7168 + 2 * (3584 + 512) + 7168), "tower": None, "projector": None}
    for part, count in counts.items():
        recipe = from_dict({"model": "m", "data": "d", "lora_parts": [part]})
        plan = make_plan(recipe, Facts(model, rows, recorded_machine("a100_80gb")))
        assert plan.estimates.adapter_parameters == count, part
