"""`push` of a run with real files, to a Hub on this machine, and back."""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

import planning
import step_records
import tiny
import whole_records
from hub_emulator import Fault, Hub
from hub_emulator.faults import NO_PERMISSION
from skill_train.core.errors import UsageError, VerificationFailed
from skill_train.publish.files import evaluation_of, files_of, proof_of
from skill_train.publish.records import published
from skill_train.run import records
from skill_train.run.evaluate_record import Evaluation
from skill_train.run.folder import RunDir
from skill_train.run.lock import locked
from skill_train.run.train_record import PromptAnswers

pytestmark = pytest.mark.slow

pytest.importorskip("huggingface_hub")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.adapter(tiny.cached("gemma"), tmp_path_factory.mktemp("trained") / "adapter")


@pytest.fixture
def run(adapter: Path, tmp_path: Path) -> Path:
    """The files of a trained, exported and verified run; the adapter and the base are real."""
    base = tiny.cached("gemma")
    folder = tmp_path / "runs" / "first"
    (folder / "gguf").mkdir(parents=True)
    shutil.copytree(adapter, folder / "adapter")
    (folder / "gguf" / "first-q8_0.gguf").write_bytes(b"GGUF" + bytes(range(256)) * 1000)
    outputs = {f"adapter/{p.name}": _digest(p) for p in sorted((folder / "adapter").iterdir())}
    recipe = {"model": str(base), "revision": None, "data": str(tmp_path / "secret-customers" / "rows.jsonl")}
    recipe |= {"data_revision": None, "lora_r": 8, "target_modules": ["q_proj"], "seed": 42}
    policy = {"sensitive": False, "hub_model_id": None}
    plan = planning.plan_document(recipe=recipe, policy=policy, fingerprints={})
    _write(folder / "plan.json", plan)
    training = step_records.trained(outputs, first_loss=2.5, last_loss=0.25)
    training = replace(training, example="a row of a customer", answer=PromptAnswers("of a customer"))
    records.write(folder / "train.json", training)
    planning.write_recipe_hash(folder)
    _write_proof(folder, "pass")
    return folder


def _write_proof(folder: Path, verdict: str) -> None:
    file = folder / "gguf" / "first-q8_0.gguf"
    check = {"name": "tuned", "file": file.name, "verdict": verdict, "figure": 1.0, "threshold": "1 ± 0.05"}
    checks = [check | {"detail": "1.000 of the tuning"}]
    inputs = {"ggufs": {file.name: _digest(file)}}
    _write(folder / "verify.json", whole_records.whole_proof(verdict=verdict, checks=checks, inputs=inputs))


def _write(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document), encoding="utf-8")


