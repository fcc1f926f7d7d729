"""A base or data that changed behind a run: no later step takes the one for the other."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import step_records
import tiny
from command_child import Commands, Done
from skill_train.machine.training_program import train_program
from skill_train.model.folder import fingerprint
from skill_train.recipe.fields import recipe_hash

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, rows, and an exported run of three steps."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(tiny.cached("gemma"), folder / "base")
    tiny.write_rows(folder / "rows.jsonl", 24)
    recipe = "model: base\ndata: rows.jsonl\nmax_steps: 3\nmax_length: 96\n"
    (folder / "recipe.yaml").write_text(recipe)
    for line in ("local recipe.yaml --run-dir run", "export-gguf run --quant q8_0"):
        done = _call(commands, folder, line)
        assert done.code == 0, done.stdout + done.stderr
    return folder


# --- The base of a finished run ---


@pytest.mark.parametrize("line", ["merge run", "export-gguf run --lora", "verify run", "evaluate run"])
def test_a_base_that_was_replaced_is_refused(commands: Commands, trained: Path, line: str) -> None:
    """Else a model that was never trained would be merged, or proven as the one that was."""
    base, weights = trained / "base", trained / "base" / "model.safetensors"
    was, kept = fingerprint(base), weights.read_bytes()
    _other_weights(weights)
    try:
        done = _call(commands, trained, line)
        assert done.error == (2, "input_changed"), done.stdout + done.stderr
        error = done.answer["error"]
        assert str(base) in error["message"]
        assert was[:12] in error["expected"] and fingerprint(base)[:12] in error["got"]
    finally:
        weights.write_bytes(kept)


def test_the_same_base_brought_back_is_taken(commands: Commands, trained: Path) -> None:
    """Files of another time, beside a folder that is none of the model's."""
    base = trained / "base"
    shutil.copytree(base, trained / "copy")
    shutil.rmtree(base)
    shutil.copytree(trained / "copy", base, copy_function=shutil.copyfile)
    (base / "runs").mkdir()
    assert _call(commands, trained, "export-gguf run --quant q8_0").data["reused"] is True
    assert _call(commands, trained, "verify run --tokens 64").answer["ok"] is True


def test_a_base_that_lies_elsewhere_is_found_by_a_link(commands: Commands, trained: Path, tmp_path: Path) -> None:
    """As the hint says: its content is compared, and its place is not."""
    base = trained / "base"
    base.rename(tmp_path / "copy")
    try:
        done = _call(commands, trained, "export-gguf run --lora")
        assert done.error == (2, "missing_file"), done.stdout + done.stderr
        assert done.answer["error"]["hint"].endswith(f"ln -s COPY {base}")
        base.symlink_to(tmp_path / "copy")
        assert _call(commands, trained, "export-gguf run --lora").code == 0
        base.unlink()
    finally:
        (tmp_path / "copy").rename(base)


def test_the_hint_after_the_rows_changed_begins_another_run(commands: Commands, trained: Path) -> None:
    """`plan --out` does not write into a run, so the hint for a plan alone would end in a refusal."""
    rows = trained / "rows.jsonl"
    kept = rows.read_bytes()
    tiny.write_rows(rows, 25)
    try:
        done = _call(commands, trained, "local run/plan.json")
        assert done.error == (2, "outdated_plan"), done.stdout + done.stderr
        *_, line = done.answer["error"]["hint"].partition("skill-train ")
        anew = _call(commands, trained, line)
        assert anew.code == 0, anew.stdout + anew.stderr
        assert anew.data["run_dir"] != "run" and anew.data["data"]["rows"] == 25
    finally:
        rows.write_bytes(kept)


def _call(commands: Commands, folder: Path, line: str) -> Done:
    return commands.run(folder, dict(os.environ), *line.split(), "--format", "json")


