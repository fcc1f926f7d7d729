"""`push` of a vision model's two files: what is sent, what the card says, and what half of a pair is called."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import planning
import step_records
import whole_records
from hub_emulator import Hub
from skill_train.commands.push import PushOptions, card_file, gathered
from skill_train.core.console import Console
from skill_train.core.errors import VerificationFailed
from skill_train.publish.files import evaluation_of, files_of, half_of_a_pair, proof_of
from skill_train.run import records
from skill_train.run.folder import RunDir

TEXT, PROJECTOR = "first-q8_0.gguf", "mmproj-first-f16.gguf"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that was trained on pictures, exported as a pair and verified."""
    folder = tmp_path / "runs" / "first"
    for name, content in (
        (TEXT, b"GGUF text"),
        (f"first-f16{TEXT[10:]}", b"GGUF larger text"),
        (PROJECTOR, b"GGUF eye"),
    ):
        (folder / "gguf").mkdir(parents=True, exist_ok=True)
        (folder / "gguf" / name).write_bytes(content)
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen2-VL"}))
    (folder / "images").mkdir()
    (folder / "images" / "held-out.png").write_bytes(b"a picture of a customer")
    recipe = {"model": str(tmp_path / "base"), "revision": None, "data": str(tmp_path / "rows.jsonl"), "images": True}
    policy = {"sensitive": False, "hub_model_id": None}
    _write(folder / "plan.json", planning.plan_document(recipe=recipe, policy=policy, fingerprints={}))
    records.write(folder / "train.json", step_records.trained({}, first_loss=2.5, last_loss=0.25))
    planning.write_recipe_hash(folder)
    made = {f"gguf/{PROJECTOR}": _digest(folder / "gguf" / PROJECTOR) | {"quant": "f16"}}
    _write(folder / "mmproj.json", {"outputs": made})
    write_proof(folder)
    return RunDir(folder)


def write_proof(folder: Path, **verdicts: str) -> None:
    of_text, of_projector = ("tuned", "pictures"), ("projector", "projector_weights")
    named = [(name, TEXT) for name in of_text] + [(name, PROJECTOR) for name in of_projector]
    checks = [
        {"name": name, "file": file, "verdict": verdicts.get(name, "pass"), "figure": 2e-6, "detail": "as trained"}
        for name, file in named
    ]
    worst = next(word for word in ("fail", "warn", "pass") if word in {check["verdict"] for check in checks})
    files = {path.name: _digest(path) for path in (folder / "gguf").iterdir()}
    _write(folder / "verify.json", whole_records.whole_proof(verdict=worst, checks=checks, inputs={"ggufs": files}))


def _write(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document), encoding="utf-8")