def _digest(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _program() -> list[str]:
    return [sys.executable, "-c", "from skill_train.cli import main; main()", "push"]


def _push(hub: Hub, home: Path, run: Path, *options: str, token: str | None = "") -> tuple[int, dict[str, Any], str]:
    env = hub.environment(home, token=token)
    done = subprocess.run([*_program(), str(run), *options], env=env, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout), done.stdout + done.stderr


def test_it_arrives_byte_for_byte_and_says_what_was_changed(hub: Hub, tmp_path: Path, run: Path) -> None:
    code, answer, _ = _push(hub, tmp_path / "home", run, "--repo", "me/tickets")
    assert (code, answer["data"]["created"], answer["data"]["verdict"]) == (0, True, "pass")
    repository = hub.repositories["model", "me/tickets"]
    there = repository.at("main")
    assert repository.private
    for sent, kept in (
        ("first-q8_0.gguf", run / "gguf" / "first-q8_0.gguf"),
        ("adapter/adapter_model.safetensors", run / "adapter" / "adapter_model.safetensors"),
    ):
        assert there[sent] == kept.read_bytes()
    assert (
        json.loads(there["adapter/adapter_config.json"])["base_model_name_or_path"] == Path(tiny.cached("gemma")).name
    )
    changed = {file["path"] for file in answer["data"]["files"] if file["changed"]}
    assert changed == set(there) - {"first-q8_0.gguf", "adapter/adapter_model.safetensors", ".gitattributes"}
    everything = b"\n".join(data for name, data in there.items() if not name.endswith((".gguf", ".safetensors")))
    for hidden in (str(tmp_path), "secret-customers", "of a customer", hub.token):
        assert hidden.encode() not in everything
    card = there["README.md"].decode()
    assert "| first-q8_0.gguf | tuned | pass | 1.000 of the tuning |" in card
    assert "it does not say that the model is good" in card and "While this repository is private" in card
    assert "ollama run hf.co/me/tickets:first-q8_0.gguf" in card
    assert answer["data"]["reused"] is False and "## Measured" not in card
    assert "| checks of the training | pass |" in card and "smoke test" not in card
    assert "license" not in card.split("---")[1]


def test_ollama_finds_the_sampling_of_the_modelfile(hub: Hub, tmp_path: Path, run: Path) -> None:
    """Ollama takes `params` of a repository, and its own sampling without one. The system message is of the data."""
    lines = ("FROM ./x.gguf", "# a reason", "PARAMETER temperature 0", 'PARAMETER stop "<eos>"', 'PARAMETER stop "###"')
    system = 'SYSTEM """You serve secret-customers.\nPARAMETER top_k 3\n"""'
    (run / "gguf" / "Modelfile").write_text("\n".join([*lines, "parameter top_p 0.95", system]) + "\n")
    for part, there in (("gguf", True), ("adapter", False)):
        code, _, _ = _push(hub, tmp_path / "home", run, "--repo", f"me/{part}", "--part", part)
        files = hub.repositories["model", f"me/{part}"].at("main")
        assert code == 0 and ("params" in files) is there
        assert all(b"secret-customers" not in data for data in files.values())
    params = json.loads(hub.repositories["model", "me/gguf"].at("main")["params"])
    assert params == {"temperature": 0, "stop": ["<eos>", "###"], "top_p": 0.95}


def test_the_adapters_own_gguf_needs_a_proof_too(hub: Hub, tmp_path: Path, run: Path) -> None:
    """And Ollama runs no adapter, though it is the smallest file."""
    (run / "gguf" / "first-lora-f16.gguf").write_bytes(b"GGUF")
    _write(
        run / "lora_gguf.json", {"outputs": {"gguf/first-lora-f16.gguf": {"bytes": 4, "sha256": "x", "quant": "f16"}}}
    )
    code, answer, _ = _push(hub, tmp_path / "home", run, "--repo", "me/tickets")
    assert (code, answer["data"]["verdict"], [w["code"] for w in answer["warnings"]]) == (0, None, ["not_verified"])
    assert "skill-train/verify.json" not in hub.repositories["model", "me/tickets"].at("main")
    proof = json.loads((run / "verify.json").read_text())
    proof["inputs"]["ggufs"]["first-lora-f16.gguf"] = _digest(run / "gguf" / "first-lora-f16.gguf")
    _write(run / "verify.json", whole_records.whole_proof(**proof))
    code, answer, _ = _push(hub, tmp_path / "home", run, "--repo", "me/tickets")
    assert (code, answer["data"]["verdict"], answer["warnings"]) == (0, "pass", [])
    there = hub.repositories["model", "me/tickets"].at("main")
    card = there["README.md"].decode()
    assert "first-lora-f16.gguf" in there and "-hff first-lora-f16.gguf" not in card
    assert "--lora first-lora-f16.gguf" in card
    assert "ollama run hf.co/me/tickets:first-q8_0.gguf" in card and "Each file in the table below" in card


def test_the_same_push_again_makes_no_second_commit(hub: Hub, tmp_path: Path, run: Path) -> None:
    first = _push(hub, tmp_path / "home", run, "--repo", "me/tickets")[1]["data"]["commit"]
    code, answer, words = _push(hub, tmp_path / "home", run, "--repo", "me/tickets")
    assert (code, answer["data"]["commit"], answer["data"]["created"]) == (0, first, False)
    assert answer["data"]["reused"] is True
    assert "MB: sent" not in words and "nothing has changed" in words


def test_a_push_that_cannot_be_recorded_here_is_done_all_the_same(hub: Hub, tmp_path: Path, run: Path) -> None:
    """A full or read-only disk looks the same after the upload: it was told as a push that failed."""
    (run / "push.json").mkdir()
    code, answer, _ = _push(hub, tmp_path / "home", run, "--repo", "me/tickets")
    assert (code, [warning["code"] for warning in answer["warnings"]]) == (0, ["not_recorded"]), answer
    assert "first-q8_0.gguf" in hub.repositories["model", "me/tickets"].at("main")
    assert not [path for path in run.iterdir() if path.name.endswith(".part")]


def test_a_push_from_a_full_disk_goes_on_with_room(hub: Hub, tmp_path: Path, run: Path) -> None:
    """hf_xet writes what it knows of the chunks to its cache, and says in words only that it cannot."""
    (run / "gguf" / "first-q8_0.gguf").write_bytes(b"GGUF" + bytes(range(256)) * 40_000)  # of many chunks
    _write_proof(run, "pass")
    before = sorted(run.rglob("*"))
    done = subprocess.run(
        [*_program(), str(run), "--repo", "me/tickets"],
        env=hub.environment(tmp_path / "home"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (3, "no_disk"), done.stdout + done.stderr
    assert sorted(path for path in run.rglob("*") if path.name != ".lock") == before
    code, answer, _ = _push(hub, tmp_path / "home", run, "--repo", "me/tickets")
    assert (code, answer["data"]["reused"]) == (0, False)


def test_a_run_whose_files_are_being_made_is_not_pushed(hub: Hub, tmp_path: Path, run: Path) -> None:
    """Its digests are compared with the proof first, and its bytes are sent later."""
    with locked(RunDir(run), "export-gguf"):
        code, answer, _ = _push(hub, tmp_path / "home", run, "--repo", "me/tickets")
    assert (code, answer["error"]["code"]) == (2, "run_in_use") and ("model", "me/tickets") not in hub.repositories


def test_weights_that_an_earlier_push_left_are_named(hub: Hub, tmp_path: Path, run: Path) -> None:
    """Who asks the repository for its Q8_0 may get the file of another run, beside the card of this one."""
    hub.add(
        "model",
        "me/tickets",
        {"old-q8_0.gguf": b"GGUF", "adapter/adapter_model.safetensors": b"", "notes.txt": b""},
        private=True,
    )
    answer = _push(hub, tmp_path / "home", run, "--repo", "me/tickets")[1]
    [warning] = answer["warnings"]
    assert warning["code"] == "other_files" and "me/tickets also holds old-q8_0.gguf," in warning["message"]
    assert "old-q8_0.gguf" in hub.repositories["model", "me/tickets"].at("main")


def test_a_private_repository_stays_private(hub: Hub, tmp_path: Path, run: Path) -> None:
    assert _push(hub, tmp_path / "home", run, "--repo", "me/tickets")[1]["data"]["private"] is True
    repository, card = hub.repositories["model", "me/tickets"], b"While this repository is private"
    for more in ((), ("--dry-run",)):
        code, answer, _ = _push(hub, tmp_path / "home", run, "--repo", "me/tickets", "--public", *more)
        [warning] = [warning for warning in answer["warnings"] if warning["code"] == "stays_private"]
        assert code == 0 and "hf repos settings me/tickets --public" in warning["message"]
    sent = json.loads((run / "push.json").read_text(encoding="utf-8"))
    assert (sent["options"]["private"], sent["private"], repository.private) == (False, True, True)
    assert card in repository.files["README.md"]
    answer = _push(hub, tmp_path / "home", run, "--repo", "me/open", "--public")[1]
    assert (answer["data"]["private"], answer["warnings"]) == (False, [])
    assert card not in hub.repositories["model", "me/open"].files["README.md"]


def test_a_repository_of_which_the_hub_is_silent_may_stay_private(hub: Hub, tmp_path: Path, run: Path) -> None:
    """The Hub refuses the question, and takes the push."""
    hub.add("model", "me/tickets", {}, private=True)
    hub.faults.add("GET /api/models/me/tickets", NO_PERMISSION)
    code, answer, _ = _push(hub, tmp_path / "home", run, "--repo", "me/tickets", "--public")
    [warning] = answer["warnings"]
    assert (code, warning["code"], answer["data"]["private"]) == (0, "stays_private", True)
    assert "me/tickets may be private, as the Hub does not say" in warning["message"]
    assert b"While this repository is private" in hub.repositories["model", "me/tickets"].files["README.md"]


def test_a_dry_run_of_a_public_push_needs_no_answer(hub: Hub, tmp_path: Path, run: Path) -> None:
    more = ("--repo", "me/tickets", "--public")
    code, answer, _ = _push(hub, tmp_path / "home", run, *more, "--dry-run", token=None)
    assert (code, answer["error"]["code"], answer["data"]["dry_run"]) == (4, "not_signed_in", True)
    code, answer, _ = _push(hub, tmp_path / "home", run, *more, token=None)
    assert (code, answer["error"]["code"]) == (4, "not_signed_in")


def test_a_dry_run_asks_for_nothing_to_be_written(hub: Hub, tmp_path: Path, run: Path) -> None:
    code, answer, _ = _push(hub, tmp_path / "home", run, "--repo", "me/tickets", "--part", "adapter", "--dry-run")
    assert (code, answer["data"]["dry_run"], answer["data"]["parts"]) == (0, True, ["adapter"])
    assert answer["next"] == [f"skill-train push {run} --repo me/tickets --part adapter"]
    assert [r for r in hub.log if r.method != "GET"] == []
    assert answer["data"]["access"] == {"account": "me", "repository": "new", "may_write": True}
    assert {f["path"] for f in answer["data"]["files"]} >= {"adapter_config.json", "README.md"}


@pytest.mark.parametrize(
    ("what", "code", "name"),
    [
        ("nobody", 4, "not_signed_in"),
        ("a reader", 4, "no_permission"),
        ("a stranger", 4, "no_permission"),
        ("an unknown token", 4, "bad_token"),
        ("half of a token", 4, "bad_token"),
        ("offline", 0, None),
    ],
)
def test_a_dry_run_says_what_the_push_would_meet(
    hub: Hub, tmp_path: Path, run: Path, what: str, code: int, name: str | None
) -> None:
    tokens = {"nobody": None, "an unknown token": "hf_" + "x" * 34, "half of a token": "hf_madeUpAbc…xyz"}
    token = hub.new_token("read", ()) if what == "a reader" else tokens.get(what, "")
    repo = "somebody/tickets" if what == "a stranger" else "me/tickets"
    if what == "offline":
        hub.faults.add("GET /api/whoami-v2", Fault(503), times=9)
    done, answer, output = _push(hub, tmp_path / "home", run, "--repo", repo, "--dry-run", token=token)
    assert (done, answer.get("error", {}).get("code")) == (code, name), answer
    assert (token or "no token") not in output and "madeUpAbc" not in output
    assert answer["data"]["files"] and bool(answer["next"]) == (code == 0)
    assert ("not_checked" in [w["code"] for w in answer["warnings"]]) == (what == "offline")


def test_the_card_has_the_figures_of_these_files_and_of_no_others(hub: Hub, tmp_path: Path, run: Path) -> None:
    file = run / "gguf" / "first-q8_0.gguf"
    model = {"loss": 0.5, "exact_match": 0.75, "asked_rows": 20}
    difference = {"model": file.name, "against": "tuned", "measure": "loss", "difference": 0.01, "low": -0.02}
    evaluation = whole_records.evaluation(
        inputs={"models": {file.name: {"model": _digest(file), "adapter": None}}},
        models=[model | {"name": "base", "loss": 2.5}, model | {"name": file.name}],
        differences=[difference | {"high": 0.04, "says": "inside the noise"}],
    )
    _write(run / "evaluate.json", evaluation)
    _push(hub, tmp_path / "home", run, "--repo", "me/tickets")
    card = hub.repositories["model", "me/tickets"].at("main")["README.md"].decode()
    assert "on 20 rows that this run never trained on" in card and "| base | 2.5 | 75% of 20 |  |" in card
    assert f"| {file.name} | 0.5 | 75% of 20 | +0.01 (-0.02 to +0.04) against tuned: inside the noise |" in card
    evaluation["inputs"]["models"][file.name]["model"]["sha256"] = "0" * 64
    _write(run / "evaluate.json", evaluation)
    _push(hub, tmp_path / "home", run, "--repo", "me/tickets")
    assert "## Measured" not in hub.repositories["model", "me/tickets"].at("main")["README.md"].decode()


def test_an_evaluation_of_an_earlier_model_that_was_trained_whole_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "model.safetensors").write_bytes(b"weights")
    _write(tmp_path / "plan.json", planning.plan_document(recipe={"finetuning_type": "full"}))
    tuned = {"model": {"model.safetensors": _digest(tmp_path / "merged" / "model.safetensors")}, "adapter": None}
    _write(tmp_path / "evaluate.json", whole_records.evaluation(inputs={"models": {"tuned": tuned}}))
    assert evaluation_of(RunDir(tmp_path), []) is not None
    (tmp_path / "merged" / "model.safetensors").write_bytes(b"trained again")
    assert evaluation_of(RunDir(tmp_path), []) is None


def test_a_server_that_fails_for_a_while_costs_only_time(hub: Hub, tmp_path: Path, run: Path) -> None:
    hub.faults.add("POST /api/repos/create", Fault(500))
    hub.faults.add("POST /api/models/me/tickets/commit", Fault(503), times=2)
    hub.faults.add("POST /api/models/me/tickets/commit", Fault(412), call=3)  # somebody else's commit came between
    code, answer, words = _push(hub, tmp_path / "home", run, "--repo", "me/tickets")
    assert (code, answer["ok"]) == (0, True)
    assert "asking again" in words
    assert "first-q8_0.gguf" in hub.repositories["model", "me/tickets"].at("main")


@pytest.mark.parametrize(
    ("what", "code", "name"),
    [
        ("a proof that failed", 6, "verification_failed"),
        ("sensitive", 3, "sensitive"),
        ("a token in a file", 2, "secret_found"),
        ("no such part", 2, "missing_step"),
        ("no repository", 2, "bad_usage"),
        ("a path as repository", 2, "bad_usage"),
        ("a name that ends in a hyphen", 2, "bad_usage"),
        ("nobody", 4, "not_signed_in"),
        ("a reader", 4, "no_permission"),
        ("a public repository", 3, "public_repository"),
    ],
)
def test_what_is_refused(
    hub: Hub, tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch, what: str, code: int, name: str | None
) -> None:
    options, token = ["--repo", "me/tickets"], ""
    if what == "a proof that failed":
        _write_proof(run, "fail")
    elif what == "sensitive":
        plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
        _write(run / "plan.json", plan | {"policy": {"sensitive": True, "hub_model_id": None}})
    elif what == "a token in a file":
        config = run / "adapter" / "extra.json"
        _write(config, {"key": "hf_" + "a1B2c3D4" * 4})
    elif what == "no such part":
        options += ["--part", "merged"]
    elif what == "no repository":
        options = []
    elif what == "a path as repository":
        options = ["--repo", "../../etc"]
    elif what == "a name that ends in a hyphen":
        options = ["--repo", "me/tickets-"]
    elif what == "nobody":
        token = None
    elif what == "a reader":
        token = hub.new_token("read", ())
    else:
        from huggingface_hub import HfApi, constants

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # set for all other tests
        HfApi(endpoint=hub.endpoint, token=hub.token).create_repo("me/tickets", private=False)
    done, answer, _ = _push(hub, tmp_path / "home", run, *options, token=token)
    assert (done, answer["ok"]) == (code, False), answer
    assert name in (None, answer["error"]["code"])
    assert name != "sensitive" or (answer["error"]["expected"] and answer["error"]["got"])
    assert not [key for key, found in hub.repositories.items() if "first-q8_0.gguf" in found.at("main")]


def test_a_run_on_top_of_a_sensitive_one_is_refused(hub: Hub, tmp_path: Path, run: Path) -> None:
    plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
    before = tmp_path / "before"
    shutil.copytree(plan["recipe"]["model"], before / "merged")
    _write(before / "plan.json", plan | {"policy": {"sensitive": True}})
    _write(run / "plan.json", plan | {"recipe": plan["recipe"] | {"model": str(before / "merged")}})
    planning.write_recipe_hash(run)
    done, answer, _ = _push(hub, tmp_path / "home", run, "--repo", "me/tickets", "--public")
    assert (done, answer["error"]["code"]) == (3, "sensitive"), answer
    assert f"the recipe of {before}, which made the base" in answer["error"]["message"]
    assert hub.log == []


def test_a_file_that_failed_goes_nowhere_beside_one_that_was_not_verified(run: Path) -> None:
    """Another type was exported since; the file that failed is as it was."""
    _write_proof(run, "fail")
    (run / "gguf" / "first-q4_k_m.gguf").write_bytes(b"GGUF, exported later")
    with pytest.raises(VerificationFailed) as refused:
        proof_of(RunDir(run), files_of(RunDir(run), ("gguf", "adapter"), "base"))
    assert "first-q8_0.gguf: tuned" in str(refused.value)


@pytest.mark.parametrize("what", ["as it was merged", "changed", "of another adapter", "without a record"])
def test_a_merged_model_is_the_one_that_was_merged_and_checked(run: Path, what: str) -> None:
    (run / "merged").mkdir()
    weights = run / "merged" / "model.safetensors"
    weights.write_bytes(b"merged")
    adapter = {path.name: _digest(path) for path in (run / "adapter").iterdir()}
    if what == "of another adapter":
        adapter["adapter_model.safetensors"] |= {"sha256": "0" * 64}
    if what != "without a record":
        records.write(run / "merge.json", step_records.merged(adapter, {"merged/model.safetensors": _digest(weights)}))
    if what == "changed":
        weights.write_bytes(b"others")
    if what != "as it was merged":
        with pytest.raises(UsageError) as refused:
            files_of(RunDir(run), ("merged",), "base")
        assert refused.value.code == ("missing_step" if what == "without a record" else "output_changed")
        assert refused.value.hint.endswith(f"skill-train merge {run}")
    else:
        assert [file.path for file in files_of(RunDir(run), ("merged",), "base")] == ["model.safetensors"]


def test_a_training_that_failed_its_smoke_test_is_said_to_have(hub: Hub, tmp_path: Path, run: Path) -> None:
    """The proof says that the files are what was trained, and all of it passed."""
    check = {"name": "loss_falls", "verdict": "fail", "figure": 1.5, "detail": "2.5 before, 4 after"}
    training = json.loads((run / "train.json").read_text()) | {"verdict": "fail", "checks": [check]}
    _write(run / "train.json", training)
    code, answer, _ = _push(hub, tmp_path / "home", run, "--repo", "me/tickets")
    assert (code, answer["data"]["verdict"], [w["code"] for w in answer["warnings"]]) == (0, "pass", ["smoke_failed"])
    card = hub.repositories["model", "me/tickets"].at("main")["README.md"].decode()
    assert "**The training failed its smoke test:** loss_falls." in card
    assert "| checks of the training | fail: loss_falls |" in card


ROW = "the row of a customer"


@pytest.mark.parametrize("parts", [("gguf", "adapter"), ("adapter",)])
def test_a_proof_of_other_files_goes_nowhere(hub: Hub, tmp_path: Path, run: Path, parts: tuple[str, ...]) -> None:
    """One that failed, after which the files were exported again; and without a GGUF file there is nothing to prove."""
    _write_proof(run, "fail")
    if "gguf" in parts:
        (run / "gguf" / "first-q8_0.gguf").write_bytes(b"GGUF, exported again")
    answer = {"line": 1, "prompt": ROW, "expected": "", "answers": {}}
    inputs = {"models": {"first-q8_0.gguf": {"model": {"bytes": 1, "sha256": "0"}}}}
    _write(run / "evaluate.json", whole_records.evaluation(inputs=inputs, answers=[answer]))
    options = [word for part in parts for word in ("--part", part)]
    code, answer, _ = _push(hub, tmp_path / "home", run, "--repo", "me/tickets", *options)
    assert (code, answer["data"]["verdict"]) == (0, None)
    there = hub.repositories["model", "me/tickets"].at("main")
    assert "skill-train/verify.json" not in there and "skill-train/train.json" in there
    assert "gguf" not in parts or "skill-train/evaluate.json" not in there
    assert ("not verified" in there["README.md"].decode()) == ("gguf" in parts)


def test_a_proof_leaves_without_rows(hub: Hub, tmp_path: Path, run: Path) -> None:
    """Checks of texts quote the rows that they compare, and their token ids, in sentences, figures and lists."""
    proof = json.loads((run / "verify.json").read_text())
    ids = [31337, 27182]
    quoting = {
        "detail": f"{ROW!r} gives {ids}",
        "figures": {"looked_at": 9, "worst": ROW, "ids": ids, "of": {"a": ROW}},
    }
    for name in (
        "tokens",
        "special_tokens",
        "trained_is_shipped",
        "answers",
        "chat_template",
        "vocabulary",
        "metadata",
    ):
        proof["checks"].append({"name": name, "file": "first-q8_0.gguf", "verdict": "warn", "figure": 3} | quoting)
        proof["checks"][-1] |= {"threshold": ROW}
    proof |= {"examples": [ROW], "not_checked": [{"name": "tokens", "file": "first-q8_0.gguf", "reason": ROW}]}
    _write(run / "verify.json", proof | {"verdict": "warn", "something_new": ROW})
    _write(
        run / "train.json",
        json.loads((run / "train.json").read_text()) | {"checks": [{"name": "x", "verdict": "warn"} | quoting]},
    )
    code, answer, _ = _push(hub, tmp_path / "home", run, "--repo", "me/tickets")
    assert (code, answer["data"]["verdict"]) == (0, "warn")
    there = hub.repositories["model", "me/tickets"].at("main")
    small = {name: content for name, content in there.items() if not name.endswith((".gguf", ".safetensors"))}
    assert [name for name, content in small.items() if ROW.encode() in content or b"31337" in content] == []
    sent = {check["name"]: check for check in json.loads(there["skill-train/verify.json"])["checks"]}
    plain = {"name": "tokens", "file": "first-q8_0.gguf", "verdict": "warn", "figure": 3}
    assert sent["tokens"] == plain | {"figures": {"looked_at": 9, "of": {}}}
    assert sent["tuned"]["detail"] == "1.000 of the tuning"


def test_an_evaluation_of_files_of_one_name_leaves_without_their_folders() -> None:
    """They are told apart by their whole paths, which are names of objects too."""
    paths = [f"/srv/customers/{folder}/m-q8_0.gguf" for folder in ("first", "second")]
    models = {path: {"model": {"bytes": 1, "sha256": "a"}} for path in paths}
    difference = {"model": paths[0], "against": paths[1], "measure": "loss", "difference": 0, "low": 0, "high": 0}
    record = whole_records.evaluation(
        inputs={"models": models}, models=[{"name": path} for path in paths], differences=[difference | {"says": ""}]
    )
    assert "customers" not in json.dumps(published("evaluate", msgspec.convert(record, Evaluation)))


def test_another_adapter_has_no_proof(hub: Hub, tmp_path: Path, run: Path) -> None:
    proof = json.loads((run / "verify.json").read_text())
    weights = run / "adapter" / "adapter_model.safetensors"
    proof["inputs"]["adapter"] = {weights.name: _digest(weights) | {"sha256": "0" * 64}}
    _write(run / "verify.json", proof)
    _, answer, _ = _push(hub, tmp_path / "home", run, "--repo", "me/tickets", "--dry-run")
    assert answer["data"]["verdict"] is None


@pytest.mark.parametrize("whole", [False, True], ids=["adapter", "whole"])
def test_files_of_an_earlier_training_are_not_proven_by_their_own_proof(run: Path, whole: bool) -> None:
    """The run was trained again in its folder; the files are those of before, and so is the proof. The card would show
    it beside the figures of the new training, and beside a merged model of it."""
    weights = run / "adapter" / "adapter_model.safetensors"
    if whole:
        weights = run / "merged" / "model.safetensors"
        weights.parent.mkdir()
        weights.write_bytes(b"trained whole")
        plan = json.loads((run / "plan.json").read_text())
        _write(run / "plan.json", plan | {"recipe": plan["recipe"] | {"finetuning_type": "full"}})
        outputs = {f"merged/{weights.name}": _digest(weights)}
        records.write(run / "train.json", step_records.trained(outputs))
    proof, part = json.loads((run / "verify.json").read_text()), "reference" if whole else "adapter"
    other = {"notes.md": {"bytes": 1, "sha256": "1" * 64}}  # it may change: train.json has no digest of it
    for sha256, proven in ((_digest(weights)["sha256"], True), ("0" * 64, False)):
        proof["inputs"][part] = {weights.name: _digest(weights) | {"sha256": sha256}} | other
        _write(run / "verify.json", proof)
        files = files_of(RunDir(run), ("gguf",), "base")
        assert (proof_of(RunDir(run), files) is not None) is proven


TOKEN = "hf_" + "a1B2c3D4" * 4


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("extra.json", json.dumps({"log": f"login\n{TOKEN}"})),
        ("extra.json", json.dumps({"log": json.dumps(f"login\t{TOKEN}")})),
        ("tokenizer.json", '{"words": "' + "word " * 4_200_000 + f'", "x": "{TOKEN}"}}'),
        (f"{TOKEN}.json", "{}"),
        ("tokens.txt", "hf_oauth_eyJh.eyJz-dWIi_OiJh.c2ln-bmF0dXJl"),
        ("extra.safetensors", f'{{"__metadata__": {{"by": "me\\n{TOKEN}"}}}}' + "\0" * 99),
    ],
    ids=["newline", "tab", "21 MB", "name", "signed in", "metadata"],
)
def test_a_token_goes_nowhere_however_it_is_written(
    hub: Hub, tmp_path: Path, run: Path, name: str, content: str
) -> None:
    (run / "adapter" / name).write_text(content)
    done, answer, output = _push(hub, tmp_path / "home", run, "--repo", "me/tickets")
    assert (done, answer["error"]["code"]) == (2, "secret_found") and TOKEN not in output
    assert hub.repositories == {}


