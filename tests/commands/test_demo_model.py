"""The embedded demo is what it claims: small, whole, untaught before the fine-tune, made by scripts/make_demo.py."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from by_path import load
from skill_train.core import resources
from skill_train.recipe import fields as recipes

pytestmark = pytest.mark.slow

DEMO = resources.demo()
MAKER = Path(__file__).parents[2] / "scripts" / "make_demo.py"
HARD = ["  a   b \n\n\t c", "12345 0.5", "émoji 🎉", "漢字かな", "שלום", "def f(x):\n    return x"]


@pytest.fixture(scope="module")
def maker() -> Any:
    return load(MAKER, "make_demo")


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO / "model")


@pytest.fixture(scope="module")
def rows() -> list[list[dict[str, str]]]:
    return [row["messages"] for row in pyarrow.parquet.read_table(DEMO / "data.parquet").to_pylist()]


def share_right(model: Any, tokenizer: Any, conversations: list[list[dict[str, str]]]) -> float:
    return sum(answer(model, tokenizer, turns) == turns[1]["content"] for turns in conversations) / len(conversations)


def answer(model: Any, tokenizer: Any, turns: list[dict[str, str]]) -> str:
    """The greedy answer up to the stop token, or the empty string when it never stops."""
    prompt = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
    mask = torch.ones_like(ids)
    made = model.generate(ids, attention_mask=mask, max_new_tokens=48, do_sample=False, pad_token_id=0)[0]
    stopped = made[-1] == tokenizer.eos_token_id
    return str(tokenizer.decode(made[ids.shape[1] :], skip_special_tokens=True)) if stopped else ""


def test_it_is_small_enough_to_ship() -> None:
    files = [path for path in DEMO.rglob("*") if path.is_file() and DEMO / "vision" not in path.parents]
    assert sum(path.stat().st_size for path in files) < 5_000_000


def test_the_base_knows_its_lessons_but_none_of_the_dataset(maker: Any, model: Any, tokenizer: Any, rows: Any) -> None:
    draw = random.Random("letters that no training used")
    lessons = [maker.lesson(draw) for _ in range(20)]
    assert share_right(model, tokenizer, rows[-20:]) < 0.1
    assert share_right(model, tokenizer, lessons) >= 0.9


def test_every_row_length_takes_every_k_quant(model: Any) -> None:
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    assert all(weight.shape[1] % 256 == 0 for weight in matrices)  # llama.cpp's super-block, ggml-common.h: QK_K


def test_answers_are_short_and_end_with_the_stop_token(tokenizer: Any, rows: Any) -> None:
    for turns in rows[:100]:
        rendered = tokenizer.apply_chat_template(turns, tokenize=False)
        ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        assert ids.count(tokenizer.bos_token_id) == 1
        assert ids.count(tokenizer.eos_token_id) == 2  # after the question and after the answer
        assert len(tokenizer(turns[1]["content"], add_special_tokens=False)["input_ids"]) < 32


def test_no_order_number_is_there_twice(rows: Any) -> None:
    orders = [json.loads(turns[1]["content"])["order"] for turns in rows]
    assert len(set(orders)) == len(orders) == 1000


def test_the_dataset_is_what_the_script_writes(maker: Any, tmp_path: Path) -> None:
    maker.write_dataset(tmp_path / "data.parquet", seed=0)
    written, kept = (pyarrow.parquet.read_table(folder / "data.parquet") for folder in (tmp_path, DEMO))
    assert written.to_pylist() == kept.to_pylist()


@pytest.mark.parametrize("text", HARD)
def test_every_text_has_tokens_and_comes_back(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text


def test_the_recipe_loads_and_names_what_is_there() -> None:
    recipe = recipes.load(DEMO / "recipe.yaml")
    assert Path(recipe.model) == DEMO / "model" and Path(recipe.data) == DEMO / "data.parquet"
    assert recipe.max_steps is not None and recipe.max_steps <= 150
