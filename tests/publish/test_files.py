"""Which files of a run are pushed, under which names, with which proof, and what is refused: paths in, paths out."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import planning
import step_records
import whole_records
from skill_train.core.errors import UsageError, VerificationFailed
from skill_train.publish.files import (
    chosen_parts,
    evaluation_of,
    files_of,
    half_of_a_pair,
    may_leave,
    proof_of,
    records_of,
    require_own_weights,
    without_others,
)
from skill_train.run import records, train_record
from skill_train.run.folder import RunDir

Q8, Q4, WEIGHTS = "m-q8_0.gguf", "m-q4_k_m.gguf", "adapter_model.safetensors"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run with an adapter and two GGUF files, of which the proof is."""
    run = RunDir(tmp_path / "run")
    for name in (f"gguf/{Q8}", f"gguf/{Q4}", f"adapter/{WEIGHTS}", "adapter/README.md", "adapter/deep/notes.txt"):
        _put(run, name, name.encode())
    _put(run, "adapter/adapter_config.json", b'{"base_model_name_or_path": "org/base", "r": 8}')
    recipe = {"model": "org/base", "data": "org/rows", "revision": None}
    _write(run.plan, planning.plan_document(recipe=recipe, fingerprints={}))
    records.write(run.record("train"), step_records.trained({f"adapter/{WEIGHTS}": _digest(run.adapter / WEIGHTS)}))
    planning.write_recipe_hash(run.path)
    prove(run)
    return run


def prove(run: RunDir, verdict: str = "pass", **verdicts: str) -> None:
    """`verdicts`: of checks, by the quantization of their file."""
    names = {"q8": Q8, "q4": Q4}
    checks = [{"name": "tuned", "file": names[key], "verdict": word, "detail": ""} for key, word in verdicts.items()]
    inputs = {
        "ggufs": {path.name: _digest(path) for path in run.ggufs},
        "adapter": {WEIGHTS: _digest(run.adapter / WEIGHTS)},
    }
    _write(run.record("verify"), whole_records.whole_proof(verdict=verdict, checks=checks, inputs=inputs))


def _put(run: RunDir, name: str, content: bytes) -> Path:
    path = run.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def _write(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document), encoding="utf-8")


