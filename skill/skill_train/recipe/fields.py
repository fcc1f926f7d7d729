"""The recipe: everything that must be the same on every machine. Its defaults are only here.

Keys are flat. Keys that TRL and PEFT also have, have the same names. If a field is None, the plan chooses it from the
model and the data, with a reason.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skill_train.core.errors import UsageError, nearest, quoted
from skill_train.core.secrets import holds_token, pasted
from skill_train.recipe.yaml_file import bad_recipe, loader, small_text

FORMATS = ("messages", "prompt_completion", "completion", "text", "instruction", "question_answer", "sharegpt")
METHODS = ("sft",)
_NOT_YET = dict.fromkeys(("dpo", "kto", "grpo", "reward"), "not trained by this version")
TUNINGS = ("lora", "full")
LOSS_ON = ("assistant", "completion", "all")
SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup")
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adafactor", "adagrad", "rmsprop", "sgd")  # of torch, transformers
OPTIMIZERS_OF_4_BIT = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit")  # of bitsandbytes

ALL_LINEAR = ["all-linear"]  # PEFT's word for every linear layer
# Fields that full fine-tuning ignores.
OF_LORA = ("lora_r", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save", "use_rslora", "use_dora")
OF_ADAMW = ("adam_beta1", "adam_beta2", "adam_epsilon")  # which the other optimizers do not read
LORA_PARTS = ("language", "projector", "tower")
PREPROCESS = ("engine", "model")
SCORES = ("exact", "regex", "json")
REPORT_TO = ("none", "trackio")
_HINTS = {  # by the first letters of an unknown key
    "system": "a system prompt is a column of the data with the text in each row, such as `system` in a .csv",
    "schema": "a record or plan is no recipe, which is recipe.yaml beside it; `local` and `submit` take a plan",
}

# Fields that are stored with the run and do not affect the trained model.
POLICY = ("sensitive", "hub_model_id", "score", "score_pattern", "report_to")
NOT_HASHED = (*POLICY, "num_train_epochs", "warmup_ratio")


def _say(default: Any, help_text: str, unit: str = "") -> Any:
    return field(default=default, metadata={"help": help_text, "unit": unit})


@dataclass(frozen=True)
class Recipe:
    """One fine-tune. references/recipe.md is generated from this class."""

    model: str = _say("", "base model: Hub id or folder")
    data: str = _say("", "dataset: .jsonl, .json, .csv, .tsv or .parquet file, folder saved by datasets, or Hub id")
    revision: str | None = _say(None, "revision of the model on the Hub; pinned to its commit when resolved")
    data_revision: str | None = _say(None, "revision of the dataset on the Hub")
    data_config: str | None = _say(None, "configuration of the dataset on the Hub")
    data_file: str | None = _say(
        None, "file of rows on the Hub: a table, or one with pictures beside it; found when left out"
    )
    split: str = _say("train", "part of the dataset, such as train or train[:500]")
    format: str | None = _say(None, f"one of {', '.join(FORMATS)}; found from the columns when left out")
    columns: dict[str, str] | None = _say(None, "what the format calls a column: what the dataset calls it")
    loss_on: str | None = _say(
        None, "assistant, completion or all; by default answers in conversations and completions after prompts"
    )
    method: str = _say("sft", f"one of {', '.join(METHODS)}")
    finetuning_type: str = _say(
        "lora", "lora (an adapter on a frozen base) or full (every weight; the fields of LoRA are not read)"
    )
    pure_bf16: bool = _say(False, "full: weights and AdamW's moments in bfloat16; half the memory, small updates lost")
    max_length: int = _say(1024, "longest row; longer ones are cut and counted", "tokens")
    max_steps: int | None = _say(None, "optimizer steps; from num_train_epochs when left out", "steps")
    num_train_epochs: float | None = _say(
        None, "passes over the data, when max_steps is left out; 3 below 500 rows, 2 below 1,000, then 1", "epochs"
    )
    effective_batch_size: int = _say(16, "rows a step: per device x accumulation x processes", "rows")
    learning_rate: float | None = _say(None, "peak learning rate; 2e-4 with LoRA and 2e-5 in full when left out")
    lr_scheduler_type: str = _say("linear", f"one of {', '.join(SCHEDULES)}")
    warmup_steps: int | None = _say(None, "steps of rising learning rate; from warmup_ratio when left out", "steps")
    warmup_ratio: float = _say(0.0, "share of steps that warm up, without warmup_steps; none in 10 steps or fewer")
    weight_decay: float = _say(0.0, "decay of the weights that train, without biases and norms")
    adam_beta1: float = _say(0.9, "AdamW's first moment")
    adam_beta2: float = _say(0.999, "AdamW's second moment")
    adam_epsilon: float = _say(1e-8, "AdamW's epsilon")
    max_grad_norm: float = _say(1.0, "gradients are clipped to this norm; 0 clips none")
    optim: str | None = _say(
        None,
        f"one of {', '.join(OPTIMIZERS)}, or with load_in_4bit {', '.join(OPTIMIZERS_OF_4_BIT)}; adamw_torch, and "
        "adamw_torch_fused in full, when left out",
    )
    lora_r: int = _say(16, "rank of the adapter")
    lora_alpha: float = _say(32.0, "scale of the adapter: lora_alpha / lora_r")
    lora_dropout: float = _say(0.05, "dropout before the adapter")
    target_modules: list[str] | None = _say(
        None, "modules that get an adapter, or all-linear; by architecture when left out"
    )
    modules_to_save: list[str] | None = _say(
        None, "modules trained whole beside the adapter, by the end of a name: norm is post_attention_layernorm too"
    )
    images: bool | None = _say(
        None, "rows have pictures, and the model reads them; found from the rows and the model when left out"
    )
    lora_parts: list[str] | None = _say(
        None, f"parts of a vision model that get an adapter, of {', '.join(LORA_PARTS)}; language when left out"
    )
    preprocess: str | None = _say(
        None, "engine (train on llama.cpp's pixels) or model (on its own); engine where it can be, when left out"
    )
    min_pixels: int | None = _say(None, "smaller pictures are enlarged to it; the model's own when left out", "pixels")
    max_pixels: int | None = _say(None, "larger pictures are reduced to it; the model's own when left out", "pixels")
    use_rslora: bool = _say(False, "scale by lora_alpha / sqrt(lora_r)")
    use_dora: bool = _say(False, "train magnitude and direction apart (DoRA)")
    load_in_4bit: bool = _say(False, "QLoRA: the base in 4-bit NF4; needs CUDA")
    held_out_fraction: float = _say(0.05, "share of the rows that never train, 200 at most; none below 20 rows")
    skip_untrained_rows: bool = _say(False, "leave out rows with no token to train on, instead of refusing them")
    seed: int = _say(42, "of the adapter's start, the held-out rows, the row order and dropout")
    sensitive: bool = _say(False, "true: data, adapter and model never leave this machine")
    hub_model_id: str | None = _say(None, "repository on the Hub for the result")
    report_to: str = _say(
        "none", "none, or trackio: also a copy on the machine that trains (pip install trackio), lost with a job"
    )
    score: str | None = _say(None, f"how `evaluate` scores answers: one of {', '.join(SCORES)}; exact when left out")
    score_pattern: str | None = _say(None, "regular expression for score: regex; its first group is compared")


_MANY = 1e9  # the limit of a count; a larger number is a typing error
_STEEPEST = 1e3  # the limit of a learning rate: sgd runs at 1 and more, nothing at a thousand
_SEEDS = 2**32  # numpy's own limit
_ANY = float("inf")
_OF_DATA = (".jsonl", ".csv", ".tsv", ".parquet")  # .json may be a recipe
# Errors of PyYAML 6 that are not its own classes: a date of month 13, an empty !!int, deeply nested lists, a null byte.
_OF_YAML = (ValueError, RecursionError, IndexError, KeyError, TypeError, AttributeError, OverflowError)
_WRITE = "write keys and values, one a line: references/recipe.md"

FIELDS: dict[str, dataclasses.Field[Any]] = {f.name: f for f in dataclasses.fields(Recipe)}


def load(path: Path) -> Recipe:
    return from_dict(read(path))


def read(path: Path) -> dict[str, object]:
    """The values in a YAML or JSON file, for `from_dict`. A relative `model` or `data` is looked for beside it first.

    Raises:
        UsageError: the file is missing or not YAML.
    """
    import yaml

    if path.suffix in _OF_DATA and path.is_file():
        data = quoted(path)
        raise bad_recipe(
            f"{path} is a dataset, not a recipe",
            expected="a YAML file with at least model and data",
            got=str(path),
            hint=f"the same command with --model MODEL --data {data} in place of {data}",
        )
    try:
        document = yaml.load(small_text(path), Loader=loader())  # noqa: S506 - a SafeLoader
    except (FileNotFoundError, IsADirectoryError):
        run = (
            f"skill-train local --resume --run-dir {quoted(path)}; for another run name {quoted(path / 'recipe.yaml')}"
        )
        raise UsageError(
            f"{path} is a folder, not a recipe" if path.is_dir() else f"the recipe {path} does not exist",
            code="missing_file",
            expected="a YAML file with at least model and data",
            got=str(path),
            hint=run if (path / "recipe.yaml").is_file() else "check the path, or give --model and --data instead",
        ) from None
    except (yaml.YAMLError, *_OF_YAML) as error:
        raise bad_recipe(f"{path} is not YAML: {' '.join(str(error).split())[:300]}", hint=_WRITE) from None
    if not isinstance(document, dict):
        raise bad_recipe(f"{path} is not a recipe", expected="model: …\ndata: …", hint=_WRITE)
    return {
        key: _from_recipe_folder(path, value) if key in ("model", "data") else value for key, value in document.items()
    }


def from_dict(values: Mapping[str, object]) -> Recipe:
    """A recipe from plain values, which are all checked.

    Raises:
        UsageError: a key is unknown (the message suggests the nearest one), a type is wrong, or a value out of range.
    """
    for key, value in values.items():
        if holds_token(value):
            raise pasted(f"the recipe's {key}", "a recipe, which is kept and shared, without a token")
        if isinstance(value, str) and "\0" in value:
            raise bad_recipe(f"{key} contains a null character", got=repr(value)[:200], hint="remove it from the text")
        if key not in FIELDS:
            raise bad_recipe(
                f"unknown key {key!r} in the recipe{nearest(str(key), FIELDS)}",
                expected="a key of references/recipe.md",
                got=str(key),
                hint=_HINTS.get(str(key).lower()[:6], "references/recipe.md lists the keys"),
            )
    recipe = Recipe(**{key: _typed(key, value) for key, value in values.items() if value is not None})
    _check_values(recipe)
    return recipe


def to_yaml(values: Mapping[str, object]) -> str:
    """The recipe as YAML, which `load` reads back."""
    import yaml

    plain = json.loads(json.dumps(values))  # safe_dump accepts no subclass of dict, such as those of `records`
    return str(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))


def recipe_hash(resolved: Mapping[str, object], fingerprints: dict[str, str | None]) -> str:
    """SHA-256 of a resolved recipe. Local paths are replaced by fingerprints of their content, so a moved file does not
    change it. `preprocess: model` is left out, because plans of earlier versions mean it but have no such field."""
    values = {key: value for key, value in resolved.items() if key not in NOT_HASHED}
    if values.get("preprocess") == "model":
        del values["preprocess"]
    for key in ("model", "data"):
        if fingerprints.get(key):
            values[key] = fingerprints[key]
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()


def _from_recipe_folder(recipe_file: Path, value: Any) -> Any:
    relative = isinstance(value, str) and not Path(value).is_absolute()
    try:
        return str(recipe_file.parent / value) if relative and (recipe_file.parent / value).exists() else value
    except (OSError, ValueError):  # a name that is too long, or with a null byte
        return value


def _typed(key: str, value: Any) -> Any:
    """The value in the type of the field. YAML reads 2e-4 as text, so a number in text is converted."""
    if key == "target_modules" and value == ALL_LINEAR[0]:
        return ALL_LINEAR
    type_name = str(FIELDS[key].type).removesuffix(" | None")  # the annotation in `Recipe`
    number = _number(value) if type_name in ("float", "int") else None
    too_large = number is not None and not abs(number) < 1e18  # also true for NaN
    if number is not None and not too_large and not isinstance(value, bool):
        if type_name == "float":
            return number
        if number == int(number):
            return int(number)
    kinds = {"str": str, "bool": bool, "list[str]": list, "dict[str, str]": dict}
    kind = kinds.get(type_name)
    if kind is not None and isinstance(value, kind) and all(isinstance(item, str) for item in _items(value)):
        return value
    raise bad_recipe(
        f"{key} has the wrong type",
        expected=f"{type_name}, finite and below 1e18" if too_large else type_name,
        got=f"{reprlib.repr(value)[:200]} ({type(value).__name__})",
        hint="references/recipe.md lists the type of each key",
    )


def _number(value: Any) -> float | None:
    """The value as a number; infinite if it is too large for a float; None if it is not a number."""
    try:
        return float(value) if isinstance(value, (int, float, str)) else None
    except OverflowError:
        return _ANY
    except ValueError:
        return None


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return value if isinstance(value, list) else []


def _check_values(recipe: Recipe) -> None:
    for key in ("model", "data"):
        if not getattr(recipe, key):
            raise bad_recipe(
                f"the recipe has no {key}",
                expected=FIELDS[key].metadata["help"],
                hint=f"give --{key}, or write {key} into the recipe",
            )
    _check_choices(recipe)
    _check_score(recipe)
    counts = ("max_length", "max_steps", "effective_batch_size", "lora_r", "min_pixels", "max_pixels")
    for key in (*counts, "num_train_epochs"):
        _at_least(recipe, key, 1 if key != "num_train_epochs" else 1e-6, below=_MANY)
    for key, most in (("learning_rate", _STEEPEST), ("lora_alpha", _MANY), ("adam_epsilon", _STEEPEST)):
        _at_least(recipe, key, 1e-12, below=most)
    for key, most in (("warmup_steps", _MANY), ("seed", _SEEDS), ("weight_decay", _ANY), ("max_grad_norm", _ANY)):
        _at_least(recipe, key, 0, below=most)
    for key in ("held_out_fraction", "lora_dropout", "warmup_ratio", "adam_beta1", "adam_beta2"):
        _at_least(recipe, key, 0, below=1)
    if recipe.sensitive and recipe.report_to != "none":
        raise bad_recipe(
            f"sensitive: true and report_to: {recipe.report_to} cannot be used together",
            expected="report_to: none, because the metrics would leave this machine",
            got=f"report_to {recipe.report_to}",
            hint="remove report_to from the recipe",
        )
    _check_tuning(recipe)
    _check_pictures(recipe)


def _check_pictures(recipe: Recipe) -> None:
    parts = recipe.lora_parts
    unknown = next((part for part in parts or () if part not in LORA_PARTS), None)
    if unknown is not None or parts == []:
        raise bad_recipe(
            "lora_parts is empty" if unknown is None else f"lora_parts: {unknown!r} is not known",
            expected=", ".join(LORA_PARTS),
            got=", ".join(parts or ()),
            hint="use one or more of these, or remove lora_parts to train the language model",
        )
    if recipe.min_pixels and recipe.max_pixels and recipe.min_pixels > recipe.max_pixels:
        raise bad_recipe(
            "min_pixels is larger than max_pixels",
            expected=f"at most {recipe.max_pixels}",
            got=str(recipe.min_pixels),
            hint="swap the two values",
        )


def _check_choices(recipe: Recipe) -> None:
    choices = {"format": FORMATS, "method": METHODS, "loss_on": LOSS_ON, "lr_scheduler_type": SCHEDULES}
    choices |= {"finetuning_type": TUNINGS, "score": SCORES, "report_to": REPORT_TO, "preprocess": PREPROCESS}
    of_4_bit = recipe.load_in_4bit or recipe.optim in OPTIMIZERS_OF_4_BIT
    choices["optim"] = (*OPTIMIZERS, *OPTIMIZERS_OF_4_BIT) if of_4_bit else OPTIMIZERS
    for key, allowed in choices.items():
        value = getattr(recipe, key)
        if value is not None and value not in allowed:
            raise bad_recipe(
                f"{key}: {value!r} is {_NOT_YET.get(value, 'not known')}{nearest(value, allowed)}",
                expected=", ".join(allowed),
                got=value,
                hint=f"use one of these, or remove {key}",
            )


def _check_tuning(recipe: Recipe) -> None:
    """Full fine-tuning changes every weight, so it excludes 4-bit weights; `pure_bf16` requires it."""
    full = recipe.finetuning_type == "full"
    if recipe.target_modules == [] and not full:  # the plan of full fine-tuning has an empty list
        raise bad_recipe(
            "target_modules is empty, so the adapter would change nothing",
            expected="names of linear layers, or all-linear",
            got="[]",
            hint="remove target_modules from the recipe for the usual ones of the model",
        )
    if full and recipe.load_in_4bit:
        raise bad_recipe(
            "finetuning_type: full and load_in_4bit: true cannot be used together",
            expected="full with weights that can be trained, or lora with load_in_4bit (QLoRA)",
            got="finetuning_type full, load_in_4bit true",
            hint="remove load_in_4bit from the recipe; pure_bf16: true halves the memory of full fine-tuning",
        )
    if recipe.pure_bf16 and not full:
        raise bad_recipe(
            "pure_bf16 applies to full fine-tuning only",
            expected="finetuning_type: full",
            got=f"finetuning_type {recipe.finetuning_type}",
            hint="remove pure_bf16 from the recipe; --dtype bfloat16 sets the precision of a LoRA run",
        )
    if recipe.optim in OPTIMIZERS_OF_4_BIT and not recipe.load_in_4bit:
        raise bad_recipe(
            f"optim: {recipe.optim} comes from bitsandbytes, which is used only with load_in_4bit",
            expected=f"load_in_4bit: true, or one of {', '.join(OPTIMIZERS)}",
            got=f"optim {recipe.optim}, load_in_4bit false",
            hint="remove optim from the recipe; the optimizer of an adapter needs little memory",
        )


def _check_score(recipe: Recipe) -> None:
    if (recipe.score == "regex") is not (recipe.score_pattern is not None):
        raise bad_recipe(
            "score: regex and score_pattern belong together",
            expected="both, or neither",
            got=f"score: {recipe.score}, score_pattern: {recipe.score_pattern}",
            hint="score: regex with score_pattern: …, or another score",
        )
    try:
        re.compile(recipe.score_pattern or "")
    except (re.error, OverflowError, RecursionError) as error:
        raise bad_recipe(f"score_pattern is not valid: {error}", hint="try it with Python's re.compile") from None


def _at_least(recipe: Recipe, key: str, least: float, below: float = _ANY) -> None:
    value = getattr(recipe, key)
    if value is not None and not least <= value < below:
        expected = f"at least {least:g}" + (f" and below {below:,.10g}" if below < _ANY else "")
        raise bad_recipe(
            f"{key} is out of range",
            expected=expected,
            got=str(value),
            hint=f"remove {key} to use {'the default' if FIELDS[key].default is None else FIELDS[key].default}",
        )
