"""LoRA targets of families that are on no list: the linear layers of the blocks, by name."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import tiny
import tiny_families
import tiny_vision
import training
from command_child import Commands
from hub_emulator import Hub
from skill_train.commands import _planning as planning
from skill_train.core.errors import UsageError
from skill_train.estimate.modules import adapter_parameters
from skill_train.facts import ModelFacts
from skill_train.model import config as model_config
from skill_train.model import folder as models
from skill_train.model.lora_targets import TARGETS, linear_layers
from skill_train.model.parameter_count import with_files
from skill_train.recipe.fields import from_dict
from skill_train.reference.checkpoint_names import empty_model, task_of
from tiny_gemma4 import published

pytestmark = pytest.mark.slow

_MLP = {"gate_proj", "up_proj", "down_proj"}  # PEFT takes them for the experts, too
LEFT_OUT = {
    **dict.fromkeys(("deepseek2", "deepseek3", "glm4moe", "glm4moelite", "erniemoe", "exaonemoe", "dots1"), _MLP),
    "qwen2moe": _MLP | {"shared_expert_gate"},
    **dict.fromkeys(("qwen3next", "qwen35moe"), _MLP | {"shared_expert_gate", "out_proj"}),
    "qwen35": {"out_proj"},  # like a state-space mixer
    "gemma4": {"per_layer_input_gate", "per_layer_model_projection"},  # the second stands in no layer
    "gemma4moe": {"proj"},  # of the router
    "llama4": {"router"},
    "lfm2moe": {"w1", "w2", "w3"},
    # State-space mixers. transformers' fused kernels read these weights without calling the layer.
    "mamba": {"dt_proj", "x_proj", "out_proj"},
    "mamba2": {"out_proj"},
    "falconmamba": {"dt_proj", "x_proj", "out_proj"},
    "jamba": {"dt_proj", "x_proj", "out_proj"} | _MLP,
    **{family: {"out_proj"} for family in ("bamba", "falconh1", "granitehybrid", "nemotronh")},
    "afmoe": _MLP | {"gate"},
    "nemotronhmoe": {"out_proj", "up_proj", "down_proj"},
}
MIXTURES = {"mixtral", "qwen2moe", "qwen3moe", "olmoe", "granitemoe", "granitemoeshared", "granitehybrid", "deepseek2"}
MIXTURES |= {"deepseek3", "lfm2moe", "gptoss", "glm4moe", "erniemoe", "qwen3next", "qwen35moe", "dots1", "minimaxm2"}
MIXTURES |= {"afmoe", "gemma4moe", "mellum", "glm4moelite", "nemotronhmoe", "exaonemoe", "granitemoeswa"}
TRAINED = ("gptoss", "lfm2", "deepseek3", "ernie", "mamba")


# The files of EXAONE have other names than its modules: training refuses what plan takes beyond the default targets.
ALL = set(tiny_families.FAMILIES) - {"gemma1", "llama-bias", "phi3-long", "falcon7", "exaone"}


@pytest.mark.parametrize("name", tiny_families.by_default(ALL))
def test_the_names_are_those_of_the_models_linear_layers(name: str) -> None:
    folder = tiny_families.folder(name)
    assert set(_found(folder)) == _linear(folder) - LEFT_OUT.get(name, set())


@pytest.mark.parametrize("name", tiny_families.by_default(ALL - {"bloom", "gpt2-plain", "gptneox"}))
def test_the_parameters_of_the_adapter_are_those_that_peft_makes(name: str) -> None:
    """Of all families but three that ignore a key of the tiny ones: they have as many key heads as heads."""
    import peft
    from transformers import AutoModelForCausalLM

    folder = tiny_families.folder(name)
    for said in ({}, {"target_modules": ["o_proj", "in_proj"]}):
        recipe = from_dict({"model": str(folder), "data": "rows.jsonl", **said})
        read = models.read_model(folder)
        if recipe.target_modules and read.model_type in TARGETS:
            continue
        facts = planning._with_layers(recipe, read, lambda: models.tensor_shapes(folder))
        targets = recipe.target_modules or TARGETS.get(facts.model_type) or facts.linear_layers or ()
        config = peft.LoraConfig(r=4, target_modules=list(targets), task_type="CAUSAL_LM")
        try:
            model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
        except ValueError:  # none of the two is there
            continue
        made = sum(weight.numel() for key, weight in model.named_parameters() if "lora_" in key)
        present = [target for target in targets if target in facts.linear_sizes or facts.model_type in TARGETS]
        assert adapter_parameters(facts, present, 4) == made


def test_targets_of_a_listed_mixture_are_counted_in_its_files() -> None:
    """The shared expert of a Qwen MoE has another width than the experts, and its gate one output."""
    import peft
    from transformers import AutoModelForCausalLM

    folder, targets = tiny_families.folder("qwen2moe"), ["q_proj", "down_proj", "shared_expert_gate"]
    recipe = from_dict({"model": str(folder), "data": "rows.jsonl", "target_modules": targets})
    facts = planning._with_layers(recipe, models.read_model(folder), lambda: models.tensor_shapes(folder))
    config = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
    made = sum(weight.numel() for key, weight in model.named_parameters() if "lora_" in key)
    assert adapter_parameters(facts, targets, 4) == made


@pytest.mark.parametrize("name", tiny_families.by_default(MIXTURES))
def test_the_parameters_in_experts_are_those_of_the_files(name: str) -> None:
    """Two of four experts are used: a token passes all parameters but half of those that the model has in experts."""
    folder = tiny_families.folder(name)
    facts, inside = models.read_model(folder), _in_experts(folder)
    unread = msgspec.structs.replace(facts, expert_parameters=None, active_parameters=None)
    for each in (facts, with_files(unread, models.tensor_shapes(folder))):  # the latter as of a model on the Hub
        assert each.expert_parameters == inside > 0
        assert each.active_parameters == (facts.parameters or 0) - inside // 2


@pytest.mark.parametrize(
    "further", ["model.layers.2.", "mtp.layers.0."]
)  # of DeepSeek-V3 and GLM-4.5, and of Qwen3-Next
@pytest.mark.parametrize("finetuning", ["lora", "full"])
def test_what_predicts_further_tokens_is_neither_counted_nor_a_target(
    finetuning: str, further: str, tmp_path: Path
) -> None:
    """transformers loads none of it; it says what the model has."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    folder = Path(shutil.copytree(tiny_families.folder("glm4moe"), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    copies = {
        further + name.removeprefix("model.layers.1."): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith("model.layers.1.")
    }
    whole = {"shared_head.head": tensors["lm_head.weight"].clone(), "eh_proj": torch.ones(64, 128)}
    extra = copies | {f"{further}{name}.weight": tensor for name, tensor in whole.items()}
    save_file(tensors | extra, folder / "model.safetensors", metadata={"format": "pt"})
    recipe = from_dict({"model": str(folder), "data": "rows.jsonl", "finetuning_type": finetuning})
    here = models.read_model(folder)
    stored = sum(tensor.numel() for tensor in (tensors | extra).values())
    on_the_hub = msgspec.structs.replace(
        here, parameters=stored, active_parameters=None, expert_parameters=None, further_parameters=0
    )
    built = AutoModelForCausalLM.from_pretrained(folder)
    for facts in (here, planning._with_layers(recipe, on_the_hub, lambda: models.tensor_shapes(folder))):
        # transformers 5 has a number for each expert as a buffer, which the files hold
        assert facts.parameters == sum(tensors[name].numel() for name in tensors)
        assert facts.further_parameters == sum(tensor.numel() for tensor in extra.values())
        assert facts.expert_parameters == _in_experts(folder)
        assert facts.active_parameters == (facts.parameters or 0) - _in_experts(folder) // 2
        assert "eh_proj" not in (facts.linear_layers or ())
    assert 0 <= (here.parameters or 0) - sum(parameter.numel() for parameter in built.parameters()) < 100


