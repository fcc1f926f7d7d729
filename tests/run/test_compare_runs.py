"""What counts as the recipe and what as placement, on the files of a real run: tiny Gemma on a CPU, eight steps,
recorded 2026-11-21 with the program of that day and transformers 5.23, trl 1.16, peft 0.21, torch 2.13."""

from __future__ import annotations

import dataclasses
import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from skill_train.commands import diff as diff_command
from skill_train.commands.diff import DiffOptions
from skill_train.core.console import MAX_JSON_BYTES, Console
from skill_train.core.digests import FileDigest
from skill_train.core.errors import UsageError
from skill_train.recipe.fields import recipe_hash
from skill_train.run import compare_runs as diff
from skill_train.run.export_record import ExportedFile, MatrixChoice, MatrixUse
from skill_train.run.folder import RunDir
from skill_train.run.train_record import StepLine, read_steps

run = inspect.unwrap(diff_command.diff.callback)
RECORDED = Path(__file__).resolve().parent.parent / "support" / "data" / "runs" / "tiny"


def recorded() -> diff.ComparedRun:
    return diff.read_run(RunDir(RECORDED))


def changed(part: str, *path: str | int, to: Any) -> diff.ComparedRun:
    """The recorded run with one value replaced."""
    run = recorded()
    kept = getattr(run, part)
    document = msgspec.to_builtins(kept)
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    kind = list[type(kept[0])] if isinstance(kept, list) and part == "metrics" else type(kept)  # type: ignore[misc]
    return dataclasses.replace(run, **{part: document if part == "samples" else msgspec.convert(document, kind)})


def write_trained(folder: Path, plan: dict[str, Any]) -> None:
    """The plan, and a `train.json` of its recipe."""
    plan["recipe_hash"] = recipe_hash(plan["recipe"], plan["fingerprints"])
    (folder / "plan.json").write_text(json.dumps(plan))
    train = json.loads((folder / "train.json").read_text()) | {"recipe_hash": plan["recipe_hash"]}
    (folder / "train.json").write_text(json.dumps(train))


def facts(found: list[diff.RunDifference]) -> list[str]:
    return [each.fact for each in found]


def test_a_run_is_the_same_as_itself() -> None:
    found = diff.compare(recorded(), recorded())
    assert (found.verdict, found.recipe, found.placement, found.not_compared) == ("same", [], [], [])
    assert found.losses == {"steps": 8, "equal": True, "largest_difference": 0.0, "at_step": None}
    assert found.same_weights is True
    # SFTConfig alone has 135 arguments (trl 1.16)
    assert found.compared > 250


NESTED = changed("environment", "trainer", "accelerator_config", "split_batches", to=True)
RECIPE: list[tuple[str, diff.ComparedRun]] = [
    ("recipe.hash", changed("plan", "recipe_hash", to="0" * 64)),
    ("recipe.learning_rate", changed("plan", "recipe", "learning_rate", to=3e-4)),
    ("recipe.model.sha256", changed("plan", "fingerprints", "model", to="0" * 64)),
    ("recipe.data.sha256", changed("plan", "fingerprints", "data", to="0" * 64)),
    ("trainer.learning_rate", changed("environment", "trainer", "learning_rate", to=3e-4)),
    ("trainer.seed", changed("environment", "trainer", "seed", to=43)),
    ("trainer.accelerator_config.split_batches", NESTED),
    ("trainer.an_argument_of_next_year", changed("environment", "trainer", "an_argument_of_next_year", to=1)),
    ("lora.lora_alpha", changed("environment", "lora", "lora_alpha", to=64.0)),
    ("lora.target_modules", changed("environment", "lora", "target_modules", to=["q_proj"])),
    ("optimizer.class", changed("environment", "optimizer", "class", to="SGD")),
    ("optimizer.groups.1.betas", changed("environment", "optimizer", "groups", 1, "betas", to=[0.9, 0.95])),
    ("schedule.num_warmup_steps", changed("environment", "schedule", "num_warmup_steps", to=1)),
    ("program.sha256", changed("environment", "program", "sha256", to="0" * 64)),
    ("versions.torch", changed("environment", "versions", "torch", to="2.12.0+cpu")),
    ("versions.trl", changed("environment", "versions", "trl", to="1.17.0")),
    ("data.order_sha256", changed("environment", "data", "order_sha256", to="0" * 64)),
    ("data.rows_sha256", changed("environment", "data", "rows_sha256", to="0" * 64)),
    ("data.fed_trained_tokens", changed("environment", "data", "fed_trained_tokens", to=906)),
    ("data.first_batches.3", changed("environment", "data", "first_batches", 2, to="0" * 16)),
    ("samples.row", changed("samples", 1, "row", to=99)),
    ("step 4.trained_tokens", changed("metrics", 3, "trained_tokens", to=1)),
    ("step 2.learning_rate", changed("metrics", 1, "learning_rate", to=1e-5)),
]  # fmt: skip


