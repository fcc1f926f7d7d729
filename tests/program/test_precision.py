"""The types of what trains: as the plan computes, on a base that TRL takes for a 4-bit one, and after a restart.

TRL 1.16 makes the adapter of a 4-bit base bfloat16 (`is_loaded_in_4bit` or `is_loaded_in_8bit` of the model), whatever
is computed in; torch's gradient scaler has no kernel for that on CUDA, and with float32 nothing casts its inputs.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import tiny
import training
from skill_train.program.events import Refused
from skill_train.program.folders.checkpoints import numbered
from skill_train.program.main import load_data, main
from skill_train.program.model import load_model, require_float32
from skill_train.program.plan import without_launchers
from skill_train.program.start.inputs import load_plan
from skill_train.program.tokenizer import load_tokenizer
from skill_train.program.trainer import build_trainer
from skill_train.program.watch import Watch

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("short_answers")]

WHOLE = {"modules_to_save": ["lm_head", "embed_tokens"]}


@pytest.mark.parametrize(("dtype", "adapter"), [("float16", "F32"), ("float32", "F32"), ("bfloat16", "BF16")])
def test_the_adapter_of_a_quantized_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, adapter: str
) -> None:
    """bfloat16 stays what TRL makes of it; the optimizer's moments have the type of their weights."""
    _pretend_quantized(monkeypatch)
    run = training.write_run(tmp_path / "run", placement={"dtype": dtype}, max_steps=4)
    assert main([str(run / "plan.json")]) == 0
    record = json.loads((run / "train.json").read_text())
    assert _types(run / "adapter") == {adapter}
    assert _moments(run) == {{"F32": "torch.float32", "BF16": "torch.bfloat16"}[adapter]}
    assert record["saved_dtype"] == {"F32": "float32", "BF16": "bfloat16"}[adapter]
    assert record["verdict"] == "pass", record["checks"]


# What a user's shell may hold from another launch, whatever started it.
OF_ANOTHER_LAUNCH = {
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "7",
    "FSDP_VERSION": "2",
    "RANK": "16",
    "LOCAL_RANK": "3",
    "WORLD_SIZE": "32",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "OMPI_COMM_WORLD_SIZE": "2",
}


def test_variables_of_another_launch_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [training.write_run(tmp_path / name / "run", max_steps=2) for name in ("as it is", "with variables")]
    assert main([str(runs[0] / "plan.json")]) == 0
    for name, value in OF_ANOTHER_LAUNCH.items():
        monkeypatch.setenv(name, value)
    assert main([str(runs[1] / "plan.json")]) == 0
    records = [json.loads((run / "environment.json").read_text()) for run in runs]
    assert records[1]["processes"] == {"count": 1, "distributed": "NO", "mixed_precision": "no"}
    plain, other = ((run / "adapter" / "adapter_model.safetensors").read_bytes() for run in runs)
    assert other == plain


def test_local_gives_them_to_no_launcher() -> None:
    """Neither does it take more: such as choose the GPUs, or the place of the Hub's files."""
    kept = {"CUDA_VISIBLE_DEVICES": "1", "HF_HOME": "/hf", "LOCAL_FILES": "a", "RANKING": "b", "NCCL_DEBUG": "INFO"}
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "PET_NNODES": "2", "ROLE_WORLD_SIZE": "2"}
    assert without_launchers(OF_ANOTHER_LAUNCH | torchrun | kept) == kept


