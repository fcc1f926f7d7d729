"""A plan is decided from facts alone, and each decision carries its reason. The facts here are made by hand."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from skill_train.core.errors import DecisionNeeded, UsageError
from skill_train.core.program_events import Probed
from skill_train.facts import DatasetFacts, Gpu, MachineFacts, ModelFacts, TokenFacts
from skill_train.hub import flavors
from skill_train.model.lora_targets import TARGETS
from skill_train.plan.few_steps import few_steps, least_steps
from skill_train.plan.make import FEW_STEPS, WHOLE_STEPS, make_plan, wants_probe
from skill_train.plan.placement import Choices
from skill_train.plan.refusals import OF_EXPERTS
from skill_train.recipe.fields import FIELDS, Recipe, from_dict
from skill_train.recipe.resolved import ResolvedRecipe
from skill_train.run import plan_record
from skill_train.run.plan_record import Facts

GIB = 1 << 30
HERE = Choices(where="local")
LAPTOP = MachineFacts("Darwin", "Apple M2 Pro", "mps", 16 * GIB, 12 * GIB, None, 6, False)
A100 = MachineFacts("Linux", "NVIDIA A100-SXM4-80GB", "cuda", 81920 << 20, 81000 << 20, 8.0, 32, False)
T4 = MachineFacts("Linux", "Tesla T4", "cuda", 15360 << 20, 15000 << 20, 7.5, 2, False)
CPU = MachineFacts("Linux", "AMD EPYC 7B13", "cpu", 16 * GIB, 12 * GIB, None, 4, False)
AMX = msgspec.structs.replace(CPU, chip="Intel Xeon Platinum 8481C", bf16_matrix=True)

# Qwen2.5-0.5B: 494,032,768 parameters (its model card says 0.49B), 24 layers, width 896.
MODEL = ModelFacts("m", "f" * 64, "qwen2", "Qwen2ForCausalLM", 494032768, 24, 896, 151936, 32768, "BF16", None, True)
CHAT = DatasetFacts("d", "e" * 64, 1000, ("messages",), "messages", {"messages": "messages"}, 1, "found")
TEXT = msgspec.structs.replace(CHAT, format="text", columns={"text": "text"}, column_names=("text",))
PAIRS = msgspec.structs.replace(
    CHAT, format="prompt_completion", columns={"prompt": "prompt", "completion": "completion"}
)
BARE = msgspec.structs.replace(PAIRS, format="completion")


# --- Batch split: the effective batch is the recipe's, the split is the machine's ---


@pytest.mark.parametrize(
    ("chip", "gib", "rows", "accumulated"),
    [
        # The user's table of Macs, one row each: chip, memory, batch size, accumulation; 16 together.
        ("Apple M2", 8, 1, 16),
        ("Apple M2", 16, 1, 16),
        ("Apple M2 Pro", 18, 2, 8),
        ("Apple M3 Pro", 36, 4, 4),
        ("Apple M4 Pro", 48, 4, 4),
        ("Apple M3 Max", 36, 4, 4),
        ("Apple M3 Max", 128, 8, 2),
        ("Apple M2 Ultra", 64, 8, 2),
        ("Apple M2 Ultra", 192, 16, 1),
    ],
)
def test_the_batch_split_on_a_mac(chip: str, gib: int, rows: int, accumulated: int) -> None:
    machine = msgspec.structs.replace(LAPTOP, chip=chip, memory_bytes=gib * GIB, available_bytes=gib * GIB)
    assert _split(_plan(machine=machine)) == (rows, accumulated, 1)


@pytest.mark.parametrize(
    ("mebibytes", "rows", "accumulated"),
    [
        (8192, 1, 16),
        (15360, 2, 8),  # T4: "16GB VRAM, use batch_size=2"
        (40960, 8, 2),  # A100 40GB
        (81920, 16, 1),  # A100 80GB
        (143771, 16, 1),
    ],
)
def test_the_batch_split_on_a_gpu(mebibytes: int, rows: int, accumulated: int) -> None:
    """Memory as nvidia-smi states it for these cards; the split of the user's tables."""
    machine = msgspec.structs.replace(A100, memory_bytes=mebibytes << 20)
    assert _split(_plan(machine=machine)) == (rows, accumulated, 1)


def test_the_batch_split_on_a_processor_depends_on_the_model() -> None:
    small = msgspec.structs.replace(MODEL, parameters=10_000_000)
    assert _split(_plan(machine=CPU)) == (1, 16, 1)
    assert _split(_plan(machine=CPU, model=small, max_length=128)) == (8, 2, 1)


@pytest.mark.parametrize(("effective", "split"), [(1, (1, 1, 1)), (7, (7, 1, 1)), (12, (12, 1, 1)), (34, (2, 17, 1))])
def test_the_split_divides_the_effective_batch(effective: int, split: tuple[int, int, int]) -> None:
    """80 GB would take 16 rows; a divisor is taken, so that the product is exact."""
    assert _split(_plan(machine=A100, effective_batch_size=effective)) == split


def test_unknown_memory_takes_one_row_and_checkpointing() -> None:
    machine = msgspec.structs.replace(LAPTOP, memory_bytes=None, available_bytes=None)
    plan = _plan(machine=machine)
    assert _split(plan) == (1, 16, 1)
    assert plan["placement"]["gradient_checkpointing"] is True
    assert "unknown" in _reason(plan, "gradient_checkpointing")


