"""`skill-train submit` against the Hub for tests: what it refuses, what it sends, and that no job is there twice."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

import planning
from command_child import Commands, Done, program
from hub_emulator import ALWAYS, Fault, Hub, JobFault, faults
from hub_models import add_model
from waiting import wait_until

pytestmark = pytest.mark.slow

pytest.importorskip("huggingface_hub")

MODEL, DATA = "Qwen/Qwen2.5-0.5B-Instruct", "me/tickets"
CREATE = "POST /api/jobs/me$"
ROWS = "rows.jsonl"


@pytest.fixture
def hub(desk: tuple[Hub, Commands, Path]) -> Iterator[Hub]:
    """It forgets the jobs and repositories of the test before. Its jobs wait for a machine until they are ended."""
    server = desk[0]
    hardware = list(server.hardware)
    for bucket in server.buckets.values():
        bucket.private = True
        for claim in bucket.inside("claims"):
            del bucket.files[claim]
    server.repositories.clear()
    server.log.clear()
    server.faults.add_job(JobFault("stuck", attempt=None))
    add_model(server)
    yield server
    server.faults.clear()
    server.faults.struck.clear()
    server.hardware = hardware
    for job in server.jobs.all:
        job.cancelled.set()
    server.jobs.all.clear()
    assert server.unknown == []


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    _rows(folder / ROWS)
    return folder


@pytest.fixture
def call(desk: tuple[Hub, Commands, Path], here: Path) -> Any:
    server, commands, home = desk

    def run(*arguments: object, token: str | None = "", **environment: str) -> Done:
        env = server.environment(home, token=token) | environment
        done = commands.run(here, env, "submit", *arguments)
        assert server.token not in done.stdout + done.stderr
        return done

    return run


SAID = ("--model", MODEL, "--data", ROWS)


# --- What it sends ---


def test_local_data_goes_along(hub: Hub, call: Any, here: Path) -> None:
    data = call(*SAID, "--yes").data
    [job] = hub.jobs.all
    assert (data["job_id"], data["reused"], data["stage"]) == (job.id, False, "SCHEDULING")
    assert data["url"] == f"{hub.endpoint}/jobs/me/{job.id}"
    assert job.spec["command"] == [
        "uv", "run", "/data/train.py", "/data/plan.json", "--job", "--data", f"/dataset/{ROWS}"
    ]  # fmt: skip
    kept = next(v for v in job.spec["volumes"] if v["mountPath"] == "/data")
    sent = next(v for v in job.spec["volumes"] if v["mountPath"] == "/dataset")
    assert (kept["readOnly"], sent["readOnly"], sent["source"]) == (False, True, "me/jobs-artifacts")
    assert _in_bucket(hub, sent["path"]) == {ROWS: (here / ROWS).read_bytes()}
    files = _in_bucket(hub, kept["path"])
    repository = Path(__file__).resolve().parents[2]
    assert files["train.py"] == (repository / "scripts" / "train.py").read_bytes()
    run = here / data["run_dir"]
    assert files["plan.json"] == (run / "plan.json").read_bytes()
    assert [u["bytes"] for u in data["uploads"]] == [len(files["train.py"]), len(files["plan.json"]), 2390, None]
    result = data["uploads"][-1]
    assert (result["what"], result["name"]) == ("result", data["hub_model_id"])
    assert (run / "recipe.yaml").is_file()
    record = json.loads((run / "cloud.json").read_text())
    assert record["folder"] == kept["path"] and record["data"]["folder"] == sent["path"]
    assert [(j["state"], j["job_id"], j["flavor"]) for j in record["jobs"]] == [("started", job.id, data["flavor"])]
    assert job.labels["run"] == record["run_id"] == job.spec["environment"]["SKILL_TRAIN_RUN"]
    assert job.labels["plan"] == record["plan_hash"]
    planned = json.loads(files["plan.json"])
    assert planned["policy"]["hub_model_id"] == data["hub_model_id"] == record["hub_model_id"]
    assert job.spec["timeoutSeconds"] == planned["timeout_seconds"] == data["timeout_seconds"]


def test_data_of_the_hub_is_pinned_and_not_uploaded(hub: Hub, call: Any, here: Path) -> None:
    repository = hub.add("dataset", DATA, {"train.jsonl": (here / ROWS).read_bytes()})
    done = call("--model", MODEL, "--data", DATA, "--yes")
    [job] = hub.jobs.all
    assert [v["mountPath"] for v in job.spec["volumes"]] == ["/data"]
    assert "--data" not in job.spec["command"]
    planned = json.loads((here / done.data["run_dir"] / "plan.json").read_text())
    assert planned["recipe"]["data_revision"] == repository.commit("main")
    assert [u["what"] for u in done.data["uploads"]] == ["program", "plan", "result"]


def test_local_data_in_a_private_dataset_repository(hub: Hub, call: Any, here: Path) -> None:
    data = call(*SAID, "--data-repo", "me/rows", "--yes").data
    repository = hub.repositories["dataset", "me/rows"]
    assert repository.private and repository.files[ROWS] == (here / ROWS).read_bytes()
    sent = next(v for v in hub.jobs.all[0].spec["volumes"] if v["mountPath"] == "/dataset")
    assert (sent["type"], sent["source"], sent["revision"]) == ("dataset", "me/rows", repository.commit("main"))
    assert data["uploads"][2]["to"] == "the private dataset me/rows"


@pytest.mark.parametrize("place", ["bucket", "repository", "skypilot", "colab"])
def test_a_folder_sends_what_its_format_names_and_no_link(
    hub: Hub, desk: Any, call: Any, here: Path, place: str
) -> None:
    """A link to the key or to the token's own file, whatever its name, is refused before the size is shown."""
    datasets = pytest.importorskip("datasets")
    rows = [json.loads(line) for line in (here / ROWS).read_text().splitlines()]
    datasets.Dataset.from_list(rows).save_to_disk(str(here / "rows"))
    own = {f"rows/{path.name}": path.read_bytes() for path in (here / "rows").iterdir()}
    (here / "id_rsa").write_text("a private key")
    (here / "rows" / "README.md").write_text("a private note")
    words = ["--model", MODEL, "--data", "rows", "--max-steps", "2"]
    words += {"repository": ["--data-repo", "me/rows"], "bucket": []}.get(place, ["--backend", place])
    for name in ("notes.txt", ".t"):
        (here / "rows" / name).symlink_to(here / "id_rsa")
        done = call(*words, "--yes")
        assert done.error == (2, "unsafe_link") and name in done.answer["error"]["message"]
        assert hub.jobs_created == 0 and "bytes" not in done.stdout and not (here / "runs").exists()
        (here / "rows" / name).unlink()
    done = call(*words, *(["--yes"] if place in ("bucket", "repository") else []))
    run = here / done.answer["data"]["run_dir"]
    if place == "bucket":
        sent = _in_bucket(hub, next(v for v in hub.jobs.all[0].spec["volumes"] if v["mountPath"] == "/dataset")["path"])
        [told] = [upload for upload in done.data["uploads"] if upload["what"] == "data"]
        assert (told["files"], told["bytes"]) == (len(own), sum(map(len, own.values())))
        assert told["left_out"] == ["README.md"]
    elif place == "repository":
        sent = {n: c for n, c in hub.repositories["dataset", "me/rows"].at("main").items() if n != ".gitattributes"}
    elif place == "skypilot":
        there = run / "skypilot" / "data"
        sent = {path.relative_to(there).as_posix(): path.read_bytes() for path in there.rglob("*") if path.is_file()}
    else:
        sent = {name: own.get(name, b"") for name in _names_in_notebook(run / "colab.ipynb")}
    assert sent == own


@pytest.mark.parametrize("more", [("--yes",), ("--backend", "skypilot"), ("--backend", "colab"), ("--dry-run",)])
def test_a_token_in_the_data_is_sent_nowhere(hub: Hub, call: Any, here: Path, more: tuple[str, ...]) -> None:
    first, *rows = (here / ROWS).read_text().splitlines()
    row = json.loads(first)
    name = list(row)[-1]
    row[name] = f"{row[name]}\n{'hf_' + 'a1B2c3D4' * 4}"
    (here / ROWS).write_text("\n".join([json.dumps(row), *rows]) + "\n")
    done = call(*SAID, "--max-steps", "2", *more)
    assert done.error == (2, "secret_found") and "a1B2c3D4" not in done.stdout + done.stderr
    assert hub.jobs_created == 0 and not (here / "runs").exists()


