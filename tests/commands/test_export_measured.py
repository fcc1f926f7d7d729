"""`export-gguf` of a run with importance matrices and mixes of types: the rows that are used, and what is refused."""

from __future__ import annotations

import inspect
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

import shared_runs
import tiny
from skill_train.commands import export_gguf, verify
from skill_train.commands._export import MatrixOrder, matrix_for, target_of
from skill_train.core.console import Console
from skill_train.core.digests import file_digest
from skill_train.core.errors import UsageError
from skill_train.gguf.quality.texts import RunTexts, texts_of
from skill_train.llama.gguf_header import GgufFile, Tensor, read_gguf
from skill_train.run.folder import RunDir, open_run

export = inspect.unwrap(export_gguf.export_gguf.callback)


def exported(run: Path, **options: Any) -> tuple[dict[str, Any], list[str]]:
    console = Console("quiet", "export-gguf")
    result = export(export_gguf.ExportOptions(run=run, **options), console)
    return dict(result.data), [warning["code"] for warning in console.warnings]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A copy of the shared run, as `export-gguf --quant q8_0,q4_k_m` left it."""
    return Path(shutil.copytree(shared_runs.chain().run, tmp_path / "run"))


# --- The rows ---


def fed(number: int, ids: list[int], **more: Any) -> dict[str, Any]:
    line = {"row": number, "line": number + 1, "kind": "text", "text": "", "input_ids": ids, "labels": ids}
    return {**line, "rendered": "", "truncated": False, "full_length": len(ids), **more}


def folder_of(tmp_path: Path, samples: list[dict[str, Any]], held_out: list[dict[str, Any]]) -> RunDir:
    for name, rows in (("samples.jsonl", samples), ("held_out.jsonl", held_out)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunDir(tmp_path)


MODEL = GgufFile(
    Path("m"), 3, 32, {"tokenizer.ggml.tokens": ["a"] * 100}, {"w": Tensor("w", (256, 4), "F16", 0, 2048)}, 0, 0
)


def test_rows_that_were_held_out_are_never_read(tmp_path: Path) -> None:
    """Neither by their number nor by what they say, nor rows with pictures, and every row once."""
    samples = [fed(number, [number] * 40) for number in range(12)]
    samples += [fed(50, [3] * 40), fed(51, [77] * 40), fed(52, [88] * 40, images=["a.png"])]
    texts = texts_of(folder_of(tmp_path, samples, [fed(4, [95] * 40), fed(99, [77] * 40)]), MODEL)
    read = [ids[0] for ids in [*texts.computed, *texts.compared]]
    assert sorted(read) == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11]
    assert {ids[0] for ids in texts.compared} == {3, 8}  # each fourth row, which nothing is computed of
    assert texts.tokens == 9 * 40 and "all that the run keeps" in texts.why


@pytest.mark.slow
def test_rows_with_pictures_are_left_out_and_it_is_said(tmp_path: Path) -> None:
    """Their tokens stand for a picture. The other rows of the run are read."""
    samples = [fed(number, [number] * 40) for number in range(12)]
    samples += [fed(number, [7, 99, 99, 99, number] * 8, images=["a.png"]) for number in range(20, 40)]
    run = folder_of(tmp_path, samples, [])
    plan = json.loads((shared_runs.chain().run / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps(plan | {"recipe": plan["recipe"] | {"images": True}}))
    texts = texts_of(run, MODEL)
    assert not [ids for ids in [*texts.computed, *texts.compared] if 99 in ids]
    assert texts.tokens == 9 * 40
    assert texts.lacking == (
        "rows with pictures are not read: the tokens in place of a picture are not text; 20 of 32 rows of "
        "samples.jsonl have some"
    )


def test_a_matrix_that_is_not_made_for_want_of_rows_is_said(tmp_path: Path) -> None:
    order, console = MatrixOrder(None, RunDir(tmp_path)), Console("quiet", "export-gguf")
    texts = RunTexts([], [], "", "0 tokens of 0 training rows, all that the run keeps", lacking="rows have pictures")
    assert matrix_for(order, tmp_path / "f16.gguf", texts, ["q8_0"], console) is None and console.warnings == []
    assert matrix_for(order, tmp_path / "f16.gguf", texts, ["q4_k_m"], console) is None
    [warning] = console.warnings
    assert warning["code"] == "imatrix" and warning["message"].startswith("there is no importance matrix: 0 tokens")
    assert "rows have pictures" in warning["message"]


def test_a_large_model_reads_fewer_tokens_and_says_why(tmp_path: Path) -> None:
    large = GgufFile(Path("m"), 3, 32, MODEL.metadata, {"w": Tensor("w", (256, 30_000_000), "F16", 0, 1)}, 0, 0)
    samples = [fed(number, [number % 90, *range(400)]) for number in range(90)]
    texts = texts_of(folder_of(tmp_path, samples, []), large)
    assert texts.tokens == 520 and "at most 520 for a model of 7680 million weights" in texts.why  # 4e12 / 7.68e9
    assert sum(map(len, texts.compared)) == 130


# --- The options ---


def test_the_size_of_a_mix_is_read_and_one_is_needed() -> None:
    sizes = [target_of("auto", size, None)[1] for size in ("400MB", "1.5 gb", "2MiB")]
    assert [size and size.most_bytes for size in sizes] == [400_000_000, 1_500_000_000, 2 << 20]
    names, target = target_of("q8_0, Auto", None, 4.5)
    assert names == ["q8_0"] and target is not None and target.name == "auto-4.5bpw"
    assert target_of("q8_0", None, None) == (["q8_0"], None)
    with pytest.raises(UsageError, match="--mix has the types of --quant auto"):
        target_of("q8_0", None, None, Path("quantize.json"))
    for quant, size, bits in (
        ("auto", None, None), ("auto", "1GB", 4.0), ("q8_0", "1GB", None), ("auto", "0", None), ("auto", "-1GB", None),
        ("auto", "four", None), ("auto", "1e99GB", None),
    ):  # fmt: skip
        with pytest.raises(UsageError) as caught:
            target_of(quant, size, bits)
        assert caught.value.code == "bad_usage"


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        (("q8_0,q4_k_m", "1MB", None), "--quant auto --max-size 1MB"),  # the types that none asked for
        (("q6_k", None, 4.25), "--quant q6_k,auto --bits 4.25"),
        (("q6_k", None, 5.0, Path("my g1/quantize.json")), "--quant q6_k,auto --mix 'my g1/quantize.json' --bits 5"),
        (("auto", "1 GB", 4.0), "--quant auto --max-size '1 GB'"),
        (("q8_0,auto", None, None), "--quant q8_0,auto --bits 4.5"),
    ],
)
def test_the_hint_has_what_was_asked_for(given: Any, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        target_of(*given)
    assert caught.value.hint == f"skill-train export-gguf RUN {hint}"
    target_of(*_options(hint))


def _options(hint: str) -> Any:
    words = shlex.split(hint)
    value = dict(zip(words[::2], words[1::2], strict=True))
    return value["--quant"], value.get("--max-size"), float(value.get("--bits", 0)) or None


@pytest.mark.slow
def test_a_model_folder_has_no_rows_to_measure_on(run: Path) -> None:
    for options in ({"imatrix": "auto"}, {"quant": "auto", "bits": 5.0}):
        with pytest.raises(UsageError, match="rows of a run") as caught:
            exported(run / "merged", **options)
        assert caught.value.code == "bad_usage"
    assert not (run.parent / "run" / "merged-gguf").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"imatrix": "none.gguf"}, "no such file"),
        ({"imatrix": ""}, "not a file"),
        ({"quant": ""}, "'' is not a type"),
        ({"for_device": ""}, "no device ''"),
    ],
)
def test_what_is_no_matrix_type_or_device_is_refused_before_anything_is_made(
    tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        exported(tiny.cached("gemma"), out=tmp_path / "out", **options)
    assert not list((tmp_path / "out").glob("*"))


# --- The export of a run ---


@pytest.mark.slow
def test_a_run_gets_a_matrix_of_its_own_rows_by_default(run: Path) -> None:
    record, made = (json.loads((run / f"{step}.json").read_text()) for step in ("imatrix", "quantize"))
    by_type = {entry["quant"]: entry for entry in made["outputs"].values()}
    assert {"with_matrix", "without_matrix"} == set(by_type["q4_k_m"]["choice"])
    assert "choice" not in by_type["q8_0"] and "imatrix" not in by_type["q8_0"]
    texts = texts_of(RunDir(run), read_gguf(next((run / "gguf").glob("*f16.gguf"))))
    assert record["options"] == {"data": texts.sha256, "dataset": "training rows"} and record["tokens"] == texts.tokens
    assert [reason["rule"] for reason in record["reasons"]] == ["tokens"]
    held_out = [json.loads(line)["input_ids"] for line in (run / "held_out.jsonl").read_text().splitlines()]
    assert held_out and not [ids for ids in held_out if ids in texts.computed or ids in texts.compared]
    data, _ = exported(run, quant="q8_0,q4_k_m")
    assert data["reused"] is True
    assert [answer["mean_kl_with"] > 0 for answer in data["imatrix"].values()] == [True]


def changed_data(run: Path) -> None:
    """The same rows in another order."""
    plan = json.loads((run / "plan.json").read_text())
    rows = Path(plan["recipe"]["data"]).read_text().splitlines()
    data = run.parent / "rows.jsonl"
    data.write_text("\n".join([*rows[1:], rows[0]]) + "\n")
    (run / "plan.json").write_text(json.dumps(plan | {"recipe": {**plan["recipe"], "data": str(data)}}))


@pytest.mark.slow
def test_where_the_data_has_changed_the_answer_and_the_record_say_so(run: Path) -> None:
    """Of a run without a matrix."""
    for name in ("imatrix.gguf", "imatrix.json"):
        (run / name).unlink()
    changed_data(run)
    console = Console("quiet", "export-gguf")
    answer = export(export_gguf.ExportOptions(run=run, quant="q5_k_m"), console).data
    why = "rows.jsonl has changed since the training"
    record = json.loads((run / "imatrix.json").read_text())
    said = [warning["message"] for warning in console.warnings if warning["code"] == "imatrix"]
    assert said == [f"only the rows of samples.jsonl are used, {record['tokens']} tokens: {why}"]
    assert record["options"]["dataset"] == "samples.jsonl"
    assert {"rule": "data", "because": why, "source": "samples.jsonl"} in record["reasons"]
    made = next(use for name, use in answer["imatrix"].items() if name.endswith("q5_k_m.gguf"))
    assert "mean_kl_with" in made
    held_out = [json.loads(line)["input_ids"] for line in (run / "held_out.jsonl").read_text().splitlines()]
    texts = texts_of(RunDir(run), read_gguf(next((run / "gguf").glob("*f16.gguf"))))
    assert held_out and not [ids for ids in held_out if ids in texts.computed or ids in texts.compared]


@pytest.mark.slow
def test_a_matrix_of_training_rows_is_kept_where_only_samples_are_left(run: Path) -> None:
    """The files that were made with it name it, and it is of more rows."""
    before = [(run / name).read_bytes() for name in ("imatrix.gguf", "imatrix.json")]
    changed_data(run)
    console = Console("quiet", "export-gguf")
    export(export_gguf.ExportOptions(run=run, quant="q5_k_m"), console)
    assert [(run / name).read_bytes() for name in ("imatrix.gguf", "imatrix.json")] == before
    [said] = [warning["message"] for warning in console.warnings if warning["code"] == "imatrix"]
    assert said.startswith("imatrix.gguf of an earlier export is kept, of training rows sha256 ")
    assert said.endswith("on rows of samples.jsonl, which it may have read: rows.jsonl has changed since the training")
    outputs = json.loads((run / "quantize.json").read_text())["outputs"].values()
    used = {entry["imatrix"]["sha256"] for entry in outputs if "imatrix" in entry}
    assert used <= {file_digest(run / "imatrix.gguf")["sha256"]}
    record = json.loads(before[1])
    for key in ("inputs", "outputs"):  # of another model, or another matrix than its record says
        [name] = record[key]
        other = {**record, key: {name: {**record[key][name], "sha256": "0" * 64}}}
        (run / "imatrix.json").write_text(json.dumps(other))
        exported(run, quant="q4_k_s" if key == "inputs" else "q3_k_m")
        assert json.loads((run / "imatrix.json").read_text())["options"]["dataset"] == "samples.jsonl"
        (run / "imatrix.gguf").write_bytes(before[0])


@pytest.mark.slow
def test_a_bad_matrix_is_refused_before_anything_is_quantized(run: Path, tmp_path: Path) -> None:
    before = sorted(path.name for path in (run / "gguf").iterdir())
    cut = tmp_path / "cut.gguf"
    cut.write_bytes((run / "imatrix.gguf").read_bytes()[:-100])
    for file in (cut, tmp_path / "none.gguf", next((run / "gguf").glob("*f16.gguf"))):
        with pytest.raises(UsageError, match="not an importance matrix") as caught:
            exported(run, quant="q5_k_m", imatrix=str(file))
        assert caught.value.code == "cannot_quantize"
    assert sorted(path.name for path in (run / "gguf").iterdir()) == before
    data, warned = exported(run, quant="q5_k_m", imatrix=str(run / "imatrix.gguf"))
    assert [Path(name).name for name, use in data["imatrix"].items() if "mean_kl_with" not in use] == [
        "run-q5_k_m.gguf"
    ]
    assert "imatrix" not in warned
    with pytest.raises(UsageError, match="asks for it without one"):
        exported(run, quant="q5_k_m", imatrix="none")


@pytest.mark.slow
def test_a_mix_of_a_run_is_made_again_from_its_record_and_verified(run: Path) -> None:
    data, _ = exported(run, quant="auto", bits=6.0)
    made = Path(data["files"][-1]["path"])
    assert made.name == "run-auto-6bpw.gguf"
    record = json.loads((run / "quantize.json").read_text())["outputs"][f"gguf/{made.name}"]
    assert record["bits_per_weight"] <= 6.0 and record["measured"]["mean_kl"] > 0
    digest = made.read_bytes()
    made.unlink()
    exported(run, quant="auto", bits=6.0)
    assert made.read_bytes() == digest  # from the types in the record
    data, _ = exported(run, mix=run / "quantize.json")
    again = Path(data["files"][-1]["path"])
    assert again.name.startswith("run-mix-") and again.read_bytes() == digest
    entry = json.loads((run / "quantize.json").read_text())["outputs"][f"gguf/{again.name}"]
    assert entry["replayed"]["mix"] == "auto-6bpw" and "mix" not in entry
    assert {key: entry[key] for key in ("measured", "tensor_types")} == {
        key: record[key] for key in ("measured", "tensor_types")
    }
    assert exported(run, mix=run / "quantize.json")[0]["reused"] is True
    with pytest.raises(UsageError, match="asks for it without one"):  # both were made with the run's own matrix
        exported(run, mix=run / "quantize.json", imatrix="none")
    proof = verify.verify_run(Console("quiet", "verify"), open_run(run), verify.VerifyOptions(tokens=256)).data
    for name in (made.name, again.name):
        own = {check["name"]: check["verdict"] for check in proof["checks"] if check["file"] == name}
        assert (own["types"], own["logits"], own["digest"]) == ("pass", "pass", "pass")