@pytest.mark.parametrize(("fact", "other"), RECIPE, ids=[fact for fact, _ in RECIPE])
def test_a_change_of_the_recipe_is_named(fact: str, other: diff.ComparedRun) -> None:
    found = diff.compare(recorded(), other)
    assert (found.verdict, facts(found.recipe), found.placement) == ("different", [fact], [])


PLACEMENT: list[tuple[str, diff.ComparedRun]] = [
    ("placement.backend", changed("plan", "placement", "backend", to="hf_jobs")),
    ("placement.dtype", changed("plan", "placement", "dtype", to="bfloat16")),
    ("launch.flavor", changed("plan", "flavor", to="a10g-small")),
    ("launch.arguments", changed("plan", "launch", "arguments", to=["--multi_gpu"])),
    ("recipe.data.path", changed("plan", "recipe", "data", to="elsewhere/rows.jsonl")),
    ("policy.hub_model_id", changed("plan", "policy", "hub_model_id", to="me/tuned")),
    ("trainer.per_device_train_batch_size", changed("environment", "trainer", "per_device_train_batch_size", to=2)),
    ("trainer.output_dir", changed("environment", "trainer", "output_dir", to="elsewhere")),
    ("model.dtype", changed("environment", "model", "dtype", to="torch.bfloat16")),
    ("optimizer.groups.0.fused", changed("environment", "optimizer", "groups", 0, "fused", to=True)),
    ("lora.base_model_name_or_path", changed("environment", "lora", "base_model_name_or_path", to="elsewhere")),
    ("versions.torch_build", changed("environment", "versions", "torch", to="2.13.0+cu130")),
    ("machine.device", changed("environment", "device", to="cuda:0")),
    ("processes.count", changed("environment", "processes", "count", to=8)),
]


@pytest.mark.parametrize(("fact", "other"), PLACEMENT, ids=[fact for fact, _ in PLACEMENT])
def test_a_change_of_the_placement_is_listed(fact: str, other: diff.ComparedRun) -> None:
    found = diff.compare(recorded(), other)
    assert (found.verdict, facts(found.placement), found.recipe) == ("same", [fact], [])


def test_a_token_that_differs_is_placed() -> None:
    ids = recorded().samples[1]["input_ids"]
    found = diff.compare(recorded(), changed("samples", 1, "input_ids", to=[*ids[:4], 5, *ids[5:]]))
    (one,) = found.recipe
    assert one.fact == f"samples.row {recorded().samples[1]['row']}.input_ids from 4"
    assert (one.a[0], one.b[0], one.a[1:]) == (ids[4], 5, one.b[1:])


def test_losses_are_told_and_not_judged() -> None:
    line = recorded().metrics[4]
    found = diff.compare(recorded(), changed("metrics", 4, "loss", to=(line.loss or 0) + 0.25))
    assert found.verdict == "same"
    assert found.losses == {"steps": 8, "equal": False, "largest_difference": 0.25, "at_step": 5}


def test_a_loss_that_is_no_number_is_not_equal_to_one() -> None:
    """The losses of a run that diverged `differ by up to 0 (step None)`."""
    found = diff.compare(recorded(), changed("metrics", 6, "loss", to=None))
    assert found.losses == {"steps": 7, "equal": True, "largest_difference": 0.0, "at_step": None}
    assert (found.verdict, found.not_compared) == ("incomplete", ["loss of step 7: only run A has a record"])
    found = diff.compare(changed("metrics", 6, "loss", to=None), recorded())
    assert found.not_compared == ["loss of step 7: only run B has a record"]
    ended = dataclasses.replace(recorded(), metrics=changed("metrics", 6, "loss", to=None).metrics[:7])
    found = diff.compare(recorded(), ended)
    assert found.not_compared == [f"{what}: only run A has a record" for what in ("loss of step 7", "steps after 7")]


