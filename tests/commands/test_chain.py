"""One real chain by the console script: a tiny model is trained, merged, exported and verified. Not marked `slow`, so
that `make check` walks it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader
from safetensors.torch import load_file, save_file

import gguf_maker
import shared_runs
import step_records
import tiny
from one_command import answered
from shared_runs import Chain
from skill_train.core.digests import file_digest
from skill_train.gguf.export_files import model_of
from skill_train.program.chat.labels import fed_digest
from skill_train.run.folder import RunDir


@pytest.fixture(scope="module", params=["gemma", pytest.param("qwen2", marks=pytest.mark.torture)])
def chain(request: pytest.FixtureRequest) -> Chain:
    return shared_runs.chain(request.param)


@pytest.mark.parametrize("name", ["local", "again", "from its file", "merge", "export-gguf", "verify"])
def test_each_command_answers_with_one_document(chain: Chain, name: str) -> None:
    done = chain.answers[name]
    assert done.code == 0, done.stderr
    answer = json.loads(done.stdout, parse_constant=_no_json)
    assert done.stdout.count("\n") == 1 and len(done.stdout.encode()) <= 8192
    assert (answer["schema"], answer["ok"]) == ("skill-train/1", True)
    assert set(answer) == {"schema", "command", "ok", "data", "warnings", "next"}
    assert all(set(warning) == {"code", "message"} for warning in answer["warnings"])
    assert all(command.startswith("skill-train ") for command in answer["next"])
    assert "Traceback" not in done.stderr


def test_status_names_the_step_that_is_next(chain: Chain, tmp_path: Path) -> None:
    run = shutil.copytree(chain.run, tmp_path / "run")
    for record, step in (("verify", "report"), ("convert", "verify"), ("train", "export-gguf")):
        assert answered("status", run)[1]["next"] == [f"skill-train {step} {run}"]
        (run / f"{record}.json").unlink()


def test_a_local_run_says_what_the_design_promises(chain: Chain) -> None:
    run, local = chain.run, chain.answers["local"]
    data = local.data
    assert (data["run_dir"], data["reused"], data["steps"], data["verdict"]) == (str(run), False, 3, "pass")
    names = {"model_loads", "batches_are_valid", "accumulation", "loss_falls", "checkpoint_saves", "adapter_reloads"}
    assert {check["name"] for check in data["checks"]} == names
    assert data["epochs"] == pytest.approx(3 * 16 / 23, abs=1e-3)
    warned = {warning["code"]: warning["message"] for warning in local.answer["warnings"]}
    assert warned["epochs"].startswith("3 steps are 2.1 epochs of the 23 rows")
    assert data["data"]["train_rows"] == 23 and data["figures"]["tokens_per_second"] > 0
    assert (run / "adapter" / "adapter_model.safetensors").is_file() and (run / "train.json").is_file()
    assert local.answer["next"] == [f"skill-train export-gguf {run}"]
    assert "dtype: " in local.stderr and "loss " in local.stderr


def test_everyone_may_read_the_weights_who_may_read_the_plan(chain: Chain) -> None:
    """The run of a container's root was the user's to read, but for its adapter."""
    expected = (chain.run / "plan.json").stat().st_mode
    assert {str(path): oct(path.stat().st_mode) for path in chain.run.rglob("*") if path.is_file()} == {
        str(path): oct(expected) for path in chain.run.rglob("*") if path.is_file()
    }


def test_no_card_of_a_library_lies_in_a_run(chain: Chain) -> None:
    """TRL wrote a draft beside the checkpoints, PEFT a page of empty headings into each."""
    assert list(chain.run.rglob("checkpoint-*/trainer_state.json"))
    assert not list(chain.run.rglob("README.md"))


def test_the_second_call_and_the_recipe_that_was_written_find_the_run_done(chain: Chain) -> None:
    first, again, from_file = (chain.answers[name].data for name in ("local", "again", "from its file"))
    assert (again["reused"], from_file["reused"]) == (True, True)
    assert first["recipe_hash"] == again["recipe_hash"] == from_file["recipe_hash"]
    assert again["figures"] == first["figures"]


def test_an_export_lists_its_files(chain: Chain) -> None:
    run, data = chain.run, chain.answers["export-gguf"].data
    files = data["files"]
    assert all(set(file) >= {"path", "bytes", "sha256", "quant"} for file in files)
    assert {file["quant"] for file in files} >= {"q8_0", "q4_k_m"}
    for file in files:
        assert Path(file["path"]).parent == run / "gguf"
        assert Path(file["path"]).stat().st_size == file["bytes"]
        assert Path(file["path"]).read_bytes()[:4] == b"GGUF"
    last = f"FROM ./{next(Path(file['path']).name for file in files if file['quant'] == 'q4_k_m')}"
    reason = {"rule": last, "because": "the last of the types that were asked for", "source": "--quant"}
    assert data["modelfile_reasons"][0] == reason
    assert (run / "gguf" / "Modelfile").read_text().splitlines().count(last) == 1


def test_the_proof_passes(chain: Chain) -> None:
    done = chain.answers["verify"]
    assert done.data["verdict"] in ("pass", "warn")
    wanted = {"name", "file", "figure", "threshold", "verdict"}
    assert done.data["checks"] and all(set(check) >= wanted for check in done.data["checks"])
    assert not [check for check in done.data["checks"] if check["verdict"] == "fail"]
    assert done.answer["next"] == [f"skill-train {step} {chain.run}" for step in ("evaluate", "report")]


@pytest.mark.slow
def test_a_proof_in_another_place_knows_what_the_run_recorded(tmp_path: Path) -> None:
    """A key that nothing but its digest tells: a file that was changed after the export."""
    run = RunDir(Path(shutil.copytree(shared_runs.chain().run, tmp_path / "run")))
    file = next(path for path in run.exported if path.name.endswith("-q8_0.gguf"))
    written = file.read_bytes()
    key = b"general.name"
    at = written.index(key) + len(key) + 4 + 8  # its type, its length
    file.write_bytes(written[:at] + bytes([written[at] ^ 1]) + written[at + 1 :])
    code, answer = answered("verify", run.path, "--out", tmp_path / "proof.json", "--tokens", 64)
    failed = [(check["name"], check["file"]) for check in answer["data"]["checks"] if check["verdict"] == "fail"]
    assert (code, failed) == (6, [("digest", file.name)])


@pytest.mark.slow
def test_a_plan_that_was_deleted_is_made_again_by_the_hint(tmp_path: Path) -> None:
    """And is the plan of the run again: its proof stands."""
    run = RunDir(Path(shutil.copytree(shared_runs.chain().run, tmp_path / "my run")))
    run.plan.unlink()
    again = ("local", run.recipe, "--run-dir", run.path)
    refused = [
        answered(*words) for words in (("verify", run.path), ("local", "--resume", "--run-dir", run.path), again)
    ]
    (hint,) = {answer["error"]["hint"] for _, answer in refused}
    assert [code for code, _ in refused] == [2, 2, 2] and answered(*shlex.split(hint)[1:])[0] == 0
    for words in (("verify", run.path), ("local", "--resume", "--run-dir", run.path), again):
        code, answer = answered(*words)
        assert (code, answer["data"]["reused"]) == (0, True)


@pytest.mark.slow
def test_a_file_of_a_model_folder_is_known_by_the_records_beside_it(tmp_path: Path) -> None:
    """Wherever the proof goes. The other reference has the same weights in another file: what measures passes."""
    model, other = (Path(shutil.copytree(tiny.cached("gemma"), tmp_path / name)) for name in ("model", "other"))
    save_file(load_file(other / "model.safetensors"), other / "model.safetensors", {"format": "pt", "saved": "again"})
    assert answered("export-gguf", model, "--out", tmp_path / "gguf", "--quant", "f16,q8_0")[0] == 0
    (tmp_path / "convert.json").write_text("[]")  # not ours: the folder around a model is no run

    def digests(reference: Path) -> tuple[int, list[str]]:
        files = [word for kind in ("f16", "q8_0") for word in ("--gguf", tmp_path / "gguf" / f"model-{kind}.gguf")]
        words = (*files, "--out", tmp_path / "away" / "proof.json", "--tokens", 64)
        (tmp_path / "away").mkdir(exist_ok=True)
        code, answer = answered("verify", "--reference", reference, *words)
        found = [check for check in answer["data"]["checks"] if check["verdict"] != "pass"]
        assert {check["name"] for check in found} <= {"digest"}, found
        return code, [check["detail"] for check in found]

    assert digests(model) == (0, [])
    made_of = "the file that was exported, and its record says that it was made of another model than the reference"
    assert digests(other) == (0, [made_of] * 2)
    file = tmp_path / "gguf" / "model-q8_0.gguf"
    written = file.read_bytes()
    at = written.index(b"general.name") + len(b"general.name") + 4 + 8  # its type, its length
    file.write_bytes(written[:at] + bytes([written[at] ^ 1]) + written[at + 1 :])
    assert digests(model) == (6, ["the file changed after it was exported"])


@pytest.mark.slow
@pytest.mark.parametrize("recorded", [True, False])
def test_a_file_of_another_run_is_not_said_to_hold_this_runs_adapter(tmp_path: Path, recorded: bool) -> None:
    """Under the name of an exported file, and beside those. Nothing of this run's adapter is in it."""
    run = RunDir(Path(shutil.copytree(shared_runs.chain().run, tmp_path / "run")))
    own = next(path for path in run.exported if path.name.endswith("-q8_0.gguf"))
    file = own if recorded else own.with_name("other-q8_0.gguf")
    shutil.copyfile(gguf_maker.exported("gemma").file("q8_0"), file)
    code, answer = answered("verify", run.path, "--tokens", 64)
    detail = next(c["detail"] for c in answer["data"]["checks"] if (c["name"], c["file"]) == ("tuned", file.name))
    why = "the file changed after it was exported" if recorded else "no export record names this file or has its bytes"
    assert code == 6 and detail.startswith(f"{why}, and may hold another tuning; if it is this one: "), detail


