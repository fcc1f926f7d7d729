"""A recipe says what it means, or is refused with the key, what was read and what was expected."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from skill_train.core.errors import UsageError
from skill_train.recipe import fields as recipes

LEAST: dict[str, Any] = {"model": "some/model", "data": "rows.jsonl"}
FINGERPRINTS: dict[str, str | None] = {"model": "a" * 64, "data": "b" * 64}


def test_yaml_reads_2e_4_as_text_and_the_recipe_as_a_number(tmp_path: Path) -> None:
    """YAML 1.1 wants a dot in a float, so its reader hands over the text "2e-4"."""
    import yaml

    text = "model: some/model\ndata: rows.jsonl\nlearning_rate: 2e-4\nmax_steps: 1e2\n"
    assert yaml.safe_load(text)["learning_rate"] == "2e-4"
    recipe = _load(tmp_path, text)
    assert recipe.learning_rate == 0.0002
    assert (recipe.max_steps, type(recipe.max_steps)) == (100, int)


def test_what_is_left_out_is_what_the_reference_promises(tmp_path: Path) -> None:
    recipe = _load(tmp_path, "model: some/model\ndata: rows.jsonl\n")
    assert (recipe.method, recipe.split, recipe.effective_batch_size, recipe.max_length) == ("sft", "train", 16, 1024)
    assert (recipe.learning_rate, recipe.lora_r, recipe.lora_alpha, recipe.seed) == (None, 16, 32, 42)
    chosen_by_the_plan = ("format", "columns", "loss_on", "max_steps", "warmup_steps", "target_modules")
    assert [getattr(recipe, key) for key in chosen_by_the_plan] == [None] * 6


def test_a_default_that_is_written_down_is_the_same_recipe() -> None:
    """32 and 32.0 are equal to Python and two texts to SHA-256."""
    import dataclasses

    left_out = dataclasses.asdict(recipes.from_dict(LEAST))
    said = dataclasses.asdict(recipes.from_dict({k: v for k, v in left_out.items() if v is not None}))
    assert recipes.recipe_hash(said, FINGERPRINTS) == recipes.recipe_hash(left_out, FINGERPRINTS)
    in_whole_numbers = recipes.from_dict(LEAST | {"lora_alpha": 32, "max_grad_norm": 1, "weight_decay": 0})
    assert recipes.recipe_hash(dataclasses.asdict(in_whole_numbers), FINGERPRINTS) == recipes.recipe_hash(
        left_out, FINGERPRINTS
    )


def test_null_in_the_file_is_left_out(tmp_path: Path) -> None:
    recipe = _load(tmp_path, "model: some/model\ndata: rows.jsonl\nseed: null\nmax_steps: null\n")
    assert (recipe.seed, recipe.max_steps) == (42, None)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"finetuning_type": "full", "load_in_4bit": True}, "cannot be used together"),
        ({"pure_bf16": True}, "applies to full fine-tuning only"),
        ({"finetuning_type": "ful"}, "did you mean 'full'"),
    ],
)
def test_what_full_fine_tuning_cannot_be(values: dict[str, Any], word: str) -> None:
    error = _refused(LEAST | values)
    assert (error.code, error.exit_code) == ("bad_recipe", 2) and word in str(error)
    assert recipes.from_dict(LEAST | {"finetuning_type": "full", "pure_bf16": True, "lora_r": 8}).pure_bf16


@pytest.mark.parametrize(
    ("key", "meant"),
    [("learning_rat", "learning_rate"), ("lora_rank", "lora_r"), ("max_seq_length", "max_length"), ("modle", "model")],
)
def test_an_unknown_key_is_refused_with_the_nearest(key: str, meant: str) -> None:
    error = _refused(LEAST | {key: 1})
    assert (error.code, error.exit_code, error.got) == ("bad_recipe", 2, key)
    assert f"{meant!r}" in error.message


@pytest.mark.parametrize("key", ["system", "system_prompt", "System_message"])
def test_a_system_prompt_is_no_key_but_a_column(key: str) -> None:
    error = _refused(LEAST | {key: "You are a clerk."})
    assert (error.code, error.got) == ("bad_recipe", key) and "a column of the data" in error.hint
    assert "lists the keys" in _refused(LEAST | {"zzzz": 1}).hint


def test_a_key_like_no_other_is_refused_without_a_guess() -> None:
    assert "did you mean" not in _refused(LEAST | {"zzzz": 1}).message


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("max_length", "long", "int"),
        ("max_length", 1.5, "int"),
        ("max_length", True, "int"),
        ("max_length", float("inf"), "int, finite and below 1e18"),
        ("max_length", 10**30, "int, finite and below 1e18"),
        ("num_train_epochs", "1e400", "float, finite and below 1e18"),
        ("learning_rate", "nan", "float, finite and below 1e18"),
        ("learning_rate", float("-inf"), "float, finite and below 1e18"),
        ("learning_rate", "fast", "float"),
        ("learning_rate", [1e-4], "float"),
        ("learning_rate", float("nan"), "float, finite and below 1e18"),
        ("learning_rate", "1e300", "float, finite and below 1e18"),
        ("use_dora", "yes", "bool"),
        ("use_dora", 1, "bool"),
        ("model", 7, "str"),
        ("target_modules", "q_proj", "list[str]"),
        ("target_modules", ["q_proj", 1], "list[str]"),
        ("columns", ["prompt"], "dict[str, str]"),
        ("columns", {"prompt": 1}, "dict[str, str]"),
    ],
)
def test_a_wrong_type_is_refused_with_both_sides(key: str, value: Any, expected: str) -> None:
    error = _refused(LEAST | {key: value})
    assert (error.code, error.expected) == ("bad_recipe", expected)
    assert key in error.message
    assert repr(value) in error.got


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_length", 0),
        ("max_steps", 0),
        ("effective_batch_size", -16),
        ("lora_r", 0),
        ("num_train_epochs", 0),
        ("learning_rate", 0),
        ("learning_rate", -2e-4),
        ("lora_alpha", 0),
        ("weight_decay", -0.1),
        ("warmup_steps", -1),
        ("seed", -1),
        ("lora_dropout", 1),
        ("lora_dropout", -0.1),
        ("held_out_fraction", 1.0),
        ("adam_beta2", 1),
        ("max_length", 10**9),
        ("max_steps", 10**9),
        ("effective_batch_size", 10**9),
        ("num_train_epochs", 1e9),
        ("lora_r", 10**9),
        ("warmup_steps", 10**9),
        ("seed", 2**32),  # numpy takes no more
        ("learning_rate", 1e17),
        ("lora_alpha", 1e9),
        ("adam_epsilon", 1e3),
    ],
)
def test_a_value_out_of_range_is_refused(key: str, value: Any) -> None:
    error = _refused(LEAST | {key: value})
    assert error.code == "bad_recipe"
    assert key in error.message


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("method", "dpo", "sft"),
        ("method", "grpo", "not trained by this version"),
        ("lr_scheduler_type", "cosin", "did you mean 'cosine'?"),
        ("format", "message", "did you mean 'messages'?"),
        ("loss_on", "answers", "assistant, completion, all"),
        ("optim", "adamw_torhc", "did you mean 'adamw_torch'?"),
        ("optim", "galore_adamw", "adamw_torch_fused, adafactor"),  # transformers knows it; its package is not here
        ("optim", "paged_adamw_8bit", "load_in_4bit: true"),
    ],
)
def test_an_unknown_choice_is_refused_with_the_known_ones(key: str, value: str, hint: str) -> None:
    error = _refused(LEAST | {key: value})
    assert error.code == "bad_recipe"
    assert hint in error.message + error.expected


@pytest.mark.parametrize("key", ["model", "data"])
def test_a_recipe_without_model_or_data_is_refused(key: str) -> None:
    error = _refused({k: v for k, v in LEAST.items() if k != key})
    assert (error.code, error.exit_code) == ("bad_recipe", 2)
    assert key in error.message


@pytest.mark.parametrize("key", ["model", "data", "revision", "hub_model_id"])
def test_a_null_character_is_refused(tmp_path: Path, key: str) -> None:
    """YAML writes it as \\0, and no path may contain it."""
    with pytest.raises(UsageError) as refused:
        _load(tmp_path, "".join(f"{name}: {json.dumps(value)}\n" for name, value in (LEAST | {key: "a\0b"}).items()))
    assert (refused.value.code, refused.value.got) == ("bad_recipe", "'a\\x00b'") and key in refused.value.message


@pytest.mark.parametrize("text", ["[a list]", "just words", "", "model: [unclosed"])
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        _load(tmp_path, text)
    assert caught.value.code == "bad_recipe"
    assert "recipe.yaml" in caught.value.message
    assert "\n" not in caught.value.message


def test_a_recipe_in_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_bytes("model: caf\xe9\n".encode("latin-1"))
    with pytest.raises(UsageError) as caught:
        recipes.load(tmp_path / "recipe.yaml")
    assert caught.value.code == "bad_recipe"


def test_a_missing_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        recipes.load(tmp_path / "none.yaml")
    assert (caught.value.code, caught.value.got) == ("missing_file", str(tmp_path / "none.yaml"))


def test_a_folder_of_a_run_is_not_called_missing(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("model: some/model\ndata: rows.jsonl\n")
    with pytest.raises(UsageError, match="is a folder, not a recipe") as caught:
        recipes.load(tmp_path)
    continued = f"skill-train local --resume --run-dir {tmp_path}; "
    assert caught.value.hint.startswith(continued) and str(tmp_path / "recipe.yaml") in caught.value.hint


def test_relative_paths_are_looked_for_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    (home / "base").mkdir(parents=True)
    elsewhere.mkdir()
    (home / "rows.jsonl").write_text("{}\n")
    monkeypatch.chdir(elsewhere)
    recipe = _load(home, "model: base\ndata: rows.jsonl\n")
    assert (Path(recipe.model), Path(recipe.data)) == (home / "base", home / "rows.jsonl")


def test_what_is_not_beside_the_file_stays_as_it_is_written(tmp_path: Path) -> None:
    recipe = _load(tmp_path, "model: owner/name\ndata: owner/rows\n")
    assert (recipe.model, recipe.data) == ("owner/name", "owner/rows")


def test_a_recipe_written_and_read_is_the_same(tmp_path: Path) -> None:
    import dataclasses

    values = LEAST | {
        "columns": {"prompt": "Frage", "completion": "Antwört"},
        "format": "prompt_completion",
        "learning_rate": 3e-5,
        "target_modules": ["q_proj", "v_proj"],
        "sensitive": True,
        "max_steps": 7,
    }
    first = recipes.from_dict(values)
    assert _load(tmp_path, recipes.to_yaml(dataclasses.asdict(first))) == first


def test_the_hash_is_sha256_of_the_sorted_values() -> None:
    """Made once by hand: printf '%s' '{"data":"D","lora_r":16,"model":"M"}' | sha256sum."""
    known = "aab4cc3cca4499e0618f10f7ee9f8188dce3779af7c0a1670d66911d4f39ef7a"
    assert recipes.recipe_hash({"model": "m", "lora_r": 16, "data": "d"}, {"model": "M", "data": "D"}) == known


def test_a_moved_file_is_the_same_recipe() -> None:
    here = LEAST | {"data": "/here/rows.jsonl", "model": "/here/base"}
    there = LEAST | {"data": "/there/renamed.jsonl", "model": "/there/base"}
    assert recipes.recipe_hash(here, FINGERPRINTS) == recipes.recipe_hash(there, FINGERPRINTS)


def test_other_rows_or_another_model_are_another_recipe() -> None:
    same = recipes.recipe_hash(LEAST, FINGERPRINTS)
    assert recipes.recipe_hash(LEAST, FINGERPRINTS | {"data": "c" * 64}) != same
    assert recipes.recipe_hash(LEAST, FINGERPRINTS | {"model": "c" * 64}) != same


def test_a_model_on_the_hub_is_hashed_by_its_name_and_revision() -> None:
    nothing: dict[str, str | None] = {"model": None, "data": None}
    first = recipes.recipe_hash(LEAST | {"revision": "1"}, nothing)
    assert recipes.recipe_hash(LEAST | {"revision": "2"}, nothing) != first
    assert recipes.recipe_hash(LEAST | {"revision": "1", "model": "other/model"}, nothing) != first


@pytest.mark.parametrize(("key", "value"), [("learning_rate", 1e-4), ("seed", 1), ("lora_dropout", 0.0)])
def test_another_hyperparameter_is_another_recipe(key: str, value: Any) -> None:
    values = LEAST | {"learning_rate": 2e-4, "seed": 42, "lora_dropout": 0.05}
    assert recipes.recipe_hash(values | {key: value}, FINGERPRINTS) != recipes.recipe_hash(values, FINGERPRINTS)


@pytest.mark.parametrize(("key", "value"), [("sensitive", True), ("hub_model_id", "me/tuned"), ("score", "json")])
def test_policy_does_not_change_the_recipe(key: str, value: Any) -> None:
    same = recipes.recipe_hash(LEAST, FINGERPRINTS)
    assert recipes.recipe_hash(LEAST | {key: value}, FINGERPRINTS) == same


@pytest.mark.parametrize(
    "values",
    [
        {"score": "regex"},
        {"score_pattern": "(.+)"},
        {"score": "json", "score_pattern": "x"},
        {"score": "bleu"},
        {"score": "regex", "score_pattern": "(open"},
        {"score": "regex", "score_pattern": "a{99999999999999999999}"},
        {"score": "regex", "score_pattern": "(" * 20_000},
    ],
)
def test_a_score_that_cannot_be_made_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        recipes.from_dict(LEAST | values)
    assert caught.value.code == "bad_recipe"


def _load(folder: Path, text: str) -> recipes.Recipe:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return recipes.load(path)


def _refused(values: dict[str, Any]) -> UsageError:
    with pytest.raises(UsageError) as caught:
        recipes.from_dict(values)
    return caught.value


@pytest.mark.parametrize(
    "template", sorted((Path(__file__).parents[2] / "templates").glob("*.yaml")), ids=lambda p: p.name
)
def test_templates_load_as_they_are(template: Path) -> None:
    assert recipes.load(template).model


def test_metrics_of_sensitive_data_go_nowhere() -> None:
    with pytest.raises(UsageError, match="report_to: trackio cannot be used together"):
        recipes.from_dict({"model": "m", "data": "d.jsonl", "sensitive": True, "report_to": "trackio"})
    assert recipes.from_dict({"model": "m", "data": "d.jsonl", "report_to": "trackio"}).report_to == "trackio"


def test_a_dataset_in_the_place_of_a_recipe_is_told_apart(tmp_path: Path) -> None:
    rows = tmp_path / "my rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    with pytest.raises(UsageError) as caught:
        recipes.load(rows)
    assert caught.value.code == "bad_recipe" and "is a dataset" in caught.value.message
    assert f"--data '{rows}'" in caught.value.hint


@pytest.mark.parametrize(("text", "number"), [("010", 8), ("-017", -15), ("1:30", 90), ("0x10", 16), ("0b11", 3)])
def test_a_number_that_yaml_reads_otherwise_than_people_is_refused(tmp_path: Path, text: str, number: int) -> None:
    with pytest.raises(UsageError) as caught:
        _load(tmp_path, f"model: a\ndata: b\nmax_steps: {text}\n")
    assert caught.value.code == "bad_recipe" and f"{text} is {number} in YAML" in caught.value.message


def test_so_is_a_number_of_minutes_with_a_point(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"1:30\.5 is 90\.5 in YAML"):
        _load(tmp_path, "model: a\ndata: b\nnum_train_epochs: 1:30.5\n")
    for text, number in (("1_0.5", 10.5), (".5", 0.5), ("1.e-4", 1e-4), ("'1e-4'", 1e-4), ("1e-4", 1e-4)):
        assert _load(tmp_path, f"model: a\ndata: b\nnum_train_epochs: {text}\n").num_train_epochs == number


@pytest.mark.parametrize(("text", "number"), [("10", 10), ("1_000", 1000), ("0", 0), ("+7", 7), ("'010'", 10)])
def test_other_whole_numbers_are_read(tmp_path: Path, text: str, number: int) -> None:
    assert _load(tmp_path, f"model: a\ndata: b\nseed: {text}\n").seed == number


def test_no_target_at_all_is_refused_but_of_full_fine_tuning() -> None:
    """The recipe.yaml of a full run has the empty list."""
    with pytest.raises(UsageError, match="target_modules is empty"):
        recipes.from_dict(LEAST | {"target_modules": []})
    assert recipes.from_dict(LEAST | {"target_modules": [], "finetuning_type": "full"}).target_modules == []


@pytest.mark.parametrize("text", ["model: a\ndata: b\nmodel: c\n", "model: a\ndata: b\ncolumns: {text: x, text: y}\n"])
def test_a_key_that_stands_twice_is_refused(tmp_path: Path, text: str) -> None:
    """YAML's readers take the last of them, and say nothing."""
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(UsageError, match="stands twice") as caught:
        recipes.load(tmp_path / "recipe.yaml")
    assert caught.value.code == "bad_recipe" and "line 3" in caught.value.message


@pytest.mark.slow
def test_many_keys_take_no_time(tmp_path: Path) -> None:
    """100,000 of them fit into the largest recipe; compared each with each, they would take hours."""
    (tmp_path / "recipe.yaml").write_text("".join(f"k{n}: 1\n" for n in range(60_000)))
    started = time.process_time()
    with pytest.raises(UsageError):
        recipes.load(tmp_path / "recipe.yaml")
    assert time.process_time() - started < 30