def _names_in_notebook(path: Path) -> set[str]:
    cells = json.loads(path.read_text())["cells"]
    [cell] = [cell for cell in cells if "files" in cell["metadata"].get("tags", [])]
    packed: dict[str, Any] = {}
    exec("".join(cell["source"]), packed)  # noqa: S102 - a literal of our own
    return {name.removeprefix("data/") for name in packed["FILES"] if name.startswith("data/")}


def test_the_data_is_uploaded_once(hub: Hub, call: Any) -> None:
    call(*SAID, "--yes")
    hub.log.clear()
    call(*SAID, "--yes", "--force-new")
    batches = [request for request in hub.log if request.path.endswith("/batch")]
    assert (hub.jobs_created, len(batches)) == (2, 2)  # the program with the plan, and the claim on the job


@pytest.mark.parametrize(
    "more", [(), ("--data-repo", "me/rows"), ("four.yaml",)], ids=["bucket", "repository", "4-bit"]
)
def test_a_dry_run_shows_what_is_then_sent(hub: Hub, call: Any, here: Path, more: tuple[str, ...]) -> None:
    if more == ("four.yaml",):
        (here / "four.yaml").write_text("load_in_4bit: true\nmodel: m\ndata: d\n")
    before = hub.jobs_created, len(hub.buckets), _tree(here)
    shown = call(*more, *SAID, "--dry-run").data
    assert (hub.jobs_created, len(hub.buckets), _tree(here)) == before
    assert shown["not_checked"] == []
    assert [request.path for request in hub.log if request.method not in ("GET", "HEAD")] == []
    call(*more, *SAID, "--yes")
    job = hub.jobs.all[0]
    sent = job.spec | {"labels": job.labels, "secrets": sorted(job.secrets), "namespace": job.namespace}
    assert _at_start(shown["job"]) == _at_start(sent)
    if more == ("four.yaml",):
        assert sent["command"][:4] == ["uv", "run", "--with", "bitsandbytes==0.50.2"]


def _at_start(spec: dict[str, Any]) -> dict[str, Any]:
    """Without what only the start makes: the run's id, the folder of its files, the commit of an upload."""
    spec = json.loads(json.dumps(spec))
    del spec["labels"]["run"], spec["environment"]["SKILL_TRAIN_RUN"]
    for volume in spec["volumes"]:
        volume.pop("revision", None)
        if volume["mountPath"] == "/data":
            del volume["path"]
    return spec


def test_the_token_is_a_secret_of_the_job_and_nowhere_else(hub: Hub, call: Any, here: Path) -> None:
    shown = [call(*SAID, *more) for more in (("--dry-run",), (), ("--yes",), ("--yes", "--format", "human"))]
    [job] = hub.jobs.all
    assert job.secrets == {"HF_TOKEN": hub.token}
    texts = [done.stdout + done.stderr for done in shown] + [repr(hub.log), repr(job), json.dumps(job.info())]
    files = [path.read_bytes() for root in (here, hub.folder) for path in root.rglob("*") if path.is_file()]
    assert not [text for text in texts if hub.token in text]
    assert files and not [data for data in files if hub.token.encode() in data]


def test_an_organisation_runs_and_pays(hub: Hub, call: Any) -> None:
    data = call(*SAID, "--namespace", "me-org", "--yes").data
    [job] = hub.jobs.all
    assert (job.namespace, data["namespace"], data["hub_model_id"].split("/")[0]) == ("me-org", "me-org", "me-org")
    assert {volume["source"] for volume in job.spec["volumes"]} == {"me-org/jobs-artifacts"}
    assert call(*SAID, "--namespace", "me-org").data["reused"] is True


# --- Where it comes from ---


def test_a_cloud_plan_is_run_as_it_is(hub: Hub, desk: Any, call: Any, here: Path) -> None:
    _, commands, home = desk
    layers = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkvo"]  # a recipe of a run names them
    add_model(hub, weights=save({name: np.zeros((2, 2), np.float16) for name in layers}))
    arguments = ("plan", *SAID, "--flavor", "l4x1", "--out", "plan.json")
    planned = commands.run(here, hub.environment(home), *arguments)
    assert planned.answer["next"] == ["skill-train submit plan.json"]
    assert call("plan.json", "--flavor", "t4-small").error == (2, "bad_usage")
    data = call("plan.json", "--yes").data
    made, sent = (json.loads((here / name).read_text()) for name in ("plan.json", f"{data['run_dir']}/plan.json"))
    assert {key for key in made if made[key] != sent[key]} == {"policy"}
    assert hub.jobs.all[0].spec["flavor"] == "l4x1"
    (here / ROWS).write_text((here / ROWS).read_text() * 2)
    refused = call("plan.json", "--yes")
    assert refused.error == (2, "outdated_plan") and refused.answer["error"]["hint"].endswith(" and --out plan.json")
    run = data["run_dir"]
    refused = call(run, "--yes")  # `plan --out` does not write there
    anew = f"begin another run with its recipe: skill-train submit {run}/recipe.yaml"
    assert refused.error == (2, "outdated_plan") and refused.answer["error"]["hint"] == anew
    assert call(f"{run}/recipe.yaml").error == (3, "confirm_cost")


@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_a_plan_whose_parts_cannot_be_read_any_more(hub: Hub, desk: Any, call: Any, here: Path, kind: str) -> None:
    """Nothing else asks for them: the plan is made."""
    _, commands, home = desk
    hub.add("dataset", DATA, {"train.jsonl": (here / ROWS).read_bytes()})
    arguments = ("plan", "--model", MODEL, "--data", DATA, "--where", "cloud", "--out", "plan.json")
    assert commands.run(here, hub.environment(home), *arguments).code == 0
    hub.repositories[kind, MODEL if kind == "model" else DATA].gated = True
    assert call("plan.json", "--yes").error == (4, "gated")


def test_a_local_run_now_for_real(hub: Hub, desk: Any, call: Any, here: Path) -> None:
    """Its plan here, the same recipe there, in a run directory of its own."""
    _, commands, home = desk
    arguments = ("plan", *SAID, "--max-steps", "7", "--where", "local", "--out", "run/plan.json")
    there = commands.run(here, hub.environment(home), *arguments).data
    done = call("run", "--yes")
    assert (done.data["recipe_hash"], done.data["reused"]) == (there["recipe_hash"], False)
    assert done.data["run_dir"] == f"runs/rows-{there['recipe_hash'][:8]}-cloud"
    assert "planned again, for the cloud" in done.stderr
    made = json.loads((here / done.data["run_dir"] / "plan.json").read_text())
    assert (made["where"], made["recipe"]["max_steps"], made["placement"]["device"]) == ("cloud", 7, "cuda")
    assert call("run", "--run-dir", "run", "--yes").error == (2, "another_run")
    again = call(done.data["run_dir"], "--yes").data
    assert (again["reused"], again["run_dir"], hub.jobs_created) == (True, done.data["run_dir"], 1)
    (here / ROWS).write_text((here / ROWS).read_text() * 2)
    assert [w["code"] for w in call("run").answer["warnings"]] == ["another_recipe"]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (("--data", "twice.jsonl"), (38, 4, None, ["q_proj", "k_proj", "v_proj", "o_proj"])),
        (("--max-steps", "31"), (31, 4, None, ["q_proj", "k_proj", "v_proj", "o_proj"])),
        (("--model", "me/phi"), (19, 2, None, ["qkv_proj", "o_proj"])),
        ((), (38, 4, None, ["q_proj", "k_proj", "v_proj", "o_proj"])),
    ],
)
def test_what_the_planner_chose_is_chosen_anew_with_other_inputs(
    hub: Hub, desk: Any, call: Any, here: Path, said: tuple[str, ...], expected: tuple[Any, ...]
) -> None:
    """Steps of one epoch, their warmup, the revision and the modules; what the user said stays."""
    _, commands, home = desk
    other = add_model(hub, "me/phi", "phi-3-mini-4k")
    (here / "twice.jsonl").write_text((here / ROWS).read_text() * 2)
    (here / "r.yaml").write_text(
        f"model: {MODEL}\ndata: {ROWS}\neffective_batch_size: 2\nnum_train_epochs: 1\nwarmup_ratio: 0.1\nlora_r: 8\n"
    )
    planned = commands.run(here, hub.environment(home), "plan", "r.yaml", "--where", "local", "--out", "run/plan.json")
    first = json.loads((here / "run/plan.json").read_text())["recipe"]
    assert planned.code == 0 and (first["max_steps"], first["warmup_steps"]) == (19, 2)  # 38 of 40 rows; a tenth
    if not said:
        (here / ROWS).write_text((here / "twice.jsonl").read_text())
    done = call("run", *said, "--yes")
    recipe = json.loads((here / done.data["run_dir"] / "plan.json").read_text())["recipe"]
    commit = (other if said[:1] == ("--model",) else hub.repositories["model", MODEL]).commit("main")
    names = ("max_steps", "warmup_steps", "data_revision", "target_modules")
    assert tuple(recipe[name] for name in names) == expected
    assert (recipe["revision"], recipe["lora_r"], recipe["effective_batch_size"]) == (commit, 8, 2)


