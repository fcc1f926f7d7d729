"""What hostile input has found: each input here ended in a traceback, in a hang or outside of the run once."""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

import hostile
import hostile_records
import planning
import step_records
import whole_records
from hostile import command, judged
from hostile_files import LAUGHS, ROOT, _archive, _gguf
from skill_train.cloud import bucket as kept
from skill_train.cloud.failure_reason import Ending, exit_code, explain
from skill_train.core.errors import NotInstalled, SkillTrainError, UsageError
from skill_train.core.files import write_json
from skill_train.core.resources import template
from skill_train.data import scan as dataset
from skill_train.gguf import ollama_modelfile
from skill_train.hub import flavors
from skill_train.hub.rows import first_rows
from skill_train.llama import get_converter, gguf_header, run_converter
from skill_train.model import adapter, sidecar_files
from skill_train.model import template_guard_worker as template_trial
from skill_train.program.encode import limited
from skill_train.program.rows import CELL_CHARACTERS
from skill_train.publish.files import files_of
from skill_train.publish.model_card import CardFacts, card
from skill_train.recipe import fields as recipe
from skill_train.report import step as report
from skill_train.run import earlier_start, plan_record, records, verify_record
from skill_train.run import lock as run_lock
from skill_train.run.folder import RunDir
from skill_train.run.job_spec import dependencies
from skill_train.run.progress import speed
from skill_train.run.records import read_json
from skill_train.run.train_record import read_steps
from skill_train.run.verify_record import Proof
from skill_train.train import measured_speed as calibration

pytestmark = pytest.mark.slow


def refused(call: Any, *arguments: Any, **named: Any) -> SkillTrainError:
    with pytest.raises(SkillTrainError) as caught:
        call(*arguments, **named)
    assert len(caught.value.message) + len(caught.value.got) < 2000
    return caught.value


# --- recipes ---


@pytest.mark.parametrize(
    "content",
    [
        "[" * 1500,
        "- " * 1500,
        "seed: " + "9" * 5000,
        "seed: !!int ''",
        "model: !!timestamp 2026-13-45",
        "learning_rate: 1" + "0" * 400,
        "model: x\x00\ndata: y",
        LAUGHS,
        "# " + "x" * 1_000_000,
    ],
    ids=["deep list", "deep dashes", "digits", "empty int", "month 13", "no float", "null", "laughs", "large"],
)
def test_a_recipe_that_the_reader_of_yaml_breaks_on(content: str, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(content)
    with hostile.limits(5):
        assert refused(recipe.load, path).code == "bad_recipe"


def test_a_recipe_with_half_a_surrogate_pair_has_a_hash_and_a_file(tmp_path: Path) -> None:
    assert len(recipe.recipe_hash({"model": "\ud800"}, {})) == 64
    write_json(tmp_path / "x.json", {"model": "\ud800", "ok": "ä"})
    assert read_json(tmp_path / "x.json") == {"model": "\ud800", "ok": "ä"}


# --- records ---


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b"9" * 5000, b"\xff", b""], ids=["deep", "digits", "no text", "empty"]
)
def test_a_record_that_is_no_json(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    path.write_bytes(content)
    assert refused(read_json, path).code == "broken_record"
    path.with_suffix(".jsonl").write_bytes(content + b'\n{"step": 1, "steps": 2}\n')
    assert judged(lambda: read_steps(path.with_suffix(".jsonl")), tmp_path) in ("broken_record", "done")


def test_a_record_of_a_gigabyte_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "train.json", "wb") as file:
        file.truncate(1 << 30)
    assert "too large" in refused(read_json, tmp_path / "train.json").message