def test_another_precision_than_the_plans_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of one process of torchrun, whose other variables must stay."""
    run = training.write_run(tmp_path / "run", max_steps=2)
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in (torchrun | {"ACCELERATE_MIXED_PRECISION": "bf16"}).items():
        monkeypatch.setenv(name, value)
    assert main([str(run / "plan.json")]) == 2
    error = json.loads((run / "train.failed.json").read_text())["error"]
    assert (error["code"], error["expected"], error["got"]) == ("bad_plan", "mixed precision: no", "bf16")


@pytest.mark.parametrize("dtype", ["float16", pytest.param("float32", marks=pytest.mark.torture), "bfloat16"])
def test_a_restart_goes_on_in_the_same_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """PEFT 0.21 makes an adapter that it reads float32."""
    _pretend_quantized(monkeypatch)
    run = training.write_run(tmp_path / "run", placement={"dtype": dtype}, max_steps=4)
    assert main([str(run / "plan.json")]) == 0
    straight, types = (run / "adapter" / "adapter_model.safetensors").read_bytes(), _types(run / "adapter")
    shutil.rmtree(run / "adapter")
    shutil.rmtree(run / "checkpoints" / "checkpoint-4")
    (run / "train.json").unlink()
    assert main([str(run / "plan.json"), "--resume"]) == 0
    assert _types(run / "adapter") == types
    assert (run / "adapter" / "adapter_model.safetensors").read_bytes() == straight


@pytest.mark.parametrize("values", [{}, WHOLE, {"use_dora": True}], ids=["lora", "whole modules", "dora"])
@pytest.mark.parametrize("quantized", [False, True])
def test_with_float16_all_that_trains_is_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], quantized: bool
) -> None:
    """As the gradient scaler of a GPU needs it: PEFT leaves a module that trains whole in the type of the base."""
    if quantized:
        _pretend_quantized(monkeypatch)
    trainer = _built(tmp_path, "float16", **values)
    trained = {name: weight for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    assert any("lora_A" in name for name in trained)
    assert any("modules_to_save" in name for name in trained) == (values == WHOLE)
    assert {str(weight.dtype) for weight in trained.values()} == {"torch.float32"}
    frozen = {str(weight.dtype) for weight in trainer.model.parameters() if not weight.requires_grad}
    assert frozen == {"torch.float16"}


@pytest.mark.parametrize(
    "modules",
    [
        pytest.param(["lm_head"], marks=pytest.mark.torture),
        ["embed_tokens"],
        ["embed_tokens", "lm_head"],
    ],
    ids="-".join,
)
def test_a_module_that_trains_whole_on_a_float16_base(tmp_path: Path, modules: list[str]) -> None:
    """float16 weights that train end in NaN at the second step; read back, none is rounded to the type of the base."""
    run = training.write_run(
        tmp_path / "run",
        base=tiny.cached("gemma", tied=False),
        placement={"dtype": "float16"},
        modules_to_save=modules,
        learning_rate=2e-3,
        max_steps=4,
    )
    assert main([str(run / "plan.json")]) == 0
    record = json.loads((run / "train.json").read_text())
    assert record["verdict"] == "pass", record["checks"]
    assert {check["name"]: check["figure"] for check in record["checks"]}["adapter_reloads"] == 0.0
    assert _types(run / "adapter") == {"F32"}


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        ("bfloat16", {}, {"torch.float32"}),
        ("bfloat16", WHOLE, {"torch.float32", "torch.bfloat16"}),
        ("float32", WHOLE, {"torch.float32"}),
        ("bfloat16", {"finetuning_type": "full"}, {"torch.float32"}),
        ("bfloat16", {"finetuning_type": "full", "pure_bf16": True}, {"torch.bfloat16"}),
    ],
)
def test_other_precisions_are_what_peft_and_the_recipe_make_them(
    tmp_path: Path, dtype: str, values: dict[str, Any], expected: set[str]
) -> None:
    trainer = _built(tmp_path, dtype, **values)
    assert {str(weight.dtype) for weight in trainer.model.parameters() if weight.requires_grad} == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_no_layer_copies_its_input(tmp_path: Path, dtype: str) -> None:
    """PEFT would make it float32 first. The loss and the gradients are the same bits."""
    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer

    trainer = _built(tmp_path, dtype, lora_dropout=0.0)
    adapters = [module for name, module in trainer.model.named_modules() if name.endswith("lora_A.default")]
    given: set[torch.dtype] = set()
    for module in adapters:
        module.register_forward_pre_hook(lambda _, inputs: given.add(inputs[0].dtype))
    loss, gradients = _pass(trainer)
    assert given == {getattr(torch, dtype)}
    for module in trainer.model.modules():
        if isinstance(module, BaseTunerLayer):
            module.cast_input_dtype_enabled = True  # as PEFT has it
    as_peft, their_gradients = _pass(trainer)
    assert torch.float32 in given
    assert loss == as_peft and loss > 0 and len(gradients) == len(their_gradients) > 0
    assert all(torch.equal(one, other) for one, other in zip(gradients, their_gradients, strict=True))


def test_dora_multiplies_in_float32(tmp_path: Path) -> None:
    """So its layers cast their inputs, as PEFT has it."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    trainer = _built(tmp_path, "bfloat16", use_dora=True)
    casts = {m.cast_input_dtype_enabled for m in trainer.model.modules() if isinstance(m, BaseTunerLayer)}
    assert casts == {True}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_nothing_trains_that_a_gradient_scaler_cannot_take(dtype: str) -> None:
    """Asked when the optimizer is there, of the weights that it holds."""
    import torch

    weights = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2, dtype=getattr(torch, dtype)))]
    require_float32(torch.optim.AdamW(weights[:1]))
    with pytest.raises(Refused) as refused:
        require_float32(torch.optim.AdamW(weights))
    assert refused.value.exit_code == 5 and refused.value.error["code"] == "unsafe_precision"
    assert refused.value.error["got"] == f"1 of 2 weights are {dtype}"