def _digest(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def card_of(run: RunDir, *parts: str) -> tuple[dict[str, Any], str]:
    """The YAML and the text of the card."""
    push = gathered(PushOptions(run.path, repo="me/seen", part=parts), Console("quiet", "push"))
    content = card_file(push, half_of_a_pair(run, push.files)).content
    assert isinstance(content, bytes)
    _, front, text = content.decode().split("---\n", 2)
    return yaml.safe_load(front), text


def test_the_card_says_which_files_belong_together_and_how_both_run(run: RunDir) -> None:
    front, text = card_of(run)
    assert (front["pipeline_tag"], front["library_name"]) == ("image-text-to-text", "gguf")
    for name in (TEXT, "first-f16.gguf"):
        assert f"| {name} | {PROJECTOR} |" in text
        assert f"llama-server -m {name} --mmproj {PROJECTOR}\n" in text
    assert f"llama-mtmd-cli -m {TEXT} --mmproj {PROJECTOR} --image FILE -p QUESTION\n" in text
    assert "hf download me/seen --local-dir seen && cd seen\n" in text
    assert f"`FROM ./{TEXT}` and `FROM ./{PROJECTOR}`" in text
    assert f"| {PROJECTOR} | projector_weights | pass | as trained |" in text
    assert f"| {TEXT} | pictures | pass | 2e-06 (limit 0) |" in text
    assert "llama-cli" not in text and "ollama run" not in text and "Not whole" not in text
    assert "AutoModelForImageTextToText.from_pretrained" in text and "AutoModelForCausalLM" not in text


def test_the_card_says_which_importance_matrix_a_file_was_made_with(run: RunDir) -> None:
    assert "importance matrix" not in card_of(run)[1]
    use = {"file": "imatrix.gguf", "sha256": "0" * 64, "model": "", "data": "samples.jsonl sha256 1234"}
    made = _digest(run.gguf / TEXT) | {"quant": "q4_k_m", "imatrix": use}
    _write(run.record("quantize"), {"outputs": {f"gguf/{TEXT}": made}})
    assert f"- `{TEXT}`: imatrix.gguf, of samples.jsonl sha256 1234\n" in card_of(run)[1]


def test_a_language_model_without_its_projector_is_not_called_whole(run: RunDir) -> None:
    """The projector was verified with it, and is gone: what is left reads text only, and has no proof."""
    (run.gguf / PROJECTOR).unlink()
    files = files_of(run, ("gguf",), "base")
    assert half_of_a_pair(run, files) == "no projector is pushed with the language model: llama.cpp will read text only"
    assert proof_of(run, files) is None
    front, text = card_of(run)
    assert front["pipeline_tag"] == "text-generation"
    assert "**Not whole:** no projector is pushed" in text and "**not verified**" in text
    assert "--mmproj" not in text


def test_a_projector_alone_is_not_called_whole(run: RunDir) -> None:
    for path in run.ggufs:
        path.unlink()
    front, text = card_of(run, "gguf")
    assert front["pipeline_tag"] == "text-generation"
    assert "**Not whole:** no language model is pushed" in text and "llama-server" not in text


def test_a_run_that_exported_no_projector_is_not_called_whole(run: RunDir) -> None:
    """`export-gguf --mmproj none`."""
    (run.gguf / PROJECTOR).unlink()
    run.record("mmproj").unlink()
    assert half_of_a_pair(run, files_of(run, ("gguf",), "base")).startswith("no projector")
    assert half_of_a_pair(run, files_of(run, ("adapter",), "base")) == ""


def test_a_run_of_text_has_no_other_half(run: RunDir) -> None:
    plan = json.loads(run.plan.read_text())
    _write(run.plan, plan | {"recipe": plan["recipe"] | {"images": False}})
    planning.write_recipe_hash(run.path)
    (run.gguf / PROJECTOR).unlink()
    run.record("mmproj").unlink()
    assert half_of_a_pair(run, files_of(run, ("gguf",), "base")) == ""
    front, text = card_of(run)
    assert front["pipeline_tag"] == "text-generation"
    assert f"llama-cli -hf me/seen -hff {TEXT} -cnv" in text and "AutoModelForCausalLM" in text


def test_an_adapter_of_a_vision_model_is_one_that_reads_pictures(run: RunDir) -> None:
    front, text = card_of(run, "adapter")
    assert (front["pipeline_tag"], front["library_name"]) == ("image-text-to-text", "peft")
    assert "AutoModelForImageTextToText" in text and "Two files" not in text


def test_a_projector_that_failed_goes_nowhere_even_after_it_was_removed(run: RunDir) -> None:
    write_proof(run.path, projector_weights="fail")
    for _ in range(2):
        with pytest.raises(VerificationFailed) as refused:
            proof_of(run, files_of(run, ("gguf",), "base"))
        assert PROJECTOR in str(refused.value)
        (run.gguf / PROJECTOR).unlink(missing_ok=True)


@pytest.mark.parametrize("changed", [None, TEXT, PROJECTOR])
def test_the_figures_of_a_pair_are_of_both_files(run: RunDir, changed: str | None) -> None:
    read = _digest(run.gguf / TEXT) | {"projector": _digest(run.gguf / PROJECTOR)}
    _write(run.record("evaluate"), whole_records.evaluation(inputs={"models": {TEXT: {"model": read}}}))
    if changed is not None:
        (run.gguf / changed).write_bytes(b"GGUF exported again")
    assert (evaluation_of(run, files_of(run, ("gguf",), "base")) is not None) is (changed is None)


@pytest.mark.slow
def test_both_files_arrive_and_half_a_pair_is_warned_of(tmp_path: Path, run: RunDir) -> None:
    with Hub(tmp_path / "hub") as hub:
        answer = _push(hub, tmp_path, run)
        there = hub.repositories["model", "me/seen"].at("main")
        assert (answer["data"]["verdict"], answer["warnings"]) == ("pass", [])
        assert (there[TEXT], there[PROJECTOR]) == (b"GGUF text", b"GGUF eye")
        assert not [name for name, content in there.items() if b"of a customer" in content or name.endswith(".png")]
        (run.gguf / PROJECTOR).unlink()
        answer = _push(hub, tmp_path, run)
        assert {warning["code"] for warning in answer["warnings"]} == {"not_verified", "verdict_warn", "other_files"}
        assert "llama.cpp will read text only" in str(answer["warnings"])


def _push(hub: Hub, home: Path, run: RunDir) -> dict[str, Any]:
    command = [sys.executable, "-c", "from skill_train.cli import main; main()", "push", str(run.path)]
    env = hub.environment(home / "home", token="")
    done = subprocess.run([*command, "--repo", "me/seen"], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
