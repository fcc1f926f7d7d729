"""The loss that is minimised: TRL's own, and plain cross entropy over the trained tokens, on rows in their order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny
import training
from skill_train.program.chat.labels import IGNORED
from skill_train.program.checks import Checks
from skill_train.program.main import load_data
from skill_train.program.model import log_probs_function, score_trained_tokens_only
from skill_train.program.split import feeding_order
from skill_train.program.start.inputs import load_plan
from skill_train.program.tokenizer import load_tokenizer
from skill_train.program.trainer import build_trainer
from skill_train.program.watch import Watch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["lora", "full"])
def two_trainers(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """Our scoring, and TRL's own, on the same model with the same adapter, or with every weight trained."""
    folder = tmp_path_factory.mktemp("loss")
    ours = _trainer(folder / "ours", request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skill_train.program.trainer.score_trained_tokens_only", lambda model, fused: None)
        theirs = _trainer(folder / "theirs", request.param)
    assert [_scored_by(trainer) for trainer in (ours, theirs)] == ["model.py", "utils.py"]
    return ours, theirs


@pytest.mark.parametrize(
    ("lot", "part"), [(16_000_000, 1_000_000), (640 * 3, 640 * 2)], ids=["at once", "three tokens, then two and one"]
)
def test_loss_and_gradients_are_those_of_trl(
    two_trainers: tuple[Any, Any], lot: int, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr("skill_train.program.model.LOGITS_AT_ONCE", lot)
    monkeypatch.setattr("skill_train.program.model.SOFTMAX_AT_ONCE", part)
    (loss, gradient), (their_loss, their_gradient) = (_loss_and_gradient(trainer) for trainer in two_trainers)
    torch.testing.assert_close(loss, their_loss, rtol=1e-5, atol=0)
    assert gradient.keys() == their_gradient.keys()
    assert sum(bool(g.abs().max() > 1e-4) for g in gradient.values()) == len(gradient)
    for name, value in gradient.items():
        torch.testing.assert_close(value, their_gradient[name], rtol=1e-5, atol=1e-7)


def test_loss_and_gradients_are_plain_cross_entropy(two_trainers: tuple[Any, Any]) -> None:
    """Full logits, shifted by one, and torch's own cross entropy over the trained tokens."""
    import torch

    trainer = two_trainers[0]
    loss, gradient = _loss_and_gradient(trainer)
    inputs = _batch(trainer)
    trainer.model.zero_grad()
    logits = trainer.model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    plain = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
    torch.testing.assert_close(loss, plain.detach(), rtol=1e-5, atol=0)
    plain.backward()
    for name, value in _gradients(trainer).items():
        torch.testing.assert_close(gradient[name], value, rtol=1e-4, atol=1e-7)


def test_a_head_in_bf16_gives_the_gradient_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probabilities are made in float32 and multiplied in bf16, which has 8 bits: a relative 1/256 each way."""
    import torch

    monkeypatch.setattr("skill_train.program.model.LOGITS_AT_ONCE", 500 * 5)
    monkeypatch.setattr("skill_train.program.model.SOFTMAX_AT_ONCE", 500 * 2)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(500, 64, generator=generator).bfloat16()
    hidden = (0.3 * torch.randn(12, 64, generator=generator)).bfloat16().requires_grad_()
    labels = torch.randint(0, 500, (12,), generator=generator)
    log_probs_function().apply(hidden, weight, labels).sum().backward()
    plain = hidden.detach().float().requires_grad_()
    torch.nn.functional.cross_entropy(plain @ weight.float().T, labels, reduction="sum").backward()
    assert hidden.grad is not None and plain.grad is not None
    assert torch.linalg.norm(hidden.grad.float() + plain.grad) < 2 / 256 * torch.linalg.norm(plain.grad)


@pytest.mark.parametrize("change", ["cap", "bias", "adapter on the head"])
def test_a_model_with_its_own_head_keeps_the_librarys_way(change: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(tiny.cached("gemma")))
    model.requires_grad_(False)
    if change == "cap":
        model.config.final_logit_softcapping = 30.0
    elif change == "bias":
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(640), requires_grad=False)
    else:
        from peft import LoraConfig, get_peft_model

        get_peft_model(model, LoraConfig(target_modules=["lm_head"]))
    score_trained_tokens_only(model, fused=False)
    assert "forward" not in vars(model)


def test_every_argument_is_ours_and_not_a_default(two_trainers: tuple[Any, Any]) -> None:
    """Unset, trl 1.16 takes bf16 and checkpointing everywhere, batch 8, learning rate 2e-5, and cuts at 1024 tokens."""
    arguments = two_trainers[0].args
    assert (arguments.bf16, arguments.fp16, arguments.gradient_checkpointing) == (False, False, False)
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == (4, 1)
    assert (arguments.learning_rate, arguments.max_length, arguments.packing) == (2e-4, None, False)
    assert (arguments.seed, arguments.report_to, arguments.push_to_hub) == (42, [], False)


def test_rows_are_fed_in_the_order_that_the_seed_decides(two_trainers: tuple[Any, Any]) -> None:
    """The library's own sampler would depend on the number of processes. In each step of 4 long rows come first."""
    trainer = two_trainers[0]
    data = trainer.data_of_the_test
    fed = [ids[mask.bool()].tolist() for b in trainer.get_train_dataloader() for ids, mask in _rows_of(b)]
    seeded = [data["train"][index]["input_ids"] for index in feeding_order(23, training.STEPS * 4, 42)]
    steps = [sorted(seeded[at : at + 4], key=len, reverse=True) for at in range(0, len(seeded), 4)]
    assert fed == [row for step in steps for row in step]


@pytest.mark.parametrize(
    ("moved", "verdict"),
    [
        (lambda labels: labels, "pass"),
        (lambda labels: labels.roll(1, dims=1), "fail"),
        (lambda labels: labels.roll(-1, dims=1), "fail"),
        (lambda labels: labels.clamp(min=0), "fail"),
        (lambda labels: labels.masked_fill(labels != labels.max(), IGNORED), "fail"),
    ],
    ids=["as they are", "one back", "shifted twice", "the prompt too", "one alone"],
)
def test_a_loss_of_other_labels_fails_the_smoke_test(two_trainers: tuple[Any, Any], moved: Any, verdict: str) -> None:
    """As a library could move them: the loss of the wrong tokens falls too."""
    for trainer in two_trainers:
        plan = load_plan(Path(trainer.args.output_dir).parent / "plan.json")
        checks = Checks(trainer, trainer.processing_class, trainer.data_of_the_test, plan["recipe"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer, "data_collator", _moving(trainer.data_collator, moved))
            checks.check_batches()
        trainer.model.eval()
        (batches,) = checks.results
        assert batches["verdict"] == verdict, batches
        assert ("cross-entropy" in batches["detail"]) is (verdict == "fail")


@pytest.mark.parametrize(("counts", "verdict"), [(True, "pass"), (False, "fail")])
def test_a_trainer_that_counts_the_tokens_of_no_step_fails_the_smoke_test(
    two_trainers: tuple[Any, Any], counts: bool, verdict: str
) -> None:
    trainer = two_trainers[0]
    plan = load_plan(Path(trainer.args.output_dir).parent / "plan.json")
    checks = Checks(trainer, trainer.processing_class, trainer.data_of_the_test, plan["recipe"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "model_accepts_loss_kwargs", counts)
        trainer.model.zero_grad()
        checks.check_accumulation()
    trainer.model.eval()
    assert [result["verdict"] for result in checks.results] == [verdict], checks.results


def _moving(collate: Any, moved: Any) -> Any:
    def collated(rows: Any) -> dict[str, Any]:
        batch = dict(collate(rows))
        return batch | {"labels": moved(batch["labels"])}

    return collated


def _trainer(run: Path, tuning: str) -> Any:
    """A trainer whose adapter already does something: B is zero at the start, and so would be A's gradient."""
    import torch

    training.write_run(run, finetuning_type=tuning, learning_rate=2e-4)
    plan = load_plan(run / "plan.json")
    recipe = plan["recipe"]
    tokenizer = load_tokenizer(recipe["model"], recipe["revision"])
    data = load_data(recipe, tokenizer)
    watch = Watch(run, data, recipe, None, keep=2)
    trainer = build_trainer(recipe, plan["placement"], run, tokenizer, data, watch)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in trainer.model.named_parameters():
            if "lora_" in name:
                weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))
    trainer.model.eval()
    trainer.data_of_the_test = data
    return trainer


def _batch(trainer: Any) -> dict[str, Any]:
    rows = [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in trainer.data_of_the_test["train"][:4]]
    assert len({len(row["input_ids"]) for row in rows}) > 1  # padding is in play
    return dict(trainer.data_collator(rows))


def _rows_of(batch: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    return zip(batch["input_ids"], batch["attention_mask"], strict=True)


def _loss_and_gradient(trainer: Any) -> tuple[Any, dict[str, Any]]:
    import torch

    inputs = _batch(trainer)
    items = (inputs["labels"][:, 1:] != IGNORED).sum()
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, inputs, num_items_in_batch=items)
    loss.backward()
    assert isinstance(loss, torch.Tensor)
    return loss.detach(), _gradients(trainer)


def _gradients(trainer: Any) -> dict[str, Any]:
    return {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}


def _scored_by(trainer: Any) -> str:
    """The file whose forward function the base model has: TRL puts in its own from trl/trainer/utils.py."""
    model = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
    return Path(model.forward.__func__.__code__.co_filename).name
