"""`skill-train plan` as a program: what it answers and refuses, what it asks of the Hub, and the plan that is run."""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import planning
import shared_runs
import tiny
from hub_emulator import ALWAYS, Fault, Hub, environment
from hub_models import add_model
from models import recorded, write_model
from skill_train.core.errors import UsageError
from skill_train.plan.file import require_free
from skill_train.run import plan_record

pytestmark = pytest.mark.slow

pytest.importorskip("huggingface_hub")

MODEL, DATA = "Qwen/Qwen2.5-0.5B-Instruct", "me/tickets"
WEIGHTS = r"\.safetensors$"
PRICES = "/api/jobs/hardware"
ROW = {"prompt": "What is late?", "completion": "The ticket."}
TALK = {"messages": [{"role": "user", "content": "What is late?"}, {"role": "assistant", "content": "The ticket."}]}
TODAY = datetime.now(UTC).strftime("%Y-%m-%d")


def _gpu(name: str, gpu: str, count: int, memory_gb: int, usd_an_hour: float) -> dict[str, Any]:
    """A row as the Jobs API sends it: JobHardwareInfo in huggingface_hub 2.4."""
    accelerator = {"type": "gpu", "model": gpu, "quantity": str(count), "manufacturer": "Nvidia"}
    return {
        "name": name, "prettyName": name, "cpu": "8 vCPU", "ram": "1500 GB", "ephemeralStorage": "6 TB",
        "accelerator": accelerator | {"vram": f"{memory_gb * count} GB"},
        "unitCostMicroUSD": round(usd_an_hour * 1e6 / 60), "unitCostUSD": usd_an_hour / 60, "unitLabel": "minute",
    }  # fmt: skip


# Prices that the shipped table does not have, so that an answer shows where it has them from.
HARDWARE = [
    _gpu("t4-small", "T4", 1, 16, 0.48),
    _gpu("l40sx8", "L40S", 8, 48, 27.0),
    _gpu("h200x8", "H200", 8, 141, 48),
]


@pytest.fixture
def hub(hub: Hub) -> Hub:
    hub.hardware = HARDWARE
    return hub


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with a small model's files (no weights: its config tells its size) and 40 rows."""
    folder = tmp_path / "here"
    write_model(folder / "model", "smollm2-135m")
    _rows(folder / "rows.jsonl", ROW)
    return folder


LOCAL = ("plan", "--model", "model", "--data", "rows.jsonl")
TRAINED_FROM = ("tokenizer.json", "model.safetensors")


def _add(here: Path, *names: str) -> None:
    """Files that a training needs and a plan does not."""
    for name in names:
        shutil.copy(tiny.cached("llama-chatml") / name, here / "model" / name)


# --- What it answers ---


def test_the_answer_in_json(hub: Hub, here: Path) -> None:
    before = _tree(here)
    answer = _answer(_call(hub, here, *LOCAL))
    data = answer["data"]
    assert (answer["command"], answer["ok"], data["where"], data["flavor"]) == ("plan", True, "local", None)
    assert data["parameters"] == recorded("smollm2-135m")["published_parameters"]
    assert data["cost_usd"] == {"low": 0, "high": 0, "basis": "this machine: no rent"}
    for name in ("memory_bytes", "seconds"):
        assert 0 < data[name]["low"] <= data[name]["high"] and data[name]["basis"], name
    assert all(reason.keys() == {"rule", "value", "because", "source"} for reason in data["reasons"])
    assert all(reason["because"] and reason["source"] for reason in data["reasons"])
    assert re.fullmatch("[0-9a-f]{64}", data["recipe_hash"])
    assert answer["next"] == []  # there are no weights to train
    assert (data["plan"], _tree(here), hub.log) == (None, before, [])