def test_a_local_run_whose_data_has_other_columns_now(hub: Hub, desk: Any, call: Any, here: Path) -> None:
    planned = _other(desk, here, "plan", *SAID, "--where", "local", "--out", "run/plan.json")
    assert planned.code == 0
    (here / ROWS).write_text("".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(40)))
    done = call("run", "--yes")
    assert [warning["code"] for warning in done.answer["warnings"]] == ["without_template", "another_recipe"]
    recipe = json.loads((here / done.data["run_dir"] / "plan.json").read_text())["recipe"]
    assert (recipe["format"], recipe["loss_on"], recipe["columns"]) == ("text", "all", {"text": "text"})


@pytest.mark.parametrize("backend", ["skypilot", "colab"])
def test_a_run_with_a_job_on_machines_of_others_has_another_folder(
    hub: Hub, call: Any, here: Path, backend: str
) -> None:
    """Its plan stays that of its job."""
    first = call(*SAID, "--run-dir", "r", "--yes").data
    ours = {path.name: path.read_bytes() for path in (here / "r").iterdir()}
    words = ("r",) if backend == "skypilot" else SAID
    done = call(*words, "--backend", backend, "--run-dir", "r")
    assert (done.error, done.answer["error"]["hint"]) == ((2, "another_run"), "use another --run-dir")
    done = call(*words, "--backend", backend)
    folder = f"runs/rows-{first['recipe_hash'][:8]}-{backend}"
    assert done.answer["data"]["run_dir"] == folder
    assert json.loads((here / folder / "plan.json").read_text())["placement"]["backend"] == backend
    assert {path.name: path.read_bytes() for path in (here / "r").iterdir()} == ours
    assert call("r").data["job_id"] == first["job_id"]


@pytest.mark.parametrize("backend", ["skypilot", "colab"])
def test_a_run_of_this_machine_is_left_alone(hub: Hub, desk: Any, call: Any, here: Path, backend: str) -> None:
    """Also one of the same recipe."""
    planned = _other(desk, here, "plan", *SAID, "--max-steps", "7", "--where", "local", "--out", "run/plan.json")
    before = (here / "run/plan.json").read_bytes()
    assert planned.code == 0
    assert call("run", "--backend", backend, "--run-dir", "run").error == (2, "another_run")
    assert (here / "run/plan.json").read_bytes() == before


@pytest.mark.parametrize("options", [(), ("--force-new",), ("--dry-run",)])
def test_a_recipe_of_the_users_in_the_run_directory_is_kept(
    hub: Hub, call: Any, here: Path, options: tuple[str, ...]
) -> None:
    (here / "recipe.yaml").write_text(f"model: {MODEL}\ndata: {ROWS}\n")
    before = {path.name: path.read_bytes() for path in here.iterdir()}
    assert call("recipe.yaml", "--run-dir", ".", "--yes", *options).error == (2, "output_exists")
    assert {path.name: path.read_bytes() for path in here.iterdir()} == before
    assert hub.jobs_created == 0


def test_a_recipe_of_the_users_beside_its_plan_is_kept(hub: Hub, desk: Any, call: Any, here: Path) -> None:
    (here / "recipe.yaml").write_text(f"# mine\nmodel: {MODEL}\ndata: {ROWS}\n")
    assert _other(desk, here, "plan", "recipe.yaml", "--where", "cloud", "--out", "plan.json").code == 0
    before = {path.name: path.read_bytes() for path in here.iterdir()}
    done = call("plan.json", "--run-dir", ".", "--yes")
    assert (done.error, done.answer["error"]["got"]) == ((2, "output_exists"), "recipe.yaml")
    assert {path.name: path.read_bytes() for path in here.iterdir()} == before
    assert hub.jobs_created == 0


def test_a_plan_for_the_cloud_becomes_a_run_in_its_folder(hub: Hub, desk: Any, call: Any, here: Path) -> None:
    """A folder in which nothing but the plan lies."""
    assert _other(desk, here, "plan", *SAID, "--where", "cloud", "--out", "r/plan.json").code == 0
    first = call("r", "--run-dir", "r", "--yes").data
    assert (first["run_dir"], first["reused"], call("r", "--yes").data["job_id"]) == ("r", False, first["job_id"])


# --- What it costs ---