@pytest.mark.slow
def test_a_file_from_elsewhere_is_held_against_the_records_of_a_run(tmp_path: Path) -> None:
    """A changed bit of a weight lies within every bound, so the figures alone do not tell the file of a run."""
    run = shared_runs.chain().run
    own = next(path for path in RunDir(run).exported if path.name.endswith("-q8_0.gguf"))
    sent, changed = tmp_path / "sent.gguf", tmp_path / "changed.gguf"
    shutil.copyfile(own, sent)
    written = bytearray(own.read_bytes())
    [up] = [tensor for tensor in GGUFReader(own).tensors if tensor.name == "blk.0.ffn_up.weight"]
    written[up.data_offset + 40] ^= 1  # one of 127 steps of one weight
    changed.write_bytes(written)
    before = (run / "verify.json").read_bytes()
    for question in ([run], ["--reference", run / "merged"]):
        code, answer = answered("verify", *question, "--gguf", sent, "--gguf", changed, "--tokens", 64)
        verdicts = {c["file"]: c["verdict"] for c in answer["data"]["checks"] if c["name"] == "digest"}
        assert (code, answer["data"]["verdict"]) == (0, "warn"), answer
        assert verdicts == {"sent.gguf": "pass", "changed.gguf": "warn"}
        (tmp_path / "verify.json").unlink()
    assert (run / "verify.json").read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["held_out", "samples"])
