"""Full fine-tuning: every weight of a tiny model trains, and what it leaves is exported and proven as it is."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import picture_runs
import shared_runs
import tiny
import tiny_families
import training
from skill_train.model import sidecar_files
from skill_train.program.main import main

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_threads", "short_answers")]

FULL: dict[str, Any] = {"finetuning_type": "full", "learning_rate": 1e-3}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps of two batches, with a checkpoint every second step."""
    run = training.write_run(tmp_path_factory.mktemp("straight") / "run", split=(2, 2, 1), **FULL)
    assert main([str(run / "plan.json")]) == 0
    return run


# --- What it leaves ---


def test_the_whole_model_with_the_files_of_its_base(straight: Path) -> None:
    base = tiny.cached("gemma")
    names = {path.name for path in base.iterdir()}
    assert {path.name for path in (straight / "merged").iterdir()} == names
    assert not (straight / "adapter").exists() and not list(straight.rglob("*.part"))
    for name in names - {"model.safetensors"}:
        assert (straight / "merged" / name).read_bytes() == (base / name).read_bytes(), name
    record = json.loads((straight / "train.json").read_text())
    digest = hashlib.sha256((straight / "merged" / "model.safetensors").read_bytes()).hexdigest()
    beside = {"environment.json", "metrics.jsonl", "samples.jsonl"}
    assert set(record["outputs"]) == beside | {f"merged/{name}" for name in names}
    environment = hashlib.sha256((straight / "environment.json").read_bytes()).hexdigest()
    assert record["outputs"]["environment.json"]["sha256"] == environment
    assert record["outputs"]["merged/model.safetensors"]["sha256"] == digest
    assert record["saved_dtype"] == "float32"


def test_every_weight_has_trained(straight: Path) -> None:
    """Of the embedding only the rows of tokens that are read or scored; the head is the embedding, so all of them."""
    before, after = _weights(tiny.cached("gemma")), _weights(straight / "merged")
    assert before.keys() == after.keys()
    assert [name for name, weight in after.items() if not bool((weight != before[name]).any())] == []
    record = json.loads((straight / "train.json").read_text())
    checks = {check["name"]: check for check in record["checks"]}
    names = ["model_loads", "batches_are_valid", "accumulation", "loss_falls", "checkpoint_saves", "model_reloads"]
    assert list(checks) == names and record["verdict"] == "pass", record["checks"]
    assert checks["model_loads"]["figure"] == sum(weight.numel() for weight in before.values())
    assert checks["model_reloads"]["figure"] == 0.0  # float32 on both sides, the same arithmetic


def test_resumed_it_ends_in_the_same_bytes(straight: Path, tmp_path: Path) -> None:
    _same_after_a_stop(straight, tmp_path)


@pytest.mark.parametrize("kind", ["gemma3", "mixtral"])
def test_so_does_a_model_whose_weights_have_other_names_on_disk(kind: str, tmp_path: Path) -> None:
    """transformers (5.23) goes on from a checkpoint by the names of the modules, and leaves out what it does not
    know: each expert of Mixtral, and all of Gemma 3 with pictures, which would begin again from the base."""
    values = FULL | {"max_steps": 4}
    if kind == "gemma3":
        run = picture_runs.write_run(tmp_path / "run", kind, placement={"save_steps": 2}, **values)
    else:
        run = training.write_run(tmp_path / "run", base=tiny_families.folder(kind), **values)
    assert main([str(run / "plan.json")]) == 0
    _same_after_a_stop(run, tmp_path / "again")


def _same_after_a_stop(whole: Path, folder: Path) -> None:
    run = Path(shutil.copytree(whole, folder / "run"))
    shutil.rmtree(run / "merged")
    shutil.rmtree(max(run.glob("checkpoints/checkpoint-*"), key=lambda path: int(path.name[11:])))
    (run / "train.json").unlink()
    assert main([str(run / "plan.json"), "--resume"]) == 0
    assert [line["loss"] for line in training.metrics(run)] == [line["loss"] for line in training.metrics(whole)]
    files = [path / "merged" / "model.safetensors" for path in (run, whole)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_run_in_the_folder_of_its_base_takes_the_files_that_a_merge_takes(tmp_path: Path) -> None:
    """And an earlier run beside it is no part of the base."""
    base = Path(shutil.copytree(tiny.cached("gemma"), tmp_path / "base"))
    names = {path.name for path in base.iterdir()}
    for name in ("earlier/plan.json", "earlier/samples.jsonl", "rows.csv", "notes/rows.json", ".cache/x", "README.md"):
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_text("[]")
    taken = {path.name for path in sidecar_files.companion_files(base)}
    assert taken == names - {"model.safetensors"} | {"README.md"}  # the base's card, which a merge keeps
    run = training.write_run(base / "runs" / "run", base=base, **FULL | {"max_steps": 1})
    assert main([str(run / "plan.json")]) == 0
    assert {str(path.relative_to(run / "merged")) for path in (run / "merged").rglob("*") if path.is_file()} == names


# --- Precision ---


@pytest.mark.parametrize(("pure", "dtype"), [(False, "float32"), (True, "bfloat16")])
def test_a_base_in_bfloat16(pure: bool, dtype: str, tmp_path: Path) -> None:
    """Autocast trains float32 weights; `pure_bf16` rounds each step to 8 bits, and most small ones are lost: at 1e-6 a
    weight of 0.02 would have to move by 2**-8 of it, 80 times as far."""
    base = tmp_path / "base"
    shutil.copytree(tiny.cached("gemma", dtype="bfloat16"), base)
    (base / "generation_config.json").unlink()  # what the base has not, transformers would add
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"eos_token_id": [1, 6]}))  # <eos> and <end_of_turn>
    values = FULL | {"learning_rate": 1e-6, "pure_bf16": pure, "max_steps": 2}
    run = training.write_run(tmp_path / "run", base=base, placement={"dtype": "bfloat16"}, **values)
    assert main([str(run / "plan.json")]) == 0
    assert json.loads((run / "environment.json").read_text())["trainer"]["bf16"] is not pure
    assert json.loads((run / "train.json").read_text())["saved_dtype"] == dtype
    assert {path.name for path in (run / "merged").iterdir()} == {path.name for path in base.iterdir()}
    config = [json.loads((path / "config.json").read_text()) for path in (run / "merged", base)]
    assert config[0] == config[1] | {"dtype": dtype}
    before, after = _weights(base), _weights(run / "merged")
    changed = [(after[name] != before[name].to(after[name].dtype)).float().mean() for name in before if "proj" in name]
    assert max(changed) < 0.5 if pure else min(changed) > 0.9