# --- Precision ---


def _probe(bf16_seconds: float, bf16_loss: float | None) -> Probed:
    return {"float32": {"seconds": 1.0, "loss": 10.0}, "bfloat16": {"seconds": bf16_seconds, "loss": bf16_loss}}


@pytest.mark.parametrize(
    ("machine", "probe", "dtype", "because"),
    [
        (LAPTOP, None, "float32", "MPS"),
        (A100, None, "bfloat16", "8.0"),
        (msgspec.structs.replace(A100, compute_capability=9.0), None, "bfloat16", "9.0"),
        (T4, None, "float16", "7.5"),
        (msgspec.structs.replace(T4, compute_capability=None), None, "float32", "unknown"),
        (CPU, None, "float32", "no bf16 instructions"),
        (CPU, _probe(0.1, 10.0), "float32", "no bf16 instructions"),
        (AMX, None, "float32", "no probe"),
        (AMX, _probe(0.5, 10.02), "bfloat16", "2.00 times as fast, loss 0.20% off"),
        (AMX, _probe(0.95, 10.0), "float32", "1.05 times as fast"),
        (AMX, _probe(2.0, 10.0), "float32", "0.50 times as fast"),
        (AMX, _probe(0.5, 10.2), "float32", "loss 2.00% off"),
        (AMX, _probe(0.5, None), "float32", "nan"),
    ],
    ids=lambda value: value.chip if isinstance(value, MachineFacts) else None,
)
def test_precision_by_device(machine: MachineFacts, probe: Probed | None, dtype: str, because: str) -> None:
    plan = _plan(machine=machine, probe=probe)
    assert plan["placement"]["dtype"] == dtype
    assert because in _reason(plan, "dtype")


@pytest.mark.parametrize("machine", [LAPTOP, CPU], ids=["mps", "cpu"])
def test_float16_off_cuda_is_refused_unless_forced(machine: MachineFacts) -> None:
    with pytest.raises(DecisionNeeded) as caught:
        _plan(machine=machine, choices=Choices(dtype="float16"))
    assert (caught.value.code, caught.value.exit_code) == ("unsafe_precision", 3)
    assert "--force" in caught.value.hint
    forced = _plan(machine=machine, choices=Choices(dtype="float16", force=True))
    assert forced["placement"]["dtype"] == "float16"
    assert "against the advice" in _reason(forced, "dtype")


def test_bf16_on_mps_is_taken_on_request_after_a_good_probe() -> None:
    """Asked for on a Mac: a probe there must give the loss of float32, however fast it is."""
    asked = Choices(dtype="bfloat16")
    plan = _plan(choices=asked, probe=_probe(2.0, 10.02))
    assert plan["placement"]["dtype"] == "bfloat16"
    assert "0.20% off" in _reason(plan, "dtype")
    for probe, got in ((None, "did not run"), (_probe(0.1, 10.2), "2.00% off"), (_probe(0.1, float("nan")), "nan")):
        with pytest.raises(DecisionNeeded) as caught:
            _plan(choices=asked, probe=probe)
        assert (caught.value.code, caught.value.exit_code) == ("unsafe_precision", 3)
        assert got in caught.value.got
    assert _plan(choices=Choices(dtype="bfloat16", force=True))["placement"]["dtype"] == "bfloat16"


def test_what_is_asked_for_is_taken_and_said() -> None:
    plan = _plan(machine=A100, choices=Choices(device="cpu", dtype="bfloat16"))
    assert (plan["placement"]["device"], plan["placement"]["dtype"]) == ("cpu", "bfloat16")
    assert (_reason(plan, "device"), _reason(plan, "dtype")) == ("asked for", "asked for")


@pytest.mark.parametrize(
    ("machine", "parameters", "choices", "wanted"),
    [
        (AMX, 494032768, Choices(), True),
        (AMX, 99_999_999, Choices(), False),
        (AMX, None, Choices(), False),
        (AMX, 494032768, Choices(dtype="float32"), False),
        (CPU, 494032768, Choices(), False),
        (A100, 494032768, Choices(), False),
        (LAPTOP, 494032768, Choices(), False),
        (LAPTOP, 10_000_000, Choices(dtype="bfloat16"), True),
        (LAPTOP, 494032768, Choices(dtype="bfloat16", force=True), False),
        (msgspec.structs.replace(AMX, device="mps"), 494032768, Choices(device="cpu"), True),
    ],
)
def test_a_probe_is_made_only_where_it_can_change_the_plan(
    machine: MachineFacts, parameters: int | None, choices: Choices, wanted: bool
) -> None:
    assert wants_probe(machine, msgspec.structs.replace(MODEL, parameters=parameters), choices) is wanted


# --- What is refused before anything runs ---


@pytest.mark.parametrize("machine", [LAPTOP, CPU], ids=["mps", "cpu"])
def test_4_bit_off_cuda_is_blocked(machine: MachineFacts) -> None:
    (blocker,) = _plan(machine=machine, load_in_4bit=True)["blockers"]
    assert blocker["code"] == "needs_cuda"
    assert machine.device in blocker["message"]
    assert _plan(machine=A100, load_in_4bit=True)["recipe"]["load_in_4bit"] is True