@pytest.mark.parametrize("name", ["train.json", "flavors.json", "cloud.json"])
def test_a_record_that_is_a_pipe_or_a_device_is_refused_at_once(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    (tmp_path / "device.json").symlink_to("/dev/zero")
    with hostile.limits(5):
        assert refused(read_json, tmp_path / name).code == "broken_record"
        assert refused(read_json, tmp_path / "device.json").code == "broken_record"
        assert run_lock.is_locked(RunDir(tmp_path)) is False
        os.mkfifo(tmp_path / ".lock")
        assert run_lock.is_locked(RunDir(tmp_path)) is False


def test_a_line_without_an_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    with open(tmp_path / "metrics.jsonl", "wb") as file:
        file.truncate(10**12)
    with hostile.limits(5):
        assert refused(read_steps, tmp_path / "metrics.jsonl").code == "broken_record"


def test_a_file_of_another_size_than_its_record_says_is_not_read(tmp_path: Path) -> None:
    """A terabyte of nothing, which takes no room and an hour to hash."""
    run = hostile_records.make_run(tmp_path)
    with open(run / "adapter" / "adapter_model.safetensors", "r+b") as file:
        file.truncate(10**12)
    with hostile.limits(5):
        assert refused(earlier_start.trained, RunDir(run)).code == "output_changed"


@pytest.mark.parametrize(
    "content", ["5", "[" * 100_000, '{"flavors": [5], "asked": 1}', '{"shapes": 5}', '{"a": 1e999}']
)
def test_a_cache_of_another_shape_is_none(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKILL_TRAIN_CACHE", str(tmp_path))
    flavors._keep(flavors.shipped(), flavors.endpoint())
    [kept] = tmp_path.glob("flavors-*.json")
    kept.write_text(content)
    (tmp_path / get_converter.MANIFEST).write_text(content)
    assert flavors.current(live=False)[0] == flavors.shipped()
    assert calibration._read(kept) == {} and get_converter.is_whole(tmp_path) is False


def test_a_price_that_is_no_number_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKILL_TRAIN_CACHE", str(tmp_path))
    flavors._keep((msgspec.structs.replace(flavors.shipped()[0], usd_per_hour="free"),), flavors.endpoint())  # type: ignore[arg-type]
    assert flavors.current(live=False)[0] == flavors.shipped()


def test_a_key_that_is_missing_is_named_with_its_file(tmp_path: Path) -> None:
    document = planning.plan_document()
    del document["recipe"]["model"]
    write_json(tmp_path / "plan.json", document)
    error = refused(lambda: plan_record.read(tmp_path / "plan.json"))
    assert error.code == "broken_record" and "plan.json" in error.message
    assert error.got == "Object missing required field `model` - at `$.recipe`"


@pytest.mark.parametrize(
    ("name", "change", "got"),
    [
        ("train.json", {"outputs": {"/etc/passwd": {"bytes": 1, "sha256": ""}}}, "outside of the run directory"),
        ("train.json", {"outputs": {"adapter/../../x": {"bytes": 1, "sha256": ""}}}, "outside of the run directory"),
        ("train.json", {"outputs": {"adapter/x": {"bytes": 1}}}, "missing required field `sha256`"),
        ("train.json", {"checks": [{"name": "x", "verdict": "fine"}]}, "Invalid enum value 'fine' - at `$.checks[0]"),
        ("train.json", {"steps": 10**400}, "at `$.steps`"),
        ("train.json", {"schema": "skill-train/step/2"}, "skill-train/step/2"),
        ("train.json", {"figures": {"last_loss": float("nan")}}, "at `$.figures.last_loss`"),
        ("environment.json", {"versions": {"torch": 1}}, "at `$.versions[...]`"),
        ("merge.json", {"inputs": {"base": {}}}, "missing required field `adapter`"),
        ("convert.json", {"outputs": {"a": {"bytes": 1, "sha256": "x"}}}, "missing required field `quant`"),
    ],
)
def test_a_record_of_another_kind(name: str, change: dict[str, Any], got: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(json.dumps(hostile_records.documents()[name] | change))
    error = refused(lambda: records.read(tmp_path / name, hostile_records.CLASSES[name]))
    assert error.code == "broken_record" and got in error.got


_INFINITE = {"name": "logits", "file": "x.gguf", "verdict": "pass", "figure": 0, "threshold": 0, "detail": ""}
_INFINITE |= {"figures": {"limits": {"ratio": [0.1, float("inf")]}}}


@pytest.mark.parametrize(
    ("change", "got"),
    [
        ({"checks": [5]}, "`$.checks[0]`"),
        ({"checks": None}, "`$.checks`"),
        ({"checks": [_INFINITE]}, "is not a number that a step writes"),
        ({"verdict": "fine"}, "Invalid enum value 'fine'"),
        ({"schema": "skill-train/step/2"}, "Invalid enum value 'skill-train/step/2'"),
        ({"samples": {"tokens": 10**400}}, "`$.samples[...]`"),
        ({"seconds": float("nan")}, "`$.seconds`"),
        ({"inputs": {"ggufs": {"/etc/passwd": {"bytes": 1, "sha256": ""}}}}, "`$.inputs.ggufs`"),
        ({"inputs": {"ggufs": {"a\n/../../x": {"bytes": 1, "sha256": ""}}}}, "`$.inputs.ggufs`"),
        ({"inputs": {"ggufs": {"x.gguf": {"bytes": 1}}}}, "missing required field `sha256`"),
        ({"not_checked": [{"name": "\ud800", "file": "x"}]}, "`$.not_checked[0]`"),
    ],
)
def test_a_proof_of_another_kind(change: dict[str, Any], got: str, tmp_path: Path) -> None:
    document = whole_records.proof() | change
    if "inputs" in change:
        document["inputs"] = whole_records.proof(**change)["inputs"]
    (tmp_path / "verify.json").write_text(json.dumps(document))
    error = refused(verify_record.read, tmp_path / "verify.json")
    assert error.code == "broken_record" and got in error.got


def test_a_proof_without_a_verdict_is_none(tmp_path: Path) -> None:
    document = whole_records.proof()
    for key in ("verdict", "checks", "not_checked"):
        write_json(tmp_path / "verify.json", {name: value for name, value in document.items() if name != key})
        assert refused(verify_record.read, tmp_path / "verify.json").got == f"Object missing required field `{key}`"


@pytest.mark.parametrize(
    ("change", "got"),
    [
        ({"recipe": None}, "$.recipe"),
        ({"schema": "skill-train/plan/2"}, "skill-train/plan/2"),
        ({"recipe": {"max_steps": 10**400}}, "a huge number"),
        ({"recipe": {"\ud800": "x"}}, "surrogates not allowed"),
        ({"timeout_seconds": float("nan")}, "at `$.timeout_seconds`"),
        ({"recipe": {"model": ["x"]}}, "got `array` - at `$.recipe.model`"),
        ({"launch": {"arguments": ["--module", "evil"], "environment": {}}}, "starts something else"),
        ({"launch": {"arguments": ["evil.py"], "environment": {}}}, "starts something else"),
        ({"launch": {"arguments": [], "environment": {"LD_PRELOAD": "x"}}}, "LD_PRELOAD"),
        # Each of these loads a library, writes a file, reads settings, or speaks to another host.
        *(
            ({"launch": {"arguments": [], "environment": {name: "x.so"}}}, name)
            for name in (
                "NCCL_NET_PLUGIN",
                "NCCL_TUNER_PLUGIN",
                "NCCL_PROFILER_PLUGIN",
                "NCCL_CONF_FILE",
                "NCCL_TOPO_FILE",
                "NCCL_DEBUG_FILE",
                "NCCL_COMM_ID",
                "OMP_TOOL_LIBRARIES",
                "PET_LOG_DIR",
                "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
                "GLOO_DEVICE_TRANSPORT",
                "ACCELERATE_USE_FSDP",
                "PET_RDZV_ENDPOINT",
                "PATH",
                "PYTHONPATH",
                "nccl_debug",
            )
        ),
        ({"launch": {"arguments": [], "environment": {"NCCL_DEBUG": "x.so"}}}, "NCCL_DEBUG"),
        ({"launch": {"arguments": [], "environment": {"NCCL_ALGO": "Ring\n"}}}, "NCCL_ALGO"),
    ],
)
def test_a_plan_of_another_kind(change: dict[str, Any], got: str, tmp_path: Path) -> None:
    document = planning.plan_document() | change
    if isinstance(change.get("recipe"), dict):
        document["recipe"] = planning.plan_document()["recipe"] | change["recipe"]
    (tmp_path / "plan.json").write_text(json.dumps(document))
    error = refused(plan_record.read, tmp_path / "plan.json")
    assert error.code == "broken_record" and got in error.got


@pytest.mark.parametrize("name", ["report", "diff", "push", "verify", "evaluate", "merge", "status"])
@pytest.mark.parametrize(
    "change", [{"outputs": {str(hostile.CANARY): {"bytes": 2, "sha256": "0" * 64}}}, {"outputs": 5, "data": None}]
)
def test_no_command_reads_outside_of_the_run_for_a_record(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    run = hostile_records.make_run(tmp_path)
    write_json(run / "train.json", json.loads((run / "train.json").read_text()) | change)
    more = {"diff": [str(run)], "push": ["--repo", "me/x", "--dry-run"]}.get(name, [])
    assert command([name, str(run), *more, "--format", "json"], tmp_path) in ((2, 0) if name == "status" else (2,))


def test_a_modelfile_that_is_no_text_is_shown_as_far_as_it_is(tmp_path: Path) -> None:
    run = hostile_records.make_run(tmp_path)
    (run / "gguf" / "Modelfile").write_bytes(b"FROM x\xf5\n")
    assert report.reported_run(RunDir(run), "run").texts["Modelfile"] == "FROM x�\n"


# --- datasets ---


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.parquet", b"PAR1"),
        ("x.parquet", b"PAR1" + b"\0" * 20 + b"PAR1"),
        ("x.jsonl", b'{"a": ' + b"9" * 5000 + b"}"),
        ("x.json", b'{"a": ' + b"9" * 5000 + b"}"),
    ],
)
def test_a_dataset_that_its_reader_breaks_on(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    asked = recipe.from_dict({"model": "m", "data": str(tmp_path / name)})
    assert refused(dataset.scan, asked).code == "unreadable_dataset"


def test_a_cell_of_a_table_on_the_hub_that_is_too_long() -> None:
    cell = b"x" * (CELL_CHARACTERS + 1)
    assert refused(first_rows.numbered, b"a,b\n" + cell + b",y\n", "x.csv", whole=True).code == "unreadable_dataset"


# --- models and adapters ---


@pytest.mark.parametrize(
    ("name", "document"),
    [
        ("tokenizer.json", {"added_tokens": ["x", {"id": {}, "content": []}]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"-0.0": {"content": "x"}, "y": 5}, "chat_template": "a"}),
        ("tokenizer_config.json", {"added_tokens_decoder": [5], "eos_token": ["x"]}),
    ],
)
def test_tokenizer_files_of_another_shape(name: str, document: Any, tmp_path: Path) -> None:
    for folder in ("base", "adapter", "part"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tokenizer_config.json").write_text("{}")
        (tmp_path / folder / name).write_text(json.dumps(document))
    sidecar_files.copy_companions(tmp_path / "base", tmp_path / "adapter", tmp_path / "part", lambda code, said: None)


def test_a_config_with_infinity_is_written_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": Infinity, "b": "\\ud800", "vocab_size": 1}')
    (tmp_path / "part").mkdir()
    sidecar_files.write_config(tmp_path, tmp_path / "part", {"vocab_size": 2}, None)
    there = json.loads((tmp_path / "part" / "config.json").read_text())
    assert there == {"a": float("inf"), "b": "\ud800", "vocab_size": 2}


def test_a_template_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"{{ messages }}\xe4")
    assert refused(sidecar_files.chat_template, tmp_path).code == "broken_model"


@pytest.mark.parametrize(
    "content", ["5", '{"model": []}', '{"model": {"type": "BPE", "byte_fallback": 1}, "normalizer": 5}']
)
def test_a_tokenizer_of_another_shape_is_left_to_the_converter(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    assert set(run_converter._prefix_of(tmp_path / "tokenizer.json", tmp_path / "tokenizer.model").values()) <= {False}


def test_a_gguf_file_that_is_cut_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A memory map of it ended the process."""
    path, parse = tmp_path / "x.gguf", gguf_header._parse
    path.write_bytes(_gguf())

    def cut(*arguments: Any) -> Any:
        os.truncate(path, 0)
        return parse(*arguments)

    monkeypatch.setattr(gguf_header, "_parse", cut)
    assert refused(gguf_header.read_gguf, path).code == "bad_gguf"


def test_a_pattern_of_an_adapter_that_takes_for_ever() -> None:
    with hostile.limits(8):
        error = refused(adapter.pattern_value, {"(a+)+b": 4}, "model." + "a" * 40, 8)
    assert error.code == "bad_adapter"


@pytest.mark.parametrize(
    "text",
    [
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10**10 }}",
    ],
    ids=["endless", "large"],
)
def test_a_chat_template_that_does_not_end_is_refused_before_it_is_used(text: str) -> None:
    with hostile.limits(60):
        assert refused(template_trial.require_ending, text).code == "unsafe_file"


def test_a_chat_template_runs_in_a_sandbox(tmp_path: Path) -> None:
    """Four escapes of plain jinja2, a number computed while it compiles, and what real templates use."""
    paths = "().__class__.__base__.__subclasses__()", "cycler.__init__.__globals__.os", "lipsum.__globals__['os']"
    texts = [f"{{{{ {path}.popen('touch {tmp_path}/canary') }}}}" for path in (*paths, "messages.append.__self__")]
    texts += ["{{ 10**10**9 }}", "{{ bos_token }}{% generation %}{{ strftime_now('%d') }}{% endgeneration %}"]
    template_trial.require_ending({str(number): text for number, text in enumerate(texts)})
    assert not (tmp_path / "canary").exists()


def test_a_template_that_hangs_on_one_row_is_a_refusal_of_that_row() -> None:
    started = time.monotonic()
    with pytest.raises(TimeoutError), limited(0.2):
        while True:
            pass
    assert time.monotonic() - started < 5


# --- archives, links, the card ---


@pytest.mark.parametrize("name", ["a" * 300 + ".py", "x\x1b[2J.py", "__init__.py/x.py", "\udcff.py"])
def test_a_name_in_the_archive_that_is_none(name: str, tmp_path: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(_archive(b""))) as source, tarfile.open(fileobj=out, mode="w:gz") as made:
        for member in source:
            made.addfile(member, source.extractfile(member))
        made.addfile(tarfile.TarInfo(f"{ROOT}/conversion/{name}"), io.BytesIO())
    (tmp_path / "a.tar.gz").write_bytes(out.getvalue())
    error = refused(get_converter.unpack, tmp_path / "a.tar.gz", tmp_path / "cache" / "x", version="1")
    assert isinstance(error, NotInstalled) and not (tmp_path / "cache" / "x").exists()


def test_an_archive_whose_bytes_were_changed(tmp_path: Path) -> None:
    content = bytearray(_archive(b""))
    content[60:70] = b"\xff" * 10
    (tmp_path / "a.tar.gz").write_bytes(content)
    assert refused(get_converter.unpack, tmp_path / "a.tar.gz", tmp_path / "x", version="1").code == "no_converter"


def test_a_link_out_of_a_run_is_not_pushed(tmp_path: Path) -> None:
    run, secret = hostile_records.make_run(tmp_path), tmp_path / "secret"
    secret.write_text("x")
    for part, link in (("adapter", run / "adapter" / "notes.txt"), ("gguf", run / "gguf" / "x.gguf")):
        link.symlink_to(secret)
        assert refused(files_of, RunDir(run), (part,), "base").code == "unsafe_link"
        link.unlink()


HOSTILE_NAME = 'x"); import os; os.system("touch canary")\n`| <script>{{ 7 * 7 }} $(id)'


def test_names_in_a_model_card_are_words_of_a_line() -> None:
    check = {
        "file": HOSTILE_NAME,
        "name": "weights",
        "verdict": "pass",
        "figure": 1.0,
        "threshold": 1,
        "detail": "a|b\nc",
    }
    facts = CardFacts(
        repo="me/x", parts=("gguf", "adapter"), base=HOSTILE_NAME, base_on_hub=True, licence=None, licence_reason="r",
        data=HOSTILE_NAME, data_on_hub=True, recipe={"revision": HOSTILE_NAME, "target_modules": [HOSTILE_NAME]},
        recipe_hash="0", training=step_records.trained({}, rows=1),
        proof=msgspec.convert(whole_records.proof(checks=[check]), Proof), ggufs={"a b;$(id).gguf": 1},
    )  # fmt: skip
    page = card(facts, template("model_card.md").read_text(encoding="utf-8"))
    front, body = page.split("---\n", 2)[1:]
    assert yaml.safe_load(front)["base_model"] == HOSTILE_NAME
    before, _, rest = body.partition("```python\n")
    code, _, after = rest.partition("```")
    assert "<script>" not in before + after
    assert json.dumps(HOSTILE_NAME) in code
    compile(code, "card", "exec")
    assert "-hff 'a b;$(id).gguf' -cnv" in body
    assert all(line.count("|") == 5 for line in body.splitlines() if "weights" in line and line.startswith("|"))


def test_the_licence_of_a_base_is_a_word_of_a_line() -> None:
    """The card of a base says any text there."""
    licence = "mit`\n# <script>alert(1)</script> ![x](http://evil/x.png)"
    facts = CardFacts(
        repo="me/x", parts=("adapter",), base="a/b", base_on_hub=True, licence=licence, licence_reason="r",
        data="a/c", data_on_hub=True, recipe={}, recipe_hash="0", training=step_records.trained({}, rows=1),
        proof=None, ggufs={},
    )  # fmt: skip
    page = card(facts, template("model_card.md").read_text(encoding="utf-8"))
    front, body = page.split("---\n", 2)[1:]
    assert yaml.safe_load(front)["license"] == licence
    assert "<script>" not in body and not [line for line in body.splitlines() if line.startswith("# ‹")]
    [line] = [line for line in body.splitlines() if "that of the base" in line]
    assert line.count("`") == 2 and "http://evil/x.png" in line.split("`")[1]


def test_a_file_that_ends_a_line_of_a_modelfile() -> None:
    for name in ("a\rSYSTEM x.gguf", "a\u2028b.gguf", "a\nb.gguf"):
        assert refused(ollama_modelfile.modelfile, gguf=name, parameters=[]).code == "bad_usage"


# --- what a job left ---


def test_a_word_of_a_plan_is_no_package() -> None:
    plan = planning.plan_with(placement={"report_to": "evil-package"})
    assert dependencies(plan) == ()


@pytest.mark.parametrize(
    "error", [{}, {"code": [], "message": "m"}, {"code": "x", "message": 5}, {"message": "m"}, "text", None]
)
def test_a_failure_of_another_shape_is_none(error: Any) -> None:
    line = json.dumps({"event": "failed", "error": error, "exit_code": 5})
    for failure, lines in (({"error": error, "exit_code": 5}, ()), (None, (line,)), ({"error": error}, ("[" * 99999,))):
        assert explain(Ending("ERROR", "exit code: 5", failure=failure, lines=lines), run="r").code == "job_failed"
    assert exit_code("exit code " + "9" * 5000) is None


def test_lines_of_metrics_of_another_shape_are_left_out() -> None:
    good = {"step": 2, "steps": 9, "loss": 1.0, "seconds": 1.0, "memory_bytes": {"rss": 5}}
    bad = [{"memory_bytes": "x"}, {"memory_bytes": {"rss": "x"}}, {"seconds": "1"}, {"step": 10**400}, {"loss": []}]
    lines = [json.dumps(good | change) for change in bad] + ["{" * 90_000, json.dumps(good)]
    found = speed(lines)
    assert found is not None and (found.step, found.memory_bytes) == (2, {"rss": 5})


def test_a_name_in_a_bucket_that_is_the_folder_itself() -> None:
    assert kept.belongs_to_run(".") is False and kept.belongs_to_run("./") is False
    assert isinstance(refused(kept.belongs_to_run, "../x"), SkillTrainError) and UsageError.exit_code == 2


def test_half_a_surrogate_pair_in_a_record_is_pushed_as_a_mark(tmp_path: Path) -> None:
    run = hostile_records.make_run(tmp_path)
    for name in ("plan.json", "verify.json"):
        document = json.loads((run / name).read_text())
        document |= {"recipe": document["recipe"] | {"revision": "\ud800"}} if name == "plan.json" else {"x": "\ud800"}
        write_json(run / name, document)
    sent = files_of(RunDir(run), ("adapter",), "base")
    assert all(file.content.decode() for file in sent if file.content is not None)