def test_steps_too_small_for_the_weights_are_no_training(tmp_path: Path) -> None:
    """At 1e-12 only weights below 2e-5 move in float32."""
    values = FULL | {"learning_rate": 1e-12, "max_steps": 2}
    run = training.write_run(tmp_path / "run", base=tiny.cached("gemma"), **values)
    assert main([str(run / "plan.json")]) == 0
    record = json.loads((run / "train.json").read_text())
    (check,) = [each for each in record["checks"] if each["name"] == "loss_falls"]
    assert (record["verdict"], check["verdict"], check["figure"]) == ("fail", "fail", 0.0)
    assert "% of the weights have moved" in check["detail"]


# --- Several processes ---


@pytest.mark.torture
def test_sharded_by_fsdp_it_is_the_same_training(straight: Path, tmp_path: Path) -> None:
    """Two processes, FSDP 2 over gloo. The embedding is the head: it is saved once, by one name."""
    placement = {"strategy": "fsdp", "offload": False}
    run = training.write_run(tmp_path / "run", split=(2, 1, 2), placement=placement, save_steps=4, **FULL)
    assert training.sharded(run) == 0, (run / "log").read_text()[-3000:]
    losses = [[line["loss"] for line in training.metrics(path)] for path in (straight, run)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    weights = [_weights(path / "merged") for path in (straight, run)]
    assert weights[0].keys() == weights[1].keys()
    assert max(float((weights[1][name] - weights[0][name]).abs().max()) for name in weights[0]) < 1e-4


# --- The chain ---


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, subprocess.CompletedProcess[str]]]:
    folder = tmp_path_factory.mktemp("chain")
    tiny.write_rows(folder / "rows.jsonl", 24)
    recipe = {
        "model": str(tiny.cached("gemma")),
        "data": "rows.jsonl",
        "max_steps": 8,
        "effective_batch_size": 4,
        **FULL,
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    run = folder / "run"
    commands: dict[str, tuple[Any, ...]] = {
        "local": ("local", folder / "recipe.yaml", "--run-dir", run),
        "again": ("local", folder / "recipe.yaml", "--run-dir", run),
        "merge": ("merge", run),
        "lora": ("export-gguf", run, "--lora"),
        "export-gguf": ("export-gguf", run, "--quant", "q8_0"),
        "verify": ("verify", run),
    }
    return run, {name: _call(folder, *command) for name, command in commands.items()}


def test_trained_exported_and_proven_without_a_merge(chain: Any) -> None:
    run, calls = chain
    for name in ("local", "again", "export-gguf", "verify"):
        assert calls[name].returncode == 0, calls[name].stderr
    assert _answer(calls["again"])["data"]["reused"] is True
    assert _answer(calls["verify"])["data"]["verdict"] == "pass"
    assert not (run / "merge.json").exists() and not (run / "adapter").exists()
    checks = {check["name"]: check for check in _answer(calls["verify"])["data"]["checks"]}
    assert checks["tuned"]["figure"] == pytest.approx(1.0, abs=0.05)  # all of the tuning is in the file


@pytest.mark.parametrize(("name", "code"), [("merge", "no_adapter"), ("lora", "no_adapter")])
def test_what_needs_an_adapter_says_that_there_is_none(chain: Any, name: str, code: str) -> None:
    run, calls = chain
    assert calls[name].returncode == 2
    error = _answer(calls[name])["error"]
    assert (error["code"], error["hint"]) == (code, f"skill-train export-gguf {run}")


def test_a_model_that_changed_after_training_is_refused(chain: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(chain[0], run)
    (run / "merged" / "config.json").write_text((run / "merged" / "config.json").read_text() + "\n")
    done = _call(tmp_path, "export-gguf", run)
    assert (done.returncode, _answer(done)["error"]["code"]) == (2, "output_changed")


def _weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(folder / "model.safetensors"))


def _call(folder: Path, *arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [shared_runs.script(), *map(str, arguments), "--format", "json"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def _answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return dict(json.loads(done.stdout))