def test_nothing_is_sent_without_yes(hub: Hub, call: Any, here: Path) -> None:
    """The t4-small is 0.40 dollars an hour (huggingface.co/docs/hub/jobs-pricing, 2026-08-22), billed by the minute."""
    before = _tree(here)
    done = call(*SAID, "--flavor", "t4-small", "--timeout", "30m")
    assert done.error == (3, "confirm_cost")
    answer = done.answer
    yes = f"skill-train submit {' '.join(SAID)} --flavor t4-small --timeout 30m --yes --agreed 0.20"
    assert (answer["next"], answer["error"]["hint"]) == ([], yes)  # to pay is decided by nobody but the user
    assert answer["data"]["cost_usd"]["most"] == pytest.approx(0.20)
    low, high = (answer["data"]["seconds"][end] for end in ("low", "high"))
    assert answer["data"]["cost_usd"]["low"] == pytest.approx(-(-low // 60) / 60 * 0.4, abs=1e-6)
    assert answer["data"]["cost_usd"]["high"] == pytest.approx(-(-high // 60) / 60 * 0.4, abs=1e-6)
    assert "$0.20 at most" in answer["error"]["message"]
    assert (hub.jobs_created, _tree(here)) == (0, before)
    assert not [request for request in hub.log if request.method not in ("GET", "HEAD")]
    told = call(*SAID, "--format", "human")
    assert "upload: data" in told.stdout and "the private bucket me/jobs-artifacts" in told.stdout
    assert call(*SAID, "--flavor", "t4-small", "--timeout", "30m", "--yes").data["timeout_seconds"] == 1800


def test_a_price_that_rose_since_it_was_shown_is_shown_again(hub: Hub, call: Any) -> None:
    """Half an hour of a t4-small is 0.20 dollars, and 4 dollars at twenty times its price, which has 4 digits here."""
    small = (*SAID, "--flavor", "t4-small", "--timeout", "30m")
    again = call(*small).answer["error"]["hint"].split()[2:]
    low = hub.hardware
    hub.hardware = [
        row | {key: 20 * value for key, value in row.items() if key.startswith("unitCost")} for row in hub.hardware
    ]
    done = call(*again)
    assert (*done.error, hub.jobs_created, done.answer["data"]["cost_usd"]["most"]) == (3, "confirm_cost", 0, 4.0002)
    assert "this costs more than was agreed to: " in done.answer["error"]["message"]
    assert done.answer["error"]["hint"].endswith(" --timeout 30m --yes --agreed 4.01")
    limited = call(*small, "--max-cost", "5").answer["error"]["hint"]  # a bound already
    assert limited.endswith(" --max-cost 5 --yes")
    hub.hardware = low
    assert call(*again).data["reused"] is False  # as it was shown


def test_no_job_is_expected_to_end_after_its_timeout(hub: Hub, call: Any) -> None:
    """Between the ends of the estimate: it is stopped then."""
    small = (*SAID, "--flavor", "t4-small")
    seconds = call(*small).answer["data"]["seconds"]
    timeout = int(seconds["low"] + seconds["high"]) // 2
    end = call(*small, "--timeout", str(timeout), "--yes").data["expected_end"]
    low, high = (datetime.fromisoformat(end[name]) for name in ("low", "high"))
    assert (high - low).total_seconds() == pytest.approx(timeout - seconds["low"], abs=1.5)


def test_the_timeout_keeps_to_the_ceiling(hub: Hub, call: Any) -> None:
    """At 0.40 dollars an hour, 0.08 dollars are 12 minutes."""
    done = call(*SAID, "--flavor", "t4-small", "--max-cost", "0.08", "--yes")
    assert done.data["timeout_seconds"] == hub.jobs.all[0].spec["timeoutSeconds"] == 720
    assert [warning["code"] for warning in done.answer["warnings"]] == ["lowered_timeout"]


# --- What it refuses ---

ALONE = "--base BASE --adapter alone --out MERGED"
LOCAL_MODEL = {"model": "model"}
REFUSED: list[tuple[str, dict[str, Any], int, str, str]] = [
    ("no token", {"token": None}, 4, "not_signed_in", "hf auth login"),
    ("a wrong token", {"token": "hf_wrong"}, 4, "bad_token", "hf auth login"),
    ("a token that only reads", {"role": ("read", ())}, 4, "no_permission", "hf auth login"),
    ("no right to jobs", {"role": ("fineGrained", ("repo.write",))}, 4, "no_permission", "hf auth login"),
    ("no right to write", {"role": ("fineGrained", ("job.write",))}, 4, "no_permission", "hf auth login"),
    ("another namespace", {"more": ["--namespace", "you"]}, 4, "no_permission", "--namespace me"),
    ("another's repository", {"more": ["--hub-model-id", "you/x"]}, 4, "no_permission", "--hub-model-id me/x"),
    ("no repository", {"more": ["--hub-model-id", "a b"]}, 2, "bad_usage", "--hub-model-id"),
    ("gated model", {"model": "me/gated"}, 4, "gated", "huggingface.co/me/gated"),
    ("gated data", {"data": "me/gated-rows"}, 4, "gated", "huggingface.co/datasets/me/gated-rows"),
    ("no model", {"model": "me/nothing"}, 2, "unknown_model", ""),
    ("a model here", {"model": "model"}, 2, "local_input", "hf upload NAMESPACE/model model --private"),
    ("sensitive", {"recipe": "sensitive: true"}, 3, "sensitive", "train on this machine"),
    ("no such flavor", {"more": ["--flavor", "abacus"]}, 2, "unknown_flavor", ""),
    ("no timeout", {"more": ["--timeout", "soon"]}, 2, "bad_timeout", "--timeout 30m"),
    ("too short", {"more": ["--timeout", "60"]}, 3, "bad_timeout", "--timeout"),
    ("too dear", {"more": ["--max-cost", "0.001"]}, 3, "over_budget", "--max-cost"),
    ("too dear by its timeout", {"more": ["--max-cost", "1", "--timeout", "9h"]}, 3, "over_budget", "--timeout"),
    ("too dear for anybody", {"token": None, "more": ["--max-cost", "0.001"]}, 3, "over_budget", "--max-cost"),
    ("too large", {"model": "me/large", "more": ["--flavor", "t4-small"]}, 3, "no_memory", "a larger flavor"),
    ("a public result", {"more": ["--hub-model-id", "me/shown"]}, 3, "public_repository", "--hub-model-id"),
    ("no repository for the data", {"more": ["--data-repo", "a b"]}, 2, "bad_usage", "--data-repo"),
    ("data of others", {"more": ["--data-repo", "nobody/rows"]}, 4, "no_permission", "--data-repo me/rows"),
    ("public data", {"more": ["--data-repo", "me/open"]}, 3, "public_repository", "--data-repo"),
]


def test_a_run_or_an_adapter_as_the_model_is_refused_as_by_plan(hub: Hub, call: Any, here: Path) -> None:
    """It said to upload the run, of which no job could load a model."""
    for folder, file in (
        ("run", "plan.json"),
        ("run/adapter", "adapter_config.json"),
        ("alone", "adapter_config.json"),
    ):
        (here / folder).mkdir()
        (here / folder / file).write_text("{}")
    found = ("not_a_model", "skill-train merge run")
    for model, expected in (
        ("run", found),
        ("run/adapter", found),
        ("alone", ("not_a_model", f"skill-train merge {ALONE}")),
    ):
        for more in ((), ("--backend", "skypilot"), ("--backend", "colab")):
            error = call("--model", model, "--data", ROWS, *more).answer["error"]
            assert (error["code"], error["hint"]) == expected
    (here / "run" / "merged").mkdir()
    error = call("--model", "run", "--data", ROWS).answer["error"]
    assert (error["code"], error["hint"]) == ("not_a_model", "use the merged model: run/merged")
    (here / "run" / "merged" / "config.json").write_text('{"model_type": "llama"}')
    (here / "run" / "plan.json").write_text(json.dumps(planning.plan_document()))
    error = call("--model", "run/merged", "--data", ROWS).answer["error"]
    assert error["code"] == "local_input" and error["hint"].startswith("hf upload NAMESPACE/run-merged run/merged ")
    assert hub.log == []


@pytest.mark.parametrize(("case", "exit_code", "code", "hint"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_one_clear_error_before_anything_is_sent(
    hub: Hub, call: Any, here: Path, case: dict[str, Any], exit_code: int, code: str, hint: str
) -> None:
    _troubles(hub)
    (here / "model").mkdir()
    (here / "recipe.yaml").write_text(f"model: m\ndata: d\n{case.get('recipe', '')}\n")
    token = hub.new_token(*case["role"]) if "role" in case else case.get("token", "")
    words = ["--model", case.get("model", MODEL), "--data", case.get("data", ROWS), *case.get("more", [])]
    before = _tree(here)
    done = call("recipe.yaml", *words, "--yes", token=token)
    assert done.error == (exit_code, code), done.answer
    assert hint in done.answer["error"]["hint"]
    assert done.answer["error"]["expected"] or done.answer["error"]["got"]
    assert (hub.jobs_created, _tree(here)) == (0, before)
    assert code not in ("sensitive", "local_input") or hub.log == []
    assert not [request for request in hub.log if request.method not in ("GET", "HEAD")]


def test_the_cost_is_known_before_the_token(hub: Hub, call: Any) -> None:
    """Whoever has to sign in first shall know what for."""
    with_token = call(*SAID, "--flavor", "t4-small")
    without = call(*SAID, "--flavor", "t4-small", token=None)
    assert (with_token.error, without.error) == ((3, "confirm_cost"), (4, "not_signed_in"))
    priced, shown = with_token.answer["data"], without.answer["data"]
    assert shown["timeout_seconds"] == priced["timeout_seconds"]
    ends = ("low", "high", "most", "usd_per_hour")
    assert [shown["cost_usd"][end] for end in ends] == [priced["cost_usd"][end] for end in ends]
    assert "t4-small: $" in call(*SAID, "--flavor", "t4-small", "--format", "human", token=None).stdout


def test_a_public_bucket_is_no_place_for_the_run(hub: Hub, call: Any) -> None:
    call(*SAID, "--yes")
    hub.buckets["me/jobs-artifacts"].private = False
    assert call(*SAID, "--yes", "--force-new").error == (3, "public_repository")
    assert hub.jobs_created == 1


def test_a_flavor_that_is_offered_no_more(hub: Hub, call: Any) -> None:
    """The plan knows the offer of a day; the check asks again."""
    assert call(*SAID, "--flavor", "l4x1").error == (3, "confirm_cost")
    hub.hardware = [row for row in hub.hardware if row["name"] != "l4x1"]
    assert call(*SAID, "--flavor", "l4x1", "--yes").error == (2, "unknown_flavor")


@pytest.mark.parametrize(
    ("path", "fault", "code"),
    [
        ("GET /api/whoami-v2", faults.SERVER_ERROR, "hub_error"),
        ("GET /api/whoami-v2", faults.RATE_LIMIT, "rate_limit"),
        ("GET /api/whoami-v2", faults.NO_ANSWER, "hub_unreachable"),
        ("/auth-check$", faults.BAD_GATEWAY, "hub_error"),
        ("GET /api/jobs/hardware", faults.SERVER_ERROR, "hub_error"),
    ],
)
def test_a_check_without_an_answer_is_temporary(
    hub: Hub, call: Any, here: Path, path: str, fault: Fault, code: str
) -> None:
    """Once is survived; a dry run says what was not checked."""
    call(*SAID)
    hub.faults.add(path, fault)
    assert call(*SAID).error == (3, "confirm_cost")
    hub.faults.add(path, fault, times=ALWAYS)
    assert call(*SAID, "--yes").error == (8, code)
    shown = call(*SAID, "--dry-run", "--namespace", "me").data
    assert len(shown["not_checked"]) == 1 and shown["job"]["flavor"] == "t4-small"
    assert (hub.jobs_created, _tree(here)) == (0, [ROWS])


@pytest.mark.parametrize(
    ("path", "fault", "error"),
    [
        ("GET /api/whoami-v2", faults.NO_PERMISSION, (4, "no_permission")),
        ("GET /api/whoami-v2", faults.NO_CREDIT, (4, "no_credit")),
        ("GET /api/whoami-v2", faults.NOT_FOUND, (2, "hub_refused")),
        ("xet-write-token", faults.NO_PERMISSION, (4, "no_permission")),
        ("POST /cas/.*/xorbs", faults.NO_PERMISSION, (8, "hub_error")),
    ],
)
def test_a_refusal_is_no_outage(hub: Hub, call: Any, here: Path, path: str, fault: Fault, error: Any) -> None:
    """But a store that refuses what the Hub has allowed is in trouble itself."""
    mine = {"prompt": path, "completion": str(fault.status)}  # so that nothing of it was uploaded before
    (here / ROWS).write_text((here / ROWS).read_text() + json.dumps(mine) + "\n")
    hub.faults.add(path, fault, times=ALWAYS)
    assert call(*SAID, "--yes").error == error
    assert hub.jobs_created == 0


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["Write to ada@example.org", "or to bob.b@mail.example.com", "plain"], "2 lines of the data seem to contain"),
        (["Call +49 170 1234567 today"], "1 line of the data seems to contain"),
        (["@property", "a @ b", "prices rise +5 %", "git@", "x+1 = 2"], ""),  # of code, markdown and arithmetic
    ],
)
@pytest.mark.parametrize("more", [(), ("--backend", "colab")])
def test_personal_data_is_told_before_it_is_sent(
    hub: Hub, call: Any, here: Path, words: list[str], count: str, more: tuple[str, ...]
) -> None:
    rows = [json.dumps({"prompt": text, "completion": "yes"}) for text in words * (1 if count else 20)]
    (here / "told.jsonl").write_text("\n".join([*rows, *['{"prompt": "a", "completion": "b"}'] * 20]) + "\n")
    answer = call("--model", MODEL, "--data", "told.jsonl", "--max-steps", "20", *more).answer
    told = [each["message"] for each in answer["warnings"] if each["code"] == "personal_data"]
    assert len(told) == bool(count) and all(each.startswith(count) for each in told)
    assert all("skill-train data" in each and "sensitive: true" in each for each in told)


def test_a_dataset_of_the_users_with_these_names_is_told_before_it_changes(hub: Hub, call: Any) -> None:
    files = {ROWS: b"precious", "README.md": b"mine", "other.jsonl": b"another"}
    repository = hub.add("dataset", "me/rows", files, private=True)
    done = call(*SAID, "--data-repo", "me/rows")
    assert done.error == (3, "confirm_cost") and repository.files[ROWS] == b"precious"
    [warning] = done.answer["warnings"]
    assert warning["code"] == "repository_in_use" and f"me/rows already holds {ROWS}" in warning["message"]
    del repository.files[ROWS]
    assert call(*SAID, "--data-repo", "me/rows").answer["warnings"] == []


def test_a_dataset_that_leaves_the_rows_out_starts_no_job(hub: Hub, call: Any) -> None:
    """The Hub applies the .gitignore of a repository without a word: the job would find no data."""
    repository = hub.add("dataset", "me/rows", {".gitignore": b"*.tmp\n*.jsonl"}, private=True)
    done = call(*SAID, "--data-repo", "me/rows", "--yes")
    assert (*done.error, hub.jobs_created) == (2, "output_changed", 0)
    assert f"{ROWS} is in its .gitignore" in done.answer["error"]["message"] and not repository.history
    repository.files[".gitignore"] = b"*.tmp"
    assert (call(*SAID, "--data-repo", "me/rows", "--yes").code, hub.jobs_created) == (0, 1)
    assert ROWS in repository.files


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize(
    ("left_out", "named"), [("*.safetensors", "adapter_model.safetensors"), ("training.json", "training.json")]
)
def test_a_repository_that_leaves_the_result_out_starts_no_job(
    hub: Hub, call: Any, left_out: str, named: str, dry: bool
) -> None:
    """The job asks too, in its first minute, which is paid."""
    repository = hub.add("model", "me/mine", {".gitignore": f"*.tmp\n{left_out}".encode()}, private=True)
    said = (*SAID, "--hub-model-id", "me/mine", "--dry-run" if dry else "--yes")
    done = call(*said)
    assert (*done.error, hub.jobs_created) == (2, "output_changed", 0)
    assert f"{named} is in its .gitignore" in done.answer["error"]["message"] and not repository.history
    repository.files[".gitignore"] = b"*.tmp"
    assert (call(*said).code, hub.jobs_created) == (0, 0 if dry else 1)


def test_a_repository_that_is_in_use_is_told(hub: Hub, call: Any) -> None:
    hub.add("model", "me/mine", {"adapter_config.json": b"{}", ".gitattributes": b""}, private=True)
    done = call(*SAID, "--hub-model-id", "me/mine")
    assert [w["code"] for w in done.answer["warnings"]] == ["repository_in_use"]


# --- One job, and never two ---


@pytest.mark.parametrize(
    ("fault", "times"),
    [
        (faults.SERVER_ERROR, 2),
        (faults.BAD_GATEWAY, 1),
        (faults.NO_ANSWER, 1),
        (faults.RATE_LIMIT, 1),
        (faults.DONE_AND_ERROR, 1),
        (faults.DONE_AND_NO_ANSWER, 1),
    ],
)
def test_an_error_of_the_request_that_makes_the_job(hub: Hub, call: Any, here: Path, fault: Fault, times: int) -> None:
    hub.faults.add(CREATE, fault, times=times)
    data = call(*SAID, "--yes").data
    assert (hub.jobs_created, len(hub.faults.struck)) == (1, times)
    assert data["job_id"] == hub.jobs.all[0].id
    record = json.loads((here / data["run_dir"] / "cloud.json").read_text())
    assert [job["state"] for job in record["jobs"]] == ["started"]
    assert record["folder"] == next(v["path"] for v in hub.jobs.all[0].spec["volumes"] if v["mountPath"] == "/data")


@pytest.mark.parametrize(
    ("fault", "exit_code", "code"),
    [
        (faults.NO_CREDIT, 4, "no_credit"),
        (faults.NO_PERMISSION, 4, "no_permission"),
        (faults.UNAUTHORIZED, 4, "bad_token"),
        (faults.SERVER_ERROR, 8, "hub_error"),
        (faults.NO_ANSWER, 8, "hub_unreachable"),
    ],
)
def test_a_job_that_cannot_be_made_can_be_made_later(
    hub: Hub, call: Any, here: Path, fault: Fault, exit_code: int, code: str
) -> None:
    """The run directory stays, and the same command goes on with it."""
    hub.faults.add(CREATE, fault, times=ALWAYS)
    done = call(*SAID, "--yes")
    assert done.error == (exit_code, code)
    if fault is faults.NO_CREDIT:
        assert "Pre-paid credit balance is insufficient" in done.answer["error"]["got"]
        assert "billing" in done.answer["error"]["hint"]
    tries = sum(request.method == "POST" and request.path == "/api/jobs/me" for request in hub.log)
    assert (hub.jobs_created, tries) == (0, 1 if exit_code == 4 else 3)
    [record] = [json.loads(path.read_text()) for path in here.glob("runs/*/cloud.json")]
    assert [job["state"] for job in record["jobs"]] == ([] if exit_code == 4 else ["starting"])
    hub.faults.clear()
    hub.faults.add_job(JobFault("stuck", attempt=None))
    data = call(*SAID, "--yes").data
    assert (hub.jobs_created, data["reused"], hub.jobs.all[0].labels["run"]) == (1, False, record["run_id"])


def test_an_account_without_credit_does_not_pay_when_another_is_named(hub: Hub, call: Any, here: Path) -> None:
    hub.faults.add("POST /api/jobs/me-org$", faults.NO_CREDIT, times=ALWAYS)
    assert call(*SAID, "--run-dir", "r", "--namespace", "me-org", "--yes").error == (4, "no_credit")
    hub.faults.clear()
    hub.faults.add_job(JobFault("stuck", attempt=None))
    data = call(*SAID, "--run-dir", "r", "--yes").data
    [job] = hub.jobs.all
    assert (job.namespace, data["namespace"], data["hub_model_id"].split("/")[0]) == ("me", "me", "me")
    assert {volume["source"] for volume in job.spec["volumes"]} == {"me/jobs-artifacts"}
    record = json.loads((here / "r/cloud.json").read_text())
    assert (record["namespace"], record["bucket"]) == ("me", "me/jobs-artifacts")


def test_the_same_plan_is_the_same_job(hub: Hub, call: Any, here: Path) -> None:
    first = call(*SAID, "--yes").data
    again = call(*SAID).data  # it costs nothing more, so it needs no --yes
    elsewhere = call(*SAID, "--run-dir", "other").data
    assert [d["job_id"] for d in (again, elsewhere)] == [first["job_id"]] * 2
    assert [d["reused"] for d in (first, again, elsewhere)] == [False, True, True]
    ours, theirs = (json.loads((here / d["run_dir"] / "cloud.json").read_text()) for d in (first, elsewhere))
    for record in (ours, theirs):
        record["jobs"][0].pop("asked_at")
    assert ours == theirs
    assert (here / "other/plan.json").read_bytes() == (here / first["run_dir"] / "plan.json").read_bytes()
    assert call(*SAID, "--flavor", "l4x1", "--yes").error == (2, "another_run")
    new = call(*SAID, "--force-new", "--yes").data
    assert (new["run_dir"], hub.jobs_created) == (f"{first['run_dir']}-2", 2)
    assert call(*SAID, "--force-new", "--run-dir", "other", "--yes").error == (2, "another_run")


@pytest.mark.parametrize("label", ["second", "²"])
def test_a_job_whose_label_is_no_number_is_the_first(hub: Hub, desk: Any, call: Any, here: Path, label: str) -> None:
    """Labels can be changed on the Hub."""
    first = call(*SAID, "--yes").data
    hub.jobs.all[0].labels["attempt"] = label
    data = call(*SAID, "--run-dir", "other").data
    assert (data["job_id"], data["reused"]) == (first["job_id"], True)
    [recorded_job] = json.loads((here / "other" / "cloud.json").read_text())["jobs"]
    assert recorded_job["number"] == 1
    assert _other(desk, here, "status", first["job_id"]).data["attempt"] == 1


@pytest.mark.parametrize("fault", [faults.NO_CREDIT, faults.SERVER_ERROR])
@pytest.mark.parametrize("before", [(), ("--flavor", "l4x1")], ids=["same plan", "another plan"])
def test_a_folder_whose_job_never_began_finds_the_same_plan_too(
    hub: Hub, call: Any, here: Path, fault: Fault, before: tuple[str, ...]
) -> None:
    """As a folder without a record does."""
    hub.faults.add(CREATE, fault, times=ALWAYS)
    assert call(*SAID, *before, "--run-dir", "a", "--yes").code in (4, 8)
    hub.faults.clear()
    hub.faults.add_job(JobFault("stuck", attempt=None))
    first = _once_it_is_settled(call, *SAID, "--run-dir", "b", "--yes").data
    again = call(*SAID, "--run-dir", "a", "--yes").data
    assert (again["job_id"], again["reused"], hub.jobs_created) == (first["job_id"], True, 1)
    ours, theirs = (json.loads((here / name / "cloud.json").read_text()) for name in ("a", "b"))
    assert (ours["run_id"], ours["folder"]) == (theirs["run_id"], theirs["folder"])
    assert (here / "a/plan.json").read_bytes() == (here / "b/plan.json").read_bytes()


def _once_it_is_settled(call: Any, *said: str) -> Done:
    """As the hint says: the same command again, while a request of another folder may still make its job."""
    for _ in range(5):
        done = call(*said)
        if done.code == 0 or done.answer["error"]["code"] != "started_elsewhere":
            break
        assert done.code == 8
    return done


def test_a_job_that_has_ended_is_told_and_not_run_again(hub: Hub, call: Any) -> None:
    first = call(*SAID, "--yes").data
    hub.jobs.all[0].become("ERROR", "Job failed with exit code: 137. Reason: OOMKilled")
    done = call(*SAID, "--yes")
    assert done.error == (3, "job_ended")
    data, error = done.answer["data"], done.answer["error"]
    assert (data["job_id"], data["reused"], data["stage"]) == (first["job_id"], True, "ERROR")
    assert first["expected_end"]["low"] < first["expected_end"]["high"] and data["expected_end"]["low"] is None
    assert "ran out of memory (RAM, not the GPU's)" in error["message"]
    assert done.answer["next"][0] == error["hint"]
    assert error["hint"].startswith(f"skill-train resume {first['run_dir']} --flavor ")
    hub.jobs.all[0].become("CANCELED")
    assert call(*SAID, "--yes").answer["error"]["hint"] == f"skill-train resume {first['run_dir']}"
    hub.jobs.all[0].become("COMPLETED")
    assert call(*SAID, "--yes").answer["next"] == [f"skill-train pull {first['run_dir']}"]
    assert hub.jobs_created == 1


def test_a_job_that_was_deleted_is_told_and_can_go_on(hub: Hub, desk: Any, call: Any, here: Path) -> None:
    first = call(*SAID, "--yes").data
    hub.jobs.all.clear()
    done = call(*SAID, "--yes")
    assert done.error == (3, "job_ended")
    assert done.answer["error"]["hint"] == f"skill-train resume {first['run_dir']}"
    again = _other(desk, here, *done.answer["error"]["hint"].split()[1:], "--yes").data
    assert (again["attempt"], again["reused"]) == (2, False)


def test_a_job_that_was_deleted_after_its_end_is_done(hub: Hub, desk: Any, call: Any, here: Path) -> None:
    """`status` has recorded the end."""
    first = call(*SAID, "--yes").data
    hub.jobs.all[0].become("COMPLETED")
    assert _other(desk, here, "status", first["run_dir"]).code == 0
    hub.jobs.all.clear()
    done = call(*SAID, "--yes")
    assert (done.code, done.data["reused"], hub.jobs.all) == (0, True, [])
    assert done.answer["next"] == [f"skill-train pull {first['run_dir']}"]


def test_a_resume_without_an_answer_does_not_hide_the_job_before_it(hub: Hub, desk: Any, call: Any, here: Path) -> None:
    """Its checkpoints were paid for: nothing starts from the first step again, and no other plan takes its place."""
    first = call(*SAID, "--run-dir", "r", "--yes").data
    hub.jobs.all[0].become("ERROR", "Job timeout")
    hub.faults.add(CREATE, faults.SERVER_ERROR, times=ALWAYS)
    assert _other(desk, here, "resume", "r", "--yes").error == (8, "hub_error")
    hub.faults.clear()
    hub.faults.add_job(JobFault("stuck", attempt=None))
    ours = {name: (here / "r" / name).read_bytes() for name in ("plan.json", "recipe.yaml")}
    record = json.loads((here / "r/cloud.json").read_text())
    assert [job["state"] for job in record["jobs"]] == ["started", "starting"]
    for more in ((), ("--yes",)):
        done = call("r", *more)
        assert done.error == (3, "job_ended")
        assert (done.answer["data"]["job_id"], done.answer["data"]["stage"]) == (first["job_id"], "ERROR")
        assert done.answer["error"]["hint"] == "skill-train resume r"
    done = call(*SAID, "--flavor", "l4x1", "--run-dir", "r", "--yes")
    assert done.error == (2, "another_run") and first["job_id"] in done.answer["error"]["message"]
    after = json.loads((here / "r/cloud.json").read_text())
    assert (after["run_id"], after["folder"]) == (record["run_id"], record["folder"])
    assert [job["job_id"] for job in after["jobs"]] == [first["job_id"], None]
    assert {name: (here / "r" / name).read_bytes() for name in ours} == ours
    assert hub.jobs_created == 1
    data = _other(desk, here, "resume", "r", "--yes").data
    assert (data["attempt"], data["reused"], hub.jobs_created) == (2, False, 2)


def test_a_plan_that_was_done_is_not_paid_for_again(hub: Hub, call: Any) -> None:
    """From another run directory. One that ended badly elsewhere does not count, and one that runs comes first."""
    first = call(*SAID, "--yes").data
    hub.jobs.all[0].become("ERROR", "Job timeout")
    second = call(*SAID, "--run-dir", "second", "--yes").data
    assert (second["reused"], hub.jobs_created) == (False, 2)
    hub.jobs.all[0].become("COMPLETED")
    assert call(*SAID, "--run-dir", "third", "--yes").data["job_id"] == second["job_id"]
    hub.jobs.all[1].become("CANCELED")
    done = call(*SAID, "--run-dir", "fourth", "--yes")
    assert (done.data["job_id"], done.data["reused"], done.data["stage"]) == (first["job_id"], True, "COMPLETED")
    assert done.answer["next"] == ["skill-train pull fourth"]
    assert hub.jobs_created == 2
    assert call(*SAID, "--run-dir", "fifth", "--force-new", "--yes").data["reused"] is False


def test_a_job_that_runs_keeps_to_what_is_asked_now(hub: Hub, call: Any, here: Path) -> None:
    """Half an hour of a t4-small for 0.40 dollars an hour is 0.20 dollars."""
    small = (*SAID, "--flavor", "t4-small")
    first = call(*small, "--timeout", "30m", "--max-cost", "0.5", "--yes").data
    done = call(*small, "--max-cost", "0.19", "--yes")
    assert done.error == (3, "over_budget")
    assert done.answer["error"]["got"] == "$0.20 at its timeout of 1800 s"
    assert done.answer["error"]["hint"].startswith(f"skill-train cancel {first['run_dir']}; ")
    assert done.answer["next"] == []
    done = call(*small, "--max-cost", "0.2", "--timeout", "2h", "--yes")
    assert (done.data["job_id"], done.data["timeout_seconds"]) == (first["job_id"], 1800)
    assert [warning["code"] for warning in done.answer["warnings"]] == ["another_timeout"]
    assert json.loads((here / first["run_dir"] / "cloud.json").read_text())["jobs"][0]["max_cost"] == 0.5
    assert hub.jobs_created == 1


def test_a_job_that_went_on_on_another_machine_has_no_known_bound(hub: Hub, desk: Any, call: Any, here: Path) -> None:
    """Eight hours of an a100-large for 2.50 dollars are 20 dollars; the plan says half an hour of a t4-small."""
    small = (*SAID, "--flavor", "t4-small", "--timeout", "30m")
    call(*small, "--run-dir", "a", "--yes")
    hub.jobs.all[0].become("CANCELED")
    larger = ("--flavor", "a100-large", "--timeout", "8h", "--yes")
    resumed = _other(desk, here, "resume", "a", *larger).data
    for _ in range(2):  # found, and then known
        done = call(*small, "--run-dir", "b", "--max-cost", "0.25", "--yes")
        assert done.error == (3, "over_budget")
        assert (done.answer["error"]["got"], done.answer["next"]) == ("an unknown cost", [])
        data = call(*SAID, "--flavor", "t4-small", "--run-dir", "b").data
        assert (data["job_id"], data["reused"], data["flavor"]) == (resumed["job_id"], True, "a100-large")
        assert (data["timeout_seconds"], data["cost_usd"]["most"], data["cost_usd"]["low"]) == (None, None, None)
        assert data["cost_usd"]["usd_per_hour"] == pytest.approx(2.5)
        assert data["expected_end"]["low"] is None
        shown = call(*SAID, "--flavor", "t4-small", "--run-dir", "b", "--format", "human").stdout
        assert "a100-large of me, stopped after a time that is not known" in shown and "at most" not in shown
    [job] = json.loads((here / "b/cloud.json").read_text())["jobs"]
    assert (job["flavor"], job["timeout_seconds"], job["number"]) == ("a100-large", None, 2)
    assert hub.jobs_created == 2


def test_the_limit_of_a_job_holds_in_a_folder_that_finds_it(hub: Hub, desk: Any, call: Any, here: Path) -> None:
    """Half an hour of a t4-small is 0.20 dollars: more than is left of 0.21 once a minute was paid for."""
    small = (*SAID, "--flavor", "t4-small", "--timeout", "30m", "--yes")
    call(*small, "--run-dir", "a", "--max-cost", "0.205")
    assert call(*small, "--run-dir", "b").data["reused"] is True
    [job] = hub.jobs.all
    job.become("RUNNING")
    job.become("CANCELED")
    job.started = job.finished - 60
    for folder in ("a", "b"):
        assert _other(desk, here, "resume", folder, "--yes").error == (3, "over_budget")
        [known] = json.loads((here / folder / "cloud.json").read_text())["jobs"]
        assert known["max_cost"] == 0.205
    assert hub.jobs_created == 1


@pytest.mark.parametrize("known", [True, False], ids=["its timeout", "of an earlier version"])
def test_a_job_that_runs_counts_with_its_timeout(hub: Hub, call: Any, known: bool) -> None:
    """Half an hour of a t4-small is 0.20 dollars, and two of them 0.40."""
    small = (*SAID, "--flavor", "t4-small", "--timeout", "30m", "--yes")
    call(*small, "--run-dir", "a")
    [job] = hub.jobs.all
    if not known:
        del job.labels["timeout"]
    new = (*small, "--run-dir", "b", "--force-new", "--max-cost")
    done = call(*new, "0.39")
    assert done.error == (3, "over_budget")
    if known:
        assert "$0.20 of the jobs before it" in done.answer["error"]["got"]
        assert call(*new, "0.4").data["reused"] is False
    else:
        assert done.answer["error"]["got"] == "a running job with an unknown time limit"
        assert done.answer["next"] == [f"skill-train wait me/{job.id}"]


def test_a_job_whose_plan_cannot_be_read_has_no_known_bound(hub: Hub, call: Any) -> None:
    """It may have been sent with a longer timeout than the one that is computed here."""
    call(*SAID, "--timeout", "9h", "--run-dir", "a", "--yes")
    hub.faults.add("GET /buckets/|POST .*/paths-info|HEAD /buckets/", faults.NO_PERMISSION, times=ALWAYS)
    assert call(*SAID, "--run-dir", "b", "--max-cost", "1").error == (3, "over_budget")


def test_a_job_that_went_on_elsewhere_is_the_answer_in_the_first_folder(
    hub: Hub, desk: Any, call: Any, here: Path
) -> None:
    first = call(*SAID, "--run-dir", "a", "--yes").data
    hub.jobs.all[0].become("CANCELED")
    resumed = _other(desk, here, "resume", f"me/{first['job_id']}", "--run-dir", "b", "--timeout", "1m", "--yes").data
    for folder in ("a", "b"):
        data = call(folder, "--yes").data
        assert (data["job_id"], data["reused"], data["stage"]) == (resumed["job_id"], True, "SCHEDULING")
    assert data["timeout_seconds"] == 60  # of a part of the run: shorter than the estimate of the whole
    assert hub.jobs_created == 2


def test_killed_between_the_request_and_its_record(hub: Hub, desk: Any, call: Any, here: Path) -> None:
    hub.faults.add(CREATE, Fault(200, after=True, drop_seconds=5.0))
    child = _start(hub, desk, here, *SAID, "--yes")
    wait_until(lambda: hub.jobs_created == 1, 30)
    child.send_signal(signal.SIGKILL)
    child.wait(10)
    [record] = [json.loads(path.read_text()) for path in here.glob("runs/*/cloud.json")]
    assert [job["state"] for job in record["jobs"]] == ["starting"]
    data = call(*SAID, "--yes").data
    assert (hub.jobs_created, data["reused"], data["job_id"]) == (1, True, hub.jobs.all[0].id)
    [after] = [json.loads(path.read_text()) for path in here.glob("runs/*/cloud.json")]
    assert after["jobs"][0]["state"] == "started"


def test_an_answer_that_comes_too_late(hub: Hub, desk: Any, call: Any, here: Path) -> None:
    """The job is made after nobody waits for it any more: asking again at once would make another."""
    hub.faults.add(CREATE, Fault(seconds=5.0))
    child = _start(hub, desk, here, *SAID, "--yes", TEST_REQUEST_SECONDS="1", TEST_SETTLED_SECONDS="1")
    assert (child.wait(30), hub.jobs_created) == (8, 0)
    wait_until(lambda: hub.jobs_created == 1, 30)
    assert (call(*SAID, "--yes").data["reused"], hub.jobs_created) == (True, 1)


def test_stopped_while_the_job_is_requested(hub: Hub, desk: Any, here: Path) -> None:
    """Ctrl-C takes no request back: its job comes a moment later, and the command of the hint waits for it."""
    env, pipe = hub.environment(desk[2]) | {"TEST_SETTLED_SECONDS": "20"}, subprocess.PIPE
    hub.faults.add(CREATE, Fault(seconds=4.0))
    words = program("submit", *SAID, "--run-dir", "a run", "--yes", "--format", "json")
    child = subprocess.Popen(words, cwd=here, env=env, stdout=pipe, stderr=pipe, text=True)
    wait_until(lambda: any((each.method, each.path) == ("POST", "/api/jobs/me") for each in hub.log), 30)
    child.send_signal(signal.SIGINT)
    answer = json.loads(child.communicate(timeout=30)[0])
    assert (child.returncode, answer["error"]["code"], hub.jobs_created) == (130, "interrupted", 0)
    assert "may start" in answer["error"]["message"] and answer["next"] == ["skill-train cancel 'a run'"]
    words = program("cancel", "a run", "--format", "json")
    done = subprocess.run(words, cwd=here, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, hub.jobs_created, hub.jobs.all[0].stage) == (0, 1, "CANCELED"), done.stdout


def test_stopped_before_the_job_is_requested(hub: Hub, desk: Any, here: Path) -> None:
    """No job may start: the same command goes on."""
    env, pipe = hub.environment(desk[2]), subprocess.PIPE
    hub.faults.add("GET /api/jobs/hardware", Fault(seconds=4.0))
    words = program("submit", *SAID, "--run-dir", "a", "--yes", "--format", "json")
    child = subprocess.Popen(words, cwd=here, env=env, stdout=pipe, stderr=pipe, text=True)
    wait_until(lambda: any(each.path == "/api/jobs/hardware" for each in hub.log), 30)
    child.send_signal(signal.SIGINT)
    answer = json.loads(child.communicate(timeout=30)[0])
    assert (child.returncode, answer["error"]["message"], hub.jobs_created) == (130, "interrupted", 0)
    assert answer["error"]["hint"] == f"skill-train submit {' '.join(SAID)} --run-dir a --yes --format json"


@pytest.mark.parametrize("more", [(), ("--run-dir", "new")], ids=["no folder", "folder"])
def test_another_job_whose_answer_comes_too_late_is_looked_for(
    hub: Hub, desk: Any, call: Any, here: Path, more: tuple[str, ...]
) -> None:
    """The same command again, as it says: not one more in a folder of its own."""
    first = call(*SAID, "--yes").data
    new = (*SAID, "--force-new", "--yes", *more)
    hub.faults.add(CREATE, Fault(seconds=5.0))
    child = _start(hub, desk, here, *new, TEST_REQUEST_SECONDS="1", TEST_SETTLED_SECONDS="1")
    assert (child.wait(30), hub.jobs_created) == (8, 1)
    wait_until(lambda: hub.jobs_created == 2, 30)
    data = call(*new).data
    folder = more[-1] if more else f"{first['run_dir']}-2"
    assert (data["reused"], data["job_id"], data["run_dir"]) == (True, hub.jobs.all[1].id, folder)
    if more:
        assert call(*new).error == (2, "another_run")
    else:
        assert call(*new).data["run_dir"] == f"{first['run_dir']}-3"
    assert hub.jobs_created == (2 if more else 3)


@pytest.mark.parametrize("fault", [faults.NO_CREDIT, faults.SERVER_ERROR])
def test_another_job_that_cannot_be_made_can_be_made_later(hub: Hub, call: Any, here: Path, fault: Fault) -> None:
    hub.faults.add(CREATE, fault, times=ALWAYS)
    new = (*SAID, "--run-dir", "new", "--force-new", "--yes")
    assert call(*new).code in (4, 8)
    run_id = json.loads((here / "new/cloud.json").read_text())["run_id"]
    hub.faults.clear()
    hub.faults.add_job(JobFault("stuck", attempt=None))
    data = call(*new).data
    assert (data["reused"], hub.jobs_created, hub.jobs.all[0].labels["run"]) == (False, 1, run_id)


def test_one_that_was_slower_finds_the_job_of_the_other(hub: Hub, desk: Any, call: Any, here: Path) -> None:
    """It looked before the other began, and looks again when it is its turn."""
    call(*SAID)
    hub.log.clear()
    hub.faults.add("GET /api/jobs/hardware", Fault(seconds=2.5))
    slower = _start(hub, desk, here, *SAID, "--yes")
    wait_until(lambda: any(request.path == "/api/jobs/hardware" for request in hub.log), 30)
    assert call(*SAID, "--yes").data["reused"] is False
    assert (slower.poll(), slower.wait(30), hub.jobs_created) == (None, 0, 1)


def test_two_at_once_make_one_job(hub: Hub, desk: Any, here: Path) -> None:
    """One of both may find the run directory in use, and says so."""
    hub.faults.add(CREATE, Fault(seconds=1.0))
    children = [_start(hub, desk, here, *SAID, "--yes") for _ in range(2)]
    codes = sorted(child.wait(60) for child in children)
    assert codes in ([0, 0], [0, 2])
    assert hub.jobs_created == 1


# --- Helpers ---


def _start(hub: Hub, desk: Any, here: Path, *arguments: object, **more: str) -> subprocess.Popen[bytes]:
    """A process of its own."""
    env = hub.environment(desk[2]) | more
    null = subprocess.DEVNULL
    return subprocess.Popen(program("submit", *arguments), cwd=here, env=env, stdout=null, stderr=null)


def _other(desk: Any, here: Path, *arguments: object) -> Done:
    """Another command than `submit`."""
    server, commands, home = desk
    done: Done = commands.run(here, server.environment(home), *arguments)
    return done


def _rows(path: Path) -> None:
    rows = ({"prompt": f"What is late {n}?", "completion": "The ticket."} for n in range(40))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _troubles(hub: Hub) -> None:
    add_model(hub, "me/gated").gated = True
    add_model(hub, "me/large", "qwen2.5-72b")
    rows = {"train.jsonl": b'{"prompt": "a", "completion": "b"}\n' * 40}
    hub.add("dataset", "me/gated-rows", rows, gated=True)
    hub.add("dataset", "me/open", {})
    hub.add("model", "me/shown", {})


def _in_bucket(hub: Hub, folder: str) -> dict[str, bytes]:
    from hub_emulator.buckets import read_file

    bucket = hub.buckets["me/jobs-artifacts"]
    return {path.split("/", 1)[1]: read_file(hub, bucket, path) for path in bucket.inside(folder)}


def _tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
