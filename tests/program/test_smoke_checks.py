"""The smoke verdict goes red: each check with a training that is wrong in its way, on a model of two weights, and what
was saved on a tiny real one."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tiny
from skill_train.program.chat.labels import IGNORED
from skill_train.program.checks import Checks

# Of two and three tokens in turn, the first of which is the prompt.
ROWS = [{"input_ids": [1, 5, 3][:size], "labels": [IGNORED, 5, 3][:size]} for size in (2, 3, 2, 3)]


class Model(torch.nn.Module):
    """The loss of each token is `level`, and it knows 8 tokens."""

    def __init__(self, level: float) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(torch.tensor([level, 1.0]))
        self.device = torch.device("cpu")
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=8))


def by_all(model: Model, inputs: dict[str, Any], num_items_in_batch: Any) -> Any:
    """The mean over the trained tokens of all batches, as it should be."""
    return model.weights[0] * (inputs["labels"] != IGNORED).sum() / num_items_in_batch


def by_batch(model: Model, inputs: dict[str, Any], num_items_in_batch: Any) -> Any:
    """The fault of many trainers: the mean over the tokens of this batch."""
    return by_all(model, inputs, (inputs["labels"] != IGNORED).sum())


def checks(loss: Callable[..., Any] = by_all, *, level: float = 1.0, rows: list[Any] = ROWS, **trainer: Any) -> Checks:
    def collated(rows: list[Any]) -> dict[str, Any]:
        return {"labels": torch.tensor([(row["labels"] + [IGNORED])[:3] for row in rows])}

    def counted(batches: list[Any], _: Any) -> Any:
        return sum((batch["labels"] != IGNORED).sum() for batch in batches)

    double: Any = SimpleNamespace(
        model=Model(level),
        args=SimpleNamespace(bf16=False, fp16=False, per_device_train_batch_size=4),
        data_collator=collated,
        aux_loss_enabled=True,
        state=SimpleNamespace(log_history=[]),
        compute_loss_context_manager=contextlib.nullcontext,
        compute_loss=loss,
        _get_num_items_in_batch=counted,
        _metrics=defaultdict(dict),
        accelerator=SimpleNamespace(num_processes=1),
        is_fsdp_enabled=True,
    )
    vars(double).update(trainer)
    data: Any = {"order": list(range(len(rows))), "train": rows, "held_out": [], "figures": {}}
    recipe: Any = {"effective_batch_size": 4, "pure_bf16": False, "max_length": 8}
    return Checks(double, None, data, recipe)


def only(found: Checks) -> dict[str, Any]:
    (result,) = found.results
    return dict(result)


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (2.0, 1.9, "pass"),
        (2.0, 1.9996, "pass"),  # 0.02 % less
        (2.0, 1.9999, "warn"),  # 0.005 % less: as much as rounding
        (1e-5, 9e-6, "pass"),
        (2.0, 2.0, "warn"),
        (2.0, 2.09, "warn"),  # up to 5 % more
        (2.0, 2.2, "fail"),
        (2.0, float("nan"), "fail"),
        (float("nan"), 1.0, "fail"),
        (2.0, float("-inf"), "fail"),
    ],
)
def test_the_loss_falls(before: float, after: float, verdict: str) -> None:
    found = checks(level=after)
    found.loss_before = before
    found.check_loss()
    assert only(found)["verdict"] == verdict
    assert ("blind guessing" in only(found)["detail"]) == (before > 2.0794)  # log 8
    assert ("less than 0.01%" in only(found)["detail"]) == (after in (1.9999, 2.0))


@pytest.mark.parametrize(("trained", "verdict"), [([[0.0, 0.0]], "fail"), ([[0.0], [1e-9]], "warn"), ([], "warn")])
def test_an_adapter_that_was_never_trained_fails(trained: list[list[float]], verdict: str) -> None:
    """B is zero at first. A step at the learning rate 0 of a warm-up leaves it so; a small change leaves the loss."""
    found = checks(level=2.0)
    for number, values in enumerate(trained):
        layer = torch.nn.Module()
        layer.lora_B = torch.nn.ParameterDict({"default": torch.nn.Parameter(torch.tensor(values))})
        layer.lora_A = torch.nn.ParameterDict({"default": torch.nn.Parameter(torch.ones(1))})
        found.trainer.model.add_module(f"layer{number}", layer)
    found.loss_before = 2.0
    found.check_loss()
    assert only(found)["verdict"] == verdict
    assert ("every B of the adapter is zero" in only(found)["detail"]) == (verdict == "fail")


@pytest.mark.parametrize(("moved", "verdict"), [(0.0, "fail"), (1e-6, "warn")])
def test_a_model_of_which_no_weight_has_moved_fails(moved: float, verdict: str) -> None:
    """Where every weight is trained. Rounding to bf16 loses each step of a small learning rate."""
    found = checks(level=2.0)
    found.recipe["finetuning_type"], found.loss_before = "full", found.mean_loss(found.rows)
    found.started = found.first_values()
    with torch.no_grad():
        found.trainer.model.weights[1] += moved  # of which the loss knows nothing
    found.check_loss()
    assert only(found)["verdict"] == verdict
    assert ("% of the weights have moved" in only(found)["detail"]) == (verdict == "fail")


def test_a_base_worse_than_guessing_is_told() -> None:
    found = checks(level=2.0)
    found.loss_before = 2.1
    found.check_loss()
    assert "worse than blind guessing among 8 tokens" in only(found)["detail"]


@pytest.mark.parametrize(("loss", "verdict"), [(by_all, "pass"), (by_batch, "fail")])
def test_gradients_that_are_scaled_by_their_batch_are_found(loss: Callable[..., Any], verdict: str) -> None:
    found = checks(loss)
    found.check_accumulation()
    assert only(found)["verdict"] == verdict
    assert only(found)["figure"] == pytest.approx(0 if loss is by_all else 3, abs=1e-3)  # four rows: four times it
    assert found.trainer.model.weights.grad is None and found.trainer.model.training
    assert found.trainer.aux_loss_enabled  # as it was


def test_gradients_of_nothing_are_no_proof() -> None:
    """Two zeros are equal, also where no weight is trained at all."""
    found = checks(lambda *arguments, **items: 0 * by_all(*arguments, **items))
    found.check_accumulation()
    assert only(found)["verdict"] == "warn" and "change no weight" in only(found)["detail"]


def test_long_rows_are_cut_to_the_end_of_what_is_trained() -> None:
    """A batch of 4 rows of 8 tokens: 8 tokens of each row."""
    row: Any = {"input_ids": [*range(20)], "labels": [IGNORED] * 10 + [10, 11] + [IGNORED] * 8}
    short = checks(rows=[row] * 4).short_rows([row] * 4)
    assert short == [{"input_ids": [*range(4, 12)], "labels": [IGNORED] * 6 + [10, 11]}] * 4


def test_one_row_accumulates_nothing() -> None:
    found = checks(rows=ROWS[:1])
    found.check_accumulation()
    assert only(found)["verdict"] == "warn"


class Pictures:
    """A loss that falls by `seen` where the pictures are not grey."""

    def __init__(self, seen: float) -> None:
        self.seen, self.grey = seen, False

    @contextlib.contextmanager
    def all_grey(self) -> Iterator[None]:
        self.grey = True
        yield
        self.grey = False

    def loss(self, model: Model, inputs: dict[str, Any], num_items_in_batch: Any) -> Any:
        own: Any = by_all(model, inputs, num_items_in_batch)
        return own if self.grey else own * (1 - self.seen)


@pytest.mark.parametrize(
    ("seen", "read", "helps"),
    [(0.1, "pass", "pass"), (-0.1, "pass", "warn"), (0.0, "fail", "warn"), (1e-6, "fail", "pass")],
)
def test_pictures_that_change_nothing_are_found(seen: float, read: str, helps: str) -> None:
    pictures = Pictures(seen)
    found = checks(pictures.loss, rows=[ROWS[0], ROWS[1] | {"images": ["a.png"]}])
    found.pictures = pictures  # type: ignore[assignment]
    found.check_pictures_are_read()
    found.check_pictures_help()
    assert [result["verdict"] for result in found.results] == [read, helps]
    without = checks(pictures.loss)  # no row has one
    without.pictures = pictures  # type: ignore[assignment]
    without.check_pictures_are_read()
    without.check_pictures_help()
    assert without.results == []


def test_a_training_without_a_whole_checkpoint_fails(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "checkpoint-3").mkdir(parents=True)  # begun, and nothing in it
    found = checks()
    found.after_training(tmp_path, tmp_path / "adapter")
    assert (only(found)["name"], only(found)["verdict"], only(found)["figure"]) == ("checkpoint_saves", "fail", 0)


# --- What was saved, read back ---


@pytest.fixture(scope="module")
def base() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny.cached("qwen2"))


def saved(recipe: dict[str, Any], model: Any) -> Checks:
    plain = SimpleNamespace(unwrap_model=lambda wrapped: wrapped)
    found = checks(rows=[{"input_ids": [*range(20, 40)], "labels": [*range(20, 40)]}], model=model, accelerator=plain)
    found.trainer.optimizer = SimpleNamespace(state={})
    found.recipe.update(recipe)  # type: ignore[typeddict-item]
    return found


def change(file: Path, named: str, changed: Callable[[Any], Any]) -> None:
    """Changes one tensor of a file; takes it out where nothing is left."""
    from safetensors.torch import load_file, save_file

    weights = load_file(file)
    name = next(name for name in weights if named in name)
    weights |= {name: changed(weights[name])}
    save_file({name: weight for name, weight in weights.items() if weight is not None}, file, {"format": "pt"})


CHANGES = pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        (lambda weight: weight, "pass"),
        (lambda weight: weight * 1.05, "fail"),
        (lambda weight: weight * float("nan"), "fail"),
        (lambda weight: None, "fail"),
    ],
    ids=["as it was", "other values", "no numbers", "left out"],
)


@CHANGES
@pytest.mark.slow
def test_an_adapter_that_was_saved_otherwise_is_found(
    base: Any, tmp_path: Path, changed: Callable[[Any], Any], verdict: str
) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    adapter = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(base, adapter)
    model.save_pretrained(tmp_path / "adapter")
    change(tmp_path / "adapter" / "adapter_model.safetensors", "layers.1.mlp.down_proj.lora_B", changed)
    found = saved({"finetuning_type": "lora"}, model)
    found.check_reload(tmp_path / "adapter")
    assert (only(found)["name"], only(found)["verdict"]) == ("adapter_reloads", verdict)
    model.unload()


@CHANGES
@pytest.mark.slow
def test_a_model_that_was_saved_otherwise_is_found(
    base: Any, tmp_path: Path, changed: Callable[[Any], Any], verdict: str
) -> None:
    base.save_pretrained(tmp_path / "merged")
    change(tmp_path / "merged" / "model.safetensors", "layers.1.mlp.down_proj.weight", changed)
    found = saved({"finetuning_type": "full", "method": "sft"}, base)
    found.check_reload(tmp_path / "merged")
    assert (only(found)["name"], only(found)["verdict"]) == ("model_reloads", verdict)