# --- The quantized files ---


def matrix(words: str, number: str) -> MatrixUse:
    return {"file": "imatrix.gguf", "sha256": number * 64, "model": "", "data": words}


def chosen(near: float, plain: float) -> MatrixChoice:
    return {
        "with_matrix": {"mean_kl": near, "same_top1": 1.0, "tokens": 100},
        "without_matrix": {"mean_kl": plain, "same_top1": 0.9, "tokens": 100},
    }


def exported(*files: ExportedFile) -> diff.ComparedRun:
    return dataclasses.replace(recorded(), quantized=list(files))


def listed(a: diff.ComparedRun, b: diff.ComparedRun) -> dict[str, tuple[Any, Any]]:
    """The differences of the files. They never change the verdict."""
    found = diff.compare(a, b)
    assert (found.verdict, found.recipe, found.placement, found.not_compared) == ("same", [], [], [])
    return {each.fact: (each.a, each.b) for each in found.exports}


Q4: ExportedFile = {"bytes": 900, "sha256": "1" * 64, "quant": "q4_k_m", "seconds": 1.5}
MIXED: ExportedFile = {
    "bytes": 800, "sha256": "2" * 64, "quant": "auto-5bpw", "types": {"q4_k": 2, "f32": 1},
    "measured": {"mean_kl": 0.25, "same_top1": 1.0, "tokens": 100},
    "tensor_types": {"a": "q4_k", "b": "q4_k"},
    "mix": {"target": "auto-5bpw", "estimated_kl": 0.5, "measured_pairs": 4, "pairs": 4},
}  # fmt: skip


def test_equal_files_differ_in_nothing_and_one_run_without_files_is_not_compared() -> None:
    again: ExportedFile = {**Q4, "seconds": 9.0}  # a time is no difference
    assert listed(exported(Q4, MIXED), exported(MIXED, again)) == {}
    assert listed(exported(Q4), exported()) == listed(exported(), exported(Q4)) == {}


def test_a_type_that_one_run_has_is_named() -> None:
    assert listed(exported(Q4, MIXED), exported(MIXED)) == {"export.q4_k_m": ("900 bytes", "(absent)")}
    assert listed(exported(MIXED), exported(Q4, MIXED)) == {"export.q4_k_m": ("(absent)", "900 bytes")}


def test_matrices_and_what_was_measured_of_them_are_told() -> None:
    here: ExportedFile = {**Q4, "imatrix": matrix("training rows", "a"), "choice": chosen(0.125, 0.25)}
    there: ExportedFile = {**here, "imatrix": matrix("samples.jsonl", "b"), "choice": chosen(0.5, 0.75)}
    assert listed(exported(here), exported(there)) == {
        "export.q4_k_m.imatrix.data": ("training rows", "samples.jsonl"),
        "export.q4_k_m.imatrix.sha256": ("a" * 64, "b" * 64),
        "export.q4_k_m.choice.kl_with_matrix": (0.125, 0.5),
        "export.q4_k_m.choice.kl_without_matrix": (0.25, 0.75),
    }
    without: ExportedFile = {**Q4, "sha256": "3" * 64, "choice": chosen(0.5, 0.25)}  # it did not help there
    assert listed(exported(here), exported(without)) == {
        "export.q4_k_m.sha256": ("1" * 64, "3" * 64),
        "export.q4_k_m.imatrix.data": ("training rows", "(absent)"),
        "export.q4_k_m.imatrix.sha256": ("a" * 64, "(absent)"),
        "export.q4_k_m.choice.kl_with_matrix": (0.125, 0.5),
    }