def test_a_mamba_in_4_bits_is_refused() -> None:
    """transformers 5.24 ends there in an error of shapes, with bitsandbytes 0.50; Falcon's Mamba and Mamba 2 train
    (tried on tiny models, 2026-12-01)."""
    others = {"machine": A100, "load_in_4bit": True, "target_modules": ["in_proj"]}
    with pytest.raises(UsageError, match="m is a Mamba, which transformers cannot compute in 4 bits"):
        _plan(model=msgspec.structs.replace(MODEL, model_type="mamba"), **others)
    for model_type in ("mamba2", "falcon_mamba", "jamba"):
        assert _plan(model=msgspec.structs.replace(MODEL, model_type=model_type), **others)["blockers"] == []


@pytest.mark.parametrize("four_bit", [False, True])
@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "mxfp4", "bitsandbytes"])
def test_a_quantized_base_is_refused(method: str, four_bit: bool) -> None:
    """transformers 5.23 loads none of these with the config of bitsandbytes, but for its own (quantizers/auto.py)."""
    quantized = msgspec.structs.replace(MODEL, quantization=method)
    if four_bit and method == "bitsandbytes":
        assert _plan(model=quantized, machine=A100, load_in_4bit=True)["recipe"]["load_in_4bit"] is True
        return
    with pytest.raises(UsageError) as caught:
        _plan(model=quantized, machine=A100, load_in_4bit=four_bit)
    assert (caught.value.code, caught.value.exit_code) == ("quantized_base", 2)
    assert method in caught.value.message


@pytest.mark.parametrize("target", ["out_proj", "mixer.out_proj"])
@pytest.mark.parametrize("model_type", ["mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h"])
def test_a_target_that_peft_refuses_of_mamba_is_refused_before_the_training(model_type: str, target: str) -> None:
    """It was a ValueError of PEFT, once the job ran. The list is PEFT's own, 0.21; Jamba is not on it, and trains."""
    mamba = msgspec.structs.replace(MODEL, model_type=model_type)
    with pytest.raises(UsageError, match="has no adapter for out_proj") as caught:
        _plan(model=mamba, target_modules=["in_proj", target])
    assert (caught.value.code, caught.value.got) == ("no_such_target", target)
    assert _plan(model=mamba, target_modules=["in_proj"])["recipe"]["target_modules"] == ["in_proj"]
    assert _plan(model=mamba, target_modules=[target], finetuning_type="full")["recipe"]["target_modules"] == []
    jamba = msgspec.structs.replace(MODEL, model_type="jamba")
    assert _plan(model=jamba, target_modules=[target])["recipe"]["target_modules"] == [target]


@pytest.mark.parametrize(("model_type", "target"), [("deepseek_v3", "mlp.down_proj"), ("minimax_m2", "w1")])
def test_a_target_that_names_experts_is_refused_before_the_training(model_type: str, target: str) -> None:
    mixture = msgspec.structs.replace(MODEL, model_type=model_type)
    with pytest.raises(UsageError, match="one for all experts") as caught:
        _plan(model=mixture, target_modules=["o_proj", target])
    assert (caught.value.code, caught.value.got) == ("no_such_target", target)
    assert _plan(model=mixture, target_modules=["o_proj"])["recipe"]["target_modules"] == ["o_proj"]
    qwen = msgspec.structs.replace(MODEL, model_type="qwen2_moe")  # the name of its shared expert alone
    assert _plan(model=qwen, target_modules=["down_proj"])["recipe"]["target_modules"] == ["down_proj"]


def test_the_names_of_experts_are_those_of_peft() -> None:
    conversion = pytest.importorskip("peft.utils.transformers_weight_conversion")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    names = {kind: set(conversion._MOE_TARGET_MODULE_MAPPING[kind]) for kind in conversion._MOE_FUSED_TARGETS}
    types = conversion._MODEL_TO_CONVERSION_PATTERN.items()
    known = {kind: names[pattern] for kind, pattern in types if pattern in names and kind.islower()}
    ours = {kind: set(targets) for kind, targets in OF_EXPERTS.items() if kind in CONFIG_MAPPING}
    assert ours == known  # sarvam_mla is of transformers 5.24


def test_an_unknown_model_type_is_refused_unless_targets_are_named() -> None:
    unknown = msgspec.structs.replace(MODEL, model_type="brandnew")
    with pytest.raises(UsageError) as caught:
        _plan(model=unknown)
    assert (caught.value.code, caught.value.got) == ("no_such_target", "brandnew")
    assert "target_modules" in caught.value.hint
    assert _plan(model=unknown, target_modules=["q_proj"])["recipe"]["target_modules"] == ["q_proj"]


@pytest.mark.parametrize("data_format", ["messages", "sharegpt", "instruction", "question_answer"])
def test_conversations_without_a_chat_template_are_refused(data_format: str) -> None:
    with pytest.raises(UsageError) as caught:
        _plan(model=_silent(), dataset=msgspec.structs.replace(CHAT, format=data_format))
    assert (caught.value.code, caught.value.exit_code) == ("no_chat_template", 2)
    assert "Instruct" in caught.value.hint


@pytest.mark.parametrize("dataset", [TEXT, PAIRS], ids=["text", "prompt_completion"])
def test_plain_text_needs_no_chat_template(dataset: DatasetFacts) -> None:
    assert _plan(model=_silent(), dataset=dataset)["recipe"]["format"] == dataset.format


# --- The recipe resolved ---


