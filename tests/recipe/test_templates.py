"""The recipes in templates/ load, and plan as their first lines say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from machines import recorded_machine
from models import recorded_model
from planning import rows_of
from skill_train.hub import flavors
from skill_train.plan.make import make_plan
from skill_train.plan.placement import Choices
from skill_train.recipe import fields as recipe
from skill_train.run.plan_record import Facts

FOLDER = Path(__file__).resolve().parents[2] / "templates"
RECIPES = {path.name: path for path in sorted(FOLDER.glob("*.yaml"))}
# The recorded model of each, the machine it is written for, and where it trains there.
MADE_FOR = {
    "chat.yaml": ("qwen2.5-0.5b", "m2_pro_32gb", "local"),
    "domain_text.yaml": ("qwen2.5-0.5b", "rtx_4090", "local"),
    "fsdp_70b.yaml": ("llama-3.1-70b", "8x_a100_nvlink", "local"),
    "instruction.yaml": ("qwen2.5-1.5b", "rtx_4090", "local"),
    "pictures.yaml": ("qwen2.5-vl-7b", "m2_pro_32gb", "cloud"),
    "private_data.yaml": ("qwen2.5-0.5b", "m2_pro_32gb", "local"),
    "qlora_7b_one_gpu.yaml": ("qwen2.5-7b", "rtx_4090", "local"),
    "small_laptop.yaml": ("smollm2-135m", "m2_pro_16gb", "local"),
}


def test_every_recipe_is_tried() -> None:
    assert set(RECIPES) == set(MADE_FOR)


@pytest.mark.parametrize("name", MADE_FOR)
def test_it_plans_where_it_is_made_for(name: str) -> None:
    model, machine, where = MADE_FOR[name]
    made = _plan(recipe.load(RECIPES[name]), model, machine)
    assert (made["where"], made["blockers"]) == (where, [])


@pytest.mark.parametrize("name", MADE_FOR)
def test_its_first_lines_say_how_it_is_run(name: str) -> None:
    first = RECIPES[name].read_text(encoding="utf-8").split("model:")[0]
    assert first.startswith("# ")
    assert len(first.splitlines()) <= 3


def test_the_multi_gpu_recipe_is_divided_and_the_private_one_stays() -> None:
    divided = _plan(recipe.load(RECIPES["fsdp_70b.yaml"]), "llama-3.1-70b", "8x_a100_nvlink")
    assert (divided["placement"]["strategy"], divided["placement"]["num_processes"]) == ("fsdp", 8)
    private = recipe.load(RECIPES["private_data.yaml"])
    assert private.sensitive
    assert _plan(private, "qwen2.5-7b", "m2_pro_16gb")["where"] == "local"


def _plan(asked: recipe.Recipe, model: str, machine: str) -> dict[str, Any]:
    """Of 1,000 rows as the recipe wants them."""
    rows = rows_of(1000, asked.max_length, asked.max_length)
    data_format = asked.format or rows.format
    columns = {"text": "text"} if data_format == "text" else {"instruction": "instruction", "output": "output"}
    if data_format != "messages":
        rows = msgspec.structs.replace(rows, format=data_format, columns=columns)
    if asked.preprocess is not None:
        rows = msgspec.structs.replace(rows, images=1000, most_images=1, image_pixels=1000 * 640 * 480)
    return make_plan(
        asked,
        Facts(recorded_model(model), rows, recorded_machine(machine)),
        choices=Choices(),
        offered=flavors.shipped(),
    ).as_dict()