def test_a_proof_misses_rows_that_are_gone(tmp_path: Path, name: str) -> None:
    """The file was cut at the end of a row: each row that is left can be read."""
    whole = shared_runs.chain().run
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    lines = (run / f"{name}.jsonl").read_text().splitlines(keepends=True)
    (run / f"{name}.jsonl").write_text("".join(lines[:-1]))
    training = json.loads((run / "train.json").read_text())
    if training["outputs"].pop(f"{name}.jsonl", None):
        assert answered("verify", run, "--tokens", 64)[1]["error"]["code"] == "output_changed"
        (run / "train.json").write_text(json.dumps(training))  # as an earlier version wrote it
    code, answer = answered("verify", run, "--tokens", 64)
    assert (code, answer["error"]["code"], answer["error"]["got"]) == (2, "broken_record", f"{len(lines) - 1} rows")
    assert f"{name}.jsonl has {len(lines) - 1} of the {len(lines)} rows" in answer["error"]["message"]
    answer = answered("diff", run, whole)[1]
    told = f"samples: run A has {len(lines) - 1} rows, run B {len(lines)}" in answer["data"]["not_compared"]
    assert told is (name == "samples") and answer["ok"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["f16", "q4_k_m"])
def test_a_file_that_was_replaced_is_not_measured(tmp_path: Path, kind: str) -> None:
    """`report` told its figures from those of the export, and its words led back to `evaluate`, which had them
    already."""
    run = RunDir(Path(shutil.copytree(shared_runs.chain().run, tmp_path / "my run")))
    file = next(path for path in run.exported if path.name.endswith(f"-{kind}.gguf"))
    written = file.read_bytes()
    at = written.index(b"general.name") + 12 + 4 + 8  # its type, its length
    file.write_bytes(written[:at] + bytes([written[at] ^ 1]) + written[at + 1 :])
    for named in ([], ["--gguf", file]):
        code, answer = answered("evaluate", run.path, "--rows", 2, *named)
        assert (code, answer["error"]["code"]) == (2, "output_changed") and str(file) in answer["error"]["message"]
    moved, again = answer["error"]["hint"].split(" away and make it again: skill-train ")
    assert moved == f"move {shlex.quote(str(file))}"
    elsewhere = file.rename(tmp_path / file.name)
    assert answered("evaluate", run.path, "--rows", 2, "--gguf", elsewhere)[0] == 0  # a file of the user's
    assert answered(*shlex.split(again))[0] == 0 and file.read_bytes() == written
    assert answered("evaluate", run.path, "--rows", 2)[0] == 0
    assert answered("report", run.path)[1]["data"]["runs"][0]["missing"] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chat_template.jinja", "adapter_config.json"])