@pytest.mark.parametrize(
    ("dataset", "loss_on"), [(CHAT, "assistant"), (PAIRS, "assistant"), (BARE, "completion"), (TEXT, "all")]
)
def test_what_is_trained_by_default(dataset: DatasetFacts, loss_on: str) -> None:
    plan = _plan(dataset=dataset)
    assert plan["recipe"]["loss_on"] == loss_on
    assert _reason(plan, "loss_on")
    assert _plan(dataset=dataset, loss_on="all")["recipe"]["loss_on"] == "all"


def test_the_completion_of_a_conversation_is_not_guessed() -> None:
    """It may be every answer or the last one. TRL takes `completion_only_loss` for prompts and completions alone."""
    with pytest.raises(UsageError, match="several answers") as refused:
        _plan(dataset=CHAT, loss_on="completion")
    assert refused.value.code == "bad_recipe"


@pytest.mark.parametrize("loss_on", ["assistant", "completion"])
def test_a_part_of_a_plain_text_cannot_be_asked_for(loss_on: str) -> None:
    """All of it would train, and the record would say that the answers alone did."""
    with pytest.raises(UsageError, match="plain text") as caught:
        _plan(dataset=TEXT, loss_on=loss_on)
    assert caught.value.code == "bad_recipe"


@pytest.mark.parametrize(
    ("model_type", "targets"),
    [
        ("llama", ["q_proj", "k_proj", "v_proj", "o_proj"]),
        ("qwen2", ["q_proj", "k_proj", "v_proj", "o_proj"]),
        ("qwen3", ["q_proj", "k_proj", "v_proj", "o_proj"]),
        ("mistral", ["q_proj", "k_proj", "v_proj", "o_proj"]),
        ("gemma3_text", ["q_proj", "k_proj", "v_proj", "o_proj"]),
        ("phi3", ["qkv_proj", "o_proj"]),
        ("gpt2", ["c_attn", "c_proj"]),
        ("bloom", ["query_key_value", "dense"]),
        ("falcon", ["query_key_value", "dense"]),
    ],
)
def test_lora_targets_by_architecture(model_type: str, targets: list[str]) -> None:
    plan = _plan(model=msgspec.structs.replace(MODEL, model_type=model_type))
    assert plan["recipe"]["target_modules"] == targets
    assert model_type in _reason(plan, "target_modules")


def test_target_lists_are_not_shared_between_plans() -> None:
    before = copy.deepcopy(TARGETS)
    _plan()["recipe"]["target_modules"].append("lm_head")
    assert before == TARGETS


@pytest.mark.parametrize(
    ("rows", "epochs", "batch", "steps"),
    [
        (1000, 1, 16, 60),  # 50 held out: 950 / 16 = 59.4
        (1000, 3, 16, 179),  # 2850 / 16 = 178.1
        (19, 1, 16, 2),  # none held out below 20 rows
        (20, 1, 16, 2),  # 1 held out
        (10_000, 1, 16, 613),  # 200 held out at most, not 500: 9800 / 16 = 612.5
        (3, 0.1, 16, 1),  # never none
    ],
)
def test_steps_from_epochs(rows: int, epochs: float, batch: int, steps: int) -> None:
    dataset = msgspec.structs.replace(CHAT, rows=rows)
    plan = _plan(dataset=dataset, num_train_epochs=epochs, effective_batch_size=batch)
    assert plan["recipe"]["max_steps"] == steps
    assert f"{epochs:g} epochs" in _reason(plan, "max_steps")


def test_epochs_beside_steps_are_told_as_unread() -> None:
    dataset = msgspec.structs.replace(CHAT, rows=1000)
    words = "50 steps x 16 rows / 950 training rows"
    for epochs, told in ((5, f"{words}; num_train_epochs 5 is not read"), (None, words)):
        plan = _plan(dataset=dataset, effective_batch_size=16, max_steps=50, num_train_epochs=epochs)
        assert (plan["recipe"]["max_steps"], _reason(plan, "epochs")) == (50, told)


def test_a_number_of_rows_that_is_estimated_is_said_to_be() -> None:
    """An earlier or later stop is a part of what is decided on: 950 of 1000 rows train."""
    estimated = msgspec.structs.replace(CHAT, rows=1000, rows_estimated="estimated from the first 0.5 of 21 MB")
    said = [
        _reason(_plan(dataset=dataset, effective_batch_size=16, **recipe), decided)
        for dataset in (estimated, msgspec.structs.replace(CHAT, rows=1000))
        for decided, recipe in (("max_steps", {"num_train_epochs": 1}), ("epochs", {"max_steps": 50}))
    ]
    assert said == [
        "about 950 training rows (estimated from the first 0.5 of 21 MB) x 1 epochs / 16 rows a step",
        "50 steps x 16 rows / about 950 training rows (estimated from the first 0.5 of 21 MB)",
        "950 training rows x 1 epochs / 16 rows a step",
        "50 steps x 16 rows / 950 training rows",
    ]