@pytest.mark.parametrize(("dtype", "code"), [("float16", 5), ("bfloat16", 0)])
def test_a_run_asks_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dtype: str, code: int
) -> None:
    """A library that changes the types later, as a model of its own does here when it begins to train."""
    _pretend_quantized(monkeypatch)
    run = training.write_run(tmp_path / "run", placement={"dtype": dtype}, max_steps=2)
    build = build_trainer

    def built(*arguments: Any) -> Any:
        trainer = build(*arguments)
        made = trainer.create_optimizer

        def narrowed(*given: Any) -> Any:
            import torch

            optimizer = made(*given)
            for weight in filter(lambda each: each.requires_grad, trainer.model.parameters()):
                weight.data = weight.data.to(torch.bfloat16)
            return optimizer

        trainer.create_optimizer = narrowed
        return trainer

    monkeypatch.setattr("skill_train.program.main.build_trainer", built)
    assert main([str(run / "plan.json")]) == code
    if code:
        assert training.metrics(run) == []
        assert training.events(capsys.readouterr().out)[-1]["error"]["code"] == "unsafe_precision"


def _pretend_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real tiny model, with the mark that TRL reads from a quantized one: of 8 bits, since transformers asks
    bitsandbytes for the size of a model that says 4."""
    load = load_model

    def loaded(*arguments: Any) -> Any:
        model = load(*arguments)
        model.is_loaded_in_8bit = True
        return model

    monkeypatch.setattr("skill_train.program.trainer.load_model", loaded)


def _pass(trainer: Any) -> tuple[float, list[Any]]:
    """Loss and gradients of the first batch."""
    trainer.model.train()
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    with trainer.compute_loss_context_manager():
        loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    gradients = [weight.grad for weight in trainer.model.parameters() if weight.grad is not None]
    trainer.model.zero_grad()
    return float(loss.detach()), gradients


def _built(folder: Path, dtype: str, **values: Any) -> Any:
    """The trainer that the program trains with."""
    run = training.write_run(
        folder / "run", base=tiny.cached("gemma", tied=False), placement={"dtype": dtype}, max_steps=2, **values
    )
    plan = load_plan(run / "plan.json")
    recipe, placement = plan["recipe"], plan["placement"]
    tokenizer = load_tokenizer(recipe["model"], recipe["revision"])
    data = load_data(recipe, tokenizer)
    watch = Watch(run, data, recipe, None, keep=2)
    return build_trainer(recipe, placement, run, tokenizer, data, watch)


def _types(folder: Path) -> set[str]:
    """The types in the file, as safetensors names them."""
    from safetensors import safe_open

    with safe_open(str(folder / "adapter_model.safetensors"), "pt") as file:
        return {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - it is no mapping


def _moments(run: Path) -> set[str]:
    import torch

    (newest, *_) = numbered(run / "checkpoints")
    states = torch.load(newest / "optimizer.pt", weights_only=True)["state"].values()
    return {str(state["exp_avg_sq"].dtype) for state in states}