def test_a_file_that_was_put_into_the_merged_model_is_refused(tmp_path: Path, name: str) -> None:
    """Transformers reads it: `evaluate` measured the adapter's copy on top of the merged model."""
    run = RunDir(Path(shutil.copytree(shared_runs.chain().run, tmp_path / "run")))
    (run.merged / name).write_bytes((run.adapter / "adapter_config.json").read_bytes())
    push = ("push", run.path, "--repo", "me/x", "--part", "merged", "--dry-run")
    for command in (("evaluate", run.path, "--rows", 2), push, ("merge", run.path)):
        code, answer = answered(*command)
        assert (code, answer["error"]["code"], answer["error"]["got"]) == (2, "output_changed", name), answer
    code, answer = answered("export-gguf", run.path)
    assert code == 2 and name in answer["error"]["message"] + answer["error"]["got"]


def test_an_adapter_beside_a_model_is_not_that_model(tmp_path: Path) -> None:
    """Transformers loads both, and llama.cpp's converter the model alone."""
    base = Path(shutil.copytree(tiny.cached("gemma"), tmp_path / "base"))
    adapter = tiny.adapter(base, tmp_path / "adapter", targets=["q_proj"])
    for file in adapter.iterdir():
        shutil.copy(file, base)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a b c"}\n' * 4)
    for command in (("plan", "--model", base, "--data", rows), ("export-gguf", base, "--quant", "q8_0")):
        code, answer = answered(*command)
        assert (code, answer["error"]["code"]) == (2, "not_a_model"), answer
        assert "adapter_config.json" in answer["error"]["hint"]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [{"held_out"}, {"samples"}, {"held_out", "samples"}], ids=len)
def test_a_proof_without_the_rows_of_its_run_does_not_pass(tmp_path: Path, lost: set[str]) -> None:
    """Nothing of a file that is gone could be compared, and the proof is read without the warnings."""
    run = RunDir(Path(shutil.copytree(shared_runs.chain().run, tmp_path / "run")))
    for name in lost:
        (run.path / f"{name}.jsonl").unlink()
    code, answer = answered("verify", run.path, "--tokens", 64)
    unjudged = {c["file"]: c["detail"] for c in answer["data"]["checks"] if c["verdict"] == "warn"}
    assert (code, answer["data"]["verdict"]) == (0, "warn")
    assert unjudged.keys() >= {f"{name}.jsonl" for name in lost}
    assert str(tmp_path) not in str(unjudged)  # `push` publishes it
    told = [warning["message"] for warning in answer["warnings"] if warning["code"] == "missing_file"]
    assert len(told) == len(lost) and all("does not exist: put the file back" in each for each in told)
    assert ("--max-steps 1" in str(told)) is ("held_out" in lost)
    again = answered("verify", run.path, "--tokens", 64)[1]
    assert (again["data"]["verdict"], again["data"]["reused"]) == ("warn", True) and len(again["warnings"]) >= len(told)
    record = json.loads(run.record("train").read_text())
    record["data"]["held_out_rows"] = 0  # as a recipe with held_out_fraction: 0 leaves it
    run.record("train").write_text(json.dumps(record))
    run.held_out.touch()
    answer = answered("verify", run.path, "--tokens", 64)[1]
    files = {c["file"] for c in answer["data"]["checks"]}
    assert ("evaluate" in str(answer["next"])) is ("held_out" not in lost)
    assert "held_out.jsonl" not in files and ("samples.jsonl" in files) is ("samples" in lost)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "edited", "told"),
    [
        ("FROM ", "FROM ./other.gguf", ("exported: FROM names ./other.gguf, which is not a file of this run;",)),
        ("FROM ", "from {gguf}/../gguf/run-f16.gguf", ()),
        ("FROM ", "", ("exported: it lacks FROM;",)),
        ("PARAMETER temperature ", "parameter temperature 0", ()),
        ("PARAMETER stop ", "FROM llama3", ("it has FROM llama3",)),
        ("PARAMETER stop ", "", ('it lacks PARAMETER stop "<end_of_turn>"',)),
        ("# ", "# a word of the user's", ()),
        ("PARAMETER repeat_penalty ", "TEMPLATE {{ .Prompt }}", ("it has TEMPLATE {{ .Prompt }}",)),
    ],
)
def test_a_modelfile_that_was_edited_is_told(tmp_path: Path, line: str, edited: str, told: tuple[str, ...]) -> None:
    """Ollama would run the model in another way than it was judged."""
    run = RunDir(Path(shutil.copytree(shared_runs.chain().run, tmp_path / "run")))
    file = run.gguf / "Modelfile"
    lines = file.read_text().splitlines()
    at = next(number for number, each in enumerate(lines) if each.startswith(line))
    file.write_text("\n".join([*lines[:at], edited.replace("{gguf}", str(run.gguf)), *lines[at + 1 :]]))
    code, answer = answered("verify", run.path)
    said = [warning["message"] for warning in answer["warnings"] if warning["code"] == "modelfile_edited"]
    assert code == 0 and len(said) == bool(told) and all(words in said[0] for words in told), answer["warnings"]
    assert not any("it lacks FROM ." in words for words in said)


