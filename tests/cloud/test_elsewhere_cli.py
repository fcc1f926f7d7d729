"""`skill-train submit --backend skypilot|colab`: what it writes, what it refuses, and that nothing is sent."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

import tiny
from command_child import Commands, Done
from hub_emulator import ALWAYS, Fault, Hub
from hub_emulator.buckets import Bucket
from hub_models import add_model
from skill_train.machine.training_program import train_program

pytestmark = pytest.mark.slow

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
ASKS = ("paths-info", "preupload/main")  # requests that send nothing
SAID = ("--model", MODEL, "--data", "rows.jsonl", "--max-steps", "20")


@pytest.fixture(scope="module")
def desk(desk: tuple[Hub, Commands, Path]) -> tuple[Hub, Commands, Path]:
    add_model(desk[0])
    return desk


@pytest.fixture
def call(desk: tuple[Hub, Commands, Path], tmp_path: Path) -> Any:
    server, commands, home = desk
    server.log.clear()
    tiny.write_rows(tmp_path / "rows.jsonl", 24)

    def run(*arguments: object, token: str | None = "", **environment: str) -> Done:
        env = server.environment(home, token=token) | environment
        done = commands.run(tmp_path, env, "submit", *arguments)
        assert server.token not in done.stdout + done.stderr
        changed = [r.path for r in server.log if r.method not in ("GET", "HEAD") and not r.path.endswith(ASKS)]
        assert changed == [] and server.jobs_created == 0  # nothing is sent to the Hub
        written = [p for p in tmp_path.rglob("*") if p.is_file() and server.token.encode() in p.read_bytes()]
        assert written == []
        return done

    return run


def test_a_notebook_is_written_for_the_gpu_that_colab_gives(call: Any, tmp_path: Path) -> None:
    data = call(*SAID, "--backend", "colab").data
    run = tmp_path / data["run_dir"]
    assert (data["gpu"], data["launched"], data["placement"]["device"]) == ("T4", False, "cuda")
    assert data["placement"]["dtype"] == "float16" or data["placement"]["dtype"] == "float32"  # a T4 has no bf16
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["flavor"], plan["placement"]["backend"], plan["where"]) == ("t4-small", "colab", "cloud")
    assert plan["policy"]["hub_model_id"] == data["hub_model_id"]
    assert data["files"]["train.py"]["bytes"] == train_program().stat().st_size
    assert set(data["files"]) == {"train.py", "plan.json", "data/rows.jsonl"}
    first = (tmp_path / data["notebook"]).read_bytes()
    assert call(*SAID, "--backend", "colab").data["recipe_hash"] == data["recipe_hash"]
    assert (tmp_path / data["notebook"]).read_bytes() == first


def test_a_notebook_needs_no_token_when_the_repository_is_said(call: Any) -> None:
    done = call(*SAID, "--backend", "colab", token=None)
    assert done.error == (4, "not_signed_in") and "--namespace" in done.answer["error"]["message"]
    assert "job.write" not in done.answer["error"]["expected"]  # no job of the Hub runs
    assert call(*SAID, "--backend", "colab", "--namespace", "me", token=None).code == 0
    data = call(*SAID, "--backend", "colab", "--hub-model-id", "me/tuned", token=None).data
    assert data["hub_model_id"] == "me/tuned"


def test_a_task_is_written_and_machines_are_rented_with_yes_alone(call: Any, tmp_path: Path) -> None:
    done = call(*SAID, "--backend", "skypilot", "--flavor", "l40sx4", "--nodes", "2", "--infra", "aws, gcp")
    assert done.error == (3, "confirm_cost")
    answer = done.answer
    assert answer["next"] == []
    assert {"--yes", "--nodes", "--infra", "--backend"} <= set(answer["error"]["hint"].split())
    data = answer["data"]
    task = yaml.safe_load((tmp_path / data["task"]).read_text())
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, "L40S:4")
    assert task["resources"]["any_of"] == [{"infra": "aws"}, {"infra": "gcp"}]
    assert data["kept_in"] in task["run"] and data["kept_in"].startswith("hf://buckets/me/jobs-artifacts/")
    plan = json.loads((tmp_path / data["run_dir"] / "skypilot" / "plan.json").read_text())
    assert plan["placement"]["num_processes"] == 8
    assert plan["placement"]["backend"] == "skypilot"
    assert [warning["code"] for warning in answer["warnings"]][-1] == "not_pushed"


def test_with_yes_the_users_own_sky_launches_it(call: Any, tmp_path: Path) -> None:
    """A program called sky that writes down its arguments, and whether it was given the token."""
    asked = (*SAID, "--backend", "skypilot", "--timeout", "2h", "--yes")
    nowhere = call(*asked, PATH="/nowhere")
    assert nowhere.error == (7, "missing_package")
    (tmp_path / "bin").mkdir()
    sky = tmp_path / "bin" / "sky"
    sky.write_text('#!/bin/sh\nprintf "%s\\n" "$@" "given ${HF_TOKEN:+a token}" > argv\n')
    sky.chmod(0o755)
    data = call(*asked, PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}").data
    words = (tmp_path / data["run_dir"] / "skypilot" / "argv").read_text().splitlines()
    assert words[:3] == ["launch", "--cluster", data["cluster"]]
    assert words[-4:] == ["--secret", "HF_TOKEN", "task.yaml", "given a token"]
    assert (data["launched"], data["timeout_seconds"]) == (True, 7200)
    assert "--timeout 7200" in (tmp_path / data["task"]).read_text()


def test_a_repository_that_leaves_the_result_out_is_told_before_anything_is_written(
    call: Any, desk: Any, tmp_path: Path
) -> None:
    """A job asks in its first minute, on a machine that is rented then. Without a token nothing can be asked."""
    files = {".gitignore": b"*.tmp\n*.safetensors"}
    repository = desk[0].add("model", "me/mine", files, private=True)
    said = (*SAID, "--hub-model-id", "me/mine", "--run-dir", "r", "--backend")
    for backend in ("colab", "skypilot"):
        done = call(*said, backend)
        assert done.error == (2, "output_changed") and not (tmp_path / "r").exists()
        assert "adapter_model.safetensors is in its .gitignore" in done.answer["error"]["message"]
    assert call(*said, "skypilot", "--nodes", 2, "--flavor", "l40sx4").error == (3, "confirm_cost")  # pushes nothing
    assert call(*said[:-1], "--backend", "colab", "--run-dir", "alone", token=None).code == 0
    repository.files[".gitignore"] = b"*.tmp"
    assert call(*said[:-3], "--run-dir", "other", "--backend", "colab").code == 0


@pytest.fixture
def sky(tmp_path: Path) -> dict[str, str]:
    """The PATH of a program called sky that writes what it was asked."""
    (program := tmp_path / "bin" / "sky").parent.mkdir()
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > argv\n')
    program.chmod(0o755)
    return {"PATH": f"{program.parent}:{os.environ['PATH']}"}


@pytest.mark.parametrize("last", [(), ("--yes",)])
def test_a_task_is_checked_as_a_job_is(
    call: Any, desk: tuple[Hub, Commands, Path], tmp_path: Path, sky: dict[str, str], last: tuple[str, ...]
) -> None:
    """Its program pushes with the same token: nobody else's place, and none that everybody can read."""
    server = desk[0]
    for name in ("me/shown", "acme/shown"):
        server.add("model", name, {"README.md": b""}, private=False)
    asked = (*SAID, "--backend", "skypilot", "--flavor", "l4x1", "--run-dir", "r", *last)
    refusals = [
        (("--hub-model-id", "me/shown"), (3, "public_repository")),
        (("--hub-model-id", "nobody/new"), (4, "no_permission")),
        (("--hub-model-id", "nobody/new", "--namespace", "nobody"), (4, "no_permission")),
        (("--namespace", "nobody"), (4, "no_permission")),
    ]
    for words, refusal in refusals:
        assert call(*asked, *words, **sky).error == refusal, words
    reader = server.new_token("read", ())
    assert call(*asked, "--hub-model-id", "me/new", token=reader, **sky).error == (4, "no_permission")
    writer = server.new_token("fineGrained", ("repo.write",))  # it rents no machine of the Hub
    bucket = server.buckets.setdefault("me/jobs-artifacts", Bucket("me/jobs-artifacts", private=False))
    bucket.private = False
    assert call(*asked, "--hub-model-id", "me/new", **sky).error == (3, "public_repository")
    assert not (tmp_path / "r").exists()
    bucket.private = True
    expected = (0, None) if last else (3, "confirm_cost")
    done = call(*asked, "--hub-model-id", "me/new", token=writer, **sky)
    assert (done.code, done.answer.get("error", {}).get("code")) == expected
    assert done.answer["data"]["kept_in"].startswith("hf://buckets/me/jobs-artifacts/")