def _other_weights(path: Path) -> None:
    """A model of the same shape."""
    from safetensors.numpy import load_file, save_file

    tensors = {name: tensor + 0.01 for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


# --- A base that changed inside a weight file ---


@pytest.mark.parametrize(
    "line", ["merge run", "export-gguf run --lora", "verify run", "evaluate run", "chat run --file base --prompt Hi"]
)
def test_a_base_that_changed_where_no_fingerprint_looks_is_refused(
    commands: Commands, trained: Path, line: str
) -> None:
    """A fingerprint covers the header and both ends of a weight file. A model of gigabytes is copied in parts, and one
    part may be of another version."""
    base, weights = trained / "base", trained / "base" / "model.safetensors"
    was, kept = fingerprint(base), weights.read_bytes()
    weights.write_bytes(_changed_in_the_middle(kept))
    assert fingerprint(base) == was
    try:
        done = _call(commands, trained, line)
        assert done.error == (2, "input_changed"), done.stdout + done.stderr
        assert "model.safetensors with sha256" in done.answer["error"]["expected"]
    finally:
        weights.write_bytes(kept)


def test_a_run_does_not_go_on_with_a_base_that_changed(commands: Commands, trained: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained / "run", tmp_path / "run")
    for name in ("train.json", "convert.json", "quantize.json", "merge.json"):
        (run / name).unlink(missing_ok=True)
    for name in ("adapter", "merged", "gguf"):
        shutil.rmtree(run / name)
    assert (run / "checkpoints" / "checkpoint-3").is_dir()
    weights = trained / "base" / "model.safetensors"
    kept = weights.read_bytes()
    weights.write_bytes(_changed_in_the_middle(kept))
    try:
        done = _call(commands, trained, f"local recipe.yaml --resume --run-dir {run}")
        assert done.error == (2, "input_changed"), done.stdout + done.stderr
        assert "model.safetensors" in done.answer["error"]["message"]
    finally:
        weights.write_bytes(kept)


def test_the_weights_of_the_base_are_a_fact_of_a_run(commands: Commands, trained: Path, tmp_path: Path) -> None:
    """And a run of an earlier version, which did not record them, can still be compared and merged."""
    run = shutil.copytree(trained / "run", tmp_path / "run")
    environment = json.loads((run / "environment.json").read_text())
    digest = hashlib.sha256((trained / "base" / "model.safetensors").read_bytes()).hexdigest()
    assert environment["base_weights"]["model.safetensors"]["sha256"] == digest
    other = environment | {"base_weights": {"model.safetensors": {"bytes": 1, "sha256": "0" * 64}}}
    step_records.put_environment(run, other)
    done = _call(commands, trained, f"diff run {run}")
    assert done.error == (6, "different_recipe"), done.stdout + done.stderr
    assert [each["fact"] for each in done.answer["data"]["recipe"]] == [
        "base_weights.model.safetensors.bytes",
        "base_weights.model.safetensors.sha256",
    ]
    step_records.put_environment(run, {**environment, "base_weights": None})
    done = _call(commands, trained, f"diff run {run}")
    assert done.data["recipe"] == [] and "base_weights: only run A has a record" in done.data["not_compared"]
    assert _call(commands, trained, f"diff {run} {run}").data["verdict"] == "same"
    assert _call(commands, trained, f"merge {run}").answer["ok"] is True


def _changed_in_the_middle(weights: bytes) -> bytes:
    middle = len(weights) // 2
    assert middle > 4 * 65_536
    return weights[:middle] + bytes(byte ^ 1 for byte in weights[middle : middle + 64]) + weights[middle + 64 :]


# --- The recipe of a finished run ---


@pytest.mark.parametrize(
    "line", ["merge run", "export-gguf run --quant q8_0", "verify run", "evaluate run", "report run"]
)
def test_a_recipe_that_was_edited_after_training_is_refused(commands: Commands, trained: Path, line: str) -> None:
    """Else a proof would stand beside a recipe that nobody trained."""
    plan = trained / "run" / "plan.json"
    kept = plan.read_text()
    document = json.loads(kept)
    plan.write_text(json.dumps(document | {"recipe": document["recipe"] | {"learning_rate": 0.9}}))
    try:
        done = _call(commands, trained, line)
        assert done.error == (2, "another_run"), done.stdout + done.stderr
        assert "train.json" in done.answer["error"]["message"]
    finally:
        plan.write_text(kept)


@pytest.mark.parametrize(
    "spoiled", ["plan.json", "adapter/adapter_model.safetensors", "adapter/adapter_config.json", "adapter"]
)
def test_status_names_no_step_that_refuses_what_was_trained(
    commands: Commands, trained: Path, tmp_path: Path, spoiled: str
) -> None:
    run = Path(shutil.copytree(trained / "run", tmp_path / "run"))
    if spoiled == "adapter":
        shutil.rmtree(run / spoiled)
    elif spoiled == "plan.json":
        (run / spoiled).write_text((run / spoiled).read_text().replace('"lora_r": 16', '"lora_r": 4'))
    elif spoiled.endswith(".json"):  # of the same size
        (run / spoiled).write_bytes((run / spoiled).read_bytes()[:-1] + b" ")
    else:
        (run / spoiled).write_bytes(b"another")
    refused = _call(commands, tmp_path, "merge run").answer["error"]
    state = _call(commands, tmp_path, "status run")
    if spoiled == "adapter":
        assert (state.data["stage"], state.answer["next"]) == ("STOPPED", [refused["hint"]])
        return
    assert (state.data["stage"], state.data["why"], state.answer["next"]) == ("COMPLETED", refused, [])


def test_the_adapter_and_the_records_of_another_run_are_refused(
    commands: Commands, trained: Path, tmp_path: Path
) -> None:
    """All that a run of another recipe left, put beside this run's plan."""
    done = _call(commands, trained, f"local recipe.yaml --max-steps 4 --run-dir {tmp_path / 'other'}")
    assert done.code == 0, done.stdout + done.stderr
    other = tmp_path / "other"
    shutil.copy(trained / "run" / "plan.json", other / "plan.json")
    done = _call(commands, trained, f"merge {other}")
    assert done.error == (2, "another_run"), done.stdout + done.stderr
    assert not (other / "merged").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_the_steps_and_the_rows_of_another_run_are_refused(
    commands: Commands, trained: Path, tmp_path: Path, name: str
) -> None:
    """Else `report` draws the other run's curve, and `diff` finds two runs the same that had other rows."""
    run = Path(shutil.copytree(trained / "run", tmp_path / "run"))
    other = tiny.write_rows(tmp_path / "other.jsonl", 30)
    recipe = (trained / "recipe.yaml").read_text().replace("rows.jsonl", str(other))
    (trained / "other.yaml").write_text(recipe)
    assert _call(commands, trained, f"local other.yaml --run-dir {tmp_path / 'other'}").code == 0
    shutil.copy(tmp_path / "other" / name, run / name)
    reading = ("report run", f"diff run {trained / 'run'}", "merge run", "export-gguf run --quant q8_0")
    for line in (*reading, "verify run --tokens 64", "evaluate run"):
        done = _call(commands, tmp_path, line)
        assert done.error == (2, "output_changed"), line + done.stdout + done.stderr
        assert done.answer["error"]["message"].endswith(f"run/{name} is not the file that train.json describes")
    assert done.answer["error"]["hint"] == f"put the trained file back, or move {Path('run', name)} away"
    state = _call(commands, tmp_path, "status run")
    assert (state.data["why"]["code"], state.answer["next"]) == ("output_changed", [])
    (run / name).unlink()  # a run may lose its rows before somebody else gets it
    for line in (*reading, "status run"):
        done = _call(commands, tmp_path, line)
        assert done.code == 0, line + done.stdout + done.stderr


# --- What was planned on the Hub, and a file here of the same name ---


@pytest.mark.parametrize("key", ["data", "model"])
def test_what_lies_here_is_not_trained_in_place_of_the_hubs(
    commands: Commands, trained: Path, tmp_path: Path, key: str
) -> None:
    """The training read the rows here, and its record named the dataset on the Hub."""
    run, name = tmp_path / "run", "owner/rows.jsonl"  # a name that a repository may have
    run.mkdir()
    (tmp_path / "owner").mkdir()
    if key == "data":
        tiny.write_rows(tmp_path / name, 24)
    else:
        shutil.copytree(trained / "base", tmp_path / name)
    plan = json.loads((trained / "run" / "plan.json").read_text())
    revision = {"data": "data_revision", "model": "revision"}[key]
    plan["recipe"] |= {key: name, revision: "5" * 40}
    plan["fingerprints"][key] = None
    plan["recipe_hash"] = recipe_hash(plan["recipe"], plan["fingerprints"])
    (run / "plan.json").write_text(json.dumps(plan))
    words = [sys.executable, train_program(), run / "plan.json"]
    done = subprocess.run(words, cwd=tmp_path, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    assert done.returncode == 2 and not (run / "train.json").exists(), done.stdout + done.stderr
    failed = json.loads((run / "train.failed.json").read_text())
    assert failed["error"]["code"] == "input_changed" and str(tmp_path / name) in failed["error"]["got"]
    planned = _call(commands, tmp_path, "local run/plan.json --run-dir again")
    assert planned.error == (2, "outdated_plan")