@pytest.mark.slow
@pytest.mark.parametrize("loops", [False, True])
def test_a_modelfile_of_a_file_that_is_gone_was_not_edited(tmp_path: Path, loops: bool) -> None:
    run = RunDir(Path(shutil.copytree(shared_runs.chain().run, tmp_path / "run")))
    named = run.gguf / str(model_of(run.gguf / "Modelfile"))
    named.unlink()
    if loops:  # Python's own `resolve` raises, behind the proof
        named.symlink_to(named.name)
    _, answer = answered("verify", run.path, "--tokens", 64)
    assert "modelfile_edited" not in [warning["code"] for warning in answer["warnings"]]
    said = [each["message"] for each in answer["warnings"] if each["message"].startswith(str(run.gguf / "Modelfile"))]
    again = f"skill-train export-gguf {run.path} writes it again"
    assert said == [f"{run.gguf / 'Modelfile'} names {named.name}, which is gone; {again}"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer.json"])
def test_a_broken_merged_model_hides_no_verdict(tmp_path: Path, name: str) -> None:
    """The proof does not read it. It was written and `verify` ended with exit 2, without the verdict."""
    run = RunDir(Path(shutil.copytree(shared_runs.chain().run, tmp_path / "run")))
    whole = answered("verify", run.path)[1]["data"]
    (run.merged / name).write_bytes((run.merged / name).read_bytes()[:99])
    code, answer = answered("verify", run.path)
    assert code == 0 and answer["data"] == whole, answer
    (told,) = [each["message"] for each in answer["warnings"] if each["code"] == "not_compared"]
    assert told.startswith(f"{run.gguf / 'Modelfile'} was not compared") and str(run.merged) in told


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("cut", [99, None])
def test_a_broken_merged_model_is_made_again(tmp_path: Path, name: str, cut: int | None) -> None:
    """`export-gguf` said to download a file that the merge writes, and there was no way on."""
    run = RunDir(Path(shutil.copytree(shared_runs.chain().run, tmp_path / "run")))
    file = run.merged / name
    whole = file.read_bytes()
    file.write_bytes(whole[:cut]) if cut else file.unlink()
    error = answered("export-gguf", run.path)[1]["error"]
    assert error["code"] == "output_changed" and str(file) in error["message"]
    assert error["hint"].startswith(f"move {run.record('merge')} and what it made away, and run the step again")
    run.record("merge").rename(tmp_path / "merge.json")
    run.merged.rename(tmp_path / "merged")
    assert answered("export-gguf", run.path)[0] == 0 and file.read_bytes() == whole


@pytest.mark.slow
def test_rows_that_trained_are_not_measured_as_held_out(tmp_path: Path) -> None:
    """Rows of another run, or a file that somebody made: the model may have learned them by heart."""
    run = Path(shutil.copytree(shared_runs.chain().run, tmp_path / "run"))
    shutil.copyfile(run / "samples.jsonl", run / "held_out.jsonl")
    for command in (["verify", run, "--tokens", 64], ["evaluate", run, "--rows", 2]):
        code, answer = answered(*command)
        assert (code, answer["error"]["code"]) == (2, "broken_record")
        assert "other rows than were held out" in answer["error"]["message"]


@pytest.mark.slow
def test_held_out_rows_whose_text_was_edited_are_not_measured(tmp_path: Path) -> None:
    """Their token ids are those that the trainer recorded."""
    run = Path(shutil.copytree(shared_runs.chain().run, tmp_path / "run"))
    rows = [json.loads(line) for line in (run / "held_out.jsonl").read_text(encoding="utf-8").splitlines()]
    rows[0]["messages"][-1]["content"] += " Not so."
    (run / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for command in (["verify", run, "--tokens", 64], ["evaluate", run, "--rows", 2]):
        code, answer = answered(*command)
        assert (code, answer["error"]["code"]) == (2, "broken_record")
        assert "was changed after the training" in answer["error"]["message"]


@pytest.mark.slow
def test_held_out_rows_and_their_digests_of_another_run_are_not_measured(tmp_path: Path) -> None:
    """The digests are in `environment.json`, which no record described."""
    run = Path(shutil.copytree(shared_runs.chain().run, tmp_path / "run"))
    rows = [json.loads(line) for line in (run / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    held_out = rows[: len((run / "held_out.jsonl").read_text(encoding="utf-8").splitlines())]  # they were trained on
    (run / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out), encoding="utf-8")
    environment = json.loads((run / "environment.json").read_text())
    environment["data"]["held_out_sha256"] = fed_digest(held_out)
    environment["data"]["held_out_file_sha256"] = file_digest(run / "held_out.jsonl")["sha256"]
    (run / "environment.json").write_text(json.dumps(environment))
    for command in (["verify", run, "--tokens", 64], ["evaluate", run, "--rows", 2], ["merge", run]):
        code, answer = answered(*command)
        assert (code, answer["error"]["code"]) == (2, "output_changed"), answer
        assert f"{run / 'environment.json'} is not the file that train.json describes" == answer["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("content", [None, "{}\n", "{\n", '{"row": 1}'], ids=["gone", "no row", "torn", "half a row"])
def test_held_out_rows_come_back_as_the_hint_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    """A finished training writes them no more: `local` on the same run says that all is done."""
    monkeypatch.chdir(tmp_path)
    run = Path(shutil.copytree(shared_runs.chain().run, "my run"))
    kept = (run / "held_out.jsonl").read_bytes()
    (run / "held_out.jsonl").unlink()
    if content is not None:
        (run / "held_out.jsonl").write_text(content)
    code, answer = answered("evaluate", run, "--rows", 2)
    assert (code, answer["error"]["code"]) == (2, "broken_record")
    whole = r"put the file back, or the one that a run of the same rows writes: skill-train (.*); if a job .* 'my run'"
    command = re.fullmatch(whole, answer["error"]["hint"])
    assert command is not None, answer["error"]["hint"]
    assert command[1] == "local 'my run/recipe.yaml' --max-steps 1 --run-dir 'my run-2'"
    if content is None:
        assert answered(*shlex.split(command[1]))[0] == 0
        assert Path("my run-2/held_out.jsonl").read_bytes() == kept


@pytest.mark.slow
def test_a_split_that_nobody_can_tell_from_another_is_not_made_again(tmp_path: Path) -> None:
    """An earlier version recorded no digest of the rows, and may have held out others."""
    run = Path(shutil.copytree(shared_runs.chain().run, tmp_path / "run"))
    environment = json.loads((run / "environment.json").read_text())
    del environment["data"]["held_out_sha256"]
    step_records.put_environment(run, environment)
    (run / "held_out.jsonl").unlink()
    hint = answered("evaluate", run)[1]["error"]["hint"]
    assert hint == f"put the file back; if a job trained the run: skill-train pull {run}"


@pytest.mark.slow
def test_a_proof_that_was_emptied_is_made_again_as_its_hint_says(tmp_path: Path) -> None:
    run = Path(shutil.copytree(shared_runs.chain().run, tmp_path / "run"))
    (run / "verify.json").write_bytes(b"")
    code, answer = answered("verify", run, "--tokens", 64)
    assert (code, answer["error"]["code"]) == (2, "broken_record")
    assert answer["error"]["hint"].startswith("move it away, then run the step that writes it")
    (run / "verify.json").rename(tmp_path / "away")
    assert answered("verify", run, "--tokens", 64)[0] == 0


def _no_json(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")
