"""A run in the cloud as a user types it, each command in turn; the job really trains and dies at a random step.

Plan, submit, wait, resume, wait, pull, the same run here, diff, export, verify, push; and the token is nowhere, after
every command that there is.
"""

from __future__ import annotations

import json
import os
import random
import shlex
from pathlib import Path
from typing import Any

import pytest

import secret_scan
import tiny
import training
from command_child import Commands
from command_tree import commands
from hub_emulator import Hub, JobFault
from skill_train.cli import GROUPS

pytestmark = pytest.mark.slow

pytest.importorskip("huggingface_hub")
pytest.importorskip("trl")

STEPS = 8
RECIPE = f"""
model: me/tiny
data: rows.jsonl
max_steps: {STEPS}
effective_batch_size: 4
"""
SCANNED_IN_THE_DEMO = {"demo"}  # its own test looks for a token too; a training more would cost a minute


@pytest.fixture
def hub(hub: Hub) -> Hub:
    hub.add("model", "me/tiny", {path.name: path.read_bytes() for path in tiny.cached("gemma").iterdir()})
    return hub


@pytest.mark.timeout(600)
def test_a_run_that_is_killed_is_the_run_that_was_trained_here(hub: Hub, tmp_path: Path) -> None:
    step = random.Random(os.environ.get("SKILL_TRAIN_SEED")).randint(1, STEPS)
    print(f"killed at step {step}")
    hub.faults.add_job(JobFault("exit", 1, line=f'"step", "step": {step},', job=1))
    with secret_scan.arguments_of_processes() as arguments:
        texts = _story(hub, tmp_path, step)
    assert _commands(texts) | SCANNED_IN_THE_DEMO == set(commands())
    argv = (tmp_path / "hook" / "argv.jsonl").read_bytes()
    texts |= {"arguments of processes": b"\n".join(arguments)}
    assert len(argv.splitlines()) > 5 and b"--job" in texts["arguments of processes"]
    found, looked = secret_scan.places(hub.token, hub, tmp_path, texts)
    assert (found, looked > 100) == ([str(tmp_path / "home" / "token")], True)  # where `hf auth login` put it
    (tmp_path / "home" / "token").unlink()

    (tmp_path / "here" / "planted").write_text(f"x{hub.token}x")
    hub.jobs.all[0].labels["planted"] = hub.token
    found, _ = secret_scan.places(hub.token, hub, tmp_path, texts | {"planted": hub.token})
    assert set(found) == {"planted", "job 1", str(tmp_path / "here" / "planted")}


def _story(hub: Hub, tmp_path: Path, step: int) -> dict[str, Any]:
    """Everything that the commands said."""
    here = tmp_path / "here"
    training.write_data(here, tiny.rows(24))
    (here / "recipe.yaml").write_text(RECIPE)
    environment = hub.environment(tmp_path / "home") | secret_scan.hook(tmp_path / "hook")
    (tmp_path / "home" / "skill-train").mkdir(parents=True)
    for converter in Path(os.environ["SKILL_TRAIN_CACHE"]).glob("llama.cpp-*"):
        (tmp_path / "home" / "skill-train" / converter.name).symlink_to(converter)
    (tmp_path / "home" / "token").write_text(hub.token)
    outputs: dict[str, Any] = {}
    child = Commands(environment)

    def call(line: str, exits: int = 0) -> dict[str, Any]:
        done = child.run(here, environment, *shlex.split(line))
        outputs[f"{len(outputs)} {line}"] = done.stdout + done.stderr
        log = "\n".join(hub.jobs.all[-1].lines[-30:]) if hub.jobs.all else ""
        assert done.code == exits, f"{line}\n{done.stdout}{done.stderr}{log}"
        return dict(json.loads(done.stdout))

    call("plan recipe.yaml --where local --dtype float32 --out local.json")
    call("plan recipe.yaml --where cloud --flavor cpu-basic --out plan.json")  # a job of this Hub has no GPU
    agreed = call("submit plan.json --run-dir cloud", exits=3)["error"]["hint"]
    job = call(agreed.removeprefix("skill-train "))["data"]
    assert job["job_id"] == hub.jobs.all[0].id
    lost = call("wait cloud", exits=5)
    assert (lost["data"]["stage"], lost["error"]["code"]) == ("ERROR", "job_failed")
    assert "skill-train resume cloud" in lost["next"]
    assert call("status cloud")["data"]["attempt"] == 1
    assert call("resume cloud --yes")["data"]["attempt"] == 2
    done = call("wait cloud")["data"]
    assert (done["stage"], done["step"]) == ("COMPLETED", STEPS)
    assert call("pull cloud")["data"]["trained"] is True
    call("local local.json --run-dir local")
    same = call("diff local cloud")["data"]
    assert (same["verdict"], same["recipe"], same["same_weights"]) == ("same", [], True)
    places = {"launch.flavor", "placement.backend", "policy.hub_model_id", "trainer.output_dir"}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if cores != os.cpu_count():  # a process of pytest-xdist keeps to one
        places |= {"machine.threads", "placement.threads"}
    assert {each["fact"] for each in same["placement"]} == places
    assert same["losses"] == {"steps": STEPS, "equal": True, "largest_difference": 0.0, "at_step": None}
    call("export-gguf cloud --quant q8_0")
    assert call("verify cloud")["ok"] is True
    assert call("submit plan.json --run-dir cloud")["data"]["reused"] is True
    assert hub.jobs_created == 2
    _the_other_commands(call)
    child.close()
    return outputs


def _the_other_commands(call: Any) -> None:
    """For the scan alone; what they answer has tests of its own."""
    call("data rows.jsonl")
    call("logs cloud")
    call("cancel cloud")
    call("merge cloud")
    call("evaluate cloud")
    call("report cloud")
    call("push cloud --repo me/story")
    call("bench cloud --prompt-tokens 8 --answer-tokens 4 --rounds 1")
    call("chat cloud --prompt hello --max-tokens 4")
    call("serve cloud --host 0.0.0.0", exits=2)  # another address needs a key
    call("doctor")
    call("skills install --target agents")
    call("skills check --target agents")


def _commands(said: dict[str, Any]) -> set[str]:
    """Those that were called: `2 skills check --target agents` is `skills check`."""
    words = [line.split()[1:3] for line in said if line != "arguments of processes"]
    return {" ".join(pair[: 1 + (pair[0] in GROUPS)]) for pair in words}
