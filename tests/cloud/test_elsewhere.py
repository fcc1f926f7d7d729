"""The same run on machines of others, really run on this one: the program of a SkyPilot machine against the Hub for
tests, alone and two of them. The notebook's cells are in test_notebook_cells."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import training
from hub_emulator import Hub
from planned_elsewhere import STEPS, compared, planned, trained_here
from skill_train.core.resources import node_program
from skill_train.machine.training_program import train_program

pytestmark = [pytest.mark.slow, pytest.mark.real_python]

FOLDER = "me/jobs-artifacts/skill-train-0123456789ab"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with Hub(tmp_path_factory.mktemp("elsewhere") / "hub") as server:
        yield server
        assert server.unknown == []


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_here(tmp_path_factory.mktemp("straight"))


class Machine:
    """One machine of a task: its own folder, and the environment that SkyPilot gives it."""

    def __init__(self, folder: Path, hub: Hub, plan: Path, *, rank: int = 0, nodes: int = 1, bucket: str = FOLDER):
        self.folder = folder
        folder.mkdir(parents=True)
        program = node_program().read_text(encoding="utf-8").replace('"29500"', '"29617"')  # tests share this machine
        (folder / "skypilot_node.py").write_text(program, encoding="utf-8")
        shutil.copyfile(train_program(), folder / "train.py")
        shutil.copyfile(plan, folder / "plan.json")
        self.env = hub.environment(folder / "home") | {"OMP_WAIT_POLICY": "PASSIVE"}
        self.env |= {"SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NUM_NODES": str(nodes)}
        self.env |= {"SKYPILOT_NODE_IPS": "\n".join(["127.0.0.1"] * nodes), "SKILL_TRAIN_RUN": "0123456789ab"}
        self.words = [sys.executable, "skypilot_node.py", f"hf://buckets/{bucket}", "--timeout", "600"]
        self.words += ["--data", str(plan.parent.parent / "rows.jsonl")]

    def start(self) -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": open(self.folder / "stderr", "w")}  # noqa: SIM115
        return subprocess.Popen(self.words, cwd=self.folder, env=self.env, text=True, **pipes)

    def said(self) -> str:
        return (self.folder / "stderr").read_text()


@pytest.mark.torture
def test_a_machine_that_is_stopped_goes_on_in_another(hub: Hub, straight: Path, tmp_path: Path) -> None:
    """The first is told to end after its second step. The second has nothing but the task and the bucket."""
    plan = planned(tmp_path) / "plan.json"
    first = Machine(tmp_path / "first", hub, plan)
    with first.start() as process:
        for line in process.stdout or ():
            if line.startswith('{"event": "step", "step": 2'):
                process.send_signal(signal.SIGTERM)
    assert process.returncode == 5, first.said()
    assert (first.folder / "run" / "checkpoints" / "checkpoint-2" / "kept.json").is_file()
    second = Machine(tmp_path / "second", hub, plan)
    with second.start() as process:
        events = training.events((process.stdout or open(os.devnull)).read())  # noqa: SIM115
    assert process.returncode == 0, second.said()
    steps = [event["step"] for event in events if event["event"] == "step"]
    assert steps and steps[0] > 2 and steps[-1] == STEPS
    assert [event["repo"] for event in events if event["event"] == "pushed"] == ["me/tuned"]
    brought = brought_back(hub, tmp_path / "back")
    found = compared(straight, brought)
    assert (found.verdict, found.recipe, found.same_weights) == ("same", [], True)
    assert [line["loss"] for line in training.metrics(brought)] == [line["loss"] for line in training.metrics(straight)]
    pushed = hub.repositories["model", "me/tuned"].at("main") or {}
    assert hashlib.sha256(pushed["adapter_model.safetensors"]).hexdigest() == weights(straight)
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and hub.token.encode() in path.read_bytes()]
    assert kept == []


@pytest.mark.torture
def test_two_machines_train_as_one(hub: Hub, straight: Path, tmp_path: Path) -> None:
    """Each with a folder of its own, on one address: the same rows, the same losses within rounding."""
    plan = planned(tmp_path, split=(2, 1, 2)) / "plan.json"
    bucket = "me/jobs-artifacts/skill-train-two"
    machines = [Machine(tmp_path / str(rank), hub, plan, rank=rank, nodes=2, bucket=bucket) for rank in (0, 1)]
    started = [machine.start() for machine in machines]
    for machine, process in zip(machines, started, strict=True):
        process.communicate()
        assert process.returncode == 0, machine.said()
    brought = brought_back(hub, tmp_path / "back", bucket)
    found = compared(straight, brought)
    assert (found.verdict, found.recipe) == ("same", [])
    assert {"processes.count", "placement.num_processes"} <= {each.fact for each in found.placement}
    assert (found.losses or {})["largest_difference"] < 1e-5
    assert json.loads((brought / "train.json").read_text())["verdict"] == "pass"
    assert not (tmp_path / "1" / "run" / "adapter").exists()  # the first machine alone writes


def test_a_token_that_may_not_write_ends_before_training(hub: Hub, tmp_path: Path) -> None:
    machine = Machine(tmp_path / "machine", hub, planned(tmp_path) / "plan.json")
    machine.env["HF_TOKEN"] = hub.new_token("read", ())
    source = machine.folder / "skypilot_node.py"
    source.write_text(source.read_text().replace("PAUSES = (5, 20, 60)", "PAUSES = ()"))
    with machine.start() as process:
        assert "step" not in (process.stdout or open(os.devnull)).read()  # noqa: SIM115
    assert process.returncode == 4
    assert "the bucket could not be used" in machine.said()


def brought_back(hub: Hub, folder: Path, bucket: str = FOLDER) -> Path:
    """What the bucket has of a run, by the command that `submit` names."""
    client = str(Path(sys.executable).with_name("hf"))
    env = hub.environment(folder.with_name("own-home"))
    done = subprocess.run([client, "buckets", "sync", f"hf://buckets/{bucket}", str(folder)], env=env, text=True)
    assert done.returncode == 0
    return folder


def weights(run: Path) -> str:
    return hashlib.sha256((run / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest()