def test_what_is_unknown_is_null_with_its_reason(hub: Hub, here: Path) -> None:
    """A config without a shape: no size, so no memory, no time, and no file sizes are known, and each says so."""
    (here / "model" / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    done = _call(hub, here, *LOCAL, "--where", "local", "--device", "cpu")
    assert done.returncode == 3, done.stderr
    answer = _answer(done)
    data = answer["data"]
    assert (answer["error"]["code"], data["parameters"]) == ("unknown_memory", None)
    figures = [data[k] for k in ("memory_bytes", "seconds", "merge_bytes", "disk_bytes")]
    figures += [file[k] for file in data["files"] for k in ("bytes", "memory_bytes", "tokens_per_second")]
    for figure in figures:
        assert (figure["low"], figure["high"]) == (None, None) and figure["basis"], figure
    assert all("None" not in reason["because"] for reason in data["reasons"])


@pytest.mark.parametrize(("dtype", "wide"), [((), True), (("--dtype", "bfloat16"), False)])
def test_the_memory_of_an_unseen_gpu_says_its_type(hub: Hub, here: Path, dtype: tuple[str, ...], wide: bool) -> None:
    """Its type is not known here, so the figures are those of float32: twice as much as a card of today needs."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""}  # on a machine that has a GPU
    done = _call(hub, here, *LOCAL, "--where", "local", "--device", "cuda", *dtype, **hidden)
    error = _answer(done)["error"]
    assert (done.returncode, error["code"]) == (3, "device_unavailable")
    assert ("they are of float32: --dtype bfloat16" in error["hint"]) is wide


@pytest.mark.parametrize("columns", [80, 120])
def test_the_answer_for_a_person_fits_the_screen(hub: Hub, here: Path, columns: int) -> None:
    data = f"{'rows-' * 20}.jsonl"
    (here / "rows.jsonl").rename(here / data)
    _add(here, *TRAINED_FROM)
    done = _call(hub, here, *LOCAL[:-1], data, "--format", "human", COLUMNS=str(columns))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].strip() == "train: local"
    assert lines[-1] == f"next: skill-train local --model model --data {data}"  # one line to copy
    assert max(map(len, lines[:-1])) <= columns
    assert "…" not in done.stdout
    for words in ("gradient_checkpointing", "model size", "memory", "time", "cost", "q4_k_m file", "small enough"):
        assert words in done.stdout, words


def test_the_quiet_answer_is_one_word(hub: Hub, here: Path) -> None:
    done = _call(hub, here, *LOCAL, "--format", "quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "local\n", "")


def test_a_name_is_no_markup(hub: Hub, here: Path) -> None:
    (here / "rows.jsonl").rename(here / "[red]rows.jsonl")
    done = _call(hub, here, *LOCAL[:-1], "[red]rows.jsonl", "--format", "human", COLUMNS="200")
    assert "([red]rows.jsonl)" in done.stdout


def test_a_large_plan_is_whole_in_8_kb(hub: Hub, tmp_path: Path) -> None:
    """Long names, conversations, a model that eight GPUs share: nothing is left out."""
    folder = tmp_path / ("a long name " * 9) / ("another " * 9)
    write_model(folder / ("model " * 9), "qwen2.5-72b")
    row = TALK | {f"column {n:030}": n for n in range(30)}
    _rows(folder / ("rows " * 9 + ".jsonl"), row, count=400)  # enough for steps that teach: no warning of few
    arguments = ("--model", folder / ("model " * 9), "--data", folder / ("rows " * 9 + ".jsonl"))
    answer = _answer(_call(hub, folder, "plan", *arguments, "--flavor", "h200x8", "--max-length", "8192"))
    assert "shortened" not in answer
    assert (answer["data"]["flavor"], answer["data"]["placement"]["num_processes"]) == ("h200x8", 8)
    assert answer["data"]["launch"] and answer["data"]["files"] and answer["data"]["plan"] is None


def test_the_next_command_says_what_was_said(hub: Hub, here: Path) -> None:
    options = ("--max-steps", "3", "--max-length", "64", "--device", "cpu", "--dtype", "float32")
    _add(here, *TRAINED_FROM)
    answer = _answer(_call(hub, here, *LOCAL, *options))
    assert answer["next"] == [" ".join(["skill-train local --model model --data rows.jsonl", *options])]


# --- The Hub ---


def test_a_model_on_the_hub_is_planned_from_its_metadata(hub: Hub, here: Path) -> None:
    """Prices are those of the Jobs API, of today: 0.48 dollars an hour."""
    repository = _add_model(hub)
    arguments = ("--model", MODEL, "--data", "rows.jsonl", "--where", "cloud", "--flavor", "t4-small")
    data = _answer(_call(hub, here, "plan", *arguments, "--out", "plan.json"))["data"]
    assert (data["where"], data["flavor"], data["parameters"]) == ("cloud", "t4-small", 494_032_768)
    assert not [request for request in hub.log if re.search(WEIGHTS, request.path)]
    assert data["cost_usd"]["basis"] == f"$0.48 an hour, price of {TODAY}"
    for end in ("low", "high"):
        minutes = math.ceil(data["seconds"][end] / 60)  # begun ones, as the Hub bills them
        assert data["cost_usd"][end] == pytest.approx(minutes * 0.48 / 60, abs=1e-3)
    assert data["timeout_seconds"] > data["seconds"]["high"]
    again = _answer(_call(hub, here, "plan", *arguments))
    assert again["next"] == [f"skill-train submit --model {MODEL} --data rows.jsonl --flavor t4-small"]
    planned = json.loads((here / "plan.json").read_text())
    assert planned["recipe"]["revision"] == repository.commit("main")
    assert planned["recipe"]["data"] == str(here / "rows.jsonl")
    hub.log.clear()
    _call(hub, here, "plan", *arguments)
    assert not [request for request in hub.log if request.path == PRICES]  # kept for a day


def test_without_live_prices_the_dated_table_counts(hub: Hub, here: Path) -> None:
    hub.faults.add(PRICES, Fault(500), times=ALWAYS)
    done = _call(hub, here, *LOCAL, "--flavor", "t4-small")
    data = _answer(done)["data"]
    assert data["cost_usd"]["basis"] == "$0.40 an hour, price of 2026-08-22"
    assert (
        "the table of huggingface.co shipped with skill-train, of 2026-08-22: the Hub failed to answer" in done.stderr
    )


def test_the_prices_of_one_hub_are_not_those_of_another(hub: Hub, here: Path, tmp_path: Path) -> None:
    """Two Hubs, one cache. A plan takes the prices of the Hub it would rent from, also offline, and says whose they
    are and of when; another Hub's are as good as none."""
    words = (*LOCAL, "--flavor", "t4-small")
    with Hub(tmp_path / "other hub") as other:
        other.hardware = [_gpu("t4-small", "T4", 1, 16, 0.02)]
        first = _prices(_call(other, here, *words))
        second = _prices(_call(hub, here, *words))
        of_other, of_hub = other.endpoint, hub.endpoint
    assert first == ("$0.020 an hour", {"source": f"{of_other}/api/jobs/hardware", "read_at": TODAY})
    assert second == ("$0.48 an hour", {"source": f"{of_hub}/api/jobs/hardware", "read_at": TODAY})
    hub.faults.add(PRICES, Fault(500), times=ALWAYS)
    offline = _call(hub, here, *words)
    assert _prices(offline) == second
    assert f"prices: the Jobs API of {of_hub}, asked 0.0 hours ago" in offline.stderr
    home = hub.environment(here.with_name("home of here"))
    elsewhere = _run(here, home | {"HF_ENDPOINT": of_other, "HF_HUB_OFFLINE": "1"}, *words)
    assert _prices(elsewhere) == first  # that server is gone, and the plan is for it
    dollars, whose = _prices(_run(here, home | {"HF_ENDPOINT": "http://127.0.0.1:1"}, *words))
    assert (dollars, whose["read_at"]) == ("$0.40 an hour", "2026-08-22")  # huggingface.co/docs/hub/jobs-pricing
    assert whose["source"].startswith("huggingface.co/docs/hub/jobs-pricing")


def test_prices_that_were_kept_without_their_hub_count_for_nothing(hub: Hub, here: Path) -> None:
    """As earlier versions kept them."""
    hub.faults.add(PRICES, Fault(500), times=ALWAYS)
    row = json.loads((Path(__file__).parents[2] / "skill/skill_train/hub/flavors.json").read_text())["flavors"][4]
    flavor = {
        "name": row["name"], "gpu": "T4", "gpus": 1, "gpu_memory_bytes": 16 * 10**9, "cores": 4,
        "ram_bytes": 15 * 10**9, "disk_bytes": None, "usd_per_hour": 0.02, "read_at": TODAY, "source": "the Jobs API",
    }  # fmt: skip
    old = Path(hub.environment(here.with_name("home of here"))["SKILL_TRAIN_CACHE"]) / "flavors.json"
    old.parent.mkdir(parents=True)
    old.write_text(json.dumps({"asked": datetime.now(UTC).timestamp() - 60, "flavors": [flavor]}))
    assert _prices(_call(hub, here, *LOCAL, "--flavor", "t4-small"))[0] == "$0.40 an hour"


def test_a_plan_for_this_machine_says_whose_prices_it_lists(hub: Hub, here: Path) -> None:
    data = _answer(_call(hub, here, *LOCAL))["data"]
    assert data["flavors"] and data["prices"]["read_at"] == "2026-08-22"
    shown = _call(hub, here, *LOCAL, "--format", "human", COLUMNS="120")
    assert "prices of huggingface.co/docs/hub/jobs-pricing" in shown.stdout and "2026-08-22" in shown.stdout


def _prices(done: subprocess.CompletedProcess[str]) -> tuple[str, dict[str, str]]:
    """The price that the plan counts with, and whose it says the prices are."""
    assert done.returncode == 0, done.stdout + done.stderr
    data = _answer(done)["data"]
    reason = next(reason for reason in data["reasons"] if reason["rule"] == "flavor")
    assert reason["source"] == data["prices"]["source"]
    return data["cost_usd"]["basis"].partition(",")[0], data["prices"]


def test_a_dataset_on_the_hub_is_looked_at(hub: Hub, here: Path) -> None:
    lines = b"".join(json.dumps(ROW).encode() + b"\n" for _ in range(320))
    repository = hub.add("dataset", DATA, {"train.jsonl": lines})
    _add(here, *TRAINED_FROM)
    answer = _answer(_call(hub, here, "plan", "--model", "model", "--data", DATA, "--out", "plan.json"))
    planned = json.loads((here / "plan.json").read_text())
    assert planned["recipe"]["data_revision"] == repository.commit("main")
    assert planned["facts"]["dataset"]["rows"] == 320
    # 16 rows (5 %) are held out, 304 x 3 / 16 rows a step: fewer than 500 rows are read three times
    assert planned["recipe"]["max_steps"] == 57
    assert answer["next"] == ["skill-train local plan.json"]


def test_a_dataset_that_is_only_called_like_one_on_the_hub(hub: Hub, here: Path) -> None:
    (here / "me").mkdir()
    (here / "rows.jsonl").rename(here / "me" / "tickets.jsonl")
    assert _answer(_call(hub, here, "plan", "--model", "model", "--data", "me/tickets.jsonl"))["ok"]
    assert hub.log == []


def test_sensitive_rows_stay_offline(hub: Hub, here: Path) -> None:
    (here / "recipe.yaml").write_text("model: model\ndata: rows.jsonl\nsensitive: true\n")
    data = _answer(_call(hub, here, "plan", "recipe.yaml", "--max-hours", "0.0001"))["data"]
    assert (data["where"], data["reasons"][0]["rule"]) == ("local", "sensitive")
    refused = _call(hub, here, "plan", "recipe.yaml", "--where", "cloud")
    assert (refused.returncode, _answer(refused)["error"]["code"]) == (3, "sensitive")
    flavor = _call(hub, here, "plan", "recipe.yaml", "--flavor", "t4-small")
    assert (flavor.returncode, _answer(flavor)["error"]["code"]) == (3, "sensitive")
    assert _answer(flavor)["error"]["got"] == "--flavor t4-small"
    assert hub.log == []


def test_what_a_sensitive_run_made_stays_here_too(hub: Hub, here: Path) -> None:
    """Its merged model holds what the rows taught it, so that a run on top of it is as sensitive."""
    before = here / "runs" / "before"
    (before / "merged").parent.mkdir(parents=True)
    (here / "model").rename(before / "merged")
    words = ("--model", "runs/before/merged", "--data", "rows.jsonl")
    for sensitive in (True, False):
        document = planning.plan_document(recipe={"model": MODEL}, policy={"sensitive": sensitive})
        (before / "plan.json").write_text(json.dumps(document))
        assert _answer(_call(hub, here, "plan", *words, "--out", "plan.json"))["ok"]
        plan = json.loads((here / "plan.json").read_text())
        assert (plan["policy"]["sensitive"], plan["where"]) == (sensitive, "local")
        for command in (("plan", *words, "--flavor", "t4-small"), ("submit", *words, "--flavor", "t4-small")):
            refused = _call(hub, here, *command)
            error = _answer(refused).get("error", {})
            if sensitive:
                assert (refused.returncode, error["code"]) == (3, "sensitive"), error
                assert f"the recipe of {before.resolve()}, which made the base" in error["message"]
                assert "hf upload" not in error["hint"] and "--where" not in error["got"]
            else:
                assert error.get("code") != "sensitive", error
        if sensitive:
            assert hub.log == []


def test_sensitive_rows_with_a_model_on_the_hub(hub: Hub, here: Path) -> None:
    """Its metadata is public and is read; nothing of the rows is sent, not even their name."""
    _add_model(hub)
    (here / "rows.jsonl").rename(here / "patients.jsonl")
    (here / "recipe.yaml").write_text(f"model: {MODEL}\ndata: patients.jsonl\nsensitive: true\n")
    assert _answer(_call(hub, here, "plan", "recipe.yaml"))["data"]["where"] == "local"
    assert hub.log and not [r for r in hub.log if "patients" in r.path or r.method not in ("GET", "HEAD")]


# --- What it refuses ---

HALF = "hf_madeUpAbc…xyz"  # as pages show a token that is theirs to hide
REFUSED: list[tuple[str, dict[str, Any], int, str, str]] = [
    ("unknown model", {"model": "me/nothing"}, 2, "unknown_model", "me/nothing"),
    ("no such folder", {"model": "./nowhere"}, 2, "unknown_model", "./nowhere"),
    ("gated model", {"model": "me/gated"}, 4, "gated", "me/gated"),
    ("private model", {"model": "me/private", "token": None}, 2, "unknown_model", "me/private"),
    ("wrong token", {"model": MODEL, "token": "hf_wrong"}, 4, "bad_token", MODEL),
    ("half of a token", {"model": MODEL, "token": HALF}, 4, "bad_token", MODEL),
    ("half of it, for data", {"data": DATA, "token": HALF}, 4, "bad_token", DATA),
    ("a dataset as model", {"model": DATA}, 2, "unknown_model", "is a dataset"),
    ("an adapter as model", {"model": "me/adapter"}, 2, "not_a_model", "me/adapter"),
    ("no template", {"model": "me/base", "row": TALK}, 2, "no_chat_template", "me/base"),
    ("unknown architecture", {"model": "me/new"}, 2, "unknown_model_type", "brandnew"),
    ("unknown dataset", {"data": "me/nothing"}, 2, "unknown_dataset", "me/nothing"),
    ("gated dataset", {"data": "me/gated"}, 4, "gated", "me/gated"),
    ("wrong columns on the Hub", {"data": "me/wrong"}, 2, "wrong_columns", "me/wrong"),
    ("wrong columns", {"row": {"a": 1}}, 2, "wrong_columns", "rows.jsonl"),
    ("no file", {"data": "nothing.jsonl"}, 2, "missing_file", "nothing.jsonl"),
    ("unknown flavor", {"more": ["--flavor", "abacus"]}, 2, "unknown_flavor", "abacus"),
    ("a flavor here", {"more": ["--flavor", "t4-small", "--where", "local"]}, 2, "bad_usage", "--flavor"),
    ("no hours", {"more": ["--max-hours", "0"]}, 2, "bad_usage", "max-hours"),
    ("fp16 on a CPU", {"more": ["--device", "cpu", "--dtype", "float16"]}, 3, "unsafe_precision", "float16"),
]


@pytest.mark.parametrize(("case", "exit_code", "code", "words"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_one_clear_error(hub: Hub, here: Path, case: dict[str, Any], exit_code: int, code: str, words: str) -> None:
    _hub_of_troubles(hub)
    _rows(here / "rows.jsonl", case.get("row", ROW))
    arguments = ["plan", "--model", case.get("model", "model"), "--data", case.get("data", "rows.jsonl")]
    arguments += [*case.get("more", []), "--out", "plan.json"]
    token = case.get("token", "")
    done = _call(hub, here, *arguments, token=token)
    assert done.returncode == exit_code, done.stdout + done.stderr
    answer = _answer(done)
    assert (answer["ok"], answer["error"]["code"]) == (False, code)
    assert words in answer["error"]["message"]
    assert answer["error"]["hint"] or answer["error"]["expected"]
    assert not (here / "plan.json").exists()
    told = _call(hub, here, *arguments, "--format", "human", token=token)
    assert (told.returncode, told.stdout) == (exit_code, "")
    assert f"error: {answer['error']['message']}\n" in told.stderr


def test_an_unreachable_hub_is_temporary(here: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]  # and nobody answers there
    env = environment(f"http://127.0.0.1:{port}", here / "home", "hf_madeUp")
    for arguments in (("--model", MODEL, "--data", "rows.jsonl"), ("--model", "model", "--data", DATA)):
        done = _run(here, env, "plan", *arguments)
        assert (done.returncode, _answer(done)["error"]["code"]) == (8, "hub_unreachable"), done.stderr
        assert (MODEL if MODEL in arguments else DATA) in _answer(done)["error"]["message"]
        assert _answer(done)["error"]["hint"].startswith("try again when the Hub can be reached, or name a local")
        kept_away = _answer(_run(here, env | {"HF_HUB_OFFLINE": "1"}, "plan", *arguments))["error"]
        assert kept_away["code"] == "hub_unreachable" and kept_away["hint"].startswith("unset HF_HUB_OFFLINE, or")
    assert _run(here, env, *LOCAL).returncode == 0


def test_a_plan_that_cannot_run_is_shown_and_refused(hub: Hub, here: Path) -> None:
    (here / "recipe.yaml").write_text("model: model\ndata: rows.jsonl\nload_in_4bit: true\n")
    arguments = ("plan", "recipe.yaml", "--where", "local", "--device", "cpu")
    done = _call(hub, here, *arguments, "--out", "plan.json")
    assert done.returncode == 3, done.stderr
    answer = _answer(done)
    assert [blocker["code"] for blocker in answer["data"]["blockers"]] == ["needs_cuda"]
    assert (answer["error"]["code"], answer["next"]) == ("needs_cuda", [])
    assert answer["data"]["reasons"] and answer["data"]["memory_bytes"]["low"] > 0
    told = _call(hub, here, *arguments, "--format", "human", COLUMNS="80")
    assert "blocked: load_in_4bit needs CUDA" in told.stdout
    assert "error: the plan cannot be run: load_in_4bit needs CUDA" in told.stderr
    refused = _call(hub, here, "local", "plan.json")
    assert (refused.returncode, _answer(refused)["error"]["code"]) == (3, "needs_cuda")


def test_a_base_in_4_bits_gets_a_warning_because_no_adapter_merges_into_it(hub: Hub, here: Path) -> None:
    (here / "recipe.yaml").write_text("model: model\ndata: rows.jsonl\nload_in_4bit: true\n")
    arguments = ("plan", "recipe.yaml", "--where", "cloud")
    assert "quantized_base" not in {warning["code"] for warning in _answer(_call(hub, here, *arguments))["warnings"]}
    config = json.loads((here / "model" / "config.json").read_text())
    quantized = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (here / "model" / "config.json").write_text(json.dumps(config | quantized))
    warned = {warning["code"]: warning["message"] for warning in _answer(_call(hub, here, *arguments))["warnings"]}
    assert "merges into full precision: train on the model that it was made from" in warned["quantized_base"]


# --- Its options ---


def test_what_takes_too_long_goes_to_the_cloud(hub: Hub, here: Path) -> None:
    """Nothing ends within a second, and the plan does not say that something does."""
    data = _answer(_call(hub, here, *LOCAL, "--max-hours", "0.0003"))["data"]
    reasons = {reason["rule"]: reason for reason in data["reasons"]}
    assert (data["where"], reasons["time"]["value"]) == ("cloud", "cloud")
    assert reasons["flavor"]["because"].startswith("the fastest that fits; none is sure to end within 0.0003 h")


def test_what_a_folder_lacks_for_a_training_is_said(hub: Hub, here: Path) -> None:
    """Both, the weights alone, and nothing. A command that is known to fail is not the next one."""
    answers = [_answer(_call(hub, here, *LOCAL))]
    for name in TRAINED_FROM:
        _add(here, name)
        answers.append(_answer(_call(hub, here, *LOCAL)))
    told = [answer["warnings"][0] for answer in answers]
    assert [answer["next"] for answer in answers] == [[], [], ["skill-train local --model model --data rows.jsonl"]]
    assert [(one["code"], one["message"].partition(" has ")[2].partition(",")[0]) for one in told] == [
        ("no_tokenizer", "no tokenizer and no whole weights"), ("no_weights", "no whole weights"), ("few_held_out", ""),
    ]  # fmt: skip


def test_where_overrides_the_rules_and_says_so(hub: Hub, here: Path) -> None:
    answer = _answer(_call(hub, here, *LOCAL, "--where", "cloud"))
    data = answer["data"]
    assert (data["where"], data["flavor"]) == ("cloud", "t4-small")
    codes = ["no_tokenizer", "few_held_out", "few_steps", "local_model"]  # 38 rows x 3 / 16: 8 steps
    assert (answer["next"], [w["code"] for w in answer["warnings"]]) == ([], codes)
    assert data["reasons"][0]["rule"] == "asked"
    assert "against model size" in data["reasons"][0]["because"]
    local = _answer(_call(hub, here, *LOCAL, "--where", "local", "--max-hours", "0.0003"))["data"]
    assert (local["where"], local["reasons"][0]["because"]) == ("local", "--where local, against time")


def test_steps_that_were_said_are_told_as_epochs(hub: Hub, here: Path) -> None:
    """Of 40 rows 2 are held out: 100 steps of 16 rows are 1600 / 38 epochs, 20 are 8.42."""
    for steps, epochs, warned in (("100", "42.11", True), ("20", "8.42", False)):
        answer = _answer(_call(hub, here, *LOCAL, "--max-steps", steps))
        reason = next(reason for reason in answer["data"]["reasons"] if reason["rule"] == "epochs")
        assert reason["value"] == epochs
        assert ("many_epochs" in [warning["code"] for warning in answer["warnings"]]) == warned


@pytest.mark.parametrize(("steps", "warned"), [("9", True), ("10", False)])
def test_steps_that_are_too_few_to_learn_from_are_told(hub: Hub, here: Path, steps: str, warned: bool) -> None:
    warnings = _answer(_call(hub, here, *LOCAL, "--max-steps", steps))["warnings"]
    messages = [warning["message"] for warning in warnings if warning["code"] == "few_steps"]
    assert messages == (
        [
            "9 steps are too few to learn from, by a rule of thumb: AdamW averages 10 of them (adam_beta1 0.9); "
            "more epochs, or a smaller effective_batch_size"
        ]
        if warned
        else []
    )


@pytest.mark.parametrize(("max_length", "least"), [("1024", "at least 89%"), ("8192", "at least 9%"), ("30000", None)])
def test_text_that_max_length_cuts_away_is_told(hub: Hub, here: Path, max_length: str, least: str | None) -> None:
    """A row of 45,005 bytes has 9,001 tokens or more, at 5 bytes a token."""
    _rows(here / "long.jsonl", {"text": "late " * 9001})
    warnings = _answer(_call(hub, here, *LOCAL[:-1], "long.jsonl", "--max-length", max_length))["warnings"]
    said = [warning["message"] for warning in warnings if warning["code"] == "truncated"]
    assert [message.partition(" of the tokens")[0] for message in said] == (
        [f"max_length {max_length} cuts away {least}"] if least else []
    )


@pytest.mark.parametrize(("max_length", "told"), [("8192", False), ("8193", True)])
def test_rows_beyond_the_positions_of_the_model_are_told(hub: Hub, here: Path, max_length: str, told: bool) -> None:
    """SmolLM2-135M has 8192 positions, and rotary ones go on without an error. The rows have more tokens than that."""
    _rows(here / "long.jsonl", {"prompt": "late? " * 9000, "completion": "Yes."})
    warnings = _answer(_call(hub, here, *LOCAL[:-1], "long.jsonl", "--max-length", max_length))["warnings"]
    messages = [warning["message"] for warning in warnings if warning["code"] == "beyond_context"]
    expected = "rows of 8193 tokens and more are trained, and model was made for 8192 positions"
    assert [message.replace(f"{here.resolve()}/", "") for message in messages] == ([expected] if told else [])


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (19, None),  # none is held out, so nothing is measured
        (40, "2 of 40 rows are held out, which tell a share of right answers to ±69 points; set 0.2"),  # 0.98 / sqrt(2)
        (199, "9 of 199 rows are held out, which tell a share of right answers to ±33 points; set 0.16"),  # 0.98 / 3
        (599, "29 of 599 rows are held out, which tell a share of right answers to ±18 points; set 0.06"),
        (600, None),  # from 30 on `evaluate` does not warn either
    ],
)
def test_a_few_rows_held_out_tell_little(hub: Hub, here: Path, rows: int, told: str | None) -> None:
    tiny.write_rows(here / "n.jsonl", rows)
    warnings = _answer(_call(hub, here, *LOCAL[:-1], "n.jsonl"))["warnings"]
    messages = [warning["message"] for warning in warnings if warning["code"] == "few_held_out"]
    share = "set held_out_fraction:"
    assert messages == ([] if told is None else [f"{told.replace('set', share)} to hold out more"])


def test_half_of_few_rows_is_not_told_to_be_half(hub: Hub, here: Path) -> None:
    (here / "half.yaml").write_text("model: model\ndata: rows.jsonl\nheld_out_fraction: 0.5\n")
    [told] = [w for w in _answer(_call(hub, here, "plan", "half.yaml"))["warnings"] if w["code"] == "few_held_out"]
    assert told["message"] == "20 of 40 rows are held out, which tell a share of right answers to ±22 points"


def test_a_flavor_is_a_wish_for_the_cloud(hub: Hub, here: Path) -> None:
    data = _answer(_call(hub, here, *LOCAL, "--flavor", "l40sx8"))["data"]
    assert (data["where"], data["flavor"]) == ("cloud", "l40sx8")
    assert {reason["rule"]: reason["because"] for reason in data["reasons"]}["flavor"].startswith("asked for")


def test_out_replaces_plans_and_nothing_else(hub: Hub, here: Path) -> None:
    for _ in range(2):
        assert _answer(_call(hub, here, *LOCAL, "--out", "new/plan"))["data"]["plan"] == "new/plan"
    assert _tree(here / "new") == ["plan"]
    rows = (here / "rows.jsonl").read_bytes()
    for taken in ("rows.jsonl", "model", "model/config.json"):
        done = _call(hub, here, *LOCAL, "--out", taken)
        assert (done.returncode, _answer(done)["error"]["code"]) == (2, "output_exists")
    assert (here / "rows.jsonl").read_bytes() == rows
    done = _call(hub, here, *LOCAL, "--out", "rows.jsonl/plan.json")
    assert (done.returncode, _answer(done)["error"]["code"]) == (2, "system_error")


def test_the_plan_that_a_run_followed_is_kept(hub: Hub, here: Path) -> None:
    assert _call(hub, here, *LOCAL, "--out", "run/plan.json").returncode == 0
    (here / "run" / "checkpoints").mkdir()
    done = _call(hub, here, *LOCAL, "--out", "run/plan.json")
    assert (done.returncode, _answer(done)["error"]["message"]) == (2, "run/plan.json is the plan of a run")


@pytest.mark.parametrize(
    "name", ["cloud.json", "train.log", "environment.json", "merged", "colab.ipynb", "skypilot/task.yaml"]
)
def test_a_file_of_a_run_beside_a_plan_keeps_it(tmp_path: Path, name: str) -> None:
    """Also of a run that was submitted, or has just begun."""
    (tmp_path / "plan.json").write_text(json.dumps({"schema": plan_record.SCHEMA}))
    require_free(tmp_path / "plan.json")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with pytest.raises(UsageError) as caught:
        require_free(tmp_path / "plan.json")
    assert str(caught.value).startswith(f"{tmp_path / 'plan.json'} is the plan of a run")


# --- A plan that is run later ---


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A tiny model on the Hub, planned, trained from that plan, and asked about again: the folder and each answer."""
    folder = tmp_path_factory.mktemp("followed")
    tiny.write_rows(folder / "rows.jsonl", 24)
    words = ("--model", "me/tiny", "--data", "rows.jsonl", "--max-steps", "5", "--device", "cpu")
    calls = {
        "plan": ("plan", *words, "--where", "local", "--out", "plan.json"),
        "local": ("local", "plan.json", "--run-dir", "run"),
        "same": ("local", *words, "--run-dir", "run"),
        "of run": ("plan", "run"),
        "again": ("plan", *words, "--where", "local"),
    }
    with Hub(tmp_path_factory.mktemp("hubs") / "hub") as hub:
        hub.hardware = HARDWARE
        hub.add("model", "me/tiny", {p.name: p.read_bytes() for p in tiny.cached("gemma").iterdir()})
        done, loaded = {}, []
        for name, arguments in calls.items():
            done[name] = _call(hub, folder, *arguments)
            loaded.append(any(re.search(WEIGHTS, r.path) and r.sent > 200_000 for r in hub.log))
    for name, one in done.items():
        assert one.returncode == 0, (name, one.stderr)
    assert loaded[:2] == [False, True]  # weights come when they are trained, not when they are planned
    return folder, {name: _answer(one)["data"] for name, one in done.items()}


def test_local_runs_the_plan_as_it_was_made(followed: Any) -> None:
    folder, told = followed
    assert told["plan"]["recipe_hash"] == told["local"]["recipe_hash"]
    assert told["local"]["steps"] == 5
    planned, run = (json.loads((folder / name).read_text()) for name in ("plan.json", "run/plan.json"))
    assert (run["recipe"], run["placement"]) == (planned["recipe"], planned["placement"])


def test_the_same_recipe_without_its_plan_is_the_same_run(followed: Any) -> None:
    assert followed[1]["same"]["reused"] is True


def test_a_finished_run_shows_the_estimates_beside_the_measurements(followed: Any, tmp_path: Path) -> None:
    folder, told = followed
    record = json.loads((folder / "run" / "train.json").read_text())
    actual = told["of run"]["actual"]
    assert actual["seconds"]["actual"] == record["seconds"]
    assert actual["memory_bytes"]["actual"] == record["figures"]["peak_memory_bytes"]["rss"]
    for figure in actual.values():
        assert figure["within"] is (figure["low"] <= figure["actual"] <= figure["high"])
    with Hub(tmp_path / "hub") as hub:
        done = _call(hub, folder, "plan", "run", "--format", "human", COLUMNS="100")
    assert re.search(r"│ time +│ .+ to .+ │ .+ │ (yes|no)", done.stdout)


def test_a_finished_run_calibrates_the_next_plan(followed: Any) -> None:
    """Four steps: the first warms up. The speed is the run's own: within a quarter of it, both ways."""
    folder, told = followed
    assert "measured" not in told["plan"]["seconds"]["basis"]
    assert re.search(r"measured: 4 steps of tiny in float32, \d{4}-", told["again"]["seconds"]["basis"])
    steps = [json.loads(line)["seconds"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    training = next(part for part in told["again"]["seconds_parts"] if part["name"] == "training")
    assert len(list((folder.with_name(f"home of {folder.name}") / "skill-train" / "calibration").iterdir())) == 1
    assert training["low"] <= round(5 * sum(steps[1:]) / 4)


def test_a_run_takes_no_options(followed: Any, tmp_path: Path) -> None:
    with Hub(tmp_path / "hub") as hub:
        done = _call(hub, followed[0], "plan", "run", "--where", "cloud")
        assert (done.returncode, _answer(done)["error"]["code"]) == (2, "bad_usage")
        assert "--where" in _answer(done)["error"]["message"]
        folder = _call(hub, followed[0], "plan", "run/adapter")
        assert (folder.returncode, _answer(folder)["error"]["code"]) == (2, "not_a_run")


def _edit(folder: Path, **values: Any) -> None:
    planned = json.loads((folder / "plan.json").read_text())
    for path, value in values.items():
        *way, last = path.split("__")
        place = planned
        for key in way:
            place = place[key]
        place[last] = value
    (folder / "plan.json").write_text(json.dumps(planned))


CHANGES: list[tuple[str, Any, tuple[str, ...], str, str]] = [
    ("a cloud plan", lambda f: _edit(f, where="cloud"), (), "cloud_plan", "for the cloud"),
    ("another machine", lambda f: _edit(f, facts__machine__chip="Apple M9"), (), "outdated_plan", "another machine"),
    (
        "another recipe",
        lambda f: _edit(f, recipe__learning_rate=0.1),
        (),
        "outdated_plan",
        "was edited after planning",
    ),
    (
        "half a plan",
        lambda f: (f / "plan.json").write_text('{"schema": "skill-train/plan/1"}'),
        (),
        "broken_record",
        "",
    ),
    ("other rows", lambda f: _rows(f / "rows.jsonl", ROW, 41), (), "outdated_plan", "the data changed"),
    ("no rows", lambda f: (f / "rows.jsonl").unlink(), (), "outdated_plan", "the data changed"),
    (
        "another model",
        lambda f: (f / "model" / "vocab.json").write_text("{}"),
        (),
        "outdated_plan",
        "the model changed",
    ),
    ("an option", lambda f: None, ("--max-steps", "3"), "bad_usage", "--max-steps"),
    ("a device", lambda f: None, ("--device", "cpu"), "bad_usage", "--device"),
    ("a torn file", lambda f: (f / "plan.json").write_text('{"schema": '), (), "bad_recipe", "plan.json is not YAML"),
]


@pytest.mark.parametrize(("change", "more", "code", "words"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES])
def test_a_plan_that_no_longer_holds_is_refused(
    hub: Hub, here: Path, change: Any, more: tuple[str, ...], code: str, words: str
) -> None:
    assert _call(hub, here, *LOCAL, "--where", "local", "--out", "plan.json").returncode == 0
    change(here)
    before = _tree(here)
    done = _call(hub, here, "local", "plan.json", *more, "--run-dir", "run")
    assert done.returncode == 2, done.stderr
    error = _answer(done)["error"]
    assert error["code"] == code, error
    assert words in error["message"] and (error["hint"] or code == "bad_recipe")
    assert _tree(here) == before


# --- Helpers ---


def _call(
    hub: Hub, folder: Path, *arguments: object, token: str | None = "", **more: str
) -> subprocess.CompletedProcess[str]:
    """The console script, with `hub` as the Hub and caches of its own beside the folder."""
    home = folder.with_name(f"home of {folder.name}")
    return _run(folder, hub.environment(home, token=token) | more, *arguments)


def _run(folder: Path, env: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [shared_runs.script(), *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=280)
    assert "Traceback" not in done.stderr, done.stderr
    assert env.get("HF_TOKEN", "no token") not in done.stdout + done.stderr
    return done


def _answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The one document on stdout."""
    assert len(done.stdout.encode()) <= 8192
    assert done.stdout.count("\n") == 1, done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer["schema"] == "skill-train/1"
    return answer


def _rows(path: Path, row: dict[str, Any], count: int = 40) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for _ in range(count)))


def _add_model(hub: Hub, place: str = MODEL, **config: Any) -> Any:
    return add_model(hub, place, weights=bytes(1_000_000), **config)


def _hub_of_troubles(hub: Hub) -> None:
    _add_model(hub)
    _add_model(hub, "me/gated").gated = True
    _add_model(hub, "me/private").private = True
    _add_model(hub, "me/new", model_type="brandnew", architectures=["BrandnewForCausalLM"])
    del _add_model(hub, "me/base").files["tokenizer_config.json"]
    hub.add("model", "me/adapter", {"adapter_config.json": b"{}", "adapter_model.safetensors": b""})
    hub.add("dataset", DATA, {"train.jsonl": json.dumps(ROW).encode()})
    hub.add("dataset", "me/gated", {"train.jsonl": json.dumps(ROW).encode()}, gated=True)
    hub.add("dataset", "me/wrong", {"train.jsonl": b'{"a": 1}\n'})


def _tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