def test_weights_that_the_training_did_not_write_stay_here(hub: Hub, tmp_path: Path, run: Path) -> None:
    (run / "adapter" / "extra.safetensors").write_bytes(b"of another run")
    done, answer, _ = _push(hub, tmp_path / "home", run, "--repo", "me/tickets")
    assert (done, answer["error"]["code"], hub.repositories) == (2, "output_changed", {})


def test_only_files_of_a_model_leave(hub: Hub, tmp_path: Path, run: Path) -> None:
    names = ("evil.py", "optimizer.pt", "adapter_model.bin", "evil.pkl", ".env", "sub/.netrc", "rows.parquet", "run.sh")
    for name in names:
        (run / "adapter" / name).parent.mkdir(exist_ok=True)
        (run / "adapter" / name).write_bytes(b"import os")
    (run / "adapter" / "LICENSE").write_text("as it is")
    code, answer, _ = _push(hub, tmp_path / "home", run, "--repo", "me/tickets")
    assert (code, set(answer["data"]["left_out"])) == (0, {f"adapter/{name}" for name in names})
    assert [w["code"] for w in answer["warnings"]] == ["left_out"]
    there = hub.repositories["model", "me/tickets"].at("main")
    assert not [name for name in there for other in names if name.endswith(other)] and "adapter/LICENSE" in there
    words = ("--part", "adapter", "--include", "evil.py", "--dry-run")
    _, answer, _ = _push(hub, tmp_path / "home", run, "--repo", "me/tickets", *words)
    assert "evil.py" in {file["path"] for file in answer["data"]["files"]}
    assert answer["next"] == [f"skill-train push {run} --repo me/tickets --part adapter --include evil.py"]
    code, answer, _ = _push(hub, tmp_path / "home", run, "--repo", "me/tickets", "--include", "evli.py")
    assert (code, answer["error"]["code"], "adapter/evil.py" in answer["error"]["expected"]) == (
        2,
        "missing_file",
        True,
    )
    (run / "adapter" / "evil.py").write_text(f"login({TOKEN!r})")
    code, answer, _ = _push(hub, tmp_path / "home", run, "--repo", "me/tickets", "--include", "adapter/evil.py")
    assert (code, answer["error"]["code"]) == (2, "secret_found")


