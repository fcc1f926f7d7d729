"""The SkyPilot task: where it may run, how a plan is spread over machines, and that SkyPilot's own parser takes it."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

import planning
from planning import shipped_flavor
from skill_train.cloud.elsewhere import skypilot
from skill_train.core.errors import AccessError, NotInstalled, SkillTrainError, TrainingFailed, UsageError
from skill_train.core.resources import node_program
from skill_train.hub import flavors
from skill_train.machine.training_program import train_program
from skill_train.program.start.inputs import check_batch
from skill_train.run import plan_record
from skill_train.run.plan_record import Plan

RUN_ID = "0123456789ab"
BUCKET = "hf://buckets/me/jobs-artifacts/skill-train-0123456789ab"


def plan(name: str = "l40sx1", **said: Any) -> Plan:
    return planning.decided_plan("qwen2.5-7b", "m2_pro_16gb", where="cloud", flavor=name, **said)


def task(name: str = "l40sx1", *, nodes: int = 1, infra: list[str] | None = None, **said: Any) -> dict[str, Any]:
    made = skypilot.spread(plan(name, **said), shipped_flavor(name), nodes)
    places = skypilot.clouds(infra, nodes)
    run = skypilot.SkyRun(RUN_ID, BUCKET, "data/my rows.jsonl", timeout_seconds=7200)
    return skypilot.task(made, shipped_flavor(name), run, nodes=nodes, places=places)


# --- Where ---


def test_all_clouds_are_tried_and_for_several_machines_those_that_can() -> None:
    assert skypilot.clouds(None, 1) == ["lambda", "runpod", "vast", "k8s", "aws", "gcp"]
    assert skypilot.clouds(None, 2) == ["lambda", "k8s", "aws", "gcp"]
    assert skypilot.clouds(["aws/us-east-1", "gcp"], 2) == ["aws/us-east-1", "gcp"]


@pytest.mark.parametrize(
    ("places", "nodes", "code"),
    [(["runpod"], 2, "unknown_flavor"), (["lambda", "vast"], 4, "unknown_flavor"), (["azur"], 1, "bad_usage")],
)
def test_a_place_that_cannot_is_refused(places: list[str], nodes: int, code: str) -> None:
    with pytest.raises(UsageError) as caught:
        skypilot.clouds(places, nodes)
    assert caught.value.code == code


# --- On how many machines ---


def test_one_machine_runs_the_plan_as_it_is() -> None:
    made = plan("l40sx4", effective_batch_size=16)
    placed = skypilot.spread(made, shipped_flavor("l40sx4"), 1)
    assert placed.placement == replace(made.placement, backend="skypilot")
    assert placed.launch == made.launch


@pytest.mark.parametrize(
    ("name", "nodes", "rows_a_process"),
    [("l40sx4", 2, 2), ("l40sx1", 4, 4), ("l40sx8", 2, 1)],  # 16 rows by 8, 4 and 16 processes
)
def test_several_machines_share_the_same_batch(name: str, nodes: int, rows_a_process: int) -> None:
    made = plan(name, effective_batch_size=16)
    there = skypilot.spread(made, shipped_flavor(name), nodes)
    placed = there.placement
    assert placed.num_processes == nodes * shipped_flavor(name).gpus
    assert placed.per_device_train_batch_size * placed.gradient_accumulation_steps == rows_a_process
    assert (there.recipe, there.recipe_hash) == (made.recipe, made.recipe_hash)
    assert placed.strategy == "ddp"
    words = there.launch.arguments
    assert "--multi_gpu" in words
    # of two equal options of argparse the later one counts
    last = {name: words[at + 1] for at, name in enumerate(words) if name.startswith("--num_")}
    assert (last["--num_processes"], last["--num_machines"]) == (str(placed.num_processes), str(nodes))
    assert not {"NCCL_IB_DISABLE", "NCCL_ALGO"} & set(there.launch.environment)
    check_batch(there.as_dict()["recipe"], there.as_dict()["placement"])


def test_a_batch_that_cannot_be_shared_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        skypilot.spread(plan("l40sx4", effective_batch_size=16), shipped_flavor("l40sx4"), 3)
    assert caught.value.code == "unknown_flavor"
    assert "12" in caught.value.expected


@pytest.mark.parametrize("nodes", [1, 2])
def test_machines_without_a_gpu_are_refused(nodes: int) -> None:
    with pytest.raises(UsageError) as caught:
        skypilot.spread(plan("t4-small"), shipped_flavor("cpu-basic"), nodes)
    assert (caught.value.code, caught.value.hint) == ("unknown_flavor", "choose another --flavor")


# --- The task ---


def test_the_task_says_what_is_needed() -> None:
    made = task()
    assert made["resources"]["accelerators"] == "L40S:1"
    assert [place["infra"] for place in made["resources"]["any_of"]] == list(skypilot.CLOUDS)
    assert made["resources"]["autostop"] == {"idle_minutes": 10, "down": True}  # given back, not only stopped
    assert made["secrets"] == {"HF_TOKEN": None}
    assert made["run"].split() == [
        "~/skill-train-venv/bin/python", "skypilot_node.py", BUCKET,
        "--timeout", "7200", "--data", "'data/my", "rows.jsonl'",
    ]  # fmt: skip
    assert task("l40sx4", nodes=2, effective_batch_size=16)["num_nodes"] == 2


def test_every_gpu_of_a_flavor_has_its_name() -> None:
    """Of SkyPilot 0.14.1, `get_common_gpus`."""
    known = {"A10", "A10G", "A100", "A100-80GB", "B200", "H100", "H200", "L4", "L40S", "RTX5090", "RTXPRO6000", "T4"}
    for each in flavors.shipped():
        if each.gpu is not None:
            assert skypilot.accelerator(each) in known
            assert (each.gpu == "A100") == (skypilot.accelerator(each) == "A100-80GB")
            assert each.gpu != "A100" or each.gpu_memory_bytes == 80e9


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = tmp_path / "my rows.jsonl"
    data.write_text('{"text": "x"}\n')
    plan_record.write(tmp_path / "plan.json", plan())
    made = tmp_path / "skypilot"
    for _ in range(2):  # writing it again changes nothing
        skypilot.write_task(made, task(), tmp_path / "plan.json", {data.name: data}, ("bitsandbytes==0.50.2",))
    return made


def test_the_folder_holds_what_travels(folder: Path) -> None:
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    programs = {"train.py", "skypilot_node.py"}
    assert files == programs | {"task.yaml", "plan.json", "requirements.txt", "data/my rows.jsonl"}
    assert (folder / "train.py").read_bytes() == train_program().read_bytes()
    assert (folder / "skypilot_node.py").read_bytes() == node_program().read_bytes()
    assert (folder / "plan.json").read_bytes() == (folder.parent / "plan.json").read_bytes()
    lock = (Path(__file__).resolve().parents[2] / "requirements.lock").read_text().splitlines()
    pins = (folder / "requirements.txt").read_text().splitlines()
    assert pins.pop() == "bitsandbytes==0.50.2"
    assert len(pins) == 10
    assert {pin.replace("_", "-") for pin in pins} <= set(lock)
    assert yaml.safe_load((folder / "task.yaml").read_text()) == task()


PARSER = """
import sys, yaml, sky
for path in sys.argv[1:]:
    task = sky.Task.from_yaml_config(yaml.safe_load(open(path)))
    kinds = sorted({(str(r.cloud).lower(), str(r.accelerators), r.autostop_config.down) for r in task.resources})
    print("PARSED", task.num_nodes, kinds)