@pytest.mark.parametrize(
    ("rows", "values", "told"),
    [
        (60, {"num_train_epochs": 1, "effective_batch_size": 256}, ("4.49", "1 x 256 rows from 57 training rows")),
        (60, {"effective_batch_size": 256}, ("4.49", "1 x 256 rows from 57 training rows")),  # 3 epochs are 171
        (60, {"effective_batch_size": 200}, None),
        (60, {"num_train_epochs": 1, "effective_batch_size": 16}, None),  # 64 of 57
        (21, {"num_train_epochs": 1, "effective_batch_size": 16}, ("1.6", "2 x 16 rows from 20 training rows")),
        (60, {"max_steps": 1, "effective_batch_size": 256}, None),  # which says it as `epochs`
        (5000, {}, None),
        (0, {}, None),
    ],
)
def test_more_epochs_than_were_asked_for_are_told(
    rows: int, values: dict[str, Any], told: tuple[str, str] | None
) -> None:
    """Every step trains a whole batch, where TRL trains what is left."""
    plan = _plan(dataset=msgspec.structs.replace(CHAT, rows=rows), **values)
    found = [(reason["value"], reason["because"]) for reason in plan["reasons"] if reason["rule"] == WHOLE_STEPS]
    assert found == ([told] if told else [])