def test_keys_that_layers_of_gemma4_do_not_use_are_neither_counted_nor_adapted(tmp_path: Path) -> None:
    """A published E2B has them in its files. transformers loads none of them; PEFT says what it adapts."""
    import peft
    from transformers import AutoModelForCausalLM

    folder = published(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    numbers = {name: tensor.numel() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    recipe = from_dict({"model": str(folder), "data": "rows.jsonl"})
    facts = planning._with_layers(recipe, models.read_model(folder), lambda: models.tensor_shapes(folder))
    assert facts.parameters == sum(numbers.values())
    assert facts.further_parameters == sum(math.prod(shape) for shape in models.tensor_shapes(folder).values()) - (
        facts.parameters or 0
    )
    config = peft.LoraConfig(r=4, target_modules=list(facts.linear_layers or ()), task_type="CAUSAL_LM")
    made = sum(w.numel() for name, w in peft.get_peft_model(model, config).named_parameters() if "lora_" in name)
    assert adapter_parameters(facts, facts.linear_layers or (), 4) == made


def test_the_mlp_beside_the_experts_of_gemma4_is_shared() -> None:
    facts = models.read_model(tiny_families.folder("gemma4moe"))
    assert (facts.experts, facts.intermediate_size, facts.shared_width) == (4, 32, 128)
    config = {"model_type": "gemma4_text", "num_experts": 4, "top_k_experts": 2, "enable_moe_block": False}
    assert model_config.read(config, source="x").experts is None


@pytest.mark.parametrize("name", tiny_families.by_default(TRAINED, TRAINED[:1]))
def test_a_family_without_a_list_trains(commands: Commands, tmp_path: Path, name: str) -> None:
    """Every module that the plan names has its two matrices in the adapter."""
    from safetensors import safe_open

    base = tiny_families.folder(name)
    assert json.loads((base / "config.json").read_text())["model_type"] not in TARGETS
    data = training.write_data(tmp_path, [{"text": f"The parcel {n} is in depot {n}."} for n in range(12)])
    values = f"model: {base}\ndata: {data}\nmax_steps: 1\neffective_batch_size: 4\nmax_length: 64\n"
    (tmp_path / "recipe.yaml").write_text(values)
    done = commands.run(tmp_path, dict(os.environ), "local", "recipe.yaml", "--run-dir", "run", "--format", "json")
    assert done.code in (0, 5), done.stdout  # a step of random weights need not pass the smoke checks
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    reason = next(one for one in plan["reasons"] if one["rule"] == "target_modules")
    assert reason["source"] == "safetensors headers" and plan["recipe"]["target_modules"] == _found(base)
    with safe_open(tmp_path / "run" / "adapter" / "adapter_model.safetensors", framework="numpy") as tensors:
        adapted = {key.split(".lora_")[0].rpartition(".")[2] for key in tensors.keys()}  # noqa: SIM118
    assert adapted == set(_found(base))


@pytest.mark.parametrize("name", tiny_families.by_default(ALL))
def test_a_target_of_a_known_family_is_refused_by_plan_as_by_training(name: str) -> None:
    """Every linear layer of the language model outside experts can be named, and no other name."""
    folder = tiny_families.folder(name)
    read = models.read_model(folder)
    if read.model_type not in TARGETS:
        return
    for target in [*_linear(folder), "lm_head", "experts", "gate", "router", "q_porj", "all_linear"]:
        recipe = from_dict({"model": str(folder), "data": "rows.jsonl", "target_modules": [target]})
        if target in _linear(folder) - LEFT_OUT.get(name, set()):
            planned = planning._with_layers(recipe, read, lambda: models.tensor_shapes(folder))
            assert msgspec.structs.replace(planned, linear_sizes={}) == read
        elif target not in _linear(folder):
            with pytest.raises(UsageError) as caught:
                planning._with_layers(recipe, read, lambda: models.tensor_shapes(folder))
            assert (caught.value.code, caught.value.got) == ("no_such_target", target)
            assert all(layer in caught.value.expected for layer in _found(folder))


@pytest.mark.parametrize("targets", [["gate_proj", "up_proj", "down_proj"], ["q_proj", "gate_proj"]])
def test_an_mlp_beside_experts_is_counted_as_it_is(targets: list[str]) -> None:
    """Of a Qwen2-MoE the shared expert has these layers. The width of a token's experts was counted."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = tiny_families.folder("qwen2moe")
    recipe = from_dict({"model": str(folder), "data": "rows.jsonl", "target_modules": targets})
    planned = planning._with_layers(recipe, models.read_model(folder), lambda: models.tensor_shapes(folder))
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), LoraConfig(r=8, target_modules=targets))
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert adapter_parameters(planned, targets, 8) == trained


@pytest.mark.parametrize("name", tiny_families.by_default(ALL))
def test_a_module_to_save_of_a_known_family_is_refused_by_plan_as_by_training(name: str) -> None:
    """Every module of the model as it runs can be named, by the end of its name as PEFT takes it."""
    from transformers import AutoModelForCausalLM

    folder = tiny_families.folder(name)
    read = models.read_model(folder)
    if read.model_type in TARGETS:
        named = AutoModelForCausalLM.from_pretrained(folder).named_modules(remove_duplicate=False)
        held = {name for name, one in named if name and any(True for _ in one.parameters())}
        _saves_its_modules(folder, held | {name.rpartition(".")[2] for name in held} | {"_head"})


@pytest.mark.parametrize("kind", tiny_vision.one_of_each())
def test_a_module_to_save_of_a_vision_family_is_refused_too(kind: str) -> None:
    """Its modules have other names in memory than in the files."""
    folder = tiny_vision.cached(kind)
    named = empty_model(folder, task_of(folder)).named_modules(remove_duplicate=False)
    _saves_its_modules(folder, {name for name, one in named if name and any(True for _ in one.parameters())})


def _saves_its_modules(folder: Path, names: set[str]) -> None:
    read = models.read_model(folder)
    for name in [*sorted(names), "lm_hed", "embed_token", "act_fn", ""]:
        recipe = from_dict({"model": str(folder), "data": "rows.jsonl", "modules_to_save": [name]})
        if name in names:
            assert planning._with_layers(recipe, read, lambda: models.tensor_shapes(folder)) == read
            continue
        with pytest.raises(UsageError) as caught:
            planning._with_layers(recipe, read, lambda: models.tensor_shapes(folder))
        assert (caught.value.code, caught.value.got) == ("no_such_target", name or "''")
        assert all(layer in caught.value.expected for layer in ["lm_head", *_found(folder)])


@pytest.mark.parametrize(
    ("said", "got", "expected"),
    [
        (
            "target_modules: [q_proj, gate_porj]",
            "gate_porj",
            "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj",
        ),
        ("modules_to_save: [lm_hed]", "lm_hed", "input_layernorm, k_proj, lm_head, norm, o_proj"),
    ],
    ids=["target_modules", "modules_to_save"],
)
@pytest.mark.parametrize("words", [["plan"], ["local", "--run-dir", "run"]])
def test_a_target_that_is_none_costs_no_job(
    commands: Commands, tmp_path: Path, words: list[str], said: str, got: str, expected: str
) -> None:
    data = training.write_data(tmp_path, [{"text": f"The parcel {n} is in depot {n}."} for n in range(12)])
    (tmp_path / "recipe.yaml").write_text(f"model: {tiny.cached('qwen2')}\ndata: {data}\n{said}\n")
    done = commands.run(tmp_path, dict(os.environ), words[0], "recipe.yaml", *words[1:], "--format", "json")
    error = done.answer["error"]
    assert (done.code, error["code"], error["got"]) == (2, "no_such_target", got)
    assert expected in error["expected"]
    assert not (tmp_path / "run").exists()


def test_submit_reads_the_rows_and_names_of_layers_first(tmp_path: Path) -> None:
    """Of a model on the Hub the names come from the headers of its weights."""
    row = {"prompt": "[INST] Where is it? [/INST]", "completion": "In the depot."}
    data = training.write_data(tmp_path, [row] * 12)
    with Hub(tmp_path / "hub") as hub:
        files = {file.name: file.read_bytes() for file in tiny.cached("qwen2").iterdir() if file.is_file()}
        hub.add("model", "me/qwen2", files)
        env = hub.environment(tmp_path / "home")
        commands = Commands(env)  # one that has not read the address of another Hub
        for target, key in (
            ("gate_porj", "target_modules"),
            ("lm_hed", "modules_to_save"),
            ("gate_proj", "target_modules"),
        ):
            (tmp_path / "recipe.yaml").write_text(f"model: me/qwen2\ndata: {data}\n{key}: [{target}]\n")
            done = commands.run(tmp_path, env, "submit", "recipe.yaml", "--dry-run", "--format", "json")
            if target != "gate_proj":
                assert (done.code, done.answer["error"]["got"]) == (2, target), done.stdout
            assert (target == "gate_proj") is ("12 of the first 12 rows hold marks of turns" in done.stderr)
        commands.close()
        assert hub.unknown == []


@pytest.mark.parametrize("said", ["all-linear", "[all-linear]"])
def test_all_linear_means_what_peft_means(commands: Commands, tmp_path: Path, said: str) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    base = tiny.cached("qwen2")
    data = training.write_data(tmp_path, [{"text": f"The parcel {n} is in depot {n}."} for n in range(12)])
    (tmp_path / "recipe.yaml").write_text(f"model: {base}\ndata: {data}\nlora_r: 4\ntarget_modules: {said}\n")
    done = commands.run(tmp_path, dict(os.environ), "plan", "recipe.yaml", "--out", "plan.json", "--format", "json")
    assert done.code == 0, done.stdout
    plan = json.loads((tmp_path / "plan.json").read_text())
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    adapted = {name.rpartition(".")[2] for name in model.peft_config["default"].target_modules}
    assert set(plan["recipe"]["target_modules"]) == adapted
    assert plan["asked"]["target_modules"] == ["all-linear"]
    made = sum(weight.numel() for key, weight in model.named_parameters() if "lora_" in key)
    assert adapter_parameters(_facts_of(plan), plan["recipe"]["target_modules"], 4) == made


def test_all_linear_needs_the_weights(tmp_path: Path, commands: Commands) -> None:
    base = Path(shutil.copytree(tiny.cached("qwen2"), tmp_path / "base"))
    (base / "model.safetensors").unlink()
    data = training.write_data(tmp_path, [{"text": f"The parcel {n} is in depot {n}."} for n in range(12)])
    (tmp_path / "recipe.yaml").write_text(f"model: {base}\ndata: {data}\ntarget_modules: all-linear\n")
    done = commands.run(tmp_path, dict(os.environ), "plan", "recipe.yaml", "--format", "json")
    assert (done.code, done.answer["error"]["code"]) == (2, "no_such_target")
    assert "weight files" in done.answer["error"]["expected"]


def test_the_hub_is_asked_for_the_layers(tmp_path: Path) -> None:
    """The names come from the headers: the plan of a folder with the same files has them too."""
    base = tiny_families.folder("lfm2")
    data = training.write_data(tmp_path, [{"text": f"The parcel {n} is in depot {n}."} for n in range(12)])
    with Hub(tmp_path / "hub") as hub:
        files = {file.name: file.read_bytes() for file in base.iterdir() if file.is_file()}
        hub.add("model", "me/lfm2", files)
        env = hub.environment(tmp_path / "home")
        commands = Commands(env)  # one that has not read the address of another Hub
        done = commands.run(tmp_path, env, "plan", "--model", "me/lfm2", "--data", str(data), "--out", "plan.json")
        commands.close()
        assert hub.unknown == []
    assert done.code == 0, done.stdout
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["recipe"]["target_modules"] == _found(base) != []


def test_a_type_that_transformers_cannot_run_is_refused(commands: Commands, tmp_path: Path) -> None:
    """Also with targets, or where every weight trains: a job would start, and could not load the model."""
    base = tmp_path / "base"
    base.mkdir()
    for file in tiny_families.folder("arcee").iterdir():
        shutil.copy(file, base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").unlink()
    (base / "config.json").write_text(json.dumps(config | {"model_type": "brandnew"}))
    data = training.write_data(tmp_path, [{"text": f"The parcel {n}."} for n in range(12)])
    for said in ("", "target_modules: [q_proj]", "finetuning_type: full"):
        (tmp_path / "recipe.yaml").write_text(f"model: {base}\ndata: {data}\n{said}\n")
        done = commands.run(tmp_path, dict(os.environ), "plan", "recipe.yaml")
        assert (done.code, done.answer["error"]["code"]) == (2, "unknown_model_type"), said


def _facts_of(plan: dict[str, Any]) -> ModelFacts:
    return msgspec.convert(plan["facts"]["model"], ModelFacts)


def _found(folder: Path) -> list[str]:
    facts = models.read_model(folder)
    return linear_layers(models.tensor_shapes(folder), vocab_size=facts.vocab_size, experts=facts.experts)


def _linear(folder: Path) -> set[str]:
    """The last names of the linear layers of the model as it runs, without its output layer."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    model = AutoModelForCausalLM.from_pretrained(folder)
    named = model.named_modules()
    last = model.get_output_embeddings()
    return {
        name.rpartition(".")[2] for name, one in named if isinstance(one, (torch.nn.Linear, Conv1D)) and one is not last
    }


def _in_experts(folder: Path) -> int:
    """The parameters of the model in modules that transformers calls experts."""
    from transformers import AutoModelForCausalLM

    modules = AutoModelForCausalLM.from_pretrained(folder).modules()
    experts = [one for one in modules if "Experts" in type(one).__name__]
    return sum(parameter.numel() for one in experts for parameter in one.parameters())


@pytest.mark.parametrize("said", [["o_proj", "gate_proj"], ["gate_proj", "up_proj", "down_proj"]], ids=len)
def test_names_that_peft_takes_for_experts_are_refused(commands: Commands, tmp_path: Path, said: list[str]) -> None:
    """DeepSeek has the same names in its dense layers, so they are modules of the model."""
    data = training.write_data(tmp_path, [{"text": f"The parcel {n} is in depot {n}."} for n in range(12)])
    values = f"model: {tiny_families.folder('deepseek3')}\ndata: {data}\nmax_steps: 1\neffective_batch_size: 4\n"
    (tmp_path / "recipe.yaml").write_text(f"{values}max_length: 64\nlora_dropout: 0\ntarget_modules: {said}\n")
    done = commands.run(tmp_path, dict(os.environ), "local", "recipe.yaml", "--run-dir", "run", "--format", "json")
    assert (done.code, done.answer["error"]["code"]) == (2, "no_such_target"), done.stdout
    assert "gate_proj" in done.answer["error"]["got"] and not (tmp_path / "run" / "adapter").exists()