def test_a_notebook_goes_into_no_public_repository(call: Any, desk: tuple[Hub, Commands, Path], tmp_path: Path) -> None:
    """It has a token of its own, so that this one needs no permission."""
    server = desk[0]
    server.add("model", "me/seen", {"README.md": b""}, private=False)
    said = (*SAID, "--backend", "colab", "--run-dir", "r", "--hub-model-id")
    for token in ("", None):
        assert call(*said, "me/seen", token=token).error == (3, "public_repository")
    assert not (tmp_path / "r").exists()
    assert call(*said, "other/new", token=server.new_token("read", ())).data["hub_model_id"] == "other/new"


def test_a_hub_that_does_not_answer_is_told_without_yes_and_stops_the_launch(
    call: Any, desk: tuple[Hub, Commands, Path], tmp_path: Path, sky: dict[str, str]
) -> None:
    server = desk[0]
    asked = (*SAID, "--backend", "skypilot", "--flavor", "l4x1", "--hub-model-id", "me/new", "--run-dir", "r")
    server.faults.add("GET /api/whoami-v2", Fault(503), times=ALWAYS)
    try:
        done = call(*asked, **sky)
        assert done.error == (3, "confirm_cost")
        assert [each["code"] for each in done.answer["warnings"]].count("hub_unreachable") == 1
        assert call(*asked, "--yes", **sky).code == 8
        assert not (tmp_path / "r" / "skypilot" / "argv").exists()
    finally:
        server.faults.clear()


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (("--backend", "skypilot", "--nodes", "2", "--infra", "runpod"), (2, "unknown_flavor")),
        (("--backend", "skypilot", "--nodes", "3", "--flavor", "l40sx4"), (2, "unknown_flavor")),
        (("--backend", "skypilot", "--nodes", "2", "--flavor", "cpu-basic"), (2, "unknown_flavor")),
        (("--backend", "skypilot", "--flavor", "cpu-basic"), (2, "unknown_flavor")),
        (("--backend", "skypilot", "--max-cost", "3"), (2, "bad_usage")),
        (("--backend", "colab", "--flavor", "l40sx1"), (2, "unknown_flavor")),
        (("--backend", "colab", "--nodes", "2"), (2, "bad_usage")),
        (("--nodes", "2"), (2, "bad_usage")),
        (("--infra", "aws"), (2, "bad_usage")),
    ],
)
def test_what_a_backend_cannot_do_is_refused(call: Any, tmp_path: Path, words: Any, refusal: Any) -> None:
    assert call(*SAID, *words).error == refusal
    assert not list(tmp_path.rglob("task.yaml")) and not list(tmp_path.rglob("*.ipynb"))
    assert not list(tmp_path.rglob("plan.json")) and not list(tmp_path.rglob("recipe.yaml"))