@pytest.mark.parametrize(
    ("rows", "epochs", "steps"),
    [
        (56, 3, 11),  # 2 held out: 54 x 3 / 16 = 10.1
        (499, 3, 90),  # 24 held out: 475 x 3 / 16 = 89.1
        (500, 2, 60),  # 25 held out: 475 x 2 / 16 = 59.4
        (999, 2, 119),  # 49 held out: 950 x 2 / 16 = 118.75
        (1000, 1, 60),  # 50 held out: 950 / 16 = 59.4
        (10_000, 1, 613),
    ],
)
def test_few_rows_are_read_more_often(rows: int, epochs: int, steps: int) -> None:
    """The table of references/training_methods.md. What the user says comes first, one epoch too."""
    dataset = msgspec.structs.replace(CHAT, rows=rows)
    plan = _plan(dataset=dataset, max_steps=None, effective_batch_size=16)
    assert plan["recipe"]["max_steps"] == steps
    reason = next(reason for reason in plan["reasons"] if reason["rule"] == "max_steps")
    assert reason["source"] == "references/training_methods.md"
    below = {3: "below 500 rows", 2: "below 1,000 rows", 1: "from 1,000 rows on"}[epochs]
    assert f" x {epochs} epochs ({below}) / 16 rows a step" in reason["because"]
    said = _plan(dataset=dataset, num_train_epochs=1, effective_batch_size=16)
    assert said["recipe"]["max_steps"] == -(-(rows - min(200, rows // 20)) // 16)
    assert " x 1 epochs / 16 rows a step" in _reason(said, "max_steps")


@pytest.mark.parametrize(
    ("values", "least"),
    [({}, 10), ({"adam_beta1": 0.95}, 20), ({"adam_beta1": 0.0}, 1), ({"warmup_steps": 7}, 17)],
)
def test_the_fewest_steps_that_can_teach(values: dict[str, Any], least: int) -> None:
    """A mean with weights 0.9 ** n holds 1 / (1 - 0.9) = 10 terms; while it warms up, a step is a part of one."""
    assert least_steps(msgspec.convert(_plan(max_steps=50, **values)["recipe"], ResolvedRecipe)) == least


@pytest.mark.parametrize(
    ("optim", "beta", "why"),
    [
        ("adamw_torch", 0.8, "AdamW averages 5 of them (adam_beta1 0.8) after 2 of warm-up"),
        ("paged_adamw_8bit", 0.9, "AdamW averages 10 of them (adam_beta1 0.9) after 2 of warm-up"),
        ("rmsprop", 0.8, "it takes 10 of them after 2 of warm-up"),
        ("adafactor", 0.9, "it takes 10 of them after 2 of warm-up"),
    ],
)
def test_few_steps_name_adamw_where_it_trains(optim: str, beta: float, why: str) -> None:
    """No other optimizer reads adam_beta1, so the number does not follow from it there."""
    recipe = msgspec.convert(_plan(max_steps=50, warmup_steps=2, adam_beta1=beta)["recipe"], ResolvedRecipe)
    said = few_steps(msgspec.structs.replace(recipe, optim=optim), 6)
    assert said is not None and f"by a rule of thumb: {why}; more epochs" in said


def test_steps_that_are_said_are_taken() -> None:
    plan = _plan(max_steps=7, num_train_epochs=100)
    assert plan["recipe"]["max_steps"] == 7
    assert all(reason["rule"] != "max_steps" for reason in plan["reasons"])


@pytest.mark.parametrize(
    "values",
    [
        {"max_steps": 10**8, "effective_batch_size": 16},
        {"max_steps": 1001, "effective_batch_size": 10**6},
        {"num_train_epochs": 2e6},
    ],
)
def test_an_order_of_rows_that_no_memory_holds_is_refused(values: dict[str, Any]) -> None:
    """The training program makes it before the first step: 8 bytes a row, and a billion rows here."""
    with pytest.raises(UsageError) as caught:
        _plan(**values)
    assert (caught.value.code, caught.value.hint != "") == ("bad_recipe", True)
    assert _plan(max_steps=10**6, effective_batch_size=1000)["recipe"]["max_steps"] == 10**6


@pytest.mark.parametrize(
    ("steps", "ratio", "said", "warmup"),
    [(200, 0.03, None, 6), (201, 0.03, None, 7), (10, 0.5, None, 0), (9, 0, 4, 4), (100, 0.07, None, 7)],
)
def test_warmup_steps(steps: int, ratio: float, said: int | None, warmup: int) -> None:
    """7 % of 100 are 7, and 7.000000000000001 in binary."""
    plan = _plan(max_steps=steps, warmup_ratio=ratio, warmup_steps=said)
    assert plan["recipe"]["warmup_steps"] == warmup
    left_out = [reason["because"] for reason in plan["reasons"] if reason["rule"] == "warmup_steps"]
    assert bool(left_out) is (ratio > 0 and not warmup), "a ratio that does nothing is told"


def test_the_fields_of_the_recipe_tell_what_does_not_show() -> None:
    assert f"none in {FEW_STEPS} steps or fewer" in FIELDS["warmup_ratio"].metadata["help"]
    assert "by the end of a name: norm is post_attention_layernorm too" in FIELDS["modules_to_save"].metadata["help"]


@pytest.mark.parametrize("values", [{"warmup_steps": 5}, {"warmup_ratio": 0.1}])
def test_a_warm_up_that_the_schedule_does_not_have_is_refused(values: dict[str, Any]) -> None:
    """transformers' `constant` begins at the peak."""
    with pytest.raises(UsageError, match="warm-up") as caught:
        _plan(lr_scheduler_type="constant", **values)
    assert (caught.value.code, "constant_with_warmup" in caught.value.hint) == ("bad_recipe", True)
    assert _plan(lr_scheduler_type="constant", warmup_steps=0)["recipe"]["warmup_steps"] == 0
    assert _plan(lr_scheduler_type="constant_with_warmup", max_steps=100, **values)["recipe"]["warmup_steps"] > 0


@pytest.mark.parametrize(
    ("model_type", "longest", "max_length", "refused"),
    [
        ("gpt2", (1025, 1025), 2048, True),
        ("gpt2", (1025, 1025), 1024, False),
        ("gpt2", (1024, 2000), 2048, False),  # perhaps longer: the training program knows
        ("qwen2", (1025, 1025), 2048, False),
    ],
)
def test_rows_beyond_a_table_of_positions_are_refused(
    model_type: str, longest: tuple[int, int], max_length: int, refused: bool
) -> None:
    """GPT-2's table ends at 1024: its forward pass is an IndexError there. Qwen2 computes a position of any number."""
    tokens = TokenFacts("counted in all rows", True, (9, 9), longest, (9, 9), max_length)
    model = msgspec.structs.replace(MODEL, model_type=model_type, context=1024)
    values = {"model": model, "dataset": msgspec.structs.replace(TEXT, tokens=tokens), "max_length": max_length}
    if not refused:
        assert _plan(**values)["recipe"]["max_length"] == max_length
        return
    with pytest.raises(UsageError, match="1024 positions") as caught:
        _plan(**values)
    assert (caught.value.code, "max_length: 1024" in caught.value.hint) == ("bad_recipe", True)


@pytest.mark.parametrize(("steps", "every"), [(1, 1), (4, 1), (8, 2), (50, 13), (10_000, 200)])
def test_checkpoints_come_four_times_and_every_200_steps_at_least(steps: int, every: int) -> None:
    assert _plan(max_steps=steps)["placement"]["save_steps"] == every


def test_threads_are_the_physical_cores_on_a_processor_only() -> None:
    assert _plan(machine=CPU)["placement"]["threads"] == 4
    assert _plan(machine=A100)["placement"]["threads"] is None


# --- The plan as a whole ---


def test_the_same_facts_give_the_same_plan() -> None:
    assert _plan(machine=AMX, probe=_probe(0.5, 10.0)) == _plan(machine=AMX, probe=_probe(0.5, 10.0))


def test_a_plan_is_plain_data() -> None:
    import json

    plan = _plan(hub_model_id="me/tuned", sensitive=True, score="regex", score_pattern="(.+)")
    again = json.loads(json.dumps(plan, allow_nan=False))
    assert plan_record.from_dict(again, Path("plan.json")).as_dict() == plan
    policy = {"hub_model_id": "me/tuned", "sensitive": True, "score": "regex", "score_pattern": "(.+)"}
    policy |= {"report_to": "none"}
    assert plan["policy"] == policy
    assert all(set(reason) == {"rule", "value", "because", "source"} for reason in plan["reasons"])
    assert all(all(reason.values()) for reason in plan["reasons"])


def test_the_hash_is_the_same_on_every_machine_and_not_after_a_change() -> None:
    plans = [_plan(machine=machine) for machine in (LAPTOP, A100, T4, CPU)]
    assert len({plan["recipe_hash"] for plan in plans}) == 1
    assert len({str(plan["placement"]) for plan in plans}) == 4
    changed = [
        _plan(learning_rate=1e-4),
        _plan(max_steps=7),
        _plan(model=msgspec.structs.replace(MODEL, fingerprint="0")),
    ]
    assert len({plan["recipe_hash"] for plan in [*plans, *changed]}) == 4


# --- Full fine-tuning ---


def test_a_step_is_not_added_by_the_last_digit_of_a_float() -> None:
    """50 x 1.1 is 55, and 55.00000000000001 in binary."""
    rows = msgspec.structs.replace(CHAT, rows=50)
    values = {"num_train_epochs": 1.1, "effective_batch_size": 1, "held_out_fraction": 0.0}
    assert _plan(machine=A100, dataset=rows, **values)["recipe"]["max_steps"] == 55


def test_full_fine_tuning_reads_no_field_of_lora() -> None:
    """So two recipes that differ there alone are one: the same hash, the same plan."""
    plan = _plan(machine=A100, finetuning_type="full")
    other = _plan(machine=A100, finetuning_type="full", lora_r=64, use_dora=True, target_modules=["q_proj"])
    assert plan["recipe_hash"] == other["recipe_hash"] != _plan(machine=A100)["recipe_hash"]
    assert plan["recipe"]["target_modules"] == [] and plan["recipe"]["modules_to_save"] is None
    assert "not read" in _reason(plan, "finetuning_type")
    unknown = msgspec.structs.replace(
        MODEL, model_type="something_new"
    )  # no LoRA targets are known, and none are needed
    assert _plan(machine=A100, model=unknown, finetuning_type="full")["recipe"]["finetuning_type"] == "full"


@pytest.mark.parametrize(
    ("values", "rate", "optim"),
    [
        ({}, 2e-4, "adamw_torch"),
        ({"finetuning_type": "full"}, 2e-5, "adamw_torch_fused"),
        ({"finetuning_type": "full", "learning_rate": 1e-5, "optim": "adafactor"}, 1e-5, "adafactor"),
    ],
)
def test_how_fast_and_by_what_it_trains(values: dict[str, Any], rate: float, optim: str) -> None:
    """TRL's documentation: 2e-5, and ten times that for adapters. What the recipe says has no reason."""
    plan = _plan(machine=A100, **values)
    assert (plan["recipe"]["learning_rate"], plan["recipe"]["optim"]) == (rate, optim)
    assert any(reason["rule"] == "learning_rate" for reason in plan["reasons"]) is ("learning_rate" not in values)


@pytest.mark.parametrize("optim", ["sgd", "adafactor", "adamw_torch", None])
@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_fields_of_adamw_that_another_optimizer_does_not_read_are_told(optim: str | None, tuning: str) -> None:
    values = {"optim": optim, "finetuning_type": tuning, "adam_beta1": 0.8, "adam_epsilon": 1e-8}  # the last is usual
    reasons = _plan(machine=A100, **values)["reasons"]
    told = [each["because"] for each in reasons if each["rule"] == "optim" and "adam_" in each["because"]]
    assert told == (["it does not read adam_beta1"] if optim in ("sgd", "adafactor") else [])


def test_an_adapter_on_layers_of_unknown_width_is_not_counted() -> None:
    """Without the headers of its weights only the layers of listed families have known widths."""
    unlisted = msgspec.structs.replace(MODEL, model_type="lfm2")
    assert _plan(model=unlisted, target_modules=["in_proj"])["estimates"]["adapter_parameters"] is None
    known = msgspec.structs.replace(unlisted, linear_sizes={"in_proj": (2, 20, 60)})
    assert _plan(model=known, target_modules=["in_proj"])["estimates"]["adapter_parameters"] == 16 * 80
    sized = msgspec.structs.replace(MODEL, intermediate_size=4864)
    listed = _plan(model=sized, target_modules=["q_proj", "gate_proj"])["estimates"]["adapter_parameters"]
    assert listed == 24 * 16 * (896 + 896 + 896 + 4864)


def test_each_unknown_figure_has_its_reason() -> None:
    """A speed was said to lack the bandwidth of a machine whose bandwidth is known."""
    shapeless = msgspec.structs.replace(MODEL, parameters=None, layers=None, hidden_size=None, vocab_size=None)
    estimates = _plan(machine=A100, model=shapeless)["estimates"]
    names = ("memory_bytes", "merge_bytes", "convert_bytes", "verify_bytes", "disk_bytes")
    figures = [*map(estimates.get, names), *(file["tokens_per_second"] for file in estimates["files"])]
    assert {(figure["low"], figure["basis"]) for figure in figures} == {(None, "the model's shape is unknown")}


def test_full_fine_tuning_has_nothing_to_merge() -> None:
    estimates = _plan(machine=A100, finetuning_type="full")["estimates"]
    assert (estimates["merge_bytes"]["low"], estimates["merge_bytes"]["basis"]) == (None, "nothing to merge")
    assert estimates["adapter_parameters"] is None
    # 494,032,768 x 4 bytes, ten times: the model and three checkpoints of three times its size.
    assert estimates["disk_bytes"]["low"] > 40 * 494_032_768


def test_pure_bf16_says_the_precision_too() -> None:
    pure = {"finetuning_type": "full", "pure_bf16": True}
    assert _plan(machine=CPU, **pure)["placement"]["dtype"] == "bfloat16"
    with pytest.raises(UsageError, match="cannot be used together"):
        _plan(machine=CPU, choices=Choices(dtype="float32"), **pure)


def test_epochs_and_the_steps_they_come_to_are_the_same_recipe() -> None:
    assert _plan(num_train_epochs=1)["recipe_hash"] == _plan(max_steps=60)["recipe_hash"]


def test_planning_loads_no_heavy_library() -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_make; test_make._plan();"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub', 'datasets', 'numpy') if m in sys.modules])"
    )
    folder = __file__.rsplit("/", 1)[0]
    done = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


# --- Memory ---


def test_checkpointing_when_memory_is_short() -> None:
    """The upper estimate without checkpointing decides, against nine tenths of what is free."""
    need = _plan(machine=CPU, max_length=512)["estimates"]["memory_bytes"]["high"]
    for free, checkpointing in ((need / 0.9 + 10, False), (need / 0.9 - 10, True)):
        machine = msgspec.structs.replace(CPU, available_bytes=int(free))
        assert _plan(machine=machine, max_length=512)["placement"]["gradient_checkpointing"] is checkpointing


# Qwen2.5-7B: 7,615,616,512 parameters (its model card says 7.61B), 28 layers, width 3584.
SEVEN = ModelFacts("m", "f" * 64, "qwen2", "Qwen2ForCausalLM", 7615616512, 28, 3584, 152064, 32768, "BF16", None, True)


def test_fewer_rows_where_more_would_need_recomputation() -> None:
    """On an A100, 16 rows of 1,024 tokens beside 7B fit with recomputation alone: a pass more of
    three, so up to half as much arithmetic again. 8 without it are 15.2 GB of weights,
    43 of activations and 4 around them, with 30 % of doubt 81, of 80.7; 4 are sure."""
    plan = _plan(machine=A100, model=SEVEN, max_length=1024, dataset=_of_lengths(1024, 1024))
    assert _split(plan) == (4, 4, 1)
    assert plan["placement"]["gradient_checkpointing"] is False
    times = re.search(r"about ([\d.]+) times as quick as 16 x 1 with checkpointing", _reason(plan, "batch"))
    assert times is not None and float(times[1]) == pytest.approx(1.45, abs=0.1)


def test_one_long_row_does_not_decide_the_split() -> None:
    """With rows of 100 tokens, but for one of 2,048, 2 at a time would start 28 layers of programs 8 times for little
    work. Without recomputation half as many rows fit, and the programs' time is longer than what that saves."""
    plan = _plan(machine=A100, model=SEVEN, max_length=2048, dataset=_of_lengths(100, 2048))
    assert (_split(plan), plan["placement"]["gradient_checkpointing"]) == ((16, 1, 1), True)


def test_processes_stand_in_the_comparison() -> None:
    """Two A100: 16 rows of a step are 8 for each, of which 4 at a time are sure to fit; 16 need
    recomputation."""
    two = msgspec.structs.replace(A100, gpus=(Gpu(A100.chip, 81920 << 20, 81000 << 20, 8.0, True),) * 2)
    plan = _plan(machine=two, model=SEVEN, max_length=1024, dataset=_of_lengths(1024, 1024), effective_batch_size=32)
    assert _split(plan) == (4, 4, 2)
    assert "times as quick as 16 x 1 x 2 processes with checkpointing" in _reason(plan, "batch")


@pytest.mark.parametrize(
    ("machine", "model", "mean"),
    [
        (A100, MODEL, 600),  # fits without recomputation
        (msgspec.structs.replace(A100, chip="NVIDIA X1"), SEVEN, 300),  # of unknown speed
        (
            msgspec.structs.replace(LAPTOP, memory_bytes=192 * GIB, available_bytes=190 * GIB),
            SEVEN,
            300,
        ),  # not on a Mac
    ],
)
def test_else_as_many_rows_as_the_table_says(machine: MachineFacts, model: ModelFacts, mean: float) -> None:
    plan = _plan(machine=machine, model=model, max_length=1024, dataset=_of_lengths(mean, 1024))
    assert _split(plan) == (16, 1, 1)
    assert "quick" not in _reason(plan, "batch")


def _of_lengths(mean: float, longest: int) -> DatasetFacts:
    tokens = TokenFacts("counted in all rows", True, (mean, mean), (longest, longest), (mean, mean), longest)
    return msgspec.structs.replace(CHAT, tokens=tokens)


def test_no_flavor_is_offered_for_sensitive_rows() -> None:
    """The rows may not leave this machine, so the price of another one is no way on."""
    said = {"model": "m", "data": "d"}
    open_, closed = (
        make_plan(from_dict(values), Facts(MODEL, CHAT, LAPTOP), choices=HERE, offered=flavors.shipped())
        for values in (said, said | {"sensitive": True})
    )
    assert open_.estimates.flavors and open_.estimates.prices is not None
    assert (closed.estimates.flavors, closed.estimates.prices) == ([], None)


def _plan(
    *,
    machine: MachineFacts = LAPTOP,
    model: ModelFacts = MODEL,
    dataset: DatasetFacts = CHAT,
    choices: Choices = HERE,
    probe: Probed | None = None,
    **values: Any,
) -> dict[str, Any]:
    recipe: Recipe = from_dict({"model": "m", "data": "d", **values})
    choices = msgspec.structs.replace(choices, where="local")
    return make_plan(recipe, Facts(model, dataset, machine), choices=choices, probe=probe).as_dict()


def _split(plan: dict[str, Any]) -> tuple[int, int, int]:
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_processes")
    rows, accumulated, processes = (plan["placement"][name] for name in names)
    assert rows * accumulated * processes == plan["recipe"]["effective_batch_size"]
    return rows, accumulated, processes


def _reason(plan: dict[str, Any], rule: str) -> str:
    return next(reason["because"] for reason in plan["reasons"] if reason["rule"] == rule)


def _silent() -> ModelFacts:
    return msgspec.structs.replace(MODEL, has_chat_template=False)


def test_who_else_is_told_of_the_metrics_is_a_choice_and_not_of_the_recipe() -> None:
    plain, told = _plan(), _plan(report_to="trackio")
    assert (plain["placement"]["report_to"], told["placement"]["report_to"]) == ("none", "trackio")
    assert plain["recipe_hash"] == told["recipe_hash"]