"""


@pytest.mark.skipif("SKY_PYTHON" not in os.environ, reason="SKY_PYTHON: a Python with skypilot==0.14.1 of its own")
def test_the_parser_of_skypilot_takes_it(folder: Path, tmp_path: Path) -> None:
    several = folder / "several.yaml"
    several.write_text(yaml.safe_dump(task("l40sx4", nodes=2, effective_batch_size=16)))
    wrong = folder / "wrong.yaml"
    wrong.write_text(yaml.safe_dump(task() | {"runs": "x"}))
    env = {**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1", "PYTHONPATH": ""}
    command = [os.environ["SKY_PYTHON"], "-c", PARSER, *(str(path) for path in (folder / "task.yaml", several, wrong))]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    parsed = [line for line in done.stdout.splitlines() if line.startswith("PARSED")]
    assert len(parsed) == 2, done.stderr
    assert parsed[0].startswith("PARSED 1") and parsed[1].startswith("PARSED 2")
    for name in ("lambda", "runpod", "vast", "kubernetes", "aws", "gcp"):
        assert f"('{name}', \"{{'L40S': 1}}\", True)" in parsed[0]
    assert "runpod" not in parsed[1] and "{'L40S': 4}" in parsed[1]
    assert done.returncode != 0 and "did you mean" in done.stderr.lower()  # the third one


# The fields of SkyPilot 0.14.1, `sky/utils/schemas.py`: get_task_schema, get_resources_schema, _AUTOSTOP_SCHEMA.
FIELDS = {"name", "workdir", "num_nodes", "resources", "file_mounts", "setup", "run", "envs", "secrets"}
RESOURCES = {"accelerators", "disk_size", "any_of", "ordered", "autostop", "infra", "use_spot", "cpus", "memory"}


def test_its_fields_are_those_of_the_published_schema() -> None:
    made = task()
    assert set(made) <= FIELDS and set(made["resources"]) <= RESOURCES
    assert set(made["resources"]["autostop"]) <= {"idle_minutes", "down", "wait_for", "hook", "hook_timeout"}
    assert all(isinstance(value, str) for value in made["envs"].values())
    assert isinstance(made["resources"]["disk_size"], int) and made["resources"]["disk_size"] > 100


# --- The user's own sky ---


def stub(folder: Path, code: int) -> Path:
    """A program called `sky` that writes down what it was started with."""
    folder.mkdir()
    program = folder / "sky"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > argv\nprintf "%s" "$HF_TOKEN" > token\nexit {code}\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return folder


def test_sky_is_started_with_the_token_by_name(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{stub(tmp_path / 'bin', 0)}:{os.environ['PATH']}")
    skypilot.run_sky(folder, "skill-train-x", "hf_madeUp")
    assert (folder / "argv").read_text().splitlines() == [
        "launch", "--cluster", "skill-train-x", "--yes", "--detach-run", "--secret", "HF_TOKEN", "task.yaml"
    ]  # fmt: skip
    assert (folder / "token").read_text() == "hf_madeUp"


@pytest.mark.parametrize(
    ("there", "token", "kind", "code"),
    [
        (None, "hf_madeUp", NotInstalled, "missing_package"),
        (0, None, AccessError, "not_signed_in"),
        (1, "hf_madeUp", TrainingFailed, "sky_failed"),
    ],
)
def test_why_sky_did_not_start(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    there: int | None,
    token: str | None,
    kind: type[SkillTrainError],
    code: str,
) -> None:
    path = "/nowhere" if there is None else f"{stub(tmp_path / 'bin', there)}:{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)
    with pytest.raises(kind) as caught:
        skypilot.run_sky(folder, "skill-train-x", token)
    assert caught.value.code == code
    assert skypilot.VERSION in caught.value.hint or code != "missing_package"