def test_the_types_of_a_mix_are_told_and_the_first_matrices_that_differ() -> None:
    other: ExportedFile = {
        **MIXED,
        "types": {"q5_k": 1, "f32": 1, "q4_k": 1},
        "measured": {"mean_kl": 0.125, "same_top1": 1.0, "tokens": 100},
        "tensor_types": {"a": "q4_k", "b": "q5_k"},
    }
    assert listed(exported(MIXED), exported(other)) == {
        "export.auto-5bpw.mean_kl": (0.25, 0.125),
        "export.auto-5bpw.types": ("1 f32, 2 q4_k", "1 f32, 1 q4_k, 1 q5_k"),
        "export.auto-5bpw.types.b": ("q4_k", "q5_k"),
    }
    many: ExportedFile = {**MIXED, "tensor_types": {f"m{number}": "q4_k" for number in range(9)}}
    finer: ExportedFile = {**MIXED, "tensor_types": {f"m{number}": "q6_k" for number in range(9)}}
    assert list(listed(exported(many), exported(finer))) == [f"export.auto-5bpw.types.m{number}" for number in range(5)]


def test_the_command_reads_the_records_of_both_exports(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    runs = [Path(shutil.copytree(RECORDED, tmp_path / name)) for name in "ab"]
    for run_dir, words in zip(runs, ("training rows", "samples.jsonl"), strict=True):
        file: ExportedFile = {**Q4, "imatrix": matrix(words, "a")}
        document = {"schema": "skill-train/step/1", "step": "quantize", "outputs": {"gguf/run-q4_k_m.gguf": file}}
        (run_dir / "quantize.json").write_text(json.dumps(document))
    console = Console("json", "diff")
    assert console.result(run(DiffOptions(*runs), console)) == 0
    data = json.loads(capsys.readouterr().out)["data"]
    fact = {"fact": "export.q4_k_m.imatrix.data", "a": "training rows", "b": "samples.jsonl"}
    assert (data["verdict"], data["exports"], data["counts"]["exports"]) == ("same", [fact], 1)


def test_other_weights_without_a_reason_are_told() -> None:
    name = "adapter/adapter_model.safetensors"
    other = changed("train", "outputs", name, "sha256", to="0" * 64)
    found = diff.compare(recorded(), other)
    assert (found.same_weights, found.unexplained, found.verdict) == (False, True, "same")
    elsewhere = changed("environment", "device_name", to="another processor")
    assert diff.compare(recorded(), dataclasses.replace(other, environment=elsewhere.environment)).unexplained is False


def test_a_fact_that_only_one_run_has_is_said() -> None:
    """A run of an earlier version has no record of the data; one that failed has fewer steps and no weights."""
    old = recorded()
    assert old.environment is not None
    environment = msgspec.structs.replace(old.environment, data=None, optimizer=None)
    old = dataclasses.replace(old, environment=environment)
    found = diff.compare(recorded(), old)
    assert found.verdict == "incomplete"
    assert found.not_compared == ["data: only run A has a record", "optimizer: only run A has a record"]
    failed = diff.ComparedRun(recorded().plan, recorded().environment, None, recorded().metrics[:5], recorded().samples)
    found = diff.compare(failed, recorded())
    assert found.not_compared == ["trained weights: only run B has a record", "steps after 5: only run B has a record"]
    assert found.same_weights is None
    assert (found.losses or {})["steps"] == 5
    for pair, which in (((failed, recorded()), "B"), ((recorded(), failed), "A")):
        without = [dataclasses.replace(run, metrics=[]) if run is failed else run for run in pair]
        assert f"losses: only run {which} has a record" in diff.compare(*without).not_compared
    assert (
        diff.compare(diff.ComparedRun(old.plan), diff.ComparedRun(old.plan)).not_compared[0]
        == "program: neither run has a record"
    )


def test_another_base_is_another_recipe() -> None:
    def of_base(digest: str) -> diff.ComparedRun:
        kept = recorded().environment
        assert kept is not None
        base = {"model.safetensors": FileDigest(bytes=9, sha256=digest)}
        return dataclasses.replace(recorded(), environment=msgspec.structs.replace(kept, base_weights=base))

    assert diff.compare(of_base("a"), of_base("a")).verdict == "same"
    other = diff.compare(of_base("a"), of_base("b"))
    assert facts(other.recipe) == ["base_weights.model.safetensors.sha256"] and other.placement == []
    for pair, which in (((of_base("a"), recorded()), "A"), ((recorded(), of_base("a")), "B")):
        earlier = diff.compare(*pair)  # a run of an earlier version has no record of it
        assert earlier.not_compared == [f"base_weights: only run {which} has a record"]
        assert earlier.verdict == "incomplete"


def test_an_adapter_on_one_side_alone_is_another_recipe() -> None:
    found = diff.compare(recorded(), changed("environment", "lora", to=None))
    assert "lora.r" in facts(found.recipe) and found.not_compared == []


def test_every_placement_argument_is_one_of_the_trainer() -> None:
    """A renamed argument must not stay excused."""
    environment = recorded().environment
    assert environment and environment.trainer and environment.lora and environment.optimizer
    assert set(environment.trainer) >= diff.PLACEMENT_ARGUMENTS
    assert set(environment.lora) | {"runtime_config"} >= diff.PLACEMENT_OF["lora"]
    assert set(environment.optimizer["groups"][0]) >= diff.PLACEMENT_OF["optimizer"]


def test_the_arguments_that_decide_the_model_are_of_the_recipe() -> None:
    """Of the argument groups "Training hyperparameters" and "Optimizer" in transformers' documentation."""
    decide = (
        "learning_rate lr_scheduler_type warmup_steps weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm"
    )
    others = "optim seed data_seed max_steps loss_type label_smoothing_factor neftune_noise_alpha packing max_length"
    for name in f"{decide} {others} average_tokens_across_devices train_sampling_strategy use_liger_kernel".split():
        assert not diff.is_placement(f"trainer.{name}"), name


def test_the_answer_names_what_differs_within_its_bound(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Another model and everything else other too: the answer stays an answer."""
    other = Path(shutil.copytree(RECORDED, tmp_path / "run"))
    plan = json.loads((other / "plan.json").read_text())
    long = "é" * 3000
    plan["recipe"] |= {
        key: [long] if key in ("target_modules", "modules_to_save")
        else {long: long} if key == "columns"
        else value + 1 if type(value) in (int, float)
        else not value if isinstance(value, bool)
        else long
        for key, value in plan["recipe"].items()
    }  # fmt: skip
    write_trained(other, plan)
    (other / "environment.json").write_text(json.dumps({"trainer": {}, "lora": None}))
    console = Console("json", "diff")
    assert console.result(run(DiffOptions(RECORDED, other), console)) == 6
    text = capsys.readouterr().out
    assert len(text.encode()) <= MAX_JSON_BYTES
    answer = json.loads(text)
    assert answer["error"]["code"] == "different_recipe"
    assert answer["error"]["got"].startswith("recipe.") and answer["data"]["counts"]["recipe"] >= 30
    assert len(answer["data"]["recipe"]) >= 3


def test_a_torn_last_line_is_left_out_and_a_broken_one_is_not(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "steps": 9}\n{"st')
    assert read_steps(file) == [StepLine(step=1, steps=9)]
    file.write_text('{"st\n{"step": 2}\n')
    with pytest.raises(UsageError) as caught:
        read_steps(file)
    assert (caught.value.code, caught.value.message) == ("broken_record", f"line 1 of {file} is not JSON")
    assert caught.value.hint.startswith("move it away, then ")  # `report` can do without, and read it at each call


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"recipe": {"model": "me/tiny-gemma", "revision": "a" * 40}, "gone": "model"}, "the model's name"),
        ({"recipe": {"data": "me/rows", "data_revision": "a" * 40}, "gone": "data"}, "the data's name"),
        ({"recipe": {"learning_rate": 0.5}, "gone": None}, "make both runs of one recipe file"),
    ],
)
def test_the_hint_knows_a_folder_against_an_id(
    changes: dict[str, Any], named: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = Path(shutil.copytree(RECORDED, tmp_path / "other"))
    plan = json.loads((other / "plan.json").read_text())
    plan["recipe"] |= changes["recipe"]
    plan["fingerprints"].pop(changes["gone"], None)
    write_trained(other, plan)
    console = Console("json", "diff")
    assert console.result(run(DiffOptions(RECORDED, other), console)) == 6
    answer = json.loads(capsys.readouterr().out)
    assert named in answer["error"]["hint"]
    assert ("trained weights are the same" in answer["error"]["hint"]) == (changes["gone"] is not None)
    assert answer["next"] == [f"skill-train report {RECORDED} {other}"]


def test_a_version_that_is_null_is_no_build_of_torch() -> None:
    other = changed("environment", "versions", "torch", to=None)
    assert "versions.torch" in {each.fact for each in diff.compare(recorded(), other).recipe}