def _digest(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _names(run: RunDir, *parts: str) -> list[str]:
    return [file.path for file in files_of(run, parts, "org/base")]


def _remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


# --- Parts and names ---


def test_the_parts_that_are_pushed(run: RunDir) -> None:
    assert chosen_parts(run, ()) == ("gguf", "adapter")
    assert chosen_parts(run, ("adapter", "gguf")) == ("gguf", "adapter")
    assert chosen_parts(run, ("adapter",)) == ("adapter",)
    _put(run, "merged/model.safetensors", b"")
    assert chosen_parts(run, ()) == ("gguf", "adapter")
    _remove(run.gguf)
    assert chosen_parts(run, ()) == ("adapter",)
    _remove(run.adapter)
    assert chosen_parts(run, ()) == ("merged",)


@pytest.mark.parametrize(
    ("part", "hint"),
    [("gguf", "skill-train export-gguf "), ("merged", "skill-train merge "), ("adapter", "skill-train local --resume")],
)
def test_a_part_that_is_not_there(run: RunDir, part: str, hint: str) -> None:
    if part != "merged":
        _remove(run.path / part)
    with pytest.raises(UsageError) as refused:
        chosen_parts(run, (part,))
    others = {"gguf": "adapter", "merged": "gguf, adapter", "adapter": "gguf"}[part]
    assert (refused.value.code, refused.value.expected) == ("missing_step", others)
    assert f"has no {part} to push" in refused.value.message and refused.value.hint.startswith(hint)
    for folder in (run.gguf, run.adapter):
        if folder.is_dir():
            _remove(folder)
    with pytest.raises(UsageError) as refused:
        chosen_parts(run, (part,))
    assert refused.value.expected == "a trained run"


def test_the_names_in_the_repository(run: RunDir) -> None:
    of_adapter = ["adapter_config.json", WEIGHTS, "deep/notes.txt"]
    assert _names(run, "adapter") == of_adapter
    assert _names(run, "gguf") == [Q4, Q8]
    assert _names(run, "gguf", "adapter") == [Q4, Q8, *(f"adapter/{name}" for name in of_adapter)]


def test_a_model_that_was_trained_whole_needs_no_record_of_a_merge(run: RunDir) -> None:
    for name in ("README.md", "config.json", "deep/README.md", "model.safetensors"):
        _put(run, f"merged/{name}", b"{}")
    with pytest.raises(UsageError, match="nobody knows what it was merged from"):
        _names(run, "merged")
    plan = json.loads(run.plan.read_text())
    _write(run.plan, plan | {"recipe": plan["recipe"] | {"finetuning_type": "full"}})
    assert _names(run, "merged") == ["config.json", "model.safetensors"]


def test_weights_that_the_training_did_not_write_are_not_pushed(run: RunDir) -> None:
    """The card would call them trained. Texts beside the adapter are of the user."""
    _put(run, "adapter/LICENSE.txt", b"as the base")
    training = train_record.read(run.record("train"))
    assert "LICENSE.txt" in _names(run, "adapter")
    require_own_weights(run, training)
    _put(run, "adapter/extra.safetensors", b"of another run")
    with pytest.raises(UsageError, match=r"extra\.safetensors is a file that train\.json does not describe"):
        require_own_weights(run, training)


def test_only_a_path_of_this_machine_is_replaced_in_the_adapters_config(run: RunDir) -> None:
    [config] = [file for file in files_of(run, ("adapter",), "org/base") if file.path == "adapter_config.json"]
    assert (config.content, config.changed, config.source) == (None, None, run.adapter / "adapter_config.json")
    [config] = [file for file in files_of(run, ("adapter",), "other") if file.path == "adapter_config.json"]
    assert json.loads(config.content or b"") == {"base_model_name_or_path": "other", "r": 8}
    assert config.changed is not None and config.size == len(config.content or b"")


@pytest.mark.parametrize("what", ["a file", "a folder", "inside"])
def test_no_link_leads_out_of_the_run(run: RunDir, tmp_path: Path, what: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "key.json").write_text("{}")
    if what == "inside":
        (run.adapter / "again.txt").symlink_to(run.adapter / "deep" / "notes.txt")
        assert "again.txt" in _names(run, "adapter")
        return
    if what == "a file":
        (run.adapter / "key.json").symlink_to(outside / "key.json")
    else:
        _remove(run.gguf)
        (outside / Q8).write_bytes(b"GGUF")
        run.gguf.symlink_to(outside)
        (outside / Q4).symlink_to(run.adapter / WEIGHTS)
    with pytest.raises(UsageError) as refused:
        _names(run, "adapter" if what == "a file" else "gguf")
    assert refused.value.code == "unsafe_link"
    assert (str(outside) in refused.value.got) == (what == "a file")


@pytest.mark.parametrize(
    ("name", "leaves"),
    [
        (WEIGHTS, True), ("deep/tokenizer.json", True), ("chat_template.jinja", True), ("MODEL.GGUF", True),
        ("LICENSE", True), ("licence.txt", True), ("notice", True), ("USE_POLICY.md", True), ("tokenizer.model", True),
        ("modeling.py", False), ("pytorch_model.bin", False), ("optimizer.pt", False), ("rows.jsonl", False),
        (".env.json", False), (".cache/x.json", False), ("a/.git/LICENSE", False), ("x.license", False),
    ],
)  # fmt: skip
def test_which_files_may_leave(name: str, leaves: bool) -> None:
    assert may_leave(name) is leaves


def test_another_file_leaves_only_by_its_name(run: RunDir) -> None:
    for name in ("a.py", "b.py"):
        _put(run, f"adapter/{name}", b"import os")
    files = files_of(run, ("adapter",), "org/base")
    sent, left_out = without_others(files, ())
    assert left_out == ["a.py", "b.py"] and [f.path for f in sent] == ["adapter_config.json", WEIGHTS, "deep/notes.txt"]
    sent, left_out = without_others(files, ("b.py",))
    assert left_out == ["a.py"] and "b.py" in [file.path for file in sent]
    with pytest.raises(UsageError) as refused:
        without_others(files, ("b.py", "c.py"))
    assert (refused.value.got, refused.value.expected) == ("c.py", "a.py, b.py")
    with pytest.raises(UsageError) as refused:
        without_others(sent[:1], ("c.py",))
    assert refused.value.expected.startswith("nothing")


def test_the_records_that_go_along(run: RunDir) -> None:
    assert [file.path for file in records_of(run, None, None)] == ["skill-train/recipe.yaml", "skill-train/train.json"]
    _write(run.record("evaluate"), whole_records.evaluation())
    both = records_of(run, proof_of(run, files_of(run, ("gguf",), "b")), evaluation_of(run, []))
    assert [file.path.split("/")[1] for file in both] == ["recipe.yaml", "train.json", "verify.json", "evaluate.json"]


def test_a_pair_is_known_by_its_record_too(run: RunDir) -> None:
    """Of a vision model that was trained on text."""
    files = files_of(run, ("gguf",), "org/base")
    assert half_of_a_pair(run, files) == ""
    _write(run.record("mmproj"), {"outputs": {"gguf/mmproj-m-f16.gguf": {"bytes": 1, "sha256": "0", "quant": "f16"}}})
    assert half_of_a_pair(run, files).startswith("no projector is pushed")


# --- The proof ---


def _proof(run: RunDir, *parts: str) -> Any:
    return proof_of(run, files_of(run, parts, "org/base"))


def test_a_proof_is_of_all_files_that_are_pushed(run: RunDir) -> None:
    prove(run, q8="pass", q4="pass")
    assert _proof(run, "gguf") == _proof(run, "gguf", "adapter") is not None
    assert _proof(run, "adapter") is None  # with it the files are compared
    (run.gguf / Q4).unlink()  # one that was verified may be gone
    assert _proof(run, "gguf") is not None
    _put(run, f"gguf/{Q4}", b"exported again")
    assert _proof(run, "gguf") is None
    run.record("verify").unlink()
    assert _proof(run, "gguf") is None


@pytest.mark.parametrize("failed", ["q8", "q4"])
def test_a_file_that_failed_stops_the_push_while_it_is_there(run: RunDir, failed: str) -> None:
    prove(run, "fail", q8="fail" if failed == "q8" else "pass", q4="fail" if failed == "q4" else "pass")
    with pytest.raises(VerificationFailed) as refused:
        _proof(run, "gguf")
    assert {"q8": Q8, "q4": Q4}[failed] in refused.value.message
    _put(run, f"gguf/{Q4}", b"exported again")
    if failed == "q8":  # the other one is new, and this one is not
        with pytest.raises(VerificationFailed):
            _proof(run, "gguf")
    else:
        assert _proof(run, "gguf") is None
    assert _proof(run, "adapter") is None


def test_a_proof_whose_verdict_alone_says_fail(run: RunDir) -> None:
    """Its checks were edited."""
    prove(run, "fail", q8="pass")
    with pytest.raises(UsageError, match="the worst of its checks pass"):
        _proof(run, "gguf")


def test_a_proof_that_names_no_adapter_is_of_any(run: RunDir) -> None:
    proof = json.loads(run.record("verify").read_text())
    proof["inputs"]["adapter"] = None
    _write(run.record("verify"), proof)
    assert _proof(run, "gguf") is not None


# --- The evaluation ---


@pytest.mark.parametrize("changed", [None, "adapter", "base"])
def test_an_evaluation_is_of_the_adapter_that_is_there(run: RunDir, changed: str | None) -> None:
    inputs = {"tuned": {"model": "the folder of base", "adapter": {WEIGHTS: _digest(run.adapter / WEIGHTS)}}}
    inputs["base"] = {"model": {"model.safetensors": {"bytes": 1, "sha256": "0" * 64}}}  # it is not of the run
    _write(run.record("evaluate"), whole_records.evaluation(inputs={"models": inputs}))
    if changed == "adapter":
        _put(run, f"adapter/{WEIGHTS}", b"trained again")
    assert (evaluation_of(run, files_of(run, ("adapter",), "b")) is not None) is (changed != "adapter")
    run.record("evaluate").unlink()
    assert evaluation_of(run, []) is None


def test_the_adapter_of_a_run_that_trained_every_weight_is_no_missing_step(tmp_path: Path) -> None:
    (tmp_path / "merged").mkdir()
    document = planning.plan_document(recipe={"finetuning_type": "full"})
    (tmp_path / "plan.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        chosen_parts(RunDir(tmp_path), ("adapter",))
    assert caught.value.hint == f"skill-train push {tmp_path} --part merged"
