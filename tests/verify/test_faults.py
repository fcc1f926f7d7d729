"""Each fault is planted in a real file, and the check that is named here must fail on it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import gguf_edit
import gguf_maker
import verify_rows
from gguf_faults import check_weights
from skill_train.core.digests import file_digest
from skill_train.llama import inference
from skill_train.llama import template as templates
from skill_train.verify.check import Findings
from skill_train.verify.questions import MeasuredReference, questions_of
from skill_train.verify.run_checks import Draft, PreparedFiles, export_records, judge, own_templates, readable
from skill_train.verify.sample_texts import Sample
from skill_train.verify.step import _measure

pytestmark = pytest.mark.slow

TOKENS = 512


def subject_of(
    reference: Path, *, adapter: Path | None, base: Path | None, folder: Path, **about: Any
) -> MeasuredReference:
    """What `verify` makes of a reference before it judges files."""
    nothing: Future[Draft] = Future()
    nothing.set_result(Draft())
    asked = questions_of(reference, adapter=adapter, **about)
    measured, _ = _measure(asked, base, [], folder, nothing)
    return MeasuredReference(**vars(asked), measured=measured)


def prepared_files(files: Sequence[Path], about: MeasuredReference, proof: Findings, run: Path) -> PreparedFiles:
    """What `verify` knows of files when it judges them."""
    read = readable(list(files), proof)
    weights = check_weights(read, about.folder, about.adapter)
    digests = {file.name: file_digest(file) for file in files}
    rendered = own_templates(read, about.conversations)
    return PreparedFiles(read, weights, rendered, Draft(), digests, export_records(run, files))


@pytest.fixture(scope="module")
def good() -> gguf_maker.Export:
    return gguf_maker.exported("gemma")


@pytest.fixture(scope="module")
def subject(good: gguf_maker.Export, tmp_path_factory: pytest.TempPathFactory) -> MeasuredReference:
    """The tuned model, measured once for all faults."""
    rows = verify_rows.chats(good.base, 8)
    folder = tmp_path_factory.mktemp("logits")
    return subject_of(
        good.base,
        adapter=good.adapter,
        base=good.base,
        rows=rows,
        held_out=rows,
        sample=Sample(tokens=TOKENS),
        folder=folder,
    )


@pytest.fixture
def verdicts(subject: MeasuredReference, tmp_path: Path) -> Iterator[Callable[..., dict[str, str]]]:
    """A function from files to the verdicts on the first of them, by check."""

    def judged(*files: Path, about: MeasuredReference = subject, run: Path = tmp_path) -> dict[str, str]:
        proof = Findings()
        prepared = prepared_files(files, about, proof, run)
        judge(about, proof, run, prepared, warn=lambda *_: None, progress=lambda *_: None)
        return {check.name: check.verdict for check in proof.checks if check.file == files[0].name}

    yield judged


def failed(verdicts: dict[str, str]) -> set[str]:
    return {name for name, verdict in verdicts.items() if verdict == "fail"}


def test_nothing_is_wrong_with_the_files_that_faults_are_planted_in(good: gguf_maker.Export, verdicts: Any) -> None:
    assert set(verdicts(good.file("f16")).values()) == {"pass"}


@pytest.mark.parametrize("quant", ["f16", *(pytest.param(q, marks=pytest.mark.torture) for q in ("q8_0", "q4_k_m"))])
@pytest.mark.parametrize(("times", "alpha"), [(0, 16), (2, 16), (1, 8)], ids=["left out", "twice", "half of alpha"])
def test_adapter_applied_wrongly(quant: str, times: int, alpha: float, verdicts: Any, good: gguf_maker.Export) -> None:
    wrong = wrongly_tuned(good, times, alpha)
    # The unquantized twin has the same fault, so only the reference can tell.
    files = [wrong.file(quant)] if quant == "f16" else [wrong.file(quant), wrong.file("f16")]
    found = verdicts(*files)
    assert "tuned" in failed(found)
    assert failed(found) <= {"tuned", "logits", "answers", "weights"}


def wrongly_tuned(good: gguf_maker.Export, times: int, alpha: float) -> gguf_maker.Export:
    """B is scaled by size / alpha in `tiny.adapter`: `size` follows, so that only alpha differs from the good one."""
    return gguf_maker.exported(
        "gemma", times=times, **({} if alpha == 16 else {"alpha": alpha, "size": 0.1 * alpha / 16})
    )


def test_a_right_file_beside_a_wrong_unquantized_one(verdicts: Any, good: gguf_maker.Export, tmp_path: Path) -> None:
    """It would be compared with the wrong one: with the base here."""
    base = tmp_path / "base-f16.gguf"
    shutil.copyfile(wrongly_tuned(good, 0, 16).file("f16"), base)
    assert set(verdicts(good.file("q8_0"), base).values()) == {"pass"}
    assert {"tuned", "weights"} <= failed(verdicts(base, good.file("q8_0")))


def test_another_chat_template(good: gguf_maker.Export, verdicts: Any, tmp_path: Path) -> None:
    template = gguf_edit.metadata(good.file("f16"), "tokenizer.chat_template")
    changed = {"tokenizer.chat_template": template.replace("<start_of_turn>", "<start_of_turn>\n")}
    found = verdicts(gguf_edit.rewrite(good.file("f16"), tmp_path / "model-f16.gguf", metadata=changed))
    assert failed(found) == {"chat_template", "trained_is_shipped"}


def test_chat_template_lost(good: gguf_maker.Export, verdicts: Any, tmp_path: Path) -> None:
    changed = {"tokenizer.chat_template": None}
    found = verdicts(gguf_edit.rewrite(good.file("f16"), tmp_path / "model-f16.gguf", metadata=changed))
    assert failed(found) == {"chat_template", "trained_is_shipped"}


def test_chat_template_that_never_ends(
    good: gguf_maker.Export, verdicts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "SECONDS", 2)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    changed = {"tokenizer.chat_template": endless}
    found = verdicts(gguf_edit.rewrite(good.file("f16"), tmp_path / "model-f16.gguf", metadata=changed))
    assert failed(found) == {"chat_template", "trained_is_shipped"}


@pytest.mark.parametrize(
    ("addition", "verdict"),
    [
        ("{% if tools %}x{% endif %}", "fail"),
        ("{% if messages | length > 6 %}x{% endif %}", "fail"),
        ("{% if messages[-1].tool_calls %}x{% endif %}", "fail"),
        ("{% if messages[-1].role == 'tool' %}x{% endif %}", "fail"),
        ("{% if messages | length == 57 %}x{% endif %}", "warn"),
    ],
)
def test_chat_template_that_differs_where_no_sample_looks(
    addition: str, verdict: str, good: gguf_maker.Export, verdicts: Any, tmp_path: Path
) -> None:
    template = gguf_edit.metadata(good.file("f16"), "tokenizer.chat_template")
    changed = {"tokenizer.chat_template": template + addition}
    found = verdicts(gguf_edit.rewrite(good.file("f16"), tmp_path / "model-f16.gguf", metadata=changed))
    assert {name: one for name, one in found.items() if one != "pass"} == {"chat_template": verdict}


@pytest.mark.parametrize("name", ["tool_use", "s"])
def test_second_template_that_the_reference_has_not(
    name: str, good: gguf_maker.Export, verdicts: Any, tmp_path: Path
) -> None:
    second = {f"tokenizer.chat_template.{name}": "{{ messages }}"}
    made = gguf_edit.rewrite(good.file("f16"), tmp_path / "model-f16.gguf", texts=second)
    assert failed(verdicts(made)) == {"chat_template"}


@pytest.mark.parametrize("token", [5, 639, *(pytest.param(token, marks=pytest.mark.torture) for token in (300, 500))])
@pytest.mark.parametrize("name", ["eot", "eom"])
def test_stop_at_a_token_that_ends_nothing(
    name: str, token: int, good: gguf_maker.Export, verdicts: Any, tmp_path: Path
) -> None:
    key = f"tokenizer.ggml.{name}_token_id"
    made = gguf_edit.rewrite(good.file("f16"), tmp_path / "model-f16.gguf", numbers={key: token})
    assert failed(verdicts(made)) == {"stop_tokens"}


def test_an_end_of_the_list_that_ollama_reads(good: gguf_maker.Export, verdicts: Any, tmp_path: Path) -> None:
    """Ollama stops at each token of `eos_token_ids` (fs/ggml/ggml.go, model/models); llama.cpp reads no such list."""
    end = gguf_edit.metadata(good.file("f16"), "tokenizer.ggml.eos_token_id")
    for name, ids, told in (("a", [end], set()), ("b", [end, 300], {"stop_tokens"})):
        numbers = {"tokenizer.ggml.eos_token_ids": ids}
        made = gguf_edit.rewrite(good.file("f16"), tmp_path / f"{name}.gguf", numbers=numbers)
        assert failed(verdicts(made)) == told


def test_scores_in_another_order(good: gguf_maker.Export, verdicts: Any, tmp_path: Path) -> None:
    scores = gguf_edit.metadata(good.file("f16"), "tokenizer.ggml.scores")
    changed = {"tokenizer.ggml.scores": [*scores[:600], *reversed(scores[600:])]}
    found = verdicts(gguf_edit.rewrite(good.file("f16"), tmp_path / "model-f16.gguf", metadata=changed))
    assert "vocabulary" in failed(found)


def test_swapped_token_pair(good: gguf_maker.Export, verdicts: Any, tmp_path: Path) -> None:
    tokens = gguf_edit.metadata(good.file("f16"), "tokenizer.ggml.tokens")
    tokens[500], tokens[501] = tokens[501], tokens[500]
    changed = {"tokenizer.ggml.tokens": tokens}
    found = verdicts(gguf_edit.rewrite(good.file("f16"), tmp_path / "model-f16.gguf", metadata=changed))
    assert "vocabulary" in failed(found)


def test_dropped_token(good: gguf_maker.Export, verdicts: Any, tmp_path: Path) -> None:
    keys = ("tokens", "scores", "token_type")
    whole = {f"tokenizer.ggml.{key}": gguf_edit.metadata(good.file("f16"), f"tokenizer.ggml.{key}") for key in keys}
    changed = {key: [*values[:500], *values[501:]] for key, values in whole.items()}
    found = verdicts(gguf_edit.rewrite(good.file("f16"), tmp_path / "model-f16.gguf", metadata=changed))
    assert {"vocabulary", "metadata"} <= failed(found)


@pytest.mark.parametrize("change", [{"tokenizer.ggml.eos_token_id": 500}, {"tokenizer.ggml.add_bos_token": False}])
def test_wrong_special_token(change: dict[str, Any], good: gguf_maker.Export, verdicts: Any, tmp_path: Path) -> None:
    found = verdicts(gguf_edit.rewrite(good.file("f16"), tmp_path / "model-f16.gguf", metadata=change))
    assert "special_tokens" in failed(found)
    assert not {"tokens", "vocabulary", "logits"} & failed(found)


@pytest.mark.parametrize("quant", ["f16", "q4_k_m"])
def test_zeroed_tensor(quant: str, good: gguf_maker.Export, verdicts: Any, tmp_path: Path) -> None:
    zeroed = {"blk.1.ffn_up.weight": lambda data: data * 0}
    found = verdicts(gguf_edit.rewrite(good.file(quant), tmp_path / f"model-{quant}.gguf", tensors=zeroed))
    assert "tensors" in failed(found)


@pytest.mark.parametrize("quant", ["f16", "q4_k_m", pytest.param("q8_0", marks=pytest.mark.torture)])
def test_rows_permuted_in_an_attention_projection(
    quant: str, good: gguf_maker.Export, verdicts: Any, tmp_path: Path
) -> None:
    """With no other file beside it: the trained model alone shows it."""
    shifted = {"blk.0.attn_q.weight": lambda data: data[[*range(1, len(data)), 0]]}
    found = verdicts(gguf_edit.rewrite(good.file(quant), tmp_path / f"model-{quant}.gguf", tensors=shifted))
    assert "weights" in failed(found)
    assert quant != "f16" or "logits" in failed(found)


def test_two_rows_exchanged_in_a_file_alone(good: gguf_maker.Export, verdicts: Any, tmp_path: Path) -> None:
    """Logits of a coarse type do not move enough; the weights do."""
    exchanged = {"blk.1.attn_k.weight": lambda data: data[[1, 0, *range(2, len(data))]]}
    found = verdicts(gguf_edit.rewrite(good.file("q4_k_m"), tmp_path / "model-q4_k_m.gguf", tensors=exchanged))
    assert failed(found) == {"weights"}


@pytest.mark.parametrize("quant", ["q8_0", "q4_k_m"])
def test_two_rows_exchanged_in_a_quantized_file(
    quant: str, good: gguf_maker.Export, verdicts: Any, tmp_path: Path
) -> None:
    """Too little for the logits of a coarse type; the unquantized file shows which tensor it is."""
    exchanged = {"blk.1.attn_k.weight": lambda data: data[[1, 0, *range(2, len(data))]]}
    made = gguf_edit.rewrite(good.file(quant), tmp_path / f"model-{quant}.gguf", tensors=exchanged)
    assert "tensors" in failed(verdicts(made, good.file("f16")))


def test_trained_lm_head_lost_on_a_tied_model(verdicts: Any, tmp_path: Path) -> None:
    """Without output.weight llama.cpp takes the embedding, as for a tied model."""
    own = gguf_maker.exported("gemma", quants=(), modules_to_save=["lm_head"])
    rows = verify_rows.chats(own.base, 4)
    about = subject_of(
        own.base,
        adapter=own.adapter,
        base=own.base,
        rows=rows,
        held_out=rows,
        sample=Sample(tokens=256),
        folder=tmp_path,
    )
    lost = gguf_edit.rewrite(own.file("f16"), tmp_path / "model-f16.gguf", without=("output.weight",))
    assert not failed(verdicts(own.file("f16"), about=about))
    assert {"tensors", "logits"} <= failed(verdicts(lost, about=about))


@pytest.mark.parametrize(("is_", "named"), [("q8_0", "q4_k_m"), ("q4_k_m", "f16")])
def test_file_under_the_name_of_another_type(
    is_: str, named: str, good: gguf_maker.Export, verdicts: Any, tmp_path: Path
) -> None:
    wrong = tmp_path / f"model-{named}.gguf"
    shutil.copy(good.file(is_), wrong)
    assert failed(verdicts(wrong)) == {"types"}


def test_type_that_the_metadata_lie_about(good: gguf_maker.Export, verdicts: Any, tmp_path: Path) -> None:
    q4_k_m = {"general.file_type": 15}  # LLAMA_FTYPE_MOSTLY_Q4_K_M
    made = gguf_edit.rewrite(good.file("q8_0"), tmp_path / "model-q4_k_m.gguf", metadata=q4_k_m)
    assert failed(verdicts(made)) == {"types"}


@pytest.mark.parametrize("size", [0, 3, 100, 0.5, -1, "longer"])
def test_cut_file(size: Any, good: gguf_maker.Export, verdicts: Any, tmp_path: Path) -> None:
    data = good.file("q4_k_m").read_bytes()
    cut = tmp_path / "model-q4_k_m.gguf"
    cut.write_bytes(data + b"more" if size == "longer" else data[: int(len(data) * size) if size == 0.5 else size])
    assert "file" in failed(verdicts(cut))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gemma3.rope.freq_base", 5e5),
        ("gemma3.attention.layer_norm_rms_epsilon", 1e-2),
        ("gemma3.context_length", 64),
        ("gemma3.rope.freq_base_swa", 1e5),
    ],
)
def test_wrong_metadata(key: str, value: Any, good: gguf_maker.Export, verdicts: Any, tmp_path: Path) -> None:
    assert gguf_edit.metadata(good.file("f16"), key) != value
    found = verdicts(gguf_edit.rewrite(good.file("f16"), tmp_path / "model-f16.gguf", metadata={key: value}))
    assert "metadata" in failed(found)


def test_file_that_changed_after_its_export(good: gguf_maker.Export, verdicts: Any, tmp_path: Path) -> None:
    listed = {"model-f16.gguf": {**file_digest(good.file("f16")), "quant": "f16"}}
    (tmp_path / "convert.json").write_text(json.dumps({"outputs": listed}))
    assert verdicts(good.file("f16"))["digest"] == "pass"
    listed["model-f16.gguf"]["sha256"] = "0" * 64
    (tmp_path / "convert.json").write_text(json.dumps({"outputs": listed}))
    assert failed(verdicts(good.file("f16"))) == {"digest"}


def test_system_prompt_that_only_the_trainer_knew(good: gguf_maker.Export, verdicts: Any, tmp_path: Path) -> None:
    """Seen in a peer in 2026: training inserts a system prompt that neither the data nor the template has."""
    rows = verify_rows.chats(good.base, 2)
    secret = verify_rows.chats(good.base, 2, system="You are a helpful assistant.")
    fed = [row | {"input_ids": other["input_ids"]} for row, other in zip(rows, secret, strict=True)]
    about = subject_of(
        good.base, adapter=None, base=None, rows=fed, held_out=[], sample=Sample(tokens=64), folder=tmp_path
    )
    assert "trained_is_shipped" in failed(verdicts(good.file("f16"), about=about))


def test_file_that_llama_cpp_refuses(good: gguf_maker.Export, verdicts: Any, tmp_path: Path) -> None:
    missing = gguf_edit.rewrite(good.file("f16"), tmp_path / "model-f16.gguf", without=("blk.1.attn_q.weight",))
    assert "loads" in failed(verdicts(missing))


def test_crash_of_llama_cpp_is_a_verdict_on_that_file(
    good: gguf_maker.Export, subject: MeasuredReference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker dies for one of two files; the other one is still judged."""
    (tmp_path / "dying_worker.py").write_text(
        "import json, os, signal, sys\n"
        "from skill_train.llama import inference_worker\n"
        "if 'q8_0' in json.load(open(sys.argv[1]))['gguf']:\n"
        "    os.kill(os.getpid(), signal.SIGSEGV)\n"
        "inference_worker.worker_main(inference_worker.run, inference_worker.InferenceJob)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(inference, "WORKER", "dying_worker")
    files, proof = [good.file("q8_0"), good.file("f16")], Findings()
    known = prepared_files(files, subject, proof, tmp_path)
    judge(subject, proof, tmp_path, known, warn=lambda *_: None, progress=lambda *_: None)
    loads = {check.file: check for check in proof.checks if check.name == "loads"}
    assert loads["model-q8_0.gguf"].verdict == "fail" and "SIGSEGV" in loads["model-q8_0.gguf"].detail
    assert loads["model-f16.gguf"].verdict == "pass"
    assert [check.verdict for check in proof.checks if (check.name, check.file) == ("logits", "model-f16.gguf")] == [
        "pass"
    ]