def test_files_of_another_training_or_that_were_replaced_are_said_to_be(hub: Hub, tmp_path: Path, run: Path) -> None:
    """`not verified` alone sounds as if `verify` were all that is missing."""
    file = run / "gguf" / "first-q8_0.gguf"
    _write(run / "quantize.json", {"outputs": {f"gguf/{file.name}": _digest(file) | {"quant": "q8_0"}}})
    (run / "verify.json").unlink()

    def warned() -> list[str]:
        _, answer, _ = _push(hub, tmp_path / "home", run, "--repo", "me/tickets", "--dry-run")
        return [warning["code"] for warning in answer["warnings"]]

    assert warned() == ["not_verified"]
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert warned() == ["not_verified", "not_proven"]
    merge = step_records.merged({"adapter_model.safetensors": {"bytes": 1, "sha256": "0" * 64}}, {})
    _write(run / "merge.json", msgspec.to_builtins(merge))
    assert warned() == ["not_verified", "other_adapter", "not_proven"]


def test_files_that_were_not_verified_are_said_to_be(hub: Hub, tmp_path: Path, run: Path) -> None:
    file = run / "gguf" / "first-q8_0.gguf"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    code, answer, _ = _push(hub, tmp_path / "home", run, "--repo", "me/tickets")
    assert (code, answer["data"]["verdict"]) == (0, None)
    assert [w["code"] for w in answer["warnings"]] == ["not_verified"]
    assert "**not verified**" in hub.repositories["model", "me/tickets"].at("main")["README.md"].decode()