def test_a_plan_for_a_machine_that_is_not_known_here(call: Any, tmp_path: Path) -> None:
    """It was made where the Hub offered another one."""
    run = call(*SAID, "--backend", "skypilot").answer["data"]["run_dir"]
    plan = json.loads((tmp_path / run / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps(plan | {"flavor": "h900x1"}))
    refused = call("plan.json", "--run-dir", "other", "--backend", "skypilot")
    assert refused.error == (2, "unknown_flavor") and "h900x1" in refused.answer["error"]["message"]


@pytest.mark.parametrize("backend", ["colab", "skypilot"])
def test_a_recipe_of_the_users_in_the_run_directory_is_kept(call: Any, tmp_path: Path, backend: str) -> None:
    (tmp_path / "recipe.yaml").write_text(f"model: {MODEL}\ndata: rows.jsonl\nmax_steps: 20\n")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    done = call("recipe.yaml", "--run-dir", ".", "--backend", backend)
    assert done.error == (2, "output_exists")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


@pytest.mark.parametrize(("backend", "name"), [("skypilot", "skypilot/mine.yaml"), ("colab", "colab.ipynb")])
def test_files_of_the_users_under_the_name_of_the_task_are_kept(
    call: Any, tmp_path: Path, backend: str, name: str
) -> None:
    mine = tmp_path / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine\n")
    done = call(*SAID, "--run-dir", ".", "--backend", backend)
    assert done.error == (2, "output_exists")
    assert done.answer["error"]["got"] == name.split("/")[0]
    assert mine.read_text() == "mine\n" and not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize("backend", ["colab", "skypilot"])
def test_a_recipe_of_the_users_beside_its_plan_is_kept(
    call: Any, desk: tuple[Hub, Commands, Path], tmp_path: Path, backend: str
) -> None:
    server, commands, home = desk
    (tmp_path / "recipe.yaml").write_text(f"# mine\nmodel: {MODEL}\ndata: rows.jsonl\nmax_steps: 20\n")
    words = ("plan", "recipe.yaml", "--where", "cloud", "--flavor", "t4-small", "--out", "plan.json")
    assert commands.run(tmp_path, server.environment(home), *words).code == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    done = call("recipe.yaml", "--flavor", "t4-small", "--run-dir", ".", "--backend", backend)
    assert (done.error, done.answer["error"]["got"]) == ((2, "output_exists"), "recipe.yaml")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_a_run_directory_takes_a_notebook_and_a_task_again_and_again(call: Any, tmp_path: Path) -> None:
    """Also the files of a command that was killed before it wrote the recipe."""
    said = (*SAID, "--flavor", "t4-small", "--run-dir", "run")
    for backend in ("colab", "skypilot", "skypilot", "colab"):
        assert call(*said, "--backend", backend).code == (0 if backend == "colab" else 3)
    (tmp_path / "run" / "recipe.yaml").unlink()
    assert call(*said, "--backend", "colab").code == 0
    assert (tmp_path / "run" / "recipe.yaml").is_file()


@pytest.mark.parametrize("backend", ["colab", "skypilot"])
def test_a_run_on_machines_of_others_goes_on_there(
    call: Any, desk: tuple[Hub, Commands, Path], tmp_path: Path, backend: str
) -> None:
    """Not on this machine, which knows nothing of its progress."""
    server, commands, home = desk
    call(*SAID, "--flavor", "t4-small", "--backend", backend, "--run-dir", "r")
    ours = {path.name: path.read_bytes() for path in (tmp_path / "r").rglob("*") if path.is_file()}
    again = f"skill-train submit --backend {backend} r"
    env = server.environment(home)
    state = commands.run(tmp_path, env, "status", "r").answer
    assert (state["data"]["stage"], state["next"]) == ("ELSEWHERE", [again])
    assert backend in state["data"]["message"].lower()
    refused = commands.run(tmp_path, env, "local", "--resume", "--run-dir", "r")
    assert (refused.error, refused.answer["error"]["hint"]) == ((2, "cloud_plan"), again)
    assert call(*again.split()[2:]).answer["data"]["run_dir"] == "r"
    assert {path.name: path.read_bytes() for path in (tmp_path / "r").rglob("*") if path.is_file()} == ours


@pytest.mark.parametrize("backend", ["skypilot", "colab"])
def test_a_run_for_another_provider_is_the_same_plan_as_a_job(call: Any, backend: str) -> None:
    """Otherwise the same plan would be paid for twice, because its job is not found."""
    plans = [call(*SAID, "--flavor", "t4-small", "--dry-run").data["job"]["labels"]["plan"]]
    call(*SAID, "--flavor", "t4-small", "--backend", backend, "--run-dir", "r")
    plans.append(call("r", "--dry-run").data["job"]["labels"]["plan"])
    assert plans[0] == plans[1]


def test_a_task_of_several_machines_is_no_job_of_one(
    call: Any, desk: tuple[Hub, Commands, Path], tmp_path: Path
) -> None:
    """Its launcher would wait for the second machine until the timeout."""
    server, commands, home = desk
    call(*SAID, "--backend", "skypilot", "--flavor", "l4x1", "--nodes", "2", "--run-dir", "r")
    again = "skill-train submit --backend skypilot r"
    for words in (("--dry-run",), ("--backend", "colab")):
        done = call("r", *words)
        assert (*done.error, done.answer["error"]["hint"]) == (2, "cloud_plan", again)
    for command in ("resume", "pull", "status"):
        assert commands.run(tmp_path, server.environment(home), command, "r").answer["next"] == [again]


def test_a_task_that_was_launched_is_followed_and_stopped_with_sky(
    call: Any, desk: tuple[Hub, Commands, Path], tmp_path: Path, sky: dict[str, str]
) -> None:
    """Nobody who wants to stop a machine is told to launch one. It stays so when the task is written again."""
    server, commands, home = desk
    asked = (*SAID, "--backend", "skypilot", "--flavor", "l4x1", "--run-dir", "r e")
    shown = call(*asked).answer
    assert "is not known here" in shown["error"]["message"] and "which SkyPilot shows" not in str(shown)
    assert "sky launch --dryrun 'r e/skypilot/task.yaml'" in shown["error"]["message"]
    for words in ((*asked, "--yes"), ("r e", "--backend", "skypilot")):
        answer = call(*words, **sky).answer
        name, bucket = answer["data"]["cluster"], answer["data"]["kept_in"]
        ways = [f"sky logs {name}", f"hf buckets sync {bucket} 'r e'", f"sky down {name}"]
        assert f"sky down {name}" in answer["data"]["how"]
        assert "--yes" not in words or answer["next"] == ways
        for command in ("cancel", "pull", "wait", "logs", "resume"):
            done = commands.run(tmp_path, server.environment(home), command, "r e")
            error = done.answer["error"]
            assert done.error == (2, "missing_step") and "submit" not in error["hint"], command
            assert all(way in error["hint"] for way in ways), error
        assert commands.run(tmp_path, server.environment(home), "status", "r e").answer["next"] == ways


def test_a_task_goes_on_with_its_machines(call: Any, tmp_path: Path) -> None:
    first = call(*SAID, "--backend", "skypilot", "--flavor", "l40sx4", "--nodes", "2", "--run-dir", "r").answer["data"]
    task = (tmp_path / first["task"]).read_bytes()
    again = call("r", "--backend", "skypilot").answer["data"]
    assert (again["nodes"], again["cluster"], again["task"]) == (2, first["cluster"], first["task"])
    assert (tmp_path / again["task"]).read_bytes() == task


def test_a_task_goes_on_on_its_clouds_and_with_its_timeout(call: Any, tmp_path: Path) -> None:
    """A folder of a run says all that was asked for; what is asked for now counts more."""
    call(*SAID, "--backend", "skypilot", "--infra", "aws/us-east-1, gcp", "--timeout", "7h", "--run-dir", "r")
    task = (tmp_path / "r" / "skypilot" / "task.yaml").read_bytes()
    again = call("r", "--backend", "skypilot").answer["data"]
    assert [place["infra"] for place in again["resources"]["any_of"]] == ["aws/us-east-1", "gcp"]
    assert again["timeout_seconds"] == 7 * 3600
    assert (tmp_path / "r" / "skypilot" / "task.yaml").read_bytes() == task
    other = call("r", "--backend", "skypilot", "--infra", "lambda", "--timeout", "5h").answer["data"]
    assert (other["resources"]["any_of"], other["timeout_seconds"]) == ([{"infra": "lambda"}], 5 * 3600)
    (tmp_path / "r" / "skypilot" / "task.yaml").write_text("name: [")
    assert call("r", "--backend", "skypilot").error == (2, "broken_record")


def test_a_task_on_all_clouds_goes_on_on_those_that_can(call: Any) -> None:
    """Not on RunPod and Vast, which were among the clouds for one machine and have no two."""
    call(*SAID, "--backend", "skypilot", "--flavor", "l40sx4", "--run-dir", "r")
    data = call("r", "--backend", "skypilot", "--nodes", "2").answer["data"]
    assert [place["infra"] for place in data["resources"]["any_of"]] == ["lambda", "k8s", "aws", "gcp"]


def test_a_plan_for_the_cloud_becomes_a_notebook(call: Any, desk: tuple[Hub, Commands, Path], tmp_path: Path) -> None:
    server, commands, home = desk
    words = ("plan", *SAID, "--where", "cloud", "--flavor", "l4x1", "--out", "plan.json")
    assert commands.run(tmp_path, server.environment(home), *words).code == 0
    assert call("plan.json", "--backend", "colab").data["gpu"] == "L4"
